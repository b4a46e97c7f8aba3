"""Section: what a long chat leaves in memory."""

from tests.benchmarks.plan import BenchError, Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, holds
from tests.benchmarks.servers import EngineServer, Held
from tests.benchmarks.stats import number

TOKENS = 40
SLACK_MB = 1.0


def measure(plan: Plan) -> Section:
    """Chat for fifty turns and see what grows."""
    turns = plan.count(50, 4)
    with Remote(_server, plan.model) as server:
        held: list[Held] = server.call("chat", turns, TOKENS)
    if len(held) != turns:
        raise BenchError(f"{len(held)} of {turns} turns were taken")
    others = [(now.active - now.kv) / 1e6 for now in held]
    growth, most = others[-1] - others[0], max(others) - others[0]
    shown = [0, turns // 4, turns // 2, turns - 1]
    rows = [Row(f"after turn {turn + 1}", _shown(held[turn])) for turn in sorted(set(shown))]
    rows += [
        Row("growth of active memory", f"{number((held[-1].active - held[0].active) / 1e6)} MB"),
        Row("growth of keys and values", f"{number((held[-1].kv - held[0].kv) / 1e6)} MB"),
        holds(
            "growth of all else, last turn over first", f"{growth:.3f} MB", f"≤ {SLACK_MB:g} MB", met=growth <= SLACK_MB
        ),
        holds("growth of all else, at most in any turn", f"{most:.3f} MB", f"≤ {SLACK_MB:g} MB", met=most <= SLACK_MB),
    ]
    how = (
        f"One chat, questions of the guide's field in turn, replies of at most {TOKENS} tokens at temperature 0, "
        "earlier turns reused. After each turn, once all is stored: "
        "MLX's active memory, and the bytes of keys and values that the prompt "
        "cache reports: the conversation's, room to grow included, and what it set aside. Counts of bytes, so one run."
    )
    return Section(f"Memory over {turns} turns of chat", rows, how)


def _server(model: str) -> EngineServer:
    return EngineServer(model, endless=False, reuse=True)


def _shown(held: Held) -> str:
    return f"active {held.active / 1e6:.2f} MB, of it keys and values {held.kv / 1e6:.2f} MB; context {held.tokens:,} tokens"
