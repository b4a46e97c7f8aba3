"""Every block type as MLX multiplies with it, against the `gguf` package's own unpacking."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.engine.gguf import written
from tokamac.engine.gguf.blocks import PACKINGS, Order, leaves_of, unpack_into
from tokamac.engine.gguf.file import GgufTensor

Kind = GGMLQuantizationType
TYPES = {"U32": np.uint32, "U8": np.uint8, "F16": np.float16}
ROWS, WIDTH, HEAD = 64, 512, 32
PLAIN, COLUMNS = Order(), (2, 0, 3, 1)
EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}


def unpacked(tensor: GgufTensor, order: Order = PLAIN) -> np.ndarray[Any, np.dtype[np.float32]]:
    packing = PACKINGS[tensor.kind]
    leaves = {name: np.zeros(shape, TYPES[dtype]) for name, (dtype, shape) in leaves_of(tensor).items()}
    unpack_into(tensor, leaves, order)
    weight, scales, biases = (
        mx.array(leaves[name]) if name in leaves else None for name in ("weight", "scales", "biases")
    )
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
    return np.array(mx.dequantize(weight, scales, biases, dtype=mx.float32, **how))


@pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name)
def test_a_type_keeps_its_numbers_within_its_error(kind: Kind, tmp_path: Path) -> None:
    noise = np.random.default_rng(int(kind)).normal(0, 0.05, (ROWS, WIDTH))
    rows, file = written.packed(kind, noise.astype(np.float32)), tmp_path / "blocks"
    file.write_bytes(bytes(100) + rows.tobytes())
    tensor = GgufTensor("blocks", kind, (ROWS, WIDTH), file, 100)
    wanted = dequantize(rows, kind)
    error = float(np.sqrt(np.mean((unpacked(tensor) - wanted) ** 2) / np.mean(wanted**2)))
    assert error <= PACKINGS[kind].error
    assert (error == 0) == (kind.name in EXACT)
    turned = wanted.reshape(-1, HEAD // 2, 2, WIDTH).swapaxes(1, 2).reshape(wanted.shape)
    turned = np.concatenate([turned.reshape(ROWS, 4, -1)[:, at] for at in COLUMNS], axis=1)
    order = Order(((0, HEAD), (HEAD, ROWS)), HEAD, COLUMNS)
    np.testing.assert_allclose(unpacked(tensor, order), turned, atol=float(np.abs(wanted).max()) * 0.01)


def test_every_type_of_the_format_is_kept_or_known_not_to_be() -> None:
    # Of numbers, of activations, and one that no published model has.
    others = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}
    assert {kind.name for kind in Kind} == {kind.name for kind in PACKINGS} | others
