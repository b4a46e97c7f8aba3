"""Rows of a weight taken some at a time, each with the importance of its inputs."""

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

BLOCK_WEIGHTS = 1 << 20
"""Worked on at a time with MLX, in whole rows: some dozen float32 arrays of this size are alive at once."""


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


def blocks_of(weight: mx.array, importance: np.ndarray | None) -> Iterator[tuple[mx.array, mx.array | None]]:
    """Yield (rows, in) pieces of a matrix, and the (in,) importance of each.

    importance: (parts, in), each for an equal share of the rows, or None.
    """
    parts = 1 if importance is None else len(importance)
    share, height = weight.shape[0] // parts, max(BLOCK_WEIGHTS // weight.shape[-1], 1)
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
