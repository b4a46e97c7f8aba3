"""A program in tmux, and a check of what it may write to a terminal."""

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import PATIENCE_S

# A program in tmux, which is a terminal of its own: what a person would see and press.

# What tells of the terminal around the tests: a program would believe it and not ask the window for its size.
OUTER = ("TMUX", "TMUX_PANE", "COLUMNS", "LINES")
Size = tuple[int, int]


class Tmux:
    """``command`` in a window of ``size`` (columns, rows), in a server of its own. ``folder`` is for what it needs to write."""

    def __init__(
        self, command: Sequence[str], folder: Path, size: Size, term: str, environment: Mapping[str, str]
    ) -> None:
        self._sockets = tempfile.TemporaryDirectory(dir="/tmp", prefix="tmux-")  # a socket's path must be short
        self._call = ["tmux", "-S", f"{self._sockets.name}/tmux", "-f", "/dev/null"]
        columns, rows = size
        given = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        options = (
            "set -g remain-on-exit on",
            "set -sg escape-time 0",
            "set -g status off",
            f"set -g default-terminal {term}",
        )
        before = [part for option in options for part in (*option.split(), ";")]
        self._status = folder / f"status-{time.monotonic_ns()}"
        # tmux tells no status of some programs that end by themselves, so the shell does, by a file that appears whole.
        new = shlex.quote(f"{self._status}.new")
        script = f"{shlex.join(command)}; echo $? > {new}; mv {new} {shlex.quote(str(self._status))}"
        # The command begins once the window has its size and its TERM: options hold for windows made after them.
        start = ["new-session", "-d", "-x", str(columns), "-y", str(rows), *given, script]
        self._run(*before, *start)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: ``Enter``, ``C-q``, ``Escape``."""
        self._run("send-keys", *keys)

    def write(self, text: str) -> None:
        """Type ``text``."""
        self._run("send-keys", "-l", text)

    def resize(self, size: Size) -> None:
        """Give the window another size."""
        self._run("resize-window", "-x", str(size[0]), "-y", str(size[1]))

    def screen(self, *, colours: bool = False) -> str:
        """Return what is seen, with the escape sequences of its colours if wanted."""
        return self._run("capture-pane", "-p", *(["-e"] if colours else []))

    def children(self, words: str) -> list[int]:
        """Return the processes that the program started whose command has ``words``."""
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], check=True, capture_output=True, text=True
        )
        rows = [
            (int(pid), int(parent), command)
            for pid, parent, command in (line.split(maxsplit=2) for line in listed.stdout.splitlines())
        ]
        family = {int(self._run("list-panes", "-F", "#{pane_pid}"))}
        while grown := {pid for pid, parent, _ in rows if parent in family} - family:
            family |= grown
        return [pid for pid, _, command in rows if pid in family and words in command]

    @property
    def exit_status(self) -> int | None:
        """What the program returned; None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something holds; fail with what is seen instead."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; on the screen:\n{self.screen()}"
            time.sleep(0.05)

    def shows(self, text: str) -> None:
        """Wait until ``text`` is seen."""
        self.until(lambda: text in self.screen(), text)

    def close(self) -> None:
        """End the program and the server."""
        subprocess.run([*self._call, "kill-server"], check=False, capture_output=True)
        self._sockets.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, *parts: str) -> str:
        # Not in the terminal that may be around this one, and in UTF-8 wherever this runs.
        environment = {name: value for name, value in os.environ.items() if name not in OUTER}
        environment |= {"LC_ALL": "C.UTF-8"}
        return subprocess.run([*self._call, *parts], check=True, capture_output=True, text=True, env=environment).stdout


# What Textual may write to a terminal, and a check that a stream holds nothing else.

OWN = re.compile(
    r"\x1b\[[0-9;]*m"  # colours and styles of a row
    r"|\x1b\[[0-9]+;[0-9]+H|\x1b\[H"  # places
    r"|\x1b\[\?(?:25|1000|1003|1004|1006|1015|1016|1049|2004|2026|2048)[hl]"  # cursor, mouse, focus, screen, pastes, syncing, sizes
    r"|\x1b\[\?(?:2026|2048)\$p|\x1b\[\?7[hl]|\x1b\[>[0-9]+u|\x1b\[<u"  # questions, wrapping, the keyboard
    r"|\x1b\]22;[a-z-]*\x07"  # the mouse pointer's shape
    r"|\x1b\]8;id=[0-9-]+;(?:https?://|mailto:)[!-~]+?\x1b\\|\x1b\]8;;\x1b\\"  # a link, and its end
    # Ours: the terminal's title is remembered, named after the chat, and given back.
    r"|\x1b\[22;2t|\x1b\]2;\x07\x1b\[23;2t"
    r"|\x1b\]2;(?:[^\x00-\x1f\x7f-\x9f]{1,40} · )?tokamac\x07"
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ALL_CONTROLS = [chr(code) for code in (*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0))]
BIDI = [chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]


def foreign(stream: str) -> list[str]:
    """Return the controls in ``stream`` that Textual has not made, each with what stands around it."""
    rest = OWN.sub("", stream)
    return [ascii(rest[max(0, at.start() - 20) : at.start() + 20]) for at in CONTROL.finditer(rest)]


def recorder(monkeypatch: object) -> Callable[[], str]:
    """Have an app that runs without a terminal write as to one; return what it wrote so far."""
    from textual.drivers.headless_driver import HeadlessDriver

    written: list[str] = []
    patch = monkeypatch.setattr  # type: ignore[attr-defined]
    patch(HeadlessDriver, "is_headless", property(lambda _: False))
    patch(HeadlessDriver, "write", lambda _, data: written.append(data))
    return lambda: "".join(written)
