"""The side panel. Only rows that changed are drawn again; no timer and no layout while a reply is written."""

from collections.abc import Sequence

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tokamac.app.tui.figures import FIGURES, Figure, explain
from tokamac.app.tui.gauge_rows import WIDTH, GaugeRow, rows
from tokamac.app.tui.session import Session
from tokamac.app.tui.widgets.painter import segments, select, selected_in

POINTER = "◂"  # beside all rows of the figure that is pointed at


class Gauges(Widget, can_focus=True):
    """Figures of the running reply, or of the last one. What is not known says so. Up and Down choose one, Enter explains it."""

    FOCUS_ON_CLICK = False
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("up", "move(-1)", "Figure above", id="gauges.up", show=False),
        Binding("down", "move(1)", "Figure below", id="gauges.down", show=False),
        Binding("home", "move(-99)", "First figure", id="gauges.first", show=False),
        Binding("end", "move(99)", "Last figure", id="gauges.last", show=False),
        Binding("enter,space", "explain", "Explain", id="gauges.explain", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._session: Session | None = None
        self._rows: list[GaugeRow] = []
        self._drawn: list[Content] = []
        self._chosen: Figure | None = None

    def show(self, session: Session) -> None:
        """Show where ``session`` is."""
        self._session = session
        self._rows = rows(session, self.container_size.height)
        self._draw()

    @property
    def chosen(self) -> Figure | None:
        """The figure that is pointed at."""
        return self._chosen

    def _draw(self) -> None:
        first = next(
            (y for y, row in enumerate(self._rows) if row.figure is not None and row.figure == self._chosen), -1
        )
        before, self._drawn = self._drawn, [self._pointed(row, y == first) for y, row in enumerate(self._rows)]
        if len(before) != len(self._drawn):
            self.refresh(layout=True)
            return
        changed = [y for y, (was, row) in enumerate(zip(before, self._drawn, strict=True)) if not was.is_same(row)]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _pointed(self, row: GaugeRow, first: bool) -> Content:
        """Return a row as it is drawn: of the figure that is pointed at the first is reversed, which needs no colours."""
        if row.figure is None or row.figure != self._chosen:
            return row.content
        pad = " " * (WIDTH - row.content.cell_length)
        whole = Content.styled(row.content.plain + pad, "reverse") if first else row.content + pad
        return whole + Content.styled(POINTER, "$primary")

    # Pointing -------------------------------------------------------------------------------------------------------------

    def on_focus(self) -> None:
        """Point at the figure that was pointed at last, or the first."""
        self._choose(self._chosen or "ttft")

    def on_blur(self) -> None:
        """Point at none, but remember which it was while a dialog explains it."""
        if self.screen.is_current:
            self._choose(None)

    def action_move(self, by: int) -> None:
        """Point at another figure."""
        index = FIGURES.index(self._chosen or "ttft") + by
        self._choose(FIGURES[max(0, min(len(FIGURES) - 1, index))])

    def action_explain(self) -> None:
        """Explain the figure that is pointed at."""
        if self._chosen is not None:
            self._open(self._chosen)

    def on_click(self, event: events.Click) -> None:
        """Explain the figure that was clicked."""
        if self.text_selection is None and 0 <= event.y < len(self._rows) and (figure := self._rows[event.y].figure):
            self._open(figure)

    def _choose(self, figure: Figure | None) -> None:
        self._chosen = figure
        self._draw()
        if figure is not None:
            self.call_after_refresh(self._bring_into_view, figure)  # the panel may be about to be shown

    def _bring_into_view(self, figure: Figure) -> None:
        """Scroll the panel to a figure, with what stands above it: it may be its title."""
        shown = [y for y, row in enumerate(self._rows) if row.figure == figure]
        if shown and isinstance(self.parent, Widget):
            top = max(0, shown[0] - 1)
            self.parent.scroll_to_region(Region(0, top, 1, shown[-1] + 1 - top), animate=False)

    def _open(self, figure: Figure) -> None:
        from tokamac.app.tui.screens.figure import FigureScreen

        if (session := self._session) is not None:
            explained = [explain(each, session) for each in FIGURES]
            self.app.push_screen(FigureScreen(explained, FIGURES.index(figure)), self._explained)

    def _explained(self, index: int | None) -> None:
        """Point at the figure that was read last."""
        if self.has_focus and index is not None:
            self._choose(FIGURES[index])

    # Drawing --------------------------------------------------------------------------------------------------------------

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of rows; none is wider than ``WIDTH`` and the pointer."""
        del container, viewport, width  # Textual's signature
        return len(self._rows)

    def render_line(self, y: int) -> Strip:
        """Return row ``y``."""
        if y >= len(self._drawn):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        selected = selected_in(self, y)
        return Strip(segments(select(self._drawn[y], selected), self.visual_style)).apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text."""
        return selection.extract("\n".join(_plain(self._rows))), "\n"


def _plain(shown: Sequence[GaugeRow]) -> list[str]:
    return [row.content.plain for row in shown]
