"""What is computed already, in memory: one set of live caches, and a tree of everything else that was computed before.

The live caches hold the path that was used last, whole and in place, as attention wants it. When another path is wanted, they
are cut back to where the two part: what lies beyond is set aside as pieces of its own in the tree, and the pieces of the other path
are appended. So what two paths share is held once and never copied; switching costs a copy of what differs, at memory speed.

    root ── system prompt ── question ── answer ── question ── answer        live: no pieces, they lie in the live caches
                                    └─── another answer                      set aside: a piece for every cache that grows

State that can't be cut (rings that wrapped, recurrent layers) is frozen as a whole at turn boundaries. A model that has any can
be continued only from there, or as far back as its caches rewind by themselves.

What the prompt cache holds: the caches in use, and what is kept of each run of tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokamac.engine import kv
from tokamac.engine.kv import snapshot
from tokamac.engine.kv.snapshot import Piece, States
from tokamac.engine.prompt_cache.radix_tree import Node, add, common_prefix, divide, find, remove


@dataclass(slots=True)
class CacheLease:
    """Caches and the token ids they hold; ``keep`` is the number of pinned tokens they were made with."""

    ids: list[int]
    caches: list[Any]
    keep: int | None


class Kept:
    """What is kept of a run of tokens. piece: None while it lies in the live caches. states: of what can't be cut, at its end.

    stored: whether a segment on disk ends here. nbytes: of piece and states; known without asking hundreds of arrays.
    """

    __slots__ = ("_piece", "_piece_bytes", "_states", "_states_bytes", "stored")

    def __init__(self, piece: Piece | None = None, states: States | None = None, *, stored: bool = False) -> None:
        self.stored = stored
        self.piece = piece
        self.states = states

    @property
    def piece(self) -> Piece | None:
        """The run's tokens, of all caches that grow."""
        return self._piece

    @piece.setter
    def piece(self, piece: Piece | None) -> None:
        self._piece = piece
        self._piece_bytes = 0 if piece is None else snapshot.piece_bytes(piece)

    @property
    def states(self) -> States | None:
        """What can't be cut, at the run's end."""
        return self._states

    @states.setter
    def states(self, states: States | None) -> None:
        self._states = states
        self._states_bytes = 0 if states is None else snapshot.states_bytes(states)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._piece_bytes + self._states_bytes


LEAST_ASIDE = 8
"""Tokens: fewer are computed again rather than kept, as those at a reply's end that its text, read again, divides otherwise."""


class MemoryStore:
    """Computed prefixes in memory, the live caches and at most ``budget`` bytes in all, as it is when room is made.

    make: empty caches for a number of pinned tokens. all_grow: whether every one of them can be cut.
    beside: bytes that memory has now for another conversation beside a live one of so many tokens: up to that, the one that was
    used last before stays, even beyond the budget. Else two that are larger than it would be computed anew at every switch.
    """

    def __init__(
        self,
        make: Callable[[int | None], list[Any]],
        budget: Callable[[], int],
        *,
        all_grow: bool,
        beside: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.all_grow = all_grow
        self._beside = beside
        self._make = make
        self._budget = budget
        self._roots: dict[int | None, Node[Kept]] = {}  # by pinned tokens: caches of another number are other caches
        self._live: CacheLease | None = None
        self._end: Node[Kept] | None = None  # where the live caches' path ends, as far as the tree knows it
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """Bytes held: the live caches, and all that is set aside."""
        live = kv.nbytes(self._live.caches) if self._live else 0
        return live + self.aside

    @property
    def aside(self) -> int:
        """Bytes held beside the live caches: all that could be let go of."""
        return sum(node.kept.nbytes for node in self._nodes())

    def shrink(self, wanted: int) -> int:
        """Let go of ``wanted`` bytes beside the live caches, what was not used for longest first; return the bytes that went."""
        before = self.nbytes
        self._evict(before - wanted)
        return before - self.nbytes

    def take(self, ids: list[int], keep: int | None) -> CacheLease:
        """Return the live caches, holding the longest known prefix of ``ids`` that can be gone back to."""
        wanted, root = ids[:-1], self._root(keep)
        if self._live is not None and self._live.keep != keep:
            self._put_away()
        position = self._reachable(root, wanted)
        if self._live is None:
            self._live, self._end = CacheLease([], self._make(keep), keep), root
        self._go_to(root, wanted[:position])
        assert self._end is not None
        self._touch(self._end)
        self._evict()
        return self._live

    @contextmanager
    def lending(self, slot: CacheLease) -> Iterator[CacheLease]:
        """Take ``slot`` back when the block ends, or is left early; after a failure nobody knows what its caches hold: drop it."""
        try:
            yield slot
        except GeneratorExit:
            self._put(slot)
            raise
        except BaseException:
            if slot is self._live:
                self._forget_live()
            raise
        self._put(slot)

    def rest(self, slot: CacheLease) -> None:
        """Take ``slot`` back in the middle of its block, and leave it empty: the live caches may be another's until ``adopt``."""
        if slot is not self._live:
            return
        self._put(slot)
        self._live = CacheLease(list(slot.ids), list(slot.caches), slot.keep)
        slot.ids.clear()
        slot.caches.clear()

    def adopt(self, slot: CacheLease) -> None:
        """Let ``slot``, which was empty, be the live caches. Raises RuntimeError where there are none."""
        if self._live is None:
            raise RuntimeError("there are no live caches")
        slot.ids[:], slot.caches[:] = self._live.ids, self._live.caches
        self._live = slot

    def mark(self, slot: CacheLease) -> None:
        """Freeze here what can't be cut, so that a request that begins the same need not begin before this."""
        if not self.all_grow:
            self._follow(slot.ids)
            self._freeze_end()

    def reachable(self, ids: list[int], keep: int | None) -> int:
        """Return how many of the ids are computed and can be gone back to, if all but the last may be."""
        return self._reachable(self._root(keep), ids[:-1])

    @property
    def live(self) -> CacheLease | None:
        """The live caches."""
        return self._live

    @property
    def end(self) -> Node[Kept]:
        """The node where their path ends. Raises RuntimeError where there are none."""
        if self._end is None:
            raise RuntimeError("there are no live caches")
        return self._end

    def ends(self) -> list[tuple[int | None, Node[Kept]]]:
        """Return where the paths end that nothing continues, with their numbers of pinned tokens: the live caches' first, then
        what was used last."""
        found = [
            (keep, node)
            for keep, root in self._roots.items()
            for node in root.subtree()
            if node is not root and not node.children and node is not self._end
        ]
        found.sort(key=lambda each: -each[1].used)
        return found if self._live is None else [(self._live.keep, self.end), *found]

    def cut(self, node: Node[Kept], start: int, stop: int) -> Piece:
        """Return copies of the tokens start…stop on the path to ``node``, wherever they lie: in the live caches or set aside."""
        parts = []
        for each in node.path():
            low, high = max(start, each.start), min(stop, each.stop)
            if low < high and each.kept.piece is not None:
                parts.append(snapshot.part(each.kept.piece, low - each.start, high - each.start))
            elif low < high and self._live is not None:
                parts.append(snapshot.cut(self._live.caches, low, high))
        return snapshot.joined(parts)

    def follow(self, ids: list[int], states: States | None = None) -> Node[Kept]:
        """Be told that the live caches hold ``ids`` now, and what can't be cut of them; return the node at the end."""
        self._follow(ids)
        if states is not None:
            self.end.kept.states = states
        return self.end

    def freeze(self) -> States | None:
        """Return what can't be cut of the live caches, as it is at their end; None where all can."""
        self._freeze_end()
        return self.end.kept.states

    def anew(self) -> "MemoryStore":
        """Return an empty store of the same kind."""
        return MemoryStore(self._make, self._budget, all_grow=self.all_grow, beside=self._beside)

    def restart(self, keep: int | None) -> CacheLease:
        """Drop the live caches, whose content nobody knows, and return empty ones."""
        self._forget_live()
        self._live, self._end = CacheLease([], self._make(keep), keep), self._root(keep)
        return self._live

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._live = self._end = None

    def _root(self, keep: int | None) -> Node[Kept]:
        return self._roots.setdefault(keep, Node([], None, 0, Kept()))

    def _nodes(self) -> Iterator[Node[Kept]]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    def _put(self, slot: CacheLease) -> None:
        if slot is not self._live:
            return  # it rests: what it held was put back then
        self._follow(slot.ids)
        assert self._end is not None
        self._touch(self._end)
        self._evict()

    def _reachable(self, root: Node[Kept], ids: list[int]) -> int:
        """Return the longest known prefix of ``ids`` that can be gone back to."""
        node, matched = find(root, ids)
        live = self._live
        if self.all_grow:
            return matched
        frozen = [each.stop for each in node.path() if each.stop <= matched and each.kept.states is not None]
        best = max(frozen, default=0)
        if live is not None and self._roots.get(live.keep) is root:
            shared = common_prefix(live.ids, ids)
            if shared > best and len(live.ids) - shared <= kv.rewindable(live.caches):
                return shared
        return best

    def _go_to(self, root: Node[Kept], ids: list[int]) -> None:
        """Make the live caches hold ``ids``, all of which the tree knows."""
        live = self._live
        assert live is not None
        if len(live.ids) != len(ids) and live.ids:
            self._freeze_end()
        node = self._boundary(root, ids)
        parted = common_prefix(live.ids, ids)
        surplus = len(live.ids) - parted
        if node.kept.states is None and 0 < surplus <= kv.rewindable(live.caches) and parted == len(ids):
            snapshot.rewind(live.caches, surplus)
            rewound = True
        else:
            rewound = surplus == 0 and parted == len(ids)
        self._set_aside(self._boundary(root, ids[:parted]))
        for each in node.path():
            if each.start >= parted:
                assert each.kept.piece is not None
                snapshot.extend(live.caches, each.kept.piece, room=node.stop)
                each.kept.piece = None
        if not rewound:
            self._thaw(node)
        live.ids[:] = ids
        self._end = node

    def _thaw(self, node: Node[Kept]) -> None:
        """Put back what can't be cut, as it was at the node's end; at the root, as it was when nothing was held."""
        live = self._live
        assert live is not None
        if self.all_grow:
            return
        if node.parent is None:
            live.caches[:] = self._make(live.keep)
        else:
            assert node.kept.states is not None
            snapshot.thaw(live.caches, node.kept.states)

    def _boundary(self, root: Node[Kept], ids: list[int]) -> Node[Kept]:
        """Return the node that ends where ``ids`` end, dividing one if it must be; all of them are in the tree."""
        node, position = find(root, ids)
        assert position == len(ids)
        return node if node.stop == position else self._divide(node, position)

    def _divide(self, node: Node[Kept], at: int) -> Node[Kept]:
        piece, states, stored = node.kept.piece, node.kept.states, node.kept.stored
        if piece is None:
            return divide(node, at, Kept(), Kept(None, states, stored=stored))
        upper, lower = snapshot.split(piece, at - node.start)
        return divide(node, at, Kept(upper), Kept(lower, states, stored=stored))

    def _follow(self, ids: list[int]) -> None:
        """Let the tree know the whole path that the live caches hold; what it had set aside of that is held twice no more."""
        node = self._end
        assert node is not None
        while node.stop < len(ids):
            rest = ids[node.stop :]
            child = node.children.get(rest[0])
            if child is None:
                child = add(node, rest, Kept())
            elif (shared := common_prefix(child.tokens, rest)) < len(child.tokens):
                child = self._divide(child, child.start + shared)
            child.kept.piece = None
            node = child
        self._end = node

    def _freeze_end(self) -> None:
        live, end = self._live, self._end
        assert live is not None
        assert end is not None
        if end.parent is not None and end.kept.states is None and not self.all_grow:
            end.kept.states = snapshot.freeze(live.caches)

    def _set_aside(self, start: Node[Kept]) -> None:
        """Cut the live caches back to the end of ``start``; the tree keeps what they held beyond it."""
        live, end = self._live, self._end
        assert live is not None
        assert end is not None
        beyond = [node for node in end.path() if node.start >= start.stop]
        pieces = snapshot.cut_off(live.caches, [start.stop, *(node.stop for node in beyond)])
        for node, piece in zip(beyond, pieces, strict=True):
            node.kept.piece = piece
        self._end = start
        if not self.all_grow or end.stop - start.stop < LEAST_ASIDE:
            self._prune(end, start, crumbs=end.stop - start.stop < LEAST_ASIDE)

    def _prune(self, leaf: Node[Kept], until: Node[Kept], *, crumbs: bool) -> None:
        """Drop runs at the end of a path from which nothing can be continued, or nothing worth it."""
        while (
            leaf is not until and not leaf.children and leaf.parent is not None and (crumbs or leaf.kept.states is None)
        ):
            parent = leaf.parent
            remove(leaf)
            leaf = parent

    def _put_away(self) -> None:
        """Set all of the live caches aside."""
        live = self._live
        assert live is not None
        self._freeze_end()
        self._set_aside(self._root(live.keep))
        self._live = self._end = None

    def _forget_live(self) -> None:
        """Drop the live caches, and all in the tree that begins with what they alone held."""
        if self._end is not None and (path := self._end.path()):
            remove(path[0])
        self._live = self._end = None

    def _touch(self, node: Node[Kept]) -> None:
        self._uses += 1
        for each in node.path():
            each.used = self._uses

    def _evict(self, budget: int | None = None) -> None:
        """Drop what was not used for longest until all fits the budget, its own or this; the live caches always stay."""
        held = self.nbytes
        surplus = held - (self._budget() if budget is None else budget)
        if surplus > 0 and budget is None:
            surplus = min(surplus, held - self._two())
        while surplus > 0:
            on_path = set(map(id, self._end.path())) if self._end else set()
            nodes = sorted(self._nodes(), key=lambda node: (node.used, -node.start))
            freed = 0
            for node in nodes:
                if surplus - freed <= 0:
                    break
                freed += self._drop(node, live=id(node) in on_path)
            if not freed:
                return
            surplus -= freed

    def _two(self) -> int:
        """Return the bytes of the live caches and of the path that was used last before, where memory has room for both; else 0."""
        live, ends = self._live, self.ends()
        if live is None or len(ends) < 2:
            return 0
        other = sum(node.kept.nbytes for node in ends[1][1].path())
        return kv.nbytes(live.caches) + other if other <= self._beside(len(live.ids)) else 0

    def _drop(self, node: Node[Kept], *, live: bool) -> int:
        """Drop a leaf, or the frozen states of any other node; return the bytes."""
        kept = node.kept
        if not live and not node.children and node.parent is not None:
            freed = kept.nbytes
            remove(node)
            return freed
        before = kept.nbytes
        kept.states = None
        return before - kept.nbytes
