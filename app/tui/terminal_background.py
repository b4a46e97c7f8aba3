"""Whether the terminal is dark or light, asked before the screen opens, while Textual is being imported.

The terminal is asked for its background (OSC 11), and then for what it is (DA1), which nearly all answer: so one that says nothing
of colours is not waited for. Where there is no answer, COLORFGBG tells, or macOS' appearance; else it is dark, as most are.
"""

import os
import plistlib
import re
import select
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

QUESTIONS = b"\x1b]11;?\x1b\\\x1b[c"
PATIENCE_S, FAR_S = 0.15, 1.0
"""How long an answer is waited for, from the question on, here (the import takes longer) and over SSH: one that came later would
be taken for what the user types."""
LONGEST = 4096
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_IDENTITY = re.compile(rb"\x1b\[\?[0-9;]*c")
_LIGHT = 0.5
"""Luma from which a background is light."""


class BackgroundQuery:
    """Asks on entering; ``is_dark`` takes the answer. The terminal is as before on leaving, and no answer is left in its input."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._terminal: int | None = None
        self._before: list[Any] = []
        self._asked_s = 0.0

    def __enter__(self) -> Self:
        """Ask, where this is in the foreground of a terminal."""
        if self._environment.get("TERM", "dumb") in ("dumb", "linux"):
            return self
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        except OSError:
            return self
        try:
            if os.tcgetpgrp(terminal) != os.getpgrp() or select.select([terminal], [], [], 0)[0]:
                raise OSError("in the background, or somebody types already")
            before = termios.tcgetattr(terminal)
            quiet = list(before)
            quiet[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(terminal, termios.TCSANOW, quiet)
            self._terminal, self._before = terminal, before
            os.write(terminal, QUESTIONS)
            self._asked_s = time.monotonic()
        except (OSError, termios.error):
            if self._terminal is None:
                os.close(terminal)
            else:
                self._close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back."""
        del kind, error, trace
        self._close()

    def is_dark(self) -> bool:
        """Return whether the background is dark, as far as can be known."""
        answer = is_dark_answer(self._answer())
        return guess(self._environment) if answer is None else answer

    def _answer(self) -> bytes:
        """Return what the terminal has answered, by the time that it may take."""
        said = b""
        patience_s = FAR_S if self._environment.get("SSH_CONNECTION") else PATIENCE_S
        while self._terminal is not None and not _IDENTITY.search(said) and len(said) < LONGEST:
            left = max(0.0, self._asked_s + patience_s - time.monotonic())
            if not select.select([self._terminal], [], [], left)[0]:
                break
            said += os.read(self._terminal, LONGEST)
        return said

    def _close(self) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
            os.close(self._terminal)
            self._terminal = None


def is_dark_answer(said: bytes) -> bool | None:
    """Return whether the background in the answer ``said`` is dark; None where it names none."""
    found = _COLOUR.search(said)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return bool(0.299 * red + 0.587 * green + 0.114 * blue < _LIGHT)


def guess(environment: Mapping[str, str], *, platform: str = sys.platform, home: Path | None = None) -> bool:
    """Return whether the background is probably dark, by what the environment and the system say."""
    ground = environment.get("COLORFGBG", "").rpartition(";")[2]
    if ground.isdigit():
        return int(ground) < 7 or int(ground) == 8
    if platform != "darwin":
        return True
    try:
        with ((home or Path.home()) / "Library/Preferences/.GlobalPreferences.plist").open("rb") as file:
            return bool(plistlib.load(file).get("AppleInterfaceStyle") == "Dark")
    except (OSError, ValueError, AttributeError, plistlib.InvalidFileException):
        return True
