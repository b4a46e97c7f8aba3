"""Packed token vectors, unpacked row by row."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .attention_tiles import FORMS, unpack
from .compiling import compile_kernel
from .products import (
    BIASES,
    BLOCKS,
    GROUPS,
    ROW_BYTES,
    SCALES,
    STORED,
    WEIGHTS,
    PackedMatrix,
    _widen,
    words_at,
)
from .tiles import FORMATS, WeightFormat

IDS, OUT, OUT_BYTES = range(13, 16)
"""Beyond the words of a product's arguments: addresses of ids and of the rows that are written, and their bytes."""


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
    """Return a kernel and its arguments, whose pieces are rows: of ``ids`` (N,) it writes the vectors to ``out`` (N, D).

    keep: keeps an array as long as the kernel may be called.
    """
    words = keep(np.zeros(OUT_BYTES + 1, np.int64))
    words[: len(matrix._arguments)] = matrix._arguments
    words[IDS], words[OUT], words[OUT_BYTES] = ids.ctypes.data, out.ctypes.data, out.strides[0]
    return _kernel_of(matrix.format), words.ctypes.data


assert FORMS[: len(FORMATS)] == FORMATS
