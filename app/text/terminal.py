"""Output of the command line: results to stdout, all else to stderr, always safe for terminals."""

# Model text on a terminal or pipe passes the sanitiser (a pipe may end on a terminal); into files and
# ``--json`` it goes byte for byte. Zero-width characters pass: scripts and emoji need them. If stdout fails,
# every command ends alike: silently with status 141 for a closed pipe, with status 1 and one stderr line for a
# full disk.

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from tokamac.engine.errors import shortened

from .sanitise import Sanitiser, reveal, sanitise, sanitise_line
from .units import seconds, size

BAR_CELLS, LEAST_CELLS = 20, 4


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or no file of the system's
        return False


def note(text: str) -> None:
    print(shortened(sanitise(text).replace("\n", " ")), file=sys.stderr, flush=True)


_COLOURS = {"+": "32", "-": "31"}


def quote(lines: Iterable[tuple[str, str]]) -> None:
    """Write lines in full, each after its mark; those of a diff are coloured on a terminal."""
    coloured = is_terminal(sys.stderr) and not os.environ.get("NO_COLOR")
    for mark, text in lines:
        safe = f"{mark if mark in DIFF else ''}{reveal(text)}"
        print(f"\x1b[{_COLOURS[mark]}m{safe}\x1b[m" if coloured and mark in _COLOURS else safe, file=sys.stderr)
    sys.stderr.flush()


DIFF = ("+", "-", " ")


def json_line(value: Any) -> None:
    """Write and flush a line of ASCII JSON: safe on terminals."""
    print(json.dumps(value, allow_nan=False), flush=True)


def picked(value: object, *names: str) -> dict[str, Any]:
    return {name: None if value is None else getattr(value, name) for name in names}


def dim(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[22m"


class ModelText:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gate = None if is_file(stream) else Sanitiser()
        self._last = "\n"

    def write(self, text: str) -> None:
        safe = self._gate.feed(text) if self._gate else text
        if safe:
            self._stream.write(safe)
            self._stream.flush()
            self._last = safe[-1]

    def end(self) -> None:
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
            self._last = "\n"


class Progress:
    """Progress on stderr: a rewritten line on a terminal, else a line every tenth if ``plain``."""

    def __init__(self, label: str, *, unit: str = "bytes", plain: bool = True) -> None:
        self._label, self._unit, self._plain = label, unit, plain
        self._live = is_terminal(sys.stderr)
        self._began: tuple[float, int] | None = None  # when the first update came, and how much was done then
        self._drawn_s = 0.0
        self._tenth = -1
        self._shown = False
        self._said: set[str] = set()

    def update(self, done: int, total: int | None, what: str = "") -> None:
        self._began = self._began or (time.monotonic(), done)
        self._said.clear()
        if self._live:
            now = time.monotonic()
            if now - self._drawn_s < 0.1 and done != total:
                return
            self._drawn_s = now
            self._draw(lambda cells: self._line(done, total, what, cells))
        elif self._plain and total:
            tenth = 10 * done // total
            if tenth > self._tenth:
                self._tenth = tenth
                note(f"{self._label} {100 * done // total} % ({self._amount(done, total)})")

    def say(self, text: str) -> None:
        self.clear()
        if text not in self._said:
            self._said.add(text)
            note(text)

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _draw(self, line: Callable[[int], str]) -> None:
        room = max(1, shutil.get_terminal_size().columns - 1)
        over = len(sanitise_line(line(BAR_CELLS))) - room
        cells = max(LEAST_CELLS, BAR_CELLS - max(0, over))
        sys.stderr.write(f"\r\x1b[K{sanitise_line(line(cells))[:room]}")
        sys.stderr.flush()
        self._shown = True

    def _line(self, done: int, total: int | None, what: str, cells: int) -> str:
        if not total:
            return f"{self._label} {what}"
        filled = cells * done // total
        bar = "█" * filled + "░" * (cells - filled)
        left = self._left(done, total)
        return f"{self._label} {bar} {100 * done // total} %  {self._amount(done, total)}{left}  {what}"

    def _amount(self, done: int, total: int) -> str:
        if self._unit == "bytes":
            return f"{size(done)} of {size(total)}"
        return f"{done:,} of {total:,} {self._unit}"

    def _left(self, done: int, total: int) -> str:
        began_s, first = self._began or (0.0, 0)
        elapsed, gone = time.monotonic() - began_s, done - first
        if elapsed < 2 or done >= total or 50 * gone < total:
            return ""
        return f"  {seconds(elapsed * (total - done) / gone)} left"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
