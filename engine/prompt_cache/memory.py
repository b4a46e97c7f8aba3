"""Computed prefixes in memory: live caches in place, and a radix tree of slices and frozen states."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from ..kv import snapshot
from ..kv.cache import nbytes as kv_bytes
from ..kv.cache import rewindable
from ..kv.snapshot import LOCAL, CacheOperations, KVSlice, States
from ..metrics import Rates
from ..perf.memory import give_back_freed
from .misses import ReadPrompt

# Lookups compare whole lists at C speed: well under 1 ms for tens of thousands of tokens.


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Node(Generic[T]):
    """A run of tokens after ``parent``. start: position of its first token. last_used: a counter."""

    tokens: list[int]
    parent: "Node[T] | None"
    start: int
    value: T
    children: dict[int, "Node[T]"] = field(default_factory=dict)
    last_used: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list["Node[T]"]:
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def ids(self) -> list[int]:
        return [token for node in self.path() for token in node.tokens]

    def subtree(self) -> Iterator["Node[T]"]:
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def match_prefix(root: Node[T], ids: list[int]) -> tuple[Node[T], int]:
    """Return the node where the longest known prefix ends (perhaps mid-run) and its length; root, 0 if none."""
    node, at = root, 0
    while at < len(ids) and (child := node.children.get(ids[at])) is not None:
        shared = common_prefix(child.tokens, ids[at : at + len(child.tokens)])
        at += shared
        node = child
        if shared < len(child.tokens):
            break
    return node, at


def insert(parent: Node[T], tokens: list[int], value: T) -> Node[T]:
    if not tokens or tokens[0] in parent.children:
        raise ValueError("a run must begin with a token that no sibling begins with")
    node = Node(tokens, parent, parent.stop, value)
    parent.children[tokens[0]] = node
    return node


def split(node: Node[T], at: int, upper: T, lower: T) -> Node[T]:
    """Split at position ``at`` inside the run; return the new upper node, ``node`` becomes the lower."""
    count = at - node.start
    if not 0 < count < len(node.tokens) or node.parent is None:
        raise ValueError(f"position {at} is not inside the run {node.start}…{node.stop}")
    above = Node(node.tokens[:count], node.parent, node.start, upper, last_used=node.last_used)
    node.parent.children[above.tokens[0]] = above
    node.tokens, node.start, node.value, node.parent = node.tokens[count:], at, lower, above
    above.children[node.tokens[0]] = node
    return above


def remove(node: Node[T]) -> None:
    if node.parent is None:
        raise ValueError("the root can't be removed")
    del node.parent.children[node.tokens[0]]
    node.parent = None


# The live caches hold the last path, whole and in place. For another path they are cut back to the fork: the
# rest moves into the tree as slices, the other path's slices are appended. A shared prefix is held once.
#
# Unsliceable state (wrapped rings, recurrent layers) is frozen at checkpoints. Such a model continues only from
# a checkpoint, or from as far back as its caches rewind.


# Tokens: a shorter branch is computed again rather than kept, such as a reply's last tokens that its text encodes
# differently.
SHORTEST_BRANCH = 8


# Tokens that two conversations in use have in common from which on they are held once: what each adds goes to slots of
# its own.
WORTH_SHARING = 256

LEAST_TAIL = 32  # tokens beyond the last whole block that are worth a file of their own

HOLES = 128 << 20  # bytes evicted from between others that stay: then what is free goes back to the system

WORTH_WAITING = 64  # tokens of a prompt that another reply is reading anyway from which on a reply waits for them


@dataclass(slots=True)
class CacheLease:
    """Caches and the token ids they hold; in use inside a ``with`` block, dropped after a failure.

    keep: pinned tokens. expected_bytes: predicted. own: makes private caches, of which nothing is kept.
    """

    ids: list[int]
    caches: list[Any]
    keep: int | None
    store: "weakref.ref[CacheStore] | None" = None  # weak: a cycle would hold the caches until the next collection
    expected_bytes: int = 0
    coming: Sequence[int] = ()
    restoring: Sequence[int] = ()
    own: Callable[[int | None], list[Any]] | None = None

    def __enter__(self) -> "CacheLease":
        if self.store is not None and (store := self.store()) is not None:
            store.use(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.store is not None and (store := self.store()) is not None:
            store.release(self, failed=kind is not None and not issubclass(kind, GeneratorExit))


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """How much of a prompt is known. tokens: in memory or on disk; disk_bytes: to read for that."""

    tokens: int
    disk_bytes: int


@dataclass(slots=True)
class ByteCount:
    """Running total of a tree's bytes."""

    # Maintained incrementally: trees have thousands of runs, and every request asks.

    total: int = 0


class CachedRun:
    """A run of tokens in the tree. piece: None while the live caches hold it. states: at its end."""

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
        return self._piece

    @piece.setter
    def piece(self, piece: KVSlice | None) -> None:
        before, self._piece = self._piece_bytes, piece
        self._piece_bytes = 0 if piece is None else snapshot.slice_bytes(piece)
        self._count.total += self._piece_bytes - before

    @property
    def states(self) -> States | None:
        return self._states

    @states.setter
    def states(self, states: States | None) -> None:
        before, self._states = self._states_bytes, states
        self._states_bytes = sum(state.nbytes for state in states or ())
        self._count.total += self._states_bytes - before

    @property
    def nbytes(self) -> int:
        return self._piece_bytes + self._states_bytes


@dataclass(slots=True, eq=False)
class Held:
    lease: CacheLease
    end: Node[CachedRun]


class CacheStore:
    """Leases caches with computed prefixes, at most ``budget`` bytes in all; several leases may be in use.

    Args:
        make: Makes empty caches with a number of pinned tokens.
        budget: Returns the bytes allowed, before every eviction. None: caches are private, nothing is kept.
        all_grow: Whether every cache can be sliced.
        least: Bytes allowed whatever ``budget`` returns.
        beside: Returns the bytes free for another conversation beside a live one of the given tokens.

    Attributes:
        rates: Measured speeds of prefill and disk.
        recent: Prompts read of late, newest last.
        keeps: Whether anything is ever reused.
        needs_checkpoints: Whether requests can continue only from checkpoints.
    """

    # Up to ``beside`` the previous conversation stays even beyond the budget: else two large ones would be
    # recomputed at every switch.

    def __init__(
        self,
        make: Callable[[int | None], list[Any]],
        budget: Callable[[], int] | None = None,
        *,
        all_grow: bool = True,
        least: int = 0,
        beside: Callable[[int], int] = lambda _: 0,
        operations: CacheOperations = LOCAL,
    ) -> None:
        self.rates = Rates()
        self.recent: deque[ReadPrompt] = deque()
        self.keeps, self.needs_checkpoints = budget is not None, budget is not None and not all_grow
        self._make, self._budget, self._least, self._beside = make, budget, least, beside
        self._operations = operations
        self._roots: dict[int | None, Node[CachedRun]] = {}  # by pinned tokens: other numbers make other caches
        self._in_tree = ByteCount()
        self._idle: Held | None = None  # the live caches that nobody uses
        self._used: list[Held] = []
        self._own: list[CacheLease] = []  # in use, with caches of their own
        self._set_aside: list[CacheLease] = []  # such ones, suspended until others need the memory
        self._uses = 0
        self._freed = 0  # bytes, since they were given back
        self._written = set[
            str
        ]()  # segments, since the last request, so that a small budget does not cause a cycle of writes

    @property
    def leases(self) -> list[CacheLease]:
        return [*[held.lease for held in self._used], *self._own]

    @property
    def nbytes(self) -> int:
        return self._kept_bytes + sum(kv_bytes(lease.caches) for lease in (*self._own, *self._set_aside))

    @property
    def _kept_bytes(self) -> int:
        return kv_bytes([cache for held in self._held for cache in held.lease.caches]) + self.aside

    @property
    def aside(self) -> int:
        return self._in_tree.total

    def acquire(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return caches with the longest known prefix of ``ids``, at most all but the last; use in ``with``."""
        lease = self.lend(ids, keep)
        for _ in self.restore(lease, ids):
            pass
        return lease

    def lend(
        self, ids: list[int], keep: int | None, own: Callable[[int | None], list[Any]] | None = None
    ) -> CacheLease:
        """Return the live caches, cut to the longest prefix of ``ids`` in memory; own: makes private ones."""
        if not self.keeps or own is not None:
            own = own or self._make
            return CacheLease([], own(keep), keep, weakref.ref(self), own=own)
        self._written.clear()
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

    def restore(
        self,
        lease: CacheLease,
        ids: list[int],
        within_s: Callable[[], float] = lambda: math.inf,
        *,
        awaited: bool = True,
    ) -> Generator[None, None, None]:
        """Read from disk what a lease in use lacks of ``ids``, but the last; yields every ``within_s()`` seconds."""
        if lease.own is None and len(ids) - 1 - len(lease.ids) >= LEAST_TAIL:
            yield from self._read_stored(lease, ids, within_s, awaited=awaited)

    def _read_stored(
        self,
        lease: CacheLease,  # noqa: ARG002
        ids: list[int],  # noqa: ARG002
        within_s: Callable[[], float],  # noqa: ARG002
        *,
        awaited: bool,  # noqa: ARG002
    ) -> Generator[None, None, None]:
        yield from ()

    def use(self, lease: CacheLease) -> None:
        if lease.own is not None:
            if not any(each is lease for each in self._own):
                self._own.append(lease)
        elif self._idle is not None and self._idle.lease is lease:
            self._used.append(self._idle)
            self._idle = None

    def release(self, lease: CacheLease, *, failed: bool = False) -> None:
        """Take a lease back, dropping its caches after a failure; a suspended one is ignored."""
        if lease.own is not None:
            self._own = [each for each in self._own if each is not lease]
            self._set_aside = [each for each in self._set_aside if each is not lease]
            return
        held = self._holding(lease)
        if held is None:
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
        """Take back a lease in use until ``resume``: others may use its caches, or its memory."""
        if lease.own is not None:
            self.release(lease)
            self._set_aside.append(lease)
        elif (held := self._holding(lease)) is not None:
            self.release(lease)
            held.lease = CacheLease(list(lease.ids), list(lease.caches), lease.keep, weakref.ref(self))
            lease.ids.clear()
            lease.caches.clear()

    def resume(self, lease: CacheLease, ids: list[int]) -> None:
        if lease.own is not None:
            self.release(lease)
            if not lease.caches:
                lease.caches[:] = lease.own(lease.keep)
        else:
            live = self.lend([*ids, 0], lease.keep)  # any last id will do: it is never held
            lease.ids[:], lease.caches[:] = live.ids, live.caches
            self._current().lease = lease
        self.use(lease)

    def is_coming(self, ids: list[int], keep: int | None, but: CacheLease | None = None) -> bool:
        """Return whether another lease in use will soon hold a good part of ``ids``."""
        # With checkpoints only, this is true just for a lease that is read from disk.
        leases = [held.lease for held in self._used if held.lease is not but and held.lease.keep == keep]
        coming = [lease.restoring for lease in leases]
        if not self.needs_checkpoints:
            coming += [lease.coming for lease in leases]
        most = max((common_prefix(each, ids) for each in coming), default=0)
        return most >= WORTH_WAITING and most - CacheStore.known(self, ids, keep).tokens >= WORTH_WAITING

    def drop(self, lease: CacheLease) -> None:
        """Drop a failed lease's caches and all that continues them in the tree; see ``start_over``."""
        if lease.own is None:
            self.release(lease, failed=True)
        lease.expected_bytes = 0
        lease.ids.clear()
        lease.caches.clear()

    def start_over(self, lease: CacheLease, ids: list[int]) -> None:
        self.drop(lease)
        self.resume(lease, ids)

    def checkpoint(self, lease: CacheLease) -> None:
        if self.needs_checkpoints and (held := self._holding(lease)) is not None:
            self._follow(held)
            self._freeze_end(held)

    def known(self, ids: list[int], keep: int | None) -> KnownPrefix:
        if not self.keeps:
            return KnownPrefix(0, 0)
        for held in self._used:
            self._follow(held)
        return KnownPrefix(self._reachable(self._root(keep), ids[:-1]), 0)

    def on_disk(self, ids: list[int], keep: int | None) -> list[int]:  # noqa: ARG002
        """Return the stored tokens that begin most like ``ids``."""
        return []

    @property
    def has_other_settings(self) -> bool:
        """Whether prompts of this model are stored that were computed with other settings."""
        return False

    def shrink(self, wanted: int) -> int:
        before = self._kept_bytes
        self._evict(before - wanted)
        return before - self._kept_bytes

    def drop_idle(self, lease: CacheLease) -> int:
        idle = [each for each in self._set_aside if each is not lease]
        freed = sum(kv_bytes(each.caches) for each in idle)
        for each in idle:
            self.drop(each)
        if (held := self._idle) is not None and held.lease is not lease:
            freed += kv_bytes(held.lease.caches)
            self._drop(held)
        return freed

    def clear(self) -> None:
        self._roots.clear()
        self.recent.clear()
        self._in_tree = ByteCount()
        self._idle = None
        self._used.clear()

    def anew(self) -> Self:
        return type(self)(
            self._make,
            self._budget,
            all_grow=not self.needs_checkpoints,
            least=self._least,
            beside=self._beside,
            operations=self._operations,
        )

    def _root(self, keep: int | None) -> Node[CachedRun]:
        return self._roots.setdefault(keep, Node([], None, 0, CachedRun(self._in_tree)))

    def _nodes(self) -> Iterator[Node[CachedRun]]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    @property
    def _held(self) -> list[Held]:
        return self._used if self._idle is None else [self._idle, *self._used]

    def _holding(self, lease: CacheLease) -> Held | None:
        return next((held for held in self._used if held.lease is lease), None)

    def _live_nodes(self, but: Held | None = None) -> set[int]:
        return {id(node) for held in self._held if held is not but for node in held.end.path()}

    def _leaves(self) -> list[tuple[int | None, Node[CachedRun]]]:
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
        if self._idle is None:
            raise RuntimeError("there are no live caches")
        return self._idle

    def _renew(self, keep: int | None) -> Held:
        self._idle = Held(CacheLease([], self._make(keep), keep, weakref.ref(self)), self._root(keep))
        return self._idle

    def _begin_anew(self, lease: CacheLease, *, in_use: bool) -> None:
        lease.ids.clear()
        lease.caches[:] = self._make(lease.keep)
        held = Held(lease, self._root(lease.keep))
        if in_use:
            self._used.append(held)
        else:
            self._idle = held

    def _retire(self) -> None:
        if (held := self._idle) is not None:
            with self._dropping(held):
                self._freeze_end(held)
                self._cut_back(held, self._root(held.lease.keep))
            self._idle = None

    def _drop(self, held: Held) -> None:
        if held is self._idle:
            self._idle = None
        self._used = [each for each in self._used if each is not held]
        live = self._live_nodes()
        only = [node for node in held.end.path() if id(node) not in live]
        if only and only[0].parent is not None:
            _forget(only[0])

    @contextmanager
    def _dropping(self, held: Held) -> Iterator[None]:
        """Drop live caches where moving them fails (out of memory): their contents are then unknown."""
        try:
            yield
        except BaseException:
            self._drop(held)
            raise

    def _cut(self, node: Node[CachedRun], start: int, stop: int) -> KVSlice:
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
            if shared > best and len(live.ids) - shared <= rewindable(live.caches):
                return shared
        return best

    def _go_to(self, held: Held, root: Node[CachedRun], ids: list[int]) -> None:
        live = held.lease
        if len(live.ids) != len(ids) and live.ids:
            self._freeze_end(held)
        node = self._node_at(root, ids)
        shared = common_prefix(live.ids, ids)
        surplus = len(live.ids) - shared
        self._operations.own_prefixes(live.caches)
        in_place = shared == len(ids) and surplus == 0
        if shared == len(ids) and 0 < surplus <= rewindable(live.caches) and node.value.states is None:
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
        donors = [other for other in self._used if other.lease.keep == held.lease.keep]
        common = [common_prefix(other.lease.ids, ids) for other in donors]
        most = max(common, default=0)
        if most < WORTH_SHARING:
            return 0
        return self._operations.share(donors[common.index(most)].lease.caches, held.lease.caches, most)

    def _node_at(self, root: Node[CachedRun], ids: list[int]) -> Node[CachedRun]:
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
        if self.needs_checkpoints and held.end.parent is not None and held.end.value.states is None:
            held.end.value.states = self._operations.freeze(held.lease.caches)
        return held.end.value.states

    def _cut_back(self, held: Held, start: Node[CachedRun]) -> None:
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
        held = self._kept_bytes
        if budget is None and held <= self._least:
            return
        allowed = self._budget() if budget is None and self._budget is not None else budget or 0
        surplus = held - allowed
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
            self._freed += freed
        if self._freed >= HOLES:
            self._freed = 0
            give_back_freed()

    def _last_two_bytes(self) -> int:
        live, ends = self._idle, self._leaves()
        if live is None or len(ends) < 2:
            return 0
        other = sum(node.value.nbytes for node in ends[1][1].path())
        held = live.lease
        return kv_bytes(held.caches) + other if other <= self._beside(len(held.ids)) else 0

    def _evict_node(self, node: Node[CachedRun], *, live: bool) -> int:
        before = node.value.nbytes
        if not live and not node.children:
            _forget(node)
            return before
        node.value.states = None
        return before - node.value.nbytes


def _forget(node: Node[CachedRun]) -> None:
    for each in node.subtree():
        each.value.piece = each.value.states = None
    remove(node)
