"""How often it is said how far something has come: more would be read out over everything else."""

import time

PROGRESS_S = 5.0


class Rarely:
    """Is due every ``PROGRESS_S``, for the first time so long after it began."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Something begins, or was said of it."""
        self._told_s = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to say something; whoever asks is expected to do it."""
        if time.monotonic() - self._told_s < PROGRESS_S:
            return False
        self.begin()
        return True
