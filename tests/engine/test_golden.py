"""Parity with Hugging Face transformers: the engine's log-probabilities and greedy chats equal the golden ones.

The golden values, and the configs just as transformers saves them, were made by tests/golden/make.py. Weights are made here.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.families import WINDOW, is_windowed
from tests.golden.weights import write_weights
from tokamac.engine import Engine, Finished, Message, Sampling

GOLDEN = Path(__file__).parents[1] / "golden"

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
CHATS = [case for case in CASES if "turns" in json.loads((GOLDEN / case / "case.json").read_text())]
REQUIRED = {"llama", "qwen2", "qwen3", "gemma3", "granite", "mistral", "phi3", "mixtral"}
BEYOND_THEIR_WINDOW = {"mistral_window", "gemma2_window", "gemma3_window", "gemma4_window", "gpt_oss_window"}
TOLERANCE = 1e-4
CHUNKS = (None, 1, 5, 7)
BEYOND_CHUNKS = (None, 1, 7, WINDOW, 2 * WINDOW + 8)


def build(case: str, folder: Path) -> dict[str, Any]:
    """Make the case's model folder as a user would have it; return its case.json."""
    stored: dict[str, Any] = json.loads((GOLDEN / case / "case.json").read_text())
    shutil.copy(GOLDEN / case / "config.json", folder)
    for file in (GOLDEN / "tokenizer").iterdir():
        shutil.copy(file, folder)
    write_weights(folder, stored["seed"], stored["shapes"], json.loads((folder / "config.json").read_text()))
    return stored


@pytest.fixture
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Engine, dict[str, Any]]]:
    stored = build(request.param, tmp_path)
    with Engine.load(tmp_path, dtype="float32") as engine:
        yield request.param, engine, stored


def test_the_families_that_must_work_are_here() -> None:
    assert set(CASES) >= REQUIRED | BEYOND_THEIR_WINDOW
    assert {"llama", "qwen3", "gemma3"} <= set(CHATS)


@pytest.mark.parametrize("loaded", CASES, indirect=True, ids=str)
def test_logprobs_equal_transformers_whole_and_in_chunks(loaded: tuple[str, Engine, dict[str, Any]]) -> None:
    case, engine, _ = loaded
    with np.load(GOLDEN / case / "golden.npz") as golden:
        tokens, expected = golden["tokens"].tolist(), golden["logprobs"]
    differences = {
        chunk: float(np.abs(np.array(engine.logprobs(tokens, chunk=chunk)) - expected).max())
        for chunk in (BEYOND_CHUNKS if is_windowed(case) else CHUNKS)
    }
    print(f"{case}: largest differences by chunk {differences}")
    assert max(differences.values()) < TOLERANCE, f"{case}: largest difference by chunk size: {differences}"


@pytest.mark.parametrize("loaded", CHATS, indirect=True, ids=str)
def test_three_greedy_turns_equal_transformers(loaded: tuple[str, Engine, dict[str, Any]]) -> None:
    _, engine, stored = loaded
    messages = [Message("system", stored["system"])]
    for turn in stored["turns"]:
        messages.append(Message("user", turn["user"]))
        end = finished(engine, messages, len(turn["reply"]))
        assert end.text == turn["text"]
        assert end.metrics.prompt_tokens == len(turn["prompt"])
        messages.append(Message("assistant", end.text))
    assert end.metrics.cached_tokens > 0, "the last turn reused nothing of the ones before"


@pytest.mark.parametrize("loaded", CHATS, indirect=True, ids=str)
def test_a_cold_last_turn_equals_the_warm_one(loaded: tuple[str, Engine, dict[str, Any]]) -> None:
    _, engine, stored = loaded
    last = stored["turns"][-1]
    messages = [Message("system", stored["system"])]
    for turn in stored["turns"]:
        messages.append(Message("user", turn["user"]))
        if turn is not last:
            messages.append(Message("assistant", turn["text"]))
    assert finished(engine, messages, len(last["reply"])).text == last["text"]


def finished(engine: Engine, messages: list[Message], tokens: int) -> Finished:
    *_, end = engine.generate(messages, Sampling(temperature=0.0, max_tokens=tokens))
    assert isinstance(end, Finished)
    return end
