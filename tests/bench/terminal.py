"""A program in a pseudo-terminal whose output is read all the time, as a terminal does, and searched for what it shows."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

COLUMNS, ROWS = 120, 40
END_S = 8.0
# CSI, then OSC and other strings, then the short escapes.
CONTROLS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


class Terminal:
    """``command`` runs in it from now on. ``began`` is when it was started, by ``time.perf_counter``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        settings = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        inherited = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._shown = b""
        self._news = threading.Condition()
        self.painted = 0
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=inherited | settings, start_new_session=True
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout_s: float) -> float:
        """Return the seconds from the start until ``text`` had been written, escape sequences aside.

        Raises TimeoutError, with the end of what was written instead.
        """
        wanted, until = text.encode(), time.perf_counter() + timeout_s
        with self._news:
            while wanted not in CONTROLS.sub(b"", self._shown):
                if not self._news.wait(until - time.perf_counter()):
                    tail = CONTROLS.sub(b"", self._shown)[-400:].decode(errors="replace")
                    raise TimeoutError(
                        f"{text!r} was not shown within {timeout_s:g} s; the end of the output: {tail!r}"
                    )
            return self._at - self.began

    def answers(self, keys: str, text: str, timeout_s: float) -> float:
        """Press keys; return the seconds until ``text`` was written that was not written before them. Raises TimeoutError."""
        with self._news:
            self._shown = b""
        pressed = time.perf_counter()
        self.press(keys)
        return self.wait_for(text, timeout_s) - (pressed - self.began)

    def press(self, keys: str) -> None:
        """Press keys, all at once."""
        os.write(self._ours, keys.encode())

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the program has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Press Ctrl+Q; end the program if it stays."""
        try:
            self.press("\x11")
            self._process.wait(END_S)
        except (OSError, subprocess.TimeoutExpired):
            if self.running:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(END_S)
        os.close(self._ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # Linux says so when the program's end is closed
                data = b""
            with self._news:
                self._at = time.perf_counter()
                self.painted += len(data)
                self._shown = (self._shown + data)[-(1 << 18) :]
                self._news.notify_all()
            if not data:
                return
