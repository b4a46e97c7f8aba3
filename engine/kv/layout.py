"""How keys and values are stored: layouts (growing, ring, compressed), codecs, slot arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import mlx.core as mx

from ..device import device_kind
from ..errors import OptionError
from ..vision.positions import PictureGroups, picture_groups
from .costs import STEP, grown, token_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Each token and head is encoded alone, so its slot doesn't matter and it can be dropped. Shapes: B sequences,
# H KV heads, R query heads per KV head, N new tokens, T stored tokens, D head dimension. An orthonormal
# Hadamard matrix H spreads outlier channels of few-bit keys and keeps every product, (Hq)·(Hk) = q·k (QuaRot,
# https://arxiv.org/abs/2404.00456; llama.cpp does the same). Attention can stay in the rotated space by
# rotating queries and sums instead of keys and values.


Encoded = tuple[mx.array, ...]  # what a codec makes of (B, H, N, D): arrays whose first three axes are (B, H, N)

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
LEAST_ROTATED = 16  # a Hadamard block of fewer channels spreads an outlier over too few others to be of use


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's own type, untouched.

    bits: per value without scales. block: channels rotated together. packed: fused kernels need it decoded.
    """

    bits: ClassVar[int] = 16
    group_size: ClassVar[None] = None
    block: ClassVar[None] = None
    width: ClassVar[int] = 1
    packed: ClassVar[bool] = False

    def encode(self, x: mx.array) -> Encoded:
        """Encode x (B, H, N, D)."""
        return (x,)

    def decode(self, encoded: Encoded) -> mx.array:
        """Return (B, H, T, D), in the space and type of what was encoded."""
        return encoded[0]

    def unpack(self, encoded: Encoded) -> mx.array:
        """Return (B, H, T, D), still rotated where the codec rotates."""
        return encoded[0]

    def rotate(self, x: mx.array) -> mx.array:
        """Apply the codec's rotation, its own inverse, to x (..., D)."""
        return x

    def dot(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Multiply queries (B, H, M, D) by the keys: (B, H, M, T)."""
        return queries @ encoded[0].swapaxes(-1, -2)

    def mix(self, weights: mx.array, encoded: Encoded) -> mx.array:
        """Multiply weights (B, H, M, T) by the values: (B, H, M, D)."""
        return weights @ encoded[0]

    def token_bytes(self, heads: int, dim: int, scale_bytes: int) -> int:
        """Bytes per token and layer. scale_bytes: of a number of the model's type."""
        return token_bytes(heads, dim, 16, 1, scale_bytes)


@dataclass(frozen=True, slots=True)
class Affine:
    """Affine groups: ``bits`` per value, a scale and a bias per ``group_size`` values."""

    bits: int
    group_size: int
    block: int | None = None
    width: ClassVar[int] = 3  # words, scales, biases
    packed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in AFFINE_BITS:
            raise OptionError(f"{self.bits} bits can't be packed in affine groups", f"Use one of {AFFINE_BITS}.")
        if self.group_size not in (32, 64, 128):
            raise OptionError(f"a KV group size of {self.group_size} is not supported", "Use 32, 64 or 128.")
        if self.block is not None and (self.block < LEAST_ROTATED or self.block & (self.block - 1)):
            raise OptionError(f"{self.block} channels can't be rotated", f"Use a power of two from {LEAST_ROTATED}.")

    def encode(self, x: mx.array) -> Encoded:
        """Pack x (B, H, N, D) into words (B, H, N, D·bits/32), scales and biases (B, H, N, D/group)."""
        packed, scales, biases = mx.quantize(self.rotate(x), group_size=self.group_size, bits=self.bits)
        return packed, scales, biases

    def decode(self, encoded: Encoded) -> mx.array:
        return self.rotate(self.unpack(encoded))

    def unpack(self, encoded: Encoded) -> mx.array:
        words, scales, biases = encoded
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)

    def rotate(self, x: mx.array) -> mx.array:
        if self.block is None:
            return x
        if self.block == x.shape[-1]:
            return mx.hadamard_transform(x)
        return mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, self.block)).reshape(x.shape)

    def dot(self, queries: mx.array, encoded: Encoded) -> mx.array:
        return self._times(self.rotate(queries), encoded, transpose=True)

    def mix(self, weights: mx.array, encoded: Encoded) -> mx.array:
        """Multiply weights (B, H, M, T) by packed values: (B, H, M, D)."""
        # Metal: row by row. MLX runs ``qvm_split_k`` (splits T) below four rows and ``qmm_n`` (one threadgroup walks
        # all of T) above (quantized.cpp, QuantizedMatmul::eval_gpu); rows together gain nothing. Not measured on
        # Metal. CPU: rows together, 4.5 ms against 6.6 (8 heads, 8 rows, D 128, T 4,000, 4 bits, 2-core x86).
        if device_kind() != "metal" or weights.shape[2] == 1:
            return self.rotate(self._times(weights, encoded, transpose=False))
        rows = mx.expand_dims(weights, 3)  # (B, H, M, 1, T)
        shared = tuple([mx.expand_dims(array, 2) for array in encoded])
        return self.rotate(self._times(rows, shared, transpose=False).squeeze(3))

    def token_bytes(self, heads: int, dim: int, scale_bytes: int) -> int:
        return token_bytes(heads, dim, self.bits, self.group_size, scale_bytes)

    def _times(self, x: mx.array, encoded: Encoded, *, transpose: bool) -> mx.array:
        words, scales, biases = encoded
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=self.group_size, bits=self.bits
        )


Codec = Plain | Affine


def rotation_block(dim: int) -> int | None:
    """Return the largest power of two dividing the head dimension, or None if too small to help."""
    # MLX's Hadamard matrices of 20 and 28 times a power of two aren't symmetric, so their inverse needs another
    # product.
    block = dim & -dim
    return block if block >= LEAST_ROTATED else None


# 0 ··· keep ··············· high − size ········ offset − (window − keep) ·········· offset ······ high
# pinned      gone                        unseen, for rewinding               seen           taken back

# A window counts its ``keep`` pinned tokens (attention sinks, https://arxiv.org/abs/2309.17453): position p
# sees q ≤ p where q < keep or q > p − (window − keep). ``spare`` slots keep unseen tokens for exact
# rewinding; size = window − keep + spare. Pinned tokens move in blocks, half the sliding slots: the query at
# p ≥ window sees q at q + shift(p), the next multiple above p − window. It depends on p alone, so neither
# cuts nor rewinding change it.


Mask = mx.array | Literal["causal"] | None  # (N, T) of bool, the word for plain causal, or None where all is seen

# Steps in which pinned tokens move while the window moves by its own length. Fewer leave them closer to the query than
# they are numbered, by a block at most; more rewrite their keys more often, and divide a prompt's attention into more
# calls.
BLOCKS = 2
# Positions that pinned tokens move by at least, where as many slide: a prompt's attention is called once for each
# block.
LEAST_BLOCK = 16
# Masks of a single token to keep: layers of one layout share theirs, and few models have more than two layouts.
ROWS = 4


class Span(NamedTuple):
    """Tokens ``token``…``token + length`` of a call go to slots ``slot``…``slot + length``."""

    token: int
    slot: int
    length: int


class ShiftedSpan(NamedTuple):
    """Tokens ``begin``…``stop`` of a call see the pinned ones ``shift`` positions on."""

    begin: int
    stop: int
    shift: int


@dataclass(frozen=True, slots=True)
class Growing:
    """Keeps every token, in order. window: tokens seen at most. limit: slots at most. None: unbounded."""

    window: ClassVar[None] = None
    limit: ClassVar[None] = None

    def used(self, offset: int) -> int:
        return offset

    def fits(self, start: int, count: int) -> bool:  # noqa: ARG002
        """Whether writing ``count`` tokens after ``start`` keeps everything the first of them may see."""
        return True

    def spans(self, start: int, count: int) -> list[Span]:
        return [Span(0, start, count)]

    def rewindable(self, offset: int, high: int) -> int:  # noqa: ARG002
        return offset

    def mask(self, start: int, count: int, *, reach: int | None = None, as_array: bool = False) -> Mask:
        """Return the mask: rows are the ``count`` tokens after ``start``, columns as in ``Cache.update_and_fetch``.

        reach: the window the model asks for, if any.
        """
        if (ahead := picture_groups()) is not None:
            ahead = ahead.within(reach)
        if not as_array and ahead is None and (reach is None or start + count <= reach):
            return None if count == 1 else "causal"
        if count == 1 and ahead is None:
            return _last_row(start + 1, reach)
        return visible(mx.arange(start, start + count), mx.arange(start + count), None, 0, reach, ahead=ahead)


@dataclass(frozen=True, slots=True)
class Ring:
    """A window's last tokens, ``keep`` pinned ones, and ``spare`` slots for rewinding."""

    window: int
    keep: int = 0
    spare: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.keep < self.window:
            raise OptionError(
                f"keeping {self.keep} tokens leaves no room in a window of {self.window}",
                "Make the window larger, or keep fewer.",
            )
        if self.spare < 0:
            raise OptionError(f"{self.spare} spare slots make no sense", "Use 0 or more.")

    @property
    def limit(self) -> int:
        return self.window + self.spare

    @property
    def block(self) -> int:
        slides = self.window - self.keep
        return max(slides // BLOCKS, min(slides, LEAST_BLOCK))

    def used(self, offset: int) -> int:
        return min(offset, self.window + self.spare)

    def fits(self, start: int, count: int) -> bool:
        return start + count <= self.window + self.spare or count <= self.spare + 1

    def spans(self, start: int, count: int) -> list[Span]:
        stop, size = start + count, self.window + self.spare - self.keep
        spans = [Span(0, start, min(stop, self.keep) - start)] if start < self.keep else []
        position = max(start, self.keep, stop - size)
        while position < stop:
            turn = (position - self.keep) % size
            length = min(stop - position, size - turn)
            spans.append(Span(position - start, self.keep + turn, length))
            position += length
        return spans

    def rewindable(self, offset: int, high: int) -> int:
        if high <= self.window + self.spare:
            return offset
        return max(0, offset - high + self.spare)

    def shift(self, position: int) -> int:
        """Return how far pinned tokens have moved for the query at ``position``; 0 until one is out of sight."""
        return 0 if position < self.window else ((position - self.window) // self.block + 1) * self.block

    def parts(self, start: int, count: int) -> list[ShiftedSpan]:
        parts, begin, stop = list[ShiftedSpan](), start, start + count
        while begin < stop:
            shift = self.shift(begin)
            end = min(stop, self.window + shift)
            parts.append(ShiftedSpan(begin - start, end - start, shift))
            begin = end
        return parts

    def mask(self, start: int, count: int, *, reach: int | None = None, as_array: bool = False) -> Mask:
        stop = start + count
        if (ahead := picture_groups()) is not None:
            ahead = ahead.within(reach)
        if reach is not None and reach >= self.window:
            reach = None
        if not as_array and ahead is None and stop <= min(self.window, reach or stop):
            return None if count == 1 else "causal"
        if count == 1 and reach is None and ahead is None:
            return None if self.spare == 0 and not as_array else _ring_row(self, start)
        rows = mx.arange(start, stop)
        in_slots = self.fits(start, count)
        columns = self._positions(stop) if in_slots else mx.concatenate([self._positions(start), rows])
        return visible(rows, columns, self.window, self.keep, reach, ahead=ahead)

    def _positions(self, offset: int) -> mx.array:
        used, size = self.used(offset), self.window + self.spare - self.keep
        slots = mx.arange(used)
        if offset <= used:
            return slots
        turned = offset - 1 - (offset - 1 - slots) % size  # the last p < offset with (p − keep) mod size = slot − keep
        return mx.where(slots < self.keep, slots, turned)


Layout = Growing | Ring


@lru_cache(maxsize=ROWS)
def _last_row(count: int, reach: int | None) -> mx.array:
    import numpy as np

    row = np.ones((1, count), dtype=np.bool_)
    row[:, : max(0, count - (reach or count))] = False
    return mx.array(row)


@lru_cache(maxsize=ROWS)
def _ring_row(ring: Ring, start: int) -> mx.array:
    import numpy as np

    # Made on the host: comparing positions on the device takes eight kernels per step.
    head = start - ring.keep
    if head < 0:
        return mx.array(np.ones((1, start + 1), dtype=np.bool_))
    size = ring.window + ring.spare - ring.keep
    used = min(head + 1, size)
    first = size - 1 - head % size
    return mx.array(np.concatenate([np.ones(ring.keep, dtype=np.bool_), _distances(ring)[first : first + used]])[None])


@lru_cache(maxsize=ROWS)
def _distances(ring: Ring) -> "npt.NDArray[np.bool_]":
    """Return visibility by slot distance size − 1 … −(size − 1) behind the newest token: (2·size − 1,)."""
    # A slot d behind holds the token d before the newest, a slot d ahead the one size − d before: each row is a
    # slice.
    import numpy as np

    size = ring.window + ring.spare - ring.keep
    behind = np.arange(size - 1, -size, -1) % size
    return behind < ring.window - ring.keep


def visible(
    rows: mx.array,
    columns: mx.array,
    window: int | None,
    keep: int,
    reach: int | None,
    *,
    ahead: PictureGroups | None = None,
) -> mx.array:
    """Return (N, T) of bool: whether position rows[i] sees columns[j]."""
    p, q = rows[:, None], columns[None]
    seen = q <= p
    if ahead is not None and ahead.slides:
        seen = ahead.joined(seen, rows, columns)
    if window is not None:
        recent = q > p - (window - keep)
        seen = seen & (recent | (q < keep) if keep else recent)
    if reach is not None:
        seen = seen & (q > p - reach)
    return seen if ahead is None or ahead.slides else ahead.joined(seen, rows, columns)


class Slots:
    """One codec's arrays, all (B, H, capacity, …); grown by a sixteenth at a time.

    step: slots come in multiples of it. addresses: of evaluated arrays; (): not evaluated; None: may be shared.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.step, self.capacity, self.nbytes = STEP, 0, 0
        self.held: Encoded = ()
        self.addresses: tuple[int, ...] | None = None

    @property
    def arrays(self) -> Encoded:
        self.addresses = None
        return self.held

    @arrays.setter
    def arrays(self, arrays: Encoded) -> None:
        self.held, self.addresses = arrays, None
        self.capacity = arrays[0].shape[2] if arrays else 0
        self.nbytes = sum([array.nbytes for array in arrays])

    def write(self, encoded: Encoded, spans: list[Span], used: int, reserve: int = 0) -> None:
        """Copy ``encoded`` to its slots, in place unless the arrays are shared."""
        self.addresses = None
        if used > self.capacity:
            self.grow(encoded, max(used, reserve))
        count = encoded[0].shape[2]
        for token, slot, length in spans:
            for array, new in zip(self.held, encoded, strict=True):
                part = new if length == count else new[..., token : token + length, :]
                # What is written over all of an array MLX takes in its place, in whatever order it lies; kernels count on this one.
                array[..., slot : slot + length, :] = mx.contiguous(part) if length == self.capacity else part

    def make(self, like: Encoded) -> None:
        self.grow(like, 1)

    def read(self, count: int) -> Encoded:
        arrays = self.arrays
        if count == self.capacity:
            return arrays
        return tuple([array[..., :count, :] for array in arrays])  # a list: this runs in every step of every layer

    def claim(self, used: int, slot: Callable[[], int]) -> Encoded:
        """Return the arrays once exclusively owned, lazy; () where ``in_place`` has them, or room must be made."""
        # MLX writes in place only what nobody else holds, so something is written first. Stores grow one by one: only
        # one exists twice.
        if self.addresses or used > self.capacity:
            return ()
        if self.addresses is None:
            at = slot()
            for array in self.held:
                array[..., at : at + 1, :] = mx.zeros((*array.shape[:2], 1, array.shape[3]), array.dtype)
            self.addresses = ()
        return self.held

    def in_place(self, used: int, slot: Callable[[], int]) -> tuple[int, ...]:
        """Return the addresses of the claimed, evaluated arrays with ``used`` slots. CPU only."""
        if used > self.capacity:
            self.grow(self.held, used)
        if not self.addresses:
            import numpy as np

            arrays = self.claim(used, slot)
            mx.eval(arrays)
            self.addresses = tuple(np.asarray(array).ctypes.data for array in arrays)
        return self.addresses

    def copy(self) -> "Slots":
        other = Slots(self._limit)
        other.step = self.step
        other.arrays = tuple(mx.array(array) for array in self.arrays)
        return other

    def split(self, at: int, used: int) -> tuple[Encoded, Encoded]:
        arrays = self.arrays
        front = tuple(mx.contiguous(array[..., :at, :]) for array in arrays)
        rest = tuple(mx.contiguous(array[..., at:used, :]) for array in arrays) if used > at else ()
        return front, rest

    def shrink(self, used: int) -> None:
        """Free all but the first ``used`` slots if at least half are unused; evaluates."""
        if self.held and used <= self.capacity // 2 and (self.capacity > self.step or not used):
            self.arrays = tuple([mx.contiguous(array[..., :used, :]) for array in self.held]) if used else ()
            mx.eval(self.held)

    def grow(self, like: Encoded, stop: int) -> None:
        capacity = grown(self.capacity, stop, self.step)
        if self._limit is not None:
            capacity = min(capacity, self._limit)
        made, nbytes = [], 0
        for number, x in enumerate(like):
            more = mx.zeros((*x.shape[:2], capacity - self.capacity, x.shape[3]), x.dtype)
            made.append(mx.concatenate([self.held[number], more], axis=2) if self.held else more)
            nbytes += made[-1].nbytes
        self.held, self.addresses, self.capacity, self.nbytes = tuple(made), None, capacity, nbytes


# recent      rows of the window, plus those needed for rewinding
# tails       compressor inputs of groups that are open or may be reopened by rewinding
# entries     one row per closed group of ``ratio`` tokens and compressor

# The last ``SPARE`` tokens can be trimmed exactly; further back only with a whole saved state (snapshot.py).


SPARE = 64  # tokens that can always be trimmed: what a window of 128 has spare elsewhere (plan.py), too
ROWS_STEP = 64  # entries by which an array grows, or a sixteenth where that is more

Rows = tuple[mx.array, mx.array]


class CompressedCache:
    """One layer's rows. Callers run ``slide``, ``close`` and ``append`` per compressor, then ``advance``.

    ratio: tokens per entry, 0 without compressors. reach: tokens before its group that an entry includes.
    """

    def __init__(self, window: int, ratio: int = 0, reach: int = 0, compressors: int = 0) -> None:
        self.window, self.ratio, self.reach = window, ratio, reach
        self.offset = 0
        self.recent: mx.array | None = None  # (B, R, D), the last R tokens
        self.tails: list[mx.array | None] = [None] * (2 * compressors)  # values and gates (B, R, ·) of each compressor
        self.entries: list[mx.array | None] = [None] * compressors  # (B, capacity, D)

    def slide(self, rows: mx.array) -> mx.array:
        """Add rows (B, N, D); return the visible rows (B, T, D), the new ones last."""
        known = rows if self.recent is None else mx.concatenate([self.recent, rows], axis=1)
        seen = self.seen_before + rows.shape[1]
        self.recent = mx.contiguous(_last(known, self.window - 1 + SPARE))  # a view would keep all of ``known``
        return _last(known, seen)

    @property
    def seen_before(self) -> int:
        return min(self.offset, self.window - 1)

    def close(self, compressor: int, values: mx.array, gates: mx.array) -> Rows | None:
        """Add compressor inputs (B, N, ·); return those of the groups they close, (B, reach + G × ratio, ·), or None."""
        # Before the first token, values are 0 and gates −∞.
        at, end = 2 * compressor, self.offset + values.shape[1]
        pair = []
        for index, rows in ((at, values), (at + 1, gates)):
            tail = self.tails[index]
            pair.append(rows if tail is None else mx.concatenate([tail, rows], axis=1))
        begin = end - pair[0].shape[1]  # position of the first row
        first_kept = max(begin, self._first_needed(end - SPARE))
        self.tails[at], self.tails[at + 1] = (mx.contiguous(rows[:, first_kept - begin :]) for rows in pair)
        first, last = self.offset // self.ratio * self.ratio - self.reach, end // self.ratio * self.ratio
        if last == first + self.reach:
            return None
        closed = [rows[:, max(first, 0) - begin : last - begin] for rows in pair]
        if first < 0:
            closed = [
                mx.pad(rows, [(0, 0), (-first, 0), (0, 0)], constant_values=mx.array(fill, rows.dtype))
                for rows, fill in zip(closed, (0.0, -mx.inf), strict=True)
            ]
        return closed[0], closed[1]

    @property
    def groups(self) -> int:
        return self.offset // self.ratio

    def append(self, compressor: int, rows: mx.array) -> None:
        """Add the entries (B, G, D) of the groups from ``close``."""
        first, entries = self.groups, self.entries[compressor]
        stop, capacity = first + rows.shape[1], 0 if entries is None else entries.shape[1]
        if stop > capacity:
            more = -(-max(stop - capacity, capacity // 16) // ROWS_STEP) * ROWS_STEP
            fresh = mx.zeros((rows.shape[0], more, rows.shape[2]), rows.dtype)
            entries = fresh if entries is None else mx.concatenate([entries, fresh], axis=1)
        assert entries is not None
        entries[:, first:stop] = rows
        self.entries[compressor] = entries

    def read(self, compressor: int, tokens: int) -> mx.array | None:
        """Return the entries (B, E, D) closed once ``tokens`` more are added, or None."""
        entries, count = self.entries[compressor], (self.offset + tokens) // self.ratio
        return None if entries is None or not count else entries[:, :count]

    def advance(self, tokens: int) -> None:
        self.offset += tokens

    @property
    def rewindable(self) -> int:
        if self.recent is None:
            return 0
        rows = self.recent.shape[1]
        least = 0 if rows == self.offset else self.offset - rows + self.window - 1
        for tail in self.tails[::2]:
            begin = self.offset - (0 if tail is None else tail.shape[1])
            if begin > 0:
                least = max(least, -(-(begin + self.reach) // self.ratio) * self.ratio)
        return max(0, self.offset - least)

    def is_trimmable(self) -> bool:
        return self.rewindable > 0 or self.offset == 0

    def trim(self, n: int) -> int:
        """Drop the last n tokens (at most all); return the count, 0 beyond ``rewindable``."""
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
        return [array for array in (self.recent, *self.tails, *self.entries) if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def bytes_per_token(self) -> int:
        share = 2 if self.reach else 1  # half of what an overlapping compressor is given goes into a group's own entry
        return round(sum(_row_bytes(tail) // share for tail in self.tails[::2]) / self.ratio) if self.ratio else 0

    @property
    def fixed_bytes(self) -> int:
        tokens = SPARE + self.reach + self.ratio
        return (self.window - 1 + SPARE) * _row_bytes(self.recent) + tokens * sum(map(_row_bytes, self.tails))

    def empty(self) -> bool:
        return self.recent is None

    def size(self) -> int:
        return self.offset

    def _first_needed(self, offset: int) -> int:
        return max(0, offset // self.ratio * self.ratio - self.reach) if offset > 0 else 0


def _last(rows: mx.array, count: int) -> mx.array:
    return rows if rows.shape[1] <= count else rows[:, -count:]


def _row_bytes(rows: mx.array | None) -> int:
    return 0 if rows is None else rows.shape[2] * rows.itemsize
