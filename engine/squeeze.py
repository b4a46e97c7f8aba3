"""Make room for a prefill before it begins: predict its peak, take the ladder's steps, or refuse. Runs on the engine's thread."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from tokamac.engine.events import Squeezed
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.kit import nbytes as kv_bytes
from tokamac.engine.kv.plan import spare_slots
from tokamac.engine.kv.probe import leaves
from tokamac.engine.limits import memory
from tokamac.engine.limits.ladder import Squeeze, offers, refusal, steps
from tokamac.engine.limits.peak import Peak, predict_peak
from tokamac.engine.limits.peak_shape import Shape
from tokamac.engine.prompt_cache.kept import Slot
from tokamac.engine.prompt_cache.seam import Store
from tokamac.engine.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Room:
    """Room for a prefill. chunk: tokens to compute at once. squeezed: what was done for it; None where nothing had to be.

    force_fused: whether to ask for fused attention wherever there is a kernel. peak_with: the peak that is expected with a reply
    of so many tokens.
    """

    chunk: int
    squeezed: Squeezed | None
    peak_with: Callable[[int], Peak]
    force_fused: bool = False


class ReplyGrowth:
    """Asked while decoding, before the caches of a reply are made larger: makes room, and says whether there is any.

    told: what was done and is still to be said.
    """

    def __init__(self, runtime: Runtime, store: Store, slot: Slot) -> None:
        self._runtime, self._store, self._slot = runtime, store, slot
        self.told: list[Squeezed] = []

    def fits(self) -> bool:
        """Clear the pool and shrink the prompt cache as far as the larger caches need it; return whether they fit then."""
        shape, budget = self._runtime.shape, self._budget()
        if budget is None:
            return True
        held, slots, aside = len(self._slot.ids), slots_of(self._slot.caches), self._store.aside

        def peak(_: int) -> Peak:
            return predict_peak(shape, held=held, new=0, chunk=1, slots=slots, reply=1, prompt_cache=aside)

        found = steps(peak, budget, chunk=1, pool=mx.get_cache_memory())
        done = _take(found, self._store, budget) if found.rungs else None
        if found.missing:
            pool, freed = (done.pool_bytes, done.cache_bytes) if done else (0, 0)
            self.told.append(Squeezed(pool, None, freed, found.peak.total, budget, ended=True))
        elif done is not None and done.cache_bytes:  # a pool that was cleared is nothing to tell
            self.told.append(done)
        return not found.missing

    def _budget(self) -> int | None:
        whole = memory.array_budget()
        if whole is None:
            return None
        ours = self._runtime.shape.weights + kv_bytes(self._slot.caches) + self._store.aside
        return whole - max(0, mx.get_active_memory() - ours)


def make_room(runtime: Runtime, store: Store, slot: Slot, tokens: int, *, most: int | None = None) -> Room:
    """Make room to compute a prompt of so many ``tokens``, of which ``slot`` holds the first, and one token of reply.

    most: tokens to compute at once at most, after MLX had no memory for more.
    Raises MemoryLimitError where there can be none, with what would fit; nothing was given up for it then.
    """
    shape, held, slots, aside = runtime.shape, len(slot.ids), slots_of(slot.caches), store.aside

    def peak(of: Shape, chunk: int, reply: int = 1, beside: int = aside) -> Peak:
        new = max(0, tokens - 1 - held)
        return predict_peak(of, held=held, new=new, chunk=chunk, slots=slots, reply=reply, prompt_cache=beside)

    def afresh(of: Shape) -> Peak:
        return predict_peak(of, held=0, new=tokens - 1, chunk=runtime.prefill_chunk, reply=1)

    budget = _budget(shape, store)
    fused = replace(shape, force_fused=True)
    largest = runtime.prefill_chunk if most is None else min(most, runtime.prefill_chunk)
    found = steps(
        lambda chunk: peak(shape, chunk),
        budget,
        chunk=largest,
        pool=mx.get_cache_memory(),
        fused_at=lambda chunk: peak(fused, chunk),
    )
    if budget is not None and found.missing:
        offered = list(offers(shape, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered)
    squeezed = None if budget is None or not found.rungs else _take(found, store, budget)
    if most is not None:
        done = squeezed or Squeezed(0, None, 0, found.peak.total, budget)
        squeezed = replace(done, chunk=found.chunk, failed=True)
    taken = fused if found.fused else shape
    beside = found.peak.prompt_cache
    return Room(found.chunk, squeezed, lambda reply: peak(taken, found.chunk, reply, beside), found.fused)


def slots_of(caches: list[Any]) -> int:
    """Return the most tokens that one of our caches has room for."""
    return max((cache.slots for _, cache in leaves(caches) if isinstance(cache, Cache)), default=0)


def _budget(shape: Shape, store: Store) -> int | None:
    """Return what this engine may use: other engines of the process have their arrays in the same budget."""
    whole = memory.array_budget()
    others = max(0, mx.get_active_memory() - shape.weights - store.nbytes)
    return None if whole is None else whole - others


def _take(found: Squeeze, store: Store, budget: int) -> Squeezed:
    """Take the steps, in their order."""
    pool, chunk, freed, spared = 0, None, 0, 0
    for rung in found.rungs:
        match rung.name:
            case "pool":
                pool = rung.amount
                mx.clear_cache()
            case "fused":
                spared = rung.amount
            case "chunk":
                chunk = rung.amount
            case "prompt cache":
                freed = store.shrink(rung.amount)
                mx.clear_cache()
    return Squeezed(pool, chunk, freed, found.peak.total, budget, spared)
