"""The innermost loops of attention: rows of queries times keys, and weights times values, as a cache holds them.

    dots   scores (rows, tokens) = queries (rows, D) · keys (tokens, D)
    mix    sums (rows, D) += weights (rows, tokens) · values (tokens, D)

Keys and values are float32, or packed as weights are (tiles.py): groups along the head dimension, unpacked in registers. A number
has the same bits whatever rows and tokens it is computed beside.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compile_kernel
from .tiles import F32, FLOATS, FORMATS, I32, I64, LANES, TileWriter, WeightFormat

PLAIN = WeightFormat(32, "plain")
"""Numbers as they are. Not a way of packing, so it is not among FORMATS."""

FORMS = (*FORMATS, PLAIN)
PLAIN_FORM = FORMS.index(PLAIN)

SWAPPED = [LANES // 2 * (lane % 2) + lane // 2 for lane in range(LANES)]
"""Which number stands in each lane where words of 4 bits are unpacked."""

# Words of a kernel's arguments.
FIRST, ROW_BYTES, SCALES, BIASES, GROUPS, BLOCKS, ROWS, ROWS_BYTES, OUT, OUT_BYTES, COUNT = range(11)
"""Addresses of the first token's numbers, scales and biases, and bytes from one token to the next; groups in a token; sixteens in
a group; addresses of rows of queries or weights, and of scores or sums, with the bytes from one to the next; how many rows."""


class AttentionWriter(TileWriter):
    """Also writes what takes numbers as they are."""

    def group(self, scale: Any, bias: Any) -> tuple[Any, ...]:
        """Return what the weights of a group are made from; nothing for plain ones."""
        return () if self.format == PLAIN else super().group(scale, bias)

    def weights(self, address: Any, group: tuple[Any, ...]) -> Any:
        """Return sixteen numbers."""
        return self.load(address, FLOATS) if self.format == PLAIN else super().weights(address, group)

    def total(self, vector: Any) -> Any:
        """Return the sum of a vector."""
        return self.reduce(vector, self.builder.fadd)

    def numbers(self, scales: Any, biases: Any, place: Any) -> tuple[Any, ...]:
        """Return what the numbers of a group are made from, whose scale and bias lie at ``place``."""
        if self.format == PLAIN:
            return ()
        return self.group(self.load(self.at(scales, place), F32), self.load(self.at(biases, place), F32))

    def in_order(self, vector: Any) -> Any:
        """Return sixteen unpacked numbers, or sums of such, in the order in which they were packed."""
        if not self.format.swaps:
            return vector
        mask = ir.Constant(ir.VectorType(I32, LANES), [SWAPPED.index(lane) for lane in range(LANES)])
        return self.builder.shuffle_vector(vector, vector, mask)

    def as_unpacked(self, vector: Any) -> Any:
        """Return sixteen numbers in the order in which such are unpacked."""
        if not self.format.swaps:
            return vector
        return self.builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, LANES), SWAPPED))

    def store_at(self, vector: Any, address: Any) -> None:
        """Write sixteen numbers to an address."""
        self.builder.store(vector, self.builder.inttoptr(address, FLOATS.as_pointer()), align=4)


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
"""Of the words of a kernel's arguments, in order."""


def _parts(builder: Any, total: Any, sizes: tuple[int, ...] = (4, 2, 1)) -> Iterator[tuple[int, Any]]:
    """Yield, inside the loop that goes there, each size of a part and where such a part of ``total`` begins."""
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


def _write_sums(builder: Any, format: WeightFormat, given: dict[str, Any]) -> None:
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
    """Write what adds all tokens' numbers in some sixteens of a group to as many sums of some rows. at: the group, the sixteen."""
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


_write_all_scores, _write_all_sums = _intrinsic(_write_scores), _intrinsic(_write_sums)


@intrinsic(prefer_literal=True)
def unpack(typingctx, form, first, scales, biases, groups, blocks, out):  # type: ignore[no-untyped-def]  # noqa
    """Write one row's numbers to ``out``, in order. form: a literal, a place in FORMS; scales and biases are float32."""
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
    """Return the product of two rows of float32 at these addresses, of ``blocks`` sixteens."""

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


@cache
def scoring_of(form: int) -> int:
    """Return the address of the kernel that multiplies rows of queries by keys in this form: f(arguments, 0, tokens)."""

    def kernel(arguments: int, first: int, last: int) -> None:
        _write_all_scores(form, arguments, last - first)

    return compile_kernel(kernel)


@cache
def mixing_of(form: int) -> int:
    """Return the address of the kernel that adds weighted values in this form: f(arguments, 0, tokens)."""

    def kernel(arguments: int, first: int, last: int) -> None:
        _write_all_sums(form, arguments, last - first)

    return compile_kernel(kernel)
