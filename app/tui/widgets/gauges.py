"""The side panel: what the reply costs, beside what this machine allows. A verdict and three figures; all figures on a key.

It shows the running reply, or the last one, or an earlier one that is selected. The number of rows never changes while a reply is
written, so that none of them moves. Only rows that changed are drawn again, without a timer or a layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tokamac.engine import metrics as rates

from ... import units
from ...chat import figures
from ...chat.figures import Figure, Measured, explain
from ...sanitise import sanitise_line
from ..markdown.rows import wrapped
from ..screens.figure import shares
from ..theme import EMPTY, LABEL, bar, end_of, sparkline
from .page_view import segments, select, selected_in

WIDTH = 30
VERDICT_ROWS = 7
"""Rows for the verdict, at most: what does not fit is left out by whole sentences."""
NONE_YET = "–"  # there is no reply to measure; what a reply does not tell is "unknown"
CACHED, COMPUTED, WRITTEN = "$secondary", "$primary", "$success"


@dataclass(frozen=True, slots=True)
class GaugeRow:
    """A row, the figure that it shows, if any, and whether a click on it switches between few figures and all."""

    content: Content
    figure: Figure | None = None
    switches: bool = False


BLANK = GaugeRow(Content(""))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the panel is to be drawn. room: rows that are seen at once. verdict: rows for the verdict, at least."""

    room: int
    every: bool = False
    focused: bool = False
    verdict: int = 0


def rows(reply: Measured, layout: Layout) -> list[GaugeRow]:
    """Return all rows, none wider than ``WIDTH``; with blank ones between the groups where all fit into the room then."""
    first = [*_model(reply)], [*verdict_rows(reply, layout.verdict)]
    last = [*_hints(reply, layout)]
    if layout.every:
        parts = (_first_token, _decode, _limits, _context, _memory)
        groups = [*first, *([*part(reply)] for part in parts), last]
    else:
        groups = [*first, [*_few(reply)], last]
    tight = sum(map(len, groups))
    airy = tight + len(groups) - 1 <= layout.room or tight > layout.room  # what scrolls anyway may as well be readable
    found = [row for group in groups for row in ([BLANK, *group] if airy else group)]
    return found[1:] if airy else found


def _title(text: str) -> GaugeRow:
    return GaugeRow(Content.styled(text, "bold"))


def _row(figure: Figure, label: str, value: str, strong: str = "") -> GaugeRow:
    style, room = f"{strong} $foreground", WIDTH - len(label) - 1
    if value in (units.UNKNOWN, NONE_YET):
        style = LABEL
    value = value if len(value) <= room else f"{value[: room - 1]}…"
    gap = " " * (WIDTH - len(label) - len(value))
    return GaugeRow(Content.styled(label, LABEL) + gap + Content.styled(value, style.strip()), figure)


def _of(part: int | None, whole: int | None) -> str:
    if part is None:
        return units.UNKNOWN
    return units.count(part) if whole is None else f"{units.count(part)} of {units.count(whole)}"


def _model(reply: Measured) -> Iterator[GaugeRow]:
    info = reply.engine.info
    name = sanitise_line(reply.engine.load.model if info is None else info.name)
    name = end_of(name, WIDTH)
    yield GaugeRow(Content.styled(name, "bold $text-primary"), "model")
    if info is None:
        yield GaugeRow(Content.styled("not loaded", LABEL), "model")
    else:
        bits = "" if info.bits_per_weight is None else f"{info.bits_per_weight:.2g} bits"
        parts = [units.short(info.parameters), bits, units.size(info.weight_bytes)]
        yield GaugeRow(Content.styled(" · ".join(part for part in parts if part), LABEL), "model")


def verdict_rows(reply: Measured, least: int) -> Iterator[GaugeRow]:
    """Yield which reply it is, and its verdict, in whole sentences as far as they fit; ``least`` rows at least."""
    yield GaugeRow(Content.styled(reply.which.upper(), "bold"), "diagnosis")
    shown: list[Content] = []
    for sentence in figures.verdict(reply):
        lines = [row.content for row in wrapped(Content(f"{' '.join((*_plain_of(shown), sentence))}"), WIDTH)]
        if shown and len(lines) > VERDICT_ROWS:
            break
        shown = lines
    yield from (GaugeRow(line, "diagnosis") for line in shown)
    yield from (BLANK for _ in range(least - len(shown)))


def _plain_of(lines: Sequence[Content]) -> list[str]:
    return [line.plain for line in lines]


def _few(reply: Measured) -> Iterator[GaugeRow]:
    """Yield the figures that everybody wants to know."""
    m, context, limit = reply.metrics, figures.context_of(reply), figures.capacity_of(reply)
    yield _row("mean", "speed", units.rate(m.decode_tps) if m else NONE_YET, "bold")
    yield _row("ttft", "first token", units.wait(m.ttft_s) if m else NONE_YET, "bold")
    held = NONE_YET if context is None else units.count(context.held)
    value = held if limit is None else f"{held} of {units.count(limit)}"
    yield _row("context", "context", value, "bold")
    yield GaugeRow(_context_bar(context), "context")
    if reply.left_out or (reply.engine.info is not None and reply.engine.info.rolls):
        gone = 0 if context is None else context.out_of_sight
        yield _row("context", "forgotten", f"{units.count(gone)} tokens" if gone else "none")


def _hints(reply: Measured, layout: Layout) -> Iterator[GaugeRow]:
    """Yield how figures are explained, and how all of them are shown."""
    key = reply.keymap.key("all_figures")
    explains = "↑ ↓ · Enter explains" if layout.focused else "Tab or click · Enter explains"
    yield GaugeRow(Content.styled(explains, "$text-primary" if layout.focused else LABEL))
    switch = f"{key} {'fewer' if layout.every else 'all'} figures"
    yield GaugeRow(Content.styled(switch, LABEL), switches=True)


def _first_token(reply: Measured) -> Iterator[GaugeRow]:
    m, prefill = reply.metrics, reply.prefill
    cached = m.cached_tokens if m is not None else prefill.cached if prefill is not None else None
    total = m.prompt_tokens if m is not None else prefill.total if prefill is not None else None
    yield _title("FIRST TOKEN")
    yield _row("ttft", "TTFT", units.wait(m.ttft_s) if m else NONE_YET)
    yield _row("prefill", "prefill", units.rate(m.prefill_tps) if m else NONE_YET)
    yield _row("cached", "cached tokens", NONE_YET if cached is None else _of(cached, total))


def _decode(reply: Measured) -> Iterator[GaugeRow]:
    m, live = reply.metrics, reply.live
    gaps = m.itl_ms if m else None
    yield _title("DECODE")
    yield _row("now", "now", units.rate(figures.decode_now(reply)) if reply.replying else NONE_YET)
    yield _row("mean", "mean", units.rate(m.decode_tps) if m else NONE_YET)
    yield _row("guessed", "guessed right", figures.guessed_right(m) if m else NONE_YET)
    line = sparkline(live.gaps_ms, WIDTH) if live is not None else ""
    yield GaugeRow(Content.styled(line or "─" * WIDTH, "$secondary" if line else EMPTY), "gaps")
    if gaps is None:
        yield _row("gaps", "ITL 50·95·99", NONE_YET if m is None else units.UNKNOWN)
    else:
        shown = [units.milliseconds(each).removesuffix(" ms") for each in (gaps.p50, gaps.p95, gaps.p99)]
        yield _row("gaps", "ITL 50·95·99", " ".join([*shown, "ms"][: 3 if max(map(len, shown)) > 4 else 4]))
    yield from _slowest(reply)


def _slowest(reply: Measured) -> Iterator[GaugeRow]:
    """Yield the reply's worst outlier, and its cause."""
    if not reply.outliers:
        yield _row("slowest", "slowest gap", NONE_YET if reply.metrics is None else "no outliers")
        yield BLANK
        return
    outlier = reply.outliers[0]
    why = f"token {units.count(outlier.token)}: {figures.causes(outlier)}"
    yield _row("slowest", "slowest gap", units.milliseconds(outlier.gap_ms))
    yield _row("slowest", "", why if len(why) < WIDTH else f"{why[: WIDTH - 2]}…")


def _limits(reply: Measured) -> Iterator[GaugeRow]:
    m, achieved = reply.metrics, figures.achieved_gbs(reply)
    none = NONE_YET if m is None else units.UNKNOWN
    ceiling = m.ceiling_tps if m is not None else reply.engine.ceiling_tps
    expected = m.expected_tps if m is not None else None
    of_ceiling = figures.share_of_ceiling(m) if m is not None else None
    of_expected = figures.share_of_expected(m) if m is not None else None
    yield _title("CEILING")
    yield _row("ceiling", f"ceiling{_allowed(ceiling)}", none if of_ceiling is None else units.percent(of_ceiling))
    yield GaugeRow(bar(of_ceiling, WIDTH, "$success"), "ceiling")
    yield _row("expected", f"expected{_allowed(expected)}", none if of_expected is None else units.percent(of_expected))
    yield GaugeRow(bar(of_expected, WIDTH, "$secondary"), "expected")
    yield _row("achieved", "achieved", none if achieved is None else units.bandwidth(achieved))


def _allowed(tps: float | None) -> str:
    return "" if tps is None else f" {units.rate(tps)}"


def _context(reply: Measured) -> Iterator[GaugeRow]:
    context, limit = figures.context_of(reply), figures.capacity_of(reply)
    if context is None:
        yield _titled("context", "CONTEXT", NONE_YET if limit is None else f"{NONE_YET} of {units.count(limit)}")
    else:
        yield _titled("context", "CONTEXT", _of(context.held, limit))
    yield GaugeRow(_context_bar(context), "context")
    if context is None:
        yield BLANK
        yield BLANK
        yield _row("out of sight", "forgotten", NONE_YET)
        return
    yield from _legend(context)
    gone = context.out_of_sight
    yield _row("out of sight", "forgotten", f"{units.count(gone)} tokens" if gone else "none")


def _context_bar(context: figures.Context | None) -> Content:
    """Return what is in the context as a bar of its parts."""
    if context is None:
        return bar(None, WIDTH)
    cached, read = (
        (context.cached, context.computed) if not context.out_of_sight else (0, context.cached + context.computed)
    )
    parts = ((cached, CACHED), (read, COMPUTED), (context.written, WRITTEN), (context.free or 0, EMPTY))
    cells = shares([float(count) for count, _ in parts], WIDTH)
    drawn = (
        Content.styled(("─" if style == EMPTY else "━") * count, style)
        for count, (_, style) in zip(cells, parts, strict=True)
    )
    return Content("").join(drawn)


def _titled(figure: Figure, title: str, value: str) -> GaugeRow:
    gap = " " * max(1, WIDTH - len(title) - len(value))
    style = LABEL if value.startswith(NONE_YET) else "$foreground"
    return GaugeRow(Content.styled(title, "bold") + gap + Content.styled(value, style), figure)


def _legend(context: figures.Context) -> Iterator[GaugeRow]:
    """Yield the parts of the bar in two columns. Where tokens were dropped, who knows which part of the prompt they were of?"""
    cached, read = ("cached", units.short(context.cached), CACHED), ("read", units.short(context.computed), COMPUTED)
    written = ("written", units.short(context.written), WRITTEN)
    free = ("free", "any" if context.free is None else units.short(context.free), EMPTY)
    parts = [cached, read, written, free]
    if context.out_of_sight:
        parts = [("prompt", units.short(context.cached + context.computed), COMPUTED), written, free]
    shown = [
        Content.styled("─ " if style == EMPTY else "■ ", style) + Content.styled(f"{name} {count}", LABEL)
        for name, count, style in parts
    ]
    column = max(WIDTH // 2, *(each.cell_length + 1 for each in shown[::2]))
    for index in (0, 2):
        first, *second = shown[index : index + 2]
        gap = " " * (column - first.cell_length)
        yield GaugeRow(Content("").join([first, gap, *second]) if second else first, "context")


def _memory(reply: Measured) -> Iterator[GaugeRow]:
    m, memory, peak = reply.metrics, reply.engine.memory, figures.peak_bytes(reply)
    most = NONE_YET if peak is None else units.size(peak)
    budget = "" if memory.budget_bytes is None or peak is None else f" of {units.size(memory.budget_bytes)}"
    promised = memory.predicted_peak_bytes
    yield _title("MEMORY")
    yield _row("kv", "KV cache", units.size(m.kv_bytes) if m else NONE_YET)
    yield _row("peak", "peak", most + budget)
    yield GaugeRow(bar(rates.share(peak, memory.budget_bytes), WIDTH, "$secondary"), "peak")
    yield _row("predicted", "expected peak", NONE_YET if promised is None else units.size(promised))


POINTER = "◂"  # beside all rows of the selected figure


class Gauges(Widget, can_focus=True):
    """Figures of a reply. Up and Down select one, Enter explains it; Right shows all of them, Left the few."""

    class Switched(Message):
        """The user wants all figures, or the few."""

    FOCUS_ON_CLICK = False
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("up", "move(-1)", "Figure above", id="gauges.up", show=False),
        Binding("down", "move(1)", "Figure below", id="gauges.down", show=False),
        Binding("home", "move(-99)", "First figure", id="gauges.first", show=False),
        Binding("end", "move(99)", "Last figure", id="gauges.last", show=False),
        Binding("enter,space", "explain", "Explain", id="gauges.explain", show=False),
        Binding("right", "every(True)", "All figures", id="gauges.all", show=False),
        Binding("left", "every(False)", "Fewer figures", id="gauges.few", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._reply: Measured | None = None
        self._every = self._entered = False
        self._verdict = 0  # its rows, as they were when no reply was being made
        self._rows: list[GaugeRow] = []
        self._drawn: list[Content] = []
        self._selected: Figure | None = None

    def show(self, reply: Measured, *, every: bool) -> None:
        """Show the few figures of ``reply``, or every one."""
        self._reply, self._every = reply, every
        if not reply.replying:
            self._verdict = len([*verdict_rows(reply, 0)]) - 1
        room = (
            self.parent.size.height if isinstance(self.parent, Widget) else 0
        )  # its own container is as high as it is
        self._rows = rows(reply, Layout(room, every, self._entered, self._verdict))
        if self._selected is not None and self._selected not in self._figures:
            self._selected = "ttft"
        self._draw()

    @property
    def _figures(self) -> list[Figure]:
        """The figures that are shown, from the top."""
        return list(dict.fromkeys(row.figure for row in self._rows if row.figure is not None))

    @property
    def selected(self) -> Figure | None:
        """The selected figure."""
        return self._selected

    def _draw(self) -> None:
        first = next(
            (y for y, row in enumerate(self._rows) if row.figure is not None and row.figure == self._selected), -1
        )
        before, self._drawn = self._drawn, [self._marked(row, y == first) for y, row in enumerate(self._rows)]
        if len(before) != len(self._drawn):
            self.refresh(layout=True)
            return
        changed = [y for y, (was, row) in enumerate(zip(before, self._drawn, strict=True)) if not was.is_same(row)]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _marked(self, row: GaugeRow, first: bool) -> Content:
        """Return a row as it is drawn: the first one of the selected figure is reversed, which needs no colours."""
        if row.figure is None or row.figure != self._selected:
            return row.content
        pad = " " * (WIDTH - row.content.cell_length)
        whole = Content.styled(row.content.plain + pad, "reverse") if first else row.content + pad
        return whole + Content.styled(POINTER, "$primary")

    # Selecting ------------------------------------------------------------------------------------------------------------

    def on_focus(self) -> None:
        """Select the figure that was selected last, or the first that a reply has."""
        self._enter(entered=True)
        self._select(self._selected or "ttft")

    def on_blur(self) -> None:
        """Select none, but remember which it was while a dialog explains it."""
        if self.screen.is_current:
            self._enter(entered=False)
            self._select(None)

    def _enter(self, *, entered: bool) -> None:
        """Say what the keys do once they are for the panel."""
        self._entered = entered
        if self._reply is not None:
            self.show(self._reply, every=self._every)

    def action_move(self, by: int) -> None:
        """Select another figure."""
        shown = self._figures
        index = shown.index(self._selected or "ttft") + by
        self._select(shown[max(0, min(len(shown) - 1, index))])

    def action_every(self, every: bool) -> None:
        """Show every figure, or the few."""
        if every is not self._every:
            self.post_message(self.Switched())

    def action_explain(self) -> None:
        """Explain the selected figure."""
        if self._selected is not None:
            self._open(self._selected)

    def on_click(self, event: events.Click) -> None:
        """Explain the figure that was clicked, or switch between few and all."""
        if self.text_selection is not None or not 0 <= event.y < len(self._rows):
            return
        row = self._rows[event.y]
        if row.switches:
            self.post_message(self.Switched())
        elif row.figure is not None:
            self._open(row.figure)

    def _select(self, figure: Figure | None) -> None:
        self._selected = figure
        self._draw()
        if figure is not None:
            self.call_after_refresh(self._bring_into_view, figure)  # the panel may be about to be shown

    def _bring_into_view(self, figure: Figure) -> None:
        """Scroll the panel to a figure, with the row above it, which may be its title."""
        shown = [y for y, row in enumerate(self._rows) if row.figure == figure]
        if shown and isinstance(self.parent, Widget):
            top = max(0, shown[0] - 1)
            self.parent.scroll_to_region(Region(0, top, 1, shown[-1] + 1 - top), animate=False)

    def _open(self, figure: Figure) -> None:
        from ..screens.figure import FigureScreen

        if (reply := self._reply) is not None:
            shown = self._figures
            explained = [explain(each, reply) for each in shown]
            self.app.push_screen(FigureScreen(explained, shown.index(figure)), self._explained)

    def _explained(self, index: int | None) -> None:
        """Select the figure that was explained last."""
        if self.has_focus and index is not None:
            self._select(self._figures[index])

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


NARROW = 90  # below this many columns, the gauges would leave too little for the text
