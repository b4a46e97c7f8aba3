"""A conversation as rows of one width: what stands where, and what copying takes from it. No widget, no terminal."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from textual.content import Content

from tokamac.app.tui.prose.rows import Row


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a row's text and is not copied.

    lead: before the text. style: beneath it, to the end of the row but for ``right`` cells.
    """

    lead: Content
    style: str = ""
    right: int = 1


PLAIN = Frame(Content(" "))


@dataclass(frozen=True, slots=True)
class PageRow:
    """One row as it is shown."""

    row: Row
    frame: Frame = PLAIN

    def is_same(self, other: "PageRow") -> bool:
        """Whether it looks and copies the same (Content's own equality is blind to styles)."""
        return (
            self.row.content.is_same(other.row.content)
            and (self.row.joint, self.row.indent) == (other.row.joint, other.row.indent)
            and self.frame.lead.is_same(other.frame.lead)
            and (self.frame.style, self.frame.right) == (other.frame.style, other.frame.right)
        )


BLANK = PageRow(Row(Content("")))


def keep_same(old: Sequence[PageRow], new: Sequence[PageRow]) -> list[PageRow]:
    """Return ``new``, with the objects of ``old`` where they look the same: what is the same object need not be drawn again."""
    kept = [was if was is row or was.is_same(row) else row for was, row in zip(old, new, strict=False)]
    return [*kept, *new[len(kept) :]]


class Message(Protocol):
    """A part of the conversation that knows its rows."""

    def rows(self, width: int) -> Sequence[PageRow]:
        """Return the rows at ``width`` cells; the same objects as before where nothing changed."""


@dataclass(slots=True)
class Page:
    """Messages, oldest first, with a blank row after each."""

    width: int = 0
    messages: list[Message] = field(default_factory=list)
    _rows: list[Sequence[PageRow]] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Rows of the whole page."""
        return self._starts[-1] + len(self._rows[-1]) + 1 if self.messages else 0

    def fit(self, width: int) -> None:
        """Lay everything out at ``width`` cells."""
        if width != self.width:
            self.width = width
            self._rows = [message.rows(width) for message in self.messages]
            self._place(0)

    def append(self, message: Message) -> None:
        """Add ``message`` at the end."""
        self.messages.append(message)
        self._rows.append(message.rows(self.width))
        self._place(len(self.messages) - 1)

    def pop(self) -> None:
        """Take the last message away."""
        for parts in (self.messages, self._rows, self._starts):
            parts.pop()

    def clear(self) -> None:
        """Take all messages away."""
        for parts in (self.messages, self._rows, self._starts):
            parts.clear()

    def update(self, message: Message) -> None:
        """Lay ``message``, which changed, out again."""
        index = self.messages.index(message)
        self._rows[index] = message.rows(self.width)
        self._place(index)

    def row(self, y: int) -> PageRow | None:
        """Return row ``y``; None below the end."""
        if not 0 <= y < self.height:
            return None
        index, within = self.at(y)
        rows = self._rows[index]
        return rows[within] if within < len(rows) else BLANK

    def at(self, y: int) -> tuple[int, int]:
        """Return the index of the message at row ``y``, and the row within it; the last is the blank one below it."""
        index = bisect_right(self._starts, y) - 1
        return index, y - self._starts[index]

    def copy(self, span: Callable[[int], tuple[int, int] | None]) -> str:
        """Return the text of the rows that ``span`` gives characters of (from, to; −1 is the end), as it was written."""
        text = ""
        first = True
        for y in range(self.height):
            if (row := self.row(y)) is None or (chosen := span(y)) is None:
                continue
            plain, (start, end) = row.row.content.plain, chosen
            text += "" if first else row.row.joint
            text += plain[start if first else max(start, row.row.indent) : len(plain) if end == -1 else end]
            first = False
        return text

    def rows_of(self, index: int) -> int:
        """Return the number of rows of message ``index``."""
        return len(self._rows[index])

    def start(self, index: int) -> int:
        """Return the row at which message ``index`` begins."""
        return self._starts[index]

    def _place(self, first: int) -> None:
        del self._starts[first:]
        for index in range(first, len(self._rows)):
            self._starts.append(self._starts[-1] + len(self._rows[index - 1]) + 1 if index else 0)
