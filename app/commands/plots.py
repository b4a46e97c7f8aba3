"""Pictures in the terminal, no wider than it: decode rate over context, and the roofline with both phases on it."""

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokamac.app.output import is_terminal
from tokamac.app.roofline_axis import lowest
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import short
from tokamac.engine.limits import metrics

if TYPE_CHECKING:
    from tokamac.engine.limits.hardware import Chip
    from tokamac.engine.limits.outcomes import Point
    from tokamac.engine.limits.prediction import Phase, Prediction

WIDEST, NARROWEST, HEIGHT = 100, 40, 18
TICKS = 5
HEADROOM = 1.2
"""The axis ends so far above the highest point that the legend covers no curve."""

LEGEND_SHARE = 0.3
"""The same on a logarithmic axis, as a share of the powers of ten below."""


def decode_plot(points: "Sequence[Point]", title: str) -> str | None:
    """Return tokens a second over context: the ceiling, and what is expected. None where neither is known anywhere."""
    ceiling = [(at.context, at.ceiling_tps) for at in points if at.ceiling_tps is not None]
    expected = [(at.context, at.expected_tps) for at in points if at.expected_tps is not None]
    if not ceiling:
        return None

    def draw(plot: Any) -> None:
        _line(plot, ceiling, "ceiling, tok/s", "blue", braille=True)
        if expected:
            _line(plot, expected, "expected, tok/s", "green", braille=False)
        last = max(context for context, _ in ceiling)
        ticks = [round(last * part / (TICKS - 1)) for part in range(TICKS)]
        plot.xticks(ticks, [short(tick) for tick in ticks])
        plot.xlim(0, last)
        plot.ylim(0, HEADROOM * max(tps for _, tps in ceiling))
        plot.xlabel("context, tokens")

    return _picture(f"{title}: decode over context", draw)


def roofline_plot(predicted: "Prediction", chip: "Chip") -> str | None:
    """Return operations a second over operations a byte: the roof, and where both phases are under it. None without a roof.

    A phase is drawn at its expected speed, or, where that is unknown, on the roof.
    """
    if chip.bandwidth_gbs is None or predicted.ridge is None:
        return None
    gbs, ridge = chip.bandwidth_gbs, predicted.ridge
    peak_tflops = ridge * gbs / 1e3
    both = (("decode", predicted.decode), ("prefill", predicted.prefill))
    phases = [(name, phase) for name, phase in both if phase.intensity]
    reach = [phase.intensity for _, phase in phases if phase.intensity is not None]
    left, right = min([*reach, ridge]) / 4, max([*reach, ridge]) * 4
    low = lowest(left * gbs / 1e3, (_reached_tflops(phase) for _, phase in phases))

    def draw(plot: Any) -> None:
        plot.xscale("log")
        plot.yscale("log")
        roof = [(left, left * gbs / 1e3), (ridge, peak_tflops), (right, peak_tflops)]
        _line(plot, roof, f"roof: {gbs:,.3g} GB/s, {peak_tflops:,.3g} TFLOP/s", "blue", braille=True)
        for (name, phase), colour in zip(phases, ("green", "magenta"), strict=False):
            _mark(plot, name, phase, colour)
        for set_ticks, begin, end in ((plot.xticks, left, right), (plot.yticks, low, peak_tflops)):
            powers = list(_powers(begin, end))
            set_ticks(powers, [f"{power:g}" for power in powers])
        # On a logarithmic axis plotext takes limits as exponents.
        plot.ylim(math.log10(low), math.log10(peak_tflops) + LEGEND_SHARE * math.log10(peak_tflops / low))
        plot.xlabel("operations a byte")

    return _picture(f"{sanitise_line(chip.name)}: roofline, TFLOP/s", draw)


def _mark(plot: Any, name: str, phase: "Phase", colour: str) -> None:
    reached = _reached_tflops(phase)
    if reached is None or phase.intensity is None:
        return
    roof = "the host" if phase.by_host else "memory" if phase.bound == "memory" else "arithmetic"
    side = f", waits for {roof}" if phase.bound else ""
    plot.scatter([phase.intensity], [reached], marker=name[0].upper(), label=f"{name}{side}", **_coloured(colour))


def _reached_tflops(phase: "Phase") -> float | None:
    """Return what a phase is expected to reach, or else its roof."""
    took_s = phase.ceiling_s if phase.expected_s is None else phase.expected_s
    reached = None if phase.operations is None else metrics.rate(phase.operations, took_s)
    return None if reached is None else reached / 1e12


def _line(plot: Any, points: Sequence[tuple[float, float]], label: str, colour: str, *, braille: bool) -> None:
    xs, ys = zip(*points, strict=True)
    marker = "braille" if braille and _draws_braille() else "*" if braille else "."
    plot.plot(list(xs), list(ys), marker=marker, label=label, **_coloured(colour))


def _picture(title: str, draw: Callable[[Any], None]) -> str:
    import plotext as plot

    plot.clear_figure()
    plot.theme("clear")
    plot.plotsize(max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns)), HEIGHT)
    plot.title(sanitise_line(title))
    draw(plot)
    text = str(plot.build())
    plot.clear_figure()
    lines = text if _colours() else plot.uncolorize(text)
    return "\n".join(line.rstrip() for line in lines.splitlines())


def _coloured(colour: str) -> dict[str, str]:
    return {"color": colour} if _colours() else {}


def _colours() -> bool:
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def _draws_braille() -> bool:
    return "utf" in (sys.stdout.encoding or "").casefold()


def _powers(low: float, high: float) -> Iterator[float]:
    """Yield the powers of ten within."""
    for exponent in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        yield 10.0**exponent
