"""How many requests may wait for the engine, and how long a client that is turned away should stay away. Pure arithmetic.

places = min(replies at once, memory for keys and values ÷ what a reply took of late)
wait   = replies before this one, in rounds of ``places`` × seconds that a reply took of late
"""

import math
from collections import deque
from dataclasses import dataclass

from .errors import RequestError

MOST_WAITING = 8
"""Replies that may wait, as a multiple of those that are made at once."""
MOST_WAIT_S = 120.0
"""A longer wait than this is refused: clients give up after some minutes, and then ask again."""
RECENT = 32
"""Replies whose mean is "of late"."""


@dataclass(frozen=True, slots=True)
class ReplyCost:
    """What a reply took: seconds from its turn to its end, bytes of keys and values; None is unknown."""

    seconds: float
    kv_bytes: int | None


class Admission:
    """Counts the replies that are open.

    Args:
        parallel: replies that are made at once.

    Attributes:
        open: replies that are being made or wait.
        room_bytes: for keys and values of all replies; None is unknown, and bounds nothing.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.open = 0
        self.room_bytes: int | None = None
        self._costs: deque[ReplyCost] = deque(maxlen=RECENT)

    @property
    def places(self) -> int:
        """Replies that can be made at once, by their number and by what they take of memory."""
        known = [each.kv_bytes for each in self._costs if each.kv_bytes]
        if self.room_bytes is None or not known:
            return self.parallel
        return max(1, min(self.parallel, int(self.room_bytes / (sum(known) / len(known)))))

    @property
    def waiting(self) -> int:
        """Replies that wait for their turn, as far as their number tells."""
        return max(0, self.open - self.places)

    def wait_s(self, more: int = 1) -> float | None:
        """Return how long the last of so many more replies would wait; None where nothing is known of it yet."""
        if self.open + more <= self.places:
            return 0.0
        if not self._costs:
            return None
        mean_s = sum(each.seconds for each in self._costs) / len(self._costs)
        return math.ceil((self.open + more - self.places) / self.places) * mean_s

    def enter(self, replies: int) -> None:
        """Count replies that are asked for. Raises RequestError, counting none, where too many wait already."""
        waits = self.wait_s(replies)
        before = self.open + replies - self.places
        too_many = before > MOST_WAITING * self.parallel and self.open > 0
        if too_many or (waits is not None and waits > MOST_WAIT_S and self.open > 0):
            seconds = max(1, math.ceil((waits or 10.0) / 2))
            raise RequestError(
                f"{self.waiting} replies wait for their turn already",
                f"Try again in {seconds} s.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=seconds,
            )
        self.open += replies

    def leave(self, cost: ReplyCost | None = None) -> None:
        """A reply has ended. cost: None of one that failed or was cancelled, which says nothing of others."""
        self.open -= 1
        if cost is not None:
            self._costs.append(cost)
