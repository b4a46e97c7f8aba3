"""A block as rows of a page. As it grows, only what is new is laid out; what looks the same stays the same objects."""

from collections.abc import Iterable
from dataclasses import replace

from textual.content import Content

from tokamac.app.tui.prose.blocks import Block, Code, Flow, Table
from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow, keep_same
from tokamac.app.tui.prose.rows import Row, rows
from tokamac.app.tui.prose.table import Grid

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
