"""What good kernels reach on Apple silicon: the roofline with overheads fitted to published measurements.

    decode   t = weights ÷ (s · B) + attention + launches × l + products with experts × e
    attention  = Σ over caches of layers × ⁴√(r⁴ + c⁴), r = bytes ÷ (k · B), c = operations ÷ (a · F)
    unfused    = Σ over caches of layers × query heads of a key head × r
    prefill  t = max(operations × i ÷ (p · F), chunks × weights ÷ (s · B)) + chunks × launches × l
             i = 1 + n · (cores ÷ hidden)² + r ÷ rows of each expert
    launch   l = that of M4 and later × a ^ generations before it × g ^ sizes beyond the smallest: Pro, Max, Ultra

B is the table's bandwidth, F its half-precision peak; s, k, a, p are shares below 1, l and e are seconds. Narrow matrices leave
cores without work (n), and so do experts that few of a chunk's rows choose (r, for mixtures alone). Metal's vector attention gives
a query head a SIMD group of its own, and each computes with every key, so beyond about four query heads for each key head it
waits for arithmetic, not for memory; where no kernel is fused, every query head reads the keys and values anew. All constants come
from assets/roofline.json, which assets/tables/fit_roofline.py writes with its errors; nothing is tuned by hand. The launch goes by
the chip's name, not by its bandwidth: so of two chips alike in all else, the one with more bandwidth is never slower.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any, Literal

from tokamac.engine.limits.attention_work import Heads
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.work import KVLayer, Work

Kind = Literal["dense", "mixture", "hybrid"]

NEURAL = 5
"""The generation from which MLX multiplies matrices on the GPU's neural accelerators (macOS 26.2 and later)."""

SIMD_UNITS = 4
"""Parts of a GPU core that each run a SIMD group. Two-pass attention puts the query heads of a key head into one threadgroup, a
SIMD group each; beyond four some parts get one more than others, and all wait for these: five heads take as long as eight."""

TYPICAL_INTENSITY = 30
"""Half-precision operations for each byte of bandwidth where the table has no peak: chips from M1 to M5 have 26 to 42."""

RECENT = 4
"""The generation from which launching a kernel takes the same; each one before takes longer by a factor."""

SIZES = ("", "Pro", "Max", "Ultra")
"""Apple's sizes of a generation. Each has about twice the GPU of the one before, and reports name it more often than the cores."""


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

    def covers(self, work: Work) -> bool | None:
        """Whether a step reads as much as some published one: below that the host decides, of which the formula knows nothing. None
        where the bytes are unknown."""
        weights = work.weight_bytes()
        return None if weights is None else weights >= self.least_weight_bytes


@dataclass(frozen=True, slots=True)
class Fitted:
    """The expected speed of a chip whose bandwidth is known. Decode needs no peak; prefill is unknown without one."""

    chip: Chip
    constants: Constants

    def decode_s(self, work: Work, context: int, batch: int = 1) -> float | None:
        """Seconds of one step; None where bytes or bandwidth are unknown."""
        weights, bandwidth = work.weight_bytes(batch), self.chip.bandwidth_gbs
        if weights is None or bandwidth is None:
            return None
        reading = weights / (self.constants.shared * bandwidth * 1e9)
        attending = batch * self.attention_s(work, context, bandwidth)
        return reading + attending + self._launching_s(work) + self._gathering_s(work)

    def attention_s(self, work: Work, context: int, bandwidth_gbs: float) -> float:
        """Seconds of a step of one sequence that its attention takes, and the states that some layers keep instead."""
        alike = ((layer, len(list(run))) for layer, run in groupby(work.kv))
        return sum(count * self.attending_s(layer, context, bandwidth_gbs) for layer, count in alike)

    def attending_s(self, layer: KVLayer, context: int, bandwidth_gbs: float) -> float:
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

    def prefill_s(self, work: Work, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached``, up to ``chunk`` at once; None where operations or the peak are
        unknown."""
        operations, peak = work.prefill_operations(tokens, cached), peak_tflops(self.chip)
        weights, bandwidth = work.weight_bytes(min(tokens, chunk)), self.chip.bandwidth_gbs
        idle = self._idle(work, min(tokens, chunk))
        if operations is None or peak is None or weights is None or bandwidth is None or idle is None:
            return None
        chunks = math.ceil(tokens / chunk)
        computing = operations * (1 + idle) / (self._prefill_share(work) * peak * 1e12)
        reading = chunks * weights / (self.constants.shared * bandwidth * 1e9)
        return max(computing, reading) + chunks * self._launching_s(work)

    def _idle(self, work: Work, rows: int) -> float | None:
        """Operations for which there was room beside each one that was done, for want of work; None where cores or the model's
        width are unknown."""
        if self.chip.gpu_cores is None or work.hidden is None:
            return None
        narrow = self.constants.narrow * (self.chip.gpu_cores / work.hidden) ** 2
        if not work.expert_bytes or not work.active:
            return narrow
        rows_of_each = rows * work.active / work.touched(rows)  # of the experts that have any
        return narrow + self.constants.few_rows / rows_of_each

    def _launching_s(self, work: Work) -> float:
        return work.launches * self.constants.launch_s * self._slowness()

    def _gathering_s(self, work: Work) -> float:
        return work.expert_products * self.constants.gather_s * self._slowness()

    def _slowness(self) -> float:
        """How much longer than on the smallest recent chip a kernel takes to start."""
        c, generation = self.constants, generation_of(self.chip.name)
        age = max(RECENT - generation, 0) if generation is not None else 0
        return math.pow(c.older, age) * math.pow(c.larger, size_of(self.chip.name))

    def _prefill_share(self, work: Work) -> float:
        return self.constants.prefill[units_of(self.chip)][kind_of(work)]


def kind_of(work: Work) -> Kind:
    """Return the kind of model, as far as kernels differ: experts first, then states."""
    if "mixture" in work.traits:
        return "mixture"
    return "hybrid" if {"hybrid", "state space"} & set(work.traits) else "dense"


def units_of(chip: Chip) -> str:
    """Return what multiplies matrices: "shaders", or "neural" accelerators. Of a chip that is only named, what it can."""
    if chip.units is not None:
        return chip.units
    generation = generation_of(chip.name)
    return "neural" if generation is not None and generation >= NEURAL else "shaders"


def peak_tflops(chip: Chip) -> float | None:
    """Return the peak that prefill is measured against: with neural accelerators where the chip has them."""
    return chip.nax_fp16_tflops if units_of(chip) == "neural" and chip.nax_fp16_tflops is not None else chip.fp16_tflops


def generation_of(name: str) -> int | None:
    """Return the generation of an Apple M chip by its name; None for another chip."""
    found = re.match(r"Apple M(\d+)\b", name)
    return int(found.group(1)) if found else None


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
