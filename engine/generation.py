"""The two phases on the device: prefill in chunks, decode one step ahead. Knows tokens and caches, nothing of text."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from tokamac.engine.errors import ModelDamagedError
from tokamac.engine.kv.attention import forcing_fused
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.probe import leaves
from tokamac.engine.kv.room import Room
from tokamac.engine.kv.segments import freeze, grows, thaw
from tokamac.engine.limits.gaps import Cause
from tokamac.engine.sampling import Sampler

CHECK_STEPS = 16
"""Decoded tokens between looks at whether logits are numbers still: what spoils one step stays in the caches."""
NO_NUMBER = (1 << 32) - 1
"""In place of a token: no vocabulary has so many."""

POOL_CLEAR_STEPS = 256
"""Decoded tokens between returns of MLX's unused buffers to the system."""


class Run:
    """One sequence being computed: a model, its caches, and the ids that the caches hold.

    Number line: ``held`` are the tokens whose keys and values are in the caches, always, whenever the caller regains control.
    ``mark`` is told, while decoding, of what may hold the next token up. force_fused: prefill writes no attention scores down
    where MLX has a kernel for that on this device; None asks for none. may_grow: asked, while decoding, before the caches are made
    larger; where it says no, decoding ends, and ``ended_by_memory`` is true. piece: tokens that prefill computes at once just now.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        held: list[int],
        *,
        ahead: bool,
        mark: Callable[[Cause], None] = lambda _: None,
        force_fused: AttentionDevice | None = None,
        may_grow: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model = model
        self._caches = caches
        self._ahead = ahead
        self._mark = mark
        self._force_fused = force_fused
        self._may_grow = may_grow
        self._room = Room([])
        self.ended_by_memory = False
        self.piece = 0
        self.held = held

    def resumed(self) -> None:
        """The caches were given away and taken again: other objects, which hold the same tokens."""
        self._room = Room(self._caches)

    def prefill(self, ids: list[int], chunk: int) -> Iterator[int]:
        """Compute ``ids`` (after those held) in chunks; yield after each how many are done. Stop iterating to cancel."""
        done = 0
        while done < len(ids):
            part = ids[done : done + chunk]
            self.piece = len(part)
            with forcing_fused(self._force_fused):
                self._model(mx.array([part]), cache=self._caches)
            mx.eval(
                [cache.state for cache in self._caches]
            )  # the logits are not asked for, so the head is never computed
            mx.clear_cache()  # a chunk's temporaries are large and of no use to decoding
            self.held.extend(part)
            done += len(part)
            yield done

    def prefill_in_stages(self, ids: list[int], stages: int, stopped: Callable[[], bool]) -> bool:
        """Compute ``ids`` at once, a few layers at a time; return whether all were. False: ``stopped``, and all is as it was.

        What is computed is the same, bit by bit: stages only say when the device is waited for.
        """
        parts = _in_stages(self._caches, stages)
        before = [
            [cache.copy() for cache in part] for part in parts
        ]  # shared: until a layer is computed nothing is copied
        frozen, self.piece = freeze(self._caches), len(ids)
        with forcing_fused(self._force_fused):
            self._model(mx.array([ids]), cache=self._caches)
        for done, part in enumerate(parts, 1):
            before[done - 1] = []  # or the layer's keys would be copied, not written in place
            mx.eval([cache.state for cache in part])
            if done < len(parts) and stopped():
                for cache in (cache for computed in parts[:done] for cache in computed):
                    cache.trim(len(ids))
                for waiting, held in zip(parts[done:], before[done:], strict=True):
                    for cache, old in zip(waiting, held, strict=True):
                        cache.state = old.state
                thaw(self._caches, frozen)
                mx.clear_cache()
                return False
        mx.eval([cache.state for cache in self._caches])  # of caches that do not grow
        mx.clear_cache()
        self.held.extend(ids)
        return True

    def decode(self, last: int, sampler: Sampler, limit: int | None) -> Iterator[int]:
        """Yield up to ``limit`` tokens (None: without end) that follow ``last``, the one prompt token not yet held.

        Stop iterating to cancel. With ``ahead`` the next step is launched before a token is read, so the device works while the
        host does.
        """
        pending = self._step(mx.array([last]), sampler, checked=True)
        self.held.append(last)
        self._room = Room(self._caches)
        for count in itertools.count(1):
            self.ended_by_memory = count != limit and self._room.will_grow(len(self.held)) and not self._may_grow()
            last_one = count == limit or self.ended_by_memory
            checked = count % CHECK_STEPS == 0
            following = (
                self._step(_some_token(pending), sampler, checked=checked) if self._ahead and not last_one else None
            )
            if self._room.grew():
                self._mark("kv growth")
            token = int(pending.tolist()[0])  # type: ignore[index,arg-type]
            if token == NO_NUMBER:
                raise ModelDamagedError(
                    "the model computed values that are not numbers",
                    "Load it with dtype float32, or download it again.",
                )
            if following is not None:
                self.held.append(token)
            yield token
            if last_one:
                return
            if count % POOL_CLEAR_STEPS == 0:
                mx.clear_cache()
                self._mark("pool cleared")
            if following is None:
                following = self._step(pending, sampler, checked=checked)
                self.held.append(token)
            pending = following

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
