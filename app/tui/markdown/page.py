"""A conversation as rows of one width, with growing Markdown texts. No widget, no terminal."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from ..theme import end_of
from .rows import STYLES, Align, Block, Code, Flow, Grid, Inline, Line, Row, Section, StyledSpan, Table, rows

# ``Page`` maps rows and copies text; messages are laid out when in view, heights estimated until then.
# ``Prose`` lays out each block once: only the last section can change when text is added, and ``Tail`` parses
# just that, so cost doesn't grow with the reply. Finished list items and table rows aren't parsed again.
# Unchanged rows stay the same objects, so that they aren't redrawn.


# Which characters of a rendered text were guessed. The parser keeps no places, so its words are found in the source
# again.

Range = tuple[int, int]
WORD = re.compile(r"\w+|[^\w\s]")
NEAR, FAR = 24, 800  # characters of markup between two words: as usual; and at most, such as those of a link's address


class GuessedText:
    """A growing text and which of it were draft tokens."""

    def __init__(self) -> None:
        self.text = ""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, text: str, *, guessed: bool) -> None:
        start = len(self.text)
        self.text += text
        if not guessed or not text:
            return
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = len(self.text)
        else:
            self._starts.append(start)
            self._ends.append(len(self.text))

    def __bool__(self) -> bool:
        return bool(self._starts)

    def marked(self, blocks: Iterable[Block], at: int) -> tuple[list[Block], int]:
        found: list[Block] = []
        for block in blocks:
            match block:
                case Flow(lines):
                    new: list[Line] = []
                    for line in lines:
                        inline, at = self._inline(line.inline, at)
                        new.append(replace(line, inline=inline))
                    found.append(replace(block, lines=tuple(new)))
                case Table(rows):
                    cells: list[tuple[Inline, ...]] = []
                    for row in rows:
                        made: list[Inline] = []
                        for cell in row:
                            inline, at = self._inline(cell, at)
                            made.append(inline)
                        cells.append(tuple(made))
                    found.append(replace(block, rows=tuple(cells)))
                case Code(text):
                    ranges, at = self._found(text, at)
                    found.append(replace(block, guessed=tuple(joined(ranges, text))))
                case _:
                    found.append(block)
        return found, at

    def _inline(self, inline: Inline, at: int) -> tuple[Inline, int]:
        ranges: list[Range] = []
        place = 0
        formulas = sorted((span for span in inline.spans if span.source is not None), key=lambda span: span.start)
        for span in formulas:
            before, at = self._found(inline.text[place : span.start], at)
            ranges += [(place + start, place + end) for start, end in before]
            place = span.end
            if span.source and (began := self.text.find(span.source, at, at + FAR + len(span.source))) >= 0:
                at = began + len(span.source)
                if sum(end - start for start, end in self._guessed(began, at)) * 2 > at - began:
                    ranges.append((span.start, span.end))
        rest, at = self._found(inline.text[place:], at)
        ranges += [(place + start, place + end) for start, end in rest]
        spans = (StyledSpan(start, end, "guessed") for start, end in joined(ranges, inline.text))
        return replace(inline, spans=(*inline.spans, *spans)) if ranges else inline, at

    def _found(self, text: str, at: int) -> tuple[list[Range], int]:
        ranges: list[Range] = []
        words = list(WORD.finditer(text))
        for number, word in enumerate(words):
            following = words[number + 1].group() if number + 1 < len(words) else ""
            if (began := self._place(word.group(), following, at)) < 0:
                continue
            at = began + len(word.group())
            shift = word.start() - began
            ranges += [(start + shift, end + shift) for start, end in self._guessed(began, at)]
        return ranges, at

    def _place(self, word: str, following: str, at: int) -> int:
        began = self.text.find(word, at, at + NEAR + len(word))
        if began >= 0 or not word[0].isalnum():
            return began
        began = self.text.find(word, at + 1, at + FAR + len(word))
        end = began + len(word)
        sure = began >= 0 and following and self.text.find(following, end, end + NEAR + len(following)) >= 0
        return began if sure else -1

    def _guessed(self, start: int, end: int) -> Iterator[Range]:
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            if self._starts[index] >= end:
                return
            if self._ends[index] > start:
                yield max(start, self._starts[index]), min(end, self._ends[index])


def joined(ranges: Sequence[Range], text: str) -> Iterator[Range]:
    last: Range | None = None
    for start, end in ranges:
        if last is not None and not text[last[1] : start].strip():
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class Frame:
    """Row decoration that isn't copied. style: behind the text, up to ``right`` cells from the end."""

    lead: Content
    style: str = ""
    right: int = 1


PLAIN = Frame(Content(" "))


@dataclass(frozen=True, slots=True)
class PageRow:
    """A displayed row. code: the block that a click copies."""

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

Span = tuple[int, int]  # from character, to character (exclusive; −1 is the end)


def keep_same(old: Sequence[PageRow], new: Sequence[PageRow]) -> list[PageRow]:
    """Return ``new`` with equal objects of ``old`` reused, so that they aren't redrawn."""
    kept = [was if was is row or was.is_same(row) else row for was, row in zip(old, new, strict=False)]
    return [*kept, *new[len(kept) :]]


class PageItem(Protocol):
    def rows(self, width: int) -> Sequence[PageRow]:
        """Return the rows at ``width`` cells; the same objects where nothing changed."""


def guess(text: str, width: int) -> int:
    return sum(1 + len(line) // max(1, width) for line in text.split("\n"))


@dataclass(slots=True)
class Page:
    width: int = 0
    messages: list[PageItem] = field(default_factory=list)
    _rows: list[Sequence[PageRow] | None] = field(default_factory=list)  # None: not laid out
    _heights: list[int] = field(default_factory=list)  # of what is not laid out, a guess
    _starts: list[int] = field(default_factory=list)

    @property
    def height(self) -> int:
        return self._starts[-1] + self._heights[-1] + 1 if self.messages else 0

    def fit(self, width: int) -> None:
        if width != self.width:
            self._heights = [max(1, rows * self.width // width) for rows in self._heights]
            self._rows = [None] * len(self.messages)
            self.width = width
            self._place(0)

    def append(self, message: PageItem) -> None:
        self.append_later(message, 0)
        self._lay_out(len(self.messages) - 1)

    def append_later(self, message: PageItem, rows: int) -> None:
        self.messages.append(message)
        self._rows.append(None)
        self._heights.append(rows)
        self._place(len(self.messages) - 1)

    def pop(self) -> None:
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.pop()

    def clear(self) -> None:
        for parts in (self.messages, self._rows, self._heights, self._starts):
            parts.clear()

    def update(self, message: PageItem) -> None:
        self._lay_out(self.messages.index(message))

    def settle(self, y: int, height: int) -> int:
        """Lay out ``height`` rows from row ``y``; return the row to scroll to."""
        # Rows laid out before keep their screen position; if there were none, the message at ``y`` does.
        if not self.messages:
            return y
        index, within = self.locate(y)
        fixed = next((i for i in range(index, self.locate(y + height - 1)[0] + 1) if self._rows[i] is not None), None)
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
        while missing := self._missing(max(0, self.height - height), height):
            self._lay_out(missing[-1])

    def _missing(self, y: int, height: int) -> list[int]:
        if not self.messages:
            return []
        first, last = self.locate(y)[0], self.locate(y + height - 1)[0]
        return [index for index in range(first, last + 1) if self._rows[index] is None]

    def row(self, y: int) -> PageRow | None:
        if not 0 <= y < self.height:
            return None
        index, within = self.locate(y)
        rows = self._rows[index]
        return BLANK if rows is None or within >= len(rows) else rows[within]

    def locate(self, y: int) -> tuple[int, int]:
        index = bisect_right(self._starts, y) - 1
        return index, y - self._starts[index]

    def copy(self, span: Callable[[int], Span | None]) -> str:
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
        for message, laid, start in zip(self.messages, self._rows, self._starts, strict=True):
            if laid is None and span(start) is not None:
                yield from ((row, (0, -1)) for row in (*message.rows(self.width), BLANK))
            elif laid is not None:
                chosen = ((row, span(y)) for y, row in enumerate((*laid, BLANK), start))
                yield from ((row, where) for row, where in chosen if where is not None)

    def rows_of(self, index: int) -> int:
        return self._heights[index]

    def start(self, index: int) -> int:
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
CODE_BAR = "▏"  # stands before each row of code: there are themes, and terminals, in which its ground is not seen
CODE_HINT = "copy: /code"


def _indent(block: Code, width: int) -> str:
    return block.indent[max(0, len(block.indent) - width // 2) :]


def _code_lead(indent: str) -> Content:
    return Content(" ") + Content.styled(indent, STYLES["marker"]) + Content.styled(CODE_BAR, f"$text-muted {CODE}")


def _code_head(block: Code, width: int) -> Frame:
    lead = _code_lead(_indent(block, width))
    room = width - lead.cell_length
    language = end_of(block.language, max(2, room)) if block.language else ""
    hint = CODE_HINT if room >= cell_len(language) + len(CODE_HINT) + 2 else ""
    gap = " " * max(0, room - cell_len(language) - len(hint) - 1)
    text = Content.styled(language, f"bold $text-muted {CODE}") + Content.styled(f"{gap}{hint}", f"$text-muted {CODE}")
    return Frame(lead + text, CODE)


class BlockRows:
    def __init__(self, block: Block, width: int, *, final: bool) -> None:
        self.rows: list[PageRow] = []
        self._width = width
        self._block: Block | None = None
        self._final = False
        self._table: tuple[tuple[Align, ...], Grid] | None = None
        self.become(block, final=final)

    def become(self, block: Block, *, final: bool) -> None:
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
        last = next(index for index in reversed(range(len(self.rows) - 1)) if self.rows[index].row.joint == "\n")
        cut = before.text.rfind("\n") + 1
        guessed = tuple((max(0, start - cut), end - cut) for start, end in block.guessed if end > cut)
        line = replace(block, text=block.text[cut:], guessed=guessed)
        self._replace(last, rows(line, self._room(block)))

    @property
    def code(self) -> str:
        return self._block.text if isinstance(self._block, Code) else ""

    def _room(self, block: Block) -> int:
        return self._width - 2 - len(_indent(block, self._width)) if isinstance(block, Code) else self._width

    def _replace(self, kept: int, new: Iterable[Row]) -> None:
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
    alike = (before.language, before.indent) == (block.language, block.indent)
    return alike and not block.closed and not before.closed and block.text.startswith(before.text)


LONGEST_OPEN_LIST = 24
OPEN_ITEMS = 3
# A wider table is parsed as a whole: the parser adds cells to short rows, and must see how many it has added.
MOST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Look:
    blocks: tuple[Block, ...]
    settled: int


def parse(source: str) -> tuple[Section, ...]:
    """Parse top-level sections; imports the parser late, since the first frame doesn't need it."""
    from .parse import parse as by_library

    return by_library(source)


class Tail:
    @property
    def length(self) -> int | None:
        return None if self._read else len(self._text)

    def __init__(self) -> None:
        self._text = ""
        self._read: tuple[
            tuple[Inline, ...], ...
        ] = ()  # of the table that the text begins with, header and rows taken out

    def add(self, text: str) -> None:
        self._text += text

    def look(self) -> Look:
        """Return the unsettled blocks, and settle those that are final now."""
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
        sections = parse(self._text)
        if not self._read:
            return sections
        (table,) = sections[0].blocks
        assert isinstance(table, Table)  # its first lines are whole, and are still there
        whole = replace(table, rows=(*self._read, *table.rows[1:]))
        return (replace(sections[0], blocks=(whole,)), *sections[1:])

    def _take_rows(self, section: Section, table: Table, whole_lines: int) -> None:
        count = sum(line < whole_lines for line in section.items)
        if count and len(table.align) <= MOST_COLUMNS:
            first = section.items[0]
            lines = self._text.splitlines(keepends=True)
            self._text = "".join([*lines[:first], *lines[first + count :]])
            self._read = table.rows[: max(1, len(self._read)) + count]

    def _cut_list(self, section: Section) -> Look:
        """Settle all but the last items of a long list, so that a token doesn't redraw it all."""
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
    """A growing text as rows. ``add`` is cheap; ``look`` parses. tinted: mark draft text."""

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
        self._tail.add(text)
        if self._guessed is not None:
            self._guessed.add(text, guessed=guessed)
        self._added = True

    def look(self) -> None:
        if self._whole is not None:
            self._settled = list(self._parsed(self._whole))
            self._open, self._whole = (), None
        elif self._added:
            self._added = False
            look = self._tail.look()
            self._settled += self._marked(look.blocks[: look.settled], settled=True)
            self._open = self._marked(look.blocks[look.settled :], settled=False)

    def _marked(self, blocks: Sequence[Block], *, settled: bool) -> Sequence[Block]:
        if self._guessed is None:
            return blocks
        marked, at = self._guessed.marked(blocks, self._open_at) if self._guessed else (blocks, self._open_at)
        if settled:
            left = self._tail.length
            self._open_at = at if left is None else len(self._guessed.text) - left
        return marked

    def _parsed(self, text: str) -> Iterator[Block]:
        guessed = self._guessed if self._guessed and self._guessed.text.rstrip() == text.rstrip() else None
        starts = [0, *(each.end() for each in re.finditer("\n", text))] if guessed else []
        for section in parse(text):
            yield from (
                section.blocks if guessed is None else guessed.marked(section.blocks, starts[section.start_line])[0]
            )

    def finish(self, text: str) -> None:
        self._whole, self._added = text, False

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells, reusing objects that look the same."""
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


# One widget draws all rows, and paints only changed ones: a layout per row, or a widget per paragraph, would
# cost a model on the same cores a tenth of its speed.


MOST_STRIPS = 1000  # that are kept

Selected = tuple[int, int, Style]  # from character, to character (exclusive; −1 is the end), and their style


def segments(content: Content, base: Style) -> list[Segment]:
    drawn = content.render(base, end="", parse_style=_parse)
    return [Segment(text, (base + style).rich_style) for text, style in drawn if text]


def _parse(style: str | Style) -> Style:
    return style if isinstance(style, Style) else Style.parse(style)


def selected_in(widget: Widget, y: int) -> Selected | None:
    selection = widget.text_selection
    if selection is None or (span := selection.get_span(y)) is None:
        return None
    return (*span, Style.from_styles(widget.screen.get_component_styles("screen--selection")))


def select(content: Content, selected: Selected | None) -> Content:
    if selected is None:
        return content
    start, end, style = selected
    return content.stylize(style, start, len(content.plain) if end == -1 else end)


@dataclass(frozen=True, slots=True)
class Painter:
    base: Style
    theme: str
    width: int
    left: int
    room: int

    def strip(self, page_row: PageRow, selected: Selected | None = None) -> Strip:
        before, text, after = self._parts(page_row, selected)
        # Few segments are few bytes for the terminal. The margin stays a segment of its own: pictures place text by segments.
        strip = Strip([*Segment.simplify(before), *Segment.simplify([*text, *after])])
        return strip.adjust_cell_length(self.width, self.base.rich_style)

    def blank(self) -> Strip:
        return Strip.blank(self.width, self.base.rich_style)

    def located(self, page_row: PageRow, y: int) -> Strip:
        before, text, after = self._parts(page_row, None)
        cells = sum(segment.cell_length for segment in before)
        start = RichStyle.from_meta({"offset": (0, y)})
        margin = [Segment(" ", start)] * cells  # left of the text is its beginning
        return Strip([*margin, *Strip(text).apply_offsets(0, y), *after])

    def _parts(
        self, page_row: PageRow, selected: Selected | None
    ) -> tuple[list[Segment], list[Segment], list[Segment]]:
        row, frame, base = page_row.row, page_row.frame, self.base
        beneath = base + Style.parse(frame.style) if frame.style else base
        before = [Segment(" " * self.left, base.rich_style), *segments(frame.lead, base)]
        used = frame.lead.cell_length + row.content.cell_length + frame.right
        after = [Segment(" " * max(0, self.room - used), beneath.rich_style)]
        return before, segments(select(row.content, selected), beneath), after


class Canvas:
    def __init__(self) -> None:
        self._painter: Painter | None = None
        self._strips: dict[int, tuple[PageRow, Strip]] = {}

    def strip(self, painter: Painter, page: Page, y: int, selected: Selected | None) -> Strip:
        if painter != self._painter or len(self._strips) > MOST_STRIPS:
            self._painter = painter
            self._strips.clear()
        row = page.row(y)
        if row is None or selected is not None:
            self._strips.pop(y, None)
            return painter.blank() if row is None else painter.strip(row, selected)
        shown = self._strips.get(y)
        if shown is None or shown[0] is not row:
            shown = self._strips[y] = (row, painter.strip(row))
        return shown[1]

    def shows(self, page: Page, y: int) -> bool:
        row, shown = page.row(y), self._strips.get(y)
        return shown is None if row is None else shown is not None and shown[0] is row


SEEN_CELLS = 0.5  # a change of the scroll bar's length that the eye sees


class PageView(ScrollView, can_focus=False):
    def __init__(self) -> None:
        super().__init__()
        self._page = Page()
        self._following = True
        self._canvas = Canvas()

    @property
    def growing(self) -> bool:
        return False

    @property
    def following(self) -> bool:
        return self.max_scroll_y == 0 or self._following

    def page(self, direction: int) -> None:
        if self.max_scroll_y > 0:
            self.scroll_relative(y=direction * max(1, self.container_size.height - 1), animate=False)

    def follow(self) -> None:
        self._following = True
        self._show()

    # Place ----------------------------------------------------------------------------------------------------------------

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        self._settle()
        self._following = round(self.scroll_y) >= self.max_scroll_y
        self._move_bar(exact=not (self.growing and self._following))
        if round(old_value) != round(new_value):
            self.refresh()

    def release_anchor(self) -> None:
        super().release_anchor()
        self._move_bar(exact=True)

    def _move_bar(self, *, exact: bool) -> None:
        """Set the scroll bar, by visible steps unless ``exact``: any change redraws all of it."""
        bar, height, rows = self.vertical_scrollbar, self.container_size.height, self._page.height
        drawn = _thumb(height, bar.window_virtual_size, bar.position)
        thumb = _thumb(height, rows, self.scroll_y)
        seen = any(abs(new - old) >= SEEN_CELLS for new, old in zip(thumb, drawn, strict=True))
        if self.show_vertical_scrollbar and (exact or seen):
            bar.window_virtual_size, bar.position = rows, self.scroll_y

    def _scroll(self, y: int) -> None:
        self.scroll_target_y = self.scroll_y = y

    def _settle(self) -> None:
        top = self._page.settle(self.scroll_offset.y, self.size.height)
        self._set_height()
        if (top := min(top, self.max_scroll_y)) != self.scroll_offset.y:
            self._clear_text_selection()
            self._scroll(top)

    def _set_height(self) -> None:
        size = Size(self.size.width, self._page.height)
        if (size.height > self.container_size.height) != self.show_vertical_scrollbar:
            self.virtual_size = size
        else:
            self.set_reactive(Widget.virtual_size, size)

    def _show(self) -> None:
        if self._following:
            self._page.settle_end(self.size.height)
            self._set_height()
            self._scroll(self.max_scroll_y)
        else:
            self._settle()
        self._move_bar(exact=not self.growing)
        top, height = self.scroll_offset.y, self.size.height
        changed = [y for y in range(height) if not self._canvas.shows(self._page, top + y)]
        if changed:
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] - changed[0] + 1))

    # Drawing --------------------------------------------------------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        painter, top = self._painter(), self.scroll_offset.y
        rows = range(top + crop.y, top + crop.bottom)
        strips = [self._canvas.strip(painter, self._page, y, selected_in(self, y)) for y in rows]
        background = self.background_colors[1]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
        if crop.column_span == (0, self.size.width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        row = self._page.row(y)
        return self._painter().blank() if row is None else self._painter().located(row, y)

    def _painter(self) -> Painter:
        width, room = self.size.width, self._page.width
        return Painter(self.visual_style, self.app.theme, width, max(0, (width - room) // 2), room)

    # Selection ------------------------------------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return self._page.copy(selection.get_span), "\n"

    def _clear_text_selection(self) -> None:
        if self.text_selection is not None:
            self.screen.clear_selection()


def _thumb(height: int, rows: int, top: float) -> tuple[float, float]:
    share = height / max(1, rows)
    return height * share, top * share
