"""The two phases of one sequence on the device: prefill in chunks, decode one step ahead. Knows tokens and caches, not text."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from .errors import ModelDamagedError
from .kv.attention import forcing_fused
from .kv.attention_kernel import AttentionDevice
from .kv.cache import Cache, GrowthWatcher
from .kv.probe import leaves
from .kv.snapshot import freeze, grows, thaw
from .metrics import Cause
from .perf.mitigation import Chunking
from .sampling import Sampler

CHECK_STEPS = 16
"""Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches."""
NO_NUMBER = (1 << 32) - 1
"""In place of a token: no vocabulary has so many."""

POOL_CLEAR_STEPS = 256
"""Decoded tokens between returns of MLX's unused buffers to the system."""


class Generation:
    """One sequence being computed: a model, its caches, and the ids that the caches hold.

    Invariant: whenever control returns to the caller, ``cached_ids`` are exactly the tokens in the caches.

    Args:
        model: called with (1, T) ids and the caches.
        caches: one a layer.
        cached_ids: the tokens that the caches hold; extended in place.
        ahead: launch the next decode step before a token is read.
        note: told, while decoding, what may delay the next token.
        force_fused: prefill writes no attention scores down where MLX has a kernel for that on this device; None asks for none.
        may_grow: asked, while decoding, before the caches are made larger; where it says no, decoding ends.

    Attributes:
        chunk: tokens that prefill is computing at once.
        ended_by_memory: whether ``may_grow`` ended decoding.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        cached_ids: list[int],
        *,
        ahead: bool,
        note: Callable[[Cause], None] = lambda _: None,
        force_fused: AttentionDevice | None = None,
        may_grow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model = model
        self._caches = caches
        self._ahead = ahead
        self._note = note
        self._force_fused = force_fused
        self._may_grow = may_grow
        self._growth = GrowthWatcher([])
        self.ended_by_memory = False
        self.chunk = 0
        self.cached_ids = cached_ids
        self._forced: deque[int] = deque()

    def force(self, ids: Iterable[int]) -> None:
        """Have these tokens come next, whatever the sampler chooses. Call it before asking for a token, or after one came."""
        self._forced.extend(ids)

    def resumed(self) -> None:
        """The caches were released and acquired again: other objects, which hold the same tokens."""
        self._growth = GrowthWatcher(self._caches)

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        """Compute ``ids`` after the cached ones in chunks; yield after each how many are done. Stop iterating to cancel."""
        done = 0
        while done < len(ids):
            part = ids[done : done + chunk]
            self.chunk = len(part)
            with forcing_fused(self._force_fused):
                self._model(mx.array([part]), cache=self._caches)
            mx.eval(
                [cache.state for cache in self._caches]
            )  # the logits are not asked for, so the head is never computed
            mx.clear_cache()  # a chunk's temporaries are large and of no use to decoding
            self.cached_ids.extend(part)
            done += len(part)
            yield done

    def prefill_in_stages(self, ids: list[int], stages: int, stopped: Callable[[], bool]) -> bool:
        """Compute ``ids`` at once, waiting for the device after every few layers; return whether all were computed.

        The result is the same, bit by bit. Where ``stopped`` said so in between, all is as it was before.
        """
        parts = _in_stages(self._caches, stages)
        before = [
            [cache.copy() for cache in part] for part in parts
        ]  # shared: until a layer is computed nothing is copied
        frozen, self.chunk = freeze(self._caches), len(ids)
        with forcing_fused(self._force_fused):
            self._model(mx.array([ids]), cache=self._caches)
        for done, part in enumerate(parts, 1):
            before[done - 1] = []  # or the layer's keys would be copied, not written in place
            mx.eval([cache.state for cache in part])
            if done < len(parts) and stopped():
                for cache in (cache for computed in parts[:done] for cache in computed):
                    cache.trim(len(ids))
                for waiting, copies in zip(parts[done:], before[done:], strict=True):
                    for cache, old in zip(waiting, copies, strict=True):
                        cache.state = old.state
                thaw(self._caches, frozen)
                mx.clear_cache()
                return False
        mx.eval([cache.state for cache in self._caches])  # of caches that do not grow
        mx.clear_cache()
        self.cached_ids.extend(ids)
        return True

    def decode(self, last: int, sampler: Sampler, limit: int | None) -> Iterator[int]:
        """Yield up to ``limit`` tokens (None: without end) that follow ``last``, the one prompt token not yet cached.

        Stop iterating to cancel. With ``ahead`` the next step is launched before a token is read, so the device works while the
        host does.
        """
        pending = self._or_forced(self._step(mx.array([last]), sampler, checked=True), sampler)
        self.cached_ids.append(last)
        self._growth = GrowthWatcher(self._caches)
        for count in itertools.count(1):
            self.ended_by_memory = (
                count != limit and self._growth.will_grow(len(self.cached_ids)) and not self._may_grow()
            )
            last_one = count == limit or self.ended_by_memory
            checked = count % CHECK_STEPS == 0
            following = (
                self._step(_some_token(pending), sampler, checked=checked) if self._ahead and not last_one else None
            )
            if self._growth.grew():
                self._note("kv growth")
            token = int(pending.tolist()[0])  # type: ignore[index,arg-type]
            if token == NO_NUMBER:
                raise ModelDamagedError(
                    "the model computed values that are not numbers",
                    "Load it with dtype float32, or download it again.",
                )
            if following is not None:
                self.cached_ids.append(token)
            yield token
            if last_one:
                return
            if count % POOL_CLEAR_STEPS == 0:
                mx.clear_cache()
                self._note("pool cleared")
            if following is None:
                following = self._step(pending, sampler, checked=checked)
                self.cached_ids.append(token)
            pending = self._or_forced(following, sampler)

    def _or_forced(self, chosen: mx.array, sampler: Sampler) -> mx.array:
        """Return what the sampler chose (1,), or the forced token in its place: what was computed of it so far is not used."""
        if not self._forced:
            return chosen
        forced = mx.array([self._forced.popleft()], mx.uint32)
        sampler.replace_last(forced)
        return forced

    def _step(self, token: mx.array, sampler: Sampler, *, checked: bool) -> mx.array:
        """token (1,) → the next (1,), not evaluated. checked: it is NO_NUMBER where the logits are not numbers."""
        logits = self._model(token[None], cache=self._caches)[:, -1, :]  # (1, 1) ids → (1, V)
        chosen = sampler(logits)
        if checked:
            chosen = mx.where(mx.isfinite(mx.max(logits)), chosen, mx.array(NO_NUMBER, mx.uint32))
        mx.async_eval(chosen, *sampler.newest_score())  # type: ignore[no-untyped-call]
        return chosen


def _some_token(chosen: mx.array) -> mx.array:
    """Return ``chosen`` (1,) or, in place of NO_NUMBER, a token that there is: a lookup has no bounds, and reads foreign memory."""
    return mx.where(chosen == NO_NUMBER, 0, chosen)


def _in_stages(caches: list[Any], stages: int) -> list[list[Cache]]:
    """Return the caches that grow, in so many parts or fewer, in the order of their layers; none where one is the model's own."""
    growing = [cache for _, cache in leaves(caches) if grows(cache)]
    ours = [cache for cache in growing if isinstance(cache, Cache)]
    if len(ours) < len(growing) or not ours:
        return []
    size = -(-len(ours) // stages)
    return [ours[at : at + size] for at in range(0, len(ours), size)]


STAGE_S = 1.0
"""Of computing, after which a prefill asks whether to stop."""


class PrefillChunker:
    """Computes prompts in chunks, cut at multiples of the chunk size, counted from the first token (perf/mitigation.py).

    Where a chunk takes long, it is computed a few layers at a time, so that a cancellation is heard in between: then what was
    begun of it is dropped. Time decides that alone, never where a prompt is cut.

    Args:
        chunking: how large a chunk is at which depth.
        most: tokens of a chunk at most, a power of two: what there is memory for.
        cached: tokens in the caches at the beginning.
        stage_s: seconds after which ``stopped`` is asked, as far as the speed is known.

    Attributes:
        largest: tokens of the first chunk, which no later one exceeds.
    """

    def __init__(
        self,
        chunking: Chunking,
        most: int,
        cached: int,
        *,
        stage_s: float = STAGE_S,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chunking, self._most = chunking, most
        self._stage_s, self._stopped, self._clock = stage_s, stopped, clock
        self.largest = self._size(cached)
        self._token_s = chunking.token_s(cached)

    def compute(self, generation: Generation, ids: list[int]) -> Iterator[None]:
        """Compute ``ids`` after the cached ones; yield after each chunk. Stop iterating to cancel."""
        at = 0
        while at < len(ids):
            cached = len(generation.cached_ids)
            size = self._size(cached)
            chunk = ids[at : at + size - cached % size]
            stages = 1 if self._token_s is None else math.ceil(len(chunk) * self._token_s / self._stage_s)
            began = self._clock()
            if stages > 1:
                whole = generation.prefill_in_stages(chunk, stages, self._stopped)
            else:
                whole = all(generation.prefill(chunk, len(chunk)))
            if whole:
                self._token_s = (self._clock() - began) / len(chunk)
                at += len(chunk)
            yield
            if not whole:
                return

    def _size(self, cached: int) -> int:
        return min(self._most, self._chunking.at(cached))
