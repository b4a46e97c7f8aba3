"""The roofline of F3, drawn: every mark is on it, however far below the roof a phase is expected."""

import pytest
from textual.app import App, ComposeResult

from tokamac.app.backend.protocol import Roof, Spot
from tokamac.app.tui.screens.whatif import RoofPlot


def spots(decode_tflops: float) -> tuple[Spot, ...]:
    """Both phases as a small model has them on a chip of 546 GB/s and 16.16 TFLOP/s: decode has little to do and many steps."""
    return (Spot("decode", 1.8, "memory", 0.98, decode_tflops), Spot("prefill", 3000.0, "compute", 16.16, 0.9))


class OnePlot(App[None]):
    def __init__(self, roof: Roof) -> None:
        super().__init__()
        self._roof = roof

    def compose(self) -> ComposeResult:
        plot = RoofPlot()
        plot.show(self._roof)
        yield plot


@pytest.mark.parametrize("decode_tflops", [0.5, 0.09, 0.0001])
async def test_both_phases_are_drawn_however_far_below_the_roof_they_are(decode_tflops: float) -> None:
    app = OnePlot(Roof(546.0, 16.16, 29.6, spots(decode_tflops)))
    async with app.run_test(size=(80, 20)):
        rows = [strip.text for strip in app.screen._compositor.render_strips()]
        legend = sum(word in row for row in rows for word in ("DD decode", "PP prefill"))
        marks = sum("D" in row.replace("DD decode", "") for row in rows if "operations" not in row)
    assert (legend, marks) == (2, 1)
