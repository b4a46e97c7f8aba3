"""Rows of a weight taken some at a time, each with the importance of its inputs.

The error of a packed weight by unpacking it, block by block, with MLX: any form, on any device.

MLX's layout of packed codes: one after another from the lowest bit on, whatever the bits, cut in words of 32.

Where the search of an affine group begins: the same for every implementation, bits and group size.

mx.quantize spreads the codes of a group from its smallest to its largest value. Moving an end by a part of a step changes how the
values fall between codes; drawing it in makes all steps smaller, for a larger error at that end. So both ends are moved, in
quarters of a step: from a quarter outwards to three quarters inwards. Each placement is judged by the least-squares fit to the
codes it gives (its scale and bias, not the placement's), and the best fit is refined by finding codes and fitting again, twice.

Squared error over mx.quantize's, 4 bits at groups of 64, mean of Gaussian, Student-t (5) and Laplace weights:

    ends moved by                        placements   error
    1/4 out … 3/4 in, by halves               9       0.802
    1/4 out … 3/4 in, by thirds              16       0.798
    1/4 out … 3/4 in, by quarters            25       0.796   chosen
    1/2 out … 1 in, by quarters              49       0.795
    a share of the range, 0 … 1/8            25       0.803
    a share of the range, 0 … 1/4            25       0.827
    a share of 0 … 0.15, judged as placed    16       0.824

Counted in steps, the best range hardly depends on the bits; as a share of the range it does. At 2 bits a whole step in would save
another 0.3 %. A third round of refinement saves less than 0.1 %.

The search for microscaling formats: the scale that a group of 4-bit floats shares, in mx.quantize's format.

Formats: OCP Microscaling Formats (MX) Specification 1.0 for mxfp4 (32 weights, a power of two), and NVIDIA's NVFP4 (16 weights, an
E4M3 scale). mx.quantize divides a group's largest value by 6 and rounds to a scale of the format. The scales around that one are
tried here. Squared error over mx.quantize's on Gaussian, Student-t and Laplace weights: 0.85 to 0.94 for mxfp4, by where the values
lie between powers of two, and 0.73 to 0.81 for nvfp4. With mxfp8 nothing is gained: its floats reach so far that the scale
hardly matters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.memory import device_total

SEARCHING, SEARCHING_SCALES, COMPARING = 80, 140, 20
"""Bytes a weight that MLX holds beside a block: while affine groups or scales are searched, and while a packing is compared."""

SMALLEST, LARGEST = 1 << 20, 1 << 24
"""Weights of a block. A CPU gains nothing by more; a GPU does nothing between two blocks, and a small one does not fill it."""

PART_OF_MEMORY = 12
"""A block's arrays take at most one such part of the GPU's memory."""


def block_weights(kind: DeviceKind, memory_bytes: int | None, weight_bytes: int) -> int:
    """Return how many weights to work on at a time with MLX, in whole rows. It decides about time and memory, not about results.

    memory_bytes: of the device, or None. weight_bytes: what the work holds for each weight.
    """
    if kind == "cpu" or memory_bytes is None:
        return SMALLEST
    fits = max(memory_bytes // PART_OF_MEMORY // weight_bytes, 1)
    return min(max(1 << fits.bit_length() - 1, SMALLEST), LARGEST)


def block_here(weight_bytes: int) -> int:
    """Return ``block_weights`` for MLX's default device."""
    return block_weights(device_kind(), device_total(), weight_bytes)


def checked(importance: np.ndarray | None, weight: mx.array) -> np.ndarray | None:
    """Return importance as (parts, in) float32. Raises ValueError where it does not fit, is negative or not finite.

    importance: (in,), or (experts, in) for a weight (experts, out, in).
    """
    if importance is None:
        return None
    inputs = weight.shape[-1]
    if importance.shape != (inputs,) and (weight.ndim != 3 or importance.shape != (weight.shape[0], inputs)):
        raise ValueError(f"importance of shape {importance.shape} does not fit a weight of shape {weight.shape}")
    parts = np.ascontiguousarray(importance, dtype=np.float32).reshape(-1, inputs)
    if not math.isfinite(parts.max()) or not parts.min() >= 0:
        raise ValueError("importance must be finite and not negative")
    return parts


def blocks_of(
    weight: mx.array, importance: np.ndarray | None, block: int
) -> Iterator[tuple[mx.array, mx.array | None]]:
    """Yield (rows, in) pieces of a matrix, and the (in,) importance of each.

    importance: (parts, in), each for an equal share of the rows, or None. block: weights of a piece, at most, or one row.
    """
    parts = 1 if importance is None else len(importance)
    share, height = weight.shape[0] // parts, max(block // weight.shape[-1], 1)
    for part in range(parts):
        h = None if importance is None else mx.array(importance[part])
        for begin in range(part * share, (part + 1) * share, height):
            yield weight[begin : min(begin + height, (part + 1) * share)], h


def importance_of_groups(importance: mx.array, size: int, rows: int) -> mx.array:
    """Return (groups, size): what (in,) says for every group of so many rows, the largest of a group being 1.

    Where nothing in a group matters, everything matters alike.
    """
    h = importance.reshape(-1, size)
    most = h.max(axis=-1, keepdims=True)
    h = mx.where(most > 0, h / mx.where(most > 0, most, 1), 1)
    return mx.broadcast_to(h, (rows, *h.shape)).reshape(-1, size)


def unpacked_error(weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
    """Return Σ (weight − packed)² and Σ weight². weight: (rows, in); arrays: words, scales[, biases], as matrices."""
    height = max(block_here(COMPARING) // weight.shape[-1], 1)
    error = total = 0.0
    for begin in range(0, weight.shape[0], height):
        block = slice(begin, begin + height)
        sums = _block(weight[block], [each[block] for each in arrays], packing)
        error, total = error + sums[0], total + sums[1]
    return error, total


def _block(weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
    """Squares are taken of values divided by the largest, which they can't overflow, and added in float64 beyond a group."""
    exact = weight.astype(mx.float32)
    words, scales, *biases = arrays
    if biases:  # in the wider type the product is not rounded to theirs
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    bias = biases[0] if biases else None
    made = mx.dequantize(words, scales, bias, dtype=mx.float32, **asdict(packing))
    largest = mx.maximum(mx.abs(exact).max(), float(np.finfo(np.float32).tiny))
    groups = (-1, packing.group_size)
    unit = float(largest.item())  # type: ignore[arg-type]
    return _sum(exact - made, largest, groups) * unit**2, _sum(exact, largest, groups) * unit**2


def _sum(values: mx.array, largest: mx.array, groups: tuple[int, int]) -> float:
    squares = mx.square((values / largest).reshape(groups)).sum(axis=-1)
    return float(np.asarray(squares).sum(dtype=np.float64))


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Return (groups, size · bits / 32) uint32. codes: (groups, size), whole numbers of any type."""
    single = codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32) & 1
    words = single.reshape(codes.shape[0], -1, 32) << mx.arange(32, dtype=mx.uint32)
    return words.sum(axis=-1).astype(mx.uint32)


OFFSETS = (-0.25, 0.0, 0.25, 0.5, 0.75)
"""Steps by which an end is drawn in."""

DRAWN_IN = tuple((low, high) for low in OFFSETS for high in OFFSETS)
"""Steps by which the lower and the upper end are drawn in."""

ROUNDS = 2
"""Of refinement."""


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
