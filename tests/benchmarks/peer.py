"""Section: the same checkpoint through mlx-lm."""

from functools import partial

from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, at_least, plain
from tests.benchmarks.servers import EngineServer, PeerServer, Timing
from tests.benchmarks.stats import Series, alternate, ratios, series

PROMPTS = (64, 512, 2048)
BUDGET_S = 60.0
"""For one prompt length, both sides and all rounds, unless the run is a patient one: mlx-lm may take minutes for the longest."""


def measure(plan: Plan) -> Section:
    """Prefill prompts of several lengths, then decode, in turn; and compare the peaks of memory."""
    on_cpu = plan.device == "cpu"
    new = plan.count(96, 8)
    rows: list[Row] = []
    with Remote(EngineServer, plan.model) as engine, Remote(PeerServer, plan.folder) as mlx_lm:
        sides = (engine, mlx_lm)
        for side in sides:
            side.call("reply", engine.call("prompt", 32, 0), 4)
        ours, theirs = _replies(plan, engine, mlx_lm, PROMPTS[0], new)
        rows += _rows("decode", ours, theirs, "decode_tps", 4.0 if on_cpu else 1.0)
        peaks: tuple[list[Timing], list[Timing]] = ([], [])
        for length in PROMPTS[:2] if plan.quick else PROMPTS:
            peaks = _replies(plan, engine, mlx_lm, length, 2)
            rows += _rows(f"prefill of {length:,} tokens", *peaks, "prefill_tps", 5.0 if on_cpu else 1.0)
        rows += [
            _bytes("peak of MLX's arrays, longest prompt: engine", *(timing.peak_bytes for timing in peaks[0])),
            _bytes("peak of MLX's arrays, longest prompt: mlx-lm", *(timing.peak_bytes for timing in peaks[1])),
            _bytes("peak resident memory of the process: engine", engine.call("resident_peak")),
            _bytes("peak resident memory of the process: mlx-lm", mlx_lm.call("resident_peak")),
        ]
    how = (
        "Each side has a process of its own and works alone. mlx-lm: `mlx_lm.load` and `mlx_lm.stream_generate`, unchanged, "
        "with its own defaults. Same token ids, temperature 0, end marks not obeyed; decode is that of "
        f"{new} tokens after a prompt of {PROMPTS[0]}; every prefill is of a prompt of its own, with nothing cached. Both rates "
        "as the product defines them, from time stamps taken where tokens arrive: n − 1 gaps for decode, prompt tokens ÷ time "
        "to the first token for prefill. The targets are those of the CPU backend; on a GPU they are 1. Where n is below "
        f"{plan.rounds}, further rounds would have taken more than {BUDGET_S:g} s for that prompt (`--patient` takes them)."
    )
    return Section("The same checkpoint through mlx-lm", rows, how)


def _replies(plan: Plan, engine: Remote, mlx_lm: Remote, length: int, new: int) -> tuple[list[Timing], list[Timing]]:
    prompts = [engine.call("prompt", length, number) for number in range(plan.rounds + 1)]
    ours, theirs = alternate(
        plan.rounds,
        *(partial(_reply, side, prompts, new) for side in (engine, mlx_lm)),
        budget_s=None if plan.patient else BUDGET_S,
    )
    return ours, theirs


def _reply(side: Remote, prompts: list[list[int]], new: int, number: int) -> Timing:
    timing: Timing = side.call("reply", prompts[number], new)
    if timing.tokens != new:
        raise ValueError(f"{timing.tokens} of {new} tokens were made")
    return timing


def _rows(what: str, ours: list[Timing], theirs: list[Timing], rate: str, bound: float) -> list[Row]:
    engine, mlx_lm = (series([getattr(timing, rate) for timing in side]) for side in (ours, theirs))
    return [
        plain(f"{what}: engine", engine, "tok/s"),
        plain(f"{what}: mlx-lm", mlx_lm, "tok/s"),
        at_least(f"{what}: engine ÷ mlx-lm", ratios(engine, mlx_lm), bound),
    ]


def _bytes(what: str, *values: int) -> Row:
    return plain(what, Series(tuple(value / 1e6 for value in values)), "MB")
