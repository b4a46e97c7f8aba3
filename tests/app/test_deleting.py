"""Chats deleted and brought back by commands: the open one, too, and after the list was closed."""

from collections.abc import Callable
from typing import Any

from textual.widgets import OptionList

from tests.app.conftest import Chat
from tokamac.app.chat.recording import LEFT
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.chats import ChatsScreen

Start = Callable[..., Any]


def deleted(c: Chat) -> list[str]:
    """The titles of the chats that are deleted, as another program reads them."""
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.title for chat in store.chats(deleted=True))


def kept(c: Chat) -> list[str]:
    with Store.open(c.recording.store.file) as store:
        return sorted(chat.title for chat in store.chats())


async def test_the_open_chat_is_deleted_for_a_new_one_and_comes_back_whole(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("about apples")
        first = c.held
        await c.send("/delete")
        await c.until(lambda: c.prompts == [])
        assert "Deleted: about apples. This is a new chat. /restore restores the old one." in c.notices
        assert (deleted(c), kept(c), c.held) == (["about apples"], [], None)
        await c.ask("about pears")
        assert (deleted(c), kept(c)) == (["about apples"], ["about pears"])  # it is not back by what is said now
        await c.send("/restore")
        await c.until(lambda: c.prompts == ["about apples"])
        assert "Restored: about apples." in c.notices
        assert (deleted(c), kept(c), c.held) == ([], ["about apples", "about pears"], first)
        await c.ask("and more")
        assert c.prompts == ["about apples", "and more"]


async def test_what_was_not_sent_goes_with_the_chat_and_comes_back_with_it(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("about apples")
        await c.type("a thought about")
        c.app.chat.do("delete_chat")  # as the palette has it done
        assert (c.prompt.text, deleted(c)) == ("", ["about apples"])
        await c.until(
            lambda: (
                "about apples. This is a new chat. /restore restores the old one with your unsent prompt." in c.notices
            )
        )
        assert LEFT not in c.notices
        c.app.chat.do("restore_chat")
        assert (c.prompt.text, c.prompts) == ("a thought about", ["about apples"])


async def test_another_chat_is_deleted_and_brought_back_by_its_id(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("about apples")
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.ask("about pears")
        second = c.held
        await c.send(f"/delete {first}")
        await c.until(lambda: deleted(c) == ["about apples"])
        assert "Deleted: about apples. /restore restores it." in c.notices
        assert c.prompts == ["about pears"]
        await c.send(f"/delete {first}")
        await c.until(lambda: f"This chat is already deleted. /restore {first} restores it." in c.notices)
        await c.send(f"/restore {second}")
        await c.until(lambda: f"This chat is not deleted. /open {second} opens it." in c.notices)
        await c.send(f"/delete {second}")  # the open one by its id
        await c.until(lambda: deleted(c) == ["about apples", "about pears"])
        assert c.prompts == []
        await c.send(f"/restore {first}")
        await c.until(lambda: c.prompts == ["about apples"])
        assert deleted(c) == ["about pears"]


async def test_what_the_list_deleted_is_brought_back_after_it_was_closed_the_last_one_first(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        for prompt in ("about apples", "about pears"):
            await c.ask(prompt)
            await c.pilot.press("ctrl+n")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatsScreen) and shown(c) == 2)
        await c.pilot.press("down", "down", "ctrl+d")  # the one that was used first is deleted first
        await c.until(lambda: shown(c) == 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: shown(c) == 0)
        assert "Ctrl+Z restores it; once the list is closed, /restore does." in c.notices
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
        for prompt in ("about pears", "about apples"):
            await c.send("/restore")
            await c.until(lambda prompt=prompt: c.prompts == [prompt])
        await c.send("/restore")
        await c.until(lambda: "No chat is deleted." in c.notices)


async def test_while_a_reply_runs_its_chat_is_not_deleted_and_another_is(chat: Start) -> None:
    async with chat("slow") as c:
        await c.ready()
        await c.ask("about apples")
        first = c.held
        await c.pilot.press("ctrl+n")
        await c.send("about pears")
        await c.phase(EnginePhase.DECODING)
        await c.send("/delete")
        await c.until(lambda: "A reply is running: wait, or stop it with Esc, then delete." in c.notices)
        await c.send(f"/delete {first}")
        await c.until(lambda: deleted(c) == ["about apples"])
        assert c.prompts == ["about pears"]  # what runs goes on
        await c.pilot.press("escape")


async def test_there_may_be_nothing_to_delete_and_no_chat_of_that_id(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.send("/delete")
        await c.until(lambda: "There is nothing to delete yet." in c.notices)
        for command in ("/delete zzzz", "/restore zzzz"):
            c.app.clear_notifications()
            await c.send(command)
            await c.until(lambda: "No chat has an id that begins with zzzz. The list of chats" in c.notices)


async def test_a_chat_of_which_not_all_is_saved_is_not_deleted(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("about apples")
        c.refuse_writes()
        await c.ask("about pears")
        await c.send("/delete")
        await c.until(lambda: "that part would be lost" in c.notices)
        assert (deleted(c), c.prompts) == ([], ["about apples", "about pears"])
        c.refuse_writes(refused=False)
        await c.send("/delete")
        await c.until(lambda: c.prompts == [])
        await c.send("/restore")
        await c.until(lambda: c.prompts == ["about apples", "about pears"])


async def test_without_a_store_there_is_nothing_to_delete_or_to_bring_back(chat: Start, tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db") as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        for action in ("delete_chat", "restore_chat"):
            c.app.clear_notifications()
            c.app.chat.do(action)
            await c.until(lambda: "Chats are not saved in this session" in c.notices)


def test_the_chat_deleted_last_is_not_the_one_used_last(tmp_path: Any) -> None:
    moments = iter(range(100))
    with Store.open(tmp_path / "chats.db", clock=lambda: float(next(moments))) as store:
        assert store.last_deleted() is None
        made = [store.new_chat().id for _ in range(3)]
        for chat in made:
            store.add_message(chat, None, "user", "hi")
        store.delete(made[2])
        store.delete(made[0])
        assert store.last_deleted().id == made[0]
        store.undelete(made[0])
        assert store.last_deleted().id == made[2]


def shown(c: Chat) -> int:
    lists = c.app.screen.query(OptionList)
    return lists.first().option_count if lists else -1
