"""Runs the full-screen chat, dark or light as the terminal is. Textual is imported only when a screen is needed."""

import gc
import os
import re
import select
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .. import settings
from ..chat.external_programs import forget_copied
from ..chat.start import ChatOptions, begin, open_store

if TYPE_CHECKING:
    from ..chat.controller import Bridge
    from .app import TokamacApp


FRAMES_PER_S = 160  # Textual may let two frames pass before it shows a key: at its own 60, a typist would notice
OLD_THRESHOLD = 200  # collections of the middle generation until one of everything; Python's own default is 10


def run_chat(options: ChatOptions) -> int:
    gc.disable()  # until all is imported: modules are no garbage, and looking through them takes 20 ms
    try:
        read = options.read or settings.load(options.settings_path or settings.default_path())
        options = replace(options, read=read)
        if read.settings.theme or "NO_COLOR" in os.environ:
            app, bridge = build(options, lambda: guess(os.environ))  # should the user want "automatic" later
        else:
            with BackgroundQuery() as background:
                app, bridge = build(options, background.is_dark)
        look_for_garbage_rarely()
    finally:
        gc.enable()
    try:
        return app.run() or app.return_code or 0
    finally:
        bridge.close()
        if app.chat.copied:
            forget_copied(app.chat.preferences.home)


def look_for_garbage_rarely() -> None:
    """Collect garbage rarely and freeze imports: Python's defaults cost 50 ms every few seconds."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_THRESHOLD)


def build(options: ChatOptions, is_dark: Callable[[], bool] = lambda: True) -> "tuple[TokamacApp, Bridge]":
    """Return the app and its bridge, not running. is_dark: asks the terminal, after Textual is imported."""
    os.environ.setdefault("TEXTUAL_FPS", str(FRAMES_PER_S))  # read when Textual is imported
    # Textual takes 0.2 s to import: not before it is known that a screen is wanted.
    from ..chat.controller import Bridge
    from .app import TokamacApp, keep_reverse

    keep_reverse()
    begun = begin(options)
    bridge = Bridge(begun.command, begun.log, begun.keep_awake, begun.finder)
    app = TokamacApp(
        begun.session, bridge, begun.preferences, lambda: open_store(options), begun.warnings, dark=is_dark()
    )
    app.view.first_prompt = options.prompt or ""
    return app, bridge


# Asks for the background (OSC 11), then DA1, which nearly all terminals answer, so silence needs no timeout.
# Else COLORFGBG, macOS' appearance, or dark.


QUESTIONS = b"\x1b]11;?\x1b\\\x1b[c"
# How long an answer is waited for, from the question on, here (the import takes longer) and over SSH: one that came
# later would be taken for what the user types.
PATIENCE_S, FAR_S = 0.15, 1.0
LONGEST = 4096
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_IDENTITY = re.compile(rb"\x1b\[\?[0-9;]*c")
_LIGHT = 0.5  # luma from which a background is light


class BackgroundQuery:
    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._terminal: int | None = None
        self._before: list[Any] = []
        self._asked_s = 0.0

    def __enter__(self) -> Self:
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
        del kind, error, trace
        self._close()

    def is_dark(self) -> bool:
        answer = is_dark_answer(self._answer())
        return guess(self._environment) if answer is None else answer

    def _answer(self) -> bytes:
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
    found = _COLOUR.search(said)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return bool(0.299 * red + 0.587 * green + 0.114 * blue < _LIGHT)


def guess(environment: Mapping[str, str], *, platform: str = sys.platform, home: Path | None = None) -> bool:
    ground = environment.get("COLORFGBG", "").rpartition(";")[2]
    if ground.isdigit():
        return int(ground) < 7 or int(ground) == 8
    if platform != "darwin":
        return True
    import plistlib

    try:
        with ((home or Path.home()) / "Library/Preferences/.GlobalPreferences.plist").open("rb") as file:
            return bool(plistlib.load(file).get("AppleInterfaceStyle") == "Dark")
    except (OSError, ValueError, AttributeError, plistlib.InvalidFileException):
        return True
