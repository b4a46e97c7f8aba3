"""Commands that the user writes for their own shell: run once, with nothing to type to, and ended as a group of processes.

A command has a session of its own, so that it can neither read from the terminal nor draw on it. What it leaves in the background
ends with it. Its output is foreign text: ``ShellOutput.text`` is made safe.
"""

import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tokamac.engine.errors import TokamacError

from ..sanitise import Sanitiser
from .command_process import killed_by

DEADLINE_S = 300.0
KEPT_BYTES = 200_000
"""Of the output: the first half and the last; what is between is left out."""
MOST_BYTES = 100_000_000
"""A command that writes more, such as ``yes``, is ended."""
LOOK_S = 0.1
GRACE_S = 1.0
"""How long a command that is to end may take until it is killed."""


class ShellError(TokamacError):
    """A command could not be started."""


class ShellEnding(Enum):
    """Why a command is over."""

    ITSELF = ""
    STOPPED = "stopped by you"
    DEADLINE = f"ended after {DEADLINE_S:g} s"
    TOO_MUCH = f"ended: it wrote more than {MOST_BYTES // 10**6} MB"


@dataclass(frozen=True, slots=True)
class ShellOutput:
    """What a command wrote, and how it ended. text: stdout and stderr in the order they came, safe. left_out: bytes not in it."""

    command: str
    text: str
    status: int
    ending: ShellEnding = ShellEnding.ITSELF
    left_out: int = 0

    @property
    def how(self) -> str:
        """How it ended, in a few words; "" where it ended well."""
        if self.ending is not ShellEnding.ITSELF:
            return str(self.ending.value)
        return "" if not self.status else killed_by(-self.status) if self.status < 0 else f"exit status {self.status}"


def user_shell() -> str:
    """Return the program that runs the user's commands."""
    return os.environ.get("SHELL") or "/bin/sh"


def working_folder() -> Path:
    """Return the folder that commands run in: the one that the app was started in. Raises ShellError where it is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ShellError("The folder that tokamac was started in is gone", "Start it again in another one.") from error


class ShellCommand:
    """One command, which runs once: ``run`` on any thread, ``stop`` from any other, or from a signal's handler."""

    def __init__(self, text: str, folder: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self.text = text
        self._folder = folder
        self._deadline_s = deadline_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the command and all that it has started; before it runs, it never will."""
        self._stopped.set()

    def run(self) -> ShellOutput:
        """Run it to its end. Raises ShellError."""
        shell = user_shell()
        if self._stopped.is_set():
            return ShellOutput(self.text, "", -signal.SIGTERM, ShellEnding.STOPPED)
        try:
            process = subprocess.Popen(
                [shell, "-c", self.text],
                cwd=self._folder,
                env={**os.environ, "TERM": "dumb"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # no such shell or folder, a NUL
            raise ShellError(f"{shell} could not be started: {error}", "Check SHELL.") from error
        kept = _Kept()
        with process:
            try:
                ending = self._follow(process, kept)
            finally:
                _end(process)
        return ShellOutput(self.text, kept.text, process.returncode, ending, kept.left_out)

    def _follow(self, process: "subprocess.Popen[bytes]", kept: "_Kept") -> ShellEnding:
        """Read until the command is over, or has to be."""
        assert process.stdout is not None
        pipe, until_s = process.stdout.fileno(), time.monotonic() + self._deadline_s
        is_open, ended_s = True, float("inf")
        while not self._stopped.is_set():
            if ended_s > time.monotonic() and process.poll() is not None:
                ended_s = time.monotonic()
            if not is_open:
                self._stopped.wait(LOOK_S)
            elif select.select([pipe], [], [], LOOK_S)[0]:
                data = os.read(pipe, 1 << 16)
                is_open = bool(data)
                kept.add(data)
            now_s = time.monotonic()
            if now_s > ended_s + (GRACE_S if is_open else 0.0):  # what it left may hold the pipe open for ever
                return ShellEnding.ITSELF
            if kept.count > MOST_BYTES:
                return ShellEnding.TOO_MUCH
            if now_s > until_s:
                return ShellEnding.DEADLINE
        if is_open and select.select([pipe], [], [], 0)[0]:  # written before it was stopped
            kept.add(os.read(pipe, 1 << 16))
        return ShellEnding.STOPPED


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the command's group: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has ended
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


class _Kept:
    """The first and the last bytes of an output. count: of all of it."""

    def __init__(self) -> None:
        self.count = 0
        self._first = bytearray()
        self._last = bytearray()

    def add(self, data: bytes) -> None:
        """Take more of it."""
        self.count += len(data)
        room = KEPT_BYTES // 2 - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        del self._last[: -KEPT_BYTES // 2]

    @property
    def left_out(self) -> int:
        """The bytes that are not kept."""
        return self.count - len(self._first) - len(self._last)

    @property
    def text(self) -> str:
        """What is kept, as safe text without a trace of what a terminal would obey."""
        gap = f"\n[… {self.left_out:,} bytes were left out]\n".encode() if self.left_out else b""
        whole = bytes(self._first) + gap + bytes(self._last)
        return Sanitiser(replacement="").feed(whole.decode("utf-8", "replace")).strip("\n")
