"""``--adapter`` and ``--unchecked`` on the command line, and an adapter that the settings have for a model."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.plain_chat import last_path, piped
from tests.engine.adapter_files import as_mlx, write_peft
from tests.engine.seeded import write_model
from tokamac.app import settings
from tokamac.app.settings import Settings
from tokamac.engine.model.adapters import read_adapter

ASK = ("--max-tokens", "16", "--temp", "0")


@pytest.fixture
def adapter(tmp_path: Path, tiny: Path) -> Path:
    return write_peft(tmp_path / "adapter", tiny)


def test_ask_answers_with_the_adapter_and_says_so(tokamac: Run, tiny: Path, adapter: Path, tmp_path: Path) -> None:
    bare = tokamac("ask", "Hello", "-m", tiny, *ASK)
    done = tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", adapter)
    assert (bare.status, done.status) == (0, 0)
    assert done.out != bare.out
    assert done.err == f"note: adapter {adapter}: 6 matrices of rank 4, trained on org/base\n"
    mlx = tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", as_mlx(tmp_path / "mlx", adapter))
    assert mlx.out == done.out


def test_the_settings_give_a_model_its_adapter_and_a_flag_takes_it_away(
    tokamac: Run, tiny: Path, adapter: Path
) -> None:
    bare = tokamac("ask", "Hello", "-m", tiny, *ASK)
    settings.save(settings.default_path(), Settings(adapters={str(tiny): str(adapter)}))
    assert tokamac("ask", "Hello", "-m", tiny, *ASK).out != bare.out
    assert tokamac("ask", "Hello", "-m", tiny, *ASK, "--adapter", "none") == bare


def test_an_adapter_that_does_not_fit_is_one_line(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    other = write_peft(tmp_path / "other", write_model(tmp_path / "wide", hidden_size=96))
    done = tokamac("ask", "Hello", "-m", tiny, "--adapter", other)
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert "does not fit" in done.err
    missing = tokamac("ask", "Hello", "-m", tiny, "--adapter", "./nothing")
    assert missing.status == 1
    assert "no folder" in missing.err


def test_bench_records_the_adapter_and_what_is_doubted(tokamac: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "doubtful", logits_scaling=2.0)
    adapter = write_peft(tmp_path / "peft", model)
    flags = ("--prompt", "8", "--max-tokens", "4", "--runs", "1", "--json")
    assert tokamac("bench", model, *flags).status == 1
    done = tokamac("bench", model, *flags, "--unchecked", "--adapter", adapter)
    record = json.loads(done.out)
    assert record["adapter"] == {"name": str(adapter), "digest": read_adapter(adapter, "x").digest}
    assert "logits_scaling" in record["doubts"][0]
    assert "unchecked: config.json sets logits_scaling" in done.err
    refused = tokamac("bench", model, *flags, "--unchecked", "--adapter", adapter, "--compare", "mlx-lm")
    assert refused.status == 2
    assert "--adapter none" in refused.err


def test_inspect_counts_what_the_loaded_adapter_costs(tokamac: Run, tiny: Path, adapter: Path) -> None:
    from tokamac.engine import Engine

    bare, added = (
        json.loads(tokamac("inspect", tiny, "--json", "--context", "64", *more).out)
        for more in ((), ("--adapter", adapter))
    )
    with Engine.load(tiny, prompt_cache=None, adapter=adapter) as engine:
        work = engine._runner.runtime.work
    assert added["bytes_per_step"] == work.step_bytes(64)
    assert added["bytes_per_step"] - bare["bytes_per_step"] == 4 * read_adapter(adapter, "x").parameters
    assert added["adapter"] == {"name": str(adapter), "digest": read_adapter(adapter, "x").digest}
    assert added["memory"]["weights"] > bare["memory"]["weights"]
    assert tokamac("inspect", tiny, "--adapter", adapter, "--table").status == 2


def test_the_plain_chat_takes_an_adapter_and_says_which_it_has(home: Path, data: Path) -> None:
    status, out, err = piped("/adapter\n/adapter org/letters\n/adapter\nhi\n", "fast")
    assert status == 0
    assert "This model has no adapter." in out
    assert "org/letters" in out
    assert "The model is reloading with it." in err
    assert settings.load(home / "settings.toml").settings.adapters == {"fast": "org/letters"}
    assert last_path(data)[-1].settings["adapter"]["name"] == "org/letters"
