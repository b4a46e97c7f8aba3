"""Every block type as MLX multiplies with it, against the `gguf` package's own unpacking."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tokamac.engine.gguf.blocks import PACKINGS, leaves_of, unpack_into
from tokamac.engine.gguf.file import GgufTensor

Kind = GGMLQuantizationType
TYPES = {"U32": np.uint32, "U8": np.uint8, "F16": np.float16}
ROWS, WIDTH, HEAD = 64, 512, 32
# Where a block has its float16 numbers, from its start or its end; any other bytes are valid codes.
SCALES = {
    **dict.fromkeys((Kind.Q4_K, Kind.Q5_K), (0, 2)),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS), (0,)),
    **dict.fromkeys((Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S), (0,)),
    **dict.fromkeys((Kind.Q6_K, Kind.Q3_K), (-2,)),
    Kind.Q2_K: (-4, -2),
}
EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}


def stored(kind: Kind) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows that the package's quantizer makes of noise; random valid blocks of types that it has none for."""
    noise = np.random.default_rng(int(kind))
    try:
        return quantize(noise.normal(0, 0.05, (ROWS, WIDTH)).astype(np.float32), kind)
    except NotImplementedError:
        block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = noise.integers(0, 256, (ROWS * WIDTH // block, nbytes), np.uint8)
    numbers = np.abs(noise.normal(0.01, 0.004, len(blocks))).astype(np.float16)
    for at in SCALES.get(kind, ()):
        blocks[:, at % nbytes : at % nbytes + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if kind == Kind.NVFP4:
        blocks[:, :4] &= 0x7F  # its scales have no sign
    if kind == Kind.IQ1_M:  # its scale is in the upper nibbles of four words
        words = blocks[:, -8:].copy().view(np.uint16)
        words = words & 0x0FFF | (numbers.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
        blocks[:, -8:] = words.view(np.uint8)
    return blocks.reshape(ROWS, -1)


def unpacked(tensor: GgufTensor, turned: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    packing = PACKINGS[tensor.kind]
    leaves = {name: np.zeros(shape, TYPES[dtype]) for name, (dtype, shape) in leaves_of(tensor).items()}
    unpack_into(tensor, leaves, turned)
    weight, scales, biases = (
        mx.array(leaves[name]) if name in leaves else None for name in ("weight", "scales", "biases")
    )
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
    return np.array(mx.dequantize(weight, scales, biases, dtype=mx.float32, **how))


@pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name)
def test_a_type_keeps_its_numbers_within_its_error(kind: Kind, tmp_path: Path) -> None:
    rows, file = stored(kind), tmp_path / "blocks"
    file.write_bytes(bytes(100) + rows.tobytes())
    tensor = GgufTensor("blocks", kind, (ROWS, WIDTH), file, 100)
    wanted = dequantize(rows, kind)
    error = float(np.sqrt(np.mean((unpacked(tensor) - wanted) ** 2) / np.mean(wanted**2)))
    assert error <= PACKINGS[kind].error
    assert (error == 0) == (kind.name in EXACT)
    turned = wanted.reshape(-1, HEAD // 2, 2, WIDTH).swapaxes(1, 2).reshape(wanted.shape)
    np.testing.assert_allclose(unpacked(tensor, HEAD), turned, atol=float(np.abs(wanted).max()) * 0.01)


def test_every_type_of_the_format_is_kept_or_known_not_to_be() -> None:
    # Of numbers, of activations, and one that no published model has.
    others = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}
    assert {kind.name for kind in Kind} == {kind.name for kind in PACKINGS} | others
