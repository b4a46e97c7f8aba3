"""The end of a growing text: what may still change, and what is settled.

Only the last top-level section of a Markdown text can change when text is added (a paragraph may become a heading or a table,
a list may go on); all before it is settled. So each look parses the open tail alone, however long the reply has become. Of a
list or a table that grows long, what is whole is not parsed again either.
"""

from dataclasses import dataclass, replace

from tokamac.app.tui.prose.blocks import Block, Flow, Inline, Section, Table
from tokamac.app.tui.prose.parse import parse

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
