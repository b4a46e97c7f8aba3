"""The screen's end of the engine's process: start it, talk to it, notice when it dies or freezes, never wait for it.

    caller ─ send ─▶ writer thread ─▶ stdin      stdout ─▶ reader thread ─▶ on_event(reply | Garbled | Died)

``on_event`` is called from the reader's thread; the caller brings it to its own loop. The process leads its own session, so
that Ctrl-C in the terminal reaches only the screen; it ends when its stdin closes, however the screen went.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tokamac.engine.files import FLUSH_S

from ..sanitise import sanitise_line
from .command_process import killed_by
from .protocol import (
    LONGEST_LINE,
    AskTokens,
    EngineMessage,
    EngineNotice,
    Generate,
    PromptTokens,
    Quit,
    Request,
    RequestFailed,
    WireError,
    decode_message,
    encode,
)

SILENCE_S = 20.0  # a busy process beats every second; a machine that swaps may delay it, but not this long
GRACE_S = FLUSH_S + 3.0
"""The engine's process ends itself before: what it computed is written by then."""
TAIL_BYTES = 4096
LONGEST_LOG = 2**20  # bytes; the log before it is kept beside it


@dataclass(frozen=True, slots=True)
class Garbled:
    """The process sent a line that is no message; it was left out."""

    error: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended without being asked to. ``why`` is one short clause; ``last_line`` the end of its log."""

    why: str
    last_line: str


BackendEvent = EngineMessage | Garbled | Died


CHILD_COMMAND = (sys.executable, "-m", "tokamac.app.backend.child")
"""Starts the engine's process."""


class EngineLink:
    """A connection to an engine's process: what is sent, and what is heard.

    Args:
        outgoing, incoming: lines to the process and from it; both are closed by threads of this.
        on_event: told what the process says, on a thread of this.
        silence_s: after how long without a word from a process at work it counts as hung.
    """

    def __init__(
        self,
        outgoing: IO[bytes],
        incoming: IO[bytes],
        on_event: Callable[[BackendEvent], object],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._on_event = on_event
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._asked_to_end = False
        self._frozen = False
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        for run, given in ((self._read, (incoming,)), (self._write, (outgoing,)), (self._watch, ())):
            threading.Thread(target=run, args=given, name=f"engine-{run.__name__}", daemon=True).start()

    def send(self, request: Request) -> None:
        """Queue ``request``; never blocks. To a dead process it is silently late: ``Died`` has been or will be reported."""
        self._outgoing.put(request)

    def set_busy(self, busy: bool) -> None:
        """Say whether the process is at work, so that its silence would mean that it hangs."""
        if busy and not self._busy.is_set():
            self._heard = time.monotonic()
            self._busy.set()
        elif not busy:
            self._busy.clear()

    def kill(self) -> None:
        """End the process at once, whatever it does. ``Died`` is not reported."""
        self._asked_to_end = True
        self._end()

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to end, wait, and end it if it does not. For the way out of the app."""
        self._asked_to_end = True
        self._outgoing.put(Quit())
        self._outgoing.put(None)
        if not self._ended.wait(grace_s):
            self._end()
            self._ended.wait(grace_s)

    @property
    def alive(self) -> bool:
        """Whether there is somebody who hears."""
        return not self._ended.is_set()

    def _end(self) -> None:
        """End the process, or the connection to it."""
        raise NotImplementedError

    def _ended_how(self) -> tuple[str, str]:
        """Return, once nothing more comes, why it ended, and the end of its log; free what is held."""
        raise NotImplementedError

    def _write(self, outgoing: IO[bytes]) -> None:
        try:
            with outgoing:  # closing it writes what is left, and fails as well
                while (request := self._outgoing.get()) is not None:
                    line = encode(request)
                    if len(line) > LONGEST_LINE and (refused := _refused(request)) is not None:
                        self._on_event(refused)
                        continue
                    outgoing.write(line)
                    outgoing.flush()
        except OSError:
            return  # the reader's thread reports the death

    def _read(self, incoming: IO[bytes]) -> None:
        with incoming, suppress(ConnectionError):
            while line := incoming.readline(LONGEST_LINE + 1):
                self._heard = time.monotonic()
                self._on_event(self._decode(line, incoming))
        why, last_line = self._ended_how()
        self._busy.set()
        self._ended.set()
        self._outgoing.put(None)
        if self._frozen:
            why = f"it did not answer for {self._silence_s:g} s and was stopped"
        if not self._asked_to_end:
            self._on_event(Died(why, last_line))

    @staticmethod
    def _decode(line: bytes, incoming: IO[bytes]) -> BackendEvent:
        """Return what ``line`` says; of a line that is too long, the rest is read past."""
        end = line
        while len(line) > LONGEST_LINE and end and not end.endswith(b"\n"):
            end = incoming.readline(LONGEST_LINE)
        try:
            return decode_message(line)
        except WireError as error:
            return Garbled(sanitise_line(error.message))

    def _watch(self) -> None:
        """Kill the process when it should be at work and is silent."""
        now = time.monotonic()
        while self._busy.wait() and not self._ended.wait(self._silence_s / 4):
            now, last = time.monotonic(), now
            if (
                now - last > self._silence_s / 2
            ):  # this process itself was stopped: what the engine said waits to be read
                self._heard = max(self._heard, now - self._silence_s / 2)
            if self._busy.is_set() and time.monotonic() - self._heard > self._silence_s:
                self._frozen = True
                self._end()
                return


class EngineProcess(EngineLink):
    """One running engine process. A new one is made for a restart; this one is never reused."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        on_event: Callable[[BackendEvent], object],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._log, unkept = _opened(log)
        self._log_start = os.fstat(self._log.fileno()).st_size
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except BaseException:
            self._log.close()
            raise
        if unkept:
            on_event(EngineNotice(unkept))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(self._process.stdin, self._process.stdout, on_event, silence_s)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        try:
            # Its own session: helpers that a library started go with it.
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # A group of zombies: macOS refuses it (EPERM), Linux may not find it. poll() can't tell while another thread waits.
            with suppress(ProcessLookupError, PermissionError):
                self._process.kill()

    def _ended_how(self) -> tuple[str, str]:
        code = self._process.wait()
        with self._log:
            last_line = self._last_line()
        return killed_by(-code) if code < 0 else f"exit status {code}", last_line

    def _last_line(self) -> str:
        try:
            # By position: the process writes through the same file, wherever that stands.
            begin = max(self._log_start, os.fstat(self._log.fileno()).st_size - TAIL_BYTES)
            lines = os.pread(self._log.fileno(), TAIL_BYTES, begin).decode(errors="replace").splitlines()
        except OSError as error:
            return f"the log can't be read: {error}"
        return next((sanitise_line(line) for line in reversed(lines) if line.strip()), "")


def _refused(request: Request) -> EngineMessage | None:
    """Return the answer to what is too long to be sent; None where the process says so itself."""
    why = "the prompt is too long to be read"
    match request:
        case Generate(id):
            return RequestFailed(id, why, "Shorten it.", "ContextError")
        case AskTokens(id):
            return PromptTokens(id, error=why)
        case _:
            return None


def _opened(log: Path) -> tuple[IO[bytes], str]:
    """Return what the process writes its log to, and what to say where that is not ``log``: then it is gone with the process."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LONGEST_LOG:
            log.replace(log.with_suffix(".old.log"))
        return log.open("a+b", buffering=0), ""
    except OSError as error:
        unkept = f"The engine's log is not kept: {log} can't be written ({error.strerror or error})."
    try:
        return tempfile.TemporaryFile("a+b", buffering=0), unkept
    except OSError:
        return Path(os.devnull).open("a+b", buffering=0), unkept
