"""What ../products.py multiplies with."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ..formats import BFLOAT16, E8M0, EXACT, FLOAT16, FLOAT32, LANES
from ..words.products import *
from .byte_tiles import PADS, padded, round_row, tiles
from .pool import call, inner, let_go, make_room
from .tiles import unpack


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


def product(form: int, rounded: int) -> Any:
    pads, may_widen = PADS and rounded != EXACT, PADS or rounded == EXACT
    there = FLOAT32 if may_widen else rounded  # in tiles
    in_tiles = EXACT if rounded == EXACT else there

    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, 13)
        groups, blocks, count = given[GROUPS], given[BLOCKS], given[COUNT]
        begin, stop = OUTS * first, min(OUTS * last, given[WIDTH])
        numbers = padded(groups) if pads else groups
        scale_row = numbers * (4 if there == FLOAT32 else 2)
        scales, biases, skip, wide = given[SCALES], given[BIASES], 0, 0
        if may_widen and (pads or given[STORED] != there):
            wide = make_room(2 * (stop - begin), scale_row)
            behind = wide + (stop - begin) * scale_row
            for out in range(stop - begin):
                _widen(given[STORED], scales, (begin + out) * groups, groups, wide + out * scale_row)
                if biases != 0:
                    _widen(given[STORED], biases, (begin + out) * groups, groups, behind + out * scale_row)
            scales, biases, skip = wide, behind if biases != 0 else 0, begin
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
        let_go(wide)

    return inner(kernel)


def rounding(form: int) -> Any:
    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, 6)
        size, group_size = given[2], given[5]
        for row in range(first, last):
            x, out = given[0] + row * given[1], given[3] + row * given[4]
            round_row(form, x, size // group_size, group_size // LANES, out)

    return inner(kernel)


@inner
def swap(arguments: int, first: int, last: int) -> None:
    given = words_at(arguments, 6)
    size = given[2]
    for row in range(first, last):
        x = floats_at(given[0] + row * given[1], size)
        out = floats_at(given[3] + row * given[4], size)
        for begin in range(0, size, LANES):
            for i in range(LANES // 2):
                out[begin + 2 * i] = x[begin + i]
                out[begin + 2 * i + 1] = x[begin + LANES // 2 + i]


@inner
def several(arguments: int, first: int, last: int) -> None:
    count = words_at(arguments, 1)[0]
    given = words_at(arguments + 8, PER_MATRIX * count + 1)
    for each in range(count):
        words = given[PER_MATRIX * each : PER_MATRIX * each + PER_MATRIX + 1]
        begin, stop = max(first, words[0]), min(last, words[PER_MATRIX])
        if begin < stop:
            call(words[1], words[2], begin - words[0], stop - words[0])


def embedding(form: int) -> Any:
    def kernel(arguments: int, first: int, last: int) -> None:
        given = words_at(arguments, OUT_BYTES + 1)
        groups = given[GROUPS]
        ids = words_at(given[IDS], last)
        scales = make_room(2 * groups, 4)
        biases = scales + 4 * groups if given[BIASES] != 0 else scales
        for row in range(first, last):
            token = ids[row]
            _widen(given[STORED], given[SCALES], groups * token, groups, scales)
            if given[BIASES] != 0:
                _widen(given[STORED], given[BIASES], groups * token, groups, biases)
            first_at = given[WEIGHTS] + token * given[ROW_BYTES]
            unpack(form, first_at, scales, biases, groups, given[BLOCKS], given[OUT] + row * given[OUT_BYTES])
        let_go(scales)

    return inner(kernel)
