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


def muted_share(grounds: Iterable[Color], floor: int) -> int:
    """Return how many per cent of black or white, whichever Textual takes there, give ``LEAST`` on each of ``grounds``.

    floor: the result is no less, even where less would do.
    """
    behind = tuple(grounds)
    return next((share for share in range(floor, 100) if _muted(behind, share) >= LEAST), 100)


def _muted(grounds: tuple[Color, ...], percent: int) -> float:
    return min(contrast(ground + ground.get_contrast_text(percent / 100), ground) for ground in grounds)


def _worst(colour: Color, grounds: tuple[Color, ...]) -> float:
    return min(contrast(colour, ground) for ground in grounds)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
