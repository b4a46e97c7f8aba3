"""Blocks to rows of a given width."""

from collections.abc import Iterator

from textual.content import Content

from tokamac.app.tui.prose.blocks import Block, Code, Flow, Line, Rule, Table
from tokamac.app.tui.prose.table import Grid
from tokamac.app.tui.prose.wrapping import STYLES, Row, content, wrapped

__all__ = ["Row", "rows", "wrapped"]

CODE_TAB = 4  # cells


def rows(block: Block, width: int) -> list[Row]:
    """Return ``block`` laid out in ``width`` cells."""
    width = max(width, 2)
    match block:
        case Flow(lines):
            return [row for line in lines for row in _line(line, width)]
        case Code():
            return list(_code(block, width))
        case Table():
            return Grid(block.right, width).grow(block, final=True).rows
        case Rule():
            return [Row(Content.styled("─" * width, STYLES["faint"]))]


def _line(line: Line, width: int) -> Iterator[Row]:
    indent = min(len(line.rest), width // 2)  # deep nesting in a narrow window gives up its indent first
    for index, row in enumerate(wrapped(content(line.inline), width - indent)):
        prefix = (line.first if index == 0 else line.rest)[len(line.rest) - indent :]
        text = Content.styled(prefix, STYLES["marker"]) + row.content if prefix else row.content
        yield Row(text, row.joint, len(prefix) if index else 0)


def _code(block: Code, width: int) -> Iterator[Row]:
    text = Content(block.text)
    if block.closed and block.language:
        from textual.highlight import highlight

        text = highlight(block.text, language=block.language)
    for line in text.split("\n", allow_blank=True):
        pieces = line.expand_tabs(CODE_TAB).fold(width) if line.plain else [Content("")]
        for index, piece in enumerate(pieces):
            yield Row(piece, "" if index else "\n")
