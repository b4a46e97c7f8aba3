"""Numbers for display; None is ``unknown``, never 0. And the origin of a plot's logarithmic axis."""

from collections.abc import Iterable

from tokamac.engine.files import figures
from tokamac.engine.files import size as size_text

UNKNOWN = "unknown"
HOUR_S = 3600


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def short(value: int | None) -> str:
    """Return a count in three figures: 981, 32.8k, 4.02B."""
    if value is None:
        return UNKNOWN
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{figures(value / size)}{letter}"
    return str(value)


def size(value: int | None) -> str:
    """Return bytes in decimal units: 2.26 GB."""
    return UNKNOWN if value is None else size_text(value)


def rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{figures(value)} tok/s"


def rates(value: float | None, within: tuple[float, float] | None) -> str:
    """Return a rate as a range where one is known: ``31–36 tok/s``."""
    if within is None or figures(within[0]) == figures(within[1]):
        return rate(value)
    return f"{figures(within[0])}–{figures(within[1])} tok/s"


def bandwidth(value: float | None) -> str:
    return UNKNOWN if value is None else f"{figures(value)} GB/s"


def tflops(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g} TFLOP/s"


def percent(share: float | None) -> str:
    """Return a share in whole per cent; below 1 % but above 0 is not written as 0."""
    if share is None:
        return UNKNOWN
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{figures(value)} ms"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 0.0995:
        return f"{value * 1e3:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 99.5:
        return f"{value:.0f} s"
    whole = round(value)
    if whole >= HOUR_S:
        return _hours(whole)
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s"


def minutes(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    whole = round(value / 60)
    if whole >= 60:
        return _hours(60 * whole)
    return f"{whole} min" if whole else "under a minute"


def _hours(value: int) -> str:
    hours, rest = divmod(round(value / 60), 60)
    return f"{hours:,} h {rest:02d} min"


def wait(value: float | None) -> str:
    """Return a time to first token, always in seconds, for comparison: 0.06 s."""
    if value is None:
        return UNKNOWN
    if value < 0.005:
        return "under 0.01 s"
    return f"{value:.2f} s" if value < 0.995 else seconds(value)


# How many times lower than the lowest mark the axis begins: of a mark outside of it plotext can't draw the legend.
_BENEATH = 2


def lowest(roof: float, marks: Iterable[float | None]) -> float:
    return min([roof, *(mark / _BENEATH for mark in marks if mark)])
