"""Where requests get their caches from: computed prefixes in memory, in one set of live caches and a radix tree of all others.

The live caches hold the path that was used last, whole and in place, as attention wants it. For another path they are cut back to
where the two part: what lies beyond moves into the tree as slices, and the slices of the other path are appended. So a shared
prefix is held once and never copied, and a switch copies only what differs, at memory speed.

    root ── system prompt ── question ── answer ── question ── answer        live: no slices, the live caches hold them
                                    └─── another answer                      in the tree: a slice for every cache that grows

State that can't be sliced (rings that wrapped, recurrent layers) is frozen as a whole at checkpoints. A model with such state can
continue only from a checkpoint, or from as far back as its caches rewind by themselves.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import kv
from ..kv import snapshot
from ..kv.snapshot import KVSlice, States
from .disk import DiskStore, Rates
from .portable import Packet
from .radix_tree import Node, common_prefix, insert, match_prefix, remove, split

SHORTEST_BRANCH = 8
"""Tokens: a shorter branch is computed again rather than kept, such as a reply's last tokens that its text encodes differently."""


@dataclass(slots=True)
class CacheLease:
    """Caches, the token ids they hold, and the number of pinned tokens they were made with (``keep``).

    In use inside a ``with`` block; at its end the store takes them back, or drops them after a failure.
    """

    ids: list[int]
    caches: list[Any]
    keep: int | None
    store: "weakref.ref[MemoryStore] | None" = None  # weak: a cycle would hold the caches until the next collection

    def __enter__(self) -> "CacheLease":
        if self.store is not None and (store := self.store()) is not None:
            store.in_use = True
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

    def acquire(self, ids: list[int], keep: int | None) -> CacheLease:  # noqa: ARG002
        """Return caches that hold the longest known prefix of ``ids``, all but the last id at most; empty ones if none is.

        Use them inside ``with lease:``, which gives them back. keep: tokens that they pin.
        """
        return CacheLease([], self._make(keep), keep)

    def anew(self) -> "CacheStore":
        """Return a store with the same disk and nothing in memory."""
        return self

    def suspend(self, lease: CacheLease) -> None:
        """Take back a lease in use, for others to use its caches until ``resume``."""

    def resume(self, lease: CacheLease, ids: list[int]) -> None:
        """Put a suspended lease in use again: it then holds the longest prefix of ``ids`` that is still known."""

    def checkpoint(self, lease: CacheLease) -> None:
        """Make the end of what a lease holds a place to continue from."""

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:  # noqa: ARG002
        """Return how much of ``ids`` ``acquire`` would find."""
        return KnownPrefix(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those of leased caches included."""
        return 0

    @property
    def aside(self) -> int:
        """Bytes in memory beside the leased caches."""
        return 0

    def shrink(self, wanted: int) -> int:  # noqa: ARG002
        """Evict ``wanted`` of those bytes; return how many were freed."""
        return 0

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


class CachedRun:
    """What the tree holds of a run of tokens. piece: None while the live caches hold it. states: of fixed caches, at its end.

    stored: whether a segment on disk ends here. nbytes: kept up to date, since asking hundreds of arrays takes time.
    """

    __slots__ = ("_piece", "_piece_bytes", "_states", "_states_bytes", "stored")

    def __init__(self, piece: KVSlice | None = None, states: States | None = None, *, stored: bool = False) -> None:
        self.stored = stored
        self.piece = piece
        self.states = states

    @property
    def piece(self) -> KVSlice | None:
        """The tokens of all caches that grow."""
        return self._piece

    @piece.setter
    def piece(self, piece: KVSlice | None) -> None:
        self._piece = piece
        self._piece_bytes = 0 if piece is None else snapshot.slice_bytes(piece)

    @property
    def states(self) -> States | None:
        """The states of all other caches, at the run's end."""
        return self._states

    @states.setter
    def states(self, states: States | None) -> None:
        self._states = states
        self._states_bytes = sum(state.nbytes for state in states or ())

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._piece_bytes + self._states_bytes


class MemoryStore(CacheStore):
    """Computed prefixes in memory: the live caches and the tree, at most ``budget`` bytes in all.

    Args:
        make: Makes empty caches with a number of pinned tokens.
        budget: Returns the bytes that all may take; called before every eviction.
        all_grow: Whether every cache can be sliced.
        beside: Returns the bytes that memory has for another conversation beside a live one of the given tokens. Up to that, the
            one used before stays even beyond the budget: else two larger ones would be computed anew at every switch.
    """

    keeps = True

    def __init__(
        self,
        make: Callable[[int | None], list[Any]],
        budget: Callable[[], int],
        *,
        all_grow: bool,
        beside: Callable[[int], int] = lambda _: 0,
    ) -> None:
        super().__init__(make)
        self.needs_checkpoints = not all_grow
        self.in_use = False
        self._beside = beside
        self._budget = budget
        self._roots: dict[int | None, Node[CachedRun]] = {}  # by pinned tokens: other numbers make other caches
        self._live: CacheLease | None = None
        self._end: Node[CachedRun] | None = None  # where the live caches' path ends, as far as the tree knows it
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the live caches and the tree."""
        return (kv.nbytes(self._live.caches) if self._live else 0) + self.aside

    @property
    def aside(self) -> int:
        """Bytes of the tree alone: all that could be evicted."""
        return sum(node.value.nbytes for node in self._nodes())

    def acquire(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return the live caches, holding the longest known prefix of ``ids`` that they can go back to."""
        wanted, root = ids[:-1], self._root(keep)
        if self._live is not None and self._live.keep != keep:
            self._freeze_end()
            self._cut_back(self._root(self._live.keep))
            self._live = self._end = None
        position = self._reachable(root, wanted)
        if self._live is None:
            self._renew(keep)
        self._go_to(root, wanted[:position])
        live, end = self._current()
        self._touch(end)
        self._evict()
        return live

    def release(self, lease: CacheLease, *, failed: bool = False) -> None:
        """Take a lease back; after a failure nobody knows what its caches hold, so they are dropped. A suspended one is ignored."""
        if lease is not self._live:
            return
        self.in_use = False
        if failed:
            self._drop_live()
            return
        self._touch(self._follow(lease.ids))
        self._evict()

    def suspend(self, lease: CacheLease) -> None:
        """Take a lease back in the middle of its block and leave it empty: others may use the live caches until ``resume``."""
        if lease is self._live:
            self.release(lease)
            self._live = CacheLease(list(lease.ids), list(lease.caches), lease.keep, weakref.ref(self))
            lease.ids.clear()
            lease.caches.clear()

    def resume(self, lease: CacheLease, ids: list[int]) -> None:
        """Give the live caches, filled as ``acquire`` fills them, to a suspended lease."""
        live = self.acquire([*ids, 0], lease.keep)  # any last id will do: it is never held
        lease.ids[:], lease.caches[:] = live.ids, live.caches
        self._live, self.in_use = lease, True

    def checkpoint(self, lease: CacheLease) -> None:
        """Freeze here what can't be sliced, so that a request with the same beginning can continue from here."""
        if self.needs_checkpoints:
            self._follow(lease.ids)
            self._freeze_end()

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        """Return how much of ``ids`` is in memory and can be continued."""
        return KnownPrefix(self._reachable(self._root(keep), ids[:-1]), 0)

    def shrink(self, wanted: int) -> int:
        """Evict ``wanted`` bytes of the tree, least recently used first; return the bytes freed."""
        before = self.nbytes
        self._evict(before - wanted)
        return before - self.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._live = self._end = None
        self.in_use = False

    def anew(self) -> CacheStore:
        """Return an empty store of the same kind."""
        return type(self)(self._make, self._budget, all_grow=not self.needs_checkpoints, beside=self._beside)

    def _root(self, keep: int | None) -> Node[CachedRun]:
        return self._roots.setdefault(keep, Node([], None, 0, CachedRun()))

    def _nodes(self) -> Iterator[Node[CachedRun]]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    def _leaves(self) -> list[tuple[int | None, Node[CachedRun]]]:
        """Return the ends of all paths with their numbers of pinned tokens: the live one, then by last use."""
        found = [
            (keep, node)
            for keep, root in self._roots.items()
            for node in root.subtree()
            if node is not root and not node.children and node is not self._end
        ]
        found.sort(key=lambda each: -each[1].last_used)
        return found if self._live is None or self._end is None else [(self._live.keep, self._end), *found]

    def _current(self) -> tuple[CacheLease, Node[CachedRun]]:
        """Return the live caches and the node where their path ends."""
        if self._live is None or self._end is None:
            raise RuntimeError("there are no live caches")
        return self._live, self._end

    def _renew(self, keep: int | None) -> CacheLease:
        self._live, self._end = CacheLease([], self._make(keep), keep, weakref.ref(self)), self._root(keep)
        return self._live

    def _drop_live(self) -> None:
        """Drop the live caches, and all in the tree that continues what only they held."""
        if self._end is not None and (path := self._end.path()):
            remove(path[0])
        self._live = self._end = None

    def _cut(self, node: Node[CachedRun], start: int, stop: int) -> KVSlice:
        """Return copies of the tokens start…stop on the path to ``node``, from the live caches or the tree."""
        parts = []
        for each in node.path():
            low, high = max(start, each.start), min(stop, each.stop)
            if low < high and each.value.piece is not None:
                parts.append(snapshot.part(each.value.piece, low - each.start, high - each.start))
            elif low < high and self._live is not None:
                parts.append(snapshot.cut(self._live.caches, low, high))
        return snapshot.join(parts)

    def _reachable(self, root: Node[CachedRun], ids: list[int]) -> int:
        node, matched = match_prefix(root, ids)
        if not self.needs_checkpoints:
            return matched
        checkpoints = [each.stop for each in node.path() if each.stop <= matched and each.value.states is not None]
        best = max(checkpoints, default=0)
        live = self._live
        if live is not None and self._roots.get(live.keep) is root:
            shared = common_prefix(live.ids, ids)
            if shared > best and len(live.ids) - shared <= kv.rewindable(live.caches):
                return shared
        return best

    def _go_to(self, root: Node[CachedRun], ids: list[int]) -> None:
        """Make the live caches hold ``ids``, all of which the tree knows."""
        live, _ = self._current()
        if len(live.ids) != len(ids) and live.ids:
            self._freeze_end()
        node = self._node_at(root, ids)
        shared = common_prefix(live.ids, ids)
        surplus = len(live.ids) - shared
        in_place = shared == len(ids) and surplus == 0
        if shared == len(ids) and 0 < surplus <= kv.rewindable(live.caches) and node.value.states is None:
            snapshot.rewind(live.caches, surplus)
            in_place = True
        self._cut_back(self._node_at(root, ids[:shared]))
        for each in node.path():
            if each.start >= shared:
                assert each.value.piece is not None
                snapshot.extend(live.caches, each.value.piece, reserve=node.stop)
                each.value.piece = None
        if not in_place and self.needs_checkpoints:
            if node.parent is None:
                live.caches[:] = self._make(live.keep)
            else:
                assert node.value.states is not None
                snapshot.thaw(live.caches, node.value.states)
        live.ids[:] = ids
        self._end = node

    def _node_at(self, root: Node[CachedRun], ids: list[int]) -> Node[CachedRun]:
        """Return the node that ends where ``ids``, which the tree knows, end; splits one where there is none."""
        node, position = match_prefix(root, ids)
        assert position == len(ids)
        return node if node.stop == position else self._split(node, position)

    def _split(self, node: Node[CachedRun], at: int) -> Node[CachedRun]:
        run = node.value
        upper, lower = (None, None) if run.piece is None else snapshot.split(run.piece, at - node.start)
        return split(node, at, CachedRun(upper), CachedRun(lower, run.states, stored=run.stored))

    def _follow(self, ids: list[int]) -> Node[CachedRun]:
        """Add the live caches' whole path to the tree, without slices of what they hold themselves; return its end."""
        _, node = self._current()
        while node.stop < len(ids):
            rest = ids[node.stop :]
            child = node.children.get(rest[0])
            if child is None:
                child = insert(node, rest, CachedRun())
            elif (shared := common_prefix(child.tokens, rest)) < len(child.tokens):
                child = self._split(child, child.start + shared)
            child.value.piece = None
            node = child
        self._end = node
        return node

    def _freeze_end(self) -> States | None:
        """Freeze what can't be sliced of the live caches; return the states at their end, None where all can be sliced."""
        live, end = self._current()
        if self.needs_checkpoints and end.parent is not None and end.value.states is None:
            end.value.states = snapshot.freeze(live.caches)
        return end.value.states

    def _cut_back(self, start: Node[CachedRun]) -> None:
        """Cut the live caches back to the end of ``start``; the tree keeps what they held beyond it, if that is of use."""
        live, leaf = self._current()
        beyond = [node for node in leaf.path() if node.start >= start.stop]
        pieces = snapshot.cut_off(live.caches, [start.stop, *(node.stop for node in beyond)])
        for node, piece in zip(beyond, pieces, strict=True):
            node.value.piece = piece
        self._end = start
        short = leaf.stop - start.stop < SHORTEST_BRANCH
        while leaf is not start and leaf.parent is not None and not leaf.children:
            if not short and (not self.needs_checkpoints or leaf.value.states is not None):
                return  # a prompt can continue from here
            parent = leaf.parent
            remove(leaf)
            leaf = parent

    def _touch(self, node: Node[CachedRun]) -> None:
        self._uses += 1
        for each in node.path():
            each.last_used = self._uses

    def _evict(self, budget: int | None = None) -> None:
        """Evict the least recently used until all fits ``budget`` (the store's own by default); the live caches always stay."""
        held = self.nbytes
        surplus = held - (self._budget() if budget is None else budget)
        if surplus > 0 and budget is None:
            surplus = min(surplus, held - self._last_two_bytes())
        while surplus > 0:
            live = set(map(id, self._end.path())) if self._end else set()
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
        live, ends = self._live, self._leaves()
        if live is None or len(ends) < 2:
            return 0
        other = sum(node.value.nbytes for node in ends[1][1].path())
        return kv.nbytes(live.caches) + other if other <= self._beside(len(live.ids)) else 0

    def _evict_node(self, node: Node[CachedRun], *, live: bool) -> int:
        """Remove a leaf, or only the frozen states of any other node; return the bytes freed."""
        before = node.value.nbytes
        if not live and not node.children:
            remove(node)
            return before
        node.value.states = None
        return before - node.value.nbytes
