"""Text can be read in every theme: each colour that the app derives for it, and what is drawn with them on the screen."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from textual.color import Color
from textual.geometry import Region
from textual.theme import BUILTIN_THEMES, Theme

from tests.app.conftest import Chat
from tests.app.test_theme import contrast
from tokamac.app.tui.theme import DARK, LIGHT, TERMINAL, readable, text_colours

Start = Callable[..., Any]
LEAST = 4.5
"""Of WCAG 2, for running text."""
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
    behind = Color.parse(known[ground])
    derived = [name for name in known if name.startswith("prose-") or name in text_colours(theme, known)]
    assert {"text-muted", "text-warning", "prose-code", "prose-heading", "prose-marker"} <= set(derived)
    found = {name: contrast((behind + Color.parse(known[name])).rgb, behind.rgb) for name in derived}
    assert {name: ratio for name, ratio in found.items() if ratio < LEAST} == {}


@pytest.mark.parametrize("theme", RGB, ids=lambda theme: theme.name)
def test_a_colour_that_can_be_read_already_stays_as_it_is(theme: Theme) -> None:
    known = variables(theme)
    grounds = [Color.parse(known[name]) for name in ("background", "surface")]
    for name in ("primary", "secondary", "accent", "warning", "error", "success"):
        own = Color.parse(known[name])
        if all(contrast(own.rgb, ground.rgb) >= LEAST for ground in grounds):
            assert Color.parse(known[f"text-{name}"]).rgb == pytest.approx(own.rgb, abs=1)


def test_a_colour_becomes_darker_on_a_light_ground_and_lighter_on_a_dark_one() -> None:
    for ground, end in (("#ffffff", "#000000"), ("#000000", "#ffffff")):
        found, behind = (
            readable(Color.parse("#ffa62b" if end == "#000000" else "#003055"), [Color.parse(ground)]),
            ground,
        )
        assert LEAST <= contrast(found.rgb, Color.parse(behind).rgb) < LEAST + 0.5


def test_where_nothing_stands_out_so_well_the_best_is_taken() -> None:
    grounds = [Color.parse("#707070"), Color.parse("#808080")]  # white has 3.9 on the one, black 4.2 on the other
    assert readable(Color.parse("#7a7a7a"), grounds).rgb == (0, 0, 0)


def test_a_terminals_own_colours_stay_its_own() -> None:
    found = text_colours(TERMINAL, TERMINAL.to_color_system().generate())
    assert not {"text-muted", "text-disabled"} & set(found)
    assert all(value.startswith("ansi_") for value in found.values())


def drawn(c: Chat, region: Region) -> Iterator[tuple[str, tuple[int, int, int], tuple[int, int, int]]]:
    """The words in a region of the screen, their colour and what is behind it."""
    screen = c.app.screen
    for strip in screen._compositor.render_strips(screen.size)[region.y : region.bottom]:
        for segment in strip.crop(region.x, region.right):
            style = segment.style
            if any(map(str.isalnum, segment.text)) and style is not None and style.color and style.bgcolor:
                yield segment.text.strip(), tuple(style.color.get_truecolor()), tuple(style.bgcolor.get_truecolor())


@pytest.mark.parametrize("theme", RGB, ids=lambda theme: theme.name)
def test_muted_text_stands_out_less_than_the_rest(theme: Theme) -> None:
    known = variables(theme)
    behind = Color.parse(known["background"])
    rest = contrast(Color.parse(known["foreground"]).rgb, behind.rgb)
    muted = contrast(Color.parse(known["text-muted"]).rgb, behind.rgb)
    assert muted < rest or rest < LEAST + 0.5


async def faint(c: Chat, region: Region) -> list[tuple[str, float]]:
    """What of it is fainter than running text may be, and fainter than the theme's own foreground is there."""
    await c.pilot.pause()
    own = Color.parse(c.app.theme_variables["foreground"]).rgb
    found = [(text, contrast(fore, back), contrast(own, back)) for text, fore, back in drawn(c, region)]
    assert found
    return [(text, round(ratio, 2)) for text, ratio, theirs in found if ratio < LEAST and ratio < theirs - 0.1]


async def test_what_stands_beside_the_chat_can_be_read_on_light_themes(chat: Start) -> None:
    async with chat("fast", size=(120, 40)) as c:
        await c.ready()
        for theme in LIGHTS:
            c.app.theme = theme
            muted = variables(c.app.available_themes[theme])["text-muted"]
            await c.until(lambda muted=muted: c.app.theme_variables["text-muted"] == muted)  # type: ignore[misc]
            assert await faint(c, c.app.chat.query_one("#panel").region) == [], theme


@pytest.mark.parametrize("key", ["ctrl+l", "f1", "ctrl+s"])
async def test_what_a_dialog_says_can_be_read_on_light_themes(chat: Start, key: str) -> None:
    async with chat("fast", size=(120, 40)) as c:
        await c.ready()
        await c.ask("what is a ring?")
        await c.pilot.press(key)
        await c.until(lambda: c.app.screen is not c.app.chat and c.app.screen.query(".box"))
        for theme in LIGHTS:
            c.app.theme = theme
            inside = c.app.screen.query_one(".box").region.shrink((2, 1, 2, 1))
            await c.pilot.pause()
            assert await faint(c, inside) == [], theme


async def test_what_is_said_of_a_reply_and_what_it_thought_can_be_read_on_light_themes(chat: Start) -> None:
    async with chat("thinking", size=(100, 40)) as c:
        await c.ready()
        await c.ask("what is a ring?")
        for theme in LIGHTS:
            c.app.theme = theme
            await c.pilot.pause()
            own = {Color.parse(c.app.theme_variables[name]).rgb for name in ("primary", "accent", "foreground")}
            said = [each for each in drawn(c, c.transcript.region) if each[1] not in own]
            assert any(" s" in text for text, _, _ in said), theme
            assert [text for text, fore, back in said if contrast(fore, back) < LEAST] == [], theme
