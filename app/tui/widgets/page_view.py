"""A page that scrolls. It follows the end until the reader scrolls away, and again when they return to it.

It is one widget that draws its own rows, and paints only rows that changed: a layout of the screen for each new row, or a widget
for each paragraph, would cost a model on the same cores a tenth of its speed.
"""

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from ..markdown.page import Page, PageRow

MOST_STRIPS = 1000  # that are kept

Selected = tuple[int, int, Style]
"""From character, to character (exclusive; −1 is the end), and their style."""


def segments(content: Content, base: Style) -> list[Segment]:
    """Return ``content`` on ``base``, with colours of the current theme."""
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
    """Return ``content`` with its selected part marked."""
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
        # Few segments are few bytes for the terminal. The margin stays a segment of its own: pictures place text by segments.
        strip = Strip([*Segment.simplify(before), *Segment.simplify([*text, *after])])
        return strip.adjust_cell_length(self.width, self.base.rich_style)

    def blank(self) -> Strip:
        """Return a row with nothing on it."""
        return Strip.blank(self.width, self.base.rich_style)

    def located(self, page_row: PageRow, y: int) -> Strip:
        """Return ``page_row`` as row ``y`` with the offsets of its characters, for Textual's selection."""
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
    """The strips of a page, each with the row it shows: another object is another row."""

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
        """Whether the last painting of row ``y`` is still right."""
        row, shown = page.row(y), self._strips.get(y)
        return shown is None if row is None else shown is not None and shown[0] is row


SEEN_CELLS = 0.5  # a change of the scroll bar's length that the eye sees


class PageView(ScrollView, can_focus=False):
    """Shows ``_page``."""

    def __init__(self) -> None:
        super().__init__()
        self._page = Page()
        self._following = True
        self._canvas = Canvas()

    @property
    def growing(self) -> bool:
        """Whether it is redrawn often, so that invisible changes are skipped."""
        return False

    @property
    def following(self) -> bool:
        """Whether the end stays in view."""
        return self.max_scroll_y == 0 or self._following

    def page(self, direction: int) -> None:
        """Scroll a page up (−1) or down (1). Where all is in view, following continues."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=direction * max(1, self.container_size.height - 1), animate=False)

    def follow(self) -> None:
        """Jump to the end and stay there."""
        self._following = True
        self._show()

    # Place ----------------------------------------------------------------------------------------------------------------

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolling away from the end stops following; scrolling to the end starts it again."""
        self._settle()
        self._following = round(self.scroll_y) >= self.max_scroll_y
        self._move_bar(exact=not (self.growing and self._following))
        if round(old_value) != round(new_value):
            self.refresh()

    def release_anchor(self) -> None:
        """Put the scroll bar where the page is, before the reader drags it."""
        super().release_anchor()
        self._move_bar(exact=True)

    def _move_bar(self, *, exact: bool) -> None:
        """Set the scroll bar; unless ``exact``, only by visible steps, since any change redraws all of it."""
        bar, height, rows = self.vertical_scrollbar, self.container_size.height, self._page.height
        drawn = _thumb(height, bar.window_virtual_size, bar.position)
        thumb = _thumb(height, rows, self.scroll_y)
        seen = any(abs(new - old) >= SEEN_CELLS for new, old in zip(thumb, drawn, strict=True))
        if self.show_vertical_scrollbar and (exact or seen):
            bar.window_virtual_size, bar.position = rows, self.scroll_y

    def _scroll(self, y: int) -> None:
        self.scroll_target_y = self.scroll_y = y

    def _settle(self) -> None:
        """Lay out what comes into view, and stay at the reader's place as guessed heights become known."""
        top = self._page.settle(self.scroll_offset.y, self.size.height)
        self._set_height()
        if (top := min(top, self.max_scroll_y)) != self.scroll_offset.y:
            self._clear_text_selection()
            self._scroll(top)

    def _set_height(self) -> None:
        """Tell Textual the height of the page. The screen needs a layout only when the scroll bar appears or disappears."""
        size = Size(self.size.width, self._page.height)
        if (size.height > self.container_size.height) != self.show_vertical_scrollbar:
            self.virtual_size = size
        else:
            self.set_reactive(Widget.virtual_size, size)

    def _show(self) -> None:
        """Update the height, and draw the rows that changed."""
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
        """Return the strips in ``crop``, those painted before with their escape sequences."""
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
        """Return line ``y`` with offsets, by which Textual finds the character under the mouse."""
        y += self.scroll_offset.y
        row = self._page.row(y)
        return self._painter().blank() if row is None else self._painter().located(row, y)

    def _painter(self) -> Painter:
        width, room = self.size.width, self._page.width
        return Painter(self.visual_style, self.app.theme, width, max(0, (width - room) // 2), room)

    # Selection ------------------------------------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text as it was written, with wrapped rows joined."""
        return self._page.copy(selection.get_span), "\n"

    def _clear_text_selection(self) -> None:
        """Rows have moved, so that the selection is no longer right."""
        if self.text_selection is not None:
            self.screen.clear_selection()


def _thumb(height: int, rows: int, top: float) -> tuple[float, float]:
    """Return the length and start of a scroll bar's thumb in cells, with ``height`` of ``rows`` in view from row ``top``."""
    share = height / max(1, rows)
    return height * share, top * share
