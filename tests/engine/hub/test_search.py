"""What a search of the hub finds: a local server lists models as the hub does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hub.hub_server import Hub, serve
from tokamac.app import cli
from tokamac.app.backend.processes import HubModelLine, decode_pull
from tokamac.engine.hub.download import good_for


def listed(id_: str, *tags: str, **more: Any) -> dict[str, Any]:
    """A model as the hub's list has it."""
    usual = {
        "pipeline_tag": "text-generation",
        "config": {"model_type": "qwen3"},
        "downloads": 10,
        "usedStorage": 4_000,
    }
    return {"_id": "1", "id": id_, "modelId": id_, "tags": list(tags), **usual, **more}


@pytest.fixture
def hub() -> Any:
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, "architectures": ["Qwen3ForCausalLM"]}
    models = [
        listed("someone/Qwen3-Coder-mlx", "mlx", "safetensors", downloads=900),
        listed(
            "mlx-community/Qwen3-4B-4bit", "mlx", "safetensors", "license:apache-2.0", "conversational",
            safetensors={"parameters": {"U32": 500, "BF16": 100}, "total": 600},
        ),
        listed("Qwen/Qwen3-4B", "safetensors", "license:apache-2.0", downloads=5_000),
        listed("x/Qwen3-GGUF", "gguf", "safetensors"),
        listed("x/Qwen3-Embedding", "mlx", "safetensors", pipeline_tag="feature-extraction"),
        listed("x/Qwen3-unheard-of", "safetensors", config={"model_type": "unheard_of"}),
        listed("x/Qwen3-\x1b]52;c;AAAA\x07[red]", "mlx"),
        listed("x/Llama", "mlx"),
    ]  # fmt: skip
    with serve(Hub(listed=models, configs={"mlx-community/Qwen3-4B-4bit": json.dumps(config).encode()})) as running:
        yield running


@pytest.fixture
def search(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    from huggingface_hub import constants

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["models", "search", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_mlx_models_come_first_and_what_can_not_run_is_left_out(search: Any, tmp_path: Path) -> None:
    status, out, _ = search("qwen3", "--json")
    assert status == 0
    lines = [decode_pull(line.encode()) for line in out.splitlines()]
    *each, last = lines
    assert [model.id for model in last.models][:3] == [
        "mlx-community/Qwen3-4B-4bit", "someone/Qwen3-Coder-mlx", "x/Qwen3-\x1b]52;c;AAAA\x07[red]",
    ]  # fmt: skip
    assert [model.id for model in last.models][3:] == ["Qwen/Qwen3-4B"]
    assert all(isinstance(line, HubModelLine) for line in each)
    first = last.models[0]
    assert (first.nbytes, first.context, first.licence, first.downloads) == (2_200, 40960, "apache-2.0", 10)
    assert (first.mlx, first.good_for) == (True, "general chat")
    assert first.config_folder is not None
    assert (Path(first.config_folder) / "config.json").is_file()
    other = last.models[-1]
    assert (other.nbytes, other.context, other.mlx, other.config_folder) == (4_000, None, False, None)


def test_for_people_it_is_a_table_that_no_terminal_obeys(search: Any) -> None:
    status, out, err = search("qwen3")
    assert status == 0
    assert "\x1b" not in out
    assert "mlx-community/Qwen3-4B-4bit" in out
    assert "writing code" in out
    assert "41.0k" in out
    assert "tokamac models pull ID" in err
    assert "no model for" in search("nothing", "like", "this")[1]
    assert search()[0] == 2


def test_without_a_network_one_line_says_so(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    status, out, err = search("qwen3")
    assert (status, out) == (1, "")
    assert err == "tokamac: no connection to http://127.0.0.1:9. Models on this disk can still be used.\n"


def test_a_hub_that_fails_is_named(search: Any, hub: Hub) -> None:
    hub.status = 404
    status, _, err = search("qwen3")
    assert status == 1
    assert "the hub failed (HTTP 404)" in err


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "writing code"),
        ("deepseek-ai/DeepSeek-R1-Distill", "reasoning step by step"),
        ("google/gemma-3-4b-it", "general chat"),
        ("org/Something", ""),
    ],
)
def test_a_name_says_what_a_model_is_good_for(name: str, phrase: str) -> None:
    assert good_for(name) == phrase
