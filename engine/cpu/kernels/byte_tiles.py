"""Tiles with rows of x rounded to int8: four byte products per lane."""

# Each group of x becomes integers -127…127 with one scale. Weights are unsigned integers, so a group's sum is exact,
# then scaled by both scales; biases multiply the sum of x's group. Bits are tile-independent, as in tiles.py.
#
#     chunk of a row of W    64 bytes of 2, 4 or 8-bit weights; 64 weights of other widths
#     turn                   sixteen groups, in whole chunks
#     rounded row of x       per chunk: bytes in unpacking order
#                            per turn: group scales, then sums (float32, zero-padded)
#
# AVX-512 uses ``vpdpbusd``; AVX2 ``vpmaddubsw`` (16-bit sums, enough for 4-bit weights) and ``vpmaddwd``, with
# equal integers; at 8 bits that is no faster than exact rows. Elsewhere rows aren't rounded.

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import adds_products
from ..formats import BFLOAT16, EXACT, FLOAT16, FLOAT32, FORMATS, LANES, TURN_BYTES, VECTOR, WeightFormat, vectors_of
from .pool import inner
from .tiles import *  # fmt: skip

ADDS_PRODUCTS = adds_products()

# Whether a tile's scales and biases are float32, rows of `padded` numbers: where nothing reads a part of a vector.
PADS = not ADDS_PRODUCTS

BYTES = ir.VectorType(I8, VECTOR)
MOST = 127.0
TINY = 2.0**-126  # groups whose scale would be smaller than the smallest normal number are zeros

# Of how many bytes a row of W is for the first rows of x to go through it alone, and how many bytes before they are
# read its weights, and its scales, are asked for: memory is read fastest in the order in which it lies. Shorter rows
# are of models that a cache holds.
LONG, AHEAD, SCALES_AHEAD = 320, 4096, 128

STORED_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}  # of a scale or a bias


@inner
def padded(groups: int) -> int:
    return LANES * ((groups + LANES - 1) // LANES)


def _chunk_bytes(format: WeightFormat) -> int:
    return VECTOR if format.bits in (2, 4, 8) else 8 * format.bits


class _ByteWriter(TileWriter):
    def chunk(self, address: Any, left: Any | None) -> list[Any]:
        bits, build = self.format.bits, self.builder
        if left is None and _chunk_bytes(self.format) < VECTOR:
            left = I64(_chunk_bytes(self.format))
        raw = self.load(address, BYTES) if left is None else self.some_bytes(address, left)
        if bits == 8:
            return [raw]
        mask = ir.Constant(BYTES, [2**bits - 1] * VECTOR)
        if bits in (2, 4):
            words = build.bitcast(raw, WORDS)
            shifted = (build.lshr(words, self.words([shift] * LANES)) for shift in range(0, 8, bits))
            return [build.and_(build.bitcast(each, BYTES), mask) for each in shifted]
        # Eight weights are as many bytes as one has bits: they go to eight bytes, of which each then takes its own bits.
        places = ir.Constant(BYTES, [lane // 8 * bits + min(lane % 8, bits - 1) for lane in range(VECTOR)])
        eights = self._bytewise("llvm.x86.avx512.permvar.qi.512", raw, places)
        shifts = ir.Constant(BYTES, [lane % 8 * bits for lane in range(VECTOR)])
        return [build.and_(self._bytewise("llvm.x86.avx512.pmultishift.qb.512", shifts, eights), mask)]

    def some_bytes(self, address: Any, left: Any) -> Any:
        build = self.builder
        if ADDS_PRODUCTS:
            places = ir.Constant(BYTES, [*range(VECTOR)])
            there = build.icmp_unsigned("<", places, self.all_alike(build.trunc(left, I8), VECTOR))
            return self.load_some(address, BYTES, there)
        copy = cgutils.alloca_once(build, BYTES)
        build.store(ir.Constant(BYTES, [0] * VECTOR), copy)
        into = build.ptrtoint(copy, I64)
        with cgutils.for_range(build, left, intp=I64) as loop:
            byte = self.load(self.at(address, loop.index), I8)
            build.store(byte, build.inttoptr(self.at(into, loop.index), I8.as_pointer()))
        return build.load(copy)

    def _bytewise(self, name: str, *operands: Any) -> Any:
        kind = ir.FunctionType(BYTES, [BYTES, BYTES])
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), operands)

    def load_some(self, address: Any, kind: Any, there: Any) -> Any:
        element = kind.element
        name = f"llvm.masked.load.v{kind.count}{'f32' if element == F32 else f'i{element.width}'}.p0"
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        function = ir.FunctionType(kind, [pointer.type, I32, there.type, kind])
        called = cgutils.get_or_insert_function(self.module, function, name)
        return self.builder.call(called, [pointer, I32(1), there, ir.Constant(kind, [0] * kind.count)])

    def stored(self, address: Any, stored: int, left: Any) -> Any:
        build = self.builder
        if PADS:
            return self.load(address, FLOATS)
        few = build.select(build.icmp_signed("<", left, I64(LANES)), left, I64(LANES))
        there = build.icmp_signed("<", self.words([*range(LANES)]), self.all_alike(build.trunc(few, I32)))
        if stored == FLOAT32:
            return self.load_some(address, FLOATS, there)
        halves = self.load_some(address, ir.VectorType(ir.IntType(16), LANES), there)
        if stored == FLOAT16:
            return build.fpext(build.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
        return build.bitcast(build.shl(build.zext(halves, WORDS), self.words([16] * LANES)), FLOATS)

    def table(self) -> Any:
        return cgutils.alloca_once(self.builder, ir.ArrayType(FLOATS, 2 if PADS else 1))

    def fill(self, table: Any, numbers: Any) -> None:
        self.builder.store(numbers, self.builder.bitcast(table, FLOATS.as_pointer()))

    def of_lanes(self, table: Any, first: Any, groups: Any) -> Any:
        build = self.builder
        if not PADS:
            numbers = build.load(build.bitcast(table, FLOATS.as_pointer()))
            return self.look_up(numbers, build.add(groups, self.all_alike(build.trunc(first, I32))))
        eight = ir.VectorType(F32, LANES // 2)
        kind = ir.FunctionType(eight, [eight, ir.VectorType(I32, LANES // 2)])
        called = cgutils.get_or_insert_function(self.module, kind, "llvm.x86.avx2.permps")
        place = build.mul(build.and_(first, I64(LANES - 1)), I64(4))
        numbers = self.load(self.at(build.ptrtoint(table, I64), place), eight)
        return self._joined([build.call(called, [numbers, self._half(groups, half)]) for half in range(2)])

    def products(self, weights: list[Any], xs: list[Any]) -> Any:
        build = self.builder
        if ADDS_PRODUCTS:
            kind = ir.FunctionType(WORDS, [WORDS] * 3)
            called = cgutils.get_or_insert_function(self.module, kind, "llvm.x86.avx512.vpdpbusd.512")
            found = self.words([0] * LANES)
            for each, x in zip(weights, xs, strict=True):
                found = build.call(called, [found, build.bitcast(each, WORDS), x])
            return found
        bytes_, shorts, words = (ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8))
        multiply, add = (
            cgutils.get_or_insert_function(self.module, ir.FunctionType(gives, [takes] * 2), f"llvm.x86.avx2.{name}")
            for name, takes, gives in (("pmadd.ub.sw", bytes_, shorts), ("pmadd.wd", shorts, words))
        )
        ones, halves = ir.Constant(shorts, [1] * 16), []
        for half in range(2):
            pairs = [  # at most 4 · 2 · 3 · 127, or 2 · 2 · 15 · 127, in all vectors together
                build.call(multiply, [self._half(each, half), self._half(build.bitcast(x, BYTES), half)])
                for each, x in zip(weights, xs, strict=True)
            ]
            halves.append(build.call(add, [reduce(build.add, pairs), ones]))
        return self._joined(halves)

    def _half(self, vector: Any, half: int) -> Any:
        count = vector.type.count // 2
        places = ir.Constant(ir.VectorType(I32, count), [*range(count * half, count * (half + 1))])
        return self.builder.shuffle_vector(vector, vector, places)

    def _joined(self, halves: list[Any]) -> Any:
        count = 2 * halves[0].type.count
        return self.builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, count), [*range(count)]))

    def larger(self, a: Any, b: Any) -> Any:
        takes_b = self.builder.fcmp_unordered(">", b, a)
        return self.builder.select(self.builder.and_(takes_b, self.builder.fcmp_ordered("ord", a, a)), b, a)


def _write_byte_tiles(builder: Any, format: WeightFormat, stored: int, rows: int, given: dict[str, Any]) -> None:
    groups = given["groups"]
    numbers = builder.mul(_turns(builder, groups), I64(LANES)) if PADS else groups  # as ``padded``
    scale_row = builder.mul(numbers, I64(STORED_BYTES[stored]))
    long = builder.icmp_unsigned(">=", given["row_bytes"], I64(LONG))
    awaited = builder.and_(long, builder.trunc(given["fresh"], ir.IntType(1)))
    whole = builder.select(awaited, I64(0), builder.udiv(given["outs"], I64(SIDE)))
    for side, tile in each_tile(builder, given, whole, scale_row):
        awaits = side == 1 and (SIDE > 1 or rows <= AWAITING)
        _write_byte_sums(_ByteWriter(builder, format), stored, (side, rows), tile, scale_row, awaits=awaits)


def _turns(builder: Any, groups: Any) -> Any:
    return builder.udiv(builder.add(groups, I64(LANES - 1)), I64(LANES))


def _write_byte_sums(
    write: _ByteWriter, stored: int, size: tuple[int, int], given: dict[str, Any], scale_row: Any, *, awaits: bool
) -> None:
    outs, rows = size
    builder, format, count = write.builder, write.format, vectors_of(write.format)
    sums = write.zeros(outs, rows)
    weight_rows = [write.at(given["weights"], builder.mul(given["row_bytes"], I64(out))) for out in range(outs)]
    x_rows = [write.at(given["x"], builder.mul(given["x_bytes"], I64(row))) for row in range(rows)]
    scales, biases = (
        [write.at(given[name], builder.mul(scale_row, I64(out))) for out in range(outs)]
        for name in ("scales", "biases")
    )
    # A lane sums 4 · count weights, all of one group.
    log = builder.add(builder.cttz(given["blocks"], ir.Constant(ir.IntType(1), 0)), I64(4))
    lanes = ir.Constant(WORDS, [4 * count * lane for lane in range(LANES)])
    lane_group = builder.lshr(lanes, write.all_alike(builder.trunc(log, I32)))
    groups = given["groups"]
    packed = builder.mul(groups, builder.mul(given["blocks"], I64(format.block_bytes)))
    chunk_bytes, record = _chunk_bytes(format), VECTOR * count
    chunks, left = builder.udiv(packed, I64(chunk_bytes)), builder.urem(packed, I64(chunk_bytes))
    whole = builder.icmp_unsigned("!=", left, I64(0))
    turns_at = builder.mul(builder.add(chunks, builder.zext(whole, I64)), I64(record))
    turn_scales = _TurnScales(write, outs, rows)

    def chunk(index: Any, left: Any | None) -> None:
        place, x_at = builder.mul(index, I64(chunk_bytes)), builder.mul(index, I64(record))
        first = builder.lshr(x_at, log)  # a weight is a byte there
        xs = [
            [write.load(write.at(write.at(row, x_at), VECTOR * part), WORDS) for part in range(count)] for row in x_rows
        ]
        factors = turn_scales.of_chunk(first, lane_group)
        for out in range(outs):
            weights_at = write.at(weight_rows[out], place)
            weights = write.chunk(weights_at, left)
            if awaits and left is None:
                write.prefetch(write.at(weights_at, AHEAD))
            for row in range(rows):
                found = builder.sitofp(write.products(weights, xs[row]), FLOATS)
                factor = factors[out][row]
                builder.store(write.multiply_add(found, factor, builder.load(sums[out][row])), sums[out][row])

    with cgutils.for_range(builder, _turns(builder, groups), intp=I64) as turn:
        first = builder.mul(turn.index, I64(LANES))
        x_at = builder.add(turns_at, builder.mul(turn.index, I64(TURN_BYTES)))
        there, at = builder.sub(groups, first), builder.mul(first, I64(STORED_BYTES[stored]))
        x_scales, totals = (
            [write.load(write.at(write.at(row, x_at), 4 * LANES * part), FLOATS) for row in x_rows] for part in range(2)
        )
        if awaits:
            for address in (*scales, *biases):
                write.prefetch(write.at(write.at(address, at), SCALES_AHEAD))
        turn_scales.begin([write.stored(write.at(each, at), stored, there) for each in scales], x_scales)
        for out in range(outs):
            bias = write.stored(write.at(biases[out], at), stored, there)
            for row in range(rows):
                builder.store(write.multiply_add(bias, totals[row], builder.load(sums[out][row])), sums[out][row])
        begin, end = (
            builder.udiv(builder.shl(each, log), I64(record)) for each in (first, builder.add(first, I64(LANES)))
        )
        end = builder.select(builder.icmp_unsigned("<", end, chunks), end, chunks)
        with cgutils.for_range_slice(builder, begin, end, I64(1), intp=I64, inc=True) as (index, _):
            chunk(index, None)
    with cgutils.if_unlikely(builder, whole):
        chunk(chunks, left)
    write.write_sums(sums, given)


class _TurnScales:
    def __init__(self, write: _ByteWriter, outs: int, rows: int) -> None:
        self._write, self._rows, self._once = write, rows, outs * rows <= outs + rows
        self._tables = [write.table() for _ in range(outs * rows if self._once else outs + rows)]

    def begin(self, scales: list[Any], x_scales: list[Any]) -> None:
        build = self._write.builder
        products = [build.fmul(scale, of_x) for scale in scales for of_x in x_scales] if self._once else []
        for table, numbers in zip(self._tables, products or [*scales, *x_scales], strict=True):
            self._write.fill(table, numbers)

    def of_chunk(self, first: Any, lane_group: Any) -> list[list[Any]]:
        found = [self._write.of_lanes(table, first, lane_group) for table in self._tables]
        rows = self._rows
        if self._once:
            return [found[at : at + rows] for at in range(0, len(found), rows)]
        scales, x_scales = found[:-rows], found[-rows:]
        return [[self._write.builder.fmul(scale, of_x) for of_x in x_scales] for scale in scales]


def _write_rounded_row(write: _ByteWriter, x: Any, groups: Any, blocks: Any, out: Any) -> None:
    build, count = write.builder, vectors_of(write.format)
    kind = ir.FunctionType(FLOATS, [FLOATS])
    absolute, nearest = (
        cgutils.get_or_insert_function(build.module, kind, f"llvm.{name}.v16f32") for name in ("fabs", "rint")
    )
    most, total = cgutils.alloca_once(build, FLOATS), cgutils.alloca_once(build, WORDS)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    in_chunk, record = I64(4 * count), VECTOR * count  # sixteens, bytes
    step = LANES // count  # bytes of a sixteen in each vector
    chunks = build.udiv(build.add(build.mul(groups, blocks), I64(4 * count - 1)), in_chunk)
    turns = write.at(out, build.mul(chunks, I64(record)))

    def put(values: Any, address: Any) -> None:
        build.store(values, build.inttoptr(address, values.type.as_pointer()), align=1)

    def sixteen(at: Any) -> Any:
        return write.load(write.at(x, build.mul(at, I64(4 * LANES))), FLOATS)

    with cgutils.for_range(build, groups, intp=I64) as group:
        first = build.mul(group.index, blocks)
        build.store(zero, most)
        build.store(write.words([0] * LANES), total)
        with cgutils.for_range(build, blocks, intp=I64) as block:
            size = build.call(absolute, [sixteen(build.add(first, block.index))])
            build.store(write.larger(build.load(most), size), most)
        largest = write.reduce(build.load(most), write.larger)
        scale = build.fmul(largest, F32(1 / MOST))
        lost = build.fcmp_unordered(">=", largest, F32(float("inf")))  # a group with one that is no number has none
        usable = build.and_(build.fcmp_ordered(">=", scale, F32(TINY)), build.not_(lost))
        factor = write.all_alike(build.select(usable, build.fdiv(F32(MOST), largest), F32(0.0)))
        scale = build.select(lost, F32(float("nan")), build.select(usable, scale, F32(0.0)))
        with cgutils.for_range(build, blocks, intp=I64) as block:
            at = build.add(first, block.index)
            scaled = build.fmul(sixteen(at), factor)
            scaled = build.select(build.fcmp_ordered("ord", scaled, scaled), scaled, zero)
            whole = build.fptosi(build.call(nearest, [scaled]), WORDS)
            build.store(build.add(build.load(total), whole), total)
            small = build.trunc(whole, ir.VectorType(I8, LANES))
            place = write.at(out, build.mul(build.udiv(at, in_chunk), I64(record)))
            place = write.at(place, build.mul(build.urem(at, in_chunk), I64(step)))
            for vector in range(count):
                chosen = ir.Constant(ir.VectorType(I32, step), [*range(vector, LANES, count)])
                put(build.shuffle_vector(small, small, chosen), write.at(place, VECTOR * vector))
        sum = build.sitofp(write.reduce(build.load(total), build.add), F32)
        turn, in_turn = (
            build.mul(by(group.index, I64(LANES)), I64(size))
            for by, size in ((build.udiv, TURN_BYTES), (build.urem, 4))
        )
        place = write.at(write.at(turns, turn), in_turn)
        put(scale, place)
        put(build.fmul(sum, scale), write.at(place, 4 * LANES))


@intrinsic(prefer_literal=True)
def round_row(typingctx, form, x, groups, blocks, out):  # type: ignore[no-untyped-def]  # noqa
    """Write a rounded row of x to zeroed ``out``. form: a literal index in FORMATS."""
    chosen = FORMATS[form.literal_value]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        _write_rounded_row(_ByteWriter(builder, chosen), *values[1:])
        return context.get_dummy_value()

    return types.void(form, *[types.intp] * 4), generate


@intrinsic(prefer_literal=True)
def tiles(typingctx, form, rounded, rows, weights, row_bytes, scales, biases, groups, blocks, x, x_bytes, y, y_bytes, outs, fresh):  # type: ignore[no-untyped-def]  # noqa  # fmt: skip
    """Multiply rows of W with some rows of x; the first three arguments are literals.

    rounded: scale storage of rounded rows (see PADS), or EXACT.
    """
    # One function per number of rows: LLVM would else prepare for all of them.
    format, stored, count = FORMATS[form.literal_value], rounded.literal_value, rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(ARGUMENTS))
        function = ir.Function(builder.module, kind, builder.module.get_unique_name(f"tiles_of_{count}"))
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        given = dict(zip(ARGUMENTS, function.args, strict=True))
        if stored == EXACT:
            write_tiles(inside, format, count, given)
        else:
            _write_byte_tiles(inside, format, stored, count, given)
        inside.ret_void()
        builder.call(function, values[3:])
        return context.get_dummy_value()

    return types.void(form, rounded, rows, *[types.intp] * len(ARGUMENTS)), generate
