"""The seam to mlx-lm's models: attention over our caches goes to the cache; everything else is unchanged."""

# Models call ``scaled_dot_product_attention`` by a name imported from ``mlx_lm.models.base``;
# ``install_seam`` rebinds it there and in model modules already imported. Only calls with an
# ``AttendingCache`` are diverted. Gemma 2 writes its attention by hand (soft cap), so its class gets a
# stand-in. Importing this module patches nothing. Three ways to attend: MLX's kernel; two products, for
# packed data and soft caps; NumPy's BLAS for many queries on a plain CPU, where MLX's products are some
# thirty times slower.

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..architectures import MODEL_MODULES
from ..device import device_kind
from .costs import NUMPY_SCORES, NUMPY_SCORES_PACKED, AttentionCall, AttentionDevice, MaskKind, Number, has_fused_kernel
from .layout import Codec, Encoded, Mask

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "scaled_dot_product_attention"

# Called with the keys, the values and the cache of each attention call.
Recorder = Callable[[mx.array, mx.array, Any], None]

_recorders: list[Recorder] = []
_ours: set[Any] = set()  # functions that stand in for mlx-lm's, each with the original as `__wrapped__`
# One for each thread: other engines' calls stay as they are.
_forced: ContextVar[AttentionDevice | None] = ContextVar("forced", default=None)
_uncached: ContextVar[bool] = ContextVar("uncached", default=False)
# Returns for what device a fused kernel is asked for; None where none is. In every layer: so it is no function around
# another.
forced = _forced.get
_NUMBERS: dict[mx.Dtype, Number] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}


class Scoring(NamedTuple):
    """How scores are modified. sinks: one logit per query head that takes weight and contributes nothing."""

    scale: float
    mask: Mask
    sinks: mx.array | None = None
    softcap: float | None = None


class AttendingCache:
    """A cache that attends by itself.

    Attributes:
        offset: Tokens held.
        by_kernel: The last ``update_and_fetch`` result goes to MLX's attention as is.
        sent: In a pipeline part, the sent result, to be evaluated with the cache.
    """

    # No ``abc.ABC``: the seam checks the class in every layer of every step.

    offset: Any
    by_kernel = False
    seam_calls = 0
    sent: mx.array | None = None

    @property
    def keys(self) -> mx.array:
        # mlx-lm's pipelines make ``keys`` depend on having sent a result: that is kept apart from the stored keys.
        return mx.array(0)

    @keys.setter
    def keys(self, sent: mx.array) -> None:
        self.sent = sent

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        raise NotImplementedError

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise NotImplementedError

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
        """Attend for queries (B, H·R, N, D) → (B, H·R, N, D of the values)."""
        raise NotImplementedError


class StandInMask:
    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        raise NotImplementedError


Path = tuple[int, ...]  # of a cache: (layer,), or (layer, part) inside mlx-lm's `CacheList`


def leaves(caches: list[Any]) -> Iterator[tuple[Path, Any]]:
    from mlx_lm.models.cache import CacheList

    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from (((index, part), each) for part, each in enumerate(cache.caches))
        else:
            yield (index,), cache


def flat(caches: list[Any]) -> list[Any]:
    from mlx_lm.models.cache import CacheList

    found: list[Any] = []
    for cache in caches:
        found += cache.caches if isinstance(cache, CacheList) else (cache,)
    return found


def map_leaves(caches: list[Any], change: Callable[[Path, Any], Any]) -> list[Any]:
    from mlx_lm.models.cache import CacheList

    gather: Any = CacheList
    return [
        gather(*(change((index, part), each) for part, each in enumerate(cache.caches)))
        if isinstance(cache, CacheList)
        else change((index,), cache)
        for index, cache in enumerate(caches)
    ]


def install_seam() -> None:
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
            cache.seam_calls += 1
            if cache.by_kernel:
                return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            return cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if isinstance(mask, StandInMask):
            return mask.attend(queries, keys, values, scale=scale, sinks=sinks)
        if cache is None and _uncached.get() and prefers_numpy(queries, keys):
            return attend_in_numpy(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return original(queries, keys, values, cache, scale, mask, sinks)

    _ours.add(scaled_dot_product_attention)
    return scaled_dot_product_attention


def _make_gemma2_call(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
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
        cache.seam_calls += 1
        out = cache.attend(queries, keys, values, scale=self.scale, mask=mask, softcap=self.attn_logit_softcapping)
        projected: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, count, -1))
        return projected

    _ours.add(call)
    return call


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


@contextmanager
def attending_uncached() -> Iterator[None]:
    """Let calls without a cache be attended by NumPy, too, where it is faster."""
    before = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(before)


@contextmanager
def forcing_fused(device: AttentionDevice | None) -> Iterator[None]:
    before = _forced.set(device)
    try:
        yield
    finally:
        _forced.reset(before)


def fused(queries: mx.array, keys: mx.array, values: mx.array, by: Scoring, *, packed: bool = False) -> mx.array:
    """Attend with MLX's attention (fused or not), on a plain CPU with NumPy; no soft cap.

    queries (B, H·R, N, D), keys, values (B, H, T, ·) → (B, H·R, N, ·). packed: decoded from fewer bits.
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
    # Forcing a kernel that MLX lacks raises.
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
    """Attend by two products over encoded parts: queries (B, H·R, N, D) → (B, H·R, N, E)."""
    # Queries of one key head are stacked, (B, H, R·N, D), so its keys are read once. With sinks (gpt-oss):
    # softmax over the scores × sigmoid(logsumexp(scores) − sink).
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
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _mixed(weights: mx.array, values: Sequence[Encoded], codec: Codec) -> mx.array:
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
    """Whether NumPy should attend: many float32 queries (B, H·R, N, D), and no GPU."""
    many = queries.shape[2] > 1 and queries.shape[2] * keys.shape[2] >= (
        NUMPY_SCORES_PACKED if packed else NUMPY_SCORES
    )
    return many and queries.dtype == keys.dtype == mx.float32 and device_kind() == "cpu"


def attend_in_numpy(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Attend head by head. queries (B, H·R, N, D), keys (B, H, T, D), values (B, H, T, E) → (B, H·R, N, E).

    mask: "causal", None, or bool or additive, broadcast to (B, H·R, N, T). Evaluates its arguments.
    """
    import numpy as np

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


def _softmax(scores: "npt.NDArray[np.float32]", sink: float | None) -> "npt.NDArray[np.float32]":
    """Softmax over the last axis, in place; a sink takes part and is dropped."""
    import numpy as np

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
