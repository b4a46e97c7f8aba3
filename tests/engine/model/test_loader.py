"""Model folders: damaged or unsafe ones are refused, and checkpoints are read as they are published."""

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from tests.engine.helpers import CONFIG, write_model
from tests.families import build
from tokamac.engine import (
    DeviceError,
    Engine,
    Finished,
    ModelDamagedError,
    ModelError,
    ModelNotFoundError,
    ModelUnsupportedError,
    OptionError,
    Sampling,
)
from tokamac.engine.device import check_backends
from tokamac.engine.model.config import normalise, read_config
from tokamac.engine.model.loader import build_model
from tokamac.engine.model.safetensors import INDEX, find_shards, read_header
from tokamac.engine.model.weights import is_fp8, unpack_fp8
from tokamac.engine.perf.config_cost import cost_of_config
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.sampling import Sampler
from tokamac.engine.schedule.decoding import CHECK_STEPS, Lane, decode_alone
from tokamac.quant import convert
from tokamac.quant.source import read_checkpoint

# Folders that are not whole, not safe or not ours: one clear error each, before any weight is used.


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        Engine.load(folder)
    assert caught.value.hint
    assert "\n" not in caught.value.one_line()
    return caught.value


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        Engine.load("/nowhere/at/all")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert "model*.safetensors" if name == "model.safetensors" else name in str(refusal(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_not_json_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{ not json")
    assert isinstance(refusal(folder), ModelDamagedError)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_file_nested_too_deeply_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    error = refusal(folder)
    assert isinstance(error, ModelDamagedError)
    # mlx-lm reads one of them itself, and names the folder
    assert name in error.message or "recursion" in error.message


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_a_truncated_shard_is_named(folder: Path, keep: int) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    error = refusal(folder)
    assert isinstance(error, ModelDamagedError)
    assert "model.safetensors is damaged" in str(error)


def test_a_shard_that_the_index_names_and_nobody_has(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}))
    assert "model-00002.safetensors is missing" in str(refusal(folder))


@pytest.mark.parametrize(("leaf", "dtype"), [("scales", mx.int32), ("biases", mx.int32), ("biases", mx.uint8)], ids=str)
def test_scales_and_biases_that_are_no_numbers_are_damage(tmp_path: Path, leaf: str, dtype: mx.Dtype) -> None:
    write_model(tmp_path, bits=4)
    arrays = mx.load(str(tmp_path / "model.safetensors"))
    changed = {name: array.astype(dtype) if name.endswith(leaf) else array for name, array in arrays.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), changed)
    error = refusal(tmp_path)
    assert isinstance(error, ModelDamagedError)
    assert leaf in str(error)


@pytest.mark.parametrize(("scales", "biases"), [(mx.float32, mx.float16), (mx.float16, mx.float32)], ids=str)
def test_scales_and_biases_of_two_types_are_as_stored(tmp_path: Path, scales: mx.Dtype, biases: mx.Dtype) -> None:
    write_model(tmp_path, bits=4)
    arrays = mx.load(str(tmp_path / "model.safetensors"))
    found = []
    for kinds in ((mx.float16, mx.float16), (scales, biases)):  # halves, so that the same numbers are in both
        given = {
            name: array.astype(mx.float16).astype(kind)
            for name, array in arrays.items()
            for leaf, kind in zip(("scales", "biases"), kinds, strict=True)
            if name.endswith(leaf)
        }
        mx.save_safetensors(str(tmp_path / "model.safetensors"), {**arrays, **given})
        with Engine.load(tmp_path, prompt_cache=None, cpu_exact=True) as engine:
            found.append(engine.logprobs(list(range(1, 20))))
    assert np.allclose(found[0], found[1], atol=1e-5)


def test_an_index_may_not_point_outside_the_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "outside" in str(refusal(folder))


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(folder)
    assert isinstance(error, ModelUnsupportedError)
    assert "pickled" in str(error)


def test_weights_that_are_not_numbers_are_named(folder: Path) -> None:
    shard = folder / "model.safetensors"
    weights = dict(mx.load(str(shard)))
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = mx.full(weights[name].shape, float("nan"))
    mx.save_safetensors(str(shard), weights)
    assert name in str(refusal(folder))


def test_a_tensor_that_is_missing_or_of_another_shape(folder: Path) -> None:
    shard = folder / "model.safetensors"
    weights = dict(mx.load(str(shard)))
    del weights["model.norm.weight"]
    mx.save_safetensors(str(shard), weights)
    assert "model.norm.weight" in str(refusal(folder))


def test_an_unknown_architecture_is_unsupported(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "made_up"}))
    assert isinstance(refusal(folder), ModelUnsupportedError)


def test_code_in_a_model_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    for name in ("modeling_custom.py", "tokenization_custom.py"):
        (folder / name).write_text(f"open({str(witness)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_custom.Model", "AutoTokenizer": ["tokenization_custom.T", None]}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "made_up", "auto_map": auto_map, "model_file": "modeling_custom.py"})
    )
    refusal(folder)
    assert not witness.exists()


def test_a_dtype_that_is_none(tiny: Path) -> None:
    with pytest.raises(OptionError, match="dtype int8"):
        Engine.load(tiny, dtype="int8")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_and_nothing_else(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = (tiny / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(0, 8 + length - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with contextlib.suppress(
        ModelDamagedError
    ):  # nothing else; a changed letter in a name passes, and is found at loading
        assert read_header(shard)


def test_whole_shards_are_found(tiny: Path) -> None:
    assert [shard.name for shard in find_shards(tiny)] == ["model.safetensors"]


def test_exactly_one_backend_is_right() -> None:
    check_backends(("mlx-cpu",), platform="linux")
    with pytest.raises(DeviceError, match="without a backend"):
        check_backends((), platform="linux")
    with pytest.raises(DeviceError, match=r"together \(mlx-cpu, mlx-cuda-13\)") as caught:
        check_backends(("mlx-cpu", "mlx-cuda-13"), platform="linux")
    assert "pip uninstall -y mlx-cpu mlx-cuda-13" in caught.value.hint


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("spoiled", [0, 5, 40])
def test_logits_that_are_no_numbers_are_noticed_at_any_step(ahead: bool, spoiled: int) -> None:
    class Model:
        steps = 0

        def __call__(self, ids: mx.array, cache: list[object]) -> mx.array:
            self.steps += 1
            assert int(ids.max().item()) < 9  # an embedding's lookup would read beyond its table
            return mx.full((1, ids.shape[1], 9), math.nan if self.steps > spoiled else 1.0)

    lane = Lane([], [1], 2, Sampler(Sampling(temperature=0).resolved(Sampling()), []), 100)
    with pytest.raises(ModelDamagedError, match="not numbers"):
        list(decode_alone(Model(), lane, ahead=ahead))
    assert len(lane.cached_ids) <= 2 + spoiled + CHECK_STEPS + ahead


def test_a_tokenizer_that_makes_its_library_panic_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    file.write_text(
        json.dumps({**told, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    )  # no map: a panic
    refused = refusal(folder)
    assert isinstance(refused, ModelDamagedError)
    assert "precompiled_charsmap" in refused.message


def test_a_text_that_makes_the_tokenizer_panic_fails_alone(folder: Path) -> None:
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    pattern = {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}  # backtracks until the regex engine gives up
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**told, "pre_tokenizer": split}))
    with Engine.load(folder, prompt_cache=None) as engine:
        for _ in range(2):
            with pytest.raises(ModelDamagedError, match="retry-limit") as caught:
                list(engine.chat().send("a" * 400 + "!"))
            assert caught.value.hint
            with pytest.raises(ModelDamagedError, match="retry-limit"):
                engine.tokenizer.encode("a" * 400 + "!")
            *_, last = engine.chat().send("A", Sampling(max_tokens=2))
            assert isinstance(last, Finished)


# Checkpoints as they are published: other names, other layouts, fp8.

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
    [(".weight_scale_inv", BLOCKS), (".weight_scale_inv", WHOLE), (".weight_scale", ROWS), (".weight_scale", MODELOPT)],
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
    from tokamac.engine.model.loader import skeleton_model

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
