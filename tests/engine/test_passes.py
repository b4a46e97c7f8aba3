"""The passes of a reply: what is recorded, what a pass costs, how likely its tokens were."""

import base64
import math
import zlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from tokamac.engine import Engine, Finished, Message, PrefillProgress, Sampling
from tokamac.engine.events import PromptText, StepToken, StepTokens
from tokamac.engine.lab.likely import OTHERS
from tokamac.engine.lab.passes import CAUSES, PassCost, PassLogError, ReplyWalk, TimedTokens, cost_of, log_of, pack
from tokamac.engine.lab.without_cache import (
    CacheWorth,
    KnownFigure,
    cache_worth,
    known_figures,
    shown_steps,
    units_with,
    units_without,
)
from tokamac.engine.metrics import Mark, PromptBeside, Recorder, StepCost
from tokamac.engine.perf.catalogue import find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.footprint import Footprint, weigh
from tokamac.engine.perf.hardware import Chip
from tokamac.engine.perf.roofline import Attention, KVUse
from tokamac.engine.perf.what_if import WhatIfCase, elsewhere, load

from ..scripted_engine import CHIP, WORK

COST = PassCost(
    1_000_000, 0, 0.0, 500_000, 10_000, ((2, KVUse(100, None, 0)),), ((2, Attention(64, None)),), 100.0, 1.0
)


def recorded(*gaps_ms: float, pieces: tuple[tuple[int, float], ...] = ()) -> Recorder:
    """A recorder of a prompt of ten tokens, whose pieces end at these seconds, and of tokens with these gaps."""
    recorder = Recorder(clock=lambda: 0.0)
    recorder.begin_prefill(10, 0)
    recorder.pieces = list(pieces)
    at = pieces[-1][1] if pieces else 0.0
    for number, gap in enumerate(gaps_ms):
        at += gap / 1e3
        recorder.token_times.append(at)
        recorder.ids.append(1000 + number)
    return recorder


def test_what_others_take_while_a_prompt_is_read_is_not_its_own() -> None:
    now = [0.0]
    recorder = Recorder(clock=lambda: now[0])
    recorder.accept()
    recorder.begin_prefill(100, 0)

    def read() -> Generator[int, None, None]:
        for done in (64, 99):
            now[0] += 1
            recorder.computed(done)
            yield done

    for _ in recorder.reading(read()):
        now[0] += 10  # another reply's step
    now[0] += 0.5
    recorder.token()
    recorder.ids.append(7)
    metrics = recorder.metrics(StepCost(None, None, None, None), kv_bytes=None, peak_memory_bytes=None)
    assert (metrics.ttft_s, metrics.prefill_s, metrics.prefill_tps) == (22.5, 2.5, 40.0)
    log = log_of(recorder, COST, ahead=False)
    assert [piece.ms for piece in log.pieces] == [1000.0, 1000.0]
    assert log.unpacked().ms == (500.0,)


def test_a_log_holds_ids_times_and_what_held_the_tokens_up() -> None:
    recorder = recorded(5.0, 10.0, 10.0, 40.0, 10.0, pieces=((6, 0.02), (3, 0.03)))
    recorder.marks = [Mark(4, "swap"), Mark(4, "another prompt", prompt=PromptBeside(2013))]
    log = log_of(recorder, COST, ahead=False)
    assert [(piece.tokens, piece.ms) for piece in log.pieces] == [(6, 20.0), (3, 10.0)]
    timed = log.unpacked()
    assert timed.ids == (1000, 1001, 1002, 1003, 1004)
    assert timed.ms == pytest.approx((5, 10, 10, 40, 10))
    assert {token: set(causes) for token, causes in timed.held_up.items()} == {3: {"swap", "another prompt"}}
    walk = ReplyWalk(10, 0, log)
    assert [at.prompt for at in walk] == [None] * 5 + [PromptBeside(2013), None]
    assert timed.median_ms == pytest.approx(10)  # the first step waits for the prompt, and does not count


def test_every_cause_survives_and_so_does_a_step_without_one() -> None:
    timed = TimedTokens((7, 8), (1.0, 2.0), {0: CAUSES, 1: ()})
    log = replace(log_of(recorded(1.0, 2.0), COST, ahead=True), packed=pack(timed))  # type: ignore[type-var]
    assert log.unpacked() == timed


def test_a_token_takes_eight_bytes_at_most() -> None:
    many = 4000
    ids = tuple((number * 2_654_435_761) % 152_000 for number in range(many))
    ms = tuple(20.0 + (number * 7_919 % 1_000) / 100 for number in range(many))
    assert len(pack(TimedTokens(ids, ms))) <= 8 * many


ENDLESS = base64.b64encode(zlib.compress((b"\x80" * 1000 + b"\x01") * 9)).decode()  # numbers of thousands of bits


@pytest.mark.parametrize("damage", ["", "not base64!", "AAAA", "eJwDAAAAAAE=", ENDLESS])
def test_a_damaged_log_says_so(damage: str) -> None:
    log = log_of(recorded(1.0, 2.0), COST, ahead=False)
    assert log is not None
    with pytest.raises(PassLogError):
        replace(log, packed=damage).unpacked()


def test_nothing_is_recorded_of_a_reply_without_tokens() -> None:
    assert log_of(recorded(), COST, ahead=False) is None


def test_the_cost_of_a_pass_is_the_work_of_the_model() -> None:
    cost = cost_of(WORK, CHIP)
    assert cost.weight_bytes() == WORK.weight_bytes()
    for context in (1, 300, 32_000):
        assert cost.kv_bytes(context) == WORK.kv_bytes(context)
    head = 2 * WORK.head_parameters
    assert cost.operations(512, 64, head=True) == WORK.prefill_operations(512, 64)
    assert cost.operations(512, 64, head=False) == (WORK.prefill_operations(512, 64) or 0) - head
    mixture = replace(WORK, expert_bytes=10**9, active=0.125)
    assert cost_of(mixture, CHIP).weight_bytes(8) == mixture.weight_bytes(8)


def test_a_pass_takes_as_long_as_reading_or_computing() -> None:
    work = COST.work(1, 99, head=True)
    assert (work.weight_bytes, work.kv_bytes) == (1_000_000, 20_000)
    assert work.operations == 2 * 510_000 + 2 * 2 * 64 * 100
    assert work.weights_ms == pytest.approx(0.01)
    assert work.kv_ms == pytest.approx(0.0002)
    assert work.least_ms == pytest.approx(0.0102)
    assert work.share_of_ceiling(0.0204) == pytest.approx(0.5)


def test_what_is_unknown_of_a_chip_stays_unknown() -> None:
    work = cost_of(WORK, Chip("somewhere", None, None, None, "unknown")).work(1, 10, head=True)
    assert (work.reading_ms, work.computing_ms, work.least_ms, work.share_of_ceiling(3.0)) == (None,) * 4


def test_a_walk_goes_from_the_prompt_to_the_last_token() -> None:
    recorder = recorded(5.0, 10.0, 10.0, 40.0, pieces=((4, 0.02), (3, 0.03)))
    walk = ReplyWalk(10, 2, log_of(recorder, COST, ahead=False))
    assert len(walk) == 6
    assert [(at.cached, at.tokens, at.token) for at in map(walk.__getitem__, range(6))] == [
        (2, 4, None), (6, 3, None), (9, 1, 0), (10, 1, 1), (11, 1, 2), (12, 1, 3),
    ]  # fmt: skip
    assert [at.held_up for at in map(walk.__getitem__, range(6))] == [False] * 5 + [True]
    assert (walk.next_held_up(0, 1), walk.next_held_up(5, 1), walk.next_held_up(5, -1)) == (5, None, None)
    with pytest.raises(IndexError):
        walk[6]


def test_a_reply_without_a_log_has_steps_and_no_times() -> None:
    walk = ReplyWalk(10, 2, None, 3)
    assert [walk[index].ms for index in range(len(walk))] == [None] * 3
    assert walk[0].work is None


QUESTION = [Message("user", "What is TTFT?")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # Exact: a row is rounded to 8 bits otherwise after its prompt's piece or its step, whose last bits differ.
    with Engine.load("guide", cpu_exact=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def answered(engine: Engine) -> Finished:
    return engine.ask(QUESTION, Sampling(temperature=0, logprobs=OTHERS, max_tokens=24))


def looked_at(engine: Engine, end: Finished, *, logged: bool = True) -> tuple[PromptText, list[StepToken]]:
    found = list(
        engine.look_again(
            QUESTION,
            Message("assistant", end.text),
            passes=end.passes if logged else None,
            prompt_tokens=end.metrics.prompt_tokens,
            cached_tokens=end.metrics.cached_tokens,
        )
    )
    (prompt,) = (each for each in found if isinstance(each, PromptText))
    progress = [each.done for each in found if isinstance(each, PrefillProgress)]
    assert all(a <= b for a, b in pairwise(progress))
    return prompt, [token for each in found if isinstance(each, StepTokens) for token in each.tokens]


def test_the_passes_of_a_reply_are_those_that_ran(answered: Finished) -> None:
    metrics = answered.metrics
    walk = ReplyWalk(metrics.prompt_tokens, metrics.cached_tokens, answered.passes)
    assert walk.timed.ids == answered.ids
    assert sum(piece.tokens for piece in answered.passes.pieces) == metrics.prefill_tokens - 1
    total_ms = sum(ms for ms in walk.ms if ms is not None)
    assert total_ms == pytest.approx(
        ((metrics.prefill_s or 0) + (metrics.total_s or 0) - (metrics.ttft_s or 0)) * 1e3, abs=1
    )


def test_looking_again_finds_what_the_model_thought(engine: Engine, answered: Finished) -> None:
    prompt, tokens = looked_at(engine, answered)
    assert prompt.tokens == answered.metrics.prompt_tokens
    assert len(prompt.pieces) == len(answered.passes.pieces)  # type: ignore[union-attr]
    assert [token.id for token in tokens] == list(answered.ids)
    for then, now in zip(answered.logprobs, tokens, strict=True):
        assert now.logprob == pytest.approx(then.logprob, abs=1e-3)
        likeliest = {then.id: then.logprob} | {each.id: each.logprob for each in then.top}
        assert all(math.isclose(other.logprob, likeliest[other.id], abs_tol=2e-3) for other in now.others[: OTHERS - 1])
    assert "".join(token.text for token in tokens).startswith(answered.text)


def test_a_place_tells_how_much_text_comes_before_it(engine: Engine, answered: Finished) -> None:
    _, tokens = looked_at(engine, answered)
    for before, token in pairwise(tokens):
        assert answered.text[: token.answer] == answered.text[: before.answer] + before.text
    assert all(token.settled for token in tokens)
    assert all(token.id not in {other.id for other in token.others} for token in tokens)


def test_a_reply_whose_tokens_were_not_recorded_is_read_from_its_text(engine: Engine, answered: Finished) -> None:
    _, tokens = looked_at(engine, answered, logged=False)
    assert "".join(token.text for token in tokens) == answered.text


def test_a_reply_that_went_on_from_another_is_found_again(engine: Engine) -> None:
    begun = Message("assistant", "TTFT is")
    *_, end = engine.generate([*QUESTION, begun], Sampling(temperature=0, max_tokens=8), continues=True)
    prompt, tokens = looked_at(engine, end)
    assert prompt.tokens == end.metrics.prompt_tokens
    assert (tokens[0].answer, tokens[0].logprob > math.log(0.5)) == (len(begun.content), True)


def test_looking_can_be_ended(engine: Engine, answered: Finished) -> None:
    steps = engine.look_again(QUESTION, Message("assistant", answered.text), passes=answered.passes)
    next(steps)
    steps.close()
    assert engine.ask("What is TTFT?", Sampling(temperature=0, max_tokens=2)).metrics.generated_tokens == 2


# Without a cache ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", known_figures(), ids=lambda figure: figure.label)
def test_a_well_known_figure_is_computed_as_it_is_quoted(figure: KnownFigure) -> None:
    digits = len(figure.said.partition(".")[2])
    assert f"{figure.value:.{digits}f}" == figure.said


def test_the_figures_that_must_be_there_are() -> None:
    said = [figure.said for figure in known_figures()]
    assert said == ["4.78", "209", "29", "27", "58", "23", "3.5", "3.9", "20", "14", "105", "9.62", "83.9"]


@pytest.mark.parametrize(("prompt", "steps"), [(1, 14), (7, 1), (100, 30), (5, 0)])
def test_units_are_the_tokens_put_through(prompt: int, steps: int) -> None:
    assert units_without(prompt, steps) == sum(prompt + step for step in range(steps))
    assert units_with(prompt, steps) == (prompt + max(steps - 1, 0) if steps else 0)


def test_steps_are_shown_twice_as_far_each_time() -> None:
    assert shown_steps(1) == [1]
    assert shown_steps(14) == [1, 2, 4, 8, 14]
    assert shown_steps(16) == [1, 2, 4, 8, 16]


@pytest.fixture(scope="module")
def weighed() -> Footprint:
    entry = find("Llama-3.2-1B")
    assert entry.config is not None
    found = weigh(entry.config, "metal", packing=Packing(4, 64))
    assert isinstance(found, Footprint)
    return found


@pytest.fixture(scope="module")
def worth(weighed: Footprint) -> CacheWorth:
    case = WhatIfCase(context=1064, prompt=1000)
    return cache_worth(weighed, case, elsewhere("Apple M4", 10, 16), (1024, 8192))


def test_a_cache_makes_every_step_but_the_first_a_small_one(worth: CacheWorth) -> None:
    first, *later = worth.steps
    assert first.units_with == first.units_without == 1000
    assert first.seconds_with == first.seconds_without
    assert {pair.units_with for pair in later} == {1}
    assert all((pair.seconds_without or 0) > 5 * (pair.seconds_with or math.inf) for pair in later)
    assert (worth.total.units_with, worth.total.units_without) == (units_with(1000, 64), units_without(1000, 64))
    assert worth.expected


def test_keys_and_values_are_those_of_the_plans(weighed: Footprint, worth: CacheWorth) -> None:
    case = WhatIfCase(context=1064, prompt=1000)
    loaded = load(weighed, case.kv, elsewhere("Apple M4", 10, 16))
    growing, *_ = worth.sizes
    assert growing.nbytes == tuple(loaded.plan.bytes_at(each) for each in worth.contexts)
    assert len(worth.sizes) == 12
    by_bits = [size.nbytes[0] for size in worth.sizes[:4]]
    assert by_bits == sorted(by_bits, reverse=True)
    windows = [size for size in worth.sizes if size.window is not None]
    assert all(size.nbytes[1] < growing.nbytes[1] for size in windows)


def test_as_many_requests_fit_as_the_memory_beside_the_weights_holds(weighed: Footprint, worth: CacheWorth) -> None:
    case, place = WhatIfCase(context=1064, prompt=1000), elsewhere("Apple M4", 10, 16)
    loaded, count = load(weighed, case.kv, place), worth.sizes[0].requests
    assert (loaded.fit(case, count).fits, loaded.fit(case, count + 1).fits) == (True, None)  # only that Mac knows
    assert count == loaded.most_at_once(case)
    fewer_bits = [size.requests or 0 for size in worth.sizes[:4]]
    assert fewer_bits == sorted(fewer_bits)
