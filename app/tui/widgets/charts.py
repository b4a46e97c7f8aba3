"""Bars and sparklines as text."""

from collections.abc import Sequence

from textual.content import Content

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
