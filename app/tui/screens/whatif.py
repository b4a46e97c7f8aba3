"""F3: a model with other precisions, caches, contexts and machines, as tables and plots."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult, RenderResult
from textual.binding import Binding
from textual.color import Color
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.suggester import SuggestFromList
from textual.timer import Timer
from textual.widgets import DataTable, Input, Label, Select, Static, TabbedContent, TabPane
from textual_plotext import PlotextPlot

from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue
from tokamac.engine.perf.hardware import chip_label, known_chips, plain_name
from tokamac.engine.perf.memory import MemoryFit
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome
from tokamac.engine.speculation.gain import SpeculationGain

from ...backend.protocol import (
    Answer,
    CaseLine,
    Change,
    ChatCase,
    ChipLine,
    CurvePoint,
    Figures,
    ModelLine,
    Question,
    Roof,
    Spot,
    Wanted,
    WhatIf,
    Where,
)
from ...chat.settings_form import whole_number
from ...models.local import hub_cache, names_on_disk, short_name
from ...reports.verdict import BOUND
from ...reports.what_if import NAMES, capacity_sentence, gain_sentence, limit_text, times, worth_text
from ...text import units
from ...text.sanitise import sanitise_line
from ...text.units import lowest
from ..theme import FAINT
from ..widgets.prompt_input import TextInput
from .dialog import Dialog

# The engine process computes; an answer stays until the next one. Cells never interpret markup in foreign
# names.


# Tables -------------------------------------------------------------------------------------------------------------------

CASES = ("change", "weights", "KV", "context", "memory", "fits", "ceiling", "expected", "TTFT")
NARROW_CASES = ("weights", "KV", "context", "expected", "memory", "fits", "ceiling", "TTFT")
CHIPS = ("chip", "bandwidth", "fits", "ceiling", "expected", "TTFT")
WIDTHS = ("at once", "together", "each", "memory", "fits", "limit", "TTFT", "ceiling")
GUESSES = ("at once", "tokens a pass", "pass takes")
MODELS = ("model", "verdict", "expected", "TTFT", "memory", "download", "weights", "active")
# Verdicts that the other columns complete.
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}

# The head above bars, which is their legend; where there is no room for it there are none.
BARS = "━ expected ─ ceiling"
# Columns that are flush left; numbers are flush right.
TEXTS = frozenset({"change", "weights", "KV", "fits", "limit", "chip", "model", "verdict", BARS})
Row = tuple[Text, ...]


def case_columns(*, narrow: bool) -> tuple[str, ...]:
    return NARROW_CASES if narrow else CASES


def head(column: str) -> Text:
    return Text(column, justify="left" if column in TEXTS else "right")


def case_rows(lines: Iterable[CaseLine], *, narrow: bool = False) -> Iterator[Row]:
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
        if context == "empty":  # there is no prompt to wait for
            ttft = Text("")
        if narrow:
            yield (*cells, expected, *_memory(line.figures), ceiling, ttft)
        else:
            yield (_plain(change, "dim"), *cells, *_memory(line.figures), ceiling, expected, ttft)


def _weight(changed: Change, column: Change, *, narrow: bool) -> str:
    return "bold" if changed in ("as now", "as asked") or (narrow and changed == column) else ""


def chip_rows(lines: Iterable[ChipLine], *, narrow: bool = False) -> Iterator[Row]:
    for line in lines:
        yield (
            _plain(line.chip.removeprefix("Apple ") if narrow else line.chip),
            _number(units.bandwidth(line.bandwidth_gbs)),
            _fits(line.figures),
            *_speeds(line.figures),
        )


def width_rows(lines: Iterable[WidthOutcome]) -> Iterator[Row]:
    for each in lines:
        style = "dim" if each.memory.fits is False else ""
        yield (
            _number(units.count(each.replies), style),
            _number(units.rate(each.expected_tps), style),
            _number(units.rate(each.each_tps), style),
            _number(units.size(each.memory.total), style),
            _fits(each.memory),
            _plain("" if each.waits is None else limit_text(each), style),
            _number(units.seconds(each.newcomer_ttft_s), style),
            _number(units.rate(each.ceiling_tps), style),
        )


def width_bars(lines: Iterable[WidthOutcome], room: int) -> Iterator[Text]:
    speeds = [(each.expected_tps or 0.0, each.ceiling_tps or 0.0) for each in lines]
    most = max((ceiling for _, ceiling in speeds), default=0.0) or 1.0
    for pair in speeds:
        expected, ceiling = (round(room * tps / most) for tps in pair)
        yield Text("━" * expected) + Text("─" * (ceiling - expected), "dim")


def guess_columns(found: SpeculationGain) -> tuple[str, ...]:
    return (*GUESSES, *(NAMES[each.source] for each in found.guessers))


def guess_rows(found: SpeculationGain) -> Iterator[Row]:
    for number, free in enumerate(found.guessers[0].widths):
        gains = []
        for each in found.guessers:
            known = each.widths[number] if number < len(each.widths) else None
            pays = known is not None and (known.gain or 0.0) > 1
            style = "bold green" if known is not None and known.width == each.best else "" if pays else "dim"
            gains.append(_number("" if known is None else times(known.gain), style))
        steps = "" if free.steps is None else f"{free.steps:.2f}"
        yield (_number(units.count(free.width)), _number(f"{free.tokens:.2f}"), _number(steps), *gains)


def model_rows(lines: Iterable[ModelLine], *, narrow: bool = False) -> Iterator[Row]:
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
    return {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}[figures.fits]


def _speeds(figures: Figures) -> tuple[Text, Text, Text]:
    return (
        _number(units.rate(figures.ceiling_tps)),
        _number(units.rate(figures.expected_tps)),
        _number(units.seconds(figures.ttft_s)),
    )


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitise_line(text), style)


def _number(text: str, style: str = "") -> Text:
    return Text("" if text == units.UNKNOWN else text, style, justify="right")


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
        values = texts_of(self._start)
        with Vertical(classes="box") as box:
            box.border_title = "What if"
            with Container(id="form"):
                suggester = SuggestFromList(self._names, case_sensitive=False)
                yield _pair("model", TextInput(values["model"], id="model", compact=True, suggester=suggester), "wide")
                yield _pair("on", Select(CHIP_CHOICES, value=HERE, allow_blank=False, id="chip", compact=True))
                yield _pair("memory", TextInput("", "GB", id="memory", compact=True, type="number", valid_empty=True))
                yield _pair("weights", Select(WEIGHTS, value="", allow_blank=False, id="bits", compact=True))
                yield _pair("KV bits", Select(KV_BITS, value=values["kv"], allow_blank=False, id="kv", compact=True))
                yield _pair("context", TextInput(values["context"], id="context", compact=True, type="integer"))
                yield _pair("prompt", TextInput(values["prompt"], id="prompt", compact=True, type="integer"))
            with TabbedContent(id="tabs"):
                with TabPane("Cases", id="cases"):
                    yield _table("case-table", CASES)
                with TabPane("At once", id="widths"):
                    yield Static("", id="widths-text", markup=False)
                    yield _table("width-table", WIDTHS)
                with TabPane("Guesses", id="guesses"):
                    with Horizontal(id="guess-form"):
                        yield _pair("come true", TextInput(values["acceptance"], id="acceptance", compact=True))
                        draft = TextInput(values["draft"], KNOWN_DRAFT, id="draft", compact=True, suggester=suggester)
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
        self.say_keys("Tab moves", "Esc closes")
        self.query_one("#model", Input).focus()
        self.ask()

    def on_resize(self, event: Resize) -> None:
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
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, self.ask)

    @on(TabbedContent.TabActivated)
    def turned(self) -> None:
        self.ask()
        self._note()

    def ask(self, *, again: bool = False) -> None:
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

    def receive(self, event: WhatIf) -> None:
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
        self.query_one("#widths-text", Static).update(Content("" if found is None else capacity_sentence(found)))

    def _fill_guesses(self, found: SpeculationGain | None) -> None:
        columns, rows = (GUESSES, []) if found is None else (guess_columns(found), list(guess_rows(found)))
        _refill(self.query_one("#guess-table", DataTable), columns, rows)
        self.query_one("#guesses-text", Static).update(Content("" if found is None else gain_sentence(found)))

    @on(DataTable.RowHighlighted)
    def highlighted(self) -> None:
        self._note()

    @on(DataTable.RowSelected, "#model-table")
    def chosen(self, event: DataTable.RowSelected) -> None:
        self.query_one("#model", Input).value = self._answers["models"].models[event.cursor_row].model
        self.query_one("#tabs", TabbedContent).active = "cases"

    # The line below -------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
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
                self._say(" · ".join([capacity_sentence(answer.at_once), LAST, *answer.notes]))
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
        lines: Sequence[CaseLine | ChipLine] = answer.cases or answer.chips
        unknown = bool(lines) and all(each.figures.fits is None for each in lines)
        unknown = unknown or (answer.at_once is not None and answer.at_once.fitting is None)
        return unknown and not self.query_one("#memory", Input).value.strip()

    def _reason(self, tab: str, answer: Answer) -> str:
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
    # Widths are explicit: after a resize, Textual measures new columns by their heads alone.
    row, filled = table.cursor_row, [tuple(cells) for cells in rows]
    known = [at for at in range(len(columns)) if not filled or any(cells[at].plain for cells in filled)]
    columns, filled = [columns[at] for at in known], [tuple(cells[at] for at in known) for cells in filled]
    table.clear(columns=True)
    for column, width in zip(columns, _column_widths(columns, filled), strict=True):
        table.add_column(head(column), width=width)
    for cells in filled:
        table.add_row(*cells)
    table.move_cursor(row=min(row, table.row_count - 1))


def _column_widths(columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
    return [max((len(name), *(cells[number].cell_len for cells in rows))) for number, name in enumerate(columns)]


TICKS = 5
FRAME = 4  # rows around what is drawn: the frame, numbers and the axis' name
ROOMY = 14
MARKER = "braille"
# As plotext takes it: red, green and blue; one of the terminal's own by its number; or "default".
Colour = tuple[int, int, int] | int | str


class Plot(PlotextPlot):
    def render(self) -> RenderResult:
        self.plt.clear_figure()
        # Textual's plots know no colours of the terminal's own: they would draw black on black.
        self.set_reactive(PlotextPlot.theme, "clear" if self.app.native_ansi_color else "auto")
        return super().render() if self.draw(self.plt) else ""

    @abstractmethod
    def draw(self, plot: Any) -> bool:
        """Draw on plotext's empty ``plot``; return whether anything is known."""

    @property
    def roomy(self) -> bool:
        return self.size.height >= ROOMY

    def stretch(self, legend: int) -> float:
        rows = self.size.height - FRAME
        return rows / (rows - legend - 1) if self.roomy else 1.05

    def line(self, plot: Any, points: Sequence[tuple[float, float]], label: str, colour: Colour) -> None:
        if points:
            xs, ys = zip(*points, strict=True)
            plot.plot(list(xs), list(ys), marker=MARKER, label=label if self.roomy else None, color=colour)

    def colour(self, variable: str) -> Colour:
        variables = self.app.theme_variables
        # "ansi_default 50%": a share of the terminal's own colour is no colour by itself.
        named = Color.parse(variables.get(variable, variables["foreground"]).split()[0])
        if named.ansi is not None:
            return named.ansi if named.ansi >= 0 else "default"
        return Color.parse(variables["surface"]).blend(named, named.a).rgb


class CurvePlot(Plot):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._points: Sequence[CurvePoint] = ()

    def show(self, points: Sequence[CurvePoint]) -> None:
        self._points = points
        self.refresh()

    def draw(self, plot: Any) -> bool:
        ceiling = [(at.context, at.ceiling_tps) for at in self._points if at.ceiling_tps is not None]
        expected = [(at.context, at.expected_tps) for at in self._points if at.expected_tps is not None]
        if not ceiling:
            return False
        self.line(plot, ceiling, "ceiling, tok/s", self.colour("foreground-muted"))
        self.line(plot, expected, "expected, tok/s", self.colour("primary"))
        last = float(max(context for context, _ in ceiling))
        top = self.stretch(2) * max(tps for _, tps in ceiling)
        for set_ticks, set_limits, end in ((plot.xticks, plot.xlim, last), (plot.yticks, plot.ylim, top)):
            steps = list(even_steps(end))
            set_ticks(steps, [_tick(step) for step in steps])
            set_limits(0, end)
        plot.xlabel("context, tokens")
        return True


class RoofPlot(Plot):
    """10^12 operations/s over operations/byte; a phase is at its expected rate, else on the roof."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._roof: Roof | None = None

    def show(self, roof: Roof | None) -> None:
        self._roof = roof
        self.refresh()

    def draw(self, plot: Any) -> bool:
        roof = self._roof
        if roof is None:
            return False
        reach = [*(spot.intensity for spot in roof.spots), roof.ridge]
        left, right = min(reach) / 4, max(reach) * 4
        low = lowest(left * roof.bandwidth_gbs / 1e3, map(_reached, roof.spots))
        top = low * (roof.peak_tflops / low) ** self.stretch(1 + len(roof.spots))
        plot.xscale("log")
        plot.yscale("log")
        edge = [(left, left * roof.bandwidth_gbs / 1e3), (roof.ridge, roof.peak_tflops), (right, roof.peak_tflops)]
        label = (
            f"roof, TFLOP/s: {units.bandwidth(roof.bandwidth_gbs)}, peak {roof.peak_tflops:.1f}, ridge {roof.ridge:.0f}"
        )
        self.line(plot, edge, label, self.colour("foreground-muted"))
        for spot in roof.spots:
            reached = _reached(spot)
            colour = self.colour("primary" if spot.name == "decode" else "secondary")
            said = spot_text(spot) if self.roomy else None
            if reached is not None:
                plot.scatter([spot.intensity], [reached], marker=mark_of(spot), label=said, color=colour)
        for set_ticks, begin, end in ((plot.xticks, left, right), (plot.yticks, low, top)):
            powers = list(powers_of_ten(begin, end))
            set_ticks(powers, [f"{power:g}" for power in powers])
        plot.ylim(math.log10(low), math.log10(top))  # plotext takes limits as the axis has them
        plot.xlabel("operations a byte")
        return True


def curve_text(answer: Answer) -> str:
    known = [at for at in answer.curve if at.ceiling_tps is not None]
    if not known:
        return "unknown: the machine's bandwidth or the bytes a step are unknown"
    first, last = known[0], known[-1]
    ceiling = (
        f"ceiling {units.rate(first.ceiling_tps)}, {units.rate(last.ceiling_tps)} at {units.short(last.context)} tokens"
    )
    return f"{ceiling}; expected {units.rate(first.expected_tps)}, {units.rate(last.expected_tps)}"


def roof_text(answer: Answer) -> str:
    if answer.roof is None:
        return "the roofline is unknown: the machine's bandwidth or peak arithmetic is unknown"
    return "; ".join(f"{mark_of(spot)}: {spot_text(spot)}" for spot in answer.roof.spots)


def even_steps(end: float) -> Iterator[float]:
    size = 10.0 ** math.floor(math.log10(end / TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * (TICKS + 1) >= end)
    yield from (step * number for number in range(math.floor(end / step) + 1))


def powers_of_ten(low: float, high: float) -> Iterator[float]:
    for exponent in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        yield 10.0**exponent


def mark_of(spot: Spot) -> str:
    return spot.name[0].upper()


def spot_text(spot: Spot) -> str:
    return spot.name if spot.bound is None else f"{spot.name}, {BOUND[spot.bound]}"


def _reached(spot: Spot) -> float | None:
    return spot.ceiling_tflops if spot.expected_tflops is None else spot.expected_tflops


def _tick(value: float) -> str:
    return f"{value / 1e3:,.4g}k" if value >= 1e3 else f"{value:.4g}"


HERE = ""  # the chip that means this machine
WEIGHTS = [("as it is", ""), *((f"{bits} bits", str(bits)) for bits in (16, 8, 6, 5, 4, 3, 2))]
KV_BITS = [(name, name) for name in ("16", "8", "8,4", "6", "5", "4", "3", "2")]


def _chips() -> list[tuple[str, str]]:
    named = dict.fromkeys((plain_name(row["chip"]), row["gpu_cores"]) for row in known_chips())
    return [(chip_label(name, cores), f"{name}|{cores or ''}") for name, cores in named]


CHIP_CHOICES = [("here", HERE), *_chips()]


class FormError(ValueError):
    """Invalid form text; the message says why."""


def known_names(model: str) -> list[str]:
    """Return completions: the chat's model, those on disk, the catalogue."""
    catalogued = (repository.id for entry in catalogue() for repository in entry.repositories)
    return list(dict.fromkeys([model, *names_on_disk(hub_cache()), *catalogued]))


def texts_of(question: Question) -> dict[str, str]:
    bits = kv_bits(question.kv.key_bits, question.kv.value_bits)
    known = bits if bits in dict(KV_BITS) else "16"
    return {
        "model": question.model,
        "kv": known,
        "context": str(question.context),
        "prompt": str(question.prompt),
        "acceptance": f"{100 * question.acceptance:g} %",
        "draft": question.draft,
    }


def question_of(wanted: Wanted, texts: Mapping[str, str], kv: KVSpec, now: ChatCase | None = None) -> Question:
    """Parse the form; missing cache settings come from ``kv``. now: the chat's case. Raises FormError."""
    key_bits, _, value_bits = texts["kv"].partition(",")
    context = _tokens(texts["context"], "context")
    chip, _, cores = texts["chip"].partition("|")
    if not (model := texts["model"].strip()):
        raise FormError("Name a model: a folder, a Hugging Face ID, a name from the catalogue, or guide.")
    question = Question(
        now=now if now is not None and wanted == "table" and not chip and model == now.model else None,
        wanted=wanted,
        model=model,
        bits=int(texts["bits"]) if texts["bits"] else None,
        kv=replace(kv, key_bits=int(key_bits), value_bits=int(value_bits or key_bits)),
        context=context,
        prompt=min(_tokens(texts["prompt"], "prompt"), context),
        where=Where(
            chip, int(cores) if cores else None, _gigabytes(texts["memory"]) if chip or wanted == "chips" else None
        ),
    )
    if wanted != "guesses":
        return question
    return replace(question, acceptance=_share(texts["acceptance"]), draft=texts["draft"].strip())


def kv_bits(key_bits: int, value_bits: int) -> str:
    """Format as for ``--kv-bits``."""
    return str(key_bits) if key_bits == value_bits else f"{key_bits},{value_bits}"


def _tokens(text: str, name: str) -> int:
    number = whole_number(text.strip().replace(",", "").replace("_", ""))
    if not number:
        raise FormError(f"The {name} must be a number of tokens, 1 or more.")
    return number


def _share(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise FormError("The share of guesses that come true must be from 0 to 100 %.")
    return value / 100


def _gigabytes(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise FormError("The memory must be a size in GB, above 0.")
    return value
