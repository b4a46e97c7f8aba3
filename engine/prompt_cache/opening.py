"""Make the prompt cache of a loaded model from what the caller asked for."""

from pathlib import Path

import mlx.core as mx

from tokamac.engine.kv import segments
from tokamac.engine.limits import memory
from tokamac.engine.limits.peak import predict_peak
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.prompt_cache.cache import PromptCache
from tokamac.engine.prompt_cache.disk import Disk, Rates
from tokamac.engine.prompt_cache.folder import Budgets, Folder, default_root
from tokamac.engine.prompt_cache.names import identity
from tokamac.engine.prompt_cache.seam import NoCache, Store
from tokamac.engine.prompt_cache.store import MemoryStore
from tokamac.engine.prompt_cache.weights import identify
from tokamac.engine.runtime import Runtime

MEMORY_SHARE = 10
"""One part in so many of what may be used is for the prompt cache, as it is whenever room is made in it, and"""
LEAST_MEMORY = 64 << 20
"""never fewer bytes than these."""


def open_cache(spec: PromptCacheSpec | None, runtime: Runtime, *, folder: Path, name: str, **more: object) -> Store:
    """Return the prompt cache of the model in ``folder``, called ``name``; one that keeps nothing where ``spec`` is None.

    more: whatever beside files and KV settings decides what its keys and values look like.
    """
    if spec is None:
        return NoCache(runtime.new_caches)
    rates = Rates()
    asked = spec.memory_bytes

    def budget() -> int:
        return max(LEAST_MEMORY, (runtime.memory_budget or 0) // MEMORY_SHARE) if asked is None else asked

    def beside(held: int) -> int:
        return 0 if asked is not None else _room_beside(runtime, cache, held)

    grow = segments.all_grow(runtime.new_caches(0))
    cache = PromptCache(MemoryStore(runtime.new_caches, budget, all_grow=grow, beside=beside), None, rates)
    if spec.disk:
        stored = Folder(spec.folder or default_root(), Budgets(spec.disk_bytes, spec.daily_write_bytes))

        def known(weights: str) -> None:
            model = identity(folder, runtime.kv, weights, device=runtime.device, **more)
            cache.use_disk(Disk(stored, model.fingerprint, name, rates, identity=model))

        cache.identifying = identify(folder, stored.root, known)
    return cache


def _room_beside(runtime: Runtime, cache: PromptCache, held: int) -> int:
    """Return the bytes that memory has, without taking from other programs, beside a conversation of ``held`` tokens that goes on.

    Its next piece of prompt is predicted; where less is left when it comes, the memory ladder lets go of what is kept beside.
    """
    whole, left = runtime.memory_budget, memory.available()
    if whole is None:
        return 0
    chunk = runtime.chunking.at(held)
    peak = predict_peak(runtime.shape, held=held, new=chunk, chunk=chunk, reply=1).total
    others = max(0, mx.get_active_memory() - runtime.shape.weights - cache.nbytes)
    return (whole if left is None else min(whole, left)) - others - peak
