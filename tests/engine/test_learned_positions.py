"""Models with a table of learned positions: nothing asked of them reaches beyond its last row."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.golden.weights import write_weights
from tokamac.engine import ContextError, Engine, Finished, KVSpec, OptionError, Sampling
from tokamac.engine.model.cpu import DenseEmbedding
from tokamac.engine.model.loader import position_rows

GOLDEN = Path(__file__).parents[1] / "golden"
LONG = Sampling(temperature=0, max_tokens=500)


@pytest.fixture(params=["gpt2", "gpt_bigcode"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    case = GOLDEN / request.param
    config = json.loads((case / "config.json").read_text())
    # Also a key of rotary models that says more than the table has.
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    for file in (GOLDEN / "tokenizer").iterdir():
        shutil.copy(file, tmp_path)
    stored = json.loads((case / "case.json").read_text())
    write_weights(tmp_path, stored["seed"], stored["shapes"], config)
    return tmp_path


def load(folder: Path, kv: KVSpec) -> tuple[Engine, int]:
    engine = Engine.load(folder, kv=kv)
    engine.tokenizer.eos_ids = frozenset()
    config = json.loads((folder / "config.json").read_text())
    return engine, int(config["n_positions"])


def ids(count: int) -> list[int]:
    return np.random.default_rng(3).integers(9, 99, count).tolist()


def test_rolling_past_the_table_is_refused_with_its_size(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"learned .* positions one by one, so nothing can roll past them"):
        Engine.load(folder, kv=KVSpec(on_full="roll"))
    with pytest.raises(OptionError, match="learned"):
        Engine.load(folder, kv=KVSpec(on_full="roll", window=16))


def test_a_window_rolls_up_to_the_end_of_the_table_and_that_is_said(folder: Path) -> None:
    engine, rows = load(folder, KVSpec(window=24))
    with engine:
        assert any(f"learned {rows:,} positions" in note for note in engine.spec.notes)
        *_, last = engine.generate(ids(30), LONG)
        assert isinstance(last, Finished)
        assert (last.reason, last.metrics.generated_tokens) == ("length", rows - 30)


@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(window=24)], ids=["whole", "window"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda engine, prompt: list(engine.generate(prompt, LONG)),
        lambda engine, prompt: list(engine.warm(prompt)),
        lambda engine, prompt: engine.logprobs([*prompt, 9]),
    ],
    ids=["generate", "warm", "logprobs"],
)
def test_a_longer_prompt_is_refused(folder: Path, kv: KVSpec, ask: Callable[[Engine, list[int]], object]) -> None:
    engine, rows = load(folder, kv)
    with engine:
        with pytest.raises(ContextError, match=f" {rows:,}"):
            ask(engine, ids(rows))
        ask(engine, ids(rows - 1))


def test_a_context_is_never_longer_than_the_table(folder: Path) -> None:
    engine, rows = load(folder, KVSpec())
    with engine:
        assert (engine.spec.context_length, engine.spec.capacity) == (rows, rows)


def test_an_unpacked_table_is_one_still(folder: Path) -> None:
    engine, rows = load(folder, KVSpec())
    with engine:
        model = engine._runner.runtime.model
        assert any(isinstance(module, DenseEmbedding) for _, module in model.named_modules())
        assert position_rows(model) == rows
