"""Where the vertical axis of a roofline begins: for plotext's plots, in the shell and in the chat."""

from collections.abc import Iterable

_BENEATH = 2
"""How many times lower than the lowest mark the axis begins: of a mark outside of it plotext can't draw the legend."""


def lowest(roof: float, marks: Iterable[float | None]) -> float:
    """Return where the logarithmic axis begins, given where the roof does at its left end, and the marks; None is not drawn."""
    return min([roof, *(mark / _BENEATH for mark in marks if mark)])
