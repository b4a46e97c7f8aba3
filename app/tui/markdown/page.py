"""A text in Markdown that may grow, as rows. Each block is laid out once; only the open end is laid out again.

A conversation as rows of one width: what stands where, and what copying takes from it. No widget, no terminal.

A long conversation is not laid out as a whole before any of it is seen: the height of what has not been in view is guessed.
``settle`` lays out what comes into view, and says where it then stands.

A block as rows of a page. As it grows, only what is new is laid out; what looks the same stays the same objects.

The end of a growing text: what may still change, and what is settled.

Only the last top-level section of a Markdown text can change when text is added (a paragraph may become a heading or a table,
a list may go on); all before it is settled. So each look parses the open tail alone, however long the reply has become. Of a
list or a table that grows long, what is whole is not parsed again either.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from textual.content import Content

from tokamac.app.tui.markdown.parse import Block, Code, Flow, Inline, Section, Table, parse
from tokamac.app.tui.markdown.rows import Grid, Row, rows


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


class PageItem(Protocol):
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
    messages: list[PageItem] = field(default_factory=list)
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

    def append(self, message: PageItem) -> None:
        """Add ``message`` at the end."""
        self.append_later(message, 0)
        self._lay_out(len(self.messages) - 1)

    def append_later(self, message: PageItem, rows: int) -> None:
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

    def update(self, message: PageItem) -> None:
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


CODE = Frame(Content(" ") + Content.styled(" ", "on $surface"), "on $surface")


class Laid:
    """``block`` in ``rows`` of ``width`` cells, with a blank one below. ``final``: it grows no more."""

    def __init__(self, block: Block, width: int, *, final: bool) -> None:
        self.rows: list[PageRow] = []
        self._width = width
        self._block: Block | None = None
        self._final = False
        self._table: tuple[tuple[bool, ...], Grid] | None = None
        self.become(block, final=final)

    def become(self, block: Block, *, final: bool) -> None:
        """Lay out ``block``, which stands where the one before stood."""
        if block is self._block and final is self._final:
            return
        before, self._block, self._final = self._block, block, final
        if isinstance(block, Table):
            self._lay_out_table(block)
        elif block != before:
            self._table = None
            if isinstance(block, Code) and isinstance(before, Code) and _goes_on(before, block):
                self._lay_out_lines(before, block)
            else:
                self._keep(0, rows(block, self._room(block)))

    def _lay_out_table(self, table: Table) -> None:
        if self._table is None or self._table[0] != table.right:
            self._table = table.right, Grid(table.right, self._room(table))
        growth = self._table[1].grow(table, final=self._final)
        self._keep(growth.kept, growth.rows)

    def _lay_out_lines(self, before: Code, block: Code) -> None:
        """Lay out the lines that ``before`` lacks: otherwise, each new token of a long block would cost more than the last."""
        last = next(index for index in reversed(range(len(self.rows) - 1)) if self.rows[index].row.joint == "\n")
        line = replace(block, text=block.text[before.text.rfind("\n") + 1 :])
        self._keep(last, rows(line, self._room(block)))

    def _room(self, block: Block) -> int:
        return self._width - 2 if isinstance(block, Code) else self._width

    def _keep(self, kept: int, new: Iterable[Row]) -> None:
        """Have ``new`` rows after the first ``kept``."""
        frame = CODE if isinstance(self._block, Code) else PLAIN
        joined = isinstance(self._block, Flow) and self._block.joined
        framed = [*(PageRow(row, frame) for row in new), *(() if joined else (BLANK,))]
        self.rows = [*self.rows[:kept], *keep_same(self.rows[kept:], framed)]


def _goes_on(before: Code, block: Code) -> bool:
    """Whether both are plain lines, and the lines of ``before`` but for its last are those of ``block``."""
    return not block.closed and not before.closed and block.text.startswith(before.text)


LONGEST_OPEN_LIST = 24
OPEN_ITEMS = 3
MOST_COLUMNS = 64
"""A table with more is parsed as a whole: for a short row the parser makes up cells, and it must see how many it made already."""


@dataclass(frozen=True, slots=True)
class Look:
    """The tail's blocks: the first ``settled`` of them are final."""

    blocks: tuple[Block, ...]
    settled: int


class Tail:
    """The unsettled end of a text that grows."""

    def __init__(self) -> None:
        self._text = ""
        self._read: tuple[
            tuple[Inline, ...], ...
        ] = ()  # of the table that the text begins with, header and rows taken out

    def add(self, text: str) -> None:
        """Append ``text``."""
        self._text += text

    def look(self) -> Look:
        """Return the blocks since the last look's settled ones, and settle what now is final."""
        sections = self._sections()
        blocks = tuple(block for section in sections for block in section.blocks)
        # A section that begins on a line still being written may yet turn out to belong to the one before: it settles nothing.
        whole_lines = self._text.count("\n")
        last = next((i for i in reversed(range(1, len(sections))) if sections[i].start_line < whole_lines), 0)
        if last:
            self._text = self._text_from(sections[last - 1].end_line)
            self._read = ()
        elif len(sections) == 1:
            match sections[0].blocks:
                case (Table() as table,):
                    self._take_rows(sections[0], table, whole_lines)
                case _ if len(sections[0].items) >= LONGEST_OPEN_LIST:
                    return self._cut_list(sections[0])
        return Look(blocks, sum(len(section.blocks) for section in sections[:last]))

    def _sections(self) -> tuple[Section, ...]:
        """Parse the text; rows that were taken out of it are put back."""
        sections = parse(self._text)
        if not self._read:
            return sections
        (table,) = sections[0].blocks
        assert isinstance(table, Table)  # its first lines are whole, and are still there
        whole = replace(table, rows=(*self._read, *table.rows[1:]))
        return (replace(sections[0], blocks=(whole,)), *sections[1:])

    def _take_rows(self, section: Section, table: Table, whole_lines: int) -> None:
        """Take rows that are whole lines out of the text: no line below changes them. The header stays, and what is above it."""
        count = sum(line < whole_lines for line in section.items)
        if count and len(table.right) <= MOST_COLUMNS:
            first = section.items[0]
            lines = self._text.splitlines(keepends=True)
            self._text = "".join([*lines[:first], *lines[first + count :]])
            self._read = table.rows[: max(1, len(self._read)) + count]

    def _cut_list(self, section: Section) -> Look:
        """Settle all items but the last few of a long list: it would be drawn as a whole for each token otherwise."""
        line = section.items[-OPEN_ITEMS]
        head, rest = parse("".join(self._text.splitlines(keepends=True)[:line])), parse(self._text_from(line))
        settled = [block for part in head for block in part.blocks if isinstance(block, Flow)]
        alike = all(part.loose == section.loose for part in (*head, *rest))
        if not alike or len(settled) < sum(len(part.blocks) for part in head):
            return Look(section.blocks, 0)
        self._text = self._text_from(line)
        joined = [replace(block, joined=not section.loose) for block in settled]
        return Look((*joined, *(block for part in rest for block in part.blocks)), len(joined))

    def _text_from(self, line: int) -> str:
        return "".join(self._text.splitlines(keepends=True)[line:])


class Prose:
    """Blocks and their rows. ``add`` is cheap; ``look`` parses what was added."""

    def __init__(self) -> None:
        self._tail = Tail()
        self._added = False
        self._whole: str | None = None  # what it is to be in the end, not parsed yet
        self._settled: list[Block] = []
        self._open: Sequence[Block] = ()
        self._width = 0
        self._laid: list[Laid] = []

    def add(self, text: str) -> None:
        """Append ``text``; ``look`` takes notice of it."""
        self._tail.add(text)
        self._added = True

    def look(self) -> None:
        """Take notice of what was added."""
        if self._whole is not None:
            self._settled = [block for section in parse(self._whole) for block in section.blocks]
            self._open, self._whole = (), None
        elif self._added:
            self._added = False
            look = self._tail.look()
            self._settled += look.blocks[: look.settled]
            self._open = look.blocks[look.settled :]

    def finish(self, text: str) -> None:
        """Be the whole of ``text``, whatever was added: a link may be defined after its use. It is parsed when rows are wanted."""
        self._whole, self._added = text, False

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells: the same objects as before for what looks the same."""
        if self._whole is not None:
            self.look()
        if width != self._width:
            self._width = width
            self._laid.clear()
        blocks = [*self._settled, *self._open]
        del self._laid[len(blocks) :]
        for index, block in enumerate(blocks):
            final = index < len(self._settled)
            if index < len(self._laid):
                self._laid[index].become(block, final=final)
            else:
                self._laid.append(Laid(block, width, final=final))
        return [row for laid in self._laid for row in laid.rows]
