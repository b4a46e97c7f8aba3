"""Whether the system holds the chip back because it is hot, asked on a thread of its own: no token ever waits for the answer."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

FIRST_S = 2.0
"""Nothing gets hot in a shorter reply, and asking starts a process."""
EVERY_S = 10.0


class ThermalWatch:
    """While entered, asks ``read`` now and then, until it says that the chip is held back: from then on it is ``throttled``.

    read: returns None where the system does not tell. Where there is nobody to ask it is None itself, and no thread is started.
    """

    def __init__(
        self, read: Callable[[], bool | None] | None, *, first_s: float = FIRST_S, every_s: float = EVERY_S
    ) -> None:
        self.throttled = False
        self._read = read
        self._first_s, self._every_s = first_s, every_s
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._read is not None:
            threading.Thread(target=self._ask, args=(self._read,), name="thermal", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()  # the thread may be asking still: it is not waited for

    def _ask(self, read: Callable[[], bool | None]) -> None:
        pause_s = self._first_s
        while not self.throttled and not self._ended.wait(pause_s):
            pause_s = self._every_s
            self.throttled = read() is True
