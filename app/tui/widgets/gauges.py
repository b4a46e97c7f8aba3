"""The side panel: what the reply costs, beside what this machine allows.

The number of rows never changes while a reply is written, so that none of them moves. Only rows that changed are drawn again,
without a timer or a layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tokamac.engine import metrics as rates

from ... import units
from ...chat import figures
from ...chat.figures import FIGURES, Figure, explain
from ...chat.session import Session
from ...sanitise import sanitise_line
from ...verdict import sentence
from ..markdown.rows import wrapped
from ..screens.figure import shares
from ..theme import EMPTY, FAINT, bar, end_of, sparkline
from .page_view import segments, select, selected_in

WIDTH = 30
SENTENCE_ROWS = 6
NONE_YET = "–"  # there is no reply to measure; what a reply does not tell is "unknown"
CACHED, COMPUTED, WRITTEN = "$secondary", "$primary", "$success"


@dataclass(frozen=True, slots=True)
class GaugeRow:
    """A row, and the figure that it shows, if any."""

    content: Content
    figure: Figure | None = None


def rows(session: Session, room: int) -> list[GaugeRow]:
    """Return all rows, none wider than ``WIDTH``; with blank ones between the groups, if all fit into ``room`` rows then."""
    parts = (_model, _first_token, _decode, _limits, _context, _memory, _diagnosis)
    groups = [list(part(session)) for part in parts]
    airy = sum(map(len, groups)) + len(groups) - 1 <= room
    found = [row for group in groups for row in ([GaugeRow(Content("")), *group] if airy else group)]
    return found[1:] if airy else found


def _title(text: str) -> GaugeRow:
    return GaugeRow(Content.styled(text, f"bold {FAINT}"))


def _row(figure: Figure, label: str, value: str) -> GaugeRow:
    style, room = FAINT if value in (units.UNKNOWN, NONE_YET) else "$foreground", WIDTH - len(label) - 1
    value = value if len(value) <= room else f"{value[: room - 1]}…"
    gap = " " * (WIDTH - len(label) - len(value))
    return GaugeRow(Content.styled(label, FAINT) + gap + Content.styled(value, style), figure)


def _of(part: int | None, whole: int | None) -> str:
    if part is None:
        return units.UNKNOWN
    return units.count(part) if whole is None else f"{units.count(part)} of {units.count(whole)}"


def _model(session: Session) -> Iterator[GaugeRow]:
    info = session.engine.info
    name = sanitise_line(session.engine.load.model if info is None else info.name)
    name = end_of(name, WIDTH)
    yield GaugeRow(Content.styled(name, "bold $text-primary"), "model")
    if info is None:
        yield GaugeRow(Content.styled("not loaded", FAINT), "model")
    else:
        bits = "" if info.bits_per_weight is None else f"{info.bits_per_weight:.2g} bpw"
        parts = [units.short(info.parameters), bits, units.size(info.weight_bytes)]
        yield GaugeRow(Content.styled(" · ".join(part for part in parts if part), FAINT), "model")


def _first_token(session: Session) -> Iterator[GaugeRow]:
    m, prefill = session.metrics, session.prefill
    cached = m.cached_tokens if m is not None else prefill.cached if prefill is not None else None
    total = m.prompt_tokens if m is not None else prefill.total if prefill is not None else None
    yield _title("FIRST TOKEN")
    yield _row("ttft", "TTFT", units.seconds(m.ttft_s) if m else NONE_YET)
    yield _row("prefill", "prefill", units.rate(m.prefill_tps) if m else NONE_YET)
    yield _row("cached", "cached tokens", NONE_YET if cached is None else _of(cached, total))


def _decode(session: Session) -> Iterator[GaugeRow]:
    m, live = session.metrics, session.live
    gaps = m.itl_ms if m else None
    yield _title("DECODE")
    yield _row("now", "now", units.rate(figures.decode_now(session)) if session.replying else NONE_YET)
    yield _row("mean", "mean", units.rate(m.decode_tps) if m else NONE_YET)
    line = sparkline(live.gaps_ms, WIDTH) if live is not None else ""
    yield GaugeRow(Content.styled(line or "─" * WIDTH, "$secondary" if line else EMPTY), "gaps")
    if gaps is None:
        yield _row("gaps", "ITL 50·95·99", NONE_YET if m is None else units.UNKNOWN)
    else:
        shown = [units.milliseconds(each).removesuffix(" ms") for each in (gaps.p50, gaps.p95, gaps.p99)]
        yield _row("gaps", "ITL 50·95·99", " ".join([*shown, "ms"][: 3 if max(map(len, shown)) > 4 else 4]))
    yield from _slowest(session)


def _slowest(session: Session) -> Iterator[GaugeRow]:
    """Yield the reply's worst outlier, and its cause."""
    if not session.outliers:
        yield _row("slowest", "slowest gap", NONE_YET if session.metrics is None else "no outliers")
        yield GaugeRow(Content(""))
        return
    outlier = session.outliers[0]
    why = f"token {units.count(outlier.token)}: {figures.causes(outlier)}"
    yield _row("slowest", "slowest gap", units.milliseconds(outlier.gap_ms))
    yield _row("slowest", "", why if len(why) < WIDTH else f"{why[: WIDTH - 2]}…")


def _limits(session: Session) -> Iterator[GaugeRow]:
    m, achieved = session.metrics, figures.achieved_gbs(session)
    none = NONE_YET if m is None else units.UNKNOWN
    ceiling = m.ceiling_tps if m is not None else session.engine.ceiling_tps
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


def _context(session: Session) -> Iterator[GaugeRow]:
    context, limit = figures.context_of(session), figures.capacity_of(session)
    if context is None:
        yield _titled("context", "CONTEXT", NONE_YET if limit is None else f"{NONE_YET} of {units.count(limit)}")
        yield GaugeRow(bar(None, WIDTH), "context")
        yield GaugeRow(Content(""))
        yield GaugeRow(Content(""))
        yield _row("out of sight", "out of sight", NONE_YET)
        return
    yield _titled("context", "CONTEXT", _of(context.held, limit))
    parts = (
        (context.cached, CACHED),
        (context.computed, COMPUTED),
        (context.written, WRITTEN),
        (context.free or 0, EMPTY),
    )
    cells = shares([float(count) for count, _ in parts], WIDTH)
    drawn = (
        Content.styled(("─" if style == EMPTY else "━") * count, style)
        for count, (_, style) in zip(cells, parts, strict=True)
    )
    yield GaugeRow(Content("").join(drawn), "context")
    free = "any" if context.free is None else units.short(context.free)
    yield _legend(
        ("cached", units.short(context.cached), CACHED), ("computed", units.short(context.computed), COMPUTED)
    )
    yield _legend(("written", units.short(context.written), WRITTEN), ("free", free, EMPTY))
    gone = context.out_of_sight
    yield _row("out of sight", "out of sight", f"{units.count(gone)} tokens" if gone else "none")


def _titled(figure: Figure, title: str, value: str) -> GaugeRow:
    gap = " " * max(1, WIDTH - len(title) - len(value))
    style = FAINT if value.startswith(NONE_YET) else "$foreground"
    return GaugeRow(Content.styled(title, f"bold {FAINT}") + gap + Content.styled(value, style), figure)


def _legend(*parts: tuple[str, str, str]) -> GaugeRow:
    half = WIDTH // 2 - 1
    shown = []
    for name, count, style in parts:
        mark, text = "─ " if style == EMPTY else "■ ", f"{name} {count}"
        shown.append(Content.styled(mark, style) + Content.styled(text.ljust(half - 2), FAINT))
    return GaugeRow(Content("  ").join(shown), "context")


def _memory(session: Session) -> Iterator[GaugeRow]:
    m, memory, peak = session.metrics, session.engine.memory, figures.peak_bytes(session)
    most = NONE_YET if peak is None else units.size(peak)
    budget = "" if memory.budget_bytes is None or peak is None else f" of {units.size(memory.budget_bytes)}"
    promised = memory.predicted_peak_bytes
    yield _title("MEMORY")
    yield _row("kv", "KV cache", units.size(m.kv_bytes) if m else NONE_YET)
    yield _row("peak", "peak", most + budget)
    yield GaugeRow(bar(rates.share(peak, memory.budget_bytes), WIDTH, "$secondary"), "peak")
    yield _row("predicted", "expected peak", NONE_YET if promised is None else units.size(promised))


def _diagnosis(session: Session) -> Iterator[GaugeRow]:
    m = session.metrics
    told = sentence(m, session.diagnosis) if m is not None and not session.replying else ""
    lines = [row.content for row in wrapped(Content(told), WIDTH)] if told else [Content.styled(NONE_YET, FAINT)]
    if len(lines) > SENTENCE_ROWS:
        last = lines[SENTENCE_ROWS - 1].plain
        lines = [*lines[: SENTENCE_ROWS - 1], Content(f"{last[: WIDTH - 2].rstrip()} …")]
    yield _title("DIAGNOSIS")
    yield from (GaugeRow(line, "diagnosis") for line in lines)
    yield from (GaugeRow(Content("")) for _ in range(SENTENCE_ROWS - len(lines)))


POINTER = "◂"  # beside all rows of the selected figure


class Gauges(Widget, can_focus=True):
    """Figures of the running reply, or of the last one. Up and Down select one, Enter explains it."""

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
        self._selected: Figure | None = None

    def show(self, session: Session) -> None:
        """Show the figures of ``session``."""
        self._session = session
        self._rows = rows(session, self.container_size.height)
        self._draw()

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
        """Select the figure that was selected last, or the first."""
        self._select(self._selected or "ttft")

    def on_blur(self) -> None:
        """Select none, but remember which it was while a dialog explains it."""
        if self.screen.is_current:
            self._select(None)

    def action_move(self, by: int) -> None:
        """Select another figure."""
        index = FIGURES.index(self._selected or "ttft") + by
        self._select(FIGURES[max(0, min(len(FIGURES) - 1, index))])

    def action_explain(self) -> None:
        """Explain the selected figure."""
        if self._selected is not None:
            self._open(self._selected)

    def on_click(self, event: events.Click) -> None:
        """Explain the figure that was clicked."""
        if self.text_selection is None and 0 <= event.y < len(self._rows) and (figure := self._rows[event.y].figure):
            self._open(figure)

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

        if (session := self._session) is not None:
            explained = [explain(each, session) for each in FIGURES]
            self.app.push_screen(FigureScreen(explained, FIGURES.index(figure)), self._explained)

    def _explained(self, index: int | None) -> None:
        """Select the figure that was explained last."""
        if self.has_focus and index is not None:
            self._select(FIGURES[index])

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
