"""What the command line writes: results to stdout, everything else to stderr, and nothing a terminal would obey by accident.

Model text passes a gate on the way to stdout: the full sanitiser on a terminal, and in a pipe, since that may end on one. What it
replaces is seen (``�``). Into a file it goes as the model wrote it, to the byte, as it does with ``--json``. Zero-width characters
pass: scripts and emoji need them, and no terminal obeys them.

Where stdout can't be written any more, every command ends alike, and says nothing of the file or folder it was at: with status 141,
in silence, where the reader of a pipe has left, and with status 1 and one line on stderr where the disk under it is full.
"""

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tokamac.engine.errors import shortened

from .sanitise import Sanitiser, reveal, sanitise, sanitise_line
from .units import seconds, size

BAR_CELLS, LEAST_CELLS = 20, 4


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees this stream, on something that can rewrite a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def is_file(stream: TextIO) -> bool:
    """Whether what is written lands in a regular file, where no terminal reads along."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or no file of the system's
        return False


def note(text: str) -> None:
    """Write one line to stderr."""
    print(shortened(sanitise(text).replace("\n", " ")), file=sys.stderr, flush=True)


def quote(text: str) -> None:
    """Write what the user is asked to allow to stderr: whole, with its line breaks."""
    print(reveal(text), file=sys.stderr, flush=True)


def json_line(value: Any) -> None:
    """Write one line of JSON to stdout, at once. ASCII, so that model text can hold nothing a terminal obeys."""
    print(json.dumps(value, allow_nan=False), flush=True)


def picked(value: object, *names: str) -> dict[str, Any]:
    """Return these attributes of a value, for JSON; of None, each is None."""
    return {name: None if value is None else getattr(value, name) for name in names}


def dim(text: str) -> str:
    """Return text that a terminal shows faint; unchanged where NO_COLOR is set."""
    return text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[22m"


class ModelText:
    """Streams a model's text to ``stream``, safe for what it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gate = None if is_file(stream) else Sanitiser()
        self._last = "\n"

    def write(self, text: str) -> None:
        """Write what of ``text`` may be shown, at once."""
        safe = self._gate.feed(text) if self._gate else text
        if safe:
            self._stream.write(safe)
            self._stream.flush()
            self._last = safe[-1]

    def end(self) -> None:
        """End the last line, where it is not ended yet."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
            self._last = "\n"


class Progress:
    """How far long work has come, on stderr: a line rewritten in place on a terminal, else a line every tenth if ``plain``."""

    def __init__(self, label: str, *, unit: str = "bytes", plain: bool = True) -> None:
        self._label, self._unit, self._plain = label, unit, plain
        self._live = is_terminal(sys.stderr)
        self._began: tuple[float, int] | None = None  # when the first update came, and how much was done then
        self._drawn_s = 0.0
        self._tenth = -1
        self._shown = False
        self._said: set[str] = set()

    def update(self, done: int, total: int | None, what: str = "") -> None:
        """Show that ``done`` of ``total`` is done; ``what`` names the part at hand."""
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
        """Print a line instead, unless it was said since the last update."""
        self.clear()
        if text not in self._said:
            self._said.add(text)
            note(text)

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _draw(self, line: Callable[[int], str]) -> None:
        """Draw a line whose bar has so many cells: fewer where it would be too long."""
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
        """Return the time left at the rate so far, once there is one to speak of."""
        began_s, first = self._began or (0.0, 0)
        elapsed, gone = time.monotonic() - began_s, done - first
        if elapsed < 2 or done >= total or 50 * gone < total:
            return ""
        return f"  {seconds(elapsed * (total - done) / gone)} left"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return rows as aligned columns; those in ``right`` are set flush right."""
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
