"""The side panel: what the reply costs, measured by the engine, beside what this machine allows."""

from textual.content import Content
from textual.widgets import Static

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import measures, units
from tokamac.app.tui.session import Session
from tokamac.app.tui.verdict import share_of_ceiling
from tokamac.app.tui.widgets.charts import bar, sparkline

WIDTH = 30
NONE_YET = "–"  # no reply, so nothing to measure; what a reply does not tell is "unknown"


class Gauges(Static):
    """Figures of the running reply, or of the last one. What is not known says so."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: Content | None = None

    def show(self, session: Session) -> None:
        """Show where ``session`` is."""
        groups = [_model(session), _first_token(session), _decode(session), _ceiling(session), _memory(session)]
        content = Content("\n\n").join(Content("\n").join(lines) for lines in groups)
        shown, self._shown = self._shown, content
        if shown is None or not content.is_same(shown):
            # A layout of the whole screen, five times a second, would take the model's time.
            self.update(content, layout=shown is None or content.plain.count("\n") != shown.plain.count("\n"))


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
        Content.styled(line or "─" * WIDTH, "$secondary" if line else "$foreground 15%"),
    ]


def _ceiling(session: Session) -> list[Content]:
    m = session.metrics
    ceiling = m.ceiling_tps if m is not None else session.ceiling_tps
    reached = share_of_ceiling(m) if m is not None else None
    return [
        _title("CEILING"),
        _row("memory allows", units.rate(ceiling)),
        _row("reached", f"{reached:.0%}" if reached is not None else NONE_YET if m is None else units.UNKNOWN),
        bar(reached, WIDTH, "$success"),
    ]


def _memory(session: Session) -> list[Content]:
    held, memory = measures.context_held(session), session.memory
    peak = (session.metrics.peak_memory_bytes if session.metrics else None) or memory.peak_bytes or memory.active_bytes
    limit, gone = measures.capacity_of(session), measures.out_of_sight(session)
    return [
        _title("MEMORY"),
        _row("context", NONE_YET if held is None else _of(held, limit)),
        bar(measures.share(held, limit), WIDTH),
        *([_row("out of sight", f"{units.count(gone)} tokens")] if gone else []),
        _row("KV cache", units.size(session.metrics.kv_bytes) if session.metrics else NONE_YET),
        _row("peak memory", NONE_YET if peak is None else units.size(peak)),
        _row("budget", NONE_YET if session.info is None else units.size(memory.budget_bytes)),
        bar(measures.share(peak, memory.budget_bytes), WIDTH, "$secondary"),
    ]
