"""Sources that other packers made: what every weight is worth is known by construction."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import load_model as mlx_lm_load_model

from tests.golden.weights import write_weights
from tests.quant.converting import MODES, arrays_of, config_of, logits, packed_folder, refuse, run, same
from tests.quant.packed_models import (
    E2M1,
    E4M3,
    awq_source,
    bitnet_source,
    float_weights,
    nibbles,
    projections,
    write_source,
)
from tests.quant.quant_models import GOLDEN
from tokamac.engine.errors import ConversionError, ModelUnsupportedError
from tokamac.engine.model.config import read_config
from tokamac.engine.model.safetensors import INDEX
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.source import open_source


@pytest.mark.parametrize(("method", "symmetric"), [("awq", False), ("awq", True), ("gptq", True)])
def test_awq_words_are_read_as_their_codes(tmp_path, method, symmetric):
    folder, expected = awq_source(tmp_path, method=method, symmetric=symmetric)
    source = open_source(folder)
    assert len(expected) == 14
    assert {f"{path}.weight" for path in source.packed} == set(expected)
    for name, weight in expected.items():
        assert source.packed[name.removesuffix(".weight")].packing == Packing(4, 64)
        assert np.array_equal(np.array(source.weights[name]), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_converted_awq_checkpoint_gives_the_logits_of_the_original(tmp_path, bits):
    folder, _ = awq_source(tmp_path)
    run(folder, tmp_path / "out", bits=bits, embed_bits=16)
    written = config_of(tmp_path / "out")
    assert written["quantization"]["bits"] == bits
    assert "quant_method" not in written["quantization_config"]
    assert same(logits(tmp_path / "out"), logits(folder)) or bits == 8
    assert mx.allclose(logits(tmp_path / "out"), logits(folder), atol=0.02, rtol=0.02).item()


def test_dequantizing_awq_writes_what_the_codes_are_worth(tmp_path):
    folder, expected = awq_source(tmp_path, group=128)
    run(folder, tmp_path / "plain", dequantize=True)
    written = arrays_of(tmp_path / "plain")
    assert all(np.array_equal(np.array(written[name]), weight) for name, weight in expected.items())
    assert "quantization_config" not in config_of(tmp_path / "plain")
    mlx_lm_load_model(tmp_path / "plain")


def test_gptq_in_its_own_layout_is_refused_by_name(tmp_path):
    weights, config = float_weights("llama")
    for path in projections(weights):
        codes = np.zeros(weights.pop(f"{path}.weight").shape, np.uint32)
        weights[f"{path}.qweight"] = nibbles(codes).T.view(np.uint32)  # words along the inputs
        weights[f"{path}.scales"] = np.ones((codes.shape[1] // 64, codes.shape[0]), np.float16)
        weights[f"{path}.g_idx"] = (np.arange(codes.shape[1]) // 64).astype(np.int32)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    folder = write_source(tmp_path, weights, config)
    assert "original" in refuse(ConversionError, folder, "gptq.*g_idx").hint


def deepseek(tmp_path):
    """Return the folder of a tiny DeepSeek-V3, and its float32 arrays."""
    config = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    case = json.loads((GOLDEN / "deepseek_v3" / "case.json").read_text())
    (tmp_path / "floats").mkdir()
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path / "floats", case["seed"], case["shapes"], read_config(tmp_path / "floats"))
    return {name: np.array(array) for name, array in arrays_of(tmp_path / "floats").items()}, config


def test_compressed_tensors_are_read_as_their_codes(tmp_path):
    arrays, config = deepseek(tmp_path)
    rng, expected = np.random.default_rng(1), {}
    for name in [name for name in arrays if "experts" in name and arrays[name].shape[-1] % 32 == 0]:
        rows, columns = arrays.pop(name).shape
        codes, scales = rng.integers(-8, 8, (rows, columns)), np.exp2(rng.integers(-7, -3, (rows, columns // 32)))
        path = name.removesuffix(".weight")
        arrays[f"{path}.weight_packed"] = nibbles(codes + 8).view(np.int32)
        arrays[f"{path}.weight_scale"] = scales.astype(np.float16)
        arrays[f"{path}.weight_shape"] = np.array([rows, columns])
        expected[name] = codes * np.repeat(scales, 32, axis=1)
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    folder = write_source(tmp_path, arrays, config)
    source = open_source(folder)
    for part in ("gate_proj", "up_proj"):
        stack = f"model.layers.1.mlp.switch_mlp.{part}"
        wanted = np.stack([expected[f"model.layers.1.mlp.experts.{e}.{part}.weight"] for e in range(4)])
        assert source.packed[stack].packing == Packing(4, 32)
        assert np.array_equal(np.array(source.weights[f"{stack}.weight"]), wanted)
    run(folder, tmp_path / "out", group_size=32, embed_bits=16)
    again = open_source(tmp_path / "out")
    assert np.array_equal(np.array(again.weights[f"{stack}.weight"]), wanted)


@pytest.mark.parametrize("form", ["int-quantized", "marlin-24"])
def test_other_forms_of_compressed_tensors_are_refused_by_name(tmp_path, form):
    weights, config = float_weights("llama")
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": form}
    refuse(ModelUnsupportedError, write_source(tmp_path, weights, config), f"compressed-tensors.*{form}")


def to_fp8(array):
    """Return an array's bytes as 8-bit floats, and what they are worth."""
    codes = mx.to_fp8(mx.array(array))
    return np.array(codes), np.array(mx.from_fp8(codes, mx.float32))


def test_fp8_blocks_are_unpacked_where_the_model_knows_how(tmp_path):
    arrays, config = deepseek(tmp_path)
    types, expected = {}, {}
    for name in [name for name in arrays if name.endswith("_proj.weight")]:
        codes, values = to_fp8(arrays[name])
        arrays[name], types[name] = codes, E4M3
        arrays[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)  # these matrices are less than a block of 128
        expected[name] = values / 2
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    folder = write_source(tmp_path, arrays, config, types=types)
    source = open_source(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not source.packed
    assert np.array_equal(np.array(source.weights[name].astype(mx.float32)), expected[name])
    assert any("fp8" in note for note in source.notes)
    run(folder, tmp_path / "plain", dequantize=True)
    assert same(logits(tmp_path / "plain"), logits(folder))


@pytest.mark.parametrize("scaled", [True, False])
def test_fp8_of_any_family_is_unpacked_by_its_scales_and_refused_without(tmp_path, scaled):
    weights, config = float_weights("llama")
    types, expected = {}, {}
    for path in projections(weights):
        weights[f"{path}.weight"], worth = to_fp8(weights[f"{path}.weight"])
        types[f"{path}.weight"] = E4M3
        if scaled:
            weights[f"{path}.weight_scale_inv"] = np.array([[2.0], [0.5]], np.float32)
            half = len(worth) // 2
            expected[f"{path}.weight"] = np.concatenate([worth[:half] * 2, worth[half:] * 0.5])
    config["quantization_config"] = {"quant_method": "fp8"}
    folder = write_source(tmp_path, weights, config, types=types)
    if not scaled:
        refuse(ConversionError, folder, "packed by fp8")
        return
    source = open_source(folder)
    assert expected
    for name, worth in expected.items():
        assert np.array_equal(np.array(source.weights[name].astype(mx.float32)), worth)


def test_mxfp4_blocks_are_read_as_their_codes(tmp_path):
    config = json.loads((GOLDEN / "gpt_oss_window" / "config.json").read_text())
    case = json.loads((GOLDEN / "gpt_oss_window" / "case.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    rng, arrays, expected = np.random.default_rng(2), {}, {}
    for name, shape in case["shapes"].items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            arrays[name] = rng.normal(size=shape).astype(np.float32)
            continue
        experts, inputs, outputs = shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32)).astype(np.uint8)
        scales = rng.integers(120, 128, codes.shape[:3]).astype(np.uint8)
        arrays[f"{name}_blocks"], arrays[f"{name}_scales"] = codes[..., ::2] | codes[..., 1::2] << 4, scales
        values = np.array(E2M1)[codes & 7] * np.where(codes & 8, -1, 1)
        worth = values * np.exp2(scales.astype(float) - 127)[..., None]
        expected[name] = worth.reshape(experts, outputs, inputs)
    folder = write_source(tmp_path, arrays, config)
    source = open_source(folder)
    pre = "model.layers.0.mlp.experts"
    for part, wanted in (
        ("gate_proj", expected[f"{pre}.gate_up_proj"][:, ::2]),
        ("up_proj", expected[f"{pre}.gate_up_proj"][:, 1::2]),
        ("down_proj", expected[f"{pre}.down_proj"]),
    ):
        assert source.packed[f"{pre}.{part}"].packing == Packing(4, 32, "mxfp4")
        assert np.array_equal(np.array(source.weights[f"{pre}.{part}.weight"].astype(mx.float32)), wanted)
    run(folder, tmp_path / "plain", dequantize=True)
    assert not any("quantization" in key for key in config_of(tmp_path / "plain"))
    assert mx.allclose(logits(tmp_path / "plain"), logits(folder), atol=0.05).item()


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("mxfp4", {"quant_method": "mxfp4"}),
        ("mxfp8", {"quant_method": "mxfp8"}),
        ("mxfp8", {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("nvfp4", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [True, False])
def test_microscaling_words_named_by_another_packer_are_taken_over(tmp_path, mode, settings, nested):
    folder = packed_folder(tmp_path, "gemma3" if nested else "llama", mode)
    plain = {key: value for key, value in config_of(folder).items() if not key.startswith("quantization")}
    if nested:
        arrays = {f"language_model.{name}": array for name, array in arrays_of(folder).items()}
        mx.eval(arrays)
        for name in ("model.safetensors", INDEX):
            (folder / name).unlink()
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        plain = {"model_type": "gemma3", "text_config": {**plain, "quantization_config": settings}}
    else:
        plain["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(plain))
    bits, group = MODES[mode]
    assert {held.packing for held in open_source(folder).packed.values()} == {Packing(bits, group, mode)}
    run(folder, tmp_path / "again", bits=bits, group_size=group, mode=mode)
    before, after = arrays_of(folder), arrays_of(tmp_path / "again")
    assert all(mx.array_equal(after[name], before[name]).item() for name in before)
    assert same(logits(tmp_path / "again"), logits(folder))


@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_bitnets_ternary_weights_unpack(tmp_path, linear_class):
    folder, expected = bitnet_source(tmp_path, linear_class=linear_class)
    run(folder, tmp_path / "plain", dequantize=True)
    written = arrays_of(tmp_path / "plain")
    assert all(np.array_equal(np.array(written[name]), weight) for name, weight in expected.items())
    assert isinstance(mlx_lm_load_model(tmp_path / "plain")[0].layers[0].mlp.up_proj, nn.Linear)


def test_a_class_that_is_ternary_by_nature_stays_so(tmp_path):
    folder, expected = bitnet_source(tmp_path, model_type="bitnet")
    run(folder, tmp_path / "out")
    before, after = arrays_of(folder), arrays_of(tmp_path / "out")
    assert all(mx.array_equal(after[name], before[name]).item() for name in expected)
    assert "model.embed_tokens.scales" in after
    mlx_lm_load_model(tmp_path / "out")


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "eetq"])
def test_a_method_that_mlx_lm_does_not_know_is_refused_by_name(tmp_path, method):
    weights, config = float_weights("llama")
    for path in projections(weights):
        weights[f"{path}.weight"] = weights[f"{path}.weight"].view(np.uint8)[:, ::2]
    config["quantization_config"] = {"quant_method": method, "load_in_8bit": True}
    refuse(ModelUnsupportedError, write_source(tmp_path, weights, config), f"packed by {method}")


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "W4A8_AWQ"])
def test_other_modelopt_algorithms_are_refused_by_name(tmp_path, algorithm):
    weights, config = float_weights("llama")
    folder = write_source(tmp_path, weights, config)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}})
    )
    refuse(ModelUnsupportedError, folder, f"modelopt.*{algorithm}")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "awq", "bits": 4},  # says so, and no weight is
        {"load_in_4bit": True},
    ],
    ids=str,
)
def test_settings_that_no_weight_answers_to_are_refused(tmp_path, settings):
    weights, config = float_weights("llama")
    folder = write_source(tmp_path, weights, {**config, "quantization_config": settings})
    refuse(ConversionError, folder, settings.get("quant_method", "unnamed"))


def test_a_leftover_note_about_packing_does_no_harm(tmp_path):
    weights, config = float_weights("llama")  # as published by those who unpacked an fp8 checkpoint
    folder = write_source(tmp_path, weights, {**config, "quantization_config": {"quant_method": "fp8"}})
    run(folder, tmp_path / "out")
    assert "quant_method" not in config_of(tmp_path / "out")["quantization_config"]
