"""Rows of a weight taken some at a time, each with the importance of its inputs."""

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.limits.memory import device_total

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
