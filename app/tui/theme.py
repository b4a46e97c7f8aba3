"""Tokamac's own themes. Textual's are in the palette beside them.

``terminal`` is the first: it has no colours but the sixteen that the user has chosen for their terminal, on the terminal's own
background, so it is light where that is light, and as readable as all else there. What is pointed at is reversed, which
needs no colour. The two others are ours, in 24 bits, or in the nearest of 256 where a terminal has no more: their greys are
nearly neutral, for of a bluer dark one the nearest is navy blue, or black like the one beneath it.

What text is written in beside the foreground, ``text-muted``, ``text-primary`` and so on, and the colours of prose, is derived so
that it can be read in every theme: many have accents, or greys, that are too near to their background for text.

How well text stands out from what is behind it, by WCAG 2, and colours changed until it does. Pure.

Text cut to a number of the terminal's cells: a letter of Chinese or an emoji takes two.

Bars and sparklines as text.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from textual.color import BLACK, WHITE, Color
from textual.content import Content
from textual.theme import Theme

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


_DARK = {
    "prose-code": "#8bd5ca",
    "prose-marker": "#ff8f6b",
    "prose-heading": "#ffb199",
    "footer-key-foreground": "#ff8f6b",
    "input-selection-background": "#ff8f6b 35%",
    "screen-selection-background": "#ff8f6b 35%",
    "block-cursor-text-style": "none",
}
_LIGHT = {
    "prose-code": "#0f766e",
    "prose-marker": "#c2410c",
    "prose-heading": "#9a3412",
    "footer-key-foreground": "#c2410c",
    "input-selection-background": "#c2410c 25%",
    "screen-selection-background": "#c2410c 25%",
    "block-cursor-text-style": "none",
}
TERMINAL = Theme(
    name="terminal",
    ansi=True,
    primary="ansi_magenta",  # blue, the usual choice, can't be read on the black of many terminals
    secondary="ansi_cyan",
    accent="ansi_blue",
    warning="ansi_yellow",
    error="ansi_red",
    success="ansi_green",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
    variables={
        "prose-code": "ansi_cyan",
        "prose-marker": "ansi_magenta",
        "prose-heading": "ansi_magenta",
        "footer-key-foreground": "ansi_magenta",
        "border": "ansi_magenta",
        "border-blurred": "ansi_default",
        "ansi-background": "ansi_default",
        "ansi-foreground": "ansi_default",
        "block-cursor-foreground": "ansi_default",
        "block-cursor-background": "ansi_default",
        "block-cursor-text-style": "reverse",
        "block-cursor-blurred-text-style": "bold",
        "input-cursor-foreground": "ansi_default",
        "input-cursor-background": "ansi_default",
        "input-cursor-text-style": "reverse",
        "input-selection-foreground": "ansi_black",
        "input-selection-background": "ansi_cyan",
        "screen-selection-foreground": "ansi_black",
        "screen-selection-background": "ansi_cyan",
    },
)
DARK = Theme(
    name="tokamac-dark",
    primary="#ff8f6b",
    secondary="#8bd5ca",
    accent="#ffb199",
    warning="#e9c46a",
    error="#ef6f6c",
    success="#8fd694",
    foreground="#e2e4e9",
    background="#14151a",
    surface="#1b1d23",
    panel="#23262e",
    dark=True,
    variables=_DARK,
)
LIGHT = Theme(
    name="tokamac-light",
    primary="#c2410c",
    secondary="#0f766e",
    accent="#9a3412",
    warning="#a16207",
    error="#b91c1c",
    success="#15803d",
    foreground="#1f2328",
    background="#fbfaf8",
    surface="#f2f1ef",
    panel="#eae8e4",
    dark=False,
    variables=_LIGHT,
)


FAINT = "$text-muted"
"""The style of what is said beside the rest."""
LEAST_MUTED = 55
"""Per cent of the foreground in muted text. Where less would be enough to read it, it would still look like a mistake."""
POINTED = 0.25
"""Share of the primary colour in the ground of a row that is pointed at, as the style sheets of lists have it."""
ACCENTS = ("primary", "secondary", "accent", "warning", "error", "success")
PROSE = {"prose-code": "secondary", "prose-marker": "primary", "prose-heading": "primary"}
"""The colours of prose, and what a theme that is not ours has for them."""
FIRST = TERMINAL.name
"""The theme until one is chosen."""


def text_colours(theme: Theme, colours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of text that ``theme`` does not set itself. colours: all that Textual makes of the theme.

    On background and surface each has the contrast of running text. A terminal's own colours, which nobody knows, stay as they are.
    """
    sources = {f"text-{name}": name for name in ACCENTS} | PROSE
    if theme.ansi:
        found = {name: colours[source] for name, source in sources.items()}
    else:
        grounds = tuple(Color.parse(colours[name]) for name in ("background", "surface"))
        found = {name: readable(Color.parse(colours[source]), grounds).hex for name, source in sources.items()}
        panel, foreground = Color.parse(colours["panel"]), Color.parse(colours["foreground"])
        focused = panel.tint(foreground.with_alpha(0.05))  # as Textual tints the box that one writes in
        boxes = (*grounds, panel, focused)
        pointed = grounds[1].blend(Color.parse(colours["primary"]), POINTED)
        rows = (
            (*grounds, pointed) if contrast(foreground, pointed) >= LEAST else grounds
        )  # else nothing is readable there
        found["text-muted"] = muted(foreground, rows, LEAST_MUTED).hex
        found["text-disabled"] = muted(foreground, boxes, LEAST_MUTED).hex  # what an empty box to write in says
    return {name: value for name, value in found.items() if name not in theme.variables}


def end_of(name: str, most: int) -> str:
    """Return ``name``, or as much of its end, after an ellipsis, as has room in ``most`` cells; two at least."""
    if cell_len(name) <= most:
        return name
    end = name[1 - max(most, 2) :]
    while cell_len(end) >= max(most, 2):
        end = end[1:]
    return f"…{end}"


TICKS = "▁▂▃▄▅▆▇█"
EMPTY = "$foreground 25%"


def bar(share: float | None, width: int, style: str = "$primary") -> Content:
    """Return a bar filled to ``share`` (0…1); empty where it is unknown. What is empty is a thin line, also without colours."""
    filled = 0 if share is None else round(min(max(share, 0.0), 1.0) * width)
    return Content.styled("━" * filled, style) + Content.styled("─" * (width - filled), EMPTY)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as a row of ticks, from zero to the largest."""
    shown = values[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(TICKS[min(len(TICKS) - 1, int(value / top * len(TICKS)))] for value in shown)
