"""The list of conversations while it changes: where it points, what it answers too late, and a title that is written in it."""

import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Input, OptionList

from tests.app.conftest import Chat
from tokamac.app.chat.actions import Keymap
from tokamac.app.chat.listing import ChatMatches, ChatSearch
from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.chats import ChatsScreen

Start = Callable[..., Any]
FRUITS = ("apples", "pears", "plums", "quinces")  # as they are listed: the newest first


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A store that holds a chat about each fruit."""
    path, moments = tmp_path / "chats" / "chats.db", iter(range(100))
    with Store.open(path, clock=lambda: float(next(moments))) as store:
        for fruit in reversed(FRUITS):
            chat = store.new_chat().id
            store.add_message(chat, None, "user", fruit)
    return path


@dataclass(frozen=True)
class Slow(ChatSearch):
    """Answers each question when it is let to."""

    asked: list[str] = field(default_factory=list)
    answers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def find(self, text: str) -> ChatMatches:
        found = super().find(text)
        self.asked.append(text)
        assert self.answers.acquire(timeout=60)
        return found


def titles(file: Path, *, deleted: bool = False) -> list[str]:
    with Store.open(file) as store:
        return [chat.title for chat in store.chats(deleted=deleted)]


def rename(file: Path, was: str, title: str) -> None:
    with Store.open(file) as store:
        (chat,) = store.chats(was)
        store.rename(chat.id, title)


def rows(screen: ChatsScreen) -> list[str]:
    options = screen.query_one(OptionList).options
    return [str(option.prompt).split()[0] for option in options]


def pointed(screen: ChatsScreen) -> str:
    index = screen.query_one(OptionList).highlighted
    assert index is not None
    return rows(screen)[index]


async def opened(c: Chat) -> ChatsScreen:
    """The list, all of it, by its key."""
    await c.ready()
    await c.pilot.press("ctrl+l")
    screen = c.app.screen
    assert isinstance(screen, ChatsScreen)
    await c.until(lambda: len(rows(screen)) == len(FRUITS))
    return screen


async def test_after_a_deletion_the_next_row_is_pointed_at(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        await c.pilot.press("down", "down", "ctrl+d")
        await c.until(lambda: rows(screen) == ["apples", "plums", "quinces"] and not screen.workers)
        assert pointed(screen) == "plums"
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(screen) == ["apples", "quinces"] and not screen.workers)
        assert pointed(screen) == "quinces"
        assert sorted(titles(file, deleted=True)) == ["pears", "plums"]
        await c.pilot.press("ctrl+z")
        await c.until(lambda: rows(screen) == ["apples", "plums", "quinces"] and not screen.workers)
        assert pointed(screen) == "plums"


async def test_two_deletions_before_the_store_answers_are_of_two_chats(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        screen.query_one(OptionList).highlighted = 1
        screen.action_delete()
        screen.action_delete()
        assert sorted(titles(file, deleted=True)) == ["pears", "plums"]
        await c.pilot.press("ctrl+z", "ctrl+z")
        await c.until(lambda: rows(screen) == list(FRUITS))
        assert titles(file, deleted=True) == []


async def test_what_is_typed_points_at_what_fits_first(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        screen.query_one(OptionList).highlighted = 3
        await c.pilot.press("p")
        await c.until(lambda: rows(screen) == ["apples", "pears", "plums"])
        assert pointed(screen) == "apples"


async def test_an_answer_from_before_a_deletion_does_not_list_the_chat_again(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        await c.ready()
        slow = Slow(file)
        screen = ChatsScreen(slow, None, Keymap())
        await c.app.push_screen(screen)
        await c.until(lambda: slow.asked == [""])
        slow.answers.release()
        await c.until(lambda: rows(screen) == list(FRUITS))
        screen.find("")
        await c.until(lambda: len(slow.asked) == 2)
        screen.action_delete()
        await c.until(lambda: len(slow.asked) == 3)
        seen = list[list[str]]()
        slow.answers.release(2)
        await c.until(lambda: seen.append(rows(screen)) or not screen.workers)
        assert seen
        assert all(each == list(FRUITS[1:]) for each in seen)


async def test_a_list_that_is_being_closed_is_neither_drawn_again_nor_answered(chat: Start, file: Path) -> None:
    async with chat("fast") as c:
        screen = await opened(c)
        await screen.query(OptionList).remove()  # the parts of a screen that is left go first
        screen.post_message(events.Resize(screen.size, screen.size))
        screen.find("")
        await c.until(lambda: not screen.workers)
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
        assert await c.ask("and on it goes")


NAMING = "Enter saves · Esc cancels"


async def test_the_border_and_the_keys_are_those_of_the_title_that_is_written(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        await c.pilot.press("ctrl+d")
        await c.until(lambda: rows(screen) == list(FRUITS[1:]))
        await c.pilot.press("ctrl+e")
        box = screen.query_one(Input)
        assert (box.value, screen.query_one(".box").border_subtitle) == ("pears", NAMING)
        await c.pilot.press("ctrl+z", "home", "ctrl+d", "ctrl+e", *"es")
        assert (box.value, titles(file, deleted=True)) == ("earses", ["apples"])
        await c.pilot.press("escape")
        assert str(screen.query_one(".box").border_subtitle).startswith("Enter opens · ")
        await c.pilot.press("ctrl+z")
        await c.until(lambda: rows(screen) == list(FRUITS))


async def test_a_title_that_is_refused_stays_to_be_written_and_it_is_told_why(chat: Start, file: Path) -> None:
    async with chat("fast", size=(140, 40)) as c:
        screen = await opened(c)
        with sqlite3.connect(file) as database:
            refusal = "BEFORE UPDATE OF title ON chats BEGIN SELECT RAISE(ABORT, 'no title today'); END"
            database.execute(f"CREATE TRIGGER refused {refusal}")
        await c.pilot.press("ctrl+e", *" red", "enter")
        await c.until(lambda: not screen.workers)
        assert "no title today" in c.screen_text()
        assert (screen.query_one(Input).value, titles(file)) == ("apples red", list(FRUITS))
        with sqlite3.connect(file) as database:
            database.execute("DROP TRIGGER refused")
        await c.pilot.press("enter")
        await c.until(lambda: not screen.workers)
        assert titles(file) == ["apples red", *FRUITS[1:]]
        assert screen.query_one(Input).value == ""
        assert "no title today" not in c.screen_text()


async def test_a_foreign_title_is_made_safe_to_be_written_on(chat: Start, file: Path) -> None:
    rename(file, "apples", "apples\x1b[31m red\u202e")
    async with chat("fast", size=(140, 40)) as c:
        await opened(c)
        await c.pilot.press("ctrl+e")
        value = c.app.screen.query_one(Input).value
        assert value == sanitise_line("apples\x1b[31m red\u202e")
        assert "\x1b" not in value


async def test_a_system_message_is_found_and_the_chat_opens_where_it_stands(chat: Start, file: Path) -> None:
    with Store.open(file) as store:
        (about,) = store.chats("pears")
        store.add_message(about.id, about.head, "assistant", "They grow. " * 400)
        system = store.add_message(about.id, store.chat(about.id).head, "system", "Be a walrus.")
        store.add_message(about.id, system.id, "user", "more")
        store.add_message(about.id, store.chat(about.id).head, "assistant", "They grow still. " * 400)
    async with chat("fast", size=(100, 30)) as c:
        screen = await opened(c)
        await c.pilot.press(*"walrus")
        await c.until(lambda: rows(screen) == ["system:"])
        await c.pilot.press("enter")
        await c.until(lambda: c.prompts == ["pears", "more"] and "Be a walrus." in c.screen_text())
