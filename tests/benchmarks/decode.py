"""Section: what the engine adds to the bare loop it is made of."""

from functools import partial

from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Section, at_least, plain
from tests.benchmarks.servers import EngineServer
from tests.benchmarks.stats import alternate, ratios, series

PROMPT = 64


def measure(plan: Plan) -> Section:
    """Decode through the engine and through the bare loop, in turn."""
    new = plan.count(256, 24)
    with Remote(EngineServer, plan.model) as server:
        ids = server.call("prompt", PROMPT, 0)
        server.call("reply", ids, 16)
        server.call("bare", ids, 16)
        through, bare = alternate(
            plan.many_rounds, *(partial(_run, server, side, ids, new) for side in ("reply", "bare"))
        )
    engine_tps, bare_tps = series(through), series(bare)
    rows = [
        plain("engine", engine_tps, "tok/s"),
        plain("bare loop", bare_tps, "tok/s"),
        at_least("engine ÷ bare loop", ratios(engine_tps, bare_tps), 0.97),
    ]
    how = (
        f"Decode rate of {new} tokens at temperature 0 after a prompt of {PROMPT}. The bare loop is forward, "
        "`argmax`, `async_eval`, `item`, on the engine's thread, on the same loaded model, with a fresh cache of the "
        "same plan, as many steps ahead as the engine goes. The engine's figure includes sampling, detokenizing, "
        "metrics, and the queue to the thread that reads the events."
    )
    return Section("Decode: the engine over a bare loop", rows, how)


def _run(server: Remote, side: str, ids: list[int], new: int, number: int) -> float | None:
    del number  # the same prompt each time: both sides make the same tokens
    timing = server.call(side, ids, new)
    if timing.tokens != new:
        raise ValueError(f"{side} made {timing.tokens} of {new} tokens")
    rate: float | None = timing.decode_tps
    return rate
