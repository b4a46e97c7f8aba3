"""Keeps macOS from sleeping while something is at work: ``caffeinate -i -w PID``, a process beside this one.

Metal stops while a Mac sleeps, and so does the clock that replies are timed by. Only idle sleep is held off: the display may go
dark, since a lit one makes macOS less patient with long work on the GPU (ml-explore/mlx#3267). ``-w`` ends caffeinate with this
process, however that ends.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

PROGRAM = "/usr/bin/caffeinate"

LINGER_S = 10.0
"""How long it stays after the work, so that a conversation does not start one a reply. No Mac sleeps sooner than in a minute."""
REAP_S = 2.0
"""How long its end is waited for."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


def program() -> str | None:
    """Return what keeps this machine awake; None where nothing is known."""
    return PROGRAM if sys.platform == "darwin" else None


class KeepAwake:
    """One process of ``program``, while anybody works and ``wanted`` says so when the work begins. Any thread may tell.

    Where it can't be started, or ends by itself, nothing is said and it is not tried again: whatever works goes on as well.
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
        """Take note whether ``worker`` is at work. The same may be told any number of times."""
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
        """Keep awake while entered."""
        worker = object()
        self.tell(worker, busy=True)
        try:
            yield
        finally:
            self.tell(worker, busy=False)

    def close(self) -> None:
        """End the process, whoever works."""
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
    """Return ``run`` as a function that keeps this machine awake, unless the settings say otherwise."""

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
    """Return what the settings say. What is wrong with them is told by who needs them."""
    from .. import settings

    try:
        return settings.read(settings.default_path()).settings.keep_awake
    except (OSError, *settings.DAMAGED):
        return True
