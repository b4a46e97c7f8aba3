"""Ten minutes of what `make soak` does for two hours, and what large bodies leave."""

import pytest

from tests.bench.waiting import CLIENTS, MOST_CHANGE, MOST_LEFT_MB, large_bodies, left_by, soak

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]


def test_mixed_clients_leave_nothing() -> None:
    found = soak("guide", 600.0)
    assert not [status for status in found.answers if status >= 500 and status != 503]
    assert abs(found.growth) <= MOST_CHANGE
    assert abs(found.end.files - found.warm.files) <= CLIENTS


def test_large_bodies_leave_nothing() -> None:
    assert left_by(large_bodies(), "guide") <= MOST_LEFT_MB * 1e6
