"""Markdown blocks as values, and the rows that they are laid out in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from textual.content import Content
from textual.content import Span as ContentSpan
from textual.style import Style

# Equal text gives equal blocks, so only changes are redrawn.


InlineStyle = Literal[
    "strong", "em", "code", "strike", "link", "faint", "marker", "heading", "quote", "math", "guessed"
]
Align = Literal["left", "center", "right"]


@dataclass(frozen=True, slots=True)
class StyledSpan:
    """``style`` for characters [start, end). link: address. source: copied instead of the text; None: the text."""

    start: int
    end: int
    style: InlineStyle
    link: str = ""
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Inline:
    text: str
    spans: tuple[StyledSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    inline: Inline
    first: str = ""
    rest: str = ""

    @property
    def is_formula(self) -> bool:
        return any(
            span.style == "math" and span.end - span.start == len(self.inline.text) for span in self.inline.spans
        )

    @property
    def goes_on(self) -> bool:
        return any(span.source == "" for span in self.inline.spans)


@dataclass(frozen=True, slots=True)
class Flow:
    lines: tuple[Line, ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Verbatim code. ``closed``: highlight it. ``indent``: of its list. guessed: draft ranges [from, to)."""

    text: str
    language: str = ""
    closed: bool = True
    indent: str = ""
    guessed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    rows: tuple[tuple[Inline, ...], ...]
    align: tuple[Align, ...]  # of each column


@dataclass(frozen=True, slots=True)
class HorizontalRule:
    """A horizontal line."""


Block = Flow | Code | Table | HorizontalRule


@dataclass(frozen=True, slots=True)
class Section:
    """A top-level section: its blocks and source lines [start, end).

    ``items``: first lines of items or table rows where it may be cut. ``loose``: a list with space between items.
    ``unsure``: an open formula that may yet belong to the previous section.
    """

    start_line: int
    end_line: int
    blocks: tuple[Block, ...]
    items: tuple[int, ...] = ()
    loose: bool = False
    unsure: bool = False


# HTML is plain text. Links are offered to the terminal, never followed; addresses that can't be opened are
# shown.


# Growing tables are laid out row by row. Columns widen only rarely until the table is final, so that a frame's
# cost doesn't depend on its length; a wider cell is wrapped meanwhile.


TAB = 8  # cells
STYLES = {
    "strong": "bold",
    "em": "italic",
    "code": "$prose-code",
    "strike": "strike",
    "link": "underline",
    "faint": "$text-muted",
    "marker": "$prose-marker",
    "heading": "bold $prose-heading",
    "quote": "$text-muted",
    "math": "$prose-code",
    "guessed": "$text-success",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row on screen.

    joint: separator from the row above in copied text (after a wrap, the text's white space). indent: leading
    characters that aren't text. shown_for: sources copied instead of characters.
    """

    content: Content
    joint: str = "\n"
    indent: int = 0
    shown_for: tuple["ShownFor", ...] = ()

    def copied(self, start: int, end: int, *, first: bool) -> str:
        plain, text, at = self.content.plain, "", start
        for each in self.shown_for:
            if each.start < end and at < each.end:
                text += plain[at : each.start] + (each.source if first or not each.begun else "")
                at = each.end
        return text + plain[at:end]


@dataclass(frozen=True, slots=True)
class ShownFor:
    """Characters [start, end) display ``source``. begun: it began in a row above."""

    start: int
    end: int
    source: str
    begun: bool = False


def content(inline: Inline) -> Content:
    return Content(inline.text, spans=[ContentSpan(span.start, span.end, _style(span)) for span in inline.spans])


def _style(span: StyledSpan) -> str | Style:
    return Style(underline=True, link=span.link) if span.link else STYLES[span.style]


def wrapped(text: Content, width: int, sources: Sequence[StyledSpan] = ()) -> Iterator[Row]:
    text = text.expand_tabs(TAB) if "\t" in text.plain else text
    end = 0
    for index, part in enumerate(text.wrap(width)):
        start = text.plain.find(part.plain, end)
        joint = text.plain[end:start] if index else "\n"
        end = start + len(part.plain)
        inside = [span for span in sources if span.start < end and start < span.end]
        if any(span.start < start for span in inside):
            joint = ""
        yield Row(part, joint, shown_for=tuple(_shown_for(span, start, end) for span in inside))


def _shown_for(span: StyledSpan, start: int, end: int) -> ShownFor:
    return ShownFor(max(span.start, start) - start, min(span.end, end) - start, span.source or "", span.start < start)


def _sources(inline: Inline) -> list[StyledSpan]:
    return [span for span in inline.spans if span.source is not None]


NARROWEST_COLUMN = 4
BAR, CROSSING = " │ ", "─┼─"
SHORT = 24  # rows up to which the columns of a table may move at any time
OFTEN = 2  # a longer table must have grown by this factor before its columns move again
LONG = 200  # rows from which its columns stay until it is final

Cells = tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    kept: int
    rows: list[Row]


class Grid:
    def __init__(self, align: tuple[Align, ...], width: int) -> None:
        self._align = align
        self._width = max(width, 2)
        self._room = self._width - len(BAR) * (len(align) - 1)
        self._widths: list[int] = []  # of the columns, as they are laid out
        self._moved_at = 0  # rows of the table when the columns last moved
        # Of each of the table's rows:
        self._source: list[Cells] = []
        self._cells: list[list[Content]] = []
        self._needs: list[list[int]] = []  # what the columns need for it and all above it
        self._words: list[list[int]] = []  # the widest words of the columns, of it and all above it
        self._ends: list[int] = []  # rows on the screen for it and all above it

    def grow(self, table: Table, *, final: bool) -> Growth:
        known = self._known(table.rows)
        self._cut(known)
        self._source = list(table.rows[:known])  # the same objects are compared by identity next time
        for row in table.rows[len(self._source) :]:
            self._take(row)
        settled = final or len(self._source) <= SHORT
        last = -1 if settled else -2  # the last row may be half a row yet
        widths = _column_widths(self._needs[last], self._words[last], self._room)
        if widths != self._widths and (settled or self._may_move()):
            self._widths, self._moved_at = widths, len(self._source)
            self._ends.clear()
        kept, rows = self._end(), list[Row]()
        for index in range(len(self._ends), len(self._source)):
            rows += self._laid_out(index)
            self._ends.append(kept + len(rows))
        return Growth(kept, rows)

    def _known(self, rows: Sequence[Cells]) -> int:
        pairs = zip(self._source, rows, strict=False)
        changed = (index for index, (was, row) in enumerate(pairs) if was is not row and was != row)
        return next(changed, min(len(self._source), len(rows)))

    def _cut(self, count: int) -> None:
        for of_rows in (self._source, self._cells, self._needs, self._words, self._ends):
            del of_rows[count:]

    def _take(self, row: Cells) -> None:
        cells = [content(cell) for cell in row]
        least = [NARROWEST_COLUMN] * len(cells)
        above, words = (self._needs[-1], self._words[-1]) if self._needs else (least, least)
        self._source.append(row)
        self._cells.append(cells)
        self._needs.append([max(need, cell.cell_length) for need, cell in zip(above, cells, strict=True)])
        self._words.append([max(word, _widest_word(cell)) for word, cell in zip(words, cells, strict=True)])

    def _may_move(self) -> bool:
        return not self._moved_at or OFTEN * self._moved_at <= len(self._source) <= LONG

    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _laid_out(self, index: int) -> Iterator[Row]:
        if not self._widths:
            yield from self._record(index)
            return
        lines = [_lines(cell, size) for cell, size in zip(self._cells[index], self._widths, strict=True)]
        for height in range(max(map(len, lines))):
            yield Row(self._joined([line[height] if height < len(line) else Content("") for line in lines]))
        if index == 0:
            yield Row(Content.styled(CROSSING.join("─" * size for size in self._widths), STYLES["faint"]))

    def _joined(self, cells: Sequence[Content]) -> Content:
        """Join a line of each cell. (Content's ``pad`` and ``join`` take several times as long.)"""
        text, spans = "", list[ContentSpan]()
        for column, (cell, size, align) in enumerate(zip(cells, self._widths, self._align, strict=True)):
            if column:
                spans.append(ContentSpan(len(text), len(text) + len(BAR), STYLES["faint"]))
                text += BAR
            gap = size - cell.cell_length
            before = gap if align == "right" else gap // 2 if align == "center" else 0
            start = len(text) + before
            spans += (ContentSpan(start + span.start, start + span.end, span.style) for span in cell.spans)
            text += " " * before + cell.plain + " " * (gap - before)
        return Content(text, spans, strip_control_codes=False)

    def _record(self, index: int) -> Iterator[Row]:
        if index > 1:
            yield Row(Content(""))
        for name, cell in zip(self._cells[0], self._cells[index], strict=True) if index else ():
            yield from wrapped(name.stylize("bold") + ": " + cell, self._width)


def _lines(cell: Content, size: int) -> list[Content]:
    plain = cell.plain
    if cell.cell_length <= size and "\n" not in plain and "\t" not in plain:
        return [cell]
    return cell.wrap(size)


def _widest_word(cell: Content) -> int:
    return max(map(cell_len, cell.plain.split()), default=0)


def _column_widths(needs: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    least = [NARROWEST_COLUMN] * len(needs)
    if room < sum(least):
        return []
    return _shortened(needs, _shortened(words, least, room), room)


def _shortened(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    widths = list(wanted)
    while (excess := sum(widths) - room) > 0:
        spare = [index for index, width in enumerate(widths) if width > least[index]]
        widest = max(widths[index] for index in spare)
        tied = [index for index in spare if widths[index] == widest]
        floor = max([least[index] for index in tied] + [widths[index] for index in spare if widths[index] < widest])
        each, over = divmod(min(excess, len(tied) * (widest - floor)), len(tied))
        for place, index in enumerate(tied):
            widths[index] -= each + (place < over)
    return widths


CODE_TAB = 4  # cells


def rows(block: Block, width: int) -> list[Row]:
    width = max(width, 2)
    match block:
        case Flow(lines):
            return [row for line in lines for row in _line(line, width)]
        case Code():
            return list(_code(block, width))
        case Table():
            return Grid(block.align, width).grow(block, final=True).rows
        case HorizontalRule():
            return [Row(Content.styled("─" * width, STYLES["faint"]))]


def _line(line: Line, width: int) -> Iterator[Row]:
    indent = min(len(line.rest), width // 2)  # deep nesting in a narrow window gives up its indent first
    for index, row in enumerate(wrapped(content(line.inline), width - indent, _sources(line.inline))):
        prefix = (line.first if index == 0 else line.rest)[len(line.rest) - indent :]
        text = Content.styled(prefix, STYLES["marker"]) + row.content if prefix else row.content
        at = len(prefix)
        shown_for = tuple(replace(each, start=each.start + at, end=each.end + at) for each in row.shown_for)
        joint = "" if index == 0 and line.goes_on else row.joint
        inside = index > 0 or (line.is_formula and not prefix.strip())
        yield Row(text, joint, at if inside else 0, shown_for)


DIFF = {"+": "$text-success", "-": "$text-error", "@": "$text-primary"}


def _code(block: Code, width: int) -> Iterator[Row]:
    text = Content(block.text)
    if block.language.lower() in ("diff", "patch"):
        text = Content("\n").join(Content.styled(line, DIFF.get(line[:1], "")) for line in block.text.split("\n"))
    elif block.closed and block.language:
        from textual.highlight import highlight

        text = highlight(block.text, language=block.language)
    for start, end in block.guessed:
        text = text.stylize(STYLES["guessed"], start, end)
    for line in text.split("\n", allow_blank=True):
        pieces = line.expand_tabs(CODE_TAB).fold(width) if line.plain else [Content("")]
        for index, piece in enumerate(pieces):
            yield Row(piece, "" if index else "\n")
