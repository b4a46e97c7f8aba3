"""Choose the next token on the device: logits in, one token id out, no host round trip."""

# DRY subtracts multiplier × base^(n − allowed) from the logit of a token that would continue a sequence of
# n ≥ allowed tokens found earlier in the context. Nothing matches across a sequence breaker, and breakers are
# not penalised. By p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677; breakers may begin
# within a token and span several, as in https://github.com/LostRuins/koboldcpp/pull/982 and
# https://github.com/ggml-org/llama.cpp/pull/9702.

# Those search the context on the host for every token. Here, on the device: length[i] counts the tokens up to
# i that equal the newest; a new token t gives length'[i] = length[i − 1] + 1 where ids[i] = t, else 0 (all 0
# after a breaker). So decode stays a step ahead.

import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import xxhash

from .options import Sampling, Stage

PENALTY_WINDOW = 64  # tokens looked back at by the repetition penalty
COLDEST = 1e-4  # below this temperature the likeliest token is taken: dividing by less overflows float32
TIES = 64  # tokens taken beyond the k likeliest, for those as likely as the k-th: in 16-bit logits there are often some

GROWS_BY = 512  # places for new tokens made at once; meanwhile the arrays keep their shapes
# Matched tokens beyond the allowed length that are counted: by then any base above 1 forbids the token.
MOST_BEYOND = 512
LARGEST_LOG = 88.0  # ln of the largest power, a little below that of float32's largest number
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Breakers:
    """Sequence ends: single tokens; and, for breakers of several tokens, a head followed by the tail."""

    single: frozenset[int] = frozenset()
    sequences: tuple[tuple[frozenset[int], tuple[int, ...]], ...] = ()

    def last(self, ids: Sequence[int]) -> int:
        return next((since for since in range(len(ids)) if self._ends(ids, len(ids) - since)), len(ids))

    def _ends(self, ids: Sequence[int], end: int) -> bool:
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
    """Return the DRY breakers; ``marks``, end-of-turn tokens, break too, so that every reply can end."""
    breaks = re.compile("|".join(map(re.escape, texts)) or r"(?!)").search  # quicker than text by text
    single = {token for token, text in enumerate(vocabulary) if breaks(text)}
    sequences: dict[tuple[int, ...], set[int]] = {}
    for text in texts:
        for cut in range(1, len(text)):
            tail = tuple(encode(text[cut:]))
            heads = {token for token, each in enumerate(vocabulary) if each.endswith(text[:cut])} - single
            if tail and heads:
                sequences.setdefault(tail, set()).update(heads)
    return Breakers(frozenset(single) | marks, tuple((frozenset(heads), tail) for tail, heads in sequences.items()))


def match_lengths(ids: Sequence[int], most: int) -> np.ndarray:
    """For each place, the tokens up to it that equal the end of ``ids``: ≤ ``most``; 0 at the last place."""
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
    mask = np.zeros(vocabulary, dtype=bool)
    mask[[each for each in ids if each < vocabulary]] = True
    return mx.array(mask)


class Dry:
    """The DRY penalties of one reply to ``prompt``."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], breakers: Breakers, vocabulary: int) -> None:
        base = self._base = sampling.dry_base
        self._multiplier, self._allowed = sampling.dry_multiplier, sampling.dry_allowed_length
        most = MOST_BEYOND if base <= 1 else min(MOST_BEYOND, int(LARGEST_LOG / math.log(base)))
        self._most = self._allowed + most
        self._breaks = token_mask(breakers.single, vocabulary)
        self._sequences = [(token_mask(heads, vocabulary), tail) for heads, tail in breakers.sequences]
        self._count = len(prompt)
        lengths = match_lengths(prompt, min(self._most, breakers.last(prompt[-self._most :])))
        self._ids = _padded(mx.array(np.asarray(prompt, dtype=np.int32)), GROWS_BY, NO_TOKEN)  # (places,)
        self._lengths = _padded(mx.array(lengths), GROWS_BY, 0)  # (places,)

    def add(self, token: mx.array) -> None:
        if self._count == len(self._ids):
            self._ids, self._lengths = _padded(self._ids, GROWS_BY, NO_TOKEN), _padded(self._lengths, GROWS_BY, 0)
        token = token.astype(mx.int32)
        before = mx.concatenate([mx.zeros((1,), mx.int32), self._lengths[:-1]])
        same = mx.logical_and(self._ids == token, mx.logical_not(self._broken_by(token)))
        self._lengths = mx.where(same, mx.minimum(before + 1, self._most), 0)
        self._ids = mx.slice_update(self._ids, token, mx.array([self._count]), axes=(0,))
        self._count += 1

    @property
    def state(self) -> tuple[mx.array, mx.array, int]:
        return self._ids, self._lengths, self._count

    @state.setter
    def state(self, state: tuple[mx.array, mx.array, int]) -> None:
        self._ids, self._lengths, self._count = state

    def penalise(self, logits: mx.array) -> mx.array:
        lengths = self._lengths[:-1]
        following = mx.maximum(self._ids[1:], 0)  # where no token follows, the length is 0
        beyond = mx.maximum(lengths - self._allowed, 0).astype(mx.float32)
        spared = mx.logical_or(lengths < self._allowed, self._breaks[following])
        penalties = mx.where(spared, 0, self._multiplier * mx.power(self._base, beyond))  # (places − 1,)
        return logits - mx.zeros((logits.shape[-1],)).at[following].maximum(penalties)

    def _broken_by(self, token: mx.array) -> mx.array:
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


def forbid(logits: mx.array, allowed: np.ndarray) -> mx.array:
    """Mask logits (B, V) by allowed (n,) or (B, n) bool; the others, and those from n on, become −inf."""
    size = logits.shape[-1]
    mask = allowed[..., :size]
    if missing := size - mask.shape[-1]:
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
    return mx.where(mx.array(np.ascontiguousarray(mask)), logits, -mx.inf)


def take_top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Select the k largest logits and their ids: (B, V) → logits, ids (B, C), C = min(V, k + TIES).

    In id order, so that a draw finds the same token as over the whole vocabulary. Logits below the k-th are −inf;
    up to TIES ties stay.
    """
    size = logits.shape[-1]
    count = min(size, k + TIES)
    ids = mx.sort(mx.argpartition(logits, kth=size - count, axis=-1)[:, size - count :], axis=-1)
    taken = mx.take_along_axis(logits, ids, axis=-1)
    threshold = mx.sort(taken, axis=-1)[:, count - k : count - k + 1]  # (B, 1)
    return mx.where(taken >= threshold, taken, -mx.inf), ids


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """Keep the smallest set of likeliest tokens with total probability ≥ p (nucleus, Holtzman et al. 2019).

    (B, V) → (B, V), the others −inf. The likeliest always stays.
    """
    order = mx.argsort(-logits, axis=-1)  # (B, V), likeliest first
    probabilities = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), order, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    ranked = mx.where(before < p, mx.take_along_axis(logits, order, axis=-1), -mx.inf)
    return mx.put_along_axis(mx.zeros_like(logits), order, ranked, axis=-1)


def keep_min_p(logits: mx.array, share: float) -> mx.array:
    """Keep tokens ≥ ``share`` times as likely as the likeliest (Nguyen et al. 2024). (B, V) → (B, V)."""
    threshold = mx.max(logits, axis=-1, keepdims=True) + mx.log(mx.array(share))
    return mx.where(logits >= threshold, logits, -mx.inf)


def penalise_repeats(logits: mx.array, recent: mx.array, penalty: float) -> mx.array:
    """Divide positive, multiply negative logits of recent tokens by ``penalty`` (Keskar et al. 2019, CTRL).

    logits (1, V), recent (n,) token ids → (1, V).
    """
    seen = logits[:, recent]
    changed = mx.where(seen > 0, seen / penalty, seen * penalty)
    return mx.put_along_axis(logits, recent[None], changed, axis=-1)


def mask_top_k(logits: mx.array, k: int) -> mx.array:
    """Mask all but the top k in place: (B, V) → (B, V), the others −inf."""
    taken, ids = take_top_k(logits, k)
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf), ids, taken, axis=-1)


def exclude_top(logits: mx.array, threshold: float, protected: mx.array) -> mx.array:
    """Exclude all but the least likely of the tokens with probability ≥ ``threshold`` (XTC, by p-e-w).

    https://github.com/oobabooga/text-generation-webui/pull/6335. As there and in mlx-lm, end-of-reply and newline
    tokens (``protected``, (B, V) bool) stay; so do ties with the least likely. (B, V) → (B, V).
    """
    probabilities = mx.softmax(logits, axis=-1, precise=True)
    least = mx.min(mx.where(probabilities >= threshold, probabilities, mx.inf), axis=-1, keepdims=True)
    return mx.where(mx.logical_and(probabilities > least, mx.logical_not(protected)), -mx.inf, logits)


def penalise_presence(logits: mx.array, counts: mx.array, presence: float, frequency: float) -> mx.array:
    """Subtract ``presence`` from tokens that occurred, and ``frequency`` per occurrence in the reply.

    logits (1, V), counts (1, V) → (1, V). See https://developers.openai.com/api/docs/guides/text-generation.
    """
    return logits - frequency * counts - mx.where(counts > 0, presence, 0.0)


@dataclass(frozen=True, slots=True)
class TokenSets:
    """Tokens with their own rules."""

    ends: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    breakers: Breakers = field(default_factory=Breakers)


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log-probability before any stage; and the likeliest tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class _DeviceScore(NamedTuple):
    """A Score on the device: logprob (1,), ids and logprobs (N,), likeliest first."""

    logprob: mx.array
    ids: mx.array
    logprobs: mx.array


class SamplerState(NamedTuple):
    last: mx.array | None
    made: int
    recent: mx.array
    counts: mx.array | None
    dry: tuple[mx.array, mx.array, int] | None
    scores: int


class Sampler:
    """One reply's sampler, of a resolved Sampling. made: reply tokens before this sampler.

    Logit biases and masks come first, then the stages of ``Sampling.order``.
    """

    # Random numbers derive from the seed and the token's position alone. Top-k commutes with the temperature and
    # comes first: the vocabulary is searched once and never sorted. Where penalties follow it, it masks in place.

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], tokens: TokenSets = TokenSets(), made: Sequence[int] = ()
    ) -> None:
        self._sampling = sampling
        self._tokens = tokens
        self._position = len(prompt)  # of the reply's first token
        self._before = [*prompt, *made]
        self._greedy = (sampling.temperature or 0) < COLDEST
        self._penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        self._counted = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._stages = self._active_stages()
        self._recent = mx.array(self._before[-PENALTY_WINDOW:], dtype=mx.uint32)
        self._seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        self._made = len(made)
        self._last: mx.array | None = None  # chosen, and not remembered yet
        self._raw: mx.array | None = None  # the logits it was chosen from, where scores are wanted
        self._vocabulary = 0
        self._counts: mx.array | None = None  # (1, V), of the tokens of this reply
        self._dry: Dry | None = None
        self._protected: mx.array | None = None  # (V,), from XTC
        self._scores: deque[_DeviceScore] = deque()
        self.scored = sampling.logprobs is not None
        bias = sampling.logit_bias
        self._biases = tuple(mx.array([part]) for part in zip(*bias, strict=True)) if bias else None  # (1, n) each
        self._plain = not (self._stages or sampling.logit_bias or sampling.min_tokens or self.scored)

    def _active_stages(self) -> tuple[Stage, ...]:
        sampling = self._sampling
        on: dict[Stage, bool] = {
            "penalties": self._penalty != 1.0 or self._counted,
            "dry": sampling.dry_multiplier > 0,
            "top_k": bool(sampling.top_k),
            "temperature": not self._greedy and sampling.temperature != 1,
            "top_p": sampling.top_p is not None and sampling.top_p < 1,
            "min_p": bool(sampling.min_p),
            "xtc": sampling.xtc_probability > 0,
        }
        if self._greedy:
            excludes = on["xtc"] and sampling.xtc_before_temperature
            judged = sampling.order[: sampling.order.index("xtc") + 1] if excludes else ()
            on = {stage: on[stage] and stage in {"penalties", "dry", *judged} for stage in on}
        return tuple(stage for stage in sampling.order if on[stage])

    def __call__(self, logits: mx.array, allowed: np.ndarray | None = None) -> mx.array:
        """logits (1, V) of any float type → token (1,) uint32, lazy. allowed: (n,) bool, None: any."""
        logits = logits.astype(mx.float32)
        if self._plain and allowed is None:
            self._vocabulary, key = logits.shape[-1], None if self._greedy else self._key("token")
            self._made += 1
            chosen = mx.argmax(logits, axis=-1) if key is None else mx.random.categorical(logits, axis=-1, key=key)
            return chosen.astype(mx.uint32)
        if not self._vocabulary:
            self._vocabulary = logits.shape[-1]
            self._count(mx.array(self._before[self._position :], mx.uint32))
        if self._last is not None:
            self._remember(self._last)
        choice = self._bias(logits)
        if allowed is not None:
            choice = forbid(choice, allowed)
        token = self._last = self._choose(choice).astype(mx.uint32)
        self._made += 1
        if (count := self._sampling.logprobs) is not None:
            self._raw = logits
            self._scores.append(_score(logits, token, count))
        return token

    @property
    def takes_likeliest(self) -> bool:
        as_they_are = not self._stages and not self._sampling.logit_bias and self._made >= self._sampling.min_tokens
        return self._greedy and as_they_are and self._sampling.logprobs is None

    def take_likeliest(self, logits: np.ndarray) -> int:
        """Choose the argmax of logits (V,) float32 on the host; requires ``takes_likeliest``."""
        self._vocabulary = len(logits)
        self._made += 1
        return int(logits.argmax())

    def take_likeliest_rows(self, logits: np.ndarray) -> tuple[list[int], list[SamplerState]]:
        """Choose argmaxes on the host: (N, V) → N tokens, and the states after each."""
        tokens, states = [], []
        for row in logits:
            tokens.append(self.take_likeliest(row))
            states.append(self._state())
        return tokens, states

    def choose_rows(
        self, logits: mx.array, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[mx.array, list[SamplerState]]:
        """Choose a token per row, sequentially: (N, V) → (N,) uint32, lazy, and the states after each.

        A row's penalties see the tokens chosen before it. allowed: one mask per row.
        """
        if self.takes_likeliest:
            logits = logits.astype(mx.float32)
            return self._likeliest_rows(logits if allowed is None else forbid(logits, np.stack(allowed)))
        chosen, states = [], []
        for row in range(len(logits)):
            chosen.append(self(logits[row : row + 1], None if allowed is None else allowed[row]))
            states.append(self._state())
        return mx.concatenate(chosen), states

    def _likeliest_rows(self, logits: mx.array) -> tuple[mx.array, list[SamplerState]]:
        chosen = mx.argmax(logits, axis=-1).astype(mx.uint32)
        states = []
        for _ in range(len(logits)):
            self._made += 1
            states.append(self._state())
        return chosen, states

    def _state(self) -> SamplerState:
        dry = None if self._dry is None else self._dry.state
        return SamplerState(self._last, self._made, self._recent, self._counts, dry, len(self._scores))

    def restore(self, state: SamplerState) -> None:
        self._last, self._made, self._recent, self._counts, dry, scores = state
        if self._dry is not None and dry is not None:
            self._dry.state = dry
        while len(self._scores) > scores:
            self._scores.pop()

    @contextmanager
    def supposing(self) -> Iterator[None]:
        """Choices inside the ``with`` block are rolled back. Not before the first token."""
        before, raw = self._state(), self._raw
        try:
            yield
        finally:
            self.restore(before)
            self._raw = raw

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def ends(self) -> frozenset[int]:
        return self._tokens.ends

    def newest_scores(self, count: int) -> list[mx.array]:
        return [array for score in list(self._scores)[-count:] for array in score] if self._scores else []

    def replace_last(self, token: mx.array) -> None:
        self._last = token
        if self._raw is not None:
            self._scores[-1] = _score(self._raw, token, self._sampling.logprobs or 0)

    def newest_score(self) -> tuple[mx.array, ...]:
        return self._scores[-1] if self._scores else ()

    def take_score(self) -> Score | None:
        if not self._scores:
            return None
        values: Any = [array.tolist() for array in self._scores.popleft()]
        (own,), ids, logprobs = values
        return Score(own, tuple(pair for pair in zip(ids, logprobs, strict=True) if math.isfinite(pair[1])))

    def _bias(self, logits: mx.array) -> mx.array:
        if self._biases is not None:
            ids, biases = self._biases
            added = mx.take_along_axis(logits, ids, axis=-1) + biases
            logits = mx.put_along_axis(logits, ids, added, axis=-1)
        if self._made < self._sampling.min_tokens and (ends := sorted(self._tokens.ends)):
            logits = mx.put_along_axis(logits, mx.array([ends]), mx.array(-mx.inf), axis=-1)
        return logits

    def _choose(self, logits: mx.array) -> mx.array:
        ids: mx.array | None = None  # (1, C), once top-k has left C logits
        for place, stage in enumerate(self._stages):
            if stage == "top_k":
                logits, ids = self._cut(logits, self._stages[place + 1 :])
            else:
                logits = self._apply(stage, logits, ids)
        key = None if self._greedy else self._key("token")
        chosen = mx.argmax(logits, axis=-1) if key is None else mx.random.categorical(logits, axis=-1, key=key)
        return chosen if ids is None else mx.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0]

    def _key(self, draw: Literal["token", "xtc"]) -> mx.array:
        """Return a draw's key from the seed and position alone: the text never depends on other load."""
        position = self._position + self._made
        key: mx.array = mx.random.key(xxhash.xxh3_64_intdigest(f"{self._seed} {position} {draw}".encode()))
        return key

    def _cut(self, logits: mx.array, later: Sequence[Stage]) -> tuple[mx.array, mx.array | None]:
        k = int(self._sampling.top_k or 0)
        if k >= logits.shape[-1]:
            return logits, None
        if "penalties" in later or "dry" in later:
            return mask_top_k(logits, k), None
        return take_top_k(logits, k)

    def _apply(self, stage: Stage, logits: mx.array, ids: mx.array | None) -> mx.array:
        """Apply one stage to logits (1, V), or (1, C) of ``ids``."""
        sampling = self._sampling
        match stage:
            case "penalties":
                if self._penalty != 1.0:
                    logits = penalise_repeats(logits, self._recent, self._penalty)
                if self._counts is not None:
                    penalties = sampling.presence_penalty, sampling.frequency_penalty
                    logits = penalise_presence(logits, self._counts, *penalties)
                return logits
            case "dry":
                if self._dry is None:
                    self._dry = Dry(sampling, self._before, self._tokens.breakers, self._vocabulary)
                return self._dry.penalise(logits)
            case "temperature":
                return logits * (1 / (sampling.temperature or 1))
            case "top_p":
                return keep_top_p(logits, sampling.top_p or 1)
            case "min_p":
                return keep_min_p(logits, sampling.min_p or 0)
            case _:
                return self._exclude_top(logits, ids)

    def _exclude_top(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        if self._protected is None:
            self._protected = token_mask(self._tokens.kept, self._vocabulary)
        protected = self._protected[None] if ids is None else self._protected[ids]
        left = mx.random.uniform(key=self._key("xtc")) >= self._sampling.xtc_probability
        return mx.where(left, logits, exclude_top(logits, self._sampling.xtc_threshold, protected))

    def _remember(self, token: mx.array) -> None:
        if self._penalty != 1.0:
            self._recent = mx.concatenate([self._recent, token])[-PENALTY_WINDOW:]
        self._count(token)
        if self._dry is not None:
            self._dry.add(token)

    def _count(self, tokens: mx.array) -> None:
        if self._counted and tokens.size:
            counts = mx.zeros((1, self._vocabulary)) if self._counts is None else self._counts
            self._counts = counts.at[:, tokens].add(1)


def _score(logits: mx.array, token: mx.array, count: int) -> _DeviceScore:
    """logits (1, V), token (1,) → its log-probability, and the top ``count`` tokens."""
    total = mx.logsumexp(logits, axis=-1)  # (1,)
    own = mx.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    size = logits.shape[-1]
    count = min(count, size)
    ids = mx.argpartition(logits[0], kth=size - count)[size - count :] if count else mx.zeros((0,), mx.uint32)
    values = logits[0][ids]
    order = mx.argsort(-values)
    return _DeviceScore(own, ids[order], values[order] - total)
