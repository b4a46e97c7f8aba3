"""A seeded model with our caches, against plain references: full attention masked by position, each token encoded once."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.models import (
    VOCABULARY,
    MovingReference,
    Reference,
    Taken,
    bypassed,
    codec,
    feed,
    follow,
    largest_difference,
    llama_move,
    offset,
    overhear,
    reference_logits,
    seeded,
    seen,
    tiny_llama,
    tokens,
    trim,
)
from tokamac.engine import KVSpec
from tokamac.engine.kv import attention, nbytes, plan_caches, rewindable
from tokamac.engine.kv.plan import CachePlan

LLAMA = {"model_type": "llama"}
DIM = 32


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


def following(plan: CachePlan, taken: list[Taken]) -> list[Any]:
    """Return new caches that encode what others were given."""
    caches = plan.make()
    for cache, its in zip(caches, taken, strict=True):
        follow(cache, its)
    return caches


def reference(spec: KVSpec) -> Reference:
    rotated = DIM if spec.key_bits <= 4 else None
    keep = spec.keep if isinstance(spec.keep, int) else 0
    codecs = codec(spec.key_bits, rotated_dim=rotated), codec(spec.value_bits)
    if spec.window is None or not keep:
        return Reference(*codecs, spec.window, keep)
    return MovingReference(*codecs, spec.window, keep, llama_move(spec.key_bits))


@given(
    bits=st.sampled_from([(16, 16), (16, 16), (8, 8), (8, 4), (4, 4), (16, 5), (3, 16), (6, 2)]),
    window=st.one_of(st.none(), st.integers(8, 40)),
    keep=st.integers(0, 7),
    times=st.floats(0.3, 6.0),
    cuts=st.lists(st.integers(1, 90), max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_model_equals_the_reference_however_its_prompt_is_cut(  # noqa: PLR0917
    llama: Any, bits: tuple[int, int], window: int | None, keep: int, times: float, cuts: list[int], seed: int
) -> None:
    spec = KVSpec(key_bits=bits[0], value_bits=bits[1], group_size=32, window=window, keep=keep)
    ids = tokens(max(2, int((window or 30) * times)), seed)
    caches = plan_caches(llama, LLAMA, spec).make()
    taken = [overhear(cache) for cache in caches]
    logits = feed(llama, caches, ids, cuts)
    wanted = reference_logits(llama, ids, lambda _: reference(spec), taken)
    assert largest_difference(logits, wanted) < 1e-4
    assert offset(caches) == ids.shape[1]
    assert bypassed(caches) == []


@pytest.mark.parametrize(
    "spec", [KVSpec(), KVSpec(8, 4, 32), KVSpec(4, 4, 32, window=24), KVSpec(window=24, keep=0)], ids=str
)
def test_cuts_do_not_change_logits(llama: Any, spec: KVSpec) -> None:
    ids, plan = tokens(140), plan_caches(llama, LLAMA, spec)
    caches = plan.make()
    taken = [overhear(cache) for cache in caches]
    whole = feed(llama, caches, ids, [])
    for cuts in ([1] * 139, [7] * 20, [50, 50], [100]):
        assert largest_difference(feed(llama, following(plan, taken), ids, cuts), whole) < 1e-4


def test_the_default_is_bit_for_bit_mlx_lms_own_cache(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    monkeypatch.setattr(attention, "WORTH", 1 << 62)  # the same kernel on both sides: what differs is the caches'
    ids, cuts = tokens(300), [130, 1, 1, 1, 100]
    caches, theirs = plan_caches(llama, LLAMA, KVSpec()).make(), make_prompt_cache(llama)
    assert largest_difference(feed(llama, caches, ids, cuts), feed(llama, theirs, ids, cuts)) == 0
    assert nbytes(theirs) == sum(cache.nbytes for cache in theirs)
    assert nbytes(caches) == sum(cache.nbytes for cache in caches)


@given(
    back=st.integers(1, 64),
    prompt=st.integers(65, 300),
    bits=st.sampled_from([(16, 16), (8, 4)]),
    cut=st.integers(1, 99),
)
@settings(max_examples=10, deadline=None)
def test_a_model_taken_back_after_wrapping_goes_on_as_if_nothing_had_been(
    llama: Any, back: int, prompt: int, bits: tuple[int, int], cut: int
) -> None:
    spec = KVSpec(*bits, 32, window=32, keep=4)
    plan = plan_caches(llama, LLAMA, spec)
    ids, other = tokens(prompt), tokens(back, seed=9)
    caches = plan.make()
    taken = [overhear(cache) for cache in caches]
    feed(llama, caches, mx.concatenate([ids, other], axis=1), [cut])
    assert rewindable(caches) >= 64
    assert trim(caches, back) == back
    for its in taken:
        its.trim(back)
    went_on = feed(llama, caches, tokens(40, seed=4), [1, 1])
    straight = following(plan, taken)
    feed(llama, straight, ids, [])
    assert largest_difference(went_on, feed(llama, straight, tokens(40, seed=4), [])) < 1e-4


def test_a_pinned_system_prompt_is_seen_for_ever(llama: Any) -> None:
    plan = plan_caches(llama, LLAMA, KVSpec(window=32, keep="system"))
    ids = tokens(120)
    logits = feed(llama, plan.make(keep=13), ids, [13, 1, 40])
    wanted = reference_logits(llama, ids, lambda _: MovingReference(codec(16), codec(16), 32, 13, llama_move(16)))
    assert largest_difference(logits, wanted) < 1e-4


def gpt_oss() -> Any:
    from mlx_lm.models import gpt_oss as module

    args = module.ModelArgs(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY, hidden_size=64,
        intermediate_size=32, head_dim=32, num_attention_heads=4, num_key_value_heads=2, sliding_window=16,
        rope_theta=10_000, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = seeded(module.Model(args))
    for layer in model.layers:
        layer.self_attn.sinks = layer.self_attn.sinks + mx.array([0.5, 2.0, -1.0, 3.0])
    return model


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
def test_sinks_inside_the_model_work_with_any_bits(bits: tuple[int, int]) -> None:
    model, ids = gpt_oss(), tokens(96)
    spec = KVSpec(*bits, 32)
    plan = plan_caches(model, {"model_type": "gpt_oss"}, spec)
    assert [(layer.kind, layer.window) for layer in plan.layers] == [("window", 16), ("full", None)]
    rotated = DIM if bits[0] <= 4 else None

    def by_position(index: int) -> Reference:
        return Reference(codec(bits[0], rotated_dim=rotated), codec(bits[1]), 16 if index == 0 else None, 0)

    for cuts in ([], [1] * 95, [30, 1, 1, 40]):
        caches = plan.make()
        taken = [overhear(cache) for cache in caches]
        logits = feed(model, caches, ids, cuts)
        assert largest_difference(logits, reference_logits(model, ids, by_position, taken)) < 1e-4
        assert bypassed(caches) == []


def gemma2() -> Any:
    from mlx_lm.models import gemma2 as module

    args = module.ModelArgs(
        model_type="gemma2", hidden_size=64, num_hidden_layers=3, intermediate_size=64, num_attention_heads=4, head_dim=32,
        rms_norm_eps=1e-6, vocab_size=VOCABULARY, num_key_value_heads=2, attn_logit_softcapping=5.0, query_pre_attn_scalar=32,
    )  # fmt: skip
    return seeded(module.Model(args))


def gemma2_logits(model: Any, ids: mx.array, windows: list[int | None], codecs: tuple[Any, Any]) -> mx.array:
    """Run gemma 2 layer by layer with mlx-lm's own code, each layer with its own mask."""
    hidden = model.model.embed_tokens(ids) * model.args.hidden_size**0.5
    for layer, window in zip(model.layers, windows, strict=True):
        hidden = layer(hidden, seen(ids.shape[1], window, 0), Reference(*codecs, window, 0))
    out = model.model.embed_tokens.as_linear(model.model.norm(hidden))
    return (mx.tanh(out / model.final_logit_softcapping) * model.final_logit_softcapping)[0]


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_gemma2_slides_in_every_second_layer_as_its_config_says(bits: tuple[int, int]) -> None:
    model, ids = gemma2(), tokens(3 * 20)
    config = {"model_type": "gemma2", "sliding_window": 20}
    plan = plan_caches(model, config, KVSpec(*bits, 32))
    assert [layer.window for layer in plan.layers] == [20, None, 20]
    assert "slide over 20 tokens" in plan.notes[0]
    wanted = gemma2_logits(model, ids, [20, None, 20], (codec(bits[0]), codec(bits[1])))
    unmasked = gemma2_logits(model, ids, [None, None, None], (codec(bits[0]), codec(bits[1])))
    assert largest_difference(wanted, unmasked) > 0.1  # the window matters here
    for cuts in ([], [1] * 59, [25, 1, 1, 30]):
        caches = plan.make()
        assert largest_difference(feed(model, caches, ids, cuts), wanted) < 1e-3
        assert bypassed(caches) == []


def test_mistral_slides_in_every_layer_as_its_config_says() -> None:
    model, ids = tiny_llama(), tokens(3 * 20)
    plan = plan_caches(model, {"model_type": "mistral", "sliding_window": 20}, KVSpec())
    wanted = reference_logits(model, ids, lambda _: Reference(codec(16), codec(16), 20, 0))
    for cuts in ([], [1] * 59, [25, 1, 1, 30]):
        assert largest_difference(feed(model, plan.make(), ids, cuts), wanted) < 1e-4


def test_a_model_whose_layers_slide_in_part_gets_a_mask_for_each() -> None:
    model, ids = tiny_llama(layers=3), tokens(3 * 20)
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    plan = plan_caches(model, config, KVSpec(8, 8, 32))
    assert [layer.window for layer in plan.layers] == [None, 20, 20]

    hidden = model.model.embed_tokens(ids)
    for layer, window in zip(model.layers, [None, 20, 20], strict=True):
        hidden = layer(hidden, seen(60, window, 0), Reference(codec(8), codec(8), window, 0))
    wanted = model.model.embed_tokens.as_linear(model.model.norm(hidden))[0]
    for cuts in ([], [1] * 59, [25, 1, 1, 30]):
        assert largest_difference(feed(model, plan.make(), ids, cuts), wanted) < 1e-3
