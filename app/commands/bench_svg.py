"""Draws a Chart (bench_plot.py) as a stand-alone SVG: no scripts, fonts or links to elsewhere.

It follows the reader's light or dark scheme, and series differ by shape and dash as well as by colour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN

if TYPE_CHECKING:
    from tokamac.app.commands.bench_plot import Chart, Curve, Dot

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 96, 24, 96, 60
"""Margins around the field, in pixels."""
DOT, CAP = 4.5, 6.0
LETTER, LEGEND_GAP = 7.2, 56.0
LONGEST_TEXT = 110
LOG_FROM = 10.0
"""Rates that lie this far apart are drawn over a logarithm: a linear axis would press the lower ones onto its line."""

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
    """Values from ``low`` to ``high`` over pixels from ``begin`` to ``end``; ``ticks`` are labelled. ``log``: over a logarithm."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; above 0 where the axis is logarithmic."""
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * part


def linear_axis(highest: float, begin: float, end: float, most_ticks: int) -> Axis:
    """Return an axis from 0 to a little above ``highest`` (above 0), with round ticks: steps of 1, 2 or 5 times a power of ten."""
    high = 1.06 * highest
    power = 10.0 ** math.floor(math.log10(high / most_ticks))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * most_ticks >= high * (1 - 1e-9))
    return Axis(0.0, high, begin, end, tuple(i * step for i in range(int(high / step) + 1)))


def log_axis(lowest: float, highest: float, begin: float, end: float) -> Axis:
    """Return a logarithmic axis around two values above 0, with ticks at powers of ten; over few of them also at 2 and 5 times."""
    low, high = lowest / 1.5, 1.3 * highest
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
    return Axis(low, high, begin, end, tuple(tick for tick in ticks if low <= tick <= high), log=True)


def render(chart: "Chart") -> bytes:
    """Return the picture as a file's bytes."""
    drawing = _Drawing(chart)
    drawing.draw()
    ElementTree.indent(drawing.root)
    written: bytes = ElementTree.tostring(drawing.root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


class _Drawing:
    """Turns a Chart into the elements below ``root``."""

    def __init__(self, chart: "Chart") -> None:
        self._chart = chart
        curves, dots = (*chart.ceiling, *chart.expected), (*chart.measured, *chart.peer_measured)
        contexts = [x for x, _ in curves] + [dot.context for dot in dots]
        rates = [y for _, y in curves] + [rate for dot in dots for rate in (dot.tps.low, dot.tps.high)]
        self._x = linear_axis(max(contexts, default=1.0), LEFT, WIDTH - RIGHT, 8)
        self._y = _rate_axis(rates)
        view = f"0 0 {WIDTH} {HEIGHT}"
        self.root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=view, role="img")

    def draw(self) -> None:
        """Add everything, what is on top last."""
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
        for dot in chart.measured:
            self._whisker(dot, "measured")
            self._mark(self._x.at(dot.context), self._y.at(dot.tps.median), "measured")
        for dot in chart.peer_measured:
            self._whisker(dot, "peer")
            self._mark(self._x.at(dot.context), self._y.at(dot.tps.median), "peer")

    def _axes(self) -> None:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for tick in self._y.ticks:
            y = self._y.at(tick)
            self._line(LEFT, y, right, y, "grid")
            self._write(LEFT - 8, y + 4, f"{tick:,.10g}", "faint", anchor="end")
        for tick in self._x.ticks:
            x = self._x.at(tick)
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

    def _curve(self, curve: "Curve", kind: str) -> None:
        if curve:
            path = "L".join(f"{self._x.at(x):.1f} {self._y.at(y):.1f}" for x, y in curve)
            self._add("path", f"line {kind}", d=f"M{path}")

    def _whisker(self, dot: "Dot", kind: str) -> None:
        x, low, high = self._x.at(dot.context), self._y.at(dot.tps.low), self._y.at(dot.tps.high)
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
    """Return foreign text as XML can hold it, on one line, cut where it would leave the picture."""
    safe = sanitise_line(text).encode("utf-8", "replace").decode()
    safe = "".join(char for char in safe if char not in "\ufffe\uffff")
    return safe if len(safe) <= LONGEST_TEXT else f"{safe[: LONGEST_TEXT - 1]}…"
