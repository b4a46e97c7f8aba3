"""Whether an engine that was asked to stop still hears. Pure.

A stop acts within a token while a reply is written, and after the piece that is being read while a prompt is. A piece of a large
model on a slow machine takes seconds, and an engine that is started again has to load, and to read everything again: so one whose
pulse beats is given several times as long as its pieces took.
"""

from collections.abc import Callable

IMPATIENT_S, DEAF_S = 1.0, 5.0
"""After how long a stop counts as not heard: where the user insists, and where not."""

READING_IMPATIENT_S, READING_DEAF_S = 10.0, 30.0
"""The same while a prompt is read: a first piece may bring the weights from the disk, and no piece before it tells how long."""

IMPATIENT_PIECES, DEAF_PIECES = 2, 4
"""The same in the longest time between two signs of progress of this reply."""

SILENCE_S = 3.0
"""The pulse of a busy engine beats every second."""


class Hearing:
    """What was heard of a reply, and when. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A reply is asked for."""
        self.reading = True
        self._heard_s = self._clock()
        self._progress_s: float | None = None
        self._longest_s = 0.0

    def heard(self) -> None:
        """The engine's process said something."""
        self._heard_s = self._clock()

    def progress(self, *, reading: bool) -> None:
        """A piece of the prompt was read, or some of the reply written."""
        now = self._clock()
        if self._progress_s is not None:
            self._longest_s = max(self._longest_s, now - self._progress_s)
        self._progress_s, self.reading = now, reading

    def is_deaf(self, since_s: float, *, insists: bool) -> bool:
        """Whether a stop that was asked for at ``since_s`` is not heard any more. insists: the user asked for it again."""
        now = self._clock()
        beats = now - self._heard_s < SILENCE_S
        pieces_s = (IMPATIENT_PIECES if insists else DEAF_PIECES) * self._longest_s if beats else 0.0
        writing_s, reading_s = (IMPATIENT_S, READING_IMPATIENT_S) if insists else (DEAF_S, READING_DEAF_S)
        return now - since_s > max(reading_s if beats and self.reading else writing_s, pieces_s)
