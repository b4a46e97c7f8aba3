"""F3: what a model would do in other precisions, with other caches and contexts, on this machine or another one.

The screen asks and shows; the engine's process computes. It is never waited for: what is shown stays until an answer replaces it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Horizontal, Vertical
from textual.content import Content
from textual.events import Resize
from textual.suggester import SuggestFromList
from textual.timer import Timer
from textual.widgets import DataTable, Input, Label, Select, Static, TabbedContent, TabPane, Tabs

from tokamac.app.backend.whatif import Answer, CaseLine, ChipLine, ModelLine, Question, Wanted
from tokamac.app.backend.wire import WhatIf
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import whatif_tables as tables
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.whatif_form import CHIPS, HERE, KV_BITS, WEIGHTS, FormError, read, written
from tokamac.app.tui.whatif_plots import CurvePlot, RoofPlot, curve_text, roof_text

REST_S = 0.4  # longer than the gaps of a typist within a number
NARROW = 90
WANTED: dict[str, Wanted] = {"cases": "table", "curve": "table", "roof": "table", "chips": "chips", "models": "models"}
Ask = Callable[[Question], int]


class WhatIfScreen(Dialog[None]):
    """Asks by ``ask``, which returns a number by which the answer is known, and is given answers by ``take``."""

    BINDINGS = [Binding("f3", "leave", "Close", id="what_if.leave", show=False)]  # noqa: RUF012 (Textual's way)

    def __init__(self, ask: Ask, start: Question, names: Sequence[str], *, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._ask = ask
        self._start = start
        self._names = names
        self._busy = busy
        self._waiting: dict[int, Question] = {}
        self._asked: dict[Wanted, Question] = {}
        self._answers: dict[Wanted, Answer] = {}
        self._rest: Timer | None = None

    def compose(self) -> ComposeResult:
        """Yield the form, the tabs, and a line about what is shown."""
        values = written(self._start)
        with Vertical(classes="box") as box:
            box.border_title = "What if"
            with Container(id="form"):
                suggester = SuggestFromList(self._names, case_sensitive=False)
                yield _pair("model", Input(values["model"], id="model", compact=True, suggester=suggester), "wide")
                yield _pair("on", Select(CHIPS, value=HERE, allow_blank=False, id="chip", compact=True))
                yield _pair("memory", Input("", "GB", id="memory", compact=True, type="number"))
                yield _pair("weights", Select(WEIGHTS, value="", allow_blank=False, id="bits", compact=True))
                yield _pair("KV bits", Select(KV_BITS, value=values["kv"], allow_blank=False, id="kv", compact=True))
                yield _pair("context", Input(values["context"], id="context", compact=True, type="integer"))
                yield _pair("prompt", Input(values["prompt"], id="prompt", compact=True, type="integer"))
            with TabbedContent(id="tabs"):
                with TabPane("Cases", id="cases"):
                    yield _table("case-table", tables.CASES)
                with TabPane("Context", id="curve"):
                    yield CurvePlot(id="curve-plot")
                with TabPane("Roofline", id="roof"):
                    yield RoofPlot(id="roof-plot")
                with TabPane("Chips", id="chips"):
                    yield _table("chip-table", tables.CHIPS)
                with TabPane("Models", id="models"):
                    yield _table("model-table", tables.MODELS)
            yield Static("", id="note", markup=False)

    def on_mount(self) -> None:
        """Ask at once for the case there is."""
        self.say_keys("Tab moves", "Esc closes")
        self.query_one(Tabs).focus()
        self.ask()

    def on_resize(self, event: Resize) -> None:
        """Give the form as many rows as it needs, and the tables the columns that they have room for."""
        narrow = event.size.width < NARROW
        if narrow != self._narrow:
            self.set_class(narrow, "-narrow")
            for wanted, answer in self._answers.items():
                self._fill(wanted, answer)

    @property
    def _narrow(self) -> bool:
        return self.has_class("-narrow")

    # Asking ---------------------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self) -> None:
        """Ask once the user rests."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, self.ask)

    @on(TabbedContent.TabActivated)
    def turned(self) -> None:
        """Ask for what the tab shows, unless that is known."""
        self.ask()
        self._note()

    def ask(self, *, again: bool = False) -> None:
        """Ask for what the open tab shows. again: even if it was asked before, since who was asked is no more."""
        if again:
            self._asked.clear()
            self._waiting.clear()
        wanted = WANTED[self.query_one("#tabs", TabbedContent).active or "cases"]
        try:
            question = read(wanted, self._texts(), self._start.kv)
        except FormError as error:
            self._say(str(error), "$text-error")
            return
        if self._asked.get(wanted) != question:
            self._asked[wanted] = question
            self._waiting[self._ask(question)] = question
            self._say("The engine is busy: this is computed after the reply." if self._busy() else "Computing …")

    def _texts(self) -> dict[str, str]:
        boxes = {box.id or "": box.value for box in self.query(Input)}
        return {
            **boxes,
            **{choice.id or "": str(choice.value) for choice in self.query("#form Select").results(Select)},
        }

    # Answers --------------------------------------------------------------------------------------------------------------

    def take(self, event: WhatIf) -> None:
        """Show an answer, how far it has come, or why there is none; unless something else was asked meanwhile."""
        question = self._waiting.get(event.id)
        if question is None or self._asked.get(question.wanted) != question:
            self._waiting.pop(event.id, None)
            return
        if event.answer is not None:
            del self._waiting[event.id]
            self._answers[question.wanted] = event.answer
            self._fill(question.wanted, event.answer)
            self._note()
        elif event.error:
            del self._waiting[event.id]
            self._say(event.error, "$text-error")
        else:
            self._say(f"Weighing the catalogue: {event.done} of {event.total} models …")

    def _fill(self, wanted: Wanted, answer: Answer) -> None:
        narrow = self._narrow
        match wanted:
            case "table":
                columns, rows = tables.case_columns(narrow=narrow), tables.case_rows(answer.cases, narrow=narrow)
                _refill(self.query_one("#case-table", DataTable), columns, rows)
                self.query_one(CurvePlot).show(answer.curve)
                self.query_one(RoofPlot).show(answer.roof)
            case "chips":
                _refill(self.query_one("#chip-table", DataTable), tables.CHIPS, tables.chip_rows(answer.chips))
            case "models":
                rows = tables.model_rows(answer.models, narrow=narrow)
                _refill(self.query_one("#model-table", DataTable), tables.MODELS, rows)

    @on(DataTable.RowHighlighted)
    def highlighted(self) -> None:
        """Say what there is to say of the row."""
        self._note()

    @on(DataTable.RowSelected, "#model-table")
    def chosen(self, event: DataTable.RowSelected) -> None:
        """Ask about the model of the row."""
        self.query_one("#model", Input).value = self._answers["models"].models[event.cursor_row].model
        self.query_one("#tabs", TabbedContent).active = "cases"

    # The line below -------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """Say where the numbers hold, and what is to be known of the row that is pointed at."""
        tab = self.query_one("#tabs", TabbedContent).active
        answer = self._answers.get(WANTED.get(tab, "table"))
        if answer is None or any(question.wanted == WANTED[tab] for question in self._waiting.values()):
            return
        match tab:
            case "curve":
                said = curve_text(answer)
            case "roof":
                said = roof_text(answer)
            case _:
                said = self._reason(tab, answer) or " · ".join(each for each in (*answer.notes, answer.rule) if each)
        closer = "Enter looks closer" if tab == "models" else ""
        self._say(" · ".join(part for part in (answer.model, answer.place, said, closer) if part))

    def _reason(self, tab: str, answer: Answer) -> str:
        """Return what is to be known of the row that is pointed at."""
        lines: Sequence[CaseLine | ChipLine | ModelLine] = answer.cases or answer.chips or answer.models
        row = self.query_one(f"#{tab} DataTable", DataTable).cursor_row
        return lines[min(row, len(lines) - 1)].figures.reason if lines else ""

    def _say(self, text: str, style: str = FAINT) -> None:
        self.query_one("#note", Static).update(Content.styled(sanitise_line(text), style))


def _pair(label: str, widget: Input | Select[str], classes: str = "") -> Horizontal:
    return Horizontal(Label(label), widget, classes=f"pair {classes}")


def _table(name: str, columns: Sequence[str]) -> DataTable[Any]:
    table: DataTable[Any] = DataTable(id=name, cursor_type="row", zebra_stripes=False)
    table.add_columns(*map(tables.head, columns))
    return table


def _refill(table: DataTable[Any], columns: Sequence[str], rows: Iterable[tables.Row]) -> None:
    """Replace all there is; the cursor stays where it was."""
    row = table.cursor_row
    table.clear(columns=True)
    table.add_columns(*map(tables.head, columns))
    for cells in rows:
        table.add_row(*cells)
    table.move_cursor(row=min(row, table.row_count - 1))
