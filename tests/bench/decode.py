"""Sections decode, flat, turns, live_cost and peer: the engine beside the bare loop, itself and mlx-lm."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.bench.plan import BenchError, EngineServer, Held, PeerServer, Plan, Remote, Timing
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.bench.report import number as stats_number
from tests.engine.inside import runner_of, worker_of
from tokamac.engine import metrics
from tokamac.engine.metrics import Cause, ProcessWatch, Recorder
from tokamac.engine.options import KVSpec, Sampling

if TYPE_CHECKING:
    from tokamac.engine.sampling import Sampler


# Section: what the engine adds to the bare loop it is made of.

PROMPT = 64


def measure_decode(plan: Plan) -> Section:
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


# Section: memory over a reply far longer than its window.

TOKENS = 100_000
WINDOW = 4096
FLAT_MB = 1.0
AT_MOST_S = 7200.0


def measure_flat(plan: Plan) -> Section:
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
            f"{stats_number(growth)} MB",
            f"≤ {FLAT_MB:g} MB",
            met=abs(growth) <= FLAT_MB,
        ),
        Row("range of active memory, steps in progress included", f"{stats_number(spread)} MB"),
    ]
    how = (
        "MLX's active memory, four times a second, over one reply that begins with its window full. Counts of bytes, so one run, "
        "and other work on the machine does not matter."
    )
    return Section("Memory over a long reply", rows, how)


# Section: what a long chat leaves in memory.

TURNS_TOKENS = 40
SLACK_MB = 1.0


def measure_turns(plan: Plan) -> Section:
    """Chat for fifty turns and see what grows."""
    turns = plan.count(50, 4)
    with Remote(_server, plan.model) as server:
        held: list[Held] = server.call("chat", turns, TURNS_TOKENS)
    if len(held) != turns:
        raise BenchError(f"{len(held)} of {turns} turns were taken")
    others = [(now.active - now.kv) / 1e6 for now in held]
    growth, most = others[-1] - others[0], max(others) - others[0]
    shown = [0, turns // 4, turns // 2, turns - 1]
    rows = [Row(f"after turn {turn + 1}", _shown(held[turn])) for turn in sorted(set(shown))]
    rows += [
        Row("growth of active memory", f"{stats_number((held[-1].active - held[0].active) / 1e6)} MB"),
        Row("growth of keys and values", f"{stats_number((held[-1].kv - held[0].kv) / 1e6)} MB"),
        holds(
            "growth of all else, last turn over first", f"{growth:.3f} MB", f"≤ {SLACK_MB:g} MB", met=growth <= SLACK_MB
        ),
        holds("growth of all else, at most in any turn", f"{most:.3f} MB", f"≤ {SLACK_MB:g} MB", met=most <= SLACK_MB),
    ]
    how = (
        f"One chat, questions of the guide's field in turn, replies of at most {TURNS_TOKENS} tokens at temperature 0, "
        "earlier turns reused. After each turn, once all is stored: "
        "MLX's active memory, and the bytes of keys and values that the prompt "
        "cache reports: the conversation's, room to grow included, and what it set aside. Counts of bytes, so one run."
    )
    return Section(f"Memory over {turns} turns of chat", rows, how)


def _server(model: str) -> EngineServer:
    return EngineServer(model, endless=False, reuse=True)


def _shown(held: Held) -> str:
    return f"active {held.active / 1e6:.2f} MB, of it keys and values {held.kv / 1e6:.2f} MB; context {held.tokens:,} tokens"


# Decoding with and without a record of it, in a process of its own.

ASK_S = 0.4  # as often as the chat's engine process asks


class LiveLab:
    """A loaded model, decoded by the engine's own loop."""

    def __init__(self, model: str) -> None:
        self._server = EngineServer(model)
        self._runtime = runner_of(self._server.engine).runtime

    def decode(self, recorded: bool, prompt: int, new: int) -> float | None:
        """Return the decode rate of ``new`` tokens after ``prompt``, with all that is recorded of a reply, or stamps alone."""
        work = self._recorded if recorded else self._stamped
        times = worker_of(self._server.engine).call(lambda: work(self._server.prompt(prompt, 0), new))
        return metrics.decode_rate(times)

    def token_us(self, count: int) -> float:
        """Return the microseconds that recording a token takes, in a loop of nothing else."""
        return worker_of(self._server.engine).call(lambda: self._token_us(count))

    def asked_ms(self, tokens: int) -> float:
        """Return the milliseconds that all figures of a reply take after so many tokens, the last 100 of them new."""
        recorder = Recorder()
        recorder.token_times = [i * 0.004 + i % 7 * 1e-4 for i in range(tokens - 100)]
        self._figures(recorder)
        recorder.token_times += [i * 0.004 + i % 5 * 1e-4 for i in range(tokens - 100, tokens)]
        began = time.perf_counter()
        self._figures(recorder)
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Free the model."""
        self._server.close()

    def _token_us(self, count: int) -> float:
        from tokamac.engine.kv.cache import GrowthWatcher

        recorder, caches = Recorder(), self._runtime.new_caches(None)
        self._prefill(caches, self._server.prompt(8, 0))
        room, watch = GrowthWatcher(caches), ProcessWatch(recorder.mark, computes=True)
        began = time.perf_counter()
        for _ in range(count):
            room.grew()
            _record(watch, recorder)
        return (time.perf_counter() - began) / count * 1e6

    def _figures(self, recorder: Recorder, caches: Sequence[object] = ()) -> None:
        from tokamac.engine.kv.cache import nbytes

        cost = self._runtime.step_cost(recorder.context_tokens)
        recorder.metrics(cost, kv_bytes=nbytes(list(caches)), peak_memory_bytes=None)
        recorder.outliers(ahead=self._runtime.ahead)

    def _stamped(self, ids: list[int], new: int) -> list[float]:
        times = []
        for _ in self._tokens(self._runtime.new_caches(None), ids, new):
            times.append(time.perf_counter())
        return times

    def _recorded(self, ids: list[int], new: int) -> list[float]:
        recorder, caches, ended = Recorder(), self._runtime.new_caches(None), threading.Event()
        tokens = self._tokens(caches, ids, new, recorder.mark)
        asking = threading.Thread(target=self._ask, args=(recorder, caches, ended), daemon=True)
        asking.start()
        watch = ProcessWatch(recorder.mark, computes=self._runtime.device == "cpu")
        for _ in tokens:
            _record(watch, recorder)
        ended.set()
        asking.join()
        return recorder.token_times

    def _ask(self, recorder: Recorder, caches: Sequence[object], ended: threading.Event) -> None:
        while not ended.wait(ASK_S):
            self._figures(recorder, caches)

    def _tokens(
        self, caches: list[Any], ids: list[int], new: int, mark: Callable[[Cause], None] = lambda _: None
    ) -> Iterator[int]:
        """Compute all of ``ids`` but the last; return the tokens that follow, not computed yet."""
        from tokamac.engine.schedule.decoding import Lane, decode_alone

        held = self._prefill(caches, ids)
        return decode_alone(
            self._runtime.model, Lane(caches, held, ids[-1], _greedy(), new, note=mark), ahead=self._runtime.ahead
        )

    def _prefill(self, caches: list[Any], ids: list[int]) -> list[int]:
        from tokamac.engine.generation import Generation

        run = Generation(self._runtime.model, caches, [])
        for _ in run.prefill(ids[:-1], self._runtime.prefill_chunk):
            pass
        return run.cached_ids


def _record(watch: ProcessWatch, recorder: Recorder) -> None:
    """Do what a reply does as a token arrives."""
    watch.look()
    recorder.token()
    watch.waited_s += 1e-6


def _greedy() -> "Sampler":
    from tokamac.engine.sampling import Sampler

    return Sampler(Sampling(temperature=0).resolved(Sampling()), [])


# Section: what measuring a reply while it is written costs it.


def measure_live_cost(plan: Plan) -> Section:
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


# Section: the same checkpoint through mlx-lm.

PROMPTS = (64, 512, 2048)
# For one prompt length, both sides and all rounds, unless the run is a patient one: mlx-lm may take minutes for the
# longest.
BUDGET_S = 60.0


def measure_peer(plan: Plan) -> Section:
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
