"""The prompt cache with a disk: memory first, then stored segments, written in idle time."""

# Growing caches are stored in blocks of 256 tokens, so that common beginnings share files; the next turn
# replaces the shorter last block. Where state can't be sliced, a segment spans checkpoint to checkpoint.

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from ..kv import snapshot
from ..options import PromptCacheSpec
from ..perf import memory
from ..perf.peak_memory import predict_peak
from .disk import DiskStore, Link, Segment, to_bytes, to_host
from .folder import Budgets, Folder, Packet, default_root, identify, identity
from .memory import LEAST_TAIL, CachedRun, CacheLease, CacheStore, KnownPrefix, Node

if TYPE_CHECKING:
    from ..runner import Runner
    from ..runtime import Runtime

BLOCK = 256
LEAST_TOKENS = 256  # a prefix of fewer is computed in a moment
PAUSE_S = 0.02
AWAIT_S = 1.0

# By default the prompt cache may take a tenth of the memory budget, as it is whenever something must go, and
MEMORY_SHARE = 10
LEAST_MEMORY = 64 << 20  # never fewer bytes than these

# Differences of logits that rounding explains: the stored prefix was cut into other chunks. Where keys and values are
# packed, a difference in the last digit may put a number on the next step of its group's scale.
ROUNDING, PACKED_ROUNDING = 1e-3, 0.05
STEPS = 8  # steps of the number type, at the size of the largest logit, that come on top: bfloat16 has few


class PromptCache(CacheStore):
    """A ``CacheStore`` with a disk once ``use_disk`` is called."""

    def __init__(
        self, make: Callable[[int | None], list[Any]], budget: Callable[[], int] | None = None, **more: Any
    ) -> None:
        super().__init__(make, budget, **more)
        self.identifying: Thread | None = None
        self._disk: DiskStore | None = None
        self._replaced: tuple[str, list[int]] | None = None

    def use_disk(self, disk: DiskStore) -> None:
        """Store to, and read from, this disk from now on. Callable from any thread."""
        self._disk = disk

    @property
    def disk(self) -> DiskStore | None:
        if self._disk is None and self.identifying is not None:
            self.identifying.join()
        return self._disk

    @property
    def trouble(self) -> str | None:
        return self._disk.trouble if self._disk else None

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        known = super().known(ids, keep)
        links = self._links(ids, keep, known.tokens)
        return KnownPrefix(links[-1].stop, sum(link.entry.size for link in links)) if links else known

    def on_disk(self, ids: list[int], keep: int | None) -> list[int]:
        return self._disk.nearest(ids, keep) if self._disk else []

    @property
    def has_other_settings(self) -> bool:
        return self._disk is not None and self._disk.has_other_settings

    def anew(self) -> Self:
        other = super().anew()
        if self._disk is not None:
            other.use_disk(self._disk)
        return other

    def stored(self) -> list[tuple[list[int], int | None]]:
        return self._disk.ends() if self._disk else []

    def packets(self) -> Iterator[Packet]:
        disk, held = self.disk, self._current()
        assert disk is not None
        live, end = held.lease, held.end
        ids, states = list(live.ids), self._freeze_end(held)
        bounds = [len(ids)] if self.needs_checkpoints else [*range(BLOCK, len(ids), BLOCK), len(ids)]
        for start, stop, parent, name in disk.parts(ids, bounds, live.keep):
            piece = self._cut(end, start, stop)
            yield Packet(parent, name, to_bytes(to_host(start, ids[start:stop], piece, states)))

    def flush(self, seconds: float) -> None:
        if self._disk is None:
            return
        deadline = time.monotonic() + seconds
        while self.trouble is None and (pause := self.idle()) is not None and time.monotonic() < deadline:
            time.sleep(pause)
        self._disk.wait(max(0.0, deadline - time.monotonic()))

    def idle(self) -> float | None:
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
        if self._disk is None or len(ids) - 1 - held < LEAST_TAIL:
            return []
        links = self._disk.chain(ids[:-1], keep)
        if links and not links[-1].whole and self.needs_checkpoints:
            links.pop()
        links = [link for link in links if link.stop > held]
        if not links or not self.rates.is_worth(sum(link.entry.size for link in links), links[-1].stop - held):
            return []
        return links

    def _read_stored(
        self, lease: CacheLease, ids: list[int], within_s: Callable[[], float], *, awaited: bool
    ) -> Generator[None, None, None]:
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
                self.rates.observe_read(size, spent_s + time.perf_counter() - began_s)
        finally:
            lease.restoring = ()

    def _appended(self, lease: CacheLease, links: list[Link], ids: list[int]) -> Iterator[int]:
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
        """Append a segment to a lease; on failure (False) the lease is empty and the segment removed."""
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


def open_cache(
    spec: PromptCacheSpec | None, runtime: "Runtime", *, folder: Path, name: str, **more: object
) -> PromptCache:
    if spec is None:
        return PromptCache(runtime.new_caches)
    most = spec.memory_bytes

    def budget() -> int:
        return max(LEAST_MEMORY, (runtime.memory_budget or 0) // MEMORY_SHARE) if most is None else most

    def beside(held: int) -> int:
        return 0 if most is not None else _free_beside(runtime, cache, held)

    grow = snapshot.all_grow(runtime.new_caches(0))
    least = LEAST_MEMORY if most is None else most
    cache = PromptCache(
        runtime.new_caches, budget, all_grow=grow, least=least, beside=beside, operations=runtime.operations
    )
    if spec.disk:
        stored = Folder(spec.folder or default_root(), Budgets(spec.disk_bytes, spec.daily_write_bytes))

        def identified(weights: str) -> None:
            model = identity(folder, runtime.kv, weights, device=runtime.device, **more)
            cache.use_disk(DiskStore(stored, model.fingerprint, name, cache.rates, identity=model))

        cache.identifying = identify(folder, stored.root, identified)
    return cache


def _free_beside(runtime: "Runtime", cache: PromptCache, held: int) -> int:
    """Return the bytes free beside a conversation of ``held`` tokens, without memory pressure."""
    # Only its next prompt chunk is predicted; if memory gets short, the memory ladder evicts what is kept.
    whole, left = runtime.memory_budget, memory.available()
    if whole is None:
        return 0
    chunk = runtime.chunking.tokens_at(held)
    peak = predict_peak(runtime.shape, held=held, new=chunk, chunk=chunk, reply=1).total
    others = max(0, mx.get_active_memory() - runtime.shape.weights - cache.nbytes)
    return (whole if left is None else min(whole, left)) - others - peak


@dataclass(frozen=True, slots=True)
class Check:
    """A stored prefix, computed again.

    difference: largest difference of logits, warm against cold. bound: up to that it is rounding.
    """

    tokens: int
    difference: float
    bound: float
    top_same: bool


def check(runner: "Runner", *, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
    runtime, store = runner.runtime, runner.store
    for ids, keep in sorted(store.stored(), key=lambda each: -len(each[0])):
        if min(ids) < 0:  # pictures, of which only their hash is held
            continue
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
    last = len(ids) - 1
    for begin in range(0, last, chunk):
        model(mx.array([ids[begin : min(begin + chunk, last)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        if cancelled():
            return mx.zeros(0)
    logits: mx.array = model(mx.array([ids[last:]]), cache=caches)[0, -1]
    mx.eval(logits)
    return logits
