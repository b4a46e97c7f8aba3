"""Tokamac's themes can be read: in 24 bits, and in the nearest of 256 colours, which is what Terminal.app has."""

import pytest
from rich.color import Color, ColorSystem
from textual.theme import Theme

from tokamac.app.tui.theme import DARK, LIGHT, PROSE, TERMINAL

TEXTS = ["foreground", "primary", "secondary", "accent", "warning", "error", "success"]
GROUNDS = ["background", "surface", "panel"]
LEAST_CONTRAST = 3.0
"""Of WCAG 2, for what is more than a line of running text; running text has 4.5."""


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
