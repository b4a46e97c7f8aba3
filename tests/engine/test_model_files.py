"""Folders that are not whole, not safe or not ours: one clear error each, before any weight is used."""

import contextlib
import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from tokamac.engine.generation import CHECK_STEPS, Generation
from tokamac.engine.model.safetensors import INDEX, find_shards, read_header
from tokamac.engine.sampling import Sampler


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

    run = Generation(Model(), [], [1], ahead=ahead)
    tokens = run.decode(2, Sampler(Sampling(temperature=0).resolved(Sampling()), []), 100)
    with pytest.raises(ModelDamagedError, match="not numbers"):
        list(tokens)
    assert len(run.cached_ids) <= 2 + spoiled + CHECK_STEPS + ahead


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
