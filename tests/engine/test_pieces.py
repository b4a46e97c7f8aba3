"""How much of a prompt is computed at once: by the pace, and the same in the end."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokamac.engine import Engine, Finished, PrefillProgress, Sampling
from tokamac.engine.pieces import FIRST, Pieces

PROMPT = [7 + i % 200 for i in range(401)]


class SlowRun:
    """A device that needs ``token_s`` for each token, on a clock of its own."""

    def __init__(self, token_s: float, overhead_s: float = 0.0) -> None:
        self.now = 0.0
        self.held: list[int] = []
        self.sizes: list[int] = []
        self.token_s, self.overhead_s = token_s, overhead_s

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        for at in range(0, len(ids), chunk):
            part = ids[at : at + chunk]
            self.now += self.overhead_s + len(part) * self.token_s
            self.sizes.append(len(part))
            self.held.extend(part)
            yield len(self.held)


def read(run: SlowRun, tokens: int, most: int, token_s: float | None) -> Pieces:
    pieces = Pieces(most, token_s, clock=lambda: run.now)
    for _ in pieces.compute(run, list(range(tokens))):  # type: ignore[arg-type]
        run.now += 100  # the reader's time is not the device's
    assert run.held == list(range(tokens))
    return pieces


def test_a_piece_of_a_slow_model_takes_between_half_a_second_and_one():
    run = SlowRun(token_s=5 / 512)  # 5 s for what is computed at once at most
    pieces = read(run, 1000, 512, token_s=5 / 512)
    assert run.sizes == [64] * 15 + [40]
    assert 0.5 < 64 * run.token_s < 1.0
    assert pieces.largest == 64


def test_a_fast_model_reads_as_much_at_once_as_ever():
    run = SlowRun(token_s=0.001)
    read(run, 1100, 512, token_s=0.001)
    assert run.sizes == [512, 512, 76]


def test_where_no_pace_is_known_the_first_piece_tells_it():
    run = SlowRun(token_s=0.003)
    pieces = read(run, 700, 512, token_s=None)
    assert run.sizes == [FIRST, 256, 256, 124]
    assert pieces.largest == 256


def test_a_pace_that_was_wrong_holds_for_one_piece():
    run = SlowRun(token_s=0.01)
    read(run, 704, 512, token_s=0.001)
    assert run.sizes == [512, 64, 64, 64]


def test_a_few_tokens_between_two_marks_say_nothing_of_the_pace():
    run = SlowRun(token_s=0.001, overhead_s=0.1)
    pieces = Pieces(512, 0.001, clock=lambda: run.now)
    for tokens in (5, 1024):
        list(pieces.compute(run, list(range(tokens))))  # type: ignore[arg-type]
    assert run.sizes == [5, 512, 512]


@pytest.mark.parametrize("most", [32, 64])
def test_a_piece_is_never_larger_than_what_there_is_room_for(most: int):
    run = SlowRun(token_s=0.0001)
    read(run, 100, most, token_s=None)
    assert max(run.sizes) == most


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny, prompt_cache=None) as loaded:
        yield loaded


def answer(engine: Engine) -> tuple[list[int], Finished]:
    """Return how many tokens each piece of the prompt had, and the end."""
    events = list(engine.generate(PROMPT, Sampling(temperature=0, max_tokens=8)))
    done = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert isinstance(events[-1], Finished)
    return [after - before for before, after in itertools.pairwise(done)], events[-1]


def test_a_reply_is_read_at_the_pace_measured_and_says_the_same(engine: Engine):
    rates = engine._core._store.rates
    rates.prefill_tps = 1e6
    whole, fast = answer(engine)
    rates.prefill_tps = 70.0
    pieces, slow = answer(engine)
    assert whole[0] == 256
    assert pieces[0] == 64  # the machine that this runs on is quicker than that, as the next pieces may show
    assert slow.text == fast.text
    assert slow.metrics.prompt_tokens == slow.metrics.prefill_tokens == sum(pieces) + 1 == 401
