"""How much of a prompt is computed at once: enough to keep the device busy, and so little that a cancellation is soon heard."""

import time
from collections.abc import Callable, Iterator

from tokamac.engine.generation import Run

LONGEST_S = 1.0
"""What a piece may take where somebody waits for the prompt: between two pieces a reply can be cancelled."""

LEAST = 64
"""Tokens; every piece reads all weights again, whatever it has of them."""

FIRST = 64
"""Tokens of the first piece where no pace is known: it tells how long one takes."""


class Pieces:
    """Computes prompts in pieces of a power of two of tokens, as many as take ``longest_s`` seconds at most.

    most: tokens that a piece has at most, a power of two. least: that it has however slow they are, unless it is the last.
    token_s: seconds that a token takes; None is unknown. size: tokens of the next piece. largest: of the largest so far.
    """

    def __init__(
        self,
        most: int,
        token_s: float | None,
        *,
        longest_s: float = LONGEST_S,
        least: int = LEAST,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most, self._least = most, min(least, most)
        self._longest_s = longest_s
        self._clock = clock
        self.size = self.largest = min(most, FIRST) if token_s is None else self._fitting(token_s)

    def compute(self, run: Run, ids: list[int]) -> Iterator[None]:
        """Compute ``ids`` after those that ``run`` holds; yield after each piece. Stop iterating to cancel."""
        at = 0
        while at < len(ids):
            part = ids[at : at + self.size]
            self.largest = max(self.largest, self.size)
            began = self._clock()
            for _ in run.prefill(part, len(part)):
                pass
            self._took(len(part), self._clock() - began)  # before whoever reads may take a while
            at += len(part)
            yield

    def _took(self, tokens: int, seconds: float) -> None:
        if tokens >= self._least:  # what fewer take says little: each piece costs something however small it is
            self.size = self._fitting(seconds / tokens)

    def _fitting(self, token_s: float) -> int:
        size = self._most
        while size > self._least and size * token_s > self._longest_s:
            size = max(self._least, size // 2)
        return size
