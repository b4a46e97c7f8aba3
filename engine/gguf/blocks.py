"""GGUF's block types in MLX's packed formats: the same numbers wherever MLX can hold them, and else 8 bits."""

# A block holds integer codes q and few numbers that scale them; MLX's weight is scale · q + bias for groups of 32, 64 or
# 128. So a type is exact if its own groups are that long and its codes fit. Scales stay float16, as they are in the file:
# bfloat16 would round them. The K types multiply two numbers of 16 and 6 bits to a scale, which float16 rounds.

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, Q4_K, dequantize
from numpy.typing import NDArray

from .file import GgufTensor

Kind = GGMLQuantizationType
Bytes = NDArray[np.uint8]
# Codes (blocks, weights of a block), of 4 bits packed; scales and biases (blocks, groups of a block), of MX formats bytes
# and no biases.
Codes = tuple[Bytes, NDArray[Any], NDArray[Any] | None]

CHUNK_WEIGHTS = 1 << 20  # unpacked at a time by each thread: some 10 MB
THREADS = min(8, os.cpu_count() or 1)
LARGEST_CODE = 255  # of 8 bits
LOW, FOUR = np.uint8(15), np.uint8(4)  # a byte's low nibble, and the way to its high one
NOT_A_SCALE = 0x7F  # of nvfp4: llama.cpp reads it as 0, MLX as NaN


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """How MLX holds a type. codes: None if its numbers are rounded anew. error: relative RMS against the file."""

    bits: int
    group_size: int
    codes: Callable[[Bytes], Codes] | None
    error: float = 0.0
    mode: str = "affine"

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scale and bias."""
        return 4 if self.mode == "affine" else 1


def _halves(blocks: Bytes) -> Bytes:
    """Return nibbles (…, 2n) of bytes (…, n): the low ones first."""
    return np.concatenate([blocks & LOW, blocks >> FOUR], axis=-1)


def _packed_halves(blocks: Bytes) -> Bytes:
    low = np.array(blocks, order="C").view(np.uint16)
    high = low >> FOUR
    packed = np.empty((*blocks.shape[:-1], 2, low.shape[-1]), np.uint8)
    word = np.uint64 if low.shape[-1] % 8 == 0 else np.uint32
    for at, half in enumerate((low, high)):
        half &= np.uint16(0x0F0F)  # noqa: PLW2901
        half |= half >> FOUR  # noqa: PLW2901
        packed[..., at, :].view(word)[...] = half.astype(np.uint8).view(word)
    return packed.reshape(blocks.shape)


def _scale(blocks: Bytes, at: int) -> NDArray[np.float32]:
    return blocks.view(np.float16)[:, at // 2, None].astype(np.float32)


def _q4_0(blocks: Bytes) -> Codes:
    scale = _scale(blocks, 0)
    return _packed_halves(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Codes:
    numbers = blocks.view(np.float16)
    return _packed_halves(blocks[:, 4:]), numbers[:, :1], numbers[:, 1:2]


def _fifth_bits(blocks: Bytes) -> Bytes:
    return np.unpackbits(blocks, axis=-1, bitorder="little") << FOUR


def _q5_0(blocks: Bytes) -> Codes:
    scale = _scale(blocks, 0)
    return _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Codes:
    numbers = blocks.view(np.float16)
    return _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), numbers[:, :1], numbers[:, 1:2]


def _q8_0(blocks: Bytes) -> Codes:
    scale = _scale(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _scale(blocks, 0) * scales, -_scale(blocks, 2) * least


def _q4_k(blocks: Bytes) -> Codes:
    return _packed_halves(blocks[:, 16:].reshape(-1, 4, 32)), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Codes:
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)  # (blocks, 8, 32)
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (low | high << FOUR).reshape(-1, 256), *_k_scales(blocks)


CODEBOOK = (np.array(IQ4_NL.kvalues) + 128).astype(np.uint8)


def _iq4_nl(blocks: Bytes) -> Codes:
    scale = _scale(blocks, 0)
    return CODEBOOK[_halves(blocks[:, 2:])], scale, -128 * scale


def _iq4_xs(blocks: Bytes) -> Codes:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)  # (blocks, 8)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 15
    scale = _scale(blocks, 0) * ((low | (high & 3) << 4).astype(np.float32) - 32)
    return CODEBOOK[_halves(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256), scale, -128 * scale


def _ternary(kind: Kind) -> Callable[[Bytes], Codes]:
    def codes(blocks: Bytes) -> Codes:
        scale, ones = np.repeat(_scale(blocks, blocks.shape[1] - 2), 2, axis=1), blocks.copy()
        ones[:, -2:] = np.array([1], np.float16).view(np.uint8)
        return (dequantize(ones, kind) + 1).astype(np.uint8), scale, -scale

    return codes


def _mxfp4(blocks: Bytes) -> Codes:
    return _packed_halves(blocks[:, 1:]), blocks[:, :1], None


def _nvfp4(blocks: Bytes) -> Codes:
    scales = np.where(blocks[:, :4] == NOT_A_SCALE, 0, blocks[:, :4]).astype(np.uint8)
    return _packed_halves(blocks[:, 4:].reshape(-1, 4, 8)), scales, None


ROUNDED = ("Q6_K", "Q3_K", "Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
# Errors were measured on synthetic blocks (tests/engine/gguf), those of rounding on normally distributed weights.
PACKINGS: dict[Kind, BlockPacking] = {
    Kind.Q4_0: BlockPacking(4, 32, _q4_0),
    Kind.Q4_1: BlockPacking(4, 32, _q4_1),
    Kind.Q5_0: BlockPacking(5, 32, _q5_0),
    Kind.Q5_1: BlockPacking(5, 32, _q5_1),
    Kind.Q8_0: BlockPacking(8, 32, _q8_0),
    Kind.Q4_K: BlockPacking(4, 32, _q4_k, 0.0007),
    Kind.Q5_K: BlockPacking(5, 32, _q5_k, 0.0007),
    Kind.IQ4_NL: BlockPacking(8, 32, _iq4_nl),
    Kind.IQ4_XS: BlockPacking(8, 32, _iq4_xs, 0.0003),
    Kind.TQ1_0: BlockPacking(2, 128, _ternary(Kind.TQ1_0)),
    Kind.TQ2_0: BlockPacking(2, 128, _ternary(Kind.TQ2_0)),
    Kind.MXFP4: BlockPacking(4, 32, _mxfp4, mode="mxfp4"),
    Kind.NVFP4: BlockPacking(4, 16, _nvfp4, mode="nvfp4"),
    **dict.fromkeys(map(Kind.__getitem__, ROUNDED), BlockPacking(8, 32, None, 0.008)),
}
FLOATS = {Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}  # as safetensors call them
WORDS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def leaves_of(tensor: GgufTensor) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return safetensors' type and shape of the arrays that stand for a tensor."""
    if tensor.kind in FLOATS:
        return {"": (FLOATS[tensor.kind], tensor.shape)}
    packing, (*rows, width) = PACKINGS[tensor.kind], tensor.shape
    groups = (*rows, width // packing.group_size)
    weight = {"weight": ("U32", (*rows, width * packing.bits // 32))}
    if packing.mode != "affine":
        return weight | {"scales": ("U8", groups)}
    return weight | {"scales": ("F16", groups), "biases": ("F16", groups)}


MINUS_ONE, LOG = "minus one", "log"  # what is done to unpacked numbers: of a norm that has 1 added, of −exp(x)


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows and columns of a file a class has, in its order."""

    runs: tuple[tuple[int, int], ...] = ()  # of rows, begin and end; none: all
    turned: int = 0  # rows of a head whose halves llama.cpp interleaves
    columns: tuple[int, ...] = ()  # equal spans of each row


def unpack_into(tensor: GgufTensor, leaves: dict[str, NDArray[Any]], order: Order, change: str = "") -> None:
    """Fill the arrays of ``leaves_of``, some rows at a time. Raises ModelDamagedError.

    leaves: {"": array} of a packed type gets its numbers unpacked.
    """
    pool = _pool()
    if len(tensor.shape) == 1:  # a bias: each number is a row
        tensor = replace(tensor, shape=(*tensor.shape, 1))
    runs = order.runs or ((0, tensor.rows),)
    count = sum(end - begin for begin, end in runs)
    flat = {name: array.reshape(count, -1) for name, array in leaves.items()}
    step, turned = max(1, CHUNK_WEIGHTS // tensor.shape[-1]), order.turned
    step = -(-step // turned) * turned if turned else step
    unpacked = "" in leaves and tensor.kind not in FLOATS

    def fill(part: tuple[int, int, int]) -> None:
        first, end, place = part
        rows = tensor.read(first, end - first)
        if turned:
            rows = rows.reshape(-1, turned // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        found_in_rows = [("", dequantize(rows, tensor.kind))] if unpacked else _converted(rows, tensor.kind)
        with np.errstate(all="ignore"):  # nonsense values are told of where all are
            for name, found in found_in_rows:
                flat[name][place : place + len(rows)] = _changed(_ordered(found, order.columns), change)

    parts, place = [], 0
    for begin, end in runs:
        parts += [(at, min(at + step, end), place + at - begin) for at in range(begin, end, step)]
        place += end - begin
    if len(parts) == 1:
        fill(parts[0])
    else:
        for _ in pool.map(fill, parts):
            pass


@cache
def _pool() -> ThreadPoolExecutor:
    np.empty(8 * CHUNK_WEIGHTS, np.uint8)  # glibc asks the kernel for each array until it has freed a larger one
    return ThreadPoolExecutor(THREADS)


def _ordered(values: NDArray[Any], columns: tuple[int, ...]) -> NDArray[Any]:
    rows = len(values)
    return values.reshape(rows, len(columns), -1)[:, columns].reshape(rows, -1) if columns else values


def _changed(values: NDArray[Any], change: str) -> NDArray[Any]:
    if not change:
        return values
    halves = values.dtype == np.uint16  # bfloat16, which NumPy lacks
    wide = (values.astype(np.uint32) << 16).view(np.float32) if halves else values
    wide = wide - 1 if change == MINUS_ONE else np.log(-wide)
    if not halves:
        return wide
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to the nearest, halves to even


def _converted(rows: Bytes, kind: Kind) -> Iterator[tuple[str, NDArray[Any]]]:
    if kind in FLOATS:
        yield "", rows.view(WORDS[FLOATS[kind]])
        return
    packing = PACKINGS[kind]
    if packing.codes is None:
        codes, scales, biases = _rounded(dequantize(rows, kind), packing.group_size)
    else:
        codes, scales, biases = packing.codes(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    yield "weight", _packed(codes, packing.bits).reshape(len(rows), -1).view(np.uint32)
    yield "scales", scales.reshape(len(rows), -1)
    if biases is not None:
        yield "biases", biases.reshape(len(rows), -1)


def _rounded(values: NDArray[np.float32], group_size: int) -> Codes:
    groups = values.reshape(-1, group_size)
    least, most = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    bias = least.astype(np.float16)
    scale = ((most - bias) / LARGEST_CODE).astype(np.float16)
    scale = np.where(bias + scale.astype(np.float32) * LARGEST_CODE < most, np.nextafter(scale, np.float16(1)), scale)
    step = np.where(scale == 0, 1, scale).astype(np.float32)
    codes = np.rint((groups - bias.astype(np.float32)) / step).clip(0, LARGEST_CODE).astype(np.uint8)
    return codes, scale, bias


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Pack codes (…, n) as MLX reads them: the first in the lowest bits."""
    if bits in (4, 8):  # as they come
        return codes
    words = np.ascontiguousarray(codes).view(np.uint64)
    for lane in (8, 16, 32):  # two by two, of lanes that hold so many bits each
        held = bits * lane // 8
        low = sum((1 << held) - 1 << at for at in range(0, 64, 2 * lane))
        words = words & np.uint64(low) | words >> np.uint64(lane - held) & np.uint64(low << held)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits]
