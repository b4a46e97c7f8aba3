"""Choose the next token on the device: logits in, one token id out, no host round trip."""

import secrets
from collections.abc import Callable, Sequence

import mlx.core as mx

from tokamac.engine.options import Sampling

PENALTY_WINDOW = 64
"""Tokens looked back at by the repetition penalty."""

COLDEST = 1e-4
"""Below this temperature the likeliest token is taken: dividing by less overflows float32."""

TIES = 64
"""Tokens taken beyond the k likeliest, for those as likely as the k-th: in 16-bit logits there are often some."""

Filter = Callable[[mx.array], mx.array]


def take_top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Take the k largest logits and their token ids, so that what follows handles k numbers and not the vocabulary.

    logits (B, V), 0 < k ≤ V → logits (B, C) and ids (B, C), C = min(V, k + TIES), in the order of the ids: a draw walks its tokens
    in that order, so it finds the same token as in the whole vocabulary. Logits below the k-th are −inf; ties with it stay, up to
    TIES of them.
    """
    size = logits.shape[-1]
    count = min(size, k + TIES)
    ids = mx.sort(mx.argpartition(logits, kth=size - count, axis=-1)[:, size - count :], axis=-1)
    taken = mx.take_along_axis(logits, ids, axis=-1)
    threshold = mx.sort(taken, axis=-1)[:, count - k : count - k + 1]  # (B, 1)
    return mx.where(taken >= threshold, taken, -mx.inf), ids


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

    Filters apply in the order: repetition penalty, top-k, temperature, top-p, min-p. Top-k commutes with the temperature, and
    comes first since it leaves few logits to the others: with it, the vocabulary is searched once a token and never sorted.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._filters = _filters(sampling)
        self._greedy = (sampling.temperature or 0) < COLDEST
        self._penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        self._penalised = self._penalty != 1.0
        self._recent = mx.array(list(prompt[-PENALTY_WINDOW:]), dtype=mx.uint32)
        self._key = mx.random.key(secrets.randbits(62) if sampling.seed is None else sampling.seed)
        self._last: mx.array | None = None  # chosen, and not counted among the recent ones yet

    def __call__(self, logits: mx.array) -> mx.array:
        """logits (1, V) in any float type → token (1,) uint32, not evaluated."""
        logits = logits.astype(mx.float32)
        if self._penalised:
            if self._last is not None:
                self._recent = mx.concatenate([self._recent, self._last])[-PENALTY_WINDOW:]
            logits = penalise_repeats(logits, self._recent, self._penalty)
        token = mx.argmax(logits, axis=-1) if self._greedy else self._draw(logits)
        self._last = token.astype(mx.uint32)
        return self._last

    def replace_last(self, token: mx.array) -> None:
        """Take ``token`` (1,) for the one chosen last: that one is not used."""
        self._last = token

    def _draw(self, logits: mx.array) -> mx.array:
        """logits (1, V) → token (1,)."""
        self._key, key = mx.random.split(self._key)
        k = self._sampling.top_k
        if not k or k >= logits.shape[-1]:
            return mx.random.categorical(self._filtered(logits), axis=-1, key=key)
        logits, ids = take_top_k(logits, k)
        chosen = mx.random.categorical(self._filtered(logits), axis=-1, key=key)
        return mx.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0]

    def _filtered(self, logits: mx.array) -> mx.array:
        for apply in self._filters:
            logits = apply(logits)
        return logits


def _filters(sampling: Sampling) -> list[Filter]:
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    filters: list[Filter] = []
    if temperature and temperature != 1:
        filters.append(lambda logits: logits * (1 / temperature))
    if top_p is not None and top_p < 1:
        filters.append(lambda logits: keep_top_p(logits, top_p))
    if min_p:
        filters.append(lambda logits: keep_min_p(logits, min_p))
    return filters
