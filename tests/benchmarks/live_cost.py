"""Section: what measuring a reply while it is written costs it."""

from functools import partial

from tests.benchmarks.live_lab import LiveLab
from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Section, at_least, at_most, plain
from tests.benchmarks.stats import Series, alternate, ratios, series

PROMPT = 64


def measure(plan: Plan) -> Section:
    """Decode with every figure recorded and asked for, and with none, in turn; and time what a token costs alone."""
    new = plan.count(512, 48)
    with Remote(LiveLab, plan.model) as lab:
        lab.call("decode", True, PROMPT, 16)
        on, off = alternate(plan.many_rounds, *(partial(_decode, lab, recorded, new) for recorded in (True, False)))
        each = [lab.call("token_us", plan.count(20_000, 2_000)) for _ in range(plan.rounds)]
        asked = [lab.call("asked_ms", plan.count(32_768, 2_048)) for _ in range(plan.rounds)]
    on_tps, off_tps, alone_us = series(on), series(off), Series(tuple(each))
    share = Series(tuple(us * off_tps.median / 1e4 for us in alone_us.values))  # µs of a second's tokens, in %
    rows = [
        plain("recorded", on_tps, "tok/s"),
        plain("not recorded", off_tps, "tok/s"),
        at_least("recorded ÷ not recorded", ratios(on_tps, off_tps), 0.99),
        plain("a token's record alone", alone_us, "µs"),
        at_most("as a share of a step", share, 1.0, "%"),
        at_most("asking once, late in a long reply", Series(tuple(asked)), 4.0, "ms"),
    ]
    how = (
        f"Decode rate of {new} tokens after a prompt of {PROMPT}, by the engine's own loop on its thread. Recorded: time stamps, "
        "what may hold a token up (page faults, processor time, the reader, caches that grow, the pool), and all live figures "
        "asked for 2.5 times a second from another thread, as the chat does. Not recorded: time stamps alone. A token's record is "
        f"also timed by itself, and so is asking for all figures of a reply of {plan.count(32_768, 2_048):,} tokens, 100 of which "
        "came since they were asked for last: at 2.5 times a second 4 ms are 1 %."
    )
    return Section("Live figures: what they cost", rows, how)


def _decode(lab: Remote, recorded: bool, new: int, number: int) -> float | None:
    del number  # the same tokens each time
    rate: float | None = lab.call("decode", recorded, PROMPT, new)
    return rate
