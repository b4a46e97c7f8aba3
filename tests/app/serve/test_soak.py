"""Ten minutes of what `make soak` does for two hours."""

import pytest

from tests.bench.waiting import CLIENTS, MOST_CHANGE, soak


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_mixed_clients_leave_nothing() -> None:
    found = soak("guide", 600.0)
    assert not [status for status in found.answers if status >= 500 and status != 503]
    assert abs(found.growth) <= MOST_CHANGE
    assert abs(found.end.files - found.warm.files) <= CLIENTS
