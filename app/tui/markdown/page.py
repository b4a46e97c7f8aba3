"""A conversation as rows of one width, and texts in Markdown that grow. No widget, no terminal.

``Page`` knows the place of every row, and what copying takes from it. Messages are laid out when they come into view; until then
their height is guessed. ``Prose`` lays out each block once: only the last top-level section of a Markdown text can change when
text is added (a paragraph may become a heading or a table, a list may continue), and ``Tail`` parses that open section alone,
however long the reply has become. Whole items of a long list and whole rows of a table are not parsed again either. What looks
the same stays the same objects, so that it is not drawn again.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rich.cells import cell_len
from textual.content import Content

from ..theme import end_of
from .blocks import Align, Block, Code, Flow, Inline, Section, Table
from .guessed import GuessedText
from .rows import STYLES, Grid, Row, rows


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds a row's text and is not copied.

    lead: before the text. style: behind it, to the end of the row except ``right`` cells.
    """

    lead: Content
    style: str = ""
    right: int = 1


PLAIN = Frame(Content(" "))


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row as it is shown. code: the block that a click on it copies."""

    row: Row
    frame: Frame = PLAIN
    code: "BlockRows | None" = None

    def is_same(self, other: "PageRow") -> bool:
        """Whether it looks and copies the same (Content's own equality ignores styles)."""
        return (
            self.row.content.is_same(other.row.content)
            and (self.row.joint, self.row.indent, self.row.shown_for)
            == (other.row.joint, other.row.indent, other.row.shown_for)
            and self.frame.lead.is_same(other.frame.lead)
            and (self.frame.style, self.frame.right) == (other.frame.style, other.frame.right)
            and (self.code is None) == (other.code is None)
        )


BLANK = PageRow(Row(Content("")))

Span = tuple[int, int]
"""From character, to character (exclusive; −1 is the end)."""


def keep_same(old: Sequence[PageRow], new: Sequence[PageRow]) -> list[PageRow]:
    """Return ``new``, with the objects of ``old`` where they look the same, so that they are not drawn again."""
    kept = [was if was is row or was.is_same(row) else row for was, row in zip(old, new, strict=False)]
    return [*kept, *new[len(kept) :]]


class PageItem(Protocol):
    """A part of the conversation that knows its rows."""

    def rows(self, width: int) -> Sequence[PageRow]:
        """Return the rows at ``width`` cells; the same objects as before where nothing changed."""


def guess(text: str, width: int) -> int:
    """Return about how many rows ``text`` has at ``width`` cells."""
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
        """Change the width; everything is laid out again when it comes into view."""
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
        """Add ``message`` at the end, to be laid out when it comes into view; it has about ``rows`` rows."""
        self.messages.append(message)
        self._rows.append(None)
        self._heights.append(rows)
        self._place(len(self.messages) - 1)

    def pop(self) -> None:
        """Remove the last message."""
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.pop()

    def clear(self) -> None:
        """Remove all messages."""
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.clear()

    def update(self, message: PageItem) -> None:
        """Lay out ``message`` again, which changed."""
        self._lay_out(self.messages.index(message))

    def settle(self, y: int, height: int) -> int:
        """Lay out what is in view: ``height`` rows from row ``y``. Return the row to scroll to.

        What was laid out before stays in its place on the screen; where nothing was, the message at ``y`` does.
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
        """Lay out the last ``height`` rows."""
        while missing := self._missing(max(0, self.height - height), height):
            self._lay_out(missing[-1])

    def _missing(self, y: int, height: int) -> list[int]:
        """Return the messages in view that are not laid out."""
        if not self.messages:
            return []
        first, last = self.at(y)[0], self.at(y + height - 1)[0]
        return [index for index in range(first, last + 1) if self._rows[index] is None]

    def row(self, y: int) -> PageRow | None:
        """Return row ``y``; None below the end. What is not laid out is blank."""
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
            start, end = chosen
            text += "" if first else row.row.joint
            end = len(row.row.content.plain) if end == -1 else end
            text += row.row.copied(start if first else max(start, row.row.indent), end, first=first)
            first = False
        return text

    def _spans(self, span: Callable[[int], Span | None]) -> Iterator[tuple[PageRow, Span]]:
        """Yield the selected rows. A message that was never in view is selected as a whole, and laid out only for that."""
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


CODE = "on $surface"
CODE_BAR = "▏"
"""Stands before each row of code: there are themes, and terminals, in which its ground is not seen."""
CODE_HINT = "copy: /code"


def _indent(block: Code, width: int) -> str:
    """Return the indent of a block; deep nesting in a narrow window gives it up first."""
    return block.indent[max(0, len(block.indent) - width // 2) :]


def _code_lead(indent: str) -> Content:
    return Content(" ") + Content.styled(indent, STYLES["marker"]) + Content.styled(CODE_BAR, f"$text-muted {CODE}")


def _code_head(block: Code, width: int) -> Frame:
    """Return the row above a block: its language, and how to copy it. Nothing of it is copied."""
    lead = _code_lead(_indent(block, width))
    room = width - lead.cell_length
    language = end_of(block.language, max(2, room)) if block.language else ""
    hint = CODE_HINT if room >= cell_len(language) + len(CODE_HINT) + 2 else ""
    gap = " " * max(0, room - cell_len(language) - len(hint) - 1)
    text = Content.styled(language, f"bold $text-muted {CODE}") + Content.styled(f"{gap}{hint}", f"$text-muted {CODE}")
    return Frame(lead + text, CODE)


class BlockRows:
    """A block as ``rows`` of ``width`` cells, with a blank one below. final: it grows no more."""

    def __init__(self, block: Block, width: int, *, final: bool) -> None:
        self.rows: list[PageRow] = []
        self._width = width
        self._block: Block | None = None
        self._final = False
        self._table: tuple[tuple[Align, ...], Grid] | None = None
        self.become(block, final=final)

    def become(self, block: Block, *, final: bool) -> None:
        """Lay out ``block`` in place of the one before."""
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
                self._replace(0, rows(block, self._room(block)))

    def _lay_out_table(self, table: Table) -> None:
        if self._table is None or self._table[0] != table.align:
            self._table = table.align, Grid(table.align, self._room(table))
        growth = self._table[1].grow(table, final=self._final)
        self._replace(growth.kept, growth.rows)

    def _lay_out_lines(self, before: Code, block: Code) -> None:
        """Lay out only the new lines, so that a token of a long block costs no more than one of a short block."""
        last = next(index for index in reversed(range(len(self.rows) - 1)) if self.rows[index].row.joint == "\n")
        cut = before.text.rfind("\n") + 1
        guessed = tuple((max(0, start - cut), end - cut) for start, end in block.guessed if end > cut)
        line = replace(block, text=block.text[cut:], guessed=guessed)
        self._replace(last, rows(line, self._room(block)))

    @property
    def code(self) -> str:
        """The text of a block of code."""
        return self._block.text if isinstance(self._block, Code) else ""

    def _room(self, block: Block) -> int:
        return self._width - 2 - len(_indent(block, self._width)) if isinstance(block, Code) else self._width

    def _replace(self, kept: int, new: Iterable[Row]) -> None:
        """Replace all rows after the first ``kept``."""
        block = self._block
        framed: list[PageRow] = []
        frame = PLAIN
        if isinstance(block, Code):
            frame = Frame(_code_lead(_indent(block, self._width)), CODE)
            if not kept:
                framed.append(PageRow(Row(Content(""), joint=""), _code_head(block, self._width), self))
        framed += (PageRow(row, frame) for row in new)
        if not (isinstance(block, Flow) and block.joined):
            framed.append(BLANK)
        self.rows = [*self.rows[:kept], *keep_same(self.rows[kept:], framed)]


def _goes_on(before: Code, block: Code) -> bool:
    """Whether ``block`` is ``before`` with more text, both not highlighted."""
    alike = (before.language, before.indent) == (block.language, block.indent)
    return alike and not block.closed and not before.closed and block.text.startswith(before.text)


LONGEST_OPEN_LIST = 24
OPEN_ITEMS = 3
MOST_COLUMNS = 64
"""A wider table is parsed as a whole: the parser adds cells to short rows, and must see how many it has added."""


@dataclass(frozen=True, slots=True)
class Look:
    """The tail's blocks, of which the first ``settled`` are final."""

    blocks: tuple[Block, ...]
    settled: int


def parse(source: str) -> tuple[Section, ...]:
    """Return the top-level sections of ``source``, in order. What parses is imported here: the first frame needs none of it."""
    from .parse import parse as by_library

    return by_library(source)


class Tail:
    """The open end of a text that grows."""

    @property
    def length(self) -> int | None:
        """Its characters; None while rows of a table are taken out of it."""
        return None if self._read else len(self._text)

    def __init__(self) -> None:
        self._text = ""
        self._read: tuple[
            tuple[Inline, ...], ...
        ] = ()  # of the table that the text begins with, header and rows taken out

    def add(self, text: str) -> None:
        """Append ``text``."""
        self._text += text

    def look(self) -> Look:
        """Return the blocks after those settled by earlier looks, and settle those that are final now."""
        sections = self._sections()
        blocks = tuple(block for section in sections for block in section.blocks)
        # A section that begins on an unfinished line may still become a part of the one before: it settles nothing.
        whole_lines = self._text.count("\n")
        last = next((i for i in reversed(range(1, len(sections))) if sections[i].start_line < whole_lines), 0)
        if last and sections[last].unsure:
            last -= 1
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
        """Parse the text, and put back the rows that were taken out of it."""
        sections = parse(self._text)
        if not self._read:
            return sections
        (table,) = sections[0].blocks
        assert isinstance(table, Table)  # its first lines are whole, and are still there
        whole = replace(table, rows=(*self._read, *table.rows[1:]))
        return (replace(sections[0], blocks=(whole,)), *sections[1:])

    def _take_rows(self, section: Section, table: Table, whole_lines: int) -> None:
        """Take out rows that are whole lines, which no later line changes. The header stays, and what is above it."""
        count = sum(line < whole_lines for line in section.items)
        if count and len(table.align) <= MOST_COLUMNS:
            first = section.items[0]
            lines = self._text.splitlines(keepends=True)
            self._text = "".join([*lines[:first], *lines[first + count :]])
            self._read = table.rows[: max(1, len(self._read)) + count]

    def _cut_list(self, section: Section) -> Look:
        """Settle all items of a long list except the last few, so that it is not drawn as a whole for each token."""
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
    """A text that grows, as rows. ``add`` is cheap; ``look`` parses what was added.

    Args:
        tinted: What was guessed is marked.
    """

    def __init__(self, *, tinted: bool = False) -> None:
        self._guessed = GuessedText() if tinted else None
        self._open_at = 0  # in the whole text, where the blocks begin that are not settled
        self._tail = Tail()
        self._added = False
        self._whole: str | None = None  # the final text, not parsed yet
        self._settled: list[Block] = []
        self._open: Sequence[Block] = ()
        self._width = 0
        self._laid: list[BlockRows] = []

    def add(self, text: str, *, guessed: bool = False) -> None:
        """Append ``text``, to be parsed by ``look``."""
        self._tail.add(text)
        if self._guessed is not None:
            self._guessed.add(text, guessed=guessed)
        self._added = True

    def look(self) -> None:
        """Parse what was added."""
        if self._whole is not None:
            self._settled = list(self._parsed(self._whole))
            self._open, self._whole = (), None
        elif self._added:
            self._added = False
            look = self._tail.look()
            self._settled += self._marked(look.blocks[: look.settled], settled=True)
            self._open = self._marked(look.blocks[look.settled :], settled=False)

    def _marked(self, blocks: Sequence[Block], *, settled: bool) -> Sequence[Block]:
        """Mark what was guessed in blocks of the tail: those that are ``settled`` now, or those after them."""
        if self._guessed is None:
            return blocks
        marked, at = self._guessed.marked(blocks, self._open_at) if self._guessed else (blocks, self._open_at)
        if settled:
            left = self._tail.length
            self._open_at = at if left is None else len(self._guessed.text) - left
        return marked

    def _parsed(self, text: str) -> Iterator[Block]:
        """Yield the blocks of the whole text, with what was guessed marked where it is the text that grew."""
        guessed = self._guessed if self._guessed and self._guessed.text.rstrip() == text.rstrip() else None
        starts = [0, *(each.end() for each in re.finditer("\n", text))] if guessed else []
        for section in parse(text):
            yield from (
                section.blocks if guessed is None else guessed.marked(section.blocks, starts[section.start_line])[0]
            )

    def finish(self, text: str) -> None:
        """Become ``text``, whatever was added: a link may be defined after its use. It is parsed when rows are wanted."""
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
                self._laid.append(BlockRows(block, width, final=final))
        return [row for laid in self._laid for row in laid.rows]
