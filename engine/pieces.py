"""Prompts on their way through the model: cut at multiples of the chunk, counted from the first token (limits/prefill_chunk.py)."""

from collections.abc import Iterator

from tokamac.engine.generation import Run
from tokamac.engine.limits.prefill_chunk import Chunking


class Pieces:
    """Computes prompts piece by piece.

    most: tokens that a piece has at most, a power of two: what there is room for. largest: that of the first, which no
    later one exceeds.
    """

    def __init__(self, chunking: Chunking, most: int, held: int) -> None:
        self._chunking, self._most = chunking, most
        self.largest = self._size(held)

    def compute(self, run: Run, ids: list[int]) -> Iterator[None]:
        """Compute ``ids`` after those that ``run`` holds; yield after each piece. Stop iterating to cancel."""
        at = 0
        while at < len(ids):
            size = self._size(len(run.held))
            part = ids[at : at + size - len(run.held) % size]
            for _ in run.prefill(part, len(part)):
                pass
            at += len(part)
            yield

    def _size(self, held: int) -> int:
        return min(self._most, self._chunking.at(held))
