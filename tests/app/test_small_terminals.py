"""Small windows, and 256 colours: what one needs to know stays, and what has no room gives way to it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.color import Color, ColorSystem
from textual.theme import Theme
from textual.widgets import Input, Static, TextArea
from textual.widgets._toast import Toast

from tests.app.conftest import Chat
from tokamac.app.chat.actions import Keymap, keymap
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.tui.markdown.parse import Inline, Table
from tokamac.app.tui.markdown.rows import rows
from tokamac.app.tui.screens.dialog import fitting
from tokamac.app.tui.screens.settings import NOTES, SettingsScreen, SystemScreen
from tokamac.app.tui.theme import DARK, LIGHT
from tokamac.app.tui.widgets.status import StatusLine
from tokamac.app.tui.widgets.transcript import HINTS, PROMISE, TOUR, Welcome, with_keys

Start = Callable[..., Any]
SMALLEST = (40, 12)
USUAL = (80, 24)


def row(c: Chat, y: int) -> str:
    return c.screen_text().splitlines()[y].strip()


async def opened(c: Chat, action: str, kind: type) -> None:
    c.app.chat.do(action)
    await c.until(lambda: isinstance(c.app.screen, kind), action)
    await c.pilot.pause()


# The first keys -----------------------------------------------------------------------------------------------------------


async def test_the_tour_is_seen_whole_in_the_smallest_window(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        lines = [line.strip() for line in c.screen_text().splitlines()]
        assert all(f"{key}  {does}" in lines for key, does in with_keys(TOUR, Keymap()))
        assert c.transcript.max_scroll_y == 0


def shown(welcome: Welcome, width: int) -> list[str]:
    return [each.row.content.plain.strip() for each in welcome.rows(width)]


def test_where_the_room_ends_the_name_goes_first_and_the_keys_never() -> None:
    keys = [f"{key}  {does}" for key, does in with_keys(HINTS, Keymap())]
    assert shown(Welcome(4), 60) == keys
    assert shown(Welcome(6), 60) == [PROMISE, *keys]
    assert shown(Welcome(7), 60) == [PROMISE, "", *keys]
    assert shown(Welcome(10), 60)[2:] == ["", PROMISE, "", *keys]
    assert shown(Welcome(2), 60) == keys


def test_a_long_key_and_a_narrow_window_wrap_what_is_said_beside_the_keys() -> None:
    chosen = keymap({"help": ("ctrl+shift+alt+f12",)})
    assert not chosen.warnings
    lines = [each.row.content.plain for each in Welcome(20, tour=True, keymap=chosen).rows(36)]
    assert max(map(len, lines)) <= 36
    key, does = with_keys(TOUR, chosen)[0]
    first = next(y for y, line in enumerate(lines) if line.startswith(key))
    assert len(key) + 2 + len(does) > 36
    assert " ".join(line[len(key) :].strip() for line in lines[first : first + 2]) == does


# The lines above and below the prompt -------------------------------------------------------------------------------------


async def test_the_last_line_drops_figures_before_the_first_key_and_cuts_none(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        await c.ask("hello")
        line = row(c, -1)
        assert line.endswith("F1 help")
        assert " tok/s" in line
        assert "·" not in line.split()[-3:]
        await c.pilot.resize_terminal(*USUAL)
        await c.until(lambda: "TTFT" in row(c, -1), "the other figures")
        assert "F1 help" in row(c, -1)


async def test_a_long_name_gives_way_to_the_first_key_and_to_a_warning(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.info is not None
        c.session.engine.info = replace(c.session.engine.info, name="org/a-model-with-a-very-long-name-4bit")
        c.app.chat.show()
        await c.until(lambda: "…" in row(c, -1), "the end of the name")
        assert row(c, -1).endswith("long-name-4bit   F1 help")
        c.app.chat.query_one(StatusLine).unsaved = lambda: True
        c.app.chat.show()
        await c.until(lambda: "not saved" in row(c, -1), "the warning")
        assert row(c, -1).endswith("name-4bit · not saved   F1 help")


async def test_how_to_stop_is_said_while_something_runs_and_then_alone(chat: Start) -> None:
    async with chat("slow", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        assert "Esc stop" not in row(c, -1)
        await c.send("hello")
        await c.phase(EnginePhase.DECODING)
        assert row(c, -1).endswith("Esc stop")
        c.app.chat.do("stop")
        await c.phase(EnginePhase.IDLE)
        assert "Esc stop" not in row(c, -1)


async def test_what_goes_on_is_said_in_fewer_words_before_any_is_cut(chat: Start) -> None:
    async with chat("slow", size=USUAL) as c:
        await c.phase(EnginePhase.IDLE)
        for prompt in ("one", "two", "three"):
            await c.send(prompt)
        await c.phase(EnginePhase.DECODING)
        await c.until(lambda: "tok/s" in c.screen_text(), "a rate")
        above = next(line.strip() for line in c.screen_text().splitlines() if "prompts queued" in line)
        assert above.startswith("2 prompts wait: Up takes the last back · writing ")
        assert above.endswith("tok/s")
        c.app.chat.do("stop")


async def test_a_notice_does_not_cover_the_box_and_has_the_width_of_a_narrow_window(chat: Start) -> None:
    for size in (SMALLEST, USUAL):
        async with chat("fast", size=size) as c:
            await c.phase(EnginePhase.IDLE)
            await c.send("/nosuch thing")
            await c.until(lambda: c.app.screen.query(Toast), "the notice")
            await c.pilot.pause()
            toast = c.app.screen.query_one(Toast)
            assert toast.region.bottom <= c.prompt.region.y
            assert toast.region.width == min(60, size[0] - 2)


# The transcript -----------------------------------------------------------------------------------------------------------


def table(*cells: tuple[str, ...]) -> Table:
    return Table(tuple(tuple(Inline(text) for text in line) for line in cells), (False,) * len(cells[0]))


def plain(block: Table, width: int) -> list[str]:
    return [each.content.plain.rstrip() for each in rows(block, width)]


def test_a_narrow_table_breaks_between_words_as_long_as_the_columns_have_room_for_them() -> None:
    long = table(("phase", "bound by", "helped by"), ("decode", "arithmetic", "a smaller cache, fewer bits"))
    lines = plain(long, 34)
    assert any("arithmetic" in line for line in lines)
    assert max(map(len, lines)) <= 34
    words = {word for line in lines for word in line.replace("│", " ").split()}
    assert {"smaller", "cache,", "fewer", "decode"} <= words


def test_where_words_have_no_room_the_widest_is_torn() -> None:
    lines = plain(table(("what", "where"), ("weights", "a/very/long/path/that/never/ends.safetensors")), 30)
    assert any(line.startswith("weights │ a/very/long/path") for line in lines)
    assert max(map(len, lines)) <= 30


async def test_the_scroll_bar_is_where_the_page_is_after_a_resize_while_text_streams(chat: Start) -> None:
    async with chat("prose", size=(60, 20)) as c:
        await c.phase(EnginePhase.IDLE)
        await c.send("hello")
        await c.until(lambda: c.transcript.max_scroll_y > 20, "more than a page")
        await c.pilot.resize_terminal(50, 14)
        bar = c.transcript.vertical_scrollbar
        await c.until(lambda: bar.position + bar.window_size >= bar.window_virtual_size - 1, "the bar at the end")
        assert c.transcript.growing
        assert bar.window_size == c.transcript.container_size.height
        c.app.chat.do("stop")


# Dialogs ------------------------------------------------------------------------------------------------------------------


def test_of_the_keys_in_a_border_the_first_and_the_last_stay_longest() -> None:
    keys = ("Enter opens", "Ctrl+E renames", "Ctrl+D deletes", "Esc closes")
    assert fitting(keys, 80) == "Enter opens · Ctrl+E renames · Ctrl+D deletes · Esc closes"
    assert fitting(keys, 50) == "Enter opens · Ctrl+E renames · Esc closes"
    assert fitting(keys, 30) == "Enter opens · Esc closes"
    assert fitting(keys, 20) == "Enter opens"


async def test_a_dialog_has_all_of_the_smallest_window(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        await opened(c, "system_prompt", SystemScreen)
        box = c.app.screen.query_one(".box")
        assert (box.region.x, box.region.width) == (0, 40)
        assert box.max_scroll_y == 0
        written = c.app.screen.query_one(TextArea).region
        assert written.height >= 3
        assert "Ctrl+S applies · Esc closes" in c.screen_text()
        assert "Empty means" in c.screen_text()


async def test_the_note_of_a_field_stands_below_where_it_has_no_room_beside(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.phase(EnginePhase.IDLE)
        await opened(c, "settings", SettingsScreen)
        for name in ("temperature", "stop", "on_full", "unload_after_min"):
            c.app.screen.query_one(f"#{name}", Input).focus()
            await c.until(lambda name=name: NOTES[name] in c.screen_text(), NOTES[name])
        assert c.app.screen.query_one("#about", Static).region.bottom == 11


async def test_every_note_is_whole_at_the_usual_size(chat: Start) -> None:
    async with chat("fast", size=USUAL) as c:
        await c.phase(EnginePhase.IDLE)
        await opened(c, "settings", SettingsScreen)
        seen: set[str] = set()
        for name in NOTES:  # the last are below the edge until they are gone to
            box = c.app.screen.query_one(f"#{name}", Input)
            box.focus()
            await c.until(lambda box=box: box.has_focus and box.region in c.app.screen.region, name)
            text = c.screen_text()
            assert "…" not in text
            seen.update(each for each, note in NOTES.items() if text.count(note) > (note in _about(c)))
        assert seen == set(NOTES)


def _about(c: Any) -> str:
    """The note at the lower edge, which repeats that of the field."""
    return str(c.app.screen.query_one("#about").render())


@pytest.mark.parametrize("variable", ["", "1"], ids=["terminal's colours", "none"])
async def test_where_to_write_a_system_prompt_is_seen_without_a_ground(
    chat: Start, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv("NO_COLOR", variable)
    async with chat("fast", size=USUAL) as c:
        c.app.theme = "terminal"
        await c.phase(EnginePhase.IDLE)
        await opened(c, "system_prompt", SystemScreen)
        area = c.app.screen.query_one(TextArea).region
        drawn = c.screen_text().splitlines()
        assert {drawn[y][area.x] for y in range(area.y, area.bottom)} == {"▌"}


async def test_the_panel_says_by_a_bar_that_it_goes_on_below(chat: Start) -> None:
    async with chat("fast", size=(100, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        panel = c.app.chat.query_one("#panel")
        await c.until(lambda: panel.show_vertical_scrollbar, "the bar")
        assert panel.vertical_scrollbar.region.width == 1
        await c.pilot.resize_terminal(120, 50)
        await c.until(lambda: not panel.show_vertical_scrollbar, "no bar")


# 256 colours --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_grounds_and_text_are_different_greys_where_there_are_256_colours(theme: Theme) -> None:
    found = []
    for name in ("background", "surface", "panel", "foreground"):
        red, green, blue = Color.parse(getattr(theme, name)).downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
        assert max(red, green, blue) - min(red, green, blue) == 0, name
        found.append(red)
    assert len(set(found)) == 4
    assert found[:3] == sorted(found[:3], reverse=theme is LIGHT)
