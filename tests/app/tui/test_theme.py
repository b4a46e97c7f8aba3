"""Themes that can be read in 24 bits and in 256 colours, and windows that are small."""

import os
import plistlib
import pty
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import Color, ColorSystem
from textual.color import Color as TextualColor
from textual.geometry import Region
from textual.theme import BUILTIN_THEMES, Theme
from textual.widgets import Button, Input, OptionList, Select, Static, TextArea
from textual.widgets._select import SelectOverlay
from textual.widgets._toast import Toast

from tests.app.conftest import Chat, Start, strips_of
from tokamac.app.chat.actions import Keymap, keymap
from tokamac.app.chat.settings_form import GROUPS
from tokamac.app.chat.start import ChatOptions
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import Settings, save
from tokamac.app.text.markdown import OpenableLink
from tokamac.app.tui.app import anchored
from tokamac.app.tui.markdown.rows import Inline, Table, rows
from tokamac.app.tui.run import QUESTIONS, build, guess, is_dark_answer
from tokamac.app.tui.screens.dialog import LinksScreen, Tick, fitting
from tokamac.app.tui.screens.help import ThemeScreen
from tokamac.app.tui.screens.settings import SettingsScreen, SystemScreen
from tokamac.app.tui.theme import DARK, LIGHT, PROSE, TERMINAL, end_of, readable, text_colours
from tokamac.app.tui.widgets.prompt_input import Chips
from tokamac.app.tui.widgets.status import StatusLine
from tokamac.app.tui.widgets.transcript import HINTS, PROMISE, TOUR, Welcome, with_keys

TEXTS = ["foreground", "primary", "secondary", "accent", "warning", "error", "success"]
GROUNDS = ["background", "surface", "panel"]
LEAST_CONTRAST = 3.0  # of WCAG 2, for what is more than a line of running text; running text has 4.5


def colour(theme: Theme, name: str, system: ColorSystem) -> tuple[int, int, int]:
    value = theme.variables.get(name) or getattr(theme, name)
    red, green, blue = Color.parse(value).downgrade(system).get_truecolor()
    return red, green, blue


def luminance(rgb: tuple[int, int, int]) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_what_the_standard_says() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21.0)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT], ids=["24-bit", "256"])
@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_every_text_stands_out_from_every_ground(theme: Theme, system: ColorSystem) -> None:
    for ground in GROUNDS:
        behind = colour(theme, ground, system)
        assert contrast(colour(theme, "foreground", system), behind) >= 4.5
        for text in (*TEXTS, *PROSE):
            assert contrast(colour(theme, text, system), behind) >= LEAST_CONTRAST, (text, ground)


def test_the_terminal_theme_names_no_colour_but_the_terminals_own() -> None:
    named = [getattr(TERMINAL, name) for name in (*TEXTS, *GROUNDS, "boost")]
    named += [value for name, value in TERMINAL.variables.items() if not name.endswith("text-style")]
    assert all(value.startswith("ansi_") for value in named)
    assert TERMINAL.ansi
    assert not PROSE.keys() - TERMINAL.variables.keys()


# Text can be read in every theme: each colour that the app derives for it, and what is drawn with them on the
# screen.

LEAST = 4.5  # of WCAG 2, for running text
RGB = [theme for theme in (*BUILTIN_THEMES.values(), DARK, LIGHT) if not theme.ansi]
LIGHTS = ["solarized-light", "textual-light", "catppuccin-latte", LIGHT.name]


def variables(theme: Theme) -> dict[str, str]:
    """All colours that the app has in a theme."""
    known = {**theme.to_color_system().generate(), **theme.variables}
    return {**known, **text_colours(theme, known)}


@pytest.mark.parametrize("ground", ["background", "surface"])
@pytest.mark.parametrize("theme", RGB, ids=lambda theme: theme.name)
def test_every_derived_colour_has_the_contrast_of_running_text(theme: Theme, ground: str) -> None:
    known = variables(theme)
    behind = TextualColor.parse(known[ground])
    ours = text_colours(theme, known)
    derived = [name for name in known if name.startswith("prose-") or name in ours]
    assert {"text-muted", "text-warning", "prose-code", "prose-heading", "prose-marker"} <= set(derived)
    found = {name: contrast((behind + TextualColor.parse(known[name])).rgb, behind.rgb) for name in derived}
    assert {name: ratio for name, ratio in found.items() if ratio < LEAST} == {}


@pytest.mark.parametrize("theme", RGB, ids=lambda theme: theme.name)
def test_a_colour_that_can_be_read_already_stays_as_it_is(theme: Theme) -> None:
    known = variables(theme)
    grounds = [TextualColor.parse(known[name]) for name in ("background", "surface")]
    for name in ("primary", "secondary", "accent", "warning", "error", "success"):
        own = TextualColor.parse(known[name])
        if all(contrast(own.rgb, ground.rgb) >= LEAST for ground in grounds):
            assert TextualColor.parse(known[f"text-{name}"]).rgb == pytest.approx(own.rgb, abs=1)


def test_a_colour_becomes_darker_on_a_light_ground_and_lighter_on_a_dark_one() -> None:
    for ground, end in (("#ffffff", "#000000"), ("#000000", "#ffffff")):
        found, behind = (
            readable(TextualColor.parse("#ffa62b" if end == "#000000" else "#003055"), [TextualColor.parse(ground)]),
            ground,
        )
        assert LEAST <= contrast(found.rgb, TextualColor.parse(behind).rgb) < LEAST + 0.5


def test_a_terminals_own_colours_stay_its_own() -> None:
    found = text_colours(TERMINAL, TERMINAL.to_color_system().generate())
    assert not {"text-muted", "text-disabled"} & set(found)
    assert found.pop("text-label") == "dim"
    assert all(value.startswith("ansi_") for value in found.values())


def drawn(c: Chat, region: Region) -> Iterator[tuple[str, tuple[int, int, int], tuple[int, int, int]]]:
    """The words in a region of the screen, their colour and what is behind it."""
    screen = c.app.screen
    for strip in strips_of(screen)[region.y : region.bottom]:
        for segment in strip.crop(region.x, region.right):
            style = segment.style
            if any(map(str.isalnum, segment.text)) and style is not None and style.color and style.bgcolor:
                yield segment.text.strip(), tuple(style.color.get_truecolor()), tuple(style.bgcolor.get_truecolor())


async def faint(c: Chat, region: Region) -> list[tuple[str, float]]:
    """What of it is fainter than running text may be, and fainter than the theme's own foreground is there."""
    await c.pilot.pause()
    own = TextualColor.parse(c.app.theme_variables["foreground"]).rgb
    found = [(text, contrast(fore, back), contrast(own, back)) for text, fore, back in drawn(c, region)]
    assert found
    return [(text, round(ratio, 2)) for text, ratio, theirs in found if ratio < LEAST and ratio < theirs - 0.1]


async def test_what_stands_beside_the_chat_can_be_read_on_light_themes(chat: Start) -> None:
    async with chat("fast", size=(120, 40)) as c:
        for theme in LIGHTS:
            c.app.theme = theme
            muted = variables(c.app.available_themes[theme])["text-muted"]
            await c.until(lambda muted=muted: c.app.theme_variables["text-muted"] == muted)  # type: ignore[misc]
            assert await faint(c, c.app.view.query_one("#panel").region) == [], theme


async def test_what_a_dialog_says_can_be_read_on_light_themes(chat: Start) -> None:
    async with chat("fast", size=(120, 40)) as c:
        await c.ask("what is a ring?")
        for key in ("ctrl+l", "f1", "ctrl+s"):
            await c.pilot.press(key)
            await c.until(lambda: c.app.screen is not c.app.view and c.app.screen.query(".box"), key)
            for theme in LIGHTS:
                c.app.theme = theme
                inside = c.app.screen.query_one(".box").region.shrink((2, 1, 2, 1))
                await c.pilot.pause()
                assert await faint(c, inside) == [], theme
            await c.closed()


@pytest.mark.parametrize("theme", ["tokamac-dark", "tokamac-light"])
async def test_what_is_chosen_in_a_dialog_can_be_read_whole(chat: Start, theme: str) -> None:
    async with chat("fast", size=(120, 40)) as c:
        c.app.theme = theme
        await c.app.push_screen(LinksScreen([OpenableLink("the paper", "https://example.org/paper")]))
        c.app.screen.query_one(OptionList).highlighted = 0
        assert await faint(c, c.app.screen.query_one(".box").region.shrink((2, 1, 2, 1))) == []
        await c.app.push_screen(ThemeScreen(theme, theme))
        await c.until(lambda: is_chosen(c, theme, "nord"), "the theme that is in use")
        assert await faint(c, c.app.screen.query_one(".box").region.shrink((2, 1, 2, 1))) == []


@pytest.mark.parametrize("theme", ["tokamac-dark", "terminal"])
async def test_a_box_to_tick_is_seen_and_the_button_that_has_the_keyboard_is_filled(chat: Start, theme: str) -> None:
    async with chat("fast", size=(120, 40)) as c:
        c.app.theme = theme
        await opened(c, "system_prompt", SystemScreen)
        box, button = c.app.screen.query_one(Tick), c.app.screen.query_one("#save", Button)
        for mark in ("☐", "☑"):
            assert f"{mark} For this chat only" in c.screen_text()
            assert not any(
                segment.style and segment.style.dim for segment in box.render_line(0) if mark in segment.text
            )
            box.toggle()
            await c.pilot.pause()
        before = cells(c, "Apply")
        button.focus()
        await c.until(lambda: is_chosen(c, "Apply", "Close"), "the button")
        assert cells(c, "Apply") != before


async def test_what_is_said_of_a_reply_and_what_it_thought_can_be_read_on_light_themes(chat: Start) -> None:
    async with chat("thinking", size=(100, 40)) as c:
        await c.ask("what is a ring?")
        for theme in LIGHTS:
            c.app.theme = theme
            await c.pilot.pause()
            own = {TextualColor.parse(c.app.theme_variables[name]).rgb for name in ("primary", "accent", "foreground")}
            said = [each for each in drawn(c, c.transcript.region) if each[1] not in own]
            assert any(" s" in text for text, _, _ in said), theme
            assert [text for text, fore, back in said if contrast(fore, back) < LEAST] == [], theme


# Text cut to cells.

NAMES = st.text(st.sampled_from("abc-/模型🙂"), max_size=30)


@given(NAMES, st.integers(2, 40))
def test_as_much_of_the_end_as_has_room(name: str, most: int) -> None:
    found = end_of(name, most)
    assert cell_len(found) <= most
    if found == name:
        return
    assert cell_len(name) > most
    assert found[0] == "…"
    assert name.endswith(found[1:])
    left_out = name[: len(name) - len(found[1:])]
    assert cell_len(f"…{left_out[-1]}{found[1:]}") > most  # nothing more would fit


# Small windows, and 256 colours: what one needs to know stays, and what has no room gives way to it.

SMALLEST = (40, 12)
USUAL = (80, 24)


def row(c: Chat, y: int) -> str:
    return c.screen_text().splitlines()[y].strip()


async def opened(c: Chat, action: str, kind: type) -> None:
    c.app.view.do(action)
    await c.until(lambda: isinstance(c.app.screen, kind), action)
    await c.pilot.pause()


# The first keys -----------------------------------------------------------------------------------------------------------


def shown(welcome: Welcome, width: int) -> list[str]:
    return [each.row.content.plain.strip() for each in welcome.rows(width)]


def test_where_the_room_ends_the_name_goes_first_and_the_keys_never() -> None:
    keys = [f"{key}  {does}" for key, does in with_keys(HINTS, Keymap(), either=True)]
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
    async with chat("steady", size=SMALLEST) as c:
        await c.ask("hello")
        line = row(c, -1)
        assert line.endswith("F1 help")
        assert " tok/s" in line
        assert "·" not in line.split()[-3:]
        await c.pilot.resize_terminal(*USUAL)
        await c.until(lambda: "first token" in row(c, -1), "the other figures")
        assert "F1 help" in row(c, -1)


async def test_a_long_name_gives_way_to_the_first_key_and_to_a_warning(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        assert c.session.engine.info is not None
        c.session.engine.info = replace(c.session.engine.info, name="org/a-model-with-a-very-long-name-4bit")
        c.app.view.redraw()
        await c.until(lambda: "…" in row(c, -1), "the end of the name")
        assert row(c, -1).endswith("long-name-4bit   F1 help")
        c.app.view.query_one(StatusLine).unsaved = lambda: True
        c.app.view.redraw()
        await c.until(lambda: "not saved" in row(c, -1), "the warning")
        assert row(c, -1).endswith("name-4bit · not saved   F1 help")


async def test_a_notice_has_its_own_lines_above_the_box_and_covers_nothing(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await c.ask("hi")
        for _ in range(2):  # told twice, it is shown once
            await c.pilot.press("ctrl+n")
            await c.until(lambda: "New chat. The model stays" in c.screen_text(), "a line as wide as the window")
            await c.ask("hi")
        await c.send("/nosuch thing")
        await c.until(lambda: "There is no command /nosuch" in c.screen_text(), "the notice")
        assert c.notices.count("New chat.") == 1
        chips = c.app.view.query_one(Chips)
        assert c.transcript.region.bottom <= chips.region.y
        assert chips.region.bottom <= c.prompt.region.y
        assert not c.app.screen.query(Toast)


# The transcript -----------------------------------------------------------------------------------------------------------


def table(*cells: tuple[str, ...]) -> Table:
    return Table(tuple(tuple(Inline(text) for text in line) for line in cells), ("left",) * len(cells[0]))


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
        await c.send("hello")
        await c.until(lambda: c.transcript.max_scroll_y > 20, "more than a page")
        await c.pilot.resize_terminal(50, 14)
        bar = c.transcript.vertical_scrollbar
        await c.until(lambda: bar.position + bar.window_size >= bar.window_virtual_size - 1, "the bar at the end")
        assert c.transcript.growing
        assert bar.window_size == c.transcript.container_size.height
        c.app.view.do("stop")


# Dialogs ------------------------------------------------------------------------------------------------------------------


def test_of_the_keys_in_a_border_the_first_and_the_last_stay_longest() -> None:
    keys = ("Enter opens", "Ctrl+E renames", "Ctrl+D deletes", "Esc closes")
    assert fitting(keys, 80) == "Enter opens · Ctrl+E renames · Ctrl+D deletes · Esc closes"
    assert fitting(keys, 50) == "Enter opens · Ctrl+E renames · Esc closes"
    assert fitting(keys, 30) == "Enter opens · Esc closes"
    assert fitting(keys, 20) == "Enter opens"


NOTES = {field.name: field.note for group in GROUPS for field in group.fields}


async def test_a_dialog_has_all_of_the_smallest_window(chat: Start) -> None:
    async with chat("fast", size=SMALLEST) as c:
        await opened(c, "system_prompt", SystemScreen)
        box = c.app.screen.query_one(".box")
        assert (box.region.x, box.region.width) == (0, 40)
        assert box.max_scroll_y == 0
        written = c.app.screen.query_one(TextArea).region
        assert written.height >= 3
        assert "Ctrl+S applies · Esc closes" in c.screen_text()
        assert "Empty means" in c.screen_text()


@pytest.mark.parametrize("size", [SMALLEST, USUAL])
async def test_the_note_of_a_setting_is_whole_below_the_list(chat: Start, size: tuple[int, int]) -> None:
    async with chat("fast", size=size) as c:
        screen = await c.opened("ctrl+t", SettingsScreen)
        about = screen.query_one("#about", Static)
        for name in set(NOTES) - {
            "thinking",
            "thinking_budget",
            "keywords",
        }:  # why this model can't take them stands there
            await c.find_setting(name)
            assert str(about.render()).startswith(NOTES[name])
            assert about.region.bottom <= size[1] - 1
            assert about.region.height >= 2 + (len(NOTES[name]) > size[0])


@pytest.mark.parametrize("variable", ["", "1"], ids=["terminal's colours", "none"])
async def test_a_system_prompts_box_is_seen(chat: Start, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv("NO_COLOR", variable)
    async with chat("fast", size=USUAL, ready=False) as c:
        c.app.theme = "terminal"
        await c.phase(EnginePhase.IDLE)
        await opened(c, "system_prompt", SystemScreen)
        area = c.app.screen.query_one(TextArea).region
        drawn = c.screen_text().splitlines()
        assert {drawn[y][area.x] for y in range(area.y, area.bottom)} == {"▌"}


async def test_the_panel_says_by_a_bar_that_it_goes_on_below(chat: Start) -> None:
    async with chat("fast", size=(100, 24)) as c:
        panel = c.app.view.query_one("#panel")
        assert not panel.show_vertical_scrollbar  # the few figures fit whole
        await c.pilot.press("f5")
        await c.until(lambda: panel.show_vertical_scrollbar, "the bar")
        assert panel.vertical_scrollbar.region.width == 1
        await c.pilot.resize_terminal(120, 50)
        await c.until(lambda: not panel.show_vertical_scrollbar, "no bar")


# What is chosen is seen, in few colours and in none --------------------------------------------------------------------------

LOOKS = ["terminal", "no colours", DARK.name, LIGHT.name]


@pytest.fixture
def dress(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[Chat], None]:
    """Give an app the look that the test is for; what must be so before it starts is so already."""
    if request.param == "no colours":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)

    def wear(c: Chat) -> None:
        if request.param != "no colours":
            c.app.theme = request.param

    return wear


def cells(c: Chat, text: str) -> list[tuple[bool, str, str]]:
    """How the segments that hold ``text`` are drawn: whether underlined, and their colours, those of reversed ones turned round."""
    screen, found = c.app.screen, []
    for strip in strips_of(screen):
        for segment in strip:
            if text in segment.text and segment.style is not None:
                style = segment.style
                pair = [
                    usual if color is None or color.is_default else color.name
                    for color, usual in ((style.color, "text"), (style.bgcolor, "ground"))
                ]
                pair = pair[::-1] if style.reverse else pair
                found.append((bool(style.underline), *pair))
    return found


def is_chosen(c: Chat, text: str, other: str) -> bool:
    """Whether some drawing of ``text`` can be read, on another ground than ``other`` has."""
    grounds = {ground for _, _, ground in cells(c, other)}
    return any(fore != ground and ground not in grounds for _, fore, ground in cells(c, text))


@pytest.mark.parametrize("dress", LOOKS, indirect=True)
async def test_what_is_chosen_in_lists_and_menus_is_seen(chat: Start, dress: Callable[[Chat], None]) -> None:
    async with chat("fast", size=(120, 40)) as c:
        dress(c)
        await c.ask("what is a ring?")
        await c.pilot.press("slash", "c")
        await c.until(lambda: is_chosen(c, "/chats", "/copy"), "the chosen command")
        await c.pilot.press("escape", "backspace", "backspace", "ctrl+l")
        await c.until(lambda: is_chosen(c, "●", "Enter opens"), "the mark of the open chat, chosen")
        await c.pilot.press(*"ring")
        await c.until(lambda: any(each[0] for each in cells(c, "ring")), "the hit")
        await c.pilot.press("down")
        await c.until(
            lambda: any(under and is_chosen(c, "ring", "Enter") for under, _, _ in cells(c, "ring")), "the hit, chosen"
        )
        assert all(fore != ground for _, fore, ground in cells(c, "ring"))
        await c.pilot.press("escape", "tab")
        await c.until(lambda: is_chosen(c, "fast", "Prefill multiplies"), "the selected message")
        await c.pilot.press("up")
        await c.until(lambda: cells(c, "▸"), "the selected prompt")


@pytest.mark.parametrize("dress", LOOKS, indirect=True)
async def test_a_list_that_drops_has_an_edge_and_shows_the_chosen(chat: Start, dress: Callable[[Chat], None]) -> None:
    async with chat("fast", size=(120, 40)) as c:
        dress(c)
        await c.pilot.press("f4")
        await c.until(lambda: c.app.screen.query(Select), "the form")
        c.app.screen.query(Select).first().focus()
        await c.pilot.press("enter", "down")
        overlay = c.app.screen.query(SelectOverlay).first()
        await c.until(lambda: overlay.display and overlay.highlighted, "the list")
        await c.pilot.pause()
        region = overlay.region
        lines = [
            "".join(segment.text for segment in strip.crop(region.x, region.right))
            for strip in strips_of(c.app.screen)[region.y : region.bottom]
        ]
        options = [line.strip(" │▊▎") for line in lines if line.strip(" ─│╭╮╰╯▔▁▊▎")]
        assert options[1:] == ["2", "3", "4", "5", "6", "8"]  # and nothing of what is below
        chosen = overlay.get_visual_style("option-list--option", "option-list--option-highlighted").rich_style
        usual = overlay.get_visual_style("option-list--option").rich_style
        assert bool(chosen.reverse) or chosen.bgcolor != usual.bgcolor


@pytest.mark.parametrize("dress", LOOKS, indirect=True)
async def test_an_empty_input_is_seen(chat: Start, dress: Callable[[Chat], None]) -> None:
    async with chat("fast", size=(120, 40)) as c:
        dress(c)
        await opened(c, "system_prompt", SystemScreen)
        empty = c.app.screen.query_one("#name", Input)
        region = empty.region
        strip = strips_of(c.app.screen)[region.y]
        inside, beside = (
            {(segment.text.strip(), str(segment.style and segment.style.bgcolor)) for segment in strip.crop(*span)}
            for span in ((region.x, region.right), (region.x - 2, region.x))
        )
        assert inside - beside


# The terminal's background ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "dark"),
    [
        (b"\x1b]11;rgb:0000/0000/0000\x1b\\\x1b[?62;c", True), (b"\x1b]11;rgb:ffff/ffff/e8e8\a", False),
        (b"\x1b]11;rgba:ff/ff/ff/ff\x1b\\", False), (b"\x1b]11;rgb:28/2c/34\a", True), (b"\x1b[?62;c", None),
        (b"", None), (b"\x1b]11;rgb:xx/00/00\a", None),
    ],
)  # fmt: skip
def test_an_answer_tells_how_dark_the_terminal_is(said: bytes, dark: bool | None) -> None:
    assert is_dark_answer(said) is dark


def test_without_an_answer_the_environment_tells_then_the_system(tmp_path: Path) -> None:
    assert not guess({"COLORFGBG": "0;15"}, platform="darwin", home=tmp_path)
    assert guess({"COLORFGBG": "15;default;0"}, platform="linux")
    assert guess({"COLORFGBG": "15;default"}, platform="linux")
    assert guess({}, platform="darwin", home=tmp_path), "nothing is known"
    file = tmp_path / "Library" / "Preferences" / ".GlobalPreferences.plist"
    file.parent.mkdir(parents=True)
    for written, dark in (({"AppleInterfaceStyle": "Dark"}, True), ({}, False)):
        file.write_bytes(plistlib.dumps(written))
        assert guess({}, platform="darwin", home=tmp_path) is dark
    file.write_bytes(b"damaged")
    assert guess({}, platform="darwin", home=tmp_path)


ASKS = """
import sys
from tokamac.app.tui.run import BackgroundQuery
with BackgroundQuery() as query:
    dark = query.is_dark()
print("dark" if dark else "light", flush=True)
print("left", repr(sys.stdin.readline()), flush=True)
"""


@pytest.mark.parametrize(
    ("answer", "dark"),
    [(b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;4c", "light"), (b"\x1b[?62;4c", "dark"), (b"", "dark")],
    ids=["answers", "no colours", "silent"],
)
def test_a_terminal_is_asked_and_nothing_of_its_answer_is_left(answer: bytes, dark: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover (the other process)
        environment = {**os.environ, "TERM": "xterm-256color", "COLORFGBG": ""}
        os.execve(sys.executable, [sys.executable, "-c", ASKS], environment)
    try:
        said = b""
        while QUESTIONS not in said:
            said += os.read(terminal, 1024)
        os.write(terminal, answer)
        while b"\n" not in said.replace(QUESTIONS, b""):
            said += os.read(terminal, 1024)
        os.write(terminal, b"typed\n")
        while b"left" not in said or not said.endswith(b"\r\n"):
            said += os.read(terminal, 1024)
    finally:
        os.waitpid(pid, 0)
        os.close(terminal)
    assert f"{dark}\r\n".encode() in said
    assert rb"left 'typed\n'" in said


@pytest.mark.parametrize(("dark", "name"), [(True, DARK.name), (False, LIGHT.name)])
def test_the_theme_is_the_terminals_or_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dark: bool, name: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    paths = {"settings_path": tmp_path / "s.toml", "log_path": tmp_path / "log", "store_path": tmp_path / "c.db"}
    for written, expected in ((None, name), ("nord", "nord"), ("nosuch", name), (TERMINAL.name, TERMINAL.name)):
        if written is not None:
            save(tmp_path / "s.toml", Settings(theme=written))
        app, bridge = build(ChatOptions(engine=["true"], **paths), lambda: dark)
        bridge.close()
        assert app.theme == expected
    monkeypatch.setenv("NO_COLOR", "1")
    app, bridge = build(ChatOptions(engine=["true"], **paths), lambda: dark)
    bridge.close()
    assert app.theme == TERMINAL.name


# Emoji of several characters, which terminals draw in more or fewer cells than there are in the row ---------------------------

CLUSTERS = ["👩‍💻", "🇩🇪", "👍🏽", "❤️", "⚠️", "1️⃣", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🧑🏿‍🚀", "👁️‍🗨️", "🤷🏻‍♀️", "🏴‍☠️", "☝🏿", "*️⃣", "🇺🇳🇪🇺"]


def columns(data: str, width: Callable[[str], int]) -> dict[str, int]:
    """Return in which column each letter is drawn by a terminal for which a character has so many cells."""
    at = kept = 0
    found = {}
    for part in re.findall(r"\x1b7|\x1b8|\x1b\[\d+C|.", data):
        match part:
            case "\x1b7":
                kept = at
            case "\x1b8":
                at = kept
            case _ if part.endswith("C") and len(part) > 1:
                at += int(part[2:-1])
            case _:
                found[part] = at
                at += width(part)
    return found


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("wide", [0, 1, 2])
def test_an_edge_stays_where_it_is_however_a_terminal_draws_what_is_before_it(cluster: str, wide: int) -> None:
    cells = cell_len(cluster)
    row = f"a {cluster}b {cluster}|"
    assert cell_len(row) == 2 + cells + 2 + cells + 1
    drawn_by = columns(anchored(row), lambda char: 1 if char.isascii() else wide)
    assert (drawn_by["a"], drawn_by["b"], drawn_by["|"]) == (0, 2 + cells, 4 + 2 * cells)


@pytest.mark.parametrize("text", ["plain \x1b[31mtext│", "é ☕ 模型 α̂", "\x1b]2;a 👩‍💻 · tokamac\a", ""])
def test_all_else_is_written_as_it_is(text: str) -> None:
    assert anchored(text) == text


async def test_title_and_prompt_stand_where_the_column_of_text_does(chat: Start) -> None:
    async with chat("fast", size=(80, 40)) as c:
        await c.ask("what is a ring?")
        await c.send("/title Rings")
        await c.until(lambda: "Rings" in c.screen_text().splitlines()[0], "the title")
        for size in ((80, 40), (200, 50), (211, 50)):
            await c.pilot.resize_terminal(*size)
            await c.pilot.pause()
            lines = c.screen_text().splitlines()
            name = next(line.index("fast") for line in lines if line.strip().startswith("fast"))
            assert lines[0].index("Rings") == name
            box = next(line for line in lines if "╭" in line)
            assert box.index("╭") == name - 2
            assert "Write a message" in lines[lines.index(box) + 1][name : name + 20]
