"""Several replies at once say what each says alone: together, cancelled, failing, short of memory, in the background."""

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import within, write_model
from tests.engine.inside import replies_of, runner_of, runtime_of, store_of, worker_of
from tests.waiting import until
from tokamac.engine import (
    Engine,
    Failed,
    Finished,
    KVSpec,
    MemoryLimitError,
    MemoryPressure,
    Message,
    OptionError,
    PrefillProgress,
    Price,
    PromptCacheSpec,
    Sampling,
    TemplateOptions,
    TextChunk,
)
from tokamac.engine.kv.cache import Cache, nbytes
from tokamac.engine.metrics import PromptBeside, Recorder
from tokamac.engine.runner import stable_prompt, warm_stable
from tokamac.engine.schedule.admission import RoomTakenError
from tokamac.engine.schedule.decoding import Decoded, Decoder, Lane
from tokamac.engine.schedule.schedule import (
    ALONE_S,
    MOST_PASSED,
    STALL_S,
    WAITS,
    WELL,
    Pace,
    Pacing,
    Policy,
    ReplyEvents,
    Schedule,
    Seat,
)
from tokamac.engine.schedule.stream import EventStream
from tokamac.engine.worker import ReplyScheduler, Worker

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
    scores = [(score.id, round(score.logprob, 4)) for score in event.logprobs]
    return event.reason, event.text, event.thinking, event.ids, scores


def alone(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[tuple[object, ...]]:
    found = []
    for prompt in prompts:
        *_, end = engine.generate(prompt, sampling)
        found.append(said(end))
        engine.between(store_of(engine).clear)
    return found


def together(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, *, refused: int = 0, **more: Any
) -> dict[tuple[int, int], list[object]]:
    """Return every reply's events. The engine begins once all prompts were asked, however busy the machine is.

    refused: prompts that do not come to the engine.
    """
    begin = threading.Event()
    worker_of(engine).submit(begin.wait)

    def when_all_are_asked() -> None:
        until(lambda: len(replies_of(engine).open) == len(prompts) - refused)
        begin.set()

    threading.Thread(target=when_all_are_asked, daemon=True).start()
    found: dict[tuple[int, int], list[object]] = defaultdict(list)
    for prompt, sample, event in engine.generate_many(prompts, sampling, **more):
        found[prompt, sample].append(event)
    return found


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SAMPLED, marks=pytest.mark.exhaustive), PENALISED, Sampling(temperature=0, max_tokens=24)],
    ids=["seeded", "dry", "greedy"],
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
    engine.between(store_of(engine).clear)
    many = together(engine, PROMPTS[1:2], SAMPLED, n=3)
    assert [said(many[0, sample][-1]) for sample in range(3)] == single
    computed = [many[0, sample][-1].metrics.prefill_tokens for sample in range(3)]  # type: ignore[attr-defined]
    assert computed == [len(PROMPTS[1]), 1, 1]


@pytest.mark.parametrize("spec", [KINDS["plain"], KINDS["packed"]], ids=["plain", "packed"])
def test_samples_of_a_long_prompt_hold_it_once_and_say_what_each_says_alone(folder: Path, spec: KVSpec) -> None:
    prompt = [5 + i * i % 250 for i in range(700)]
    with Engine.load(folder, kv=spec, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        single = [said([*engine.generate(prompt, replace(SAMPLED, seed=4 + sample))][-1]) for sample in range(4)]
        store = store_of(engine)
        engine.between(store.clear)
        found, held = dict[int, object](), 0
        for _, sample, event in engine.generate_many([prompt], SAMPLED, n=4):
            found[sample] = event
            if isinstance(event, Finished):
                held = max(held, engine.between(lambda: store.nbytes))
        assert [said(found[sample]) for sample in range(4)] == single
        bytes_per_token = runtime_of(engine).plan.bytes_per_token
        assert held <= 1.1 * bytes_per_token * (len(prompt) + 4 * SAMPLED.max_tokens)
        # What is left holds no copy either, and is found again.
        assert not store.leases
        assert engine.between(lambda: store.nbytes) <= 1.1 * bytes_per_token * (len(prompt) + 4 * SAMPLED.max_tokens)
        *_, again = engine.generate([*prompt, 7], SAMPLED)
        assert again.metrics.cached_tokens == len(prompt)


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
    chunks: dict[int, list[TextChunk]] = {number: [] for number in order}
    counts = dict.fromkeys(order, 0)
    while replies:
        number = data.draw(st.sampled_from(sorted(replies)))
        if fates[number] != "whole" and counts[number] >= after[number]:
            if fates[number] == "cancel":
                replies[number].cancel()
                *_, end = replies.pop(number)
                assert single[number][1].startswith(end.text.rstrip("\ufffd")) or end.reason == "length"  # type: ignore[attr-defined]
            elif fates[number] == "close":
                replies.pop(number).close()
            else:
                del replies[number]
            continue
        event = next(replies[number], None)
        counts[number] += 1
        if isinstance(event, TextChunk):
            chunks[number].append(event)
        if event is None:
            del replies[number]
        else:
            ended[number] = event
    for number in order:
        if fates[number] == "whole":  # and no event of it was lost, or came out of its turn
            assert said(ended[number]) == single[number]
            assert "".join(each.text for each in chunks[number]) == single[number][1]
            end = ended[number]
            assert sum(len(each.ids) for each in (*chunks[number], end)) == end.metrics.generated_tokens
    until(lambda: not replies_of(engine).schedule.busy)
    assert engine.between(lambda: len(store_of(engine).leases)) == 0
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


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut after 64 tokens."""
    monkeypatch.setattr("tokamac.engine.chunking.Chunking.tokens_at", lambda *_: 64)


@pytest.mark.usefixtures("chunks")
def test_a_reply_says_how_many_were_with_it_and_what_held_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = set[object]()
    monkeypatch.setattr(Recorder, "mark", lambda _, cause, most_ms=0.0, prompt=None: held_up.add((cause, prompt)))
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        *_, single = engine.generate(PROMPTS[0], SAMPLED)
        assert single.metrics.batch_width == 1
        assert single.metrics.queue_s is not None
        first = engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=300))
        until(lambda: isinstance(next(first), TextChunk))
        *_, second = engine.generate([5 + i % 200 for i in range(1500)], replace(SAMPLED, max_tokens=60))
        *_, end = first
    assert second.metrics.batch_width == 2
    assert 1 < end.metrics.batch_width < 2
    longer = (1500 + 30) / (len(PROMPTS[0]) + 12)
    assert second.metrics.kv_bytes_per_step == pytest.approx(
        2 * longer * (single.metrics.kv_bytes_per_step or 0), rel=0.05
    )
    assert ("another prompt", PromptBeside(1500)) in held_up


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
    runtime = runtime_of(engine)
    model = FailingTogether(runtime.model, when)
    monkeypatch.setattr(runner_of(engine), "_decoder", Decoder(model, ahead=runtime.ahead))


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["seeded", "dry"])
def test_after_a_failed_pass_each_goes_on(either: Engine, monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
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


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0, max_tokens=24)], ids=["seeded", "greedy"])
@pytest.mark.parametrize("tokens", [60, 400])
@pytest.mark.parametrize("fails", [1, 2, 10])
def test_after_a_failed_pass_none_goes_on_from_what_another_of_it_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, tokens: int, fails: int
) -> None:
    """Of 400 tokens they hold most together, of 60 each a copy."""
    prompt = [5 + i * i % 250 for i in range(tokens)]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        single = alone(engine, [prompt], sampling)
        widths: list[int] = []

        def once(rows: int, _: int) -> bool:
            widths.append(rows)
            return rows == 2 and widths.count(2) == fails

        fail(engine, monkeypatch, once)
        many = together(engine, [prompt, prompt], sampling)
        assert widths.count(2) == fails  # from then on each has passes of its own
        assert [said(many[number, 0][-1]) for number in range(2)] == single * 2


def test_after_many_good_passes_replies_share_them_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, prompt_cache=None, speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        widths: list[int] = []

        def once(rows: int, number: int) -> bool:
            widths.append(rows)
            return rows == 2 and number < 10

        fail(engine, monkeypatch, once)
        together(engine, PROMPTS[:2], Sampling(temperature=0, max_tokens=400))
        narrow = widths[widths.index(2) + 1 :].index(2)  # passes of one from the failed one on
        assert narrow in (WELL, WELL + 1)


def test_caches_of_a_failed_pass_are_dropped_also_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), speculation=None) as engine:
        single = alone(engine, PROMPTS[4:], SAMPLED)

        def once(_: int, number: int) -> bool:
            if number == 3:
                replies_of(engine).open[0].abandon()
            return number == 3

        fail(engine, monkeypatch, once)
        events = engine.generate(PROMPTS[4], SAMPLED)
        within(lambda: [*events])
        until(lambda: not replies_of(engine).schedule.busy)
        assert engine.between(lambda: store_of(engine).known(PROMPTS[4], None).tokens) == 0
        assert alone(engine, PROMPTS[4:], SAMPLED) == single


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
        runner_of(either), "_decoder", Spoiling(runtime_of(either).model, ahead=runtime_of(either).ahead)
    )
    many = together(either, PROMPTS, SAMPLED)
    ends = [many[number, 0][-1] for number in range(len(PROMPTS))]
    failed = [number for number, end in enumerate(ends) if isinstance(end, Failed)]
    assert failed == [2]
    assert isinstance(ends[2].error, MemoryLimitError)  # type: ignore[attr-defined]
    assert [said(end) for number, end in enumerate(ends) if number != 2] == [*single[:2], *single[3:]]


def test_a_prompt_that_is_too_long_fails_alone(either: Engine) -> None:
    many = together(either, [PROMPTS[0], [5] * 5000, PROMPTS[1]], SAMPLED, refused=1)
    assert [type(many[number, 0][-1]) for number in range(3)] == [Finished, Failed, Finished]


def test_cancelling_all_ends_those_too_that_were_not_begun(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), parallel=1) as engine:
        engine.tokenizer.eos_ids = frozenset()
        events = engine.generate_many(PROMPTS, Sampling(temperature=0, max_tokens=1500), n=3)
        found = [next(events)]
        until(lambda: found.append(next(events)) or isinstance(found[-1][2], TextChunk))
        engine.cancel()
        found += within(lambda: list(events))
        ends = {(prompt, sample): event for prompt, sample, event in found if isinstance(event, Finished)}
        assert len(ends) == 3 * len(PROMPTS)
        assert {event.reason for event in ends.values()} == {"cancelled"}
        assert sum(event.metrics.prefill_tokens for event in ends.values()) <= len(PROMPTS[0])  # no other was read


def test_a_reply_that_waits_for_a_seat_is_cancelled_at_once(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), parallel=1) as engine:
        engine.tokenizer.eos_ids = frozenset()
        first = engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=1500))
        until(lambda: isinstance(next(first), TextChunk))
        is_read, found = threading.Event(), list[object]()

        def read() -> None:
            for _ in first:
                pass
            is_read.set()

        second = engine.generate(PROMPTS[1], SAMPLED)
        waiting = threading.Thread(target=lambda: found.extend(second), daemon=True)
        threading.Thread(target=read, daemon=True).start()
        waiting.start()
        until(lambda: len(replies_of(engine).schedule._waiting) == 1)
        second.cancel()
        within(waiting.join)
        assert not is_read.is_set()
        end = found[-1]
        assert (end.reason, end.metrics.generated_tokens) == ("cancelled", 0)
        first.cancel()
        until(is_read.is_set)


def test_caches_that_nobody_uses_cut_no_reply_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokamac.engine.schedule.stream.LOOK_AHEAD", 4
    )  # the second waits for its reader while the limit is set
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        engine.tokenizer.eos_ids = frozenset()
        store = store_of(engine)
        long = [5 + i * i % 250 for i in range(1500)]
        first, second = (  # the second grows for a while after the first has left
            engine.generate(prompt, Sampling(temperature=0, max_tokens=most))
            for prompt, most in ((long, 500), (PROMPTS[0], 1200))
        )
        for reply in (first, second):
            until(lambda reply=reply: isinstance(next(reply), TextChunk))
        first.close()  # what its caches hold is kept, and nobody uses it
        until(lambda: len(store.leases) == 1)

        def limit() -> None:
            """Leave the second no room to grow, but where the first's caches are."""
            runner_of(engine).runtime.memory_limit.nbytes = mx.get_active_memory() + store.nbytes // 12

        engine.between(limit)
        *_, end = second
        assert (end.reason, end.metrics.generated_tokens) == ("length", 1200)
        assert engine.between(lambda: store.known(long, None).tokens) < 100  # what both began with


def test_what_is_no_number_of_samples_is_refused(either: Engine) -> None:
    with pytest.raises(OptionError):
        next(either.generate_many([PROMPTS[0]], n=0))


# A reply with keys and values of other bits than the model was loaded with, on the same weights.

BITS = [(16, 16), (8, 4), (4, 2)]
SCORED = replace(SAMPLED, logprobs=3)


def whole(event: object) -> tuple[object, ...]:
    """Return a reply to the last bit, and what its keys and values took."""
    return event.reason, event.text, event.ids, event.logprobs, event.metrics.kv_bytes


@pytest.mark.parametrize("rolls", [False, True], ids=["grows", "ring"])
@pytest.mark.parametrize("cache", [PromptCacheSpec(disk=False), None], ids=["prompt cache", "no prompt cache"])
def test_other_bits_are_those_of_an_engine_so_loaded(folder: Path, rolls: bool, cache: PromptCacheSpec | None) -> None:
    spec = KVSpec(window=64, keep=4) if rolls else KVSpec()
    loaded = {}
    for bits in BITS:
        own = replace(spec, key_bits=bits[0], value_bits=bits[1])
        with Engine.load(folder, kv=own, prompt_cache=None) as engine:
            *_, loaded[bits] = engine.generate(PROMPTS[2], SCORED)
            shape, work = runtime_of(engine).shape, runtime_of(engine).work
    with Engine.load(folder, kv=spec, prompt_cache=cache) as engine:
        *_, first = engine.generate(PROMPTS[2], SCORED)
        kept = []
        for bits in BITS:
            *_, end = engine.generate(PROMPTS[2], SCORED, kv_bits=bits)
            assert whole(end) == whole(loaded[bits])
            assert end.metrics.cached_tokens == (len(PROMPTS[2]) - 1 if cache and bits == (16, 16) else 0)
            kept.append(engine.between(lambda: store_of(engine).nbytes))
        other = runner_of(engine)._with_bits[4, 2]
        assert (other.shape, other.work) == (shape, work)
        assert (16, 16) not in runner_of(engine)._with_bits
        assert engine.between(lambda: store_of(engine).leases) == []
        assert len(set(kept)) == 1
        *_, again = engine.generate(PROMPTS[2], SCORED)
        assert whole(again) == whole(first)
        assert again.metrics.prefill_tokens == (1 if cache else len(PROMPTS[2]))


def test_replies_of_several_bits_are_made_in_the_same_passes(engine: Engine) -> None:
    asked = [None, (8, 4), (4, 2), (16, 16)]
    single = []
    for bits in asked:
        *_, end = engine.generate(PROMPTS[3], SCORED, kv_bits=bits)
        single.append(whole(end))
    begin, found = threading.Event(), dict[int, Finished]()
    worker_of(engine).submit(begin.wait)

    def read(number: int) -> None:
        *_, found[number] = engine.generate(PROMPTS[3], SCORED, kv_bits=asked[number])  # type: ignore[assignment]

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    until(lambda: len(replies_of(engine).open) == len(asked))
    begin.set()
    for thread in threads:
        within(thread.join)
    assert [whole(found[number]) for number in range(len(asked))] == single
    assert all((found[number].metrics.batch_width or 0) > 1.5 for number in range(len(asked)))


def test_memory_is_reckoned_for_replies_of_all_bits_together(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        engine.tokenizer.eos_ids = frozenset()
        replies = [engine.generate(PROMPTS[4], Sampling(max_tokens=1500), kv_bits=bits) for bits in (None, (8, 8))]
        for reply in replies:
            until(lambda reply=reply: isinstance(next(reply), TextChunk))
        store = store_of(engine)

        def seen() -> tuple[int, list[int]]:
            return store.nbytes - store.aside, [nbytes(lease.caches) for lease in store.leases]

        held, parts = engine.between(seen)
        assert len(parts) == 2
        assert held == sum(parts)
        assert all(parts)
        for reply in replies:
            reply.close()
        until(lambda: not engine.between(lambda: store.leases))


def test_bits_that_the_model_can_not_have_are_refused_as_loading_does(tmp_path: Path) -> None:
    odd = write_model(tmp_path, hidden_size=80, num_attention_heads=4, head_dim=20)
    with pytest.raises(OptionError) as refused:
        Engine.load(odd, kv=KVSpec(8, 8), prompt_cache=None)
    with Engine.load(odd, prompt_cache=None) as engine:
        with pytest.raises(OptionError) as again:
            next(engine.generate(PROMPTS[0], kv_bits=(8, 8)))
        assert isinstance(engine.ask(PROMPTS[0], SAMPLED), Finished)
    assert str(again.value) == str(refused.value)


# Memory: a reply that does not fit beside the others waits for them, and says so.


def test_a_reply_that_does_not_fit_beside_another_waits_for_it(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    single = alone(either, PROMPTS[:3], SAMPLED)
    from tokamac.engine.schedule import admission

    make_room = admission.make_room

    def one_at_a_time(runtime: Any, store: Any, lease: Any, tokens: int, **more: Any) -> Any:
        if any(each is not lease for each in store.leases):
            raise RoomTakenError(MemoryPressure(0, None, 0, 100, 50, waits=True))
        return make_room(runtime, store, lease, tokens, **more)

    monkeypatch.setattr(admission, "make_room", one_at_a_time)
    many = together(either, PROMPTS[:3], SAMPLED)
    assert [said(many[number, 0][-1]) for number in range(3)] == single
    waited = [[event for event in many[number, 0] if isinstance(event, MemoryPressure)] for number in range(3)]
    assert [len(each) for each in waited] == [0, 1, 1]
    assert all(event.waits for each in waited for event in each)


def test_a_reply_that_waits_for_memory_is_cancelled_at_once(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamac.engine.schedule import admission

    def never(*_: Any, **__: Any) -> Any:
        raise RoomTakenError(MemoryPressure(0, None, 0, 100, 50, waits=True))

    either.tokenizer.eos_ids = frozenset()
    first = either.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=1500))
    until(lambda: isinstance(next(first), TextChunk))
    monkeypatch.setattr(admission, "make_room", never)
    second = either.generate(PROMPTS[1], SAMPLED)
    assert isinstance(next(second), MemoryPressure)
    second.cancel()
    *_, end = within(lambda: list(second))
    assert end.reason == "cancelled"
    first.close()


# Replies that nobody waits for keep nobody from a seat.


def test_where_one_reply_is_made_at_once_one_in_the_background_does_not_hold_it_up(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), parallel=1) as engine:
        single = alone(engine, PROMPTS[:2], SAMPLED)
        engine.tokenizer.eos_ids = frozenset()
        behind = engine.generate(PROMPTS[4], Sampling(temperature=0, max_tokens=1500), background=True)
        until(lambda: isinstance(next(behind), TextChunk))
        assert [said(list(engine.generate(prompt, SAMPLED))[-1]) for prompt in PROMPTS[:2]] == single
        assert behind.live() is not None
        behind.cancel()
        assert list(behind)[-1].reason == "cancelled"  # type: ignore[union-attr]


def test_background_work_is_no_time_of_anothers_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[Lane] = []
    monkeypatch.setattr(Lane, "interrupted", lambda lane: interrupted.append(lane))
    monkeypatch.setattr(Lane, "note", lambda *_: None)
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        engine.tokenizer.eos_ids = frozenset()
        behind = engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=1500), background=True)
        until(lambda: isinstance(next(behind), TextChunk))
        before = engine.generate(PROMPTS[1], Sampling(temperature=0, max_tokens=1500))
        until(lambda: isinstance(next(before), TextChunk))
        reader = threading.Thread(target=lambda: [*behind], daemon=True)  # until now it waits for one
        reader.start()
        for _ in before:
            if any(lane.cached_ids[: len(PROMPTS[1])] == PROMPTS[1] for lane in interrupted):
                before.cancel()
        behind.cancel()
        within(reader.join)
    assert any(lane.cached_ids[: len(PROMPTS[1])] == PROMPTS[1] for lane in interrupted)


# What is computed ahead runs in the background, and gives way.

AHEAD = [Message("system", "Be brief."), Message("user", "What there is to say of this matter, and of that. " * 8)]


def test_what_is_computed_ahead_goes_on_beside_a_reply(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), parallel=1) as engine:
        engine.tokenizer.eos_ids = frozenset()
        cold, prices = engine.price(AHEAD), list[Price | None]()
        reply = engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=1900))
        until(lambda: isinstance(next(reply), TextChunk))
        engine.warm_ahead(AHEAD, then=prices.append)
        end: Any = None
        for end in reply:  # noqa: B007  # the last is what it ended with
            if prices:
                reply.cancel()
        assert end.reason == "cancelled"  # that is, it was computed before the reply had come to its end
        assert [price.tokens < cold.tokens // 4 for price in prices if price] == [True]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("why", ["another waits for memory", "another reads the same"])
def test_what_is_computed_ahead_ends_where(folder: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        store, pace = store_of(engine), Pace()
        ids = engine.tokenizer.encode(engine.tokenizer.render(AHEAD))

        def computed() -> int:
            prompt = stable_prompt(runner_of(engine), AHEAD, TemplateOptions())
            ahead = warm_stable(runner_of(engine), prompt, pace, cancelled=lambda: False)
            while (done := next(ahead)) is None or not isinstance(done, PrefillProgress) or done.done < 64:
                pass
            if why == "another waits for memory":
                pace.is_in_the_way = True
            else:
                other = store.acquire(ids, None)
                other.coming = ids
                store.use(other)
            for _ in ahead:
                pass
            return store.known(ids, None).tokens

        assert 64 <= engine.between(computed) < len(ids) // 2


def test_what_gives_way_is_told_so_where_another_waits_and_leaves_at_once_when_it_is_cancelled() -> None:
    now_s, told, left = 0.0, list[bool](), list[str]()
    schedule = Schedule(lambda _: None, clock=lambda: now_s)
    stream = EventStream()

    class Source:
        """Pieces of 0.1 s each."""

        def __init__(self, name: str, of: Callable[[Pace], ReplyEvents]) -> None:
            self.name, self.pace, self._of = name, Pace(), of

        def events(self) -> ReplyEvents:
            nonlocal now_s
            for each in self._of(self.pace):
                now_s += 0.1
                yield each
            left.append(self.name)

        def feed(self, *_: object) -> bool:
            return True

        def live(self) -> None:
            return None

    def ahead(pace: Pace) -> ReplyEvents:
        while not stream.is_cancelled():
            told.append(pace.is_in_the_way)
            yield None

    def waits(_: Pace) -> ReplyEvents:
        while "short" not in left:
            yield WAITS
        yield None

    paces = list[float]()

    def short(pace: Pace) -> ReplyEvents:
        paces.append(pace.within_s)
        yield from (SimpleNamespace(note=lambda *_: None, interrupted=lambda: None) for _ in range(40))

    def add(name: str, of: Callable[[Pace], ReplyEvents], stream: EventStream, *, background: bool = False) -> None:
        schedule.add(Seat(lambda _: Source(name, of), stream, background=background))

    schedule.width, schedule.decode = 3, lambda lanes: [Decoded(lane, 5) for lane in lanes]
    add("ahead", ahead, stream, background=True)
    schedule.turn()
    add("waits", waits, EventStream())
    add("short", short, EventStream())
    while "short" not in left:
        schedule.turn()
    assert (told[0], told[-1]) == (False, True)
    add("another", short, EventStream())
    assert paces == [ALONE_S]
    turns = len(told)
    stream.cancel()
    schedule.turn()
    assert (left[-1], len(told)) == ("ahead", turns)
    while len(paces) < 2:
        schedule.turn()
    add("one more", short, EventStream())
    while len(paces) < 3:
        schedule.turn()
    assert paces == [ALONE_S, ALONE_S, STALL_S]  # in its first turn already


# Whoever comes and goes leaves nothing behind.


def test_many_joins_and_leaves_leave_no_cache_and_no_thread(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=None) as engine:

        def caches() -> int:
            until(lambda: not replies_of(engine).schedule.busy and not replies_of(engine).open)
            return engine.between(lambda: sum(type(each) is Cache for each in gc.get_objects()))

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
        seen: dict[int, Lane] = {}

        def noted(step: Callable[[Any, list[Lane]], Any]) -> Callable[[Any, list[Lane]], Any]:
            def call(self: Any, lanes: list[Lane]) -> Any:
                widths.append(len(lanes))
                seen.update((id(lane), lane) for lane in lanes)
                return step(self, lanes)

            return call

        original = Decoder.step
        Decoder.step = noted(original)  # type: ignore[method-assign]
        try:
            many = together(engine, PROMPTS, replace(SAMPLED, max_tokens=40))
        finally:
            Decoder.step = original  # type: ignore[method-assign]
        assert max(widths) == len(PROMPTS)
        made = [
            [*prompt, *(id for event in many[number, 0] for id in getattr(event, "ids", ()))]
            for number, prompt in enumerate(PROMPTS)
        ]
        held = sorted((lane.cached_ids for lane in seen.values()), key=len)
        assert [whole[: len(each)] for whole, each in zip(sorted(made, key=len), held, strict=True)] == held
        assert all(len(whole) - len(each) <= 1 for whole, each in zip(sorted(made, key=len), held, strict=True))


# A turn that does not end.


def test_a_turn_is_stuck_once_it_takes_far_longer_than_any_like_it() -> None:
    now_s, found = 0.0, list[float | None]()
    schedule = Schedule(lambda _: None, clock=lambda: now_s)
    lane = SimpleNamespace(note=lambda *_: None, interrupted=lambda: None)

    def take(*seconds: float) -> None:
        nonlocal now_s
        for each in seconds:
            now_s += each
            found.append(schedule.stuck_s(9.0))

    class Reply:
        pace = Pace()

        def events(self) -> ReplyEvents:
            take(60, 1)  # the first piece of a prompt, before anything is known
            yield None
            take(29, 700)  # the next may take ten times as long
            yield lane
            yield lane
            yield lane

        def feed(self, *_: object) -> bool:
            return True

        def live(self) -> None:
            return None

    turns = iter([(60, 1), (8, 3), (600, 20)])

    def decode(lanes: list[Any]) -> list[Decoded]:
        take(*next(turns))
        return [Decoded(lanes[0], 5)]

    schedule.decode = decode
    schedule.add(Seat(lambda _: Reply(), EventStream(), background=False))
    while schedule.turn() is not None:
        pass
    assert found == [None, 61, None, 729, None, 61, None, None, None, 620]
    assert schedule.stuck_s(9.0) is None


@pytest.mark.parametrize("background", [False, True])
def test_a_reply_that_waits_for_others_to_leave_is_passed_by_some_and_not_for_ever(background: bool) -> None:
    """Short ones come without end; a large one has room only where none of them is there."""
    schedule = Schedule(lambda _: None)
    schedule.width = 4
    there, begun, large_at = set[int](), 0, list[int]()

    class Short:
        pace = Pace()

        def __init__(self, number: int) -> None:
            self._number = number

        def events(self) -> ReplyEvents:
            there.add(self._number)
            for _ in range(3):
                yield None
            there.remove(self._number)
            come()

        def live(self) -> None:
            return None

    class Large(Short):
        def events(self) -> ReplyEvents:
            while there:
                yield WAITS
            large_at.append(begun)
            yield None

    def come() -> None:
        nonlocal begun
        begun += 1
        if begun < 200:
            schedule.add(Seat(lambda _, number=begun: Short(number), EventStream(), background=False))

    come()
    come()
    schedule.turn()
    schedule.add(Seat(lambda _: Large(0), EventStream(), background=background))
    while schedule.turn() is not None:
        pass
    assert begun == 201
    assert (large_at[0] <= MOST_PASSED + 6) is not background  # what nobody waits for holds up nobody


def test_a_failure_of_the_schedule_reaches_every_reader(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    single = alone(either, PROMPTS[:1], SAMPLED)
    streams = [either.generate(prompt, Sampling(temperature=0, max_tokens=1500)) for prompt in PROMPTS[:2]]
    for stream in streams:
        until(lambda stream=stream: isinstance(next(stream), TextChunk))

    def fails(*_: Any) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("of the schedule")

    monkeypatch.setattr(Policy, "choose", fails)
    for stream in streams:
        with pytest.raises(ZeroDivisionError, match="of the schedule"):
            within(lambda stream=stream: list(stream))
    assert alone(either, PROMPTS[:1], SAMPLED) == single


class Steps:
    """A reply of three steps, a second each."""

    def __init__(self, clock: Callable[[float], None]) -> None:
        self.pace, self._work = Pace(), clock

    def events(self) -> ReplyEvents:
        for _ in range(3):
            self._work(1.0)
            yield None

    def live(self) -> None:
        return None


@pytest.mark.parametrize(
    ("percent", "rests"), [(100, [0.0, 0.0, 0.0]), (50, [1.5, 1.5, 1.5]), (25, [4.5, 4.5, 4.5]), (1, [148.5] * 3)]
)
def test_the_device_works_a_share_of_the_time_with_what_was_launched_ahead(percent: int, rests: list[float]) -> None:
    now_s, found = 0.0, list[float]()

    def work(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    schedule = Schedule(lambda _: None, clock=lambda: now_s)
    schedule.pacing = Pacing(lambda: percent / 100, settle=lambda: work(0.5))
    reply = Steps(work)
    schedule.add(Seat(lambda _: reply, EventStream(), background=False))
    while (rest_s := schedule.turn()) is not None:
        found.append(rest_s)
        assert reply.pace.within_s <= STALL_S
        assert reply.pace.rests is (percent < 100)
        if rest_s > 1:
            now_s += 1.0
            assert schedule.turn() == pytest.approx(rest_s - 1)  # a call in between cuts nothing short
            rest_s -= 1
        now_s += rest_s
    assert found == pytest.approx(rests)


@pytest.mark.parametrize("comes", ["a reply", "its end"])
def test_a_rest_ends_for_a_reply_that_comes_and_for_one_that_ends_and_is_not_forgotten(comes: str) -> None:
    now_s = 0.0

    def work(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    schedule, stream = Schedule(lambda _: None, clock=lambda: now_s), EventStream()
    schedule.pacing = Pacing(lambda: 0.01, settle=lambda: None)
    schedule.add(Seat(lambda _: Steps(work), stream, background=False))
    assert schedule.turn() == pytest.approx(99)
    if comes == "a reply":
        schedule.add(Seat(lambda _: Steps(work), EventStream(), background=False))
        assert schedule.turn() == pytest.approx(99 - 1 + 99)
    else:
        stream.abandon()
        assert schedule.turn() is None


def test_a_thread_that_rests_is_woken_by_a_reply_its_end_another_pace_and_the_end() -> None:
    worker = Worker("test", at_end=lambda: None)
    replies, steps = ReplyScheduler(worker), list[float]()
    replies.pace(Pacing(lambda: 1e-9, settle=lambda: None))

    def source(_: EventStream) -> Steps:
        return Steps(steps.append)

    streams = [EventStream(), EventStream(), EventStream()]
    replies.open_reply(source, streams[0])
    until(lambda: len(steps) == 1)
    replies.open_reply(source, streams[1])
    until(lambda: len(steps) == 2)
    streams[0].abandon()
    until(lambda: len(replies.open) == 1)
    replies.pace(None)
    until(lambda: not replies.open)
    before = len(steps)
    replies.pace(Pacing(lambda: 1e-9, settle=lambda: None))
    replies.open_reply(source, streams[2])
    until(lambda: len(steps) > before)
    within(lambda: replies.close(lambda: None))
    assert worker.closed
