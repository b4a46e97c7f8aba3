"""When a model that nobody uses gives its memory back: after so many minutes without a wish of the user."""

from collections.abc import Callable


class Idle:
    """Knows when the user was last seen. after_min: minutes without a wish until the model is unloaded; 0 is never."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.after_min = 0
        self._clock = clock
        self._seen_s = clock()

    def seen(self) -> None:
        """The user wants something, or writes."""
        self._seen_s = self._clock()

    def due(self, since_s: float) -> bool:
        """Whether the user was away long enough, and the engine has had nothing to do since ``since_s`` for as long."""
        return self.after_min > 0 and self.quiet_s(since_s) >= 60 * self.after_min

    def quiet_s(self, since_s: float) -> float:
        """Return how long neither the user wanted anything nor the engine had anything to do, which it had until ``since_s``."""
        return self._clock() - max(since_s, self._seen_s)
