"""Which slot a token's keys and values have, and which tokens another may see: arithmetic on positions, and the arrays themselves.

A window of ``window`` tokens counts its ``keep`` pinned first ones (attention sinks, https://arxiv.org/abs/2309.17453). The token
at position p sees q ≤ p where q < keep or q > p − (window − keep).

Rewinding a ring after it has wrapped needs the tokens that were overwritten. So the ring has ``spare`` slots more than the window:
what falls out of sight stays there, unseen, for ``spare`` tokens more. No copy is made, and the bytes count.

Number line of a ring (``size`` = window − keep + spare), after ``high`` tokens at most were ever written:

    0 ··· keep ··············· high − size ········ offset − (window − keep) ·········· offset ······ high
    pinned      gone for ever               unseen,                             seen           taken back
                                            for rewinding

Pinned tokens move along with the window, where their keys can be rotated further (rotary.py), so that nothing seen is ever further
back than the window is long. They move in steps of a ``block``, half of the slots that slide: to the query at position
p ≥ window the pinned token at position q has the position q + shift(p), the next multiple of a block that is more than p − window.
It depends on p alone, so neither cuts nor rewinding change it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import OptionError
from .codec import Encoded
from .sizes import STEP, grown

Mask = mx.array | Literal["causal"] | None
"""(N, T) of bool, the word for plain causal, or None where all is seen."""

BLOCKS = 2
"""Steps in which pinned tokens move while the window moves by its own length. Fewer leave them closer to the query than they are
numbered, by a block at most; more rewrite their keys more often, and divide a prompt's attention into more calls."""
LEAST_BLOCK = 16
"""Positions that pinned tokens move by at least, where as many slide: a prompt's attention is called once for each block."""
ROWS = 4
"""Masks of a single token to keep: layers of one layout share theirs, and few models have more than two layouts."""


class Span(NamedTuple):
    """The tokens ``token``…``token + length`` of a call go to the slots ``slot``…``slot + length``."""

    token: int
    slot: int
    length: int


class ShiftedSpan(NamedTuple):
    """The tokens ``begin``…``stop`` of a call see the pinned ones ``shift`` positions further on."""

    begin: int
    stop: int
    shift: int


@dataclass(frozen=True, slots=True)
class Growing:
    """Every token is kept, in order. window: tokens seen at most. limit: slots at most. None: no bound."""

    window: ClassVar[None] = None
    limit: ClassVar[None] = None

    def used(self, offset: int) -> int:
        """Return the slots that hold something worth reading once ``offset`` tokens are held."""
        return offset

    def fits(self, start: int, count: int) -> bool:  # noqa: ARG002
        """Whether writing ``count`` tokens after ``start`` spares everything that the first of them may see."""
        return True

    def spans(self, start: int, count: int) -> list[Span]:
        """Return where to write ``count`` tokens after ``start``, without those that would be overwritten at once."""
        return [Span(0, start, count)]

    def rewindable(self, offset: int, high: int) -> int:  # noqa: ARG002
        """Return how many tokens can be trimmed exactly from ``offset``; ``high``: the most that were ever held."""
        return offset

    def mask(self, start: int, count: int, *, reach: int | None = None, as_array: bool = False) -> Mask:
        """Return who sees whom: rows are the ``count`` tokens after ``start``, columns what ``Cache.update_and_fetch`` returns.

        reach: the window that the model itself asks for, if any. as_array: the model needs the array.
        """
        if not as_array and (reach is None or start + count <= reach):
            return None if count == 1 else "causal"
        if count == 1:
            return _last_row(start + 1, reach)
        return visible(mx.arange(start, start + count), mx.arange(start + count), None, 0, reach)


@dataclass(frozen=True, slots=True)
class Ring:
    """The last tokens of a window, and the first ``keep`` for ever; ``spare`` slots more to rewind into."""

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
        """Slots at most."""
        return self.window + self.spare

    @property
    def block(self) -> int:
        """Positions by which the pinned tokens move at once."""
        slides = self.window - self.keep
        return max(slides // BLOCKS, min(slides, LEAST_BLOCK))

    def used(self, offset: int) -> int:
        """Return all slots, once full."""
        return min(offset, self.window + self.spare)

    def fits(self, start: int, count: int) -> bool:
        """Whether the ring is not yet full, or the tokens are at most one more than the spare slots."""
        return start + count <= self.window + self.spare or count <= self.spare + 1

    def spans(self, start: int, count: int) -> list[Span]:
        """Return the pinned tokens, then the last of the others, in two parts where the ring's end lies between."""
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
        """Return everything until something was overwritten; then what the spare slots still cover."""
        if high <= self.window + self.spare:
            return offset
        return max(0, offset - high + self.spare)

    def shift(self, position: int) -> int:
        """Return by how many positions the pinned tokens have moved for the query at ``position``: 0 until one is out of sight."""
        return 0 if position < self.window else ((position - self.window) // self.block + 1) * self.block

    def parts(self, start: int, count: int) -> list[ShiftedSpan]:
        """Return the parts of a call of ``count`` tokens after ``start`` that see the pinned tokens at the same positions."""
        parts, begin, stop = list[ShiftedSpan](), start, start + count
        while begin < stop:
            shift = self.shift(begin)
            end = min(stop, self.window + shift)
            parts.append(ShiftedSpan(begin - start, end - start, shift))
            begin = end
        return parts

    def mask(self, start: int, count: int, *, reach: int | None = None, as_array: bool = False) -> Mask:
        """Return who sees whom, by position; None or "causal" while nothing has left the window. See ``Growing.mask``."""
        stop = start + count
        if reach is not None and reach >= self.window:
            reach = None
        if not as_array and stop <= min(self.window, reach or stop):
            return None if count == 1 else "causal"
        if count == 1 and reach is None:
            return None if self.spare == 0 and not as_array else _ring_row(self, start)
        rows = mx.arange(start, stop)
        in_slots = self.fits(start, count)
        columns = self._positions(stop) if in_slots else mx.concatenate([self._positions(start), rows])
        return visible(rows, columns, self.window, self.keep, reach)

    def _positions(self, offset: int) -> mx.array:
        """Return which token each used slot holds when ``offset`` tokens are held: (T,)."""
        used, size = self.used(offset), self.window + self.spare - self.keep
        slots = mx.arange(used)
        if offset <= used:
            return slots
        turned = offset - 1 - (offset - 1 - slots) % size  # the last p < offset with (p − keep) mod size = slot − keep
        return mx.where(slots < self.keep, slots, turned)


Layout = Growing | Ring


@lru_cache(maxsize=ROWS)
def _last_row(count: int, reach: int | None) -> mx.array:
    """Return ``visible`` for the last of ``count`` tokens in order: (1, count). Made on the host, like ``_ring_row``."""
    row = np.ones((1, count), dtype=np.bool_)
    row[:, : max(0, count - (reach or count))] = False
    return mx.array(row)


@lru_cache(maxsize=ROWS)
def _ring_row(ring: Ring, start: int) -> mx.array:
    """Return ``visible`` for the one token after ``start``: (1, T).

    Made on the host and copied, so it costs the device no kernel; comparing positions there takes eight in every step.
    """
    head = start - ring.keep
    if head < 0:
        return mx.array(np.ones((1, start + 1), dtype=np.bool_))
    size = ring.window + ring.spare - ring.keep
    used = min(head + 1, size)
    first = size - 1 - head % size
    return mx.array(np.concatenate([np.ones(ring.keep, dtype=np.bool_), _distances(ring)[first : first + used]])[None])


@lru_cache(maxsize=ROWS)
def _distances(ring: Ring) -> npt.NDArray[np.bool_]:
    """Return for slots size − 1 … −(size − 1) behind the newest token's whether that token sees them: (2·size − 1,).

    ``size`` counts the slots that turn, without the pinned ones. A slot d behind holds the token d before the newest, a slot d
    ahead the one size − d before it. So every row is ``size`` of these values in sequence; the newest token's slot says from where.
    """
    size = ring.window + ring.spare - ring.keep
    behind = np.arange(size - 1, -size, -1) % size
    return behind < ring.window - ring.keep


def visible(rows: mx.array, columns: mx.array, window: int | None, keep: int, reach: int | None) -> mx.array:
    """Return (N, T) of bool: whether the token at position rows[i] sees the one at columns[j]."""
    p, q = rows[:, None], columns[None]
    seen = q <= p
    if window is not None:
        recent = q > p - (window - keep)
        seen = seen & (recent | (q < keep) if keep else recent)
    if reach is not None:
        seen = seen & (q > p - reach)
    return seen


class Slots:
    """The arrays of one codec, all (B, H, capacity, …): made on the first write, grown by a sixteenth at a time.

    step: slots are made in multiples of it. capacity: how many there are.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.step, self.capacity = STEP, 0
        self._arrays: Encoded = ()
        self._addresses: tuple[int, ...] | None = None  # None: others may hold the arrays; (): they are not evaluated

    @property
    def arrays(self) -> Encoded:
        """The arrays. Whoever has them may keep them."""
        self._addresses = None
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Encoded) -> None:
        self._arrays, self._addresses = arrays, None
        self.capacity = arrays[0].shape[2] if arrays else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, unused slots included."""
        return sum(array.nbytes for array in self._arrays)

    def write(self, encoded: Encoded, spans: list[Span], used: int, reserve: int = 0) -> None:
        """Copy tokens of ``encoded`` to their slots, of which ``used`` will then be in use, and ``reserve`` soon.

        In place where nobody else holds the arrays: nothing else is copied, however much is held.
        """
        self._addresses = None
        if used > self.capacity:
            self._grow(encoded, max(used, reserve))
        count = encoded[0].shape[2]
        for token, slot, length in spans:
            for array, new in zip(self._arrays, encoded, strict=True):
                part = new if length == count else new[..., token : token + length, :]
                # What is written over all of an array MLX takes in its place, in whatever order it lies; kernels count on this one.
                array[..., slot : slot + length, :] = mx.contiguous(part) if length == self.capacity else part

    def make(self, like: Encoded) -> None:
        """Make the first slots, for tokens like this one."""
        self._grow(like, 1)

    def read(self, count: int) -> Encoded:
        """Return views of the first ``count`` slots."""
        arrays = self.arrays
        if count == self.capacity:
            return arrays
        return tuple([array[..., :count, :] for array in arrays])  # a list: this runs in every step of every layer

    def claim(self, used: int, slot: Callable[[], int]) -> Encoded:
        """Return the arrays, lazy, once nobody else holds them; () where ``in_place`` knows them so, or has to make room in them.

        Room is made in one store after another: only one is there twice then. slot: tells the first that the caller will write
        itself. For stores that hold something. What MLX writes in place is held by nobody else; so something is written there
        first, unless nobody asked for the arrays since.
        """
        if self._addresses or used > self.capacity:
            return ()
        if self._addresses is None:
            at = slot()
            for array in self._arrays:
                array[..., at : at + 1, :] = mx.zeros((*array.shape[:2], 1, array.shape[3]), array.dtype)
            self._addresses = ()
        return self._arrays

    def in_place(self, used: int, slot: Callable[[], int]) -> tuple[int, ...]:
        """Return the addresses of what was claimed, evaluated, with ``used`` slots: on a CPU."""
        if used > self.capacity:
            self._grow(self._arrays, used)
        if not self._addresses:
            arrays = self.claim(used, slot)
            mx.eval(arrays)
            self._addresses = tuple(np.asarray(array).ctypes.data for array in arrays)
        return self._addresses

    def copy(self) -> "Slots":
        """Return a store of the same arrays; whichever of the two writes first makes its own copy then."""
        other = Slots(self._limit)
        other.step = self.step
        other.arrays = tuple(mx.array(array) for array in self.arrays)
        return other

    def split(self, at: int, used: int) -> tuple[Encoded, Encoded]:
        """Return copies of the first ``at`` slots, and of the rest of the ``used`` ones (() if there is none); lazy."""
        arrays = self.arrays
        front = tuple(mx.contiguous(array[..., :at, :]) for array in arrays)
        rest = tuple(mx.contiguous(array[..., at:used, :]) for array in arrays) if used > at else ()
        return front, rest

    def shrink(self, used: int) -> None:
        """Free all but the first ``used`` slots, where at least half are unused; evaluates."""
        if self._arrays and used <= self.capacity // 2:
            self.arrays = tuple(mx.contiguous(array[..., :used, :]) for array in self._arrays) if used else ()
            mx.eval(self._arrays)

    def _grow(self, like: Encoded, stop: int) -> None:
        capacity = grown(self.capacity, stop, self.step)
        if self._limit is not None:
            capacity = min(capacity, self._limit)
        fresh = [mx.zeros((*x.shape[:2], capacity - self.capacity, x.shape[3]), x.dtype) for x in like]
        if self._arrays:
            fresh = [mx.concatenate(list(pair), axis=2) for pair in zip(self._arrays, fresh, strict=True)]
        self.arrays = tuple(fresh)
