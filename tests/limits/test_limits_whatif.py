"""What if: cases and outcomes by hand, and what must hold for every model of the catalogue on every chip of the table."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.footprint import Footprint, weigh
from tokamac.engine.perf.machine import Machine, elsewhere, everywhere
from tokamac.engine.perf.roofline import Fitted, constants_of
from tokamac.engine.perf.what_if import (
    WeighedModel,
    WhatIfCase,
    contexts_up_to,
    curve,
    load,
    on_chips,
    outcome,
    outcome_at,
    table,
)

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
M4_MAX = elsewhere("Apple M4 Max", 40, 64)
NAMES = tuple(entry.name for entry in catalogue() if entry.config is not None)
PLACES = everywhere(64)
KV = (KVSpec(), KVSpec(8, 8), KVSpec(8, 4), KVSpec(4, 4))
PRECISIONS = (16, 8, 6, 5, 4, 3)


# Cases and outcomes


@pytest.mark.parametrize("wrong", [{"bits": 7}, {"group_size": 48}, {"context": 10, "prompt": 11}, {"prompt": 0}])
def test_a_case_that_can_not_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        WhatIfCase(**wrong)  # type: ignore[arg-type]


def test_an_outcome_by_hand() -> None:
    found = outcome(LLAMA, WhatIfCase(16, context=1000, prompt=1000), M4_MAX)
    embedding = 128_256 * 4096
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    weights = 2 * (2 * embedding + 32 * layer + 65 * 4096)
    kv = 1000 * 32 * 2 * 8 * 128 * 2
    assert found.weight_bytes == weights
    assert found.kv_bytes == kv
    assert found.bits_per_weight == 16
    assert found.ceiling_tps == pytest.approx(546e9 / (weights - 2 * embedding + kv))
    assert found.memory is not None
    assert found.memory.total >= weights + kv
    assert found.reason is None


def test_bits_none_is_the_models_own_packing() -> None:
    packed = {**LLAMA, "quantization": {"bits": 4, "group_size": 64}}
    assert outcome(packed, WhatIfCase(), M4_MAX).weight_bytes == outcome(LLAMA, WhatIfCase(4), M4_MAX).weight_bytes
    assert outcome(packed, WhatIfCase(8), M4_MAX).weight_bytes == outcome(LLAMA, WhatIfCase(8), M4_MAX).weight_bytes


def test_flags_that_a_model_can_not_take_are_a_reason_and_its_weights_are_still_known() -> None:
    odd = {**LLAMA, "head_dim": 48}
    found = outcome(odd, WhatIfCase(4, kv=KVSpec(8, 8)), M4_MAX)
    assert "48 numbers per head" in (found.reason or "")
    assert found.weight_bytes is not None
    assert (found.kv_bytes, found.memory, found.ceiling_tps, found.expected_tps) == (None, None, None, None)


def test_a_model_that_can_not_be_weighed_is_a_reason_alone() -> None:
    found = outcome({**LLAMA, "model_type": "unheard_of"}, WhatIfCase(4), M4_MAX)
    assert "unheard_of" in (found.reason or "")
    assert found.weight_bytes is None
    assert curve({**LLAMA, "model_type": "unheard_of"}, WhatIfCase(4), M4_MAX, (1, 2)) == ()


def test_the_table_changes_one_thing_at_a_time() -> None:
    base = WhatIfCase(4, context=2048, prompt=512)
    rows = [found.case for found in table(LLAMA, base, M4_MAX)]
    assert rows[0] == base
    assert len(set(rows)) == len(rows)
    changed = [(row.bits != 4) + (row.kv != base.kv) + (row.context != 2048) for row in rows[1:]]
    assert set(changed) == {1}
    assert [row.bits for row in rows if row.bits != 4] == [16, 8, 6, 5, 3]
    assert [(row.kv.key_bits, row.kv.value_bits) for row in rows if row.kv != base.kv] == [(8, 8), (8, 4), (4, 4)]
    assert [row.context for row in rows if row.context != 2048] == [1024, 4096, 8192]
    assert {row.prompt for row in rows} == {512}


def test_a_prompt_that_fills_the_context_does_so_in_every_row() -> None:
    assert all(found.case.prompt == found.case.context for found in table(LLAMA, WhatIfCase(4), M4_MAX))


def test_a_row_of_the_table_is_the_outcome_of_its_case() -> None:
    for found in table(LLAMA, WhatIfCase(4), M4_MAX):
        alone = outcome(LLAMA, found.case, M4_MAX)
        assert replace(alone, prediction=None) == replace(found, prediction=None)


def test_contexts_end_with_what_the_model_was_made_for() -> None:
    assert contexts_up_to(LLAMA) == (1024, 4096, 8192)
    assert contexts_up_to({**LLAMA, "max_position_embeddings": 512}) == (512,)
    assert contexts_up_to({**LLAMA, "max_position_embeddings": None})[-1] == 131_072


def test_a_curve_agrees_with_the_outcomes() -> None:
    for point in curve(LLAMA, WhatIfCase(4), M4_MAX, (1000, 4096)):
        alone = outcome(LLAMA, WhatIfCase(4, context=point.context, prompt=1), M4_MAX)
        assert (point.ceiling_tps, point.expected_tps) == (alone.ceiling_tps, alone.expected_tps)


def test_on_chips_agrees_with_each_alone() -> None:
    some = PLACES[::9]
    for found in on_chips(LLAMA, WhatIfCase(4), some):
        alone = outcome(LLAMA, WhatIfCase(4), found.place)
        assert (found.ceiling_tps, found.expected_tps, found.ttft_s, found.memory) == (
            alone.ceiling_tps,
            alone.expected_tps,
            alone.ttft_s,
            alone.memory,
        )
    assert on_chips(LLAMA, WhatIfCase(4), ()) == ()


def test_on_a_plain_cpu_the_speed_is_unknown_until_it_was_measured(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = replace(M4_MAX, device="cpu", latency=None, local=True, budget_bytes=M4_MAX.memory_bytes)
    found = outcome(LLAMA, WhatIfCase(4), place)
    assert (found.expected_tps, found.prefill_tps, found.ttft_s) == (None, None, None)
    assert "not measured" in (found.reason or "")


# What must hold for all


@cache
def weighed(name: str, bits: int | None) -> Footprint:
    """The catalogue's model with weights of so many bits. To build one takes longer than all that is asked of it."""
    entry = find(name)
    assert entry is not None
    assert entry.config is not None
    found = weigh(entry.config, M4_MAX.device, None, packing=WhatIfCase(bits).packing())
    assert not isinstance(found, str), found
    return found


@cache
def loaded(name: str, bits: int | None, kv: KVSpec) -> WeighedModel | None:
    """The catalogue's model with these weights and caches; None where it can't take them."""
    try:
        return load(weighed(name, bits), kv, M4_MAX)
    except OptionError:
        return None


names = st.sampled_from(NAMES)
kvs = st.sampled_from(KV)
contexts = st.integers(1, 1_000_000)
some = settings(max_examples=40, deadline=None)


@some
@given(names, st.sampled_from(PLACES), kvs, contexts, contexts)
def test_more_context_is_never_faster_nor_smaller(name: str, place: Machine, kv: KVSpec, one: int, other: int) -> None:
    model = loaded(name, 4, kv)
    if model is None:
        return
    few, many = sorted((one, other))
    short, long = (
        outcome_at(model.at(place), WhatIfCase(4, kv=kv, context=n, prompt=min(n, 512))) for n in (few, many)
    )
    assert short.ceiling_tps is not None
    assert long.ceiling_tps is not None
    assert long.ceiling_tps <= short.ceiling_tps
    if short.expected_tps is not None and long.expected_tps is not None:
        assert long.expected_tps <= short.expected_tps
    assert short.memory is not None
    assert long.memory is not None
    assert short.memory.total <= long.memory.total


@some
@given(names, st.sampled_from(PLACES), kvs, st.integers(1, 200_000), st.floats(1, 10))
def test_more_bandwidth_is_never_slower(name: str, place: Machine, kv: KVSpec, context: int, times: float) -> None:
    model = loaded(name, 4, kv)
    if model is None:
        return
    chip = place.chip
    assert chip.bandwidth_gbs is not None
    faster = replace(chip, bandwidth_gbs=chip.bandwidth_gbs * times)
    case = WhatIfCase(4, kv=kv, context=context, prompt=context)
    slow, fast = (
        outcome_at(model.at(replace(place, chip=each, latency=Fitted(each, constants_of()))), case)
        for each in (chip, faster)
    )
    assert slow.ceiling_tps is not None
    assert fast.ceiling_tps is not None
    assert fast.ceiling_tps >= slow.ceiling_tps
    assert (slow.expected_tps is None) == (fast.expected_tps is None) == ("was not measured" in (slow.reason or ""))
    if slow.expected_tps is not None and fast.expected_tps is not None:
        assert fast.expected_tps >= slow.expected_tps
    if slow.ttft_s is not None and fast.ttft_s is not None:
        assert fast.ttft_s <= slow.ttft_s


@some
@given(names, st.sampled_from(PLACES), kvs, st.sampled_from(PRECISIONS), contexts)
def test_expected_is_never_above_the_ceiling(name: str, place: Machine, kv: KVSpec, bits: int, context: int) -> None:
    model = loaded(name, bits, kv)
    if model is None:
        return
    found = outcome_at(model.at(place), WhatIfCase(bits, kv=kv, context=context, prompt=min(context, 4096)))
    if found.expected_tps is None:
        assert place.latency is None or "was not measured" in (found.reason or "")
        return
    assert found.ceiling_tps is not None
    assert found.expected_tps <= found.ceiling_tps
    assert found.prediction is not None
    prefill = found.prediction.prefill
    if prefill.expected_s is not None and prefill.ceiling_s is not None:
        assert prefill.expected_s >= prefill.ceiling_s


@settings(max_examples=12, deadline=None)
@given(names)
def test_more_bits_are_never_smaller(name: str) -> None:
    models = [loaded(name, bits, KVSpec()) for bits in PRECISIONS]
    sizes = [model.weighed.stored.weight_bytes for model in models if model is not None]
    assert len(sizes) == len(PRECISIONS)
    assert sizes == sorted(sizes, reverse=True)


@some
@given(names, contexts)
def test_fewer_kv_bits_are_never_more_bytes(name: str, context: int) -> None:
    models = [loaded(name, 4, kv) for kv in KV]
    kept = [
        outcome_at(model, WhatIfCase(4, kv=kv, context=context, prompt=1)).kv_bytes
        for model, kv in zip(models, KV, strict=True)
        if model
    ]
    known = [size for size in kept if size is not None]
    assert len(known) == len(kept)
    assert known == sorted(known, reverse=True)
