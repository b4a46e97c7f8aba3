"""Configs with numbers that no model has: refused where they are read, with a sentence, before anything is built of them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny
from tokamac.app.cli import main
from tokamac.engine import Engine, ModelDamagedError
from tokamac.engine.model.config import LAYERS, check_values, read_config

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
INFINITE, NAN = float("inf"), float("nan")
HOSTILE = [
    ({"rms_norm_eps": INFINITE}, "rms_norm_eps to inf, which is not a finite number"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps to nan"),
    ({"rms_norm_eps": {"__float__": "Infinity"}}, "rms_norm_eps to inf"),
    ({"rms_norm_eps": 1e39}, "rms_norm_eps to 1e"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps to -1e-05, which is too small"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta to 0"),
    ({"rope_parameters": {"rope_theta": 1e4, "long_factor": [1.0, INFINITE]}}, "rope_parameters.long_factor to inf"),
    ({"text_config": {"layer_norm_eps": NAN}}, "text_config.layer_norm_eps to nan"),
    ({"num_hidden_layers": 3_000_000}, "num_hidden_layers to 3,000,000, which is more than 4,096"),
    ({"num_hidden_layers": 10**400}, "num_hidden_layers to a huge number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers to 0, which is less than 1"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers to 'many', which is not a number"),
    ({"layer_types": ["full_attention"] * (LAYERS + 1)}, "layer_types for 4,097 layers"),
    ({"hybrid_override_pattern": "M" * 100_000}, "hybrid_override_pattern for 100,000 layers"),
    ({"vocab_size": 10**12}, "vocab_size to 1,000,000,000,000"),
    ({"hidden_size": 10**9}, "hidden_size to 1,000,000,000"),
    ({"num_key_value_heads": [1, 10**9]}, "num_key_value_heads to 1,000,000,000"),
    ({"head_dim": 10**18}, "head_dim to 1.0e\\+18"),
    ({"num_local_experts": 10**7}, "num_local_experts to 10,000,000"),
]


@pytest.mark.parametrize(("changes", "said"), HOSTILE, ids=[said.split(",")[0] for _, said in HOSTILE])
def test_a_value_that_no_model_has_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelDamagedError, match=said):
        read_config(folder)


@pytest.mark.parametrize("command", [["inspect"], ["ask", "hi", "-m"], ["convert", "--dry-run"]], ids=lambda c: c[0])
@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3_000_000}, {"rms_norm_eps": INFINITE}], ids=str)
def test_each_command_refuses_it_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert main([*command, str(folder)]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"tokamac: config.json sets {next(iter(changes))} to ")
    assert said.err.count("\n") == 1


def test_real_configs_have_none() -> None:
    for config in (*PUBLISHED.values(), *(json.loads(path.read_text()) for path in GOLDEN.glob("*/config.json"))):
        check_values(config)


def test_no_bound_of_a_step_is_infinite(tmp_path: Path) -> None:
    check_values({"time_step_limit": [0.0, INFINITE], "vision_config": {"hidden_size": -1}})
    with pytest.raises(ModelDamagedError, match="time_step_limit to nan"):
        check_values({"time_step_limit": [0.0, NAN]})


def test_a_tensor_of_integers_is_refused_alike_by_the_engine_and_by_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny(tmp_path / "model")
    shard, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = shard.read_bytes()
    at = whole.index(b'"F32"', whole.index(name.encode()))
    shard.write_bytes(whole[:at] + b'"I32"' + whole[at + 5 :])
    said = f"{name} holds int32 where the model has floating numbers"
    with pytest.raises(ModelDamagedError, match=said):
        Engine.load(folder)
    assert main(["convert", str(folder), "-o", str(tmp_path / "out"), "--no-verify"]) == 1
    assert said in capsys.readouterr().err


def test_packed_weights_are_words(tmp_path: Path) -> None:
    from tests.engine.seeded import write_model

    folder = write_model(tmp_path / "model", bits=4)
    shard, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = shard.read_bytes()
    at = whole.index(b'"U32"', whole.index(name.encode()))
    shard.write_bytes(whole[:at] + b'"F32"' + whole[at + 5 :])
    with pytest.raises(ModelDamagedError, match=f"{name} holds float32 where the model has packed weights"):
        Engine.load(folder)
