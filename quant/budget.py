"""Spend a budget of bytes where it does the least damage: one packing for every tensor.

A multiple-choice knapsack. Its relaxation is solved by one price λ for a byte: every tensor takes the candidate of least
damage + λ · bytes, and those lie on the lower convex hull of its candidates.

    damage │ o                    the hull's steps of all tensors, steepest first, are bought while the budget lasts;
           │  \\  o               then whatever later step still fits is taken as well (the greedy fill)
           │   o─._
           │       ‾o───o
           └───────────── bytes

Greedy misses the best choice by less than one step. What may still beat it is looked for exactly: a candidate's damage + λ · bytes
above the least of its tensor is its regret, and no choice whose regrets add up to more than the gap between greedy and relaxed
damage can win (Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem"). The few that remain are searched.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokamac.engine.errors import OptionError
from tokamac.engine.limits.config_cost import Packing

MAX_FRONTIER = 4096
"""Partial choices that the exact search keeps in view. More, and the greedy choice stands: it is then very near the best."""

ROUNDING = 1e-9
"""Relative error allowed to sums of damages, so that a tie is not lost to rounding."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a tensor: its packing (None: unpacked), the bytes it takes, and the damage it does, in any one unit."""

    packing: Packing | None
    nbytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class _Step:
    """On the hull of one tensor, from one candidate to the next larger: what it costs and what it saves."""

    name: str
    to: Candidate
    nbytes: int
    saved: float

    @property
    def slope(self) -> float:
        """Damage saved by a byte."""
        return self.saved / self.nbytes


Chosen = dict[str, Candidate]


def smallest_bytes(candidates: Mapping[str, Sequence[Candidate]]) -> int:
    """Return the bytes of the smallest choice there is."""
    return sum(min(each.nbytes for each in options) for options in candidates.values())


def spend(candidates: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> Chosen:
    """Return one candidate for every tensor: the least total damage that takes at most ``budget_bytes``.

    Where several are as good, one that takes no more bytes than the others. The same arguments give the same choice.
    Raises OptionError if nothing fits.
    """
    needed = smallest_bytes(candidates)
    if needed > budget_bytes:
        raise OptionError(
            f"{budget_bytes} bytes are too few: the smallest packing takes {needed}", "Allow more bits per weight."
        )
    useful = {name: _undominated(options) for name, options in candidates.items()}
    steps = sorted(_all_steps(useful), key=lambda step: -step.slope)
    greedy, price = _buy(useful, steps, budget_bytes)
    return _search(useful, budget_bytes, greedy, price) or greedy


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """Return the bytes of a choice."""
    return sum(each.nbytes for each in chosen.values())


def total_damage(chosen: Mapping[str, Candidate]) -> float:
    """Return the damage of a choice."""
    return sum(each.damage for each in chosen.values())


def _undominated(options: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in bytes and damage, smallest first: damages fall strictly."""
    kept: list[Candidate] = []
    for each in sorted(options, key=lambda option: (option.nbytes, option.damage)):
        if not kept or each.damage < kept[-1].damage:
            kept.append(each)
    return kept


def _all_steps(useful: Mapping[str, Sequence[Candidate]]) -> Iterator[_Step]:
    for name, options in useful.items():
        for small, large in pairwise(_hull(options)):
            yield _Step(name, large, large.nbytes - small.nbytes, small.damage - large.damage)


def _hull(options: Sequence[Candidate]) -> list[Candidate]:
    """Return the lower convex hull: each step saves less damage a byte than the one before."""
    hull: list[Candidate] = []
    for each in options:
        while len(hull) > 1 and _above(hull[-2], hull[-1], each):
            hull.pop()
        hull.append(each)
    return hull


def _above(left: Candidate, middle: Candidate, right: Candidate) -> bool:
    """Whether ``middle`` lies on or above the line between the others."""
    first = (left.damage - middle.damage) * (right.nbytes - middle.nbytes)
    second = (middle.damage - right.damage) * (middle.nbytes - left.nbytes)
    return first <= second


def _buy(useful: Mapping[str, Sequence[Candidate]], steps: Sequence[_Step], budget_bytes: int) -> tuple[Chosen, float]:
    """Return the greedy choice, and the price of a byte: the slope of the first step that did not fit (0: all did)."""
    chosen = {name: options[0] for name, options in useful.items()}
    left, price, stopped = budget_bytes - total_bytes(chosen), 0.0, set[str]()
    for step in steps:
        # A step starts where the one before it ended, so a tensor that missed one takes no later one.
        if step.name in stopped or step.nbytes > left:
            stopped.add(step.name)
            price = price or step.slope
            continue
        chosen[step.name] = step.to
        left -= step.nbytes
    return _fill(useful, chosen, left), price


def _fill(useful: Mapping[str, Sequence[Candidate]], chosen: Chosen, left: int) -> Chosen:
    """Spend what is left on the best single changes that fit, off the hull too, until none does."""
    filled = dict(chosen)
    while True:
        better = [
            (filled[name].damage - each.damage, name, each)
            for name, options in useful.items()
            for each in options
            if each.damage < filled[name].damage and each.nbytes - filled[name].nbytes <= left
        ]
        if not better:
            return filled
        _, name, best = max(better, key=lambda entry: entry[0])
        left -= best.nbytes - filled[name].nbytes
        filled[name] = best


@dataclass(frozen=True, slots=True)
class _Partial:
    """Candidates for the first few tensors: a linked list, newest first."""

    nbytes: int
    damage: float
    regret: float
    last: Candidate | None
    before: "_Partial | None"

    def picks(self) -> list[Candidate]:
        """Return the candidates in order."""
        found, node = list[Candidate](), self
        while node.before is not None and node.last is not None:
            found.append(node.last)
            node = node.before
        return found[::-1]


def _search(
    useful: Mapping[str, Sequence[Candidate]], budget_bytes: int, greedy: Chosen, price: float
) -> Chosen | None:
    """Return the best choice of all, or None where the search would grow past MAX_FRONTIER."""
    least = {name: min(each.damage + price * each.nbytes for each in options) for name, options in useful.items()}
    scale = sum(least.values())
    gap = total_damage(greedy) - (scale - price * budget_bytes) + ROUNDING * scale
    rest_bytes = sum(options[0].nbytes for options in useful.values())
    frontier = [_Partial(0, 0.0, 0.0, None, None)]
    for name, options in useful.items():
        rest_bytes -= options[0].nbytes
        grown = [
            _Partial(part.nbytes + each.nbytes, part.damage + each.damage, regret, each, part)
            for part in frontier
            for each in options
            if (regret := part.regret + each.damage + price * each.nbytes - least[name]) <= gap
            and part.nbytes + each.nbytes + rest_bytes <= budget_bytes
        ]
        frontier = _pareto(grown)
        if len(frontier) > MAX_FRONTIER:
            return None
    best = min(frontier, key=lambda part: (part.damage, part.nbytes))
    return dict(zip(useful, best.picks(), strict=True))


def _pareto(parts: Sequence[_Partial]) -> list[_Partial]:
    """Return the partial choices that no other beats in bytes and damage, smallest first."""
    kept: list[_Partial] = []
    for part in sorted(parts, key=lambda part: (part.nbytes, part.damage)):
        if not kept or part.damage < kept[-1].damage:
            kept.append(part)
    return kept
