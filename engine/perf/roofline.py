"""What a machine makes of a model: bytes a step, the rate that no kernel can beat, and the one to expect of good kernels.

The expected speed is the roofline with overheads fitted to published measurements on Apple silicon:

    decode   t = max(weights ÷ (s · B), rows × products ÷ (p · F)) + attention + launches × l + products with experts × e
    attention  = Σ over caches of layers × ⁴√(r⁴ + c⁴), r = bytes ÷ (k · B), c = operations ÷ (a · F)
    unfused    = Σ over caches of layers × query heads of a key head × r
    prefill  t = max(operations × i ÷ (p · F), chunks × weights ÷ (s · B)) + chunks × launches × l
             i = 1 + n · (cores ÷ hidden)² + r ÷ rows of each expert
    launch   l = that of M4 and later × a ^ generations before it × g ^ sizes beyond the smallest: Pro, Max, Ultra

A step has a row for each sequence; of one row the products take no time beside the weights, and those of many are a prefill's.
B is the table's bandwidth, F its half-precision peak; s, k, a, p are shares below 1, l and e are seconds. Narrow matrices leave
cores without work (n), and so do experts that few of a chunk's rows choose (r, for mixtures alone). Metal's vector attention gives
a query head a SIMD group of its own, and each computes with every key, so beyond about four query heads for each key head it
waits for arithmetic, not for memory; where no kernel is fused, every query head reads the keys and values anew. All constants come
from assets/roofline.json, which tests/roofline/fit_roofline.py writes with its errors; nothing is tuned by hand. The launch goes by
the chip's name, not by its bandwidth: so of two chips alike in all else, the one with more bandwidth is never slower.

A step costs the host as well: Python builds its graph, however little there is to compute.

    decode   t = max(device, host)                  the host builds the next step while the device is at this one
    prefill  t = max(device, calls × host) + calls × wait

The host's share is measured where the model runs, in milliseconds: a step's graph is built and dropped. It is a lower bound: MLX
encodes kernels on the host as well, which the fitted launches include. Of a machine that is only named it is unknown, and so is
the speed there of a model smaller than all that the shares are fitted to.
"""

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from typing import Any, Literal, Protocol

from ..metrics import ceiling_tps, rate
from .hardware import Chip, Source, generation_of, units_of
from .workload import Heads, KVUse, Workload

Kind = Literal["dense", "mixture", "hybrid"]
Bound = Literal["memory", "compute"]

SIMD_UNITS = 4
"""Parts of a GPU core that each run a SIMD group. Two-pass attention puts the query heads of a key head into one threadgroup, a
SIMD group each; beyond four some parts get one more than others, and all wait for these: five heads take as long as eight."""

TYPICAL_INTENSITY = 30
"""Half-precision operations for each byte of bandwidth where the table has no peak: chips from M1 to M5 have 26 to 42."""

RECENT = 4
"""The generation from which launching a kernel takes the same; each one before takes longer by a factor."""

SIZES = ("", "Pro", "Max", "Ultra")
"""Apple's sizes of a generation. Each has about twice the GPU of the one before, and reports name it more often than the cores."""

CHUNK = 2048
"""Prompt tokens computed at once in published measurements: mlx-lm's default."""

BUDGET_S, LEAST_TRIES = 0.02, 3
"""Seconds of trials, and how many at least: the quickest counts."""

WAITS = 5
"""Round trips to the device that are timed."""

MATTERS_S = 0.02
"""Seconds of a device's step above which no host is the slower of the two: a slow one builds the longest in less."""


class LatencyModel(Protocol):
    """How fast a machine really is. Seconds; None is unknown."""

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        """Seconds of a decode step at ``context`` tokens in each of ``batch`` sequences."""

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens``, one or more, after ``cached``, up to ``chunk`` at once, and of the first token."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted shares of what a chip allows, and seconds per kernel launched; see the formulas above.

    attend: the share of the peak that fused attention reaches, by the first generation of which it is true. per_key: numbers that
    a key's score, its exponential and its sum are worth, beside the head's own. gather_s: what a product with experts takes beyond
    a launch, to choose, sort and weigh them. launch_s is of the smallest recent chip; older: the factor for each generation before
    M4; larger: for each size, since larger chips have more cores to start and to wait for. Both are the chip's, so engines share
    them. narrow, few_rows: see the formula.
    prefill: by kind of model, on shaders and on neural accelerators.
    """

    shared: float
    kv: float
    attend: Mapping[str, float]
    per_key: float
    gather_s: float
    launch_s: float
    older: float
    larger: float
    narrow: float
    few_rows: float
    prefill: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class FittedRange:
    """What the published rows of decoding cover: bytes of weights a step reads, at least, and tokens of context, at most."""

    least_weight_bytes: int
    longest_context: int

    def covers(self, work: Workload) -> bool | None:
        """Whether a step reads as much as some published one; below that the host decides. None where the bytes are unknown."""
        weights = work.weight_bytes()
        return None if weights is None else weights >= self.least_weight_bytes


@dataclass(frozen=True, slots=True)
class Fitted:
    """The expected speed of a chip whose bandwidth is known. Decode needs no peak; prefill is unknown without one."""

    chip: Chip
    constants: Constants

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        """Seconds of one step; None where bytes or bandwidth are unknown."""
        reading, bandwidth = self.reading_s(work, batch), self.chip.bandwidth_gbs
        if reading is None or bandwidth is None:
            return None
        attending = batch * self.attention_s(work, context, bandwidth)
        gathering = work.expert_products * self.constants.gather_s * self._slowness()
        return reading + attending + self._launching_s(work) + gathering

    def reading_s(self, work: Workload, batch: int = 1) -> float | None:
        """Seconds of a step of so many sequences that its products take: reading the weights, or the arithmetic of many rows."""
        weights, bandwidth = work.weight_bytes(batch), self.chip.bandwidth_gbs
        if weights is None or bandwidth is None:
            return None
        return max(weights / (self.constants.shared * bandwidth * 1e9), self._multiplying_s(work, batch))

    def _multiplying_s(self, work: Workload, rows: int) -> float:
        """The arithmetic of so many rows with all weights; 0 where the peak or the operations are unknown."""
        peak, parameters = peak_tflops(self.chip), work.prefill_parameters
        if peak is None or parameters is None:
            return 0.0
        share = self.constants.prefill[units_of(self.chip)][kind_of(work)]
        return 2 * rows * (parameters + work.head_parameters) / (share * peak * 1e12)

    def attention_s(self, work: Workload, context: int, bandwidth_gbs: float) -> float:
        """Seconds of a step of one sequence that its attention takes, and the states that some layers keep instead."""
        alike = ((layer, len(list(run))) for layer, run in groupby(work.kv))
        return sum(count * self.attending_s(layer, context, bandwidth_gbs) for layer, count in alike)

    def attending_s(self, layer: KVUse, context: int, bandwidth_gbs: float) -> float:
        """Seconds in which one sequence's step attends to this cache, by all layers that do."""
        bandwidth = bandwidth_gbs * 1e9
        heads, reading = layer.heads, layer.bytes_at(context) / (self.constants.kv * bandwidth)
        if heads is None:
            return reading
        if not heads.fused:
            return heads.layers * heads.group * reading
        computing = self._computing_s(heads, layer.held(context), bandwidth)
        return heads.layers * math.sqrt(math.hypot(reading**2, computing**2))

    def _computing_s(self, heads: Heads, held: int, bandwidth: float) -> float:
        """Seconds of one layer's arithmetic with the keys and values held, in the fused kernel."""
        kernel = heads.kernel(held, large=size_of(self.chip.name) > 0)
        queries = heads.queries
        if kernel == "vector two-pass" and heads.group > SIMD_UNITS:
            queries = heads.keys * SIMD_UNITS * math.ceil(heads.group / SIMD_UNITS)
        numbers = heads.key_dim + heads.value_dim + self.constants.per_key
        peak = TYPICAL_INTENSITY * bandwidth if self.chip.fp16_tflops is None else self.chip.fp16_tflops * 1e12
        return 2 * held * queries * numbers / (self._attend_share() * peak)

    def _attend_share(self) -> float:
        """The share of the latest generation named that is not later than the chip's; of the first for a chip of none."""
        generation = generation_of(self.chip.name) or 0
        shares = {int(name.removeprefix("M")): share for name, share in self.constants.attend.items()}
        return shares[max((first for first in shares if first <= generation), default=min(shares))]

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached``, up to ``chunk`` at once; None where operations or the peak are
        unknown."""
        operations, peak = work.prefill_operations(tokens, cached), peak_tflops(self.chip)
        weights, bandwidth = work.weight_bytes(min(tokens, chunk)), self.chip.bandwidth_gbs
        idle = self._idle(work, min(tokens, chunk))
        if operations is None or peak is None or weights is None or bandwidth is None or idle is None:
            return None
        chunks = math.ceil(tokens / chunk)
        share = self.constants.prefill[units_of(self.chip)][kind_of(work)]
        computing = operations * (1 + idle) / (share * peak * 1e12)
        reading = chunks * weights / (self.constants.shared * bandwidth * 1e9)
        return max(computing, reading) + chunks * self._launching_s(work)

    def _idle(self, work: Workload, rows: int) -> float | None:
        """Operations left undone beside each one, for want of work; None where cores or the model's width are unknown."""
        if self.chip.gpu_cores is None or work.hidden is None:
            return None
        narrow = self.constants.narrow * (self.chip.gpu_cores / work.hidden) ** 2
        if not work.expert_bytes or not work.active:
            return narrow
        rows_of_each = rows * work.active / work.touched(rows)  # of the experts that have any
        return narrow + self.constants.few_rows / rows_of_each

    def _launching_s(self, work: Workload) -> float:
        return work.launches * self.constants.launch_s * self._slowness()

    def _slowness(self) -> float:
        """How much longer than on the smallest recent chip a kernel takes to start."""
        c, generation = self.constants, generation_of(self.chip.name)
        age = max(RECENT - generation, 0) if generation is not None else 0
        return math.pow(c.older, age) * math.pow(c.larger, size_of(self.chip.name))


def kind_of(work: Workload) -> Kind:
    """Return the kind of model, as far as kernels differ: experts first, then states."""
    if "mixture" in work.traits:
        return "mixture"
    return "hybrid" if {"hybrid", "state space"} & set(work.traits) else "dense"


def peak_tflops(chip: Chip) -> float | None:
    """Return the peak that prefill is measured against: with neural accelerators where the chip has them."""
    return chip.nax_fp16_tflops if units_of(chip) == "neural" and chip.nax_fp16_tflops is not None else chip.fp16_tflops


def size_of(name: str) -> int:
    """Return the place in SIZES of an Apple M chip, by its name; 0 for another chip."""
    found = re.match(r"Apple M\d+ (\w+)", name)
    return SIZES.index(found.group(1)) if found and found.group(1) in SIZES else 0


@functools.cache
def published() -> Mapping[str, Any]:
    """Return the shipped file: constants and ranges by engine, how they were fitted, and their errors."""
    text = resources.files("tokamac.assets").joinpath("roofline.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def constants_of(engine: str = "mlx") -> Constants:
    """Return the constants of an engine: "mlx" or "llama.cpp"."""
    return Constants(**published()["engines"][engine])


def range_of(engine: str = "mlx") -> FittedRange:
    """Return what the rows of an engine cover that its constants are fitted to."""
    return FittedRange(**published()["ranges"][engine])


def fitted(chip: Chip) -> Fitted | None:
    """Return the expected speeds of an Apple chip in the table; None for any other, which only a measurement knows."""
    known = chip.source == "table" and chip.name.startswith("Apple")
    return Fitted(chip, constants_of()) if known else None


def ridge_point(bandwidth_gbs: float, tflops: float) -> float:
    """Return the arithmetic intensity, in operations a byte, above which a pass is compute-bound."""
    return tflops * 1e3 / bandwidth_gbs


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host's part. step_s: building one call of the model. wait_s: a round trip to the device that does nothing."""

    step_s: float
    wait_s: float = 0.0

    def reading_s(self, calls: int) -> float:
        """Seconds of ``calls`` calls, each waited for."""
        return calls * (self.step_s + self.wait_s)


@dataclass(frozen=True, slots=True)
class HostLimited:
    """Never faster than the host builds steps. host: None where it was not measured, or does not matter."""

    device: Fitted
    host: Host | None = None

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        """Seconds of a decode step; None also for a model so small that the host decides, where that is unknown."""
        device_s = self.device.decode_s(work, context, batch)
        if device_s is None or self.host is None:
            return device_s if range_of().covers(work) else None
        return max(device_s, self.host.step_s)

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached``; None as for decoding."""
        device_s = self.device.prefill_s(work, tokens, cached, chunk)
        if device_s is None or self.host is None:
            return device_s if range_of().covers(work) else None
        calls = calls_of(tokens, chunk)
        return max(device_s + calls * self.host.wait_s, self.host.reading_s(calls))


def decodes_by_host(latency: object, expected_s: float | None) -> bool:
    """Whether a step takes as long as it is expected to because the host does."""
    return isinstance(latency, HostLimited) and latency.host is not None and expected_s == latency.host.step_s


def reads_by_host(latency: object, expected_s: float | None, calls: int) -> bool:
    """Whether a prompt of ``calls`` calls takes as long as it is expected to because the host does."""
    return isinstance(latency, HostLimited) and latency.host is not None and expected_s == latency.host.reading_s(calls)


def calls_of(tokens: int, chunk: int) -> int:
    """Return how often the model is called for a prompt: for its chunks, and for its last token, which makes the reply's first."""
    return math.ceil((tokens - 1) / chunk) + 1


def measure_host(model: Any, new_caches: Callable[[], list[Any]]) -> Host | None:
    """Time building a decode step of mlx-lm's ``model``, loaded or a skeleton, and a round trip. Computes nothing of the model.

    new_caches: makes empty caches for it. None where its step can't be built. The thread's own time counts: what other programs
    take of a busy machine is not the host's part.
    """
    import mlx.core as mx

    steps: list[float] = []
    until = time.perf_counter() + BUDGET_S
    try:
        while len(steps) < LEAST_TRIES or time.perf_counter() < until:
            caches = new_caches()
            began = time.thread_time()
            logits = model(mx.array([[0]]), cache=caches)
            mx.argmax(logits[:, -1, :], axis=-1)
            steps.append(time.thread_time() - began)
    except (RuntimeError, ValueError):
        return None
    return Host(min(steps), min(_wait_s() for _ in range(WAITS)))


def _wait_s() -> float:
    import mlx.core as mx

    one = mx.array(1.0)
    began = time.perf_counter()
    mx.eval(one + 1.0)
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on the roofline. bytes_read and operations of all of it; intensity is operations a byte.

    bound: which side of the ridge it is on: above, arithmetic limits it. ceiling_s: the least time that physics allows.
    expected_s: with good kernels, never below it. None is unknown. by_host: it is the host's time, which the device waits for.
    """

    tokens: int
    bytes_read: int | None
    operations: int | None
    intensity: float | None
    bound: Bound | None
    ceiling_s: float | None
    expected_s: float | None
    by_host: bool = False

    @property
    def ceiling_tps(self) -> float | None:
        """Tokens a second that nothing can beat."""
        return rate(self.tokens, self.ceiling_s)

    @property
    def expected_tps(self) -> float | None:
        """Tokens a second to expect."""
        return rate(self.tokens, self.expected_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Both phases of a reply. prompt tokens, of which ``cached`` are not computed: at most all but the last, which makes the first
    token. Decode at ``context``, ``batch`` at once.

    ridge: operations a byte above which a phase is bound by arithmetic. ttft_s: prefill and the first token, nothing before it.
    """

    prompt: int
    cached: int
    context: int
    batch: int
    ridge: float | None
    prefill: Phase
    decode: Phase

    @property
    def ceiling_tps(self) -> float | None:
        """Tokens a second of all sequences together that no kernel can beat."""
        return self.decode.ceiling_tps

    @property
    def expected_tps(self) -> float | None:
        """Tokens a second of all sequences together to expect."""
        return self.decode.expected_tps

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token to expect."""
        return self.prefill.expected_s


def predict(
    work: Workload,
    chip: Chip,
    latency: LatencyModel | None,
    prompt: int,
    context: int,
    *,
    cached: int = 0,
    batch: int = 1,
    chunk: int = CHUNK,
) -> Prediction:
    """Return what ``chip`` makes of ``work``. latency: None leaves what is expected unknown, and the ceilings known.

    The last token of a prompt is always computed: a first token comes of nothing else.
    """
    prompt = max(prompt, 1)
    cached = min(cached, prompt - 1)
    peak = peak_tflops(chip)
    ridge = None if peak is None or chip.bandwidth_gbs is None else ridge_point(chip.bandwidth_gbs, peak)
    return Prediction(
        prompt=prompt,
        cached=cached,
        context=context,
        batch=batch,
        ridge=ridge,
        prefill=prefill_phase(work, chip, latency, prompt - cached, cached, chunk=chunk),
        decode=decode_phase(work, chip, latency, context, batch),
    )


def decode_phase(work: Workload, chip: Chip, latency: LatencyModel | None, context: int, batch: int = 1) -> Phase:
    """Return a decode step: one token for each of ``batch`` sequences."""
    operations = None
    if work.prefill_parameters is not None:
        attended = sum(layer.operations(1, max(context - 1, 0)) for layer in work.attention)
        operations = batch * (2 * (work.prefill_parameters + work.head_parameters) + attended)
    expected = None if latency is None else latency.decode_s(work, context, batch)
    phase = _phase(chip, batch, work.step_bytes(context, batch), operations, expected)
    return replace(phase, by_host=decodes_by_host(latency, phase.expected_s))


def prefill_phase(
    work: Workload, chip: Chip, latency: LatencyModel | None, tokens: int, cached: int = 0, *, chunk: int = CHUNK
) -> Phase:
    """Return the reading of ``tokens``, one or more, after ``cached``. Every chunk reads the weights; the ceiling counts them
    once."""
    weights, operations = work.weight_bytes(tokens), work.prefill_operations(tokens, cached)
    read = None if weights is None else weights + work.kv_bytes(cached + tokens)
    expected = None if latency is None else latency.prefill_s(work, tokens, cached, chunk)
    phase = _phase(chip, tokens, read, operations, expected)
    return replace(phase, by_host=reads_by_host(latency, phase.expected_s, calls_of(tokens, chunk)))


def _phase(chip: Chip, tokens: int, bytes_read: int | None, operations: int | None, expected_s: float | None) -> Phase:
    per_second, peak = ceiling_tps(chip.bandwidth_gbs, bytes_read), peak_tflops(chip)
    reading = None if per_second is None else 1 / per_second
    computing = None if operations is None or peak is None else operations / (peak * 1e12)
    known = [seconds for seconds in (reading, computing) if seconds is not None]
    least = max(known, default=None)
    bound: Bound | None = None
    if reading is not None and computing is not None:
        bound = "memory" if reading >= computing else "compute"
    return Phase(
        tokens=tokens,
        bytes_read=bytes_read,
        operations=operations,
        intensity=rate(operations, bytes_read) if operations and bytes_read else None,
        bound=bound,
        ceiling_s=least,
        expected_s=None if expected_s is None else max(expected_s, least or 0.0),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of decoding at a context of ``context`` tokens. Bytes, GB/s (10^9), tokens a second; None is unknown.

    bandwidth_source: the chip table, a measurement on this machine, or unknown; bandwidth_condition: how it was measured, or why
    it is unknown.
    expected_tps: what good kernels reach; unknown until published measurements or this machine's own say it.
    """

    context: int
    weight_bytes_per_token: int | None
    kv_bytes_per_step: int | None
    bytes_per_step: int | None
    bandwidth_gbs: float | None
    bandwidth_source: Source
    ceiling_tps: float | None
    expected_tps: float | None = None
    bandwidth_condition: str = ""


def limits_of(context: int, work: Workload, chip: Chip, latency: LatencyModel | None) -> Limits:
    """Return the limits of a model on a chip. latency: None leaves the expected speed unknown."""
    expected = decode_phase(work, chip, latency, context).expected_tps
    known = limits_for(
        context, weight_bytes_per_token=work.weight_bytes(), kv_bytes_per_step=work.kv_bytes(context), chip=chip
    )
    return replace(known, expected_tps=expected)


def limits_for(
    context: int, *, weight_bytes_per_token: int | None, kv_bytes_per_step: int | None, chip: Chip
) -> Limits:
    """Return the limits by the bytes alone that a step reads. An unknown cost leaves the ceiling unknown."""
    unknown = weight_bytes_per_token is None or kv_bytes_per_step is None
    step = None if unknown else (weight_bytes_per_token or 0) + (kv_bytes_per_step or 0)
    return Limits(
        context=context,
        weight_bytes_per_token=weight_bytes_per_token,
        kv_bytes_per_step=kv_bytes_per_step,
        bytes_per_step=step,
        bandwidth_gbs=chip.bandwidth_gbs,
        bandwidth_source=chip.source,
        ceiling_tps=ceiling_tps(chip.bandwidth_gbs, step),
        bandwidth_condition=chip.condition,
    )
