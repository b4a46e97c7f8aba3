"""Several replies at once say what each says alone: together, cancelled, failing, short of memory, in the background."""

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import until, within, write_model
from tokamac.engine import (
    Engine,
    Failed,
    Finished,
    KVSpec,
    MemoryLimitError,
    MemoryPressure,
    OptionError,
    PromptCacheSpec,
    Sampling,
    TextChunk,
)
from tokamac.engine.kv.cache import Cache
from tokamac.engine.metrics import Recorder
from tokamac.engine.prefill_budget import RoomTakenError
from tokamac.engine.schedule.decoding import Decoder, Lane

PROMPTS = [[5 + (i * i + number * 7) % 250 for i in range(40 + 37 * number)] for number in range(5)]
SAMPLED = Sampling(temperature=0.9, top_k=30, seed=4, max_tokens=24, repetition_penalty=1.1, presence_penalty=0.3)
PENALISED = replace(SAMPLED, dry_multiplier=0.8, logprobs=2)
KINDS = {
    "plain": KVSpec(),
    "packed": KVSpec(key_bits=8, value_bits=4),
    "ring": KVSpec(window=64, keep=4),
    "packed ring": KVSpec(key_bits=4, value_bits=4, window=64, keep=4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("many"), max_position_embeddings=2048)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(folder, kv=request.param, prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        yield loaded


@pytest.fixture(params=[PromptCacheSpec(disk=False), None], ids=["prompt cache", "no prompt cache"])
def either(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(folder, prompt_cache=request.param) as loaded:
        yield loaded


def said(event: object) -> tuple[object, ...]:
    """Return what must be the same whoever else is there."""
    assert isinstance(event, Finished)
    scores = [(score.id, round(score.logprob, 4)) for score in event.logprobs]
    return event.reason, event.text, event.thinking, event.ids, scores


def alone(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[tuple[object, ...]]:
    found = []
    for prompt in prompts:
        *_, end = engine.generate(prompt, sampling)
        found.append(said(end))
        engine.between(engine._runner._store.clear)
    return found


def together(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, **more: Any
) -> dict[tuple[int, int], list[object]]:
    """Return every reply's events. The engine begins once all prompts were asked, however busy the machine is."""
    begin = threading.Event()
    engine._worker.submit(begin.wait)

    def when_all_are_asked() -> None:
        until(lambda: len(engine._replies.open) == len(prompts))
        begin.set()

    threading.Thread(target=when_all_are_asked, daemon=True).start()
    found: dict[tuple[int, int], list[object]] = defaultdict(list)
    for prompt, sample, event in engine.generate_many(prompts, sampling, **more):
        found[prompt, sample].append(event)
    return found


@pytest.mark.parametrize(
    "sampling", [SAMPLED, PENALISED, Sampling(temperature=0, max_tokens=24)], ids=["seeded", "dry", "greedy"]
)
def test_replies_made_together_say_what_each_says_alone(engine: Engine, sampling: Sampling) -> None:
    single = alone(engine, PROMPTS, sampling)
    many = together(engine, PROMPTS, sampling)
    assert [said(many[number, 0][-1]) for number in range(len(PROMPTS))] == single
    # Once more, over what the prompt cache holds now.
    many = together(engine, PROMPTS, sampling)
    assert [said(many[number, 0][-1]) for number in range(len(PROMPTS))] == single


def test_samples_of_a_prompt_have_seeds_of_their_own_and_read_it_once(engine: Engine) -> None:
    single = []
    for sample in range(3):
        *_, end = engine.generate(PROMPTS[1], replace(SAMPLED, seed=4 + sample))
        single.append(said(end))
    engine.between(engine._runner._store.clear)
    many = together(engine, PROMPTS[1:2], SAMPLED, n=3)
    assert [said(many[0, sample][-1]) for sample in range(3)] == single
    computed = [many[0, sample][-1].metrics.prefill_tokens for sample in range(3)]  # type: ignore[attr-defined]
    assert computed == [len(PROMPTS[1]), 1, 1]


def test_threads_that_ask_at_once_get_what_each_gets_alone(engine: Engine) -> None:
    single = alone(engine, PROMPTS, SAMPLED)
    found: dict[int, object] = {}

    def read(number: int) -> None:
        for event in engine.generate(PROMPTS[number], SAMPLED):
            found[number] = event

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        within(thread.join)
    assert [said(found[number]) for number in range(len(PROMPTS))] == single


@settings(max_examples=15)
@given(st.data())
def test_whatever_is_cancelled_or_let_go_of_the_others_say_the_same(data: st.DataObject) -> None:
    engine, single = shared_engine()
    sampling = SAMPLED
    order = data.draw(st.permutations(range(len(PROMPTS))))
    fates = {number: data.draw(st.sampled_from(["whole", "whole", "cancel", "close", "drop"])) for number in order}
    after = {number: data.draw(st.integers(0, 6)) for number in order}
    replies = {number: engine.generate(PROMPTS[number], sampling) for number in order}
    ended: dict[int, object] = {}
    counts = dict.fromkeys(order, 0)
    while replies:
        number = data.draw(st.sampled_from(sorted(replies)))
        if fates[number] != "whole" and counts[number] >= after[number]:
            if fates[number] == "cancel":
                replies[number].cancel()
                *_, end = replies.pop(number)
                assert isinstance(end, Finished)
                assert single[number][1].startswith(end.text.rstrip("\ufffd")) or end.reason == "length"  # type: ignore[attr-defined]
            elif fates[number] == "close":
                replies.pop(number).close()
            else:
                del replies[number]
            continue
        event = next(replies[number], None)
        counts[number] += 1
        if event is None:
            del replies[number]
        else:
            ended[number] = event
    for number in order:
        if fates[number] == "whole":
            assert said(ended[number]) == single[number]
    until(lambda: not engine._replies.schedule.busy)
    assert engine.between(lambda: len(engine._runner._store.leases)) == 0
    *_, end = engine.generate(PROMPTS[0], sampling)
    assert said(end) == single[0]


_shared: list[tuple[Engine, list[tuple[object, ...]]]] = []


def shared_engine() -> tuple[Engine, list[tuple[object, ...]]]:
    """Return one engine for all examples of a property, and what it says of each prompt alone."""
    return _shared[0]


@pytest.fixture(scope="module", autouse=True)
def _one_engine(folder: Path) -> Iterator[None]:
    with Engine.load(folder, kv=KVSpec(key_bits=8, value_bits=4), prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        _shared.append((loaded, alone(loaded, PROMPTS, SAMPLED)))
        yield
        _shared.clear()


# What a reply tells of those beside it.


def test_a_reply_says_how_many_were_made_with_it_and_what_held_it_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamac.engine.perf.mitigation.Chunking.at", lambda *_: 64)
    held_up: list[str] = []
    monkeypatch.setattr(Recorder, "mark", lambda _, cause, most_ms=0.0: held_up.append(cause))
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        *_, single = engine.generate(PROMPTS[0], SAMPLED)
        assert isinstance(single, Finished)
        assert single.metrics.batch_width == 1
        assert single.metrics.queue_s is not None
        first = engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=300))
        until(lambda: isinstance(next(first), TextChunk))
        *_, second = engine.generate([5 + i % 200 for i in range(1500)], replace(SAMPLED, max_tokens=60))
        *_, end = first
    assert isinstance(second, Finished)
    assert isinstance(end, Finished)
    assert second.metrics.batch_width == 2
    assert end.metrics.batch_width is not None
    assert 1 < end.metrics.batch_width < 2
    longer = (1500 + 30) / (len(PROMPTS[0]) + 12)
    assert second.metrics.kv_bytes_per_step == pytest.approx(
        2 * longer * (single.metrics.kv_bytes_per_step or 0), rel=0.05
    )
    assert "another prompt" in held_up


def test_prompts_that_begin_alike_are_read_once_also_while_the_first_is_still_being_read(folder: Path) -> None:
    shared = [5 + i * i % 240 for i in range(900)]
    prompts = [[*shared, 10 + number, 20 + number] for number in range(4)]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        single = alone(engine, prompts, SAMPLED)
        many = together(engine, prompts, SAMPLED)
    assert [said(many[number, 0][-1]) for number in range(4)] == single
    computed = sorted(many[number, 0][-1].metrics.prefill_tokens for number in range(4))  # type: ignore[attr-defined]
    assert computed == [2, 2, 2, 902]


# Failures: one reply alone, or a pass of several, after which all are computed again.


class FailingTogether:
    """A model whose pass fails where ``when`` says so of its rows and its number; what is in the caches is spoiled then."""

    def __init__(self, model: Any, when: Callable[[int, int], bool]) -> None:
        self.layers, self.passes = model.layers, 0
        self._model, self._when = model, when

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.passes += 1
        out: mx.array = self._model(ids, cache=cache)
        if ids.shape[1] == 1 and self._when(ids.shape[0], self.passes):
            for layer in cache:
                for row in getattr(layer, "rows", [layer]):
                    row.state = [*[tuple(x * 0 for x in part) for part in row.state[:2]], *row.state[2:]]
            raise RuntimeError("[metal::malloc] Unable to allocate 1099511627776 bytes.")
        return out


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[int, int], bool]) -> None:
    runtime = engine._runner.runtime
    model = FailingTogether(runtime.model, when)
    monkeypatch.setattr(engine._runner, "_decoder", Decoder(model, ahead=runtime.ahead))


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["seeded", "dry"])
def test_after_a_pass_of_several_that_failed_each_goes_on_and_says_the_same(
    either: Engine, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    single = alone(either, PROMPTS, sampling)
    widths: list[int] = []

    def too_wide(rows: int, number: int) -> bool:
        widths.append(rows)
        return rows > 2 and number > 6

    fail(either, monkeypatch, too_wide)
    many = together(either, PROMPTS, sampling)
    assert [said(many[number, 0][-1]) for number in range(len(PROMPTS))] == single
    assert max(widths) > 2
    assert max(widths[widths.index(max(widths)) + 8 :], default=0) <= max(widths)


def test_a_reply_that_fails_alone_ends_alone(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    single = alone(either, PROMPTS, SAMPLED)
    bad: list[int] = []

    class Spoiling(Decoder):
        def step(self, lanes: Any) -> Any:
            if not bad and any(lane.count == 5 for lane in lanes):
                bad.append(next(id(lane) for lane in lanes if lane.count == 5))
            if bad and any(id(lane) == bad[0] or lane.cached_ids[:3] == PROMPTS[2][:3] for lane in lanes):
                raise RuntimeError("[malloc] Unable to allocate 1099511627776 bytes.")
            return super().step(lanes)

    monkeypatch.setattr(
        either._runner, "_decoder", Spoiling(either._runner.runtime.model, ahead=either._runner.runtime.ahead)
    )
    many = together(either, PROMPTS, SAMPLED)
    ends = [many[number, 0][-1] for number in range(len(PROMPTS))]
    failed = [number for number, end in enumerate(ends) if isinstance(end, Failed)]
    assert failed == [2]
    assert isinstance(ends[2].error, MemoryLimitError)  # type: ignore[attr-defined]
    assert [said(end) for number, end in enumerate(ends) if number != 2] == [*single[:2], *single[3:]]


def test_a_prompt_that_is_too_long_fails_alone(either: Engine) -> None:
    many = together(either, [PROMPTS[0], [5] * 5000, PROMPTS[1]], SAMPLED)
    assert [type(many[number, 0][-1]) for number in range(3)] == [Finished, Failed, Finished]


def test_what_is_no_number_of_samples_is_refused(either: Engine) -> None:
    with pytest.raises(OptionError):
        next(either.generate_many([PROMPTS[0]], n=0))


# Memory: a reply that does not fit beside the others waits for them, and says so.


def test_a_reply_that_does_not_fit_beside_another_waits_for_it(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    single = alone(either, PROMPTS[:3], SAMPLED)
    from tokamac.engine import prefill_budget

    make_room = prefill_budget.make_room

    def one_at_a_time(runtime: Any, store: Any, lease: Any, tokens: int, **more: Any) -> Any:
        if any(each is not lease for each in store.leases):
            raise RoomTakenError(MemoryPressure(0, None, 0, 100, 50, waits=True))
        return make_room(runtime, store, lease, tokens, **more)

    monkeypatch.setattr(prefill_budget, "make_room", one_at_a_time)
    many = together(either, PROMPTS[:3], SAMPLED)
    assert [said(many[number, 0][-1]) for number in range(3)] == single
    waited = [[event for event in many[number, 0] if isinstance(event, MemoryPressure)] for number in range(3)]
    assert [len(each) for each in waited] == [0, 1, 1]
    assert all(event.waits for each in waited for event in each)


def test_a_reply_that_waits_for_memory_is_cancelled_at_once(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamac.engine import prefill_budget

    def never(*_: Any, **__: Any) -> Any:
        raise RoomTakenError(MemoryPressure(0, None, 0, 100, 50, waits=True))

    either.tokenizer.eos_ids = frozenset()
    first = either.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=1500))
    until(lambda: isinstance(next(first), TextChunk))
    monkeypatch.setattr(prefill_budget, "make_room", never)
    second = either.generate(PROMPTS[1], SAMPLED)
    assert isinstance(next(second), MemoryPressure)
    second.cancel()
    *_, end = within(lambda: list(second))
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    first.close()


# Whoever comes and goes leaves nothing behind.


def test_many_joins_and_leaves_leave_no_cache_and_no_thread(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=None) as engine:

        def caches() -> int:
            until(lambda: not engine._replies.schedule.busy and not engine._replies.open)
            return engine.between(lambda: sum(isinstance(each, Cache) for each in gc.get_objects()))

        def some(left_after: int) -> None:
            events = engine.generate_many(PROMPTS, SAMPLED, n=2)
            for _ in range(left_after):
                next(events, None)
            events.close()

        some(60)
        gc.collect()
        gc.disable()  # what is let go of must go by itself: keys and values can't wait for garbage to be looked for
        try:
            before, threads = caches(), threading.active_count()
            for left_after in range(0, 60, 3):
                some(left_after)
            assert caches() == before
        finally:
            gc.enable()
        assert threading.active_count() == threads


# A lane is what it says of itself.


def test_the_decoder_takes_lanes_of_any_number_and_keeps_their_ids(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=None) as engine:
        widths: list[int] = []

        def noted(step: Callable[[Any, list[Lane]], Any]) -> Callable[[Any, list[Lane]], Any]:
            def call(self: Any, lanes: list[Lane]) -> Any:
                widths.append(len(lanes))
                return step(self, lanes)

            return call

        original = Decoder.step
        Decoder.step = noted(original)  # type: ignore[method-assign]
        try:
            together(engine, PROMPTS, replace(SAMPLED, max_tokens=40))
        finally:
            Decoder.step = original  # type: ignore[method-assign]
        assert max(widths) == len(PROMPTS)
