"""The plots of What if: decoding over contexts, and a machine's roofline with both phases under it."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from textual.app import RenderResult
from textual.color import Color
from textual_plotext import PlotextPlot

from ... import units
from ...backend.protocol import Answer, CurvePoint, Roof, Spot
from ...units import lowest
from ...verdict import BOUND

TICKS = 5
FRAME = 4
"""Rows around what is drawn: the frame, numbers and the axis' name."""
ROOMY = 14
MARKER = "braille"
Colour = tuple[int, int, int] | int | str
"""As plotext takes it: red, green and blue; one of the terminal's own by its number; or "default"."""


class Plot(PlotextPlot):
    """A plot that is drawn for its current size, so that its legend never covers a curve."""

    def render(self) -> RenderResult:
        """Draw, or stay empty where nothing is known; the line below says why."""
        self.plt.clear_figure()
        # Textual's plots know no colours of the terminal's own: they would draw black on black.
        self.set_reactive(PlotextPlot.theme, "clear" if self.app.native_ansi_color else "auto")
        return super().render() if self.draw(self.plt) else ""

    @abstractmethod
    def draw(self, plot: Any) -> bool:
        """Draw on plotext's ``plot``, which is empty; return whether anything is known."""

    @property
    def roomy(self) -> bool:
        """Whether there is room for a legend; the line below the plot has the same text."""
        return self.size.height >= ROOMY

    def stretch(self, legend: int) -> float:
        """Return the factor by which an axis must exceed the highest point, for a legend of ``legend`` rows."""
        rows = self.size.height - FRAME
        return rows / (rows - legend - 1) if self.roomy else 1.05

    def line(self, plot: Any, points: Sequence[tuple[float, float]], label: str, colour: Colour) -> None:
        """Draw a line through ``points``, if there are any."""
        if points:
            xs, ys = zip(*points, strict=True)
            plot.plot(list(xs), list(ys), marker=MARKER, label=label if self.roomy else None, color=colour)

    def colour(self, variable: str) -> Colour:
        """Return a colour of the current theme, without transparency."""
        variables = self.app.theme_variables
        # "ansi_default 50%": a share of the terminal's own colour is no colour by itself.
        named = Color.parse(variables.get(variable, variables["foreground"]).split()[0])
        if named.ansi is not None:
            return named.ansi if named.ansi >= 0 else "default"
        return Color.parse(variables["surface"]).blend(named, named.a).rgb


class CurvePlot(Plot):
    """Tokens a second over tokens of context: the ceiling, and the expected rate."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._points: Sequence[CurvePoint] = ()

    def show(self, points: Sequence[CurvePoint]) -> None:
        """Show other points."""
        self._points = points
        self.refresh()

    def draw(self, plot: Any) -> bool:
        """Draw both curves, as far as known."""
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
    """10^12 operations a second over operations a byte. A phase is at its expected rate; if that is unknown, on the roof."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._roof: Roof | None = None

    def show(self, roof: Roof | None) -> None:
        """Show another roof."""
        self._roof = roof
        self.refresh()

    def draw(self, plot: Any) -> bool:
        """Draw the roof, if it is known, and both phases under it."""
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
    """Return the ends of the curves in words."""
    known = [at for at in answer.curve if at.ceiling_tps is not None]
    if not known:
        return "unknown: the machine's bandwidth or the bytes a step are unknown"
    first, last = known[0], known[-1]
    ceiling = (
        f"ceiling {units.rate(first.ceiling_tps)}, {units.rate(last.ceiling_tps)} at {units.short(last.context)} tokens"
    )
    return f"{ceiling}; expected {units.rate(first.expected_tps)}, {units.rate(last.expected_tps)}"


def roof_text(answer: Answer) -> str:
    """Return in words which limit each phase meets."""
    if answer.roof is None:
        return "the roofline is unknown: the machine's bandwidth or peak arithmetic is unknown"
    return "; ".join(f"{mark_of(spot)}: {spot_text(spot)}" for spot in answer.roof.spots)


def even_steps(end: float) -> Iterator[float]:
    """Yield about TICKS round numbers from 0 to ``end``: multiples of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(end / TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * (TICKS + 1) >= end)
    yield from (step * number for number in range(math.floor(end / step) + 1))


def powers_of_ten(low: float, high: float) -> Iterator[float]:
    """Yield the powers of ten within."""
    for exponent in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        yield 10.0**exponent


def mark_of(spot: Spot) -> str:
    """Return the letter of a phase."""
    return spot.name[0].upper()


def spot_text(spot: Spot) -> str:
    """Return the phase of a spot, and its limit."""
    return spot.name if spot.bound is None else f"{spot.name}, {BOUND[spot.bound]}"


def _reached(spot: Spot) -> float | None:
    return spot.ceiling_tflops if spot.expected_tflops is None else spot.expected_tflops


def _tick(value: float) -> str:
    return f"{value / 1e3:,.4g}k" if value >= 1e3 else f"{value:.4g}"
