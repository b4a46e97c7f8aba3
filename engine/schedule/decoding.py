"""Decoding several sequences together, one step ahead: one pass makes the next token of every lane.

    decoder.step(lanes)     the tokens that became known, lane by lane

Lanes may come and go with every step: nothing is copied. A single lane is decoded by the same code, through its own caches.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import ModelDamagedError, TokamacError
from ..kv.cache import GrowthWatcher
from ..kv.rows import forward
from ..sampling import Sampler

CHECK_STEPS = 16
"""Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches."""
NO_NUMBER = (1 << 32) - 1
"""In place of a token: no vocabulary has so many."""

POOL_CLEAR_STEPS = 256
"""Steps between returns of MLX's unused buffers to the system."""


class Lane:
    """One sequence being decoded.

    Invariant: whenever control returns to the caller, ``cached_ids`` are exactly the tokens in the caches.

    Args:
        caches: one a layer, which hold all tokens but ``last``.
        cached_ids: the tokens that the caches hold; extended in place.
        last: the token that the first step takes.
        sampler: chooses its tokens.
        limit: tokens to decode at most; None: without end.
        note: told what may delay the next token (a Cause), and by how many milliseconds at most where that is known.
        may_grow: asked before the caches are made larger; where it says no, decoding ends.
        launched: told the number of lanes of each of its steps.

    Attributes:
        count: tokens decoded.
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
    ) -> None:
        self.caches, self.cached_ids = caches, cached_ids
        self.sampler = sampler
        self.note, self.launched = note, launched
        self.count = 0
        self.ended = self.ended_by_memory = False
        self._limit, self._may_grow = limit, may_grow
        self._growth = GrowthWatcher(caches)
        self._forced: deque[int] = deque()
        self._forcing: int | None = None  # taken by a step, and not read yet
        self.token = mx.array([last], mx.uint32)  # what the next step takes: (1,), maybe not computed yet
        self.known: int | None = last  # the same, where the host knows it
        self.chosen: mx.array | None = None  # what the last step chose, until it is the token

    def force(self, ids: Iterable[int]) -> None:
        """Have these tokens come next, whatever the sampler chooses. Call it before the first step, or after a token came."""
        self._forced.extend(ids)

    @property
    def forced(self) -> list[int]:
        """The tokens that are to come next, and have not come yet."""
        return [*([] if self._forcing is None else [self._forcing]), *self._forced]

    def resumed(self) -> None:
        """The caches were released and acquired again: other objects, which hold the same tokens."""
        self._growth = GrowthWatcher(self.caches)

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

    def stepped(self) -> None:
        """A step took the token: it is in the caches."""
        if self._growth.grew() and self.count:
            self.note("kv growth")

    def read(self) -> int:
        """Wait for the token, and return it. Raises ModelDamagedError."""
        token = int(self.token.tolist()[0])  # type: ignore[index,arg-type]
        if token == NO_NUMBER:
            raise ModelDamagedError(
                "the model computed values that are not numbers",
                "Load it with dtype float32, or download it again.",
            )
        self.known, self._forcing = token, None
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
    """

    def __init__(self, model: Any, *, ahead: bool) -> None:
        self._model, self._ahead = model, ahead
        self._steps = 0

    def step(self, lanes: Sequence[Lane]) -> list[Decoded]:
        """Compute a token of every lane that has not ended; return those that became known.

        With ``ahead``, a lane's first step brings none: its first token is read while the second is computed. Raises what MLX
        raises: then nobody knows what the caches hold.
        """
        for lane in lanes:
            lane.take_chosen()
        if self._ahead:
            reading = [lane for lane in lanes if lane.known is None]
            ending = [lane for lane in reading if not lane.goes_on(lane.count + 1)]
            self._launch([lane for lane in lanes if lane not in ending])
        else:
            reading, ending = list(lanes), []
            self._launch(reading)
            for lane in reading:
                lane.take_chosen()
        found = [self._read(lane, last=lane in ending) for lane in reading]
        self._steps += 1
        if self._steps % POOL_CLEAR_STEPS == 0:
            mx.clear_cache()
            for lane in lanes:
                lane.note("pool cleared")
        return found

    def _launch(self, lanes: list[Lane]) -> None:
        """Begin to compute what follows the lanes' tokens, which then are in their caches."""
        if not lanes:
            return
        tokens = [_some_token(lane.token) for lane in lanes]
        ids = (tokens[0] if len(tokens) == 1 else mx.concatenate(tokens))[:, None]  # (B, 1)
        logits = forward(self._model, ids, [lane.caches for lane in lanes])
        wanted: list[mx.array] = []
        for row, lane in enumerate(lanes):
            own = logits[row : row + 1, -1, :]  # (1, V)
            chosen = lane.sampler(own)
            if lane.count % CHECK_STEPS == 0:
                chosen = mx.where(mx.isfinite(mx.max(own)), chosen, mx.array(NO_NUMBER, mx.uint32))
            lane.chosen = chosen
            wanted += [chosen, *lane.sampler.newest_score()]
            if lane.known is not None:
                lane.cached_ids.append(lane.known)
            lane.stepped()
            lane.launched(len(lanes))
        mx.async_eval(*wanted)  # type: ignore[no-untyped-call]

    def _read(self, lane: Lane, *, last: bool) -> Decoded:
        """Read a lane's token, whose step was launched before."""
        try:
            token = lane.read()
        except TokamacError as error:
            lane.ended = True
            return Decoded(lane, failure=error)
        if self._ahead and not last:
            lane.cached_ids.append(token)  # the step that takes it was launched
        lane.ended = last if self._ahead else not lane.goes_on(lane.count)
        return Decoded(lane, token)


def decode_alone(model: Any, lane: Lane, *, ahead: bool) -> Iterator[int]:
    """Yield the tokens of one lane. Stop iterating to cancel. Raises ModelDamagedError."""
    decoder = Decoder(model, ahead=ahead)
    while not lane.ended:
        for each in decoder.step([lane]):
            if each.failure is not None:
                raise each.failure
            if each.token is not None:
                yield each.token


def _some_token(chosen: mx.array) -> mx.array:
    """Return ``chosen`` (1,) or, in place of NO_NUMBER, a token that there is: a lookup has no bounds, and reads foreign memory."""
    return mx.where(chosen == NO_NUMBER, 0, chosen)
