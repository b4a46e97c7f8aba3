"""The seam to mlx-lm's model classes: attention goes to the cache where the cache is ours, and is unchanged elsewhere.

Every model class of mlx-lm calls ``scaled_dot_product_attention(queries, keys, values, cache, …)`` by a name it imported from
``mlx_lm.models.base``. ``install_seam`` rebinds that name, there and in the model modules that are already imported, to a function
that hands calls with an ``AttendingCache`` to that cache. Nobody else's caches are of that class, so nobody else sees a difference.
Gemma 2 alone writes its attention out by hand, for its soft cap; its class gets a stand-in of the same kind. Importing this module
imports no mlx-lm and patches nothing.

Beside the seam are the three ways to attend: MLX's own kernel; two products, for packed data and soft caps; and NumPy's BLAS for
many queries on a plain CPU, where MLX's products are some thirty times slower.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..architectures import MODEL_MODULES
from ..device import device_kind
from .attention_kernel import (
    NUMPY_SCORES,
    NUMPY_SCORES_PACKED,
    AttentionCall,
    AttentionDevice,
    MaskKind,
    Number,
    has_fused_kernel,
)
from .codec import Codec, Encoded
from .layout import Mask

NAME = "scaled_dot_product_attention"

Recorder = Callable[[mx.array, mx.array, Any], None]
"""Called with the keys, the values and the cache of each attention call."""

_recorders: list[Recorder] = []
_ours: set[Any] = set()
"""Functions that stand in for mlx-lm's, each with the original as ``__wrapped__``."""
_forced: ContextVar[AttentionDevice | None] = ContextVar("forced", default=None)
"""One for each thread: other engines' calls stay as they are."""
_NUMBERS: dict[mx.Dtype, Number] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}


class Scoring(NamedTuple):
    """How keys are weighed. sinks: one logit per query head that takes weight and gives nothing. softcap: bounds the scores."""

    scale: float
    mask: Mask
    sinks: mx.array | None = None
    softcap: float | None = None


class AttendingCache(ABC):
    """A cache that attends by itself.

    Attributes:
        sent: in a part of a pipeline, what stands for its result being sent on, which is to be computed with the cache.
    """

    sent: mx.array | None = None

    @property
    def keys(self) -> mx.array:
        """What mlx-lm's pipelines make depend on having sent a result: it is kept apart, whatever the keys are."""
        return mx.array(0)

    @keys.setter
    def keys(self, sent: mx.array) -> None:
        self.sent = sent

    @property
    @abstractmethod
    def offset(self) -> int:
        """Return the tokens held: the position of the next."""

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """Return who sees whom for the next N tokens; called before ``update_and_fetch``, the names are mlx-lm's."""

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys and values (B, H, N, D); return what the model shall pass on to ``attend``."""

    @abstractmethod
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Return the attention output for queries (B, H·R, N, D): (B, H·R, N, D of the values)."""


class StandInMask(ABC):
    """What stands for masks that one array can't hold (rows.py), and attends where a layer has no cache of its own."""

    @abstractmethod
    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend to what the cache of an earlier layer returned."""


def install_seam() -> None:
    """Route the attention of mlx-lm's models, and of ours, through our caches. Idempotent; mlx-lm's other users see no change."""
    from mlx_lm.models import base

    bound = getattr(base, NAME)
    seam = bound if bound in _ours else _make_seam(bound)
    for name, module in list(sys.modules.items()):
        if name.startswith(MODEL_MODULES) and module is not None and vars(module).get(NAME) is seam.__wrapped__:
            setattr(module, NAME, seam)
    gemma2 = sys.modules.get("mlx_lm.models.gemma2")
    if gemma2 is not None and gemma2.Attention.__call__ not in _ours:
        gemma2.Attention.__call__ = _make_gemma2_call(gemma2.Attention.__call__)


def _make_seam(original: Callable[..., mx.array]) -> Any:
    @wraps(original)
    def scaled_dot_product_attention(  # noqa: PLR0917, as mlx-lm's models call it
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        for recorder in _recorders:
            recorder(keys, values, cache)
        if isinstance(cache, AttendingCache):
            return cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if isinstance(mask, StandInMask):
            return mask.attend(queries, keys, values, scale=scale, sinks=sinks)
        return original(queries, keys, values, cache, scale, mask, sinks)

    _ours.add(scaled_dot_product_attention)
    return scaled_dot_product_attention


def _make_gemma2_call(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Stand in for ``mlx_lm.models.gemma2.Attention.__call__``: the same, but the cache attends."""

    @wraps(original)
    def call(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, AttendingCache):
            return original(self, x, mask, cache)
        batch, count, _ = x.shape
        queries, keys, values = (
            project(x).reshape(batch, count, -1, self.head_dim).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (self.rope(each, offset=cache.offset) for each in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
        for recorder in _recorders:
            recorder(keys, values, cache)
        out = cache.attend(queries, keys, values, scale=self.scale, mask=mask, softcap=self.attn_logit_softcapping)
        projected: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, count, -1))
        return projected

    _ours.add(call)
    return call


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Report every attention call that passes the seam to ``recorder``, inside a with block."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


@contextmanager
def forcing_fused(device: AttentionDevice | None) -> Iterator[None]:
    """Inside a with block, ask for a fused kernel wherever MLX has one for ``device``; None asks for none.

    Such a kernel never writes the scores down, at a lower rate.
    """
    before = _forced.set(device)
    try:
        yield
    finally:
        _forced.reset(before)


def forced() -> AttentionDevice | None:
    """Return for what device a fused kernel is asked for; None where none is."""
    return _forced.get()


def fused(queries: mx.array, keys: mx.array, values: mx.array, by: Scoring, *, packed: bool = False) -> mx.array:
    """Attend by MLX's own attention, which is fused or not, without a soft cap; on a plain CPU by NumPy.

    queries (B, H·R, N, D), keys, values (B, H, T, ·) → (B, H·R, N, ·). packed: whether keys or values are decoded from fewer bits.
    """
    scale, mask, sinks, _ = by
    if prefers_numpy(queries, keys, packed=packed):
        return attend_in_numpy(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    device = _forced.get()
    force = device is not None and _has_kernel(device, queries, keys, values, mask, sinks)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, force_fused=force
    )


def _has_kernel(  # noqa: PLR0917
    device: AttentionDevice, queries: mx.array, keys: mx.array, values: mx.array, mask: Mask, sinks: mx.array | None
) -> bool:
    """Whether MLX has a fused kernel for this call; asked to force one that it lacks, it would raise."""
    if queries.dtype not in _NUMBERS:
        return False
    kind: MaskKind = "none"
    if mask is not None:
        kind = "causal" if isinstance(mask, str) else "bool" if mask.dtype == mx.bool_ else "additive"
    call = AttentionCall(
        query_heads=queries.shape[1],
        heads=keys.shape[1],
        queries=queries.shape[2],
        keys=keys.shape[2],
        size=queries.shape[3],
        value_size=values.shape[3],
        mask=kind,
        number=_NUMBERS[queries.dtype],
        sinks=sinks is not None,
        batch=queries.shape[0],
    )
    return has_fused_kernel(call, device)


def stepwise(
    queries: mx.array, stored: Sequence[tuple[Encoded, Encoded]], codecs: tuple[Codec, Codec], by: Scoring
) -> mx.array:
    """Attend by two products with encoded keys and values: for packed data, for soft caps, and for keys held in several parts.

    stored: keys and values of consecutive tokens, whose T adds up. queries (B, H·R, N, D) → (B, H·R, N, E). Queries that share a
    key head are stacked, (B, H, R·N, D), so that head's keys are read once. With sinks (gpt-oss), the softmax over [scores, sink]
    is that over the scores, times sigmoid(logsumexp(scores) − sink).
    """
    scale, mask, sinks, softcap = by
    batch, query_heads, count, dim = queries.shape
    heads, (key_codec, value_codec) = stored[0][0][0].shape[1], codecs
    stacked = (queries * scale).reshape(batch, heads, -1, dim)
    scores = _joined([key_codec.dot(stacked, keys) for keys, _ in stored])
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    scores = scores.reshape(batch, query_heads, count, -1)
    if isinstance(mask, str):
        mask = mx.tri(count, scores.shape[-1], scores.shape[-1] - count, dtype=mx.bool_)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    stacked = weights.reshape(batch, heads, -1, weights.shape[-1])  # (B, H, R·N, T)
    out = _mixed(stacked, [values for _, values in stored], value_codec).reshape(batch, query_heads, count, -1)
    if sinks is not None:
        mass = mx.logsumexp(scores.astype(mx.float32), axis=-1, keepdims=True)
        out = out * mx.sigmoid(mass - sinks.astype(mx.float32)[:, None, None]).astype(out.dtype)
    return out


def _joined(parts: list[mx.array]) -> mx.array:
    """Return parts of the last axis as one."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _mixed(weights: mx.array, values: Sequence[Encoded], codec: Codec) -> mx.array:
    """Multiply weights (B, H, M, T) by values in parts of T: (B, H, M, E)."""
    if len(values) == 1:
        return codec.mix(weights, values[0])
    out, begin = None, 0
    for part in values:
        stop = begin + part[0].shape[2]
        mixed = codec.mix(weights[..., begin:stop], part)
        out, begin = mixed if out is None else out + mixed, stop
    assert out is not None
    return out


def prefers_numpy(queries: mx.array, keys: mx.array, *, packed: bool = False) -> bool:
    """Whether NumPy should attend: queries (B, H·R, N, D) and keys (B, H, T, D) of float32, many of them, and no GPU."""
    many = queries.shape[2] > 1 and queries.shape[2] * keys.shape[2] >= (
        NUMPY_SCORES_PACKED if packed else NUMPY_SCORES
    )
    return many and queries.dtype == keys.dtype == mx.float32 and device_kind() == "cpu"


def attend_in_numpy(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Attend head by head. queries (B, H·R, N, D), keys (B, H, T, D), values (B, H, T, E) → (B, H·R, N, E).

    mask: "causal", None, or bool or additive that broadcasts to (B, H·R, N, T). sinks: one logit per query head that takes
    weight and gives nothing. Evaluates its arguments at once.
    """
    q, k, v = (np.asarray(array) for array in (queries, keys, values))
    (batch, heads, count, _), total = q.shape, k.shape[2]
    repeats = heads // k.shape[1]
    masks: npt.NDArray[Any] | None = None
    if mask is not None:
        if isinstance(mask, str):  # "causal": the last query sees every key
            masks = np.tri(count, total, total - count, dtype=np.bool_)
        else:
            masks = np.asarray(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))
        masks = np.broadcast_to(masks, (batch, heads, count, total))
    out = np.empty((batch, heads, count, v.shape[3]), dtype=np.float32)
    for b in range(batch):
        for h in range(heads):
            scores = (q[b, h] * np.float32(scale)) @ k[b, h // repeats].T  # (N, T)
            if masks is not None and masks.dtype == np.bool_:
                scores[~masks[b, h]] = np.finfo(np.float32).min
            elif masks is not None:
                scores += masks[b, h]
            sink = None if sinks is None else float(np.asarray(sinks)[h])
            out[b, h] = _softmax(scores, sink) @ v[b, h // repeats]
    return mx.array(out)


def _softmax(scores: npt.NDArray[np.float32], sink: float | None) -> npt.NDArray[np.float32]:
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
