"""The search in MLX operations: affine groups on GPUs or without numba, and microscaling scales."""

# Affine: both ends of mx.quantize's range move in quarter steps, from 1/4 out to 3/4 in. Each placement is
# judged by
# its least-squares fit, and the best is refined twice. Squared error over mx.quantize's, 4 bits at groups of
# 64,
# mean of Gaussian, Student-t (5) and Laplace weights:
#
#     ends moved by                        placements   error
#     1/4 out … 3/4 in, by halves               9       0.802
#     1/4 out … 3/4 in, by quarters            25       0.796   chosen
#     1/2 out … 1 in, by quarters              49       0.795
#     a share of the range, 0 … 1/8            25       0.803
#
# Microscaling (OCP MX Specification 1.0: mxfp4, 32 weights; NVIDIA's NVFP4, 16 weights, E4M3 scale): scales around
# mx.quantize's are tried, for 0.85–0.94 of its error with mxfp4, 0.73–0.81 with nvfp4, no gain with mxfp8.

# Counted in steps the best range hardly depends on bits. At 2 bits a whole step in saves another 0.3 %; a third
# refinement less than 0.1 %. Candidates are passed as arrays, so that the two hot functions compile once.

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.memory import device_total

Arrays = tuple[mx.array, mx.array, mx.array]

# Bytes a weight that MLX holds beside a block: while affine groups or scales are searched, and while a packing is
# compared.
SEARCHING, SEARCHING_SCALES, COMPARING = 80, 140, 20

# Weights of a block. A CPU gains nothing by more; a GPU does nothing between two blocks, and a small one does not fill
# it.
SMALLEST, LARGEST = 1 << 20, 1 << 24

PART_OF_MEMORY = 12  # a block's arrays take at most one such part of the GPU's memory

OFFSETS = (-0.25, 0.0, 0.25, 0.5, 0.75)
# Steps by which the lower and the upper end of a group are drawn in.
DRAWN_IN = tuple((low, high) for low in OFFSETS for high in OFFSETS)

ROUNDS = 2  # of refinement

TINY = 1e-30  # a step or spread up to this is none: its inverse could overflow. Values are about 1.

SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)

# An answer replaces another, first MLX's own, only where its error is smaller by more than sums in float32 can be
# wrong.
NO_WORSE = 1 - 1e-5

MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by code, and where the nearest changes


@dataclass(frozen=True, slots=True)
class Format:
    """largest: the last positive scale byte. nearby: byte offsets tried around MLX's."""

    group_size: int
    largest: int
    nearby: tuple[int, ...]


# Formats that gain. Of powers of two the next smaller is better for a third of the groups, and the next larger never
# is.
FORMATS: Mapping[str, Format] = {
    "mxfp4": Format(32, 254, (-1,)),
    "nvfp4": Format(16, 126, (-1, 1, 2, 3, 4, 5)),
}


class MlxSearch:
    name = "mlx"

    def search(self, weight: mx.array, packing: Packing, importance: np.ndarray | None) -> Arrays:
        words, scales, biases = _in_blocks(_search, weight, packing, importance, SEARCHING)
        return words, scales, biases

    def squared_error(self, weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
        return unpacked_error(weight, arrays, packing)


def search_scales(
    weight: mx.array, packing: Packing, importance: np.ndarray | None = None
) -> tuple[mx.array, mx.array]:
    """Return words and scales, no group worse than mx.quantize's. weight: (…, in). Raises ValueError."""
    if packing.mode not in FORMATS:
        raise ValueError(f"{packing.mode} has no scales worth searching")
    rows = weight.reshape(-1, weight.shape[-1])
    found = _in_blocks(_search_scales, rows, packing, checked(importance, weight), SEARCHING_SCALES)
    words, scales = (each.reshape(*weight.shape[:-1], -1) for each in found)
    return words, scales


def unpacked_error(weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
    """Return Σ (weight − packed)² and Σ weight². weight: (rows, in)."""
    height = max(block_here(COMPARING) // weight.shape[-1], 1)
    error = total = 0.0
    for begin in range(0, weight.shape[0], height):
        block = slice(begin, begin + height)
        sums = _block_error(weight[block], [each[block] for each in arrays], packing)
        error, total = error + sums[0], total + sums[1]
    return error, total


def checked(importance: np.ndarray | None, weight: mx.array) -> np.ndarray | None:
    """Return importance as (parts, in) float32. Raises ValueError if misshapen, negative or not finite."""
    if importance is None:
        return None
    inputs = weight.shape[-1]
    if importance.shape != (inputs,) and (weight.ndim != 3 or importance.shape != (weight.shape[0], inputs)):
        raise ValueError(f"importance of shape {importance.shape} does not fit a weight of shape {weight.shape}")
    parts = np.ascontiguousarray(importance, dtype=np.float32).reshape(-1, inputs)
    if not math.isfinite(parts.max()) or not parts.min() >= 0:
        raise ValueError("importance must be finite and not negative")
    return parts


def block_weights(kind: DeviceKind, memory_bytes: int | None, weight_bytes: int) -> int:
    if kind == "cpu" or memory_bytes is None:
        return SMALLEST
    fits = max(memory_bytes // PART_OF_MEMORY // weight_bytes, 1)
    return min(max(1 << fits.bit_length() - 1, SMALLEST), LARGEST)


def block_here(weight_bytes: int) -> int:
    return block_weights(device_kind(), device_total(), weight_bytes)


def _in_blocks(
    find: Callable[[mx.array, Packing, mx.array | None], tuple[mx.array, ...]],
    weight: mx.array,
    packing: Packing,
    importance: np.ndarray | None,
    weight_bytes: int,
) -> list[mx.array]:
    found = []
    for block, h in _blocks(weight, importance, block_here(weight_bytes)):
        found.append(find(block, packing, h))
        mx.eval(found[-1])
    return [mx.concatenate(list(each)) for each in zip(*found, strict=True)]


def _blocks(weight: mx.array, importance: np.ndarray | None, block: int) -> Iterator[tuple[mx.array, mx.array | None]]:
    parts = 1 if importance is None else len(importance)
    share, height = weight.shape[0] // parts, max(block // weight.shape[-1], 1)
    for part in range(parts):
        h = None if importance is None else mx.array(importance[part])
        for begin in range(part * share, (part + 1) * share, height):
            yield weight[begin : min(begin + height, (part + 1) * share)], h


def _importance_of_groups(importance: mx.array, size: int, rows: int) -> mx.array:
    h = importance.reshape(-1, size)
    most = h.max(axis=-1, keepdims=True)
    h = mx.where(most > 0, h / mx.where(most > 0, most, 1), 1)
    return mx.broadcast_to(h, (rows, *h.shape)).reshape(-1, size)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Return codes (groups, size) as words (groups, size · bits ÷ 32)."""
    single = codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32) & 1
    words = single.reshape(codes.shape[0], -1, 32) << mx.arange(32, dtype=mx.uint32)
    return words.sum(axis=-1).astype(mx.uint32)


def _block_error(weight: mx.array, arrays: Sequence[mx.array], packing: Packing) -> tuple[float, float]:
    exact = weight.astype(mx.float32)
    words, scales, *biases = arrays
    if biases:  # in the wider type the product is not rounded to theirs
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    bias = biases[0] if biases else None
    made = mx.dequantize(words, scales, bias, dtype=mx.float32, **asdict(packing))
    largest = mx.maximum(mx.abs(exact).max(), SMALLEST_FLOAT)
    unit: Any = largest.item()

    def total(values: mx.array) -> float:
        squares = mx.square((values / largest).reshape(-1, packing.group_size)).sum(axis=-1)
        return float(np.asarray(squares).sum(dtype=np.float64)) * float(unit) ** 2

    return total(exact - made), total(exact)


# The search of affine groups.


class Values(NamedTuple):
    """Fitted values. x: (groups, size), of mean zero. h: importance, or None. total: Σ h."""

    x: mx.array
    h: mx.array | None
    total: mx.array


@dataclass(frozen=True, slots=True)
class GroupValues:
    values: Values
    low: mx.array
    high: mx.array
    factor: mx.array
    mean: mx.array


class BestFit(NamedTuple):
    gain: mx.array
    scale: mx.array
    bias: mx.array


class StoredFit(NamedTuple):
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
        h = _importance_of_groups(importance, size, weight.shape[0])
        total = h.sum(axis=-1, keepdims=True)
        mean = (h * x).sum(axis=-1, keepdims=True) / total
    return GroupValues(Values(x - mean, h, total), low * factor - mean, high * factor - mean, factor, mean)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return mx.compile(function)


def _codes(x: mx.array, start: mx.array, step: mx.array, top: float) -> mx.array:
    inverse = mx.where(mx.abs(step) > TINY, 1 / step, 0)
    return mx.round(mx.clip((x - start) * inverse, 0, top))


def _fit(values: Values, start: mx.array, step: mx.array, best: BestFit, top: float) -> BestFit:
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
    return bias * groups.factor - groups.mean, scale * groups.factor


def _answer(groups: GroupValues, scale: mx.array, bias: mx.array, top: float) -> StoredFit:
    return StoredFit(_compiled(_error)(groups.values, *_aim(groups, scale, bias), top), scale, bias)


def _mlx_answer(groups: GroupValues, weight: mx.array, packing: Packing, top: float) -> StoredFit:
    _, *stored = mx.quantize(weight, **asdict(packing))
    scale, bias = (each.astype(mx.float32).reshape(-1, 1) for each in stored)
    answer = _answer(groups, scale, bias, top)
    return StoredFit(mx.where(mx.isfinite(answer.error), answer.error, mx.inf), scale, bias)


def _settle(groups: GroupValues, fit: BestFit, answer: StoredFit, top: float, dtype: mx.Dtype) -> StoredFit:
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
    largest = float(mx.finfo(dtype).max)
    return mx.clip(mx.clip(numbers, -largest, largest).astype(dtype).astype(mx.float32), -largest, largest)


# The search of microscaling scales.


def _search_scales(weight: mx.array, packing: Packing, importance: mx.array | None) -> tuple[mx.array, mx.array]:
    form, rows = FORMATS[packing.mode], weight.shape[0]
    scales = mx.quantize(weight, **asdict(packing))[1]
    first, table = scales.reshape(-1, 1).astype(mx.int32), _scale_table(packing.mode)
    first = mx.where(first > form.largest, 0, first)  # what MLX gives for subnormal weights is no number
    x = weight.astype(mx.float32).reshape(-1, form.group_size)
    h = mx.array(1.0) if importance is None else _importance_of_groups(importance, form.group_size, rows)
    unit = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), SMALLEST_FLOAT)
    best, least = first, _float_error(x, h, table[first], unit)
    for move in form.nearby:
        tried = mx.clip(first + move, 0, form.largest)
        error = _float_error(x, h, table[tried], unit)
        better = error < least * NO_WORSE
        best, least = mx.where(better, tried, best), mx.where(better, error, least)
    words = pack_codes(_float_codes(x, table[best]), 4)
    return words.reshape(rows, -1), best.astype(mx.uint8).reshape(rows, -1)


def _scale_table(mode: str) -> mx.array:
    if mode == "nvfp4":
        return mx.from_fp8(mx.arange(256).astype(mx.uint8), dtype=mx.float32)
    return mx.array(np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127))


def _float_codes(x: mx.array, scale: mx.array) -> mx.array:
    size = mx.where(scale > 0, mx.abs(x) / mx.where(scale > 0, scale, 1), 0)
    codes = sum((size > middle).astype(mx.uint32) for middle in MIDDLES)
    return codes + mx.where(x < 0, 8, 0).astype(mx.uint32)


def _float_error(x: mx.array, h: mx.array, scale: mx.array, unit: mx.array) -> mx.array:
    made = mx.array(MAGNITUDES)[_float_codes(x, scale) & 7] * scale
    return (h * mx.square((mx.abs(x) - made) / unit)).sum(axis=-1, keepdims=True)
