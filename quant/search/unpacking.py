"""The error of a packed weight by unpacking it, block by block, with MLX: any form, on any device."""

from collections.abc import Sequence
from dataclasses import asdict

import mlx.core as mx
import numpy as np

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.search.blocks import COMPARING, block_here


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
