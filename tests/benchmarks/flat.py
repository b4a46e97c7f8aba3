"""Section: memory over a reply far longer than its window."""

from tests.benchmarks.plan import BenchError, Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, holds
from tests.benchmarks.servers import EngineServer, Held
from tests.benchmarks.stats import number
from tokamac.engine.options import KVSpec

TOKENS = 100_000
WINDOW = 4096
FLAT_MB = 1.0
AT_MOST_S = 7200.0


def measure(plan: Plan) -> Section:
    """Watch the memory of one reply that begins with its window full."""
    window, most = plan.count(WINDOW, 256), plan.count(TOKENS, 500)
    with Remote(EngineServer, plan.model, KVSpec(4, 4, window=window)) as server:
        ids = server.call("prompt", window + window // 4, 1)  # more than the window and its spare slots
        held: list[Held]
        held, generated = server.call("long", ids, most, AT_MOST_S)
    if len(held) < 4:
        raise BenchError("the long reply was too short to see anything")
    part = max(1, len(held) // 10)
    first, last = (sorted(now.active for now in some)[part // 2] for some in (held[:part], held[-part:]))
    growth = (last - first) / 1e6
    spread = (max(now.active for now in held) - min(now.active for now in held)) / 1e6
    rows = [
        Row("tokens generated, 4-bit keys and values, window of 4,096", f"{generated:,} of {most:,}"),
        Row("keys and values, first and last", f"{held[0].kv / 1e6:.3f} MB, {held[-1].kv / 1e6:.3f} MB"),
        holds(
            "growth of active memory, last tenth over first",
            f"{number(growth)} MB",
            f"≤ {FLAT_MB:g} MB",
            met=abs(growth) <= FLAT_MB,
        ),
        Row("range of active memory, steps in progress included", f"{number(spread)} MB"),
    ]
    how = (
        "MLX's active memory, four times a second, over one reply that begins with its window full. Counts of bytes, so one run, "
        "and other work on the machine does not matter."
    )
    return Section("Memory over a long reply", rows, how)
