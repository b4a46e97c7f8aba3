"""Tokamac's themes, readable text colours for every theme, and bars."""

# ``tokamac-dark`` and ``tokamac-light``: 24 bits or the nearest of 256; greys are nearly neutral, since a
# bluish dark grey would become navy or black. ``terminal``: the user's sixteen colours. Many themes' accents
# and greys lack contrast, so text colours are derived until they meet WCAG 2.

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from textual.color import BLACK, WHITE, Color
from textual.content import Content
from textual.theme import Theme

LEAST = 4.5  # the contrast that running text needs, by WCAG 2


def contrast(one: Color, other: Color) -> float:
    """Return the contrast of two opaque colours: 1 (equal) to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: Color) -> float:
    """Return the relative luminance, 0 (black) to 1."""
    red, green, blue = (_linear(part / 255) for part in colour.rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def readable(colour: Color, grounds: Iterable[Color]) -> Color:
    """Return ``colour`` with contrast ``LEAST`` on each of ``grounds``, else black or white."""
    behind = tuple(grounds)
    target = max((WHITE, BLACK), key=lambda end: _worst(end, behind))
    steps = (colour.blend(target, percent / 100) for percent in range(101))
    return next((step for step in steps if _worst(step, behind) >= LEAST), target)


def muted(foreground: Color, grounds: Iterable[Color], floor: int) -> Color:
    """Mix ``foreground`` into the first ground up to contrast ``LEAST``. floor: minimum per cent."""
    # Opaque, since rows are drawn ahead, before their ground is known.
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


AUTOMATIC = "automatic"  # in place of a theme's name: the dark or the light one, by the terminal's background
FAINT = "$text-muted"  # the style of secondary text
# The style of a label beside its value, and of the line below a reply: dimmer than the rest in every theme.
LABEL = "$text-label"
LEAST_MUTED = 55  # per cent of the foreground in muted text. Less may be readable, but looks like a mistake.
SELECTED = 0.25  # share of the primary colour in the ground of a selected row, as in the style sheets of lists
ACCENTS = ("primary", "secondary", "accent", "warning", "error", "success")
# The colours of prose, and what other themes have for them.
PROSE = {"prose-code": "secondary", "prose-marker": "primary", "prose-heading": "primary"}


def text_colours(theme: Theme, colours: Mapping[str, str]) -> dict[str, str]:
    """Return readable text variables that ``theme`` doesn't set; terminal colours, unknown, stay."""
    sources = {f"text-{name}": name for name in ACCENTS} | PROSE
    if theme.ansi:
        # A share of a colour that nobody knows is that colour; the terminal itself can dim it.
        found = {name: colours[source] for name, source in sources.items()} | {"text-label": "dim"}
    else:
        grounds = tuple(Color.parse(colours[name]) for name in ("background", "surface"))
        found = {name: readable(Color.parse(colours[source]), grounds).hex for name, source in sources.items()}
        panel, foreground = Color.parse(colours["panel"]), Color.parse(colours["foreground"])
        focused = panel.tint(foreground.with_alpha(0.05))  # as Textual tints a focused input
        boxes = (*grounds, panel, focused)
        selected = grounds[1].blend(Color.parse(colours["primary"]), SELECTED)
        rows = (
            (*grounds, selected) if contrast(foreground, selected) >= LEAST else grounds
        )  # else nothing is readable there
        found["text-muted"] = muted(foreground, rows, LEAST_MUTED).hex
        found["text-label"] = found["text-muted"]
        found["text-disabled"] = muted(foreground, boxes, LEAST_MUTED).hex  # the placeholder of an input
    return {name: value for name, value in found.items() if name not in theme.variables}


def end_of(name: str, most: int) -> str:
    if cell_len(name) <= most:
        return name
    end = name[1 - max(most, 2) :]
    while cell_len(end) >= max(most, 2):
        end = end[1:]
    return f"…{end}"


TICKS = "▁▂▃▄▅▆▇█"
EMPTY = "$foreground 25%"


def bar(share: float | None, width: int, style: str = "$primary") -> Content:
    """Return a bar filled to ``share`` (0…1, None: empty), readable without colours."""
    filled = 0 if share is None else round(min(max(share, 0.0), 1.0) * width)
    return Content.styled("━" * filled, style) + Content.styled("─" * (width - filled), EMPTY)


def sparkline(values: Sequence[float], width: int) -> str:
    shown = values[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(TICKS[min(len(TICKS) - 1, int(value / top * len(TICKS)))] for value in shown)
