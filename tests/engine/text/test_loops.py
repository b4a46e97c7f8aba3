"""A reply that repeats itself is noticed, and nothing else is."""

from hypothesis import given
from hypothesis import strategies as st

from tests.real.loops import false_alarms, texts
from tokamac.assets import asset_path
from tokamac.engine.events import LoopFound
from tokamac.engine.text.stream import ENOUGH_REPEATS, ENOUGH_TOKENS, REACHES, LoopWatch, Repetition
from tokamac.engine.text.tokenizer import load_tokenizer

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def period_of(ids: list[int]) -> int:
    """Return the shortest period, by its definition."""
    return next(p for p in range(1, len(ids) + 1) if ids[p:] == ids[:-p])


@given(IDS)
def test_the_period_is_the_shortest_there_is(ids: list[int]) -> None:
    repetition = Repetition(reach=1000)
    for count, each in enumerate(ids, 1):
        repetition.add(each)
        assert repetition.period == period_of(ids[:count])


def ended_at(watch: LoopWatch, ids: list[int]) -> int | None:
    """Return after how many tokens the watch ends the reply; None: never."""
    for count, each in enumerate(ids, 1):
        watch.add(each)
        if watch.ends_reply:
            return count
    return None


@given(IDS, st.lists(st.integers(0, 50), max_size=700))
def test_any_loop_ends_the_reply_whatever_came_before(loop: list[int], before: list[int]) -> None:
    enough = max(ENOUGH_TOKENS, ENOUGH_REPEATS * len(loop))
    reach = max(REACHES) + len(loop)
    text = before + loop * (1 + (enough + reach) // len(loop))
    assert ended_at(LoopWatch(), text) is not None
    assert ended_at(LoopWatch(check=False), text) is None


@given(IDS, st.integers(0, 1000))
def test_what_breaks_off_before_it_has_repeated_enough_ends_nothing(loop: list[int], seed: int) -> None:
    fewer = (ENOUGH_TOKENS - 1) // len(loop)
    blocks = [[*loop * fewer, 100 + seed + number] for number in range(5)]
    assert ended_at(LoopWatch(), [each for block in blocks for each in block]) is None


def test_real_code_tables_and_lists_are_no_loops() -> None:
    assert false_alarms(load_tokenizer(asset_path("guide", "model"), {}, "guide"), texts()) == 0


LOOP = [7, 8, 9]


def test_a_grace_is_told_once_and_ends_the_reply() -> None:
    watch = LoopWatch(grace=30)
    found = [(count, told) for count, each in enumerate(LOOP * 400, 1) if (told := watch.add(each)) is not None]
    assert found == [(ENOUGH_TOKENS, LoopFound(3, ENOUGH_TOKENS + 30))]
    assert ended_at(LoopWatch(grace=30), LOOP * 400) == ENOUGH_TOKENS + 30


def test_a_loop_that_ends_in_the_grace_is_told_too_and_ends_no_reply() -> None:
    text, watch = [*LOOP * (ENOUGH_TOKENS // 3 + 2), *range(1000)], LoopWatch(grace=30)
    assert ended_at(LoopWatch(), text) == ENOUGH_TOKENS
    told = [found for each in text if (found := watch.add(each)) is not None]
    assert told == [LoopFound(3, ENOUGH_TOKENS + 30), LoopFound(0, None)]
    assert not watch.ends_reply


def test_a_reply_that_is_let_go_on_is_never_ended() -> None:
    assert ended_at(LoopWatch(grace=30, keeps_going=lambda: True), LOOP * 2000) is None


def test_what_a_reply_has_at_least_comes_before_its_end() -> None:
    assert ended_at(LoopWatch(least=1000), LOOP * 2000) == 1000
