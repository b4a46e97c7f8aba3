"""Models that see, against transformers' ids, pixels and log-probabilities of tiny seeded checkpoints."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.engine.inside import runner_of, runtime_of
from tests.golden.vision import HERE, PROMPTS, ROWS, SHAPES, SHOWN, SIZES, picture, write_tokenizer
from tests.golden.weights import write_weights
from tokamac.engine import Engine, Message, Sampling
from tokamac.engine.metrics import Recorder
from tokamac.engine.vision.families import FAMILIES
from tokamac.engine.vision.picture import Picture, decoded, extent

pytest.importorskip("PIL")
CASES = sorted(path.stem for path in HERE.glob("*.npz"))
PUBLISHED: dict[str, dict[str, Any]] = json.loads((HERE / "published.json").read_text())


def build(case: str, folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((HERE / f"{case}.json").read_text())
    write_tokenizer(folder, stored["marks"], stored["mark"], stored["named"])
    (folder / "config.json").write_text(json.dumps(stored["config"]))
    (folder / "preprocessor_config.json").write_text(json.dumps(stored["settings"]))
    write_weights(folder, stored["seed"], stored["shapes"], stored["config"])
    return stored


def messages(prompt: str) -> list[Message]:
    said: list[Message] = []
    for shown, text in PROMPTS[prompt]:
        said += [Message("assistant", "a wave.")] if said else []
        said.append(Message("user", text, images=tuple(picture(each) for each in shown)))
    return said


def pixels(family: Any, shown: Picture, *, planes: bool) -> np.ndarray[Any, Any]:
    """Return a picture's pixels as transformers orders them: flat patches, or planes of colour."""
    plan = family.plan(*extent(shown))
    cut: np.ndarray[Any, Any] = family.pixels(decoded(shown), plan)
    if not planes:
        return cut
    tiles, size = cut.reshape(-1, *cut.shape[-2:]), int((cut.shape[-1] // 3) ** 0.5)
    side = int(tiles.shape[1] ** 0.5)
    rows, columns = (side, side) if cut.ndim == 3 else (plan.size[1] // size, plan.size[0] // size)
    planes = tiles.reshape(-1, rows, columns, 3, size, size).transpose(0, 3, 1, 4, 2, 5)
    return planes.reshape(len(tiles), 3, rows * size, columns * size)


def logprobs(engine: Engine, request: Any, chunk: int) -> np.ndarray[Any, Any]:
    """Return the log-probabilities after the prompt's last tokens, read in pieces of at most ``chunk``."""
    runtime, ids, rows = runtime_of(engine), request.ids, []
    caches, at = runtime.new_caches(None), 0
    while at < len(ids):
        end = min(at + chunk, len(ids))
        end = end if request.sight is None else request.sight.end_of_part(at, end)
        part = ids[at:end]
        logits = (
            runtime.model(mx.array([part]), cache=caches)
            if request.sight is None
            else request.sight.call(runtime.model, part, caches, at)
        )
        rows.append(logits[0].astype(mx.float32))
        at = end
    logits = mx.concatenate(rows)[-ROWS:]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("case", CASES)
def test_a_family_sees_as_transformers_does(case: str, tmp_path: Path) -> None:
    stored, golden = build(case, tmp_path), np.load(HERE / f"{case}.npz")
    with Engine.load(tmp_path, dtype="float32", prompt_cache=None) as engine:
        runner = runner_of(engine)
        for kind in SIZES:
            family, planes = runtime_of(engine).eyes.family, not case.startswith(("qwen", "lfm2", "gemma4"))
            flat = pixels(family, Picture.of(picture(kind)), planes=planes).reshape(-1)
            places = np.linspace(0, len(flat) - 1, SHOWN).astype(int)
            assert np.abs(flat[places] - golden[f"{kind} pixels"]).max() < 1e-3, kind
        for prompt in PROMPTS:
            request = runner.request(messages(prompt), Sampling(), Recorder())
            token = -1 if request.sight is None else request.sight.eyes.token_id
            assert [token if each < 0 else each for each in request.ids] == stored["ids"][prompt], prompt
            for chunk in (10_000, 37):
                found = engine.run(lambda _, request=request, chunk=chunk: logprobs(engine, request, chunk))
                assert np.abs(found - golden[prompt]).max() < 1e-3, (prompt, chunk)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_makes_a_tower_and_counts_as_transformers_does(name: str) -> None:
    given = PUBLISHED[name]
    family = FAMILIES[given["config"]["model_type"]](given["config"], given["settings"])
    assert [family.plan(*shape).tokens for shape in SHAPES] == given["counts"]
    assert sum(each.size for _, each in tree_flatten(family.tower().parameters())) == given["parameters"]
