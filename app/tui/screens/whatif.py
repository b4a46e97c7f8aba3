"""F3: a model in other precisions, with other caches and contexts, on this machine or another one, as tables and plots.

The screen asks and shows; the engine's process computes. The screen never waits for it: an answer stays until the next replaces it.
Cells are plain text with a style: names come from outside, and markup in them is not interpreted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.suggester import SuggestFromList
from textual.timer import Timer
from textual.widgets import DataTable, Input, Label, Select, Static, TabbedContent, TabPane

from tokamac.engine.perf.memory import MemoryFit
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome
from tokamac.engine.speculation.gain import SpeculationGain

from ... import units
from ...at_once import limit_text, sentence
from ...backend.protocol import (
    Answer,
    CaseLine,
    Change,
    ChipLine,
    Figures,
    ModelLine,
    Question,
    Wanted,
    WhatIf,
)
from ...chat.what_if_form import (
    CHIP_CHOICES,
    HERE,
    KV_BITS,
    WEIGHTS,
    FormError,
    kv_bits,
    question_of,
    texts_of,
)
from ...models.names import short_name
from ...sanitise import sanitise_line
from ...speculation_gain import NAMES, times
from ...speculation_gain import sentence as gain_sentence
from ...without_cache import worth_text
from ..theme import FAINT
from ..widgets.plots import CurvePlot, RoofPlot, curve_text, roof_text
from . import Dialog

# Tables -------------------------------------------------------------------------------------------------------------------

CASES = ("change", "weights", "KV", "context", "memory", "fits", "ceiling", "expected", "TTFT")
NARROW_CASES = ("weights", "KV", "context", "expected", "memory", "fits", "ceiling", "TTFT")
CHIPS = ("chip", "bandwidth", "fits", "ceiling", "expected", "TTFT")
WIDTHS = ("at once", "together", "each", "memory", "fits", "limit", "TTFT", "ceiling")
GUESSES = ("at once", "tokens a pass", "pass takes")
MODELS = ("model", "verdict", "expected", "TTFT", "memory", "download", "weights", "active")
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
"""Verdicts that the other columns complete."""

BARS = "━ expected ─ ceiling"
"""The head above bars, which is their legend; where there is no room for it there are none."""
TEXTS = frozenset({"change", "weights", "KV", "fits", "limit", "chip", "model", "verdict", BARS})
"""Columns that are flush left; numbers are flush right."""
Row = tuple[Text, ...]


def case_columns(*, narrow: bool) -> tuple[str, ...]:
    """Return the columns of the cases. narrow: without the name of the change, whose own column is bold then; speed comes first."""
    return NARROW_CASES if narrow else CASES


def head(column: str) -> Text:
    """Return a column's head, flush right above numbers."""
    return Text(column, justify="left" if column in TEXTS else "right")


def case_rows(lines: Iterable[CaseLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each case; a change is named once for the rows that follow each other."""
    before = ""
    for line in lines:
        change = "" if line.change == before else line.change
        before = line.change
        weights = "as it is" if line.bits is None else f"{line.bits} bits"
        context = "empty" if line.change == "as now" and line.context == 1 else f"{line.context:,}"
        cells = [
            _plain(weights, _weight(line.change, "weights", narrow=narrow)),
            _plain(kv_bits(line.key_bits, line.value_bits), _weight(line.change, "keys and values", narrow=narrow)),
            _number(context, _weight(line.change, "context", narrow=narrow)),
        ]
        ceiling, expected, ttft = _speeds(line.figures)
        if narrow:
            yield (*cells, expected, *_memory(line.figures), ceiling, ttft)
        else:
            yield (_plain(change, "dim"), *cells, *_memory(line.figures), ceiling, expected, ttft)


def _weight(changed: Change, column: Change, *, narrow: bool) -> str:
    """Return the style of a cell: bold for the cases as now and as asked, and for the change where no column names it."""
    return "bold" if changed in ("as now", "as asked") or (narrow and changed == column) else ""


def chip_rows(lines: Iterable[ChipLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each chip. narrow: without its maker's name."""
    for line in lines:
        yield (
            _plain(line.chip.removeprefix("Apple ") if narrow else line.chip),
            _number(units.bandwidth(line.bandwidth_gbs)),
            _fits(line.figures),
            *_speeds(line.figures),
        )


def width_rows(lines: Iterable[WidthOutcome]) -> Iterator[Row]:
    """Yield a row for each number of replies at once; faint where they do not fit."""
    for each in lines:
        style = "dim" if each.memory.fits is False else ""
        yield (
            _number(units.count(each.replies), style),
            _number(units.rate(each.expected_tps), style),
            _number(units.rate(each.each_tps), style),
            _number(units.size(each.memory.total), style),
            _fits(each.memory),
            _plain(limit_text(each), "dim" if each.waits is None else style),
            _number(units.seconds(each.newcomer_ttft_s), style),
            _number(units.rate(each.ceiling_tps), style),
        )


def width_bars(lines: Iterable[WidthOutcome], room: int) -> Iterator[Text]:
    """Yield a bar for each number of replies, of ``room`` columns for the fastest: thick as expected, thin to the ceiling."""
    speeds = [(each.expected_tps or 0.0, each.ceiling_tps or 0.0) for each in lines]
    most = max((ceiling for _, ceiling in speeds), default=0.0) or 1.0
    for pair in speeds:
        expected, ceiling = (round(room * tps / most) for tps in pair)
        yield Text("━" * expected) + Text("─" * (ceiling - expected), "dim")


def guess_columns(found: SpeculationGain) -> tuple[str, ...]:
    """Return the columns of guesses: one for each kind of them, after what they have in common."""
    return (*GUESSES, *(NAMES[each.source] for each in found.guessers))


def guess_rows(found: SpeculationGain) -> Iterator[Row]:
    """Yield a row for each number of tokens guessed at once: the gain with each kind of guesses, the best of it bold."""
    for number, free in enumerate(found.guessers[0].widths):
        gains = []
        for each in found.guessers:
            known = each.widths[number] if number < len(each.widths) else None
            pays = known is not None and (known.gain or 0.0) > 1
            style = "bold green" if known is not None and known.width == each.best else "" if pays else "dim"
            gains.append(_number("" if known is None else times(known.gain), style))
        steps = units.UNKNOWN if free.steps is None else f"{free.steps:.2f}"
        yield (_number(units.count(free.width)), _number(f"{free.tokens:.2f}"), _number(steps), *gains)


def model_rows(lines: Iterable[ModelLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each model. narrow: with the last part of its ID."""
    styles = {"runs well": "green", "tight": "yellow", "slow": "yellow", "does not fit": "red"}
    for line in lines:
        yield (
            _plain(short_name(line.model) if narrow else line.model),
            _plain(SHORTER.get(line.verdict, line.verdict), styles.get(line.verdict, "dim")),
            _number(units.rate(line.figures.expected_tps)),
            _number(units.seconds(line.figures.ttft_s)),
            _number(units.size(line.figures.memory_bytes)),
            _number(units.size(line.download_bytes)),
            _number(units.short(line.parameters)),
            _number(units.short(line.active_parameters)),
        )


def _memory(figures: Figures) -> tuple[Text, Text]:
    return _number(units.size(figures.memory_bytes)), _fits(figures)


def _fits(figures: Figures | MemoryFit) -> Text:
    if figures.fits and figures.from_others:
        return Text("tight", "yellow")
    return {True: Text("yes", "green"), False: Text("no", "red"), None: Text(units.UNKNOWN, "dim")}[figures.fits]


def _speeds(figures: Figures) -> tuple[Text, Text, Text]:
    return (
        _number(units.rate(figures.ceiling_tps)),
        _number(units.rate(figures.expected_tps)),
        _number(units.seconds(figures.ttft_s)),
    )


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitise_line(text), style)


def _number(text: str, style: str = "") -> Text:
    return Text(text, "dim" if text == units.UNKNOWN else style, justify="right")


# The screen ---------------------------------------------------------------------------------------------------------------

REST_S = 0.4  # longer than the gaps of a typist within a number
NARROW = 90
LAST = "TTFT is that of the last to come, while the others are written"
GAIN = "gain: tokens a pass (1 + a + … + aᵏ) / its steps, guessing included"
CLOSERS = {"models": "Enter shows its cases", "widths": LAST, "guesses": GAIN}
KNOWN_DRAFT = "a draft model, or the one that is known"
FILL_IN_MEMORY = "to see whether it fits, fill in the machine's memory above"
WANTED: dict[str, Wanted] = {
    "cases": "table",
    "widths": "at once",
    "guesses": "guesses",
    "curve": "table",
    "roof": "table",
    "cache": "cache",
    "chips": "chips",
    "models": "models",
}
Ask = Callable[[Question], int]


class WhatIfScreen(Dialog[None]):
    """Asks by ``ask``, which returns the number of the question, and is given answers by ``take``."""

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
        values = texts_of(self._start)
        with Vertical(classes="box") as box:
            box.border_title = "What if"
            with Container(id="form"):
                suggester = SuggestFromList(self._names, case_sensitive=False)
                yield _pair("model", Input(values["model"], id="model", compact=True, suggester=suggester), "wide")
                yield _pair("on", Select(CHIP_CHOICES, value=HERE, allow_blank=False, id="chip", compact=True))
                yield _pair("memory", Input("", "GB", id="memory", compact=True, type="number", valid_empty=True))
                yield _pair("weights", Select(WEIGHTS, value="", allow_blank=False, id="bits", compact=True))
                yield _pair("KV bits", Select(KV_BITS, value=values["kv"], allow_blank=False, id="kv", compact=True))
                yield _pair("context", Input(values["context"], id="context", compact=True, type="integer"))
                yield _pair("prompt", Input(values["prompt"], id="prompt", compact=True, type="integer"))
            with TabbedContent(id="tabs"):
                with TabPane("Cases", id="cases"):
                    yield _table("case-table", CASES)
                with TabPane("At once", id="widths"):
                    yield Static("", id="widths-text", markup=False)
                    yield _table("width-table", WIDTHS)
                with TabPane("Guesses", id="guesses"):
                    with Horizontal(id="guess-form"):
                        yield _pair("come true", Input(values["acceptance"], id="acceptance", compact=True))
                        draft = Input(values["draft"], KNOWN_DRAFT, id="draft", compact=True, suggester=suggester)
                        yield _pair("draft", draft, "draft")
                    yield Static("", id="guesses-text", markup=False)
                    yield _table("guess-table", GUESSES)
                with TabPane("Context", id="curve"):
                    yield CurvePlot(id="curve-plot")
                with TabPane("Roofline", id="roof"):
                    yield RoofPlot(id="roof-plot")
                with TabPane("No cache", id="cache"), VerticalScroll(id="worth"):
                    yield Static("", id="worth-text", markup=False)
                with TabPane("Chips", id="chips"):
                    yield _table("chip-table", CHIPS)
                with TabPane("Models", id="models"):
                    yield _table("model-table", MODELS)
            yield Static("", id="note", markup=False)

    def on_mount(self) -> None:
        """Ask for the first case at once."""
        self.say_keys("Tab moves", "Esc closes")
        self.query_one("#model", Input).focus()
        self.ask()

    def on_resize(self, event: Resize) -> None:
        """Fit the form's rows and the tables' columns to the window."""
        narrow = event.size.width < NARROW
        changed = narrow != self._narrow
        self.set_class(narrow, "-narrow")
        for wanted, answer in self._answers.items():
            if changed or wanted == "at once":  # whose bars take the room there is
                self._fill(wanted, answer)
        if changed:
            self._note()

    @property
    def _narrow(self) -> bool:
        return self.has_class("-narrow")

    # Asking ---------------------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self) -> None:
        """Ask once the user pauses."""
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, self.ask)

    @on(TabbedContent.TabActivated)
    def turned(self) -> None:
        """Ask for the tab's content, unless it is known."""
        self.ask()
        self._note()

    def ask(self, *, again: bool = False) -> None:
        """Ask for the open tab's content. again: even if it was asked before, since the process is another."""
        if again:
            self._asked.clear()
            self._waiting.clear()
        wanted = WANTED[self.query_one("#tabs", TabbedContent).active or "cases"]
        try:
            question = question_of(wanted, self._texts(), self._start.kv, self._start.now)
        except FormError as error:
            self._say(str(error), "$text-error")
            return
        if self._asked.get(wanted) != question:
            self._asked[wanted] = question
            self._waiting[self._ask(question)] = question
            self._say("The engine is busy. This is computed after the reply." if self._busy() else "Computing …")

    def _texts(self) -> dict[str, str]:
        boxes = {box.id or "": box.value for box in self.query(Input)}
        return {
            **boxes,
            **{choice.id or "": str(choice.value) for choice in self.query("#form Select").results(Select)},
        }

    # Answers --------------------------------------------------------------------------------------------------------------

    def take(self, event: WhatIf) -> None:
        """Show an answer, its progress, or why there is none; unless something else was asked meanwhile."""
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
            self._clear(question.wanted)
            self._say(event.error, "$text-error")
        else:
            self._say(f"Estimating the catalogue: {event.done} of {event.total} models …")

    def _clear(self, wanted: Wanted) -> None:
        """Show nothing of what was asked before: it is not the answer to this question."""
        if (answer := self._answers.pop(wanted, None)) is not None:
            self._fill(wanted, Answer(answer.model, answer.place))

    def _fill(self, wanted: Wanted, answer: Answer) -> None:
        narrow = self._narrow
        match wanted:
            case "table":
                columns, rows = case_columns(narrow=narrow), case_rows(answer.cases, narrow=narrow)
                _refill(self.query_one("#case-table", DataTable), columns, rows)
                self.query_one(CurvePlot).show(answer.curve)
                self.query_one(RoofPlot).show(answer.roof)
            case "at once":
                self._fill_widths(answer.at_once)
            case "guesses":
                self._fill_guesses(answer.guesses)
            case "cache" if answer.cache is not None:
                width = max(self.query_one("#tabs").size.width - 2, 20)  # beside the scroll bar
                self.query_one("#worth-text", Static).update(Content(worth_text(answer.cache, width)))
            case "chips":
                _refill(self.query_one("#chip-table", DataTable), CHIPS, chip_rows(answer.chips, narrow=narrow))
            case "models":
                rows = model_rows(answer.models, narrow=narrow)
                _refill(self.query_one("#model-table", DataTable), MODELS, rows)

    def _fill_widths(self, found: Capacity | None) -> None:
        lines = () if found is None else found.widths
        columns: tuple[str, ...] = WIDTHS
        rows: list[Row] = list(width_rows(lines))
        room = self.query_one("#tabs").size.width - sum(width + 2 for width in _column_widths(columns, rows)) - 2
        if room >= len(BARS):
            columns = (*columns, BARS)
            rows = [(*cells, bar) for cells, bar in zip(rows, width_bars(lines, room), strict=True)]
        _refill(self.query_one("#width-table", DataTable), columns, rows)
        self.query_one("#widths-text", Static).update(Content("" if found is None else sentence(found)))

    def _fill_guesses(self, found: SpeculationGain | None) -> None:
        columns, rows = (GUESSES, []) if found is None else (guess_columns(found), list(guess_rows(found)))
        _refill(self.query_one("#guess-table", DataTable), columns, rows)
        self.query_one("#guesses-text", Static).update(Content("" if found is None else gain_sentence(found)))

    @on(DataTable.RowHighlighted)
    def highlighted(self) -> None:
        """Show the note of the row."""
        self._note()

    @on(DataTable.RowSelected, "#model-table")
    def chosen(self, event: DataTable.RowSelected) -> None:
        """Ask about the row's model."""
        self.query_one("#model", Input).value = self._answers["models"].models[event.cursor_row].model
        self.query_one("#tabs", TabbedContent).active = "cases"

    # The line below -------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """Show which model and machine the numbers are for, and the note of the selected row."""
        tab = self.query_one("#tabs", TabbedContent).active
        answer = self._answers.get(WANTED.get(tab, "table"))
        if answer is None or any(question.wanted == WANTED[tab] for question in self._waiting.values()):
            return
        match tab:
            case "curve":
                said = curve_text(answer)
            case "roof":
                said = roof_text(answer)
            case "cache":
                said = "scroll with ↑ ↓"
            case "guesses" if answer.guesses is not None:
                notes = (f"passes as timed on {answer.guesses.timed_on}", *answer.notes)
                said = " · ".join(notes)
                if self._narrow:  # as below
                    self._say(" · ".join([gain_sentence(answer.guesses), GAIN, *notes]))
                    return
            case "widths" if self._narrow and answer.at_once is not None:  # where there is no room above the table
                self._say(" · ".join([sentence(answer.at_once), LAST, *answer.notes]))
                return
            case _:
                notes, reason = answer.notes, self._reason(tab, answer) or answer.rule
                told = any(reason in each for each in notes)  # of the case as asked, a note may say it too
                said = " · ".join(dict.fromkeys(each for each in (*notes, "" if told else reason) if each))
                if self._lacks_memory(answer):
                    said = " · ".join(each for each in (said, FILL_IN_MEMORY) if each)
        closer = CLOSERS.get(tab, "")
        self._say(" · ".join(part for part in (answer.model, answer.place, said, closer) if part))

    def _lacks_memory(self, answer: Answer) -> bool:
        """Whether nobody knows what fits, because the form does not say how much memory the machine has."""
        lines: Sequence[CaseLine | ChipLine] = answer.cases or answer.chips
        unknown = bool(lines) and all(each.figures.fits is None for each in lines)
        unknown = unknown or (answer.at_once is not None and answer.at_once.fitting is None)
        return unknown and not self.query_one("#memory", Input).value.strip()

    def _reason(self, tab: str, answer: Answer) -> str:
        """Return the note of the selected row."""
        lines: Sequence[CaseLine | ChipLine | ModelLine] = answer.cases or answer.chips or answer.models
        row = self.query_one(f"#{tab} DataTable", DataTable).cursor_row
        return lines[min(row, len(lines) - 1)].figures.reason if lines else ""

    def _say(self, text: str, style: str = FAINT) -> None:
        self.query_one("#note", Static).update(Content.styled(sanitise_line(text), style))


def _pair(label: str, widget: Input | Select[str], classes: str = "") -> Horizontal:
    return Horizontal(Label(label), widget, classes=f"pair {classes}")


def _table(name: str, columns: Sequence[str]) -> DataTable[Any]:
    table: DataTable[Any] = DataTable(id=name, cursor_type="row", zebra_stripes=False)
    table.add_columns(*map(head, columns))
    return table


def _refill(table: DataTable[Any], columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Replace the table's content; the cursor stays where it was.

    Widths are given: after a resize, Textual measures new columns by their heads alone.
    """
    row, filled = table.cursor_row, [tuple(cells) for cells in rows]
    table.clear(columns=True)
    for column, width in zip(columns, _column_widths(columns, filled), strict=True):
        table.add_column(head(column), width=width)
    for cells in filled:
        table.add_row(*cells)
    table.move_cursor(row=min(row, table.row_count - 1))


def _column_widths(columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
    return [max((len(name), *(cells[number].cell_len for cells in rows))) for number, name in enumerate(columns)]
