"""Background work: reading ahead while the user writes, counting attachments, and titles."""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest

from tests.app.chat.test_session import DIED, Clock, done, loaded_session
from tests.app.chat.test_session import LOADED as SESSION_LOADED
from tests.app.chat.test_session import METRICS as SESSION_METRICS
from tests.app.chat.test_session import asked as session_asked
from tests.app.conftest import Chat, Start
from tests.engine.helpers import write_model
from tests.engine.text.test_tools import QWEN, SUM, tokenizer
from tests.scripted_engine import SCENARIOS, ScriptedEngine, model_spec
from tests.waiting import PATIENCE_S
from tokamac.app.backend.child import Child
from tokamac.app.backend.client import Outbox
from tokamac.app.backend.engine_client import counter, pricer
from tokamac.app.backend.protocol import (
    AskCount,
    Asker,
    AskPrice,
    Cancel,
    Counted,
    EngineMessage,
    EngineNotice,
    Generate,
    Load,
    Loaded,
    Priced,
    Quit,
    ReplyEvent,
    Request,
    RequestFailed,
    Warm,
    Warmed,
    encode,
)
from tokamac.app.chat import steps
from tokamac.app.chat.attachments import whole
from tokamac.app.chat.background import (
    BEGUN,
    EXCERPT,
    GREEDY,
    IDLE_S,
    LEAST_CHARACTERS,
    READY_TOKENS,
    SYSTEM,
    question,
    title_of,
)
from tokamac.app.chat.conversation import MessageNode, Tree, Turn
from tokamac.app.chat.conversation import Reply as ConversationReply
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Step, Titled, TurnBegun
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment
from tokamac.engine import Engine
from tokamac.engine.errors import ContextError, EngineClosedError
from tokamac.engine.events import Finished, Live, Message, Price, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling, TemplateOptions

# What is read ahead while the user writes: the state machine's part, and the child's with engines that misbehave.

LONG = "a question with many words " * 20
MUCH, LITTLE = Price(900, 800, 0, 2.1), Price(900, READY_TOKENS, 0, 0.1)
LOADED = Loaded(model_spec("guide"))
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


def test_the_same_draft_is_asked_about_once_a_short_one_never(ready: Session) -> None:
    ready.draft_paused(LONG)
    assert ready.draft_paused(f"{LONG} \n") == []
    ready.on_event(Priced("draft", 1, LITTLE))
    assert ready.draft_paused("x" * (LEAST_CHARACTERS - 1)) == []
    assert ready.warmup.price is None


def test_a_draft_that_changes_while_it_is_read_is_read_in_its_place(ready: Session) -> None:
    ready.draft_paused(LONG)
    ready.on_event(Priced("draft", 1, MUCH))
    assert asked(ready.draft_paused(LONG * 2)) == [AskPrice("draft", 3, written(LONG * 2))]
    assert ready.on_event(Warmed(2, LITTLE)) == []
    assert ready.warmup.price == MUCH  # until what stands there now is priced
    assert asked(ready.on_event(Priced("draft", 3, MUCH))) == [Warm(4, written(LONG * 2))]
    ready.draft_paused("")
    assert ready.on_event(Warmed(4, LITTLE)) == []
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

    def warm_ahead(self, messages: Sequence[Message], **_: Any) -> NoReturn:
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
        self.written: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()

    def _write(self, *messages: EngineMessage) -> None:
        for message in messages:
            self.written.put(message)


def replies(engine: ScriptedEngine, *requests: Request) -> list[EngineMessage]:
    """What a child with ``engine`` says to ``requests``, up to a price."""
    outbox = Replies()
    child = Child(lambda *_: (engine, model_spec("fast")), outbox)
    thread = threading.Thread(target=child.run, args=(Lines(Load("x"), *requests, Quit()),))
    thread.start()
    seen: list[EngineMessage] = []
    while not seen or not isinstance(seen[-1], Priced):
        seen.append(outbox.written.get(timeout=PATIENCE_S))
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
        self.free.wait(PATIENCE_S)
        return LITTLE


def test_of_the_prices_that_wait_each_asker_is_told_its_last_one() -> None:
    outbox, engine = Replies(), Held()
    prices = pricer(outbox)
    prices.ask(engine, AskPrice("draft", 1, written("a")))
    assert engine.begun.wait(PATIENCE_S)
    waiting: list[tuple[Asker, int, str]] = [
        ("draft", 2, "c"),
        ("actions", 1, "d"),
        ("draft", 3, "e"),
        ("actions", 2, "f"),
    ]
    for asker, number, text in waiting:
        prices.ask(engine, AskPrice(asker, number, written(text)))
    engine.free.set()
    told = [outbox.written.get(timeout=PATIENCE_S) for _ in range(3)]
    assert told[0] == Priced("draft", 1, LITTLE)
    assert {(each.asker, each.id) for each in told[1:] if isinstance(each, Priced)} == {("draft", 3), ("actions", 2)}
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
    assert not any(isinstance(reply, RequestFailed | EngineNotice) for reply in seen)


# Attachments counted in tokens: the state machine's part, the child's, and the chip over the prompt box.

NOTES, CODE = Attachment("notes.md", "some notes"), Attachment("a.py", "x = 1", "code")


@pytest.fixture
def counting() -> Session:
    return loaded_session()


def counts(steps: Sequence[Step]) -> list[AskCount]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, AskCount)]


def test_each_attachment_is_counted_once_as_it_stands_in_the_prompt(counting: Session) -> None:
    first, second = counts(counting.draft_paused("", (NOTES, CODE)))
    assert [first.text, second.text] == [whole("", (NOTES,)), whole("", (CODE,))]
    assert counting.tokens(NOTES) is None
    counting.on_event(Counted(second.id, 9))
    counting.on_event(Counted(first.id, 12))
    assert (counting.tokens(NOTES), counting.tokens(CODE)) == (12, 9)
    assert counts(counting.draft_paused("and words", (NOTES, CODE))) == []
    counting.submit("and words", (NOTES, CODE))
    assert counting.tokens(NOTES) == 12


def test_what_is_being_counted_is_not_asked_for_again_unless_the_engine_is_another(counting: Session) -> None:
    (asked,) = counts(counting.draft_paused("", (NOTES,)))
    assert counts(counting.draft_paused("x", (NOTES,))) == []
    counting.start()
    counting.on_event(Loaded(model_spec("guide")))
    (again,) = counts(counting.draft_paused("x", (NOTES,)))
    counting.on_event(Counted(asked.id, 5))  # of the engine that is no more
    assert counting.tokens(NOTES) is None
    counting.on_event(Counted(again.id, 6))
    assert counting.tokens(NOTES) == 6


def test_another_model_counts_anew(counting: Session) -> None:
    (asked,) = counts(counting.draft_paused("", (NOTES,)))
    counting.on_event(Counted(asked.id, 12))
    counting.choose(Load("other"))
    assert counting.tokens(NOTES) is None
    assert counts(counting.draft_paused("", (NOTES,))) == []  # nothing can count while it loads
    counting.on_event(Loaded(model_spec("other")))
    assert len(counts(counting.draft_paused("", (NOTES,)))) == 1


def test_what_can_not_be_counted_is_asked_for_once(counting: Session) -> None:
    (asked,) = counts(counting.draft_paused("", (NOTES,)))
    counting.on_event(Counted(asked.id, None))
    assert counting.tokens(NOTES) is None
    assert counts(counting.draft_paused("x", (NOTES,))) == []


class Told(Outbox):
    """An outbox that keeps what is put into it."""

    def __init__(self) -> None:
        self._said: SimpleQueue[EngineMessage] = SimpleQueue()

    def put(self, reply: EngineMessage) -> None:
        self._said.put(reply)

    def next(self) -> EngineMessage:
        return self._said.get(timeout=PATIENCE_S)


class Closed(ScriptedEngine):
    """Was closed before it could count."""

    @property
    def tokenizer(self) -> Any:
        raise EngineClosedError("the engine is closed", "Load it again.")


def test_an_engine_that_was_closed_counts_nothing_and_the_next_question_is_answered() -> None:
    told = Told()
    asked = counter(told)
    asked.ask(Closed(SCENARIOS["fast"]), AskCount(1, "some text"))
    asked.ask(ScriptedEngine(SCENARIOS["fast"]), AskCount(2, "some text"))
    assert {told.next(), told.next()} == {Counted(1, None), Counted(2, 3)}  # each has a thread of its own


def test_of_tools_what_the_template_writes_is_counted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", max_position_embeddings=4096)
    tokenizer(folder, QWEN)
    told = Told()
    with Engine.load(folder, prompt_cache=None) as engine:
        counter(told).ask(engine, AskCount(1, "", (SUM,)))
        prompt, able = [Message("user", "Why?")], engine.tokenizer.using(TemplateOptions(tools=(SUM,)))
        rendered = [len(each.encode(each.render(prompt))) for each in (able, engine.tokenizer)]
        assert told.next() == Counted(1, rendered[0] - rendered[1])
        assert rendered[0] > rendered[1] + 200


def test_where_no_engine_is_loaded_nothing_is_counted() -> None:
    told = Told()
    counter(told).ask(None, AskCount(1, "some text"))
    assert told.next() == Counted(1, None)


async def test_the_chip_tells_characters_then_tokens(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").write_text("word " * 500)
    monkeypatch.chdir(tmp_path)
    tokens = -(-len(whole("", (Attachment("notes.md", "word " * 500, "markdown"),))) // 4)
    async with chat("slow") as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        c.app.view.do("attach", "notes.md")
        await c.until(lambda: "+ notes.md 2,500 characters" in c.screen_text(), "the characters")
        assert c.session.engine.phase is EnginePhase.DECODING
        c.app.chat.perform(c.session.stop())
        await c.until(lambda: f"+ notes.md {tokens:,} tokens" in c.screen_text(), "the tokens")


async def test_a_real_engine_counts_its_tokenizers_tokens(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Why is decode memory-bound? " * 400  # more than the context holds
    (tmp_path / "notes.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    with Engine.load("guide", prompt_cache=None) as engine:
        tokens = len(engine.tokenizer.encode(whole("", (Attachment("notes.md", text.strip("\n"), "markdown"),))))
    async with chat("guide", scripted=False) as c:
        c.app.view.do("attach", "notes.md")
        await c.until(lambda: f"+ notes.md {tokens:,} tokens" in c.screen_text(), "the tokens")


# An attachment that an engine could not count is counted by the next one, though it has the same model.


def asked_recounting(steps: Sequence[Step]) -> list[int]:
    return [step.request.id for step in steps if isinstance(step, Ask) and isinstance(step.request, AskCount)]


def test_what_could_not_be_counted_is_asked_for_again_once_the_model_is_loaded_again() -> None:
    session = loaded_session()
    notes, code = asked_recounting(session.draft_paused("", (NOTES, CODE)))
    session.on_event(Counted(notes, None))
    session.on_event(Counted(code, 7))
    assert asked_recounting(session.draft_paused("x", (NOTES, CODE))) == []
    session.start()
    session.on_event(Loaded(model_spec("guide")))
    assert session.tokens(CODE) == 7
    (again,) = asked_recounting(session.draft_paused("x", (NOTES, CODE)))
    session.on_event(Counted(again, 12))
    assert session.tokens(NOTES) == 12


# A title by the model: asked for when nobody uses the chat, never in the way of a prompt, and only where it is one.

TITLE = "Where decode spends its time"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(clock: Clock, model: str = "org/model", *, prompt_cache: bool = True) -> Session:
    session = Session(Load(model, prompt_cache=prompt_cache), Sampling(), "Be brief.", clock)
    session.start()
    session.on_event(SESSION_LOADED)
    return session


@pytest.fixture
def answered(clock: Clock) -> Session:
    """A session with one whole reply, which nobody has used for a while."""
    session = begun(clock)
    session.submit("Why is decode slow?")
    session.on_event(done(1, "Memory."))
    clock.now += IDLE_S
    return session


def sent(session: Session) -> Generate:
    """Ask for the title, and return how it was asked."""
    (request,) = session_asked(session.request_title())
    assert isinstance(request, Generate)
    return request


def says(request: Generate, text: str, reason: str = "stop") -> ReplyEvent:
    return ReplyEvent(request.id, Finished(reason, f"{BEGUN} {text}", SESSION_METRICS))  # type: ignore[arg-type]


# The state machine ------------------------------------------------------------------------------------------------------


def test_it_is_asked_for_in_the_background_and_told(answered: Session) -> None:
    request = sent(answered)
    assert answered.request_title() == []  # once
    assert request.messages == (*question(answered.turns[0]), Message("assistant", BEGUN))
    assert (request.continues, request.sampling, request.background) == (True, GREEDY, True)
    assert answered.on_event(says(request, TITLE)) == [Titled(TITLE)]
    assert answered.request_title() == []


def test_the_end_of_a_stopped_request_is_not_taken_for_its_second_asking(answered: Session, clock: Clock) -> None:
    first = sent(answered)
    answered.choose(Load("other"))
    answered.on_event(SESSION_LOADED)
    clock.now += IDLE_S
    second = sent(answered)
    assert answered.on_event(says(first, "Another", "cancelled")) == []
    assert answered.on_event(says(second, TITLE)) == [Titled(TITLE)]


def test_nothing_that_is_shown_changes(answered: Session) -> None:
    before = (
        answered.engine.phase,
        answered.progress.metrics,
        answered.progress.live,
        answered.turns,
        answered.engine.memory,
    )
    request = sent(answered)
    assert not answered.engine.busy
    assert answered.on_event(ReplyEvent(request.id, Live(SESSION_METRICS, 7, ()))) == []
    assert answered.on_event(ReplyEvent(request.id, TextChunk(" Where"))) == []
    answered.on_event(says(request, TITLE))
    assert (
        answered.engine.phase,
        answered.progress.metrics,
        answered.progress.live,
        answered.turns,
        answered.engine.memory,
    ) == before


def test_not_before_it_is_idle_for_a_while(answered: Session, clock: Clock) -> None:
    clock.now -= 0.1
    assert answered.request_title() == []
    clock.now += 0.1
    answered.idle.seen()
    clock.now += IDLE_S - 0.1
    assert answered.request_title() == []
    clock.now += 0.1
    assert session_asked(answered.request_title())


def test_it_goes_on_beside_the_reply_to_the_next_prompt(answered: Session) -> None:
    request = sent(answered)
    begun, reply = answered.submit("next")
    assert isinstance(begun, TurnBegun)
    assert isinstance(reply, Ask)
    assert answered.on_event(ReplyEvent(request.id, TextChunk(" Where"))) == []
    assert answered.on_event(says(request, TITLE)) == [Titled(TITLE)]
    assert answered.engine.phase is EnginePhase.PREFILL
    answered.on_event(done(2, "Yes."))
    assert answered.turns[-1].reply is not None


@pytest.mark.parametrize("wish", ["choose", "new_chat", "unload"])
def test_who_leaves_the_chat_or_the_model_stops_it(answered: Session, wish: str) -> None:
    request = sent(answered)
    wishes: dict[str, Callable[[], Any]] = {
        "choose": lambda: answered.choose(Load("other")),
        "new_chat": answered.new_chat,
        "unload": answered.unload,
    }
    assert wishes[wish]()[0] == Ask(Cancel(request.id))
    assert answered.on_event(says(request, TITLE)) == []


def test_nothing_else_does(answered: Session) -> None:
    request = sent(answered)
    steps = [
        *answered.draft_paused("a long draft " * 50),
        *answered.select(answered.turns[0].key),
        *answered.regenerate(),
        *answered.on_event(done(2, "Bandwidth.", "cancelled")),  # so that one whole reply is there, as before
    ]
    assert Ask(Cancel(request.id)) not in steps
    assert not answered.titles.wanted
    assert answered.on_event(says(request, TITLE)) == [Titled(TITLE)]


def test_what_failed_or_ended_the_engine_is_not_asked_again(answered: Session, clock: Clock) -> None:
    request = sent(answered)
    assert answered.on_event(RequestFailed(request.id, "the template refuses a system prompt", "")) == []
    assert answered.engine.phase is EnginePhase.IDLE
    assert answered.request_title() == []
    other = begun(clock)
    other.submit("hi")
    other.on_event(done(1, "ho"))
    clock.now += IDLE_S
    sent(other)
    other.on_event(DIED)
    other.on_event(SESSION_LOADED)
    clock.now += IDLE_S
    assert other.request_title() == []


@pytest.mark.parametrize(("model", "keeps"), [("guide", True), ("org/model", False)])
def test_all_but_the_guide_are_asked(clock: Clock, model: str, keeps: bool) -> None:
    session = begun(clock, model, prompt_cache=keeps)
    session.submit("hi")
    session.on_event(done(1, "ho"))
    clock.now += IDLE_S
    assert session.titles.wanted
    assert bool(session.request_title()) is (model != "guide")


def test_only_the_first_whole_reply_wants_one(clock: Clock) -> None:
    session = begun(clock)
    session.submit("hi")
    session.on_event(done(1, "h", "cancelled"))
    assert not session.titles.wanted
    session.submit("again")
    session.on_event(done(2, "ho"))
    assert session.titles.wanted
    old = Tree()
    old.add(MessageNode(1, None, prompt="hi"))
    old.add(MessageNode(2, 1, reply=ConversationReply("ho")))
    old.go(2)
    session.open(old)
    session.submit("more")
    session.on_event(done(3, "ho"))
    assert not session.titles.wanted


# What is asked, and what is taken ---------------------------------------------------------------------------------------


def test_the_question_is_short_whatever_was_said() -> None:
    turn = Turn("p" * 10_000, ConversationReply("r" * 10_000), attachments=(Attachment("notes.md", "n" * 10_000),))
    system, user = question(turn)
    assert system == Message("system", SYSTEM)
    assert len(user.content) < 2 * EXCERPT + 100
    assert "p" * (EXCERPT - 1) + "…" in user.content
    assert "r" * (EXCERPT - 1) + "…" in user.content


def test_of_an_attachment_alone_its_name_is_told() -> None:
    _, user = question(Turn("", ConversationReply("A list."), attachments=(Attachment("notes.md", "secret"),)))
    assert "notes.md" in user.content
    assert "secret" not in user.content


@pytest.mark.parametrize(
    ("said", "whole", "title"),
    [
        ("Title: Keys and values", True, "Keys and values"),
        ('Title:\n\n "**Keys** and `values`."\nIt is about', False, "Keys and values"),
        ("# Keys & values", True, "Keys & values"),
        ("Title: „Schlüssel und Werte“", True, "Schlüssel und Werte"),
        ("Title: メモリ帯域", True, "メモリ帯域"),
        ("Title: [Keys](http://x)", True, "Keys (http://x)"),
        ("Title: Keys\tand\u2028values", True, "Keys and"),
        ("Title: Why every weight is read for", False, ""),  # it was cut: who knows what was to come
        ("Title:", True, ""),
        ("", True, ""),
        ('Title: "..."', True, ""),
        ("Title: one two three four five six seven eight nine", True, ""),
        ("Title: " + "x" * 61, True, ""),
        ("Title: Keys\x1b]0;mine\x07 and values", True, ""),
        ("Title: Keys\u202eseulav", True, ""),
        ("Title: I'm sorry, I can't do that", True, ""),
        ("Title: Sorry, no title", True, ""),
        ("Title: As an AI I have none", True, ""),
    ],
)
def test_what_of_an_answer_is_a_title(said: str, whole: bool, title: str) -> None:
    assert title_of(said, whole=whole) == title


def test_the_engine_writes_it_and_keeps_the_conversation() -> None:
    said = [Message("user", "Which keys are there?"), Message("assistant", "F1 shows them."), Message("user", "And?")]
    with Engine.load("guide") as engine:
        list(engine.generate(said[:1], Sampling(max_tokens=20)))
        list(engine.warm(said))
        before = engine.price(said)
        asked = question(Turn("Which keys are there?" * 20, ConversationReply("F1 shows them. " * 20)))
        *_, end = engine.generate([*asked, Message("assistant", BEGUN)], GREEDY, continues=True, background=True)
        assert end.text.startswith(BEGUN)
        assert engine.price(said).tokens == before.tokens


# The whole way ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], tuple[str, str, list[str]]]:
    """The newest chat's title, who gave it, and what is said in it."""

    def read() -> tuple[str, str, list[str]]:
        with Store.open(tmp_path / "chats" / "chats.db") as store:
            chat = store.latest()
            return chat.title, chat.title_origin, [message.text for message in store.path(chat.id)]

    return read


async def rested(c: Chat) -> None:
    """As if nobody had used the chat for a while, and the screen looked."""
    await c.phase(EnginePhase.IDLE)
    age(c)
    c.app.view._rest()


def age(c: Chat) -> None:
    """Let the chat have been left alone for a while."""
    c.session.idle._seen_s -= IDLE_S
    c.session.engine.phase_since -= IDLE_S


async def test_an_idle_chat_gets_its_title_and_nothing_else_changes(chat: Start, kept: Any) -> None:
    async with chat("entitles", ready=False) as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("what is slow here?")
        assert kept()[:2] == ("what is slow here?", "words")
        before, metrics = kept()[2], c.session.progress.metrics
        await rested(c)
        await c.until(lambda: kept()[:2] == (TITLE, "model"))
        assert kept()[2] == before
        assert c.session.progress.metrics is metrics
        assert len(c.replies) == 1
        await c.ask("and now?")
        await rested(c)
        assert not c.session.titles.wanted


async def test_who_types_is_not_idle(chat: Start) -> None:
    async with chat("entitles", ready=False) as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        await c.phase(EnginePhase.IDLE)
        age(c)
        await c.pilot.press("a")
        c.app.view._rest()
        assert c.session.titles.wanted
