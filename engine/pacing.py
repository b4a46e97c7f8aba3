"""When the machine's pace with the loaded model gets measured: where no published measurement knows it, once, in idle time.

Until then the expected speed is unknown. A busy machine is not measured: its times would be too long.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tokamac.engine.limits.bandwidth import is_busy
from tokamac.engine.limits.measuring import Measuring
from tokamac.engine.runtime import Machine

QUIET_S = 3.0
"""Seconds without a request before measuring begins, so that the next prompt does not wait for it."""

AGAIN_S = 20.0
"""Seconds until a busy machine is looked at again."""


class Pacing:
    """Measures a part of a step at a time, and hands the pace to the machine once all are known."""

    def __init__(
        self, machine: Machine, measuring: Measuring | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._measuring = measuring
        self._steps: Iterator[None] | None = None
        self._clock = clock
        self._quiet_since: float | None = None
        self._take()
        if measuring is not None and not measuring.remaining:
            self._measuring = None

    def later(self) -> None:
        """A request has come: wait again, from when it is done."""
        self._quiet_since = None

    def idle(self) -> float | None:
        """Measure one part, if it is time; return after how many seconds to call again, or None when all is known."""
        if self._measuring is None:
            return None
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now  # idle again
        if now < self._quiet_since + QUIET_S:
            return self._quiet_since + QUIET_S - now
        if self._steps is None:
            if is_busy():
                return AGAIN_S
            self._steps = self._measuring.steps()
        try:
            self._step(self._steps)
        except (RuntimeError, ValueError):  # a product that MLX has no kernel for here: the pace stays unknown
            self.end()
        return None if self._measuring is None else 0.0

    def finish(self) -> None:
        """Measure all that is missing now, busy or not: for a benchmark, which takes the machine for itself."""
        if self._measuring is not None:
            steps = self._steps or self._measuring.steps()
            while self._measuring is not None:
                self._step(steps)

    def end(self) -> None:
        """Measure no more, and let go of the model."""
        self._measuring = self._steps = None

    def _step(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._take()  # known after the first pass, and truer after each further part
            return
        self._measuring = self._steps = None  # known, or it can't be

    def _take(self) -> None:
        """Hand over the pace, if it is known."""
        if self._measuring is not None and (pace := self._measuring.pace()) is not None:
            self._machine.pace = pace
            chip = self._machine.chip
            if chip.fp16_tflops is None or chip.peak_source == "measured":
                self._machine.chip = replace(chip, fp16_tflops=self._measuring.peak_tflops, peak_source="measured")
