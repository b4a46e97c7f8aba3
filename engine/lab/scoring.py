"""Scores texts: log-probabilities, perplexity, and KV settings compared. On the engine's thread."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from .. import files
from ..errors import ContextError, MemoryLimitError, OptionError, computing
from ..generation import Generation
from ..kv.plan import CachePlan, plan_caches
from ..metrics import decode_rate
from ..model.head import asking_for_logits
from ..options import KVBits, KVSpec, Sampling
from ..perf import memory
from ..perf.footprint import override
from ..perf.peak_memory import predict_peak
from ..prompt_cache.memory import CacheStore
from ..runner import Runner
from ..runtime import Runtime
from ..sampling import Sampler
from ..schedule.decoding import Lane, decode_alone
from ..text.tokenizer import opening

if TYPE_CHECKING:
    import mlx.core as mx

# KL      Σ p (ln p − ln q) over the vocabulary, in nats, mean over positions: p 16-bit cache, q the setting's
# top-1   share of positions with the same likeliest token


# Mean KL in nats up to which a cache is good enough. Storing the weights of Llama 3 8B in some 6 bits moves its
# distribution by 0.0055, in some 5 bits by 0.0108 (https://github.com/ggml-org/llama.cpp/pull/6936): a 4-bit model has
# paid more already.
MOST_KL = 0.01

# Share of matching top tokens from which a cache is good enough. Where the two likeliest are almost even, which one
# leads says little; on a text of 1,500 tokens the share is known to about half a per cent.
LEAST_TOP1 = 0.95

# A cache is faster when it decodes at this multiple of another's rate. Less may be noise, and is not worth more memory.
FASTER = 1.1

# Memory is no issue while the 16-bit cache of a whole context takes at most this share of what the weights leave.
SMALL_SHARE = 0.1

# exact: 16 bits, as memory is no issue and nothing is faster. smallest: of those good enough. faster: than a smaller
# one that is good enough. alone: no packed one is good enough.
Why = Literal["exact", "smallest", "faster", "alone"]


@dataclass(frozen=True, slots=True)
class KVDivergence:
    """Difference from the 16-bit cache. kl_nats: None if not finite. top1: 0 to 1."""

    kl_nats: float | None
    top1: float
    positions: int

    @property
    def good(self) -> bool:
        return self.kl_nats is not None and self.kl_nats <= MOST_KL and self.top1 >= LEAST_TOP1


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode rate in tokens per second at ``depth`` tokens."""

    depth: int
    tps: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One KV setting on one model.

    context_bytes: at its full context. refused: why it can't; all else is empty then. notes: what differs.
    """

    key_bits: int
    value_bits: int
    bytes_per_token: int | None = None
    context_bytes: int | None = None
    quality: KVDivergence | None = None
    decode: tuple[Speed, ...] = ()
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return self.key_bits == self.value_bits == 16

    @property
    def bits(self) -> str:
        """What ``--kv-bits`` takes: "8", or "8,4"."""
        return str(self.key_bits) if self.key_bits == self.value_bits else f"{self.key_bits},{self.value_bits}"

    @property
    def deep_tps(self) -> float | None:
        """The decode rate at the greatest depth."""
        return self.decode[-1].tps if self.decode else None


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """Progress in tokens. bits: the current setting, "" while all read the text."""

    bits: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Advice:
    pick: Trial
    why: Why
    smallest: Trial


@dataclass(slots=True)
class Tally:
    kl: float = 0.0
    same: int = 0
    positions: int = 0

    def add(self, kl: Sequence[float], same: Sequence[bool]) -> None:
        self.kl += math.fsum(kl)
        self.same += sum(same)
        self.positions += len(kl)

    def quality(self) -> KVDivergence:
        mean = self.kl / self.positions
        return KVDivergence(mean if math.isfinite(mean) else None, self.same / self.positions, self.positions)


def differences(reference: "mx.array", other: "mx.array") -> tuple["mx.array", "mx.array"]:
    import mlx.core as mx

    p = mx.exp(reference)
    terms = mx.where(p > 0, p * (reference - other), 0)  # a token ruled out by the reference adds nothing
    kl = mx.maximum(mx.sum(terms, axis=-1), 0)  # rounding alone makes it negative
    return kl, mx.argmax(reference, axis=-1) == mx.argmax(other, axis=-1)


def mean_with_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values or not all(math.isfinite(value) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def exponential(mean: float | None, error: float | None) -> tuple[float | None, float | None]:
    if mean is None or mean > 700:
        return None, None
    return math.exp(mean), None if error is None else math.exp(mean) * error


def fit_depths(depths: Iterable[int], room: int | None) -> tuple[int, ...]:
    return tuple(sorted({max(1, depth if room is None else min(depth, room)) for depth in depths}))


def recommend(trials: Sequence[Trial], room_bytes: int | None) -> Advice:
    """Choose among ``trials``, one of them exact.

    Acceptable: within MOST_KL and LEAST_TOP1, and no other faster by FASTER at the greatest depth. Then 16 bits if its
    full context takes at most SMALL_SHARE of ``room_bytes`` (None is unknown); else the smallest, ties to more bits.
    """
    good = [trial for trial in trials if trial.refused is None and trial.quality is not None and trial.quality.good]
    fastest = max((trial.deep_tps for trial in good if trial.deep_tps is not None), default=0.0)
    quick = [trial for trial in good if trial.deep_tps is None or fastest < FASTER * trial.deep_tps]
    exact = next((trial for trial in quick if trial.exact), None)
    smallest = min(good, key=_size)
    if len(good) == 1:
        return Advice(smallest, "alone", smallest)
    needed = None if exact is None else exact.context_bytes
    if exact is not None and needed is not None and room_bytes is not None and needed <= SMALL_SHARE * room_bytes:
        return Advice(exact, "exact", smallest)
    pick = min(quick, key=_size)
    return Advice(pick, "smallest" if pick is smallest else "faster", smallest)


def _size(trial: Trial) -> tuple[float, ...]:
    kl = trial.quality.kl_nats if trial.quality else None
    return tuple(math.inf if value is None else value for value in (trial.bytes_per_token, kl))


# Perplexity: exp of the mean −ln p. Windows advance by ``stride``; only tokens not seen before count, each
# with at least window − stride tokens of context (except in the first window). Settings read the text side by
# side, so only one chunk's log-probabilities are held, then decode one after another.


CHUNK = 256  # tokens compared at once, at most: two of a chunk's log-probabilities of 150,000 words take 300 MB
LOGPROBS_CHUNK = 2048  # tokens scored at once by default
WINDOW = 2048  # tokens of a window by default, where the context holds as many
FLOAT32 = 4

STEPS = 24  # tokens of one timed run: 23 gaps
ROUNDS = 3  # runs at each depth, whose median counts: the first one warms up, and one may meet a busy machine
TIMED_TOKENS = STEPS * ROUNDS  # tokens that a depth needs after it


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a text, with its standard error.

    Attributes:
        nats: Mean of −ln p. None if not finite, or for the error of a single token.
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
    done: int
    total: int


def log_probabilities(model: Any, caches: list[Any], ids: Sequence[int]) -> mx.array:
    with asking_for_logits():
        logits = model(mx.array([list(ids)]), cache=caches)[0].astype(mx.float32)  # (1, T) ids → (T, V)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found, [cache.state for cache in caches])
    return found


def logprobs(runner: Runner, ids: list[int], chunk: int | None) -> mx.array:
    """ids (n,) → (n, V) float32. Raises OptionError for unknown ids, ContextError and MemoryLimitError for too many."""
    prompting = runner.prompting()
    prompting.check_ids(ids)
    size = min(chunk or LOGPROBS_CHUNK, len(ids))
    check_scored(runner.runtime, runner.store, len(ids), size, runner.spec.vocabulary_size)
    with computing():
        return score(runner.runtime, ids, size, keep=prompting.pinned([]))


def score(runtime: Runtime, ids: list[int], chunk: int, *, keep: int | None) -> mx.array:
    """Return (n, V) float32 log-probabilities after each of ``ids``, by chunks. Evaluated."""
    caches = runtime.new_caches(keep)
    rows = [log_probabilities(runtime.model, caches, ids[begin : begin + chunk]) for begin in range(0, len(ids), chunk)]
    result = mx.concatenate(rows, axis=0)
    mx.eval(result)
    return result


def check_scored(
    runtime: Runtime, store: CacheStore, tokens: int, chunk: int, vocabulary: int, *, rows: int | None = None
) -> None:
    """Raise ContextError or MemoryLimitError where ``tokens`` or their rows don't fit."""
    longest = runtime.longest
    if longest is not None and tokens > longest:
        raise ContextError(
            f"the text has {tokens:,} tokens, but {runtime.what_bounds()} {longest:,}", "Score fewer at a time."
        )
    budget = runtime.memory_budget
    row_bytes = FLOAT32 * vocabulary * (_rows_at_once(tokens, chunk) if rows is None else rows)
    least = predict_peak(runtime.shape, held=0, new=tokens, chunk=chunk, prompt_cache=store.nbytes).total + row_bytes
    if budget is not None and least > budget:
        needed, most = files.sizes(least, budget)
        raise MemoryLimitError(
            f"the log-probabilities of {tokens:,} tokens need {needed} of memory ({files.size(row_bytes)} of it for the rows of "
            f"{vocabulary:,} numbers), and {most} may be used",
            f"Score fewer tokens at a time.{override(least, memory.device_total())}",
        )


def _rows_at_once(tokens: int, chunk: int) -> int:
    joined = tokens if tokens <= chunk else 2 * tokens
    return max(joined, tokens + min(chunk, tokens))


def windows(tokens: int, room: int, stride: int) -> Iterator[tuple[int, int, int]]:
    begin = done = 0
    while done < tokens:
        end = min(begin + room, tokens)
        yield begin, end, done
        done, begin = end, begin + stride


def check_windows(window: int, stride: int | None, before: int) -> int:
    """Return the stride or its default. Raises OptionError."""
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


def perplexity_of(
    runner: Runner, given: str | list[int], window: int | None, stride: int | None, *, cancelled: Callable[[], bool]
) -> Generator[PerplexityProgress | Perplexity, None, None]:
    """Yield progress, and the perplexity of a text or of ids."""
    runtime, prompting = runner.runtime, runner.prompting()
    tokenizer, longest = runtime.tokenizer, runtime.longest
    before, ids = opening(tokenizer), tokenizer.encode(given) if isinstance(given, str) else given
    if not isinstance(given, str):  # as they are: with what stands before a text, or without
        before = before if given[: len(before)] == before else []
        ids = given[len(before) :]
    prompting.check_ids(ids)
    if len(before) + len(ids) < 2:
        raise OptionError("a text of fewer than two tokens has no perplexity", "Give a longer one.")
    size = min(WINDOW, longest or WINDOW) if window is None else window
    step = check_windows(size, stride, len(before))
    most = min(size, len(before) + len(ids))
    check_scored(runtime, runner.store, most, min(CHUNK, most), runner.spec.vocabulary_size, rows=2 * CHUNK)
    with computing():
        yield from perplexity(
            runtime, ids, before, window=size, stride=step, keep=prompting.pinned([]), cancelled=cancelled
        )


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
    runner: Runner,
    ids: list[int],
    *,
    bits: Sequence[KVBits],
    base: KVSpec,
    depths: Sequence[int],
    cancelled: Callable[[], bool],
) -> Generator[TrialProgress | Trial, None, None]:
    """Yield progress and a Trial for each of ``bits`` (keys, values) on ``base``; 16 bits always first.

    Raises OptionError for settings the model can't use, ContextError for a text beyond its context.
    """
    runtime = runner.runtime
    runner.prompting().check_ids(ids)
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
    sampler = Sampler(Sampling(temperature=0).resolved(Sampling()), [])
    times: list[float] = []
    lane = Lane(generation.caches, generation.cached_ids, last, sampler, STEPS)
    for token in decode_alone(runtime.model, lane, ahead=runtime.ahead):
        times.append(time.perf_counter())
        last = token
        if cancelled():
            break
    return times, last
