"""What is done while a line is waited for, and only then, so that nobody else steps the session."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tokamac.app.plain.interrupts import unbroken

HEARD_S = 0.2
"""A thread that is woken by Ctrl-C has stopped waiting by then."""


class Meanwhile:
    """Has ``work`` done on a thread about every ``every_s`` seconds while the main one is ``waiting`` or lets it be
    ``working``, and at no other time.

    Ctrl-C is lost on readline where it comes between the prompt and the wait for a key: Python has noted it, and nothing wakes the
    thread that waits. So this one hears of it too, and sends it again where the other goes on waiting.
    """

    def __init__(self, every_s: float, work: Callable[[], None]) -> None:
        self._every_s = every_s
        self._work = work
        self._waits = 0  # how many have begun
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._ear, self._mouth = os.pipe()
        for end in (self._ear, self._mouth):
            os.set_blocking(end, False)
        threading.Thread(target=self._run, name="meanwhile", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let work be done, and see to it that Ctrl-C wakes this thread. Called on the main thread."""
        with self.working():
            before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let work be done; what has begun is over when this ends. Called on the main thread, whatever Ctrl-C does there."""
        with suppress(BlockingIOError):  # what an earlier wait was woken by
            os.read(self._ear, 4096)
        self._waits += 1
        self._turn.release()
        try:
            yield
        finally:
            with unbroken():  # without its turn back, this thread could not give it away again
                self._turn.acquire()

    def close(self) -> None:
        """Do no more. The two ends of the pipe stay open: a wait may still name one to the signal's handler."""
        self._over.set()
        os.write(self._mouth, b"\0")

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        while not self._over.is_set():
            if not select.select([self._ear], [], [], self._every_s)[0]:
                with self._turn:
                    self._work()
                continue
            with suppress(BlockingIOError):
                if signal.SIGINT in os.read(self._ear, 4096):
                    self._see_that_it_woke(self._waits)

    def _see_that_it_woke(self, wait: int) -> None:
        threading.Event().wait(HEARD_S)
        if self._turn.acquire(blocking=False):  # nobody took it back: the wait goes on
            self._turn.release()
            if wait == self._waits:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
