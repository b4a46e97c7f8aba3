"""Reuse of what is already computed: the caches of the last conversations, found by the longest common prefix of token ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokamac.engine import kv


@dataclass(slots=True)
class Slot:
    """One conversation's caches and the token ids they hold; ``keep`` is the number of pinned tokens they were made with."""

    ids: list[int]
    caches: list[Any]
    keep: int | None


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many leading ids are the same."""
    if a[: len(b)] == b[: len(a)]:  # the usual case, one conversation continued, at the speed of C
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class PrefixStore:
    """At most ``capacity`` conversations, least recently used out first. Slots in use are not in the store."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: list[Slot] = []  # least recently used first

    def take(self, ids: list[int], keep: int | None) -> Slot | None:
        """Remove and return the slot that shares the longest prefix with ``ids``, cut back to that prefix.

        At least one id is always left to compute. None when nothing can be reused; room is then made for a new one.
        """
        best, shared = self._best(ids, keep)
        if best is None:
            del self._slots[: max(0, len(self._slots) - self._capacity + 1)]
            return None
        self._slots.remove(best)
        surplus = len(best.ids) - shared
        if surplus > kv.rewindable(best.caches) or kv.trim(best.caches, surplus) != surplus:
            return None  # it can't be taken back that far: compute afresh
        del best.ids[shared:]
        return best

    @contextmanager
    def lending(self, slot: Slot) -> Iterator[Slot]:
        """Store ``slot`` when the block ends, or is left early; after a failure nobody knows what its caches hold: drop it."""
        try:
            yield slot
        except GeneratorExit:
            self.put(slot)
            raise
        self.put(slot)

    def put(self, slot: Slot) -> None:
        """Store a conversation that has ended its turn."""
        if slot.ids:
            self._slots.append(slot)
            del self._slots[: -self._capacity]

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held by the stored caches."""
        return sum(kv.nbytes(slot.caches) for slot in self._slots)

    def _best(self, ids: list[int], keep: int | None) -> tuple[Slot | None, int]:
        best, shared = None, 0
        for slot in self._slots:
            length = min(common_prefix(slot.ids, ids), len(ids) - 1)
            # Conversations begin alike (the template's first marks): with room for several, one must not be cut for another.
            same = self._capacity == 1 or 2 * length >= min(len(slot.ids), len(ids))
            if slot.keep == keep and length > shared and same:
                best, shared = slot, length
        return best, shared
