"""Make room for a prefill before it begins: predict its peak, take the ladder's steps, or refuse. Runs on the engine's thread.

Refused is only what goes beyond the limit (limits/memory.py). Where macOS is at critical pressure the steps are taken for what it
has left, as far as they go, and the prompt is computed all the same: what it needs is small beside a model that is loaded already.
"""

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
from tokamac.engine.limits.ladder import Squeeze, offers, refusal, relieving, steps
from tokamac.engine.limits.peak import Peak, predict_peak
from tokamac.engine.limits.peak_shape import Shape
from tokamac.engine.limits.prefill_chunk import prompt_peak
from tokamac.engine.prompt_cache.kept import Slot
from tokamac.engine.prompt_cache.seam import Store
from tokamac.engine.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Room:
    """Room for a prefill. chunk: tokens to compute at once. squeezed: what was done for it, or what it costs other programs; None
    where nothing had to be and it costs them nothing.

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
        shape, store, budget = self._runtime.shape, self._store, self._budget()
        if budget is None:
            return True
        held, slots, aside = len(self._slot.ids), slots_of(self._slot.caches), store.aside

        def peak(_: int) -> Peak:
            return predict_peak(shape, held=held, new=0, chunk=1, slots=slots, reply=1, prompt_cache=aside)

        found = steps(peak, budget, chunk=1, pool=mx.get_cache_memory())
        done = _take(found, store, budget, from_others=0, critical=False) if found.rungs else None
        if found.missing:
            pool, freed = (done.pool_bytes, done.cache_bytes) if done else (0, 0)
            self.told.append(Squeezed(pool, None, freed, found.peak.total, budget, ended=True))
        elif done is not None and done.cache_bytes:  # a pool that was cleared is nothing to tell
            self.told.append(done)
        return not found.missing

    def _budget(self) -> int | None:
        whole = self._runtime.memory_budget
        if whole is None:
            return None
        ours = self._runtime.shape.weights + kv_bytes(self._slot.caches) + self._store.aside
        return whole - max(0, mx.get_active_memory() - ours)


def make_room(
    runtime: Runtime, store: Store, slot: Slot, tokens: int, *, most: int | None = None, may_force: bool = True
) -> Room:
    """Make room to compute a prompt of so many ``tokens``, of which ``slot`` holds the first, and one token of reply.

    most: tokens to compute at once at most, after MLX had no memory for more. may_force: whether fused attention may be asked for.
    Raises MemoryLimitError where there can be none, with what would fit; nothing was given up for it then.
    """
    shape, held, slots, aside = runtime.shape, len(slot.ids), slots_of(slot.caches), store.aside

    def peak(of: Shape, chunk: int, reply: int = 1, beside: int = aside) -> Peak:
        new = max(0, tokens - 1 - held)
        return prompt_peak(
            of, runtime.chunking, held=held, new=new, most=chunk, slots=slots, reply=reply, prompt_cache=beside
        )

    def afresh(of: Shape) -> Peak:
        return prompt_peak(of, runtime.chunking, held=0, new=tokens - 1, reply=1)

    others = _others(shape, store)
    budget = None if (whole := runtime.memory_budget) is None else whole - others
    spare = None if (left := memory.available()) is None else left - others
    pool, largest = mx.get_cache_memory(), runtime.chunking.at(held)
    largest = largest if most is None else min(most, largest)
    fused = replace(shape, force_fused=True)

    def plain_at(chunk: int) -> Peak:
        return peak(shape, chunk)

    def fused_at(chunk: int) -> Peak:
        return peak(fused, chunk)

    found = steps(plain_at, budget, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)
    if budget is not None and found.missing:
        offered = list(offers(fused, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered, there_is=memory.device_total())
    critical = memory.is_critical()
    if critical and budget is not None and spare is not None and spare < budget:
        found = relieving(plain_at, spare, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)
    given = memory.taken_from_others(found.peak.total, spare)
    squeezed = _take(found, store, budget, given, critical) if found.rungs or given or critical else None
    if most is not None:
        done = squeezed or Squeezed(0, None, 0, found.peak.total, budget)
        squeezed = replace(done, chunk=found.chunk, failed=True)
    taken, beside = fused if found.fused else shape, found.peak.prompt_cache
    return Room(found.chunk, squeezed, lambda reply: peak(taken, found.chunk, reply, beside), found.fused)


def slots_of(caches: list[Any]) -> int:
    """Return the most tokens that one of our caches has room for."""
    return max((cache.slots for _, cache in leaves(caches) if isinstance(cache, Cache)), default=0)


def _others(shape: Shape, store: Store) -> int:
    """Return what other engines of the process hold: their arrays count in the same budget."""
    return max(0, mx.get_active_memory() - shape.weights - store.nbytes)


def _take(found: Squeeze, store: Store, budget: int | None, from_others: int, critical: bool) -> Squeezed:
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
    return Squeezed(pool, chunk, freed, found.peak.total, budget, from_others, critical, spared)
