"""System messages in the middle of a conversation: sent where a template takes them, or said not to be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tests.app.test_session import Clock, asked, done
from tests.tiny import TEMPLATE, make_tiny
from tokamac.app.backend.child import accepted, load_engine
from tokamac.app.backend.protocol import Generate, Load, Loaded, ModelInfo
from tokamac.app.chat.conversation import MessageNode, Reply, Tree, Turn
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Notice, Step, TurnBegun
from tokamac.app.plain.commands import last_turn
from tokamac.app.store.export import to_json
from tokamac.app.store.store import Store
from tokamac.app.tui.markdown.turns import ReplyMessage, SystemMessage, UserMessage
from tokamac.engine.events import Message
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
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
    held = Session(Load("guide"), Sampling(), "Be brief.", Clock())
    held.start()
    held.on_event(Loaded(ModelInfo("guide", later_system=later_system)))
    held.open(tree(*said))
    return held


def roles(steps: list[Step]) -> list[Said]:
    (send,) = [request for request in asked(steps) if isinstance(request, Generate)]
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
    assert "Left out of the prompt: 1 system message of this chat;" in told(held.submit("and?"))
    held.on_event(done(1))
    assert told(held.submit("and now?")) == ""
    held.on_event(done(2))
    held.open(tree(*MIDDLE, ("system", "whisper")))
    assert "Left out of the prompt: 2 system messages of this chat;" in told(held.submit("and?"))
    held.on_event(done(3))
    held.choose(Load("other"))
    held.on_event(Loaded(ModelInfo("other")))
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
def test_the_engine_is_given_what_its_template_takes(tmp_path: Path, template: str, takes: bool) -> None:
    folder = make_tiny(tmp_path / "tiny")
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": template}))
    said = [Message("user", "hi"), Message("assistant", "hello"), Message("system", "shout"), Message("user", "why?")]
    engine, info = load_engine(Load(str(folder), prompt_cache=False), lambda _: None)
    with engine:
        assert info.later_system is takes
        taken = accepted(said, later_system=info.later_system)
        length = engine.price(taken).prompt_tokens
        assert length == sum(len(each.content) + 2 for each in said if takes or each.role != "system") + 1
        assert engine.ask(taken, Sampling(max_tokens=2)).metrics.prompt_tokens == length


async def imported(c: Chat, tmp_path: Path) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    (tmp_path / "chat.md").write_text(MARKDOWN)
    await c.send(f"/import {tmp_path / 'chat.md'}")
    await c.until(lambda: c.session.turns)


async def test_it_is_shown_said_to_be_left_out_and_kept(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(100, 60)) as c:
        await imported(c, tmp_path)
        kinds = [type(message) for message in c.transcript.messages]
        assert kinds == [UserMessage, ReplyMessage, SystemMessage, UserMessage, ReplyMessage]
        shown = [line.strip() for line in c.screen_text().splitlines()]
        assert any(line.startswith("System") for line in shown)
        assert any(line.startswith("shout") and "\x1b" not in line for line in shown)
        await c.ask("and?")
        await c.until(lambda: "Left out of the prompt: 1 system message" in c.notices)
        c.app.chat.do("older")
        await c.until(lambda: "There is only one version" in c.notices)
        steps = c.session.edit(4, "who?")
        c.app.chat.perform(steps)
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE and c.session.turns[-1].place == (2, 2))
        recording = c.app.chat.recording
        assert recording is not None
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
