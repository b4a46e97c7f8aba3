"""Which models leave memory for another one. Pure arithmetic: who is in use never leaves, of the others the least recently used.

room = budget − what the models that stay take
share of a model = what it takes + (budget − what all take) ÷ models
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InMemory:
    """A model in memory. nbytes: what it takes with a context; None is unknown. used: grows with each use."""

    name: str
    nbytes: int | None
    in_use: bool
    used: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """Who leaves, least recently used first. idle: at once. busy: once they are in use no more. fits: False where
    the model has no room alone, and nobody need leave."""

    idle: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    fits: bool = True


def eviction(wanted: int | None, held: Sequence[InMemory], budget: int | None) -> Eviction:
    """Return who leaves for a model that takes ``wanted`` bytes. What is unknown is taken to need all of the memory."""
    if wanted is not None and budget is not None and wanted > budget:
        return Eviction(fits=False)
    left = sorted(held, key=lambda each: (each.in_use, each.used))
    leaving: list[InMemory] = []
    while left and not _fit(wanted, left, budget):
        leaving.append(left.pop(0))
    idle = tuple(each.name for each in leaving if not each.in_use)
    busy = tuple(each.name for each in leaving if each.in_use)
    return Eviction(idle, busy)


def _fit(wanted: int | None, beside: Sequence[InMemory], budget: int | None) -> bool:
    taken = [each.nbytes for each in beside if each.nbytes is not None]
    if wanted is None or budget is None or len(taken) < len(beside):
        return False
    return wanted + sum(taken) <= budget


def shares(taken: Mapping[str, int | None], budget: int | None) -> dict[str, int | None]:
    """Return the bytes that each model may take: what is left over is divided evenly. None is the system's limit, where
    something is unknown."""
    known = [each for each in taken.values() if each is not None]
    if budget is None or len(known) < len(taken):
        return dict.fromkeys(taken, None)
    spare = max(0, budget - sum(known)) // len(taken)
    return {name: (nbytes or 0) + spare for name, nbytes in taken.items()}
