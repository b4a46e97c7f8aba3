"""`inspect`: what a model is and what a place makes of it, from its files, its config alone, or the catalogue."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.limits.test_limits_cost import CONFIGS, build, save
from tests.tiny import make_tiny
from tokamac.engine import Engine
from tokamac.engine.errors import ModelDamagedError, ModelNotFoundError, ModelUnsupportedError, OptionError
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import timing
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.hardware import Chip
from tokamac.engine.perf.inspection import inspect, inspect_model, model_ref, model_ref_of_folder
from tokamac.engine.perf.machine import Machine, elsewhere, here
from tokamac.engine.perf.what_if import WhatIfCase

CHIP = Chip("Test", 10, 100.0, 4.0, "table", "made up")
GPU = Machine(CHIP, None, None, None, "metal")
CPU = Machine(CHIP, 1 << 34, 1 << 34, None, "cpu")


def test_inspect_agrees_with_the_loaded_model(tmp_path):
    model, config = build(CONFIGS["tied"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), place=GPU)
    cost = cost_of_model(model, config)
    kv = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, dims, bytes
    assert seen.parameters == cost.parameters
    assert seen.weight_bytes == cost.weight_bytes == seen.memory.weights
    assert seen.kv_bytes_per_token == kv
    assert seen.bytes_per_step == cost.weight_bytes_per_token + 100 * kv
    assert seen.ceiling_tps == 100e9 / seen.bytes_per_step
    assert (seen.expected_tps, seen.prefill_tps, seen.ttft_s) == (None, None, None)
    assert sum(part.bytes for part in seen.parts) == seen.weight_bytes
    assert seen.memory.total == seen.memory.weights + seen.memory.kv + seen.memory.working


def test_inspect_knows_that_a_plain_cpu_unpacks_small_models(tmp_path):
    model, config = build(CONFIGS["llama"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), place=CPU)
    assert seen.form == "unpacked"
    assert seen.memory.weights == 4 * seen.parameters
    assert seen.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_inspect_has_every_field_of_the_contract(tmp_path):
    model, config = build(CONFIGS["mixtral"])
    save(tmp_path, model, config)
    plain = json.loads(json.dumps(inspect_model(tmp_path, place=CPU).to_json()))
    wanted = (
        "model architecture parameters weight_bytes bits_per_weight kv_bytes_per_token bytes_per_step chip ceiling_tps"
    )
    assert set(wanted.split()) | {"expected_tps", "prefill_tps", "ttft_s", "memory"} <= set(plain)
    assert {"name", "gpu_cores", "bandwidth_gbs", "fp16_tflops"} <= set(plain["chip"])
    assert set(plain["memory"]) == {"weights", "kv", "working", "total", "budget", "fits", "from_others"}


def test_what_inspect_cannot_know_is_null(tmp_path):
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "layer_types": ["something_new"] * 2})
    seen = inspect_model(tmp_path, place=replace(GPU, chip=Chip("?", None, None, None, "unknown")))
    assert (seen.kv_bytes_per_token, seen.bytes_per_step, seen.ceiling_tps) == (None, None, None)


def test_inspect_of_what_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError):
        inspect_model(tmp_path / "nowhere", place=CPU)
    with pytest.raises(ModelDamagedError):
        inspect_model(tmp_path, place=CPU)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnsupportedError, match="hidden_size"):
        inspect_model(tmp_path, place=CPU)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelUnsupportedError):
        inspect_model(tmp_path, place=CPU)


def test_a_truncated_shard_is_named(tmp_path):
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, config)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelDamagedError, match=r"model\.safetensors"):
        inspect_model(tmp_path, place=CPU)


@pytest.mark.parametrize("quantized", [None, {"group_size": 64, "bits": 4}], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("place", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_config_alone_says_what_the_files_say(
    tmp_path: Path, kind: str, quantized: dict[str, int] | None, place: Machine
) -> None:
    # Of gemma, only files or this key tell whether there is a head.
    model, config = build({"tie_word_embeddings": False, **CONFIGS[kind]}, quantized=quantized)
    save(tmp_path, model, config)
    files = inspect_model(tmp_path, 100, place=place)
    (tmp_path / "model.safetensors").unlink()
    alone = inspect_model(tmp_path, 100, place=place)
    assert (files.known, alone.known) == ("files", "config")
    assert replace(alone, known="files") == files


def test_a_missing_shard_is_not_taken_for_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelDamagedError, match="00001-of-00001"):
        inspect_model(tmp_path, place=GPU)


def test_as_if_it_were_packed_otherwise(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, config)
    packed, _ = build(CONFIGS["llama"], quantized={"group_size": 32, "bits": 4})
    found = inspect(model_ref_of_folder(tmp_path), WhatIfCase(4, 32, context=64, prompt=64), GPU)
    assert found.weight_bytes == cost_of_model(packed, {}).weight_bytes
    assert found.bits_per_weight is not None
    assert 5 < found.bits_per_weight < 5.1  # norms stay as they are


def test_a_class_that_is_not_known_can_not_be_packed_otherwise(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "model_type": "unheard_of"})
    assert inspect_model(tmp_path, place=GPU).weight_bytes > 0
    with pytest.raises(ModelUnsupportedError, match="unheard_of"):
        inspect(model_ref_of_folder(tmp_path), WhatIfCase(4), GPU)


@pytest.mark.parametrize(
    ("asked", "name", "bits"),
    [
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit", 4.5),
        ("qwen3-0.6b-8bit", "mlx-community/Qwen3-0.6B-8bit", 8.5),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit", 4.5),
        ("Llama-2-7B", "Llama-2-7B", 16),
    ],
)
def test_a_model_of_the_catalogue_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, name: str, bits: float
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = inspect(model_ref(asked), WhatIfCase(context=2048, prompt=2048), elsewhere("M4 Max", 40, 64))
    assert (found.model, found.known) == (name, "catalogue")
    assert found.bits_per_weight == pytest.approx(bits, abs=0.02)
    assert found.memory.fits
    assert found.expected_tps is not None
    assert found.prefill_tps is not None
    assert found.ttft_s == pytest.approx(2048 / found.prefill_tps)
    assert found.reason is None


def test_what_is_neither_here_nor_in_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="nor in the catalogue") as missing:
        model_ref("org/nothing-like-it")
    assert "models pull" in missing.value.hint


def test_a_folder_goes_before_a_name_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert model_ref("Qwen3-8B").known == "config"


def test_the_embedded_model_here() -> None:
    found = inspect(model_ref("guide"), WhatIfCase(context=512, prompt=512), here())
    assert found.known == "files"
    assert found.traits == ("dense",)
    assert sum(part.bytes for part in found.parts) == found.weight_bytes
    assert found.memory.total == found.memory.weights + found.memory.kv + found.memory.working


def test_a_flag_that_the_model_can_not_take_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "head_dim": 48}))
    with pytest.raises(OptionError, match="48 numbers per head"):
        inspect_model(tmp_path, 10, KVSpec(8, 8), place=GPU)


def test_what_was_measured_here_is_found_again_without_loading_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "is_busy", lambda _: False)  # what a busy machine measures is not kept
    folder = make_tiny(tmp_path / "tiny")
    before = inspect(model_ref(folder), WhatIfCase(context=256, prompt=128))
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.measure()
        expected = engine.limits(256).expected_tps
    after = inspect(model_ref(folder), WhatIfCase(context=256, prompt=128))
    assert expected is not None
    assert after.expected_tps == pytest.approx(expected)
    assert after.reason is None
    assert after.ttft_s is not None
    assert after.prediction is not None
    assert after.prediction.ridge is not None
    packed = inspect(model_ref(folder), WhatIfCase(kv=KVSpec(8, 8), context=256, prompt=128))
    if (
        before.place.latency is None
    ):  # no published pace: nothing is known before, and nothing of caches that were not measured
        assert (before.expected_tps, packed.expected_tps) == (None, None)
