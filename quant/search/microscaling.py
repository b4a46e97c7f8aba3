"""The search for microscaling formats: the scale that a group of 4-bit floats shares, in mx.quantize's format.

Formats: OCP Microscaling Formats (MX) Specification 1.0 for mxfp4 (32 weights, a power of two), and NVIDIA's NVFP4 (16 weights, an
E4M3 scale). mx.quantize divides a group's largest value by 6 and rounds to a scale of the format. The scales around that one are
tried here. Squared error over mx.quantize's on Gaussian, Student-t and Laplace weights: 0.85 to 0.94 for mxfp4, by where the values
lie between powers of two, and 0.73 to 0.81 for nvfp4. With mxfp8 nothing is gained: its floats reach so far that the scale
hardly matters.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.search.blocks import SEARCHING_SCALES, block_here, blocks_of, checked, importance_of_groups
from tokamac.quant.search.words import pack_codes

NO_WORSE = 1 - 1e-5
"""See kernels.py."""


@dataclass(frozen=True, slots=True)
class Format:
    """largest: the last byte that is a positive scale. nearby: bytes tried, counted from MLX's; scales grow with their bytes."""

    group_size: int
    largest: int
    nearby: tuple[int, ...]


FORMATS: Mapping[str, Format] = {
    "mxfp4": Format(32, 254, (-1,)),
    "nvfp4": Format(16, 126, (-1, 1, 2, 3, 4, 5)),
}
"""Formats that gain. Of powers of two the next smaller is better for a third of the groups, and the next larger never is."""

MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1, by code, and where the nearest changes."""


def search_scales(
    weight: mx.array, packing: Packing, importance: np.ndarray | None = None
) -> tuple[mx.array, mx.array]:
    """Return words and scales with at most mx.quantize's squared error in every group.

    weight: (…, in), floating and finite. packing: of a mode in FORMATS. importance: of the inputs, as for affine groups.
    Raises ValueError for another mode, or importance that does not fit.
    """
    if packing.mode not in FORMATS:
        raise ValueError(f"{packing.mode} has no scales worth searching")
    found = []
    rows, known = weight.reshape(-1, weight.shape[-1]), checked(importance, weight)
    for block, h in blocks_of(rows, known, block_here(SEARCHING_SCALES)):
        found.append(_search(block, packing, h))
        mx.eval(found[-1])
    words, scales = (mx.concatenate(list(each)).reshape(*weight.shape[:-1], -1) for each in zip(*found, strict=True))
    return words, scales


def _search(weight: mx.array, packing: Packing, importance: mx.array | None) -> tuple[mx.array, mx.array]:
    form, rows = FORMATS[packing.mode], weight.shape[0]
    scales = mx.quantize(weight, **asdict(packing))[1]
    first, table = scales.reshape(-1, 1).astype(mx.int32), _table(packing.mode)
    first = mx.where(first > form.largest, 0, first)  # what MLX gives for subnormal weights is no number
    x = weight.astype(mx.float32).reshape(-1, form.group_size)
    h = mx.array(1.0) if importance is None else importance_of_groups(importance, form.group_size, rows)
    unit = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), float(np.finfo(np.float32).tiny))
    best, least = first, _error(x, h, table[first], unit)
    for move in form.nearby:
        tried = mx.clip(first + move, 0, form.largest)
        error = _error(x, h, table[tried], unit)
        better = error < least * NO_WORSE
        best, least = mx.where(better, tried, best), mx.where(better, error, least)
    words = pack_codes(_codes(x, table[best]), 4)
    return words.reshape(rows, -1), best.astype(mx.uint8).reshape(rows, -1)


def _table(mode: str) -> mx.array:
    """Return what each of a scale's 256 bytes stands for."""
    if mode == "nvfp4":
        return mx.from_fp8(mx.arange(256).astype(mx.uint8), dtype=mx.float32)
    return mx.array(np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127))


def _codes(x: mx.array, scale: mx.array) -> mx.array:
    """Return the nearest E2M1 codes: the sign bit, 8, over the magnitude's."""
    size = mx.where(scale > 0, mx.abs(x) / mx.where(scale > 0, scale, 1), 0)
    codes = sum((size > middle).astype(mx.uint32) for middle in MIDDLES)
    return codes + mx.where(x < 0, 8, 0).astype(mx.uint32)


def _error(x: mx.array, h: mx.array, scale: mx.array, unit: mx.array) -> mx.array:
    """Return each group's squared error, in squares of its largest value, which can't overflow."""
    made = mx.array(MAGNITUDES)[_codes(x, scale) & 7] * scale
    return (h * mx.square((mx.abs(x) - made) / unit)).sum(axis=-1, keepdims=True)
