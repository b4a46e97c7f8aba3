"""The prompt cache as requests see it: memory first, then the disk; and the idle work that fills the disk.

What is stored are runs of the live caches. Caches that grow go in blocks of 256 tokens, so that conversations that begin alike
share files, and a shorter last one, which the next turn replaces. Where some state can't be cut, a segment reaches from one place
where it was frozen, the end of a prompt or of a reply, to the next, and holds the state there.

Make the prompt cache of a loaded model from what the caller asked for.

Whether what is stored is what a cold run computes: stored prefixes are computed again, and the logits after them compared.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.kv import snapshot
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import memory
from tokamac.engine.perf.peak_memory import predict_peak
from tokamac.engine.prompt_cache.disk import DiskStore, Link, Rates, Segment, to_bytes, to_host
from tokamac.engine.prompt_cache.folder import Budgets, Folder, default_root, identify, identity
from tokamac.engine.prompt_cache.interface import CacheStore, KnownPrefix, NoCache
from tokamac.engine.prompt_cache.memory import CacheLease, Kept, MemoryStore
from tokamac.engine.prompt_cache.portable import Packet
from tokamac.engine.prompt_cache.radix_tree import Node
from tokamac.engine.runtime import Runtime

if TYPE_CHECKING:
    from tokamac.engine.runtime import Runtime


BLOCK = 256
LEAST_TOKENS = 256
"""A prefix of fewer is computed in a moment."""
LEAST_TAIL = 32
"""Tokens beyond the last whole block that are worth a file of their own."""
PAUSE_S = 0.02
AWAIT_S = 1.0


class PromptCache:
    """Computed prefixes in memory, and on disk where ``disk`` is given.

    identifying: the thread that finds out whose segments are this model's, and then calls ``use_disk``.
    """

    def __init__(self, memory: MemoryStore, disk: DiskStore | None, rates: Rates) -> None:
        self.rates = rates
        self.keeps = True
        self.needs_marks = not memory.all_grow
        self._memory = memory
        self._disk = disk
        self.identifying: Thread | None = None
        self._lent = False
        self._replaced: tuple[str, list[int]] | None = None
        self._written: set[str] = (
            set()
        )  # since the last request: what a small budget drops again is not written in circles

    def use_disk(self, disk: DiskStore) -> None:
        """Store what is computed from now on, and look there for what was. Callable from any thread."""
        self._disk = disk

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self._memory.nbytes

    @property
    def trouble(self) -> str | None:
        """What went wrong with the disk, once something did."""
        return self._disk.trouble if self._disk else None

    @property
    def disk(self) -> DiskStore | None:
        """The disk, waited for where it is not yet known whose segments are this model's."""
        if self._disk is None and self.identifying is not None:
            self.identifying.join()
        return self._disk

    def packets(self, disk: DiskStore) -> Iterator[Packet]:
        """Yield what the live caches hold as segments that follow one another from the beginning, as ``disk`` names them."""
        live, end = self._memory.live, self._memory.end
        assert live is not None
        ids = list(live.ids)
        bounds = [*range(BLOCK, len(ids), BLOCK), len(ids)] if self._memory.all_grow else [len(ids)]
        states = None if self._memory.all_grow else self._memory.freeze()
        names = disk.names(ids, bounds, live.keep)
        for start, stop, parent, name in zip([0, *bounds], bounds, names, names[1:], strict=False):
            piece = self._memory.cut(end, start, stop)
            yield Packet(parent, name, to_bytes(to_host(start, ids[start:stop], piece, states)))

    def take(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return the live caches, filled from memory and then from the disk as far as both know ``ids``."""
        self._written.clear()
        slot = self._memory.take(ids, keep)
        links = self._worth(ids, keep, len(slot.ids))
        return self._restored(slot, links, ids) if links else slot

    @contextmanager
    def lending(self, slot: CacheLease) -> Iterator[CacheLease]:
        """Lend the live caches."""
        self._lent = True
        try:
            with self._memory.lending(slot):
                yield slot
        finally:
            self._lent = False

    def rest(self, slot: CacheLease) -> None:
        """Take the live caches back."""
        self._memory.rest(slot)
        self._lent = False

    def resume(self, slot: CacheLease, ids: list[int]) -> None:
        """Lend them again, filled as ``take`` fills them."""
        self.take([*ids, 0], slot.keep)  # the last id is never held: here it is any
        self._memory.adopt(slot)
        self._lent = True

    def mark(self, slot: CacheLease) -> None:
        """Freeze what can't be cut."""
        self._memory.mark(slot)

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        """Return what is in memory, and what on disk beyond it is worth reading."""
        held = self._memory.reachable(ids, keep)
        links = self._worth(ids, keep, held)
        if not links:
            return KnownPrefix(held, 0)
        return KnownPrefix(links[-1].stop, sum(link.entry.size for link in links))

    @property
    def aside(self) -> int:
        """Bytes in memory beside the caches that are lent."""
        return self._memory.aside

    def shrink(self, wanted: int) -> int:
        """Let go of so many of them; what is on disk stays there."""
        return self._memory.shrink(wanted)

    def clear(self) -> None:
        """Forget what is in memory."""
        self._memory.clear()

    def stored(self) -> list[tuple[list[int], int | None]]:
        """Return the prefixes on disk that no other continues."""
        return self._disk.ends() if self._disk else []

    def anew(self) -> CacheStore:
        """Return a store with the same disk and nothing in memory."""
        return PromptCache(self._memory.anew(), self._disk, Rates())

    def flush(self, seconds: float) -> None:
        """Store what is to be stored, in so many seconds at most."""
        if self._disk is None:
            return
        deadline = time.monotonic() + seconds
        while self.trouble is None and (pause := self.idle()) is not None and time.monotonic() < deadline:
            time.sleep(pause)
        self._disk.wait(max(0.0, deadline - time.monotonic()))

    def idle(self) -> float | None:
        """Begin to write the next segment of what is in memory, if the last is written; return when there may be more to do."""
        disk = self._disk
        if disk is None:
            return AWAIT_S if self.identifying is not None else None
        if self._memory.live is None or self._lent:
            return None
        if disk.is_writing:
            return PAUSE_S
        if disk.trouble is not None:
            if (rest_s := disk.rest_s) > 0:
                return rest_s
            self._written.clear()
        if self._replaced is not None:
            disk.remove_shorter(*self._replaced)
            self._replaced = None
        try:
            begun = any(self._write_next(disk, keep, end) for keep, end in self._memory.ends())
        except (RuntimeError, ValueError) as error:  # MLX has no memory for the copy, say
            disk.fail(f"the prompt cache can't be written ({error}): it stays in memory")
            return disk.rest_s
        return PAUSE_S if begun else None

    def _write_next(self, disk: DiskStore, keep: int | None, end: Node[Kept]) -> bool:
        """Begin to write the first segment on the path to ``end`` that is not stored; return whether there was one."""
        places, ids = self._places(end), end.ids()
        bounds = list(places)
        names = disk.names(ids, bounds, keep)
        for start, stop, parent, name in zip([0, *bounds], bounds, names, names[1:], strict=False):
            if disk.has(name) or name in self._written:
                continue
            self._written.add(name)
            node, tokens = places[stop], ids[start:stop]
            states = node.kept.states if node else None
            segment = to_host(start, tokens, self._memory.cut(end, start, stop), states)
            if not self.rates.is_worth(segment.nbytes, len(tokens) if node is None else stop):
                return False
            disk.write(segment, parent, name)
            if node is None:
                self._replaced = parent, tokens
            else:
                node.kept.stored = True
            return True
        return False

    def _places(self, end: Node[Kept]) -> dict[int, Node[Kept] | None]:
        """Return where the segments of a path end, with the nodes of which states are stored, if some can't be cut."""
        if end.stop < LEAST_TOKENS:
            return {}
        if self._memory.all_grow:
            whole = list(range(BLOCK, end.stop + 1, BLOCK))
            return dict.fromkeys([*whole, end.stop] if end.stop - whole[-1] >= LEAST_TAIL else whole)
        if end is self._memory.end:
            self._memory.freeze()
        places: dict[int, Node[Kept] | None] = {}
        last = LEAST_TOKENS - LEAST_TAIL
        for node in end.path():
            if node.kept.stored or (node.kept.states is not None and node.stop - last >= LEAST_TAIL):
                places[node.stop] = node
                last = node.stop
        return places

    def _worth(self, ids: list[int], keep: int | None, held: int) -> list[Link]:
        """Return the stored segments that continue the ``held`` first ids, if to read them is worth it."""
        if self._disk is None or len(ids) - 1 - held < LEAST_TAIL:
            return []
        links = self._disk.chain(ids[:-1], keep)
        if links and not links[-1].whole and not self._memory.all_grow:
            links.pop()
        links = [link for link in links if link.stop > held]
        if not links or not self.rates.is_worth(sum(link.entry.size for link in links), links[-1].stop - held):
            return []
        return links

    def _restored(self, slot: CacheLease, links: list[Link], ids: list[int]) -> CacheLease:
        """Append stored segments to the live caches. What turns out damaged or foreign is a miss."""
        assert self._disk is not None
        states_wanted = not self._memory.all_grow
        loaded = self._load(links, ids)
        if states_wanted:
            loaded = iter(list(loaded))  # all, or there is no state to stand on
        taken, began = 0, time.perf_counter()
        for link, segment in loaded:
            last = link is links[-1]
            taken += 1
            try:
                snapshot.extend(
                    slot.caches, segment.piece, len(slot.ids) - link.start, link.tokens, room=links[-1].stop
                )
                if states_wanted and last:
                    snapshot.thaw(slot.caches, segment.states or ())
            except (ValueError, TypeError, IndexError, RuntimeError):  # arrays of another model's shapes
                self._disk.discard(link.entry)
                return self._memory.restart(slot.keep)
            slot.ids.extend(segment.tokens[len(slot.ids) - link.start : link.tokens])
            node = self._memory.follow(list(slot.ids), segment.states if states_wanted else None)
            node.kept.stored = states_wanted
        if states_wanted and taken < len(links):
            return self._memory.restart(slot.keep)
        self.rates.saw_read(sum(link.entry.size for link in links[:taken]), time.perf_counter() - began)
        return slot

    def _load(self, links: list[Link], ids: list[int]) -> Iterator[tuple[Link, Segment]]:
        """Yield what is stored of the links until one of them is a miss."""
        assert self._disk is not None
        disk = self._disk
        for link in links:
            segment = disk.load(link, ids)
            if segment is None:
                return
            yield link, segment


MEMORY_SHARE = 10
"""One part in so many of what may be used is for the prompt cache, as it is whenever room is made in it, and"""
LEAST_MEMORY = 64 << 20
"""never fewer bytes than these."""


def open_cache(
    spec: PromptCacheSpec | None, runtime: Runtime, *, folder: Path, name: str, **more: object
) -> CacheStore:
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

    grow = snapshot.all_grow(runtime.new_caches(0))
    cache = PromptCache(MemoryStore(runtime.new_caches, budget, all_grow=grow, beside=beside), None, rates)
    if spec.disk:
        stored = Folder(spec.folder or default_root(), Budgets(spec.disk_bytes, spec.daily_write_bytes))

        def known(weights: str) -> None:
            model = identity(folder, runtime.kv, weights, device=runtime.device, **more)
            cache.use_disk(DiskStore(stored, model.fingerprint, name, rates, identity=model))

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


ROUNDING, PACKED_ROUNDING = 1e-3, 0.05
"""Differences of logits that rounding explains: what was stored was computed in chunks that ended elsewhere. Where keys and values
are packed, one in the last digit may put a number on the next step of its group's scale."""

STEPS = 8
"""Steps of the number type, at the size of the largest logit, that come on top: bfloat16 has few."""


@dataclass(frozen=True, slots=True)
class Check:
    """A stored prefix of so many tokens, computed again.

    difference: the largest of the logits after it, warm against cold. bound: up to that it is rounding. top_same: whether the
    likeliest token is the same.
    """

    tokens: int
    difference: float
    bound: float
    top_same: bool


def check(runtime: "Runtime", store: CacheStore, cancelled: Callable[[], bool]) -> Generator[Check, None, None]:
    """Yield a check for every stored prefix that no other continues, the longest first. The store's own caches are left alone."""
    for ids, keep in sorted(store.stored(), key=lambda each: -len(each[0])):
        prompt = [*ids, ids[-1]]
        slot = store.anew().take(prompt, keep)
        if len(slot.ids) == len(ids):  # else it was damaged, and is gone now
            warm = _after(runtime.model, slot.caches, prompt[len(ids) :], 1, cancelled)
            cold = _after(runtime.model, runtime.new_caches(keep), prompt, runtime.prefill_chunk, cancelled)
            if cancelled():
                return
            yield _compared(len(ids), warm, cold, packed=runtime.kv.quantized)


def _compared(tokens: int, warm: mx.array, cold: mx.array, *, packed: bool) -> Check:
    step = mx.finfo(cold.dtype).eps * float(mx.max(mx.abs(cold)))
    bound = (PACKED_ROUNDING if packed else ROUNDING) + STEPS * step
    difference = float(mx.max(mx.abs(warm.astype(mx.float32) - cold.astype(mx.float32))))
    return Check(tokens, difference, bound, mx.argmax(warm).item() == mx.argmax(cold).item())


def _after(model: Any, caches: list[Any], ids: list[int], chunk: int, cancelled: Callable[[], bool]) -> mx.array:
    """Return the logits (vocabulary,) after the last of ``ids``, computed in chunks; of an earlier one when cancelled."""
    logits = mx.zeros(0)
    for begin in range(0, len(ids), chunk):
        logits = model(mx.array([ids[begin : begin + chunk]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        if cancelled():
            break
    return logits
