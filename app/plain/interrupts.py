"""Ctrl-C as something that is heard: an exception could come in the middle of a step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
