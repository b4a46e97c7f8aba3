"""The search in MLX's own operations: for GPUs, and wherever numba is not installed. Step by step what kernels.py does.

Arrays are (groups, size), and numbers of a group (groups, 1). The two functions that look at every weight for every candidate are
compiled; what differs between candidates goes in as arrays, so that they are compiled once.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.search.blocks import (
    DRAWN_IN,
    ROUNDS,
    SEARCHING,
    block_here,
    blocks_of,
    importance_of_groups,
    pack_codes,
    unpacked_error,
)

Arrays = tuple[mx.array, mx.array, mx.array]

TINY = 1e-30
NO_WORSE = 1 - 1e-5
"""See kernels.py."""


class MlxSearch:
    """See Implementation."""

    name = "mlx"

    def search(self, weight: mx.array, packing: Packing, importance: np.ndarray | None) -> Arrays:
        """See Implementation."""
        found = []
        for block, h in blocks_of(weight, importance, block_here(SEARCHING)):
            found.append(_search(block, packing, h))
            mx.eval(found[-1])
        words, scales, biases = (mx.concatenate(list(each)) for each in zip(*found, strict=True))
        return words, scales, biases

    def squared_error(self, weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
        """See Implementation."""
        return unpacked_error(weight, arrays, packing)


class Values(NamedTuple):
    """What is fitted. x: (groups, size), of mean zero. h: importance, or None. total: Σ h."""

    x: mx.array
    h: mx.array | None
    total: mx.array


@dataclass(frozen=True, slots=True)
class GroupValues:
    """Values, their ends, and what they were made with: x = weight × factor − mean."""

    values: Values
    low: mx.array
    high: mx.array
    factor: mx.array
    mean: mx.array


class BestFit(NamedTuple):
    """The best fit so far, on values. gain: by how much it lowers the squared error."""

    gain: mx.array
    scale: mx.array
    bias: mx.array


class StoredFit(NamedTuple):
    """The best scale and bias so far, as stored, on weights, and their error on values."""

    error: mx.array
    scale: mx.array
    bias: mx.array


def _search(weight: mx.array, packing: Packing, importance: mx.array | None) -> Arrays:
    bits, size, top = packing.bits or 0, packing.group_size, float(2 ** (packing.bits or 0) - 1)
    groups = _measure(weight, size, importance)
    fit = partial(_compiled(_fit), groups.values)
    steps = (groups.high - groups.low) / top
    best = BestFit(*(mx.zeros_like(groups.mean) for _ in range(3)))
    for low, high in DRAWN_IN:
        start, step = groups.low + low * steps, steps - (low + high) * steps / top
        best = BestFit(*fit(start, step, best, top))
    for _ in range(ROUNDS):
        best = BestFit(*fit(best.bias, best.scale, best, top))
    answer = _settle(groups, best, _mlx_answer(groups, weight, packing, top), top, weight.dtype)
    start, step = _aim(groups, answer.scale, answer.bias)
    words = pack_codes(_codes(groups.values.x, start, step, top), bits)
    rows = weight.shape[0]
    scales, biases = (each.astype(weight.dtype).reshape(rows, -1) for each in (answer.scale, answer.bias))
    return words.reshape(rows, -1), scales, biases


def _measure(weight: mx.array, size: int, importance: mx.array | None) -> GroupValues:
    values = weight.astype(mx.float32).reshape(-1, size)
    low, high = values.min(axis=-1, keepdims=True), values.max(axis=-1, keepdims=True)
    exponent = mx.clip(mx.maximum(mx.abs(low), mx.abs(high)).view(mx.uint32) >> 23, 1, 253).astype(mx.uint32)
    factor = ((254 - exponent) << 23).astype(mx.uint32).view(mx.float32)
    x, h = values * factor, None
    total = mx.full(low.shape, size, mx.float32)
    mean = x.mean(axis=-1, keepdims=True)
    if importance is not None:
        h = importance_of_groups(importance, size, weight.shape[0])
        total = h.sum(axis=-1, keepdims=True)
        mean = (h * x).sum(axis=-1, keepdims=True) / total
    return GroupValues(Values(x - mean, h, total), low * factor - mean, high * factor - mean, factor, mean)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return mx.compile(function)


def _codes(x: mx.array, start: mx.array, step: mx.array, top: float) -> mx.array:
    """Return the nearest codes, ties to even, as floats."""
    inverse = mx.where(mx.abs(step) > TINY, 1 / step, 0)
    return mx.round(mx.clip((x - start) * inverse, 0, top))


def _fit(values: Values, start: mx.array, step: mx.array, best: BestFit, top: float) -> BestFit:
    """Fit scale and bias by least squares to the codes that a placement gives; return the better of this fit and the best."""
    x, h, total = values
    middle = (top + 1) / 2
    codes = _codes(x, start, step, top) - middle
    weighed = codes if h is None else h * codes
    sum_q, sum_qq, sum_xq = (each.sum(axis=-1, keepdims=True) for each in (weighed, weighed * codes, weighed * x))
    spread = sum_qq - sum_q * sum_q / total
    scale = mx.where(spread > TINY, sum_xq / spread, 0)
    gain = sum_xq * scale
    found = BestFit(gain, scale, -scale * (sum_q / total + middle))
    return BestFit(*(mx.where(gain > best.gain, new, old) for new, old in zip(found, best, strict=True)))


def _error(values: Values, start: mx.array, step: mx.array, top: float) -> mx.array:
    x, h, _ = values
    rest = x - (_codes(x, start, step, top) * step + start)
    error = (rest if h is None else h * rest) * rest
    return error.sum(axis=-1, keepdims=True)


def _aim(groups: GroupValues, scale: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
    """Return start and step on values of a stored scale and bias."""
    return bias * groups.factor - groups.mean, scale * groups.factor


def _answer(groups: GroupValues, scale: mx.array, bias: mx.array, top: float) -> StoredFit:
    return StoredFit(_compiled(_error)(groups.values, *_aim(groups, scale, bias), top), scale, bias)


def _mlx_answer(groups: GroupValues, weight: mx.array, packing: Packing, top: float) -> StoredFit:
    """Return mx.quantize's scale and bias, and their error with the nearest codes."""
    _, *stored = mx.quantize(weight, **asdict(packing))
    scale, bias = (each.astype(mx.float32).reshape(-1, 1) for each in stored)
    answer = _answer(groups, scale, bias, top)
    return StoredFit(mx.where(mx.isfinite(answer.error), answer.error, mx.inf), scale, bias)


def _settle(groups: GroupValues, fit: BestFit, answer: StoredFit, top: float, dtype: mx.Dtype) -> StoredFit:
    """Round a fit to what can be stored, totaled from the lower and from the upper end; return the best, or ``answer``."""
    scale = _stored(fit.scale / groups.factor, dtype)
    step = scale * groups.factor
    start = mx.where(fit.scale > TINY, fit.bias * step / fit.scale, 0)
    for sign, begin in ((1, start), (-1, start + top * step)):
        bias = _stored((begin + groups.mean) / groups.factor, dtype)
        found = _answer(groups, sign * scale, bias, top)
        better = found.error < answer.error * NO_WORSE
        answer = StoredFit(*(mx.where(better, new, old) for new, old in zip(found, answer, strict=True)))
    return answer


def _stored(numbers: mx.array, dtype: mx.Dtype) -> mx.array:
    """Round float32 to a type and back; what lies beyond its largest number becomes that."""
    largest = float(mx.finfo(dtype).max)
    return mx.clip(mx.clip(numbers, -largest, largest).astype(dtype).astype(mx.float32), -largest, largest)
