"""What is read ahead while the user writes: the state machine's part, and the child's with engines that misbehave."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.scripted_engine import SCENARIOS, ScriptedEngine
from tokamac.app.backend.child import Child, pricer
from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.protocol import (
    Asker,
    AskPrice,
    EngineNotice,
    Failed,
    Generate,
    Load,
    Loaded,
    ModelInfo,
    Priced,
    Quit,
    Reply,
    ReplyEvent,
    Request,
    Warm,
    Warmed,
    encode,
)
from tokamac.app.chat import steps
from tokamac.app.chat.background import LEAST_CHARACTERS, READY_TOKENS
from tokamac.app.chat.session import Session
from tokamac.engine.errors import ContextError, EngineClosedError
from tokamac.engine.events import Finished, Message, Price, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling

LONG = "a question with many words " * 20
MUCH, LITTLE = Price(900, 800, 0, 2.1), Price(900, READY_TOKENS, 0, 0.1)
LOADED = Loaded(ModelInfo("guide"))
METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)


def loading(system: str = "", *, prompt_cache: bool = True) -> Session:
    session = Session(Load("guide", prompt_cache=prompt_cache), Sampling(), system, lambda: 100.0)
    session.start()
    return session


@pytest.fixture
def ready() -> Session:
    session = loading()
    assert session.on_event(LOADED) == []
    return session


def asked(given: Sequence[steps.Step]) -> list[Request]:
    return [step.request for step in given if isinstance(step, steps.Ask)]


def written(text: str) -> tuple[Message, ...]:
    return (Message("user", text.strip()),)


def test_a_long_draft_is_priced_then_computed_ahead_and_the_end_of_that_is_told(ready: Session) -> None:
    assert asked(ready.draft_paused(LONG)) == [AskPrice("draft", 1, written(LONG))]
    assert asked(ready.on_event(Priced("draft", 1, MUCH))) == [Warm(2, written(LONG))]
    assert ready.warmup.price == MUCH
    assert ready.on_event(Warmed(2, LITTLE)) == []
    assert ready.warmup.price == LITTLE
    assert asked(ready.draft_paused(LONG + "more")) == [AskPrice("draft", 3, written(LONG + "more"))]


@pytest.mark.parametrize("price", [LITTLE, None])
def test_what_is_known_or_too_long_is_not_read(ready: Session, price: Price | None) -> None:
    ready.draft_paused(LONG)
    assert ready.on_event(Priced("draft", 1, price)) == []
    assert ready.warmup.price == price


def test_what_lies_on_disk_is_read(ready: Session) -> None:
    ready.draft_paused(LONG)
    assert asked(ready.on_event(Priced("draft", 1, Price(900, 9, 310_000_000, 0.2)))) == [Warm(2, written(LONG))]


def test_what_is_asked_is_what_would_be_sent(ready: Session) -> None:
    ready.system = "Be brief."
    ready.submit("one")
    ready.on_event(ReplyEvent(1, Finished("stop", "1", METRICS)))
    (price,) = asked(ready.draft_paused(f"\n {LONG}"))
    (send,) = asked(ready.submit(LONG.strip()))
    assert isinstance(price, AskPrice)
    assert isinstance(send, Generate)
    assert price.messages == send.messages


def test_the_same_draft_is_asked_about_once_a_short_one_never(ready: Session) -> None:
    ready.draft_paused(LONG)
    assert ready.draft_paused(f"{LONG} \n") == []
    ready.on_event(Priced("draft", 1, LITTLE))
    assert ready.draft_paused("x" * (LEAST_CHARACTERS - 1)) == []
    assert ready.warmup.price is None


def test_a_draft_that_changes_while_it_is_read_is_read_at_once(ready: Session) -> None:
    ready.draft_paused(LONG)
    ready.on_event(Priced("draft", 1, MUCH))
    assert asked(ready.draft_paused(LONG * 2)) == [Warm(3, written(LONG * 2))]
    assert ready.on_event(Warmed(2, LITTLE)) == []
    assert ready.warmup.price == MUCH  # until what stands there now is computed
    ready.draft_paused("")
    assert ready.on_event(Warmed(3, LITTLE)) == []
    assert ready.warmup.price is None


def test_a_draft_whose_computing_was_ended_early_has_no_price(ready: Session) -> None:
    ready.draft_paused(LONG)
    ready.on_event(Priced("draft", 1, MUCH))
    assert ready.on_event(Warmed(2, None)) == []
    assert ready.warmup.price is None
    assert asked(ready.draft_paused(LONG * 2)) == [AskPrice("draft", 3, written(LONG * 2))]


def test_nothing_is_read_ahead_while_the_engine_is_busy(ready: Session) -> None:
    assert loading().draft_paused(LONG) == []
    ready.draft_paused(LONG)
    ready.on_event(Priced("draft", 1, LITTLE))
    ready.submit("one")
    assert ready.warmup.price is None
    assert ready.draft_paused(LONG) == []
    assert ready.on_event(Priced("draft", 1, MUCH)) == []
    ready.on_event(ReplyEvent(1, Finished("stop", "1", METRICS)))
    assert len(asked(ready.draft_paused(LONG))) == 1


def test_a_new_model_reads_the_conversation_there_is() -> None:
    session = loading("Be brief.")
    known = (Message("system", "Be brief."), Message("user", ""))
    assert asked(session.on_event(LOADED)) == [Warm(1, known)]
    assert session.on_event(Warmed(1, MUCH)) == []
    assert session.warmup.price is None  # nothing is written yet
    session.submit("one")
    session.on_event(ReplyEvent(1, Finished("stop", "1", METRICS)))
    session.choose(Load("other"))
    known = (Message("system", "Be brief."), Message("user", "one"), Message("assistant", "1"), Message("user", ""))
    assert asked(session.on_event(LOADED)) == [Warm(2, known)]


def test_a_prompt_that_waits_for_the_model_goes_first() -> None:
    session = loading("Be brief.")
    session.submit("early")
    assert [type(request) for request in asked(session.on_event(LOADED))] == [Generate]


def test_without_a_prompt_cache_nothing_is_asked() -> None:
    session = loading("Be brief.", prompt_cache=False)
    assert session.on_event(LOADED) == []
    assert session.draft_paused(LONG) == []


def test_a_notice_is_told_once(ready: Session) -> None:
    assert ready.on_event(EngineNotice("full")) == [steps.Notice("full", "warning")]
    ready.choose(Load("other"))
    assert ready.on_event(EngineNotice("full")) == []
    assert ready.on_event(EngineNotice("read-only")) == [steps.Notice("read-only", "warning")]


# The child -------------------------------------------------------------------------------------------------------------------


class Lines:
    """A stdin that never ends: where it does, the child ends its process, which here is the test's."""

    def __init__(self, *requests: Request) -> None:
        self._lines = [encode(request) for request in requests]

    def readline(self, _: int) -> bytes:
        if not self._lines:
            threading.Event().wait()
        return self._lines.pop(0)


class Broken(ScriptedEngine):
    """An engine that fails at whatever is not a reply; a price it tells after the reply alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SCENARIOS["fast"])
        self._error = error
        self._free = threading.Event()

    def warm_ahead(self, messages: Sequence[Message], **_: Any) -> None:
        raise self._error

    def price(self, prompt: Sequence[Message], **_: Any) -> Price:
        self._free.wait()
        raise self._error

    def close(self) -> None:
        self._free.set()


class Replies(Outbox):
    """An outbox that keeps what it would write."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.written: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def _write(self, reply: Reply) -> None:
        self.written.put(reply)


def replies(engine: ScriptedEngine, *requests: Request) -> list[Reply]:
    """What a child with ``engine`` says to ``requests``, up to a price."""
    outbox = Replies()
    child = Child(lambda *_: (engine, ModelInfo("fast")), outbox)
    thread = threading.Thread(target=child.run, args=(Lines(Load("x"), *requests, Quit()),))
    thread.start()
    seen: list[Reply] = []
    while not seen or not isinstance(seen[-1], Priced):
        seen.append(outbox.written.get(timeout=60))
    thread.join()
    return seen


class Held(ScriptedEngine):
    """An engine that tells a price once it is let, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(SCENARIOS["fast"])
        self.asked: list[str] = []
        self.begun, self.free = threading.Event(), threading.Event()

    def price(self, prompt: Sequence[Message], **_: Any) -> Price:
        self.asked.append(prompt[-1].content)
        self.begun.set()
        self.free.wait(60)
        return LITTLE


def test_of_the_prices_that_wait_each_asker_is_told_its_last_one() -> None:
    outbox, engine = Replies(), Held()
    prices = pricer(outbox)
    prices.ask(engine, AskPrice("draft", 1, written("a")))
    assert engine.begun.wait(60)
    waiting: list[tuple[Asker, int, str]] = [
        ("draft", 2, "c"),
        ("actions", 1, "d"),
        ("draft", 3, "e"),
        ("actions", 2, "f"),
    ]
    for asker, number, text in waiting:
        prices.ask(engine, AskPrice(asker, number, written(text)))
    engine.free.set()
    told = [outbox.written.get(timeout=60) for _ in range(3)]
    assert told[0] == Priced("draft", 1, LITTLE)
    assert {(each.asker, each.id) for each in told[1:] if isinstance(each, Priced)} == {
        ("draft", 3),
        ("actions", 2),
    }
    assert sorted(engine.asked) == ["a", "e", "f"]


@pytest.mark.parametrize("error", [EngineClosedError("closed", ""), ContextError("too long", ""), RuntimeError("bug")])
def test_what_fails_aside_is_not_told_and_delays_nothing(error: Exception) -> None:
    messages = written(LONG)
    *seen, last = replies(Broken(error), AskPrice("draft", 7, messages), Warm(3, messages), Generate(1, messages))
    assert last == Priced("draft", 7, None)
    events = [reply.event for reply in seen if isinstance(reply, ReplyEvent)]
    assert any(isinstance(event, TextChunk) for event in events)
    assert isinstance(events[-1], Finished)
    assert [reply for reply in seen if isinstance(reply, Warmed)] == [Warmed(3, None)]
    assert not any(isinstance(reply, Failed | EngineNotice) for reply in seen)
