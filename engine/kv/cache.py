"""The one cache class: a layout times a codec for keys times a codec for values; and what the engine does with a list of caches.

    update_and_fetch(keys, values)     encodes new tokens once and writes them to their slots; returns what to attend to
    attend(queries, keys, values, …)   called by the seam with what came back
    trim(n)                            takes back the last n tokens; ``rewindable`` says how many that may be

Prefill attends to [what the slots held, decoded; this call's tokens, encoded and decoded], by position: so logits do not depend on
how a prompt was cut. A decode step multiplies packed data in place. Rotated keys stay rotated where nothing but ``attend`` reads
them: then the queries are rotated, unless the keys are fewer. A ring's pinned keys are encoded anew, from what the model made,
whenever they move along with the window (rotary.py); a call whose tokens see them in several places attends in as many parts.

Caches that grow can have a prefix in common (``share_prefix``, ``begin_with``): it is held once, nobody writes to it, and what each
holds beyond it is in slots of its own. A decode step attends to both in turn, under one softmax.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..device import device_kind
from .attention import AttendingCache, Scoring, fused, stepwise
from .attention_kernel import multiplies_packed
from .codec import Codec, Encoded, Plain
from .compressed import CompressedCache
from .layout import Growing, Layout, Mask, Ring, ShiftedSpan, Slots, Span
from .probe import leaves
from .rotary import Pinned, Rotation
from .sizes import SHORT_STEP, STEP

SPARE_DECODED = 4
"""On Metal, all slots are decoded if the unused ones are at most a quarter of those in use, and the result is cut: MLX's kernel
would copy words, scales and biases that were cut (mlx/backend/metal/quantized.cpp, ``ensure_row_contiguous``), 28 % of the decoded
bytes at 4 bits. A store grows by a sixteenth, so this is the usual case. On a CPU cutting first was faster: 8 heads, D 128, 4,000
of 4,096 slots, 4 bits 7.8 ms against 8.5."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Encoded keys and values, (B, H, tokens, …) each, of tokens that several caches begin with; continues others, if any do."""

    keys: Encoded
    values: Encoded

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeldSlots:
    """Where a cache's arrays lie: for one who reads and writes slots itself, until they move.

    keys, values: addresses of the arrays of its codecs, (1, H, capacity, …) each. prefix: what stands before the slots.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    capacity: int
    prefix: tuple[SharedPrefix, ...]


class Cache(AttendingCache):
    """Keys and values of one layer, under the names that mlx-lm's models call. A plan finds all options out.

    Args:
        layout: Which slots tokens have, and who sees whom.
        key_codec: How keys are stored.
        value_codec: How values are stored.
        direct: Whether all that attends to this cache does so through ``attend``, so that a decode step need not decode.
        shared: Whether other layers ask for the same keys and values again (``keys_and_values``).
        own_mask: Whether this cache makes its own mask, since layers of several windows get one mask from the model.
        rotation: What moves the keys of pinned tokens along with the window; None leaves them where they were.
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
        self.seam_calls = 0  # how often attend was called
        self._packable = direct and (key_codec.packed or value_codec.packed)
        self._rotatable = direct and (key_codec.block is not None or value_codec.block is not None)
        self._direct, self._shared, self._own_mask = direct, shared, own_mask
        self._keys, self._values = Slots(layout.limit), Slots(layout.limit)
        self._prefix: tuple[SharedPrefix, ...] = ()
        self._prefix_tokens = 0
        self._held: HeldSlots | None = None
        self._pinned: Pinned | None = None
        if rotation is not None and isinstance(layout, Ring) and layout.keep:
            self._pinned = Pinned(layout, rotation)
        self._offset = 0
        self._high = 0  # the most tokens ever held: what lies above the offset was trimmed
        # Of the last call:
        self._last = 0  # its tokens
        self._in_slots = False  # whether it decoded nothing: attend reads the slots
        self._rotated = False  # whether it returned keys and values as the codecs rotated them
        self._fetched: tuple[mx.array, mx.array] | None = None  # what it returned, where layers share it
        self._parts: list[ShiftedSpan] = []  # where not all its tokens see the pinned ones as they were returned

    @property
    def offset(self) -> int:
        """Tokens held: the position of the next."""
        return self._offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """Return who sees whom for the next N tokens: (N, T) of bool, "causal", or None."""
        return self.layout.mask(self.offset, N, reach=window_size, as_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys (B, H, N, D) and values (B, H, N, E) of the next N tokens.

        Return the keys and values (B, H, T, ·) to attend to, in the order of ``make_mask``'s columns; where ``attend`` will
        multiply packed data, the arguments as they came, since the model only passes them on.
        """
        start, count = self._offset, keys.shape[2]
        if self._pinned is not None:
            self._pinned.add(keys, start)
        new = self.key_codec.encode(keys), self.value_codec.encode(values)
        fits = self.layout.fits(start, count)
        whole = new if fits else self._append_to_slots(new, self.layout.used(start))
        spans, used = self._spans(start, count)
        self._keys.write(new[0], spans, used)
        self._values.write(new[1], spans, used)
        self._offset, self._last = start + count, count
        self._high = max(self._high, self._offset)
        self._parts = self._move_pinned(start, after=fits)
        by_parts = self._packable or bool(self._prefix)
        self._in_slots = fits and by_parts and multiplies_packed(count, device_kind()) and not self._parts
        self._rotated = self._rotatable and not self._in_slots
        if self._in_slots:
            fetched = keys, values
        elif fits:
            fetched = (
                self._decode_slots(self.key_codec, (each.keys for each in self._prefix), self._keys, used),
                self._decode_slots(self.value_codec, (each.values for each in self._prefix), self._values, used),
            )
        else:
            fetched = self._decode(self.key_codec, whole[0]), self._decode(self.value_codec, whole[1])
        if self._shared:
            self._fetched = fetched
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last ``update_and_fetch`` returned, for layers that share it (gemma3n)."""
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
        """Attend for queries (B, H·R, N, D), given what ``update_and_fetch`` returned → (B, H·R, N, E)."""
        self.seam_calls += 1
        if self._own_mask or (self.layout.window is not None and not isinstance(mask, mx.array)):
            mask = self.layout.mask(self._offset - self._last, self._last)
        by = Scoring(scale, mask, sinks, softcap)
        if self._in_slots:
            used = self.layout.used(self._offset) - self._prefix_tokens
            stored = [
                *((each.keys, each.values) for each in self._prefix),
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
        """Make the first slots where there are none, for one who writes them itself: of float32 (1, heads, ·, dim)."""
        if not self._keys.capacity:
            token = mx.zeros((1, heads, 1, dim))
            self._keys.make(self.key_codec.encode(token))
            self._values.make(self.value_codec.encode(token))

    def takes_in_place(self, count: int) -> bool:
        """Whether the next ``count`` tokens can be written, and attended to, by one who knows only layout and codecs."""
        if not self._keys.capacity or not self._direct or self._shared or not self.layout.fits(self._offset, count):
            return False
        if self._pinned is None:
            return True
        ring, start = self._pinned.ring, self._offset
        return start >= ring.keep and ring.shift(start) == ring.shift(start + count - 1) == self._pinned.shift

    def claim(self, count: int) -> tuple[mx.array, ...]:
        """Return what ``hold`` would evaluate, for one who evaluates that of several layers at once; () where nothing is."""
        used, slot = self._next_slots(count)
        return *self._keys.claim(used, slot), *self._values.claim(used, slot)

    def hold(self, count: int) -> HeldSlots:
        """Count the next ``count`` tokens as held, and return where the caller writes them. ``takes_in_place`` must allow it."""
        used, slot = self._next_slots(count)
        keys, values = self._keys.in_place(used, slot), self._values.in_place(used, slot)
        self._offset += count
        self._high = max(self._high, self._offset)
        self._fetched = None
        held = self._held
        if held is None or held.keys is not keys or held.values is not values or held.prefix is not self._prefix:
            held = self._held = HeldSlots(keys, values, self._keys.capacity, self._prefix)
        return held

    def _next_slots(self, count: int) -> tuple[int, Callable[[], int]]:
        """Return how many slots are in use with ``count`` more tokens, and what tells the first one's slot."""
        begin = self._offset - self._prefix_tokens
        return self.layout.used(self._offset + count) - self._prefix_tokens, lambda: self.layout.spans(begin, 1)[0].slot

    @property
    def rewindable(self) -> int:
        """How many of the last tokens can be trimmed now, exactly."""
        return self.layout.rewindable(self._offset, self._high)

    def is_trimmable(self) -> bool:
        """Whether anything can be trimmed (mlx-lm's name)."""
        return self.rewindable > 0 or self._offset == 0

    def trim(self, n: int) -> int:
        """Take back the last n tokens (all, if there are fewer): return how many were, 0 if ``rewindable`` does not allow it."""
        n = min(max(n, 0), self._offset)
        if n > self.rewindable:
            return 0
        self._offset -= n
        if self._offset < self._prefix_tokens:
            self._shorten_prefix()
        self._fetched = None
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
        other._prefix, other._prefix_tokens = self._prefix, self._prefix_tokens
        other._keys, other._values = self._keys.copy(), self._values.copy()
        other._pinned = None if self._pinned is None else self._pinned.copy()
        other._offset, other._high = self._offset, self._high
        return other

    def restore(self, earlier: "Cache") -> None:
        """Hold again what ``earlier``, a copy, does, without computing what came since.

        What others share since stays shared: all layers of a model begin with the same prefix.
        """
        if self._prefix_tokens > earlier._prefix_tokens:
            self.trim(self._offset - earlier._offset)  # sharing computed what came
            return
        self._prefix, self._prefix_tokens = earlier._prefix, earlier._prefix_tokens
        self._keys.step, self._values.step = earlier._keys.step, earlier._values.step
        self.state = earlier.state

    @property
    def state(self) -> tuple[Encoded, Encoded, Encoded, int, int]:
        """The whole content beyond a shared prefix, which can be set again: key arrays, value arrays, the keys of moving pinned
        tokens as the model made them, the offset, the most tokens ever held."""
        pinned = () if self._pinned is None else self._pinned.arrays
        return self._keys.arrays, self._values.arrays, pinned, self._offset, self._high

    @state.setter
    def state(self, state: tuple[Encoded, Encoded, Encoded, int, int]) -> None:
        keys, values, pinned, self._offset, self._high = state
        self._keys.arrays, self._values.arrays = tuple(keys), tuple(values)
        if self._pinned is not None:
            self._pinned.restore(pinned, self._offset)
        self._fetched = None

    @property
    def arrays(self) -> Encoded:
        """All arrays of the slots, keys first: (B, H, slots, …) each; () while empty. Behind a shared prefix they are joined."""
        own = (*self._keys.arrays, *self._values.arrays)
        if not self._prefix:
            return own
        return _join([*((*each.keys, *each.values) for each in self._prefix), *([own] if own else [])])

    @property
    def prefix(self) -> tuple[SharedPrefix, ...]:
        """What other caches may hold too, in order."""
        return self._prefix

    @property
    def can_share(self) -> bool:
        """Whether its first tokens can be held together with others."""
        return isinstance(self.layout, Growing) and self._direct and not self._shared

    def share_prefix(self, tokens: int) -> tuple[SharedPrefix, ...]:
        """Hold the first ``tokens`` as a prefix that others may ``begin_with``, and return it: fewer, where one ends before.

        For layouts that grow. Copies once what was not shared yet; evaluates.
        """
        if tokens > self._prefix_tokens:
            at, used = tokens - self._prefix_tokens, self._offset - self._prefix_tokens
            keys, rest_of_keys = self._keys.split(at, used)
            values, rest_of_values = self._values.split(at, used)
            mx.eval(keys, rest_of_keys, values, rest_of_values)  # before anything changes: memory may not suffice
            self._keys.arrays, self._values.arrays = rest_of_keys, rest_of_values
            self._prefix = (*self._prefix, SharedPrefix(keys, values))
            self._prefix_tokens = tokens
            self._keys.step = self._values.step = SHORT_STEP
            return self._prefix
        found: list[SharedPrefix] = []
        for each in self._prefix:
            if tokens < each.tokens:
                break
            found.append(each)
            tokens -= each.tokens
        return tuple(found)

    def begin_with(self, prefix: tuple[SharedPrefix, ...]) -> None:
        """Hold what another cache of the same kind shares; for an empty one."""
        if self._offset or self._prefix:
            raise ValueError("only an empty cache can begin with a shared prefix")
        self._keys.arrays = self._values.arrays = ()
        self._prefix, self._prefix_tokens = prefix, sum(each.tokens for each in prefix)
        self._keys.step = self._values.step = SHORT_STEP
        self._offset = self._high = self._prefix_tokens

    def own_prefix(self) -> None:
        """Hold a copy of what was shared: attention then sees one array again."""
        if self._prefix:
            width, whole = self.key_codec.width, tuple(map(mx.array, self.arrays))
            self._keys.arrays, self._values.arrays = whole[:width], whole[width:]
            self._keys.step = self._values.step = STEP
            self._prefix, self._prefix_tokens = (), 0

    def append(self, arrays: Encoded, reserve: int = 0) -> None:
        """Append encoded tokens, in the form of ``arrays``; ``reserve``: tokens that will be held soon. For layouts that grow."""
        if not arrays:
            return
        width = self.key_codec.width
        start, count = self._offset, arrays[0].shape[2]
        spans, used = self._spans(start, count)
        reserve -= self._prefix_tokens
        self._keys.write(arrays[:width], spans, used, reserve)
        self._values.write(arrays[width:], spans, used, reserve)
        self._offset = start + count
        self._high = max(self._high, self._offset)

    def shrink(self) -> None:
        """Free the slots beyond the tokens held, where most are unused. For layouts that grow."""
        for slots in (self._keys, self._values):
            slots.shrink(self._offset - self._prefix_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, unused slots included; a shared prefix as if it were its own (``nbytes`` below counts it once)."""
        pinned = 0 if self._pinned is None else self._pinned.nbytes
        return self._keys.nbytes + self._values.nbytes + pinned + sum([each.nbytes for each in self._prefix])

    @property
    def slots(self) -> int:
        """Number of slots: more than before means that the arrays were copied to larger ones."""
        return self._prefix_tokens + self._keys.capacity

    def size(self) -> int:
        """Tokens that can still be seen (mlx-lm's name)."""
        window = self.layout.window
        return self._offset if window is None else min(self._offset, window)

    def empty(self) -> bool:
        """Whether nothing was ever written (mlx-lm's name)."""
        return not self._keys.capacity and not self._prefix

    def _spans(self, start: int, count: int) -> tuple[list[Span], int]:
        """Return where in the slots ``count`` tokens after ``start`` go, and how many slots are in use then."""
        return self.layout.spans(start - self._prefix_tokens, count), self.layout.used(
            start + count
        ) - self._prefix_tokens

    def _shorten_prefix(self) -> None:
        """Give up the shared prefixes that end beyond the tokens held; of the one that these end in, a copy is kept."""
        self._keys.arrays = self._values.arrays = ()
        kept = list(self._prefix)
        while kept and self._prefix_tokens > self._offset:
            last = kept.pop()
            self._prefix_tokens -= last.tokens
            if self._prefix_tokens < self._offset:
                # Handles of its own: what is written then goes to a copy.
                self._keys.arrays, self._values.arrays = (
                    tuple(map(mx.array, last.keys)),
                    tuple(map(mx.array, last.values)),
                )
        self._prefix = tuple(kept)

    def _attend_decoded(self, queries: mx.array, keys: mx.array, values: mx.array, by: Scoring) -> mx.array:
        """Attend to decoded keys and values, which may still be as the codecs rotated them."""
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
        """Move the pinned keys in the slots to where the last token sees them.

        Return the parts of the call from ``start`` on, where not all of it sees them as they are in the slots ``after`` that, or
        were before.
        """
        if self._pinned is None:
            return []
        ring, before = self._pinned.ring, self._pinned.shift
        last = ring.shift(self._offset - 1)
        if last != before:
            self._keys.write(self.key_codec.encode(self._pinned.moved(last)), [self._pinned.span], 0)
            self._pinned.shift = last
        if last == before and ring.shift(start) == last:
            return []  # most steps end here
        parts = ring.parts(start, self._offset - start)
        fetched = last if after else before
        return [] if all(part.shift == fetched for part in parts) else parts

    def _with_pinned(self, keys: mx.array, shift: int) -> mx.array:
        """Return fetched keys (B, H, T, D) with the pinned ones ``shift`` positions further on."""
        assert self._pinned is not None
        moved = self._decode(self.key_codec, self.key_codec.encode(self._pinned.moved(shift)))
        return mx.concatenate([moved, keys[:, :, moved.shape[2] :]], axis=2)

    def _decode_slots(self, codec: Codec, before: Iterable[Encoded], slots: Slots, used: int) -> mx.array:
        if self._prefix:
            return self._decode(codec, _join([*before, slots.read(used)]))
        if codec.packed and 0 < slots.capacity - used <= used // SPARE_DECODED and device_kind() == "metal":
            return self._decode(codec, slots.arrays)[..., :used, :]
        return self._decode(codec, slots.read(used))

    def _decode(self, codec: Codec, encoded: Encoded) -> mx.array:
        return codec.unpack(encoded) if self._rotated else codec.decode(encoded)

    def _append_to_slots(self, new: tuple[Encoded, Encoded], used: int) -> tuple[Encoded, Encoded]:
        """Return what the slots hold now, followed by the new tokens: for a call too long to be written first."""
        if not used:
            return new
        keys, values = (
            tuple(mx.concatenate(list(pair), axis=2) for pair in zip(slots.read(used), part, strict=True))
            for slots, part in zip((self._keys, self._values), new, strict=True)
        )
        return keys, values


def _join(parts: Sequence[Encoded]) -> Encoded:
    """Return consecutive tokens as one."""
    if len(parts) == 1:
        return parts[0]
    return tuple([mx.concatenate(list(arrays), axis=2) for arrays in zip(*parts, strict=True)])


def rewindable(caches: list[Any]) -> int:
    """Return how many of the last tokens every cache can trim exactly, now."""
    return min((_rewindable(cache) for _, cache in leaves(caches)), default=0)


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
    """Return the bytes of all arrays, unused slots included, of one conversation or several; a prefix they share counts once."""
    found = [cache for _, cache in leaves(caches)]
    shared = [each for cache in found if isinstance(cache, Cache) for each in cache.prefix]
    twice = sum(each.nbytes for each in shared) - sum(
        each.nbytes for each in {id(each): each for each in shared}.values()
    )
    return sum(int(cache.nbytes) for cache in found) - twice


class GrowthWatcher:
    """Tells whether caches were made larger, or will be by the next token, which copies all that they hold.

    One cache stands for all of its layout: they hold the same tokens, and grow by the same rule. mlx-lm's own caches are not
    watched: they are taken to grow every STEP tokens, as its KVCache does.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = [cache for _, cache in leaves(caches)]
        self._watched = list({cache.layout: cache for cache in found if isinstance(cache, Cache)}.values())
        self._others = any(not isinstance(cache, Cache) for cache in found)
        self._slots = self._count()

    def grew(self) -> bool:
        """Whether there are more slots than at the last call. Takes less than a microsecond."""
        before, self._slots = self._slots, self._count()
        return self._slots > before

    def will_grow(self, held: int) -> bool:
        """Whether the token after ``held`` makes one of them larger. Takes about a microsecond."""
        return (self._others and held % STEP == 0) or any(
            cache.offset >= cache.slots and _may_grow(cache) for cache in self._watched
        )

    def fitting(self, held: int) -> int | None:
        """Return how many tokens after ``held`` make none of them larger; None for any number."""
        left = [cache.slots - cache.offset for cache in self._watched if _may_grow(cache)]
        return min([*left, -held % STEP] if self._others else left, default=None)

    def _count(self) -> int:
        return sum([cache.slots for cache in self._watched])


def _may_grow(cache: Cache) -> bool:
    limit = cache.layout.limit
    return limit is None or cache.slots < limit
