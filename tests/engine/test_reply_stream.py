"""Reading a reply: all of it in one call, by a task, and ended alone from another thread."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from tokamac.engine import Engine, EngineClosedError, Event, Finished, Message, OptionError, Sampling, TextChunk
from tokamac.engine.worker import EventStream

LONG = Sampling(temperature=0, max_tokens=450)
SHORT = Sampling(temperature=0, max_tokens=12)
PROMPT = [10, 20, 30, 40]
ASKED = [Message("system", "Be brief."), Message("user", "Hello")]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


def last(events: Iterator[Event]) -> Finished:
    *_, end = events
    assert isinstance(end, Finished)
    return end


def test_a_whole_reply_in_one_call(engine: Engine) -> None:
    reply, events = engine.ask("Hello", SHORT, system="Be brief."), list(engine.generate(ASKED, SHORT))
    end = last(iter(events))
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
    monkeypatch.setattr(EventStream, "read", lambda _: iter([Struck("x")]))
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.ask(PROMPT, LONG)
    assert caught.traceback  # it holds the frames
    assert engine._replies.open == []


def test_one_reply_of_several_is_ended_from_another_thread(engine: Engine) -> None:
    running, waiting, third = (engine.generate(PROMPT, LONG) for _ in range(3))
    next(running)
    ends: dict[str, Finished] = {}

    def read(name: str, events: Iterator[Event]) -> None:
        ends[name] = last(events)

    threads = [threading.Thread(target=read, args=pair) for pair in (("waiting", waiting), ("third", third))]
    for thread in threads:
        thread.start()
    while len(engine._replies.open) < 3:
        time.sleep(0.001)
    waiting.cancel()
    ends["running"] = last(running)
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
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    assert (event.metrics.generated_tokens or 0) < 450
    assert engine.ask(PROMPT, SHORT).reason == "length"


def test_a_reply_cancelled_before_it_is_read_ends_at_once(engine: Engine) -> None:
    events = engine.generate(PROMPT, LONG)
    events.cancel()
    end = last(events)
    assert (end.reason, end.text, end.metrics.generated_tokens) == ("cancelled", "", 0)


def test_a_chats_reply_has_the_handle_too(engine: Engine) -> None:
    chat = engine.chat()
    events = chat.send("Hello", LONG)
    for event in events:
        if isinstance(event, TextChunk):
            events.cancel()
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    assert chat.messages[-1].content == event.text


def test_a_reply_that_is_let_go_of_ends(engine: Engine) -> None:
    events = engine.generate(PROMPT, LONG)
    next(events)
    del events
    gc.collect()
    assert engine._replies.open == []


async def collected(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


def test_a_task_reads_the_same_events(engine: Engine) -> None:
    expected = [event for event in engine.generate(PROMPT, SHORT) if isinstance(event, TextChunk)]
    read = asyncio.run(collected(engine.generate_async(PROMPT, SHORT)))
    assert [event for event in read if isinstance(event, TextChunk)] == expected
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
    assert last(iter(first)).text == last(iter(second)).text
    assert beats > 1


def ended(engine: Engine) -> bool:
    """Whether no reply is open any more, soon."""
    deadline = time.monotonic() + 30
    while engine._replies.open and time.monotonic() < deadline:
        time.sleep(0.01)
    return not engine._replies.open


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
