"""Guesses of a model's own heads for further tokens, which read the hidden states of the passes that made the tokens before.

ids          a  b  c  d  e  t            t, the newest, is in no cache yet
hidden       ·  h  h  h  h               after b … e, kept of passes that ran anyway; of a prompt, none
a draft      (h b→c) … (h e→t) d1 d2     mtp: pairs that the layer lacks in one pass, then a token a pass on its own hidden states
             h e ─▶ d1 d2 d3             medusa: all from the last hidden state

The layer's caches hold pairs that are certain alone: what was drafted is taken back at once, since the model's own hidden states
are the better ones to go on from. They begin where hidden states begin, and anew where they would grow long: guesses are a little
the worse for it, never the text.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kv.plan import CachePlan
from ..kv.rewind import BeforePass
from .ledger import SHORT, USUALLY_READ, DraftingCosts

if TYPE_CHECKING:
    from ..model.extra_heads import MedusaHeads, PredictionHead
    from ..sampling import Sampler
    from .drafters import ComputingDrafter

KEPT = 64
"""Hidden states of a reply that are kept."""
LONGEST = 1024
"""Pairs that the caches of a layer hold at most."""

NO_MEMORY = "there is no memory for the keys and values of its heads"


class HiddenStates:
    """The last hidden states of one reply, by the place of the token that was read.

    Attributes:
        end: the place after the last.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[int, mx.array]] = deque()  # the place of the first, and (1, N, D)
        self.end = 0

    @property
    def start(self) -> int:
        """The place of the first; ``end`` where there is none."""
        return self._parts[0][0] if self._parts else self.end

    def passed(self, place: int, hidden: mx.array) -> None:
        """Keep what a pass over the tokens from ``place`` on made: hidden (1, N, D)."""
        parts = self._parts
        if place > self.end:
            parts.clear()  # what lies between was computed elsewhere
        while parts and parts[-1][0] >= place:
            parts.pop()
        if parts and place < self.end:
            first, before = parts[-1]
            parts[-1] = first, before[:, : place - first]
        parts.append((place, hidden))
        self.end = place + hidden.shape[1]
        while len(parts) > 1 and self.end - parts[1][0] >= KEPT:
            parts.popleft()

    def between(self, start: int, end: int) -> mx.array:
        """Return those of the places from ``start`` up to ``end``: (1, end − start, D)."""
        found = [
            hidden[:, max(0, start - place) : max(0, end - place)]
            for place, hidden in self._parts
            if place < end and start < place + hidden.shape[1]
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """A model's heads for further tokens, and what they cost. Bytes.

    Attributes:
        named: which they are, in words.
        weight_bytes: of their weights, as they are held; kv_bytes: of their keys and values, at most.
        step_bytes: read for one token of a draft.
        costs: what their drafts take.
        drafter: makes what guesses in one reply, of its hidden states and its sampler.
        forget: lets go of all that belongs to a conversation.
    """

    named: str
    weight_bytes: int
    kv_bytes: int
    step_bytes: int
    costs: DraftingCosts
    drafter: "Callable[[HiddenStates, Sampler], ComputingDrafter]"
    forget: Callable[[], None] = lambda: None


class LayerDrafts:
    """A layer for further tokens, and its caches of one reply: of the one that asked last.

    Args:
        head: what is called.
        plan: of its caches.
        fits: asked before they take so many bytes more.

    Attributes:
        head, plan: as given.
        start: place of the first hidden state that was read. held: pairs in the caches, all of them certain.
        state: another object whenever other pairs are held.
    """

    def __init__(
        self, head: "PredictionHead", plan: CachePlan, *, fits: Callable[[int], bool] = lambda _: True
    ) -> None:
        self.head, self.plan, self._fits = head, plan, fits
        self.forget()

    def forget(self) -> None:
        """Hold no pairs any more."""
        self.caches: list[Any] = []
        self.start = self.held = 0
        self.state: object = object()

    def begin(self, start: int) -> bool:
        """Begin with the hidden state at a place; return whether there is memory for the caches."""
        self.forget()
        if not self._fits(self.plan.bytes_at(LONGEST)):
            return False
        self.caches, self.start = self.plan.make(), start
        return True

    def draft(self, tokens: Sequence[int], hidden: mx.array, k: int, sampler: "Sampler") -> tuple[int, ...]:
        """Read tokens and the hidden states (1, N, D) before them; return ``k`` tokens that may follow."""
        ids, chosen = mx.array([tokens], mx.uint32), list[mx.array]()
        with sampler.supposing():
            hidden = self.head(ids, hidden, self.caches)
            self.held += len(tokens)
            before = BeforePass(self.caches)
            while True:
                chosen.append(sampler(self.head.logits(hidden)))
                if len(chosen) == k:
                    break
                hidden = self.head(chosen[-1][None], hidden[:, -1:], self.caches)
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        before.take_back(k - 1, k - 1)
        return tuple(found)


class LayerDrafter:
    """Guesses of a layer for one reply.

    Attributes:
        rests: why it guesses no more; "" while it does.
    """

    source = "mtp"

    def __init__(self, layer: LayerDrafts, costs: DraftingCosts, hidden: HiddenStates, sampler: "Sampler") -> None:
        self._layer, self._costs, self._hidden, self._sampler = layer, costs, hidden, sampler
        self._state: object = None
        self._start = self._read = 0  # place of the first hidden state of the next draft; pairs that the last one read
        self.rests = ""

    @property
    def most(self) -> int:
        """Tokens of a draft at most."""
        return 0 if self.rests else SHORT[-1]

    def drafting(self, width: int) -> float:
        """Return the plain steps that a draft takes which goes on from the last one."""
        return self._costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:
        """Return the plain steps that it takes beyond that to read what it lacks; None without the hidden states for it."""
        layer, hidden, last = self._layer, self._hidden, len(ids) - 1
        if hidden.end < last or hidden.start >= last:
            return None
        self._start = hidden.start
        reached = layer.start + layer.held
        goes_on = layer.state is self._state and layer.held and hidden.start <= reached < last
        if goes_on and last - layer.start + SHORT[-1] <= LONGEST:
            self._start = reached
        if (steps := self._costs.reading(last - self._start)) > most:
            self._start = max(hidden.start, last - USUALLY_READ)
            steps = self._costs.reading(last - self._start)
        return steps

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return ``k`` tokens that may follow ``ids``, after ``reading`` said what that takes; none where there is no memory."""
        layer, last = self._layer, len(ids) - 1
        goes_on = layer.state is self._state and layer.held and self._start == layer.start + layer.held
        if not goes_on and not layer.begin(self._start):
            self.rests = NO_MEMORY
            return ()
        self._read = last - self._start
        found = layer.draft(ids[self._start + 1 :], self._hidden.between(self._start, last), k, self._sampler)
        layer.state = self._state = object()
        return found

    def took(self, width: int, steps: float) -> None:
        """Take what the last draft took."""
        self._costs.saw(self._read, width, steps)

    def rested(self) -> None:
        """Take a plain step."""
        self._costs.rested()


class MedusaDrafter:
    """Guesses of Medusa heads for one reply: of each head the token that the reply's sampler chooses, one after another.

    Attributes:
        rests: "": nothing makes it rest.
    """

    source = "medusa"
    rests = ""

    def __init__(self, heads: "MedusaHeads", costs: DraftingCosts, hidden: HiddenStates, sampler: "Sampler") -> None:
        self._heads, self._costs, self._hidden, self._sampler = heads, costs, hidden, sampler

    @property
    def most(self) -> int:
        """Tokens of a draft at most."""
        return min(len(self._heads.heads), SHORT[-1])

    def drafting(self, width: int) -> float:
        """Return the plain steps that a draft takes."""
        return self._costs.drafting(width)

    def reading(self, ids: Sequence[int], most: float) -> float | None:  # noqa: ARG002  # it reads nothing but what is there
        """Return 0, or None without the last hidden state."""
        return 0.0 if self._hidden.start < len(ids) - 1 <= self._hidden.end else None

    def draft(self, ids: Sequence[int], k: int) -> tuple[int, ...]:
        """Return ``k`` tokens that may follow ``ids``."""
        hidden = self._hidden.between(len(ids) - 2, len(ids) - 1)
        with self._sampler.supposing():
            chosen = [self._sampler(self._heads(hidden, index)) for index in range(k)]
            found: list[int] = mx.concatenate(chosen).tolist()  # type: ignore[assignment]
        return tuple(found)

    def took(self, width: int, steps: float) -> None:
        """Take what the last draft took."""
        self._costs.saw(1, width, steps)

    def rested(self) -> None:
        """Take a plain step."""
        self._costs.rested()
