"""Blocks to rows of a given width. Each row knows what joins it to the one above in copied text: a wrapped row is no new line."""

from collections.abc import Iterator
from dataclasses import dataclass

from textual.content import Content
from textual.content import Span as ContentSpan

from tokamac.app.tui.prose.blocks import Block, Code, Flow, Inline, Line, Rule, Table

NARROWEST_COLUMN = 4
TAB, CODE_TAB = 8, 4  # cells
STYLES = {
    "strong": "bold",
    "em": "italic",
    "code": "$prose-code",
    "strike": "strike",
    "link": "underline",
    "faint": "$prose-faint",
    "marker": "$prose-marker",
    "heading": "bold $prose-heading",
    "quote": "$prose-faint",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row on the screen.

    joint: what stands between it and the row above in copied text; where a row was wrapped, the white space of the text itself.
    indent: so many characters at its begin are not the text's own.
    """

    content: Content
    joint: str = "\n"
    indent: int = 0


def rows(block: Block, width: int) -> list[Row]:
    """Return ``block`` laid out in ``width`` cells."""
    width = max(width, 2)
    match block:
        case Flow(lines):
            return [row for line in lines for row in _line(line, width)]
        case Code():
            return list(_code(block, width))
        case Table():
            return list(_table(block, width))
        case Rule():
            return [Row(Content.styled("─" * width, STYLES["faint"]))]


def content(inline: Inline) -> Content:
    """Return ``inline`` as styled text."""
    return Content(inline.text, spans=[ContentSpan(span.start, span.end, STYLES[span.style]) for span in inline.spans])


def wrapped(text: Content, width: int) -> Iterator[Row]:
    """Yield ``text``, which may hold newlines, as rows of at most ``width`` cells."""
    text = text.expand_tabs(TAB) if "\t" in text.plain else text
    end = 0
    for index, part in enumerate(text.wrap(width)):
        start = text.plain.find(part.plain, end)
        yield Row(part, text.plain[end:start] if index else "\n")
        end = start + len(part.plain)


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


def _table(table: Table, width: int) -> Iterator[Row]:
    columns = len(table.right)
    cells = [[content(cell) for cell in row] for row in table.rows]
    widths = _column_widths([[cell.cell_length for cell in row] for row in cells], width - 3 * (columns - 1))
    if not widths:
        yield from _records(cells, width)
        return
    bar = Content.styled(" │ ", STYLES["faint"])
    for index, row in enumerate(cells):
        wrapped = [cell.wrap(size) if cell.plain else [Content("")] for cell, size in zip(row, widths, strict=True)]
        for height in range(max(map(len, wrapped))):
            yield Row(
                bar.join(
                    [
                        _cell(lines, height, size, right)
                        for lines, size, right in zip(wrapped, widths, table.right, strict=True)
                    ]
                )
            )
        if index == 0:
            yield Row(Content.styled("─┼─".join("─" * size for size in widths), STYLES["faint"]))


def _cell(lines: list[Content], height: int, size: int, right: bool) -> Content:
    line = lines[height] if height < len(lines) else Content("")
    gap = max(0, size - line.cell_length)
    return line.pad_left(gap) if right else line.pad_right(gap)


def _column_widths(lengths: list[list[int]], room: int) -> list[int]:
    """Return the columns' widths: what they need, the widest shortened first; none where ``room`` does not do."""
    widths = [max(NARROWEST_COLUMN, *column) for column in zip(*lengths, strict=True)]
    if room < NARROWEST_COLUMN * len(widths):
        return []
    while (excess := sum(widths) - room) > 0:
        widest = max(widths)
        second = max([w for w in widths if w < widest], default=NARROWEST_COLUMN)
        index = widths.index(widest)
        widths[index] -= max(1, min(excess, widest - max(second, NARROWEST_COLUMN)))
    return widths


def _records(cells: list[list[Content]], width: int) -> Iterator[Row]:
    """A table too wide for the window: each row as ``header: cell`` lines."""
    header, *body = cells
    for index, row in enumerate(body):
        if index:
            yield Row(Content(""))
        for name, cell in zip(header, row, strict=True):
            yield from wrapped(name.stylize("bold") + ": " + cell, width)
