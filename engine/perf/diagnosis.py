"""Why a reply took its time and what would help: a pure function of metrics and machine limits."""

# wait     accepted → prefill begins: the queue, tokenizing, restoring the cache
# image    of it, seeing pictures; then prefill → the first token
# decode   → the last token
# saved = (predicted without the change − predicted with it) × min(1, measured ÷ predicted without it)

# Prediction errors cancel in ``saved``; nothing beyond the roofline is promised, nothing without a known
# latency. A phase waits for the roof it reaches by half or more (prefill: by the ridge), else for overhead.
# Formulas name terms in braces, ``{bandwidth} ÷ {step}``, for the display to fill in.

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..kv.costs import group_for, token_bytes
from ..metrics import Metrics, Slowing, bytes_per_step, ceiling_tps, rate, share, share_of_limit
from .hardware import Chip, Source
from .roofline import (
    Fitted,
    Host,
    HostLimited,
    KVUse,
    LatencyModel,
    Phase,
    Workload,
    calls_of,
    decode_phase,
    peak_tflops,
    prefill_phase,
    ridge_point,
)

if TYPE_CHECKING:
    from ..kv.plan import LayerPlan


PartName = Literal["start", "load", "wait", "image", "prefill", "decode"]
# What a phase waited for. host: Python, which builds each step, and launching its kernels. overhead: neither roof, so
# what lies around the kernels. not memory: the peak of the arithmetic is not known, so it may have been that, or
# overhead.
Waits = Literal["memory", "compute", "host", "overhead", "not memory"]
RemedyName = Literal[
    "packed keys and values", "packed weights", "prompt cache", "shorter context", "quiet machine", "full power", "cool chip",
    "full pace", "no guesses",
]  # fmt: skip

# What ends a throttle; the first that there is is told.
RELIEF: dict[Slowing, RemedyName] = {"pace": "full pace", "low power": "full power", "thermal": "cool chip"}

MOST = 3
WORTH_S = 0.1  # seconds below which a change is not worth a sentence
WORTH_SHARE = 0.03  # share of the reply below which it is not either

WEIGHT_BITS, WEIGHT_GROUP = 4, 64
# Bits a weight of `tokamac convert`'s default: a scale and a bias of 16 bits in each group.
PACKED_BITS = WEIGHT_BITS + 32 / WEIGHT_GROUP

LONG = 512  # prompt tokens below which shortening is not worth it

# Share of the expected speed below which something holds the machine up; the errors of what is expected are smaller
# (assets/roofline.json).
BEHIND = 0.8
SOURCES: dict[Source, str] = {
    "table": "its maker's figure", "measured": "measured on this machine", "unknown": "not known",
}  # fmt: skip
Unit = Literal["GB/s", "TFLOP/s", "bytes", "s", "tok/s", "FLOP", "FLOP/byte", "replies", "tokens"]
Concern = Literal["machine", "decode", "prefill", "image"]

# Share of the roofline from which decode counts as waiting for a roof: all else that it does then takes less time.
NEAR = 0.5

# Share of the roofline below which one pass over a prompt waits for neither roof: kernels reach more
# (assets/roofline.json). Of many passes, what lies around them is a small part.
FAR = 0.1

TIMED = "the sum of its parts, each timed on this machine"
UNTIMED = "not known for this machine"

KV_BITS = 8  # bits that keep a reply the same to the eye (bench --kv-quality measures it for a model)


@dataclass(frozen=True, slots=True)
class Situation:
    """Possible changes. packed_kv: caches at KV_BITS, or None. chunk: prefill tokens. throttles: seen meanwhile."""

    packed_kv: tuple[KVUse, ...] | None
    bits_per_weight: float | None
    keeps_prompts: bool
    chunk: int
    throttles: tuple[Slowing, ...] = ()
    tower_operations: int = 0  # of the pictures seen


@dataclass(frozen=True, slots=True)
class TimePart:
    """A phase of the reply. of_ceiling, of_expected: share of the limit and expected speed (1 is all), None unknown."""

    name: PartName
    seconds: float
    bound: Waits | None = None
    of_ceiling: float | None = None
    of_expected: float | None = None

    @property
    def behind(self) -> bool:
        """Whether it was much slower than usual here; host waits are expected at their minimum."""
        return self.bound != "host" and self.of_expected is not None and self.of_expected < BEHIND


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change. gain_s: predicted saving. ``to``: bits or prompt tokens. before/after: measured, predicted."""

    name: RemedyName
    gain_s: float
    to: int | None = None
    before_tps: float | None = None
    after_tps: float | None = None
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """A number. key: its name in formulas."""

    key: str
    concern: Concern
    name: str
    formula: str
    value: float | None
    unit: Unit


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict: phases in order, their terms, up to three remedies (best first), throttles."""

    parts: tuple[TimePart, ...]
    remedies: tuple[Remedy, ...]
    terms: tuple[Term, ...]
    throttles: tuple[Slowing, ...] = ()

    @property
    def total_s(self) -> float:
        return sum(part.seconds for part in self.parts)

    def since(self, whole_s: float, *, start_s: float = 0.0, load_s: float = 0.0) -> "Diagnosis":
        """Extend the verdict to an earlier start; the unexplained remainder is waiting."""
        early = [part for part in (TimePart("start", start_s), TimePart("load", load_s)) if part.seconds > 0]
        waited_s = self.part("wait").seconds + max(whole_s - start_s - load_s - self.total_s, 0.0)
        later = (part for part in self.parts if part.name in ("image", "prefill", "decode"))
        return replace(self, parts=(*early, TimePart("wait", waited_s), *later))

    @property
    def slowest(self) -> TimePart:
        return max(reversed(self.parts), key=lambda part: part.seconds)

    def part(self, name: PartName) -> TimePart:
        return next(part for part in self.parts if part.name == name)


def diagnose(
    metrics: Metrics, work: Workload, chip: Chip, latency: LatencyModel | None, situation: Situation
) -> Diagnosis | None:
    ttft_s, prefill_s, total_s = metrics.ttft_s, metrics.prefill_s, metrics.total_s
    if ttft_s is None or prefill_s is None or total_s is None:
        return None
    context = metrics.prompt_tokens + metrics.generated_tokens // 2
    tokens, cached = max(metrics.prefill_tokens, 1), metrics.cached_tokens
    reply = _Reply(
        metrics=metrics,
        work=work,
        chip=chip,
        latency=latency,
        situation=situation,
        context=context,
        prefill=prefill_phase(work, chip, latency, tokens, cached, chunk=situation.chunk),
        decode=decode_phase(work, chip, latency, context, metrics.replies_at_once),
    )
    parts = (
        TimePart("wait", max(ttft_s - prefill_s - (metrics.image_s or 0.0), 0.0)),
        *reply.image_parts(),
        reply.prefill_part(prefill_s),
        reply.decode_part(max(total_s - ttft_s, 0.0)),
    )
    least = max(WORTH_S, WORTH_SHARE * total_s)
    changes = [] if latency is None else [*reply.remedies()]
    if metrics.saved_s is not None:  # this is measured, the others are predicted
        changes.append(Remedy("no guesses", -metrics.saved_s))
    worth = [remedy for remedy in changes if remedy.gain_s >= least]
    best = tuple(sorted(worth, key=lambda remedy: -remedy.gain_s)[:MOST])
    terms = (*reply.machine_terms(), *reply.decode_terms(), *reply.prefill_terms(), *reply.image_terms())
    return Diagnosis(parts, best, terms, situation.throttles)


def at_bandwidth(metrics: Metrics, diagnosis: Diagnosis | None, gbs: float | None) -> tuple[Metrics, Diagnosis | None]:
    before, ceiling = metrics.ceiling_tps, ceiling_tps(gbs, bytes_per_step(metrics))
    if before == ceiling or (
        before is not None and ceiling is not None and math.isclose(before, ceiling, rel_tol=1e-3)
    ):
        return metrics, diagnosis
    metrics = replace(metrics, ceiling_tps=ceiling)
    if diagnosis is None:
        return metrics, None
    known = {term.key: term.value for term in diagnosis.terms}
    peak, operations, read = known.get("peak"), known.get("operations"), known.get("read")
    reading_s = None if not gbs or read is None else read / (gbs * 1e9)
    computing_s = None if not peak or operations is None else operations / (peak * 1e12)
    least_s = None if reading_s is None or computing_s is None else max(reading_s, computing_s)
    ridge = None if not gbs or peak is None else ridge_point(gbs, peak)
    values = {"bandwidth": gbs, "ridge": ridge, "ceiling": ceiling, "least": least_s}
    reached = {"prefill": share_of_limit(least_s, metrics.prefill_s), "decode": metrics.share_of_ceiling}
    terms = tuple(replace(term, value=values.get(term.key, term.value)) for term in diagnosis.terms)
    parts = tuple(
        part
        if part.name == "image" or (part.name, part.bound) == ("decode", "compute")
        else replace(part, of_ceiling=reached.get(part.name))
        for part in diagnosis.parts
    )
    return metrics, replace(diagnosis, parts=parts, terms=terms)


def packed_layers(
    layers: "Iterable[LayerPlan]", group_size: int, now: tuple[KVUse, ...] | None = None
) -> tuple[KVUse, ...] | None:
    """Return caches at KV_BITS, or None if none changes."""
    plans = tuple(layers)
    now = now or tuple(KVUse(plan.bytes_per_token, plan.limit, plan.fixed_bytes) for plan in plans)
    packed = tuple(_packed(plan, layer, group_size) for plan, layer in zip(plans, now, strict=True))
    return None if packed == now else packed


def _packed(plan: "LayerPlan", layer: KVUse, group_size: int) -> KVUse:
    if plan.ours is None or min(plan.key_bits, plan.value_bits) < 16:
        return layer
    seen, total = plan.ours.seen, 0
    for dim in (seen.key_dim, seen.value_dim):
        if (group := group_for(dim, group_size)) is None:
            return layer
        total += token_bytes(seen.heads, dim, KV_BITS, group, seen.scale_bytes)
    return replace(layer, bytes_per_token=total)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply's prediction: prefill, and the step at its middle."""

    metrics: Metrics
    work: Workload
    chip: Chip
    latency: LatencyModel | None
    situation: Situation
    context: int
    prefill: Phase
    decode: Phase

    @property
    def kernels(self) -> Fitted | None:
        found = self.latency.device if isinstance(self.latency, HostLimited) else self.latency
        return found if isinstance(found, Fitted) else None

    @property
    def host(self) -> Host | None:
        return self.latency.host if isinstance(self.latency, HostLimited) else None

    @property
    def step_s(self) -> float | None:
        return None if self.metrics.decode_tps is None else 1 / self.metrics.decode_tps

    @property
    def launching_s(self) -> float | None:
        idle = replace(self.work, shared_bytes=0, expert_bytes=0, prefill_parameters=0, head_parameters=0, kv=())
        return None if self.kernels is None else self.kernels.decode_s(idle, self.context)

    def image_parts(self) -> Iterator[TimePart]:
        if (seconds := self.metrics.image_s) is not None:
            yield TimePart("image", seconds, of_ceiling=share_of_limit(self._least_image_s, seconds))

    @property
    def _least_image_s(self) -> float | None:
        peak = peak_tflops(self.chip)
        return None if not peak else self.situation.tower_operations / (peak * 1e12)

    def prefill_part(self, seconds: float) -> TimePart:
        phase = self.prefill
        of_least, of_expected = share_of_limit(phase.ceiling_s, seconds), share(phase.expected_s, seconds)
        if phase.bound is None:  # one roof is unknown, and then the other says little of a prompt
            return TimePart("prefill", seconds, self._by_memory_alone(of_least), None, of_expected)
        far = phase.tokens <= self.situation.chunk and of_least is not None and of_least < FAR
        if phase.by_host and of_least is not None and of_least < NEAR:
            return TimePart("prefill", seconds, "host", of_least, of_expected)
        return TimePart("prefill", seconds, "overhead" if far else phase.bound, of_least, of_expected)

    def decode_part(self, seconds: float) -> TimePart:
        m, phase = self.metrics, self.decode
        if m.accepted_tokens:  # no step was like the one that is predicted
            return TimePart("decode", seconds)
        of_least = share_of_limit(phase.ceiling_s, self.step_s)
        waits = self._by_memory_alone(of_least)
        if phase.bound is not None and of_least is not None:
            around: Waits = "host" if phase.by_host else "overhead"
            waits = phase.bound if of_least >= NEAR else around
        of_ceiling = m.share_of_ceiling
        if waits == "compute":
            of_ceiling = None if m.shown_decode_tps is None else of_least
        return TimePart("decode", seconds, waits, of_ceiling, m.share_of_expected)

    def _by_memory_alone(self, of_least: float | None) -> Waits | None:
        if of_least is None or self.chip.bandwidth_gbs is None:
            return None
        return "memory" if of_least >= NEAR else "not memory"

    def remedies(self) -> Iterator[Remedy]:
        m, work, bits = self.metrics, self.work, self.situation.bits_per_weight
        if self.situation.packed_kv is not None:
            yield self._reading_less("packed keys and values", KV_BITS, replace(work, kv=self.situation.packed_kv))
        if bits is not None and bits > PACKED_BITS:
            part = PACKED_BITS / bits
            shared, experts = round(work.shared_bytes * part), round(work.expert_bytes * part)
            lighter = replace(work, shared_bytes=shared, expert_bytes=experts)
            yield self._reading_less("packed weights", WEIGHT_BITS, lighter)
        if m.prompt_tokens >= LONG:  # half the prompt, as much of it cached in proportion
            half = m.prompt_tokens // 2
            sooner_s = self._prefill_saved_s(m.prefill_tokens // 2, m.cached_tokens // 2)
            step_s = self._step_saved_s(self.work, self.context - half)
            yield self._remedy("shorter context", half, prefill_s=sooner_s, step_s=step_s)
        if not self.situation.keeps_prompts and m.prompt_tokens > 1:  # next time only its last token would be computed
            yield self._remedy("prompt cache", prefill_s=self._prefill_saved_s(1, m.prompt_tokens - 1))
        # What both phases lost to whatever else held the machine up, by the name of a cause that is known.
        name: RemedyName = "quiet machine"
        if self.situation.throttles:
            name = next(name for each, name in RELIEF.items() if each in self.situation.throttles)
        lost_s = _behind_s(m.prefill_s, self.prefill), 0.0 if m.drafted_tokens else _behind_s(self.step_s, self.decode)
        yield self._remedy(name, prefill_s=lost_s[0], step_s=lost_s[1])

    def _reading_less(self, name: RemedyName, to: int, work: Workload) -> Remedy:
        return self._remedy(name, to, step_s=self._step_saved_s(work, self.context))

    def _step_saved_s(self, work: Workload, context: int) -> float:
        return _saved_s(self.step_s, self.decode, self._decode_at(work, context, self.metrics.replies_at_once))

    def _decode_at(self, work: Workload, context: int, batch: int) -> Phase:
        return decode_phase(work, self.chip, self.latency, context, batch)

    def _prefill_saved_s(self, tokens: int, cached: int) -> float:
        chunk = self.situation.chunk
        after = prefill_phase(self.work, self.chip, self.latency, max(tokens, 1), cached, chunk=chunk)
        return _saved_s(self.metrics.prefill_s, self.prefill, after)

    def _remedy(
        self, name: RemedyName, to: int | None = None, *, prefill_s: float = 0.0, step_s: float = 0.0
    ) -> Remedy:
        m = self.metrics
        remedy = Remedy(name, prefill_s + max(m.generated_tokens - 1, 0) * step_s, to)
        if step_s and self.step_s is not None:
            remedy = replace(remedy, before_tps=m.decode_tps, after_tps=rate(1, self.step_s - step_s))
        if prefill_s and m.prefill_s is not None:
            remedy = replace(remedy, before_s=m.prefill_s, after_s=m.prefill_s - prefill_s)
        return remedy

    def machine_terms(self) -> Iterator[Term]:
        chip, source = self.chip, SOURCES[self.chip.source]
        bandwidth = f"{source} for another bin" if chip.other_bin else chip.condition or source
        peak, kind = peak_tflops(chip), "half precision" if chip.source == "table" else source
        ridge = None if peak is None or chip.bandwidth_gbs is None else ridge_point(chip.bandwidth_gbs, peak)
        yield Term("bandwidth", "machine", "bandwidth", f"{chip.name}, {bandwidth}", chip.bandwidth_gbs, "GB/s")
        yield Term("peak", "machine", "peak arithmetic", f"{chip.name}, {kind}", peak, "TFLOP/s")
        yield Term("ridge", "machine", "ridge point", "{peak} ÷ {bandwidth}", ridge, "FLOP/byte")
        if self.kernels is not None:
            launches = f"{self.work.launches:,} kernels a step"
            yield Term("launching", "machine", "launching kernels", launches, self.launching_s, "s")
        if self.host is not None:
            building = "a step is built in Python: timed on this machine"
            yield Term("host", "machine", "host", building, self.host.step_s, "s")
            there_and_back = "to the device and back: timed on this machine"
            yield Term("wait", "machine", "round trip", there_and_back, self.host.wait_s, "s")

    def decode_terms(self) -> Iterator[Term]:
        m, work, batch = self.metrics, self.work, self.metrics.replies_at_once
        weights = work.weight_bytes(batch)
        all_weights = "all that a step reads"
        if work.expert_bytes:
            all_weights, active = "{shared} + {experts}", None if weights is None else weights - work.shared_bytes
            yield Term("shared", "decode", "shared weights", "all that every step reads", work.shared_bytes, "bytes")
            yield Term("experts", "decode", "active experts", f"of {work.expert_bytes / 1e9:,.1f} GB", active, "bytes")
        yield Term("weights", "decode", "weights", all_weights, weights, "bytes")
        between = None if m.total_s is None or m.ttft_s is None else m.total_s - m.ttft_s
        held = f"those of {self.context:,} tokens, the middle of the reply"
        if batch > 1:
            yield Term("width", "decode", "replies at once", "mean over the steps", m.batch_width, "replies")
            alone = rate(1, self._decode_at(work, self.context, 1).expected_s)
            yield Term("alone", "decode", "expected alone", "as below, for one reply", alone, "tok/s")
            held += f", in each of {batch} replies"
        yield Term("kv", "decode", "keys and values", held, work.kv_bytes(self.context, batch), "bytes")
        yield Term("step", "decode", "bytes a step", "{weights} + {kv}", self.decode.bytes_read, "bytes")
        plainly = " without guesses" if m.drafted_tokens else ""
        yield Term("ceiling", "decode", f"ceiling{plainly}", "{bandwidth} ÷ {step}", m.ceiling_tps, "tok/s")
        yield Term("expected", "decode", f"expected{plainly}", self._expected_step(), m.expected_tps, "tok/s")
        yield Term("writing", "decode", "time", "last token − first token", between, "s")
        yield Term("rate", "decode", "measured", f"({m.generated_tokens:,} − 1) ÷ {{writing}}", m.decode_tps, "tok/s")
        per_pass = "{step} × {rate}"
        if m.drafted_tokens:
            guessed = f"of {m.drafted_tokens:,} that were guessed, and verified several in a pass"
            yield Term("accepted", "decode", "guessed right", guessed, m.accepted_tokens, "tokens")
            yield Term("saved", "decode", "saved", "over the same tokens in plain steps, as measured", m.saved_s, "s")
            per_pass = f"{{step}} × {{rate}} × ({m.generated_tokens:,} − {{accepted}}) ÷ {m.generated_tokens:,}"
        elif m.undrafted:
            yield Term("accepted", "decode", "guesses", f"none: {m.undrafted}", 0, "tokens")
        yield Term("achieved", "decode", "achieved", per_pass, m.achieved_gbs, "GB/s")

    def prefill_terms(self) -> Iterator[Term]:
        m, work, phase = self.metrics, self.work, self.prefill
        after = f", after {m.cached_tokens:,} cached" if m.cached_tokens else ""
        operations = f"2 × active parameters × {phase.tokens:,} tokens + attention{after}"
        # Of an unknown peak, what reading the bytes takes is known: a bound, but not the one that a long prompt meets.
        least = phase.ceiling_s if phase.bound is not None else None
        weights = "{weights}"
        if work.expert_bytes:
            weights, chunk = (
                "the weights that its tokens use",
                work.weight_bytes(min(phase.tokens, self.situation.chunk)),
            )
            yield Term("chunk", "prefill", "weights of a chunk", "with all experts that its tokens use", chunk, "bytes")
        held = f"those of {m.prompt_tokens:,} tokens"
        roofs = "max({operations} ÷ {peak}, {read} ÷ {bandwidth})"
        yield Term("operations", "prefill", "operations", operations, phase.operations, "FLOP")
        yield Term("held", "prefill", "keys and values", held, work.kv_bytes(m.prompt_tokens), "bytes")
        yield Term("read", "prefill", "bytes", f"{weights} + {{held}}", phase.bytes_read, "bytes")
        yield Term("intensity", "prefill", "intensity", "{operations} ÷ {read}", phase.intensity, "FLOP/byte")
        yield Term("least", "prefill", "at least", roofs, least, "s")
        yield Term("wanted", "prefill", "expected", self._expected_prompt(), phase.expected_s, "s")
        yield Term("reading", "prefill", "measured", "prefill begins → first token", m.prefill_s, "s")

    def image_terms(self) -> Iterator[Term]:
        if (seconds := self.metrics.image_s) is None:
            return
        operations = self.situation.tower_operations
        tower = "2 × the tower's parameters × patches + attention among them"
        yield Term("tower", "image", "operations", tower, operations, "FLOP")
        yield Term("least image", "image", "at least", "{tower} ÷ {peak}", self._least_image_s, "s")
        yield Term("seeing", "image", "measured", "read the file, scale, compute the tower", seconds, "s")

    def _expected_step(self) -> str:
        kernels, batch = self.kernels, self.metrics.replies_at_once
        if kernels is None:
            return UNTIMED if self.latency is None else TIMED
        bandwidth, held = kernels.chip.bandwidth_gbs, self.work.kv_bytes(self.context, batch)
        weights, reading_s = self.work.weight_bytes(batch), kernels.reading_s(self.work, batch)
        of_bandwidth = kernels.constants.shared
        if weights and bandwidth and reading_s:  # less of it where the arithmetic of many replies takes longer
            of_bandwidth = weights / (bandwidth * 1e9) / reading_s
        device = f"{{weights}} ÷ ({of_bandwidth:.1%} × {{bandwidth}})"
        if held and bandwidth:
            attending_s = batch * kernels.attention_s(self.work, self.context, bandwidth)
            reached = held / (bandwidth * 1e9) / attending_s
            device += f" + {{kv}} ÷ ({reached:.1%} × {{bandwidth}})"
        device += " + {launching}"
        return f"1 ÷ ({device})" if self.host is None else f"1 ÷ max({{host}}, {device})"

    def _expected_prompt(self) -> str:
        kernels, phase, chunk = self.kernels, self.prefill, self.situation.chunk
        if kernels is None:
            return UNTIMED if self.latency is None else TIMED
        peak, bandwidth, calls = peak_tflops(kernels.chip), kernels.chip.bandwidth_gbs, calls_of(phase.tokens, chunk)
        if phase.by_host:
            return f"{calls} × ({{host}} + {{wait}})"
        if phase.expected_s is None or phase.operations is None or not peak or not bandwidth:
            return UNTIMED
        chunks = math.ceil(phase.tokens / chunk)
        launched = chunks * (self.launching_s or 0.0)
        waited = 0.0 if self.host is None else calls * self.host.wait_s
        waits = "" if self.host is None else f" + {calls} × {{wait}}"
        reached = phase.operations / (peak * 1e12) / (phase.expected_s - launched - waited)
        weights, shared = self.work.weight_bytes(min(phase.tokens, chunk)) or 0, kernels.constants.shared
        reading_s = chunks * weights / (shared * bandwidth * 1e9)
        if math.isclose(reading_s + launched + waited, phase.expected_s, rel_tol=1e-6):
            read = "{chunk}" if self.work.expert_bytes else "{weights}"
            return f"{chunks} × {read} ÷ ({shared:.1%} × {{bandwidth}}) + {chunks} × {{launching}}{waits}"
        return f"{{operations}} ÷ ({reached:.1%} × {{peak}}) + {chunks} × {{launching}}{waits}"


def _saved_s(measured_s: float | None, before: Phase, after: Phase) -> float:
    if measured_s is None or not before.expected_s or after.expected_s is None:
        return 0.0
    saved = (before.expected_s - after.expected_s) * min(1.0, measured_s / before.expected_s)
    return max(min(saved, measured_s - (after.ceiling_s or 0.0)), 0.0)


def _behind_s(measured_s: float | None, phase: Phase) -> float:
    """Seconds beyond expectation, if too many for its error; else 0."""
    # Of the host only the least is known: what it takes beyond that, on a quiet machine too, is not.
    expected_s = None if phase.by_host else phase.expected_s
    if measured_s is None or expected_s is None or expected_s >= BEHIND * measured_s:
        return 0.0
    return measured_s - expected_s
