"""Memory for a prompt before it is computed, and for a reply as it grows: predict the peak, relieve memory, or refuse.

Only what goes beyond the limit (perf/memory.py) is refused. Where macOS is at critical pressure memory is relieved for what it has
left, as far as that goes, and the prompt is computed all the same: what it needs is small beside a model that is loaded already.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..chunking import prompt_peak
from ..errors import MemoryLimitError
from ..events import MemoryPressure
from ..kv.cache import Cache
from ..kv.cache import nbytes as kv_bytes
from ..kv.plan import spare_slots
from ..kv.probe import leaves
from ..perf import memory
from ..perf.mitigation import LEAST_CHUNK, Mitigation, offers, refusal, relieving, steps
from ..perf.peak_memory import ModelShape, Peak, predict_peak
from ..prompt_cache.memory import CacheLease, CacheStore
from ..runtime import Runtime
from .policy import Pace
from .schedule import WAITS


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How a prompt may be computed within the memory there is.

    Attributes:
        chunk: tokens to compute at once.
        pressure: what was done to make room, or what the prompt costs other programs; None where neither.
        peak_with: the peak that is expected with a reply of so many tokens.
        force_fused: whether to ask for fused attention wherever there is a kernel.
    """

    chunk: int
    pressure: MemoryPressure | None
    peak_with: Callable[[int], Peak]
    force_fused: bool = False


class RoomTakenError(Exception):
    """A prompt fits, but not beside the replies that are being made. pressure: to be told."""

    def __init__(self, pressure: MemoryPressure) -> None:
        super().__init__()
        self.pressure = pressure


class GrowthBudget:
    """Makes room, while decoding, before the caches of a reply are made larger.

    Attributes:
        pressure: what was done and is still to be told.
        waits: whether they fit once another reply has given back what it holds.
    """

    def __init__(self, runtime: Runtime, store: CacheStore, lease: CacheLease) -> None:
        self._runtime, self._store, self._lease = runtime, store, lease
        self.pressure: list[MemoryPressure] = []
        self.waits = self._told = False

    def fits(self) -> bool:
        """Clear the pool and shrink the prompt cache as far as the larger caches need it; return whether they fit then."""
        store, idle = self._store, 0
        self.waits = False
        if (budget := self._budget()) is None:
            return True
        found = self._steps(budget)
        if found.missing and (idle := store.drop_idle(self._lease)):
            budget = self._budget()
            assert budget is not None
            found = self._steps(budget)
        done = _take(found, store, budget, from_others=0, critical=False) if found.steps or idle else None
        if done is not None:
            done = replace(done, cache_bytes=done.cache_bytes + idle)
        if found.missing:
            pool, freed = (done.pool_bytes, done.cache_bytes) if done else (0, 0)
            self.waits = any(each is not self._lease for each in store.leases)
            if not (self.waits and self._told):
                self.pressure.append(
                    MemoryPressure(pool, None, freed, found.peak.total, budget, ended=not self.waits, waits=self.waits)
                )
            self._told = self._told or self.waits
            return False
        self._lease.expected_bytes = max(self._lease.expected_bytes, found.peak.kv)
        if done is not None and done.cache_bytes:  # a pool that was cleared is nothing to tell
            self.pressure.append(done)
        return True

    def tell(self) -> Iterator[MemoryPressure]:
        """Yield what was done since it was told last."""
        while self.pressure:
            yield self.pressure.pop(0)

    def _steps(self, budget: int) -> Mitigation:
        """Return what it takes to make the caches larger by a token."""
        cached, slots, aside = len(self._lease.ids), slots_of(self._lease.caches), self._store.aside

        def peak(_: int) -> Peak:
            return predict_peak(
                self._runtime.shape, held=cached, new=0, chunk=1, slots=slots, reply=1, prompt_cache=aside
            )

        return steps(peak, budget, chunk=1, pool=mx.get_cache_memory())

    def _budget(self) -> int | None:
        whole = self._runtime.memory_budget
        if whole is None:
            return None
        return whole - _others(self._runtime.shape, self._store, self._lease)


def make_room(
    runtime: Runtime,
    store: CacheStore,
    lease: CacheLease,
    tokens: int,
    *,
    most: int | None = None,
    may_force: bool = True,
) -> PrefillBudget:
    """Make room to compute a prompt of so many ``tokens``, of which ``lease`` holds the first, and one token of reply.

    most: tokens to compute at once at most, after MLX had no memory for more. may_force: whether fused attention may be asked for.
    Raises MemoryLimitError where there can be none, with what would fit, and RoomTakenError where there would be if no other lease
    were in use; nothing was given up for it then.
    """
    shape, cached, slots, aside = runtime.shape, len(lease.ids), slots_of(lease.caches), store.aside

    def peak(of: ModelShape, chunk: int, reply: int = 1, beside: int = aside) -> Peak:
        new = max(0, tokens - 1 - cached)
        return prompt_peak(
            of, runtime.chunking, held=cached, new=new, most=chunk, slots=slots, reply=reply, prompt_cache=beside
        )

    def afresh(of: ModelShape) -> Peak:
        return prompt_peak(of, runtime.chunking, held=0, new=tokens - 1, reply=1)

    others = _others(shape, store, lease)
    budget = None if (whole := runtime.memory_budget) is None else whole - others
    spare = None if (left := memory.available()) is None else left - others
    pool, largest = mx.get_cache_memory(), runtime.chunking.at(cached)
    largest = largest if most is None else min(most, largest)
    fused = replace(shape, force_fused=True)

    def plain_at(chunk: int) -> Peak:
        return peak(shape, chunk)

    def fused_at(chunk: int) -> Peak:
        return peak(fused, chunk)

    def within(limit: int | None) -> Mitigation:
        return steps(plain_at, limit, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)

    found = within(budget)
    if budget is not None and found.missing:
        if store.drop_idle(lease):
            return make_room(runtime, store, lease, tokens, most=most, may_force=may_force)
        given_back = sum(max(kv_bytes(each.caches), each.expected_bytes) for each in store.leases if each is not lease)
        if given_back and not within(budget + given_back).missing:
            raise RoomTakenError(MemoryPressure(0, None, 0, found.peak.total, budget, waits=True))
        offered = list(offers(fused, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered, there_is=memory.device_total())
    critical = memory.is_critical()
    if critical and budget is not None and spare is not None and spare < budget:
        found = relieving(plain_at, spare, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)
    given = memory.taken_from_others(found.peak.total, spare)
    pressure = _take(found, store, budget, given, critical) if found.steps or given or critical else None
    if most is not None:
        done = pressure or MemoryPressure(0, None, 0, found.peak.total, budget)
        pressure = replace(done, chunk=found.chunk, failed=True)
    lease.expected_bytes = found.peak.kv
    taken, beside = fused if found.fused else shape, found.peak.prompt_cache
    return PrefillBudget(found.chunk, pressure, lambda reply: peak(taken, found.chunk, reply, beside), found.fused)


def admitted(
    runtime: Runtime,
    store: CacheStore,
    ids: list[int],
    keep: int | None,
    tokens: int,
    *,
    pace: Pace,
    cancelled: Callable[[], bool],
    background: bool = False,
    most: int | None = None,
    may_force: bool = True,
) -> Generator[Any, None, tuple[CacheLease, PrefillBudget]]:
    """Return caches for ``ids``, in use already, and the room to compute ``tokens``, as ``make_room``.

    Yields None while they are read from the disk, where others may go first; WAITS while others hold the room, or compute what
    ``ids`` begin with; and once the pressure to be told of. Where ``cancelled`` says so meanwhile, the room is not there. Raises
    MemoryLimitError.
    """
    told = False
    while True:
        while store.is_coming(ids, keep) and not cancelled():
            yield WAITS
        lease = store.lend(ids, keep)
        store.use(lease)
        try:
            # Nobody waits for what gives way itself.
            with closing(store.restore(lease, ids, lambda: pace.within_s, awaited=not background)) as reading:
                for _ in reading:
                    yield None
                    if cancelled():
                        break
            return lease, make_room(runtime, store, lease, tokens, most=most, may_force=may_force)
        except RoomTakenError as taken:
            if cancelled():
                return lease, PrefillBudget(LEAST_CHUNK, None, lambda _: Peak(0, 0, 0, 0))
            store.release(lease)
            pressure = taken.pressure
        except BaseException as error:
            store.release(lease, failed=not isinstance(error, GeneratorExit | MemoryLimitError))
            raise
        if not told:
            yield pressure
            told = True
        yield WAITS


def slots_of(caches: list[Any]) -> int:
    """Return the most tokens that one of our caches has room for."""
    return max((cache.slots for _, cache in leaves(caches) if isinstance(cache, Cache)), default=0)


def _others(shape: ModelShape, store: CacheStore, lease: CacheLease) -> int:
    """Return what other replies hold, or were told that they may, and other engines of the process: all count in one budget."""
    beside_it = [(kv_bytes(each.caches), each.expected_bytes) for each in store.leases if each is not lease]
    held = mx.get_active_memory() - shape.weights - kv_bytes(lease.caches) - store.aside
    return max(0, held) + sum(max(0, expected - now) for now, expected in beside_it)


def _take(found: Mitigation, store: CacheStore, budget: int | None, from_others: int, critical: bool) -> MemoryPressure:
    """Take the steps, in their order."""
    pool, chunk, freed, spared = 0, None, 0, 0
    for step in found.steps:
        match step.name:
            case "pool":
                pool = step.amount
                mx.clear_cache()
            case "fused":
                spared = step.amount
            case "chunk":
                chunk = step.amount
            case "prompt cache":
                freed = store.shrink(step.amount)
                mx.clear_cache()
    return MemoryPressure(pool, chunk, freed, found.peak.total, budget, from_others, critical, spared)
