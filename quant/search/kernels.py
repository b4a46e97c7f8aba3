"""The affine search on a CPU, compiled by numba, on all cores; see on_mlx.py. No MLX in the kernels."""

# LANES groups are searched together, arrays being (weights of a group, lanes): a group's sums have one order on any
# vector width. Groups are scaled by a power of two to [1, 2) and centred, so squares neither overflow nor vanish.

# ``contract`` is the compiler's only liberty: ``reassoc`` would remove the rounding by RINT. All in one file,
# because numba's cache is keyed by the called function's file.

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numba import njit

from tokamac.engine.perf.config_cost import Packing

from .on_mlx import DRAWN_IN, ROUNDS

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile with numba at the first call, without the GIL, cached on disk if possible."""
    # numba raises RuntimeError where neither the package's folder, the user's cache nor NUMBA_CACHE_DIR is
    # writable; then every process compiles anew, for some seconds.
    settings: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(**settings)(function)  # type: ignore[no-any-return]


Array = np.ndarray

# Groups in a batch: two of the widest vectors, and the values and importance of 128 × 32 weights fit in a 32 KB cache.
LANES = 32

# Weights of a group that one pass over the lanes takes, with the sums in registers. It divides every group size.
UNROLL = 8

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # types that scales and biases are stored in

# Adding and subtracting this rounds a number below 2²² to the nearest integer, ties to even, with two additions.
RINT = np.float32(1.5 * 2**23)

ZERO, ONE, INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)

TINY = np.float32(1e-30)  # a step or spread up to this is none: its inverse could overflow. Values are about 1.

EPS = np.float32(1e-7)  # the smallest scale that mx.quantize gives

# An answer replaces another, first MLX's own, only where its error is smaller by more than sums in float32 can be
# wrong.
NO_WORSE = np.float32(1 - 1e-5)

# Rows of a batch's state, each a number per lane. FACTOR, MEAN: value = (weight × FACTOR) − MEAN.
LOW, HIGH, FACTOR, MEAN, COUNT, INVERSE, OFFSET = range(7)
SUM_Q, SUM_QQ, SUM_XQ, GAIN, SCALE, BIAS = range(7, 13)  # of the fits, and the best of them; on values
TRY_SCALE, TRY_BIAS, ERROR, BEST_SCALE, BEST_BIAS, BEST_ERROR, STEP, START = range(13, 21)  # as stored; on weights
ROWS = 21


@compiled
def search_groups(  # noqa: PLR0917
    weights: Array,
    importance: Array | None,
    drawn: Array,
    rounds: int,
    bits: int,
    kind: int,
    words: Array,
    scales: Array,
    biases: Array,
) -> None:
    """Fill words (groups, size · bits / 32), scales and biases (groups,) from weights (groups, size).

    importance: (groups in a row, size) or None. drawn: (candidates, 2), steps that the ends move in.
    """
    top = np.float32(2**bits - 1)
    x = np.empty((weights.shape[1], LANES), np.float32)
    h = None if importance is None else np.empty((weights.shape[1], LANES), np.float32)
    s = np.empty((ROWS, LANES), np.float32)
    packed = np.empty((words.shape[1], LANES), np.uint32)
    for first in range(0, weights.shape[0], LANES):
        lanes = min(LANES, weights.shape[0] - first)
        _load(weights, importance, first, lanes, x, h)
        _measure(x, s)
        _centre(x, h, s)
        _start(x, h, s, top, kind)
        for candidate in range(drawn.shape[0]):
            _place(s, drawn[candidate, 0], drawn[candidate, 1], top)
            _fit(x, h, s, top)
        for _ in range(rounds):
            s[START, :] = s[BIAS, :]
            s[STEP, :] = s[SCALE, :]
            _fit(x, h, s, top)
        _settle(x, h, s, top, kind)
        _pack(x, s, top, bits, packed)
        for lane in range(lanes):
            scales[first + lane] = s[BEST_SCALE, lane]
            biases[first + lane] = s[BEST_BIAS, lane]
            for word in range(words.shape[1]):
                words[first + lane, word] = packed[word, lane]


@compiled
def _load(weights: Array, importance: Array | None, first: int, lanes: int, x: Array, h: Array | None) -> None:  # noqa: PLR0917
    for lane in range(LANES):
        group = first + (lane if lane < lanes else 0)
        for i in range(x.shape[0]):
            x[i, lane] = weights[group, i]
        if importance is not None and h is not None:
            row = group % importance.shape[0]
            most = importance[row].max()
            for i in range(x.shape[0]):
                h[i, lane] = importance[row, i] / most if most > ZERO else ONE


@compiled
def _measure(x: Array, s: Array) -> None:
    s[LOW, :] = INFINITE
    s[HIGH, :] = -INFINITE
    for i in range(x.shape[0]):
        for lane in range(LANES):
            s[LOW, lane] = min(s[LOW, lane], x[i, lane])
            s[HIGH, lane] = max(s[HIGH, lane], x[i, lane])
    for lane in range(LANES):
        s[FACTOR, lane] = max(abs(s[LOW, lane]), abs(s[HIGH, lane]))
    bits = s[FACTOR].view(np.uint32)
    for lane in range(LANES):  # the biased exponents of 2^e and 2^-e add up to 254; the ends are left to normal numbers
        exponent = min(max(bits[lane] >> np.uint32(23), np.uint32(1)), np.uint32(253))
        bits[lane] = (np.uint32(254) - exponent) << np.uint32(23)


@compiled
def _start(x: Array, h: Array | None, s: Array, top: np.float32, kind: int) -> None:
    for lane in range(LANES):
        low, high = s[LOW, lane], s[HIGH, lane]
        below = abs(low) > abs(high)
        edge = low if below else high
        scale = max((high - low) / top, EPS)
        scale = scale if below else -scale
        steps = np.rint(edge / scale)
        s[TRY_SCALE, lane] = scale if steps == ZERO else edge / steps
        s[TRY_BIAS, lane] = ZERO if steps == ZERO else edge
    _store(s, TRY_SCALE, kind)
    _store(s, TRY_BIAS, kind)
    _try(x, h, s, top)
    s[BEST_SCALE : BEST_BIAS + 1] = ZERO
    s[BEST_ERROR, :] = INFINITE
    _keep(s)
    s[GAIN : BIAS + 1] = ZERO


@compiled
def _store(s: Array, row: int, kind: int) -> None:
    values = s[row]
    raw = values.view(np.uint32)
    largest = np.float32(3.4028234663852886e38)
    if kind != FLOAT32:
        dropped, one = np.uint32(16 if kind == BFLOAT16 else 13), np.uint32(1)
        largest = np.float32(3.3895313892515355e38 if kind == BFLOAT16 else 65504.0)
        subnormal = np.float32(2.0**-14 if kind == FLOAT16 else 0.0)
        for lane in range(LANES):
            value, bits = values[lane], raw[lane]
            raw[lane] = (bits + (one << dropped - one) - one + (bits >> dropped & one)) >> dropped << dropped
            if abs(value) < subnormal:  # a multiple of 2^-24
                values[lane] = (value + np.float32(0.75)) - np.float32(0.75)
    for lane in range(LANES):
        values[lane] = min(max(values[lane], -largest), largest)


@compiled
def _centre(x: Array, h: Array | None, s: Array) -> None:
    s[MEAN, :] = ZERO
    s[COUNT, :] = ZERO
    for i in range(x.shape[0]):
        for lane in range(LANES):
            x[i, lane] *= s[FACTOR, lane]
            weight = ONE if h is None else h[i, lane]
            s[MEAN, lane] += weight * x[i, lane]
            s[COUNT, lane] += weight
    for lane in range(LANES):
        s[MEAN, lane] /= s[COUNT, lane]
    for i in range(x.shape[0]):
        for lane in range(LANES):
            x[i, lane] -= s[MEAN, lane]


@compiled
def _try(x: Array, h: Array | None, s: Array, top: np.float32) -> None:
    _aim(s, TRY_SCALE, TRY_BIAS)
    s[ERROR, :] = ZERO
    for begin in range(0, x.shape[0], UNROLL):
        for lane in range(LANES):
            inverse, step, start, error = s[INVERSE, lane], s[STEP, lane], s[START, lane], s[ERROR, lane]
            for i in range(UNROLL):
                value = x[begin + i, lane]
                code = (min(max((value - start) * inverse, ZERO), top) + RINT) - RINT
                rest = value - (code * step + start)
                error += (rest if h is None else h[begin + i, lane] * rest) * rest
            s[ERROR, lane] = error


@compiled
def _place(s: Array, low: np.float32, high: np.float32, top: np.float32) -> None:
    for lane in range(LANES):
        whole = (s[HIGH, lane] * s[FACTOR, lane] - s[LOW, lane] * s[FACTOR, lane]) / top
        s[START, lane] = s[LOW, lane] * s[FACTOR, lane] - s[MEAN, lane] + low * whole
        s[STEP, lane] = whole - (low + high) * whole / top


@compiled
def _fit(x: Array, h: Array | None, s: Array, top: np.float32) -> None:
    # With values of mean zero the squared error of the fit is Σ h x² less (Σ h x q)² ÷ Σ h (q − mean q)²: the gain.
    # So a candidate is judged by what it becomes, for one more sum than its own error would take.
    middle = (top + ONE) / np.float32(2)  # sums of q − middle keep more digits than sums of q
    back = RINT + middle
    s[SUM_Q : SUM_XQ + 1] = ZERO
    for lane in range(LANES):
        s[INVERSE, lane] = ONE / s[STEP, lane] if s[STEP, lane] > TINY else ZERO
        s[OFFSET, lane] = -s[START, lane] * s[INVERSE, lane]
    for begin in range(0, x.shape[0], UNROLL):
        for lane in range(LANES):
            inverse, offset = s[INVERSE, lane], s[OFFSET, lane]
            sum_q, sum_qq, sum_xq = s[SUM_Q, lane], s[SUM_QQ, lane], s[SUM_XQ, lane]
            for i in range(UNROLL):
                value = x[begin + i, lane]
                code = (min(max(value * inverse + offset, ZERO), top) + RINT) - back
                weighed = code if h is None else h[begin + i, lane] * code
                sum_q += weighed
                sum_qq += weighed * code
                sum_xq += weighed * value
            s[SUM_Q, lane], s[SUM_QQ, lane], s[SUM_XQ, lane] = sum_q, sum_qq, sum_xq
    for lane in range(LANES):
        mean = s[SUM_Q, lane] / s[COUNT, lane]
        spread = s[SUM_QQ, lane] - s[SUM_Q, lane] * mean
        scale = s[SUM_XQ, lane] / spread if spread > TINY else ZERO
        gain = s[SUM_XQ, lane] * scale
        better = gain > s[GAIN, lane]
        s[GAIN, lane] = gain if better else s[GAIN, lane]
        s[BIAS, lane] = -scale * (mean + middle) if better else s[BIAS, lane]
        s[SCALE, lane] = scale if better else s[SCALE, lane]


@compiled
def _settle(x: Array, h: Array | None, s: Array, top: np.float32, kind: int) -> None:
    # Scale and bias can be counted from the lower end or, with the scale's sign changed, from the upper one. One of the two biases
    # is smaller or happens to be rounded less: with 8 bits in bfloat16 trying both saves a twentieth of the error.
    for upper in range(2):
        for lane in range(LANES):
            s[TRY_SCALE, lane] = s[SCALE, lane] / s[FACTOR, lane]
        _store(s, TRY_SCALE, kind)
        for lane in range(LANES):  # the bias that fits the codes best with the scale as stored
            scale = s[TRY_SCALE, lane] * s[FACTOR, lane]
            start = s[BIAS, lane] * scale / s[SCALE, lane] if s[SCALE, lane] > TINY else ZERO
            start = start + top * scale if upper else start
            s[TRY_SCALE, lane] = -s[TRY_SCALE, lane] if upper else s[TRY_SCALE, lane]
            s[TRY_BIAS, lane] = (start + s[MEAN, lane]) / s[FACTOR, lane]
        _store(s, TRY_BIAS, kind)
        _try(x, h, s, top)
        _keep(s)


@compiled
def _keep(s: Array) -> None:
    for lane in range(LANES):
        better = s[ERROR, lane] < s[BEST_ERROR, lane]
        s[BEST_ERROR, lane] = s[ERROR, lane] * NO_WORSE if better else s[BEST_ERROR, lane]
        s[BEST_SCALE, lane] = s[TRY_SCALE, lane] if better else s[BEST_SCALE, lane]
        s[BEST_BIAS, lane] = s[TRY_BIAS, lane] if better else s[BEST_BIAS, lane]


@compiled
def _aim(s: Array, scale: int, bias: int) -> None:
    for lane in range(LANES):
        step = s[scale, lane] * s[FACTOR, lane]
        s[STEP, lane] = step
        s[START, lane] = s[bias, lane] * s[FACTOR, lane] - s[MEAN, lane]
        s[INVERSE, lane] = ONE / step if abs(step) > TINY else ZERO


@compiled
def _pack(x: Array, s: Array, top: np.float32, bits: int, packed: Array) -> None:
    _aim(s, BEST_SCALE, BEST_BIAS)
    packed[:] = np.uint32(0)
    for i in range(x.shape[0]):
        word, shift = i * bits // 32, i * bits % 32
        for lane in range(LANES):
            code = np.uint32((min(max((x[i, lane] - s[START, lane]) * s[INVERSE, lane], ZERO), top) + RINT) - RINT)
            packed[word, lane] |= code << np.uint32(shift)
            if shift + bits > 32:
                packed[word + 1, lane] |= code >> np.uint32(32 - shift)


# Sums that run side by side: an addition need not wait for the one before, and all sizes of groups are multiples of it.
ERROR_LANES = 8


@compiled
def squared_error_groups(
    weights: np.ndarray, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> tuple[float, float]:
    """Return Σ (weight − (scale · q + bias))² and Σ weight² in float64."""
    mask = np.uint64(2**bits - 1)
    error, total = np.zeros(ERROR_LANES), np.zeros(ERROR_LANES)
    codes = np.empty(weights.shape[1], np.float32)
    for group in range(weights.shape[0]):
        if 32 % bits == 0:
            each = 32 // bits
            for word in range(words.shape[1]):
                held = words[group, word]
                for i in range(each):
                    codes[word * each + i] = np.float32(held >> np.uint32(i * bits) & np.uint32(mask))
        else:
            for i in range(weights.shape[1]):
                word, shift = i * bits // 32, i * bits % 32
                pair = np.uint64(words[group, word])
                if shift + bits > 32:
                    pair |= np.uint64(words[group, word + 1]) << np.uint64(32)
                codes[i] = np.float32(pair >> np.uint64(shift) & mask)
        scale, bias = scales[group], biases[group]
        for i in range(0, weights.shape[1], ERROR_LANES):
            for lane in range(ERROR_LANES):
                value = np.float64(weights[group, i + lane])
                rest = value - np.float64(codes[i + lane] * scale + bias)
                error[lane] += rest * rest
                total[lane] += value * value
    return error.sum(), total.sum()


# Done by one thread at a time: some milliseconds, and its float32 values fit in a core's second-level cache.
CHUNK_WEIGHTS = 1 << 18

Arrays = tuple[mx.array, mx.array, mx.array]

KINDS = {mx.float32: FLOAT32, mx.bfloat16: BFLOAT16, mx.float16: FLOAT16}


class NumbaSearch:
    """See Implementation; threads cast what they work on, so no large weight is held in float32."""

    name = "numba"

    def search(self, weight: mx.array, packing: Packing, importance: np.ndarray | None) -> Arrays:
        bits, size = packing.bits or 0, packing.group_size
        groups = Groups.group(weight, size)
        made = mx.zeros((weight.shape[0], weight.shape[1] * bits // 32), mx.uint32)
        # MLX's memory, filled in place: a copy would double the peak.
        words = np.asarray(made).reshape(groups.count, -1)
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
        bits, size = packing.bits or 0, packing.group_size
        groups = Groups.group(weight, size)
        words = np.asarray(mx.contiguous(arrays[0])).reshape(groups.count, -1)
        scales, biases = (np.asarray(each.astype(mx.float32)).reshape(-1) for each in arrays[1:])

        def work(begin: int, end: int) -> tuple[float, float]:
            made = words[begin:end], scales[begin:end], biases[begin:end]
            return squared_error_groups(groups.read(begin, end), *made, bits)

        sums = _in_threads(work, _chunks(0, groups.count, _step(size, 1)))
        return sum(error for error, _ in sums), sum(total for _, total in sums)


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight's groups as NumPy views of MLX memory. raw: (count, size); bfloat16 as uint16."""

    raw: np.ndarray
    source: mx.array

    @classmethod
    def group(cls, weight: mx.array, size: int) -> "Groups":
        source = mx.contiguous(weight)
        source = source.view(mx.uint16) if weight.dtype == mx.bfloat16 else source
        return cls(np.asarray(source).reshape(-1, size), source)

    @property
    def count(self) -> int:
        return len(self.raw)

    def read(self, begin: int, end: int) -> np.ndarray:
        raw = self.raw[begin:end]
        if raw.dtype == np.uint16:
            raw = np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
        return raw.astype(np.float32, copy=False)


def _step(size: int, groups_in_row: int) -> int:
    return max(CHUNK_WEIGHTS // size // groups_in_row, 1) * groups_in_row


def _chunks(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, end)) for start in range(begin, end, step))


def _in_threads(work: Callable[..., Any], chunks: Iterator[tuple[Any, ...]]) -> list[Any]:
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="search")
    try:
        return [future.result() for future in [pool.submit(work, *chunk) for chunk in chunks]]
    finally:
        pool.shutdown(cancel_futures=True)
