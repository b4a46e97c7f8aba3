"""When a model that nobody uses gives its memory back: after so many minutes without a wish of the user.

A model keeps its weights wired while it is loaded, so that other programs can't have that memory: of a large one that is forgotten
in a window, half of the machine's. Where the user said nothing, such a one is unloaded after a while; it loads again when the user
writes.
"""

from collections.abc import Callable

HEAVY_SHARE = 1 / 3
"""Of the memory there is: a model that takes more is not kept for ever where nobody uses it."""
HEAVY_MIN = 30
"""Minutes that it is kept."""


class Idle:
    """Knows when the user was last seen.

    after_min: minutes without a wish until the model is unloaded; 0 is never; None: after ``HEAVY_MIN`` a heavy one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.after_min: int | None = None
        self._heavy = False
        self._clock = clock
        self._seen_s = clock()

    def weigh(self, held: int | None, there_is: int | None) -> None:
        """Be told what the model holds of the memory there is, in bytes; None is unknown, and not heavy."""
        self._heavy = held is not None and there_is is not None and held > HEAVY_SHARE * there_is

    @property
    def minutes(self) -> int:
        """Minutes that hold for the model that is loaded; 0 is never."""
        if self.after_min is not None:
            return self.after_min
        return HEAVY_MIN if self._heavy else 0

    def seen(self) -> None:
        """The user wants something, or writes."""
        self._seen_s = self._clock()

    def due(self, since_s: float) -> bool:
        """Whether the user was away long enough, and the engine has had nothing to do since ``since_s`` for as long."""
        return self.minutes > 0 and self.quiet_s(since_s) >= 60 * self.minutes

    def quiet_s(self, since_s: float) -> float:
        """Return how long neither the user wanted anything nor the engine had anything to do, which it had until ``since_s``."""
        return self._clock() - max(since_s, self._seen_s)
