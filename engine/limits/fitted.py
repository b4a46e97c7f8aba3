"""What good kernels reach on Apple silicon: the roofline with overheads fitted to published measurements.

    decode   t = shared weights ÷ (s · B) + experts ÷ (x · B) + keys and values ÷ (k · B) + launches × l
    prefill  t = max(operations × i ÷ (p · F), chunks × weights ÷ (s · B)) + chunks × launches × l
             i = 1 + n · (cores ÷ hidden)² + r ÷ rows of each expert
    launch   l = that of M4 and later × a ^ generations before it × g ^ sizes beyond the smallest: Pro, Max, Ultra

B is the table's bandwidth, F its half-precision peak; s, x, k, p are shares below 1, l is seconds. Narrow matrices leave cores
without work (n), and so do experts that few of a chunk's rows choose (r, for mixtures alone). All of them come from
assets/roofline.json, which assets/tables/fit_roofline.py writes with its errors; nothing is tuned by hand. The launch goes by the
chip's name, not by its bandwidth: so of two chips alike in all else, the one with more bandwidth is never slower.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.work import Work

Kind = Literal["dense", "mixture", "hybrid"]

NEURAL = 5
"""The generation from which MLX multiplies matrices on the GPU's neural accelerators (macOS 26.2 and later)."""

RECENT = 4
"""The generation from which launching a kernel takes the same; each one before takes longer by a factor."""

SIZES = ("", "Pro", "Max", "Ultra")
"""Apple's sizes of a generation. Each has about twice the GPU of the one before, and reports name it more often than the cores."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted shares of what a chip allows, and seconds per kernel launched; see the formulas above.

    launch_s is of the smallest recent chip; older: the factor for each generation before M4; larger: for each size, since larger
    chips have more cores to start and to wait for. Both are the chip's, so engines share them. narrow, few_rows: see the formula.
    prefill: by kind of model, on shaders and on neural accelerators.
    """

    shared: float
    experts: float
    kv: float
    launch_s: float
    older: float
    larger: float
    narrow: float
    few_rows: float
    prefill: Mapping[str, Mapping[str, float]]


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
        c = self.constants
        read = work.shared_bytes / c.shared + (weights - work.shared_bytes) / c.experts
        return (read + work.kv_bytes(context, batch) / c.kv) / (bandwidth * 1e9) + self._launching_s(work)

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
        c, generation = self.constants, generation_of(self.chip.name)
        age = max(RECENT - generation, 0) if generation is not None else 0
        return work.launches * c.launch_s * math.pow(c.older, age) * math.pow(c.larger, size_of(self.chip.name))

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
    """Return the shipped file: constants by engine, how they were fitted, and their errors."""
    text = resources.files("tokamac.assets").joinpath("roofline.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def constants_of(engine: str = "mlx") -> Constants:
    """Return the constants of an engine: "mlx" or "llama.cpp"."""
    return Constants(**published()["engines"][engine])


def fitted(chip: Chip) -> Fitted | None:
    """Return the expected speeds of an Apple chip in the table; None for any other, which only a measurement knows."""
    known = chip.source == "table" and chip.name.startswith("Apple")
    return Fitted(chip, constants_of()) if known else None
