"""DRY, a penalty on repeating sequences of tokens ("don't repeat yourself"), computed on the device token by token.

A token that would continue a sequence that stands earlier in the context, prompt included, loses multiplier × base^(n − allowed)
from its logit, where n tokens, the allowed length or more, stand before both. Nothing is matched across a sequence breaker, and a
breaker itself is never penalised. Definition by p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677; breakers are
texts that may begin within a token and span several, as in koboldcpp's and llama.cpp's form of it
(https://github.com/LostRuins/koboldcpp/pull/982, https://github.com/ggml-org/llama.cpp/pull/9702).

Both search the context for every token on the host. Here nothing leaves the device. Let length[i] be how many tokens up to place i
equal those up to the newest. Then a new token t changes it to

    length'[i] = length[i − 1] + 1 where ids[i] = t, else 0        (all 0 after a breaker)

which is one pass over the context, and the penalties are the largest length of each token that follows a place. So decode stays a
step ahead; a token costs two passes over the context and two over the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tokamac.engine.options import Sampling

GROWS_BY = 512
"""Places for new tokens that are made at once: the shapes of the arrays stay the same meanwhile."""
MOST_BEYOND = 512
"""Matched tokens beyond the allowed length that are counted: by then any base above 1 forbids the token."""
LARGEST_LOG = 88.0
"""ln of the largest power, a little below that of float32's largest number."""
NOWHERE = -1
"""In place of a token that is not there yet."""


@dataclass(frozen=True, slots=True)
class Breakers:
    """What ends a sequence: single tokens, and a token of ``heads`` that a ``tail`` of others follows.

    sequences: of each the heads and the tail, for breakers that several tokens spell.
    """

    single: frozenset[int] = frozenset()
    sequences: tuple[tuple[frozenset[int], tuple[int, ...]], ...] = ()

    def last(self, ids: Sequence[int]) -> int:
        """Return how many tokens at the end of ``ids`` follow the last breaker; all of them where there is none."""
        return next((since for since in range(len(ids)) if self._ends(ids, len(ids) - since)), len(ids))

    def _ends(self, ids: Sequence[int], end: int) -> bool:
        """Whether a breaker ends with the token before ``end``."""
        if ids[end - 1] in self.single:
            return True
        for heads, tail in self.sequences:
            begin = end - len(tail)
            if begin > 0 and ids[begin - 1] in heads and tuple(ids[begin:end]) == tail:
                return True
        return False


def find_breakers(
    texts: Sequence[str], vocabulary: Sequence[str], encode: Callable[[str], Sequence[int]], marks: frozenset[int]
) -> Breakers:
    """Return what ends a sequence.

    Args:
        texts: The sequence breakers.
        vocabulary: The text of every token, by id.
        encode: Text to token ids.
        marks: Tokens that are no text but end a turn: they break as well, so that no reply is kept from ending.
    """
    single = {token for token, text in enumerate(vocabulary) if any(each in text for each in texts)}
    sequences: dict[tuple[int, ...], set[int]] = {}
    for text in texts:
        for cut in range(1, len(text)):
            tail = tuple(encode(text[cut:]))
            heads = {token for token, each in enumerate(vocabulary) if each.endswith(text[:cut])} - single
            if tail and heads:
                sequences.setdefault(tail, set()).update(heads)
    return Breakers(frozenset(single) | marks, tuple((frozenset(heads), tail) for tail, heads in sequences.items()))


def match_lengths(ids: Sequence[int], most: int) -> np.ndarray:
    """Return for each place how many tokens up to it equal those at the end; ``most`` at most, and 0 at the last place."""
    known = np.asarray(ids, dtype=np.int64)
    lengths = np.zeros(len(known), dtype=np.int32)
    places = np.arange(len(known) - 1)
    for size in range(1, min(most, len(known)) + 1):
        places = places[places >= size - 1]
        places = places[known[places - size + 1] == known[len(known) - size]]
        if not len(places):
            break
        lengths[places] = size
    return lengths


def token_mask(ids: frozenset[int], vocabulary: int) -> mx.array:
    """Return (V,) bool, V = ``vocabulary``: which tokens are among ``ids``."""
    mask = np.zeros(vocabulary, dtype=bool)
    mask[[each for each in ids if each < vocabulary]] = True
    return mx.array(mask)


class Dry:
    """The penalties of one reply to ``prompt``. vocabulary: how many logits there are."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], breakers: Breakers, vocabulary: int) -> None:
        base = self._base = sampling.dry_base
        self._multiplier, self._allowed = sampling.dry_multiplier, sampling.dry_allowed_length
        most = MOST_BEYOND if base <= 1 else min(MOST_BEYOND, int(LARGEST_LOG / math.log(base)))
        self._most = self._allowed + most
        self._breaks = token_mask(breakers.single, vocabulary)
        self._sequences = [(token_mask(heads, vocabulary), tail) for heads, tail in breakers.sequences]
        self._count = len(prompt)
        lengths = match_lengths(prompt, min(self._most, breakers.last(prompt[-self._most :])))
        self._ids = _padded(mx.array(np.asarray(prompt, dtype=np.int32)), GROWS_BY, NOWHERE)  # (places,)
        self._lengths = _padded(mx.array(lengths), GROWS_BY, 0)  # (places,)

    def add(self, token: mx.array) -> None:
        """Take the newest token of the context, (1,), which need not be evaluated."""
        if self._count == len(self._ids):
            self._ids, self._lengths = _padded(self._ids, GROWS_BY, NOWHERE), _padded(self._lengths, GROWS_BY, 0)
        token = token.astype(mx.int32)
        before = mx.concatenate([mx.zeros((1,), mx.int32), self._lengths[:-1]])
        same = mx.logical_and(self._ids == token, mx.logical_not(self._broken_by(token)))
        self._lengths = mx.where(same, mx.minimum(before + 1, self._most), 0)
        self._ids = mx.slice_update(self._ids, token, mx.array([self._count]), axes=(0,))
        self._count += 1

    def penalise(self, logits: mx.array) -> mx.array:
        """logits (1, V) → (1, V)."""
        lengths = self._lengths[:-1]
        following = mx.maximum(self._ids[1:], 0)  # where no token follows, the length is 0
        longest = mx.zeros((logits.shape[-1],), mx.int32).at[following].maximum(lengths)  # (V,)
        beyond = mx.maximum(longest - self._allowed, 0).astype(mx.float32)
        penalty = self._multiplier * mx.power(self._base, beyond)
        spared = mx.logical_or(longest < self._allowed, self._breaks)
        return logits - mx.where(spared, 0, penalty)

    def _broken_by(self, token: mx.array) -> mx.array:
        """Whether a breaker ends with this token (1,), which is not among the ids yet."""
        broken = self._breaks[token]
        for heads, tail in self._sequences:
            begin = self._count + 1 - len(tail)
            if begin < 1:
                continue
            spelled = mx.concatenate([self._ids[begin : self._count], token])
            whole = mx.all(spelled == mx.array(tail, mx.int32))
            broken = mx.logical_or(broken, mx.logical_and(whole, heads[self._ids[begin - 1 : begin]]))
        return broken


def _padded(array: mx.array, count: int, value: int) -> mx.array:
    return mx.concatenate([array.astype(mx.int32), mx.full((count,), value, mx.int32)])
