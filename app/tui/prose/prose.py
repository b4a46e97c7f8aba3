"""A text in Markdown that may grow, as rows. Each block is laid out once; only the open end is laid out again."""

from collections.abc import Sequence

from tokamac.app.tui.prose.blocks import Block
from tokamac.app.tui.prose.laid import Laid
from tokamac.app.tui.prose.page import PageRow
from tokamac.app.tui.prose.parse import parse
from tokamac.app.tui.prose.tail import Tail


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
