"""Keeps macOS awake during work with ``caffeinate -i -w PID``."""

# Metal, and the clock that times replies, stop while a Mac sleeps. Only idle sleep is held off: a lit display
# makes macOS less patient with long GPU work (ml-explore/mlx#3267). ``-w`` ends caffeinate with this process.

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

PROGRAM = "/usr/bin/caffeinate"

# How long it stays after the work, so that a conversation does not start one a reply. No Mac sleeps sooner than in a
# minute.
LINGER_S = 10.0
REAP_S = 2.0  # how long its end is waited for

Given = ParamSpec("Given")
Made = TypeVar("Made")


def program() -> str | None:
    return PROGRAM if sys.platform == "darwin" else None


class KeepAwake:
    """One ``program`` process while any worker is busy and ``wanted`` was true at its start. Thread-safe.

    Failures are silent and not retried: the work goes on without it.
    """

    def __init__(
        self, program: str | None, wanted: Callable[[], bool] = lambda: True, *, linger_s: float = LINGER_S
    ) -> None:
        self._program = program
        self._wanted = wanted
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._workers: set[object] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None

    def tell(self, worker: object, *, busy: bool) -> None:
        """Set whether ``worker`` is busy; idempotent."""
        with self._lock:
            if self._program is None or busy == (worker in self._workers):
                return
            (self._workers.add if busy else self._workers.discard)(worker)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._workers:
                self._start(self._program)
            elif self._process is not None:
                self._timer = threading.Timer(self._linger_s, self._rest)
                self._timer.daemon = True
                self._timer.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        worker = object()
        self.tell(worker, busy=True)
        try:
            yield
        finally:
            self.tell(worker, busy=False)

    def close(self) -> None:
        with self._lock:
            self._workers.clear()
            process, self._process = self._process, None
        _end(process)

    def _start(self, program: str) -> None:
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._process = None
            if status >= 0:  # not by a signal, such as Ctrl-C, which reaches it as well
                self._program = None
                return
        if not self._wanted():
            return
        quiet = subprocess.DEVNULL
        try:
            # An absolute path and close_fds=False let Python spawn it without a fork.
            self._process = subprocess.Popen(
                [program, "-i", "-w", str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet, close_fds=False
            )
        except OSError:
            self._program = None

    def _rest(self) -> None:
        with self._lock:
            if self._workers:
                return
            process, self._process = self._process, None
        _end(process)


def _end(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)


def awake(run: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorator: keep the machine awake while ``run`` runs, unless the settings say otherwise."""

    @functools.wraps(run)
    def kept(*arguments: Given.args, **named: Given.kwargs) -> Made:
        keeper = KeepAwake(program(), in_settings)
        try:
            with keeper.working():
                return run(*arguments, **named)
        finally:
            keeper.close()

    return kept


def in_settings() -> bool:
    from .. import settings

    try:
        return settings.read(settings.default_path()).settings.keep_awake
    except (OSError, *settings.DAMAGED):
        return True
