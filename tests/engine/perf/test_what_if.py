"""What if: cases and outcomes by hand, other machines, suggested models; and what `inspect` says of a model."""

import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kv.models import kv_table, seeded
from tests.engine.perf.test_cost import CONFIGS, build, save
from tests.engine.perf.test_cost import LLAMA as LIMITS_COST_LLAMA
from tests.tiny import make_tiny
from tokamac.engine import Engine
from tokamac.engine.errors import ModelDamagedError, ModelNotFoundError, ModelUnsupportedError, OptionError
from tokamac.engine.kv.plan import plan_caches, spare_slots
from tokamac.engine.model.config import model_classes, normalise, read_config
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import bandwidth, inspection, timing
from tokamac.engine.perf.catalogue import (
    QUICK_TPS,
    QUICK_TTFT_S,
    ROOMY,
    Group,
    Nominal,
    catalogue,
    files_bytes,
    find,
    standings,
)
from tokamac.engine.perf.config_cost import kv_bytes, kv_bytes_per_token, kv_layers, pinned_bytes
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.footprint import Footprint, KVRow, KVTable, weigh
from tokamac.engine.perf.hardware import Chip
from tokamac.engine.perf.inspection import inspect, inspect_model, model_ref, model_ref_of_folder
from tokamac.engine.perf.roofline import Fitted, constants_of
from tokamac.engine.perf.what_if import (
    GIB,
    Machine,
    Suggestion,
    WeighedModel,
    WhatIfCase,
    WhatIfOutcome,
    bits_that_fit,
    contexts_up_to,
    curve,
    elsewhere,
    everywhere,
    load,
    nominal,
    on_chips,
    outcome,
    outcome_at,
    reason_of,
    suggestion,
    suggestions,
    table,
    verdict_of,
)

# What if: cases and outcomes by hand, and what must hold for every model of the catalogue on every chip of the
# table.

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
    assert found.memory.total >= weights + kv
    assert found.reason is None


@pytest.mark.parametrize("context", [1, 8192, 16_384])
def test_the_bits_that_fit_fill_what_the_context_leaves_of_nine_tenths(context: int) -> None:
    place = elsewhere("Apple M1", memory_gb=8)
    bits = bits_that_fit(LLAMA, context, place)
    four = outcome(LLAMA, WhatIfCase(4, context=context, prompt=context), place)
    filled = four.memory.total + four.memory.weights * (bits / four.bits_per_weight - 1)
    assert bits == 8.6 or 0.898 < filled / four.memory.budget <= 0.9
    with pytest.raises(OptionError, match=r"no weights fit beside 600,000 tokens, which take [\d.]+ GB of 5\.73 GB"):
        bits_that_fit(LLAMA, 600_000, place)


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


def test_on_a_plain_cpu_the_speed_is_unknown_at_first(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = weigh(entry.config, M4_MAX.device, packing=WhatIfCase(bits).packing())
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
        outcome_at(model.on(place), WhatIfCase(4, kv=kv, context=n, prompt=min(n, 512))) for n in (few, many)
    )
    assert long.ceiling_tps <= short.ceiling_tps
    if short.expected_tps is not None and long.expected_tps is not None:
        assert long.expected_tps <= short.expected_tps
    assert short.memory.total <= long.memory.total


@some
@given(names, st.sampled_from(PLACES), kvs, st.integers(1, 200_000), st.floats(1, 10))
def test_more_bandwidth_is_never_slower(name: str, place: Machine, kv: KVSpec, context: int, times: float) -> None:
    model = loaded(name, 4, kv)
    if model is None:
        return
    chip = place.chip
    faster = replace(chip, bandwidth_gbs=chip.bandwidth_gbs * times)
    case = WhatIfCase(4, kv=kv, context=context, prompt=context)
    slow, fast = (
        outcome_at(model.on(replace(place, chip=each, latency=Fitted(each, constants_of()))), case)
        for each in (chip, faster)
    )
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
    found = outcome_at(model.on(place), WhatIfCase(bits, kv=kv, context=context, prompt=min(context, 4096)))
    if found.expected_tps is None:
        assert place.latency is None or "was not measured" in (found.reason or "")
        return
    assert found.expected_tps <= found.ceiling_tps
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


# Which models would run well: verdicts by hand, and the order of the whole catalogue.

M4_PRO = elsewhere("M4 Pro", 20, 48)
NAMED = (
    "Qwen3-0.6B-4bit", "Qwen3-8B-4bit", "Qwen3-30B-A3B-4bit", "Llama-3.3-70B-Instruct-4bit", "gpt-oss-120b-MXFP4-Q8",
)  # fmt: skip


def of(name: str, place: Machine) -> Suggestion:
    entry = find(name)
    repository = entry.repository(name)
    assert repository is not None
    return suggestion(entry, repository, WhatIfCase(context=4096, prompt=4096), place)


def outcome_suggest(
    total: int, *, expected: float | None = 50.0, ceiling: float | None = 60.0, place: Machine = M4_PRO
) -> WhatIfOutcome:
    fit = place.fit(weights=total, kv=0, working=0)
    return WhatIfOutcome(
        WhatIfCase(), place, weight_bytes=total, memory=fit, ceiling_tps=ceiling, expected_tps=expected
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (outcome_suggest(10 << 30), "runs well"), (outcome_suggest(10 << 30, expected=9.9), "slow"),
        (outcome_suggest(10 << 30, expected=None), "fits, speed unknown"),
        (outcome_suggest(10 << 30, expected=None, ceiling=None), "fits, speed unknown"),
        (outcome_suggest(10 << 30, expected=None, ceiling=9.9), "slow"), (outcome_suggest(30 << 30), "tight"),
        (outcome_suggest(40 << 30), "unknown whether it fits"), (outcome_suggest(49 << 30), "does not fit"),
        (outcome_suggest(1, place=elsewhere("M4 Pro", 20)), "unknown whether it fits"),
    ],
)  # fmt: skip
def test_a_verdict(found: WhatIfOutcome, verdict: str) -> None:
    assert verdict_of(found) == verdict


def test_best_first_is_the_most_capable_that_leaves_room_and_is_quick() -> None:
    ranked = [each for each in standings(nominal(M4_PRO)) if each.repository.tail in NAMED]
    assert [(each.repository.tail, each.group) for each in ranked] == [
        ("Qwen3-30B-A3B-4bit", "recommended"),  # 30.5B weights, 3B of them active: about a dense model of 10B
        ("Qwen3-0.6B-4bit", "recommended"),
        ("Qwen3-8B-4bit", "slow"),  # 5.5 s to the first token of a prompt of 2,048
        ("Llama-3.3-70B-Instruct-4bit", "fit unknown"),  # more than macOS surely lets a GPU use
        ("gpt-oss-120b-MXFP4-Q8", "does not fit"),
    ]


@given(st.none() | st.integers(1 << 28, 1 << 39), st.floats(5, 3000))
def test_the_order_is_of_the_machine_and_the_catalogue_alone(most: int | None, gbs: float) -> None:
    """No measurement goes into it, so it is the same on the same machine whatever was timed there."""
    budget = None if most is None else most * 2 // 3
    found = standings(Nominal(budget, most, gbs))
    assert sorted(each.repository.id for each in found) == sorted(
        each.id for entry in catalogue() for each in entry.repositories
    )
    groups = [get_args(Group).index(each.group) for each in found]
    assert groups == sorted(groups)
    for each in found:
        weights = each.repository.weight_bytes
        assert (each.group == "does not fit") == (most is not None and weights > 0.8 * most)
        assert (each.group == "fit unknown") == (budget is None or budget < weights <= 0.8 * (most or 0))
        assert each.group != "recommended" or (each.tps >= QUICK_TPS and weights <= ROOMY * (budget or 0))
    chosen = [each for each in found if each.start]
    quick = [each for each in found if each.group == "recommended"]
    assert chosen == quick[:1]
    assert [each.quality for each in quick] == sorted((each.quality for each in quick), reverse=True)
    better = {each.repository.id: each.group for each in standings(Nominal(budget, most, 2 * gbs))}
    assert all(better[each.repository.id] == "recommended" for each in quick)


@pytest.mark.parametrize(
    ("chip", "cores", "memory_gb", "first"),
    [
        ("M1", 8, 8, "gemma-4-e2b-it-4bit"), ("M1", 8, 16, "gemma-4-e2b-it-8bit"),
        ("M2", 10, 16, "gemma-4-e2b-it-8bit"), ("M4", 10, 16, "gemma-4-e2b-it-8bit"),
        ("M4", 10, 24, "gemma-4-e2b-it-8bit"), ("M5", 10, 24, "gemma-4-e4b-it-4bit"),
        ("M3 Pro", 18, 36, "gemma-4-26b-a4b-it-4bit"), ("M4 Pro", 20, 48, "Qwen3.6-35B-A3B-4bit"),
        ("M1 Max", 32, 64, "Qwen3.6-35B-A3B-4bit"), ("M4 Max", 40, 64, "gemma-4-12B-it-4bit"),
        ("M5 Max", 40, 128, "Qwen3.8-27B-4bit"), ("M3 Ultra", 80, 512, "Qwen3.5-122B-A10B-6bit"),
    ],
)  # fmt: skip
def test_the_first_of_the_list_suits_the_mac(chip: str, cores: int, memory_gb: float, first: str) -> None:
    place = elsewhere(chip, cores, memory_gb)
    start = next(each for each in standings(nominal(place)) if each.start)
    assert start.repository.tail == first
    assert start.tps >= QUICK_TPS
    assert start.ttft_s is not None
    assert start.ttft_s <= QUICK_TTFT_S
    assert start.repository.weight_bytes <= 0.7 * place.budget_bytes <= 0.7 * place.memory_bytes
    found = suggestion(start.entry, start.repository, WhatIfCase(context=2048, prompt=2048), place)
    assert None not in (found.download_bytes, found.outcome.memory, found.outcome.expected_tps)


def test_every_row_of_the_catalogue_has_an_age_a_source_and_a_download() -> None:
    for entry in catalogue():
        for each in entry.repositories:
            assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", each.released), each.id
            assert files_bytes(entry, each, each.weight_bytes) >= each.weight_bytes


def test_what_the_catalogue_says_of_weights_is_what_weighing_finds() -> None:
    for entry in catalogue():
        for each in entry.repositories:
            config = entry.config_of(each)
            assert config is not None
            weighed = weigh(config, "metal", packing=each.packing)
            assert weighed.stored.weight_bytes == each.weight_bytes, each.id
            if each is entry.repositories[0]:
                counted = (weighed.stored.parameters, weighed.stored.active_parameters)
                assert counted == (entry.parameters, entry.active_parameters), entry.name


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (50_398_208, "needs 50.4 MB of 34.4 GB"),
        (9_568_000_000, "needs 9.57 GB of 34.4 GB"),
        (999_960_000, "needs 1,000 MB"),
    ],
)
def test_a_small_model_needs_no_fraction_of_a_large_unit(total: int, said: str) -> None:
    found = outcome_suggest(total)
    assert reason_of(found, verdict_of(found)).startswith(said)


def test_the_whole_catalogue_is_there_once_in_order_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    found = suggestions(M4_PRO, nominal(M4_PRO), 2048, progress=lambda done, total: told.append((done, total)))
    everything = [each.id for entry in catalogue() for each in entry.repositories]
    assert sorted(each.id for each in found) == sorted(everything)
    assert [each.id for each in found] == [each.repository.id for each in standings(nominal(M4_PRO))]
    assert told == [(done, len(everything)) for done in range(1, len(everything) + 1)]
    assert all(each.outcome.memory is not None for each in found)


def test_a_model_whose_config_is_not_known_is_still_listed() -> None:
    entry = find("Qwen3-8B-4bit")
    assert entry is not None
    nameless = replace(entry, config=None)
    found = suggestion(nameless, nameless.repositories[0], WhatIfCase(), M4_PRO)
    assert found.verdict == "unknown whether it fits"
    assert "not known here" in found.reason
    assert found.parameters is None


# Places: this machine, and machines that are only named, by the chip table, with what is and is not known of them.


@pytest.mark.parametrize("name", ["Apple M2 Ultra", "m2 ultra", "apple m2 ultra", " M2  Ultra "])
def test_a_chip_is_found_without_its_maker_and_in_any_case(name: str) -> None:
    assert elsewhere(name).chip.bandwidth_gbs == 800


def test_one_bandwidth_needs_no_core_count_but_the_peak_stays_unknown() -> None:
    found = outcome(LLAMA, WhatIfCase(4), elsewhere("M2 Ultra"))
    assert found.expected_tps is not None
    assert (found.prefill_tps, found.ttft_s) == (None, None)
    assert "GPU cores" in (found.reason or "")


def test_two_bandwidths_of_one_name_are_told_apart_by_cores_or_refused() -> None:
    assert elsewhere("M4 Max", 32).chip.bandwidth_gbs == 410
    with pytest.raises(OptionError, match="several memory bandwidths") as refused:
        elsewhere("M4 Max")
    assert "32 or 40" in refused.value.hint


def test_cores_that_no_bin_has_are_refused() -> None:
    with pytest.raises(OptionError, match="38 GPU cores"):
        elsewhere("M4 Max", 38)
    with pytest.raises(OptionError, match="does not apply"):
        elsewhere("NVIDIA H200", 132)


def test_an_unknown_chip_names_near_ones() -> None:
    with pytest.raises(OptionError, match="M4 Mox") as refused:
        elsewhere("Apple M4 Mox")
    assert "Apple M4 Max" in refused.value.hint


def test_of_a_mac_elsewhere_two_thirds_are_sure_all_is_too_much_and_between_is_unknown() -> None:
    place = elsewhere("M3", 10, 24)
    fits = [place.fit(weights=gib * GIB, kv=0, working=0).fits for gib in (15, 16, 17, 24, 25)]
    assert fits == [True, True, None, None, False]
    assert "two thirds" in (place.budget_rule or "")


def test_without_a_size_of_memory_nothing_is_said_of_it() -> None:
    place = elsewhere("M3", 10)
    assert (place.memory_bytes, place.budget_bytes, place.budget_rule) == (None, None, None)
    assert place.fit(weights=1, kv=1, working=1).fits is None


def test_a_card_has_the_memory_that_it_has_and_no_published_latency() -> None:
    card = elsewhere("NVIDIA GeForce RTX 3090")
    assert card.memory_bytes == card.budget_bytes == 24 * GIB
    found = outcome(LLAMA, WhatIfCase(4), card)
    assert found.memory.fits
    assert found.ceiling_tps is not None
    assert found.expected_tps is None
    assert "RTX 3090" in (found.reason or "")


# `inspect`: what a model is and what a place makes of it, from its files, its config alone, or the catalogue.

CHIP = Chip("Test", 10, 100.0, 4.0, "table", "made up")
GPU = Machine(CHIP, None, None, None, "metal")
CPU = Machine(CHIP, 1 << 34, 1 << 34, None, "cpu")


def test_inspect_agrees_with_the_loaded_model(tmp_path):
    model, config = build(CONFIGS["tied"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), place=GPU)
    cost = cost_of_model(model, config)
    kv = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, dims, bytes
    assert seen.parameters == cost.parameters
    assert seen.weight_bytes == cost.weight_bytes == seen.memory.weights
    assert seen.kv_bytes_per_token == kv
    assert seen.bytes_per_step == cost.weight_bytes_per_token + 100 * kv
    assert seen.ceiling_tps == 100e9 / seen.bytes_per_step
    assert (seen.expected_tps, seen.prefill_tps, seen.ttft_s) == (None, None, None)
    assert sum(part.bytes for part in seen.parts) == seen.weight_bytes
    assert seen.memory.total == seen.memory.weights + seen.memory.kv + seen.memory.working


def test_inspect_knows_that_a_plain_cpu_leaves_matrices_packed(tmp_path):
    model, config = build(CONFIGS["llama"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), place=CPU)
    assert seen.form == "float32"
    norms = 5 * 128  # float32 there, half as many bytes in the files
    assert seen.memory.weights == cost_of_model(model, config).weight_bytes + 2 * norms
    assert seen.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_inspect_of_what_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError):
        inspect_model(tmp_path / "nowhere", place=CPU)
    with pytest.raises(ModelDamagedError):
        inspect_model(tmp_path, place=CPU)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnsupportedError, match="hidden_size"):
        inspect_model(tmp_path, place=CPU)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelUnsupportedError):
        inspect_model(tmp_path, place=CPU)


@pytest.mark.parametrize("quantized", [None, {"group_size": 64, "bits": 4}], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("place", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_config_says_the_same(tmp_path: Path, kind: str, quantized: dict[str, int] | None, place: Machine) -> None:
    # Of gemma, only files or this key tell whether there is a head.
    model, config = build({"tie_word_embeddings": False, **CONFIGS[kind]}, quantized=quantized)
    save(tmp_path, model, config)
    files = inspect_model(tmp_path, 100, place=place)
    (tmp_path / "model.safetensors").unlink()
    alone = inspect_model(tmp_path, 100, place=place)
    assert (files.known, alone.known) == ("files", "config")
    assert replace(alone, known="files") == files


def test_a_missing_shard_is_not_taken_for_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelDamagedError, match="00001-of-00001"):
        inspect_model(tmp_path, place=GPU)


def test_as_if_it_were_packed_otherwise(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, config)
    packed, _ = build(CONFIGS["llama"], quantized={"group_size": 32, "bits": 4})
    found = inspect(model_ref_of_folder(tmp_path), WhatIfCase(4, 32, context=64, prompt=64), GPU)
    assert found.weight_bytes == cost_of_model(packed, {}).weight_bytes
    assert 5 < found.bits_per_weight < 5.1  # norms stay as they are


def test_a_class_that_is_not_known_can_not_be_packed_otherwise(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "model_type": "unheard_of"})
    assert inspect_model(tmp_path, place=GPU).weight_bytes > 0
    with pytest.raises(ModelUnsupportedError, match="unheard_of"):
        inspect(model_ref_of_folder(tmp_path), WhatIfCase(4), GPU)


@pytest.mark.parametrize(
    ("asked", "name", "bits"),
    [
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit", 4.5),
        ("qwen3-0.6b-8bit", "mlx-community/Qwen3-0.6B-8bit", 8.5),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit", 4.5),
        ("Llama-2-7B", "Llama-2-7B", 16),
    ],
)
def test_a_model_of_the_catalogue_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, name: str, bits: float
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = inspect(model_ref(asked), WhatIfCase(context=2048, prompt=2048), elsewhere("M4 Max", 40, 64))
    assert (found.model, found.known) == (name, "catalogue")
    assert found.bits_per_weight == pytest.approx(bits, abs=0.02)
    assert found.memory.fits
    assert found.expected_tps is not None
    assert found.ttft_s == pytest.approx(2048 / found.prefill_tps)
    assert found.reason is None


def test_what_is_neither_here_nor_in_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="nor in the catalogue") as missing:
        model_ref("org/nothing-like-it")
    assert "models pull" in missing.value.hint


def test_a_folder_goes_before_a_name_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert model_ref("Qwen3-8B").known == "config"


def test_what_was_measured_here_is_found_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "is_busy", lambda _: False)  # what a busy machine measures is not kept
    monkeypatch.setattr(bandwidth, "is_busy", lambda: False)
    monkeypatch.setattr(bandwidth, "OTHERS_SHARE", 1.0)
    folder = make_tiny(tmp_path / "tiny")
    before = inspect(model_ref(folder), WhatIfCase(context=256, prompt=128))
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.measure()
        expected = engine.limits(256).expected_tps
    after = inspect(model_ref(folder), WhatIfCase(context=256, prompt=128))
    assert expected is not None
    assert after.expected_tps == pytest.approx(expected)
    assert after.reason is None
    assert after.ttft_s is not None
    assert after.prediction.ridge is not None
    packed = inspect(model_ref(folder), WhatIfCase(kv=KVSpec(8, 8), context=256, prompt=128))
    if (
        before.place.latency is None
    ):  # no published latency: nothing is known before, and nothing of caches that were not measured
        assert (before.expected_tps, packed.expected_tps) == (None, None)


# What inspect says of each layer's cache: as the engine plans it, with nothing computed, and as the config's
# arithmetic has it.

GOLDEN = Path(__file__).parents[2] / "golden"
KV_TABLE_GPU = Machine(Chip("Test", 10, 100.0, 4.0, "table", "made up"), None, None, None, "metal")
SPECS = {
    "plain": KVSpec(),
    "packed": KVSpec(8, 4, 32),
    "window": KVSpec(window=32, keep=4),
    "both": KVSpec(8, 16, 32, window=100, keep=4),
}
FAMILIES = ("llama", "gemma3", "gemma2", "mistral", "phi3", "qwen3_next", "falcon_h1", "minicpm3", "qwen3_moe", "lfm2")
CONTEXT = 200


def table_kv_table(config: dict[str, Any], spec: KVSpec, context: int = CONTEXT) -> KVTable:
    found = kv_table(config, spec, context, value_bytes=4)
    assert isinstance(found, KVTable), found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_models_plan_and_the_configs_arithmetic_agree(family: str) -> None:
    config = read_config(GOLDEN / family)
    make, arguments = model_classes(config)
    loaded = seeded(make(arguments.from_dict(config)))
    layers = kv_layers(config)
    assert layers is not None
    for name, spec in SPECS.items():
        try:
            plan = plan_caches(loaded, config, spec)
        except OptionError as error:
            with pytest.raises(OptionError, match="can't be packed"):
                table_kv_table(config, spec)
            with pytest.raises(OptionError, match="can't be packed"):
                kv_bytes_per_token(layers, spec, value_bytes=4)
            assert "can't be packed" in str(error)  # noqa: PT017  # the tiny heads fit no group
            continue
        found = table_kv_table(config, spec)
        state = sum(row.bytes_at_context or 0 for row in found.rows if row.kind == "state")
        assert (found.bytes_per_token, found.bytes_at_context) == (plan.bytes_per_token, plan.bytes_at(CONTEXT)), name
        assert sum(len(row.layers) for row in found.rows) == len(plan.layers)
        assert kv_bytes_per_token(layers, spec, value_bytes=4) == plan.bytes_per_token, name
        counted = kv_bytes(layers, spec, CONTEXT, value_bytes=4, spare=spare_slots)
        counted += pinned_bytes(layers, spec, CONTEXT, value_bytes=4)
        assert counted + state == plan.bytes_at(CONTEXT), name


def test_like_layers_are_one_row() -> None:
    config = read_config(GOLDEN / "gemma3")  # two layers slide over 64 tokens, one head pair of 32 numbers
    found = table_kv_table(config, KVSpec(8, 4, 32, window=100, keep=4))
    packed = 2 * (32 + 8) + 2 * (16 + 8)
    held, pinned = (64 + 64, 100 + 64), 4 * 2 * 32 * 4  # four keys beside the slots, as the model makes them
    assert found.rows == (
        KVRow((0, 1), "window", 8, 4, 64, 0, True, 2 * packed, 2 * packed * held[0]),
        KVRow((2,), "window", 8, 4, 100, 4, True, packed, packed * held[1] + pinned),
    )
    assert found.bytes_at_context == sum(row.bytes_at_context or 0 for row in found.rows)
    assert "a window of 64 tokens holds 64 more" in " ".join(found.notes)


def test_notes_say_what_is_done_otherwise() -> None:
    wide = {**LIMITS_COST_LLAMA, "head_dim": 96}
    notes = " ".join(table_kv_table(normalise(wide), KVSpec(4, 4)).notes)
    assert "groups of 32, not 64" in notes
    assert "keys of 2 layers are rotated" in notes
    hybrid = table_kv_table(read_config(GOLDEN / "qwen3_next"), KVSpec(8, 8, 32))
    assert [(row.layers, row.kind, row.key_bits, row.free) for row in hybrid.rows] == [
        ((0, 1), "state", None, False),
        ((2,), "full", 8, True),
    ]
    assert "recurrent state stays" in hybrid.notes[0]


@pytest.mark.usefixtures("settled_memory")
def test_a_model_of_any_size_is_planned_without_computing_it() -> None:
    config = normalise(
        {
            **LIMITS_COST_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 40,
            "vocab_size": 128256,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        }
    )
    table_kv_table(config, KVSpec())  # what importing the class takes is not counted
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = table_kv_table(config, KVSpec(8, 4, window=1024), context=4096)
    assert mx.get_peak_memory() - before < 1_000_000
    assert found.rows[0].layers == tuple(range(40))
    assert found.bytes_per_token == 40 * 8 * (128 + 2 * 8 + 64 + 2 * 8)


def test_flags_that_can_not_be_honoured_are_errors_here_too(tmp_path: Path) -> None:
    latent = read_config(GOLDEN / "deepseek_v3")
    for spec in (KVSpec(8, 8, 32), KVSpec(window=32)):
        with pytest.raises(OptionError, match="latent attention"):
            kv_table(latent, spec, CONTEXT, value_bytes=4)
    assert table_kv_table(latent, KVSpec()).rows[0].kind == "latent"


def test_inspect_has_the_table_and_its_sums(tmp_path: Path) -> None:
    model, config = build(CONFIGS["gemma"])
    save(tmp_path, model, {**config, "sliding_window": 48})
    seen = inspect_model(tmp_path, 1000, KVSpec(8, 8, 32), place=KV_TABLE_GPU)
    assert seen.kv_reason is None
    assert seen.memory.kv == seen.kv_table.bytes_at_context
    assert seen.kv_bytes_per_token == seen.kv_table.bytes_per_token == 2 * 2 * (64 + 2 * 2 * 2)
    assert [row.window for row in seen.kv_table.rows] == [48, None]


def test_without_a_class_the_config_alone_is_counted_and_that_is_said(tmp_path: Path) -> None:
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "model_type": "unheard_of"})
    spec = KVSpec(8, 8, 32, window=100)
    seen = inspect_model(tmp_path, 1000, spec, place=KV_TABLE_GPU)
    assert seen.kv_table is None
    assert "unheard_of" in (seen.kv_reason or "")
    assert seen.kv_bytes_per_token == 2 * 2 * 2 * (32 + 2 * 2)
    pinned = 4 * 2 * 2 * 32 * 2  # of four tokens: two layers, two heads, 16 bits
    assert seen.memory.kv == (100 + spare_slots(100)) * seen.kv_bytes_per_token + pinned
    assert asdict(seen.memory)["kv"] == seen.memory.kv


def test_flags_that_the_config_alone_rules_out_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "weigh", lambda *_, **__: "no class")
    model, config = build(CONFIGS["llama"])
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    save(tmp_path, model, {**config, **latent})
    assert inspect_model(tmp_path, 10, KVSpec(), place=KV_TABLE_GPU).memory.kv == 10 * 2 * 32 * 2
    with pytest.raises(OptionError, match="neither packed nor bounded"):
        inspect_model(tmp_path, 10, KVSpec(window=8), place=KV_TABLE_GPU)


def test_a_config_of_unknown_layers_is_not_planned() -> None:
    reason = weigh({**LIMITS_COST_LLAMA, "layer_types": ["something_new"] * 2}, "metal")
    assert reason == "its config names kinds of layers that Tokamac does not know"
