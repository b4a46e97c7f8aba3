"""Ctrl-C as something that is heard: an exception could come in the middle of a step."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def heard(act: Callable[[], object]) -> Iterator[None]:
    """Let every Ctrl-C call ``act``, on the main thread and between two steps of whatever runs there.

    Without effect on another thread, and where the shell asked for Ctrl-C to be ignored (a job in the background).
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold Ctrl-C back until this is over, so that a change is made whole; it comes then as it would have come."""
    came: list[bool] = []
    try:
        with heard(lambda: came.append(True)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether Ctrl-C has come since, whoever heard it. To be used on the main thread, and in here."""
    ear, mouth = os.pipe()
    for end in (ear, mouth):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)

    def came() -> bool:
        with suppress(BlockingIOError):  # nothing came
            return signal.SIGINT in os.read(ear, 4096)
        return False

    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(ear)
        os.close(mouth)
