"""A conversation as rows of one width: what stands where, and what copying takes from it. No widget, no terminal.

A long conversation is not laid out as a whole before any of it is seen: the height of what has not been in view is guessed.
``settle`` lays out what comes into view, and says where it then stands.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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

Span = tuple[int, int]
"""From character, to character (exclusive; −1 is the end)."""


def keep_same(old: Sequence[PageRow], new: Sequence[PageRow]) -> list[PageRow]:
    """Return ``new``, with the objects of ``old`` where they look the same: what is the same object need not be drawn again."""
    kept = [was if was is row or was.is_same(row) else row for was, row in zip(old, new, strict=False)]
    return [*kept, *new[len(kept) :]]


class Message(Protocol):
    """A part of the conversation that knows its rows."""

    def rows(self, width: int) -> Sequence[PageRow]:
        """Return the rows at ``width`` cells; the same objects as before where nothing changed."""


def guess(text: str, width: int) -> int:
    """Return about how many rows ``text`` takes at ``width`` cells."""
    return sum(1 + len(line) // max(1, width) for line in text.split("\n"))


@dataclass(slots=True)
class Page:
    """Messages, oldest first, with a blank row after each."""

    width: int = 0
    messages: list[Message] = field(default_factory=list)
    _rows: list[Sequence[PageRow] | None] = field(default_factory=list)  # None: not laid out
    _heights: list[int] = field(default_factory=list)  # of what is not laid out, a guess
    _starts: list[int] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Rows of the whole page."""
        return self._starts[-1] + self._heights[-1] + 1 if self.messages else 0

    def fit(self, width: int) -> None:
        """Be ``width`` cells wide from here on; everything is laid out again when it comes into view."""
        if width != self.width:
            self._heights = [max(1, rows * self.width // width) for rows in self._heights]
            self._rows = [None] * len(self.messages)
            self.width = width
            self._place(0)

    def append(self, message: Message) -> None:
        """Add ``message`` at the end."""
        self.append_later(message, 0)
        self._lay_out(len(self.messages) - 1)

    def append_later(self, message: Message, rows: int) -> None:
        """Add ``message`` at the end, to be laid out when it comes into view; it has about so many rows."""
        self.messages.append(message)
        self._rows.append(None)
        self._heights.append(rows)
        self._place(len(self.messages) - 1)

    def pop(self) -> None:
        """Take the last message away."""
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.pop()

    def clear(self) -> None:
        """Take all messages away."""
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.clear()

    def update(self, message: Message) -> None:
        """Lay ``message``, which changed, out again."""
        self._lay_out(self.messages.index(message))

    def settle(self, y: int, height: int) -> int:
        """Lay out all that shows in ``height`` rows from row ``y`` on; return the row that must be first for it to show there.

        What was laid out before stays where it is in view; where nothing was, the message at ``y`` does.
        """
        if not self.messages:
            return y
        index, within = self.at(y)
        fixed = next((i for i in range(index, self.at(y + height - 1)[0] + 1) if self._rows[i] is not None), None)
        if fixed is None:
            fixed, guessed = index, max(1, self._heights[index])
            self._lay_out(index)
            y = self._starts[index] + within * self._heights[index] // guessed
        above = self._starts[fixed] - y
        while missing := self._missing(y, height):
            for each in missing:
                self._lay_out(each)
            y = max(0, self._starts[fixed] - above)
        return y

    def settle_end(self, height: int) -> None:
        """Lay out all that shows in the last ``height`` rows."""
        while missing := self._missing(max(0, self.height - height), height):
            self._lay_out(missing[-1])

    def _missing(self, y: int, height: int) -> list[int]:
        """Return the messages in view that are not laid out."""
        if not self.messages:
            return []
        first, last = self.at(y)[0], self.at(y + height - 1)[0]
        return [index for index in range(first, last + 1) if self._rows[index] is None]

    def row(self, y: int) -> PageRow | None:
        """Return row ``y``; None below the end. What is not laid out looks blank."""
        if not 0 <= y < self.height:
            return None
        index, within = self.at(y)
        rows = self._rows[index]
        return BLANK if rows is None or within >= len(rows) else rows[within]

    def at(self, y: int) -> tuple[int, int]:
        """Return the index of the message at row ``y``, and the row within it; the last is the blank one below it."""
        index = bisect_right(self._starts, y) - 1
        return index, y - self._starts[index]

    def copy(self, span: Callable[[int], Span | None]) -> str:
        """Return the text of the rows that ``span`` gives characters of, as it was written."""
        text = ""
        first = True
        for row, chosen in self._spans(span):
            plain, (start, end) = row.row.content.plain, chosen
            text += "" if first else row.row.joint
            text += plain[start if first else max(start, row.row.indent) : len(plain) if end == -1 else end]
            first = False
        return text

    def _spans(self, span: Callable[[int], Span | None]) -> Iterator[tuple[PageRow, Span]]:
        """Yield the rows that are chosen. Of what was never in view only all can be: it is laid out aside, and stays unplaced."""
        for message, laid, start in zip(self.messages, self._rows, self._starts, strict=True):
            if laid is None and span(start) is not None:
                yield from ((row, (0, -1)) for row in (*message.rows(self.width), BLANK))
            elif laid is not None:
                chosen = ((row, span(y)) for y, row in enumerate((*laid, BLANK), start))
                yield from ((row, where) for row, where in chosen if where is not None)

    def rows_of(self, index: int) -> int:
        """Return the number of rows of message ``index``."""
        return self._heights[index]

    def start(self, index: int) -> int:
        """Return the row at which message ``index`` begins."""
        return self._starts[index]

    def _lay_out(self, index: int) -> None:
        rows = self._rows[index] = self.messages[index].rows(self.width)
        if len(rows) != self._heights[index]:
            self._heights[index] = len(rows)
            self._place(index + 1)

    def _place(self, first: int) -> None:
        del self._starts[first:]
        for index in range(first, len(self._heights)):
            self._starts.append(self._starts[-1] + self._heights[index - 1] + 1 if index else 0)
