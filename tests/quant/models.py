"""Tiny seeded models to convert, packed by us or by others, and what calibration gives their layers."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model
from mlx_lm.utils import load_model as mlx_lm_load_model

from tokamac.engine.cpu.layers import unpack
from tokamac.engine.model.config import model_classes, read_config
from tokamac.engine.model.loader import load_model as engine_load_model
from tokamac.quant import convert
from tokamac.quant.source import Source, clone, fresh, open_source
from tokamac.quant.streaming import Streamed, streamable_source

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 10000.0},
    "gemma3": {
        **BASE, "model_type": "gemma3_text", "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window_pattern": 2,
        "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "mixtral": {
        **BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
GRANITE = {
    **BASE, "model_type": "granite", "tie_word_embeddings": True, "rope_theta": 10000.0, "logits_scaling": 1.0,
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip


QUICKLY = {"method": "round", "verify": False}  # where how a weight is packed is not the subject


def build(kind, **changes):
    """Return a bfloat16 model with seeded weights, and its config."""
    config = {**({**CONFIGS, "granite": GRANITE}[kind]), **changes}
    model_class, arguments_class = _get_classes(config)
    mx.random.seed(3)
    model = model_class(arguments_class.from_dict(config))
    if kind == "gemma3":  # tied, as its published checkpoints are: that is what a missing head means to mlx-lm
        model.sanitize({})
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model, config


def make_source(folder, kind, *, shards=1, tokenizer=True, **changes):
    """Write a source folder and return it."""
    source = Path(folder) / "source"
    source.mkdir()
    model, config = build(kind, **changes)
    arrays = tree_flatten(model.parameters())
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    where = {}
    for i, name in enumerate(names):
        part = dict(arrays[i::shards])
        mx.save_safetensors(str(source / name), part)
        where.update(dict.fromkeys(part, name))
    if shards > 1:
        (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (source / "config.json").write_text(json.dumps(config))
    if tokenizer:
        for file in (GOLDEN / "tokenizer").iterdir():
            shutil.copy(file, source)
    return source


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


# Checkpoints packed by others, made by hand from known integers: what each weight is worth follows from the format
# alone.

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its word, in nibbles, of each of eight columns in a row

# What the low three bits of a 4-bit float are worth; the fourth is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

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


# Converting and looking at what came of it, in few words.

TOKENS = mx.array([[5, 4, 3, 2, 1, 7, 7, 9]])
MODES = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def run(source, out, **options):
    """Convert by rounding, so that every weight is what MLX makes of it."""
    how = {} if options.get("dequantize") else {"method": "round"}
    return convert(source, out, verify=False, **how, **options)


def refuse(error, source, match):
    """Converting must raise before any work."""
    with pytest.raises(error, match=match) as caught:
        run(source, source.parent / "out")
    assert "out" not in names_in(source.parent)
    assert caught.value.hint
    return caught.value


def logits(folder):
    """Return what mlx-lm makes of a folder, its config in today's form."""
    return mlx_lm_load_model(folder, model_config=read_config(folder))[0](TOKENS)


def same(a, b):
    return bool(mx.array_equal(a.astype(mx.float32), b.astype(mx.float32)).item())


def arrays_of(folder):
    return {name: array for file in folder.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def packed_folder(tmp_path, kind="llama", mode="affine", **more):
    """Return an MLX folder, packed by us."""
    bits, group = MODES[mode]
    run(make_source(tmp_path, kind), tmp_path / "packed", bits=bits, group_size=group, mode=mode, **more)
    return tmp_path / "packed"


# What the tests of GPTQ and AWQ share: seeded token ids, a source in floats, and what its layers are given.

VOCABULARY = 320


def seeded_ids(sequences: int = 4, length: int = 48) -> list[list[int]]:
    """Return token ids in which some are much likelier than others, as in a text."""
    generator = np.random.default_rng(7)
    ids = np.minimum(generator.geometric(0.02, (sequences, length)), VOCABULARY - 1)
    return [[int(token) for token in row] for row in ids]


def source_of(folder: Path, kind: str, *, dtype: str = "bfloat16", **changes: Any) -> Source:
    made = make_source(folder, kind, **changes)
    file = str(made / "model.safetensors")
    arrays: Any = mx.load(file)
    mx.save_safetensors(file, {name: array.astype(getattr(mx, dtype)) for name, array in arrays.items()})
    return open_source(made)


def logits_calibrated_models(
    source: Source, ids: list[list[int]], weights: dict[str, mx.array] | None = None
) -> mx.array:
    """Return what the model says with these weights (the source's own if None), in float32."""
    model: Any = clone(source.module)
    found = fresh(source) if weights is None else weights
    floats = [(n, w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w) for n, w in found.items()]
    model.update(tree_unflatten(floats))
    answered: mx.array = model(mx.array(ids))
    return answered


def inputs_of(source: Source, ids: list[list[int]]) -> dict[str, np.ndarray]:
    """Return the rows that every linear layer is given, by path."""
    found: dict[str, np.ndarray] = {}
    Streamed(streamable_source(source)).observe(
        ids, lambda x: found.update({x.path: np.array(x.rows.astype(mx.float32))})
    )
    return found


def relative(found: mx.array, expected: mx.array) -> float:
    return float((mx.linalg.norm((found - expected).reshape(-1)) / mx.linalg.norm(expected.reshape(-1))).item())


def same_bytes(one: Source, other: Source) -> bool:
    """Whether two results hold the same arrays, bit by bit."""
    if one.packed.keys() != other.packed.keys() or one.weights.keys() != other.weights.keys():
        return False
    arrays = [
        (a, b) for path in one.packed for a, b in zip(one.packed[path].arrays, other.packed[path].arrays, strict=True)
    ]
    arrays += [(one.weights[name], other.weights[name]) for name in one.weights]
    return all(a.dtype == b.dtype and bool(mx.array_equal(a, b).item()) for a, b in arrays)


# What a model computes: whole, by the engine's own module; packed, as mlx-lm packs it.

IDS = [5, 4, 3, 2, 1, 7, 7, 9, 11, 10, 0, 3, 2, 8, 10, 6, 4, 7, 8, 3, 5, 9, 8, 11]


def whole(folder, ids=IDS):
    """The log-probabilities of the engine's own module, all of it in memory."""
    module = engine_load_model(folder, dtype=None, device="cpu", progress=lambda *_: None).module
    logits = module(mx.array([ids]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def whole_unpacked(folder):
    """The same of a module whose layers are all unpacked, as the streamed ones are."""
    module, _ = mlx_lm_load_model(folder, lazy=True, model_config=read_config(folder), get_model_classes=model_classes)
    module.set_dtype(mx.float32)
    unpack(module)
    logits = module(mx.array([IDS]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def pack(folder, out, group_size=32, bits=4):
    """The model as mlx-lm packs it."""
    out.mkdir()
    config = read_config(folder)
    model, config = mlx_lm_load_model(folder, lazy=True, model_config=config, get_model_classes=model_classes)
    model, config = quantize_model(model, config, group_size, bits)
    mx.save_safetensors(str(out / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (out / "config.json").write_text(json.dumps(config))
    return out


def difference(a, b):
    """max |a − b|, in float32."""
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
