"""What a model asks of a machine: worked by hand, against a brute-force count, and the same from a config as from real arrays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from tests.engine.helpers import CONFIG as SEEDED
from tests.engine.kv.models import work_of_config
from tests.engine.perf.test_config_cost import FAMILIES, built
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.model.config import normalise, read_config
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import find
from tokamac.engine.perf.config_cost import Packing, cost_of_config, launches, work_of
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.roofline import Attention, Heads, KVUse, Product, Workload, visible_pairs

GOLDEN = Path(__file__).parents[2] / "golden"
ALL_FAMILIES = {**FAMILIES, "seeded": SEEDED}

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
A_LAYER = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
TABLE = 128256 * 4096
NORMS = (2 * 32 + 1) * 4096

MIXTURE: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "tie_word_embeddings": False,
}  # fmt: skip


def config_work(config: dict[str, Any], **how: Any) -> Workload:
    work = work_of_config(normalise(config), **how)
    assert isinstance(work, Workload), work
    return work


def loaded_work(model: Any, config: Any, kv: KVSpec | None = None) -> Workload:
    return work_of(model, config, cost_of_model(model, config), plan_caches(model, config, kv or KVSpec()))


def test_llama_3_8b_worked_by_hand():
    work = config_work(LLAMA_3_8B)
    assert work.traits == ("dense",)
    assert (work.layers, work.hidden, work.vocabulary, work.query_heads) == (32, 4096, 128256, 32)
    assert work.prefill_parameters == 32 * A_LAYER == 6_979_321_856
    assert work.head_parameters == TABLE
    assert work.weight_bytes() == 2 * (32 * A_LAYER + TABLE + NORMS)  # the input table is looked up
    assert (work.expert_bytes, work.active) == (0, 0.0)
    a_token = 32 * 8 * (128 + 128) * 2
    assert work.kv_bytes(1000) == 1000 * a_token == 131_072_000
    assert work.step_bytes(1000) == work.weight_bytes() + work.kv_bytes(1000)
    assert work.step_bytes(1000, batch=4) == work.weight_bytes() + 4 * work.kv_bytes(1000)


def test_the_operations_of_a_prompt_worked_by_hand():
    work = config_work(LLAMA_3_8B)
    pairs = 6 + 5 + 4 + 3 + 2 + 1
    attention = 32 * 2 * 32 * (128 + 128) * pairs  # layers, a product and a sum, heads, dims of a key and a value
    assert work.prefill_operations(6) == 2 * (6 * 32 * A_LAYER + TABLE) + attention
    assert work.prefill_operations(1, 99) == 2 * (32 * A_LAYER + TABLE) + 32 * 2 * 32 * 256 * 100


def test_reading_in_two_parts_takes_what_reading_at_once_takes_and_another_head():
    work = config_work(LLAMA_3_8B)
    parts = work.prefill_operations(300) + work.prefill_operations(700, 300)
    assert parts == work.prefill_operations(1000) + 2 * TABLE


def test_packed_weights_are_read_packed():
    work = config_work(LLAMA_3_8B, packing=Packing(4))
    assert work.weight_bytes() == (32 * A_LAYER + TABLE) * 4.5 / 8 + 2 * NORMS
    assert work.prefill_parameters == 32 * A_LAYER


def test_a_mixture_worked_by_hand():
    work = config_work(MIXTURE)
    attention, router, expert = 128 * (128 + 64 + 64 + 128), 8 * 128, 3 * 128 * 64
    assert work.expert_bytes == 2 * 2 * 8 * expert
    assert work.active == 2 / 8
    assert work.prefill_parameters == 2 * (attention + router + 2 * expert)
    shared = 2 * (2 * (attention + router) + 320 * 128 + 5 * 128)
    assert work.weight_bytes() == shared + 2 * 2 * 2 * expert


def test_an_expert_that_two_sequences_chose_is_read_once():
    work = config_work(MIXTURE)
    of_each = work.expert_bytes / 8
    # Two of eight each: the second finds a quarter of its own read already.
    assert work.weight_bytes(2) == work.shared_bytes + of_each * (2 + 2 * 3 / 4)
    assert work.weight_bytes(10_000) == work.shared_bytes + work.expert_bytes
    assert work.step_bytes(100, 2) == work.weight_bytes(2) + 2 * work.kv_bytes(100)


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_larger_batch_reads_more_experts_and_fewer_for_each(batch, more):
    work = config_work_of_a_mixture()
    small, large = (work.weight_bytes(size) - work.shared_bytes for size in (batch, batch + more))
    assert small <= large <= work.expert_bytes
    assert large / (batch + more) <= small / batch + 1


MADE: dict[str, Workload] = {}


def config_work_of_a_mixture() -> Workload:
    if not MADE:
        MADE["mixture"] = config_work(MIXTURE)
    return MADE["mixture"]


def test_shared_experts_are_read_for_every_token():
    work = config_work(FAMILIES["qwen3_5_moe"])
    alone = config_work({**FAMILIES["qwen3_5_moe"], "text_config": {
        **FAMILIES["qwen3_5_moe"]["text_config"], "shared_expert_intermediate_size": 128,
    }})  # fmt: skip
    wider = 4 * 3 * 128 * 64  # layers, matrices, and 64 more of each
    assert alone.expert_bytes == work.expert_bytes
    assert alone.shared_bytes == work.shared_bytes + 2 * wider
    assert alone.prefill_parameters == work.prefill_parameters + wider


def test_a_mixture_that_does_not_say_how_many_are_active_has_no_known_step():
    config = normalise({key: value for key, value in MIXTURE.items() if key != "num_experts_per_tok"})
    model = built(config)
    work = loaded_work(model, config)
    assert work.weight_bytes() is work.step_bytes(10) is work.prefill_operations(10) is work.active is None
    assert work.kv_bytes(10) > 0


def test_latent_attention_multiplies_with_the_dims_it_unfolds():
    work = config_work(FAMILIES["deepseek_v3"])
    assert work.attention == tuple(Attention(4 * (32 + 32 + 32), None, layer) for layer in range(4))
    assert work.kv_bytes(10) == 10 * 4 * (64 + 32) * 2  # the latent and the rotary key, once for all heads


def test_layers_that_reuse_keys_attend_but_keep_none():
    config = read_config(GOLDEN / "gemma4_window")
    work = work_of_config(config)
    assert work.layers == 4
    assert len(work.kv) == 2
    own, reused = work.attention[:2], work.attention[2:]
    assert own == reused  # each of the last layer of its kind
    assert [attention.layer for attention in own] == [0, 1]
    assert [attention.window for attention in own] == [16, None]
    assert len({attention.width for attention in own}) == 2  # full layers have wider heads


def test_a_layer_with_a_state_reads_it_whatever_the_context():
    work = config_work(FAMILIES["qwen3_5"])
    states = [layer for layer in work.kv if layer.bytes_per_token == 0]
    assert len(states) == 3
    assert len(work.attention) == 1
    fixed = sum(layer.fixed_bytes for layer in states)
    assert fixed > 0
    assert work.kv_bytes(1000) == fixed + 1000 * 2 * (32 + 32) * 2
    assert config_work(FAMILIES["mamba"]).kv_bytes(1) == config_work(FAMILIES["mamba"]).kv_bytes(10**6) > 0


def test_a_window_bounds_what_is_read_with_its_spare_slots_and_what_is_computed_without_them():
    model, config = built(normalise(MIXTURE)), normalise(MIXTURE)
    work = loaded_work(model, config, KVSpec(window=512, keep=4))
    a_token = 2 * 2 * (32 + 32) * 2
    assert work.kv_bytes(500) == 500 * a_token
    assert (
        work.kv_bytes(10**6) == (512 + 64) * a_token
    )  # a ring keeps an eighth more, to rewind into; a step reads it all
    assert {attention.window for attention in work.attention} == {512}
    assert work.attention[0].operations(1, 10**6) == 2 * 4 * (32 + 32) * 512


def test_packed_keys_and_values_are_read_packed():
    config = normalise(MIXTURE)
    plain, packed = (work_of_config(config, kv=KVSpec(key_bits=bits, value_bits=bits)) for bits in (16, 8))
    assert packed.kv_bytes(64) == plain.kv_bytes(64) * (8 + 2 * 16 / 32) / 16  # heads of 32, so groups of 32


@given(st.integers(0, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_visible_pairs_are_those_that_a_mask_lets_through(tokens, cached, window):
    counted = sum(
        key <= query and (window is None or key > query - window)
        for query in range(cached, cached + tokens)
        for key in range(cached + tokens)
    )
    assert visible_pairs(tokens, cached, window) == counted


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.one_of(st.none(), st.integers(1, 10**5)))
def test_pairs_are_the_same_however_a_prompt_is_cut(cached, tokens, window):
    first = tokens // 2
    cut = visible_pairs(first, cached, window) + visible_pairs(tokens - first, cached + first, window)
    assert cut == visible_pairs(tokens, cached, window)


@pytest.mark.parametrize("tied", [False, True])
def test_the_launches_of_two_llama_layers_counted_by_hand(tied):
    config = normalise({**FAMILIES["llama"], "tie_word_embeddings": tied})
    model = built(config)
    # Two norms, seven products, and eight more: two rotations, two cache writes, attention, two sums, the gated product. Heads
    # of 32 have no fused kernel: four for that one.
    a_layer = 2 + 7 + 8 + 3
    # The embedding's row, the last norm, the head, sampling, and the copy to the host.
    assert launches(model, config, plan_caches(model, config, KVSpec())) == 2 * a_layer + 5


def test_the_launches_of_an_expert_stack_counted_by_hand():
    config = normalise(MIXTURE)
    model = built(config)
    # Two norms, four products and the router, three stacks with what chooses and weighs, and eight more; heads of 32.
    a_layer = 2 + 4 + 1 + 3 * (1 + 2) + 8 + 3
    assert launches(model, config, plan_caches(model, config, KVSpec())) == 2 * a_layer + 5
    assert config_work(MIXTURE).expert_products == 2 * 3


GEMMA_2: dict[str, Any] = {
    "model_type": "gemma2", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "vocab_size": 320, "query_pre_attn_scalar": 64,
}  # fmt: skip


@pytest.mark.parametrize(("head_dim", "more"), [(64, 0), (48, 3)])
def test_attention_that_no_kernel_fuses_launches_more(head_dim, more):
    found, fused = (config_work({**FAMILIES["llama"], "head_dim": dim}) for dim in (head_dim, 64))
    assert found.launches - fused.launches == len(found.kv) * more
    assert all(layer.heads.fused == (more == 0) for layer in found.kv)


@pytest.mark.parametrize("named", [{}, {"attn_logit_softcapping": 30.0}])
def test_a_soft_cap_is_written_out_whether_or_not_the_config_names_it(named, monkeypatch):
    found = config_work({**GEMMA_2, **named})
    assert all(layer.heads.written_out and not layer.heads.fused for layer in found.kv)
    monkeypatch.setattr("tokamac.engine.perf.config_cost.WRITTEN_OUT", 0)
    assert found.launches - config_work({**GEMMA_2, **named}).launches == 2 * 6


def test_the_heads_that_read_a_cache_are_those_of_its_layer_packed_or_not():
    for spec in (KVSpec(), KVSpec(key_bits=8, value_bits=4)):
        assert {layer.heads for layer in config_work(LLAMA_3_8B, kv=spec).kv} == {Heads(32, 8, 128, 128)}
    states = [layer for layer in config_work(FAMILIES["qwen3_5"]).kv if layer.fixed_bytes]
    assert states
    assert {layer.heads for layer in states} == {None}


def test_layers_that_reuse_keys_are_counted_where_these_are_kept():
    entry = find("gemma-4-e2b")
    work = config_work(dict(entry.config))
    assert [layer.heads.layers for layer in work.kv].count(1) == 13
    assert sum(layer.heads.layers for layer in work.kv) == 35
    assert {layer.heads.fused for layer in work.kv if layer.heads.key_dim == 256} == {True}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_config_asks_what_its_loaded_model_asks(family):
    config = normalise(ALL_FAMILIES[family])
    assert config_work(config) == loaded_work(built(config), config)


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - {"seeded"}))
def test_a_packed_config_asks_what_its_loaded_model_asks_in_every_form(family):
    config = normalise(ALL_FAMILIES[family])
    model, converted = quantize_model(built(config), config, 64, 4)
    packed = dict(converted)
    assert config_work(config, packing=Packing(4)) == loaded_work(model, packed)
    assert config_work(packed) == loaded_work(model, packed)
    pytest.importorskip("numba")  # a plain CPU's own
    from tokamac.engine.cpu.layers import keep_packed, use_kernels

    restore = keep_packed(model)
    model.set_dtype(mx.float32)
    restore()
    assert config_work(packed, form="float32") == loaded_work(model, packed)
    use_kernels(model, logits=None)
    assert config_work(packed, form="float32") == loaded_work(model, packed)


@pytest.mark.parametrize("family", ["llama", "tied", "gemma", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_products_are_the_active_parameters_less_vectors(family):
    config = normalise(FAMILIES[family])
    cost, work = cost_of_config(config), config_work(config)
    model = built(config)
    arrays = {
        name: array
        for name, array in tree_flatten(model.parameters())
        if not name.endswith(".weight") or array.ndim == 1
    }
    share = work.active or 1
    vectors = sum(
        array.size * (share if array.ndim == 2 and ".experts." in name else 1) for name, array in arrays.items()
    )
    assert work.prefill_parameters + work.head_parameters == cost.active_parameters - vectors


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "internlm2", "mamba", "openelm", "phixtral", "lille-130m"])
def test_the_head_is_found_whatever_its_name(name):
    import importlib

    from tests.engine.kv import models as zoo

    config = zoo.config_of(name)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    work = loaded_work(module.Model(module.ModelArgs.from_dict(config)), config)
    assert work.head_parameters == zoo.VOCABULARY * 64
    assert (work.vocabulary, work.hidden) == (zoo.VOCABULARY, 64)


@pytest.mark.parametrize(
    ("product", "value_bytes", "nbytes"),
    [
        (Product(256, 128, None), 2, 256 * 128 * 2),
        (Product(256, 128, None), 4, 256 * 128 * 4),
        (Product(256, 128, 4, 64), 2, 256 * 128 * 4.5 / 8),
        (Product(256, 128, 4, 32), 4, 256 * 128 * 6 / 8),
        (Product(256, 128, 4, 32, "mxfp4"), 2, 256 * 128 * 4.25 / 8),
        (Product(256, 128, 4, 16, "nvfp4"), 2, 256 * 128 * 4.5 / 8),
        (Product(256, 128, 4, 64, stack=8, active=2), 2, 2 * 256 * 128 * 4.5 / 8),
    ],
)
def test_the_bytes_of_a_product_by_its_packing(product, value_bytes, nbytes):
    assert product.nbytes(value_bytes) == nbytes


def test_products_that_differ_in_what_a_kernel_sees_have_names_of_their_own():
    base = Product(256, 128, 4)
    others = [
        replace(base, rows=128), replace(base, columns=256), replace(base, bits=8), replace(base, bits=None),
        replace(base, group_size=32), replace(base, mode="nvfp4"), replace(base, stack=8), replace(base, stack=8, active=2),
    ]  # fmt: skip
    assert len({each.key for each in [base, *others]}) == len(others) + 1
    assert replace(base, count=7).key == base.key


def test_four_ternary_weights_lie_in_a_byte():
    work = config_work({**FAMILIES["llama"], "quantization_config": {"quant_method": "bitnet"}})
    assert work.prefill_parameters == config_work(FAMILIES["llama"]).prefill_parameters


def test_what_can_not_be_weighed_says_why():
    found = work_of_config(normalise({**LLAMA_3_8B, "model_type": "nonesuch"}))
    assert isinstance(found, str)
    assert "nonesuch" in found


def test_a_published_mixture_reads_its_active_share():
    entry = find("Qwen3-30B-A3B")
    work = work_of_config(entry.config, packing=Packing(4))
    assert work.active == 8 / 128
    assert 3.0e9 < work.prefill_parameters + work.head_parameters < 3.4e9


def test_a_layer_holds_what_it_has_room_for():
    layer = KVUse(bytes_per_token=10, limit=100, fixed_bytes=7)
    assert [layer.bytes_at(context) for context in (0, 5, 100, 101)] == [7, 57, 1007, 1007]
