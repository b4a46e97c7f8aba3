"""How often what grows is drawn, so that drawing takes no more of the machine than the model can spare."""

import time
from collections.abc import Callable

SHARE: dict[str, float] = {"cpu": 0.03}
"""Of one core, where the model computes on the same cores;"""
SHARE_BESIDE_GPU = 0.3
"""and where it does not."""

SLOWEST_S = 1 / 3
"""However dear drawing is, so often it happens."""


def share_on(device: str) -> float:
    """Return the share of a core that drawing may take while the model computes on ``device``."""
    return SHARE.get(device, SHARE_BESIDE_GPU)


class Pace:
    """Says when to draw again: later the more this process worked since it last did, painting and all included."""

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._share = share
        self._clock, self._cpu = clock, cpu
        self._drawn_s = float("-inf")
        self._worked_s = 0.0

    def is_due(self, *, now: bool = False) -> bool:
        """Whether to draw; if so, it counts from now. ``now``: draw in any case."""
        clock_s, worked_s = self._clock(), self._cpu()
        if not now and clock_s - self._drawn_s < min(SLOWEST_S, (worked_s - self._worked_s) / self._share):
            return False
        self._drawn_s, self._worked_s = clock_s, worked_s
        return True
