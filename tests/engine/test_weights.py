"""Checkpoints as they are published: other names, other layouts, fp8."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.engine.seeded import CONFIG, write_model
from tests.engine.test_golden import build
from tokamac.engine.errors import ModelError, ModelUnsupportedError
from tokamac.engine.model.config import normalise, read_config
from tokamac.engine.model.loader import build_model
from tokamac.engine.model.weights import is_fp8, unpack_fp8
from tokamac.engine.perf.config_cost import cost_of_config
from tokamac.engine.perf.cost import cost_of_model
from tokamac.quant import convert
from tokamac.quant.source import read_checkpoint

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
MODELOPT = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}


def arrays(folder: Path) -> dict[str, mx.array]:
    module, _ = build_model(folder, read_config(folder))
    return dict(tree_flatten(module.parameters()))


def pack(folder: Path, scale_name: str, settings: dict[str, Any]) -> dict[str, mx.array]:
    """Rewrite a folder's projections as fp8 with scales; return what they now stand for."""
    plain = mx.load(str(folder / "model.safetensors"))
    stored, meant = {}, {}
    for name, value in plain.items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = value
            continue
        scale = scales_of(value, settings)
        spread = spread_over(scale, value)
        packed = mx.to_fp8(value / spread)
        stored[name], stored[name.replace(".weight", scale_name)] = packed, scale
        meant[name] = (mx.from_fp8(packed, mx.float32) * spread).astype(mx.bfloat16)
        if settings.get("activation_scheme") == "static":
            stored[name.replace(".weight", ".activation_scale")] = mx.array(1.0)
    mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return meant


def scales_of(value: mx.array, settings: dict[str, Any]) -> mx.array:
    if block := settings.get("weight_block_size"):
        rows, columns = (-(-size // step) for size, step in zip(value.shape, block, strict=True))
        return mx.random.uniform(0.01, 0.02, (rows, columns))
    return mx.random.uniform(0.01, 0.02, (value.shape[0], 1)) if settings is ROWS else mx.array(0.017)


def spread_over(scale: mx.array, value: mx.array) -> mx.array:
    if scale.ndim < 2 or scale.shape[1] == 1:
        return scale
    wide = np.repeat(np.repeat(np.array(scale), 32, 0), 32, 1)
    return mx.array(wide[: value.shape[0], : value.shape[1]])


@pytest.mark.parametrize(
    ("scale_name", "settings"),
    [
        (".weight_scale_inv", BLOCKS),
        (".weight_scale_inv", WHOLE),
        (".weight_scale", ROWS),
        (".weight_scale", MODELOPT),
    ],
    ids=["blocks", "whole", "rows", "modelopt"],
)
def test_fp8_is_unpacked_while_it_is_read(tmp_path: Path, scale_name: str, settings: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model", intermediate_size=80)  # blocks of 32 do not divide 80
    meant = pack(folder, scale_name, settings)
    found = arrays(folder)
    assert found.keys() == meant.keys()
    for name, value in meant.items():
        assert mx.array_equal(found[name].astype(mx.float32), value.astype(mx.float32)), name


def test_fp8_that_only_modelopts_own_file_tells_of_is_unpacked_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    meant = pack(folder, ".weight_scale", MODELOPT)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config") == MODELOPT
    (folder / "config.json").write_text(json.dumps(config))
    found = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(found))
    loaded = arrays(folder)
    assert all(
        mx.array_equal(loaded[name].astype(mx.float32), value.astype(mx.float32)) for name, value in meant.items()
    )
    convert(folder, tmp_path / "packed", bits=4, group_size=32)
    assert "quant_method" not in json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("said", "named"), [("W4A8_AWQ", "modelopt as W4A8_AWQ"), ("[", "no JSON object")])
def test_modelopts_file_is_refused_by_name_before_a_weight_is_read(tmp_path: Path, said: str, named: str) -> None:
    folder = write_model(tmp_path / "model")
    text = said if said == "[" else json.dumps({"quantization": {"quant_algo": said}})
    (folder / "hf_quant_config.json").write_text(text)
    with pytest.raises(ModelError, match=named):
        build_model(folder, read_config(folder))


def test_a_file_of_modelopt_that_packs_no_weights_does_no_harm(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before = arrays(folder)
    only_kv = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(only_kv))
    assert arrays(folder).keys() == before.keys()


def test_fp8_is_converted_and_weighed_as_what_it_stands_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    pack(folder, ".weight_scale_inv", BLOCKS)
    config = read_config(folder)
    checkpoint = read_checkpoint(folder, config)
    assert not checkpoint.packed
    module, loaded = build_model(folder, config)
    cost = cost_of_config({**config, "dtype": "float32"})
    assert not isinstance(cost, str), cost
    assert cost.parameters == cost_of_model(module, loaded).parameters
    convert(folder, tmp_path / "packed", bits=4, group_size=32)
    written = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert written["quantization"]["bits"] == 4
    assert written.get("quantization_config") in (None, written["quantization"])


def test_bytes_that_are_no_fp8_stay(tmp_path: Path) -> None:
    weights = {"a.weight": mx.zeros((4, 4), mx.uint8), "a.weight_scale": mx.array([1.0])}
    assert unpack_fp8(weights, {"quantization_config": {"quant_method": "bitnet"}}) == weights
    scaled = {"a.weight": mx.zeros((4, 4), mx.uint8), "a.weight_scale": mx.zeros((4, 1), mx.uint8)}  # nvfp4
    assert unpack_fp8(scaled, {"quantization_config": {"quant_method": "modelopt"}}) == scaled


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (BLOCKS, True),
        (WHOLE, True),
        (ROWS, True),
        (MODELOPT, True),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, False),  # mxfp8: MLX computes with it as it is
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, False),
        (None, False),
    ],
)
def test_what_a_config_says_of_fp8(settings: dict[str, Any] | None, expected: bool) -> None:
    assert is_fp8({"quantization_config": settings}) is expected
    assert is_fp8({"text_config": {"quantization_config": settings}}) is expected
    assert not is_fp8({"quantization_config": settings, "quantization": {"bits": 4}})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int-quantized"),
    ],
)
def test_a_form_that_nothing_unpacks_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    from tokamac.engine.model.skeleton import skeleton_model

    with pytest.raises(ModelUnsupportedError, match=named):
        skeleton_model(normalise({**CONFIG, "quantization_config": settings}), 2)


def test_gpt2_is_read_with_its_prefix_and_without(tmp_path: Path) -> None:
    folders = [tmp_path / "prefixed", tmp_path / "bare"]
    for folder in folders:
        folder.mkdir()
        build("gpt2", folder)
    prefixed = mx.load(str(folders[0] / "model.safetensors"))
    assert any(name.startswith("transformer.") for name in prefixed)
    bare = {name.removeprefix("transformer."): value for name, value in prefixed.items()}
    bare |= {"h.0.attn.bias": mx.ones((1, 1, 8, 8)), "h.0.attn.masked_bias": mx.array(-1e4)}
    mx.save_safetensors(str(folders[1] / "model.safetensors"), bare, {"format": "pt"})
    one, other = (arrays(folder) for folder in folders)
    assert one.keys() == other.keys()
    assert all(mx.array_equal(other[name], value) for name, value in one.items())


def test_ernie_without_the_bias_that_chooses_its_experts_is_refused(tmp_path: Path) -> None:
    build("ernie4_5_moe", tmp_path)
    shards = tmp_path / "model.safetensors"
    kept = {name: value for name, value in mx.load(str(shards)).items() if "e_score_correction_bias" not in name}
    mx.save_safetensors(str(shards), kept, {"format": "pt"})
    with pytest.raises(ModelUnsupportedError, match="lacks the bias") as caught:
        build_model(tmp_path, read_config(tmp_path))
    assert "tokamac convert" in caught.value.hint


def test_a_conversion_of_ernie_keeps_the_bias(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    build("ernie4_5_moe", source)
    convert(source, tmp_path / "packed", bits=8, group_size=32)
    found, made = arrays(source), arrays(tmp_path / "packed")
    names = [name for name in found if name.endswith("e_score_correction_bias")]
    assert names
    assert all(mx.array_equal(found[name], made[name].astype(mx.float32)) for name in names)
