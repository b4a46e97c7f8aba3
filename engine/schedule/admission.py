"""Memory admission for prompts and growing replies: predict the peak, relieve memory, or refuse."""

# Only what exceeds the limit (perf/memory.py) is refused.

# At critical macOS pressure memory is relieved as far as possible, and the prompt runs all the same: it needs
# little beside the loaded model.

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..chunking import SHALLOW, prompt_peak
from ..errors import MemoryLimitError
from ..events import MemoryPressure
from ..kv.attention import flat
from ..kv.cache import Cache
from ..kv.cache import nbytes as kv_bytes
from ..kv.plan import spare_slots
from ..perf import memory
from ..perf.footprint import LEAST_CHUNK, Mitigation, offers, refusal, relieving, steps
from ..perf.peak_memory import ModelShape, Peak, predict_peak
from ..prompt_cache.memory import CacheLease, CacheStore
from ..runtime import Runtime
from .schedule import WAITS, Pace

if TYPE_CHECKING:
    from ..vision.eyes import Sight


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How to prefill within the memory."""

    chunk: int
    pressure: MemoryPressure | None
    peak_with: Callable[[int], Peak]
    force_fused: bool = False


class RoomTakenError(Exception):
    """A prompt would fit, but not beside the running replies. pressure: to report."""

    def __init__(self, pressure: MemoryPressure) -> None:
        super().__init__()
        self.pressure = pressure


class GrowthBudget:
    """Makes room in decode before a reply's caches grow."""

    def __init__(self, runtime: Runtime, store: CacheStore, lease: CacheLease) -> None:
        self._runtime, self._store, self._lease = runtime, store, lease
        self.pressure: list[MemoryPressure] = []
        self.waits = self._told = False

    def fits(self) -> bool:
        store, idle = self._store, 0
        self.waits = False
        if (budget := self._budget()) is None:
            return True
        found = self._steps(budget)
        if found.missing and (idle := self._runtime.forget_pictures() + store.drop_idle(self._lease)):
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
        while self.pressure:
            yield self.pressure.pop(0)

    def _steps(self, budget: int) -> Mitigation:
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
    sight: "Sight | None" = None,
) -> PrefillBudget:
    """Make room to see and prefill ``tokens`` tokens, partly held by ``lease``, and one token of reply.

    Raises MemoryLimitError, with what would fit, where there can't be room; RoomTakenError where other leases
    hold it (nothing is evicted then). most: chunk limit after MLX ran out of memory.
    """
    shape, cached, slots, aside = runtime.shape, len(lease.ids), slots_of(lease.caches), store.aside
    others = _others(shape, store, lease)
    budget = None if (whole := runtime.memory_budget) is None else whole - others
    spare = None if (left := memory.available()) is None else left - others
    chunking = runtime.chunking
    pool, largest = mx.get_cache_memory(), chunking.first if cached < SHALLOW else chunking.tokens_at(cached)
    largest = largest if most is None else min(most, largest)
    critical = memory.is_critical()
    tower, image = (0, 0) if sight is None else sight.needs(cached)
    shape = replace(shape, weights=shape.weights + tower) if tower else shape

    def peak(of: ModelShape, chunk: int, reply: int = 1, beside: int = aside) -> Peak:
        new = max(0, tokens - 1 - cached)
        found = prompt_peak(
            of, runtime.chunking, held=cached, new=new, most=chunk, slots=slots, reply=reply, prompt_cache=beside
        )
        return replace(found, image=image)

    def afresh(of: ModelShape) -> Peak:
        return replace(prompt_peak(of, runtime.chunking, held=0, new=tokens - 1, reply=1), image=image)

    if budget is not None and most is None and not critical and len(store.leases) == 1:
        whole_peak, own = runtime.peak_within(tokens, slots)
        needed = whole_peak + aside + tower + image
        if needed + pool <= budget and (
            spare is None or needed <= spare
        ):  # by far, as a rule: nothing is to be reckoned
            lease.expected_bytes = own
            return PrefillBudget(largest, None, lambda reply: peak(shape, largest, reply))
    fused = replace(shape, force_fused=True)

    def plain_at(chunk: int) -> Peak:
        return peak(shape, chunk)

    def fused_at(chunk: int) -> Peak:
        return peak(fused, chunk)

    def within(limit: int | None) -> Mitigation:
        return steps(plain_at, limit, chunk=largest, pool=pool, fused_at=fused_at if may_force else None)

    found = within(budget)
    if budget is not None and found.missing:
        if runtime.forget_pictures() + store.drop_idle(lease):
            return make_room(runtime, store, lease, tokens, most=most, may_force=may_force, sight=sight)
        given_back = sum(max(kv_bytes(each.caches), each.expected_bytes) for each in store.leases if each is not lease)
        if given_back and not within(budget + given_back).missing:
            raise RoomTakenError(MemoryPressure(0, None, 0, found.peak.total, budget, waits=True))
        offered = list(offers(fused, afresh, budget, spare=spare_slots, longest=tokens))
        raise refusal(f"this prompt of {tokens:,} tokens", found.peak, budget, offered, there_is=memory.device_total())
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
    own: Callable[[int | None], list[Any]] | None = None,
    sight: "Sight | None" = None,
) -> Generator[Any, None, tuple[CacheLease, PrefillBudget]]:
    """Return leased caches for ``ids``, and the room to compute ``tokens``, as ``make_room``.

    Yields None while reading from disk, WAITS while others hold the room or compute the same prefix, and the
    pressure to report. Raises MemoryLimitError, also when ``cancelled``.
    """
    told = False
    while True:
        while own is None and store.is_coming(ids, keep) and not cancelled():
            yield WAITS
        lease = store.lend(ids, keep, own)
        store.use(lease)
        try:
            # Nobody waits for what gives way itself.
            with closing(store.restore(lease, ids, lambda: pace.within_s, awaited=not background)) as reading:
                for _ in reading:
                    yield None
                    if cancelled():
                        break
            return lease, make_room(runtime, store, lease, tokens, most=most, may_force=may_force, sight=sight)
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
    return max([cache.slots for cache in flat(caches) if isinstance(cache, Cache)], default=0)


def _others(shape: ModelShape, store: CacheStore, lease: CacheLease) -> int:
    beside_it = [(kv_bytes(each.caches), each.expected_bytes) for each in store.leases if each is not lease]
    held = mx.get_active_memory() - shape.weights - kv_bytes(lease.caches) - store.aside
    return max(0, held) + sum(max(0, expected - now) for now, expected in beside_it)


def _take(found: Mitigation, store: CacheStore, budget: int | None, from_others: int, critical: bool) -> MemoryPressure:
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
