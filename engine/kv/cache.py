"""The one cache class: a layout times a codec for keys times a codec for values.

    update_and_fetch(keys, values)     new tokens are encoded once and written to their slots; what to attend to comes back
    attend(queries, keys, values, …)   called by the seam with what came back
    trim(n)                            take back the last n tokens; ``rewindable`` says how many that may be

A ring's pinned keys are encoded anew, from what the model made, whenever they move along with the window (rotary.py). A call whose
tokens see them in several places attends in as many parts.

Prefill attends to [what the slots held, decoded; this call's tokens, encoded and decoded], by position: so logits do not
depend on how a prompt was cut. A decode step multiplies packed data as it lies. Rotated keys stay rotated where nothing but
``attend`` reads them: then the queries are rotated, unless the keys are fewer.

What the engine does with a whole list of caches, ours and mlx-lm's own: take back, measure, ask where it stands.

Whether caches were made larger, or will be by the next token, which copies all that they hold.

The cache of a layer that sees its last tokens one by one, and older ones through compressed entries (DeepSeek V4).

    recent      the rows of the last tokens: a window, and what rewinding needs
    tails       what each compressor was given of tokens whose groups are not closed, or may be opened again by rewinding
    entries     one row for each closed group of ``ratio`` tokens, of each compressor

A layer without a compressor has the window alone. Nothing that a token adds is lost for ``SPARE`` tokens, so that as many can be
taken back exactly; further back only a state that was kept as a whole leads (snapshot.py).
"""

from typing import Any

import mlx.core as mx

from tokamac.engine.device import device_kind
from tokamac.engine.kv.attention import AttendingCache, Products, fused, stepwise
from tokamac.engine.kv.codec import Codec, Encoded, Plain
from tokamac.engine.kv.layout import STEP, Layout, Mask, Ring, ShiftedSpan, Slots
from tokamac.engine.kv.probe import leaves
from tokamac.engine.kv.rotary import Pinned, Rotation

SPARE = 64
"""Tokens that can always be taken back: what a window of 128 has spare elsewhere (plan.py), too."""
ROWS_STEP = 64
"""Entries by which an array grows, or a sixteenth where that is more."""

Rows = tuple[mx.array, mx.array]


class CompressedCache:
    """Rows of one layer. Its user calls ``slide`` and, for every compressor, ``close`` and ``append``; then ``advance``.

    window: tokens that a query sees one by one, its own included. ratio: tokens to an entry; 0 without compressors. reach: tokens
    before its group that an entry is made of, too. compressors: how many there are.
    """

    def __init__(self, window: int, ratio: int = 0, reach: int = 0, compressors: int = 0) -> None:
        self.window, self.ratio, self.reach = window, ratio, reach
        self.offset = 0
        self.recent: mx.array | None = None  # (B, R, D), the last R tokens
        self.tails: list[mx.array | None] = [None] * (2 * compressors)  # values and gates (B, R, ·) of each compressor
        self.entries: list[mx.array | None] = [None] * compressors  # (B, capacity, D)

    def slide(self, rows: mx.array) -> mx.array:
        """Take in the rows (B, N, D) of the next tokens; return those that they may see (B, T, D), their own last."""
        held = rows if self.recent is None else mx.concatenate([self.recent, rows], axis=1)
        seen = self.seen_before + rows.shape[1]
        self.recent = mx.contiguous(_last(held, self.window - 1 + SPARE))  # or it would keep all of ``held``
        return _last(held, seen)

    @property
    def seen_before(self) -> int:
        """Tokens before the next that it sees one by one."""
        return min(self.offset, self.window - 1)

    def close(self, compressor: int, values: mx.array, gates: mx.array) -> Rows | None:
        """Take in what a compressor is given of the next tokens, (B, N, ·) each.

        Return what the groups that they close are made of, (B, reach + G × ratio, ·), or None where no group closes. What lies
        before the first token has values 0 and gates −∞.
        """
        at, end = 2 * compressor, self.offset + values.shape[1]
        pair = []
        for index, rows in ((at, values), (at + 1, gates)):
            tail = self.tails[index]
            pair.append(rows if tail is None else mx.concatenate([tail, rows], axis=1))
        begin = end - pair[0].shape[1]  # position of the first row
        kept = max(begin, self._first_needed(end - SPARE))
        self.tails[at], self.tails[at + 1] = (mx.contiguous(rows[:, kept - begin :]) for rows in pair)
        first, last = self.offset // self.ratio * self.ratio - self.reach, end // self.ratio * self.ratio
        if last == first + self.reach:
            return None
        closed = [rows[:, max(first, 0) - begin : last - begin] for rows in pair]
        if first < 0:
            fills = (0.0, -mx.inf)
            closed = [
                mx.pad(rows, [(0, 0), (-first, 0), (0, 0)], constant_values=mx.array(fill, rows.dtype))
                for rows, fill in zip(closed, fills, strict=True)
            ]
        return closed[0], closed[1]

    @property
    def groups(self) -> int:
        """Groups closed before the next token."""
        return self.offset // self.ratio

    def append(self, compressor: int, rows: mx.array) -> None:
        """Take in the entries (B, G, D) of the groups that ``close`` returned."""
        first, held = self.groups, self.entries[compressor]
        stop, capacity = first + rows.shape[1], 0 if held is None else held.shape[1]
        if stop > capacity:
            more = -(-max(stop - capacity, capacity // 16) // ROWS_STEP) * ROWS_STEP
            fresh = mx.zeros((rows.shape[0], more, rows.shape[2]), rows.dtype)
            held = fresh if held is None else mx.concatenate([held, fresh], axis=1)
        assert held is not None
        held[:, first:stop] = rows
        self.entries[compressor] = held

    def read(self, compressor: int, tokens: int) -> mx.array | None:
        """Return the entries (B, E, D) of all groups closed once ``tokens`` more are taken in; None where there are none."""
        held, count = self.entries[compressor], (self.offset + tokens) // self.ratio
        return None if held is None or not count else held[:, :count]

    def advance(self, tokens: int) -> None:
        """Go on by so many tokens, which all were taken in."""
        self.offset += tokens

    @property
    def rewindable(self) -> int:
        """How many of the last tokens can be taken back now, exactly."""
        if self.recent is None:
            return 0
        held = self.recent.shape[1]
        least = 0 if held == self.offset else self.offset - held + self.window - 1
        for tail in self.tails[::2]:
            begin = self.offset - (0 if tail is None else tail.shape[1])
            if begin > 0:
                least = max(least, -(-(begin + self.reach) // self.ratio) * self.ratio)
        return max(0, self.offset - least)

    def is_trimmable(self) -> bool:
        """Whether anything can be taken back (mlx-lm's name)."""
        return self.rewindable > 0 or self.offset == 0

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): return how many were, 0 if ``rewindable`` does not allow it."""
        n = min(max(n, 0), self.offset)
        if not n or n > self.rewindable:
            return 0
        self.offset -= n
        assert self.recent is not None
        self.recent = self.recent[:, :-n]
        self.tails = [None if tail is None else tail[:, :-n] for tail in self.tails]
        return n

    @property
    def state(self) -> list[mx.array]:
        """All arrays held, for MLX to compute."""
        return [array for array in (self.recent, *self.tails, *self.entries) if array is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, room to grow included."""
        return sum(array.nbytes for array in self.state)

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which a token makes the entries grow, in the mean; 0 before the first."""
        share = 2 if self.reach else 1  # of what an overlapping compressor is given, half a group's entry is made of
        return round(sum(_row_bytes(tail) // share for tail in self.tails[::2]) / self.ratio) if self.ratio else 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all but the entries at most, however many tokens are held; 0 before the first."""
        kept = SPARE + self.reach + self.ratio
        return (self.window - 1 + SPARE) * _row_bytes(self.recent) + kept * sum(_row_bytes(tail) for tail in self.tails)

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.recent is None

    def size(self) -> int:
        """Tokens held (mlx-lm's name)."""
        return self.offset

    def _first_needed(self, offset: int) -> int:
        """Return the first token whose rows a compressor needs once ``offset`` tokens are held."""
        return max(0, offset // self.ratio * self.ratio - self.reach) if offset > 0 else 0


def _last(rows: mx.array, count: int) -> mx.array:
    """Return the last ``count`` rows of (B, T, D), all where there are fewer."""
    return rows if rows.shape[1] <= count else rows[:, -count:]


def _row_bytes(rows: mx.array | None) -> int:
    return 0 if rows is None else rows.shape[2] * rows.itemsize


PACKED_TOKENS_CPU = 8
PACKED_TOKENS_GPU = 1

SPARE_DECODED = 4
"""On Metal, all slots are decoded if the unused ones are at most a quarter of those in use, and the result is cut: MLX's kernel
would copy words, scales and biases that were cut (mlx/backend/metal/quantized.cpp, ``ensure_row_contiguous``), 28 % of the decoded
bytes at 4 bits. A store grows by a sixteenth, so this is the usual case. On a CPU cutting first was faster: 8 heads, D 128, 4,000
of 4,096 slots, 4 bits 7.8 ms against 8.5."""


def multiplies_packed(tokens: int) -> bool:
    """Whether a call of so many tokens multiplies packed keys and values rather than decode them for the fused kernel.

    Measured on a 2-core x86 CPU (MLX 0.32.4, float32, 8 heads on 4, D 64; in ms, packed / decoded): at depth 512 and 4,096 with
    8 bits 1 token 0.5 / 1.2 and 2.5 / 5.3; with 4 bits 0.5 / 1.3 and 2.8 / 9.2; 8 tokens at 4,096 20 / 23 and 21 / 23; 32 tokens
    equal. So depth does not matter there, and up to 8 tokens packed wins. On a GPU it was not measured by us: one token, as mlx-lm
    does, and the fused kernel, which never writes the scores down, for more.
    """
    return tokens <= (PACKED_TOKENS_CPU if device_kind() == "cpu" else PACKED_TOKENS_GPU)


class Cache(AttendingCache):
    """Keys and values of one layer, under the names that mlx-lm's models call.

    direct: all that attends to this cache does so through ``attend``, so a decode step need not decode. shared: other
    layers ask for the same keys and values again (``keys_and_values``). own_mask: layers of several windows get one mask from
    the model, so this cache makes its own. rotation: what moves the keys of pinned tokens along with the window; None leaves them
    where they were. A plan finds all four out.

    seam_calls: how often ``attend`` was called.
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
        self._offset = 0
        self.seam_calls = 0
        self._packable = direct and (key_codec.packed or value_codec.packed)
        self._rotatable = direct and (key_codec.block is not None or value_codec.block is not None)
        self._direct, self._shared, self._own_mask = direct, shared, own_mask
        self._keys, self._values = Slots(layout.limit), Slots(layout.limit)
        self._pinned: Pinned | None = None
        if rotation is not None and isinstance(layout, Ring) and layout.keep:
            self._pinned = Pinned(layout, rotation)
        self._high = 0  # the most tokens ever held: what lies above offset was taken back
        self._last = 0  # tokens of the last call
        self._in_slots = False  # whether the last call left decoding out: attend reads the slots
        self._rotated = False  # whether what the last call handed out is as the codecs rotated it
        self._handed: tuple[mx.array, mx.array] | None = None
        self._parts: list[
            ShiftedSpan
        ] = []  # of the last call, where not all of it sees the pinned tokens as they were handed out

    @property
    def offset(self) -> int:
        """Tokens held: the position of the next."""
        return self._offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """Return who sees whom for the next N tokens: (N, T) of bool, "causal", or None."""
        return self.layout.mask(self.offset, N, reach=window_size, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in keys (B, H, N, D) and values (B, H, N, E) of the next N tokens.

        Return the keys and values (B, H, T, ·) to attend to, in the order of ``make_mask``'s columns; where ``attend`` will
        multiply packed data, the arguments as they came, since the model only passes them on.
        """
        start, count = self.offset, keys.shape[2]
        if self._pinned is not None:
            self._pinned.take(keys, start)
        new = self.key_codec.encode(keys), self.value_codec.encode(values)
        fits = self.layout.fits(start, count)
        kept = new if fits else self._before_and(new, self.layout.used(start))
        spans, used = self.layout.spans(start, count), self.layout.used(start + count)
        self._keys.write(new[0], spans, used)
        self._values.write(new[1], spans, used)
        self._offset, self._last = start + count, count
        self._high = max(self._high, self._offset)
        self._parts = self._move_pinned(start, after=fits)
        self._in_slots = fits and self._packable and multiplies_packed(count) and not self._parts
        self._rotated = self._rotatable and not self._in_slots
        if self._in_slots:
            handed = keys, values
        elif fits:
            handed = (
                self._decode_slots(self.key_codec, self._keys, used),
                self._decode_slots(self.value_codec, self._values, used),
            )
        else:
            handed = self._decode(self.key_codec, kept[0]), self._decode(self.value_codec, kept[1])
        if self._shared:
            self._handed = handed
        return handed

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last ``update_and_fetch`` returned, for layers that share it (gemma3n)."""
        if self._handed is None:
            raise RuntimeError("this cache was not planned to be shared: plan_caches must see the model's own calls")
        return self._handed

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
        """Gather for queries (B, H·R, N, D), given what ``update_and_fetch`` returned → (B, H·R, N, E)."""
        self.seam_calls += 1
        if self._own_mask or (self.layout.window is not None and not isinstance(mask, mx.array)):
            mask = self.layout.mask(self.offset - self._last, self._last)
        if self._in_slots:
            products = Products(*self._read(), self.key_codec, self.value_codec)
            return stepwise(queries, products, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
        if not self._parts:
            return self._gather(queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
        assert isinstance(mask, mx.array)  # something has left the window
        gathered = [
            self._gather(
                queries[:, :, part.begin : part.stop],
                self._with_pinned(keys, part.shift),
                values,
                scale=scale,
                mask=mask[..., part.begin : part.stop, :],
                sinks=sinks,
                softcap=softcap,
            )
            for part in self._parts
        ]
        return mx.concatenate(gathered, axis=2)

    def _gather(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        """Attend to decoded keys and values, which may still be as the codecs rotated them."""
        stay_rotated = self._rotated and queries.shape[1] * queries.shape[2] < keys.shape[1] * keys.shape[2]
        if stay_rotated:
            queries = self.key_codec.rotate(queries)
        elif self._rotated:
            keys, values = self.key_codec.rotate(keys), self.value_codec.rotate(values)
        if softcap is None:
            packed = self.key_codec.packed or self.value_codec.packed
            out = fused(queries, keys, values, scale=scale, mask=mask, sinks=sinks, packed=packed)
        else:
            products = Products((keys,), (values,), Plain(), Plain())
            out = stepwise(queries, products, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
        return self.value_codec.rotate(out) if stay_rotated else out

    @property
    def rewindable(self) -> int:
        """How many of the last tokens can be taken back now, exactly."""
        return self.layout.rewindable(self.offset, self._high)

    def is_trimmable(self) -> bool:
        """Whether anything can be taken back (mlx-lm's name)."""
        return self.rewindable > 0 or self.offset == 0

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): return how many were, 0 if ``rewindable`` does not allow it."""
        n = min(max(n, 0), self.offset)
        if n > self.rewindable:
            return 0
        self._offset -= n
        self._handed = None
        self._move_pinned(self._offset, after=True)
        return n

    def copy(self) -> "Cache":
        """Return a cache of the same content; arrays are shared until one of the two writes."""
        other = Cache(
            self.layout,
            self.key_codec,
            self.value_codec,
            direct=self._direct,
            shared=self._shared,
            own_mask=self._own_mask,
        )
        other._keys, other._values = self._keys.shared(), self._values.shared()
        other._pinned = None if self._pinned is None else self._pinned.shared()
        other._offset, other._high = self._offset, self._high
        return other

    @property
    def state(self) -> tuple[Encoded, Encoded, Encoded, int, int]:
        """What is held: the key arrays, the value arrays, the keys of pinned tokens as the model made them where these move, the
        offset, the most tokens ever held. Restorable."""
        pinned = () if self._pinned is None else self._pinned.arrays
        return self._keys.arrays, self._values.arrays, pinned, self.offset, self._high

    @state.setter
    def state(self, state: tuple[Encoded, Encoded, Encoded, int, int]) -> None:
        keys, values, pinned, self._offset, self._high = state
        self._keys.arrays, self._values.arrays = tuple(keys), tuple(values)
        if self._pinned is not None:
            self._pinned.restore(pinned, self._offset)
        self._handed = None

    @property
    def arrays(self) -> Encoded:
        """All arrays of the slots, keys first: (B, H, slots, …) each; () while empty."""
        return (*self._keys.arrays, *self._values.arrays)

    def append(self, arrays: Encoded, room: int = 0) -> None:
        """Take in tokens encoded before, as ``arrays`` gave them out; ``room`` is what will be held soon. For layouts that grow."""
        if not arrays:
            return
        width = self.key_codec.width
        start, count = self.offset, arrays[0].shape[2]
        spans, used = self.layout.spans(start, count), self.layout.used(start + count)
        self._keys.write(arrays[:width], spans, used, room)
        self._values.write(arrays[width:], spans, used, room)
        self._offset = start + count
        self._high = max(self._high, self._offset)

    def shrink(self) -> None:
        """Return the memory of slots beyond the tokens held, where most are unused. For layouts that grow."""
        for slots in (self._keys, self._values):
            slots.shrink(self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, spare slots and room to grow included."""
        pinned = 0 if self._pinned is None else self._pinned.nbytes
        return self._keys.nbytes + self._values.nbytes + pinned

    @property
    def slots(self) -> int:
        """Tokens that there is room for: more than before means that the arrays were copied to larger ones."""
        return self._keys.capacity

    def size(self) -> int:
        """Tokens that can still be seen."""
        window = self.layout.window
        return self.offset if window is None else min(self.offset, window)

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self._keys.arrays

    def _read(self) -> tuple[Encoded, Encoded]:
        used = self.layout.used(self.offset)
        return self._keys.read(used), self._values.read(used)

    def _move_pinned(self, start: int, *, after: bool) -> list[ShiftedSpan]:
        """Move the pinned keys in the slots to where the last token sees them.

        Return the parts of the call from ``start`` on, where not all of it sees them as they are in the slots ``after`` that, or
        were before.
        """
        if self._pinned is None:
            return []
        before, last = self._pinned.shift, self._pinned.ring.shift(self.offset - 1)
        if last != before:
            self._keys.write(self.key_codec.encode(self._pinned.moved(last)), [self._pinned.span], 0)
            self._pinned.shift = last
        if last == before and self._pinned.ring.shift(start) == last:
            return []  # most steps end here
        parts = self._pinned.ring.parts(start, self.offset - start)
        handed = last if after else before
        return [] if all(part.shift == handed for part in parts) else parts

    def _with_pinned(self, keys: mx.array, shift: int) -> mx.array:
        """Return the keys (B, H, T, D) that were handed out, with the pinned ones ``shift`` positions further on."""
        assert self._pinned is not None
        moved = self._decode(self.key_codec, self.key_codec.encode(self._pinned.moved(shift)))
        return mx.concatenate([moved, keys[:, :, moved.shape[2] :]], axis=2)

    def _decode_slots(self, codec: Codec, slots: Slots, used: int) -> mx.array:
        """Return what the first ``used`` slots hold: (B, H, T, D)."""
        if codec.packed and 0 < slots.capacity - used <= used // SPARE_DECODED and device_kind() == "metal":
            return self._decode(codec, slots.arrays)[..., :used, :]
        return self._decode(codec, slots.read(used))

    def _decode(self, codec: Codec, encoded: Encoded) -> mx.array:
        return codec.unpack(encoded) if self._rotated else codec.decode(encoded)

    def _before_and(self, new: tuple[Encoded, Encoded], used: int) -> tuple[Encoded, Encoded]:
        """Return what the slots hold now, followed by the new tokens: for a call too long to be written first."""
        keys, values = (
            tuple(mx.concatenate(list(pair), axis=2) for pair in zip(slots.read(used), part, strict=True))
            if used
            else part
            for slots, part in zip((self._keys, self._values), new, strict=True)
        )
        return keys, values


def rewindable(caches: list[Any]) -> int:
    """Return how many of the last tokens every cache can take back exactly, now."""
    return min((_rewindable(cache) for _, cache in leaves(caches)), default=0)


def trim(caches: list[Any], n: int) -> int:
    """Take back the last n tokens from every cache, or from none: return n, or 0 where one of them can't (see ``rewindable``)."""
    if n <= 0 or n > rewindable(caches):
        return 0
    for _, cache in leaves(caches):
        if not _stateless(cache):
            cache.trim(n)
    return n


def nbytes(caches: list[Any]) -> int:
    """Return the bytes of all arrays held, room to grow included."""
    return sum(int(cache.nbytes) for _, cache in leaves(caches))


def offset(caches: list[Any]) -> int | None:
    """Return the tokens held, or None where no cache counts them (a model with recurrent state alone)."""
    from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    counting = (Cache, CompressedCache, KVCache, RotatingKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)
    return next((int(cache.offset) for _, cache in leaves(caches) if isinstance(cache, counting)), None)


def bypassed(caches: list[Any]) -> list[tuple[int, ...]]:
    """Return the paths of our caches that were written to while no attention came through the seam: there should be none."""
    return [
        path
        for path, cache in leaves(caches)
        if isinstance(cache, Cache) and not cache.empty() and not cache.seam_calls
    ]


def _stateless(cache: Any) -> bool:
    from mlx_lm.models.cache import ArraysCache

    return isinstance(cache, ArraysCache)  # is only ever reached while empty: nothing to take back


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
    return 0  # recurrent state, and kinds we don't know, can't be taken back


class GrowthWatcher:
    """Watches a list of caches. One stands for all of its layout: they hold the same tokens, and grow by the same rule.

    mlx-lm's own caches are not watched: they are taken to grow every STEP tokens, as its KVCache does.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = [cache for _, cache in leaves(caches)]
        self._watched = list({cache.layout: cache for cache in found if isinstance(cache, Cache)}.values())
        self._others = any(not isinstance(cache, Cache) for cache in found)
        self._slots = self._count()

    def grew(self) -> bool:
        """Whether there are more slots than when this was asked last. Takes less than a microsecond."""
        before, self._slots = self._slots, self._count()
        return self._slots > before

    def will_grow(self, held: int) -> bool:
        """Whether the token after ``held`` makes one of them larger. Takes about a microsecond."""
        return (self._others and held % STEP == 0) or any(
            cache.offset >= cache.slots and _grows(cache) for cache in self._watched
        )

    def _count(self) -> int:
        return sum([cache.slots for cache in self._watched])


def _grows(cache: Cache) -> bool:
    limit = cache.layout.limit
    return limit is None or cache.slots < limit
