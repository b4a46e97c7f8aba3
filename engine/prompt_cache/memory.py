"""Where requests get their caches from: computed prefixes in memory, in one set of live caches and a radix tree of all others.

The live caches hold the path that was used last, whole and in place, as attention wants it. For another path they are cut back to
where the two part: what lies beyond moves into the tree as slices, and the slices of the other path are appended. So a shared
prefix is held once and never copied, and a switch copies only what differs, at memory speed.

    root ── system prompt ── question ── answer ── question ── answer        live: no slices, the live caches hold them
                                    └─── another answer                      in the tree: a slice for every cache that grows

State that can't be sliced (rings that wrapped, recurrent layers) is frozen as a whole at checkpoints. A model with such state can
continue only from a checkpoint, or from as far back as its caches rewind by themselves.
"""

import math
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import kv
from ..kv import snapshot
from ..kv.operations import LOCAL, CacheOperations
from ..kv.snapshot import KVSlice, States
from .disk import DiskStore, Rates
from .portable import Packet
from .radix_tree import Node, common_prefix, insert, match_prefix, remove, split

SHORTEST_BRANCH = 8
"""Tokens: a shorter branch is computed again rather than kept, such as a reply's last tokens that its text encodes differently."""


WORTH_SHARING = 256
"""Tokens that two conversations in use have in common from which on they are held once: what each adds goes to slots of its own."""

WORTH_WAITING = 64
"""Tokens of a prompt that another reply is reading anyway from which on a reply waits for them."""


@dataclass(slots=True)
class CacheLease:
    """Caches, the token ids they hold, and the number of pinned tokens they were made with (``keep``).

    In use inside a ``with`` block; at its end the store takes them back, or drops them after a failure. expected_bytes: that they
    will hold, as far as it is predicted. coming: the prompt that is being computed into them; restoring: one that is being read
    from the disk.
    """

    ids: list[int]
    caches: list[Any]
    keep: int | None
    store: "weakref.ref[CacheStore] | None" = None  # weak: a cycle would hold the caches until the next collection
    expected_bytes: int = 0
    coming: Sequence[int] = ()
    restoring: Sequence[int] = ()

    def __enter__(self) -> "CacheLease":
        if self.store is not None and (store := self.store()) is not None:
            store.use(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.store is not None and (store := self.store()) is not None:
            store.release(self, failed=kind is not None and not issubclass(kind, GeneratorExit))


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """How much of a prompt is known. tokens: computed already, in memory or on disk; disk_bytes: to read for that, in bytes."""

    tokens: int
    disk_bytes: int


class CacheStore:
    """Where requests get their caches from, and where these go afterwards. This one reuses nothing.

    Args:
        make: Makes empty caches with a number of pinned tokens.

    Attributes:
        rates: Measured speeds of prefill and disk.
        keeps: Whether anything is ever reused.
        needs_checkpoints: Whether requests can continue only from checkpoints.
    """

    keeps = False
    needs_checkpoints = False

    def __init__(self, make: Callable[[int | None], list[Any]]) -> None:
        self.rates = Rates()
        self._make = make
        self._leases: list[CacheLease] = []
        self._set_aside: list[CacheLease] = []  # suspended, with caches of their own until others need the memory

    @property
    def leases(self) -> list[CacheLease]:
        """Those in use."""
        return self._leases

    def use(self, lease: CacheLease) -> None:
        """Take note that a lease is in use, if it is not yet."""
        if not any(each is lease for each in self._leases):
            self._leases.append(lease)

    def release(self, lease: CacheLease, *, failed: bool = False) -> None:  # noqa: ARG002
        """Take a lease back. failed: nobody knows what its caches hold."""
        self._leases = [each for each in self._leases if each is not lease]
        self._set_aside = [each for each in self._set_aside if each is not lease]

    def acquire(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return caches that hold the longest known prefix of ``ids``, all but the last id at most; empty ones if none is.

        Use them inside ``with lease:``, which gives them back. keep: tokens that they pin.
        """
        lease = self.lend(ids, keep)
        for _ in self.restore(lease, ids):
            pass
        return lease

    def lend(self, ids: list[int], keep: int | None) -> CacheLease:  # noqa: ARG002
        """Return the same as far as it is in memory."""
        return CacheLease([], self._make(keep), keep, weakref.ref(self))

    def restore(
        self,
        lease: CacheLease,  # noqa: ARG002
        ids: list[int],  # noqa: ARG002
        within_s: Callable[[], float] = lambda: math.inf,  # noqa: ARG002
        *,
        awaited: bool = True,  # noqa: ARG002
    ) -> Generator[None, None, None]:
        """Read from the disk what a lease lacks of ``ids``, all but the last, and yield every ``within_s()`` seconds.

        Between two of them the lease must be in use. awaited: others may wait for it rather than read the same.
        """
        yield from ()

    def anew(self) -> "CacheStore":
        """Return a store with the same disk and nothing in memory."""
        return self

    def suspend(self, lease: CacheLease) -> None:
        """Take back a lease in use, for others to use its caches, or their memory, until ``resume``."""
        self.set_aside(lease)

    def resume(self, lease: CacheLease, ids: list[int]) -> None:  # noqa: ARG002
        """Put a suspended lease in use again: it then holds the longest prefix of ``ids`` that is still known."""
        self.take_up(lease, self._make)

    def set_aside(self, lease: CacheLease) -> None:
        """Keep a suspended lease's caches, which are its own, as long as nobody needs their memory."""
        CacheStore.release(self, lease)
        self._set_aside.append(lease)

    def take_up(self, lease: CacheLease, make: Callable[[int | None], list[Any]]) -> None:
        """Put a lease that was set aside in use again; with empty caches where its own are gone."""
        CacheStore.release(self, lease)
        if not lease.caches:
            lease.caches[:] = make(lease.keep)
        CacheStore.use(self, lease)

    def is_coming(
        self,
        ids: list[int],  # noqa: ARG002
        keep: int | None,  # noqa: ARG002
        but: CacheLease | None = None,  # noqa: ARG002
    ) -> bool:
        """Return whether a lease in use, other than ``but``, is about to hold a good part of ``ids`` that is not in memory yet."""
        return False

    def drop(self, lease: CacheLease) -> None:
        """Drop what a lease in use holds, which after a failure nobody knows; only ``start_over`` gives it caches again."""
        lease.expected_bytes = 0
        lease.ids.clear()
        lease.caches.clear()

    def start_over(self, lease: CacheLease, ids: list[int]) -> None:  # noqa: ARG002
        """Drop what a lease in use holds; it then holds the longest known prefix of ``ids``."""
        self.drop(lease)
        lease.caches[:] = self._make(lease.keep)

    def checkpoint(self, lease: CacheLease) -> None:
        """Make the end of what a lease holds a place to continue from."""

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:  # noqa: ARG002
        """Return how much of ``ids`` is in memory or on disk."""
        return KnownPrefix(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those of leased caches included."""
        return self._own_bytes

    @property
    def _own_bytes(self) -> int:
        """Bytes of caches that are a reply's own."""
        return sum(kv.nbytes(lease.caches) for lease in (*self._leases, *self._set_aside))

    @property
    def aside(self) -> int:
        """Bytes in memory beside the leased caches."""
        return 0

    def shrink(self, wanted: int) -> int:  # noqa: ARG002
        """Evict ``wanted`` of those bytes; return how many were freed."""
        return 0

    def drop_idle(self, lease: CacheLease) -> int:
        """Forget live caches that nobody uses, unless they are this lease's; return the bytes freed."""
        idle = [each for each in self._set_aside if each is not lease]
        freed = sum(kv.nbytes(each.caches) for each in idle)
        for each in idle:
            CacheStore.drop(self, each)
        return freed

    def clear(self) -> None:
        """Forget everything in memory."""

    @property
    def disk(self) -> DiskStore | None:
        """The disk; None where there is none."""
        return None

    @property
    def trouble(self) -> str | None:
        """What the user should know about the disk; None while all is well."""
        return None

    def idle(self) -> float | None:
        """Do a little of the work that can wait; return after how many seconds to call again, or None."""
        return None

    def flush(self, seconds: float) -> None:
        """Do all work that can wait, within ``seconds``."""

    def stored(self) -> list[tuple[list[int], int | None]]:
        """Return the prefixes on disk that no other continues, each with the number of tokens its caches pin."""
        return []

    def packets(self) -> Iterator[Packet]:
        """Yield what the last leased caches hold, as segments of the disk in order."""
        return iter(())


@dataclass(slots=True)
class ByteCount:
    """Bytes that the runs of a tree hold: a tree of thousands is asked at every request."""

    total: int = 0


class CachedRun:
    """What the tree holds of a run of tokens. piece: None while the live caches hold it. states: of fixed caches, at its end.

    stored: whether a segment on disk ends here. nbytes: kept up to date, since asking hundreds of arrays takes time; so is
    ``count``, of all runs that are made with it.
    """

    __slots__ = ("_count", "_piece", "_piece_bytes", "_states", "_states_bytes", "stored")

    def __init__(
        self, count: ByteCount, piece: KVSlice | None = None, states: States | None = None, *, stored: bool = False
    ) -> None:
        self._count, self._piece_bytes, self._states_bytes = count, 0, 0
        self.stored = stored
        self.piece = piece
        self.states = states

    @property
    def piece(self) -> KVSlice | None:
        """The tokens of all caches that grow."""
        return self._piece

    @piece.setter
    def piece(self, piece: KVSlice | None) -> None:
        before, self._piece = self._piece_bytes, piece
        self._piece_bytes = 0 if piece is None else snapshot.slice_bytes(piece)
        self._count.total += self._piece_bytes - before

    @property
    def states(self) -> States | None:
        """The states of all other caches, at the run's end."""
        return self._states

    @states.setter
    def states(self, states: States | None) -> None:
        before, self._states = self._states_bytes, states
        self._states_bytes = sum(state.nbytes for state in states or ())
        self._count.total += self._states_bytes - before

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._piece_bytes + self._states_bytes


@dataclass(slots=True, eq=False)
class Held:
    """Live caches, and the node where their path ends, as far as the tree knows it."""

    lease: CacheLease
    end: Node[CachedRun]


class MemoryStore(CacheStore):
    """Computed prefixes in memory: the live caches and the tree, at most ``budget`` bytes in all.

    Several leases may be in use at once. What another begins with that one of them holds, both hold once; a little is copied.

    Args:
        make: Makes empty caches with a number of pinned tokens.
        budget: Returns the bytes that all may take; called before every eviction.
        all_grow: Whether every cache can be sliced.
        beside: Returns the bytes that memory has for another conversation beside a live one of the given tokens. Up to that, the
            one used before stays even beyond the budget: else two larger ones would be computed anew at every switch.
        operations: What is done to caches.
    """

    keeps = True

    def __init__(
        self,
        make: Callable[[int | None], list[Any]],
        budget: Callable[[], int],
        *,
        all_grow: bool,
        beside: Callable[[int], int] = lambda _: 0,
        operations: CacheOperations = LOCAL,
    ) -> None:
        super().__init__(make)
        self._operations = operations
        self.needs_checkpoints = not all_grow
        self._beside = beside
        self._budget = budget
        self._roots: dict[int | None, Node[CachedRun]] = {}  # by pinned tokens: other numbers make other caches
        self._in_tree = ByteCount()
        self._idle: Held | None = None  # the live caches that nobody uses
        self._used: list[Held] = []
        self._uses = 0

    @property
    def leases(self) -> list[CacheLease]:
        """Those in use."""
        return [*(held.lease for held in self._used), *self._leases]

    @property
    def nbytes(self) -> int:
        """Bytes of the live caches and the tree, and of caches that are a reply's own."""
        return self._kept_bytes + self._own_bytes

    @property
    def _kept_bytes(self) -> int:
        return kv.nbytes([cache for held in self._held for cache in held.lease.caches]) + self.aside

    @property
    def aside(self) -> int:
        """Bytes of the tree alone: all that could be evicted."""
        return self._in_tree.total

    def lend(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return the live caches, holding the longest prefix of ``ids`` in memory that they can go back to."""
        for held in self._used:
            self._follow(held)
        wanted, root = ids[:-1], self._root(keep)
        if self._idle is not None and self._idle.lease.keep != keep:
            self._retire()
        position = self._reachable(root, wanted)
        live = self._idle or self._renew(keep)
        with self._dropping(live):
            self._go_to(live, root, wanted[:position])
        self._touch(live.end)
        self._evict()
        return live.lease

    def use(self, lease: CacheLease) -> None:
        """Take note that a lease is in use, if it is not yet: the next goes to other caches."""
        if self._idle is not None and self._idle.lease is lease:
            self._used.append(self._idle)
            self._idle = None
        elif self._holding(lease) is None:
            super().use(lease)  # of ``OwnCaches``

    def release(self, lease: CacheLease, *, failed: bool = False) -> None:
        """Take a lease back; after a failure nobody knows what its caches hold, so they are dropped. A suspended one is ignored."""
        held = self._holding(lease)
        if held is None:
            super().release(lease)
            return
        if failed:
            self._drop(held)
            return
        with self._dropping(held):
            self._follow(held)
        try:
            self._retire()  # while this one still counts as live: what both hold stays in the tree
        finally:
            self._used.remove(held)
            self._idle = held  # what it holds is known, whatever became of the other
        self._touch(held.end)
        self._evict()

    def suspend(self, lease: CacheLease) -> None:
        """Take a lease back in the middle of its block and leave it empty: others may use the live caches until ``resume``."""
        if (held := self._holding(lease)) is not None:
            self.release(lease)
            held.lease = CacheLease(list(lease.ids), list(lease.caches), lease.keep, weakref.ref(self))
            lease.ids.clear()
            lease.caches.clear()

    def resume(self, lease: CacheLease, ids: list[int]) -> None:
        """Give the live caches, filled as ``lend`` fills them, to a suspended lease."""
        live = self.lend([*ids, 0], lease.keep)  # any last id will do: it is never held
        lease.ids[:], lease.caches[:] = live.ids, live.caches
        self._current().lease = lease
        self.use(lease)

    def is_coming(self, ids: list[int], keep: int | None, but: CacheLease | None = None) -> bool:
        """Return whether another lease in use is about to hold a good part of ``ids``.

        Of a model's that needs checkpoints, only one that is read from the disk.
        """
        leases = [held.lease for held in self._used if held.lease is not but and held.lease.keep == keep]
        coming = [lease.restoring for lease in leases]
        if not self.needs_checkpoints:
            coming += [lease.coming for lease in leases]
        most = max((common_prefix(each, ids) for each in coming), default=0)
        return most >= WORTH_WAITING and most - MemoryStore.known(self, ids, keep).tokens >= WORTH_WAITING

    def drop(self, lease: CacheLease) -> None:
        """Drop what a lease in use holds, and all in the tree that continues it."""
        self.release(lease, failed=True)
        super().drop(lease)

    def start_over(self, lease: CacheLease, ids: list[int]) -> None:
        """Drop what a lease in use holds, and fill it again as ``lend`` does."""
        self.drop(lease)
        self.resume(lease, ids)

    def checkpoint(self, lease: CacheLease) -> None:
        """Freeze here what can't be sliced, so that a request with the same beginning can continue from here."""
        if self.needs_checkpoints and (held := self._holding(lease)) is not None:
            self._follow(held)
            self._freeze_end(held)

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        """Return how much of ``ids`` is in memory and can be continued."""
        for held in self._used:
            self._follow(held)
        return KnownPrefix(self._reachable(self._root(keep), ids[:-1]), 0)

    def shrink(self, wanted: int) -> int:
        """Evict ``wanted`` bytes of the tree, least recently used first; return the bytes freed."""
        before = self._kept_bytes
        self._evict(before - wanted)
        return before - self._kept_bytes

    def drop_idle(self, lease: CacheLease) -> int:
        """Forget the live caches that nobody uses, unless they are this lease's; return the bytes freed."""
        freed = super().drop_idle(lease)
        if (held := self._idle) is not None and held.lease is not lease:
            freed += kv.nbytes(held.lease.caches)
            self._drop(held)
        return freed

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._in_tree = ByteCount()
        self._idle = None
        self._used.clear()

    def anew(self) -> CacheStore:
        """Return an empty store of the same kind."""
        return type(self)(
            self._make,
            self._budget,
            all_grow=not self.needs_checkpoints,
            beside=self._beside,
            operations=self._operations,
        )

    def _root(self, keep: int | None) -> Node[CachedRun]:
        return self._roots.setdefault(keep, Node([], None, 0, CachedRun(self._in_tree)))

    def _nodes(self) -> Iterator[Node[CachedRun]]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    @property
    def _held(self) -> list[Held]:
        """All live caches."""
        return self._used if self._idle is None else [self._idle, *self._used]

    def _holding(self, lease: CacheLease) -> Held | None:
        """Return the live caches of a lease in use; None where it is not, or was cleared."""
        return next((held for held in self._used if held.lease is lease), None)

    def _live_nodes(self, but: Held | None = None) -> set[int]:
        """Return the ids of the nodes whose tokens live caches hold, ``but`` aside."""
        return {id(node) for held in self._held if held is not but for node in held.end.path()}

    def _leaves(self) -> list[tuple[int | None, Node[CachedRun]]]:
        """Return the ends of all paths with their numbers of pinned tokens: the live one, then by last use."""
        live = None if self._idle is None else self._idle.end
        found = [
            (keep, node)
            for keep, root in self._roots.items()
            for node in root.subtree()
            if node is not root and not node.children and node is not live
        ]
        found.sort(key=lambda each: -each[1].last_used)
        return found if self._idle is None else [(self._idle.lease.keep, self._idle.end), *found]

    def _current(self) -> Held:
        """Return the live caches that nobody uses."""
        if self._idle is None:
            raise RuntimeError("there are no live caches")
        return self._idle

    def _renew(self, keep: int | None) -> Held:
        self._idle = Held(CacheLease([], self._make(keep), keep, weakref.ref(self)), self._root(keep))
        return self._idle

    def _begin_anew(self, lease: CacheLease, *, in_use: bool) -> None:
        """Give a lease empty caches in place of its live ones, which were dropped."""
        lease.ids.clear()
        lease.caches[:] = self._make(lease.keep)
        held = Held(lease, self._root(lease.keep))
        if in_use:
            self._used.append(held)
        else:
            self._idle = held

    def _retire(self) -> None:
        """Move what the unused live caches hold into the tree."""
        if (held := self._idle) is not None:
            with self._dropping(held):
                self._freeze_end(held)
                self._cut_back(held, self._root(held.lease.keep))
            self._idle = None

    def _drop(self, held: Held) -> None:
        """Forget live caches, and all in the tree that continues what only they held."""
        if held is self._idle:
            self._idle = None
        self._used = [each for each in self._used if each is not held]
        live = self._live_nodes()
        only = [node for node in held.end.path() if id(node) not in live]
        if only and only[0].parent is not None:
            _forget(only[0])

    @contextmanager
    def _dropping(self, held: Held) -> Iterator[None]:
        """Drop live caches where moving them fails, for want of memory say: nobody knows what they hold then."""
        try:
            yield
        except BaseException:
            self._drop(held)
            raise

    def _cut(self, node: Node[CachedRun], start: int, stop: int) -> KVSlice:
        """Return copies of the tokens start…stop on the path to ``node``, from live caches or the tree."""
        parts = []
        for each in node.path():
            low, high = max(start, each.start), min(stop, each.stop)
            if low >= high:
                continue
            if each.value.piece is not None:
                parts.append(self._operations.part(each.value.piece, low - each.start, high - each.start))
            elif (held := self._holder(each)) is not None:
                parts.append(self._operations.cut(held.lease.caches, low, high))
        return self._operations.join(parts)

    def _holder(self, node: Node[CachedRun]) -> Held | None:
        return next((held for held in self._held if any(each is node for each in held.end.path())), None)

    def _reachable(self, root: Node[CachedRun], ids: list[int]) -> int:
        node, matched = match_prefix(root, ids)
        if not self.needs_checkpoints:
            return matched
        checkpoints = [each.stop for each in node.path() if each.stop <= matched and each.value.states is not None]
        best = max(checkpoints, default=0)
        live = None if self._idle is None else self._idle.lease
        if live is not None and self._roots.get(live.keep) is root:
            shared = common_prefix(live.ids, ids)
            if shared > best and len(live.ids) - shared <= kv.rewindable(live.caches):
                return shared
        return best

    def _go_to(self, held: Held, root: Node[CachedRun], ids: list[int]) -> None:
        """Make live caches hold ``ids``, all of which the tree knows."""
        live = held.lease
        if len(live.ids) != len(ids) and live.ids:
            self._freeze_end(held)
        node = self._node_at(root, ids)
        shared = common_prefix(live.ids, ids)
        surplus = len(live.ids) - shared
        self._operations.own_prefixes(live.caches)
        in_place = shared == len(ids) and surplus == 0
        if shared == len(ids) and 0 < surplus <= kv.rewindable(live.caches) and node.value.states is None:
            self._operations.rewind(live.caches, surplus)
            in_place = True
        self._cut_back(held, self._node_at(root, ids[:shared]))
        if not shared and (begun := self._share(held, ids)):
            shared = begun
            self._node_at(root, ids[:shared])
            node = self._node_at(root, ids)
        for each in node.path():
            if each.start < shared:
                continue
            if each.value.piece is None:  # other live caches hold it
                self._operations.extend(live.caches, self._cut(each, each.start, each.stop), reserve=node.stop)
            else:
                self._operations.extend(live.caches, each.value.piece, reserve=node.stop)
                each.value.piece = None
            held.end = each  # at once: should the next fail, the tree has lost what was moved
        if not in_place and self.needs_checkpoints:
            if node.parent is None:
                live.caches[:] = self._make(live.keep)
            else:
                assert node.value.states is not None
                self._operations.thaw(live.caches, node.value.states)
        live.ids[:] = ids
        held.end = node

    def _share(self, held: Held, ids: list[int]) -> int:
        """Have empty live caches begin with what others in use hold of ``ids``; return how many tokens that is."""
        donors = [other for other in self._used if other.lease.keep == held.lease.keep]
        common = [common_prefix(other.lease.ids, ids) for other in donors]
        most = max(common, default=0)
        if most < WORTH_SHARING:
            return 0
        return self._operations.share(donors[common.index(most)].lease.caches, held.lease.caches, most)

    def _node_at(self, root: Node[CachedRun], ids: list[int]) -> Node[CachedRun]:
        """Return the node that ends where ``ids``, which the tree knows, end; splits one where there is none."""
        node, position = match_prefix(root, ids)
        assert position == len(ids)
        return node if node.stop == position else self._split(node, position)

    def _split(self, node: Node[CachedRun], at: int) -> Node[CachedRun]:
        run = node.value
        upper, lower = (None, None) if run.piece is None else self._operations.split(run.piece, at - node.start)
        states, run.piece, run.states = run.states, None, None
        above = CachedRun(self._in_tree, upper)
        return split(node, at, above, CachedRun(self._in_tree, lower, states, stored=run.stored))

    def _follow(self, held: Held) -> Node[CachedRun]:
        """Add live caches' whole path to the tree, without slices of what they hold themselves; return its end."""
        ids = held.lease.ids
        while held.end.stop < len(ids):
            rest = ids[held.end.stop :]
            child = held.end.children.get(rest[0])
            if child is None:
                child = insert(held.end, rest, CachedRun(self._in_tree))
            elif (shared := common_prefix(child.tokens, rest)) < len(child.tokens):
                child = self._split(child, child.start + shared)
            child.value.piece = None
            held.end = child  # at once: should the next fail, nobody else holds what this one holds
        return held.end

    def _freeze_end(self, held: Held) -> States | None:
        """Freeze what can't be sliced of live caches; return the states at their end, None where all can be sliced."""
        if self.needs_checkpoints and held.end.parent is not None and held.end.value.states is None:
            held.end.value.states = self._operations.freeze(held.lease.caches)
        return held.end.value.states

    def _cut_back(self, held: Held, start: Node[CachedRun]) -> None:
        """Cut live caches back to the end of ``start``; the tree keeps what they held beyond it, if that is of use."""
        leaf, elsewhere = held.end, self._live_nodes(held)
        beyond = [node for node in leaf.path() if node.start >= start.stop]
        pieces = self._operations.cut_off(held.lease.caches, [start.stop, *(node.stop for node in beyond)])
        for node, piece in zip(beyond, pieces, strict=True):
            if id(node) not in elsewhere:
                node.value.piece = piece
        held.end = start
        short = leaf.stop - start.stop < SHORTEST_BRANCH
        while leaf is not start and leaf.parent is not None and not leaf.children and id(leaf) not in elsewhere:
            if not short and (not self.needs_checkpoints or leaf.value.states is not None):
                return  # a prompt can continue from here
            parent = leaf.parent
            _forget(leaf)
            leaf = parent

    def _touch(self, node: Node[CachedRun]) -> None:
        self._uses += 1
        for each in node.path():
            each.last_used = self._uses

    def _evict(self, budget: int | None = None) -> None:
        """Evict the least recently used until all fits ``budget`` (the store's own by default); the live caches always stay."""
        held = self._kept_bytes
        surplus = held - (self._budget() if budget is None else budget)
        if surplus > 0 and budget is None:
            surplus = min(surplus, held - self._last_two_bytes())
        while surplus > 0:
            live = self._live_nodes()
            freed = 0
            for node in sorted(self._nodes(), key=lambda node: (node.last_used, -node.start)):
                if surplus <= freed:
                    break
                freed += self._evict_node(node, live=id(node) in live)
            if not freed:
                return
            surplus -= freed

    def _last_two_bytes(self) -> int:
        """Return the bytes of the live caches and of the path used before, where memory has room for both; else 0."""
        live, ends = self._idle, self._leaves()
        if live is None or len(ends) < 2:
            return 0
        other = sum(node.value.nbytes for node in ends[1][1].path())
        held = live.lease
        return kv.nbytes(held.caches) + other if other <= self._beside(len(held.ids)) else 0

    def _evict_node(self, node: Node[CachedRun], *, live: bool) -> int:
        """Remove a leaf, or only the frozen states of any other node; return the bytes freed."""
        before = node.value.nbytes
        if not live and not node.children:
            _forget(node)
            return before
        node.value.states = None
        return before - node.value.nbytes


def _forget(node: Node[CachedRun]) -> None:
    """Remove a node and all below it, and what they hold."""
    for each in node.subtree():
        each.value.piece = each.value.states = None
    remove(node)
