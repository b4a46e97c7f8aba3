"""Markdown on the screen: one widget a block, each drawing its own rows, so that long lists cost no more than long paragraphs."""

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.selection import Selection
from textual.widget import Widget

from tokamac.app.tui.prose.blocks import Block, Code, Flow
from tokamac.app.tui.prose.parse import parse
from tokamac.app.tui.prose.rows import Row, rows
from tokamac.app.tui.prose.tail import Tail


class BlockView(Widget):
    """One block, laid out for the width it has."""

    def __init__(self, block: Block) -> None:
        super().__init__(classes=_classes(block))
        self._block = block
        self._laid_out: tuple[int, str, list[Row]] | None = None

    def show(self, block: Block) -> None:
        """Show ``block`` instead, if it is another one."""
        if block == self._block:
            return
        self.set_classes(_classes(block))
        self._block = block
        height = len(self._laid_out[2]) if self._laid_out else 0
        self._laid_out = None
        self.refresh(layout=height != len(self._rows(self.content_size.width)))

    def _rows(self, width: int) -> list[Row]:
        theme = self.app.theme
        if self._laid_out is None or self._laid_out[:2] != (width, theme):
            self._laid_out = (width, theme, rows(self._block, width))
        return self._laid_out[2]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of rows at ``width``."""
        del container, viewport  # Textual's signature; only the width matters
        return len(self._rows(width))

    def render(self) -> Content:
        """Return the rows; none is wider than the widget."""
        return Content("\n").join(row.content for row in self._rows(self.content_size.width))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text as it was written: rows that were only wrapped are joined again."""
        text = ""
        for y, row in enumerate(self._rows(self.content_size.width)):
            if (span := selection.get_span(y)) is None:
                continue
            plain, (start, end) = row.content.plain, span
            end = len(plain) if end == -1 else end
            if not text:
                text = plain[start:end]
            elif row.wrapped:
                text += ("" if isinstance(self._block, Code) else " ") + plain[max(start, row.indent) : end]
            else:
                text += "\n" + plain[start:end]
        return text, "\n"


def _classes(block: Block) -> str:
    return f"-{type(block).__name__.lower()}" + (" -joined" if isinstance(block, Flow) and block.joined else "")


class Prose(Vertical):
    """A text in Markdown that may grow. Finished blocks are drawn once; only the last one is drawn again."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._tail = Tail()
        self._views: list[BlockView] = [BlockView(block) for block in _blocks(text)]
        self._settled = len(self._views)

    def compose(self) -> ComposeResult:
        """Yield the blocks known so far."""
        yield from self._views

    def add(self, text: str) -> None:
        """Append ``text``; ``look`` shows it."""
        self._tail.add(text)

    def look(self) -> None:
        """Show what was added."""
        look = self._tail.look()
        self._show(self._settled, look.blocks)
        self._settled += look.settled

    def finish(self, text: str) -> None:
        """Show the whole of ``text``: what the stream showed of it stays where it is right."""
        self._show(0, _blocks(text))

    def _show(self, at: int, blocks: Sequence[Block]) -> None:
        views = self._views[at:]
        for view, block in zip(views, blocks, strict=False):
            view.show(block)
        for view in views[len(blocks) :]:
            view.remove()
            self._views.remove(view)
        fresh = [BlockView(block) for block in blocks[len(views) :]]
        if fresh:
            self._views += fresh
            self.mount_all(fresh)


def _blocks(text: str) -> list[Block]:
    return [block for section in parse(text) for block in section.blocks]
