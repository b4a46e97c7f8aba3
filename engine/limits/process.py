"""What the system did to this process between two tokens. Looked at once a token, for a few microseconds."""

import resource
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from tokamac.engine.limits.gaps import Cause

T = TypeVar("T")

FAULT_MS = 1.0
"""What a page read from a solid-state drive is taken to cost at most. A slower disk explains less here than it could."""

LEAST_IDLE_MS = 8.0
"""A shorter standstill is not told: of a thread that runs, the system knows the time to a tick of its clock, 4 ms at 250 Hz."""

LEAST_WAIT_MS = 0.5
"""A shorter wait for the reader explains no outlier: these are 1 ms longer than others."""


class Usage(Protocol):
    """What ``getrusage`` counts of the whole process: page faults that read a disk, and the seconds its threads computed."""

    @property
    def ru_majflt(self) -> int:
        """Faults."""

    @property
    def ru_utime(self) -> float:
        """Seconds in the program."""

    @property
    def ru_stime(self) -> float:
        """Seconds in the system, for the program."""


def own_usage() -> Usage:
    """Return this process's."""
    return resource.getrusage(resource.RUSAGE_SELF)


class ProcessWatch:
    """Tells ``mark`` what held the process up: call ``look`` as each token arrives, before it is stamped.

    computes: whether the model computes on the CPU, in this process's threads. There they are never all idle in a step, so
    where all of them together computed for less time than has passed, the difference was taken from them. Involuntary context
    switches are not counted: there were some in 698 of 699 steps, a hundred in a usual one (the guide, 2-core x86 CPU).
    """

    def __init__(
        self,
        mark: Callable[[Cause, float], None],
        *,
        computes: bool,
        usage: Callable[[], Usage] = own_usage,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mark = mark
        self._computes = computes
        self._usage = usage
        self._clock = clock
        self._waited_s = 0.0
        self._at_s = clock()
        before = usage()
        self._faults, self._computed_s = before.ru_majflt, before.ru_utime + before.ru_stime

    def look(self) -> None:
        """A token has arrived."""
        at_s, now = self._clock(), self._usage()
        faults, computed_s = now.ru_majflt - self._faults, now.ru_utime + now.ru_stime
        waited_s, self._waited_s = self._waited_s, 0.0
        idle_ms = (at_s - self._at_s - waited_s - (computed_s - self._computed_s)) * 1e3
        self._at_s, self._faults, self._computed_s = at_s, now.ru_majflt, computed_s
        if waited_s * 1e3 >= LEAST_WAIT_MS:
            self._mark("slow reader", waited_s * 1e3)
        if faults:
            self._mark("swap", faults * FAULT_MS)
        elif self._computes and idle_ms >= LEAST_IDLE_MS:  # who waits for a disk is idle, too
            self._mark("processor taken", idle_ms)

    def handed(self, items: Iterator[T]) -> Iterator[T]:
        """Yield ``items``, and note how long whoever takes them keeps the engine."""
        for item in items:
            given_s = self._clock()
            yield item
            self._waited_s += self._clock() - given_s
