"""The roofline: a model's work (bytes, operations, launches), its ceiling, and the expected speed."""

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

from ..kv.costs import AttentionCall, AttentionDevice, Kernel, kernel_of
from ..metrics import ceiling_tps, rate
from .hardware import Chip, Source, generation_of, units_of


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention.

    width: key plus value dims over all query heads. layer: whose keys and values these are. every: tokens per key.
    """

    width: int
    window: int | None
    layer: int = 0
    every: int = 1

    def operations(self, tokens: int, cached: int) -> int:
        if self.every > 1:
            pairs = _pairs_before(cached + tokens, self) - _pairs_before(cached, self)
        else:
            pairs = visible_pairs(tokens, cached, self.window)
        return 2 * self.width * pairs


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that read one cache in a decode step."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int
    written_out: bool = False
    layers: int = 1

    @property
    def group(self) -> int:
        return self.queries // self.keys

    @property
    def fused(self) -> bool:
        return self.kernel(LONG, large=True) != "unfused"

    def kernel(self, held: int, *, large: bool) -> Kernel:
        """Return Metal's kernel for one unmasked query after ``held`` tokens; large: Pro, Max, Ultra."""
        return _decode_kernel(self, max(held, 1), large)


# Tokens of a context for which it is asked whether there is a fused kernel: one that begins somewhere would else make
# the step at which it begins quicker than the one before.
LONG = 1 << 20


@functools.lru_cache(maxsize=4096)
def _decode_kernel(heads: Heads, held: int, large: bool) -> Kernel:
    call = AttentionCall(
        query_heads=heads.queries,
        heads=heads.keys,
        queries=1,
        keys=held,
        size=heads.key_dim,
        value_size=heads.value_dim,
        mask="none",
        written_out=heads.written_out,
    )
    return kernel_of(call, AttentionDevice("metal", architecture="s" if large else "g"))


def visible_pairs(tokens: int, cached: int, window: int | None) -> int:
    last = cached + tokens
    if window is None or last <= window:
        return _triangle(last) - _triangle(cached)
    if cached >= window:
        return tokens * window
    return _triangle(window) - _triangle(cached) + (last - window) * window


def _pairs_before(tokens: int, attention: Attention) -> int:
    every, most = attention.every, attention.window
    full = tokens if most is None else min(tokens, most * every - 1)  # queries that see fewer than the most
    whole, rest = divmod(full, every)
    pairs = every * _triangle(whole - 1) + whole * (rest + 1) if whole else 0
    return pairs + (0 if most is None else (tokens - full) * most)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


# dense: every weight is read for every token. mixture: of experts, only some are active. sliding window: some layers
# see only the last tokens. latent attention: keys and values are compressed together (MLA). compressed attention:
# several tokens become one entry. hybrid: some layers keep a state of fixed size instead of keys and values (linear
# attention, state space, convolution). state space: all of them do.
Trait = Literal[
    "dense", "mixture", "sliding window", "latent attention", "compressed attention", "hybrid", "state space"
]

# The mode of BitNet's matrices: four weights of three values each to a byte, stacked along the rows, with one scale for
# all.
TERNARY = "ternary"


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` equal matrices (rows, columns) of a model, packed with ``bits`` in groups (None: floats).

    stack, active: matrices in one array, and those that a token uses (experts); 1 and 1 for a plain matrix. A
    convolution over tokens counts as a stack of channels. head: makes logits, so prefill uses it once.
    """

    rows: int
    columns: int
    bits: int | None
    group_size: int = 64
    mode: str = "affine"
    stack: int = 1
    active: int = 1
    head: bool = False
    count: int = 1

    def nbytes(self, value_bytes: int) -> int:
        weights = self.rows * self.columns * self.active
        if self.bits is None:
            return weights * value_bytes
        # Affine groups have a scale and a bias each, microscaled ones a scale of one byte.
        group_bytes = {"affine": 2 * value_bytes, TERNARY: 0}.get(self.mode, 1)
        return round(weights * (self.bits / 8 + group_bytes / self.group_size))

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.active * self.count

    @property
    def key(self) -> str:
        packing = "float" if self.bits is None else f"{self.mode} {self.bits} in {self.group_size}"
        stack = "" if self.stack == 1 else f" {self.active} of {self.stack}"
        return f"{self.rows}x{self.columns} {packing}{stack}"


@dataclass(frozen=True, slots=True)
class KVUse:
    """One cache: bytes per token up to ``limit`` tokens (None: all), and ``fixed_bytes``.

    picked_bytes_per_token: the part of which a step reads at most ``picked`` tokens (sparse attention).
    """

    bytes_per_token: int
    limit: int | None
    fixed_bytes: int
    heads: Heads | None = None
    picked_bytes_per_token: int = 0
    picked: int = 0

    def held(self, context: int) -> int:
        return context if self.limit is None else min(context, self.limit)

    def bytes_at(self, context: int) -> int:
        held = self.held(context)
        unread = max(0, held - self.picked) * self.picked_bytes_per_token
        return self.fixed_bytes + held * self.bytes_per_token - unread


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's work in bytes and parameters; None is unknown.

    expert_bytes: all experts, of which each token reads the share ``active``. prefill_parameters: active, without
    the head. kv: one per cache, shared keys once. attention: one per attending layer.
    """

    traits: tuple[Trait, ...]
    layers: int
    hidden: int | None
    launches: int
    shared_bytes: int
    expert_bytes: int
    active: float | None
    prefill_parameters: int | None
    head_parameters: int
    kv: tuple[KVUse, ...]
    attention: tuple[Attention, ...]
    products: tuple[Product, ...]
    query_heads: int | None
    vocabulary: int | None

    @property
    def expert_products(self) -> int:
        return sum(product.count for product in self.products if product.active < product.stack)

    def weight_bytes(self, batch: int = 1) -> int | None:
        if not self.expert_bytes:
            return self.shared_bytes
        if self.active is None:
            return None
        return self.shared_bytes + round(self.expert_bytes * self.touched(batch))

    def touched(self, tokens: int) -> float:
        return 1 - (1 - (self.active or 0.0)) ** tokens

    def kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of keys, values and states that one step reads at this context."""
        # Writes are left out: one token of KV; states may stay in the chip's cache, and this must remain a ceiling.
        return batch * sum(layer.bytes_at(context) for layer in self.kv)

    def step_bytes(self, context: int, batch: int = 1) -> int | None:
        weights = self.weight_bytes(batch)
        return None if weights is None else weights + self.kv_bytes(context, batch)

    def prefill_operations(self, tokens: int, cached: int = 0) -> int | None:
        if self.prefill_parameters is None:
            return None
        linear = 2 * (self.prefill_parameters * tokens + self.head_parameters)
        return linear + sum(layer.operations(tokens, cached) for layer in self.attention)


# decode   t = max(weights ÷ (s·B), rows × products ÷ (p·F)) + attention + launches × l + expert products × e
# attention  = Σ over caches of layers × ⁴√(r⁴ + c⁴), r = bytes ÷ (k · B), c = operations ÷ (a · F)
# unfused    = Σ over caches of layers × query heads of a key head × r
# prefill  t = max(operations × i ÷ (p · F), chunks × weights ÷ (s · B)) + chunks × launches × l
#          i = 1 + n · (cores ÷ hidden)² + r ÷ rows of each expert
# launch   l = that of M4 and later × a ^ generations before it × g ^ sizes beyond the smallest
# host     decode max(device, host); prefill max(device, calls × host) + calls × wait

# B bandwidth, F half-precision peak; s, k, a, p shares < 1, l and e seconds; n: narrow matrices, r: rarely chosen
# experts idle cores. Metal's vector attention computes per query head: beyond ~4 per key head it is compute-bound.
# Fitted by tests/roofline/fit_roofline.py (assets/roofline.json). Host time, measured graph building, is a lower bound.
# The launch goes by the chip's name: of two chips otherwise alike, more bandwidth is never slower.


Kind = Literal["dense", "mixture", "hybrid"]
Bound = Literal["memory", "compute"]

# Parts of a GPU core that each run a SIMD group. Two-pass attention puts the query heads of a key head into one
# threadgroup, a SIMD group each; beyond four some parts get one more than others, and all wait for these: five heads
# take as long as eight.
SIMD_UNITS = 4

# Half-precision operations for each byte of bandwidth where the table has no peak: chips from M1 to M5 have 26 to 42.
TYPICAL_INTENSITY = 30

RECENT = 4  # the generation from which launching a kernel takes the same; each one before takes longer by a factor

# Apple's sizes of a generation. Each has about twice the GPU of the one before, and reports name it more often than the
# cores.
SIZES = ("", "Pro", "Max", "Ultra")

CHUNK = 2048  # prompt tokens computed at once in published measurements: mlx-lm's default

BUDGET_S, LEAST_TRIES = 0.02, 3  # seconds of trials, and how many at least: the quickest counts

WAITS = 5  # round trips to the device that are timed

# Seconds of a device's step above which no host is the slower of the two: a slow one builds the longest in less.
MATTERS_S = 0.02


class LatencyModel(Protocol):
    """A machine's actual speed. Seconds; None is unknown."""

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        """Seconds of a decode step at ``context`` tokens per sequence."""

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of prefilling ``tokens`` ≥ 1 after ``cached``, first token included."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted shares and seconds of the module's formulas.

    attend: share of peak, by first generation. per_key: extra numbers per key. gather_s: expert product beyond a
    launch. older: factor per generation before M4; larger: per size. prefill: by model kind and unit.
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
    least_weight_bytes: int
    longest_context: int

    def covers(self, work: Workload) -> bool | None:
        weights = work.weight_bytes()
        return None if weights is None else weights >= self.least_weight_bytes


@dataclass(frozen=True, slots=True)
class Fitted:
    """Expected speed; only prefill needs a peak."""

    chip: Chip
    constants: Constants

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        reading, bandwidth = self.reading_s(work, batch), self.chip.bandwidth_gbs
        if reading is None or bandwidth is None:
            return None
        attending = batch * self.attention_s(work, context, bandwidth)
        gathering = work.expert_products * self.constants.gather_s * self._slowness()
        return reading + attending + self._launching_s(work) + gathering

    def reading_s(self, work: Workload, batch: int = 1) -> float | None:
        weights, bandwidth = work.weight_bytes(batch), self.chip.bandwidth_gbs
        if weights is None or bandwidth is None:
            return None
        return max(weights / (self.constants.shared * bandwidth * 1e9), self._multiplying_s(work, batch))

    def _multiplying_s(self, work: Workload, rows: int) -> float:
        peak, parameters = peak_tflops(self.chip), work.prefill_parameters
        if peak is None or parameters is None:
            return 0.0
        share = self.constants.prefill[units_of(self.chip)][kind_of(work)]
        return 2 * rows * (parameters + work.head_parameters) / (share * peak * 1e12)

    def attention_s(self, work: Workload, context: int, bandwidth_gbs: float) -> float:
        alike = ((layer, len(list(run))) for layer, run in groupby(work.kv))
        return sum(count * self.attending_s(layer, context, bandwidth_gbs) for layer, count in alike)

    def attending_s(self, layer: KVUse, context: int, bandwidth_gbs: float) -> float:
        bandwidth = bandwidth_gbs * 1e9
        heads, reading = layer.heads, layer.bytes_at(context) / (self.constants.kv * bandwidth)
        if heads is None:
            return reading
        if not heads.fused:
            return heads.layers * heads.group * reading
        computing = self._computing_s(heads, layer.held(context), bandwidth)
        return heads.layers * math.sqrt(math.hypot(reading**2, computing**2))

    def _computing_s(self, heads: Heads, held: int, bandwidth: float) -> float:
        kernel = heads.kernel(held, large=size_of(self.chip.name) > 0)
        queries = heads.queries
        if kernel == "vector two-pass" and heads.group > SIMD_UNITS:
            queries = heads.keys * SIMD_UNITS * math.ceil(heads.group / SIMD_UNITS)
        numbers = heads.key_dim + heads.value_dim + self.constants.per_key
        peak = TYPICAL_INTENSITY * bandwidth if self.chip.fp16_tflops is None else self.chip.fp16_tflops * 1e12
        return 2 * held * queries * numbers / (self._attend_share() * peak)

    def _attend_share(self) -> float:
        generation = generation_of(self.chip.name) or 0
        shares = {int(name.removeprefix("M")): share for name, share in self.constants.attend.items()}
        return shares[max((first for first in shares if first <= generation), default=min(shares))]

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
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
        c, generation = self.constants, generation_of(self.chip.name)
        age = max(RECENT - generation, 0) if generation is not None else 0
        return math.pow(c.older, age) * math.pow(c.larger, size_of(self.chip.name))


def kind_of(work: Workload) -> Kind:
    if "mixture" in work.traits:
        return "mixture"
    return "hybrid" if {"hybrid", "state space"} & set(work.traits) else "dense"


def peak_tflops(chip: Chip) -> float | None:
    return chip.nax_fp16_tflops if units_of(chip) == "neural" and chip.nax_fp16_tflops is not None else chip.fp16_tflops


def size_of(name: str) -> int:
    found = re.match(r"Apple M\d+ (\w+)", name)
    return SIZES.index(found.group(1)) if found and found.group(1) in SIZES else 0


@functools.cache
def published() -> Mapping[str, Any]:
    text = resources.files("tokamac.assets").joinpath("roofline.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def constants_of(engine: str = "mlx") -> Constants:
    return Constants(**published()["engines"][engine])


def range_of(engine: str = "mlx") -> FittedRange:
    return FittedRange(**published()["ranges"][engine])


def expected_range(expected_tps: float, work: Workload, ceiling_tps: float | None) -> tuple[float, float]:
    """Return what nine of ten published rates lie within: of chips, and of models, that the fit had not seen."""
    kind = "dense" if kind_of(work) == "dense" else "mixture and hybrid"
    errors = published()["errors"]["mlx"][f"decode, {kind}"]
    error = max(errors[how]["p90"] for how in ("held out", "model held out"))
    return expected_tps / (1 + error), min(expected_tps / (1 - error), ceiling_tps or math.inf)


def fitted(chip: Chip) -> Fitted | None:
    """Return an Apple chip's expected speeds; None for others, which only measurement knows."""
    known = chip.source == "table" and chip.name.startswith("Apple")
    return Fitted(chip, constants_of()) if known else None


def ridge_point(bandwidth_gbs: float, tflops: float) -> float:
    return tflops * 1e3 / bandwidth_gbs


@dataclass(frozen=True, slots=True)
class Host:
    """Host seconds. step_s: building a call; wait_s: an empty device round trip."""

    step_s: float
    wait_s: float = 0.0

    def reading_s(self, calls: int) -> float:
        return calls * (self.step_s + self.wait_s)


@dataclass(frozen=True, slots=True)
class HostLimited:
    """Bounds speed by the host; None if unmeasured or irrelevant."""

    device: Fitted
    host: Host | None = None

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        device_s = self.device.decode_s(work, context, batch)
        if device_s is None or self.host is None:
            return device_s if range_of().covers(work) else None
        return max(device_s, self.host.step_s)

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        device_s = self.device.prefill_s(work, tokens, cached, chunk)
        if device_s is None or self.host is None:
            return device_s if range_of().covers(work) else None
        calls = calls_of(tokens, chunk)
        return max(device_s + calls * self.host.wait_s, self.host.reading_s(calls))


def _by_host(latency: object, expected_s: float | None, calls: int | None = None) -> bool:
    """Whether the host takes all of it. calls: of a prompt; None: a decode step."""
    if not isinstance(latency, HostLimited) or latency.host is None:
        return False
    return expected_s == (latency.host.step_s if calls is None else latency.host.reading_s(calls))


def calls_of(tokens: int, chunk: int) -> int:
    return math.ceil((tokens - 1) / chunk) + 1


def measure_host(model: Any, new_caches: Callable[[], list[Any]]) -> Host | None:
    """Time building a step and a round trip, without computing; None on failure."""
    # Thread time: other programs' use of a busy machine isn't the host's.
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
    """One phase on the roofline. intensity: operations per byte; ceiling_s: physical minimum; by_host: host-bound."""

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
        return rate(self.tokens, self.ceiling_s)

    @property
    def expected_tps(self) -> float | None:
        return rate(self.tokens, self.expected_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prefill and decode predicted.

    Attributes:
        cached: Prompt tokens not computed; at most all but the last.
        context: Tokens per sequence at decode, ``batch`` of them.
        ridge: Operations per byte of the compute bound.
        ttft_s: Prefill and first token only.
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
        """Expected seconds to the first token."""
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
    """Predict ``work`` on ``chip``; without latency, ceilings only."""
    # The last prompt token is always computed: it yields the first token.
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
    operations = None
    if work.prefill_parameters is not None:
        attended = sum(layer.operations(1, max(context - 1, 0)) for layer in work.attention)
        operations = batch * (2 * (work.prefill_parameters + work.head_parameters) + attended)
    expected = None if latency is None else latency.decode_s(work, context, batch)
    phase = _phase(chip, batch, work.step_bytes(context, batch), operations, expected)
    return replace(phase, by_host=_by_host(latency, phase.expected_s))


def prefill_phase(
    work: Workload, chip: Chip, latency: LatencyModel | None, tokens: int, cached: int = 0, *, chunk: int = CHUNK
) -> Phase:
    weights, operations = work.weight_bytes(tokens), work.prefill_operations(tokens, cached)
    read = None if weights is None else weights + work.kv_bytes(cached + tokens)
    expected = None if latency is None else latency.prefill_s(work, tokens, cached, chunk)
    phase = _phase(chip, tokens, read, operations, expected)
    return replace(phase, by_host=_by_host(latency, phase.expected_s, calls_of(tokens, chunk)))


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
    """Decode bounds at ``context`` tokens. Bytes, GB/s (10^9), tokens/s; None is unknown.

    Attributes:
        bandwidth_source: Chip table, measured, or unknown.
        bandwidth_condition: How measured, or why unknown.
        expected_tps: Of good kernels, from published or own measurements.
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


# Bytes of weights that a chip's caches hold: what is read from there is not bound by the bandwidth of its memory, which
# is what the table has. A bandwidth that was measured here is that of as many bytes.
CHIP_CACHE = 16_000_000
CACHED = "not what bounds so small a model, which stays in the chip's caches"


def bandwidth_for(chip: Chip, weight_bytes: int | None) -> float | None:
    cached = (
        chip.source == "table"
        and chip.name.startswith("Apple")
        and weight_bytes is not None
        and weight_bytes < CHIP_CACHE
    )
    return None if cached else chip.bandwidth_gbs


def limits_of(context: int, work: Workload, chip: Chip, latency: LatencyModel | None) -> Limits:
    expected = decode_phase(work, chip, latency, context).expected_tps
    known = limits_for(
        context, weight_bytes_per_token=work.weight_bytes(), kv_bytes_per_step=work.kv_bytes(context), chip=chip
    )
    return replace(known, expected_tps=expected)


def limits_for(
    context: int, *, weight_bytes_per_token: int | None, kv_bytes_per_step: int | None, chip: Chip
) -> Limits:
    """Return limits from bytes alone; an unknown cost leaves the ceiling unknown."""
    gbs = bandwidth_for(chip, weight_bytes_per_token)
    unknown = weight_bytes_per_token is None or kv_bytes_per_step is None
    step = None if unknown else (weight_bytes_per_token or 0) + (kv_bytes_per_step or 0)
    return Limits(
        context=context,
        weight_bytes_per_token=weight_bytes_per_token,
        kv_bytes_per_step=kv_bytes_per_step,
        bytes_per_step=step,
        bandwidth_gbs=gbs,
        bandwidth_source=chip.source,
        ceiling_tps=ceiling_tps(gbs, step),
        bandwidth_condition=chip.condition if gbs == chip.bandwidth_gbs else CACHED,
    )
