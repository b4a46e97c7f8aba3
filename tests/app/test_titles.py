"""A title by the model: asked for when nobody uses the chat, never in the way of a prompt, and only where it is one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tests.app.test_session import DIED, LOADED, METRICS, Clock, asked, done
from tokamac.app import settings
from tokamac.app.backend.protocol import Cancel, Failed, Generate, Load, ReplyEvent, Warm, Warmed
from tokamac.app.chat.background import (
    BEGUN,
    EXCERPT,
    GREEDY,
    IDLE_S,
    READY_TOKENS,
    SYSTEM,
    is_ready,
    question,
    title_of,
)
from tokamac.app.chat.conversation import MessageNode, Reply, Tree, Turn
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Titled, TurnBegun
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment
from tokamac.engine import Engine
from tokamac.engine.errors import OptionError
from tokamac.engine.events import Finished, Live, Message, Price, TextChunk
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
READ = Warmed(-1, Price(200, 10, 0, 0.1))
TITLE = "Where decode spends its time"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(clock: Clock, model: str = "org/model", *, prompt_cache: bool = True) -> Session:
    session = Session(Load(model, prompt_cache=prompt_cache), Sampling(), "Be brief.", clock)
    session.start()
    session.on_event(LOADED)
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
    (warm,) = asked(session.request_title())
    assert isinstance(warm, Warm)
    (request,) = asked(session.on_event(replace(READ, id=warm.id)))
    assert isinstance(request, Generate)
    return request


def says(request: Generate, text: str, reason: str = "stop") -> ReplyEvent:
    return ReplyEvent(request.id, Finished(reason, f"{BEGUN} {text}", METRICS))  # type: ignore[arg-type]


# The state machine ------------------------------------------------------------------------------------------------------


def test_it_is_read_ahead_then_asked_then_told(answered: Session) -> None:
    turn = answered.turns[0]
    assert asked(answered.request_title()) == [Warm(-1, question(turn))]
    assert answered.request_title() == []  # once
    (request,) = asked(answered.on_event(READ))
    assert isinstance(request, Generate)
    assert request.messages == (*question(turn), Message("assistant", BEGUN))
    assert (request.continues, request.sampling) == (True, GREEDY)
    assert answered.on_event(says(request, TITLE)) == [Titled(TITLE)]
    assert answered.request_title() == []


def test_the_end_of_a_request_that_was_stopped_is_not_taken_for_its_second_asking(
    answered: Session, clock: Clock
) -> None:
    unread = Price(200, 200, 0, 0.1)
    answered.request_title()
    answered.select(1)  # the title makes way for what can be done with that message
    clock.now += IDLE_S
    answered.idle.seen()
    clock.now += IDLE_S
    assert asked(answered.request_title()) == [Warm(-2, question(answered.turns[0]))]
    assert answered.on_event(Warmed(-1, unread)) == []
    (request,) = asked(answered.on_event(Warmed(-2, Price(200, 10, 0, 0.1))))
    assert isinstance(request, Generate)


def test_nothing_that_is_shown_changes(answered: Session) -> None:
    before = (answered.engine.phase, answered.metrics, answered.live, answered.turns, answered.engine.memory)
    request = sent(answered)
    assert not answered.engine.busy
    assert answered.on_event(ReplyEvent(request.id, Live(METRICS, 7, ()))) == []
    assert answered.on_event(ReplyEvent(request.id, TextChunk(" Where"))) == []
    answered.on_event(says(request, TITLE))
    assert (answered.engine.phase, answered.metrics, answered.live, answered.turns, answered.engine.memory) == before


def test_not_before_it_is_idle_for_a_while(answered: Session, clock: Clock) -> None:
    clock.now -= 0.1
    assert answered.request_title() == []
    clock.now += 0.1
    answered.idle.seen()
    clock.now += IDLE_S - 0.1
    assert answered.request_title() == []
    clock.now += 0.1
    assert asked(answered.request_title())


def test_a_prompt_stops_it_first_of_all(answered: Session, clock: Clock) -> None:
    request = sent(answered)
    first, second, third = answered.submit("next")
    assert first == Ask(Cancel(request.id))
    assert isinstance(second, TurnBegun)
    assert isinstance(third, Ask)
    assert answered.on_event(says(request, TITLE, "cancelled")) == []
    answered.on_event(done(2, "Yes."))
    clock.now += IDLE_S
    assert sent(answered).id != request.id  # when nobody uses the chat again


@pytest.mark.parametrize("wish", ["pause", "point", "regenerate", "choose", "new_chat"])
def test_whatever_the_user_wants_stops_it(answered: Session, wish: str) -> None:
    request = sent(answered)
    wishes: dict[str, Callable[[], Any]] = {
        "pause": lambda: answered.draft_paused("a long draft " * 50),
        "point": lambda: answered.select(answered.turns[0].key),
        "regenerate": answered.regenerate,
        "choose": lambda: answered.choose(Load("other")),
        "new_chat": answered.new_chat,
    }
    assert wishes[wish]()[0] == Ask(Cancel(request.id))
    assert answered.on_event(says(request, TITLE)) == []


def test_a_draft_stops_the_reading(answered: Session) -> None:
    answered.request_title()
    assert answered.draft_paused("a long draft " * 50)
    assert answered.on_event(READ) == []


def test_a_short_draft_that_asks_nothing_does_not_stop_it(answered: Session) -> None:
    request = sent(answered)
    assert answered.draft_paused("ok") == []
    assert answered.on_event(says(request, TITLE)) == [Titled(TITLE)]


@pytest.mark.parametrize("price", [None, Price(200, 190, 0, 9.0)])
def test_what_could_not_be_read_ahead_is_not_asked(answered: Session, price: Price | None) -> None:
    answered.request_title()
    assert answered.on_event(Warmed(-1, price)) == []
    assert answered.request_title() == []


def test_what_failed_or_ended_the_engine_is_not_asked_again(answered: Session, clock: Clock) -> None:
    request = sent(answered)
    assert answered.on_event(Failed(request.id, "the template refuses a system prompt", "")) == []
    assert answered.engine.phase is EnginePhase.IDLE
    assert answered.request_title() == []
    other = begun(clock)
    other.submit("hi")
    other.on_event(done(1, "ho"))
    clock.now += IDLE_S
    sent(other)
    other.on_event(DIED)
    other.on_event(LOADED)
    clock.now += IDLE_S
    assert other.request_title() == []


@pytest.mark.parametrize(("model", "keeps"), [("guide", True), ("org/model", False)])
def test_the_guide_and_an_engine_that_can_not_read_ahead_are_not_asked(clock: Clock, model: str, keeps: bool) -> None:
    session = begun(clock, model, prompt_cache=keeps)
    session.submit("hi")
    session.on_event(done(1, "ho"))
    clock.now += IDLE_S
    assert session.titles.wanted
    assert session.request_title() == []


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
    old.add(MessageNode(2, 1, reply=Reply("ho")))
    old.go(2)
    session.open(old)
    session.submit("more")
    session.on_event(done(3, "ho"))
    assert not session.titles.wanted


# What is asked, and what is taken ---------------------------------------------------------------------------------------


def test_the_question_is_short_whatever_was_said() -> None:
    turn = Turn("p" * 10_000, Reply("r" * 10_000), attachments=(Attachment("notes.md", "n" * 10_000),))
    system, user = question(turn)
    assert system == Message("system", SYSTEM)
    assert len(user.content) < 2 * EXCERPT + 100
    assert "p" * (EXCERPT - 1) + "…" in user.content
    assert "r" * (EXCERPT - 1) + "…" in user.content


def test_of_an_attachment_alone_its_name_is_told() -> None:
    _, user = question(Turn("", Reply("A list."), attachments=(Attachment("notes.md", "secret"),)))
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


def test_the_engine_reads_it_ahead_and_keeps_the_conversation() -> None:
    said = [Message("user", "Which keys are there?"), Message("assistant", "F1 shows them."), Message("user", "And?")]
    with Engine.load("guide") as engine:
        list(engine.generate(said[:1], Sampling(max_tokens=20)))
        list(engine.warm(said))
        before = engine.price(said)
        asked = question(Turn("Which keys are there?" * 20, Reply("F1 shows them. " * 20)))
        assert not is_ready(engine.price(asked))
        engine.warm_ahead(asked)
        assert is_ready(engine.price(asked))
        *_, end = engine.generate([*asked, Message("assistant", BEGUN)], GREEDY, continues=True)
        assert isinstance(end, Finished)
        assert end.text.startswith(BEGUN)
        assert end.metrics.prefill_tokens <= READY_TOKENS
        assert engine.price(said).tokens == before.tokens


# The whole way ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], tuple[str, str, list[str]]]:
    """The newest chat's title, who gave it, and what is said in it."""

    def read() -> tuple[str, str, list[str]]:
        with Store.open(tmp_path / "chats" / "chats.db") as store:
            chat = store.latest()
            assert chat is not None
            return chat.title, chat.title_origin, [message.text for message in store.path(chat.id)]

    return read


async def rested(c: Chat) -> None:
    """As if nobody had used the chat for a while, and the screen looked."""
    await c.phase(EnginePhase.IDLE)
    c.session.idle._seen_s -= IDLE_S
    c.session.engine.phase_since -= IDLE_S
    c.app.chat._rest()


async def test_an_idle_chat_gets_its_title_and_nothing_else_changes(chat: Start, kept: Any) -> None:
    async with chat("entitles") as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("what is slow here?")
        assert kept()[:2] == ("what is slow here?", "words")
        before, metrics = kept()[2], c.session.metrics
        await rested(c)
        await c.until(lambda: kept()[:2] == (TITLE, "model"))
        assert kept()[2] == before
        assert c.session.metrics is metrics
        assert len(c.replies) == 1
        await c.ask("and now?")
        await rested(c)
        assert not c.session.titles.wanted


async def test_a_prompt_ends_a_slow_title_at_once(chat: Start, kept: Any) -> None:
    async with chat("entitles-slowly") as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        await rested(c)
        await c.until(lambda: c.session.titles._id, "the title is being written")
        await c.send("two")
        await c.until(lambda: len(c.session.turns) == 2)
        assert c.session.titles.wanted  # it was being written still
        await c.phase(EnginePhase.IDLE)
        assert kept()[:2] == ("one", "words")
        assert [turn.prompt for turn in c.session.turns] == ["one", "two"]
        assert c.session.turns[1].reply.text == c.session.turns[0].reply.text


async def test_a_title_by_a_person_stays(chat: Start, kept: Any) -> None:
    async with chat("entitles") as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        c.app.chat.do("title", "Mine")
        await rested(c)
        assert c.session.titles.wanted  # nothing was asked
        c.app.chat.do("new_chat")
        await c.ask("two")
        await rested(c)
        c.app.chat.do("title", "Mine too")  # while it is asked
        await c.until(lambda: not c.session.titles.wanted and c.session.titles._state.name == "NONE")
        assert kept()[:2] == ("Mine too", "user")


async def test_a_bad_one_leaves_the_first_words(chat: Start, kept: Any) -> None:
    async with chat("fast") as c:  # goes on and on
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("what is slow here?")
        await rested(c)
        await c.until(lambda: c.session.titles._state.name == "NONE")
        assert c.session.titles._id == -2  # it was asked, after its warm-up
        assert kept()[:2] == ("what is slow here?", "words")


async def test_who_types_is_not_idle(chat: Start) -> None:
    async with chat("entitles") as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        await c.phase(EnginePhase.IDLE)
        c.session.engine.phase_since -= IDLE_S
        c.session.idle._seen_s -= IDLE_S
        await c.pilot.press("a")
        c.app.chat._rest()
        assert c.session.titles.wanted


async def test_the_first_words_stay_where_the_settings_say_so(chat: Start, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('titles = "words"\n')
    async with chat("entitles") as c:
        await c.until(lambda: c.app.chat.recording is not None)
        await c.ask("one")
        await rested(c)
        assert c.session.titles.wanted


# The setting ------------------------------------------------------------------------------------------------------------


def test_the_setting_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    settings.save(path, Settings(titles="words"))
    assert settings.load(path).settings.titles == "words"


@pytest.mark.parametrize("value", ['"nobody"', '""', "true", "1"])
def test_a_setting_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"titles = {value}\n")
    read = settings.load(path)
    assert "titles" in read.warnings[0]
    assert read.settings == Settings()


def test_no_settings_are_made_of_it() -> None:
    with pytest.raises(OptionError, match="nobody"):
        Settings(titles="nobody")
