"""Choose the next token on the device: logits in, one token id out, no host round trip."""

import secrets
from collections.abc import Callable, Sequence

import mlx.core as mx

from tokamac.engine.options import Sampling

PENALTY_WINDOW = 64
"""Tokens looked back at by the repetition penalty."""

COLDEST = 1e-4
"""Below this temperature the likeliest token is taken: dividing by less overflows float32."""

Filter = Callable[[mx.array], mx.array]


def keep_top_k(logits: mx.array, k: int) -> mx.array:
    """Keep the k largest logits. (B, V) → (B, V), the others −inf; ties with the k-th stay."""
    if k >= logits.shape[-1]:
        return logits
    threshold = mx.min(mx.topk(logits, k, axis=-1), axis=-1, keepdims=True)  # (B, 1)
    return mx.where(logits >= threshold, logits, -mx.inf)


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """Keep the smallest set of likeliest tokens whose probabilities reach p (nucleus sampling, Holtzman et al. 2019).

    (B, V) → (B, V), the others −inf. The likeliest token always stays.
    """
    order = mx.argsort(-logits, axis=-1)  # (B, V), likeliest first
    probabilities = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), order, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    ranked = mx.where(before < p, mx.take_along_axis(logits, order, axis=-1), -mx.inf)
    return mx.put_along_axis(mx.zeros_like(logits), order, ranked, axis=-1)


def keep_min_p(logits: mx.array, share: float) -> mx.array:
    """Keep tokens at least ``share`` times as likely as the likeliest (Nguyen et al. 2024). (B, V) → (B, V)."""
    threshold = mx.max(logits, axis=-1, keepdims=True) + mx.log(mx.array(share))
    return mx.where(logits >= threshold, logits, -mx.inf)


def penalise_repeats(logits: mx.array, recent: mx.array, penalty: float) -> mx.array:
    """Divide positive and multiply negative logits of recent tokens by ``penalty`` (Keskar et al. 2019, CTRL).

    logits (1, V), recent (n,) token ids → (1, V).
    """
    seen = logits[:, recent]
    changed = mx.where(seen > 0, seen / penalty, seen * penalty)
    return mx.put_along_axis(logits, recent[None], changed, axis=-1)


class Sampler:
    """One reply's sampler: knows its seed and the tokens that came before. Takes a resolved Sampling.

    Filters apply in the order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._filters = _filters(sampling)
        self._penalised = sampling.repetition_penalty != 1.0
        self._recent = mx.array(list(prompt[-PENALTY_WINDOW:]), dtype=mx.uint32)
        self._key = mx.random.key(secrets.randbits(62) if sampling.seed is None else sampling.seed)

    def __call__(self, logits: mx.array) -> mx.array:
        """logits (1, V) in any float type → token (1,) uint32, not evaluated."""
        logits = logits.astype(mx.float32)
        if self._penalised:
            logits = penalise_repeats(logits, self._recent, self._sampling.repetition_penalty)
        if (self._sampling.temperature or 0) < COLDEST:
            token = mx.argmax(logits, axis=-1)
        else:
            for apply in self._filters:
                logits = apply(logits)
            self._key, key = mx.random.split(self._key)
            token = mx.random.categorical(logits, axis=-1, key=key)
        token = token.astype(mx.uint32)
        if self._penalised:
            self._recent = mx.concatenate([self._recent, token])[-PENALTY_WINDOW:]
        return token


def _filters(sampling: Sampling) -> list[Filter]:
    temperature, top_k, top_p, min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    filters: list[Filter] = []
    if temperature and temperature != 1:
        filters.append(lambda logits: logits * (1 / temperature))
    if top_k:
        filters.append(lambda logits: keep_top_k(logits, top_k))
    if top_p is not None and top_p < 1:
        filters.append(lambda logits: keep_top_p(logits, top_p))
    if min_p:
        filters.append(lambda logits: keep_min_p(logits, min_p))
    return filters
