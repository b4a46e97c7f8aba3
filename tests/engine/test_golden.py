"""Parity with Hugging Face transformers: log-probabilities and greedy chats equal the golden ones."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.families import CHANGED_TOKENS, WINDOW, changed_rows, is_windowed, replaced
from tests.golden.weights import write_weights
from tokamac.engine import ContextError, Engine, Finished, KVSpec, Message, Sampling
from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.kv import plan_caches
from tokamac.engine.loading import keeps_short
from tokamac.engine.model.config import read_config
from tokamac.engine.model.corrections import use_short_factors
from tokamac.engine.model.cpu.dense import DenseEmbedding
from tokamac.engine.model.loader import build_model, position_rows
from tokamac.engine.perf.inspection import prospect
from tokamac.engine.perf.machine import here
from tokamac.engine.perf.what_if import WhatIfCase
from tokamac.engine.scoring import log_probabilities

# Parity with Hugging Face transformers: the engine's log-probabilities and greedy chats equal the golden ones.

GOLDEN = Path(__file__).parents[1] / "golden"

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
CHATS = [case for case in CASES if "turns" in json.loads((GOLDEN / case / "case.json").read_text())]
REQUIRED = {"llama", "qwen2", "qwen3", "gemma3", "granite", "mistral", "phi3", "mixtral"}
BEYOND_THEIR_WINDOW = {"mistral_window", "gemma2_window", "gemma3_window", "gemma4_window", "gpt_oss_window"}
TOLERANCE = 1e-4
"""Of log-probabilities down to -16. Of smaller ones in proportion: float32 keeps digits, and each BLAS rounds in its own way."""
CHANGED_TOLERANCE = 5e-4
"""Of a config changed in one value, which may make float32 itself less exact; the reference moved by more than 1e-3."""
CHANGED = sorted(path.parent.name for path in GOLDEN.glob("*/changed.json"))
SHORT_FACTORS = {"phi3", "phimoe"}
"""Prompts within the pretraining context of LongRoPE: transformers has short factors then, the engine only for such contexts."""
PACKED_BOUND = 2.0
"""Log-probabilities move by less than this in the mean with keys and values of 8 bits: models of noise are sensitive to it."""
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


@pytest.fixture(scope="module")
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine, dict[str, Any]]]:
    """Loaded once for all tests of a case, which pytest runs one after another."""
    folder = tmp_path_factory.mktemp(request.param)
    stored = build(request.param, folder)
    with Engine.load(folder, dtype="float32", kv=spec_of(request.param)) as engine:
        yield request.param, engine, stored


def spec_of(case: str, **more: Any) -> KVSpec:
    """Return the KV settings under which the engine computes as transformers did."""
    return KVSpec(window=64, on_full="stop", **more) if case in SHORT_FACTORS else KVSpec(**more)


def golden(case: str) -> tuple[list[int], Any]:
    with np.load(GOLDEN / case / "golden.npz") as stored:
        return stored["tokens"].tolist(), stored["logprobs"]


def test_the_families_that_must_work_are_here() -> None:
    assert set(CASES) >= REQUIRED | BEYOND_THEIR_WINDOW
    assert {"llama", "qwen3", "gemma3"} <= set(CHATS)


@pytest.mark.parametrize("loaded", CASES, indirect=True, ids=str)
def test_logprobs_equal_transformers_whole_and_in_chunks(loaded: tuple[str, Engine, dict[str, Any]]) -> None:
    case, engine, _ = loaded
    tokens, expected = golden(case)
    differences = {
        chunk: float(np.abs(np.array(engine.logprobs(tokens, chunk=chunk)) - expected).max())
        for chunk in (BEYOND_CHUNKS if is_windowed(case) else CHUNKS)
    }
    print(f"{case}: largest differences by chunk {differences}")
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()) / 16)
    assert max(differences.values()) < tolerance, f"{case}: largest difference by chunk size: {differences}"


@pytest.mark.parametrize("case", CASES)
def test_a_window_that_holds_all_changes_nothing_and_eight_bits_little(case: str, tmp_path: Path) -> None:
    build(case, tmp_path)
    tokens, expected = golden(case)
    model = module_of(tmp_path, spec_of(case))
    on_full = spec_of(case).on_full
    if (off := off_with(*model, tokens, expected, KVSpec(window=64 if on_full else 128, on_full=on_full))) is not None:
        assert off.max() < TOLERANCE
    if (off := off_with(*model, tokens, expected, spec_of(case, key_bits=8, value_bits=8))) is not None:
        assert off.mean() < PACKED_BOUND


def off_with(module: Any, config: dict[str, Any], tokens: list[int], expected: Any, kv: KVSpec) -> Any:
    """Return how far log-probabilities are off with these KV settings; None where the model's caches can't be so, which is said."""
    try:
        caches = plan_caches(module, config, kv).make()
    except OptionError:
        return None
    pieces = [log_probabilities(module, caches, tokens[at : at + 7]) for at in range(0, len(tokens), 7)]
    return np.abs(np.concatenate([np.array(piece) for piece in pieces]) - expected)


@pytest.mark.parametrize("loaded", CASES, indirect=True, ids=str)
def test_a_prompt_that_goes_on_from_another_is_answered_as_if_it_were_new(
    loaded: tuple[str, Engine, dict[str, Any]], tmp_path: Path
) -> None:
    case, engine, _ = loaded
    tokens, _ = golden(case)
    begun = [ids_of(engine, tokens[:-6]), ids_of(engine, tokens[:-4])]
    warm = ids_of(engine, tokens)
    build(case, tmp_path)
    with Engine.load(tmp_path, dtype="float32", kv=spec_of(case), prompt_cache=None) as alone:
        cold = ids_of(alone, tokens)
    assert begun
    assert warm == cold


def ids_of(engine: Engine, tokens: list[int]) -> str:
    """Return a greedy reply of a few tokens."""
    *_, end = engine.generate(tokens, Sampling(temperature=0.0, max_tokens=4))
    assert isinstance(end, Finished)
    return end.text


@pytest.mark.parametrize("case", CHANGED)
def test_every_value_that_moves_transformers_moves_us_as_far_or_is_refused(case: str, tmp_path: Path) -> None:
    build(case, tmp_path)
    tokens, _ = golden(case)
    config = json.loads((tmp_path / "config.json").read_text())
    rows = changed_rows(len(tokens))
    wrong, seen = {}, 0
    for change in json.loads((GOLDEN / case / "changed.json").read_text()):
        (tmp_path / "config.json").write_text(json.dumps(replaced(config, change["path"], change["value"])))
        try:
            found = answer(tmp_path, tokens, case)[rows][:, CHANGED_TOKENS]
        except ModelError:
            seen += 1
            continue
        off = float(np.abs(found.ravel() - np.array(change["logprobs"])).max())
        seen += off < CHANGED_TOLERANCE
        if not off < CHANGED_TOLERANCE and (case, *change["path"]) not in TRANSFORMERS_ALONE:
            wrong[".".join(change["path"])] = (change["value"], off)
    assert not wrong, f"{case}: keys that transformers honours otherwise: {wrong}"
    assert seen


TRANSFORMERS_ALONE = {
    # Experts of a group that is not chosen score 0 in mlx-lm and −∞ in transformers: the same unless biases make others negative.
    *(
        (case, "n_group")
        for case in ("nemotron_h", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "dots1")
    ),
    *(
        (case, "n_group")
        for case in ("solar_open", "glm4_moe", "glm4_moe_lite", "exaone_moe", "mimo_v2_flash", "glm_moe_dsa_shared")
    ),
    # Nvidia's own code bounds time steps by time_step_limit, as mlx-lm does; transformers by this key.
    ("nemotron_h", "time_step_min"),
    # For queries and keys mlx-lm has 1e-6 built in; with the 1e-5 of Llama 4's files that is no difference that shows.
    ("llama4", "text_config", "rms_norm_eps"),
    # Its maker's files have sliding_window beside it, always the same number.
    ("mimo_v2_flash", "sliding_window_size"),
}
"""Changes that transformers answers otherwise, and why that is not mended."""


def answer(folder: Path, tokens: list[int], case: str) -> Any:
    """Return the log-probabilities of a folder's model through the engine's caches, without the rest of the engine."""
    module, config = module_of(folder, spec_of(case))
    caches = plan_caches(module, config, KVSpec()).make()
    return np.array(log_probabilities(module, caches, tokens))


def module_of(folder: Path, kv: KVSpec) -> tuple[Any, dict[str, Any]]:
    module, config = build_model(folder, read_config(folder))
    if keeps_short(config, kv):
        use_short_factors(module)
    return module, config


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


@pytest.mark.parametrize("case", CHATS)
def test_a_cold_last_turn_equals_the_warm_one(case: str, tmp_path: Path) -> None:
    stored = build(case, tmp_path)
    last = stored["turns"][-1]
    messages = [Message("system", stored["system"])]
    for turn in stored["turns"]:
        messages.append(Message("user", turn["user"]))
        if turn is not last:
            messages.append(Message("assistant", turn["text"]))
    with Engine.load(tmp_path, dtype="float32", kv=spec_of(case)) as engine:
        assert finished(engine, messages, len(last["reply"])).text == last["text"]


def finished(engine: Engine, messages: list[Message], tokens: int) -> Finished:
    *_, end = engine.generate(messages, Sampling(temperature=0.0, max_tokens=tokens))
    assert isinstance(end, Finished)
    return end


def test_a_model_that_sees_too_is_text_only_in_the_list_and_in_its_notes(tmp_path: Path) -> None:
    for case, expected in (("qwen3_vl", True), ("qwen3", False)):
        folder = tmp_path / case
        folder.mkdir()
        build(case, folder)
        assert prospect(str(folder), WhatIfCase(context=64, prompt=64), here()).text_only is expected
        with Engine.load(folder, prompt_cache=None) as engine:
            assert any("text only" in note for note in engine.spec.notes) is expected


# Models with a table of learned positions: nothing asked of them reaches beyond its last row.

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
    with pytest.raises(OptionError, match=r"learned .* positions one by one, so no token can go past them"):
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
