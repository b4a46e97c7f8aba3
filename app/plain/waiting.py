"""What is done while a line is waited for, and only then, so that nobody else steps the session."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Meanwhile:
    """Has ``work`` done on a thread about every ``every_s`` seconds while this one is ``waiting``, and at no other time.

    A signal would wake this thread itself, but readline fails where one comes together with Ctrl-C.
    """

    def __init__(self, every_s: float, work: Callable[[], None]) -> None:
        self._every_s = every_s
        self._work = work
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._turn.acquire()
        threading.Thread(target=self._run, name="meanwhile", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let work be done; what has begun is over when this ends."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def close(self) -> None:
        """Do no more."""
        self._over.set()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        while not self._over.wait(self._every_s):
            with self._turn:
                self._work()
