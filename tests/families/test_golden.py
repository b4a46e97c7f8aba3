"""Each published family, from one build: parity with Hugging Face transformers, predicted costs, streaming and conversion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model

from tests.engine.inside import runtime_of
from tests.engine.kv.models import work_of_config
from tests.families import GOLDEN, GOLDEN_CASES, KINDS, build, golden, walked
from tests.golden.families import CHANGED_TOKENS, WINDOW, changed_rows, is_windowed, replaced
from tests.quant.models import IDS, difference, pack, whole
from tokamac.engine import ContextError, Engine, Finished, KVSpec, Message, Sampling
from tokamac.engine.architectures import loads_in_mlx_lm
from tokamac.engine.cpu.layers import DenseEmbedding
from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.lab.scoring import log_probabilities
from tokamac.engine.loading import keeps_short
from tokamac.engine.model.config import model_classes, read_config
from tokamac.engine.model.config_rules import use_short_factors
from tokamac.engine.model.loader import build_model, position_rows
from tokamac.engine.perf.config_cost import UNKNOWN, cost_of_config, kv_bytes, kv_layers, work_of
from tokamac.engine.perf.cost import cost_of_folder, cost_of_model, leaf_modules
from tokamac.engine.perf.footprint import module_of
from tokamac.engine.perf.inspection import prospect
from tokamac.engine.perf.what_if import WhatIfCase, here
from tokamac.quant import convert
from tokamac.quant.source import open_source
from tokamac.quant.streaming import Streamed, streamable_folder, streamable_source

REQUIRED = {"llama", "qwen2", "qwen3", "gemma3", "granite", "mistral", "phi3", "mixtral"}
BEYOND_THEIR_WINDOW = {"mistral_window", "gemma2_window", "gemma3_window", "gemma4_window", "gpt_oss_window"}
# Of log-probabilities down to -16. Of smaller ones in proportion: float32 keeps digits, and each BLAS rounds in its own
# way.
TOLERANCE = 1e-4
# Of a config changed in one value, which may make float32 itself less exact; the reference moved by more than 1e-3.
CHANGED_TOLERANCE = 5e-4
# Prompts within the pretraining context of LongRoPE: transformers has short factors then, the engine only for such
# contexts.
SHORT_FACTORS = {"phi3", "phimoe"}
# Log-probabilities move by less than this in the mean with keys and values of 8 bits: models of noise are sensitive to
# it.
PACKED_BOUND = 2.0
CHUNKS = (None, 1, 5, 7)
BEYOND_CHUNKS = (None, 1, 7, WINDOW, 2 * WINDOW + 8)


def spec_of(case: str, **more: Any) -> KVSpec:
    """Return the KV settings under which the engine computes as transformers did."""
    return KVSpec(window=64, on_full="stop", **more) if case in SHORT_FACTORS else KVSpec(**more)


def test_the_families_that_must_work_are_here() -> None:
    assert set(GOLDEN_CASES) >= REQUIRED | BEYOND_THEIR_WINDOW | KINDS
    chats = {case for case in GOLDEN_CASES if "turns" in json.loads((GOLDEN / case / "case.json").read_text())}
    assert chats >= {"llama", "qwen3", "gemma3"}


@pytest.mark.parametrize("case", walked(GOLDEN_CASES, KINDS))
def test_a_published_family(case: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One build of the case's checkpoint: what the engine computes, what it predicts, and what a conversion makes of it."""
    folder = tmp_path / "model"
    stored = build(case, folder)
    with Engine.load(folder, dtype="float32", kv=spec_of(case)) as engine:
        with subtests.test("log-probabilities equal transformers', whole and in chunks"):
            check_log_probabilities(case, engine)
        if "turns" in stored:
            with subtests.test("three greedy turns equal transformers', the last one cold as well"):
                check_chat(case, engine, folder, stored)
        with subtests.test("a prompt that goes on from another is answered as if it were new"):
            check_warm(case, engine, folder)
    config = read_config(folder)
    module, _ = load_model(folder, lazy=True, model_config=config, get_model_classes=model_classes)
    for name, check in {
        "costs and work are those that the config alone says": check_costs,
        "leaves are those that MLX finds": check_leaves,
        "keys and values take what the config alone says": check_kv_bytes,
    }.items():
        with subtests.test(name):
            check(folder, module, config)
    with subtests.test("a window that holds all changes nothing, and 8 bits little"):
        check_layouts(case, folder)
    with subtests.test("streamed layer by layer it computes the same"):
        check_streamed(case, folder, tmp_path / "packed")
    if not case.startswith("granite"):  # mlx-lm's own rule for it asks for groups of 64, which these layers don't have
        with subtests.test("it converts as mlx-lm would"):
            check_converted(case, folder, tmp_path / "converted")
    if (GOLDEN / case / "changed.json").exists():  # last, since it writes other configs
        with subtests.test("a value of the config that moves transformers moves us as far, or is refused"):
            check_changed(case, folder)


def check_log_probabilities(case: str, engine: Engine) -> None:
    tokens, expected = golden(case)
    differences = {
        chunk: float(np.abs(np.array(engine.logprobs(tokens, chunk=chunk)) - expected).max())
        for chunk in (BEYOND_CHUNKS if is_windowed(case) else CHUNKS)
    }
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()) / 16)
    assert max(differences.values()) < tolerance, f"largest difference by chunk size: {differences}"


def check_chat(case: str, engine: Engine, folder: Path, stored: dict[str, Any]) -> None:
    messages = [Message("system", stored["system"])]
    for turn in stored["turns"]:
        messages.append(Message("user", turn["user"]))
        end = finished(engine, messages, len(turn["reply"]))
        assert end.text == turn["text"]
        assert end.metrics.prompt_tokens == len(turn["prompt"])
        messages.append(Message("assistant", end.text))
    assert end.metrics.cached_tokens > 0, "the last turn reused nothing of the ones before"
    with Engine.load(folder, dtype="float32", kv=spec_of(case), prompt_cache=None) as cold:
        assert finished(cold, messages[:-1], len(turn["reply"])).text == end.text


def check_warm(case: str, engine: Engine, folder: Path) -> None:
    tokens, _ = golden(case)
    for shorter in (tokens[:-6], tokens[:-4]):
        finished(engine, shorter, 4)
    warm = finished(engine, tokens, 4).text
    with Engine.load(folder, dtype="float32", kv=spec_of(case), prompt_cache=None) as alone:
        assert finished(alone, tokens, 4).text == warm


def finished(engine: Engine, prompt: list[int] | list[Message], tokens: int) -> Finished:
    *_, end = engine.generate(prompt, Sampling(temperature=0.0, max_tokens=tokens))
    assert isinstance(end, Finished)
    return end


def check_costs(folder: Path, module: Any, config: dict[str, Any]) -> None:
    cost = cost_of_model(module, config)
    assert cost_of_config(config) == cost == cost_of_folder(folder, config)
    assert work_of_config(config) == work_of(module, config, cost, plan_caches(module, config, KVSpec()))


def check_leaves(folder: Path, module: Any, config: dict[str, Any]) -> None:
    skeleton = module_of(config)
    theirs, ours = tree_flatten(skeleton.leaf_modules(), is_leaf=nn.Module.is_module), leaf_modules(skeleton)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert all(our is their for (_, our), (_, their) in zip(ours, theirs, strict=True))


def check_kv_bytes(folder: Path, module: Any, config: dict[str, Any]) -> None:
    layers = kv_layers(config)
    assert (layers is None) == (config["model_type"] in UNKNOWN)
    if layers is None:
        return
    caches = make_prompt_cache(module)
    mx.eval(module(mx.array([[1, 2, 3, 4]]), cache=caches))
    parts = [part for cache in caches for part in getattr(cache, "caches", (cache,))]
    growing = [part for part in parts if getattr(part, "keys", None) is not None]
    a_token = sum(array.nbytes // array.shape[2] for part in growing for array in (part.keys, part.values))
    assert kv_bytes(layers, KVSpec(), 4, value_bytes=4) == 4 * a_token


def check_layouts(case: str, folder: Path) -> None:
    tokens, expected = golden(case)
    model, on_full = loaded(folder, spec_of(case)), spec_of(case).on_full
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


def check_streamed(case: str, folder: Path, packed: Path) -> None:
    assert difference(Streamed(streamable_source(open_source(folder))).run(IDS), whole(folder)) < 1e-4
    if not case.startswith("granite"):
        pack(folder, packed)
        assert difference(Streamed(streamable_folder(packed)).run(IDS), whole(packed)) < 1e-4


OURS_ALONE = {
    # What mlx-lm alone does not load, and why.
    **dict.fromkeys(
        ("gpt2", "gpt_oss", "gpt_oss_window", "kimi_linear", "olmo_hybrid"), "its class does not take these names"
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_vl_moe"), "experts as transformers 5 saves them"),
    "kimi_k25": "it takes the projector of pictures for a part of the language model",
    "longcat_flash": "it has no place for weights of experts that pass their input through",
    "glm_moe_dsa_shared": "it makes an indexer in every layer",
}


def check_converted(case: str, folder: Path, out: Path) -> None:
    config, ids = read_config(folder), mx.array([[5, 4, 3, 2, 1, 7, 7, 9]])
    report = convert(folder, out, group_size=32, method="round")
    alone = case in OURS_ALONE or not loads_in_mlx_lm(config["model_type"])
    # With the engine's classes, and with mlx-lm's own: for those, the config that was written has to do.
    for more in ({"get_model_classes": model_classes},) if alone else ({"get_model_classes": model_classes}, {}):
        model, config_loaded = load_model(folder, lazy=True, model_config=config, **more)
        model, _ = quantize_model(model, config_loaded, 32, 4)
        back, _ = load_model(out, **more)
        assert difference(back(ids), model(ids)) == 0
    cost = cost_of_folder(out, read_config(out))
    assert cost.weight_bytes == report.weight_bytes
    assert cost.bits_per_weight == pytest.approx(report.bits_per_weight)


def check_changed(case: str, folder: Path) -> None:
    tokens, _ = golden(case)
    config = json.loads((folder / "config.json").read_text())
    rows = changed_rows(len(tokens))
    wrong, seen = {}, 0
    for change in json.loads((GOLDEN / case / "changed.json").read_text()):
        (folder / "config.json").write_text(json.dumps(replaced(config, change["path"], change["value"])))
        try:
            module, changed = loaded(folder, spec_of(case))
        except ModelError:
            seen += 1
            continue
        found = np.array(log_probabilities(module, plan_caches(module, changed, KVSpec()).make(), tokens))
        off = float(np.abs(found[rows][:, CHANGED_TOKENS].ravel() - np.array(change["logprobs"])).max())
        seen += off < CHANGED_TOLERANCE
        if not off < CHANGED_TOLERANCE and (case, *change["path"]) not in TRANSFORMERS_ALONE:
            wrong[".".join(change["path"])] = (change["value"], off)
    assert not wrong, f"keys that transformers honours otherwise: {wrong}"
    assert seen


# Changes that transformers answers otherwise, and why that is not mended.
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


def loaded(folder: Path, kv: KVSpec) -> tuple[Any, dict[str, Any]]:
    module, config = build_model(folder, read_config(folder))
    if keeps_short(config, kv):
        use_short_factors(module)
    return module, config


def test_a_model_that_sees_too_is_text_only_in_the_list_and_in_its_notes(tmp_path: Path) -> None:
    for case, expected in (("kimi_k25", True), ("qwen3", False)):
        folder = tmp_path / case
        build(case, folder)
        assert prospect(str(folder), WhatIfCase(context=64, prompt=64), here()).text_only is expected
        with Engine.load(folder, prompt_cache=None) as engine:
            assert any("text only" in note for note in engine.spec.notes) is expected


# Models with a table of learned positions: nothing asked of them reaches beyond its last row.

LONG = Sampling(temperature=0, max_tokens=500)


@pytest.fixture(params=["gpt2", "gpt_bigcode"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build(request.param, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # Also a key of rotary models that says more than the table has.
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
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
        model = runtime_of(engine).model
        assert any(isinstance(module, DenseEmbedding) for _, module in model.named_modules())
        assert position_rows(model) == rows
