"""What is measured: on which model, how often, in which processes."""

import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tests.bench.texts import PROSE, QUESTIONS
from tests.engine.inside import runner_of, store_of, worker_of
from tokamac.engine import metrics
from tokamac.engine.events import Finished
from tokamac.engine.options import PARALLEL, KVSpec, PromptCacheSpec, Sampling

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime


# An object in a process of its own, called from here. So memory is measured apart, and no library meets another.

END_S = 20.0


class RemoteError(Exception):
    """The other process failed; the message is its traceback."""


class Remote:
    """``Remote(Lab, "guide").call("decode", 8)`` makes ``Lab("guide")`` over there and returns ``lab.decode(8)``.

    Arguments and results must be picklable. A ``close`` method of the object is called at the end.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process is inherited
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method over there and wait for its result."""
        self._pipe.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(END_S)
            self._process.kill()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            self._process.join(END_S)
            raise RemoteError(f"the process ended with status {self._process.exitcode}") from None
        if failed:
            raise RemoteError(value)
        return value


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    served = _try(pipe, make, arguments, answer=False)
    while served is not None and (request := pipe.recv()) is not None:
        method, given = request
        _try(pipe, getattr(served, method), given, answer=True)
    if served is not None and hasattr(served, "close"):
        served.close()


def _try(pipe: Connection, work: Callable[..., object], arguments: tuple[object, ...], *, answer: bool) -> object:
    try:
        result = work(*arguments)
    except Exception:
        pipe.send((True, traceback.format_exc()))
        return None
    pipe.send((False, result if answer else None))
    return result


# The sides that are compared, each in a process of its own (see remote): the engine, a bare loop on its model, mlx-
# lm.


@dataclass(frozen=True, slots=True)
class Timing:
    """One reply. Rates in tokens a second, None where there is nothing to divide; peak_bytes: of MLX's arrays."""

    tokens: int
    prefill_tps: float | None
    decode_tps: float | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes after a turn, or at a moment: all that MLX holds, what of it is keys and values, and the tokens in the context."""

    active: int
    kv: int
    tokens: int


class EngineServer:
    """A loaded engine."""

    def __init__(
        self,
        model: str,
        kv: KVSpec | None = None,
        *,
        endless: bool = True,
        reuse: bool = False,
        parallel: int = PARALLEL,
    ) -> None:
        from tokamac.engine import Engine

        # Of steps: what guesses bring is a section of its own.
        cache = PromptCacheSpec() if reuse else None
        self.engine: Engine = Engine.load(
            model, kv=kv or KVSpec(), prompt_cache=cache, parallel=parallel, speculation=None
        )
        if endless:
            self.engine.tokenizer.eos_ids = frozenset()

    def describe(self) -> dict[str, str]:
        """Return what the model is, where, and what computes it."""
        spec, runtime = self.engine.spec, self._runtime
        bits = "unknown" if spec.bits_per_weight is None else f"{spec.bits_per_weight:.2f}"
        described = (
            f"{spec.name}: {spec.architecture}, {spec.layers} layers, {spec.parameters / 1e6:.1f} M parameters, "
            f"{bits} bits per weight, {spec.weight_bytes / 1e6:.2f} MB"
        )
        return {"folder": str(spec.path), "device": runtime.device, "described": described}

    def prompt(self, length: int, number: int) -> list[int]:
        """Return ``length`` token ids of prose, different from the first on for every ``number``."""
        ids = self.engine.tokenizer.encode(PROSE)
        begin = (7 * number) % len(ids)
        return list(islice(cycle(ids[begin:] + ids[:begin]), length))

    def reply(self, ids: list[int], new: int) -> Timing:
        """Generate ``new`` tokens greedily, as a user of the engine does."""
        for event in self.engine.generate(ids, Sampling(temperature=0, max_tokens=new)):
            if isinstance(event, Finished):
                got = event.metrics
                return Timing(got.generated_tokens, got.prefill_tps, got.decode_tps, got.peak_memory_bytes or 0)
        raise AssertionError("a reply ends with Finished")

    def bare(self, ids: list[int], new: int) -> Timing:
        """Do the same in the fewest lines, on the engine's thread, its model, and a fresh cache of its plan."""
        return worker_of(self.engine).call(lambda: bare_loop(self._runtime, ids, new))

    def chat(self, turns: int, tokens: int) -> list[Held]:
        """Chat, and return what is held after each turn."""
        chat, held = self.engine.chat(), []
        store = store_of(self.engine)
        for question in islice(cycle(QUESTIONS), turns):
            *_, last = chat.send(question, Sampling(temperature=0, max_tokens=tokens))
            assert isinstance(last, Finished)
            context = last.metrics.prompt_tokens + last.metrics.generated_tokens
            worker_of(self.engine).call(lambda: store.flush(20.0))  # what is on its way to the disk is a copy
            kept = worker_of(self.engine).call(lambda: store.nbytes)
            held.append(Held(self.engine.memory().active, kept, context))
        return held

    def long(self, ids: list[int], most: int, seconds: float) -> tuple[list[Held], int]:
        """Generate up to ``most`` tokens, for so many seconds at most; return what is held (four a second) and how many came."""
        import mlx.core as mx

        began, due, held, generated = time.monotonic(), 0.0, [], 0
        for event in self.engine.generate(ids, Sampling(temperature=0, max_tokens=most)):
            spent = time.monotonic() - began
            if spent > due and (live := self.engine.live()) is not None and live.metrics.generated_tokens > 1:
                due = spent + 0.25
                held.append(Held(mx.get_active_memory(), live.metrics.kv_bytes or 0, live.metrics.generated_tokens))
            if spent > seconds:
                self.engine.cancel()
            if isinstance(event, Finished):
                generated = event.metrics.generated_tokens
        return held, generated

    def resident_peak(self) -> int:
        """Return the most memory this process ever had, loading included."""
        return resident_peak()

    def close(self) -> None:
        """Free the model."""
        self.engine.close()

    @property
    def _runtime(self) -> "Runtime":
        return runner_of(self.engine).runtime


class PeerServer:
    """The same checkpoint in mlx-lm, as ``mlx_lm.load`` loads it."""

    def __init__(self, folder: str) -> None:
        from mlx_lm import load

        self._model, self._tokenizer, *_ = load(folder)
        self._tokenizer.eos_token_ids = set()

    def reply(self, ids: list[int], new: int) -> Timing:
        """Generate ``new`` tokens greedily, as its users do."""
        import mlx.core as mx
        from mlx_lm import stream_generate

        mx.reset_peak_memory()
        began = time.perf_counter()
        responses: Iterator[Any] = stream_generate(self._model, self._tokenizer, mx.array(ids), max_tokens=new)
        times = [time.perf_counter() for _ in responses]
        prefill = metrics.rate(len(ids), times[0] - began)
        return Timing(len(times), prefill, metrics.decode_rate(times), mx.get_peak_memory())

    def resident_peak(self) -> int:
        """Return the most memory this process ever had, loading included."""
        return resident_peak()


def bare_loop(runtime: "Runtime", ids: list[int], new: int) -> Timing:
    """Prefill, then: forward, argmax, ``async_eval``, ``item``; as many steps ahead as the engine goes."""
    import mlx.core as mx

    caches = runtime.new_caches(None)
    mx.reset_peak_memory()
    for begin in range(0, len(ids) - 1, runtime.prefill_chunk):
        runtime.model(mx.array([ids[begin : min(begin + runtime.prefill_chunk, len(ids) - 1)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    times = decode_times(runtime.model, caches, ids[-1], new, ahead=runtime.ahead)
    return Timing(len(times), None, metrics.decode_rate(times), mx.get_peak_memory())


def decode_times(model: Any, caches: list[Any], last: int, new: int, *, ahead: bool) -> list[float]:
    """Decode ``new`` tokens after ``last`` greedily; return when each reached the host. The caches then hold ``new`` more."""
    import mlx.core as mx

    def step(token: mx.array) -> mx.array:
        chosen = mx.argmax(model(token[None], cache=caches)[:, -1, :], axis=-1)
        mx.async_eval(chosen)
        return chosen

    times = []
    pending = step(mx.array([last]))
    for count in range(1, new + 1):
        following = step(pending) if ahead and count < new else None
        pending.item()
        times.append(time.perf_counter())
        if count < new:
            pending = step(pending) if following is None else following
    return times


def resident_peak() -> int:
    """Return the most resident memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss counts the parent's memory before exec there
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# What is measured: on which model, how often.


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Plan:
    """model: as the user names it. folder: where it lies. device: what MLX computes on. quick: small counts, to try the script.

    patient: every round of the slowest peer, however long it takes.
    """

    model: str
    folder: str
    device: str
    described: str
    quick: bool
    patient: bool

    @property
    def rounds(self) -> int:
        """Runs that a median is taken of."""
        return 2 if self.quick else 5

    @property
    def many_rounds(self) -> int:
        """Runs where a run is short, so that other work on the machine weighs much in it."""
        return 3 * self.rounds

    @property
    def most_rounds(self) -> int:
        """Rounds where the ratio is to be near one: on a machine whose single ratios spread by a quarter, the median is then known
        to some hundredths."""
        return 9 * self.rounds

    def count(self, full: int, quick: int) -> int:
        """Return how many of something."""
        return quick if self.quick else full


def make_plan(model: str, *, quick: bool, patient: bool) -> Plan:
    """Load the model once, to know it."""
    with Remote(EngineServer, model) as server:
        known: dict[str, Any] = server.call("describe")
    return Plan(model, known["folder"], known["device"], known["described"], quick, patient)
