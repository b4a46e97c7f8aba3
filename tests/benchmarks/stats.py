"""Medians, ranges, and ratios taken in pairs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """What several runs gave, in their order; never empty."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)


def series(values: Sequence[float | None]) -> Series:
    """Return the values as a series. Raises ValueError where one is unknown or there is none."""
    known = tuple(value for value in values if value is not None)
    if not known or len(known) != len(values):
        raise ValueError("a run gave no figure")
    return Series(known)


def ratios(above: Series, below: Series) -> Series:
    """Return the quotients run by run: what slows the machine for a while slows both of a pair."""
    return Series(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def alternate(rounds: int, *measures: Callable[[int], T], budget_s: float | None = None) -> list[list[T]]:
    """Call the measures in turn (A B A B …) with the number of the round, from 1; return what each of them gave.

    Ends after ``rounds``, or before a further round that would probably go over ``budget_s`` seconds in all.
    """
    results: list[list[T]] = [[] for _ in measures]
    began = time.monotonic()
    for number in range(1, rounds + 1):
        for result, measure in zip(results, measures, strict=True):
            result.append(measure(number))
        spent = time.monotonic() - began
        if budget_s is not None and spent * (number + 1) / number > budget_s:
            break
    return results


def number(value: float) -> str:
    """Return a value with three significant digits, or all that stand before the point."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"
