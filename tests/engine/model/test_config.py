"""config.json: read, normalised, and refused where mlx-lm would compute something else than it says."""

import copy
import dataclasses
import io
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

from tests.engine.helpers import write_model
from tests.tiny import make_tiny
from tokamac.app.cli import main
from tokamac.engine import Engine, Sampling
from tokamac.engine.architectures import own_architectures
from tokamac.engine.errors import ModelDamagedError, ModelError, ModelUnsupportedError
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.loading import keeps_short
from tokamac.engine.model.config import (
    ABSENT,
    LAYERS,
    check_values,
    context_length,
    model_classes,
    normalise,
    pretraining_length,
    read_config,
)
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.loader import skeleton_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.footprint import weigh
from tokamac.engine.perf.inspection import inspect_model

GOLDEN = Path(__file__).parents[2] / "golden"
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
        (None, "is missing"), (b"", "is not valid JSON"), (b'{"model_type": "lla', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"), (b"[1, 2]", "holds no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": "llama", "rope_parameters": {"rope_type": "linear"}}', "values that can't be right"),
        (b'{"rope_scaling": 3}', "values that can't be right"),
    ],
)  # fmt: skip
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


# Keys whose wrong value does not pass unseen: weights of other shapes do not fit. The lists follow from other keys.
SIZES = re.compile(
    "vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|num_key_value_heads|head_dim|layer_types"
    "|max_position_embeddings|n_routed_experts|n_shared_experts|num_shared_experts|num_experts$|num_local_experts|model_type"
    "|text_config|vision_config|mamba_(d|n|chunk|conv|proj)|rope_parameters|block|idxs|per_layer|no_rope_layers|_rank|projector|out_"
)
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


# How many tokens a model was made for, however its config says it.

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 8192}, "vision_config": {"max_position_embeddings": 64}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": LONGROPE}, 131072),
        ({"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"model_type": "llama", "max_position_embeddings": 8192, "model_max_length": 131072}, 8192),
        ({"model_type": "kimi_linear", "model_max_length": 1048576}, 1048576),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_the_context_is_found_in_every_place_configs_have_for_it(config: dict[str, Any], tokens: int | None) -> None:
    assert context_length(config) == tokens


# Configs with numbers that no model has: refused where they are read, with a sentence, before anything is built of
# them.

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


def test_integers_are_refused_by_the_engine_and_by_conversion(
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
    from tests.engine.helpers import write_model

    folder = write_model(tmp_path / "model", bits=4)
    shard, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = shard.read_bytes()
    at = whole.index(b'"U32"', whole.index(name.encode()))
    shard.write_bytes(whole[:at] + b'"F32"' + whole[at + 5 :])
    with pytest.raises(ModelDamagedError, match=f"{name} holds float32 where the model has packed weights"):
        Engine.load(folder)


# Configs of published models, as they are but with fewer layers: each makes a model, or is refused for a reason
# that is listed.

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())

REFUSED = {
    # model: what the refusal names. Nothing else may be refused.
    "stepfun-ai/Step-3.7-Flash-FP8": "no 'text_config'",  # flat, without rotary bases and the heads of sliding layers
    "google/embeddinggemma-300m": "use_bidirectional_attention",  # it makes vectors of texts, and sees all of a text at once
}


def accept(config: dict[str, Any]) -> str:
    """Return what the loader's rule says against a config; "" where it says nothing."""
    done = normalise(config)
    try:
        check_config(done, model_classes(done)[1])
    except ModelError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(REFUSED)))
def test_a_published_model_can_be_built_and_run(name: str) -> None:
    config = normalise(CONFIGS[name])
    # The plan runs the model's forward pass, lazily: shapes fit from the embedding to the head.
    plan = plan_caches(skeleton_model(config, 2), config, KVSpec())
    assert plan.layers


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=REFUSED[name]):
        skeleton_model(normalise(CONFIGS[name]), 2)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_inspect_and_the_loader_say_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    said = accept(CONFIGS[name])
    weighed = weigh(read_config(tmp_path), "metal")
    if said:
        assert weighed == said
        with pytest.raises(ModelUnsupportedError, match="can't be weighed"):
            inspect_model(tmp_path)
    elif isinstance(weighed, str):
        assert "only the files can tell" in weighed  # how much of it was packed
    else:
        assert weighed.stored.parameters > 0


# Keys of a config that matter: read by mlx-lm's class, neutral, corrected, or an error that names them.


def saved_config_rules(case: str, **changes: Any) -> dict[str, Any]:
    """Return a config as transformers 5 saved it, with changes."""
    return {**copy.deepcopy(json.loads((GOLDEN / case / "config.json").read_text())), **changes}


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 30.0), ("llama", "final_logit_softcapping", 30.0),
        ("llama", "query_pre_attn_scalar", 99), ("llama", "logits_scaling", 2.0),
        ("llama", "embedding_multiplier", 12.0), ("llama", "residual_multiplier", 0.2),
        ("llama", "attention_multiplier", 0.5), ("llama", "logit_scale", 0.25), ("llama", "partial_rotary_factor", 0.5),
        ("llama", "hidden_act", "gelu"), ("llama", "hidden_act", "never_heard_of"), ("llama", "use_qk_norm", True),
        ("llama", "alibi", True), ("qwen2", "head_dim", 32), ("granite", "head_dim", 32), ("olmoe", "clip_qkv", 8.0),
        ("qwen2_moe", "norm_topk_prob", True), ("qwen2_moe", "mlp_only_layers", [0]),
        ("gemma3", "final_logit_softcapping", 30.0), ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("cohere2", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3_next", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("stablelm", "tie_word_embeddings", True), ("cohere", "tie_word_embeddings", False),
        ("helium", "tie_word_embeddings", True), ("olmo2", "sliding_window", 64), ("glm4", "num_experts_per_tok", 2),
        ("llama", "layer_norm_epsilon", 1e-6), ("gemma4_moe", "use_bidirectional_attention", "all"),
        ("falcon_h1", "attention_in_multiplier", 1.5), ("glm_moe_dsa", "indexer_types", ["shared", "full", "shared"]),
    ],
)  # fmt: skip
def test_a_key_that_matters_and_nothing_reads_is_an_error(case: str, key: str, value: Any) -> None:
    with pytest.raises(ModelUnsupportedError, match=key) as caught:
        check(saved_config_rules(case, **{key: value}))
    assert repr(value)[:30] in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"attn_logit_softcapping": None, "final_logit_softcapping": 0.0}),
        ("llama", {"logits_scaling": 1.0, "residual_multiplier": 1, "partial_rotary_factor": 1.0}),
        ("llama", {"query_pre_attn_scalar": 32, "attention_multiplier": 32**-0.5}),
        ("llama", {"hidden_act": "swish", "attention_dropout": 0.1, "pretraining_tp": 2}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False, "head_dim": 16}),
        ("olmo2", {"sliding_window": 256}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"sliding_window": 8}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
        ("gemma4_moe", {"use_bidirectional_attention": "vision"}),
        ("qwen3_moe", {"use_qk_norm": True}),  # the class always has these norms
        ("qwen3_moe", {"rope_parameters": None, "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]}}),
        ("nemotron_h", {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),  # its attention does not rotate
        ("exaone_moe", {"first_k_dense_replace": 1}),
        ("recurrent_gemma", {"num_key_value_heads": 1}),
    ],
)
def test_a_value_that_changes_nothing_is_no_error(case: str, changes: dict[str, Any]) -> None:
    check(saved_config_rules(case, **changes))


@pytest.mark.parametrize(("case", "kind"), [("phi3", "yarn"), ("llama", "martian"), ("nemotron", "yarn")])
def test_a_kind_of_rotary_scaling_the_class_lacks_is_an_error(case: str, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ModelUnsupportedError, match=f"rope_type to '{kind}'"):
        check(saved_config_rules(case, rope_parameters=rope))


def test_sliding_layers_with_a_scaling_of_their_own_are_an_error() -> None:
    config = saved_config_rules("gemma3")
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5_000.0}
    with pytest.raises(ModelUnsupportedError, match="sliding_attention"):
        check(config)
    config = saved_config_rules("olmo3")
    config["rope_parameters"]["sliding_attention"]["rope_theta"] = 7_000.0
    with pytest.raises(ModelUnsupportedError, match="rope_local_base_freq"):
        check(config)


def test_a_key_the_class_requires_is_named() -> None:
    config = saved_config_rules("llama")
    del config["rms_norm_eps"]
    with pytest.raises(ModelUnsupportedError, match="rms_norm_eps"):
        check(config)


def test_heads_given_layer_by_layer_are_read_where_all_full_layers_agree() -> None:
    config = saved_config_rules("gemma4_window")
    check(config)
    config["per_layer_config"] = {"1": {"head_dim": 64}, "3": {"head_dim": 96}}
    with pytest.raises(ModelUnsupportedError, match="per_layer_config"):
        check(config)


def test_a_wrapper_takes_its_language_model_flat_or_nested() -> None:
    language = saved_config_rules("qwen2", model_type="qwen2_5_vl")
    check(language)
    check({"model_type": "qwen2_5_vl", "text_config": language})
    with pytest.raises(ModelUnsupportedError, match="text_config"):
        check({"model_type": "gemma3"})


def test_foreign_packing_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupportedError, match="bitsandbytes"):
        check(saved_config_rules("llama", quantization_config={"quant_method": "bitsandbytes"}))


def test_jambas_offset_is_taken_where_adding_and_subtracting_it_agree() -> None:
    check(saved_config_rules("jamba", expert_layer_period=4, expert_layer_offset=2))
    with pytest.raises(ModelUnsupportedError, match="expert_layer_offset"):
        check(saved_config_rules("jamba", expert_layer_period=3, expert_layer_offset=1))


def test_classes_known_to_differ_are_refused() -> None:
    with pytest.raises(ModelUnsupportedError, match="wrongly"):
        check(saved_config_rules("llama", model_type="phi3small"))


# Corrections (that they compute the right thing is shown by the golden cases)


def test_a_longrope_model_is_served_up_to_its_whole_context() -> None:
    config = normalise(saved_config_rules("phi3"))
    assert (context_length(config), pretraining_length(config)) == (256, 64)
    assert pretraining_length(normalise(saved_config_rules("llama"))) is None


@pytest.mark.parametrize(
    ("kv", "short"),
    [
        (KVSpec(), False),
        (KVSpec(window=64), False),  # what is held is bounded, positions are not
        (KVSpec(on_full="roll"), False),
        (KVSpec(window=65, on_full="stop"), False),
        (KVSpec(window=64, on_full="stop"), True),
        (KVSpec(window=32, on_full="truncate-middle"), True),
    ],
)
def test_short_factors_are_for_a_context_that_never_leaves_pretrainings(kv: KVSpec, short: bool) -> None:
    assert keeps_short(normalise(saved_config_rules("phi3")), kv) is short
    assert not keeps_short(normalise(saved_config_rules("llama")), kv)


def test_one_set_of_longrope_factors_serves_all_positions() -> None:
    import mlx.core as mx

    from tokamac.engine.model.corrected_layers import longrope

    rope = longrope(16, False, normalise(saved_config_rules("phi3")))
    x = mx.ones((1, 1, 65, 16))
    long = rope(x)
    assert mx.allclose(rope(x[..., :1, :], offset=64), long[..., 64:, :], atol=1e-5)
    rope.choose(long=False)
    assert not mx.allclose(rope(x), long)


def test_attn_factor_multiplies_yarns_own() -> None:
    from tokamac.engine.model.corrected_layers import yarn

    config = normalise(saved_config_rules("qwen2_yarn"))
    usual = yarn(16, False, config).attention
    config["rope_scaling"]["attn_factor"] = 0.8782488562869419
    assert yarn(16, False, config).attention == pytest.approx(usual * 0.8782488562869419)
    assert usual * 0.8782488562869419 == pytest.approx(1.0)  # DeepSeek's number undoes the factor of 4


def test_what_a_class_has_built_in_can_not_be_switched_off() -> None:
    check(saved_config_rules("gpt_oss", swiglu_limit=7.0))
    with pytest.raises(ModelUnsupportedError, match="swiglu_limit"):
        check(saved_config_rules("gpt_oss", swiglu_limit=0.0))


DBRX: dict[str, Any] = {
    "model_type": "dbrx",
    **{"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500_000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": 1},
}


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("ffn_config", "moe_normalize_expert_weights", 2.0),
        ("ffn_config", "moe_normalize_expert_weights", None),
        ("ffn_config", "ffn_act_fn", {"name": "gelu"}),
        ("attn_config", "clip_qkv", None),
        ("attn_config", "rope_theta", None),
    ],
)
def test_what_dbrxs_class_has_built_in_is_refused_within_its_parts(part: str, key: str, value: Any) -> None:
    check(DBRX)
    with pytest.raises(ModelUnsupportedError, match=key):
        check({**DBRX, part: {**DBRX[part], key: value}})


def test_minimax_01_is_not_taken_for_m2() -> None:
    check(saved_config_rules("minimax_m2"))
    with pytest.raises(ModelUnsupportedError, match="MiniMax 01"):
        check({**saved_config_rules("minimax_m2"), "model_type": "minimax"})


# A model that the rule for configs doubts: refused, or loaded at one's own risk, which every reply says.


@pytest.fixture
def doubtful(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", logits_scaling=2.0, embedding_multiplier=3.0)


def test_what_the_rule_doubts_is_refused_with_a_way_on(doubtful: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="embedding_multiplier") as caught:
        Engine.load(doubtful, prompt_cache=None)
    assert "--unchecked" in caught.value.hint


def test_loaded_unchecked_it_names_every_doubt_with_every_reply(doubtful: Path) -> None:
    with Engine.load(doubtful, prompt_cache=None, unchecked=True) as engine:
        assert [
            key in doubt
            for doubt, key in zip(engine.spec.doubts, ("embedding_multiplier", "logits_scaling"), strict=True)
        ]
        for _ in range(2):
            *_, end = engine.generate([5, 6, 7], Sampling(temperature=0.0, max_tokens=2))
            assert end.doubts == engine.spec.doubts


def test_a_model_without_doubts_says_nothing_of_them(tmp_path: Path) -> None:
    with Engine.load(write_model(tmp_path / "model"), prompt_cache=None, unchecked=True) as engine:
        assert engine.spec.doubts == ()


@pytest.mark.parametrize(
    "changes", [{"quantization_config": {"quant_method": "bitsandbytes"}}, {"model_type": "nothing"}]
)
def test_what_makes_no_model_is_refused_unchecked_too(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ModelUnsupportedError):
        Engine.load(folder, prompt_cache=None, unchecked=True)
