"""Packed products y (N, out) = x (N, in) Wᵀ; all cores read W once, in MLX's format."""

# One kernel per format. Scales and biases become float32 a few rows at a time. Rows of x may be rounded to int8
# (byte_tiles.py): twice as fast, where a model tolerates it (layers.py).

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .formats import EXACT, FORMATS, LANES, WeightFormat, can_round, rounded_bytes
from .machine_code import address_of
from .pool import POOL, run
from .words.products import *

LEAST_WORK = 1 << 16  # products in what a thread takes at once, at least: some microseconds

ALONE = 2 * LEAST_WORK  # up to this many the caller does all: to hand work over and back takes as long as half of it

# Pieces that a thread takes at once, at most, and of MANY_ROWS: their weights stay in its cache while the rows of x
# pass.
MOST_PIECES = 16

MANY_ROWS = 16

SHARES = 4  # how many times a thread takes pieces, at least, where there are enough: so none waits long for the last

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int64]


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
        return address_of("round", FORMATS.index(self.format)) if self.rounded else address_of("swap")

    @property
    def row_bytes(self) -> int:
        return rounded_bytes(self.format, self.columns, self.group_size) if self.rounded else 4 * self.columns

    def arguments(self, x: npt.NDArray[Any], out: npt.NDArray[Any]) -> Words:
        words = (x.ctypes.data, x.strides[0], self.columns, out.ctypes.data, out.strides[0], self.group_size)
        return np.array(words, np.int64)


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
        return address_of("product", FORMATS.index(self.format), self.stored if self.rounds else EXACT)

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
            run(pool, address_of("several"), table.ctypes.data, pieces * len(chosen), size)
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


def embedding_of(matrix: PackedMatrix, ids: Any, out: Any, keep: Callable[[Any], Any]) -> tuple[int, int]:
    words = keep(np.zeros(OUT_BYTES + 1, np.int64))
    words[: len(matrix._arguments)] = matrix._arguments
    words[IDS], words[OUT], words[OUT_BYTES] = ids.ctypes.data, out.ctypes.data, out.strides[0]
    return address_of("embedding", FORMATS.index(matrix.format)), words.ctypes.data
