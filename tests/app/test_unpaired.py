"""Conversations from elsewhere: a reply without a prompt, two replies in a row, a prompt without a reply."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.backend.protocol import Load, Loaded, ModelInfo
from tokamac.app.chat.background import questions
from tokamac.app.chat.conversation import MessageNode, Reply, Tree
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Moved, Notice, TurnBegun
from tokamac.app.tui.markdown.turns import ReplyMessage, UserMessage
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
NO_PROMPT = "There is no prompt to answer again."
GREETED = "## Assistant\n\nhello, ask me\n"
TWICE = "## User\n\nhi\n\n## Assistant\n\nhello\n\n## Assistant\n\nand good day\n"
UNANSWERED = "## User\n\nhi\n\n## Assistant\n\nhello\n\n## User\n\nwhy so slow?\n"


def session(*said: tuple[str, str]) -> Session:
    """A session that holds this conversation: who said what. The replies were cut."""
    tree = Tree()
    for key, (role, text) in enumerate(said, 1):
        reply = Reply(text, ending="length")
        tree.add(
            MessageNode(key, tree.head, prompt=text) if role == "user" else MessageNode(key, tree.head, reply=reply)
        )
    held = Session(Load("guide"), Sampling(), "", lambda: 1.0)
    held.start()
    held.on_event(Loaded(ModelInfo("guide")))
    held.open(tree)
    return held


@pytest.mark.parametrize(
    "said",
    [(("assistant", "hello"),), (("user", "hi"), ("assistant", "hello"), ("assistant", "and good day"))],
    ids=["alone", "the second in a row"],
)
def test_a_reply_without_a_prompt_can_not_be_made_again(said: tuple[tuple[str, str], ...]) -> None:
    held = session(*said)
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
    held = session(("user", "hi"), ("assistant", "hello"), ("assistant", "and good day"))
    moved, begun, _ = held.regenerate(2)
    assert moved == Moved(())
    assert isinstance(begun, TurnBegun)
    assert (begun.turn.prompt, begun.turn.reply_place) == ("hi", (2, 2))


async def imported(c: Chat, tmp_path: Path, text: str) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)
    (tmp_path / "chat.md").write_text(text)
    c.app.chat.do("import", str(tmp_path / "chat.md"))
    await c.until(lambda: c.session.turns)


@pytest.mark.parametrize("text", [GREETED, TWICE], ids=["first", "two in a row"])
async def test_no_key_makes_a_reply_without_a_prompt_again(chat: Start, tmp_path: Path, text: str) -> None:
    async with chat("fast") as c:
        await imported(c, tmp_path, text)
        shown = len(c.transcript.messages)
        for action in ("regenerate", "again", "continue", "edit"):
            c.app.clear_notifications()
            c.app.chat.do(action)
            await c.until(lambda: "There is no prompt" in c.notices, action)
        assert len(c.transcript.messages) == shown
        await c.ask("and now?")
        assert c.session.turns[-1].prompt == "and now?"


async def test_a_reply_without_a_prompt_stands_alone(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await imported(c, tmp_path, GREETED)
        assert [type(message) for message in c.transcript.messages] == [ReplyMessage]


async def test_a_prompt_without_a_reply_stays_on_the_screen_when_it_is_answered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(100, 70)) as c:
        await imported(c, tmp_path, UNANSWERED)
        kinds = [UserMessage, ReplyMessage, UserMessage]
        assert [type(message) for message in c.transcript.messages] == kinds
        await c.pilot.press("ctrl+r")
        await c.until(lambda: c.session.turns[-1].reply)
        assert [type(message) for message in c.transcript.messages] == [*kinds, ReplyMessage]
        assert "why so slow?" in c.screen_text()


async def test_it_stays_too_where_it_is_all_there_is_and_the_window_changes(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await imported(c, tmp_path, "## User\n\nhi\n\n## User\n\nwhy so slow?\n")
        await c.pilot.resize_terminal(80, 24)
        await c.until(lambda: "why so slow?" in c.screen_text())
        await c.pilot.press("ctrl+r")
        await c.until(lambda: c.session.turns[-1].reply)
        assert [type(message) for message in c.transcript.messages] == [UserMessage, UserMessage, ReplyMessage]
