"""How well text stands out from what is behind it, by WCAG 2, and colours changed until it does. Pure."""

from collections.abc import Iterable

from textual.color import BLACK, WHITE, Color

LEAST = 4.5
"""The contrast that running text needs at least."""


def contrast(one: Color, other: Color) -> float:
    """Return the contrast of two colours that nothing shines through: 1 of equal ones, 21 of black and white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: Color) -> float:
    """Return the relative luminance, from 0 of black to 1 of white."""
    red, green, blue = (_linear(part / 255) for part in colour.rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def readable(colour: Color, grounds: Iterable[Color]) -> Color:
    """Return ``colour``, made lighter or darker by as little as gives it ``LEAST`` on each of ``grounds``.

    Grounds that no colour stands out from so well get the black or white that is best on them.
    """
    behind = tuple(grounds)
    target = max((WHITE, BLACK), key=lambda end: _worst(end, behind))
    steps = (colour.blend(target, percent / 100) for percent in range(101))
    return next((step for step in steps if _worst(step, behind) >= LEAST), target)


def muted(foreground: Color, grounds: Iterable[Color], floor: int) -> Color:
    """Return the first of ``grounds`` with as little of ``foreground`` over it as gives it ``LEAST`` on each of them.

    floor: the per cent of the foreground that there are at least, even where less would do. A colour of its own, with nothing
    shining through: text on a screen that has its rows drawn ahead can't tell what will be behind it.
    """
    behind = tuple(grounds)
    steps = (behind[0].blend(foreground, percent / 100) for percent in range(floor, 101))
    return next((step for step in steps if _worst(step, behind) >= LEAST), readable(foreground, behind))


def _worst(colour: Color, grounds: tuple[Color, ...]) -> float:
    return min(contrast(colour, ground) for ground in grounds)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
