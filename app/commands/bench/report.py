"""Report of ``tokamac bench``: tables, JSON, SVG plot."""

# Runs become medians and spreads per field. ``--plot`` draws decode rate over context with the ceiling and the expected
# rate: a self-contained SVG that follows light or dark mode; series differ by shape and dash as well as by colour.

import math
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.files import expanded, is_dir, to_disk
from tokamac.engine.metrics import share

from ...text.sanitise import sanitise_line
from ...text.terminal import picked, table
from ...text.units import UNKNOWN, count, milliseconds, rate, seconds, size
from . import peer
from .runs import MeasuredPoint

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.events import ModelSpec


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of all runs; no outliers removed."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high}


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def pair_ratios(above: Sequence[float | None], below: Sequence[float | None]) -> Spread | None:
    """Return the spread of pairwise ratios: a slow period of the machine affects both sides of a pair.

    Skips pairs with an unknown side. Raises ValueError for different lengths.
    """
    pairs = zip(above, below, strict=True)
    return spread(a / b if a is not None and b else None for a, b in pairs)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians per field; None where no run has a value."""
    middle: dict[str, Any] = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        if known and isinstance(known[0], dict):
            middle[name] = medians(known)
        elif known and all(isinstance(value, int) for value in known):
            middle[name] = statistics.median_low(known)  # a count stays whole
        else:
            middle[name] = statistics.median(known) if known else None
    return middle


Shown = Mapping[str, Callable[[float | None], str]]  # names of fields of runs, and how each is written

# What is compared with a peer, by the names of both sides' fields.
SHOWN: Shown = {"ttft_s": seconds, "prefill_tps": rate, "decode_tps": rate}


def to_json(measured: Sequence[MeasuredPoint], peer_version: str | None) -> dict[str, Any]:
    """Return the first point's JSON object; ``sweep`` has one per point if several."""
    first = _point_json(measured[0], peer_version)
    found = {name: first[name] for name in ("runs", "median", "ceiling_tps", "expected_tps", "peer")}
    if len(measured) > 1:
        found["sweep"] = [_point_json(each, peer_version) for each in measured]
    return found


def of_model(spec: "ModelSpec") -> dict[str, Any]:
    """Return a loaded model's adapter (hash of all bytes), draft model and doubts."""
    found: dict[str, Any] = {}
    if spec.adapter is not None:
        found["adapter"] = {"name": spec.adapter, "digest": spec.adapter_digest}
    if spec.draft is not None:
        found["draft"] = {"name": spec.draft, "weight_bytes": spec.draft_bytes}
    if spec.doubts:
        found["doubts"] = list(spec.doubts)
    return found


def text(model: str, measured: Sequence[MeasuredPoint], peer_version: str | None) -> str:
    one = len(measured) == 1
    parts = [_alone(model, measured[0]) if one else _sweep(model, measured)]
    if peer_version is not None:
        parts.append(_beside(measured, f"{peer.NAME} {peer_version}"))
    return "\n\n".join([*parts, *warnings(measured)])


def warnings(measured: Sequence[MeasuredPoint]) -> list[str]:
    """Return a sentence per point with an impossible run above its ceiling."""
    return [
        f"{each.point.label}: decode was measured above the ceiling: the bandwidth figure must be wrong "
        f"({rate(fastest)} measured, {rate(ceiling)} the ceiling)"
        for each in measured
        if (found := spreads(each.runs)["decode_tps"]) is not None
        and (ceiling := each.limits.ceiling_tps) is not None
        and (fastest := found.high) > ceiling
    ]


def spreads(runs: Sequence[object], shown: Shown = SHOWN) -> dict[str, Spread | None]:
    return {name: spread(getattr(run, name) for run in runs) for name in shown}


def ratios(ours: Sequence[object], theirs: Sequence[object], shown: Shown = SHOWN) -> dict[str, Spread | None]:
    """Return ours ÷ peer's per round, for each ``shown`` field."""
    return {name: pair_ratios(*([getattr(run, name) for run in runs] for runs in (ours, theirs))) for name in shown}


def spreads_json(found: Mapping[str, Spread | None]) -> dict[str, Any]:
    return {name: None if each is None else each.to_json() for name, each in found.items()}


def peer_json(version: str, ours: Sequence[object], theirs: Sequence[Any], shown: Shown = SHOWN) -> dict[str, Any]:
    runs = [asdict(run) for run in theirs]
    ratio = spreads_json(ratios(ours, theirs, shown))
    return {"name": peer.NAME, "version": version, "median": medians(runs), "ratio": ratio, "runs": runs}


def _point_json(each: MeasuredPoint, peer_version: str | None) -> dict[str, Any]:
    runs = [asdict(run) for run in each.runs]
    middle = medians(runs)
    return {
        "prompt": each.point.tokens if each.point.as_prompt else None,
        "depth": each.point.tokens if each.point.as_depth else None,
        "runs": runs,
        "median": middle,
        "spread": spreads_json(spreads(each.runs)),
        **picked(each.limits, "ceiling_tps", "expected_tps"),
        "share_of_ceiling": share(middle["decode_tps"], each.limits.ceiling_tps),
        "share_of_expected": share(middle["decode_tps"], each.limits.expected_tps),
        "peer": None if peer_version is None else _peer_json(each, peer_version),
    }


def _peer_json(each: MeasuredPoint, version: str) -> dict[str, Any]:
    found = peer_json(version, each.runs, each.peer_runs)
    return {**found, "median": {name: found["median"][name] for name in SHOWN}}


def _alone(model: str, each: MeasuredPoint) -> str:
    middle = medians([asdict(run) for run in each.runs])
    decode, gaps = middle["decode_tps"], middle["itl_ms"] or {}
    shown = [f"{name} {milliseconds(gaps.get(name))}" for name in ("p50", "p95", "p99")]
    ranges = [with_range(SHOWN[name], found) for name, found in spreads(each.runs).items()]
    rows = [
        *map(list, zip(("TTFT", "prefill", "decode"), ranges, strict=True)),
        ["ceiling", _reached(decode, each.limits.ceiling_tps)],
        ["expected", _reached(decode, each.limits.expected_tps)],
        ["gaps", ", ".join(shown)],
        ["memory", f"KV {size(middle['kv_bytes'])}, peak {size(middle['peak_memory_bytes'])}"],
    ]
    prompt, new = count(middle["prompt_tokens"]), count(middle["generated_tokens"])
    return f"{sanitise_line(model)}: {prompt} prompt tokens, {new} new; {runs_text(len(each.runs))}\n{table(rows)}"


def _reached(decode: float | None, limit: float | None) -> str:
    return UNKNOWN if limit is None else f"{rate(limit)}; decode reached {_percent(share(decode, limit))} of it"


def _sweep(model: str, measured: Sequence[MeasuredPoint]) -> str:
    head = ["", "TTFT", "prefill", "decode", "min–max", "ceiling", "expected", "of ceiling"]
    new = count(measured[0].runs[0].generated_tokens)
    rows = []
    for each in measured:
        decode, limits = spreads(each.runs)["decode_tps"], each.limits
        reached = share(None if decode is None else decode.median, limits.ceiling_tps)
        apart = UNKNOWN if decode is None else span(rate, decode.low, decode.high)
        allowed = [rate(limits.ceiling_tps), rate(limits.expected_tps), _percent(reached)]
        rows.append([each.point.label, *medians_text(each.runs), apart, *allowed])
    title = f"{sanitise_line(model)}: {new} new tokens each; {runs_text(len(measured[0].runs))}"
    return f"{title}\n\n{table([head, *rows], right=range(1, len(head)))}"


def _beside(measured: Sequence[MeasuredPoint], title: str) -> str:
    head = [title, "TTFT", "prefill", "decode", "TTFT ratio", "prefill ratio", "decode ratio"]
    rows = []
    for each in measured:
        found = ratios(each.runs, each.peer_runs).values()
        rows.append(
            [each.point.label, *medians_text(each.peer_runs), *(with_range(ratio_text, ratio) for ratio in found)]
        )
    told = "ratios are ours ÷ its, of pairs of runs taken in turn on the same prompt"
    return f"{table([head, *rows], right=range(1, len(head)))}\n{told}"


def runs_text(count: int) -> str:
    return "one run, so no spread is known" if count == 1 else f"medians of {count} runs (smallest–largest)"


def with_range(shown: Callable[[float | None], str], found: Spread | None) -> str:
    if found is None:
        return UNKNOWN
    middle = shown(found.median)
    return middle if found.low == found.high else f"{middle} ({span(shown, found.low, found.high)})"


def medians_text(runs: Sequence[object], shown: Shown = SHOWN) -> list[str]:
    return [shown[name](None if found is None else found.median) for name, found in spreads(runs, shown).items()]


def span(shown: Callable[[float | None], str], low: float, high: float) -> str:
    """Format a range with a shared unit once: ``0.2–0.4 s``."""
    first, last = shown(low).split(" "), shown(high).split(" ")
    if len(first) == len(last) == 2 and first[1:] == last[1:]:
        first = first[:1]
    return f"{' '.join(first)}–{' '.join(last)}"


def ratio_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


SAMPLES = 64
BEYOND = 1.1  # how far the limits' curves reach, in times of the deepest point; one point alone is drawn in the middle

Curve = Sequence[tuple[float, float]]  # (context in tokens, tokens a second)


@dataclass(frozen=True, slots=True)
class Dot:
    """Decode rates (tokens/s) around a context length."""

    context: int
    tps: Spread


@dataclass(frozen=True, slots=True)
class Chart:
    """Plot data; an empty curve is unknown. peer: name and version, or None."""

    title: str
    subtitle: str
    measured: Sequence[Dot]
    ceiling: Curve
    expected: Curve
    peer: str | None = None
    peer_measured: Sequence[Dot] = ()


WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 96, 24, 96, 60  # margins around the field, in pixels
DOT, CAP = 4.5, 6.0
LETTER, LEGEND_GAP = 7.2, 56.0
LONGEST_TEXT = 110
# Rates that lie this far apart are drawn over a logarithm: a linear axis would press the lower ones onto its line.
LOG_FROM = 10.0

STYLE = """
.page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif } .title { font-size: 16px; font-weight: 600 }
.faint { fill: #59636e } .grid { stroke: #d9dee3; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1 }
.line { fill: none; stroke-width: 2 } .ceiling { stroke: #b3261e } .expected { stroke: #8250df; stroke-dasharray: 7 5 }
.measured { stroke: #0550ae; fill: #0550ae; stroke-width: 1.5 } .peer { stroke: #8a5300; fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #2b323b } .axis { stroke: #9198a1 }
.ceiling { stroke: #ff8b80 } .expected { stroke: #c4a1ff } .measured { stroke: #79b8ff; fill: #79b8ff }
.peer { stroke: #f0b04f } }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """Values ``low`` to ``high`` over pixels ``begin`` to ``end``. log: logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def scale(self, value: float) -> float:
        """Return a value's pixel; logarithmic axes need values above 0."""
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * part


def linear_axis(highest: float, begin: float, end: float, most_ticks: int) -> Axis:
    """Return an axis from 0 past ``highest``, ticks in steps of 1, 2 or 5 × 10^n."""
    high = 1.06 * highest
    power = 10.0 ** math.floor(math.log10(high / most_ticks))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * most_ticks >= high * (1 - 1e-9))
    return Axis(0.0, high, begin, end, tuple(i * step for i in range(int(high / step) + 1)))


def log_axis(lowest: float, highest: float, begin: float, end: float) -> Axis:
    """Return a logarithmic axis, ticks at powers of ten; over few of them also at 2 and 5 times."""
    low, high = lowest / 1.5, 1.3 * highest
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
    return Axis(low, high, begin, end, tuple(tick for tick in ticks if low <= tick <= high), log=True)


def render(chart: Chart) -> bytes:
    drawing = _Drawing(chart)
    drawing.draw()
    ElementTree.indent(drawing.root)
    written: bytes = ElementTree.tostring(drawing.root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


class _Drawing:
    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        curves, dots = (*chart.ceiling, *chart.expected), (*chart.measured, *chart.peer_measured)
        contexts = [x for x, _ in curves] + [dot.context for dot in dots]
        rates = [y for _, y in curves] + [rate for dot in dots for rate in (dot.tps.low, dot.tps.high)]
        self._x = linear_axis(max(contexts, default=1.0), LEFT, WIDTH - RIGHT, 8)
        self._y = _rate_axis(rates)
        view = f"0 0 {WIDTH} {HEIGHT}"
        self.root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=view, role="img")

    def draw(self) -> None:
        chart = self._chart
        ElementTree.SubElement(self.root, "title").text = _safe(chart.title)
        ElementTree.SubElement(self.root, "desc").text = _safe(chart.subtitle)
        ElementTree.SubElement(self.root, "style").text = STYLE
        self._add("rect", "page", width=WIDTH, height=HEIGHT)
        self._write(LEFT, 28, chart.title, "title")
        self._write(LEFT, 48, chart.subtitle, "faint")
        self._legend()
        self._axes()
        self._curve(chart.ceiling, "ceiling")
        self._curve(chart.expected, "expected")
        for kind, dots in (("measured", chart.measured), ("peer", chart.peer_measured)):
            for dot in dots:
                self._whisker(dot, kind)
                self._mark(self._x.scale(dot.context), self._y.scale(dot.tps.median), kind)

    def _axes(self) -> None:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for tick in self._y.ticks:
            y = self._y.scale(tick)
            self._line(LEFT, y, right, y, "grid")
            self._write(LEFT - 8, y + 4, f"{tick:,.10g}", "faint", anchor="end")
        for tick in self._x.ticks:
            x = self._x.scale(tick)
            self._line(x, bottom, x, bottom + 5, "axis")
            self._write(x, bottom + 20, f"{tick:,.10g}", "faint", anchor="middle")
        self._line(LEFT, bottom, right, bottom, "axis")
        self._line(LEFT, TOP, LEFT, bottom, "axis")
        self._write((LEFT + right) / 2, HEIGHT - 14, "context (tokens)", anchor="middle")
        middle, scale = (TOP + bottom) / 2, ", logarithmic" if self._y.log else ""
        turned = f"rotate(-90 20 {middle:g})"
        self._write(20, middle, f"decode (tokens per second{scale})", anchor="middle", transform=turned)

    def _legend(self) -> None:
        chart, x, y = self._chart, float(LEFT), TOP - 24
        labels = {"measured": "measured"}
        for kind, curve in (("ceiling", chart.ceiling), ("expected", chart.expected)):
            labels[kind] = kind if curve else f"{kind}: {UNKNOWN}"
        if chart.peer is not None:
            labels["peer"] = _safe(chart.peer)
        for kind, label in labels.items():
            if kind in ("measured", "peer"):
                self._mark(x + 12, y - 4, kind)
            else:
                self._line(x, y - 4, x + 24, y - 4, f"line {kind}")
            self._write(x + 32, y, label)
            x += LEGEND_GAP + LETTER * len(label)

    def _curve(self, curve: Curve, kind: str) -> None:
        if curve:
            path = "L".join(f"{self._x.scale(x):.1f} {self._y.scale(y):.1f}" for x, y in curve)
            self._add("path", f"line {kind}", d=f"M{path}")

    def _whisker(self, dot: Dot, kind: str) -> None:
        x, low, high = self._x.scale(dot.context), self._y.scale(dot.tps.low), self._y.scale(dot.tps.high)
        self._line(x, low, x, high, kind)
        for y in (low, high):
            self._line(x - CAP, y, x + CAP, y, kind)

    def _mark(self, x: float, y: float, kind: str) -> None:
        if kind == "measured":
            self._add("circle", kind, cx=x, cy=y, r=DOT)
        else:
            self._add("rect", kind, x=x - DOT, y=y - DOT, width=2 * DOT, height=2 * DOT)

    def _line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def _write(self, x: float, y: float, text: str, kind: str = "", **attributes: str) -> None:
        attributes = {"text-anchor" if name == "anchor" else name: value for name, value in attributes.items()}
        self._add("text", kind, x=x, y=y, **attributes).text = _safe(text)

    def _add(self, name: str, kind: str, **attributes: float | str) -> ElementTree.Element:
        written = {key: value if isinstance(value, str) else f"{value:.6g}" for key, value in attributes.items()}
        return ElementTree.SubElement(self.root, name, {"class": kind, **written} if kind else written)


def _rate_axis(rates: Sequence[float]) -> Axis:
    lowest, highest = min(rates, default=1.0), max(rates, default=1.0)
    if highest > LOG_FROM * lowest:
        return log_axis(lowest, highest, HEIGHT - BOTTOM, TOP)
    return linear_axis(highest, HEIGHT - BOTTOM, TOP, 6)


def _safe(text: str) -> str:
    safe = sanitise_line(text).encode("utf-8", "replace").decode()
    safe = "".join(char for char in safe if char not in "\ufffe\uffff")
    return safe if len(safe) <= LONGEST_TEXT else f"{safe[: LONGEST_TEXT - 1]}…"


def check_writable(path: Path) -> None:
    """Raise TokamacError if ``path`` isn't writable; leaves nothing behind."""
    try:
        if path.is_dir():
            raise TokamacError(f"--plot: {path} is a folder", "Name a file in it.")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write(path: Path, chart: Chart) -> None:
    """Write the plot atomically. Raises TokamacError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(render(chart))
                file.flush()
                to_disk(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def chart(engine: "Engine", measured: Sequence[MeasuredPoint], peer_version: str | None) -> Chart:
    dots = [_dot(each, [run.decode_tps for run in each.runs]) for each in measured]
    peers = [_dot(each, [run.decode_tps for run in each.peer_runs]) for each in measured]
    limits = [engine.limits(context) for context in _contexts(engine, measured)]
    first = measured[0].runs
    told = f"{first[0].generated_tokens} new tokens, {len(first)} runs: the median, and a bar from the smallest to the largest"
    return Chart(
        title=f"Decode rate over context: {_name(engine.spec.name)}",
        subtitle=f"{told}; {engine.spec.device}",
        measured=[dot for dot in dots if dot is not None],
        ceiling=[(each.context, each.ceiling_tps) for each in limits if each.ceiling_tps is not None],
        expected=[(each.context, each.expected_tps) for each in limits if each.expected_tps is not None],
        peer=None if peer_version is None else f"{peer.NAME} {peer_version}",
        peer_measured=[dot for dot in peers if dot is not None],
    )


def _name(model: str) -> str:
    """Return the model's name; of a folder only its last part, as plots get shared."""
    folder = expanded(model)
    return folder.resolve().name if is_dir(folder) else model


def _dot(each: MeasuredPoint, rates: Sequence[float | None]) -> Dot | None:
    tps = spread(rates)
    return None if tps is None else Dot(each.limits.context, tps)


def _contexts(engine: "Engine", measured: Sequence[MeasuredPoint]) -> list[int]:
    """Return contexts to plot: slightly past the deepest point, within the model's context."""
    end = max(each.limits.context for each in measured) * (2 if len(measured) == 1 else BEYOND)
    if engine.spec.capacity is not None and not engine.spec.rolls:
        end = min(end, engine.spec.capacity)
    return sorted({max(1, round(end * i / SAMPLES)) for i in range(SAMPLES + 1)})


def _unwritable(path: Path, error: OSError) -> TokamacError:
    hint = access_hint(error, "Choose another path.")
    return TokamacError(f"--plot: {path} can't be written: {error.strerror}", hint)
