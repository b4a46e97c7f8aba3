"""What several runs come to: medians field by field, and how far the runs lie apart."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some values, and the smallest and the largest of them: all of the runs, none left out as an outlier."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return it as the JSON has it."""
        return {"median": self.median, "min": self.low, "max": self.high}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def pair_ratios(above: Sequence[float | None], below: Sequence[float | None]) -> Spread | None:
    """Return the spread of the quotients pair by pair: what slows the machine for a while slows both of a pair.

    A pair with an unknown side is left out. Raises ValueError for sequences of different lengths.
    """
    pairs = zip(above, below, strict=True)
    return spread(a / b if a is not None and b else None for a, b in pairs)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return field by field the median of what is known; None where no run knows it."""
    middle: dict[str, Any] = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        if known and isinstance(known[0], dict):
            middle[name] = medians(known)
        elif known and all(isinstance(value, int) for value in known):
            middle[name] = statistics.median_low(known)  # a count stays whole
        else:
            middle[name] = statistics.median(known) if known else None
    return middle
