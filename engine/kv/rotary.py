"""Rotating pinned keys further as the window moves, and finding out how a model rotates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import mlx.core as mx

from .attention import AttendingCache, Path, Scoring, fused, install_seam, map_leaves, recording
from .layout import Encoded, Mask, Ring, Slots, Span

# It tells, for any architecture, each layer's shapes, whether its attention uses the cache's result unchanged
# (latent or hand-written attention doesn't), and whether other layers share it.


TOKENS = 2  # tokens in the pass: more than one, so that it is built as a prefill is


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer's cache observed.

    through: all attention over its keys used the seam and the returned arrays. direct: other layers' too.
    shared: ``keys_and_values`` was called. reach: the window requested of ``make_mask``.
    """

    heads: int
    key_dim: int
    value_dim: int
    scale_bytes: int
    through: bool
    direct: bool
    shared: bool
    reach: int | None


def _reaching_inside(name: str) -> Any:
    # A model that accesses a watched array is one our caches can't serve.

    def get(self: "WatchingCache") -> Any:
        self._calls["altered"] += 1
        return getattr(self._own, name)

    def put(self: "WatchingCache", value: Any) -> None:
        self._calls["altered"] += 1
        setattr(self._own, name, value)

    return property(get, put)


class WatchingCache(AttendingCache):
    keys, values = _reaching_inside("keys"), _reaching_inside("values")

    def __init__(self, own: Any) -> None:
        self._own = own
        self._fetched: list[tuple[mx.array, mx.array]] = []
        self._calls = {"mine": 0, "altered": 0, "foreign": 0, "again": 0}
        self._reach: int | None = None

    @property
    def offset(self) -> int:
        return int(self._own.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        self._reach = window_size
        mask: Mask = self._own.make_mask(N, return_array=return_array, window_size=window_size)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self._own.update_and_fetch(keys, values)
        self._fetched.append(fetched)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        self._calls["again"] += 1
        return self._fetched[-1]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,  # noqa: ARG002
    ) -> mx.array:
        return fused(queries, keys, values, Scoring(scale, mask, sinks))

    def note(self, keys: mx.array, values: mx.array, cache: Any) -> None:
        ours = any(keys is k and values is v for k, v in self._fetched)
        if cache is self:
            self._calls["mine" if ours else "altered"] += 1
        elif ours:
            self._calls["foreign"] += 1

    def seen(self) -> Seen | None:
        if len(self._fetched) != 1:
            return None
        keys, values = self._fetched[0]
        return Seen(
            heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            scale_bytes=keys.itemsize,
            through=self._calls["mine"] > 0 and not self._calls["altered"],
            direct=not self._calls["foreign"],
            shared=self._calls["again"] > 0,
            reach=self._reach,
        )


def probe(model: Any, caches: list[Any], watched: Callable[[Any], bool]) -> dict[Path, Seen | None]:
    install_seam()
    watching: dict[Path, WatchingCache] = {}

    def stand_in(path: Path, cache: Any) -> Any:
        if not watched(cache):
            return cache
        watching[path] = WatchingCache(cache)
        return watching[path]

    def note(keys: mx.array, values: mx.array, cache: Any) -> None:
        for each in watching.values():
            each.note(keys, values, cache)

    with recording(note):
        model(mx.zeros((1, TOKENS), mx.int32), cache=map_leaves(caches, stand_in))
    return {path: each.seen() for path, each in watching.items()}


# With rotary embeddings (https://arxiv.org/abs/2104.09864) R(p + d) = R(d) R(p), so a key moves by rotating
# it again. All of mlx-lm's go through ``mx.fast.rope``: two lazy passes, at position 0 and far on, record its
# arguments. Embeddings that vary with context length, and keys changed after rotation, can't be moved. A
# ring's pinned keys move with the window, as StreamingLLM (https://arxiv.org/abs/2309.17453) numbers
# positions in the cache, or they would exceed the trained range. The originals are kept beside the slots,
# plain.


FAR = 1 << 20  # the first position of the second pass: beyond the context of any embedding that changes with it

UNKNOWN = "its queries or keys are not as MLX's rotary embedding leaves them"
CHANGING = "its rotary embedding changes with the length of the context"
FAILED = "a pass over the model far from its first position failed"

_one_at_a_time = Lock()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Arguments of ``mx.fast.rope``: ``dims`` of a head, by position × scale ÷ each pair's period."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    periods: mx.array | None = field(default=None, compare=False)

    def move(self, keys: mx.array, by: int) -> mx.array:
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
        return self == other and self.periods is other.periods


@dataclass(frozen=True, slots=True)
class KeyPositions:
    """How positions enter a layer's keys. rotation: None if absent or immovable; trouble: why."""

    rotation: Rotation | None
    trouble: str = ""


class Pinned:
    """Keys of the first ``ring.keep`` tokens. shift: their positions' offset in the ring's slots."""

    def __init__(self, ring: Ring, rotation: Rotation) -> None:
        self.ring, self._rotation = ring, rotation
        self._made = Slots(ring.keep)
        self.shift = 0

    @property
    def arrays(self) -> Encoded:
        """Original keys (B, H, keep, D); () while empty."""
        return self._made.arrays

    @property
    def nbytes(self) -> int:
        return self._made.nbytes

    @property
    def span(self) -> Span:
        return Span(0, 0, self.ring.keep)

    def restore(self, arrays: Encoded, held: int) -> None:
        self._made.arrays, self.shift = tuple(arrays), self.ring.shift(held - 1)

    def add(self, keys: mx.array, start: int) -> None:
        count = min(keys.shape[2], self.ring.keep - start)
        if count > 0:
            own = mx.contiguous(keys[:, :, :count])  # a view that fills all slots would keep the keys of the whole call
            self._made.write((own,), [Span(0, start, count)], start + count)

    def moved(self, shift: int) -> mx.array:
        return self._rotation.move(self._made.arrays[0], shift)

    def copy(self) -> "Pinned":
        other = Pinned(self.ring, self._rotation)
        other._made, other.shift = self._made.copy(), self.shift
        return other


def key_positions(model: Any, make_caches: Callable[[], list[Any]], paths: frozenset[Path]) -> dict[Path, KeyPositions]:
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
        for returned, rotation, offset in self._calls:
            if returned is x and isinstance(offset, int) and offset == position:
                return rotation
        return None

    def count_new(self) -> int:
        before, self._counted = self._counted, len(self._calls)
        return self._counted - before


class _RotationWatch(WatchingCache):
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
        first, *others = self._rotations or [None]
        if first is None or not others:
            return None
        return first if all(each is not None and each.is_same(first) for each in others) else None

    def _note_rotation(self, x: mx.array, position: int) -> None:
        self.rotates |= self._ropes.count_new() > 0
        self._rotations.append(self._ropes.rotation_of(x, position))
