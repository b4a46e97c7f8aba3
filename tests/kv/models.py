"""Tiny seeded models, and the plain reference that caches are measured against: full attention, masked by position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tests.kv.zoo import VOCABULARY
from tokamac.engine.kv import Cache, rewindable
from tokamac.engine.kv.attention import AttendingCache
from tokamac.engine.kv.codec import Affine, Codec, Plain, rotation_block
from tokamac.engine.kv.probe import leaves
from tokamac.engine.kv.rotary import Rotation


def tiny_llama(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, layers: int = 2, seed: int = 3, **more: Any
) -> Any:
    """Return a seeded float32 llama with weights large enough that attention matters."""
    from mlx_lm.models import llama

    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=heads * head_dim,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        **more,
    )
    return seeded(llama.Model(args), seed)


def seeded(model: Any, seed: int = 3) -> Any:
    """Fill a model's parameters from one seed: matrices of unit gain, everything else near 1 or 0."""
    from mlx.utils import tree_map

    mx.random.seed(seed)

    def fill(x: mx.array) -> mx.array:
        if x.ndim < 2:
            return x + 0.1 * mx.random.normal(x.shape)
        return mx.random.normal(x.shape) * (1.5 / x.shape[-1] ** 0.5)

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def tokens(count: int, seed: int = 0) -> mx.array:
    """Return (1, count) token ids."""
    return mx.random.randint(0, VOCABULARY, (1, count), key=mx.random.key(seed))


def feed(model: Any, caches: list[Any], ids: mx.array, cuts: Sequence[int]) -> mx.array:
    """Run ids (1, T) through in pieces of the lengths ``cuts`` (the last takes the rest); return logits (T, V)."""
    parts, at = [], 0
    for length in [*cuts, ids.shape[1]]:
        part = ids[:, at : at + length]
        if part.shape[1] == 0:
            break
        parts.append(model(part, cache=caches)[0])
        mx.eval(parts[-1], [cache.state for cache in caches])
        at += part.shape[1]
    return mx.concatenate(parts)


class Reference:
    """Stands where a cache would: keeps all keys and values, encodes and decodes each once, masks by position alone."""

    def __init__(self, keys: Codec, values: Codec, window: int | None, keep: int) -> None:
        self._codecs = keys, values
        self._window, self._keep = window, keep
        self._handed: tuple[mx.array, mx.array] | None = None
        self.offset = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:  # noqa: N803
        return seen(N, self._window, self._keep)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        decoded = tuple(codec.decode(codec.encode(x)) for codec, x in zip(self._codecs, (keys, values), strict=True))
        self.offset += keys.shape[2]
        self._handed = decoded[0], decoded[1]
        return self._handed

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._handed is not None
        return self._handed


Move = Callable[[mx.array, int], mx.array]
"""Rotated keys (B, H, T, D), and so many positions further on: what a model would have made of them there."""


def move_llama(keys: mx.array, by: int) -> mx.array:
    """Rotate a llama's keys further, as its paper and not as MLX: number i and i + D/2 turn by ``by`` × 10,000^(−2i/D)."""
    half = keys.shape[-1] // 2
    angle = mx.array([by * 10_000 ** (-i / half) for i in range(half)])
    a, b = keys[..., :half], keys[..., half:]
    return mx.concatenate([a * mx.cos(angle) - b * mx.sin(angle), b * mx.cos(angle) + a * mx.sin(angle)], axis=-1)


def llama_move(bits: int, dim: int = 32) -> Move:
    """Return what moves a llama's keys: ``move_llama``, or where keys are packed MLX, as the last bit may choose another level."""
    return move_llama if bits == 16 else Rotation(dim, traditional=False, base=10_000, scale=1.0).move


class MovingReference(Reference, AttendingCache):
    """A reference whose pinned keys move: for each query they are made anew, from what the model gave, and encoded once."""

    def __init__(self, keys: Codec, values: Codec, window: int, keep: int, move: Move) -> None:
        super().__init__(keys, values, window, keep)
        self._moves, self._width, self._pins = move, window, keep
        self._held, self._given = 0, mx.zeros(())

    @property
    def offset(self) -> int:
        return self._held

    @offset.setter
    def offset(self, offset: int) -> None:
        self._held = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._given = keys
        return super().update_and_fetch(keys, values)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        count = queries.shape[2]
        rule, out = seen(count, self._width, self._pins), []
        for p in range(count):
            pinned = self._move(min(self._pins, p + 1), shift(p, self._width, self._pins))
            at_p = mx.concatenate([pinned, keys[:, :, pinned.shape[2] :]], axis=2)
            out.append(
                plain_attention(
                    queries[:, :, p : p + 1], at_p, values, rule[p], scale=scale, sinks=sinks, softcap=softcap
                )
            )
        return mx.concatenate(out, axis=2)

    def _move(self, count: int, by: int) -> mx.array:
        coded = self._codecs[0]
        given = self._given[:, :, :count]
        return coded.decode(coded.encode(self._moves(given, by) if by else given))


def shift(p: int, window: int, keep: int) -> int:
    """The documented rule, written out: the next multiple of a block that is more than p − window."""
    block = max((window - keep) // 2, min(window - keep, 16))
    return 0 if p < window else next(by for by in range(block, p + block, block) if by > p - window)


def plain_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    sees: mx.array,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """Softmax of products, written out: queries (B, H·R, 1, D), of which ``sees`` (T,) says what they see."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(x, repeats, axis=1) for x in (keys, values))
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    scores = mx.where(sees, scores, -mx.inf)
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1)
    return weights[..., : keys.shape[2]] @ values


def seen(count: int, window: int | None, keep: int) -> mx.array:
    """The contract's rule, written out: p sees q ≤ p where q < keep or q > p − (window − keep)."""
    rule = [
        [q <= p and (window is None or q < keep or q > p - (window - keep)) for q in range(count)] for p in range(count)
    ]
    return mx.array(rule)


def reference_logits(
    model: Any, ids: mx.array, make: Callable[[int], Reference], taken: Sequence["Taken"] = ()
) -> mx.array:
    """Return logits (T, V) of the whole prompt at once, with one Reference per layer, each following what was ``taken``."""
    references = [make(index) for index in range(len(model.layers))]
    for each, its in zip(references, taken, strict=bool(taken)):
        follow(each, its)
    logits = model(ids, cache=references)[0]
    mx.eval(logits)
    return logits


@dataclass
class Taken:
    """The keys and the values (B, H, n, D) that a cache was given, call by call."""

    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)

    def trim(self, n: int) -> None:
        """Forget those of the last n tokens, which the cache took back."""
        for parts in (self.keys, self.values):
            parts[:] = [mx.concatenate(parts, axis=2)[:, :, :-n]]


def overhear(cache: Any) -> Taken:
    """Write down what a cache is given from now on."""
    taken, take_in = Taken(), cache.update_and_fetch

    def update_and_fetch(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        taken.keys.append(keys)
        taken.values.append(values)
        both: tuple[mx.array, mx.array] = take_in(keys, values)
        return both

    cache.update_and_fetch = update_and_fetch
    return taken


def follow(cache: Any, taken: Taken) -> None:
    """Have a cache encode what another was given, which must be what this one is given but for rounding.

    A sum that is cut otherwise differs in its last bit; a value on the edge of two levels then falls on the other, and what
    follows differs by a whole level. Fed alike, both encode alike, and nothing but rounding is left between their logits.
    """
    keys, values = mx.concatenate(taken.keys, axis=2), mx.concatenate(taken.values, axis=2)
    take_in = cache.update_and_fetch

    def update_and_fetch(*own: mx.array) -> tuple[mx.array, mx.array]:
        start, count = cache.offset, own[0].shape[2]
        same = [whole[:, :, start : start + count] for whole in (keys, values)]
        assert max(largest_difference(a, b) for a, b in zip(same, own, strict=True)) < 1e-4
        both: tuple[mx.array, mx.array] = take_in(*same)
        return both

    cache.update_and_fetch = update_and_fetch


def codec(bits: int, group: int = 32, *, rotated_dim: int | None = None) -> Codec:
    """Return the codec for ``bits``, rotated for a head dimension where one is given."""
    if bits == 16:
        return Plain()
    return Affine(bits, group, rotation_block(rotated_dim) if rotated_dim else None)


def largest_difference(a: mx.array, b: mx.array) -> float:
    """Return max |a − b|."""
    return float(mx.abs(a - b).max().item())


def offset(caches: list[Any]) -> int | None:
    """Tokens held; None where no cache counts them (recurrent state alone)."""
    return next((cache.offset for _, cache in leaves(caches) if isinstance(getattr(cache, "offset", None), int)), None)


def trim(caches: list[Any], n: int) -> int:
    """Trim n tokens from every cache, or none from any where one of them can't."""
    if n > rewindable(caches):
        return 0
    for _, cache in leaves(caches):
        cache.trim(n)
    return n


def bypassed(caches: list[Any]) -> list[tuple[int, ...]]:
    """Our caches that were written to while no attention came through the seam."""
    return [
        path
        for path, cache in leaves(caches)
        if isinstance(cache, Cache) and not cache.empty() and not cache.seam_calls
    ]
