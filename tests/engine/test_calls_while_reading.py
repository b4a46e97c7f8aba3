"""Whoever reads a reply may ask the engine for anything else meanwhile: nothing waits for ever. Each test has its own deadline."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.deadline import DEADLINE_S, until, within
from tokamac.engine import (
    Engine,
    EngineClosedError,
    Event,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PromptCacheSpec,
    Sampling,
    Send,
    TextChunk,
)
from tokamac.engine.worker import LOOK_AHEAD

GREEDY = Sampling(temperature=0, max_tokens=8)
LONG = Sampling(temperature=0, max_tokens=400)
ENDLESS = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def one_token_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model is so quick that a whole reply fits the look-ahead: here each token is handed over alone, as a slow one's is."""
    monkeypatch.setattr("tokamac.engine.worker.HAND_OVER_S", 0.0)


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    loaded = Engine.load(tiny, prompt_cache=None)
    loaded.tokenizer.eos_ids = frozenset()
    yield loaded
    within(loaded.close)


@pytest.fixture
def rolling(tiny: Path) -> Iterator[Engine]:
    loaded = Engine.load(tiny, kv=KVSpec(window=64, keep=4))
    loaded.tokenizer.eos_ids = frozenset()
    yield loaded
    within(loaded.close)


def parked(engine: Engine) -> None:
    """Wait until the reply that is read is as far ahead as it may be."""
    until(lambda: engine._replies.open[0]._batches.qsize() >= LOOK_AHEAD)


def finish(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


CALLS: dict[str, Callable[[Engine], object]] = {
    "memory": lambda engine: engine.memory(),
    "limits": lambda engine: engine.limits(100),
    "predict": lambda engine: engine.predict(100),
    "price": lambda engine: engine.price([Message("user", "x")]),
    "logprobs": lambda engine: engine.logprobs([5, 6, 7]),
    "between": lambda engine: engine.between(lambda: 1),
    "chat's price": lambda engine: engine.chat().price(Send("x")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", ["bounded", "endless"])
def test_the_loop_that_reads_a_reply_may_call(
    kind: str, call: Callable[[Engine], object], engine: Engine, rolling: Engine
) -> None:
    asked, sampling = (engine, LONG) if kind == "bounded" else (rolling, ENDLESS)

    def read() -> int:
        called = 0
        for event in asked.generate([5, 6, 7], sampling):
            if isinstance(event, TextChunk):
                assert call(asked) is not None
                called += 1
            if called == 3:
                break
        return called

    assert within(read) == 3


def test_a_call_from_the_loop_is_answered_in_the_middle_of_the_reply(engine: Engine) -> None:
    def read() -> int:
        events = engine.generate([5, 6, 7], LONG)
        next(events)
        first = next(event for event in events if isinstance(event, TextChunk))
        assert first.text
        written = engine.between(lambda: engine.live().metrics.generated_tokens)  # type: ignore[union-attr]
        assert finish(events).metrics.generated_tokens == 400
        return written

    # The reply was in progress then: after it, live() is None and the call would have failed.
    assert 1 <= within(read) < 400


def test_calls_do_not_change_what_the_reply_says(engine: Engine) -> None:
    alone = finish(engine.generate([5, 6, 7], LONG)).text

    def read() -> str:
        said = ""
        for event in engine.generate([5, 6, 7], LONG):
            if isinstance(event, TextChunk):
                said += event.text
                if len(said) % 50 == 1:
                    engine.logprobs([8, 9, 10])
                    engine.price([5, 6, 7, 8])
        return said

    assert within(read) == alone


def test_a_reply_that_waits_for_its_reader_lets_calls_of_other_threads_go_first(rolling: Engine) -> None:
    events = rolling.generate([5, 6, 7], ENDLESS)
    next(events)
    parked(rolling)
    assert within(rolling.memory).active > 0
    assert within(lambda: rolling.price([5, 6, 7, 8])).prompt_tokens == 4
    assert rolling._replies.open[0]._batches.qsize() <= LOOK_AHEAD + 1  # and it still waits
    events.close()


def test_another_reply_comes_after_the_one_that_is_half_read_and_both_are_whole(engine: Engine) -> None:
    def read() -> tuple[int, int]:
        first = engine.generate([5, 6, 7], LONG)
        next(first)
        second = finish(engine.chat().send("hi", GREEDY))  # the first rests meanwhile
        return finish(first).metrics.generated_tokens, second.metrics.generated_tokens

    assert within(read) == (400, 8)


def test_replies_may_be_asked_for_in_the_loop_that_reads_one(engine: Engine) -> None:
    def read() -> list[int]:
        counts = []
        for event in engine.generate([5, 6, 7], LONG):
            if isinstance(event, TextChunk) and len(counts) < 3:
                counts.append(finish(engine.chat().send("hi", GREEDY)).metrics.generated_tokens)
        return counts

    assert within(read) == [8, 8, 8]


def test_a_thread_that_reads_a_reply_without_an_end_may_ask_for_others_and_read_on(rolling: Engine) -> None:
    def read() -> list[int]:
        endless = rolling.generate([5, 6, 7], ENDLESS)
        next(endless)
        counts = []
        for _ in range(3):
            counts.append(finish(rolling.generate([5, 6, 8], GREEDY)).metrics.generated_tokens)
            list(rolling.warm([5, 6, 9, 10]))
            assert any(isinstance(next(endless), TextChunk) for _ in range(LOOK_AHEAD + 10))
        endless.close()
        return counts

    assert within(read) == [8, 8, 8]


def test_nobody_waits_for_a_reader_of_an_endless_reply_who_has_paused(rolling: Engine) -> None:
    paused = [rolling.generate([5, 6, first], ENDLESS) for first in (7, 8, 9)]
    for events in paused:
        next(events)
    until(lambda: all(stream._batches.qsize() >= LOOK_AHEAD for stream in rolling._replies.open))
    assert within(lambda: finish(rolling.generate([5, 6, 11], GREEDY))).metrics.generated_tokens == 8
    assert within(rolling.memory).active > 0
    for events in paused:
        assert within(lambda events=events: [next(events) for _ in range(3 * LOOK_AHEAD)])
        events.close()


RESTED: dict[str, tuple[KVSpec, PromptCacheSpec | None]] = {
    "whole": (KVSpec(), PromptCacheSpec(disk=False)),
    "packed": (KVSpec(key_bits=8, value_bits=4, group_size=32), PromptCacheSpec(disk=False)),
    "a window": (KVSpec(window=64, keep=4), PromptCacheSpec(disk=False)),
    "no prompt cache": (KVSpec(), None),
    "a prompt cache too small to keep it": (KVSpec(), PromptCacheSpec(disk=False, memory_bytes=1)),
}


@pytest.mark.parametrize(("kv", "prompt_cache"), RESTED.values(), ids=RESTED)
def test_a_reply_that_rested_says_what_it_says_alone(
    kv: KVSpec, prompt_cache: PromptCacheSpec | None, tiny: Path
) -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=300)  # its caches grow on the way
    with Engine.load(tiny, kv=kv, prompt_cache=prompt_cache) as engine:
        engine.tokenizer.eos_ids = frozenset()
        alone = finish(engine.generate([5, 6, 7], sampling))
        resting = engine.generate([5, 6, 7], sampling)
        next(resting)
        parked(engine)
        for other in ([5, 6, 7, 9, 9], [5, 200, 201]):
            said = within(lambda other=other: finish(engine.generate(other, Sampling(temperature=0, max_tokens=150))))
            assert said.metrics.generated_tokens == 150
        last = within(lambda: finish(resting))
        assert last.text == alone.text
        assert last.metrics.generated_tokens == alone.metrics.generated_tokens
        assert last.metrics.kv_bytes == alone.metrics.kv_bytes


def test_a_reply_that_rests_is_cancelled_without_its_caches(rolling: Engine) -> None:
    resting = rolling.generate([5, 6, 7], ENDLESS)
    next(resting)
    parked(rolling)
    assert within(lambda: finish(rolling.generate([5, 6, 8], GREEDY))).metrics.generated_tokens == 8
    rolling.cancel()
    last = within(lambda: finish(resting))
    assert last.reason == "cancelled"
    assert last.metrics.kv_bytes


def test_a_reply_that_rests_while_another_is_made_may_be_let_go_of(engine: Engine, rolling: Engine) -> None:
    for asked in (engine, rolling):
        resting = asked.generate([5, 6, 7], LONG)
        next(resting)
        parked(asked)
        other = asked.generate([5, 6, 8], LONG)
        next(other)
        resting.close()
        assert within(lambda other=other: finish(other)).metrics.generated_tokens == 400
        assert within(lambda asked=asked: finish(asked.generate([5, 6, 7], GREEDY))).metrics.generated_tokens == 8


def test_a_cancelled_reply_without_an_end_may_be_read_after_another(rolling: Engine) -> None:
    def read() -> tuple[str, int]:
        endless = rolling.generate([5, 6, 7], ENDLESS)
        next(endless)
        parked(rolling)
        rolling.cancel()
        until(lambda: rolling._replies.open[0].ended)
        after = finish(rolling.generate([5, 6, 7], GREEDY)).metrics.generated_tokens
        return finish(endless).reason, after

    assert within(read) == ("cancelled", 8)


def test_cancelling_reaches_a_reply_that_waits_for_its_reader_though_nobody_reads(engine: Engine) -> None:
    events = engine.generate([5, 6, 7], LONG)
    next(events)
    parked(engine)
    engine.cancel()
    until(lambda: engine._replies.open[0].ended)
    assert within(lambda: finish(events)).reason == "cancelled"


def test_closing_ends_a_reply_that_waits_for_its_reader(tiny: Path) -> None:
    engine = Engine.load(tiny, kv=KVSpec(window=64, keep=4), prompt_cache=None)
    engine.tokenizer.eos_ids = frozenset()
    events = engine.generate([5, 6, 7], ENDLESS)
    next(events)
    parked(engine)
    within(engine.close)
    with pytest.raises(EngineClosedError):
        within(lambda: list(events))


def test_an_iterator_that_was_let_go_of_waits_for_nobody(rolling: Engine) -> None:
    events = rolling.generate([5, 6, 7], ENDLESS)
    next(events)
    parked(rolling)
    del events
    gc.collect()
    assert within(lambda: finish(rolling.generate([5, 6, 7], GREEDY))).metrics.generated_tokens == 8


def test_two_readers_on_two_threads_both_get_all(engine: Engine) -> None:
    counts: dict[int, int] = {}

    def read(number: int) -> None:
        called = 0
        for event in engine.generate([5, 6, number], LONG):
            if isinstance(event, TextChunk) and called < 5:
                engine.memory()
                called += 1
            if isinstance(event, Finished):
                counts[number] = event.metrics.generated_tokens

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert counts == {7: 400, 8: 400}


def test_a_reply_rests_at_its_bound_also_while_another_waits(engine: Engine) -> None:
    events = engine.generate([5, 6, 7], LONG)
    next(events)
    parked(engine)
    time.sleep(0.3)
    stream = engine._replies.open[0]
    assert stream._batches.qsize() <= LOOK_AHEAD + 1
    waiting = threading.Thread(target=lambda: list(engine.generate([5, 6, 8], GREEDY)), daemon=True)
    waiting.start()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert stream._batches.qsize() <= LOOK_AHEAD + 1
    assert not stream.ended
    assert finish(events).metrics.generated_tokens == 400


def test_comparing_and_checking_go_on_while_a_reply_is_half_read(rolling: Engine) -> None:
    def read() -> int:
        events = rolling.generate([5, 6, 7], ENDLESS)
        next(events)
        steps = list(rolling.compare_kv([5, 6, 7, 8] * 4, [(8, 8)], KVSpec(group_size=32), depths=(8,)))
        assert list(rolling.check_cache()) == []
        events.close()
        return len(steps)

    assert within(read) > 2


def test_on_the_engines_own_thread_a_call_runs_at_once_and_a_reply_is_refused(engine: Engine) -> None:
    assert within(lambda: engine.between(lambda: engine.between(lambda: engine.memory().active))) > 0
    with pytest.raises(OptionError, match="own thread"):
        within(lambda: engine.between(lambda: list(engine.generate([5, 6], GREEDY))))


def test_a_call_says_what_went_wrong_to_its_caller_and_the_reply_goes_on(engine: Engine) -> None:
    def read() -> int:
        events = engine.generate([5, 6, 7], LONG)
        next(events)
        with pytest.raises(ZeroDivisionError):
            engine.between(lambda: 1 // 0)
        with pytest.raises(OptionError):
            engine.logprobs([10_000])
        return finish(events).metrics.generated_tokens

    assert within(read) == 400


def test_arrays_of_ids_are_read_on_the_callers_thread(engine: Engine) -> None:
    array = mx.array([10, 11, 12])
    assert within(lambda: engine.price([10, 11, 12])).prompt_tokens == 3
    assert engine.price(array).prompt_tokens == 3  # type: ignore[arg-type]
    assert engine.logprobs(array).shape == (3, 272)  # type: ignore[arg-type]
    assert finish(engine.generate(array, GREEDY)).metrics.prompt_tokens == 3  # type: ignore[arg-type]
    assert np.array(engine.logprobs(np.array([10, 11, 12]))).shape == (3, 272)  # type: ignore[arg-type]
