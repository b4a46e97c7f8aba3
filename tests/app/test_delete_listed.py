"""The open chat deleted in the list of chats: what Ctrl+D does there, and how it comes back."""

from collections.abc import Callable
from typing import Any

from textual.widgets import OptionList

from tests.app.conftest import Chat
from tests.app.test_deleting import deleted, kept
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.screens.chats import ChatsScreen

Start = Callable[..., Any]


def rows(c: Chat) -> list[str]:
    lists = c.app.screen.query(OptionList)
    return [str(option.prompt) for option in lists.first().options] if lists else []


def pointed(c: Chat) -> str:
    listed = c.app.screen.query_one(OptionList)
    assert listed.highlighted is not None
    return rows(c)[listed.highlighted]


async def listed(c: Chat, *prompts: str) -> None:
    """Hold a chat about each prompt, the last one open, and list them: the newest first."""
    await c.ready()
    for prompt in prompts:
        if c.prompts:
            await c.pilot.press("ctrl+n")
        await c.ask(prompt)
    await c.pilot.press("ctrl+l")
    await c.until(lambda: isinstance(c.app.screen, ChatsScreen) and len(rows(c)) == len(prompts))


async def test_the_open_chat_is_deleted_in_the_list_for_a_new_one_and_comes_back(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await listed(c, "apples", "pears")
        assert "● pears" in rows(c)[0]
        await c.pilot.press("ctrl+d")
        await c.until(lambda: len(rows(c)) == 1)
        assert "apples" in pointed(c)
        assert (deleted(c), kept(c), c.held, c.prompts) == (["pears"], ["apples"], None, [])
        said = "Deleted: pears. This is a new chat. Ctrl+Z, or /restore once the list is closed, restores the old one."
        assert said in c.notices
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(rows(c)) == 2 and not c.app.screen.workers)
        assert "pears" in pointed(c)
        assert "●" not in "".join(rows(c))  # the new one is open
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["pears"])
        assert deleted(c) == []


async def test_what_was_not_sent_stays_with_it_and_restore_brings_both_back(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await c.ready()
        await c.ask("apples")
        await c.type("a thought about")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(rows(c)) == 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(c) == [] and deleted(c) == ["apples"])
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
        assert c.prompt.text == ""
        await c.send("/restore")
        await c.until(lambda: c.prompts == ["apples"])
        assert c.prompt.text == "a thought about"


async def test_asked_twice_before_it_is_done_only_one_is_deleted(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await listed(c, "apples", "pears")
        screen = c.app.screen
        assert isinstance(screen, ChatsScreen)
        screen.action_delete()
        screen.action_delete()
        await c.until(lambda: len(rows(c)) == 1 and not screen.workers)
        assert (deleted(c), kept(c)) == (["pears"], ["apples"])
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(c) == [])
        assert deleted(c) == ["apples", "pears"]


async def test_one_that_is_found_by_what_was_said_is_deleted_too(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await listed(c, "pears", "apples and quinces")
        await c.pilot.press(*"quinces")
        await c.until(lambda: any("in apples" in row for row in rows(c)))
        c.app.screen.query_one(OptionList).highlighted = len(rows(c)) - 1
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(c) == [] and not c.app.screen.workers)
        assert (deleted(c), kept(c), c.held) == (["apples and quinces"], ["pears"], None)


async def test_while_a_reply_is_written_to_it_it_stays_and_it_is_told_why(chat: Start) -> None:
    async with chat("slow", size=(100, 30)) as c:
        await c.ready()
        await c.send("about pears")
        await c.phase(EnginePhase.DECODING)
        c.app.chat.do("chats")
        await c.until(lambda: len(rows(c)) == 1)
        c.app.screen.action_delete()
        await c.until(lambda: "A reply is running: wait, or stop it with Esc, then delete." in c.notices)
        assert (deleted(c), c.prompts, len(rows(c))) == ([], ["about pears"], 1)
        c.app.chat.do("stop")


async def test_where_not_all_of_it_could_be_saved_it_stays(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await listed(c, "apples")
        await c.pilot.press("escape")
        c.refuse_writes()
        await c.ask("and pears")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(rows(c)) == 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: "that part would be lost" in c.notices)
        assert (deleted(c), c.prompts, len(rows(c))) == ([], ["apples", "and pears"], 1)
        c.refuse_writes(refused=False)
