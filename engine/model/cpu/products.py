"""Products with packed weights: y (N, out) = x (N, in) Wᵀ, with W as MLX packs it, read once from memory by all cores.

One kernel for each way of packing goes through the tiles (tiles.py) of some rows of W. Scales and biases stay as they are stored,
and become float32 a few rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, literally, types
from numba.extending import intrinsic

from .compiling import compile_kernel, compiled
from .pool import POOL, run
from .tiles import FORMATS, LANES, WeightFormat, tile

OUTS = 4
"""Rows of W in a tile, and in a piece of work."""

ROWS = 4
"""Rows of x in a tile at most. Four on four sums, and what they are made from, are the registers that AVX-512 has."""

LEAST_WORK = 1 << 16
"""Products in what a thread takes at once, at least: some microseconds."""

MOST_PIECES = 16
"""Pieces that a thread takes at once, at most, and of MANY_ROWS: their weights stay in its cache while the rows of x pass."""

MANY_ROWS = 16

SHARES = 4
"""How many times a thread takes pieces, at least, where there are enough: so none waits long for the last."""

Floats = npt.NDArray[np.float32]

# Words of a kernel's arguments.
WEIGHTS, ROW_BYTES, SCALES, BIASES, STORED, GROUPS, BLOCKS, X, X_BYTES, Y, Y_BYTES, COUNT, WIDTH = range(13)
"""Addresses, and: bytes of a row of W, x and y; how scales are stored; groups in a row; sixteens in a group; rows of x; of W."""

FLOAT32, BFLOAT16, FLOAT16, E8M0, E4M3 = range(5)
"""How scales and biases are stored."""


def _pointer(kind: Any) -> Callable[[int], Any]:
    """Return what makes an address a pointer to this."""

    def pointer(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    made: Callable[[int], Any] = intrinsic(pointer)
    return made


words_at, halves_at, bytes_at, floats_at = (
    _pointer(kind) for kind in (types.intp, types.uint16, types.uint8, types.float32)
)

SMALLEST = np.float32(2.0**-127)
"""What an exponent of 0 stands for."""

MEND_16 = np.float32(2.0**112)
MEND_8 = np.float32(2.0**120)
"""What a half's or an e4m3's bits, moved to float32's place, must be multiplied by: exact, for subnormal ones, too."""


@compiled
def _widen(stored: int, address: int, first: int, out: Floats) -> None:
    """Write to ``out`` as many numbers, from the ``first`` on, as it has room for."""
    count = len(out)
    if stored == BFLOAT16:
        halves = carray(halves_at(address + 2 * first), count)
        for i in range(count):
            out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    elif stored == FLOAT16:
        halves = carray(halves_at(address + 2 * first), count)
        for i in range(count):
            bits = np.uint32(halves[i])
            size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * MEND_16
            out[i] = -size if bits & np.uint32(0x8000) else size
    elif stored == E8M0:
        small = carray(bytes_at(address + first), count)
        for i in range(count):
            exponent = np.uint32(small[i])
            out[i] = SMALLEST if exponent == 0 else np.uint32(exponent << np.uint32(23)).view(np.float32)
    else:
        small = carray(bytes_at(address + first), count)
        for i in range(count):
            bits = np.uint32(small[i])
            size = np.uint32((bits & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * MEND_8
            out[i] = -size if bits & np.uint32(0x80) else size


@compiled
def multiply_pieces(arguments: int, first: int, last: int, form: int) -> None:
    """Multiply all rows of x with the rows of W from OUTS · first to before OUTS · last. form: a literal, a place in FORMATS."""
    literally(form)
    given = carray(words_at(arguments), 13)
    groups, blocks, count = given[GROUPS], given[BLOCKS], given[COUNT]
    begin, stop = OUTS * first, min(OUTS * last, given[WIDTH])
    scales, biases, skip = given[SCALES], given[BIASES], begin
    wide = np.empty((2, 1 if given[STORED] == FLOAT32 else (stop - begin) * groups), np.float32)
    if given[STORED] != FLOAT32:
        _widen(given[STORED], scales, begin * groups, wide[0])
        scales = wide[0].ctypes.data
        if biases != 0:
            _widen(given[STORED], biases, begin * groups, wide[1])
            biases = wide[1].ctypes.data
        else:
            biases = scales
        skip = 0
    elif biases == 0:
        biases = scales
    row = 0
    while row < count:
        rows = 4 if count - row >= 4 else (2 if count - row >= 2 else 1)
        x, y = given[X] + row * given[X_BYTES], given[Y] + row * given[Y_BYTES]
        for out in range(begin, stop, OUTS):
            weights = given[WEIGHTS] + out * given[ROW_BYTES]
            at = 4 * groups * (out - begin + skip)
            if stop - out < OUTS:
                for one in range(out, stop):
                    weights = given[WEIGHTS] + one * given[ROW_BYTES]
                    at = 4 * groups * (one - begin + skip)
                    for each in range(rows):
                        tile(
                            form, 1, 1, weights, given[ROW_BYTES], scales + at, biases + at, groups, blocks,
                            x + each * given[X_BYTES], given[X_BYTES], y + each * given[Y_BYTES] + 4 * one, given[Y_BYTES],
                        )  # fmt: skip
            elif rows == 4:
                tile(
                    form, 4, 4, weights, given[ROW_BYTES], scales + at, biases + at, groups, blocks,
                    x, given[X_BYTES], y + 4 * out, given[Y_BYTES],
                )  # fmt: skip
            elif rows == 2:
                tile(
                    form, 4, 2, weights, given[ROW_BYTES], scales + at, biases + at, groups, blocks,
                    x, given[X_BYTES], y + 4 * out, given[Y_BYTES],
                )  # fmt: skip
            else:
                tile(
                    form, 4, 1, weights, given[ROW_BYTES], scales + at, biases + at, groups, blocks,
                    x, given[X_BYTES], y + 4 * out, given[Y_BYTES],
                )  # fmt: skip
        row += rows
    wide[0, 0] = 0  # numba lets go of an array after it was last named, whoever still has its address


def _affine_2(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 0)


def _affine_3(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 1)


def _affine_4(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 2)


def _affine_5(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 3)


def _affine_6(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 4)


def _affine_8(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 5)


def _fp4(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 6)


def _fp8(arguments: int, first: int, last: int) -> None:
    multiply_pieces(arguments, first, last, 7)


KERNELS = (_affine_2, _affine_3, _affine_4, _affine_5, _affine_6, _affine_8, _fp4, _fp8)
"""One for each of FORMATS: each is compiled when a model needs it."""


@cache
def kernel_of(format: WeightFormat) -> int:
    """Return the address of the kernel for a format, compiled now if it was not."""
    return compile_kernel(KERNELS[FORMATS.index(format)])


def prepare(format: WeightFormat) -> None:
    """Compile all that products of this format run: with one matrix of a few weights, one row of which is multiplied."""
    columns, outs = LANES, SHARES * OUTS
    groups = 1
    none = np.zeros((outs, groups), np.float32)
    words = np.zeros((outs, columns * format.bits // 32), np.uint32)
    PackedMatrix(words, none, none, format, columns, FLOAT32).multiply(np.zeros((1, columns), np.float32))


@compiled
def swap(x: Floats) -> Floats:
    """Return x (N, in) in the order in which words of 4 bits unpack: 0 8 1 9 … 7 15 within each sixteen."""
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        for begin in range(0, x.shape[1], LANES):
            for i in range(LANES // 2):
                out[row, begin + 2 * i] = x[row, begin + i]
                out[row, begin + 2 * i + 1] = x[row, begin + LANES // 2 + i]
    return out


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W (out, in), as MLX packs it. The arrays are the model's own, seen by NumPy.

    scales, biases: (out, groups) of float32, of the bits of halves (``stored``), or of bytes; biases: None but for affine weights.
    """

    weight: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    biases: npt.NDArray[Any] | None
    format: WeightFormat
    group_size: int
    stored: int
    _arguments: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        words = np.zeros(13, np.int64)
        words[WEIGHTS], words[ROW_BYTES] = self.weight.ctypes.data, self.weight.strides[0]
        words[SCALES] = self.scales.ctypes.data
        words[BIASES] = 0 if self.biases is None else self.biases.ctypes.data
        words[STORED], words[GROUPS], words[BLOCKS] = self.stored, self.scales.shape[1], self.group_size // LANES
        words[WIDTH] = len(self.weight)
        object.__setattr__(self, "_arguments", words)

    def multiply(self, x: Floats) -> Floats:
        """Return x (N, in) Wᵀ: (N, out). x is contiguous."""
        if self.format.swaps:
            x = swap(x)
        y = np.empty((len(x), len(self.weight)), np.float32)
        words = self._arguments.copy()
        words[X], words[X_BYTES], words[COUNT] = x.ctypes.data, x.strides[0], len(x)
        words[Y], words[Y_BYTES] = y.ctypes.data, y.strides[0]
        pool = POOL.acquire()
        try:
            pieces, size = shares(len(x), len(self.weight), x.shape[1], POOL.threads)
            run(pool, kernel_of(self.format), words.ctypes.data, pieces, size)
        finally:
            POOL.release(pool)
        return y


def shares(rows: int, outs: int, columns: int, threads: int) -> tuple[int, int]:
    """Return the pieces of a product, and how many of them a thread takes at once."""
    pieces = -(-outs // OUTS)
    wanted = MOST_PIECES if rows >= MANY_ROWS else min(LEAST_WORK // (OUTS * columns * rows) + 1, MOST_PIECES)
    return pieces, max(1, min(wanted, pieces // (SHARES * threads)))
