"""The engine's thread and the stream of a reply: calls while a reply runs, order, deadlines, and its end."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import DEADLINE_S, finish, within
from tests.engine.inside import batches_of, replies_of, runtime_of, worker_of
from tests.waiting import until
from tokamac.engine import (
    DeviceError,
    Engine,
    EngineClosedError,
    Event,
    Failed,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PrefillProgress,
    PromptCacheSpec,
    Sampling,
    Send,
    TextChunk,
    TokamacError,
)
from tokamac.engine.metrics import Recorder, StepCost
from tokamac.engine.schedule.stream import HAND_OVER_S, LOOK_AHEAD, EventStream
from tokamac.engine.worker import Worker

# The engine's small parts alone: worker, stream, recorder.


def test_a_worker_runs_in_order_passes_errors_and_closes_once() -> None:
    ended = threading.Event()
    worker = Worker("test", at_end=ended.set)
    order: list[int] = []
    futures = [worker.submit(lambda i=i: order.append(i)) for i in range(20)]  # type: ignore[misc]
    for future in futures:
        future.result()
    assert order == list(range(20))
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    worker.close()
    worker.close()
    assert ended.is_set()
    with pytest.raises(EngineClosedError):
        worker.submit(lambda: None)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stream_is_ahead_of_a_slow_reader_and_not_of_one_that_left() -> None:
    clock = FakeClock()
    stream = EventStream(clock)
    for _ in range(LOOK_AHEAD):
        assert not stream.ahead
        clock.now += 1  # a slow model: each token is a batch of its own
        stream.put(TextChunk("x"))
    assert stream.ahead
    reader = stream.read()
    next(reader)
    next(reader)
    clock.now += 1
    stream.put(TextChunk("x"))
    assert not stream.ahead
    stream.abandon()
    for _ in range(2):
        stream.put(PrefillProgress(0, 1, 0))
        assert not stream.ahead


def test_text_that_follows_at_once_is_handed_over_together_and_in_order() -> None:
    clock = FakeClock()
    stream = EventStream(clock)
    reader = stream.read()
    stream.put(TextChunk("a"))
    assert next(reader) == TextChunk("a")  # the first is not kept waiting
    stream.put(TextChunk("b"))
    assert batches_of(stream).empty()
    clock.now += 2 * HAND_OVER_S
    stream.put(TextChunk("c"))
    assert [next(reader), next(reader)] == [TextChunk("b"), TextChunk("c")]
    stream.put(TextChunk("d"))
    stream.put(PrefillProgress(1, 2, 0))  # whatever is no text goes at once, after the text before it
    assert [next(reader), next(reader)] == [TextChunk("d"), PrefillProgress(1, 2, 0)]
    stream.put(TextChunk("e"))
    stream.end()
    assert list(reader) == [TextChunk("e")]


def test_a_failure_in_the_engine_is_raised_in_the_reader() -> None:
    stream = EventStream()
    stream.put(TextChunk("x"))
    stream.end(ValueError("no"))
    events = stream.read()
    next(events)
    with pytest.raises(ValueError, match="no"):
        next(events)


@pytest.mark.parametrize("tokens", [2, 5, 20])
def test_fifty_millisecond_steps_read_twenty_tokens_a_second(tokens: int) -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.accept()
    clock.now += 0.2  # tokenizing, waiting
    recorder.begin_prefill(prompt_tokens=120, cached_tokens=20)
    clock.now += 0.5
    for index in range(tokens):
        clock.now += 0.05 if index else 0
        recorder.token()
    metrics = recorder.metrics(StepCost(1_000_000_000, 0, 100.0), kv_bytes=7, peak_memory_bytes=None)
    assert metrics.decode_tps == pytest.approx(20.0)
    assert metrics.ttft_s == pytest.approx(0.7)
    assert metrics.prefill_s == pytest.approx(0.5)
    assert metrics.prefill_tps == pytest.approx(200.0)  # the 20 cached tokens don't count
    assert metrics.total_s == pytest.approx(0.7 + 0.05 * (tokens - 1))
    assert metrics.itl_ms.p50 == pytest.approx(50)
    assert metrics.achieved_gbs == pytest.approx(20.0)
    assert metrics.ceiling_tps == pytest.approx(100.0)


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_is_not_known_is_none(tokens: int) -> None:
    recorder = Recorder(FakeClock())
    recorder.begin_prefill(10, 0)
    for _ in range(tokens):
        recorder.token()
    metrics = recorder.metrics(StepCost(None, None, None), kv_bytes=None, peak_memory_bytes=None)
    unknown = (metrics.decode_tps, metrics.itl_ms, metrics.ceiling_tps, metrics.achieved_gbs, metrics.expected_tps)
    assert unknown == (None,) * 5


# The engine's thread alone: calls that go first, waits that end, and its end when nobody refers to the engine.

GREEDY = Sampling(temperature=0, max_tokens=8)


def test_a_call_that_nobody_waits_for_any_more_is_not_run() -> None:
    worker, hold, ran = Worker("test", at_end=lambda: None), threading.Event(), threading.Event()
    worker.submit(hold.wait)
    future = worker.submit(ran.set)
    assert future.cancel()
    hold.set()
    within(worker.close)
    assert not ran.is_set()


def test_a_thread_that_is_stuck_for_good_holds_up_nobody() -> None:
    worker, stuck, running = Worker("test", at_end=lambda: None), threading.Event(), threading.Event()

    def hang() -> None:
        running.set()
        stuck.wait()

    ran: list[str] = []
    lost: list[TokamacError] = []

    def call(work: Callable[[], None]) -> None:
        try:
            worker.call(work)
        except TokamacError as error:
            lost.append(error)

    callers = [threading.Thread(target=call, args=(work,)) for work in (hang, lambda: ran.append("later"))]
    callers[0].start()
    within(running.wait)
    callers[1].start()
    until(lambda: len(worker._awaited) == 2)
    error = DeviceError("a node is lost", "Start again.")
    worker.fail(error)
    for caller in callers:
        within(caller.join)
    assert lost == [error, error]
    with pytest.raises(DeviceError):
        within(lambda: worker.call(lambda: ran.append("much later")))
    assert not within(worker.close)
    stuck.set()
    until(lambda: not worker._thread.is_alive())  # whose last result goes nowhere
    assert not ran


def test_calls_run_between_two_turns_and_idle_ones_after_the_last() -> None:
    worker, order, go = Worker("test", at_end=lambda: None), list[str](), threading.Event()
    left = iter(range(4))

    def turn() -> float | None:
        if not go.is_set():
            return None
        at = next(left, None)
        if at == 1:
            worker.submit(lambda: order.append("idle"), idle=True)
            worker.submit(lambda: order.append("call"))
        if at is not None:
            order.append(f"turn {at}")
        return None if at is None else 0.0

    worker.turn = turn
    worker.call(go.set)
    until(lambda: "idle" in order)
    within(worker.close)
    assert order == ["turn 0", "turn 1", "call", "turn 2", "turn 3", "idle"]


@pytest.mark.parametrize("ending", ["read", "cancel", "abandon", "before it rests"])
def test_a_stream_that_rests_goes_on_once(ending: str) -> None:
    asked: list[str] = []
    stream = EventStream()
    for done in range(LOOK_AHEAD):
        stream.put(PrefillProgress(done, LOOK_AHEAD, 0))
    assert stream.ahead
    if ending == "before it rests":
        stream.cancel()
    stream.rest(lambda: asked.append("again"))
    events = stream.read()
    if ending == "read":
        for _ in range(LOOK_AHEAD // 2 - 1):
            next(events)
        assert not asked
        next(events)
    elif ending != "before it rests":
        getattr(stream, ending)()
    assert asked == ["again"]
    stream.cancel()
    stream.end()
    list(events)
    assert asked == ["again"]
    assert not stream.ahead


def test_idle_work_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    worker, asked = Worker("test", at_end=lambda: None), threading.Event()

    def fail() -> float:
        asked.set()
        raise BaseException("as foreign code may")

    worker.when_idle = fail
    assert within(lambda: worker.call(lambda: 1)) == 1
    assert asked.wait(DEADLINE_S)
    until(lambda: "idle work" in caplog.text)
    asked.clear()
    assert within(lambda: worker.call(lambda: 2)) == 2
    assert asked.wait(DEADLINE_S)  # and it is tried again, after other work
    within(worker.close)


def test_an_engine_that_nobody_refers_to_closes_itself(tiny: Path) -> None:
    engine = Engine.load(tiny, prompt_cache=None)
    finish(engine.chat().send("hello", GREEDY))
    gone, thread = weakref.ref(engine), worker_of(engine)._thread
    model = weakref.ref(runtime_of(engine).model)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    gc.collect()
    assert model() is None


def test_a_reply_keeps_its_engine(tiny: Path) -> None:
    events = Engine.load(tiny, prompt_cache=None).generate([5, 6, 7], GREEDY)
    gc.collect()
    assert within(lambda: finish(events)).metrics.generated_tokens == 8


@pytest.mark.parametrize("ending", ["del engine", "del events, engine", "pass"])
def test_a_process_ends_cleanly_whatever_it_still_held(tiny: Path, ending: str) -> None:
    code = f"""
from tokamac.engine import Engine, KVSpec
engine = Engine.load({str(tiny)!r}, kv=KVSpec(window=64, keep=4), prompt_cache=None)
events = engine.generate([5, 6, 7])
next(events)
{ending}
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "over", "")


# Reading a reply: all of it in one call, by a task, and ended alone from another thread.

LONG = Sampling(temperature=0, max_tokens=450)
SHORT = Sampling(temperature=0, max_tokens=12)
PROMPT = [10, 20, 30, 40]
ASKED = [Message("system", "Be brief."), Message("user", "Hello")]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


def test_a_whole_reply_in_one_call(engine: Engine) -> None:
    reply, events = engine.ask("Hello", SHORT, system="Be brief."), list(engine.generate(ASKED, SHORT))
    end = finish(iter(events))
    assert (reply.text, reply.reason, reply.thinking) == (end.text, end.reason, end.thinking)
    assert reply.metrics.generated_tokens == 12
    assert reply.ids == tuple(
        token for event in events if isinstance(event, TextChunk | Finished) for token in event.ids
    )
    assert len(reply.ids) == 12
    assert engine.ask(ASKED, SHORT).text == reply.text
    assert len(engine.ask(PROMPT, Sampling(temperature=0, max_tokens=3, logprobs=1)).logprobs) == 3


@pytest.mark.parametrize(
    ("prompt", "system"), [(PROMPT, "Be brief."), (ASKED, "Be brief."), (" ", None), ([], None), ("Hello", 5)]
)
def test_what_can_not_be_asked_is_refused(engine: Engine, prompt: object, system: object) -> None:
    with pytest.raises(OptionError) as caught:
        engine.ask(prompt, system=system)  # type: ignore[arg-type]
    assert caught.value.hint


class Struck(TextChunk):
    """Text during whose handling the user interrupts."""

    def __getattribute__(self, name: str) -> object:
        if name == "ids":
            raise KeyboardInterrupt
        return super().__getattribute__(name)


def test_an_interrupted_question_leaves_no_reply_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "next_batch", lambda _: [Struck("x")])
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.ask(PROMPT, LONG)
    assert caught.traceback  # it holds the frames
    assert replies_of(engine).open == []


def test_one_reply_of_several_is_ended_from_another_thread(engine: Engine) -> None:
    running, waiting, third = (engine.generate(PROMPT, LONG) for _ in range(3))
    next(running)
    ends: dict[str, Finished] = {}

    def read(name: str, events: Iterator[Event]) -> None:
        ends[name] = finish(events)

    threads = [threading.Thread(target=read, args=pair) for pair in (("waiting", waiting), ("third", third))]
    for thread in threads:
        thread.start()
    while len(replies_of(engine).open) < 3:
        time.sleep(0.001)
    waiting.cancel()
    ends["running"] = finish(running)
    for thread in threads:
        thread.join(60)
    assert {name: end.reason for name, end in ends.items()} == {
        "running": "length",
        "waiting": "cancelled",
        "third": "length",
    }
    assert ends["running"].text == ends["third"].text


def test_a_running_reply_is_ended_by_its_handle(engine: Engine) -> None:
    events = engine.generate(PROMPT, LONG)
    for event in events:
        if isinstance(event, TextChunk):
            events.cancel()
    assert event.reason == "cancelled"
    assert (event.metrics.generated_tokens or 0) < 450
    assert engine.ask(PROMPT, SHORT).reason == "length"


def test_a_reply_cancelled_before_it_is_read_ends_at_once(engine: Engine) -> None:
    events = engine.generate(PROMPT, LONG)
    events.cancel()
    end = finish(events)
    assert (end.reason, end.text, end.metrics.generated_tokens) == ("cancelled", "", 0)


def test_a_chats_reply_has_the_handle_too(engine: Engine) -> None:
    chat = engine.chat()
    events = chat.send("Hello", LONG)
    for event in events:
        if isinstance(event, TextChunk):
            events.cancel()
    assert event.reason == "cancelled"
    assert chat.messages[-1].content == event.text


def test_a_reply_that_is_let_go_of_ends(engine: Engine) -> None:
    events = engine.generate(PROMPT, LONG)
    next(events)
    del events
    gc.collect()
    assert replies_of(engine).open == []


async def collected(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


def test_a_task_reads_the_same_events(engine: Engine) -> None:
    def said(events: Iterable[Any]) -> list[tuple[str, tuple[int, ...]]]:
        # Not what was guessed of it: that hangs on how long passes took.
        return [(event.text, event.ids) for event in events if isinstance(event, TextChunk)]

    read = asyncio.run(collected(engine.generate_async(PROMPT, SHORT)))
    assert said(read) == said(engine.generate(PROMPT, SHORT))
    assert isinstance(read[-1], Finished)
    chat = engine.chat()
    assert isinstance(asyncio.run(collected(aiter(chat.send("Hello", SHORT))))[-1], Finished)
    assert len(chat.messages) == 2


def test_the_event_loop_goes_on_meanwhile_and_replies_may_be_several(engine: Engine) -> None:
    async def both() -> tuple[list[Event], list[Event], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        first, second = await asyncio.gather(
            collected(engine.generate_async(PROMPT, SHORT)), collected(engine.generate_async(PROMPT, SHORT))
        )
        beating.cancel()
        return first, second, beats

    first, second, beats = asyncio.run(both())
    assert finish(iter(first)).text == finish(iter(second)).text
    assert beats > 1


def ended(engine: Engine) -> bool:
    """Wait until no reply is open any more."""
    until(lambda: not replies_of(engine).open)
    return True


def test_cancelling_the_task_ends_the_reply(engine: Engine) -> None:
    seen: list[Event] = []

    async def read() -> None:
        async for event in engine.generate_async(PROMPT, LONG):
            seen.append(event)
            if len(seen) == 3:
                asyncio.current_task().cancel()  # type: ignore[union-attr]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(read())
    assert len(seen) == 3
    assert ended(engine)


def test_closing_the_iterator_ends_the_reply(engine: Engine) -> None:
    async def read() -> None:
        events = engine.generate_async(PROMPT, LONG)
        async for _ in events:
            break
        await events.aclose()

    asyncio.run(read())
    assert ended(engine)
    assert engine.ask(PROMPT, SHORT).reason == "length"


def test_errors_reach_the_task(tiny: Path) -> None:
    engine = Engine.load(tiny)
    with pytest.raises(OptionError):
        asyncio.run(collected(engine.generate_async([])))

    async def closed_meanwhile() -> None:
        async for _ in engine.generate_async(PROMPT, LONG):
            engine.close()

    with pytest.raises(EngineClosedError):
        asyncio.run(closed_meanwhile())


# Whoever reads a reply may ask the engine for anything else meanwhile: nothing waits for ever. Each test has its
# own deadline.

MANY_TOKENS = Sampling(temperature=0, max_tokens=400)
ENDLESS = Sampling(temperature=0)


@pytest.fixture
def one_token_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model is so quick that a whole reply fits the look-ahead: here each token is handed over alone, as a slow one's is."""
    monkeypatch.setattr("tokamac.engine.schedule.stream.HAND_OVER_S", 0.0)


@pytest.fixture
def own_engine(tiny: Path) -> Iterator[Engine]:
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
    until(lambda: batches_of(replies_of(engine).open[0]).qsize() >= LOOK_AHEAD)


CALLS: dict[str, Callable[[Engine], object]] = {
    "memory": lambda engine: engine.memory(),
    "limits": lambda engine: engine.limits(100),
    "predict": lambda engine: engine.predict(100),
    "price": lambda engine: engine.price([Message("user", "x")]),
    "logprobs": lambda engine: engine.logprobs([5, 6, 7]),
    "between": lambda engine: engine.between(lambda: 1),
    "chat's price": lambda engine: engine.chat().price(Send("x")),
}


@pytest.mark.usefixtures("one_token_a_batch")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", ["bounded", "endless"])
def test_a_reading_loop_may_call(
    kind: str, call: Callable[[Engine], object], own_engine: Engine, rolling: Engine
) -> None:
    asked, sampling = (own_engine, MANY_TOKENS) if kind == "bounded" else (rolling, ENDLESS)

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


@pytest.mark.usefixtures("one_token_a_batch")
def test_calls_do_not_change_what_the_reply_says(own_engine: Engine) -> None:
    alone = finish(own_engine.generate([5, 6, 7], MANY_TOKENS)).text

    def read() -> str:
        said = ""
        for event in own_engine.generate([5, 6, 7], MANY_TOKENS):
            if isinstance(event, TextChunk):
                said += event.text
                if len(said) % 50 == 1:
                    own_engine.logprobs([8, 9, 10])
                    own_engine.price([5, 6, 7, 8])
        return said

    assert within(read) == alone


@pytest.mark.usefixtures("one_token_a_batch")
def test_a_reply_that_waits_for_its_reader_lets_calls_of_other_threads_go_first(rolling: Engine) -> None:
    events = rolling.generate([5, 6, 7], ENDLESS)
    next(events)
    parked(rolling)
    assert within(rolling.memory).active > 0
    assert within(lambda: rolling.price([5, 6, 7, 8])).prompt_tokens == 4
    assert batches_of(replies_of(rolling).open[0]).qsize() <= LOOK_AHEAD + 1  # and it still waits
    events.close()


@pytest.mark.usefixtures("one_token_a_batch")
def test_another_reply_comes_after_the_one_that_is_half_read_and_both_are_whole(own_engine: Engine) -> None:
    def read() -> tuple[int, int]:
        first = own_engine.generate([5, 6, 7], MANY_TOKENS)
        next(first)
        second = finish(own_engine.chat().send("hi", GREEDY))  # the first rests meanwhile
        return finish(first).metrics.generated_tokens, second.metrics.generated_tokens

    assert within(read) == (400, 8)


@pytest.mark.usefixtures("one_token_a_batch")
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


@pytest.mark.usefixtures("one_token_a_batch")
def test_nobody_waits_for_a_reader_of_an_endless_reply_who_has_paused(rolling: Engine) -> None:
    paused = [rolling.generate([5, 6, first], ENDLESS) for first in (7, 8, 9)]
    for events in paused:
        next(events)
    until(lambda: all(batches_of(stream).qsize() >= LOOK_AHEAD for stream in replies_of(rolling).open))
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


@pytest.mark.usefixtures("one_token_a_batch")
@pytest.mark.parametrize(("kv", "prompt_cache"), RESTED.values(), ids=RESTED)
def test_a_reply_that_rested_says_the_same(kv: KVSpec, prompt_cache: PromptCacheSpec | None, tiny: Path) -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=300)  # its caches grow on the way
    # MLX rounds a pass of several tokens otherwise than one, and when guesses are verified is a matter of time.
    with Engine.load(tiny, kv=kv, prompt_cache=prompt_cache, speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        alone = finish(engine.generate([5, 6, 7], sampling))
        resting = engine.generate([5, 6, 7], sampling)
        next(resting)
        parked(engine)
        for other in ([5, 6, 7, 9, 9], [5, 200, 201]):
            said = within(lambda other=other: finish(engine.generate(other, Sampling(temperature=0, max_tokens=50))))
            assert said.metrics.generated_tokens == 50
        last = within(lambda: finish(resting))
        assert last.text == alone.text
        assert last.metrics.generated_tokens == alone.metrics.generated_tokens
        assert last.metrics.kv_bytes == alone.metrics.kv_bytes


@pytest.mark.usefixtures("one_token_a_batch")
def test_a_reply_that_rests_is_cancelled_without_its_caches(rolling: Engine) -> None:
    resting = rolling.generate([5, 6, 7], ENDLESS)
    next(resting)
    parked(rolling)
    assert within(lambda: finish(rolling.generate([5, 6, 8], GREEDY))).metrics.generated_tokens == 8
    rolling.cancel()
    last = within(lambda: finish(resting))
    assert last.reason == "cancelled"
    assert last.metrics.kv_bytes


@pytest.mark.usefixtures("one_token_a_batch")
def test_a_reply_that_rests_while_another_is_made_may_be_let_go_of(own_engine: Engine, rolling: Engine) -> None:
    for asked in (own_engine, rolling):
        resting = asked.generate([5, 6, 7], MANY_TOKENS)
        next(resting)
        parked(asked)
        other = asked.generate([5, 6, 8], MANY_TOKENS)
        next(other)
        resting.close()
        assert within(lambda other=other: finish(other)).metrics.generated_tokens == 400
        assert within(lambda asked=asked: finish(asked.generate([5, 6, 7], GREEDY))).metrics.generated_tokens == 8


@pytest.mark.usefixtures("one_token_a_batch")
def test_cancelling_reaches_a_reply_that_waits_for_its_reader_though_nobody_reads(own_engine: Engine) -> None:
    events = own_engine.generate([5, 6, 7], MANY_TOKENS)
    next(events)
    parked(own_engine)
    (stream,) = replies_of(own_engine).open
    own_engine.cancel()
    until(lambda: stream.ended)
    assert within(lambda: finish(events)).reason == "cancelled"


@pytest.mark.usefixtures("one_token_a_batch")
def test_closing_ends_a_reply_that_waits_for_its_reader(tiny: Path) -> None:
    engine = Engine.load(tiny, kv=KVSpec(window=64, keep=4), prompt_cache=None)
    engine.tokenizer.eos_ids = frozenset()
    events = engine.generate([5, 6, 7], ENDLESS)
    next(events)
    parked(engine)
    within(engine.close)
    with pytest.raises(EngineClosedError):
        within(lambda: list(events))


@pytest.mark.usefixtures("one_token_a_batch")
def test_a_reply_rests_at_its_bound_also_while_another_waits(own_engine: Engine) -> None:
    events = own_engine.generate([5, 6, 7], MANY_TOKENS)
    next(events)
    parked(own_engine)
    time.sleep(0.3)
    stream = replies_of(own_engine).open[0]
    assert batches_of(stream).qsize() <= LOOK_AHEAD + 1
    waiting = threading.Thread(target=lambda: list(own_engine.generate([5, 6, 8], GREEDY)), daemon=True)
    waiting.start()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert batches_of(stream).qsize() <= LOOK_AHEAD + 1
    assert not stream.ended
    assert finish(events).metrics.generated_tokens == 400


@pytest.mark.usefixtures("one_token_a_batch")
def test_on_the_engines_own_thread_a_call_runs_at_once_and_a_reply_is_refused(own_engine: Engine) -> None:
    assert within(lambda: own_engine.between(lambda: own_engine.between(lambda: own_engine.memory().active))) > 0
    with pytest.raises(OptionError, match="own thread"):
        within(lambda: own_engine.between(lambda: list(own_engine.generate([5, 6], GREEDY))))
    found = within(lambda: own_engine.between(lambda: list(own_engine.generate_many([[5, 6]], GREEDY, n=3))))
    assert [(prompt, sample) for prompt, sample, _ in found] == [(0, 0), (0, 1), (0, 2)]
    assert all(isinstance(end, Failed) and "own thread" in end.error.message for _, _, end in found)


@pytest.mark.usefixtures("one_token_a_batch")
def test_a_call_says_what_went_wrong_to_its_caller_and_the_reply_goes_on(own_engine: Engine) -> None:
    def read() -> int:
        events = own_engine.generate([5, 6, 7], MANY_TOKENS)
        next(events)
        with pytest.raises(ZeroDivisionError):
            own_engine.between(lambda: 1 // 0)
        with pytest.raises(OptionError):
            own_engine.logprobs([10_000])
        return finish(events).metrics.generated_tokens

    assert within(read) == 400
