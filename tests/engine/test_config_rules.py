"""Keys of a config that matter: read by mlx-lm's class, neutral, corrected, or an error that names them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tokamac.engine.errors import ModelUnsupportedError
from tokamac.engine.loading import keeps_short
from tokamac.engine.model.config import context_length, model_classes, normalise, pretraining_length
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.options import KVSpec

GOLDEN = Path(__file__).parents[1] / "golden"


def saved(case: str, **changes: Any) -> dict[str, Any]:
    """Return a config as transformers 5 saved it, with changes."""
    return {**copy.deepcopy(json.loads((GOLDEN / case / "config.json").read_text())), **changes}


def check(config: dict[str, Any]) -> None:
    done = normalise(config)
    check_config(done, model_classes(done)[1])


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 30.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "query_pre_attn_scalar", 99),
        ("llama", "logits_scaling", 2.0),
        ("llama", "embedding_multiplier", 12.0),
        ("llama", "residual_multiplier", 0.2),
        ("llama", "attention_multiplier", 0.5),
        ("llama", "logit_scale", 0.25),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "hidden_act", "gelu"),
        ("llama", "hidden_act", "never_heard_of"),
        ("llama", "use_qk_norm", True),
        ("llama", "alibi", True),
        ("qwen2", "head_dim", 32),
        ("granite", "head_dim", 32),
        ("olmoe", "clip_qkv", 8.0),
        ("qwen2_moe", "norm_topk_prob", True),
        ("qwen2_moe", "mlp_only_layers", [0]),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("cohere2", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3_next", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("stablelm", "tie_word_embeddings", True),
        ("cohere", "tie_word_embeddings", False),
        ("helium", "tie_word_embeddings", True),
        ("olmo2", "sliding_window", 64),
        ("glm4", "num_experts_per_tok", 2),
        ("llama", "layer_norm_epsilon", 1e-6),
        ("gemma4_moe", "use_bidirectional_attention", "all"),
        ("falcon_h1", "attention_in_multiplier", 1.5),
        ("glm_moe_dsa", "indexer_types", ["shared", "full", "shared"]),
    ],
)
def test_a_key_that_matters_and_nothing_reads_is_an_error(case: str, key: str, value: Any) -> None:
    with pytest.raises(ModelUnsupportedError, match=key) as caught:
        check(saved(case, **{key: value}))
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
    check(saved(case, **changes))


@pytest.mark.parametrize(("case", "kind"), [("phi3", "yarn"), ("llama", "martian"), ("nemotron", "yarn")])
def test_a_kind_of_rotary_scaling_the_class_lacks_is_an_error(case: str, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ModelUnsupportedError, match=f"rope_type to '{kind}'"):
        check(saved(case, rope_parameters=rope))


def test_sliding_layers_with_a_scaling_of_their_own_are_an_error() -> None:
    config = saved("gemma3")
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5_000.0}
    with pytest.raises(ModelUnsupportedError, match="sliding_attention"):
        check(config)
    config = saved("olmo3")
    config["rope_parameters"]["sliding_attention"]["rope_theta"] = 7_000.0
    with pytest.raises(ModelUnsupportedError, match="rope_local_base_freq"):
        check(config)


def test_a_key_the_class_requires_is_named() -> None:
    config = saved("llama")
    del config["rms_norm_eps"]
    with pytest.raises(ModelUnsupportedError, match="rms_norm_eps"):
        check(config)


def test_heads_given_layer_by_layer_are_read_where_all_full_layers_agree() -> None:
    config = saved("gemma4_window")
    check(config)
    config["per_layer_config"] = {"1": {"head_dim": 64}, "3": {"head_dim": 96}}
    with pytest.raises(ModelUnsupportedError, match="per_layer_config"):
        check(config)


def test_a_wrapper_takes_its_language_model_flat_or_nested() -> None:
    language = saved("qwen2", model_type="qwen2_5_vl")
    check(language)
    check({"model_type": "qwen2_5_vl", "text_config": language})
    with pytest.raises(ModelUnsupportedError, match="text_config"):
        check({"model_type": "gemma3"})


def test_foreign_packing_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupportedError, match="bitsandbytes"):
        check(saved("llama", quantization_config={"quant_method": "bitsandbytes"}))


def test_jambas_offset_is_taken_where_adding_and_subtracting_it_agree() -> None:
    check(saved("jamba", expert_layer_period=4, expert_layer_offset=2))
    with pytest.raises(ModelUnsupportedError, match="expert_layer_offset"):
        check(saved("jamba", expert_layer_period=3, expert_layer_offset=1))


def test_classes_known_to_differ_are_refused() -> None:
    with pytest.raises(ModelUnsupportedError, match="wrongly"):
        check(saved("llama", model_type="phi3small"))


# Corrections (that they compute the right thing is shown by the golden cases)


def test_a_longrope_model_is_served_up_to_its_whole_context() -> None:
    config = normalise(saved("phi3"))
    assert (context_length(config), pretraining_length(config)) == (256, 64)
    assert pretraining_length(normalise(saved("llama"))) is None


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
    assert keeps_short(normalise(saved("phi3")), kv) is short
    assert not keeps_short(normalise(saved("llama")), kv)


def test_one_set_of_longrope_factors_serves_all_positions() -> None:
    import mlx.core as mx

    from tokamac.engine.model.corrected_layers import longrope

    rope = longrope(16, False, normalise(saved("phi3")))
    x = mx.ones((1, 1, 65, 16))
    long = rope(x)
    assert mx.allclose(rope(x[..., :1, :], offset=64), long[..., 64:, :], atol=1e-5)
    rope.choose(long=False)
    assert not mx.allclose(rope(x), long)


def test_attn_factor_multiplies_yarns_own() -> None:
    from tokamac.engine.model.corrected_layers import yarn

    config = normalise(saved("qwen2_yarn"))
    usual = yarn(16, False, config).attention
    config["rope_scaling"]["attn_factor"] = 0.8782488562869419
    assert yarn(16, False, config).attention == pytest.approx(usual * 0.8782488562869419)
    assert usual * 0.8782488562869419 == pytest.approx(1.0)  # DeepSeek's number undoes the factor of 4


def test_what_a_class_has_built_in_can_not_be_switched_off() -> None:
    check(saved("gpt_oss", swiglu_limit=7.0))
    with pytest.raises(ModelUnsupportedError, match="swiglu_limit"):
        check(saved("gpt_oss", swiglu_limit=0.0))


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
    check(saved("minimax_m2"))
    with pytest.raises(ModelUnsupportedError, match="MiniMax 01"):
        check({**saved("minimax_m2"), "model_type": "minimax"})
