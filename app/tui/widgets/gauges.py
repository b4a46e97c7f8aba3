"""The side panel: what the reply costs, measured by the engine, beside what this machine allows."""

from textual.content import Content
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import measures, units
from tokamac.app.tui.session import Session
from tokamac.app.tui.widgets.charts import bar, sparkline
from tokamac.app.tui.widgets.painter import segments, select, selected_in
from tokamac.engine.limits import metrics as rates

WIDTH = 30
NONE_YET = "–"  # no reply, so nothing to measure; what a reply does not tell is "unknown"


class Gauges(Widget):
    """Figures of the running reply, or of the last one. What is not known says so. Only rows that changed are drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Content] = []

    def show(self, session: Session) -> None:
        """Show where ``session`` is."""
        groups = [_model(session), _first_token(session), _decode(session), _ceiling(session), _memory(session)]
        before, self._rows = self._rows, [row for group in groups for row in (*group, Content(""))]
        if len(before) != len(self._rows):
            self.refresh(layout=True)
            return
        changed = [y for y, (was, row) in enumerate(zip(before, self._rows, strict=True)) if not was.is_same(row)]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of rows; none is wider than ``WIDTH``."""
        del container, viewport, width  # Textual's signature
        return len(self._rows)

    def render_line(self, y: int) -> Strip:
        """Return row ``y``."""
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        selected = selected_in(self, y)
        return Strip(segments(select(self._rows[y], selected), self.visual_style)).apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text."""
        return selection.extract("\n".join(row.plain for row in self._rows)), "\n"


def _title(text: str) -> Content:
    return Content.styled(text, "bold $foreground 60%")


def _row(label: str, value: str) -> Content:
    style = "$foreground 45%" if value in (units.UNKNOWN, NONE_YET) else "$foreground"
    return (
        Content.styled(label, "$foreground 70%")
        + " " * max(1, WIDTH - len(label) - len(value))
        + Content.styled(value, style)
    )


def _of(part: int | None, whole: int | None) -> str:
    if part is None:
        return units.UNKNOWN
    return units.count(part) if whole is None else f"{units.count(part)} of {units.count(whole)}"


def _model(session: Session) -> list[Content]:
    info = session.info
    name = sanitise_line(session.load.model if info is None else info.name)
    lines = [Content.styled(name if len(name) <= WIDTH else f"…{name[-WIDTH + 1 :]}", "bold $primary")]
    if info is not None:
        bits = "" if info.bits_per_weight is None else f"{info.bits_per_weight:.2g} bpw"
        parts = [units.short(info.parameters), bits, units.size(info.weight_bytes)]
        lines.append(Content.styled(" · ".join(part for part in parts if part), "$foreground 70%"))
    else:
        lines.append(Content.styled("not loaded", "$foreground 45%"))
    return lines


def _first_token(session: Session) -> list[Content]:
    m, prefill = session.metrics, session.prefill
    cached = m.cached_tokens if m is not None else prefill.cached if prefill is not None else None
    total = m.prompt_tokens if m is not None else prefill.total if prefill is not None else None
    return [
        _title("FIRST TOKEN"),
        _row("TTFT", units.seconds(m.ttft_s) if m else NONE_YET),
        _row("prefill", units.rate(m.prefill_tps) if m else NONE_YET),
        _row("cached tokens", NONE_YET if cached is None else _of(cached, total)),
    ]


def _decode(session: Session) -> list[Content]:
    m, live = session.metrics, session.live
    gaps = m.itl_ms if m else None
    none = NONE_YET if m is None else units.UNKNOWN
    line = sparkline(live.gaps_ms, WIDTH) if live is not None else ""
    return [
        _title("DECODE"),
        _row("now", units.rate(measures.decode_now(session)) if session.replying else NONE_YET),
        _row("mean", units.rate(m.decode_tps) if m else NONE_YET),
        _row("ITL p50", units.milliseconds(gaps.p50) if gaps else none),
        _row("ITL p95", units.milliseconds(gaps.p95) if gaps else none),
        *_slowest_gap(session),
        Content.styled(line or "─" * WIDTH, "$secondary" if line else "$foreground 15%"),
    ]


def _slowest_gap(session: Session) -> list[Content]:
    """Say which gap of the reply stands out most, and why. Two lines in any case: another height would be another layout."""
    if not session.outliers:
        none = NONE_YET if session.metrics is None else "none stands out"
        return [_row("slowest gap", none), Content("")]
    outlier = session.outliers[0]
    why = f"token {units.count(outlier.token)}: {measures.causes(outlier)}"
    return [
        _row("slowest gap", units.milliseconds(outlier.gap_ms)),
        _row("", why if len(why) < WIDTH else f"{why[: WIDTH - 2]}…"),
    ]


def _ceiling(session: Session) -> list[Content]:
    m, achieved = session.metrics, measures.achieved_gbs(session)
    none = NONE_YET if m is None else units.UNKNOWN
    ceiling = m.ceiling_tps if m is not None else session.ceiling_tps
    reached = measures.share_of_ceiling(m) if m is not None else None
    expected = measures.share_of_expected(m) if m is not None else None
    return [
        _title("CEILING"),
        _row("memory allows", units.rate(ceiling)),
        _row("achieved", none if achieved is None else units.bandwidth(achieved)),
        _row("reached", none if reached is None else f"{reached:.0%}"),
        bar(reached, WIDTH, "$success"),
        _row("of the expected", none if expected is None else f"{expected:.0%}"),
    ]


def _memory(session: Session) -> list[Content]:
    held, memory = measures.context_held(session), session.memory
    peak = (session.metrics.peak_memory_bytes if session.metrics else None) or memory.peak_bytes or memory.active_bytes
    limit, gone = measures.capacity_of(session), measures.out_of_sight(session)
    return [
        _title("MEMORY"),
        _row("context", NONE_YET if held is None else _of(held, limit)),
        bar(rates.share(held, limit), WIDTH),
        *([_row("out of sight", f"{units.count(gone)} tokens")] if gone else []),
        _row("KV cache", units.size(session.metrics.kv_bytes) if session.metrics else NONE_YET),
        _row("peak memory", NONE_YET if peak is None else units.size(peak)),
        *([_row("expected peak", units.size(predicted))] if (predicted := memory.predicted_peak_bytes) else []),
        _row("budget", NONE_YET if session.info is None else units.size(memory.budget_bytes)),
        bar(rates.share(peak, memory.budget_bytes), WIDTH, "$secondary"),
    ]
