"""Which chat is open: its title in the first row, and as the terminal's own while the app runs."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.conftest import Chat
from tests.app.terminal_output import ALL_CONTROLS, BIDI, CONTROL, foreign, recorder
from tokamac.app.chat.listing import ChatSearch
from tokamac.app.tui.app import RESTORE, SAVE, terminal_title
from tokamac.app.tui.screens.chats import ChatsScreen

Start = Callable[..., Any]


def first_row(c: Chat) -> str:
    return c.screen_text().splitlines()[0].strip(" ▏")


async def test_the_first_row_has_the_title_and_keeps_up_with_it(chat: Start) -> None:
    async with chat("fast", size=(80, 24)) as c:
        await c.ready()
        assert first_row(c) == ""
        await c.ask("Why is decode slow?")
        await c.until(lambda: first_row(c) == "Why is decode slow?", "its first words")
        await c.send("/title Keys and [b]values[/b]")
        await c.until(lambda: first_row(c) == "Keys and [b]values[/b]", "the title that was given")
        await c.send("/fork")
        await c.until(lambda: first_row(c) == "Keys and [b]values[/b] (fork)", "the copy's")
        await c.send("/new")
        await c.until(lambda: first_row(c) == "", "none")


async def test_a_chat_that_is_opened_again_has_its_title(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
    async with chat("fast", resume=True) as c:
        await c.ready()
        await c.until(lambda: first_row(c) == "one", "the title")


async def test_a_title_that_was_given_in_the_list_is_shown_once_that_closes(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.ask("one")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatsScreen), "the list")
        ChatSearch(c.recording.store.file).rename(c.held, "another")
        await c.pilot.press("escape")
        await c.until(lambda: first_row(c) == "another", "the other title")


async def test_a_long_title_is_cut_to_the_window(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await c.ready()
        await c.ask("one")
        await c.send("/title " + "word " * 30)
        await c.until(lambda: first_row(c).startswith("word word"), "the title")
        assert first_row(c).endswith("…")
        assert len(c.screen_text().splitlines()[0]) == 40


# The terminal's own title -------------------------------------------------------------------------------------------------


async def test_the_terminal_is_named_after_the_chat_and_has_its_title_back_at_the_end(
    chat: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = recorder(monkeypatch)
    async with chat("fast") as c:
        await c.ready()
        assert SAVE + terminal_title("") in written()
        await c.ask("Why is decode slow?")
        await c.until(lambda: "\x1b]2;Why is decode slow? · tokamac\a" in written(), "the chat's name")
        c.app.chat.do("new_chat")
        await c.until(lambda: written().rindex(terminal_title("")) > written().rindex("slow? ·"), "the app's alone")
    stream = written()
    assert stream.count(SAVE) == stream.count(RESTORE) == 1
    assert stream.rindex(RESTORE) > stream.rindex(terminal_title(""))
    assert foreign(stream) == []


@given(
    st.lists(
        st.text(st.one_of(st.sampled_from([*ALL_CONTROLS, *BIDI, "\n", "\t"]), st.characters()), max_size=8), max_size=6
    )
)
def test_nothing_in_a_title_ends_the_sequence(texts: list[str]) -> None:
    sequence = terminal_title("".join(texts))
    inside = sequence.removeprefix("\x1b]2;").removesuffix("\a")
    assert len(inside) == len(sequence) - len("\x1b]2;\a")
    assert not CONTROL.search(inside)
    assert inside.endswith("tokamac")


def test_a_title_that_a_model_made_hostile_is_text_and_short() -> None:
    sequence = terminal_title("a\x07b\x1b]52;c;c2VjcmV0\x07\x9c" + "c" * 200)
    assert sequence.count("\x1b") == 1
    assert sequence.count("\a") == 1
    assert len(sequence) < 80
