"""Batched decoding, one step ahead: one pass makes the next token of every lane."""

# Lanes may come and go with every step: nothing is copied. A lone lane takes a short path, and may verify
# drafts:
#
#     rows      t      d1     d2     d3            read in one pass
#     chosen    d1     d2     x      –             what plain decoding chooses, with the seed at its position
#     brings    d1     d2     x                    d3 is rolled back; x is in no cache yet

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..errors import ModelDamagedError, TokamacError
from ..kv.cache import GrowthWatcher
from ..kv.snapshot import LOCAL, CacheOperations, most_taken_back
from ..metrics import Recorder
from ..model.head import asking_for_logits, keeping_hidden_states
from ..sampling import Sampler, SamplerState
from ..speculation.head_drafters import HiddenStates
from ..speculation.speculator import Speculator
from ..vision.positions import shifted

# Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches.
CHECK_STEPS = 16
NO_NUMBER = (1 << 32) - 1  # in place of a token: no vocabulary has so many

POOL_CLEAR_STEPS = 256  # steps between returns of MLX's unused buffers to the system

UNSHIFTED = nullcontext()

ENDLESS = 1 << 60  # steps that caches which never grow have room for

NOT_NUMBERS = "the model computed values that are not numbers", "Load it with dtype float32, or download it again."


class Constraint(Protocol):
    """Constrains one reply to a grammar."""

    def allowed(self) -> np.ndarray:
        """Return (n,) bool: which tokens may come next."""

    def fitting(self, drafted: Sequence[int]) -> int:
        """Return how many of these tokens may follow in order."""

    def allowed_along(self, drafted: Sequence[int]) -> list[np.ndarray]:
        """Return ``allowed`` now, and after each of these fitting tokens."""


class Lane:
    """One sequence being decoded. Invariant: ``cached_ids`` are exactly the tokens in the caches.

    Args:
        caches: One per layer, holding all tokens but ``last``.
        note: Called with a Cause of delay, and its most milliseconds and prompt where known.
        may_grow: Asked before the caches grow; False ends decoding.
        unforced: How many next tokens the sampler certainly chooses; None: all.
        constraint: Masks next tokens, which are then chosen one step later, while logits are computed.
        shift: How far rotary positions stand from the count of tokens, after pictures.

    Attributes:
        behind: Tokens before ``last`` that the caches lack.
        free: Steps that certainly fit the caches; 0 is unknown.
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
        counts: Recorder | None = None,
        speculator: Speculator | None = None,
        unforced: Callable[[], int | None] = lambda: None,
        constraint: Constraint | None = None,
        shift: int = 0,
    ) -> None:
        self.shift = shift
        self.caches, self.cached_ids = caches, cached_ids
        self.sampler = sampler
        self.counts, self._note = Recorder() if counts is None else counts, note
        self.count = self.free = 0
        self.came_with_others = self.guessed = self.ended = self.ended_by_memory = False
        self.behind: list[int] = []
        self.ready: deque[int] = deque()
        self._taken_back = 0
        self.speculator: Speculator | None = None
        self.hidden: HiddenStates | None = None
        if speculator is not None:
            self.speculate(speculator)
        self.limit, self._may_grow, self._unforced = limit, may_grow, unforced
        self._growth = GrowthWatcher(caches)
        self.coming: deque[int] = deque()
        self._forcing: int | None = None  # taken by a step, and not read yet
        self.token = mx.array([last], mx.uint32)  # what the next step takes: (1,), maybe not computed yet
        self.known: int | None = last  # the same, where the host knows it
        self.chosen: mx.array | None = None  # what the last step chose, until it is the token
        self.constraint = constraint
        self._logits: mx.array | None = None  # (1, V), from which the last step has chosen nothing yet

    def speculate(self, speculator: Speculator) -> None:
        self._taken_back = most_taken_back(self.caches)
        if self._taken_back:
            self.speculator, self.hidden = speculator, speculator.hidden

    def note(self, cause: str, *more: Any) -> None:
        self.interrupted()
        self._note(cause, *more)

    def interrupted(self) -> None:
        self.free = 0
        if self.speculator is not None:
            self.speculator.interrupted()

    def force(self, ids: Iterable[int]) -> None:
        self.coming.extend(ids)

    @property
    def forced(self) -> list[int]:
        return [*([] if self._forcing is None else [self._forcing]), *self.coming]

    @property
    def last(self) -> int:
        assert self.known is not None
        return self.known

    @property
    def room(self) -> int:
        """How many tokens may be drafted, so that a pass fits the caches and can be rolled back."""
        # With recurrent state, tokens behind ``last`` count too. A pass never grows a cache: plain steps ask first.
        if self.coming:
            return 0
        most = self._taken_back - len(self.behind) - 1
        left = None if self.limit is None else self.limit - self.count
        fitting = self._growth.fitting(len(self.cached_ids) + len(self.behind))
        for bound in (left, self._unforced(), fitting):
            most = most if bound is None else min(most, bound - 1)
        return max(most, 0)

    def deliver(self) -> int:
        token = self.ready.popleft()
        self.came_with_others = True
        self.guessed = bool(self.ready)  # after those that came true stands one that the model chose
        self.ended = not self.ready and not self.goes_on(self.count)
        return token

    def resumed(self) -> None:
        self._growth = GrowthWatcher(self.caches)
        self.interrupted()

    def computed(self, logits: mx.array) -> list[mx.array]:
        """Choose from logits (1, V), or keep them until constrained; return what to evaluate."""
        if self.constraint is not None:
            self._logits = logits
            return [logits]
        return self._choose(logits, None)

    @property
    def takes_likeliest(self) -> bool:
        return self.constraint is None and self.sampler.takes_likeliest

    def take_likeliest(self, logits: np.ndarray) -> None:
        token = self.sampler.take_likeliest(logits)
        self.chosen = mx.array([token if math.isfinite(logits[token]) else NO_NUMBER], mx.uint32)

    def choose(self) -> None:
        if self._logits is not None and self.constraint is not None:
            logits, self._logits = self._logits, None
            mx.async_eval(*self._choose(logits, self.constraint.allowed()))  # type: ignore[no-untyped-call]

    def _choose(self, logits: mx.array, allowed: np.ndarray | None) -> list[mx.array]:
        chosen = self.sampler(logits, allowed)
        if self.count % CHECK_STEPS == 0:
            chosen = mx.where(mx.isfinite(mx.max(logits)), chosen, mx.array(NO_NUMBER, mx.uint32))
        self.chosen = chosen
        return [chosen, *self.sampler.newest_score()] if self.sampler.scored else [chosen]

    def take_chosen(self) -> None:
        if self.chosen is None:
            return
        self.token, self.known, self.chosen = self.chosen, None, None
        if self.coming:
            self._forcing = self.coming.popleft()
            self.token = mx.array([self._forcing], mx.uint32)
            self.sampler.replace_last(self.token)

    def goes_on(self, coming: int) -> bool:
        self.ended_by_memory = (
            coming != self.limit and self._growth.will_grow(len(self.cached_ids)) and not self._may_grow()
        )
        return coming != self.limit and not self.ended_by_memory

    def goes_on_after(self, tokens: list[int]) -> None:
        self.ready.extend(tokens)
        self.count += len(tokens)
        self.known = tokens[-1]
        self.token = mx.array([self.known], mx.uint32)

    def stepped(self) -> None:
        if self._growth.grew() and self.count:
            self.note("kv growth")
        fitting = self._growth.fitting(len(self.cached_ids) + len(self.behind))
        self.free = ENDLESS if fitting is None else fitting

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
    lane: Lane
    token: int | None = None
    failure: TokamacError | None = None


class Decoder:
    """Decodes lanes together.

    Args:
        model: Called with (B, 1) ids and the caches of all lanes.
        ahead: Launch the next step before a token is read, to overlap device and host.
    """

    def __init__(self, model: Any, *, ahead: bool, operations: CacheOperations = LOCAL) -> None:
        self._model, self._ahead, self._operations = model, ahead, operations
        self._steps = 0

    def step(self, lanes: Sequence[Lane]) -> list[Decoded]:
        """Compute a token of every live lane; return those that became known.

        With ``ahead``, a lane's first step returns none. After an MLX error the caches' contents are unknown.
        """
        alone = len(lanes) == 1
        if alone and (found := self._step_alone(lanes[0])) is not None:
            return found
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
            self._clear_pool(lanes)
        return [*delivered, *failed, *found]

    def _step_alone(self, lane: Lane) -> list[Decoded] | None:
        if lane.free <= 0 or lane.coming or lane.ready or lane.behind:
            return None
        if lane.constraint is not None or lane.hidden is not None:
            return None
        ahead, speculator = self._ahead, lane.speculator
        if speculator is not None and not speculator.rests and (drafted := self._speculate(lane, speculator)):
            return drafted
        if reads := lane.chosen is not None:
            lane.take_chosen()
        last = reads and lane.count + 1 == lane.limit
        if not last:
            self._launch_alone(lane)
        if not ahead:
            lane.take_chosen()
        elif not reads:
            return []
        try:
            token = lane.read()
        except TokamacError as error:
            lane.ended = True
            return [Decoded(lane, failure=error)]
        if ahead and not last:
            lane.cached_ids.append(token)
        lane.ended = lane.count == lane.limit if ahead or lane.free > 0 else not lane.goes_on(lane.count)
        if speculator is not None:
            speculator.observe(token, steady=not last)
        self._steps += 1
        if self._steps % POOL_CLEAR_STEPS == 0:
            self._clear_pool([lane])
        return [Decoded(lane, token)]

    def _launch_alone(self, lane: Lane) -> None:
        known, sampler = lane.known, lane.sampler
        ids = (
            mx.where(lane.token == NO_NUMBER, 0, lane.token)[:, None]
            if known is None
            else mx.array([[known]], mx.uint32)
        )
        with shifted([lane.shift]) if lane.shift else UNSHIFTED:
            logits = self._model(ids, cache=lane.caches)[:, -1, :]
        if not self._ahead and sampler.takes_likeliest:
            lane.take_likeliest(np.asarray(logits.astype(mx.float32))[0])
        else:
            mx.async_eval(*lane.computed(logits))  # type: ignore[no-untyped-call]
        if known is not None:
            lane.cached_ids.append(known)
        lane.free -= 1
        lane.counts.passes += 1
        lane.counts.rows += 1

    def _clear_pool(self, lanes: Sequence[Lane]) -> None:
        mx.clear_cache()
        for lane in lanes:
            lane.note("pool cleared")

    def _speculate(self, lane: Lane, speculator: Speculator) -> list[Decoded]:
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
            with shifted([lane.shift]) if lane.shift else UNSHIFTED:
                tokens = verify(self._model, lane, draft.tokens, self._operations, on_host=not self._ahead)
        except TokamacError as error:
            lane.ended = True
            return [Decoded(lane, failure=error)]
        speculator.verified(draft, tokens, rows)
        lane.counts.passes += 1
        lane.counts.rows += 1
        lane.stepped()
        lane.goes_on_after(tokens)
        return [Decoded(lane, lane.deliver())]

    def _launch(self, lanes: list[Lane]) -> None:
        if not lanes:
            return
        shifts = [lane.shift for lane in lanes]
        with shifted(shifts) if any(shifts) else UNSHIFTED:
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
            lane.counts.passes += 1
            lane.counts.rows += len(lanes)
        if wanted:
            mx.async_eval(*wanted)  # type: ignore[no-untyped-call]

    def _pass(self, lanes: list[Lane]) -> mx.array:
        hidden = lanes[0].hidden if len(lanes) == 1 else None
        if hidden is None:
            return self._computed(lanes)
        place = len(lanes[0].cached_ids)
        with keeping_hidden_states() as kept:
            logits = self._computed(lanes)
        hidden.passed(place, kept[-1])
        return logits

    def _computed(self, lanes: list[Lane]) -> mx.array:
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
                with shifted([lane.shift]):
                    self._model(mx.array([lane.behind]), cache=lane.caches)  # the head is not asked for
                lane.cached_ids.extend(lane.behind)
                lane.behind = []
        known = [lane.known for lane in lanes]
        if None in known:
            tokens = [_some_token(lane.token) for lane in lanes]
            ids = (tokens[0] if len(tokens) == 1 else mx.concatenate(tokens))[:, None]  # (B, 1)
        else:  # nothing to compute before the pass: on a CPU, one wait for MLX's thread less
            ids = mx.array([[each] for each in known], mx.uint32)
        if len(lanes) == 1:
            alone: mx.array = self._model(ids, cache=lanes[0].caches)
            return alone
        return self._operations.forward(self._model, ids, [lane.caches for lane in lanes])

    def _read(self, lane: Lane, *, launched: bool, last: bool = False, shared: bool = False) -> Decoded:
        try:
            token = lane.read()
        except TokamacError as error:
            lane.ended = True
            return Decoded(lane, failure=error)
        if launched:
            lane.cached_ids.append(token)
        lane.ended = last or (not launched and not lane.goes_on(lane.count))
        if shared and lane.speculator is not None:
            lane.speculator.observe_shared(token)
        elif lane.speculator is not None:
            lane.speculator.observe(token, steady=launched or not self._ahead)
        return Decoded(lane, token)


def _chosen(lanes: Sequence[Lane]) -> tuple[list[Lane], list[Decoded]]:
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
    """Yield one lane's tokens; stop iterating to cancel. Raises ModelDamagedError."""
    decoder = Decoder(model, ahead=ahead, operations=operations)
    while not lane.ended:
        for each in decoder.step([lane]):
            if each.failure is not None:
                raise each.failure
            if each.token is not None:
                yield each.token


def _some_token(chosen: mx.array) -> mx.array:
    """Replace NO_NUMBER in ``chosen`` (1,) by a valid token."""
    # An embedding lookup has no bounds check, and would read foreign memory.
    return mx.where(chosen == NO_NUMBER, 0, chosen)


def verify(
    model: Any, lane: Lane, drafted: Sequence[int], operations: CacheOperations = LOCAL, *, on_host: bool = False
) -> list[int]:
    """Return the accepted prefix of ``drafted`` and one more token, as plain decoding would choose.

    None follows an end token. The lane then holds all but the last. Raises ModelDamagedError.
    """
    allowed = None if lane.constraint is None else lane.constraint.allowed_along(drafted)
    behind = [*lane.behind, lane.last]
    read = [*behind, *drafted]
    before = operations.before_pass(lane.caches)
    with asking_for_logits(), keeping_hidden_states() as kept:
        logits = model(mx.array([read], mx.uint32), cache=lane.caches)  # (1, …, V), of which the last 1 + k are meant
    if on_host and allowed is None and lane.sampler.takes_likeliest:
        rows = np.asarray(logits.astype(mx.float32))[0, len(behind) - 1 :]
        tokens, states = lane.sampler.take_likeliest_rows(rows)
        sound = bool(np.isfinite(rows[np.arange(len(rows)), tokens]).all())
    else:
        tokens, states, sound = _chosen_rows(lane, logits[0, len(behind) - 1 :], allowed)
    if not sound:
        raise ModelDamagedError(*NOT_NUMBERS)
    right = 0
    while right < len(drafted) and tokens[right] == drafted[right] and tokens[right] not in lane.sampler.ends:
        right += 1
    lane.sampler.restore(states[right])
    if lane.hidden is not None:
        lane.hidden.passed(len(lane.cached_ids), kept[-1][:, : len(behind) + right])
    held = before.take_back(len(drafted) - right, len(read))
    lane.cached_ids.extend(read[:held])
    lane.behind = read[held : len(behind) + right]
    return tokens[: right + 1]


def _chosen_rows(
    lane: Lane, logits: mx.array, allowed: Sequence[np.ndarray] | None
) -> tuple[list[int], list[SamplerState], bool]:
    """Choose from logits (1 + k, V): tokens, the states after each, and whether logits are finite."""
    chosen, states = lane.sampler.choose_rows(logits, allowed)  # (1 + k,)
    sound = mx.all(mx.isfinite(mx.max(logits, axis=-1)))
    mx.eval(chosen, sound, *lane.sampler.newest_scores(len(logits)))
    tokens: list[int] = chosen.tolist()  # type: ignore[assignment]
    return tokens, states, bool(sound.item())
