"""Which gaps between tokens stand out, and what is known of why. Pure but for ``GapLog``, which only remembers.

A gap is an **outlier** if it is more than twice the median gap and at least 1 ms longer. Twice: a step costs much the same as the
one before, so one that takes two steps' time was held up, and a reader sees it. 1 ms: below that, timers and scheduling double
the steps of a small model all the time, and nobody sees it.

A cause is named only where it was recorded in that gap and may have taken the larger part of the excess over the median. All other
outliers have no cause: unknown, not guessed.
"""

import bisect
import heapq
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tokamac.engine.limits.metrics import Gaps, gaps_ms, percentiles

Throttle = Literal["thermal", "low power"]
"""What the system slows the chip down for."""

Cause = Literal["kv growth", "pool cleared", "swap", "slow reader", "processor taken", "thermal", "low power"]
"""kv growth: a cache's arrays were full, and copied to larger ones.
pool cleared: MLX's unused buffers went back to the system, so the next step had to ask for memory again.
swap: pages of this process had to be read from disk (major page faults).
slow reader: the engine waited for whoever reads the reply.
processor taken: where the model computes on the CPU, this process stood still for that long.
thermal: the system said during this reply that it holds the chip back. A state: it is said of each of the reply's outliers.
low power: Low Power Mode was switched on during this reply. One that was on all along makes all gaps longer, and none stand out.
"""

LAUNCHED: frozenset[Cause] = frozenset({"kv growth", "pool cleared"})
"""What the host does while it launches a step. One step ahead, the device may pay for it only in the gap after."""

TIMES, LEAST_MS = 2.0, 1.0
"""An outlier is longer than so many medians, and than the median by so much."""

MOST = 5
"""Outliers told of a reply: the longest."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A gap that stands out. token: the one that it came before, counted from 1; causes: none where they are not known."""

    token: int
    gap_ms: float
    causes: tuple[Cause, ...] = ()


class Gap(NamedTuple):
    """The milliseconds before a token, which is counted from 1: so the first gap is token 2's."""

    ms: float
    token: int


class Mark(NamedTuple):
    """Something that happened before a token, after the one before it. most_ms: what it can have taken, at most."""

    token: int
    cause: Cause
    most_ms: float = math.inf


def outliers(
    gaps: Sequence[Gap], median_ms: float, marks: Sequence[Mark], *, ahead: bool, throttled: Sequence[Throttle] = ()
) -> tuple[Outlier, ...]:
    """Return those of ``gaps`` that are outliers, longest first.

    marks: in the order of their tokens. ahead: steps are launched before the token before them is read.
    throttled: states that are a cause of each.
    """
    bound_ms = max(TIMES * median_ms, median_ms + LEAST_MS)
    found = sorted((gap for gap in gaps if gap.ms > bound_ms), key=lambda gap: (-gap.ms, gap.token))
    return tuple(
        Outlier(gap.token, gap.ms, _causes(gap, gap.ms - median_ms, marks, ahead=ahead, throttled=throttled))
        for gap in found
    )


def _causes(
    gap: Gap, excess_ms: float, marks: Sequence[Mark], *, ahead: bool, throttled: Sequence[Throttle]
) -> tuple[Cause, ...]:
    first = bisect.bisect_left(marks, gap.token - 1, key=lambda mark: mark.token)
    near = itertools.takewhile(lambda mark: mark.token <= gap.token, itertools.islice(marks, first, None))
    causes: list[Cause] = [
        mark.cause
        for mark in near
        if mark.most_ms >= excess_ms / 2 and (mark.token == gap.token or (ahead and mark.cause in LAUNCHED))
    ]
    return tuple(dict.fromkeys([*causes, *throttled]))


class GapLog:
    """The gaps of a reply that goes on: their percentiles and the longest, at any time.

    Each gap is sorted in once, so asking costs no more after 100,000 tokens than what was added since. Any thread may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 0
        self._ordered: list[float] = []
        self._longest: list[Gap] = []

    def read(self, token_times: list[float]) -> tuple[Gaps | None, list[Gap]]:
        """Take in what was appended to ``token_times`` (s) since; return the percentiles of all gaps, and the longest.

        Always of the same list.
        """
        with self._lock:
            fresh = token_times[max(self._tokens - 1, 0) :]  # a copy: the engine's thread may be appending
            gaps = [Gap(ms, token) for token, ms in enumerate(gaps_ms(fresh), max(self._tokens, 1) + 1)]
            self._tokens = max(self._tokens - 1, 0) + len(fresh)
            self._longest = heapq.nlargest(MOST, itertools.chain(self._longest, gaps))
            self._ordered.extend(gap.ms for gap in gaps)
            self._ordered.sort()  # a sorted run and a short tail: merged, not sorted again
            return percentiles(self._ordered), self._longest
