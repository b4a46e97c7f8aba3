"""Embeddings: parity with transformers, texts together as alone, what a model's files may say."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.weights import tensor, write_weights
from tests.tiny import make_tiny, write_safetensors
from tokamac.engine import ContextError, Engine, OptionError, Sampling
from tokamac.engine.errors import ModelError
from tokamac.quant import convert

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4


def build(case: str, folder: Path) -> dict[str, Any]:
    """Make a golden case's model folder; return its case.json."""
    shutil.copytree(GOLDEN / "embeddings" / case, folder)
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer_config.json", folder)
    stored: dict[str, Any] = json.loads((folder / "case.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    write_weights(folder, stored["seed"], stored["shapes"], config)
    for name, shape in stored["dense"].items():
        weight = tensor(stored["seed"], f"{name}.linear.weight", tuple(shape), config)
        write_safetensors(folder / name / "model.safetensors", {"linear.weight": weight})
    return stored


def off(found: Any, wanted: Any) -> float:
    return float(np.abs(np.array(found) - np.array(wanted)).max())


@pytest.mark.parametrize("case", ["qwen3", "gemma3"])
def test_vectors_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    stored = build(case, tmp_path / "model")
    with Engine.load(tmp_path / "model", dtype="float32", prompt_cache=None) as engine:
        together = engine.embed(stored["texts"])
        assert together.tokens == tuple(map(len, stored["ids"]))
        assert off(together.vectors, stored["vectors"]) < TOLERANCE
        alone = [engine.embed(text).vectors[0] for text in stored["texts"]]
        assert off(alone, stored["vectors"]) < TOLERANCE
        many = engine.embed(stored["texts"] * 20)
        assert off(many.vectors, stored["vectors"] * 20) < TOLERANCE
        cut = engine.embed(stored["texts"], dimensions=16).vectors
        assert off(np.linalg.norm(cut, axis=1), 1) < 1e-6
        assert (
            off(cut, together.vectors[:, :16] / np.linalg.norm(together.vectors[:, :16], axis=1, keepdims=True)) < 1e-6
        )
        prompt = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text())["prompts"]["query"]
        asked = engine.embed("the", prompt="query").vectors
        assert off(asked, engine.embed(prompt + "the").vectors) == 0
        assert off(asked, together.vectors[:1]) > 1e-2
        with pytest.raises(OptionError, match="query, document"):
            engine.embed("the", prompt="passage")
        with pytest.raises(OptionError, match="64 dimensions"):
            engine.embed("the", dimensions=65)


def test_a_model_that_reads_both_ways_writes_nothing(tmp_path: Path) -> None:
    build("gemma3", tmp_path / "model")
    with Engine.load(tmp_path / "model", prompt_cache=None) as engine:
        for ask in (lambda: engine.ask("the"), lambda: engine.logprobs([5, 6])):
            with pytest.raises(OptionError, match="makes embeddings"):
                ask()


def test_beside_a_reply_both_are_made(tmp_path: Path) -> None:
    with Engine.load(make_tiny(tmp_path / "model"), prompt_cache=None) as engine:
        reply = engine.generate("Hi", Sampling(max_tokens=40, temperature=0))
        next(reply)
        found = engine.embed(["one", "two", "a longer text " * 20])
        assert found.vectors.shape == (3, 128)
        assert list(reply)[-1].metrics.generated_tokens == 40  # type: ignore[union-attr]
        alone = [engine.embed(each).vectors[0] for each in ("one", "two", "a longer text " * 20)]
        assert off(found.vectors, alone) < 1e-5


def test_a_text_longer_than_the_context_is_refused_or_cut(tmp_path: Path) -> None:
    stored = build("qwen3", tmp_path / "model")
    with Engine.load(tmp_path / "model", prompt_cache=None) as engine:
        with pytest.raises(ContextError, match="256"):
            engine.embed("a word " * 200)
        cut = engine.embed("a word " * 200, truncate=True)
        assert cut.tokens == (256,)
        assert off(cut.vectors, engine.embed("a word " * 201, truncate=True).vectors) == 0
        assert off(engine.embed(stored["texts"][0]).vectors, stored["vectors"][:1]) < TOLERANCE
        far = engine.embed("a word " * 20_000, truncate=True)
        assert off(far.vectors, cut.vectors) == 0
        with pytest.raises(ContextError, match="140,000 characters"):
            engine.embed("a word " * 20_000)
    for nothing in ([], [b"the"]):
        with Engine.load(make_tiny(tmp_path / "tiny"), prompt_cache=None) as engine, pytest.raises(OptionError):
            engine.embed(nothing)  # type: ignore[arg-type]


def test_without_its_files_the_tokenizer_decides(tmp_path: Path) -> None:
    stored = build("qwen3", tmp_path / "model")
    modules = tmp_path / "model" / "modules.json"

    def embedded() -> Any:
        with Engine.load(tmp_path / "model", dtype="float32", prompt_cache=None) as engine:
            return engine.embed(stored["texts"]).vectors

    told = modules.read_text()
    modules.unlink()
    assert off(embedded(), stored["vectors"]) < TOLERANCE  # its tokenizer ends a text with a mark: the last state
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", tmp_path / "model")
    without = embedded()
    assert off(without, stored["vectors"]) > 1e-2
    modules.write_text(told)
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert off(without, embedded()) == 0


def test_a_conversion_keeps_what_names_the_pooling(tmp_path: Path) -> None:
    stored = build("qwen3", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "packed", bits=8, group_size=32, verify=False)
    with Engine.load(tmp_path / "packed", prompt_cache=None) as engine:
        assert off(engine.embed(stored["texts"]).vectors, stored["vectors"]) < 0.05
        assert off(engine.embed("the", prompt="query").vectors, stored["vectors"][:1]) > 0.1


def broken(**files: object) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", "/").replace("_json", ".json")
            path.write_text(content if isinstance(content, str) else json.dumps(content))

    return breaks


TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (broken(modules_json="{"), "can't be read"),
        (broken(modules_json={}), "something else"),
        (broken(modules_json=[3]), "unknown"),
        (broken(modules_json=[TRANSFORMER]), "no pooling"),
        (broken(modules_json=[{**TRANSFORMER, "path": "../other", "type": "x.Pooling"}]), "no folder"),
        (broken(modules_json=[TRANSFORMER, {"path": "1_Pooling", "type": "x.LSTM"}]), "unknown"),
        (broken(**{"1_Pooling__config_json": {"pooling_mode_max_tokens": True}}), "max_tokens"),
        (broken(**{"1_Pooling__config_json": {"pooling_mode": "weightedmean"}}), "weightedmean"),
        (broken(**{"2_Dense__config_json": {"activation_function": "x.Swish"}}), "Swish"),
        (broken(**{"2_Dense__config_json": {"activation_function": "x.Tanh", "in_features": 3}}), "shape"),
        (lambda folder: (folder / "3_Dense" / "model.safetensors").unlink(), "3_Dense"),
    ],
)
def test_files_that_say_something_else_are_an_error(tmp_path: Path, breaks: Callable[[Path], None], says: str) -> None:
    build("gemma3", tmp_path / "model")
    breaks(tmp_path / "model")
    with Engine.load(tmp_path / "model", prompt_cache=None) as engine, pytest.raises(ModelError, match=says):
        engine.embed("the")
