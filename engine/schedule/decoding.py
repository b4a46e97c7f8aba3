"""Decoding several sequences together, one step ahead: one pass makes the next token of every lane.

    decoder.step(lanes)     the tokens that became known, lane by lane

Lanes may come and go with every step: nothing is copied. A single lane is decoded by the same code, through its own caches; while
it is alone, drafts of what may come are verified, several tokens in a pass (verify.py). They then come one a step, as any others.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..errors import ModelDamagedError, TokamacError
from ..kv.cache import GrowthWatcher
from ..kv.operations import LOCAL, CacheOperations
from ..kv.rewind import most_taken_back
from ..model.head import asking_for_logits, keeping_hidden_states
from ..sampling import Sampler
from ..speculation.speculator import Speculator
from .verify import NOT_NUMBERS, verify

CHECK_STEPS = 16
"""Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches."""
NO_NUMBER = (1 << 32) - 1
"""In place of a token: no vocabulary has so many."""

POOL_CLEAR_STEPS = 256
"""Steps between returns of MLX's unused buffers to the system."""


class Constraint(Protocol):
    """Holds one reply to a form."""

    def allowed(self) -> np.ndarray:
        """Return (n,) bool: which tokens may follow all that came."""

    def fitting(self, drafted: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after another."""

    def allowed_along(self, drafted: Sequence[int]) -> list[np.ndarray]:
        """Return what ``allowed`` would now, and after each of these tokens, which fit."""


class Lane:
    """One sequence being decoded.

    Invariant: whenever control returns to the caller, ``cached_ids`` are exactly the tokens in the caches.

    Args:
        caches: one a layer, which hold all tokens but ``last``.
        cached_ids: the tokens that the caches hold; extended in place.
        last: the token that the first step takes.
        sampler: chooses its tokens.
        limit: tokens to decode at most; None: without end.
        note: told what may delay the next token (a Cause); where known, by how many milliseconds at most, and which prompt it is.
        may_grow: asked before the caches are made larger; where it says no, decoding ends.
        launched: told the number of lanes of each of its steps.
        speculator: says what to draft; None drafts nothing.
        unforced: how many of the next tokens are certainly chosen by the sampler; None: all.
        constraint: tells which tokens may come next, given all that came; None: any. Such a token is chosen a step later than
            others, once the host knows the one before it: meanwhile the device computes the logits that it is chosen from.

    Attributes:
        behind: tokens before ``last`` that the caches do not hold: the next step reads them, too.
        ready: tokens that were computed, and come one a step.
        hidden: where the hidden states of its passes are kept while it is alone; None keeps none.
        count: tokens decoded, those that are ready included.
        came_with_others: whether the token that came last is one of several of a pass.
        guessed: whether the token that came last was guessed.
        ended: whether no more will come.
        ended_by_memory: whether ``may_grow`` ended it.
    """

    def __init__(
        self,
        caches: list[Any],
        cached_ids: list[int],
        last: int,
        sampler: Sampler,
        limit: int | None,
        *,
        note: Callable[..., None] = lambda *_: None,
        may_grow: Callable[[], bool] = lambda: True,
        launched: Callable[[int], None] = lambda _: None,
        speculator: Speculator | None = None,
        unforced: Callable[[], int | None] = lambda: None,
        constraint: Constraint | None = None,
    ) -> None:
        self.caches, self.cached_ids = caches, cached_ids
        self.sampler = sampler
        self.launched, self._note = launched, note
        self.count = 0
        self.came_with_others = self.guessed = self.ended = self.ended_by_memory = False
        self.behind: list[int] = []
        self.ready: deque[int] = deque()
        self._taken_back = most_taken_back(caches)
        self.speculator = speculator if self._taken_back else None
        self.hidden = None if self.speculator is None else self.speculator.hidden
        self._limit, self._may_grow, self._unforced = limit, may_grow, unforced
        self._growth = GrowthWatcher(caches)
        self._forced: deque[int] = deque()
        self._forcing: int | None = None  # taken by a step, and not read yet
        self.token = mx.array([last], mx.uint32)  # what the next step takes: (1,), maybe not computed yet
        self.known: int | None = last  # the same, where the host knows it
        self.chosen: mx.array | None = None  # what the last step chose, until it is the token
        self.constraint = constraint
        self._logits: mx.array | None = None  # (1, V), from which the last step has chosen nothing yet

    def note(self, cause: str, *more: Any) -> None:
        """Tell what may delay the next token."""
        self.interrupted()
        self._note(cause, *more)

    def interrupted(self) -> None:
        """Something else is computed: time passes that no step of this lane takes."""
        if self.speculator is not None:
            self.speculator.interrupted()

    def force(self, ids: Iterable[int]) -> None:
        """Have these tokens come next, whatever the sampler chooses. Call it before the first step, or after a token came."""
        self._forced.extend(ids)

    @property
    def forced(self) -> list[int]:
        """The tokens that are to come next, and have not come yet."""
        return [*([] if self._forcing is None else [self._forcing]), *self._forced]

    @property
    def last(self) -> int:
        """The token that the next step takes, which the host knows."""
        assert self.known is not None
        return self.known

    @property
    def room(self) -> int:
        """How many tokens may be drafted: each may come true, and one more comes then; all may have to be taken back.

        So may the tokens before them that the pass reads, where a state is recurrent. A pass makes no cache larger: that is left to
        plain steps, which ask first.
        """
        if self._forced:
            return 0
        most = self._taken_back - len(self.behind) - 1
        left = None if self._limit is None else self._limit - self.count
        fitting = self._growth.fitting(len(self.cached_ids) + len(self.behind))
        for bound in (left, self._unforced(), fitting):
            most = most if bound is None else min(most, bound - 1)
        return max(most, 0)

    def deliver(self) -> int:
        """Return the next of the tokens that are ready."""
        token = self.ready.popleft()
        self.came_with_others = True
        self.guessed = bool(self.ready)  # after those that came true stands one that the model chose
        self.ended = not self.ready and not self.goes_on(self.count)
        return token

    def resumed(self) -> None:
        """The caches were released and acquired again: other objects, which hold the same tokens."""
        self._growth = GrowthWatcher(self.caches)
        self.interrupted()

    def computed(self, logits: mx.array) -> list[mx.array]:
        """Choose from logits (1, V), or keep them until it is known what may be chosen; return what to evaluate."""
        if self.constraint is None:
            return self._choose(logits, None)
        self._logits = logits
        return [logits]

    @property
    def takes_likeliest(self) -> bool:
        """Whether its next token is that of the largest logit."""
        return self.constraint is None and self.sampler.takes_likeliest

    def take_likeliest(self, logits: np.ndarray) -> None:
        """Choose from logits (V,) that the host has: where a token is waited for anyhow, MLX need not be waited for once more."""
        token = self.sampler.take_likeliest(logits)
        self.chosen = mx.array([token if math.isfinite(logits[token]) else NO_NUMBER], mx.uint32)

    def choose(self) -> None:
        """Choose from logits that were kept: the tokens before are known now."""
        if self._logits is not None and self.constraint is not None:
            logits, self._logits = self._logits, None
            mx.async_eval(*self._choose(logits, self.constraint.allowed()))  # type: ignore[no-untyped-call]

    def _choose(self, logits: mx.array, allowed: np.ndarray | None) -> list[mx.array]:
        chosen = self.sampler(logits, allowed)
        if self.count % CHECK_STEPS == 0:
            chosen = mx.where(mx.isfinite(mx.max(logits)), chosen, mx.array(NO_NUMBER, mx.uint32))
        self.chosen = chosen
        return [chosen, *self.sampler.newest_score()]

    def take_chosen(self) -> None:
        """Make what the last step chose, or a forced token, the next step's: what was computed of a replaced one is not used."""
        if self.chosen is None:
            return
        self.token, self.known, self.chosen = self.chosen, None, None
        if self._forced:
            self._forcing = self._forced.popleft()
            self.token = mx.array([self._forcing], mx.uint32)
            self.sampler.replace_last(self.token)

    def goes_on(self, coming: int) -> bool:
        """Whether a step may follow once ``coming`` tokens are decoded: not at the limit, nor where there is no memory for it."""
        self.ended_by_memory = (
            coming != self._limit and self._growth.will_grow(len(self.cached_ids)) and not self._may_grow()
        )
        return coming != self._limit and not self.ended_by_memory

    def goes_on_after(self, tokens: list[int]) -> None:
        """Tokens came at once: they are ready, and the next step takes the last of them."""
        self.ready.extend(tokens)
        self.count += len(tokens)
        self.known = tokens[-1]
        self.token = mx.array([self.known], mx.uint32)

    def stepped(self) -> None:
        """A step took the token: it is in the caches."""
        if self._growth.grew() and self.count:
            self.note("kv growth")

    def read(self) -> int:
        """Wait for the token, and return it. Raises ModelDamagedError."""
        token = int(self.token.tolist()[0])  # type: ignore[index,arg-type]
        if token == NO_NUMBER:
            raise ModelDamagedError(*NOT_NUMBERS)
        self.known, self._forcing = token, None
        self.came_with_others = self.guessed = False
        self.count += 1
        return token


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step brought for a lane: a token, or why none will come."""

    lane: Lane
    token: int | None = None
    failure: TokamacError | None = None


class Decoder:
    """Decodes lanes together.

    Args:
        model: called with (B, 1) ids and the caches of all lanes.
        ahead: launch the next step before a token is read, so that the device works while the host does.
        operations: what is done to the model and to caches.
    """

    def __init__(self, model: Any, *, ahead: bool, operations: CacheOperations = LOCAL) -> None:
        self._model, self._ahead, self._operations = model, ahead, operations
        self._steps = 0

    def step(self, lanes: Sequence[Lane]) -> list[Decoded]:
        """Compute a token of every lane that has not ended; return those that became known.

        With ``ahead``, a lane's first step brings none: its first token is read while the second is computed. Raises what MLX
        raises: then nobody knows what the caches hold.
        """
        alone = len(lanes) == 1
        delivered = [Decoded(lane, lane.deliver()) for lane in lanes if lane.ready]
        if delivered:
            lanes = [lane for lane in lanes if all(each.lane is not lane for each in delivered)]
        if not lanes:
            return delivered
        lanes, failed = _chosen(lanes)
        if failed:
            return [*delivered, *failed]  # the others have chosen, too: their next step goes on from there
        if alone and lanes[0].speculator is not None and (drafted := self._speculate(lanes[0], lanes[0].speculator)):
            return drafted
        for lane in lanes:
            lane.take_chosen()
        if self._ahead:
            reading = [lane for lane in lanes if lane.known is None]
            ending = [lane for lane in reading if not lane.goes_on(lane.count + 1)]
            self._launch([lane for lane in lanes if lane not in ending])
        else:
            reading, ending = list(lanes), []
            self._launch(reading)
            reading, failed = _chosen(reading)
            for lane in reading:
                lane.take_chosen()
        found = [
            self._read(lane, launched=self._ahead and lane not in ending, last=lane in ending, shared=not alone)
            for lane in reading
        ]
        self._steps += 1
        if self._steps % POOL_CLEAR_STEPS == 0:
            mx.clear_cache()
            for lane in lanes:
                lane.note("pool cleared")
        return [*delivered, *failed, *found]

    def _speculate(self, lane: Lane, speculator: Speculator) -> list[Decoded]:
        """Verify a draft of what follows a lane's last token, or read that token where this will pay; else return nothing."""
        if speculator.rests:
            return []
        if lane.chosen is not None:
            if lane.forced or not speculator.pays_soon(lambda: lane.room):
                return []
            lane.take_chosen()
            return [self._read(lane, launched=False)]
        draft = speculator.draft(lambda: lane.room)
        if draft is not None and lane.constraint is not None:
            fitting = draft.tokens[: lane.constraint.fitting(draft.tokens)]
            draft = replace(draft, tokens=fitting) if fitting else None
        if draft is None:
            return []
        rows = len(lane.behind) + 1 + len(draft.tokens)
        try:
            tokens = verify(self._model, lane, draft.tokens, self._operations, on_host=not self._ahead)
        except TokamacError as error:
            lane.ended = True
            return [Decoded(lane, failure=error)]
        speculator.verified(draft, tokens, rows)
        lane.launched(1)
        lane.stepped()
        lane.goes_on_after(tokens)
        return [Decoded(lane, lane.deliver())]

    def _launch(self, lanes: list[Lane]) -> None:
        """Begin to compute what follows the lanes' tokens, which then are in their caches."""
        if not lanes:
            return
        logits = self._pass(lanes)
        on_host = None
        if not self._ahead and any(lane.takes_likeliest for lane in lanes):
            on_host = np.asarray(logits.astype(mx.float32))[:, -1]
        wanted: list[mx.array] = []
        for row, lane in enumerate(lanes):
            if on_host is not None and lane.takes_likeliest:
                lane.take_likeliest(on_host[row])
            else:
                wanted += lane.computed(logits[row : row + 1, -1, :])
            if lane.known is not None:
                lane.cached_ids.append(lane.known)
            lane.stepped()
            lane.launched(len(lanes))
        if wanted:
            mx.async_eval(*wanted)  # type: ignore[no-untyped-call]

    def _pass(self, lanes: list[Lane]) -> mx.array:
        """Return the logits (B, N, V) after the lanes' tokens and what is behind them; the last of the N are meant."""
        hidden = lanes[0].hidden if len(lanes) == 1 else None
        if hidden is None:
            return self._computed(lanes)
        place = len(lanes[0].cached_ids)
        with keeping_hidden_states() as kept:
            logits = self._computed(lanes)
        hidden.passed(place, kept[-1])
        return logits

    def _computed(self, lanes: list[Lane]) -> mx.array:
        """Compute a pass."""
        if len(lanes) == 1 and lanes[0].behind:
            (lane,) = lanes
            ids = mx.concatenate([mx.array(lane.behind, mx.uint32), _some_token(lane.token)])[None]
            lane.cached_ids.extend(lane.behind)
            lane.behind = []
            with asking_for_logits():
                logits: mx.array = self._model(ids, cache=lane.caches)
            return logits
        for lane in lanes:
            if lane.behind:
                self._model(mx.array([lane.behind]), cache=lane.caches)  # the head is not asked for
                lane.cached_ids.extend(lane.behind)
                lane.behind = []
        known = [lane.known for lane in lanes]
        if None in known:
            tokens = [_some_token(lane.token) for lane in lanes]
            ids = (tokens[0] if len(tokens) == 1 else mx.concatenate(tokens))[:, None]  # (B, 1)
        else:  # nothing to compute before the pass: on a CPU, one wait for MLX's thread less
            ids = mx.array([[each] for each in known], mx.uint32)
        return self._operations.forward(self._model, ids, [lane.caches for lane in lanes])

    def _read(self, lane: Lane, *, launched: bool, last: bool = False, shared: bool = False) -> Decoded:
        """Read a lane's token. launched: so was the step that takes it. last: none may. shared: its pass, with other lanes."""
        try:
            token = lane.read()
        except TokamacError as error:
            lane.ended = True
            return Decoded(lane, failure=error)
        if launched:
            lane.cached_ids.append(token)
        lane.ended = last or (not launched and not lane.goes_on(lane.count))
        if shared and lane.speculator is not None:
            lane.speculator.saw_shared(token)
        elif lane.speculator is not None:
            lane.speculator.saw(token, steady=launched or not self._ahead)
        return Decoded(lane, token)


def _chosen(lanes: Sequence[Lane]) -> tuple[list[Lane], list[Decoded]]:
    """Have lanes choose from logits that were kept; return those that could, and the failures of the others."""
    able: list[Lane] = []
    failed: list[Decoded] = []
    for lane in lanes:
        try:
            lane.choose()
        except TokamacError as error:
            lane.ended = True
            failed.append(Decoded(lane, failure=error))
        else:
            able.append(lane)
    return able, failed


def decode_alone(model: Any, lane: Lane, *, ahead: bool, operations: CacheOperations = LOCAL) -> Iterator[int]:
    """Yield the tokens of one lane. Stop iterating to cancel. Raises ModelDamagedError."""
    decoder = Decoder(model, ahead=ahead, operations=operations)
    while not lane.ended:
        for each in decoder.step([lane]):
            if each.failure is not None:
                raise each.failure
            if each.token is not None:
                yield each.token


def _some_token(chosen: mx.array) -> mx.array:
    """Return ``chosen`` (1,) or, in place of NO_NUMBER, a token that there is: a lookup has no bounds, and reads foreign memory."""
    return mx.where(chosen == NO_NUMBER, 0, chosen)
