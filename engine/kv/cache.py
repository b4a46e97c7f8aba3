"""One layer's cache, a layout times codecs; and several sequences' caches as the rows of one pass."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import mlx.core as mx

from ..device import device_kind
from ..model.config import unbounded
from .attention import AttendingCache, Scoring, StandInMask, flat, forced, fused, stepwise
from .costs import SHORT_STEP, STEP, multiplies_packed
from .layout import Codec, CompressedCache, Encoded, Growing, Layout, Mask, Plain, Ring, ShiftedSpan, Slots, Span
from .rotary import Pinned, Rotation

# Prefill attends to decoded slots plus this call's tokens, encoded and decoded, by position: logits don't
# depend on how a prompt is cut. Decode multiplies packed data in place. Rotated keys stay rotated where only
# ``attend`` reads them. A ring's pinned keys are re-encoded from the originals when they move (rotary.py).
# Growing caches can share a read-only prefix (``share_prefix``, ``begin_with``): attended together with their
# own slots, under one softmax.


# On Metal, all slots are decoded if the unused ones are at most a quarter of those in use, and the result is cut: MLX's
# kernel would copy words, scales and biases that were cut (mlx/backend/metal/quantized.cpp, `ensure_row_contiguous`),
# 28 % of the decoded bytes at 4 bits. A store grows by a sixteenth, so this is the usual case. On a CPU cutting first
# was faster: 8 heads, D 128, 4,000 of 4,096 slots, 4 bits 7.8 ms against 8.5.
SPARE_DECODED = 4


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Encoded keys and values, (B, H, tokens, …) each, of a prefix that several caches share."""

    keys: Encoded
    values: Encoded

    @property
    def tokens(self) -> int:
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeldSlots:
    """Addresses of a cache's arrays, (1, H, capacity, …) each, for direct access until they move."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    capacity: int
    prefix: tuple[SharedPrefix, ...]


class Cache(AttendingCache):
    """Keys and values of one layer, with the interface of mlx-lm's caches.

    Args:
        direct: All attention to this cache goes through ``attend``, so a decode step need not decode.
        shared: Other layers reuse the same keys and values (``keys_and_values``).
        own_mask: The model's one mask serves layers of other windows, so the cache makes its own.
        rotation: Moves pinned keys along with the window; None leaves them.
    """

    def __init__(
        self,
        layout: Layout,
        key_codec: Codec,
        value_codec: Codec,
        *,
        direct: bool = True,
        shared: bool = False,
        own_mask: bool = False,
        rotation: Rotation | None = None,
    ) -> None:
        self.layout = layout
        self.key_codec = key_codec
        self.value_codec = value_codec
        self._packable = direct and (key_codec.packed or value_codec.packed)
        self._rotatable = direct and (key_codec.block is not None or value_codec.block is not None)
        self._direct, self._shared, self._own_mask = direct, shared, own_mask
        self._keys, self._values = Slots(layout.limit), Slots(layout.limit)
        self.prefix: tuple[SharedPrefix, ...] = ()
        self._prefix_tokens = 0
        self._held: HeldSlots | None = None
        self._pinned: Pinned | None = None
        if rotation is not None and isinstance(layout, Ring) and layout.keep:
            self._pinned = Pinned(layout, rotation)
        self._plain = isinstance(layout, Growing) and not (key_codec.packed or value_codec.packed or shared or own_mask)
        self.offset: int = 0
        self._high = 0  # the most tokens ever held: what lies above the offset was trimmed
        # Of the last call:
        self._last = 0  # its tokens
        self._in_slots = False  # whether it decoded nothing: attend reads the slots
        self._rotated = False  # whether it returned keys and values as the codecs rotated them
        self._fetched: tuple[mx.array, mx.array] | None = None  # what it returned, where layers share it
        self._parts: list[ShiftedSpan] = []  # where not all its tokens see the pinned ones as they were returned

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """Return the mask of the next N tokens: (N, T) of bool, "causal", or None."""
        return self.layout.mask(self.offset, N, reach=window_size, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys (B, H, N, D), values (B, H, N, E); return what to attend to, (B, H, T, ·), or the arguments."""
        if not self._plain or self.prefix:
            return self._append(keys, values)
        # Where nothing but slots is to be found, a step makes no call more than mlx-lm's own cache does.
        start, count, own, others = self.offset, keys.shape[2], self._keys, self._values
        stop = start + count
        if stop > own.capacity:
            own.grow((keys,), stop)
            others.grow((values,), stop)
        if count == own.capacity:  # what is written over all of an array MLX takes in its place, however it lies
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        self.offset = stop
        (held_keys,), (held_values,) = own.held, others.held
        held_keys[..., start:stop, :], held_values[..., start:stop, :] = keys, values
        own.addresses = others.addresses = None
        self._last, self._in_slots, self.by_kernel = count, False, count == 1 and forced() is None
        self._high = max(self._high, stop)
        if stop == own.capacity:
            return held_keys, held_values
        return held_keys[..., :stop, :], held_values[..., :stop, :]

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, count = self.offset, keys.shape[2]
        self.by_kernel = False
        if self._pinned is not None:
            self._pinned.add(keys, start)
        new = self.key_codec.encode(keys), self.value_codec.encode(values)
        fits = self.layout.fits(start, count)
        whole = new if fits else self._append_to_slots(new, self.layout.used(start))
        spans, used = self._spans(start, count)
        self._keys.write(new[0], spans, used)
        self._values.write(new[1], spans, used)
        self.offset, self._last = start + count, count
        self._high = max(self._high, self.offset)
        self._parts = self._move_pinned(start, after=fits)
        by_parts = self._packable or bool(self.prefix)
        self._in_slots = fits and by_parts and multiplies_packed(count, device_kind()) and not self._parts
        self._rotated = self._rotatable and not self._in_slots
        if self._in_slots:
            fetched = keys, values
        elif fits:
            fetched = (
                self._decode_slots(self.key_codec, (each.keys for each in self.prefix), self._keys, used),
                self._decode_slots(self.value_codec, (each.values for each in self.prefix), self._values, used),
            )
        else:
            fetched = self._decode(self.key_codec, whole[0]), self._decode(self.value_codec, whole[1])
        if self._shared:
            self._fetched = fetched
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self._fetched is None:
            raise RuntimeError("this cache was not planned to be shared: plan_caches must see the model's own calls")
        return self._fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        if self._own_mask or (self.layout.window is not None and not isinstance(mask, mx.array)):
            mask = self.layout.mask(self.offset - self._last, self._last)
        by = Scoring(scale, mask, sinks, softcap)
        if self._in_slots:
            used = self.layout.used(self.offset) - self._prefix_tokens
            stored = [
                *((each.keys, each.values) for each in self.prefix),
                (self._keys.read(used), self._values.read(used)),
            ]
            return stepwise(queries, stored, (self.key_codec, self.value_codec), by)
        if not self._parts:
            return self._attend_decoded(queries, keys, values, by)
        assert isinstance(mask, mx.array)  # something has left the window
        out = [
            self._attend_decoded(
                queries[:, :, part.begin : part.stop],
                self._with_pinned(keys, part.shift),
                values,
                by._replace(mask=mask[..., part.begin : part.stop, :]),
            )
            for part in self._parts
        ]
        return mx.concatenate(out, axis=2)

    def make_slots(self, heads: int, dim: int) -> None:
        if not self._keys.capacity:
            token = mx.zeros((1, heads, 1, dim))
            self._keys.make(self.key_codec.encode(token))
            self._values.make(self.value_codec.encode(token))

    def takes_in_place(self, count: int) -> bool:
        if not self._keys.capacity or not self._direct or self._shared or not self.layout.fits(self.offset, count):
            return False
        if self._pinned is None:
            return True
        ring, start = self._pinned.ring, self.offset
        return start >= ring.keep and ring.shift(start) == ring.shift(start + count - 1) == self._pinned.shift

    def claim(self, count: int) -> tuple[mx.array, ...]:
        used, slot = self._next_slots(count)
        return *self._keys.claim(used, slot), *self._values.claim(used, slot)

    def hold(self, count: int) -> HeldSlots:
        """Count ``count`` tokens as held; return where the caller writes them. Needs ``takes_in_place``."""
        used, slot = self._next_slots(count)
        keys, values = self._keys.in_place(used, slot), self._values.in_place(used, slot)
        self.offset += count
        self._high = max(self._high, self.offset)
        self._fetched = None
        held = self._held
        if held is None or held.keys is not keys or held.values is not values or held.prefix is not self.prefix:
            held = self._held = HeldSlots(keys, values, self._keys.capacity, self.prefix)
        return held

    def _next_slots(self, count: int) -> tuple[int, Callable[[], int]]:
        begin = self.offset - self._prefix_tokens
        return self.layout.used(self.offset + count) - self._prefix_tokens, lambda: self.layout.spans(begin, 1)[0].slot

    @property
    def rewindable(self) -> int:
        return self.layout.rewindable(self.offset, self._high)

    def is_trimmable(self) -> bool:
        return self.rewindable > 0 or self.offset == 0

    def trim(self, n: int) -> int:
        """Drop the last n tokens (at most all); return the count, 0 beyond ``rewindable``."""
        n = min(max(n, 0), self.offset)
        if n > self.rewindable:
            return 0
        self.offset -= n
        if self.offset < self._prefix_tokens:
            self._shorten_prefix()
        self._fetched = None
        if self._pinned is not None:
            self._move_pinned(self.offset, after=True)
        return n

    def copy(self) -> "Cache":
        other = Cache(
            self.layout,
            self.key_codec,
            self.value_codec,
            direct=self._direct,
            shared=self._shared,
            own_mask=self._own_mask,
        )
        other.prefix, other._prefix_tokens = self.prefix, self._prefix_tokens
        other._keys, other._values = self._keys.copy(), self._values.copy()
        other._pinned = None if self._pinned is None else self._pinned.copy()
        other.offset, other._high = self.offset, self._high
        return other

    def restore(self, earlier: "Cache") -> None:
        """Return to the state of a copy ``earlier`` without recomputation."""
        # Prefixes shared since stay shared: all layers of a model begin with the same prefix.
        if self._prefix_tokens > earlier._prefix_tokens:
            self.trim(self.offset - earlier.offset)  # sharing computed what came
            return
        self.prefix, self._prefix_tokens = earlier.prefix, earlier._prefix_tokens
        self._keys.step, self._values.step = earlier._keys.step, earlier._values.step
        self.state = earlier.state

    @property
    def state(self) -> tuple[Encoded, Encoded, Encoded, int, int]:
        """Settable content beyond a shared prefix: key, value and original pinned arrays, offset, high-water mark."""
        pinned = () if self._pinned is None else self._pinned.arrays
        return self._keys.arrays, self._values.arrays, pinned, self.offset, self._high

    @state.setter
    def state(self, state: tuple[Encoded, Encoded, Encoded, int, int]) -> None:
        keys, values, pinned, self.offset, self._high = state
        self._keys.arrays, self._values.arrays = tuple(keys), tuple(values)
        if self._pinned is not None:
            self._pinned.restore(pinned, self.offset)
        self._fetched = None

    @property
    def arrays(self) -> Encoded:
        own = (*self._keys.arrays, *self._values.arrays)
        if not self.prefix:
            return own
        return _join([*((*each.keys, *each.values) for each in self.prefix), *([own] if own else [])])

    @property
    def can_share(self) -> bool:
        return isinstance(self.layout, Growing) and self._direct and not self._shared

    def share_prefix(self, tokens: int) -> tuple[SharedPrefix, ...]:
        """Share the first ``tokens`` for ``begin_with``; return them, or fewer where a prefix ends. Growing layouts."""
        if tokens > self._prefix_tokens:
            at, used = tokens - self._prefix_tokens, self.offset - self._prefix_tokens
            keys, rest_of_keys = self._keys.split(at, used)
            values, rest_of_values = self._values.split(at, used)
            mx.eval(keys, rest_of_keys, values, rest_of_values)  # before anything changes: memory may not suffice
            self._keys.arrays, self._values.arrays = rest_of_keys, rest_of_values
            self.prefix = (*self.prefix, SharedPrefix(keys, values))
            self._prefix_tokens = tokens
            self._keys.step = self._values.step = SHORT_STEP
            return self.prefix
        found: list[SharedPrefix] = []
        for each in self.prefix:
            if tokens < each.tokens:
                break
            found.append(each)
            tokens -= each.tokens
        return tuple(found)

    def begin_with(self, prefix: tuple[SharedPrefix, ...]) -> None:
        if self.offset or self.prefix:
            raise ValueError("only an empty cache can begin with a shared prefix")
        self._keys.arrays = self._values.arrays = ()
        self.prefix, self._prefix_tokens = prefix, sum(each.tokens for each in prefix)
        self._keys.step = self._values.step = SHORT_STEP
        self.offset = self._high = self._prefix_tokens

    def own_prefix(self) -> None:
        if self.prefix:
            width, whole = self.key_codec.width, tuple(map(mx.array, self.arrays))
            self._keys.arrays, self._values.arrays = whole[:width], whole[width:]
            self._keys.step = self._values.step = STEP
            self.prefix, self._prefix_tokens = (), 0

    def append(self, arrays: Encoded, reserve: int = 0) -> None:
        if not arrays:
            return
        width = self.key_codec.width
        start, count = self.offset, arrays[0].shape[2]
        spans, used = self._spans(start, count)
        reserve -= self._prefix_tokens
        self._keys.write(arrays[:width], spans, used, reserve)
        self._values.write(arrays[width:], spans, used, reserve)
        self.offset = start + count
        self._high = max(self._high, self.offset)

    def shrink(self) -> None:
        for slots in (self._keys, self._values):
            slots.shrink(self.offset - self._prefix_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes including unused slots and the whole shared prefix (function ``nbytes`` counts that once)."""
        found = self._keys.nbytes + self._values.nbytes
        if self._pinned is not None:
            found += self._pinned.nbytes
        return found + sum([each.nbytes for each in self.prefix]) if self.prefix else found

    @property
    def slots(self) -> int:
        return self._prefix_tokens + self._keys.capacity

    def size(self) -> int:
        window = self.layout.window
        return self.offset if window is None else min(self.offset, window)

    def empty(self) -> bool:
        return not self._keys.capacity and not self.prefix

    def _spans(self, start: int, count: int) -> tuple[list[Span], int]:
        return self.layout.spans(start - self._prefix_tokens, count), self.layout.used(
            start + count
        ) - self._prefix_tokens

    def _shorten_prefix(self) -> None:
        self._keys.arrays = self._values.arrays = ()
        kept = list(self.prefix)
        while kept and self._prefix_tokens > self.offset:
            last = kept.pop()
            self._prefix_tokens -= last.tokens
            if self._prefix_tokens < self.offset:
                # Handles of its own: what is written then goes to a copy.
                self._keys.arrays, self._values.arrays = (
                    tuple(map(mx.array, last.keys)),
                    tuple(map(mx.array, last.values)),
                )
        self.prefix = tuple(kept)

    def _attend_decoded(self, queries: mx.array, keys: mx.array, values: mx.array, by: Scoring) -> mx.array:
        stay_rotated = self._rotated and queries.shape[1] * queries.shape[2] < keys.shape[1] * keys.shape[2]
        if stay_rotated:
            queries = self.key_codec.rotate(queries)
        elif self._rotated:
            keys, values = self.key_codec.rotate(keys), self.value_codec.rotate(values)
        if by.softcap is None:
            out = fused(queries, keys, values, by, packed=self.key_codec.packed or self.value_codec.packed)
        else:
            out = stepwise(queries, [((keys,), (values,))], (Plain(), Plain()), by)
        return self.value_codec.rotate(out) if stay_rotated else out

    def _move_pinned(self, start: int, *, after: bool) -> list[ShiftedSpan]:
        """Move pinned keys to where the last token sees them; return the parts of the call that see them elsewhere."""
        if self._pinned is None:
            return []
        ring, before = self._pinned.ring, self._pinned.shift
        last = ring.shift(self.offset - 1)
        if last != before:
            self._keys.write(self.key_codec.encode(self._pinned.moved(last)), [self._pinned.span], 0)
            self._pinned.shift = last
        if last == before and ring.shift(start) == last:
            return []  # most steps end here
        parts = ring.parts(start, self.offset - start)
        fetched = last if after else before
        return [] if all(part.shift == fetched for part in parts) else parts

    def _with_pinned(self, keys: mx.array, shift: int) -> mx.array:
        assert self._pinned is not None
        moved = self._decode(self.key_codec, self.key_codec.encode(self._pinned.moved(shift)))
        return mx.concatenate([moved, keys[:, :, moved.shape[2] :]], axis=2)

    def _decode_slots(self, codec: Codec, before: Iterable[Encoded], slots: Slots, used: int) -> mx.array:
        if self.prefix:
            return self._decode(codec, _join([*before, slots.read(used)]))
        if codec.packed and 0 < slots.capacity - used <= used // SPARE_DECODED and device_kind() == "metal":
            return self._decode(codec, slots.arrays)[..., :used, :]
        return self._decode(codec, slots.read(used))

    def _decode(self, codec: Codec, encoded: Encoded) -> mx.array:
        return codec.unpack(encoded) if self._rotated else codec.decode(encoded)

    def _append_to_slots(self, new: tuple[Encoded, Encoded], used: int) -> tuple[Encoded, Encoded]:
        if not used:
            return new
        keys, values = (
            tuple(mx.concatenate(list(pair), axis=2) for pair in zip(slots.read(used), part, strict=True))
            for slots, part in zip((self._keys, self._values), new, strict=True)
        )
        return keys, values


def _join(parts: Sequence[Encoded]) -> Encoded:
    if len(parts) == 1:
        return parts[0]
    return tuple([mx.concatenate(list(arrays), axis=2) for arrays in zip(*parts, strict=True)])


def rewindable(caches: list[Any]) -> int:
    return min(map(_rewindable, flat(caches)), default=0)


def _rewindable(cache: Any) -> int:
    from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    if isinstance(cache, Cache | CompressedCache):
        return cache.rewindable
    if isinstance(cache, KVCache | QuantizedKVCache | ConcatenateKVCache):
        return int(cache.offset)
    if isinstance(cache, RotatingKVCache):
        return int(cache.offset) if cache.offset < cache.max_size else 0
    if isinstance(cache, ChunkedKVCache):
        return int(cache.offset - cache.start_position)
    return 0  # recurrent state and unknown kinds can't be trimmed


def nbytes(caches: list[Any]) -> int:
    found, shared = 0, list[SharedPrefix]()
    for cache in flat(caches):
        found += int(cache.nbytes)
        if isinstance(cache, Cache):
            shared += cache.prefix
    twice = {id(each): each for each in shared}
    return found - sum([each.nbytes for each in shared]) + sum([each.nbytes for each in twice.values()])


class GrowthWatcher:
    """Detects cache growth, which copies all content."""

    # One cache represents its layout; mlx-lm's caches are assumed to grow every STEP tokens, as KVCache does.

    def __init__(self, caches: list[Any]) -> None:
        watched: dict[Layout | None, Cache] = {}
        self._others = False
        for cache in flat(caches):
            if isinstance(cache, Cache):
                watched[cache.layout if isinstance(cache.layout, Ring) else None] = cache
            else:
                self._others = True
        self._watched = list(watched.values())
        self._slots = self._count()

    def grew(self) -> bool:
        # Below 1 µs.
        before, self._slots = self._slots, self._count()
        return self._slots > before

    def will_grow(self, held: int) -> bool:
        """Whether the token after ``held`` makes a cache grow."""
        # About 1 µs.
        return (self._others and held % STEP == 0) or any(
            cache.offset >= cache.slots and _may_grow(cache) for cache in self._watched
        )

    def fitting(self, held: int) -> int | None:
        left = [cache.slots - cache.offset for cache in self._watched if _may_grow(cache)]
        return min([*left, -held % STEP] if self._others else left, default=None)

    def _count(self) -> int:
        return sum([cache.slots for cache in self._watched])


def _may_grow(cache: Cache) -> bool:
    limit = cache.layout.limit
    return limit is None or cache.slots < limit


# Embeddings, projections, experts and the head see one batch; positions (B offsets), masks and attention are
# per row. Recurrent states are stacked for the pass. A module that computes its own keys and values (latent
# attention, compressed entries, chunks) is called once per row.


Caches = list[Any]


class RowMasks(StandInMask):
    """The masks of B rows of different lengths. A model that inspects its mask can't be batched."""

    def __init__(self, rows: "_Rows", tokens: int, window: int | None, *, as_array: bool) -> None:
        self._asked, self._tokens, self._window, self._as_array = rows, tokens, window, as_array
        self._made: dict[tuple[int, Layout, int], Mask] = {}

    def row_mask(self, index: int, row: Cache) -> Mask:
        """Return the mask of a row whose cache already holds this call's tokens."""
        start = row.offset - self._tokens
        key = index, row.layout, start
        if key not in self._made:
            self._made[key] = row.layout.mask(start, self._tokens, reach=self._window, as_array=self._as_array)
        return self._made[key]

    def before(self, index: int) -> Mask:
        """Return the mask of a row whose cache doesn't hold this call's tokens yet."""
        row = self._asked.rows[index]
        mask: Mask = row.make_mask(self._tokens, return_array=self._as_array, window_size=self._window)
        return mask

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        return self._asked.batch.given[id(keys)].attend(queries, keys, values, scale=scale, mask=self, sinks=sinks)


class _Rows:
    def __init__(self, rows: Sequence[Any], batch: "_Batch") -> None:
        self.rows = rows
        self.batch = batch

    @property
    def offset(self) -> Any:
        return mx.array([row.offset for row in self.rows], mx.int32)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        return RowMasks(self, N, window_size, as_array=return_array)


class AttendingRows(_Rows, AttendingCache):
    rows: Sequence[Cache]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._fetched = [
            row.update_and_fetch(keys[index : index + 1], values[index : index + 1])
            for index, row in enumerate(self.rows)
        ]
        self._came = keys, values
        self.batch.given[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._came

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,  # noqa: ARG002
        values: mx.array,  # noqa: ARG002
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attend row by row: queries (B, H·R, N, D) → (B, H·R, N, E)."""
        out = []
        for index, (row, fetched) in enumerate(zip(self.rows, self._fetched, strict=True)):
            own = mask.row_mask(index, row) if isinstance(mask, RowMasks) else mask
            part = queries[index : index + 1]
            out.append(row.attend(part, *fetched, scale=scale, mask=own, sinks=sinks, softcap=softcap))
        return mx.concatenate(out, axis=0)


class SplitRows(_Rows):
    def __getitem__(self, part: int) -> "SplitRows":
        return SplitRows([row[part] for row in self.rows], self.batch)


@dataclass(slots=True)
class _Batch:
    stacks: list[tuple[Any, Sequence[Any]]] = field(default_factory=list)
    given: dict[int, AttendingRows] = field(default_factory=dict)

    def joined(self, rows: Sequence[Any]) -> Any:
        from mlx_lm.models.cache import ArraysCache, CacheList

        first = rows[0]
        if isinstance(first, Cache):
            return AttendingRows(rows, self)
        if isinstance(first, ArraysCache):
            return self._stacked(rows)
        if isinstance(first, CacheList):
            parts = [self.joined(each) for each in zip(*(row.caches for row in rows), strict=True)]
            if not any(isinstance(part, SplitRows) for part in parts):
                gather: Any = CacheList
                return gather(*parts)
        return SplitRows(rows, self)

    def _stacked(self, rows: Sequence[Any]) -> Any:
        from mlx_lm.models.cache import ArraysCache

        whole = ArraysCache(len(rows[0].cache))
        for index, states in enumerate(zip(*(row.cache for row in rows), strict=True)):
            known = next((state for state in states if state is not None), None)
            if known is not None:
                empty = mx.zeros((1, *known.shape[1:]), known.dtype)  # as the models take a state that is not there yet
                whole[index] = mx.concatenate([empty if state is None else state for state in states], axis=0)
        self.stacks.append((whole, rows))
        return whole

    def take_apart(self) -> None:
        for whole, rows in self.stacks:
            for index, row in enumerate(rows):
                row.cache = [None if state is None else state[index : index + 1] for state in whole.cache]

    def end(self) -> None:
        """Drop the rows."""
        # They refer to the pass: keys and values would stay until garbage collection.
        self.stacks.clear()
        self.given.clear()


def forward(model: Any, ids: mx.array, lanes: Sequence[Caches]) -> mx.array:
    """Run several sequences' next tokens: ids (B, N) → logits (B, N, V), lazy. lanes: each one's caches."""
    if len(lanes) == 1:
        alone: mx.array = model(ids, cache=lanes[0])
        return alone
    batch = _Batch()
    try:
        logits: mx.array = model(ids, cache=[batch.joined(rows) for rows in zip(*lanes, strict=True)])
        batch.take_apart()
    finally:
        batch.end()
    return logits


def why_alone(model: Any, config: Mapping[str, Any], make: Callable[[], Caches]) -> str:
    """Return why sequences can't be batched, or "". Prepares the modules; builds one lazy pass of two rows."""
    if unbounded(config):
        return "it finds positions by how many keys it is given"
    lanes = [make(), make()]
    try:
        prepare_rows(model, lanes[0])
        for tokens, caches in enumerate(lanes, 1):
            model(mx.zeros((1, tokens), mx.int32), cache=caches)
        logits = forward(model, mx.zeros((2, 1), mx.int32), lanes)
    except Exception as error:  # any model's own code may run here
        return f"its class takes one sequence at a time ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return "" if logits.shape[:2] == (2, 1) else f"its class makes logits of shape {logits.shape} of two sequences"


def prepare_rows(model: Any, caches: Caches) -> None:
    """Let layers with other caches than ours take several sequences, one after another."""
    if any(map(_is_split, caches)):
        install_split(model)


def _is_split(cache: Any) -> bool:
    from mlx_lm.models.cache import ArraysCache, CacheList

    if isinstance(cache, CacheList):
        return any(map(_is_split, cache.caches))
    return not isinstance(cache, Cache | ArraysCache)


_ours: set[Any] = set()  # calls of modules that stand in for mlx-lm's, each with the original as `__wrapped__`


def install_split(model: Any) -> None:
    for layer in model.layers:
        for name, module in layer.named_modules():
            kind = type(module)
            if name and kind.__call__ not in _ours and "cache" in signature(kind.__call__).parameters:
                kind.__call__ = _split_call(kind.__call__)


def _split_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        for split in (*args, *named.values()):
            if isinstance(split, SplitRows):
                break
        else:
            return original(self, *args, **named)
        count = len(split.rows)

        def own(index: int, value: Any) -> Any:
            if isinstance(value, SplitRows):
                return value.rows[index]
            if isinstance(value, RowMasks):
                return value.before(index)
            return value[index : index + 1] if isinstance(value, mx.array) and value.shape[:1] == (count,) else value

        out = [
            original(
                self, *(own(index, each) for each in args), **{name: own(index, each) for name, each in named.items()}
            )
            for index in range(count)
        ]
        return mx.concatenate(out, axis=0)

    _ours.add(call)
    return call
