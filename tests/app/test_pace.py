"""Drawing takes its share of a core, and no more."""

import pytest

from tokamac.app.tui.widgets.transcript import SHARE_BESIDE_GPU, SLOWEST_S, FramePacer, share_on


def drawn(cost_s: float, share: float, ticks: int = 1500) -> tuple[int, float]:
    """Run a pace at 15 ticks a second over drawings that cost so much; return their number, and the CPU seconds spent."""
    now = spent = 0.0
    pace, count = FramePacer(share, clock=lambda: now, cpu=lambda: spent), 0
    for tick in range(ticks):
        now = tick / 15
        if pace.is_due():
            count += 1
            spent += cost_s
    return count, spent


@pytest.mark.parametrize(("cost_ms", "share"), [(1, 0.03), (5, 0.03), (10, 0.03), (50, 0.3)])
def test_drawing_stays_within_its_share(cost_ms: float, share: float) -> None:
    count, spent = drawn(cost_ms / 1000, share)
    assert spent <= share * 100 + 2 * cost_ms / 1000
    assert count > 0.6 * min(1500, share * 100 / (cost_ms / 1000))


def test_what_costs_little_is_drawn_at_every_tick() -> None:
    assert drawn(0.0001, 0.03)[0] == 1500


def test_what_costs_too_much_is_drawn_all_the_same() -> None:
    assert drawn(1.0, 0.03)[0] == pytest.approx(100 / SLOWEST_S, rel=0.15)  # by whole ticks


def test_beside_a_gpu_there_is_more_to_spare() -> None:
    assert share_on("metal") == share_on("cuda") == SHARE_BESIDE_GPU > share_on("cpu")


def test_what_is_drawn_with_something_else_counts_as_drawn() -> None:
    now = spent = 0.0
    pace = FramePacer(0.03, clock=lambda: now, cpu=lambda: spent)
    assert pace.is_due()
    now, spent = 0.01, 0.02
    assert not pace.is_due()
    assert pace.is_due(now=True)
    now, spent = 0.02, 0.03
    assert not pace.is_due()
