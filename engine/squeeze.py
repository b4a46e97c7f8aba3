"""Make room for a prefill before it begins: predict its peak, take the ladder's steps, or refuse. Runs on the engine's thread.

Refused is only what goes beyond the limit (limits/memory.py). Where macOS is at critical pressure the steps are taken for what it
has left, as far as they go, and the prompt is computed all the same: what it needs is small beside a model that is loaded already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tokamac.engine.events import Squeezed
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.plan import spare_slots
from tokamac.engine.kv.probe import leaves
from tokamac.engine.limits import memory
from tokamac.engine.limits.ladder import Squeeze, offers, refusal, relieving, steps
from tokamac.engine.limits.peak import Peak
from tokamac.engine.limits.peak_shape import Shape
from tokamac.engine.limits.prefill_chunk import prompt_peak
from tokamac.engine.prompt_cache.kept import Slot
from tokamac.engine.prompt_cache.seam import Store
from tokamac.engine.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Room:
    """Room for a prefill. chunk: tokens to compute at once. squeezed: what was done for it, or what it costs other programs; None
    where nothing had to be and it costs them nothing.

    peak_with: the peak that is expected with a reply of so many tokens.
    """

    chunk: int
    squeezed: Squeezed | None
    peak_with: Callable[[int], Peak]


def make_room(runtime: Runtime, store: Store, slot: Slot, tokens: int) -> Room:
    """Make room to compute a prompt of so many ``tokens``, of which ``slot`` holds the first, and one token of reply.

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
    found = steps(lambda chunk: peak(shape, chunk), budget, chunk=largest, pool=pool)
    if budget is not None and found.missing:
        offered = list(offers(shape, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered, there_is=memory.device_total())
    critical = memory.is_critical()
    if critical and budget is not None and spare is not None and spare < budget:
        found = relieving(lambda chunk: peak(shape, chunk), spare, chunk=largest, pool=pool)
    given = memory.taken_from_others(found.peak.total, spare)
    squeezed = _take(found, store, budget or 0, given, critical) if found.rungs or given or critical else None
    return Room(found.chunk, squeezed, lambda reply: peak(shape, found.chunk, reply, found.peak.prompt_cache))


def slots_of(caches: list[Any]) -> int:
    """Return the most tokens that one of our caches has room for."""
    return max((cache.slots for _, cache in leaves(caches) if isinstance(cache, Cache)), default=0)


def _others(shape: Shape, store: Store) -> int:
    """Return what other engines of the process hold: their arrays count in the same budget."""
    return max(0, mx.get_active_memory() - shape.weights - store.nbytes)


def _take(found: Squeeze, store: Store, budget: int, from_others: int, critical: bool) -> Squeezed:
    """Take the steps, in their order."""
    pool, chunk, freed = 0, None, 0
    for rung in found.rungs:
        match rung.name:
            case "pool":
                pool = rung.amount
                mx.clear_cache()
            case "chunk":
                chunk = rung.amount
            case "prompt cache":
                freed = store.shrink(rung.amount)
                mx.clear_cache()
    return Squeezed(pool, chunk, freed, found.peak.total, budget, from_others, critical)
