"""System messages of a chat on the screen: they stay there, and can be gone to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.chat.conversation import MessageNode, Reply, Tree
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.actions.chats import jump
from tokamac.app.tui.markdown.turns import ReplyMessage, SystemMessage, UserMessage
from tokamac.app.tui.widgets.transcript import Welcome

Start = Callable[..., Any]
ALONE = "## System\n\nBe brief.\n\n## System\n\nshout\n"  # the first becomes the chat's own system prompt
FIRST = ALONE + "\n## User\n\nhi\n\n## Assistant\n\nHELLO\n"
LONG = "words " * 600


async def imported(c: Chat, tmp_path: Path, text: str) -> None:
    await c.ready()
    (tmp_path / "chat.md").write_text(text)
    await c.send(f"/import {tmp_path / 'chat.md'}")
    await c.until(lambda: c.session.turns, "the import")


def shown(c: Chat) -> list[type]:
    return [type(message) for message in c.transcript.messages]


@pytest.mark.parametrize("wish", ["edit", "regenerate"])
async def test_one_at_the_beginning_stays_when_the_first_turn_is_made_anew(
    chat: Start, tmp_path: Path, wish: str
) -> None:
    async with chat("fast", size=(100, 40)) as c:
        await imported(c, tmp_path, FIRST + "\n## User\n\nand?\n\n## Assistant\n\nSO\n")
        c.app.chat.perform(c.session.edit(2, "ho") if wish == "edit" else c.session.regenerate(3))
        await c.phase(EnginePhase.IDLE)
        await c.pilot.pause()
        assert shown(c) == [SystemMessage, UserMessage, ReplyMessage]
        assert "shout" in c.screen_text()


async def test_one_alone_stays_when_the_window_is_resized(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(100, 40)) as c:
        assert shown(c) == [Welcome]
        await imported(c, tmp_path, ALONE)
        await c.pilot.resize_terminal(60, 30)
        await c.pilot.pause()
        assert shown(c) == [SystemMessage]
        assert "shout" in c.screen_text()


@pytest.mark.parametrize("later", [True, False], ids=["an earlier turn", "the last turn"])
async def test_one_before_a_reply_stays_when_that_is_made_again(chat: Start, later: bool) -> None:
    async with chat("fast", size=(100, 40)) as c:
        await c.ready()
        tree = Tree()
        tree.ask("hi", None)
        tree.add(MessageNode(2, 1, system="shout"))
        tree.end(tree.answer(2).key, Reply("HELLO"))
        if later:
            tree.end(tree.answer(tree.ask("why?", 3).key).key, Reply("SO"))
        c.app.chat.perform(c.session.open(tree))
        c.app.chat.perform(c.session.regenerate(3))
        await c.phase(EnginePhase.IDLE)
        await c.pilot.pause()
        assert shown(c) == [UserMessage, SystemMessage, ReplyMessage]


async def opened(c: Chat) -> None:
    """Hold a chat with two versions of a system message, 3 and 5, far from its end."""
    await c.ready()
    tree = Tree()
    tree.end(tree.answer(tree.ask("hi", None).key).key, Reply("hello"))
    for key, word in ((3, "whisper"), (5, "shout")):
        tree.add(MessageNode(key, 2, system=word))
        tree.add(MessageNode(key + 1, key, prompt=LONG))
    c.app.chat.perform(c.session.open(tree))
    await c.pilot.pause()
    assert "shout" not in c.screen_text()


async def test_one_can_be_gone_to_and_the_message_before_it_is_pointed_at(chat: Start) -> None:
    async with chat("fast", size=(80, 20)) as c:
        await opened(c)
        for key, word in ((5, "shout"), (3, "whisper")):
            jump(c.app.chat, key)
            await c.until(lambda word=word: word in c.screen_text(), word)
            assert c.transcript.selected == 2
            assert c.transcript.has_focus
        await c.pilot.press("down", "]")  # from the prompt after it: the other one is newer
        await c.until(lambda: c.session.conversation.tree.head == 6, "the newer version")
        assert "shout" in c.screen_text()
        assert c.transcript.selected == 2


async def test_one_at_the_beginning_has_none_before_it(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(80, 20)) as c:
        await imported(c, tmp_path, FIRST)
        jump(c.app.chat, 1)
        await c.pilot.pause()
        assert c.transcript.selected == 2
        assert "shout" in c.screen_text()
