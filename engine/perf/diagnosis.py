"""Why a reply took as long as it did, and what would help: a pure function of its metrics and of what the machine allows.

    wait     accepted → prefill begins: the queue, tokenizing, restoring the cache
    prefill  → the first token
    decode   → the last token

The longest of the three counts. What a phase waited for is told by the roofline, as far as its roofs are known:

    decode   the roof that it meets first, where it comes half as far or more; else neither, but the overhead of a step
    prefill  the roof that it meets first: memory below the ridge, arithmetic above it; neither, where one pass is far below both

A remedy is predicted as the reply itself was:

    saved = (predicted without the change − predicted with it) × min(1, measured ÷ predicted without it)

So what is wrong in both predictions cancels, a reply that was quicker than predicted is promised no more than its share, and
nothing is promised that the machine's bandwidth or arithmetic forbids. Where the latency is unknown nothing is promised at all.

The terms are the arithmetic behind a verdict, number by number. A formula names other terms in braces, ``{bandwidth} ÷ {step}``;
whoever shows it puts their names there, or their values.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tokamac.engine.metrics import Metrics, Throttle, rate, share
from tokamac.engine.options import group_for, token_bytes
from tokamac.engine.perf.hardware import Chip, Source
from tokamac.engine.perf.roofline import (
    Fitted,
    Host,
    HostLimited,
    LatencyModel,
    Phase,
    calls_of,
    decode_phase,
    peak_tflops,
    prefill_phase,
    ridge_point,
)
from tokamac.engine.perf.workload import KVUse, Workload

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import LayerPlan


KV_BITS = 8
"""Bits that keep a reply the same to the eye (bench --kv-quality measures it for a model)."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What could be otherwise.

    packed_kv: what the caches would hold with keys and values of KV_BITS; None where none of them can be packed, or all are.
    bits_per_weight: stored; None where it is unknown, or where a step reads no fewer bytes for it (weights that were unpacked).
    keeps_prompts: the prompt cache is on. chunk: prompt tokens computed at once.
    throttles: what the system slowed the chip down for meanwhile.
    """

    packed_kv: tuple[KVUse, ...] | None
    bits_per_weight: float | None
    keeps_prompts: bool
    chunk: int
    throttles: tuple[Throttle, ...] = ()


@dataclass(frozen=True, slots=True)
class Predicted:
    """A reply as it was predicted: its prefill, and the step at its middle, after ``context`` tokens.

    chunk: prompt tokens computed at once.
    """

    prefill: Phase
    decode: Phase
    context: int
    chunk: int


def packed_layers(
    layers: "Iterable[LayerPlan]", group_size: int, now: tuple[KVUse, ...] | None = None
) -> tuple[KVUse, ...] | None:
    """Return what the caches of a plan would hold with keys and values of KV_BITS; None where that changes none of them.

    now: the caches as a step reads them now, with their heads.
    """
    plans = tuple(layers)
    now = now or tuple(KVUse(plan.bytes_per_token, plan.limit, plan.fixed_bytes) for plan in plans)
    packed = tuple(_packed(plan, layer, group_size) for plan, layer in zip(plans, now, strict=True))
    return None if packed == now else packed


def _packed(plan: "LayerPlan", layer: KVUse, group_size: int) -> KVUse:
    """A layer packed; as it is where its caches stay the model's, or are packed already."""
    if plan.ours is None or min(plan.key_bits, plan.value_bits) < 16:
        return layer
    seen, total = plan.ours.seen, 0
    for dim in (seen.key_dim, seen.value_dim):
        if (group := group_for(dim, group_size)) is None:
            return layer
        total += token_bytes(seen.heads, dim, KV_BITS, group, seen.scale_bytes)
    return replace(layer, bytes_per_token=total)


RemedyName = Literal[
    "packed keys and values", "packed weights", "prompt cache", "shorter context", "quiet machine", "full power", "cool chip",
]  # fmt: skip

MOST = 3
WORTH_S = 0.1
"""Seconds below which a change is not worth a sentence."""
WORTH_SHARE = 0.03
"""Share of the reply below which it is not either."""

WEIGHT_BITS, WEIGHT_GROUP = 4, 64
PACKED_BITS = WEIGHT_BITS + 32 / WEIGHT_GROUP
"""Bits a weight of ``tokamac convert``'s default: a scale and a bias of 16 bits in each group."""

LONG = 512
"""Prompt tokens below which nobody would shorten it."""

BEHIND = 0.8
"""Share of the expected speed below which something holds the machine up; the errors of what is expected are smaller
(assets/roofline.json)."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change. gain_s: predicted seconds less for a reply alike. ``to``: bits, or tokens of prompt, where that says something.

    before_tps, after_tps: the decode rate measured, and the one predicted with the change; None where decoding stays as it is.
    before_s, after_s: the seconds of prefill, likewise. gain_s is the difference of these, and of the steps at those rates.
    """

    name: RemedyName
    gain_s: float
    to: int | None = None
    before_tps: float | None = None
    after_tps: float | None = None
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Machinery:
    """What a reply is predicted from: a model's work, the chip that does it, and how fast that really is."""

    work: Workload
    chip: Chip
    pace: LatencyModel

    def step(self, context: int) -> Phase:
        """Predict a decode step."""
        return decode_phase(self.work, self.chip, self.pace, context)

    def reading(self, tokens: int, cached: int, chunk: int) -> Phase:
        """Predict the reading of ``tokens``, one at least, after ``cached``."""
        return prefill_phase(self.work, self.chip, self.pace, max(tokens, 1), cached, chunk=chunk)


def remedies(metrics: Metrics, predicted: Predicted, machinery: Machinery, situation: Situation) -> tuple[Remedy, ...]:
    """Return up to three changes worth their sentence, best first."""
    if metrics.total_s is None:
        return ()
    least = max(WORTH_S, WORTH_SHARE * metrics.total_s)
    found = _Reply(metrics, predicted, machinery, situation).remedies()
    worth = [remedy for remedy in found if remedy.gain_s >= least]
    return tuple(sorted(worth, key=lambda remedy: -remedy.gain_s)[:MOST])


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply, how it was predicted, and what predicts it with a change."""

    metrics: Metrics
    predicted: Predicted
    machinery: Machinery
    situation: Situation

    def remedies(self) -> Iterator[Remedy]:
        """Yield every change there is, worth it or not."""
        work, bits = self.machinery.work, self.situation.bits_per_weight
        if self.situation.packed_kv is not None:
            yield self._reading_less("packed keys and values", KV_BITS, replace(work, kv=self.situation.packed_kv))
        if bits is not None and bits > PACKED_BITS:
            share = PACKED_BITS / bits
            lighter = replace(
                work, shared_bytes=round(work.shared_bytes * share), expert_bytes=round(work.expert_bytes * share)
            )
            yield self._reading_less("packed weights", WEIGHT_BITS, lighter)
        if self.metrics.prompt_tokens >= LONG:
            yield self._shorter()
        if not self.situation.keeps_prompts and self.metrics.prompt_tokens > 1:
            yield self._cached()
        yield self._quiet()

    def _reading_less(self, name: RemedyName, to: int, work: Workload) -> Remedy:
        after = replace(self.machinery, work=work).step(self.predicted.context)
        return self._remedy(name, to, step_s=self._step_saved_s(after))

    def _shorter(self) -> Remedy:
        """Half the prompt, as much of it cached in proportion."""
        m, half = self.metrics, self.metrics.prompt_tokens // 2
        prompt = self.machinery.reading(m.prefill_tokens // 2, m.cached_tokens // 2, self.predicted.chunk)
        sooner_s = _saved_s(m.prefill_s, self.predicted.prefill, prompt)
        after = self.machinery.step(self.predicted.context - half)
        return self._remedy("shorter context", half, prefill_s=sooner_s, step_s=self._step_saved_s(after))

    def _cached(self) -> Remedy:
        """The next time, or in the next turn, all but the last token of this prompt would be there already."""
        last = self.machinery.reading(1, self.metrics.prompt_tokens - 1, self.predicted.chunk)
        return self._remedy("prompt cache", prefill_s=_saved_s(self.metrics.prefill_s, self.predicted.prefill, last))

    def _quiet(self) -> Remedy:
        """What both phases lost to whatever else held the machine up, where that was much; by the name of a cause that is known."""
        prefill_s = _behind_s(self.metrics.prefill_s, self.predicted.prefill)
        step_s = _behind_s(_step_s(self.metrics), self.predicted.decode)
        throttles = self.situation.throttles
        name: RemedyName = "quiet machine"
        if throttles:
            name = "full power" if "low power" in throttles else "cool chip"
        return self._remedy(name, prefill_s=prefill_s, step_s=step_s)

    def _step_saved_s(self, after: Phase) -> float:
        return _saved_s(_step_s(self.metrics), self.predicted.decode, after)

    def _remedy(
        self, name: RemedyName, to: int | None = None, *, prefill_s: float = 0.0, step_s: float = 0.0
    ) -> Remedy:
        """A change that saves ``prefill_s`` of the prefill and ``step_s`` of each step."""
        m, before_s = self.metrics, _step_s(self.metrics)
        remedy = Remedy(name, prefill_s + max(m.generated_tokens - 1, 0) * step_s, to)
        if step_s and before_s is not None:
            remedy = replace(remedy, before_tps=m.decode_tps, after_tps=rate(1, before_s - step_s))
        if prefill_s and m.prefill_s is not None:
            remedy = replace(remedy, before_s=m.prefill_s, after_s=m.prefill_s - prefill_s)
        return remedy


def _step_s(metrics: Metrics) -> float | None:
    return None if metrics.decode_tps is None else 1 / metrics.decode_tps


def _saved_s(measured_s: float | None, before: Phase, after: Phase) -> float:
    """The seconds that a change saves of what was measured; 0 where that is unknown."""
    if measured_s is None or not before.expected_s or after.expected_s is None:
        return 0.0
    saved = (before.expected_s - after.expected_s) * min(1.0, measured_s / before.expected_s)
    return max(min(saved, measured_s - (after.ceiling_s or 0.0)), 0.0)


def _behind_s(measured_s: float | None, phase: Phase) -> float:
    """The seconds beyond what is expected, where they are too many to be an error of that; else 0."""
    # Of the host only the least is known: what it takes beyond that, on a quiet machine too, is not.
    expected_s = None if phase.by_host else phase.expected_s
    if measured_s is None or expected_s is None or expected_s >= BEHIND * measured_s:
        return 0.0
    return measured_s - expected_s


SOURCES: dict[Source, str] = {
    "table": "its maker's figure", "measured": "measured on this machine", "unknown": "not known",
}  # fmt: skip
Unit = Literal["GB/s", "TFLOP/s", "bytes", "s", "tok/s", "FLOP", "FLOP/byte"]
Concern = Literal["machine", "decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Term:
    """One number. key: what formulas call it. value: in ``unit``; None is unknown."""

    key: str
    concern: Concern
    name: str
    formula: str
    value: float | None
    unit: Unit


def terms_of(
    metrics: Metrics, work: Workload, chip: Chip, pace: LatencyModel | None, predicted: Predicted
) -> tuple[Term, ...]:
    """Return the numbers of a reply, each after those it is computed from."""
    return (
        *_machine(work, chip, pace, predicted),
        *_decode_terms(metrics, work, pace, predicted),
        *_prefill_terms(metrics, work, pace, predicted),
    )


def _machine(work: Workload, chip: Chip, pace: LatencyModel | None, predicted: Predicted) -> tuple[Term, ...]:
    source = SOURCES[chip.source]
    bandwidth = f"{source} for another bin" if chip.other_bin else source
    peak, kind = peak_tflops(chip), "half precision" if chip.source == "table" else source
    ridge = None if peak is None or chip.bandwidth_gbs is None else ridge_point(chip.bandwidth_gbs, peak)
    found: tuple[Term, ...] = (
        Term("bandwidth", "machine", "bandwidth", f"{chip.name}, {bandwidth}", chip.bandwidth_gbs, "GB/s"),
        Term("peak", "machine", "peak arithmetic", f"{chip.name}, {kind}", peak, "TFLOP/s"),
        Term("ridge", "machine", "ridge point", "{peak} ÷ {bandwidth}", ridge, "FLOP/byte"),
    )
    if (kernels := _fitted(pace)) is None:
        return found
    idle = _launching_s(work, kernels, predicted)
    found = (*found, Term("launching", "machine", "launching kernels", f"{work.launches:,} kernels a step", idle, "s"))
    if (host := _host(pace)) is None:
        return found
    return (
        *found,
        Term("host", "machine", "host", "a step is built in Python: timed on this machine", host.step_s, "s"),
        Term("wait", "machine", "round trip", "to the device and back: timed on this machine", host.wait_s, "s"),
    )


def _decode_terms(
    metrics: Metrics, work: Workload, pace: LatencyModel | None, predicted: Predicted
) -> tuple[Term, ...]:
    step, m = predicted.decode, metrics
    between = None if m.total_s is None or m.ttft_s is None else m.total_s - m.ttft_s
    held = f"those of {predicted.context:,} tokens, the middle of the reply"
    return (
        *_weights(work),
        Term("kv", "decode", "keys and values", held, work.kv_bytes(predicted.context), "bytes"),
        Term("step", "decode", "bytes a step", "{weights} + {kv}", step.bytes_read, "bytes"),
        Term("ceiling", "decode", "ceiling", "{bandwidth} ÷ {step}", m.ceiling_tps, "tok/s"),
        Term("expected", "decode", "expected", _expected_step(work, pace, predicted), m.expected_tps, "tok/s"),
        Term("writing", "decode", "time", "last token − first token", between, "s"),
        Term("rate", "decode", "measured", f"({m.generated_tokens:,} − 1) ÷ {{writing}}", m.decode_tps, "tok/s"),
        Term("achieved", "decode", "achieved", "{step} × {rate}", m.achieved_gbs, "GB/s"),
    )


def _weights(work: Workload) -> tuple[Term, ...]:
    """What a step reads of the weights: of a mixture, its two parts first."""
    whole = work.weight_bytes()
    if not work.expert_bytes:
        return (Term("weights", "decode", "weights", "all that a step reads", whole, "bytes"),)
    active = None if whole is None else whole - work.shared_bytes
    return (
        Term("shared", "decode", "shared weights", "all that every step reads", work.shared_bytes, "bytes"),
        Term("experts", "decode", "active experts", f"of {work.expert_bytes / 1e9:,.1f} GB", active, "bytes"),
        Term("weights", "decode", "weights", "{shared} + {experts}", whole, "bytes"),
    )


def _prefill_terms(
    metrics: Metrics, work: Workload, pace: LatencyModel | None, predicted: Predicted
) -> tuple[Term, ...]:
    phase, m = predicted.prefill, metrics
    after = f", after {m.cached_tokens:,} cached" if m.cached_tokens else ""
    operations = f"2 × active parameters × {phase.tokens:,} tokens + attention{after}"
    # Of an unknown peak, what reading the bytes takes is known: a bound, but not the one that a long prompt meets.
    least = phase.ceiling_s if phase.bound is not None else None
    chunk = work.weight_bytes(min(phase.tokens, predicted.chunk))
    touched = Term("chunk", "prefill", "weights of a chunk", "with all experts that its tokens use", chunk, "bytes")
    weights = "the weights that its tokens use" if work.expert_bytes else "{weights}"
    held = f"those of {m.prompt_tokens:,} tokens"
    return (
        *((touched,) if work.expert_bytes else ()),
        Term("operations", "prefill", "operations", operations, phase.operations, "FLOP"),
        Term("held", "prefill", "keys and values", held, work.kv_bytes(m.prompt_tokens), "bytes"),
        Term("read", "prefill", "bytes", f"{weights} + {{held}}", phase.bytes_read, "bytes"),
        Term("intensity", "prefill", "intensity", "{operations} ÷ {read}", phase.intensity, "FLOP/byte"),
        Term("least", "prefill", "at least", "max({operations} ÷ {peak}, {read} ÷ {bandwidth})", least, "s"),
        Term("wanted", "prefill", "expected", _expected_prompt(work, pace, predicted), phase.expected_s, "s"),
        Term("reading", "prefill", "measured", "prefill begins → first token", m.prefill_s, "s"),
    )


TIMED = "the sum of its parts, each timed on this machine"
UNTIMED = "not known for this machine"


def _expected_step(work: Workload, pace: LatencyModel | None, predicted: Predicted) -> str:
    """The reading of weights, attention as the share of the bandwidth that it reaches here, and the launches."""
    if (kernels := _fitted(pace)) is None:
        return UNTIMED if pace is None else TIMED
    bandwidth, held = kernels.chip.bandwidth_gbs, work.kv_bytes(predicted.context)
    device = f"{{weights}} ÷ ({kernels.constants.shared:.1%} × {{bandwidth}})"
    if held and bandwidth:
        reached = held / (bandwidth * 1e9) / kernels.attention_s(work, predicted.context, bandwidth)
        device += f" + {{kv}} ÷ ({reached:.1%} × {{bandwidth}})"
    device += " + {launching}"
    return f"1 ÷ max({{host}}, {device})" if _host(pace) is not None else f"1 ÷ ({device})"


def _expected_prompt(work: Workload, pace: LatencyModel | None, predicted: Predicted) -> str:
    """The larger roof as kernels reach it, and the launches. All that roofline.py knows of kernels is one share here."""
    if (kernels := _fitted(pace)) is None:
        return UNTIMED if pace is None else TIMED
    phase, peak, bandwidth = predicted.prefill, peak_tflops(kernels.chip), kernels.chip.bandwidth_gbs
    calls, host = calls_of(phase.tokens, predicted.chunk), _host(pace)
    if phase.by_host:
        return f"{calls} × ({{host}} + {{wait}})"
    if phase.expected_s is None or phase.operations is None or not peak or not bandwidth:
        return UNTIMED
    chunks = math.ceil(phase.tokens / predicted.chunk)
    launched = chunks * (_launching_s(work, kernels, predicted) or 0.0)
    waited = 0.0 if host is None else calls * host.wait_s
    waits = "" if host is None else f" + {calls} × {{wait}}"
    reached = phase.operations / (peak * 1e12) / (phase.expected_s - launched - waited)
    weights, share = work.weight_bytes(min(phase.tokens, predicted.chunk)) or 0, kernels.constants.shared
    reading_s = chunks * weights / (share * bandwidth * 1e9)
    if math.isclose(reading_s + launched + waited, phase.expected_s, rel_tol=1e-6):
        read = "{chunk}" if work.expert_bytes else "{weights}"
        return f"{chunks} × {read} ÷ ({share:.1%} × {{bandwidth}}) + {chunks} × {{launching}}{waits}"
    return f"{{operations}} ÷ ({reached:.1%} × {{peak}}) + {chunks} × {{launching}}{waits}"


def _fitted(pace: LatencyModel | None) -> Fitted | None:
    return pace.device if isinstance(pace, HostLimited) else pace if isinstance(pace, Fitted) else None


def _host(pace: LatencyModel | None) -> Host | None:
    return pace.host if isinstance(pace, HostLimited) else None


def _launching_s(work: Workload, pace: Fitted, predicted: Predicted) -> float | None:
    """What launching a step's kernels takes: what is left of a step that reads nothing."""
    return pace.decode_s(replace(work, shared_bytes=0, expert_bytes=0, kv=()), predicted.context)


PartName = Literal["wait", "prefill", "decode"]
Waits = Literal["memory", "compute", "host", "overhead", "not memory"]
"""What a phase waited for. host: Python, which builds each step, and launching its kernels. overhead: neither roof, so what lies
around the kernels. not memory: the peak of the arithmetic is not known, so it may have been that, or overhead."""

NEAR = 0.5
"""Share of the roofline from which decode is said to wait for a roof: all else that it does then takes less time."""

FAR = 0.1
"""Share of the roofline below which one pass over a prompt waits for neither roof: kernels reach more (assets/roofline.json).
Of many passes, what lies around them is a small part."""


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of a reply's time.

    of_ceiling, of_expected: how much it reached of the speed that physics allows, and of the one to expect: 1 is all, None unknown.
    """

    name: PartName
    seconds: float
    bound: Waits | None = None
    of_ceiling: float | None = None
    of_expected: float | None = None

    @property
    def behind(self) -> bool:
        """Whether it was much slower than this machine makes it as a rule. What waits for the host is expected at its least."""
        return self.bound != "host" and self.of_expected is not None and self.of_expected < BEHIND


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a reply. parts: wait, prefill and decode. terms: the numbers it was computed from.

    remedies: what would help a reply like this one, best first, three at most. throttles: what the system slowed the chip down for.
    """

    parts: tuple[TimePart, ...]
    remedies: tuple[Remedy, ...]
    terms: tuple[Term, ...]
    throttles: tuple[Throttle, ...] = ()

    @property
    def slowest(self) -> TimePart:
        """The part that took longest; of two alike, the later."""
        return max(reversed(self.parts), key=lambda part: part.seconds)

    def part(self, name: PartName) -> TimePart:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)


def diagnose(
    metrics: Metrics, work: Workload, chip: Chip, pace: LatencyModel | None, situation: Situation
) -> Diagnosis | None:
    """Return the verdict on a reply; None where no token came, so that there is nothing to explain."""
    ttft_s, prefill_s, total_s = metrics.ttft_s, metrics.prefill_s, metrics.total_s
    if ttft_s is None or prefill_s is None or total_s is None:
        return None
    context = metrics.prompt_tokens + metrics.generated_tokens // 2
    predicted = Predicted(
        prefill=prefill_phase(
            work, chip, pace, max(metrics.prefill_tokens, 1), metrics.cached_tokens, chunk=situation.chunk
        ),
        decode=decode_phase(work, chip, pace, context),
        context=context,
        chunk=situation.chunk,
    )
    parts = (
        TimePart("wait", max(ttft_s - prefill_s, 0.0)),
        _prefill(prefill_s, predicted, chip),
        _decode(max(total_s - ttft_s, 0.0), metrics, predicted, chip),
    )
    found = () if pace is None else remedies(metrics, predicted, Machinery(work, chip, pace), situation)
    return Diagnosis(parts, found, terms_of(metrics, work, chip, pace, predicted), situation.throttles)


def _prefill(seconds: float, predicted: Predicted, chip: Chip) -> TimePart:
    phase = predicted.prefill
    of_least, of_expected = share(phase.ceiling_s, seconds), share(phase.expected_s, seconds)
    if phase.bound is None:  # one roof is unknown, and then the other says little of a prompt
        return TimePart("prefill", seconds, _by_memory_alone(of_least, chip), None, of_expected)
    far = phase.tokens <= predicted.chunk and of_least is not None and of_least < FAR
    if phase.by_host and of_least is not None and of_least < NEAR:
        return TimePart("prefill", seconds, "host", of_least, of_expected)
    return TimePart("prefill", seconds, "overhead" if far else phase.bound, of_least, of_expected)


def _decode(seconds: float, metrics: Metrics, predicted: Predicted, chip: Chip) -> TimePart:
    measured, phase = metrics.decode_tps, predicted.decode
    of_least = share(measured, phase.ceiling_tps)
    waits = _by_memory_alone(of_least, chip)
    if phase.bound is not None and of_least is not None:
        around: Waits = "host" if phase.by_host else "overhead"
        waits = phase.bound if of_least >= NEAR else around
    return TimePart(
        "decode", seconds, waits, share(measured, metrics.ceiling_tps), share(measured, metrics.expected_tps)
    )


def _by_memory_alone(of_least: float | None, chip: Chip) -> Waits | None:
    """What a phase waited for, by the bandwidth alone; None where that is unknown too."""
    if of_least is None or chip.bandwidth_gbs is None:
        return None
    return "memory" if of_least >= NEAR else "not memory"
