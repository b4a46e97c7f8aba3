"""Who is let in, and when others may come again: arithmetic."""

import pytest

from tokamac.app.serve.engine import MOST_WAITING, Admission, ReplyCost
from tokamac.app.serve.request import RequestError


def admission(*costs: ReplyCost, parallel: int = 4, room: int | None = None) -> Admission:
    made = Admission(parallel)
    made.room_bytes = room
    for cost in costs:
        made.enter(1)
        made.leave(cost)
    return made


def test_places_are_bounded_by_what_replies_took_of_memory() -> None:
    assert admission(ReplyCost(1.0, 100), room=1000).places == 4
    assert admission(ReplyCost(1.0, 300), ReplyCost(1.0, 500), room=1000).places == 2
    assert admission(ReplyCost(1.0, 4000), room=1000).places == 1  # one always may
    assert admission(ReplyCost(1.0, None), room=1000).places == admission(room=1000).places == 4  # nothing is known
    assert admission(ReplyCost(1.0, 4000)).places == 4


def test_the_wait_is_told_in_rounds_of_what_replies_took() -> None:
    busy = admission(ReplyCost(2.0, 1), ReplyCost(4.0, 1), parallel=2)
    assert busy.wait_s(2) == 0
    busy.enter(2)
    assert [busy.wait_s(more) for more in (1, 2, 3)] == [3, 3, 6]
    assert admission(parallel=1).wait_s(2) is None


def test_who_would_wait_too_long_is_turned_away_and_told_for_how_long() -> None:
    slow = admission(ReplyCost(50.0, 1), parallel=1)
    slow.enter(1)
    slow.enter(1)
    slow.enter(1)
    with pytest.raises(RequestError) as refused:
        slow.enter(1)
    assert (refused.value.status, refused.value.retry_after_s, slow.open) == (429, 75, 3)
    slow.leave()
    slow.enter(1)


def test_a_request_of_many_replies_is_let_in_where_nobody_else_waits() -> None:
    idle = admission(ReplyCost(50.0, 1), parallel=1)
    idle.enter(64)
    assert idle.waiting == 63
    with pytest.raises(RequestError):
        idle.enter(1)
    unknown = admission(parallel=2)
    unknown.enter(2 + MOST_WAITING * 2)
    with pytest.raises(RequestError) as refused:
        unknown.enter(1)
    assert refused.value.retry_after_s == 5
