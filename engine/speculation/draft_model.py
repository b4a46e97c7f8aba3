"""Guesses of a second, smaller model with the same tokenizer: it reads what the first one writes, and writes a little further.

ids        a  b  c  d  e  f  t             the conversation; t, the newest, is in no cache yet
held          b  c  d  e                   what the draft model's caches hold: an end of it, from ``start`` on
a draft                 [f  t] d1 d2 d3    what it lacks is read in one pass, then a token a pass; d3 is not read
verified                       d1 x        d2 is taken back, and with the next draft x is read

It reads no more of a prompt than the reply can bear, and so the end of a long one alone: its guesses are the worse for it, never
the text. A token is chosen by the reply's own sampler, with the random numbers of its position: where both models think alike
they choose alike, at any temperature.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kv.cache import GrowthWatcher, rewindable
from ..kv.plan import CachePlan
from ..kv.rewind import UNBOUNDED, BeforePass, most_taken_back
from ..model.head import asking_for_logits
from .ledger import SHORT, DraftingCosts

if TYPE_CHECKING:
    from ..sampling import Sampler

LEAST_READ = 32
"""Tokens of a conversation that it must know of to be worth asking; the whole of a shorter one."""
CHUNK = 512
"""Tokens that it reads at once."""
ROWS = 8
"""Tokens that are read in the pass whose last logits are used: more are read before, without the head."""

NO_MEMORY = "there is no memory for the keys and values of its draft model"


class DraftModel:
    """A loaded draft model, and its caches of one sequence.

    Args:
        model: called with (1, N) ids and the caches.
        plan: of its caches.
        vocabulary: ids that it knows.
        longest: tokens that its context holds; None where nothing bounds it.
        fits: asked before its caches take so many bytes more.

    Attributes:
        plan: of its caches.
        costs: what its drafts take.
        most: tokens of a draft at most: all but the last are read, and may have to be taken back.
        start: place in a conversation of the first token that is held.
        state: another object whenever other tokens are held.
    """

    def __init__(
        self,
        model: Any,
        plan: CachePlan,
        *,
        vocabulary: int,
        longest: int | None,
        costs: DraftingCosts,
        fits: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.costs = costs
        self._model, self.plan, self.fits = model, plan, fits
        self._vocabulary, self._longest = vocabulary, longest
        self._new()
        self.most = min(SHORT[-1], most_taken_back(self._caches) + 1)

    def _new(self) -> None:
        self._caches = self.plan.make()
        self._growth = GrowthWatcher(self._caches)
        self._held: list[int] = []
        self._sure = 0  # of those, before the last draft
        self._before: BeforePass | None = None  # it
        self.start, self.state = 0, object()

    def forget(self) -> None:
        """Hold no tokens any more."""
        self._new()

    @property
    def caches(self) -> list[Any]:
        """What holds its keys and values."""
        return self._caches

    @property
    def sure(self) -> int:
        """How many of the held tokens were not guessed."""
        return self._sure

    @property
    def held(self) -> Sequence[int]:
        """The tokens in its caches."""
        return self._held

    def alike(self, ids: Sequence[int], known: int) -> int:
        """Return how many of the held tokens are those of ``ids`` from ``start`` on, of which the first ``known`` certainly are."""
        held, start = self._held, self.start
        at, end = min(known, len(held)), min(len(held), len(ids) - 1 - start)
        while at < end and held[at] == ids[start + at]:
            at += 1
        return max(0, min(at, end))

    def fitting(self, tokens: int) -> bool:
        """Whether its context holds so many."""
        return self._longest is None or tokens <= self._longest

    @property
    def longest_read(self) -> int:
        """Tokens that it reads of a conversation at most, so that there is room for as many."""
        return UNBOUNDED if self._longest is None else self._longest // 2

    def follow(self, ids: Sequence[int], alike: int, start: int) -> bool:
        """Bring the caches to the end of ``ids``, all but the newest few; return whether there is memory for it.

        alike: held tokens that stay. start: where to begin anew, if other than now.
        """
        if start != self.start or not self._take_back(len(self._held) - alike):
            self._new()
            self.start = start
        missing = ids[self.start + len(self._held) :]
        if not self._may_hold(len(missing) + self.most):
            self.forget()
            return False
        while len(missing) > ROWS:
            part = [*missing[: min(CHUNK, len(missing) - 1)]]
            self._model(self._given(part), cache=self._caches)
            mx.eval([cache.state for cache in self._caches])
            mx.clear_cache()
            self._held += part
            missing = missing[len(part) :]
        return True

    def draft(self, ids: Sequence[int], k: int, sampler: "Sampler") -> tuple[int, ...]:
        """Return ``k`` tokens that may follow ``ids``, of which the caches hold all but the newest few."""
        missing = list(ids[self.start + len(self._held) :])
        chosen: list[mx.array] = []
        with sampler.supposing():
            with asking_for_logits():
                logits = self._model(self._given(missing), cache=self._caches)[:, -1]  # (1, V)
            self._held += missing
            self._sure, self._before = len(self._held), BeforePass(self._caches)
            while True:
                chosen.append(sampler(self._as_wide(logits, sampler)))
                if len(chosen) == k:
                    break
                known = mx.minimum(chosen[-1], self._vocabulary - 1)[None]
                logits = self._model(known, cache=self._caches)[:, -1]
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        self._held += found[:-1]
        return tuple(found)

    def _take_back(self, count: int) -> bool:
        """Take back the last ``count`` held tokens, and what else has to go with them; return whether that can be done."""
        drafted = len(self._held) - self._sure
        if self._before is not None and drafted:
            wrong = min(count, drafted)
            left = self._before.take_back(wrong, drafted)
            self._held = self._held[: self._sure + left]
            count -= wrong
        self._before = None
        self._sure = len(self._held)
        if count <= 0:
            return True
        if count > rewindable(self._caches):  # less than before, by what was guessed
            return False
        BeforePass(self._caches).take_back(count, count)
        self._held = self._held[:-count]
        self._sure = len(self._held)
        return True

    def _may_hold(self, more: int) -> bool:
        """Whether there is memory for so many tokens more."""
        fitting = self._growth.fitting(len(self._held))
        return fitting is None or more <= fitting or self.fits(self.plan.bytes_at(len(self._held) + more))

    def _given(self, ids: Sequence[int]) -> mx.array:
        """Return (1, N): a lookup has no bounds, so ids that only the larger model knows are others here."""
        return mx.minimum(mx.array([ids], mx.uint32), self._vocabulary - 1)

    def _as_wide(self, logits: mx.array, sampler: "Sampler") -> mx.array:
        """Return logits (1, V) for the V tokens of the model that verifies: what pads a vocabulary differs."""
        wanted, have = sampler.vocabulary, logits.shape[-1]
        if have > wanted:
            return logits[:, :wanted]
        if have < wanted:
            return mx.pad(logits, [(0, 0), (0, wanted - have)], constant_values=mx.array(-mx.inf, logits.dtype))
        return logits


class ModelDrafter:
    """Guesses of a draft model for one reply.

    Args:
        model: shared by all replies; it follows the one that asked last.
        sampler: the reply's.

    Attributes:
        rests: why it guesses no more; "" while it does.
    """

    source = "draft"

    def __init__(self, model: DraftModel, sampler: "Sampler") -> None:
        self._model, self._sampler = model, sampler
        self._known = 0  # held tokens that are the reply's, while the model is in that state:
        self._state: object = None
        self._start = self._read = 0  # where the next draft begins to read; tokens that the last one read
        self.rests = ""

    @property
    def most(self) -> int:
        """Tokens of a draft at most."""
        return 0 if self.rests else self._model.most

    def drafting(self, width: int) -> float:
        """Return the plain steps that a draft takes which goes on from the last one."""
        return self._model.costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        """Return the plain steps that it takes beyond that to read what it lacks of ``ids``, ``most`` at most; None for more."""
        model, costs = self._model, self._model.costs
        alike = self._alike(ids)
        missing = len(ids) - model.start - alike
        self._start = model.start
        whole = model.fitting(len(ids) - model.start + model.most) and (alike > 0 or model.start == 0)
        if whole and (steps := costs.reading(missing)) <= most:
            return steps
        size, longest = 0, min(len(ids), model.longest_read)
        tried = longest
        while tried >= min(LEAST_READ, len(ids)):
            if (steps := costs.reading(tried)) <= most:
                size = tried
                break
            tried //= 2
        if not size:
            return None
        self._start = len(ids) - size
        return steps

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return ``k`` tokens that may follow ``ids``, after ``reading`` said what that takes; none where there is no memory."""
        model = self._model
        alike = self._alike(ids)
        read_before = alike if self._start == model.start else 0
        try:
            if not model.follow(ids, alike, self._start):
                self.rests = NO_MEMORY
                return ()
            self._read = len(ids) - model.start - read_before
            found = model.draft(ids, k, self._sampler)
        except BaseException:
            model.forget()  # nobody knows what its caches hold
            raise
        model.state = self._state = object()
        self._known = len(ids) - model.start
        return found

    def took(self, width: int, steps: float) -> None:
        """Take what the last draft took."""
        self._model.costs.saw(self._read, width, steps)

    def rested(self) -> None:
        """Take a plain step."""
        self._model.costs.rested()

    def _alike(self, ids: Sequence[int]) -> int:
        model = self._model
        self._known = model.alike(ids, self._known if self._state is model.state else 0)
        self._state = model.state
        return self._known
