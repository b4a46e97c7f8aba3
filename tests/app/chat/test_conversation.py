"""Conversations in every shape: continued replies, later system messages, unpaired turns, and thinking."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.app.chat.test_session import METRICS, done, kinds, loaded_session
from tests.app.chat.test_session import asked as session_asked
from tests.app.conftest import Chat, Start
from tests.scripted_engine import SCENARIOS, model_spec
from tests.tiny import TEMPLATE, make_tiny
from tokamac.app.backend.child import load_engine
from tokamac.app.backend.protocol import (
    AskPrice,
    Cancel,
    Generate,
    Load,
    Loaded,
    Priced,
    ReplyEvent,
    Warm,
    decode_request,
    encode,
)
from tokamac.app.chat.background import questions
from tokamac.app.chat.conversation import MessageNode, Reply, Tree, Turn
from tokamac.app.chat.preferences import chosen, sentences, state, supported
from tokamac.app.chat.recording import measured
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, Moved, Notice, Step, TurnBegun
from tokamac.app.export import entries
from tokamac.app.plain.view import last_turn
from tokamac.app.settings import Settings, dumps, load
from tokamac.app.store.export import to_json
from tokamac.app.store.store import Store
from tokamac.app.tui.markdown.turns import ReplyMessage, SystemMessage, UserMessage
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.engine.errors import OptionError
from tokamac.engine.events import Finished, Message, ModelSpec, Price, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling, TemplateOptions

# Going on with a reply that was cut: a copy beside it that begins with what was said, in the session, the store and
# the chat.


@pytest.fixture
def ready() -> Session:
    return loaded_session(system="Be brief.")


def sent(steps: list[Step]) -> Generate:
    (request,) = session_asked(steps)
    assert isinstance(request, Generate)
    return request


def said(steps: list[Step]) -> str:
    return " ".join(step.text for step in steps if isinstance(step, Notice))


def test_a_reply_that_was_cut_goes_on_in_a_copy_that_begins_with_it(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "the beginn", "length"))
    steps = ready.continue_reply()
    assert kinds(steps) == [TurnBegun, Ask]
    assert sent(steps) == Generate(
        2,
        (Message("system", "Be brief."), Message("user", "one"), Message("assistant", "the beginn")),
        Sampling(),
        continues=True,
    )
    assert ready.conversation.partial.text == "the beginn"
    ready.on_event(ReplyEvent(2, TextChunk("ing")))
    assert ready.conversation.partial.text == "the beginning"
    ready.on_event(done(2, "the beginning"))
    (turn,) = ready.turns
    assert (turn.reply_place, turn.reply.text if turn.reply else "") == ((2, 2), "the beginning")
    assert ready.conversation.tree.nodes[2].reply == Reply(
        "the beginn", ending="length", model="guide", metrics=ready.progress.metrics
    )


def test_what_was_lost_keeps_what_it_began_with(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "so far", "cancelled"))
    ready.continue_reply()
    ready.on_event(ReplyEvent(2, TextChunk(" and")))
    assert [type(request) for request in session_asked(ready.stop())] == [Cancel]
    ready.open(Tree())
    ready.submit("two")
    assert ready.conversation.partial.text == ""


def test_thinking_goes_on_and_its_time_is_added_up(ready: Session) -> None:
    session = ready
    session.on_event(Loaded(model_spec("guide", thinks=True)))
    session.engine.info = model_spec("guide", thinks=True)
    session.submit("one")
    session.on_event(ReplyEvent(1, TextChunk("hm", "thinking")))
    session._clock.now += 2  # type: ignore[attr-defined]
    session.stop()
    ended = done(1, "", "cancelled")
    session.on_event(ReplyEvent(1, TextChunk("", "thinking")))
    steps = session.on_event(ReplyEvent(1, replace(ended.event, thinking="hm")))
    assert kinds(steps)
    assert session.turns[-1].reply == Reply("", "hm", 2.0, ending="cancelled", model="guide", metrics=METRICS)
    session.continue_reply()
    session.on_event(ReplyEvent(2, TextChunk(" yes", "thinking")))
    session._clock.now += 3  # type: ignore[attr-defined]
    session.on_event(ReplyEvent(2, TextChunk("so", "answer")))
    assert session.conversation.partial == Reply("so", "hm yes", 5.0)


@pytest.mark.parametrize(
    ("reply", "why"),
    [(Reply("all of it"), "complete"), (Reply(""), "complete"), (Reply("", "hm", ending="length"), "does not think")],
)
def test_what_can_not_be_continued_is_said_and_nothing_is_sent(ready: Session, reply: Reply, why: str) -> None:
    tree = Tree()
    tree.end(tree.answer(tree.ask("one", None).key).key, reply)
    ready.open(tree)
    steps = ready.continue_reply()
    assert why in said(steps)
    assert kinds(steps) == [Notice]
    assert ready.engine.phase is EnginePhase.IDLE


@pytest.mark.parametrize(
    "reply", [None, Reply("", ending="cancelled"), Reply("", ending="failed"), Reply("\ufffd", ending="length")]
)
def test_a_prompt_that_was_never_answered_is_answered(ready: Session, reply: Reply | None) -> None:
    tree = Tree()
    tree.end(tree.answer(tree.ask("zero", None).key).key, Reply("cut h", ending="length"))
    asked_last = tree.ask("one", tree.head).key
    if reply is not None:
        tree.end(tree.answer(asked_last).key, reply)
    ready.open(tree)
    steps = ready.continue_reply()
    assert kinds(steps) == [TurnBegun, Ask]
    send = sent(steps)
    assert (send.continues, send.messages[-1]) == (False, Message("user", "one"))
    ready.on_event(done(send.id, "one it is"))
    assert [turn.prompt for turn in ready.turns] == ["zero", "one"]
    assert ready.turns[-1].reply.text == "one it is"


def test_without_a_reply_there_is_nothing_to_go_on_with(ready: Session) -> None:
    assert "no reply" in said(ready.continue_reply())


def test_an_earlier_reply_goes_on_where_it_stands(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "first", "length"))
    ready.submit("two")
    ready.on_event(done(2, "second"))
    for key in (1, 2):  # the prompt, or its reply
        steps = ready.continue_reply(key)
        assert kinds(steps) == [Moved, TurnBegun, Ask]
        assert sent(steps).messages[-1] == Message("assistant", "first")
        ready.on_event(done(sent(steps).id, "first and more"))
        ready.show_path(2)


def test_pointing_at_a_message_asks_what_each_action_would_take_one_after_the_other(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "cut he", "length"))
    known = []
    (question,) = session_asked(ready.select(2))
    while isinstance(question, AskPrice):
        known.append((question.messages[-1].role, question.messages[-1].content, question.continues))
        requests = session_asked(ready.on_event(Priced("actions", question.id, Price(9, 1, 0, 0.01))))
        question = requests[0] if requests else None  # type: ignore[assignment]
    assert known == [
        ("user", "one", False),
        ("assistant", "cut he", True),
        ("user", "~ one", False),
        ("user", "", False),
    ]
    assert [each.question.id for each in ready.prices.known] == ["again", "continue", "edit", "fork"]
    ready.select(None)
    assert not ready.prices.known


def test_a_price_of_a_message_that_is_not_pointed_at_any_more_is_forgotten(ready: Session) -> None:
    ready.submit("one")
    ready.on_event(done(1, "whole"))
    (first,) = session_asked(ready.select(2))
    (second,) = session_asked(ready.select(1))
    assert isinstance(first, AskPrice)
    assert isinstance(second, AskPrice)
    assert not ready.on_event(Priced("actions", first.id, Price(1, 1, 0, None)))
    assert not ready.prices.known
    ready.on_event(Priced("actions", second.id, None))
    ready.on_event(Priced("actions", second.id + 1, Price(3, 2, 0, None)))
    assert [each.question.id for each in ready.prices.known] == ["edit"]  # what has no price is left out


async def test_a_stopped_reply_goes_on_by_g_and_both_versions_are_kept(chat: Start, tmp_path: Any) -> None:
    whole = SCENARIOS["fast"].answer
    cut = Sampling(max_tokens=12)
    async with chat("fast", sampling=cut) as c:
        await c.ask("Why?")
        begun = c.session.turns[-1].reply
        assert begun.ending == "length"
        await c.pilot.press("tab")
        await c.until(lambda: re.search("continue: |nothing to re-read", c.screen_text()), "prices")
        c.session.sampling = Sampling()
        await c.pilot.press("g", "enter")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (2, 2))
        assert c.session.turns[-1].reply.text == whole
        assert "Decode reads" in c.shown(c.replies[-1])
        await c.pilot.press("tab", "[")  # the box has had the keys since
        await c.until(lambda: c.session.turns[-1].reply_place == (1, 2))
        await c.send("/continue")
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].reply_place == (3, 3))
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        latest = store.latest()
        texts = [message.text for message in store.archive(latest.id).messages if message.role == "assistant"]
    assert texts == [begun.text, whole, whole]


async def test_what_is_continued_is_stored_with_its_beginning_before_new_text(chat: Start, tmp_path: Any) -> None:
    async with chat("slow", sampling=Sampling(max_tokens=2)) as c:
        await c.ask("Why?")
        c.session.sampling = Sampling()
        await c.send("/continue")
        await c.until(lambda: c.session.engine.replying)
        with Store.open(tmp_path / "chats" / "chats.db") as other:
            latest = other.latest()
            *_, stored = other.archive(latest.id).messages
        assert stored.text.startswith("Decode r")
        assert stored.state == "partial"


# System messages in the middle of a conversation: sent where a template takes them, or said not to be.

Said = tuple[str, str]
MIDDLE = (("user", "hi"), ("assistant", "hello"), ("system", "shout"), ("user", "why?"), ("assistant", "SO"))
MARKDOWN = (
    "## User\n\nhi\n\n## Assistant\n\nhello\n\n## System\n\nshout\x1b[2J\n\n## User\n\nwhy?\n\n## Assistant\n\nSO\n"
)


def tree(*said: Said) -> Tree:
    made = Tree()
    for key, (role, text) in enumerate(said, 1):
        match role:
            case "user":
                made.add(MessageNode(key, made.head, prompt=text))
            case "system":
                made.add(MessageNode(key, made.head, system=text))
            case _:
                made.add(MessageNode(key, made.head, reply=Reply(text, ending="length")))
    return made


def session(*said: Said, later_system: bool = False) -> Session:
    held = loaded_session(system="Be brief.", later_system=later_system)
    held.open(tree(*said))
    return held


def roles(steps: list[Step]) -> list[Said]:
    (send,) = [request for request in session_asked(steps) if isinstance(request, Generate)]
    return [(message.role, message.content) for message in send.messages]


def told(steps: list[Step]) -> str:
    return " ".join(step.text for step in steps if isinstance(step, Notice))


@pytest.mark.parametrize(
    ("said", "shape"),
    [
        (MIDDLE, [((), "hi", (), "hello"), (("shout",), "why?", (), "SO")]),
        ((("system", "a"), ("system", "b"), ("user", "hi")), [(("a", "b"), "hi", (), None)]),
        ((("user", "hi"), ("system", "a"), ("assistant", "hello")), [((), "hi", ("a",), "hello")]),
        (MIDDLE[:3], [((), "hi", (), "hello"), (("shout",), "", (), None)]),
        ((("system", "a"), ("assistant", "hello")), [(("a",), "", (), "hello")]),
        ((("user", "hi"), ("system", "a"), ("user", "ho")), [((), "hi", ("a",), None), ((), "ho", (), None)]),
    ],
    ids=[
        "before a prompt",
        "two at the beginning",
        "before a reply",
        "at the end",
        "before a first reply",
        "unanswered",
    ],
)
def test_a_turn_holds_the_system_messages_before_its_prompt_and_before_its_reply(said: Any, shape: Any) -> None:
    turns = tree(*said).turns()
    assert [(turn.system, turn.prompt, turn.between, turn.reply and turn.reply.text) for turn in turns] == shape


def test_they_are_sent_where_they_stand() -> None:
    held = session(*MIDDLE, later_system=True)
    steps = held.submit("and?")
    assert roles(steps) == [("system", "Be brief."), *MIDDLE, ("user", "and?")]
    assert told(steps) == ""


def test_what_a_template_does_not_take_is_said_once_for_each_conversation_and_model() -> None:
    held = session(*MIDDLE)
    assert "1 system message of this chat is told as the user's:" in told(held.submit("and?"))
    held.on_event(done(1))
    assert told(held.submit("and now?")) == ""
    held.on_event(done(2))
    held.open(tree(*MIDDLE, ("system", "whisper")))
    assert "2 system messages of this chat are told as the user's:" in told(held.submit("and?"))
    held.on_event(done(3))
    held.choose(Load("other"))
    held.on_event(Loaded(model_spec("other")))
    assert "template of other" in told(held.submit("and?"))


def test_one_at_the_beginning_is_no_later_one() -> None:
    held = session(("system", "a"), ("user", "hi"), ("assistant", "hello"))
    held.system = ""
    assert told(held.submit("and?")) == ""


def test_what_stands_after_a_system_message_is_edited_after_it() -> None:
    held = session(*MIDDLE, later_system=True)
    assert roles(held.edit(4, "who?"))[-2:] == [("system", "shout"), ("user", "who?")]
    assert held.turns[-1].place == (2, 2)


def test_a_system_message_at_the_end_stands_for_the_message_before_it() -> None:
    held = session(*MIDDLE[:3], later_system=True)
    steps = held.continue_reply()
    assert roles(steps)[-2:] == [("user", "hi"), ("assistant", "hello")]
    held.on_event(done(1, "hello there"))
    assert held.turns[-1].reply_place == (2, 2)
    held = session(*MIDDLE[:3], later_system=True)
    (begun,) = [step for step in held.regenerate() if isinstance(step, TurnBegun)]
    assert (begun.turn.prompt, begun.turn.reply_place, begun.again) == ("hi", (2, 2), False)


def test_a_prompt_with_one_after_it_is_answered_after_that() -> None:
    held = session(*MIDDLE[:2], ("user", "why?"), ("system", "a"))
    assert roles(held.continue_reply())[-2:] == [("user", "why?"), ("system", "a")]


def test_read_out_it_is_named() -> None:
    turns = [Turn("why?", Reply("SO"), key=4, reply_key=5, system=("shout",), between=("now",))]
    assert last_turn(turns) == "system: shout\nyou: why?\nsystem: now\nreply: SO"
    assert last_turn(tree(("system", "a")).turns()) == "system: a"


@pytest.mark.parametrize(("template", "takes"), [(TEMPLATE, True), ("{% if messages[2:] | selectattr('role', 'equalto', "
    "'system') | list %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE, False)], ids=["takes", "refuses"])  # fmt: skip
def test_the_model_is_told_all_of_it(tmp_path: Path, template: str, takes: bool) -> None:
    folder = make_tiny(tmp_path / "tiny")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": template}))
    said = [Message("user", "hi"), Message("assistant", "hello"), Message("system", "shout"), Message("user", "why?")]
    engine, info = load_engine(Load(str(folder), prompt_cache=False), lambda _: None)
    with engine:
        assert info.later_system is takes
        length = engine.price(said).prompt_tokens
        assert length == sum(len(each.content) + 2 for each in said) + 1
        assert engine.ask(said, Sampling(max_tokens=2)).metrics.prompt_tokens == length


async def imported(c: Chat, tmp_path: Path) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    (tmp_path / "chat.md").write_text(MARKDOWN)
    await c.send(f"/import {tmp_path / 'chat.md'}")
    await c.until(lambda: c.session.turns)


async def test_it_is_shown_said_to_be_the_users_and_kept(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(100, 60)) as c:
        await imported(c, tmp_path)
        kinds = [type(message) for message in c.transcript.messages]
        assert kinds == [UserMessage, ReplyMessage, SystemMessage, UserMessage, ReplyMessage]
        shown = [line.strip() for line in c.screen_text().splitlines()]
        assert any(line.startswith("System") for line in shown)
        assert any(line.startswith("shout") and "\x1b" not in line for line in shown)
        await c.ask("and?")
        await c.until(lambda: "1 system message of this chat is told as the user's" in c.notices)
        c.app.view.do("older")
        await c.until(lambda: "There is only one version" in c.notices)
        steps = c.session.edit(4, "who?")
        c.app.chat.perform(steps)
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].place == (2, 2))
        recording = c.app.chat.recording
        assert recording.chat is not None
        assert recording.holds(recording.chat)
        name = recording.chat
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        archive = store.archive(name)
        path = [(message.role, message.text) for message in store.path(name)]
    assert path[:-1] == [("user", "hi"), ("assistant", "hello"), ("system", "shout\x1b[2J"), ("user", "who?")]
    written = json.loads(to_json(archive))["messages"]
    assert [(each["role"], each["text"]) for each in written[:5]] == [
        (role, text.replace("shout", "shout\x1b[2J")) for role, text in MIDDLE
    ]


# What a reply that is made again, or goes on, follows; and that what is asked is what has a price.

BETWEEN: tuple[Said, ...] = (("user", "hi"), ("system", "shout"), ("assistant", "HEL"))
LATER: tuple[Said, ...] = (*BETWEEN, ("user", "why?"), ("assistant", "SO"))
SYSTEM: Said = ("system", "Be brief.")
BRIEF = Message("system", "Be brief.")


def priced(held: Session, key: int) -> dict[str, tuple[Message, ...]]:
    """Point at a message, and answer every question; return what each was about."""
    steps = held.select(key)
    while requests := session_asked(steps):
        (request,) = requests
        assert isinstance(request, AskPrice)
        steps = held.on_event(Priced("actions", request.id, Price(9, 1, 0, None)))
    return {each.question.id: each.question.messages for each in held.prices.known}


def test_a_system_message_before_a_reply_stays_before_the_one_that_is_made_again() -> None:
    held = session(*BETWEEN, later_system=True)
    steps = held.regenerate()
    assert roles(steps) == [SYSTEM, *BETWEEN[:2]]
    (begun,) = [step for step in steps if isinstance(step, TurnBegun)]
    assert (begun.turn.between, begun.turn.reply_place, begun.again) == (("shout",), (2, 2), True)
    assert not [step for step in steps if isinstance(step, Moved)]
    held.on_event(done(1, "HELLO"))
    assert held.conversation.tree.siblings(3) == [3, 4]


def test_it_stays_before_one_that_goes_on() -> None:
    held = session(*BETWEEN, later_system=True)
    assert roles(held.continue_reply()) == [SYSTEM, *BETWEEN]
    held.on_event(done(1, "HELLO"))
    assert [(turn.between, turn.reply_place) for turn in held.turns] == [(("shout",), (2, 2))]


@pytest.mark.parametrize("key", [1, 2, 3])
def test_so_it_does_in_an_earlier_turn(key: int) -> None:
    held = session(*LATER, later_system=True)
    steps = held.regenerate(key)
    assert roles(steps) == [SYSTEM, *LATER[:2]]
    (begun,) = [step for step in steps if isinstance(step, TurnBegun)]
    assert (begun.turn.between, begun.turn.reply_place, begun.again) == (("shout",), (2, 2), False)


def test_a_prompt_with_one_after_it_is_answered_after_both() -> None:
    held = session(*BETWEEN[:2], later_system=True)
    assert roles(held.continue_reply()) == [SYSTEM, *BETWEEN[:2]]
    held.on_event(done(1, "HELLO"))
    assert [(turn.between, turn.reply_place) for turn in held.turns] == [(("shout",), (1, 1))]


def test_what_is_priced_is_what_would_be_sent() -> None:
    held = session(*BETWEEN, later_system=True)
    found = priced(held, 3)
    assert found["again"] == (BRIEF, Message("user", "hi"), Message("system", "shout"))
    assert found["continue"] == (*found["again"], Message("assistant", "HEL"))
    assert found["edit"] == (BRIEF, Message("user", "~ hi"))


def test_going_on_where_nothing_was_said_takes_what_an_answer_takes() -> None:
    held = session(("user", "hi"), ("assistant", "hello"), ("user", "why?"))
    found = priced(held, 3)
    assert found["continue"] == found["again"]
    assert found["again"][-1] == Message("user", "why?")
    held = session(("user", "hi"), ("assistant", ""))  # cut before a whole character was said
    found = priced(held, 2)
    assert found["continue"] == found["again"] == (BRIEF, Message("user", "hi"))


def test_of_two_replies_in_a_row_each_is_itself() -> None:
    held = session(("user", "hi"), ("assistant", "one"), ("assistant", "two"))
    assert [node and node.key for node in map(held.conversation.reply_at, (1, 2, 3, None))] == [2, 2, 3, 3]
    assert roles(held.continue_reply(2))[-2:] == [("user", "hi"), ("assistant", "one")]


# Conversations from elsewhere: a reply without a prompt, two replies in a row, a prompt without a reply.

NO_PROMPT = "There is no prompt to answer again."
GREETED = "## Assistant\n\nhello, ask me\n"
UNANSWERED = "## User\n\nhi\n\n## Assistant\n\nhello\n\n## User\n\nwhy so slow?\n"


def session_unpaired(*said: tuple[str, str]) -> Session:
    """A session that holds this conversation: who said what. The replies were cut."""
    tree = Tree()
    for key, (role, text) in enumerate(said, 1):
        reply = Reply(text, ending="length")
        tree.add(
            MessageNode(key, tree.head, prompt=text) if role == "user" else MessageNode(key, tree.head, reply=reply)
        )
    held = loaded_session()
    held.open(tree)
    return held


@pytest.mark.parametrize(
    "said",
    [(("assistant", "hello"),), (("user", "hi"), ("assistant", "hello"), ("assistant", "and good day"))],
    ids=["alone", "the second in a row"],
)
def test_a_reply_without_a_prompt_can_not_be_made_again(said: tuple[tuple[str, str], ...]) -> None:
    held = session_unpaired(*said)
    before = dict(held.conversation.tree.nodes)
    for steps in (
        held.regenerate(),
        held.regenerate(held.conversation.tree.head),
        held.continue_reply(),
        held.continue_reply(held.conversation.tree.head),
    ):
        assert steps == [Notice(NO_PROMPT, "warning")]
    assert held.conversation.tree.nodes == before
    assert [asked.id for asked in questions(held.conversation, "", held.conversation.tree.head, None)] == ["fork"]


def test_one_beside_it_that_has_a_prompt_can() -> None:
    held = session_unpaired(("user", "hi"), ("assistant", "hello"), ("assistant", "and good day"))
    moved, begun, _ = held.regenerate(2)
    assert moved == Moved(())
    assert isinstance(begun, TurnBegun)
    assert (begun.turn.prompt, begun.turn.reply_place) == ("hi", (2, 2))


async def imported_unpaired(c: Chat, tmp_path: Path, text: str) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    (tmp_path / "chat.md").write_text(text)
    c.app.view.do("import", str(tmp_path / "chat.md"))
    await c.until(lambda: c.session.turns)


async def test_a_reply_without_a_prompt_stands_alone(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await imported_unpaired(c, tmp_path, GREETED)
        assert [type(message) for message in c.transcript.messages] == [ReplyMessage]


async def test_a_prompt_without_a_reply_stays_on_the_screen_when_it_is_answered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(100, 70)) as c:
        await imported_unpaired(c, tmp_path, UNANSWERED)
        kinds = [UserMessage, ReplyMessage, UserMessage]
        assert [type(message) for message in c.transcript.messages] == kinds
        await c.pilot.press("ctrl+x", "r")
        await c.until(lambda: c.session.turns[-1].reply)
        assert [type(message) for message in c.transcript.messages] == [*kinds, ReplyMessage]
        assert "why so slow?" in c.screen_text()


# /thinking: what a chat's template is told, kept with the chat, shown, and cut to what the loaded model knows.

THINKS = model_spec("qwen", thinks=True, thinking_modes=("on", "off"), template_names=("enable_thinking", "style"))
PLAIN = model_spec("guide")
OFF = TemplateOptions("off")
LONG = "What has to be read takes its time. " * 20


def requests(steps: list[Step], kind: type) -> list[Any]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, kind)]


def notices(steps: list[Step]) -> list[str]:
    return [step.text for step in steps if isinstance(step, Notice)]


def session_thinking(info: ModelSpec, template: TemplateOptions) -> Session:
    held = Session(Load(info.name), Sampling(), "", lambda: 0.0)
    held.template = template
    held.start()
    held.on_event(Loaded(info))
    return held


@pytest.mark.parametrize(
    ("text", "now", "then"),
    [
        ("off", TemplateOptions(), OFF),
        (" ON ", OFF, TemplateOptions("on")),
        ("2000", TemplateOptions("on"), TemplateOptions("on", 2000)),
        ("2000", OFF, TemplateOptions(None, 2000)),
        ("default", TemplateOptions("on", 5, ["style=a"]), TemplateOptions(keywords=["style=a"])),
        ("off", TemplateOptions("on", 5, ["style=a"]), TemplateOptions("off", 5, ["style=a"])),
    ],
)
def test_what_follows_the_command_is_read(text: str, now: TemplateOptions, then: TemplateOptions) -> None:
    assert chosen(text, now, THINKS) == then
    assert chosen(text, now, None) == then


@pytest.mark.parametrize(
    ("text", "info", "why"),
    [
        ("loud", THINKS, "/thinking does not know 'loud'. Use on, off"),
        ("-3", THINKS, "/thinking does not know"),
        ("low", THINKS, "the chat template of qwen only supports on, off. Choose one of these."),
        ("off", PLAIN, "the chat template of guide has no switch for it"),
        ("500", PLAIN, "a thinking budget is not available: guide does not mark its thinking"),
    ],
)
def test_what_can_not_be_had_is_refused_with_the_reason(text: str, info: ModelSpec, why: str) -> None:
    with pytest.raises(OptionError) as refused:
        chosen(text, TemplateOptions(), info)
    assert why in refused.value.one_line()


def test_each_request_says_what_the_template_is_told() -> None:
    held = session_thinking(THINKS, TemplateOptions("off", None, ["style=a"]))
    pause = held.draft_paused(LONG)
    (price,) = requests(pause, AskPrice)
    assert price.template == held.template
    (sent,) = requests(held.submit(LONG), Generate)
    assert sent.template == held.template
    assert decode_request(encode(sent)) == sent
    assert decode_request(encode(Warm(1, (), sent.template))) == Warm(1, (), sent.template)
    held.on_event(ReplyEvent(sent.id, Finished("stop", "yes", Metrics(*[None] * 17))))
    held.template = TemplateOptions("on")
    (key,) = [node.key for node in held.conversation.tree.nodes.values() if node.is_reply]
    assert requests(held.select(key), AskPrice)[0].template == TemplateOptions("on")
    assert requests(held.regenerate(), Generate)[0].template == TemplateOptions("on")


def test_what_a_model_can_not_be_told_is_left_out_and_said_once() -> None:
    held = session_thinking(PLAIN, TemplateOptions("off", 9, ["style=a"]))
    steps = held.submit("hi")
    assert requests(steps, Generate)[0].template == TemplateOptions()
    assert notices(steps) == [
        "Thinking off is not available: the chat template of guide has no switch for it.",
        "A thinking budget is not available: guide does not mark its thinking.",
        "The template option style is not available: the chat template of guide does not read it.",
    ]
    held.on_event(ReplyEvent(1, Finished("stop", "yes", Metrics(*[None] * 17))))
    assert notices(held.submit("again")) == []
    assert held.template == TemplateOptions("off", 9, ["style=a"])  # another model may be told
    assert supported(held.template, None) == (held.template, ())


@pytest.mark.parametrize(
    ("options", "short"),
    [
        (TemplateOptions(), ""), (OFF, "thinking off"), (TemplateOptions("off", 5), "thinking off"),
        (TemplateOptions("high"), "thinking high"), (TemplateOptions(None, 2000), "thinking ≤ 2.00k"),
        (TemplateOptions("on", 32_000, ["a=1"]), "thinking on ≤ 32.0k, 1 template option"),
        (TemplateOptions(keywords=["a=1", "b=2"]), "2 template options"),
    ],
)  # fmt: skip
def test_the_state_is_said_in_few_words(options: TemplateOptions, short: str) -> None:
    assert state(options) == short
    assert sentences(options, THINKS).endswith("qwen supports: on, off.")
    assert "has no switch" in sentences(options, PLAIN)


def test_settings_keep_it_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    kept = Settings(template=TemplateOptions("off", 2000, {"style": "a", "deep": [1, {"b": None}]}))
    path.write_text(dumps(kept))
    assert load(path).settings.template == kept.template
    path.write_text('[template]\nthinking = "loud"\nthinking_budget = 5\nkeywords = ["a=1"]\ncolour = 3\n')
    read = load(path)
    assert read.settings.template == TemplateOptions(None, 5, ["a=1"])
    assert any("thinking" in warning for warning in read.warnings)
    assert any("unknown key 'colour'" in warning for warning in read.warnings)


# On the screen ----------------------------------------------------------------------------------------------------------------


async def test_it_is_turned_off_in_this_chat_kept_with_it_and_shown(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.send("/thinking")
        await c.until(lambda: "thinking supports: on, off." in c.notices)
        assert "thinking off" not in c.screen_text()
        await c.send("/thinking off")
        await c.until(lambda: "thinking off" in c.screen_text(), "the state in the last line")
        await c.ask("one")
        assert c.session.turns[-1].reply.thinking == ""
        held = c.held
        await c.pilot.press("ctrl+n")
        await c.until(lambda: "thinking off" not in c.screen_text())
        await c.ask("two")
        assert c.session.turns[-1].reply.thinking
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        assert store.chat(held).settings["template"]["thinking"] == "off"
    async with chat("thinking", chat=held, ready=False) as c:
        await c.until(lambda: c.session.turns)
        assert c.session.template == OFF
        await c.until(lambda: "thinking off" in c.screen_text())


async def test_what_the_model_does_not_know_is_not_taken(chat: Start) -> None:
    async with chat("fast") as c:
        await c.send("/thinking off")
        await c.until(lambda: "has no switch for it" in c.notices)
        assert c.session.template == TemplateOptions()


async def test_a_budget_that_was_spent_is_said_over_the_thinking(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.send("/thinking 3")
        await c.ask("one")
        assert "s, ended at its budget of 3 tokens" in c.shown(c.replies[-1])
        held = c.held
    async with chat("thinking", chat=held, ready=False) as c:
        await c.until(
            lambda: c.replies and "ended at its budget of 3 tokens" in c.shown(c.replies[-1]), "as it was stored"
        )
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        exported = list(entries(store.archive(held)))
    assert exported[-1].thought.endswith(", ended at its budget of 3 tokens")
    assert "thinking_ended_at" not in measured(Reply("a"))


async def test_the_settings_hold_in_every_chat_but_those_with_their_own(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.opened("ctrl+t", SettingsScreen)
        await c.find_setting("thinking")
        await c.pilot.press("left")
        await c.write_setting("thinking_budget", "50")
        await c.write_setting("keywords", 'enable_thinking=true | b={"c": 1}')
        await c.close_settings()
        await c.until(lambda: c.session.template != TemplateOptions())
        expected = TemplateOptions("off", 50, {"enable_thinking": True, "b": {"c": 1}})
        assert c.session.template == expected
        assert load(tmp_path / "settings.toml").settings.template == expected
        await c.send("/set thinking loud")
        await c.until(lambda: "thinking 'loud' is not known" in c.notices)


async def test_the_command_line_goes_first(chat: Start) -> None:
    async with chat("thinking", template=OFF) as c:
        assert c.session.template == OFF
        await c.send("/thinking default")
        await c.until(lambda: c.session.template == TemplateOptions())
