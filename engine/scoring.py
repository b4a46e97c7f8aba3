"""What a loaded model thinks of a text: log-probabilities row by row, perplexity window by window, and what packing a cache costs.

All of it goes through the engine's own prefill and caches, on the engine's thread.

Perplexity is exp of the mean of −ln p(the token that comes). Each window begins with what the tokenizer puts before every text; the
next one begins ``stride`` tokens further on, and only its tokens that no window before has seen are counted. So each token is
counted once, with at least window − stride tokens before it, but for those of the first window. A stride of the whole window is
quickest and judges too harshly; a small one costs window ÷ stride as much.

KV settings are compared on one loaded model. All of them read the text side by side, chunk by chunk: so only a chunk's
log-probabilities are held, and the reference is computed once. Then each setting decodes on caches of its own, one after another.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from . import units
from .errors import ContextError, MemoryLimitError, OptionError
from .generation import Generation
from .kv import CachePlan, plan_caches
from .kv.divergence import (
    KVDivergence,
    Speed,
    Tally,
    Trial,
    TrialProgress,
    differences,
    exponential,
    fit_depths,
    mean_with_error,
)
from .metrics import decode_rate
from .model.head import asking_for_logits
from .options import KVBits, KVSpec, Sampling
from .perf import memory
from .perf.mitigation import override
from .perf.peak_memory import predict_peak
from .prompt_cache.memory import CacheStore
from .runtime import Runtime
from .sampling import Sampler
from .schedule.decoding import Lane, decode_alone

CHUNK = 256
"""Tokens compared at once, at most: two of a chunk's log-probabilities of 150,000 words take 300 MB."""
LOGPROBS_CHUNK = 2048
"""Tokens scored at once by default."""
WINDOW = 2048
"""Tokens of a window by default, where the context holds as many."""
FLOAT32 = 4

STEPS = 24
"""Tokens of one timed run: 23 gaps."""
ROUNDS = 3
"""Runs at each depth, whose median counts: the first one warms up, and one may meet a busy machine."""
TIMED_TOKENS = STEPS * ROUNDS
"""Tokens that a depth needs after it."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of a text: ``value`` with its standard error, over ``tokens`` predicted tokens in ``windows`` windows.

    nats: the mean of −ln p. None where that is not finite, or for the error of a single token.
    """

    value: float | None
    se: float | None
    nats: float | None
    tokens: int
    windows: int
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class PerplexityProgress:
    """Tokens read so far, and in all."""

    done: int
    total: int


def log_probabilities(model: Any, caches: list[Any], ids: Sequence[int]) -> mx.array:
    """Return (T, V) float32: log-probabilities after each of ``ids`` (T,), which are added to ``caches``. Evaluated."""
    with asking_for_logits():
        logits = model(mx.array([list(ids)]), cache=caches)[0].astype(mx.float32)  # (1, T) ids → (T, V)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found, [cache.state for cache in caches])
    return found


def score(runtime: Runtime, ids: list[int], chunk: int, *, keep: int | None) -> mx.array:
    """Return (n, V) float32 log-probabilities of what follows each of ``ids`` (n,), ``chunk`` ids at a time. Evaluated."""
    caches = runtime.new_caches(keep)
    rows = [log_probabilities(runtime.model, caches, ids[begin : begin + chunk]) for begin in range(0, len(ids), chunk)]
    result = mx.concatenate(rows, axis=0)
    mx.eval(result)
    return result


def check_scored(
    runtime: Runtime, store: CacheStore, tokens: int, chunk: int, vocabulary: int, *, rows: int | None = None
) -> None:
    """Raise ContextError where ``tokens`` do not fit the context, MemoryLimitError where their rows do not fit memory.

    rows: held at once; None is all of them.
    """
    longest = runtime.longest
    if longest is not None and tokens > longest:
        raise ContextError(
            f"the text has {tokens:,} tokens, but {runtime.what_bounds()} {longest:,}", "Score fewer at a time."
        )
    budget = runtime.memory_budget
    row_bytes = FLOAT32 * vocabulary * (_rows_at_once(tokens, chunk) if rows is None else rows)
    least = predict_peak(runtime.shape, held=0, new=tokens, chunk=chunk, prompt_cache=store.nbytes).total + row_bytes
    if budget is not None and least > budget:
        needed, most = units.sizes(least, budget)
        raise MemoryLimitError(
            f"the log-probabilities of {tokens:,} tokens need {needed} of memory ({units.size(row_bytes)} of it for the rows of "
            f"{vocabulary:,} numbers), and {most} may be used",
            f"Score fewer tokens at a time.{override(least, memory.device_total())}",
        )


def _rows_at_once(tokens: int, chunk: int) -> int:
    """Return the rows held at the peak: a chunk's logits beside its rows and those before, or all rows while they are joined."""
    joined = tokens if tokens <= chunk else 2 * tokens
    return max(joined, tokens + min(chunk, tokens))


def windows(tokens: int, room: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each window begins and ends, and from which token on it counts. room: tokens of the text in a window."""
    begin = done = 0
    while done < tokens:
        end = min(begin + room, tokens)
        yield begin, end, done
        done, begin = end, begin + stride


def check_windows(window: int, stride: int | None, before: int) -> int:
    """Return the stride or its default. Raises OptionError for one that leaves tokens out, or a window that holds none."""
    room = window - before
    if room < 2:
        raise OptionError(f"a window of {window} tokens is too small", f"Use {before + 2} or more.")
    chosen = max(1, room // 2) if stride is None else stride
    if not 1 <= chosen <= room:
        raise OptionError(
            f"a stride of {chosen} does not go with windows of {window} tokens",
            f"Use 1 to {room}, so that no token is left out.",
        )
    return chosen


def perplexity(
    runtime: Runtime,
    ids: list[int],
    before: list[int],
    *,
    window: int,
    stride: int,
    keep: int | None,
    cancelled: Callable[[], bool],
) -> Generator[PerplexityProgress | Perplexity, None, None]:
    """Yield progress, and finally the perplexity of ``ids``; each window begins with ``before``."""
    surprises: list[float] = []
    number = 0
    for begin, end, done in windows(len(ids), window - len(before), stride):
        number += 1
        first = len(before) + done - begin
        surprises += _surprises(runtime, before + ids[begin:end], max(first, 1), keep)
        mx.clear_cache()
        yield PerplexityProgress(end, len(ids))
        if cancelled():
            return
    yield _summed(surprises, number, window, stride)


def _surprises(runtime: Runtime, ids: list[int], first: int, keep: int | None) -> list[float]:
    """Return −ln p of the tokens from position ``first`` on, in nats; only a chunk's log-probabilities are held at once."""
    caches, found = runtime.new_caches(keep), list[float]()
    for start in range(0, len(ids) - 1, CHUNK):
        part = ids[start : min(start + CHUNK, len(ids) - 1)]
        rows = log_probabilities(runtime.model, caches, part)
        skipped = max(0, first - 1 - start)  # row i is of what follows token start + i
        if skipped < len(part):
            targets = mx.array(ids[start + skipped + 1 : start + len(part) + 1])
            chosen = mx.take_along_axis(rows[skipped:], targets[:, None], axis=-1)[:, 0]
            values: list[float] = (-chosen).tolist()  # type: ignore[assignment]  # of the one axis
            found += values
    return found


def _summed(surprises: list[float], number: int, window: int, stride: int) -> Perplexity:
    mean, error = mean_with_error(surprises)
    value, value_error = exponential(mean, error)
    return Perplexity(value, value_error, None if value is None else mean, len(surprises), number, window, stride)


@dataclass(slots=True)
class _Setting:
    """A setting the model can take, and what was measured of it."""

    spec: KVSpec
    plan: CachePlan
    tally: Tally = field(default_factory=Tally)
    decode: list[Speed] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not self.spec.quantized

    def trial(self, context_length: int | None) -> Trial:
        positions = self.tally.positions
        return Trial(
            key_bits=self.spec.key_bits,
            value_bits=self.spec.value_bits,
            bytes_per_token=self.plan.bytes_per_token,
            context_bytes=None if context_length is None else self.plan.bytes_at(context_length),
            quality=KVDivergence(0.0, 1.0, positions) if self.exact else self.tally.quality(),
            decode=tuple(self.decode),
            notes=self.plan.notes,
        )


def compare(
    runtime: Runtime,
    ids: list[int],
    *,
    bits: Sequence[KVBits],
    base: KVSpec,
    depths: Sequence[int],
    cancelled: Callable[[], bool],
) -> Iterator[TrialProgress | Trial]:
    """Yield progress, and a Trial for each of ``bits`` (keys, values) on ``base``; 16 bits come first, asked for or not.

    Args:
        runtime: The loaded model.
        ids: The text, which is repeated where a depth is greater.
        bits: The settings to try.
        base: All other KV settings.
        depths: Contexts at which to time decoding.
        cancelled: Ends it early once true.

    Raises:
        OptionError: The model can't take ``base``, or none of its caches can be packed.
        ContextError: The model's context does not hold the text.
    """
    longest = runtime.context_length
    if longest is not None and len(ids) > longest:
        raise ContextError(
            f"the text has {len(ids):,} tokens, but the model's context is {longest:,}", "Compare on a shorter one."
        )
    settings, refused = _plan(runtime, bits, base)
    yield from refused
    yield from _read(runtime, ids, settings, cancelled)
    for setting in settings:
        if cancelled():
            return
        room = None if longest is None else longest - TIMED_TOKENS
        yield from _decode(runtime, ids, setting, fit_depths(depths, room), cancelled)
        if cancelled():
            return
        yield setting.trial(longest)


def _plan(runtime: Runtime, bits: Sequence[KVBits], base: KVSpec) -> tuple[list[_Setting], list[Trial]]:
    """Return the settings the model can take, 16 bits first, and those it refuses, with reasons."""
    exact = replace(base, key_bits=16, value_bits=16)
    plan = plan_caches(runtime.model, runtime.config, exact)
    if all(layer.ours is None for layer in plan.layers):
        reasons = "; ".join(sorted({layer.note for layer in plan.layers}))
        raise OptionError(
            f"there is nothing to compare: no cache of this model can be packed ({reasons})",
            "It needs 16-bit keys and values.",
        )
    settings, refused = [_Setting(exact, plan)], []
    for key_bits, value_bits in dict.fromkeys(bits):
        if (key_bits, value_bits) == (16, 16):
            continue
        spec = replace(base, key_bits=key_bits, value_bits=value_bits)
        try:
            settings.append(_Setting(spec, plan_caches(runtime.model, runtime.config, spec)))
        except OptionError as error:
            refused.append(Trial(key_bits, value_bits, refused=error.one_line()))
    return settings, refused


def _read(
    runtime: Runtime, ids: list[int], settings: list[_Setting], cancelled: Callable[[], bool]
) -> Iterator[TrialProgress]:
    """Read the text with all settings side by side, and add up how they differ from the first one, the reference."""
    caches = [setting.plan.make() for setting in settings]
    for begin in range(0, len(ids), CHUNK):
        part = ids[begin : begin + CHUNK]
        reference = log_probabilities(runtime.model, caches[0], part)
        settings[0].tally.positions += len(part)
        for setting, own in zip(settings[1:], caches[1:], strict=True):
            if cancelled():
                return
            kl, same = differences(reference, log_probabilities(runtime.model, own, part))
            setting.tally.add(kl.tolist(), same.tolist())  # type: ignore[arg-type]  # a list, of the one axis
        mx.clear_cache()
        yield TrialProgress("", begin + len(part), len(ids))


def _decode(
    runtime: Runtime, ids: list[int], setting: _Setting, depths: tuple[int, ...], cancelled: Callable[[], bool]
) -> Iterator[TrialProgress]:
    """Fill a cache depth by depth and time decoding at each; where the last depth's tokens have passed one, it is timed there."""
    text = itertools.cycle(ids)
    generation = Generation(runtime.model, setting.plan.make(), [])
    bits, total = setting.trial(None).bits, depths[-1] + TIMED_TOKENS
    for depth in depths:
        missing = max(0, depth - 1 - len(generation.cached_ids))  # the first step computes the last of them
        for _ in generation.prefill(list(itertools.islice(text, missing)), runtime.prefill_chunk):
            yield TrialProgress(bits, len(generation.cached_ids), total)
            if cancelled():
                return
        rates, token, at = [], next(text), len(generation.cached_ids) + 1
        for _ in range(ROUNDS):
            times, token = _timed(runtime, generation, token, cancelled)
            if cancelled():
                return
            rates.append(decode_rate(times))
            yield TrialProgress(bits, len(generation.cached_ids), total)
        known = [rate for rate in rates if rate is not None]
        setting.decode.append(Speed(at, statistics.median(known) if known else None))
    mx.clear_cache()


def _timed(
    runtime: Runtime, generation: Generation, last: int, cancelled: Callable[[], bool]
) -> tuple[list[float], int]:
    """Decode STEPS tokens greedily after ``last``; return when each reached the host (s), and the last one, not cached yet."""
    sampler = Sampler(Sampling(temperature=0).resolved(Sampling()), [])
    times: list[float] = []
    lane = Lane(generation.caches, generation.cached_ids, last, sampler, STEPS)
    for token in decode_alone(runtime.model, lane, ahead=runtime.ahead):
        times.append(time.perf_counter())
        last = token
        if cancelled():
            break
    return times, last
