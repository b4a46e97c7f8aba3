"""What is read ahead while the user writes: the state machine's part, and the child's with engines that misbehave."""

import queue
import threading
from collections.abc import Sequence

import pytest

from tokamac.app.backend.child import Child, pricer
from tokamac.app.backend.outbox import Outbox
from tokamac.app.backend.protocol import (
    Asker,
    AskPrice,
    Done,
    Failed,
    Load,
    Loaded,
    ModelInfo,
    Notice,
    Priced,
    Quit,
    Reply,
    Request,
    Send,
    Text,
    Warm,
    encode,
)
from tokamac.app.backend.scripted import SCENARIOS, ScriptedEngine
from tokamac.app.chat import steps
from tokamac.app.chat.background import LEAST_CHARACTERS, READY_TOKENS
from tokamac.app.chat.session import Session
from tokamac.engine.errors import ContextError, EngineClosedError
from tokamac.engine.events import Message, Price
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling, TemplateOptions

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


def test_a_long_draft_is_priced_then_read_then_priced_again(ready: Session) -> None:
    assert asked(ready.pause(LONG)) == [AskPrice("draft", 1, written(LONG))]
    assert asked(ready.on_event(Priced("draft", 1, MUCH))) == [Warm(written(LONG)), AskPrice("draft", 2, written(LONG))]
    assert ready.ahead.price == MUCH
    assert ready.on_event(Priced("draft", 2, LITTLE)) == []
    assert ready.ahead.price == LITTLE
    assert asked(ready.pause(LONG + "more")) == [AskPrice("draft", 3, written(LONG + "more"))]


@pytest.mark.parametrize("price", [LITTLE, None])
def test_what_is_known_or_too_long_is_not_read(ready: Session, price: Price | None) -> None:
    ready.pause(LONG)
    assert ready.on_event(Priced("draft", 1, price)) == []
    assert ready.ahead.price == price


def test_what_lies_on_disk_is_read(ready: Session) -> None:
    ready.pause(LONG)
    assert Warm(written(LONG)) in asked(ready.on_event(Priced("draft", 1, Price(900, 9, 310_000_000, 0.2))))


def test_what_is_asked_is_what_would_be_sent(ready: Session) -> None:
    ready.system = "Be brief."
    ready.submit("one")
    ready.on_event(Done(1, "stop", "1", "", METRICS))
    (price,) = asked(ready.pause(f"\n {LONG}"))
    (send,) = asked(ready.submit(LONG.strip()))
    assert isinstance(price, AskPrice)
    assert isinstance(send, Send)
    assert price.messages == send.messages


def test_the_same_draft_is_asked_about_once_a_short_one_never(ready: Session) -> None:
    ready.pause(LONG)
    assert ready.pause(f"{LONG} \n") == []
    ready.on_event(Priced("draft", 1, LITTLE))
    assert ready.pause("x" * (LEAST_CHARACTERS - 1)) == []
    assert ready.ahead.price is None


def test_a_draft_that_changes_while_it_is_read_is_read_at_once(ready: Session) -> None:
    ready.pause(LONG)
    ready.on_event(Priced("draft", 1, MUCH))
    assert asked(ready.pause(LONG * 2)) == [Warm(written(LONG * 2)), AskPrice("draft", 3, written(LONG * 2))]
    assert ready.on_event(Priced("draft", 2, LITTLE)) == []
    assert ready.ahead.price == MUCH  # until the price of what stands there now has come
    ready.pause("")
    assert ready.on_event(Priced("draft", 3, LITTLE)) == []
    assert ready.ahead.price is None


def test_nothing_is_read_ahead_while_the_engine_is_busy(ready: Session) -> None:
    assert loading().pause(LONG) == []
    ready.pause(LONG)
    ready.on_event(Priced("draft", 1, LITTLE))
    ready.submit("one")
    assert ready.ahead.price is None
    assert ready.pause(LONG) == []
    assert ready.on_event(Priced("draft", 1, MUCH)) == []
    ready.on_event(Done(1, "stop", "1", "", METRICS))
    assert len(asked(ready.pause(LONG))) == 1


def test_a_new_model_reads_the_conversation_there_is() -> None:
    session = loading("Be brief.")
    known = (Message("system", "Be brief."), Message("user", ""))
    assert asked(session.on_event(LOADED)) == [Warm(known), AskPrice("draft", 1, known)]
    assert session.on_event(Priced("draft", 1, MUCH)) == []
    assert session.ahead.price is None  # nothing is written yet
    session.submit("one")
    session.on_event(Done(1, "stop", "1", "", METRICS))
    session.choose(Load("other"))
    known = (Message("system", "Be brief."), Message("user", "one"), Message("assistant", "1"), Message("user", ""))
    assert asked(session.on_event(LOADED)) == [Warm(known), AskPrice("draft", 2, known)]


def test_a_prompt_that_waits_for_the_model_goes_first() -> None:
    session = loading("Be brief.")
    session.submit("early")
    assert [type(request) for request in asked(session.on_event(LOADED))] == [Send]


def test_without_a_prompt_cache_nothing_is_asked() -> None:
    session = loading("Be brief.", prompt_cache=False)
    assert session.on_event(LOADED) == []
    assert session.pause(LONG) == []


def test_a_notice_is_told_once(ready: Session) -> None:
    assert ready.on_event(Notice("full")) == [steps.Notice("full", "warning")]
    ready.choose(Load("other"))
    assert ready.on_event(Notice("full")) == []
    assert ready.on_event(Notice("read-only")) == [steps.Notice("read-only", "warning")]


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
        super().__init__("fast", SCENARIOS["fast"])
        self._error = error
        self._free = threading.Event()

    def warm(self, messages: Sequence[Message], template: TemplateOptions = TemplateOptions()) -> None:  # noqa: B008
        raise self._error

    def price(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        template: TemplateOptions = TemplateOptions(),  # noqa: B008
    ) -> Price:
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
    child = Child(lambda *_: engine, outbox)
    thread = threading.Thread(target=child.run, args=(Lines(Load("x"), *requests, Quit()),))
    thread.start()
    seen: list[Reply] = []
    while not seen or not isinstance(seen[-1], Priced):
        seen.append(outbox.written.get(timeout=60))
    thread.join()
    return seen


class Held(ScriptedEngine):
    """An engine that tells a price once it is let; how many it was asked for is the price."""

    def __init__(self) -> None:
        super().__init__("fast", SCENARIOS["fast"])
        self.asked: list[str] = []
        self.begun, self.free = threading.Event(), threading.Event()

    def price(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        template: TemplateOptions = TemplateOptions(),  # noqa: B008
    ) -> Price:
        self.asked.append(messages[-1].content)
        self.begun.set()
        self.free.wait(60)
        return LITTLE


def test_of_the_prices_that_wait_each_asker_is_told_its_last_one() -> None:
    outbox, engine = Replies(), Held()
    prices = pricer(outbox)
    prices.ask(engine, AskPrice("draft", 1, written("a")))
    assert engine.begun.wait(60)
    waiting: list[tuple[Asker, int, str]] = [
        ("title", 1, "b"),
        ("draft", 2, "c"),
        ("actions", 1, "d"),
        ("draft", 3, "e"),
        ("actions", 2, "f"),
    ]
    for asker, number, text in waiting:
        prices.ask(engine, AskPrice(asker, number, written(text)))
    engine.free.set()
    told = [outbox.written.get(timeout=60) for _ in range(4)]
    assert told[0] == Priced("draft", 1, LITTLE)
    assert {(each.asker, each.id) for each in told[1:] if isinstance(each, Priced)} == {
        ("title", 1),
        ("draft", 3),
        ("actions", 2),
    }
    assert sorted(engine.asked) == ["a", "b", "e", "f"]


@pytest.mark.parametrize("error", [EngineClosedError("closed", ""), ContextError("too long", ""), RuntimeError("bug")])
def test_what_fails_aside_is_not_told_and_delays_nothing(error: Exception) -> None:
    messages = written(LONG)
    *seen, last = replies(Broken(error), AskPrice("draft", 7, messages), Warm(messages), Send(1, messages))
    assert last == Priced("draft", 7, None)
    assert any(isinstance(reply, Text) for reply in seen)
    assert any(isinstance(reply, Done) for reply in seen)
    assert not any(isinstance(reply, Failed | Notice) for reply in seen)
