"""The prompt cache with a disk: memory first, then stored segments; and the idle work that fills the disk.

What is stored are runs of the live caches. Caches that grow are stored in blocks of 256 tokens, so that conversations with a common
beginning share files, and a shorter last block, which the next turn replaces. Where some state can't be sliced, a segment reaches
from one checkpoint, the end of a prompt or of a reply, to the next, and holds the state there.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kv import snapshot
from ..kv.operations import LOCAL, CacheOperations
from ..options import PromptCacheSpec
from ..perf import memory
from ..perf.peak_memory import predict_peak
from .disk import DiskStore, Link, Segment, to_bytes, to_host
from .folder import Budgets, Folder, default_root, identify, identity
from .memory import CachedRun, CacheLease, CacheStore, KnownPrefix, MemoryStore
from .portable import Packet
from .radix_tree import Node

if TYPE_CHECKING:
    from ..runtime import Runtime

BLOCK = 256
LEAST_TOKENS = 256
"""A prefix of fewer is computed in a moment."""
LEAST_TAIL = 32
"""Tokens beyond the last whole block that are worth a file of their own."""
PAUSE_S = 0.02
AWAIT_S = 1.0

MEMORY_SHARE = 10
"""By default the prompt cache may take a tenth of the memory budget, as it is whenever something must go, and"""
LEAST_MEMORY = 64 << 20
"""never fewer bytes than these."""

ROUNDING, PACKED_ROUNDING = 1e-3, 0.05
"""Differences of logits that rounding explains: the stored prefix was cut into other chunks. Where keys and values are packed, a
difference in the last digit may put a number on the next step of its group's scale."""
STEPS = 8
"""Steps of the number type, at the size of the largest logit, that come on top: bfloat16 has few."""


class PromptCache(MemoryStore):
    """Computed prefixes in memory, and on disk once ``use_disk`` is called. Takes what ``MemoryStore`` takes.

    identifying: the thread that works out which stored segments are this model's and then calls ``use_disk``.
    """

    def __init__(
        self,
        make: Callable[[int | None], list[Any]],
        budget: Callable[[], int],
        *,
        all_grow: bool,
        beside: Callable[[int], int] = lambda _: 0,
        operations: CacheOperations = LOCAL,
    ) -> None:
        super().__init__(make, budget, all_grow=all_grow, beside=beside, operations=operations)
        self.identifying: Thread | None = None
        self._disk: DiskStore | None = None
        self._replaced: tuple[str, list[int]] | None = None
        self._written = set[str]()  # since the last request, so that a small budget does not cause a cycle of writes

    def use_disk(self, disk: DiskStore) -> None:
        """From now on, store what is computed and look there for what was. Callable from any thread."""
        self._disk = disk

    @property
    def disk(self) -> DiskStore | None:
        """The disk; waits until it is known which segments are this model's."""
        if self._disk is None and self.identifying is not None:
            self.identifying.join()
        return self._disk

    @property
    def trouble(self) -> str | None:
        """What went wrong with the disk, once something did."""
        return self._disk.trouble if self._disk else None

    def lend(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return the live caches, filled from memory."""
        self._written.clear()
        return super().lend(ids, keep)

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        """Return what is in memory, and what on disk beyond it is worth reading."""
        known = super().known(ids, keep)
        links = self._links(ids, keep, known.tokens)
        return KnownPrefix(links[-1].stop, sum(link.entry.size for link in links)) if links else known

    def anew(self) -> CacheStore:
        """Return a store with the same disk and nothing in memory."""
        other = super().anew()
        if isinstance(other, PromptCache) and self._disk is not None:
            other.use_disk(self._disk)
        return other

    def stored(self) -> list[tuple[list[int], int | None]]:
        """Return the prefixes on disk that no other continues."""
        return self._disk.ends() if self._disk else []

    def packets(self) -> Iterator[Packet]:
        """Yield what the live caches hold as consecutive segments, named for the disk."""
        disk, held = self.disk, self._current()
        assert disk is not None
        live, end = held.lease, held.end
        ids, states = list(live.ids), self._freeze_end(held)
        bounds = [len(ids)] if self.needs_checkpoints else [*range(BLOCK, len(ids), BLOCK), len(ids)]
        for start, stop, parent, name in disk.parts(ids, bounds, live.keep):
            piece = self._cut(end, start, stop)
            yield Packet(parent, name, to_bytes(to_host(start, ids[start:stop], piece, states)))

    def flush(self, seconds: float) -> None:
        """Store what is to be stored, within ``seconds``."""
        if self._disk is None:
            return
        deadline = time.monotonic() + seconds
        while self.trouble is None and (pause := self.idle()) is not None and time.monotonic() < deadline:
            time.sleep(pause)
        self._disk.wait(max(0.0, deadline - time.monotonic()))

    def idle(self) -> float | None:
        """Begin to write the next segment, if the last one is written; return when to look again."""
        disk = self._disk
        if disk is None:
            return AWAIT_S if self.identifying is not None else None
        if self._idle is None or self.leases:
            return None
        if disk.is_writing:
            return PAUSE_S
        if disk.trouble is not None:
            if (rest_s := disk.rest_s) > 0:
                return rest_s
            self._written.clear()
            self._replaced = None  # what was to take its place may not be there
        if self._replaced is not None:
            disk.remove_shorter(*self._replaced)
            self._replaced = None
        try:
            more = any(self._write_next(disk, keep, leaf) for keep, leaf in self._leaves())
        except (RuntimeError, ValueError) as error:  # MLX has no memory for the copy, say
            disk.fail(f"the prompt cache can't be written ({error}): it stays in memory")
            return disk.rest_s
        return PAUSE_S if more else None

    def _write_next(self, disk: DiskStore, keep: int | None, leaf: Node[CachedRun]) -> bool:
        """Begin to write the first segment on the path to ``leaf`` that is not stored; return whether there may be more to do."""
        ends, ids = self._segment_ends(leaf), leaf.ids()
        for start, stop, parent, name in disk.parts(ids, list(ends), keep):
            node, tokens = ends[stop], ids[start:stop]
            if disk.has(name):
                if node is not None:
                    node.value.stored = True
                continue
            states = None if node is None else node.value.states
            if node is not None and states is None:  # its file is gone, its state evicted: none can end here
                node.value.stored = False
                return True
            if name in self._written:
                continue
            self._written.add(name)
            segment = to_host(start, tokens, self._cut(leaf, start, stop), states)
            if not self.rates.is_worth(segment.nbytes, len(tokens) if node is None else stop):
                return False
            disk.write(segment, parent, name)
            if node is None:
                self._replaced = parent, tokens
            return True
        return False

    def _segment_ends(self, leaf: Node[CachedRun]) -> dict[int, Node[CachedRun] | None]:
        """Return where the segments of a path end, with the nodes whose states they hold, if some can't be sliced."""
        if leaf.stop < LEAST_TOKENS:
            return {}
        if not self.needs_checkpoints:
            whole = list(range(BLOCK, leaf.stop + 1, BLOCK))
            return dict.fromkeys([*whole, leaf.stop] if leaf.stop - whole[-1] >= LEAST_TAIL else whole)
        if self._idle is not None and leaf is self._idle.end:
            self._freeze_end(self._idle)
        ends: dict[int, Node[CachedRun] | None] = {}
        last = LEAST_TOKENS - LEAST_TAIL
        for node in leaf.path():
            if node.value.stored or (node.value.states is not None and node.stop - last >= LEAST_TAIL):
                ends[node.stop] = node
                last = node.stop
        return ends

    def _links(self, ids: list[int], keep: int | None, held: int) -> list[Link]:
        """Return the stored segments that continue the first ``held`` ids, where reading them is worth it."""
        if self._disk is None or len(ids) - 1 - held < LEAST_TAIL:
            return []
        links = self._disk.chain(ids[:-1], keep)
        if links and not links[-1].whole and self.needs_checkpoints:
            links.pop()
        links = [link for link in links if link.stop > held]
        if not links or not self.rates.is_worth(sum(link.entry.size for link in links), links[-1].stop - held):
            return []
        return links

    def restore(
        self,
        lease: CacheLease,
        ids: list[int],
        within_s: Callable[[], float] = lambda: math.inf,
        *,
        awaited: bool = True,
    ) -> Generator[None, None, None]:
        """Append stored segments to a lease, and yield now and then. A damaged or foreign one is a miss."""
        links = self._links(ids, lease.keep, len(lease.ids))
        lease.restoring = ids[: links[-1].stop] if links and awaited else ()
        spent_s, size = 0.0, 0
        try:
            began_s = time.perf_counter()
            for read in self._appended(lease, links, ids):
                size += read
                if (taken_s := time.perf_counter() - began_s) >= within_s():
                    spent_s += taken_s
                    yield
                    began_s = time.perf_counter()
            if size:
                self.rates.saw_read(size, spent_s + time.perf_counter() - began_s)
        finally:
            lease.restoring = ()

    def _appended(self, lease: CacheLease, links: list[Link], ids: list[int]) -> Iterator[int]:
        """Append stored segments to a lease; yield the bytes that were read of each."""
        disk, read = self._disk, list[tuple[Link, Segment]]()
        for number, link in enumerate(links, 1):
            assert disk is not None
            if (segment := disk.load(link, ids)) is None:
                return
            read.append((link, segment))
            # Where some state can't be sliced, only the last segment holds one to continue from.
            if not self.needs_checkpoints or number == len(links):
                for each in read:
                    if not self._append(lease, *each, reserve=links[-1].stop, states=each[0] is links[-1]):
                        return
                read.clear()
            yield link.entry.size

    def _append(self, lease: CacheLease, link: Link, segment: Segment, *, reserve: int, states: bool) -> bool:
        """Append a segment to a lease; return whether that could be done: else the lease is empty now, the segment gone."""
        disk, used = self._disk, self._holding(lease)
        held, begin = used or self._current(), len(lease.ids) - link.start
        assert disk is not None
        try:
            with self._dropping(held):
                snapshot.extend(lease.caches, segment.piece, begin, link.tokens, reserve=reserve)
                if states and self.needs_checkpoints:
                    snapshot.thaw(lease.caches, segment.states or ())
                lease.ids.extend(segment.tokens[begin : link.tokens])
                run = self._follow(held).value
        except (ValueError, TypeError, IndexError, RuntimeError):  # arrays of another model's shapes
            disk.discard(link.entry)
            self._begin_anew(lease, in_use=used is not None)
            return False
        if self.needs_checkpoints:
            run.stored, run.states = True, segment.states
        return True


class OwnCaches(CacheStore):
    """Makes caches that are one reply's own, other than those of the store ``beside`` it; memory is reckoned for both together.

    keeps: as of the other.
    """

    def __init__(self, make: Callable[[int | None], list[Any]], beside: CacheStore) -> None:
        super().__init__(make)
        self.keeps = beside.keeps
        self._beside = beside

    @property
    def leases(self) -> list[CacheLease]:
        """Those of both in use."""
        return self._beside.leases

    def use(self, lease: CacheLease) -> None:
        """Take note that an acquired lease is in use."""
        self._beside.use(lease)

    def release(self, lease: CacheLease, *, failed: bool = False) -> None:
        """Take a lease back; nothing of it is kept."""
        self._beside.release(lease, failed=failed)

    def suspend(self, lease: CacheLease) -> None:
        """Keep a lease's caches as long as nobody needs their memory."""
        self._beside.set_aside(lease)

    def resume(self, lease: CacheLease, ids: list[int]) -> None:  # noqa: ARG002
        """Put a suspended lease in use again, with the caches that it had or with empty ones."""
        self._beside.take_up(lease, self._make)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._beside.nbytes

    @property
    def aside(self) -> int:
        """Bytes of the other beside the leased caches."""
        return self._beside.aside

    def shrink(self, wanted: int) -> int:
        """Evict ``wanted`` of those bytes; return how many were freed."""
        return self._beside.shrink(wanted)

    def drop_idle(self, lease: CacheLease) -> int:
        """Forget live caches that nobody uses; return the bytes freed."""
        return self._beside.drop_idle(lease)


def open_cache(
    spec: PromptCacheSpec | None, runtime: "Runtime", *, folder: Path, name: str, **more: object
) -> CacheStore:
    """Return the prompt cache of the model in ``folder``, called ``name``; one that reuses nothing where ``spec`` is None.

    more: what else, beside files and KV settings, decides what its keys and values look like.
    """
    if spec is None:
        return CacheStore(runtime.new_caches)
    most = spec.memory_bytes

    def budget() -> int:
        return max(LEAST_MEMORY, (runtime.memory_budget or 0) // MEMORY_SHARE) if most is None else most

    def beside(held: int) -> int:
        return 0 if most is not None else _free_beside(runtime, cache, held)

    grow = snapshot.all_grow(runtime.new_caches(0))
    cache = PromptCache(runtime.new_caches, budget, all_grow=grow, beside=beside, operations=runtime.operations)
    if spec.disk:
        stored = Folder(spec.folder or default_root(), Budgets(spec.disk_bytes, spec.daily_write_bytes))

        def identified(weights: str) -> None:
            model = identity(folder, runtime.kv, weights, device=runtime.device, **more)
            cache.use_disk(DiskStore(stored, model.fingerprint, name, cache.rates, identity=model))

        cache.identifying = identify(folder, stored.root, identified)
    return cache


def _free_beside(runtime: "Runtime", cache: PromptCache, held: int) -> int:
    """Return the bytes free, without taking from other programs, beside a conversation of ``held`` tokens that continues.

    Predicts its next chunk of prompt; should less be left when that comes, the memory ladder evicts what is kept beside.
    """
    whole, left = runtime.memory_budget, memory.available()
    if whole is None:
        return 0
    chunk = runtime.chunking.at(held)
    peak = predict_peak(runtime.shape, held=held, new=chunk, chunk=chunk, reply=1).total
    others = max(0, mx.get_active_memory() - runtime.shape.weights - cache.nbytes)
    return (whole if left is None else min(whole, left)) - others - peak


@dataclass(frozen=True, slots=True)
class Check:
    """A stored prefix, computed again. tokens: its length.

    difference: the largest between the logits after it, warm and cold. bound: up to that it is rounding. top_same: whether the
    likeliest token is the same.
    """

    tokens: int
    difference: float
    bound: float
    top_same: bool


def check(runtime: "Runtime", store: CacheStore, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
    """Compute every stored prefix that no other continues again, longest first, and compare the logits after it.

    The store's own caches are left alone.
    """
    for ids, keep in sorted(store.stored(), key=lambda each: -len(each[0])):
        prompt = [*ids, ids[-1]]
        lease = store.anew().acquire(prompt, keep)
        if len(lease.ids) == len(ids):  # else it was damaged, and is gone now
            warm = _logits_after(runtime.model, lease.caches, prompt[len(ids) :], 1, cancelled)
            cold = _logits_after(runtime.model, runtime.new_caches(keep), prompt, runtime.prefill_chunk, cancelled)
            if cancelled():
                return
            yield _compare(len(ids), warm, cold, packed=runtime.kv.quantized)


def _compare(tokens: int, warm: mx.array, cold: mx.array, *, packed: bool) -> Check:
    step = mx.finfo(cold.dtype).eps * float(mx.max(mx.abs(cold)))
    bound = (PACKED_ROUNDING if packed else ROUNDING) + STEPS * step
    difference = float(mx.max(mx.abs(warm.astype(mx.float32) - cold.astype(mx.float32))))
    return Check(tokens, difference, bound, mx.argmax(warm).item() == mx.argmax(cold).item())


def _logits_after(model: Any, caches: list[Any], ids: list[int], chunk: int, cancelled: Callable[[], bool]) -> mx.array:
    """Return the logits (V,) after the last of ``ids``, the others computed in chunks; of nothing when cancelled."""
    last = len(ids) - 1
    for begin in range(0, last, chunk):
        model(mx.array([ids[begin : min(begin + chunk, last)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        if cancelled():
            return mx.zeros(0)
    logits: mx.array = model(mx.array([ids[last:]]), cache=caches)[0, -1]
    mx.eval(logits)
    return logits
