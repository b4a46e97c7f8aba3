"""The side panel as rows of text: what the reply costs, beside what this machine allows. Pure: a session in, rows out.

There are as many rows whatever is known, so that none of them moves while a reply is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from textual.content import Content

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import measures, units
from tokamac.app.tui.cells import end_of
from tokamac.app.tui.explanation import shares
from tokamac.app.tui.figures import Figure
from tokamac.app.tui.prose.rows import wrapped
from tokamac.app.tui.session import Session
from tokamac.app.tui.theme import FAINT
from tokamac.app.tui.widgets.charts import EMPTY, bar, sparkline
from tokamac.app.verdict import sentence
from tokamac.engine.limits import metrics as rates

WIDTH = 30
SENTENCE_ROWS = 6
NONE_YET = "–"  # no reply, so nothing to measure; what a reply does not tell is "unknown"
CACHED, COMPUTED, WRITTEN = "$secondary", "$primary", "$success"


@dataclass(frozen=True, slots=True)
class GaugeRow:
    """One row, and the figure that it shows; None where it shows none."""

    content: Content
    figure: Figure | None = None


def rows(session: Session, room: int) -> list[GaugeRow]:
    """Return all rows, none wider than ``WIDTH``; with blank ones between the groups, if then all fit ``room`` rows."""
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
    info = session.info
    name = sanitise_line(session.load.model if info is None else info.name)
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
    yield _row("now", "now", units.rate(measures.decode_now(session)) if session.replying else NONE_YET)
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
    """Yield which gap of the reply stands out most, and why."""
    if not session.outliers:
        yield _row("slowest", "slowest gap", NONE_YET if session.metrics is None else "none stands out")
        yield GaugeRow(Content(""))
        return
    outlier = session.outliers[0]
    why = f"token {units.count(outlier.token)}: {measures.causes(outlier)}"
    yield _row("slowest", "slowest gap", units.milliseconds(outlier.gap_ms))
    yield _row("slowest", "", why if len(why) < WIDTH else f"{why[: WIDTH - 2]}…")


def _limits(session: Session) -> Iterator[GaugeRow]:
    m, achieved = session.metrics, measures.achieved_gbs(session)
    none = NONE_YET if m is None else units.UNKNOWN
    ceiling = m.ceiling_tps if m is not None else session.ceiling_tps
    expected = m.expected_tps if m is not None else None
    of_ceiling = measures.share_of_ceiling(m) if m is not None else None
    of_expected = measures.share_of_expected(m) if m is not None else None
    yield _title("CEILING")
    yield _row("ceiling", f"ceiling{_allowed(ceiling)}", none if of_ceiling is None else units.percent(of_ceiling))
    yield GaugeRow(bar(of_ceiling, WIDTH, "$success"), "ceiling")
    yield _row("expected", f"expected{_allowed(expected)}", none if of_expected is None else units.percent(of_expected))
    yield GaugeRow(bar(of_expected, WIDTH, "$secondary"), "expected")
    yield _row("achieved", "achieved", none if achieved is None else units.bandwidth(achieved))


def _allowed(tps: float | None) -> str:
    return "" if tps is None else f" {units.rate(tps)}"


def _context(session: Session) -> Iterator[GaugeRow]:
    context, limit = measures.context_of(session), measures.capacity_of(session)
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
    m, memory, peak = session.metrics, session.memory, measures.peak_bytes(session)
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
