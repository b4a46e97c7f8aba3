"""config.json: read, normalised, and refused where mlx-lm would compute something else than it says."""

import copy
import dataclasses
import json
import math
import pkgutil
import re
from pathlib import Path
from typing import Any

import mlx_lm.models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tokamac.engine.architectures import own_architectures
from tokamac.engine.errors import ModelDamagedError, ModelUnsupportedError
from tokamac.engine.model.config import ABSENT, model_classes, normalise, read_config
from tokamac.engine.model.config_rules import check_config

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = {path.parent.name: json.loads(path.read_text()) for path in GOLDEN.glob("*/config.json")}


def saved(case: str, **changes: Any) -> dict[str, Any]:
    """Return a config as transformers 5 saved it, with changes."""
    return {**copy.deepcopy(SAVED[case]), **changes}


def check(config: dict[str, Any]) -> None:
    done = normalise(config)
    check_config(done, model_classes(done)[1])


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers 4 wrote it."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(config["rope_parameters"])
    old["torch_dtype"] = config["dtype"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "gpt_neox":
        old["rotary_emb_base"], old["rotary_pct"] = old.pop("rope_theta"), old.pop("partial_rotary_factor")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return old


# Reading


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "is missing"),
        (b"", "is not valid JSON"),
        (b'{"model_type": "lla', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "holds no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": "llama", "rope_parameters": {"rope_type": "linear"}}', "values that can't be right"),
        (b'{"rope_scaling": 3}', "values that can't be right"),
    ],
)
def test_a_file_that_is_no_config_is_named_with_a_remedy(tmp_path: Path, content: bytes | None, named: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelDamagedError, match=named) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "ownload" in caught.value.hint


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelDamagedError, match="is missing"):
        read_config(tmp_path / "model")


def test_tagged_floats_become_floats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [{"__float__": "Infinity"}, 1]}')
    assert read_config(tmp_path)["time_step_limit"] == [math.inf, 1]
    assert math.isnan(normalise({"x": {"__float__": "NaN"}})["x"])


def test_nothing_but_config_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert read_config(tmp_path)["eos_token_id"] == 1


# Normalising


@pytest.mark.parametrize("case", sorted(SAVED))
def test_normalising_twice_changes_nothing_and_spares_its_input(case: str) -> None:
    config = saved(case)
    once = normalise(config)
    assert config == SAVED[case]
    assert normalise(once) == once


@pytest.mark.parametrize(
    "case",
    sorted(
        case for case in SAVED if "rope_parameters" in SAVED[case] and "compress" not in SAVED[case]["rope_parameters"]
    ),
)
def test_the_form_of_transformers_4_comes_out_equal_in_what_is_read(case: str) -> None:
    new, old = normalise(saved(case)), normalise(older(saved(case)))
    given = SAVED[case]["rope_parameters"]
    for key in {"rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct"} & set(
        new
    ):
        assert old[key] == new[key], key
    if "full_attention" not in given:
        assert meaning(old["rope_scaling"]) == meaning(new["rope_scaling"])
    assert old["torch_dtype"] == new["torch_dtype"] == old["dtype"] == new["dtype"]


def meaning(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    return scaling and {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}


scalars = st.none() | st.booleans() | st.integers(1, 1000) | st.floats(0.1, 1e6)
ropes = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]),
        "factor": st.floats(1, 64),
    },
    optional={
        "rope_theta": st.none() | st.floats(1, 1e7),
        "partial_rotary_factor": st.none() | st.floats(0.1, 1),
        "original_max_position_embeddings": st.none() | st.integers(1, 4096),
        "attention_factor": st.none() | st.floats(0.1, 2),
        "mrope_section": st.just([1, 2, 3]),
    },
)
layered = st.fixed_dictionaries({"full_attention": ropes}, optional={"sliding_attention": st.none() | ropes})
flat = st.fixed_dictionaries(
    {"model_type": st.sampled_from(sorted({config["model_type"] for config in SAVED.values()} | {"exaone4", "gpt2"}))},
    optional={
        "rope_parameters": st.none() | ropes | layered | st.just({}),
        "rope_scaling": st.none() | ropes,
        "rope_theta": scalars,
        "partial_rotary_factor": scalars,
        "rotary_pct": scalars,
        "head_dim": st.none() | st.integers(1, 64),
        "hidden_size": st.none() | st.integers(1, 512),
        "num_attention_heads": st.none() | st.integers(0, 16),
        "num_key_value_heads": st.none() | st.integers(1, 16),
        "num_local_experts": st.integers(1, 8),
        "max_position_embeddings": st.integers(1, 10_000),
        "original_max_position_embeddings": st.none() | st.integers(1, 10_000),
        "sliding_window": st.none() | st.integers(1, 512),
        "sliding_window_pattern": st.none() | st.integers(1, 6) | st.just("LLLG"),
        "layer_types": st.none()
        | st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention", "conv"]), max_size=9),
        "dtype": st.sampled_from([None, "bfloat16"]),
        "torch_dtype": st.sampled_from([None, "float32"]),
        "vocab_size": st.integers(1, 9),
        "limit": st.just({"__float__": "Infinity"}),
        "model_file": st.just("evil.py"),
    },
)
configs = flat | st.builds(lambda outer, inner: {**outer, "text_config": inner}, flat, flat)


@settings(max_examples=300, deadline=None)
@given(configs)
def test_normalising_is_idempotent_for_any_config(config: dict[str, Any]) -> None:
    once = normalise(config)
    assert normalise(once) == once
    assert set(once) >= set(config), "mlx-lm merges the result over the file, so keys must be overwritten, not removed"


def test_qwen2s_rotary_base_no_longer_falls_back_to_a_default() -> None:
    from mlx_lm.models.qwen2 import ModelArgs

    assert ModelArgs.from_dict(saved("qwen2")).rope_theta == 1_000_000, "mlx-lm reads the base itself now"
    assert ModelArgs.from_dict(normalise(saved("qwen2"))).rope_theta == 50_000


def test_granite_is_no_longer_refused() -> None:
    from mlx_lm.models.granite import ModelArgs

    with pytest.raises(TypeError, match="rope_theta"):
        ModelArgs.from_dict(saved("granite"))
    assert ModelArgs.from_dict(normalise(saved("granite"))).rope_theta == 50_000


def test_rotary_settings_per_kind_of_layer_become_gemma3s_two_bases() -> None:
    config = normalise(saved("gemma3"))
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (200_000, 5_000)
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert config["sliding_window_pattern"] == 3


def test_a_nested_language_model_is_normalised_too() -> None:
    config = normalise({"model_type": "gemma3", "text_config": saved("gemma3")})
    assert config["text_config"] == normalise(saved("gemma3"))
    assert config["vocab_size"] == 128


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, "LLG"),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 3}, None),
    ],
)
def test_exaone4_gets_its_letters(changes: dict[str, Any], expected: str | None) -> None:
    assert normalise(saved("exaone4", **changes))["sliding_window_pattern"] == expected


def test_null_heads_follow_from_the_others() -> None:
    config = normalise(saved("mixtral", head_dim=None, num_key_value_heads=None))
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 4)


def test_an_absent_key_means_what_transformers_takes_it_for() -> None:
    bare = {"model_type": "qwen2", "hidden_size": 64}
    assert normalise(bare)["rope_theta"] == 10_000
    assert normalise(bare)["tie_word_embeddings"] is False


# Classes


def test_every_golden_config_has_classes_and_passes() -> None:
    for case in SAVED:
        check(saved(case))


@pytest.mark.parametrize("kind", [None, "", 3])
def test_a_config_without_a_model_type_is_damaged(kind: Any) -> None:
    with pytest.raises(ModelDamagedError, match="no model_type"):
        model_classes({"model_type": kind})


@pytest.mark.parametrize("kind", ["bert", "vit", "no_such_thing", "base", "cache", "../llama", "a.b", "llama\n", "os"])
def test_an_architecture_mlx_lm_lacks_is_refused(kind: str) -> None:
    with pytest.raises(ModelUnsupportedError, match="no language model of the kind") as caught:
        model_classes({"model_type": kind})
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaForTokenClassification"]},
        {"architectures": "BertForMaskedLM"},
        {"is_encoder_decoder": True},
    ],
)
def test_models_that_do_not_write_text_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupportedError):
        model_classes(saved("llama", **changes))


def test_code_from_the_model_folder_never_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    extra = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_file": "evil.py"}
    (tmp_path / "config.json").write_text(json.dumps(saved("llama", **extra)))
    config = read_config(tmp_path)
    check_config(config, model_classes(config)[1])  # a known architecture: mlx-lm's own class serves
    assert config["model_file"] is None
    with pytest.raises(ModelUnsupportedError) as caught:
        model_classes({**config, "model_type": "their_own"})
    assert "not run" in caught.value.hint


def test_olmo_1_is_taken_in_hugging_faces_form_alone() -> None:
    check(saved("olmo"))
    with pytest.raises(ModelUnsupportedError, match="Ai2") as caught:
        model_classes({"model_type": "olmo", "d_model": 64})
    assert "-hf" in caught.value.hint


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"sliding_window": 128, "sliding_window_size": 128}, (128, 129)),  # as published
        ({"sliding_window": 129, "sliding_window_size": 128}, (128, 129)),  # saved again by transformers
        ({"sliding_window": 129}, (128, 129)),
        ({"sliding_window_size": 128}, (128, 129)),
    ],
)
def test_mimos_window_counts_the_query_too(written: dict[str, int], expected: tuple[int, int]) -> None:
    config = normalise({"model_type": "mimo_v2_flash", **written})
    assert (config["sliding_window"], config["sliding_window_size"]) == expected
    assert normalise(config) == config


def test_the_outer_key_says_whether_a_nested_model_has_a_head_of_its_own() -> None:
    nested = {"model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    assert normalise(nested)["text_config"]["tie_word_embeddings"] is False
    assert normalise({**nested, "tie_word_embeddings": None})["text_config"]["tie_word_embeddings"] is True


SIZES = re.compile(
    "vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|num_key_value_heads|head_dim|layer_types"
    "|max_position_embeddings|n_routed_experts|n_shared_experts|num_shared_experts|num_experts$|num_local_experts|model_type"
    "|text_config|vision_config|mamba_(d|n|chunk|conv|proj)|rope_parameters|block|idxs|per_layer|no_rope_layers|_rank|projector|out_"
)
"""Keys whose wrong value does not pass unseen: weights of other shapes do not fit. The lists follow from other keys."""
DERIVED = {
    ("bailing_hybrid", "num_nextn_predict_layers"): "layers that predict further are never made",
    ("cohere2", "rope_theta"): "",
    ("deepseek_v2", "topk_method"): "mlx-lm's default is a spelling mistake that means the same",
    ("ernie4_5_moe", "moe_num_shared_experts"): "a size",
    ("ernie4_5_moe", "moe_layer_end_index"): "the last layer, in mlx-lm",
    ("exaone_moe", "rope_theta"): "",
    ("gemma4_text", "partial_rotary_factor"): "read per kind of layer",
    ("glm_moe_dsa", "rope_theta"): "read from rope_parameters, which the class requires",
    ("laguna", "partial_rotary_factor"): "read per kind of layer",
    ("mistral", "sliding_window"): "engine/model/config.py knows it",
    ("mistral4", "rope_interleave"): "mlx-lm always does",
}


def test_an_absent_key_means_to_us_what_it_means_to_transformers() -> None:
    found = {}
    for kind in {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)} | own_architectures():
        if kind in CONFIG_MAPPING and kind != "olmo":
            fields = dataclasses.fields(model_classes({"model_type": kind, "hidden_size": 8})[1])
            found |= {(kind, name): pair for name, pair in differing(kind, fields).items()}
    unexplained = {key: pair for key, pair in found.items() if key not in DERIVED and not SIZES.search(key[1])}
    assert unexplained == {}, "(mlx-lm's default, transformers')"


def differing(kind: str, fields: tuple[Any, ...]) -> dict[str, tuple[Any, Any]]:
    """Return the keys for which a class of mlx-lm, after our table, assumes another value than transformers does."""
    theirs = CONFIG_MAPPING[kind]().to_dict()
    rope = theirs.get("rope_parameters") or {}
    theirs |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    ours = ABSENT.get(kind, {})
    pairs = {}
    for field in fields:
        if theirs.get(field.name) is None or field.default is dataclasses.MISSING is field.default_factory:
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        value = ours.get(field.name, default)
        if value is not None and plain(value) != plain(theirs[field.name]):
            pairs[field.name] = (value, theirs[field.name])
    return pairs


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
