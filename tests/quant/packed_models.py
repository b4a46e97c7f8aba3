"""Checkpoints packed by others, made by hand from known integers: what each weight is worth follows from the format alone."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from tests.quant.quant_models import build

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in its word, in nibbles, of each of eight columns in a row."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a 4-bit float are worth; the fourth is the sign."""

E4M3 = "F8_E4M3"
TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "uint32": "U32", "uint8": "U8", "int64": "I64"}


def write_source(folder, arrays, config, *, types=None):
    """Write a folder with NumPy arrays; ``types`` renames the stored type of some, for those that NumPy lacks."""
    source = Path(folder) / "source"
    source.mkdir()
    header, blobs, end = {}, [], 0
    for name, array in sorted(arrays.items()):
        blob = np.ascontiguousarray(array).tobytes()
        kind = (types or {}).get(name, TYPES[str(array.dtype)])
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    head = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blobs))
    (source / "config.json").write_text(json.dumps(config))
    return source


def float_weights(kind, **changes):
    """Return a tiny model's weights as float16 NumPy arrays, by name, and its config."""
    model, config = build(kind, **changes)
    model.set_dtype(mx.float16)
    return {name: np.array(array) for name, array in tree_flatten(model.parameters())}, config


def projections(weights):
    """Return the names, without ``.weight``, of the layers' matrices: what such packers pack."""
    return [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]


def codes_of(rng, shape, group):
    """Return random 4-bit codes (out, in), and by group zeros and power-of-two scales (out, groups): products are exact."""
    rows, columns = shape
    codes, zeros = rng.integers(0, 16, shape), rng.integers(0, 16, (rows, columns // group))
    return codes, zeros, np.exp2(rng.integers(-8, -4, zeros.shape)).astype(np.float16)


def worth(codes, zeros, scales, group):
    """Return (code − zero) × scale."""
    spread = [np.repeat(each, group, axis=1) for each in (zeros, scales)]
    return (codes - spread[0]).astype(np.float16) * spread[1]


def nibbles(values, order=tuple(range(8))):
    """Return words of eight 4-bit values along the last axis, each in the place that ``order`` says."""
    eights = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    return sum(eights[..., i] << np.uint32(4 * place) for i, place in enumerate(order)).astype(np.uint32)


def awq_arrays(path, codes, zeros, scales):
    """Return a layer as AutoAWQ stores it: words along the outputs, everything transposed. zeros: None leaves them out."""
    arrays = {f"{path}.qweight": nibbles(codes.T, AWQ_ORDER).view(np.int32), f"{path}.scales": scales.T}
    return arrays if zeros is None else {**arrays, f"{path}.qzeros": nibbles(zeros.T, AWQ_ORDER).view(np.int32)}


def awq_source(folder, *, method="awq", symmetric=False, group=64, **changes):
    """Write a llama folder packed by AWQ, and return it with what its packed weights are worth, by name."""
    weights, config = float_weights("llama", **changes)
    rng, expected = np.random.default_rng(5), {}
    for path in projections(weights):
        shape = weights.pop(f"{path}.weight").shape
        codes, zeros, scales = codes_of(rng, shape, group)
        zeros = np.full_like(zeros, 8) if symmetric else zeros
        expected[f"{path}.weight"] = worth(codes, zeros, scales, group)
        weights |= awq_arrays(path, codes, None if symmetric else zeros, scales)
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": group,
        "zero_point": not symmetric,
    }
    return write_source(folder, weights, config), expected


def bitnet_source(folder, *, linear_class="bitlinear", **changes):
    """Write a BitNet folder, four ternary weights to a byte, and return it with what its weights are worth, by name."""
    weights, config = float_weights("tied", **changes)
    shapes = {name: array.shape for name, array in float_weights("tied")[0].items()}
    config["quantization_config"] = {
        "quant_method": "bitnet", "linear_class": linear_class, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    rng, expected = np.random.default_rng(6), {}
    for path in projections(shapes):
        rows, columns = shapes[f"{path}.weight"]
        ternary = rng.integers(-1, 2, (rows, columns))
        quarters = (ternary + 1).reshape(4, rows // 4, columns).astype(np.uint8)
        weights[f"{path}.weight"] = sum(quarters[i] << np.uint8(2 * i) for i in range(4)).astype(np.uint8)
        weights[f"{path}.weight_scale"] = np.array([4.0], np.float16)
        expected[f"{path}.weight"] = ternary * (4.0 if linear_class == "autobitlinear" else 0.25)
    return write_source(folder, weights, config), expected
