"""Rotary positions of stored keys: how a model rotates them, found by watching it, and rotating them further.

A rotary embedding (https://arxiv.org/abs/2104.09864) multiplies the key at position p by R(p), and R(p + d) = R(d) R(p): so a key
is moved d positions on by rotating it again. All of mlx-lm's embeddings come down to ``mx.fast.rope``, whatever scales, periods
or factors they have; rotating by d more takes what it was called with for exactly the keys that the cache gets. Two lazy passes
are watched, one at position 0 and one far on. An embedding that changes with the length of the context is called differently in
the second, and keys that are changed after their rotation are not what it returned: neither can be moved.

A ring's pinned keys move along with the window. At absolute positions they would be further from the query with every token,
beyond what the model was trained for, however short the window. StreamingLLM (https://arxiv.org/abs/2309.17453) numbers positions
inside the cache instead. Attention depends on differences of positions alone, so moving the pinned keys is enough; where to is
``Ring.shift``. The keys are kept as the model made them, in its own type, beside the slots: the slots hold what is rotated from
them and encoded once, wherever they move. That takes the bytes of a plain key for each pinned token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import mlx.core as mx

from .attention import install_seam
from .codec import Encoded
from .layout import Ring, Slots, Span
from .probe import TOKENS, Path, WatchingCache, map_leaves

FAR = 1 << 20
"""The first position of the second pass: beyond the context of any embedding that changes with it."""

UNKNOWN = "its queries or keys are not as MLX's rotary embedding leaves them"
CHANGING = "its rotary embedding changes with the length of the context"
FAILED = "a pass over the model far from its first position failed"

_one_at_a_time = Lock()


@dataclass(frozen=True, slots=True)
class Rotation:
    """The arguments of ``mx.fast.rope``: rotates ``dims`` of a head, by position × scale ÷ the period of each pair."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    periods: mx.array | None = field(default=None, compare=False)

    def move(self, keys: mx.array, by: int) -> mx.array:
        """Return rotated keys (B, H, T, D) as they would be ``by`` positions further on, each."""
        if by == 0:
            return keys
        batch, heads, count, dim = keys.shape
        alone = keys.reshape(batch, heads * count, 1, dim)  # a row of one token each: all move alike
        moved = mx.fast.rope(
            alone,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=by,
            freqs=self.periods,
        )
        return moved.reshape(keys.shape)

    def is_same(self, other: "Rotation") -> bool:
        """Whether both rotate alike: by the same periods, not by recomputed ones."""
        return self == other and self.periods is other.periods


@dataclass(frozen=True, slots=True)
class KeyPositions:
    """What the position is to the keys of a layer.

    rotation: what moves them; None where they have no position, or can't be moved. trouble: why they can't be, or "".
    """

    rotation: Rotation | None
    trouble: str = ""


class Pinned:
    """The keys of the first ``ring.keep`` tokens, rotated on by ``rotation``. shift: by how many positions, in the ring's slots."""

    def __init__(self, ring: Ring, rotation: Rotation) -> None:
        self.ring, self._rotation = ring, rotation
        self._made = Slots(ring.keep)
        self.shift = 0

    @property
    def arrays(self) -> Encoded:
        """The keys as the model made them (B, H, keep, D); () while there are none."""
        return self._made.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of these keys."""
        return self._made.nbytes

    @property
    def span(self) -> Span:
        """Where they lie among the ring's slots."""
        return Span(0, 0, self.ring.keep)

    def restore(self, arrays: Encoded, held: int) -> None:
        """Continue from these ``arrays``, and slots that were stored with them when ``held`` tokens were."""
        self._made.arrays, self.shift = tuple(arrays), self.ring.shift(held - 1)

    def add(self, keys: mx.array, start: int) -> None:
        """Add those of the keys (B, H, N, D) after ``start`` tokens that are pinned."""
        count = min(keys.shape[2], self.ring.keep - start)
        if count > 0:
            own = mx.contiguous(keys[:, :, :count])  # a view that fills all slots would keep the keys of the whole call
            self._made.write((own,), [Span(0, start, count)], start + count)

    def moved(self, shift: int) -> mx.array:
        """Return all of them (B, H, keep, D), ``shift`` positions further on than the model made them."""
        return self._rotation.move(self._made.arrays[0], shift)

    def copy(self) -> "Pinned":
        """Return another with the same arrays; whichever of the two writes first makes its own copy then."""
        other = Pinned(self.ring, self._rotation)
        other._made, other.shift = self._made.copy(), self.shift
        return other


def key_positions(model: Any, make_caches: Callable[[], list[Any]], paths: frozenset[Path]) -> dict[Path, KeyPositions]:
    """Return what moves the keys of the caches at ``paths``, all that may hold rotated keys. make_caches: of the model's own.

    Runs the model's forward pass twice, lazily.
    """
    try:
        near, far = (_watch(model, make_caches(), paths, ahead) for ahead in (0, FAR))
    except Exception:  # any model's own code may run here; its keys then stay as they are, and the plan says so
        return dict.fromkeys(paths, KeyPositions(None, FAILED))
    rotary = any(each.rotates for each in near.values())
    return {path: _judge(near[path], far[path], rotary=rotary) for path in near}


def _judge(near: "_RotationWatch", far: "_RotationWatch", *, rotary: bool) -> KeyPositions:
    if rotary and not near.rotates and not far.rotates:
        return KeyPositions(None)
    first, second = near.rotation(), far.rotation()
    if first is None or second is None:
        return KeyPositions(None, UNKNOWN)
    return KeyPositions(first) if first.is_same(second) else KeyPositions(None, CHANGING)


def _watch(model: Any, caches: list[Any], paths: frozenset[Path], ahead: int) -> dict[Path, "_RotationWatch"]:
    install_seam()
    watches: dict[Path, _RotationWatch] = {}

    def stand_in(path: Path, cache: Any) -> Any:
        if path not in paths:
            return cache
        watches[path] = _RotationWatch(cache, ropes, ahead)
        return watches[path]

    with _RopeCalls() as ropes:
        model(mx.zeros((1, TOKENS), mx.int32), cache=map_leaves(caches, stand_in))
    return watches


class _RopeCalls:
    """The calls of ``mx.fast.rope`` inside a with block. Another thread's are noted too, and match nothing."""

    def __init__(self) -> None:
        self._calls: list[
            tuple[mx.array, Rotation, Any]
        ] = []  # what came back, how it rotates, the first row's position
        self._counted = 0

    def __enter__(self) -> "_RopeCalls":
        _one_at_a_time.acquire()
        self._rope: Callable[..., mx.array] = mx.fast.rope

        def rope(a: mx.array, dims: int, **given: Any) -> mx.array:
            returned = self._rope(a, dims, **given)
            rotation = Rotation(dims, given["traditional"], given["base"], given["scale"], given.get("freqs"))
            self._calls.append((returned, rotation, given["offset"]))
            return returned

        mx.fast.rope = rope
        return self

    def __exit__(self, *_: object) -> None:
        mx.fast.rope = self._rope
        _one_at_a_time.release()

    def rotation_of(self, x: mx.array, position: int) -> Rotation | None:
        """Return how ``x`` was rotated, if it is what a call at this position returned."""
        for returned, rotation, offset in self._calls:
            if returned is x and isinstance(offset, int) and offset == position:
                return rotation
        return None

    def count_new(self) -> int:
        """Return the number of calls since the last time."""
        before, self._counted = self._counted, len(self._calls)
        return self._counted - before


class _RotationWatch(WatchingCache):
    """Stands in for a cache that holds ``ahead`` tokens, and notes how the keys and queries that it gets were rotated.

    rotates: whether anything was, after the cache before it was attended to.
    """

    def __init__(self, own: Any, ropes: _RopeCalls, ahead: int) -> None:
        super().__init__(own)
        self._ropes, self._ahead = ropes, ahead
        self._rotations: list[Rotation | None] = []
        self.rotates = False

    @property
    def offset(self) -> int:
        return super().offset + self._ahead

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._note_rotation(keys, self.offset)
        return super().update_and_fetch(keys, values)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        self._note_rotation(queries, self.offset - TOKENS)
        return super().attend(queries, keys, values, **options)

    def rotation(self) -> Rotation | None:
        """Return how keys and queries are rotated, if all alike, and none was changed afterwards."""
        first, *others = self._rotations or [None]
        if first is None or not others:
            return None
        return first if all(each is not None and each.is_same(first) for each in others) else None

    def _note_rotation(self, x: mx.array, position: int) -> None:
        self.rotates |= self._ropes.count_new() > 0
        self._rotations.append(self._ropes.rotation_of(x, position))
