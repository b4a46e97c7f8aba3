"""Attention of many queries on a plain CPU, through NumPy's BLAS: MLX's products there are some thirty times slower."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tokamac.engine.device import device_kind

Floats = npt.NDArray[np.float32]

WORTH = 1 << 14
"""Queries times keys from which NumPy attends, although its arguments must be evaluated first. Measured on two x86 cores with a
model of 6 layers, 4 heads on 2, D 64: time to the first token of 16 new tokens after 2,000 was 74 ms without NumPy and 27 with it,
of 64 after 2,000 258 and 41, of 256 alone 174 and 60; of 2 after 2,000 it was the same."""

WORTH_PACKED = 1 << 17
"""The same where keys or values are packed. Two kernels round differently in the last digit, and that may move a later layer's key
to the next step of its scale: how a prompt was cut would show in its logits. Above, there is no choice: MLX takes ten times as
long."""


def is_worth(queries: mx.array, keys: mx.array, *, packed: bool = False) -> bool:
    """Whether NumPy should attend: queries (B, H·R, N, D) and keys (B, H, T, D) of float32, many of them, and no GPU."""
    many = queries.shape[2] > 1 and queries.shape[2] * keys.shape[2] >= (WORTH_PACKED if packed else WORTH)
    return many and queries.dtype == keys.dtype == mx.float32 and device_kind() == "cpu"


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend head by head. queries (B, H·R, N, D), keys (B, H, T, D), values (B, H, T, E) → (B, H·R, N, E).

    mask: "causal", None, or bool or additive that broadcasts to (B, H·R, N, T). sinks: one logit per query head that takes
    weight and gives nothing. Evaluates its arguments at once.
    """
    q, k, v = (np.asarray(array) for array in (queries, keys, values))
    batch, heads, count, _ = q.shape
    repeats = heads // k.shape[1]
    masks = (
        None if mask is None else np.broadcast_to(_as_array(mask, count, k.shape[2]), (batch, heads, count, k.shape[2]))
    )
    out = np.empty((batch, heads, count, v.shape[3]), dtype=np.float32)
    for b in range(batch):
        for h in range(heads):
            scores = (q[b, h] * np.float32(scale)) @ k[b, h // repeats].T  # (N, T)
            if masks is not None:
                _apply(scores, masks[b, h])
            sink = None if sinks is None else float(np.asarray(sinks)[h])
            out[b, h] = _softmax(scores, sink) @ v[b, h // repeats]
    return mx.array(out)


def _as_array(mask: mx.array | str, count: int, total: int) -> npt.NDArray[Any]:
    if isinstance(mask, str):  # "causal": the last query sees every key
        return np.tri(count, total, total - count, dtype=np.bool_)
    return np.asarray(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))


def _apply(scores: Floats, mask: npt.NDArray[Any]) -> None:
    if mask.dtype == np.bool_:
        scores[~mask] = np.finfo(np.float32).min
    else:
        scores += mask


def _softmax(scores: Floats, sink: float | None) -> Floats:
    """Return the softmax over the last axis, in place; a sink takes part and is left out."""
    largest = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        largest = np.maximum(largest, np.float32(sink))
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(np.float32(sink) - largest)
    scores /= total
    return scores
