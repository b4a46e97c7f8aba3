"""The inner loop of a product, as vector instructions on packed weights."""

import platform
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import features
from ..formats import FORMS, FP4, FP8, LANES, PLAIN, WeightFormat

# A tile is SIDE (or one) rows of W times some rows of x. Sixteen weights are unpacked exactly as
# ``mx.dequantize`` (q · scale + bias). Each output has sixteen running sums, reduced in a fixed order: bits
# don't depend on tile, batch or thread.
#
# numba has no vectors, so this is LLVM IR. Only ``vpermps`` (AVX-512) is x86's own: a sixteen-entry table
# lookup, so weights up to four bits cost a shift and a lookup; elsewhere a shift, mask, conversion and product.


F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

# The numbers of 4 bits in mxfp4 and nvfp4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

LOOKS_UP = "avx512f" in features()
# Whether a product and a sum are one instruction; without it LLVM would call a function for every number.
FUSES = platform.machine() not in ("x86_64", "AMD64") or "fma" in features()

# Rows of W that are computed at once. AVX-512's registers hold the sums of four times four; AVX2's are half as many and
# half as wide, NEON's a quarter as wide: what they can't hold goes through memory, which takes twice the time.
SIDE = 4 if LOOKS_UP else 1

AWAITING = 2  # up to so many rows of x wait for W rather than it for them: what comes next of it is asked for meanwhile


class TileWriter:
    def __init__(self, builder: Any, format: WeightFormat) -> None:
        self.builder, self.format = builder, format
        self.module = builder.module

    def load(self, address: Any, kind: Any) -> Any:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def at(self, address: Any, offset: Any) -> Any:
        return self.builder.add(address, offset if isinstance(offset, ir.Value) else I64(offset))

    def prefetch(self, address: Any) -> None:
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        called = cgutils.get_or_insert_function(self.module, kind, "llvm.prefetch.p0")
        self.builder.call(called, [pointer, I32(0), I32(0), I32(1)])  # to read, once, of data

    def all_alike(self, value: Any, count: int = LANES) -> Any:
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
        kind = ir.FunctionType(FLOATS, [FLOATS, WORDS])
        name = "llvm.x86.avx512.permvar.sf.512"
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), [table, indices])

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
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
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(self.builder, zero) for _ in range(rows)] for _ in range(outs)]
        for each in (sum for row in sums for sum in row):
            self.builder.store(zero, each)
        return sums

    def write_sums(self, sums: list[list[Any]], given: dict[str, Any]) -> None:
        for row in range(len(sums[0])):
            y = self.at(given["y"], self.builder.mul(given["y_bytes"], I64(row)))
            for out in range(len(sums)):
                pointer = self.builder.inttoptr(self.at(y, 4 * out), F32.as_pointer())
                total = self.reduce(self.builder.load(sums[out][row]), self.builder.fadd)
                self.builder.store(total, pointer, align=4)

    def group(self, scale: Any, bias: Any) -> tuple[Any, ...]:
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
        return LOOKS_UP and self.format.bits <= 4

    def weights(self, address: Any, group: tuple[Any, ...]) -> Any:
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
        return ir.Constant(WORDS, values)

    def _shifted(self, address: Any) -> Any:
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
        """Decode e4m3: shift the exponent to float32's place, then rescale."""
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


# Of tiles, all intp: addresses of the first row's weights, scales and biases (float32, `groups` a row), of the first
# rows of x and y; the bytes from one row to the next; how many times sixteen weights a group has; rows of W; whether
# these are the first rows of x, for which W comes from memory.
ARGUMENTS = (
    "weights", "row_bytes", "scales", "biases", "groups", "blocks", "x", "x_bytes", "y", "y_bytes", "outs", "fresh",
)  # fmt: skip


def write_tiles(builder: Any, format: WeightFormat, rows: int, given: dict[str, Any]) -> None:
    whole, scale_row = builder.udiv(given["outs"], I64(SIDE)), builder.mul(given["groups"], I64(4))
    for side, tile in each_tile(builder, given, whole, scale_row):
        _write_sums(TileWriter(builder, format), side, rows, tile)


def each_tile(builder: Any, given: dict[str, Any], whole: Any, scale_row: Any) -> Iterator[tuple[int, dict[str, Any]]]:
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


#     dots   scores (rows, tokens) = queries (rows, D) · keys (tokens, D)
#     mix    sums (rows, D) += weights (rows, tokens) · values (tokens, D)
#
# Float32, or packed like weights (tiles.py) along the head dimension. Bits don't depend on neighbouring rows
# and tokens.


# Which number stands in each lane where words of 4 bits are unpacked.
SWAPPED = [LANES // 2 * (lane % 2) + lane // 2 for lane in range(LANES)]

# Words of a kernel's arguments. Addresses of the first token's numbers, scales and biases, and bytes from one token to
# the next; groups in a token; sixteens in a group; addresses of rows of queries or weights, and of scores or sums, with
# the bytes from one to the next; how many rows.
FIRST, ROW_BYTES, SCALES, BIASES, GROUPS, BLOCKS, ROWS, ROWS_BYTES, OUT, OUT_BYTES, COUNT = range(11)


class AttentionWriter(TileWriter):
    def group(self, scale: Any, bias: Any) -> tuple[Any, ...]:
        return () if self.format == PLAIN else super().group(scale, bias)

    def weights(self, address: Any, group: tuple[Any, ...]) -> Any:
        return self.load(address, FLOATS) if self.format == PLAIN else super().weights(address, group)

    def total(self, vector: Any) -> Any:
        return self.reduce(vector, self.builder.fadd)

    def numbers(self, scales: Any, biases: Any, place: Any) -> tuple[Any, ...]:
        if self.format == PLAIN:
            return ()
        return self.group(self.load(self.at(scales, place), F32), self.load(self.at(biases, place), F32))

    def in_order(self, vector: Any) -> Any:
        if not self.format.swaps:
            return vector
        mask = ir.Constant(ir.VectorType(I32, LANES), [SWAPPED.index(lane) for lane in range(LANES)])
        return self.builder.shuffle_vector(vector, vector, mask)

    def as_unpacked(self, vector: Any) -> Any:
        if not self.format.swaps:
            return vector
        return self.builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, LANES), SWAPPED))

    def store_at(self, vector: Any, address: Any) -> None:
        self.builder.store(vector, self.builder.inttoptr(address, FLOATS.as_pointer()), align=4)


# Of the words of a kernel's arguments, in order.
NAMES = (
    "first",
    "row_bytes",
    "scales",
    "biases",
    "groups",
    "blocks",
    "rows",
    "rows_bytes",
    "out",
    "out_bytes",
    "count",
)


def _parts(builder: Any, total: Any, sizes: tuple[int, ...] = (4, 2, 1)) -> Iterator[tuple[int, Any]]:
    begin = I64(0)
    for size in sizes:
        stop = builder.and_(total, I64(-size))
        with cgutils.for_range_slice(builder, begin, stop, I64(size), intp=I64) as (index, _):
            yield size, index
        begin = stop


def _write_dots(builder: Any, format: WeightFormat, tokens: int, rows: int, given: dict[str, Any]) -> None:
    write = AttentionWriter(builder, format)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(rows)] for _ in range(tokens)]
    for each in (sum for row in sums for sum in row):
        builder.store(zero, each)
    token_at = [write.at(given["first"], builder.mul(given["row_bytes"], I64(token))) for token in range(tokens)]
    row_at = [write.at(given["rows"], builder.mul(given["rows_bytes"], I64(row))) for row in range(rows)]
    with cgutils.for_range(builder, given["groups"], intp=I64) as group:
        made = []
        for token in range(tokens):
            place = builder.mul(builder.add(builder.mul(given["groups"], I64(token)), group.index), I64(4))
            made.append(write.numbers(given["scales"], given["biases"], place))
        first = builder.mul(group.index, given["blocks"])
        with cgutils.for_range(builder, given["blocks"], intp=I64) as block:
            at = builder.add(first, block.index)
            stored_at, plain_at = (builder.mul(at, I64(size)) for size in (format.block_bytes, 4 * LANES))
            queries = [write.load(write.at(row, plain_at), FLOATS) for row in row_at]
            for token in range(tokens):
                numbers = write.weights(write.at(token_at[token], stored_at), made[token])
                for row in range(rows):
                    into = sums[token][row]
                    builder.store(write.multiply_add(numbers, queries[row], builder.load(into)), into)
    for row in range(rows):
        out = write.at(given["out"], builder.mul(given["out_bytes"], I64(row)))
        for token in range(tokens):
            pointer = builder.inttoptr(write.at(out, 4 * token), F32.as_pointer())
            builder.store(write.total(builder.load(sums[token][row])), pointer, align=4)


def _write_scores(builder: Any, format: WeightFormat, given: dict[str, Any]) -> None:
    def moved(name: str, by: Any) -> Any:
        return builder.add(given[name], by)

    for rows, row in _parts(builder, given["count"]):
        queries = moved("rows", builder.mul(row, given["rows_bytes"]))
        scores = moved("out", builder.mul(row, given["out_bytes"]))
        for tokens, token in _parts(builder, given["tokens"], (4, 1)):
            place = builder.mul(builder.mul(given["groups"], token), I64(4))
            part = {
                "first": moved("first", builder.mul(token, given["row_bytes"])),
                "scales": moved("scales", place),
                "biases": moved("biases", place),
                "rows": queries,
                "out": builder.add(scores, builder.mul(token, I64(4))),
            }
            _write_dots(builder, format, tokens, rows, given | part)


def _write_mixes(builder: Any, format: WeightFormat, given: dict[str, Any]) -> None:
    write = AttentionWriter(builder, format)
    for rows, row in _parts(builder, given["count"]):
        weights_at, out_at = (
            [
                write.at(given[name], builder.mul(given[f"{name}_bytes"], builder.add(row, I64(each))))
                for each in range(rows)
            ]
            for name in ("rows", "out")
        )
        with cgutils.for_range(builder, given["groups"], intp=I64) as group:
            for blocks, block in _parts(builder, given["blocks"]):
                first = builder.add(builder.mul(group.index, given["blocks"]), block)
                _write_mix(write, (rows, blocks), (group.index, first), (weights_at, out_at), given)


def _write_mix(
    write: AttentionWriter,
    size: tuple[int, int],
    at: tuple[Any, Any],
    rows_at: tuple[list[Any], list[Any]],
    given: dict[str, Any],
) -> None:
    builder, format, (rows, blocks), (group, first) = write.builder, write.format, size, at
    weights_at, out_at = rows_at
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(blocks)] for _ in range(rows)]
    place = builder.mul(first, I64(4 * LANES))
    places = [[write.at(write.at(out, place), 4 * LANES * block) for block in range(blocks)] for out in out_at]
    for into, place in ((sums[row][block], places[row][block]) for row in range(rows) for block in range(blocks)):
        builder.store(write.as_unpacked(write.load(place, FLOATS)), into)
    stored = write.at(given["first"], builder.mul(first, I64(format.block_bytes)))
    with cgutils.for_range(builder, given["tokens"], intp=I64) as token:
        place = builder.mul(builder.add(builder.mul(given["groups"], token.index), group), I64(4))
        made = write.numbers(given["scales"], given["biases"], place)
        token_at = write.at(stored, builder.mul(given["row_bytes"], token.index))
        four = builder.mul(token.index, I64(4))
        weights = [write.all_alike(write.load(write.at(row, four), F32)) for row in weights_at]
        for block in range(blocks):
            numbers = write.weights(write.at(token_at, format.block_bytes * block), made)
            for row in range(rows):
                into = sums[row][block]
                builder.store(write.multiply_add(numbers, weights[row], builder.load(into)), into)
    for row in range(rows):
        for block in range(blocks):
            write.store_at(write.in_order(builder.load(sums[row][block])), places[row][block])


Writing = Callable[[Any, WeightFormat, dict[str, Any]], None]


def _intrinsic(write: Writing) -> Any:
    def typed(typingctx: Any, form: Any, arguments: Any, tokens: Any) -> Any:  # noqa: ARG001
        format = FORMS[form.literal_value]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
            words = builder.inttoptr(values[1], I64.as_pointer())
            given = {name: builder.load(builder.gep(words, [I64(index)])) for index, name in enumerate(NAMES)}
            write(builder, format, given | {"tokens": values[2]})
            return context.get_dummy_value()

        return types.void(form, types.intp, types.intp), generate

    return intrinsic(prefer_literal=True)(typed)


write_all_scores, write_all_sums = _intrinsic(_write_scores), _intrinsic(_write_mixes)


@intrinsic(prefer_literal=True)
def unpack(typingctx, form, first, scales, biases, groups, blocks, out):  # type: ignore[no-untyped-def]  # noqa
    """Unpack a row to ``out``. form: a literal index in FORMS; scales and biases are float32."""
    format = FORMS[form.literal_value]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        write = AttentionWriter(builder, format)
        first, scales, biases, groups, blocks, out = values[1:]
        with cgutils.for_range(builder, groups, intp=I64) as group:
            made = write.numbers(scales, biases, builder.mul(group.index, I64(4)))
            with cgutils.for_range(builder, blocks, intp=I64) as block:
                at = builder.add(builder.mul(group.index, blocks), block.index)
                numbers = write.weights(write.at(first, builder.mul(at, I64(format.block_bytes))), made)
                write.store_at(write.in_order(numbers), write.at(out, builder.mul(at, I64(4 * LANES))))
        return context.get_dummy_value()

    return types.void(form, *[types.intp] * 6), generate


@intrinsic
def dot(typingctx, a, b, blocks):  # type: ignore[no-untyped-def]  # noqa
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        write = AttentionWriter(builder, PLAIN)
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), total)
        a, b, blocks = values
        with cgutils.for_range(builder, blocks, intp=I64) as block:
            place = builder.mul(block.index, I64(4 * LANES))
            x, y = (write.load(write.at(each, place), FLOATS) for each in (a, b))
            builder.store(write.multiply_add(x, y, builder.load(total)), total)
        return write.total(builder.load(total))

    return types.float32(types.intp, types.intp, types.intp), generate
