"""Several versions of a reply on the screen: side by side or as tabs, chosen and taken by keys, stopped, resized, left."""

from typing import Any

import pytest
from textual.screen import Screen

from tests.app.chat.test_session import METRICS
from tests.app.conftest import Chat, Start
from tests.app.terminals import foreign, recorder
from tokamac.app.backend.protocol import ReplyEvent, RequestFailed
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.chat.versions import Versions
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.chat import ChatScreen
from tokamac.app.tui.screens.chats import ChatsScreen
from tokamac.app.tui.screens.dialog import EngineSaid
from tokamac.app.tui.screens.help import HelpScreen
from tokamac.app.tui.screens.versions import LEAST, VersionColumn, VersionsScreen, keys_line
from tokamac.engine.events import Finished

THREE = "/compare temperature 0 0.7 1.2"


async def asked(c: Chat) -> None:
    """Have a reply by which the versions will stand: begun, and stopped."""
    await c.ready()
    await c.send("What is decode?")
    await c.phase(EnginePhase.DECODING)
    c.app.view.do("stop")
    await c.phase(EnginePhase.IDLE)


async def opened(c: Chat, command: str = THREE) -> VersionsScreen:
    """Ask for versions of the last reply, and return their screen once each has begun."""
    await c.send(command)
    screen = await c.on(VersionsScreen)
    await c.until(lambda: all(each.begun or each.reply for each in screen.versions.all), "all have begun")
    return screen


def running(c: Chat) -> Versions:
    assert c.session.versions is not None
    return c.session.versions


def finish(c: Chat, index: int, text: str) -> None:
    """Have a version end, as if its model had said so; what the scripted one still says of it is late."""
    id = running(c).all[index].id
    event = ReplyEvent(id, Finished("stop", text, METRICS))
    c.app.view.post_message(EngineSaid(event, c.app.chat.bridge.process_number))


async def resized(c: Chat, size: tuple[int, int]) -> None:
    await c.pilot.resize_terminal(*size)
    await c.until(lambda: c.app.screen.size == size)


def shown(screen: Screen[Any]) -> list[VersionColumn]:
    """The versions in view."""
    return [each for each in screen.query(VersionColumn) if each.display]


async def test_they_stand_side_by_side_where_there_is_room_and_as_tabs_where_there_is_none(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        screen = await opened(c)
        assert [each.size.height > 20 and each.region.x for each in shown(screen)] == [0, 40, 80]
        await c.until(lambda: "tok/s together" in c.screen_text())
        text = c.screen_text()
        assert text.splitlines()[0].startswith(" 3 versions · ")
        assert text.splitlines()[0].endswith(" What is decode? ")
        for name in ("▸temperature 0 ", " temperature 0.7 ", " temperature 1.2 "):
            assert name in text
        await resized(c, (3 * LEAST - 1, 24))
        assert screen.tabs
        assert len(shown(screen)) == 1
        await resized(c, (60, 20))
        await c.pilot.press("right")
        (column,) = shown(screen)
        assert column is screen._columns[1]
        rows = c.screen_text().splitlines()
        assert rows[1].startswith(" temperature 0  …   ▸temperature 0.7  …  temperature 1.2  …")
        assert rows[3].split()[-1] in ("tok/s", "writing")
        await resized(c, (40, 12))
        rows = c.screen_text().splitlines()
        assert rows[1].split() == ["0", "…", "▸0.7", "…", "1.2", "…"]
        assert rows[3].startswith(" temperature 0.7  ")
        await c.pilot.click("VersionHeads", offset=(30, 0))
        assert screen.chosen == 2
        await resized(c, (200, 50))
        assert len(shown(screen)) == 3
        await c.pilot.click(screen._columns[0])
        assert screen.chosen == 0
        assert len({each.scroll_offset.y for each in shown(screen)}) == 1
        assert c.screen_text().count("Decode") >= 3


async def test_one_is_chosen_and_taken_and_the_chat_goes_on_from_it(chat: Start) -> None:
    async with chat("fast", size=(120, 36)) as c:
        await c.ask("What is decode?")
        screen = await opened(c)
        await c.phase(EnginePhase.IDLE)
        assert "the chat goes on from temperature 0" in c.screen_text().splitlines()[0]
        await c.pilot.press("left")
        assert screen.chosen == 2
        await c.pilot.press("tab", "2", "enter")
        await c.on(ChatScreen)
        assert c.session.turns[-1].reply_place == (3, 4)
        assert "‹ 3 of 4 ›" in c.screen_text()
        assert "temperature 0.7 · " in c.screen_text()
        assert c.prompt.has_focus
        assert "every weight" in await c.ask("And then?")


async def test_one_that_is_still_written_is_not_taken_and_taking_one_stops_the_others(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        screen = await opened(c)
        await c.pilot.press("enter")
        assert "temperature 0 is still being written" in c.notices
        assert c.app.screen is screen
        finish(c, 1, "The **second** one.")
        await c.until(lambda: "✓" in c.screen_text())
        assert "The second one." in c.screen_text()
        assert "1 done" in c.screen_text().splitlines()[0]
        await c.pilot.press("right", "enter")
        await c.on(ChatScreen)
        assert c.session.engine.phase is EnginePhase.IDLE
        assert [each.so_far.ending for each in running(c).all] == ["cancelled", "stop", "cancelled"]
        assert [turn.reply.text for turn in c.session.turns if turn.reply] == ["The **second** one."]
        assert "The second one." in c.screen_text()


async def test_escape_stops_all_and_then_closes(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        screen = await opened(c)
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: c.screen_text().count("■ stopped") == 3)
        assert c.app.screen is screen
        await c.pilot.press("ctrl+c")
        await c.on(ChatScreen)
        assert c.session.turns[-1].reply_place == (2, 4)
        assert not c.app._exit


async def test_the_reader_scrolls_one_while_all_grow_and_follows_again(chat: Start) -> None:
    async with chat("prose", size=(120, 20)) as c:
        await asked(c)
        screen = await opened(c)
        first, second, _ = screen._columns
        await c.until(lambda: all(each.max_scroll_y > 12 for each in screen._columns))
        await c.pilot.press("home")
        assert first.scroll_offset.y == 0
        height = second.max_scroll_y
        await c.until(lambda: second.scroll_offset.y > height)
        assert first.scroll_offset.y == 0
        await c.pilot.press("pagedown", "down", "up")
        assert first.scroll_offset.y == first.size.height - 1
        await c.pilot.press("end")
        assert first.following
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)


async def test_thinking_is_folded_and_unfolded_and_the_text_copied(chat: Start) -> None:
    async with chat("thinking", size=(100, 40)) as c:
        await c.send("hi")
        await c.phase(EnginePhase.DECODING)
        c.app.view.do("stop")
        await c.phase(EnginePhase.IDLE)
        screen = await opened(c, "/compare temperature 0 1")
        await c.until(lambda: c.screen_text().count("thinking …") == 2)
        await c.pilot.press("c")
        assert "There is no text to copy yet." in c.notices
        await c.until(lambda: c.screen_text().count("▸ thought for") == 2)
        await c.pilot.press("space")
        assert "▾ thought for" in c.screen_text()
        await c.pilot.press("c")
        assert "Copied" in c.notices
        assert screen.chosen == 0


async def test_what_models_say_is_made_safe(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    written = recorder(monkeypatch)
    async with chat("hostile", size=(120, 36)) as c:
        await c.ask("hi")
        screen = await opened(c)
        await c.phase(EnginePhase.IDLE)
        assert c.screen_text().count("[bold]not markup[/]") == 3
        await c.pilot.press("escape")
        await c.send(THREE)
        await c.until(lambda: c.app.screen is not screen and isinstance(c.app.screen, VersionsScreen))
        id = running(c).all[0].id
        failed = RequestFailed(id, "no \x1b]0;title\x07 memory", "\x1b[2J")
        c.app.view.post_message(EngineSaid(failed, c.app.chat.bridge.process_number))
        await c.phase(EnginePhase.IDLE)
    assert not foreign(written())


async def test_another_chat_is_opened_meanwhile_and_one_comes_back(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        await opened(c)
        chat_id = c.held
        await c.pilot.press("ctrl+n")
        await c.on(ChatScreen)
        assert not c.session.turns
        await c.until(lambda: "3 versions in" in c.screen_text())
        finish(c, 2, "The third.")
        await c.pilot.press("ctrl+l")
        await c.on(ChatsScreen)
        await c.pilot.press("escape")
        c.app.chat.open_chat(chat_id)
        again = await c.on(VersionsScreen)
        assert "The third." in c.screen_text()
        # Of the other two, side by side, what they said so far: its end depends on how fast this machine is.
        assert max(row.count("Dec") for row in c.screen_text().splitlines()) == 2
        await c.pilot.press("escape")
        await c.until(lambda: not again.versions.running)
        await c.pilot.press("3", "enter")
        await c.on(ChatScreen)
        assert "The third." in c.screen_text()


async def test_the_end_of_versions_in_another_chat_is_told(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        await opened(c)
        await c.pilot.press("ctrl+n")
        await c.on(ChatScreen)
        for index in range(3):
            finish(c, index, "Done.")
        await c.until(lambda: "3 versions of a reply are done" in c.notices)


async def test_another_reply_begun_from_the_palette_closes_them(chat: Start) -> None:
    async with chat("fast", size=(120, 36)) as c:
        await c.ask("hi")
        first = await opened(c)
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("f1")
        await c.on(HelpScreen)
        await c.pilot.press("escape")
        await c.on(VersionsScreen)
        c.app.view.do("compare", "temperature 0 1")
        await c.until(lambda: c.app.screen is not first and isinstance(c.app.screen, VersionsScreen))
        await c.phase(EnginePhase.IDLE)
        assert first not in c.app.screen_stack
        c.app.view.do("regenerate")
        await c.on(ChatScreen)
        await c.until(lambda: c.session.turns[-1].reply_place == (7, 7))


async def test_the_screen_without_colours_says_what_is_chosen(chat: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with chat("fast", size=(60, 20)) as c:
        await c.ask("hi")
        await opened(c, "/compare top-k 1 2 3 4")
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("right")
        rows = c.screen_text().splitlines()
        assert rows[1].split() == ["top-k", "1", "✓", "▸top-k", "2", "✓", "top-k", "3", "✓", "top-k", "4", "✓"]
        assert rows[2].index("━") == 15
        assert rows[-1].split()[:2] == ["Enter", "takes"]


@pytest.mark.parametrize("width", [12, 40, 58, 80])
def test_the_line_of_keys_fits_and_keeps_enter_and_esc(width: int) -> None:
    line = keys_line(width, running=True)
    assert line.plain.startswith("Enter takes it")
    assert line.plain.endswith("Esc stops all")
    assert line.cell_length <= max(width, len("Enter takes it  Esc stops all"))


async def test_the_chat_beneath_fits_a_window_that_was_resized_meanwhile(chat: Start) -> None:
    async with chat("slow", size=(120, 36)) as c:
        await asked(c)
        await opened(c)
        await resized(c, (60, 20))
        assert not c.app._background_screens  # else the whole screen is drawn again for whatever changes beneath it
        await c.pilot.press("escape")
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("escape")
        shown = await c.on(ChatScreen)
        await c.until(lambda: c.transcript.size.width <= 60)
        assert shown.size == (60, 20)
        assert not shown.query_one("#panel").display
        assert all(len(row) == 60 for row in c.screen_text().splitlines())


async def test_the_transcript_beneath_is_drawn_once_when_all_have_ended(chat: Start) -> None:
    async with chat("fast", size=(120, 36)) as c:
        await c.ask("hi")
        before = c.replies[-1]
        await opened(c)
        await c.phase(EnginePhase.IDLE)
        assert isinstance(c.replies[-1], ReplyMessage)
        assert c.replies[-1] is not before
        assert c.replies[-1].key == running(c).all[0].key
