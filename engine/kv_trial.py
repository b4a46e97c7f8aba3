"""Several KV settings on one loaded model: how far each moves the next-token distribution, and how fast it decodes.

The text is read once, chunk by chunk, by all settings side by side: so only a chunk's log-probabilities are held, and the
reference is computed once. Then each setting decodes on caches of its own, one after another, filled by the engine's prefill.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from tokamac.engine.errors import ContextError, OptionError
from tokamac.engine.generation import Run
from tokamac.engine.kv import CachePlan, plan_caches
from tokamac.engine.kv.quality import Quality, Speed, Tally, Trial, TrialProgress, differences, fit_depths
from tokamac.engine.limits.metrics import decode_rate
from tokamac.engine.options import KVSpec, Sampling
from tokamac.engine.runtime import Runtime
from tokamac.engine.sampling import Sampler

CHUNK = 256
"""Tokens compared at once, at most: two of a chunk's log-probabilities of 150,000 words take 300 MB."""

STEPS = 24
"""Tokens of one timed run: 23 gaps."""

ROUNDS = 3
"""Runs at each depth, whose median counts: the first one warms up, and one may meet a busy machine."""

TIMED_TOKENS = STEPS * ROUNDS
"""Tokens that a depth needs after it."""


@dataclass(slots=True)
class _Setting:
    """A setting the model can take, and what became known of it."""

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
            quality=Quality(0.0, 1.0, positions) if self.exact else self.tally.quality(),
            decode=tuple(self.decode),
            notes=self.plan.notes,
        )


def log_probabilities(model: Any, caches: list[Any], ids: Sequence[int]) -> mx.array:
    """Return (T, V) float32: what the model expects after each of ``ids`` (T,), which are added to ``caches``. Evaluated."""
    logits = model(mx.array([list(ids)]), cache=caches)[0].astype(mx.float32)  # (1, T) ids → (T, V)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found, [cache.state for cache in caches])
    return found


def compare(
    runtime: Runtime,
    config: dict[str, Any],
    ids: list[int],
    *,
    bits: Sequence[tuple[int, int]],
    base: KVSpec,
    depths: Sequence[int],
    cancelled: Callable[[], bool],
) -> Iterator[TrialProgress | Trial]:
    """Yield progress, and a Trial for each of ``bits`` (keys, values) on ``base``; 16 bits come first, asked for or not.

    ids: the text, which is repeated where a depth is greater. Ends early once ``cancelled`` says so.
    Raises OptionError for a ``base`` that the model can't take, and where none of its caches can be packed; ContextError for a text
    that the model's context does not hold.
    """
    longest = runtime.context_length
    if longest is not None and len(ids) > longest:
        raise ContextError(
            f"the text has {len(ids):,} tokens, but the model's context is {longest:,}", "Compare on fewer."
        )
    settings, refused = _plan(runtime, config, bits, base)
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


def _plan(
    runtime: Runtime, config: dict[str, Any], bits: Sequence[tuple[int, int]], base: KVSpec
) -> tuple[list[_Setting], list[Trial]]:
    """Return the settings the model can take, 16 bits first, and those that it refuses with its reasons."""
    exact = replace(base, key_bits=16, value_bits=16)
    plan = plan_caches(runtime.model, config, exact)
    if all(layer.ours is None for layer in plan.layers):
        reasons = "; ".join(sorted({layer.note for layer in plan.layers}))
        raise OptionError(f"there is nothing to compare: no cache of this model can be packed ({reasons})", "Leave it.")
    settings, refused = [_Setting(exact, plan)], []
    for key_bits, value_bits in dict.fromkeys(bits):
        if (key_bits, value_bits) == (16, 16):
            continue
        spec = replace(base, key_bits=key_bits, value_bits=value_bits)
        try:
            settings.append(_Setting(spec, plan_caches(runtime.model, config, spec)))
        except OptionError as error:
            refused.append(Trial(key_bits, value_bits, refused=error.one_line()))
    return settings, refused


def _read(
    runtime: Runtime, ids: list[int], settings: list[_Setting], cancelled: Callable[[], bool]
) -> Iterator[TrialProgress]:
    """Let every setting read the text beside the first one, the reference, and add up how they differ."""
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
    """Fill a cache depth by depth and time decoding at each. A depth that the last one's tokens have passed is measured there."""
    text = itertools.cycle(ids)
    run = Run(runtime.model, setting.plan.make(), [], ahead=runtime.ahead)
    bits, total = setting.trial(None).bits, depths[-1] + TIMED_TOKENS
    for depth in depths:
        missing = max(0, depth - 1 - len(run.held))  # the first step computes the last of them
        for _ in run.prefill(list(itertools.islice(text, missing)), runtime.prefill_chunk):
            yield TrialProgress(bits, len(run.held), total)
            if cancelled():
                return
        rates, token, at = [], next(text), len(run.held) + 1
        for _ in range(ROUNDS):
            times, token = _timed(run, token, cancelled)
            if cancelled():
                return
            rates.append(decode_rate(times))
            yield TrialProgress(bits, len(run.held), total)
        known = [rate for rate in rates if rate is not None]
        setting.decode.append(Speed(at, statistics.median(known) if known else None))
    mx.clear_cache()


def _timed(run: Run, last: int, cancelled: Callable[[], bool]) -> tuple[list[float], int]:
    """Decode STEPS tokens greedily after ``last``; return when each reached the host (s), and the final one, not held yet."""
    sampler = Sampler(Sampling(temperature=0).resolved(Sampling()), [])
    times: list[float] = []
    for token in run.decode(last, sampler, STEPS):
        times.append(time.perf_counter())
        last = token
        if cancelled():
            break
    return times, last
