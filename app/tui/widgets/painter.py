"""Rows of a page as strips, which is what Textual writes to the terminal; what has not changed is not painted again."""

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from tokamac.app.tui.prose.page import Page, PageRow

MOST_STRIPS = 1000  # that are kept

Selected = tuple[int, int, Style]
"""From character, to character (exclusive; −1 is the end), and how they look."""


def segments(content: Content, base: Style) -> list[Segment]:
    """Return ``content`` on ``base``, with colours of the theme that is on."""
    drawn = content.render(base, end="", parse_style=_parse)
    return [Segment(text, (base + style).rich_style) for text, style in drawn if text]


def _parse(style: str | Style) -> Style:
    return style if isinstance(style, Style) else Style.parse(style)


def selected_in(widget: Widget, y: int) -> Selected | None:
    """Return what is selected of row ``y`` of ``widget``."""
    selection = widget.text_selection
    if selection is None or (span := selection.get_span(y)) is None:
        return None
    return (*span, Style.from_styles(widget.screen.get_component_styles("screen--selection")))


def select(content: Content, selected: Selected | None) -> Content:
    """Return ``content`` with what is selected of it marked."""
    if selected is None:
        return content
    start, end, style = selected
    return content.stylize(style, start, len(content.plain) if end == -1 else end)


@dataclass(frozen=True, slots=True)
class Painter:
    """Paints rows of ``room`` cells from cell ``left`` of a widget of ``width`` cells. ``theme`` tells two painters apart."""

    base: Style
    theme: str
    width: int
    left: int
    room: int

    def strip(self, page_row: PageRow, selected: Selected | None = None) -> Strip:
        """Return ``page_row`` as it is shown."""
        before, text, after = self._parts(page_row, selected)
        # Few segments are few bytes for the terminal. The margin stays one of its own: pictures place text by segments.
        strip = Strip([*Segment.simplify(before), *Segment.simplify([*text, *after])])
        return strip.adjust_cell_length(self.width, self.base.rich_style)

    def blank(self) -> Strip:
        """Return a row with nothing on it."""
        return Strip.blank(self.width, self.base.rich_style)

    def located(self, page_row: PageRow, y: int) -> Strip:
        """Return ``page_row`` as row ``y`` for Textual's selection, which asks segments which characters they are."""
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
    """The strips of a page, by row. Each keeps the row it shows: another object there is another row."""

    def __init__(self) -> None:
        self._painter: Painter | None = None
        self._strips: dict[int, tuple[PageRow, Strip]] = {}

    def strip(self, painter: Painter, page: Page, y: int, selected: Selected | None) -> Strip:
        """Return row ``y`` of ``page`` as ``painter`` paints it."""
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
        """Whether what was painted last at row ``y`` is still right."""
        row, shown = page.row(y), self._strips.get(y)
        return shown is None if row is None else shown is not None and shown[0] is row
