"""A text in Markdown that may grow, as rows. Each block is laid out once; only the open end is laid out again."""

from collections.abc import Sequence

from textual.content import Content

from tokamac.app.tui.prose.blocks import Block, Code, Flow
from tokamac.app.tui.prose.page import BLANK, PLAIN, Frame, PageRow, keep_same
from tokamac.app.tui.prose.parse import parse
from tokamac.app.tui.prose.rows import rows
from tokamac.app.tui.prose.tail import Tail

CODE = Frame(Content(" ") + Content.styled(" ", "on $surface"), "on $surface")


class Prose:
    """Blocks and their rows. ``add`` is cheap; ``look`` parses what was added."""

    def __init__(self) -> None:
        self._tail = Tail()
        self._added = False
        self._settled: list[Block] = []
        self._open: Sequence[Block] = ()
        self._width = 0
        self._laid: list[tuple[Block, list[PageRow]]] = []

    def add(self, text: str) -> None:
        """Append ``text``; ``look`` takes notice of it."""
        self._tail.add(text)
        self._added = True

    def look(self) -> None:
        """Take notice of what was added."""
        if self._added:
            self._added = False
            look = self._tail.look()
            self._settled += look.blocks[: look.settled]
            self._open = look.blocks[look.settled :]

    def finish(self, text: str) -> None:
        """Be the whole of ``text``, whatever was added: a link may be defined after its use."""
        self._settled = [block for section in parse(text) for block in section.blocks]
        self._open, self._added = (), False

    def rows(self, width: int) -> list[PageRow]:
        """Return the rows at ``width`` cells: the same objects as before for what looks the same."""
        if width != self._width:
            self._width = width
            self._laid.clear()
        blocks = [*self._settled, *self._open]
        del self._laid[len(blocks) :]
        for index, block in enumerate(blocks):
            if index == len(self._laid):
                self._laid.append((block, _lay_out(block, width)))
            elif (was := self._laid[index])[0] is not block:
                drawn = was[1] if was[0] == block else keep_same(was[1], _lay_out(block, width))
                self._laid[index] = (block, drawn)
        return [row for _, laid in self._laid for row in laid]


def _lay_out(block: Block, width: int) -> list[PageRow]:
    code = isinstance(block, Code)
    frame, room = (CODE, width - 2) if code else (PLAIN, width)
    laid = [PageRow(row, frame) for row in rows(block, room)]
    return laid if isinstance(block, Flow) and block.joined else [*laid, BLANK]
