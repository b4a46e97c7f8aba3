"""The innermost loop of a product: some rows of x times some rows of W, packed as they lie in MLX's layout, in vector instructions.

A tile is SIDE rows of W, or one, times some rows of x. Sixteen weights at a time are unpacked to float32 in registers, exactly as
``mx.dequantize`` would (q · scale + bias), and multiplied with as many values of each row of x. Each output has one vector of
sixteen sums, from the first weight to the last, which is then added up in one order. So an output has the same bits whatever tile
it was computed in: alone, in a batch, in a piece of a prompt, by any thread.

numba has no vectors, so this is written in LLVM's terms; LLVM knows how to do it on every machine. One instruction alone is x86's
own: AVX-512's ``vpermps`` looks sixteen numbers up in a table of sixteen, by the low four bits of each index. So weights of up to
four bits cost a shift and a look-up; elsewhere a shift, a mask, a conversion and a product.
"""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .features import FEATURES

LANES = 16
"""Weights unpacked at once. It divides every group that MLX knows."""

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits in mxfp4 and nvfp4."""

AFFINE, FP4, FP8 = "affine", "fp4", "fp8"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are packed. kind: AFFINE (scale and bias), FP4 or FP8 (e2m1 and e4m3, a scale alone)."""

    bits: int
    kind: str = AFFINE

    @property
    def swaps(self) -> bool:
        """Whether x must be in the order 0 8 1 9 … 7 15 within each sixteen, in which words of 4 bits unpack."""
        return self.bits == 4

    @property
    def block_bytes(self) -> int:
        """Bytes of sixteen weights."""
        return self.bits * LANES // 8


FLOAT32, BFLOAT16, FLOAT16, E8M0, E4M3 = range(5)
"""How scales and biases are stored."""

FORMATS = (*(WeightFormat(bits) for bits in (2, 3, 4, 5, 6, 8)), WeightFormat(4, FP4), WeightFormat(8, FP8))


LOOKS_UP = "avx512f" in FEATURES
FUSES = platform.machine() not in ("x86_64", "AMD64") or "fma" in FEATURES
"""Whether a product and a sum are one instruction; without it LLVM would call a function for every number."""

SIDE = 4 if LOOKS_UP else 1
"""Rows of W that are computed at once. AVX-512's registers hold the sums of four times four; AVX2's are half as many and half as
wide, NEON's a quarter as wide: what they can't hold goes through memory, which takes twice the time."""

AWAITING = 2
"""Up to so many rows of x wait for W rather than it for them: what comes next of it is asked for meanwhile."""


class TileWriter:
    """Writes instructions on vectors of sixteen."""

    def __init__(self, builder: Any, format: WeightFormat) -> None:
        self.builder, self.format = builder, format
        self.module = builder.module

    def load(self, address: Any, kind: Any) -> Any:
        """Return what lies at an address that need not be aligned."""
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def at(self, address: Any, offset: Any) -> Any:
        """Return an address so many bytes further on."""
        return self.builder.add(address, offset if isinstance(offset, ir.Value) else I64(offset))

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line at an address, which need not be the program's own. It is read once: no cache shall keep it."""
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        called = cgutils.get_or_insert_function(self.module, kind, "llvm.prefetch.p0")
        self.builder.call(called, [pointer, I32(0), I32(0), I32(1)])  # to read, once, of data

    def all_alike(self, value: Any, count: int = LANES) -> Any:
        """Return a vector of one value."""
        kind = ir.VectorType(value.type, count)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a · b + c, rounded once where the machine can."""
        if not FUSES:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, "llvm.fma.v16f32"), [a, b, c])

    def look_up(self, table: Any, indices: Any) -> Any:
        """Return table[i & 15] for sixteen indices."""
        kind = ir.FunctionType(FLOATS, [FLOATS, WORDS])
        name = "llvm.x86.avx512.permvar.sf.512"
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), [table, indices])

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Return one number of a vector, whose halves are combined until one is left."""
        count = LANES
        while count > 1:
            count //= 2
            mask = ir.VectorType(I32, count)
            low, high = (
                self.builder.shuffle_vector(vector, vector, ir.Constant(mask, [*range(begin, begin + count)]))
                for begin in (0, count)
            )
            vector = combine(low, high)
        return self.builder.extract_element(vector, I32(0))

    def zeros(self, outs: int, rows: int) -> list[list[Any]]:
        """Return addresses of zeros, sixteen in each: by out, then by row."""
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(self.builder, zero) for _ in range(rows)] for _ in range(outs)]
        for each in (sum for row in sums for sum in row):
            self.builder.store(zero, each)
        return sums

    def write_sums(self, sums: list[list[Any]], given: dict[str, Any]) -> None:
        """Add up each of the vectors at ``sums[out][row]``, and write it where it belongs in y."""
        for row in range(len(sums[0])):
            y = self.at(given["y"], self.builder.mul(given["y_bytes"], I64(row)))
            for out in range(len(sums)):
                pointer = self.builder.inttoptr(self.at(y, 4 * out), F32.as_pointer())
                total = self.reduce(self.builder.load(sums[out][row]), self.builder.fadd)
                self.builder.store(total, pointer, align=4)

    def group(self, scale: Any, bias: Any) -> tuple[Any, ...]:
        """Return what the weights of a group are made from, given its numbers."""
        scale = self.all_alike(scale)
        if self.format.kind == FP8:
            return (scale,)
        if self.format.kind == FP4:
            if not LOOKS_UP:
                return (scale,)
            return (self.builder.fmul(ir.Constant(FLOATS, [*E2M1]), scale),)
        bias = self.all_alike(bias)
        if not self.looks_up:
            return scale, bias
        steps = [
            float(index % 2**self.format.bits) for index in range(LANES)
        ]  # what lies above a weight's bits is ignored
        return (self.multiply_add(ir.Constant(FLOATS, steps), scale, bias),)

    @property
    def looks_up(self) -> bool:
        """Whether weights are looked up in a table."""
        return LOOKS_UP and self.format.bits <= 4

    def weights(self, address: Any, group: tuple[Any, ...]) -> Any:
        """Return sixteen weights."""
        words = self._shifted(address)
        if self.looks_up:
            return self.look_up(group[0], words)
        if self.format.kind == FP8:
            return self.builder.fmul(self._e4m3(words), group[0])
        if self.format.bits < 8:
            words = self.builder.and_(words, self.words([2**self.format.bits - 1] * LANES))
        if self.format.kind == FP4:
            return self.builder.fmul(self._e2m1(words), group[0])
        return self.multiply_add(self.builder.sitofp(words, FLOATS), *group)

    def words(self, values: list[int]) -> Any:
        """Return sixteen whole numbers."""
        return ir.Constant(WORDS, values)

    def _shifted(self, address: Any) -> Any:
        """Return words whose low bits are the weights; what lies above is not theirs, but at 8 bits."""
        bits, build = self.format.bits, self.builder
        if bits == 8:
            return build.zext(self.load(address, ir.VectorType(I8, LANES)), WORDS)
        if bits == 4:  # two words, each in every second lane
            pair = self.all_alike(self.load(address, I64), LANES // 2)
            return build.lshr(build.bitcast(pair, WORDS), self.words([4 * (lane // 2) for lane in range(LANES)]))
        if bits == 2:
            word = self.all_alike(self.load(address, I32))
            return build.lshr(word, self.words([2 * lane for lane in range(LANES)]))
        # Four words at whole bytes, each with four weights in it; none reaches beyond the sixteen.
        offsets = [min(bits * 4 * part // 8, 2 * bits - 4) for part in range(4)]
        four = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for part, offset in enumerate(offsets):
            four = build.insert_element(four, self.load(self.at(address, offset), I32), I32(part))
        spread = build.shuffle_vector(four, four, self.words([lane // 4 for lane in range(LANES)]))
        return build.lshr(spread, self.words([bits * lane - 8 * offsets[lane // 4] for lane in range(LANES)]))

    def _e4m3(self, words: Any) -> Any:
        """Return numbers of 8 bits: the exponent's bits are moved to float32's place, whose range a product then mends."""
        build = self.builder
        size = build.shl(build.and_(words, self.words([0x7F] * LANES)), self.words([20] * LANES))
        sign = build.shl(build.and_(words, self.words([0x80] * LANES)), self.words([24] * LANES))
        number = build.bitcast(build.or_(size, sign), FLOATS)
        return build.fmul(number, ir.Constant(FLOATS, [2.0**120] * LANES))

    def _e2m1(self, words: Any) -> Any:
        build = self.builder
        size = build.shl(build.and_(words, self.words([7] * LANES)), self.words([22] * LANES))
        sign = build.shl(build.and_(words, self.words([8] * LANES)), self.words([28] * LANES))
        number = build.bitcast(build.or_(size, sign), FLOATS)
        return build.fmul(number, ir.Constant(FLOATS, [2.0**126] * LANES))


ARGUMENTS = (
    "weights", "row_bytes", "scales", "biases", "groups", "blocks", "x", "x_bytes", "y", "y_bytes", "outs", "fresh",
)  # fmt: skip
"""Of tiles, all intp: addresses of the first row's weights, scales and biases (float32, ``groups`` a row), of the first rows of x
and y; the bytes from one row to the next; how many times sixteen weights a group has; rows of W; whether these are the first rows
of x, for which W comes from memory."""


def write_tiles(builder: Any, format: WeightFormat, rows: int, given: dict[str, Any]) -> None:
    """Write instructions for all tiles with so many rows of x. given: the values of ARGUMENTS, by name."""
    whole, scale_row = builder.udiv(given["outs"], I64(SIDE)), builder.mul(given["groups"], I64(4))
    for side, tile in each_tile(builder, given, whole, scale_row):
        _write_sums(TileWriter(builder, format), side, rows, tile)


def each_tile(builder: Any, given: dict[str, Any], whole: Any, scale_row: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a tile's rows of W, and its arguments, in a loop over ``whole`` tiles of SIDE rows, and in one over those left.

    scale_row: bytes of a row's scales.
    """
    steps = {"weights": given["row_bytes"], "scales": scale_row, "biases": scale_row, "y": I64(4)}
    begin = builder.mul(whole, I64(SIDE))
    loops = (SIDE, I64(0), whole), (1, begin, builder.sub(given["outs"], begin))
    for side, before, count in loops if SIDE > 1 else ((1, I64(0), given["outs"]),):
        with cgutils.for_range(builder, count, intp=I64) as tile:
            first = builder.add(before, builder.mul(tile.index, I64(side)))
            moved = {name: builder.add(given[name], builder.mul(first, step)) for name, step in steps.items()}
            yield side, {**given, **moved}


def _write_sums(write: TileWriter, outs: int, rows: int, given: dict[str, Any]) -> None:
    builder, format = write.builder, write.format
    sums = write.zeros(outs, rows)
    weight_rows = [write.at(given["weights"], builder.mul(given["row_bytes"], I64(out))) for out in range(outs)]
    x_rows = [write.at(given["x"], builder.mul(given["x_bytes"], I64(row))) for row in range(rows)]
    numbers = [
        [write.at(given[name], builder.mul(given["groups"], I64(4 * out))) for name in ("scales", "biases")]
        for out in range(outs)
    ]
    with cgutils.for_range(builder, given["groups"], intp=I64) as group:
        place = builder.mul(group.index, I64(4))
        made = [
            write.group(*(write.load(write.at(address, place), F32) for address in numbers[out])) for out in range(outs)
        ]
        first = builder.mul(group.index, given["blocks"])
        if rows <= AWAITING:
            ahead = builder.mul(given["row_bytes"], I64(outs))
            for address in weight_rows:
                write.prefetch(write.at(write.at(address, builder.mul(first, I64(format.block_bytes))), ahead))
        with cgutils.for_range(builder, given["blocks"], intp=I64) as block:
            at = builder.add(first, block.index)
            packed_at = builder.mul(at, I64(format.block_bytes))
            x_at = builder.mul(at, I64(4 * LANES))
            xs = [write.load(write.at(row, x_at), FLOATS) for row in x_rows]
            for out in range(outs):
                weights = write.weights(write.at(weight_rows[out], packed_at), made[out])
                for row in range(rows):
                    builder.store(write.multiply_add(weights, xs[row], builder.load(sums[out][row])), sums[out][row])
    write.write_sums(sums, given)
