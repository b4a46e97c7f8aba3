"""The plain chat as a test runs it: a program of its own, behind pipes or on a terminal, with the scripted engine."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.app.plain.scripted_chat import scripted
from tests.waiting import PATIENCE_S
from tokamac.app import cli
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredMessage

PROGRAM = Path(__file__).parent / "scripted_chat.py"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def spawn(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    settings: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    return subprocess.Popen([sys.executable, PROGRAM, "chat", *arguments], **{**settings, **options})


def piped(
    lines: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Say ``lines`` to the chat, in this process, with files for its streams; return its status, stdout and stderr."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        for name, value in (env or {}).items():
            patched.setenv(name, value)
        if cwd is not None:
            patched.chdir(cwd)
        scripted(patched.setattr)
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        files[0].write(lines)
        files[0].seek(0)
        for name, file in zip(("stdin", "stdout", "stderr"), files, strict=True):
            patched.setattr(sys, name, file)
        status = cli.main(["chat", *arguments])
        for file in files[1:]:
            file.seek(0)
        out, err = (file.read() for file in files[1:])
    assert "Traceback" not in err
    return status, out, err


def last_path(data: Path) -> list[StoredMessage]:
    with Store.open(data) as store:
        chat = store.latest()
        return store.path(chat.id)


def children(process: int) -> list[int]:
    """The processes that ``process`` started and that still run."""
    done = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split()]


def sleeps(process: int) -> bool:
    """Whether a process waits for something."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True, check=True)
    return state.stdout.startswith("S")


class Terminal:
    """The chat on a terminal of its own, and all that it wrote there."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.leader, follower = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **environment}
        self.shown = b""
        self.seen = 0
        self.process = spawn(
            *arguments, stdin=follower, stdout=follower, stderr=follower, text=False, env=env,
            preexec_fn=self._lead,
        )  # fmt: skip
        os.close(follower)

    @staticmethod
    def _lead() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it as a signal
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def until(self, text: str) -> None:
        """Read on until ``text`` is written after what was waited for before."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in self.shown[self.seen :]:
            assert time.monotonic() < deadline, f"never: {text!r}; {self.shown.decode(errors='replace')}"
            if not select.select([self.leader], [], [], 1.0)[0]:
                continue
            try:
                self.shown += os.read(self.leader, 4096)
            except OSError:
                raise AssertionError(f"ended before {text!r}: {self.shown.decode(errors='replace')}") from None
        self.seen = self.shown.index(text.encode(), self.seen) + len(text.encode())

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def say(self, text: str) -> None:
        """Type this at the next prompt."""
        self.until("you> ")
        self.type(text)

    def leave(self) -> int:
        """End the input at the next prompt; return the status."""
        self.say("\x04")
        return self.left()

    def left(self) -> int:
        """Wait for the end; return the status."""
        try:
            while more := os.read(self.leader, 4096):
                self.shown += more
        except OSError:
            pass  # the last writer has left
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Kill what still runs, and give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.leader)
