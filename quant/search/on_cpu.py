"""The search with numba's kernels, on all cores: for machines where MLX computes on the CPU."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.search.candidates import DRAWN_IN, ROUNDS
from tokamac.quant.search.error_kernel import squared_error_groups
from tokamac.quant.search.kernels import BFLOAT16, FLOAT16, FLOAT32, search_groups

CHUNK_WEIGHTS = 1 << 18
"""Done by one thread at a time: some milliseconds, and its float32 values fit in a core's second-level cache."""

Arrays = tuple[mx.array, mx.array, mx.array]

KINDS = {mx.float32: FLOAT32, mx.bfloat16: BFLOAT16, mx.float16: FLOAT16}


class NumbaSearch:
    """See Implementation. A large weight is never held in float32: each thread casts what it works on."""

    name = "numba"

    def search(self, weight: mx.array, packing: Packing, importance: np.ndarray | None) -> Arrays:
        """See Implementation."""
        bits, size = packing.bits or 0, packing.group_size
        groups = Groups.of(weight, size)
        made = mx.zeros((weight.shape[0], weight.shape[1] * bits // 32), mx.uint32)
        words = np.asarray(made).reshape(
            groups.count, -1
        )  # MLX's memory, filled in place: a copy would double the peak
        scales, biases = np.empty(groups.count, np.float32), np.empty(groups.count, np.float32)
        drawn = np.array(DRAWN_IN, np.float32)
        parts = [None] if importance is None else list(importance.reshape(len(importance), -1, size))

        def work(part: np.ndarray | None, begin: int, end: int) -> None:
            found = words[begin:end], scales[begin:end], biases[begin:end]
            search_groups(groups.read(begin, end), part, drawn, ROUNDS, bits, KINDS[weight.dtype], *found)

        share = groups.count // len(parts)
        step = _step(size, weight.shape[-1] // size)
        _in_threads(work, ((p, *c) for n, p in enumerate(parts) for c in _chunks(n * share, (n + 1) * share, step)))
        shape = (weight.shape[0], -1)
        scale, bias = (mx.array(each.reshape(shape)).astype(weight.dtype) for each in (scales, biases))
        return made, scale, bias

    def squared_error(self, weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
        """See Implementation."""
        bits, size = packing.bits or 0, packing.group_size
        groups = Groups.of(weight, size)
        words = np.asarray(mx.contiguous(arrays[0])).reshape(groups.count, -1)
        scales, biases = (np.asarray(each.astype(mx.float32)).reshape(-1) for each in arrays[1:])

        def work(begin: int, end: int) -> tuple[float, float]:
            made = words[begin:end], scales[begin:end], biases[begin:end]
            return squared_error_groups(groups.read(begin, end), *made, bits)

        sums = _in_threads(work, _chunks(0, groups.count, _step(size, 1)))
        return sum(error for error, _ in sums), sum(total for _, total in sums)


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight's groups in its own type, as NumPy sees MLX's memory. raw: (count, size); bfloat16, which NumPy lacks, as uint16."""

    raw: np.ndarray
    source: mx.array

    @classmethod
    def of(cls, weight: mx.array, size: int) -> "Groups":
        """Evaluate the weight. Copies nothing, unless its rows don't lie one after another."""
        source = mx.contiguous(weight)
        source = source.view(mx.uint16) if weight.dtype == mx.bfloat16 else source
        return cls(np.asarray(source).reshape(-1, size), source)

    @property
    def count(self) -> int:
        """Groups."""
        return len(self.raw)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return some groups in float32."""
        raw = self.raw[begin:end]
        if raw.dtype == np.uint16:
            raw = np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
        return raw.astype(np.float32, copy=False)


def _step(size: int, groups_in_row: int) -> int:
    """Return the groups in a chunk: whole rows, so that a chunk begins where importance does."""
    return max(CHUNK_WEIGHTS // size // groups_in_row, 1) * groups_in_row


def _chunks(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, end)) for start in range(begin, end, step))


def _in_threads(work: Callable[..., Any], chunks: Iterator[tuple[Any, ...]]) -> list[Any]:
    """Call ``work`` with each of the chunks, on all cores; an exception or an interrupt leaves the rest undone."""
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="search")
    try:
        return [future.result() for future in [pool.submit(work, *chunk) for chunk in chunks]]
    finally:
        pool.shutdown(cancel_futures=True)
