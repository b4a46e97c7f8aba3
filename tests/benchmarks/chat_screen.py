"""Section: what the chat's screen costs an engine of 500 tok/s, by what is written."""

from collections.abc import Callable
from functools import partial

from tests.benchmarks.plan import Plan
from tests.benchmarks.report import Row, Section, at_least, at_most, plain
from tests.benchmarks.screen import with_screen, without_screen
from tests.benchmarks.stats import Series, alternate, ratios, series
from tests.benchmarks.terminal import COLUMNS, ROWS
from tokamac.engine.metrics import Metrics

SCENARIOS = {"prose": "prose", "code": "one long block of code", "list": "a list of 300 items"}
WHOLE = 10_000  # tokens, more than any scenario has


def measure(plan: Plan) -> Section:
    """Play each scenario with the chat's screen on and without one, in turn."""
    rows = [row for scenario in SCENARIOS for row in _rows(plan, scenario)]
    how = (
        "A scripted engine, in a process of its own, waits 2 ms for each token; no model computes, so this machine's cores are "
        f"free for the screen. With: the real chat in a pseudo-terminal of {COLUMNS}×{ROWS} whose output is read all the time, "
        "and which stores the reply as it grows. Without: the engine's process alone, sent the same conversation. Figures are "
        "the metrics that the engine's process sends when the reply ends."
    )
    return Section("Screen on over off at 500 tok/s", rows, how)


def _rows(plan: Plan, scenario: str) -> list[Row]:
    limit = plan.count(WHOLE, 600)
    on, off = alternate(
        plan.rounds, *(partial(_played, side, scenario, limit) for side in (with_screen, without_screen))
    )
    tps_on, tps_off = (series([metrics.decode_tps for metrics in side]) for side in (on, off))
    p99_on, p99_off = _p99(on), _p99(off)
    what = SCENARIOS[scenario]
    return [
        plain(f"{what}: decode without a screen", tps_off, "tok/s"),
        at_least(f"{what}: decode, on ÷ off", ratios(tps_on, tps_off), 0.97),
        plain(f"{what}: ITL p99 without a screen", p99_off, "ms"),
        at_most(f"{what}: ITL p99, on ÷ off", ratios(p99_on, p99_off), 2.0),
    ]


def _played(side: Callable[[str, str, int], Metrics], scenario: str, limit: int, number: int) -> Metrics:
    del number  # the same text each time
    return side("scripted", scenario, limit)


def _p99(side: list[Metrics]) -> Series:
    return series([gaps.p99 if (gaps := metrics.itl_ms) is not None else None for metrics in side])
