"""Packed products y (N, out) = x (N, in) Wᵀ; all cores read W once, in MLX's format."""

# One kernel per format. Scales and biases become float32 a few rows at a time. Rows of x may be rounded to int8
# (byte_tiles.py): twice as fast, where a model tolerates it (layers.py).

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from .byte_tiles import EXACT, PADS, can_round, padded, round_row, rounded_bytes, tiles
from .pool import POOL, call, compile_kernel, inner, run
from .tiles import BFLOAT16, E8M0, FLOAT16, FLOAT32, FORMATS, FORMS, LANES, WeightFormat, unpack

OUTS = 4  # rows of W in a piece of work

LEAST_WORK = 1 << 16  # products in what a thread takes at once, at least: some microseconds

ALONE = 2 * LEAST_WORK  # up to this many the caller does all: to hand work over and back takes as long as half of it

# Pieces that a thread takes at once, at most, and of MANY_ROWS: their weights stay in its cache while the rows of x
# pass.
MOST_PIECES = 16

MANY_ROWS = 16

ROWS_AT_ONCE = 8  # rows of x that a thread prepares at once

SHARES = 4  # how many times a thread takes pieces, at least, where there are enough: so none waits long for the last

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int64]

# Words of a kernel's arguments. Addresses, and: bytes of a row of W, x and y; how scales are stored; groups in a row;
# sixteens in a group; rows of x; of W.
WEIGHTS, ROW_BYTES, SCALES, BIASES, STORED, GROUPS, BLOCKS, X, X_BYTES, Y, Y_BYTES, COUNT, WIDTH = range(13)


PER_MATRIX = 3  # words of one of several matrices: its first piece, kernel and arguments


def _view(kind: Any) -> Callable[..., Any]:
    """Return f(address, shape) that views memory as an array."""
    # numba's ``carray`` is compiled for each kind and count, and counts references.

    def view(typingctx: Any, address: Any, shape: Any) -> Any:  # noqa: ARG001
        several = isinstance(shape, types.BaseTuple)
        sizes = shape.count if several else 1

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place, given = values
            shape = cgutils.unpack_tuple(builder, given, sizes) if several else [given]
            item = context.get_constant(types.intp, kind.bitwidth // 8)
            strides = [item]
            for size in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            made = context.make_array(signature.return_type)(context, builder)
            data = builder.inttoptr(place, context.get_value_type(kind).as_pointer())
            populate_array(made, data=data, shape=shape, strides=strides, itemsize=item, meminfo=None)
            return made._getvalue()

        given = types.UniTuple(types.intp, sizes) if several else types.intp
        return types.Array(kind, sizes, "C")(types.intp, given), generate

    made: Callable[..., Any] = intrinsic(view)
    return made


words_at, halves_at, bytes_at, floats_at = (
    _view(kind) for kind in (types.intp, types.uint16, types.uint8, types.float32)
)

SMALLEST = np.float32(2.0**-127)  # what an exponent of 0 stands for

MEND_16 = np.float32(2.0**112)
# What a half's or an e4m3's bits, moved to float32's place, must be multiplied by: exact, for subnormal ones, too.
MEND_8 = np.float32(2.0**120)


@inner
def _widen(stored: int, address: int, first: int, count: int, into: int) -> None:
    out = floats_at(into, count)
    if stored == FLOAT32:
        floats = floats_at(address + 4 * first, count)
        for i in range(count):
            out[i] = floats[i]
    elif stored == BFLOAT16:
        halves = halves_at(address + 2 * first, count)
        for i in range(count):
            out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    elif stored == FLOAT16:
        halves = halves_at(address + 2 * first, count)
        for i in range(count):
            bits = np.uint32(halves[i])
            size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * MEND_16
            out[i] = -size if bits & np.uint32(0x8000) else size
    elif stored == E8M0:
        small = bytes_at(address + first, count)
        for i in range(count):
            exponent = np.uint32(small[i])
            out[i] = SMALLEST if exponent == 0 else np.uint32(exponent << np.uint32(23)).view(np.float32)
    else:
        small = bytes_at(address + first, count)
        for i in range(count):
            bits = np.uint32(small[i])
            size = np.uint32((bits & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * MEND_8
            out[i] = -size if bits & np.uint32(0x80) else size


Kernel = Callable[[int, int, int], None]  # see compiling.KERNEL


def _kernel(form: int, rounded: int) -> Kernel:
    pads, may_widen = PADS and rounded != EXACT, PADS or rounded == EXACT
    there = FLOAT32 if may_widen else rounded  # in tiles
    in_tiles = EXACT if rounded == EXACT else there

    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, 13)
        groups, blocks, count = given[GROUPS], given[BLOCKS], given[COUNT]
        begin, stop = OUTS * first, min(OUTS * last, given[WIDTH])
        numbers = padded(groups) if pads else groups
        scale_row = numbers * (4 if there == FLOAT32 else 2)
        scales, biases, skip = given[SCALES], given[BIASES], 0
        if may_widen:
            widens = pads or given[STORED] != there
            wide = np.zeros((2, (stop - begin) * numbers if widens else 1), np.float32)
            if widens:
                into: Any = np.intp(wide.ctypes.data)
                behind = into + (stop - begin) * scale_row
                for out in range(stop - begin):
                    _widen(given[STORED], scales, (begin + out) * groups, groups, into + out * scale_row)
                    if biases != 0:
                        _widen(given[STORED], biases, (begin + out) * groups, groups, behind + out * scale_row)
                scales, biases, skip = into, behind if biases != 0 else 0, begin
        if biases == 0:
            biases = scales
        weights, at = given[WEIGHTS] + begin * given[ROW_BYTES], (begin - skip) * scale_row
        scales, biases, outs, row = scales + at, biases + at, stop - begin, 0
        while row < count:
            rows = 4 if count - row >= 4 else (2 if count - row >= 2 else 1)
            x, y, fresh = given[X] + row * given[X_BYTES], given[Y] + row * given[Y_BYTES] + 4 * begin, int(row == 0)
            if rows == 4:
                tiles(
                    form, in_tiles, 4, weights, given[ROW_BYTES], scales, biases, groups, blocks,
                    x, given[X_BYTES], y, given[Y_BYTES], outs, fresh,
                )  # fmt: skip
            elif rows == 2:
                tiles(
                    form, in_tiles, 2, weights, given[ROW_BYTES], scales, biases, groups, blocks,
                    x, given[X_BYTES], y, given[Y_BYTES], outs, fresh,
                )  # fmt: skip
            else:
                tiles(
                    form, in_tiles, 1, weights, given[ROW_BYTES], scales, biases, groups, blocks,
                    x, given[X_BYTES], y, given[Y_BYTES], outs, fresh,
                )  # fmt: skip
            row += rows
        if may_widen:
            wide[0, 0] = 0  # numba lets go of an array after it was last named, whoever still has its address

    return kernel


def _rounding_kernel(form: int) -> Kernel:
    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, 6)
        size, group_size = given[2], given[5]
        for row in range(first, last):
            x, out = given[0] + row * given[1], given[3] + row * given[4]
            round_row(form, x, size // group_size, group_size // LANES, out)

    return kernel


def _swap(arguments: int, first: int, last: int) -> None:
    given = words_at(arguments, 6)
    size = given[2]
    for row in range(first, last):
        x = floats_at(given[0] + row * given[1], size)
        out = floats_at(given[3] + row * given[4], size)
        for begin in range(0, size, LANES):
            for i in range(LANES // 2):
                out[begin + 2 * i] = x[begin + i]
                out[begin + 2 * i + 1] = x[begin + LANES // 2 + i]


def _several(arguments: int, first: int, last: int) -> None:
    count = words_at(arguments, 1)[0]
    given = words_at(arguments + 8, PER_MATRIX * count + 1)
    for each in range(count):
        words = given[PER_MATRIX * each : PER_MATRIX * each + PER_MATRIX + 1]
        begin, stop = max(first, words[0]), min(last, words[PER_MATRIX])
        if begin < stop:
            call(words[1], words[2], begin - words[0], stop - words[0])


@cache
def several() -> int:
    return compile_kernel(_several)


@cache
def kernel_of(format: WeightFormat, rounded: int = EXACT) -> int:
    return compile_kernel(_kernel(FORMATS.index(format), rounded))


@dataclass(frozen=True, slots=True)
class Preparation:
    """How rows of x are prepared; matrices with equal preparation share them.

    rounded: to int8; else 4-bit unpacking order 0 8 1 9 … 7 15 within each sixteen. The kernel's pieces are rows.
    """

    format: WeightFormat
    columns: int
    group_size: int
    rounded: bool

    @property
    def kernel(self) -> int:
        return _preparing(self.format, rounded=self.rounded)

    @property
    def row_bytes(self) -> int:
        return rounded_bytes(self.format, self.columns, self.group_size) if self.rounded else 4 * self.columns

    def arguments(self, x: npt.NDArray[Any], out: npt.NDArray[Any]) -> Words:
        words = (x.ctypes.data, x.strides[0], self.columns, out.ctypes.data, out.strides[0], self.group_size)
        return np.array(words, np.int64)


@cache
def _preparing(format: WeightFormat, *, rounded: bool) -> int:
    return compile_kernel(_rounding_kernel(FORMATS.index(format)) if rounded else _swap)


def prepare(format: WeightFormat, stored: int, *, rounded: bool) -> None:
    columns, outs = 2 * LANES, SHARES * OUTS  # so many numbers of any bits are whole words
    words = np.zeros((outs, columns * format.bits // 32), np.uint32)
    none = np.zeros((outs, 1), np.float32)  # large enough, however they are stored
    matrix = PackedMatrix(words, none, none, format, columns, stored)
    for each in (matrix, replace(matrix, rounds=True)) if rounded else (matrix,):
        each.multiply(np.zeros((1, columns), np.float32))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W (out, in) in MLX's packing, as views of the model's arrays.

    scales, biases: (out, groups) float32, half bits (``stored``) or bytes; biases only if affine. rounds: int8
    rows, only where ``can_round``.
    """

    weight: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    biases: npt.NDArray[Any] | None
    format: WeightFormat
    group_size: int
    stored: int
    rounds: bool = False
    _arguments: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert not self.rounds or can_round(self.format)
        words = np.zeros(13, np.int64)
        words[WEIGHTS], words[ROW_BYTES] = self.weight.ctypes.data, self.weight.strides[0]
        words[SCALES] = self.scales.ctypes.data
        words[BIASES] = 0 if self.biases is None else self.biases.ctypes.data
        words[STORED], words[GROUPS], words[BLOCKS] = self.stored, self.scales.shape[1], self.group_size // LANES
        words[WIDTH] = len(self.weight)
        object.__setattr__(self, "_arguments", words)

    @property
    def kernel(self) -> int:
        return kernel_of(self.format, self.stored if self.rounds else EXACT)

    @property
    def preparation(self) -> Preparation | None:
        if not self.rounds and not self.format.swaps:
            return None
        return Preparation(self.format, self.scales.shape[1] * self.group_size, self.group_size, self.rounds)

    def multiply(self, x: Floats) -> Floats:
        """Return contiguous x (N, in) Wᵀ: (N, out)."""
        count, columns = x.shape
        y = np.empty((count, len(self.weight)), np.float32)
        pool = POOL.acquire()
        try:
            rows = self._prepared(x, pool)
            words = self._arguments.copy()
            words[X], words[X_BYTES], words[COUNT] = rows.ctypes.data, rows.strides[0], count
            words[Y], words[Y_BYTES] = y.ctypes.data, y.strides[0]
            pieces, size = shares(count, len(self.weight), columns, POOL.threads)
            run(pool, self.kernel, words.ctypes.data, pieces, size)
        finally:
            POOL.release(pool)
        return y

    def multiply_chosen(self, x: Floats, rows: Words, parts: Words, outs: int) -> Floats:
        """Return y (N, outs): ``rows[i]`` of x (M, in) times expert ``parts[i]``'s ``outs`` rows of W.

        Rows of one expert are multiplied together: each is read once, unused ones never.
        """
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts)
        chosen = np.flatnonzero(counts)
        counts = counts[chosen]
        begin = np.cumsum(counts) - counts
        y = np.empty((len(order), outs), np.float32)
        pool = POOL.acquire()
        try:
            sorted_rows = self._prepared(x, pool)[rows[order]]
            words = np.repeat(self._arguments[None], len(chosen), axis=0)
            words[:, WEIGHTS] += chosen * (outs * self.weight.strides[0])
            words[:, SCALES] += chosen * (outs * self.scales.strides[0])
            if self.biases is not None:
                words[:, BIASES] += chosen * (outs * self.biases.strides[0])
            words[:, X] = sorted_rows.ctypes.data + begin * sorted_rows.strides[0]
            words[:, Y] = y.ctypes.data + begin * y.strides[0]
            words[:, X_BYTES], words[:, Y_BYTES] = sorted_rows.strides[0], y.strides[0]
            words[:, COUNT], words[:, WIDTH] = counts, outs
            pieces = -(-outs // OUTS)
            table = np.empty(PER_MATRIX * len(chosen) + 2, np.int64)
            table[0], table[-1] = len(chosen), pieces * len(chosen)
            table[1:-1:PER_MATRIX] = pieces * np.arange(len(chosen))
            table[2:-1:PER_MATRIX] = self.kernel
            table[3:-1:PER_MATRIX] = words.ctypes.data + words.strides[0] * np.arange(len(chosen))
            together = -(-len(order) // len(chosen))
            _, size = shares(together, outs * len(chosen), x.shape[1], POOL.threads)
            run(pool, several(), table.ctypes.data, pieces * len(chosen), size)
        finally:
            POOL.release(pool)
        result = np.empty_like(y)
        result[order] = y
        return result

    def _prepared(self, x: Floats, pool: int) -> npt.NDArray[Any]:
        preparation = self.preparation
        if preparation is None:
            return x
        rows = np.zeros((len(x), preparation.row_bytes), np.uint8)
        before = preparation.arguments(x, rows)
        run(pool, preparation.kernel, before.ctypes.data, len(x), ROWS_AT_ONCE)
        return rows


def shares(rows: int, outs: int, columns: int, threads: int) -> tuple[int, int]:
    pieces = -(-outs // OUTS)
    if outs * columns * rows <= ALONE:
        return pieces, pieces
    wanted = MOST_PIECES if rows >= MANY_ROWS else min(LEAST_WORK // (OUTS * columns * rows) + 1, MOST_PIECES)
    return pieces, max(1, min(wanted, pieces // (SHARES * threads)))


# Packed token vectors, unpacked row by row.

# Beyond the words of a product's arguments: addresses of ids and of the rows that are written, and their bytes.
IDS, OUT, OUT_BYTES = range(13, 16)


@cache
def _kernel_of(format: WeightFormat) -> int:
    form = FORMATS.index(format)

    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, OUT_BYTES + 1)
        groups = given[GROUPS]
        ids = words_at(given[IDS], last)
        wide = np.zeros((2, groups), np.float32)
        scales: Any = np.intp(wide.ctypes.data)
        biases = scales + 4 * groups if given[BIASES] != 0 else scales
        for row in range(first, last):
            token = ids[row]
            _widen(given[STORED], given[SCALES], groups * token, groups, scales)
            if given[BIASES] != 0:
                _widen(given[STORED], given[BIASES], groups * token, groups, biases)
            first_at = given[WEIGHTS] + token * given[ROW_BYTES]
            unpack(form, first_at, scales, biases, groups, given[BLOCKS], given[OUT] + row * given[OUT_BYTES])
        wide[0, 0] = 0  # numba lets go of an array after it was last named, whoever still has its address

    return compile_kernel(kernel)


def embedding_of(matrix: PackedMatrix, ids: Any, out: Any, keep: Callable[[Any], Any]) -> tuple[int, int]:
    words = keep(np.zeros(OUT_BYTES + 1, np.int64))
    words[: len(matrix._arguments)] = matrix._arguments
    words[IDS], words[OUT], words[OUT_BYTES] = ids.ctypes.data, out.ctypes.data, out.strides[0]
    return _kernel_of(matrix.format), words.ctypes.data


assert FORMS[: len(FORMATS)] == FORMATS
