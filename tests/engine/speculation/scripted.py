"""Drafters that know how a text goes on, or get it wrong, and speculation that asks them at every token."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tokamac.engine.kv.attention import leaves
from tokamac.engine.metrics import Recorder
from tokamac.engine.options import Sampling
from tokamac.engine.sampling import Sampler, TokenSets
from tokamac.engine.schedule.decoding import Decoder, Lane
from tokamac.engine.speculation.drafters import ComputingDrafter, Drafter, TokenDraft
from tokamac.engine.speculation.head_drafters import HiddenStates
from tokamac.engine.speculation.ledger import PassCosts
from tokamac.engine.speculation.speculator import Speculator


class Knowing:
    """Knows the whole text; gets the token after ``right()`` of a draft wrong."""

    def __init__(self, text: Sequence[int], right: Callable[[], int], vocabulary: int, width: int = 7) -> None:
        self._text, self._right, self._vocabulary, self._width = text, right, vocabulary, width

    def propose(self, ids: Sequence[int], k: int) -> TokenDraft | None:
        """Return what follows, up to ``right()`` of it, and then something else."""
        right = self._right()
        coming = list(self._text[len(ids) : len(ids) + min(k, self._width)])
        if len(coming) > right:
            coming[right] = (coming[right] + 1) % self._vocabulary
        return TokenDraft(tuple(coming), "known", 20) if coming else None


def always_right(text: Sequence[int], vocabulary: int) -> Drafter:
    """Never wrong."""
    return Knowing(text, lambda: len(text), vocabulary, width=31)


def always_wrong(text: Sequence[int], vocabulary: int) -> Drafter:
    """Wrong from the first token on."""
    return Knowing(text, lambda: 0, vocabulary)


def at_random(text: Sequence[int], vocabulary: int, seed: int = 0) -> Drafter:
    """Right for none to all of a draft's tokens."""
    draw = random.Random(seed)
    return Knowing(text, lambda: draw.randrange(0, 8), vocabulary, width=7)


class Eager(Speculator):
    """Drafts whatever it pays, but for every ninth step, which is plain."""

    def __init__(self, drafter: Drafter, ids: Sequence[int]) -> None:
        super().__init__([drafter], PassCosts(lambda rows, _: 1.0), ids)

    def pays_soon(self, room: Callable[[], int]) -> bool:
        """Read every token before the next step."""
        return len(self._ids) % 9 != 4 and bool(self._after_last()) and room() > 1

    def draft(self, room: Callable[[], int]) -> TokenDraft | None:
        """Verify as much as there is room for."""
        for guess in self._after_last() if len(self._ids) % 9 else ():
            if tokens := guess.tokens[: room()]:
                return TokenDraft(tokens, guess.source, guess.match)
        return None


class EagerDrafting(Speculator):
    """Has a computing drafter guess wherever it can, but for every ninth token, which comes of a plain step."""

    def __init__(
        self, drafter: ComputingDrafter, ids: Sequence[int], width: int = 5, hidden: HiddenStates | None = None
    ) -> None:
        super().__init__([], PassCosts(lambda rows, _: 1.0), ids, computing=[drafter], hidden=hidden)
        self._width, self._began = width, len(ids)

    def pays_soon(self, room: Callable[[], int]) -> bool:
        """Read every token before the next step."""
        return len(self._ids) % 9 != 4 and room() > 1

    def draft(self, room: Callable[[], int]) -> TokenDraft | None:
        """Verify as much as there is room for, once a first token was chosen."""
        (drafter,) = self._computing
        width = min(self._width, drafter.most, room())
        if width < 1 or len(self._ids) == self._began or len(self._ids) % 9 == 0:
            return None
        return None if drafter.reading(self._ids, math.inf) is None else self._computed(drafter, width)


class Decoding:
    """One sequence, decoded token by token; checks at every token that ``cached_ids`` are what the caches hold."""

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        prompt: list[int],
        *,
        sampling: Sampling | None = None,
        ends: frozenset[int] = frozenset(),
        drafter: Drafter | None = None,
        most: int | None = 40,
        ahead: bool = True,
    ) -> None:
        model(mx.array([prompt[:-1]]), cache=caches)
        self.model, self.prompt, self.tokens, self.counts = model, prompt, list[int](), Recorder()
        sampler = Sampler((sampling or Sampling(temperature=0)).resolved(Sampling()), prompt, TokenSets(ends))
        self.lane = Lane(
            caches,
            list(prompt[:-1]),
            prompt[-1],
            sampler,
            most,
            counts=self.counts,
            speculator=None if drafter is None else Eager(drafter, prompt),
        )
        self.decoder = Decoder(model, ahead=ahead)
        self.ends = ends

    @property
    def passes(self) -> int:
        return self.counts.passes

    def run(self, most: int | None = None) -> list[int]:
        """Decode to the end, or ``most`` tokens; return all tokens."""
        while not self.lane.ended and (most is None or len(self.tokens) < most):
            for each in self.decoder.step([self.lane]):
                if each.failure is not None:
                    raise each.failure
                if each.token is not None:
                    self.tokens.append(each.token)
            self.check()
            if self.tokens and self.tokens[-1] in self.ends:
                break
        return self.tokens

    def check(self) -> None:
        """Raise unless the caches hold what the lane says, a beginning of what came, or is ready."""
        held, known = self.lane.cached_ids, [*self.prompt, *self.tokens, *self.lane.ready]
        assert held == known[: len(held)], (held, known)
        assert [*held, *self.lane.behind] == known[: len(held) + len(self.lane.behind)]
        offsets = {
            int(cache.offset)
            for _, cache in leaves(self.lane.caches)
            if isinstance(getattr(cache, "offset", None), int)
        }
        assert offsets <= {len(held)}, (offsets, len(held))


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
