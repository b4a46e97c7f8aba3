"""Sources: MLX folders, multimodal ones, other packers' checkpoints, and damaged ones."""

import json
import shutil
import struct

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import dequantize_model, quantize_model, save_config, save_model
from mlx_lm.utils import load_model as mlx_lm_load_model

from tests.golden.weights import write_weights
from tests.quant.models import (
    E2M1,
    E4M3,
    GOLDEN,
    MODES,
    TOKENS,
    arrays_of,
    awq_source,
    bitnet_source,
    build,
    config_of,
    float_weights,
    logits,
    make_source,
    nibbles,
    packed_folder,
    projections,
    refuse,
    run,
    same,
    write_source,
)
from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelUnsupportedError
from tokamac.engine.model.config import read_config
from tokamac.engine.model.safetensors import INDEX
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import convert
from tokamac.quant.source import fresh, open_source, unpacked


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_an_mlx_folder_is_seen_unpacked_and_packed(tmp_path, kind, mode):
    folder, (bits, group) = packed_folder(tmp_path, kind, mode), MODES[mode]
    source, stored = open_source(folder), arrays_of(folder)
    assert set(source.weights) == {name for name, _ in tree_flatten(build(kind)[0].parameters())}
    for path, packed in source.packed.items():
        assert packed.packing == Packing(bits, group, mode)
        scales, biases = stored[f"{path}.scales"], stored.get(f"{path}.biases")
        plain = mx.dequantize(stored[f"{path}.weight"], scales, biases, group, bits, mode)
        assert source.weights[f"{path}.weight"].dtype == mx.bfloat16
        assert same(source.weights[f"{path}.weight"], plain)
        assert len(packed.arrays) == (3 if mode == "affine" else 2)
    assert not {"quantization", "quantization_config"} & set(source.config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["tied", "mixtral"])
def test_what_is_packed_so_already_is_taken_over_byte_for_byte(tmp_path, kind, mode):
    folder, (bits, group) = packed_folder(tmp_path, kind, mode), MODES[mode]
    report = run(folder, tmp_path / "again", bits=bits, group_size=group, mode=mode)
    for name in ("model.safetensors", "config.json", INDEX):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert not any("again" in note for note in report.notes)


def test_every_layer_keeps_its_own_packing_where_that_is_chosen(tmp_path):
    folder = packed_folder(tmp_path, "llama", embed_bits=8)
    assert open_source(folder).packed["lm_head"].packing == Packing(8, 64)
    run(folder, tmp_path / "again", embed_bits=8)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_packing_again_with_fewer_bits_starts_from_what_was_packed_and_says_so(tmp_path):
    folder = packed_folder(tmp_path)
    report = run(folder, tmp_path / "three", bits=3)
    before, after = arrays_of(folder), arrays_of(tmp_path / "three")
    for path in open_source(folder).packed:
        plain = mx.dequantize(*(before[f"{path}.{leaf}"] for leaf in ("weight", "scales", "biases")), 64, 4)
        for leaf, wanted in zip(("weight", "scales", "biases"), mx.quantize(plain, 64, 3), strict=True):
            assert mx.array_equal(after[f"{path}.{leaf}"], wanted).item()
    assert any("packed again" in note for note in report.notes)


@pytest.mark.parametrize("mode", MODES)
def test_dequantizing_writes_plain_floats_that_mlx_lm_loads(tmp_path, mode):
    folder = packed_folder(tmp_path, "mixtral", mode)
    run(folder, tmp_path / "plain", dequantize=True)
    assert not {"quantization", "quantization_config"} & set(config_of(tmp_path / "plain"))
    written = arrays_of(tmp_path / "plain")
    assert {array.dtype for array in written.values()} == {mx.bfloat16}
    for name, array in open_source(folder).weights.items():
        assert mx.array_equal(written[name], array).item()
    model, _ = mlx_lm_load_model(tmp_path / "plain")
    assert isinstance(model.model.embed_tokens, nn.Embedding)
    assert not any("scales" in name for name in written)


def test_a_folder_that_mlx_lm_packed_is_a_source(tmp_path):
    model, config = build("llama")
    model, config = quantize_model(
        model,
        config,
        64,
        4,
        quant_predicate=lambda path, _: {"group_size": 32, "bits": 6} if "v_proj" in path else True,
    )
    save_model(tmp_path / "theirs", model)
    save_config(config, tmp_path / "theirs" / "config.json")
    source = open_source(tmp_path / "theirs")
    assert source.packed["model.layers.0.self_attn.v_proj"].packing == Packing(6, 32)
    assert source.packed["model.layers.0.self_attn.q_proj"].packing == Packing(4, 64)
    run(tmp_path / "theirs", tmp_path / "plain", dequantize=True)
    assert same(logits(tmp_path / "plain"), dequantize_model(model)(TOKENS))


def test_a_type_for_floats_also_holds_for_scales_taken_over(tmp_path):
    folder = packed_folder(tmp_path)
    run(folder, tmp_path / "half", dtype="float16")
    before, after = arrays_of(folder), arrays_of(tmp_path / "half")
    assert {array.dtype for array in after.values()} == {mx.uint32, mx.float16}
    path = "model.layers.0.mlp.up_proj"
    assert mx.array_equal(after[f"{path}.weight"], before[f"{path}.weight"]).item()
    assert mx.array_equal(after[f"{path}.scales"], before[f"{path}.scales"].astype(mx.float16)).item()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_microscaling_weights_unpack_to_the_type_of_the_config(tmp_path, dtype):
    folder = packed_folder(tmp_path, mode="mxfp4")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "torch_dtype": dtype}))
    assert open_source(folder).weights["lm_head.weight"].dtype == getattr(mx, dtype)


def test_a_damaged_mlx_folder_is_named(tmp_path):
    folder = packed_folder(tmp_path)
    arrays = arrays_of(folder)
    del arrays["model.layers.1.mlp.up_proj.scales"]
    mx.eval(arrays)
    for name in ("model.safetensors", INDEX):
        (folder / name).unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    refuse(ModelDamagedError, folder, "not hold a complete llama model")


def test_experts_that_share_a_scale_of_their_own_are_unpacked_with_it():
    weight = mx.random.normal((3, 32, 64), key=mx.random.key(2))
    layer = QuantizedSwitchLinear(64, 32, 3, bias=False, group_size=16, bits=4, mode="nvfp4", global_scale=True)
    layer._quantize(weight, global_scale=True)
    plain = unpacked(layer, mx.float32)
    assert (plain.shape, plain.dtype) == ((3, 32, 64), mx.float32)
    assert mx.sqrt(mx.mean((plain - weight) ** 2) / mx.mean(weight**2)).item() < 0.15


def seeing(tmp_path, **more):
    """Return the folder of a Gemma 3 with a vision tower, and its language part."""
    model, text = build("gemma3")
    config = {"model_type": "gemma3", "text_config": {**text, **more}, "vision_config": {"hidden_size": 8}}
    arrays = {f"language_model.{name}": array for name, array in tree_flatten(model.parameters())}
    arrays |= {"vision_tower.patch.weight": mx.ones((8, 8)), "multi_modal_projector.weight": mx.ones((8, 8))}
    (tmp_path / "source").mkdir()
    mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), arrays)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    return tmp_path / "source", model


@pytest.mark.parametrize("keep", [True, False])
def test_of_a_multimodal_checkpoint_the_language_part_is_converted_as_mlx_lm_would(tmp_path, keep):
    folder, model = seeing(tmp_path)
    whole = (folder / "model.safetensors").stat().st_size
    made = run(folder, tmp_path / "out", **({} if keep else {"keep_vision": False}))
    said = (
        "the 2 tensors of what sees or hears are kept in vision.safetensors: 512 B, 32.00 bits per weight"
        if keep
        else "what sees or hears is left out, 2 tensors, 512 B: the result reads text alone"
    )
    assert said in made.notes
    assert made.source_bytes == whole - 2 * 64 * 4  # sizes compare like with like
    kept = {name for name in arrays_of(tmp_path / "out") if not name.startswith("language_model.")}
    assert kept == ({"vision_tower.patch.weight", "multi_modal_projector.weight"} if keep else set())
    assert ("vision_config" in config_of(tmp_path / "out")) is keep
    nn.quantize(model, group_size=64, bits=4)
    assert same(logits(tmp_path / "out"), model(TOKENS))


def test_what_the_text_config_says_about_packing_goes_with_the_packing(tmp_path):
    folder, model = seeing(tmp_path, quantization_config={"quant_method": "fp8"})
    run(folder, tmp_path / "plain", dequantize=True)
    assert "quantization_config" not in config_of(tmp_path / "plain")["text_config"]
    assert same(logits(tmp_path / "plain"), model(TOKENS))


@pytest.mark.parametrize("packed", [True, False])
def test_fresh_weights_are_those_that_were_popped(tmp_path, packed):
    folder = packed_folder(tmp_path) if packed else make_source(tmp_path, "llama")
    source = open_source(folder)
    first = {name: source.weights.pop(name) for name in list(source.weights)}
    again = fresh(source)
    assert list(again) == list(first)
    assert all(mx.array_equal(again[name], first[name]).item() for name in first)


@pytest.mark.parametrize("family", sorted({"llama", "gemma3", "deepseek_v3", "gpt_oss_window", "phi3", "mixtral"}))
def test_opening_reads_no_weight(tmp_path, family):
    shutil.copy(GOLDEN / family / "config.json", tmp_path)
    case = json.loads((GOLDEN / family / "case.json").read_text())
    write_weights(tmp_path, case["seed"], case["shapes"], read_config(tmp_path))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    source = open_source(tmp_path)
    assert mx.get_peak_memory() - before < 5_000 < source.source_bytes / 20


@pytest.mark.parametrize("options", [{"bits": 3}, {"dequantize": True}, {"bits": 4}], ids=str)
def test_converting_what_is_packed_takes_no_more_memory_for_more_layers(tmp_path, options):
    peaks = {}
    for layers in (6, 48):
        (tmp_path / f"{layers}").mkdir()
        source = make_source(tmp_path / f"{layers}", "llama", num_hidden_layers=layers, hidden_size=256)
        run(source, tmp_path / f"{layers}" / "packed", bits=4)
        report = run(tmp_path / f"{layers}" / "packed", tmp_path / f"{layers}" / "out", **options)
        peaks[layers] = report.peak_memory_bytes
    assert peaks[48] < 1.6 * peaks[6]


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_promises_a_tensor_its_file_lacks(tmp_path):
    folder = make_source(tmp_path, "llama", shards=2)
    rewrite_index(folder, lambda where: where.update({"model.norm.weight": "model-00001-of-00002.safetensors"}))
    rewrite_index(folder, lambda where: where.update({"lm_head.weight": "model-00002-of-00002.safetensors"}))
    refuse(ModelDamagedError, folder, r"lacks (model\.norm|lm_head)\.weight, which .*index.* promises")


def test_a_tensor_in_two_shards(tmp_path):
    folder = make_source(tmp_path, "llama", shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model.safetensors")
    refuse(ModelDamagedError, folder, r"weight is both in .*model-00001-of-00002.* and in model\.safetensors")


def shard_with(folder, header):
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    shard = folder / "model.safetensors"
    body = shard.read_bytes()[8 + struct.unpack("<Q", shard.read_bytes()[:8])[0] :]
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def header_of(folder):
    raw = (folder / "model.safetensors").read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def test_a_shard_whose_header_is_not_json(tmp_path):
    folder = make_source(tmp_path, "llama")
    shard_with(folder, b"not json" * 8)
    refuse(ModelDamagedError, folder, r"model\.safetensors is damaged: its header")


def test_a_shard_whose_tensors_overlap(tmp_path):
    folder = make_source(tmp_path, "llama")
    header = header_of(folder)
    q, k = (header[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2))
    q["data_offsets"] = [offset + 128 for offset in k["data_offsets"]]
    shard_with(folder, header)
    refuse(ModelDamagedError, folder, r"model\.safetensors is damaged: its header")


def test_a_tensor_whose_bytes_do_not_make_its_shape(tmp_path):
    folder = make_source(tmp_path, "llama")
    header = header_of(folder)
    header["model.norm.weight"]["shape"] = [64]
    shard_with(folder, header)
    refuse(ModelDamagedError, folder, r"model\.safetensors is damaged: its header")


@pytest.mark.parametrize(
    "name", ["spiece.model", "tiktoken.model", "tokenizer.model", "sentencepiece.bpe.model", "qwen.tiktoken"]
)
def test_every_file_of_a_tokenizer_goes_along(tmp_path, name):
    source = make_source(tmp_path, "llama")
    (source / name).write_bytes(b"pieces")
    (source / "code.py").write_text("raise SystemExit")
    convert(source, tmp_path / "out", method="round", verify=False)
    assert (tmp_path / "out" / name).read_bytes() == b"pieces"
    assert not (tmp_path / "out" / "code.py").exists()


# Sources that other packers made: what every weight is worth is known by construction.


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
