"""Conversations that are kept: stored as they go on, opened again, searched, edited, forked, deleted and brought back."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from tests.app.conftest import Chat
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.chats import ChatsScreen

Start = Callable[..., Any]


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], Any]:
    """What the store holds: the texts on the path of the newest chat."""

    def read() -> Any:
        with Store.open(tmp_path / "chats" / "chats.db") as store:
            chat = store.latest()
            return None if chat is None else (chat, store.path(chat.id))

    return read


async def ready(c: Chat) -> None:
    await c.phase(EnginePhase.IDLE)
    await c.until(lambda: c.app.chat.recording is not None)


async def test_a_prompt_is_stored_before_its_reply_is_and_the_reply_with_its_figures(chat: Start, kept: Any) -> None:
    async with chat("slow") as c:
        await ready(c)
        await c.send("What is decode?")
        await c.until(lambda: c.session.live and c.session.live.metrics.generated_tokens > 1)
        _, messages = kept()
        assert [(m.role, m.state) for m in messages] == [("user", "complete"), ("assistant", "partial")]
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        stored, messages = kept()
        assert stored.title == "What is decode?"
        assert [(m.role, m.state) for m in messages] == [("user", "complete"), ("assistant", "stopped")]
        assert messages[1].text == c.session.turns[-1].reply.text
        assert messages[1].metrics["metrics"]["generated_tokens"] == c.session.metrics.generated_tokens


async def test_a_chat_is_opened_again_with_its_figures_and_goes_on(chat: Start, kept: Any) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("first question")
        before = c.session.turns
    async with chat("fast", resume=True) as c:
        await ready(c)
        await c.until(lambda: len(c.session.turns) == 1)
        (turn,) = c.session.turns
        assert (turn.prompt, turn.reply) == (before[0].prompt, before[0].reply)
        assert "first question" in c.screen_text()
        await c.ask("second question")
    _, messages = kept()
    assert [m.text for m in messages if m.role == "user"] == ["first question", "second question"]
    with sqlite3.connect(c.app.chat.recording.store.file) as database:
        assert database.execute("SELECT count(*) FROM chats").fetchone() == (1,)


async def test_the_list_names_the_model_that_replied_last(chat: Start, kept: Any) -> None:
    async with chat("fast", size=(100, 40)) as c:
        await ready(c)
        await c.ask("one")
        assert kept()[0].model == "fast"
        c.app.chat.do("choose_model", "steady")
        await c.until(lambda: c.session.engine.info and c.session.engine.info.name == "steady")
        assert kept()[0].model == "fast"  # nothing was asked of the other yet
        await c.ask("two")
        stored, messages = kept()
        assert stored.model == "steady"
        assert [m.model for m in messages if m.role == "assistant"] == ["fast", "steady"]
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatsScreen))
        await c.until(lambda: "· steady ·" in c.screen_text())


async def test_a_draft_survives_a_restart(chat: Start) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("hi")
        await c.type("half a thought")
    async with chat("fast", resume=True) as c:
        await ready(c)
        await c.until(lambda: c.prompt.text == "half a thought")


async def test_an_edit_stands_beside_and_the_versions_are_walked_by_keys(chat: Start, kept: Any) -> None:
    async with chat("fast", size=(100, 70)) as c:
        await ready(c)
        await c.ask("one")
        await c.ask("two")
        await c.pilot.press("tab", "up", "e")
        await c.until(lambda: c.prompt.text == "two")
        c.prompt.text = "two, but better"
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two, but better"])
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "‹ 2 of 2 ›" in c.screen_text())
        await c.pilot.press("tab", "[")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two"])
        assert "‹ 1 of 2 ›" in c.screen_text()
        _, messages = kept()
        assert [m.text for m in messages if m.role == "user"] == ["one", "two"]
        await c.pilot.press("]")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["one", "two, but better"])


async def test_escape_gives_an_edit_up(chat: Start) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("one")
        await c.pilot.press("tab", "e")
        await c.until(lambda: c.prompt.text == "one")
        await c.pilot.press("escape")
        assert c.prompt.text == ""
        await c.ask("two")
        assert [t.prompt for t in c.session.turns] == ["one", "two"]


def listed(c: Chat) -> list[str]:
    """The lines of the list of conversations; none while another screen is up."""
    if not isinstance(c.app.screen, ChatsScreen):
        return []
    options = c.app.screen.query_one(OptionList)
    return [str(options.get_option_at_index(index).prompt) for index in range(options.option_count)]


async def narrowed(c: Chat, word: str, lines: int) -> None:
    """Type ``word``, and wait until the list has ``lines`` that hold it, and no others."""
    await c.pilot.press(*word)
    await c.until(lambda: len(listed(c)) == lines and all(word in line for line in listed(c)))


async def test_the_list_searches_opens_renames_deletes_and_brings_back(chat: Start) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("about apples")
        await c.pilot.press("ctrl+n")
        await c.ask("about pears")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: len(listed(c)) == 2)
        await narrowed(c, "apples", 2)  # its title, and what was said
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about apples"])
        await c.pilot.press("ctrl+l")
        await narrowed(c, "pears", 2)
        await c.pilot.press("ctrl+e", "end")
        await c.pilot.press(*" and plums", "enter")
        await c.until(lambda: any("about pears and plums" in line for line in listed(c)))
        await narrowed(c, "plums", 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: not listed(c))
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(listed(c)) == 1)


async def test_a_hit_stands_for_its_chat_which_is_renamed_deleted_and_brought_back(chat: Start) -> None:
    async with chat("fast", size=(140, 40)) as c:
        await ready(c)
        await c.ask("about apples")
        await c.ask("and about medlars")  # in no title
        await c.pilot.press("ctrl+n")
        await c.ask("about pears")
        await c.pilot.press("ctrl+l")
        await narrowed(c, "medlars", 1)
        await c.pilot.press("ctrl+e")
        await c.until(lambda: "New title of the chat of this message; Enter saves it." in c.screen_text())
        assert c.app.screen.query_one(Input).value == "about apples"
        await c.pilot.press("ctrl+d")  # of a title that is being written no chat is deleted
        await c.pilot.press("end", *" and more", "enter")
        await c.until(lambda: any("about apples and more" in line for line in listed(c)))
        assert len(listed(c)) == 2
        await narrowed(c, "medlars", 1)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: not listed(c))
        assert "Deleted the chat of this message: about apples and more. Ctrl+Z restores it" in c.notices
        await c.pilot.press("ctrl+z")
        await c.until(lambda: len(listed(c)) == 1)


async def test_a_hit_opens_the_chat_at_the_message_on_its_own_path(chat: Start) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("about bananas")
        await c.pilot.press("tab", "up", "e")
        await c.until(lambda: c.prompt.text)
        c.prompt.text = "about cherries"
        await c.pilot.press("enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about cherries"])
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("ctrl+n", "ctrl+l")
        await c.until(lambda: listed(c))
        await c.pilot.press(*"bananas")
        await c.until(lambda: len(listed(c)) == 2)
        await c.pilot.press("down", "down", "enter")
        await c.until(lambda: [t.prompt for t in c.session.turns] == ["about bananas"])
        assert c.transcript.selected == c.session.turns[0].key


async def test_a_fork_goes_on_alone(chat: Start, kept: Any) -> None:
    async with chat("fast") as c:
        await ready(c)
        await c.ask("one")
        first = c.app.chat.recording.chat
        await c.ask("two")
        await c.pilot.press("tab", "up", "up", "f")
        await c.until(lambda: c.app.chat.recording.chat != first)
        assert [t.prompt for t in c.session.turns] == ["one"]
        await c.ask("otherwise")
        with Store.open(c.app.chat.recording.store.file) as store:
            assert [m.text for m in store.path(first) if m.role == "user"] == ["one", "two"]


async def test_without_a_store_the_chat_goes_on_and_says_why(chat: Start, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db") as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        assert await c.ask("hi")
