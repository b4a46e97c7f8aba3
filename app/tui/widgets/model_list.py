"""The picker's list: rows under the names of their sections. It is changed row by row, so that the eye keeps its place."""

from collections.abc import Iterator, Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tokamac.app.tui import units
from tokamac.app.tui.model_rows import row_line, section_line
from tokamac.app.tui.shelf import Row, Section
from tokamac.app.tui.stock import Stock

SCROLLBAR = 2
LEAST = 30
"""Cells, also before the list has a size."""


class ModelList(OptionList, can_focus=False):
    """Lists rows; ``pointed`` is the one that is pointed at. The keyboard stays with the line to type in."""

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self._shown_rows: dict[str, Row] = {}
        self._shown_lines: dict[str, Content] = {}

    @property
    def cells(self) -> int:
        """The cells that a row has."""
        return max(LEAST, self.content_size.width - SCROLLBAR)

    @property
    def pointed(self) -> Row | None:
        """The row that is pointed at."""
        option = self.highlighted_option
        return None if option is None or option.id is None else self._shown_rows.get(option.id)

    def page(self, step: int) -> None:
        """Go a page down, or up where ``step`` is negative."""
        (self.action_page_up if step < 0 else self.action_page_down)()  # type: ignore[no-untyped-call]  # Textual's

    def show(self, rows: Sequence[Row], stock: Stock, *, loaded: str, afresh: bool) -> None:
        """Show ``rows``, and point at what was pointed at before. afresh: at the model that is loaded, or else at the first."""
        before = None if afresh else self.pointed
        lines = dict(self._drawn(rows, stock, loaded))
        self._shown_rows = {row.id: row for row in rows}
        if list(lines) == list(self._shown_lines):
            for id_, line in lines.items():
                if not line.is_same(self._shown_lines[id_]):
                    self.replace_option_prompt(id_, line)
        else:
            self.clear_options()
            self.add_options(Option(line, id=id_, disabled=id_ not in self._shown_rows) for id_, line in lines.items())
        self._shown_lines = lines
        self._point(rows, before, loaded)

    def _point(self, rows: Sequence[Row], before: Row | None, loaded: str) -> None:
        wanted = [
            *(row for row in rows if before is not None and row.id == before.id),
            *(row for row in rows if before is not None and row.model == before.model),
            *(row for row in rows if row.model == loaded),
            *(row for row in rows if row.section != "downloads"),
            *rows,
        ]
        self.highlighted = self.get_option_index(wanted[0].id) if wanted else None

    def _drawn(self, rows: Sequence[Row], stock: Stock, loaded: str) -> Iterator[tuple[str, Content]]:
        section: Section | None = None
        for row in rows:
            if row.section != section:
                section = row.section
                yield section, section_line(_title(section, stock))
            yield row.id, row_line(row, self.cells, loaded=row.model == loaded and row.on_disk)


def _title(section: Section, stock: Stock) -> str:
    match section:
        case "typed":
            return "As typed"
        case "downloads":
            return "Downloads"
        case "embedded":
            return "Embedded"
        case "disk":
            return f"On disk · {units.size(stock.disk.free_bytes)} free"
        case "recommended":
            return _recommended(stock)


def _recommended(stock: Stock) -> str:
    estimates = stock.estimates
    done, total = estimates.weighed
    if estimates.best:
        return f"Recommended for {estimates.place}, best first"
    if estimates.problem:
        return f"To download · {estimates.problem}"
    return f"Recommended for this machine · weighing {done} of {total} …" if total else "Recommended for this machine"
