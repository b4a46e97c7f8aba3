"""Which layer gets what, what it costs, and what is refused with which reason."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.kv.models import (
    VOCABULARY,
    bypassed,
    feed,
    largest_difference,
    offset,
    seeded,
    tiny_llama,
    tokens,
    trim,
)
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.kv.cache import Cache, nbytes, rewindable
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.model.config import ignored_windows, read_config

LLAMA = {"model_type": "llama"}


def hybrid() -> Any:
    """Return a qwen3_next: two layers of recurrent state, one of attention."""
    from mlx_lm.models import qwen3_next as module

    args = module.ModelArgs(
        model_type="qwen3_next", hidden_size=64, num_hidden_layers=3, intermediate_size=64, num_attention_heads=2,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_conv_kernel_dim=4, num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1,
        shared_expert_intermediate_size=32, mlp_only_layers=[], moe_intermediate_size=32, rms_norm_eps=1e-6,
        vocab_size=VOCABULARY, num_key_value_heads=1, rope_theta=1e4, partial_rotary_factor=0.5,
        max_position_embeddings=512, head_dim=32, full_attention_interval=3,
    )  # fmt: skip
    return seeded(module.Model(args))


def recurrent() -> Any:
    from mlx_lm.models import mamba as module

    args = module.ModelArgs(
        model_type="mamba", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, state_size=8,
        num_hidden_layers=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4,
    )  # fmt: skip
    return seeded(module.Model(args))


def latent() -> Any:
    from mlx_lm.models import deepseek_v3 as module

    args = module.ModelArgs(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=None, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        v_head_dim=32, qk_nope_head_dim=32, first_k_dense_replace=9,
    )  # fmt: skip
    return seeded(module.Model(args))


def parallel() -> Any:
    """Return a falcon_h1: state and attention side by side in each layer."""
    from mlx_lm.models import falcon_h1 as module

    args = module.ModelArgs(
        hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=VOCABULARY, mamba_d_conv=4, mamba_d_head=16, mamba_d_ssm=32, mamba_d_state=16,
        mamba_n_heads=2, mamba_n_groups=1,
    )  # fmt: skip
    return seeded(module.Model(args))


def shared() -> Any:
    """Return a gemma4_text: its upper layers attend to the keys and values of lower ones, without a cache."""
    from mlx_lm.models import gemma4_text as module

    args = module.ModelArgs(
        hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2, head_dim=32,
        global_head_dim=32, vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, num_key_value_heads=1,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, sliding_window=16, sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return seeded(module.Model(args))


def test_a_full_attention_model_follows_the_spec() -> None:
    plan = plan_caches(tiny_llama(), LLAMA, KVSpec(8, 4, 32, window=64, keep=3))
    layer = plan.layers[0]
    assert (layer.index, layer.kind, layer.key_bits, layer.value_bits) == (0, "window", 8, 4)
    assert (layer.group_size, layer.window, layer.keep, layer.rotated) == (32, 64, 3, False)
    assert plan.notes == ()
    assert plan.bytes_per_token == 2 * layer.bytes_per_token
    # 2 heads × 32 numbers, 8 and 4 bits, and two 4-byte scales in each group of 32
    assert layer.bytes_per_token == 2 * (32 + 8) + 2 * (16 + 8)


def test_bytes_foreseen_are_the_bytes_held() -> None:
    model = tiny_llama()
    for spec, context in ((KVSpec(8, 4, 32), 512), (KVSpec(4, 16, 32, window=200), 700), (KVSpec(), 256)):
        plan = plan_caches(model, LLAMA, spec)
        caches = plan.make()
        feed(model, caches, tokens(context), [])
        assert nbytes(caches) == plan.bytes_at(context)


def test_keys_of_few_bits_are_rotated_unless_told_otherwise() -> None:
    model = tiny_llama()
    assert plan_caches(model, LLAMA, KVSpec(4, 4)).layers[0].rotated
    assert not plan_caches(model, LLAMA, KVSpec(5, 4)).layers[0].rotated
    assert not plan_caches(model, LLAMA, KVSpec(4, 4), rotate_keys=False).layers[0].rotated
    assert plan_caches(model, LLAMA, KVSpec(8, 8), rotate_keys=True, rotate_values=True).layers[0].rotated


def test_a_group_that_does_not_divide_gives_way_aloud() -> None:
    plan = plan_caches(tiny_llama(head_dim=96), LLAMA, KVSpec(8, 8))
    assert plan.layers[0].group_size == 32
    assert "groups of 32, not 64" in plan.notes[0]


def test_a_head_dimension_that_no_group_divides_is_refused() -> None:
    with pytest.raises(OptionError, match="80 numbers per head can't be packed"):
        plan_caches(tiny_llama(head_dim=80), LLAMA, KVSpec(8, 8))


def test_a_hybrid_keeps_its_state_and_packs_its_attention() -> None:
    model = hybrid()
    plan = plan_caches(model, {"model_type": "qwen3_next"}, KVSpec(8, 8, 32, window=64))
    assert [layer.kind for layer in plan.layers] == ["state", "state", "window"]
    assert "2 of 3 caches: its recurrent state stays" in plan.notes[0]
    caches = plan.make()
    feed(model, caches, tokens(20), [])
    assert bypassed(caches) == []
    assert offset(caches) == 20
    assert rewindable(caches) == 0
    assert trim(caches, 1) == 0
    assert offset(caches) == 20


@pytest.mark.parametrize("spec", [KVSpec(8, 8), KVSpec(window=64)], ids=["bits", "window"])
@pytest.mark.parametrize(("make", "reason"), [(recurrent, "recurrent state"), (latent, "latent attention")])
def test_what_no_layer_can_honour_is_refused_with_the_reason(make: Any, reason: str, spec: KVSpec) -> None:
    config = {"model_type": make.__name__, **({"kv_lora_rank": 32} if make is latent else {})}
    with pytest.raises(OptionError, match=reason):
        plan_caches(make(), config, spec)


@pytest.mark.parametrize("make", [recurrent, latent])
def test_what_stays_as_the_model_made_it_runs_as_ever(make: Any) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = make()
    plan = plan_caches(model, {"kv_lora_rank": 32} if make is latent else {}, KVSpec())
    caches = plan.make()
    assert not any(isinstance(cache, Cache) for cache in caches)
    wanted = feed(model, make_prompt_cache(model), tokens(12), [8])
    assert largest_difference(feed(model, caches, tokens(12), [8]), wanted) == 0
    assert plan.bytes_per_token == (0 if make is recurrent else 2 * (32 + 16) * 4)
    assert offset(caches) == (None if make is recurrent else 12)


def test_attention_beside_state_in_one_layer_is_packed_too() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = parallel()
    plan = plan_caches(model, {"model_type": "falcon_h1"}, KVSpec(8, 8, 32))
    assert [(layer.path, layer.kind) for layer in plan.layers] == [
        ((0, 0), "state"), ((0, 1), "full"), ((1, 0), "state"), ((1, 1), "full"),
    ]  # fmt: skip
    ids = tokens(30)
    wanted = feed(model, make_prompt_cache(model), ids, [20, 1])
    caches = plan.make()
    assert largest_difference(feed(model, caches, ids, [20, 1]), wanted) < 0.05 * float(mx.abs(wanted).max().item())
    assert bypassed(caches) == []


def test_layers_that_share_keys_and_values_get_them_decoded() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, ids = shared(), tokens(60)
    wanted = feed(model, make_prompt_cache(model), ids, [20] + [1] * 20)
    for spec, tolerance in ((KVSpec(), 1e-4), (KVSpec(8, 8, 32), 0.05 * float(mx.abs(wanted).max().item()))):
        plan = plan_caches(model, {"model_type": "gemma4_text"}, spec)
        assert [layer.window for layer in plan.layers] == [16, None]
        caches = plan.make()
        assert largest_difference(feed(model, caches, ids, [20] + [1] * 20), wanted) < tolerance
        assert bypassed(caches) == []


def borrowing() -> Any:
    """Return a gemma3n: its upper layers ask the caches of lower ones for their keys and values."""
    from mlx_lm.models import gemma3n as module

    text = {
        "model_type": "gemma3n_text", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": [64] * 4,
        "num_attention_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY,
        "num_key_value_heads": 1, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": 16, "max_position_embeddings": 512, "rope_local_base_freq": 1e4, "rope_theta": 1e4,
        "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 16, "altup_num_inputs": 2,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8, "query_pre_attn_scalar": 32,
    }  # fmt: skip
    return seeded(module.Model(module.ModelArgs.from_dict({"model_type": "gemma3n", "text_config": text})))


def test_layers_that_borrow_from_lower_caches_get_the_same_again() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, ids = borrowing(), tokens(120)
    wanted = feed(model, make_prompt_cache(model), ids, [20] + [1] * 20)
    for spec, tolerance in ((KVSpec(), 1e-4), (KVSpec(8, 8, 32), 0.05 * float(mx.abs(wanted).max().item()))):
        caches = plan_caches(model, {"model_type": "gemma3n"}, spec).make()
        assert largest_difference(feed(model, caches, ids, [20] + [1] * 20), wanted) < tolerance
        assert bypassed(caches) == []
        assert rewindable(caches) >= 64


def test_a_system_prompt_of_unknown_or_too_great_length_is_an_error() -> None:
    plan = plan_caches(tiny_llama(), LLAMA, KVSpec(window=32, keep="system"))
    with pytest.raises(OptionError, match="system prompt"):
        plan.make()
    with pytest.raises(OptionError, match="leaves no room"):
        plan.make(keep=32)
    assert len(plan.make(keep=0)) == 2


def test_the_users_window_cuts_a_longer_one_of_the_models_and_says_so() -> None:
    config = {"model_type": "mistral", "sliding_window": 100}
    plan = plan_caches(tiny_llama(), config, KVSpec(window=40, keep=4))
    assert [(layer.window, layer.keep) for layer in plan.layers] == [(40, 0)] * 2
    assert any("cut to 40" in note for note in plan.notes)
    plan = plan_caches(tiny_llama(), config, KVSpec(window=400, keep=4))
    assert [layer.window for layer in plan.layers] == [100, 100]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "phi3"}, (None,) * 4),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, None, 8, None)),
        ({"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}, (None, None, 8, 8)),
        ({"model_type": "qwen2_moe", "sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}, (8, *(None,) * 3)),
        ({"model_type": "smollm3", "sliding_window": 8, "use_sliding_window": True}, (None, None, None, 8)),
        ({"text_config": {"model_type": "mistral", "sliding_window": 8}, "model_type": "mistral3"}, (8,) * 4),
    ],
    ids=str,
)  # fmt: skip
def test_windows_mlx_lm_ignores_are_read_from_the_config(config: dict[str, Any], windows: tuple[int | None]) -> None:
    assert ignored_windows(config, 4) == windows


def test_a_model_that_cannot_be_looked_into_keeps_its_caches_and_says_why() -> None:
    model = tiny_llama()

    class Broken(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no such thing")

    model.__class__ = Broken
    plan = plan_caches(model, LLAMA, KVSpec())
    assert {layer.kind for layer in plan.layers} == {"own"}
    assert "first pass over the model failed (ValueError: no such thing)" in plan.notes[0]
    with pytest.raises(OptionError, match="no such thing"):
        plan_caches(model, LLAMA, KVSpec(8, 8))


def test_importing_touches_no_mlx_lm_and_for_sizes_not_even_mlx() -> None:
    for module, absent in (("tokamac.engine.kv.plan", "mlx_lm"), ("tokamac.engine.options", "mlx")):
        code = f"import sys, {module}; assert not any(name.split('.')[0] == '{absent}' for name in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


# What a spec asks for and a model can't give: refused where it was asked for, said where it has no effect.

ASKED_LLAMA = {"model_type": "llama", "max_position_embeddings": 512}


def notes(spec: KVSpec) -> str:
    return " ".join(plan_caches(tiny_llama(), ASKED_LLAMA, spec).notes)


@pytest.mark.parametrize(("head_dim", "best"), [(32, 32), (64, 64), (96, 32), (192, 64)])
def test_a_group_size_that_was_asked_for_is_refused_with_what_can_be_had(head_dim: int, best: int) -> None:
    with pytest.raises(OptionError, match="this model can't use KV groups of 128") as caught:
        plan_caches(tiny_llama(head_dim=head_dim), ASKED_LLAMA, KVSpec(8, 16, group_size=128))
    assert f"Use groups of {best} (--kv-group-size {best})" in caught.value.hint
    plan = plan_caches(tiny_llama(head_dim=head_dim), ASKED_LLAMA, KVSpec(8, 16, group_size=best))
    assert plan.layers[0].group_size == best
    assert plan.notes == ()


def test_pinned_tokens_without_a_window_are_told_of() -> None:
    assert "keep 5000 has no effect: without a window nothing is dropped" in notes(KVSpec(keep=5000))
    assert "keep system has no effect" in notes(KVSpec(keep="system"))
    for spec in (KVSpec(), KVSpec(keep=5000, on_full="roll"), KVSpec(window=64, keep=8)):
        assert notes(spec) == ""


def test_a_window_longer_than_the_context_is_told_of() -> None:
    assert "the context holds 512 tokens, not 100,000" in notes(KVSpec(window=100_000, on_full="stop"))
    assert "100,000 tokens is more than the 512 that the model was made for" in notes(KVSpec(window=100_000))
    for spec in (KVSpec(window=512), KVSpec(window=512, on_full="stop"), KVSpec(window=64, on_full="error")):
        assert notes(spec) == ""


GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("case", ["gemma2", "ministral3", "mistral", "phi3", "qwen2", "smollm3", "starcoder2"])
def test_an_older_config_without_layer_types_slides_alike(case: str) -> None:
    config = read_config(GOLDEN / f"{case}_window")
    windows = ignored_windows(config, config["num_hidden_layers"])
    assert 16 in windows
    older = {key: value for key, value in config.items() if key != "layer_types"}
    assert ignored_windows(older, len(windows)) == windows
