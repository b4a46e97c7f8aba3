"""A text in Markdown that may grow, as rows. Each block is laid out once; only the open end is laid out again."""

from collections.abc import Sequence
from dataclasses import replace

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
        self._whole: str | None = None  # what it is to be in the end, not parsed yet
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
            if index == len(self._laid):
                self._laid.append((block, _lay_out(block, width)))
            elif (was := self._laid[index])[0] is not block:
                self._laid[index] = (block, was[1] if was[0] == block else _lay_out_again(*was, block, width))
        return [row for _, laid in self._laid for row in laid]


def _lay_out_again(before: Block, laid: list[PageRow], block: Block, width: int) -> list[PageRow]:
    """Return ``block`` laid out, which stands where ``before`` was laid out as ``laid``."""
    if not (isinstance(before, Code) and isinstance(block, Code) and _goes_on(before, block)):
        return keep_same(laid, _lay_out(block, width))
    # A long block of code is laid out line by line as it comes, or each new token would cost more than the one before.
    last = next(index for index in reversed(range(len(laid) - 1)) if laid[index].row.joint == "\n")
    line = replace(block, text=block.text[before.text.rfind("\n") + 1 :])
    return [*laid[:last], *keep_same(laid[last:], _lay_out(line, width))]


def _goes_on(before: Code, block: Code) -> bool:
    """Whether both are plain lines, and the lines of ``before`` but for its last are those of ``block``."""
    return not block.closed and not before.closed and block.text.startswith(before.text)


def _lay_out(block: Block, width: int) -> list[PageRow]:
    code = isinstance(block, Code)
    frame, room = (CODE, width - 2) if code else (PLAIN, width)
    laid = [PageRow(row, frame) for row in rows(block, room)]
    return laid if isinstance(block, Flow) and block.joined else [*laid, BLANK]
