"""Prompts on their way through the model: cut at multiples of the chunk, counted from the first token (limits/prefill_chunk.py).

Where a piece takes long, it is computed a few layers at a time, so that a cancellation is heard in between: then what was begun of
it is dropped. Time decides that alone, never where a prompt is cut.
"""

import math
import time
from collections.abc import Callable, Iterator

from tokamac.engine.generation import Run
from tokamac.engine.limits.prefill_chunk import Chunking

STAGE_S = 1.0
"""What is computed of a piece before it is asked whether to stop."""


class Pieces:
    """Computes prompts piece by piece.

    most: tokens that a piece has at most, a power of two: what there is room for. largest: that of the first, which no later one
    exceeds. stage_s: seconds after which ``stopped`` is asked again, as far as the pace is known.
    """

    def __init__(
        self,
        chunking: Chunking,
        most: int,
        held: int,
        *,
        stage_s: float = STAGE_S,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chunking, self._most = chunking, most
        self._stage_s, self._stopped, self._clock = stage_s, stopped, clock
        self.largest = self._size(held)
        self._token_s = chunking.token_s(held)

    def compute(self, run: Run, ids: list[int]) -> Iterator[None]:
        """Compute ``ids`` after those that ``run`` holds; yield after each piece. Stop iterating to cancel."""
        at = 0
        while at < len(ids):
            size = self._size(len(run.held))
            part = ids[at : at + size - len(run.held) % size]
            stages = 1 if self._token_s is None else math.ceil(len(part) * self._token_s / self._stage_s)
            began = self._clock()
            whole = (
                run.prefill_in_stages(part, stages, self._stopped) if stages > 1 else all(run.prefill(part, len(part)))
            )
            if whole:
                self._token_s = (self._clock() - began) / len(part)
                at += len(part)
            yield
            if not whole:
                return

    def _size(self, held: int) -> int:
        return min(self._most, self._chunking.at(held))
