"""Ceilings and expected speeds: the domain's numbers, the formulas worked by hand, and what must hold of any
machine."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kv.models import work_of_config
from tokamac.engine import metrics
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import config_cost
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import KVLayer, Packing, kv_bytes, kv_bytes_per_token, kv_layers
from tokamac.engine.perf.hardware import Chip, generation_of, known_chips, lookup, units_of
from tokamac.engine.perf.roofline import (
    CHUNK,
    SIMD_UNITS,
    TYPICAL_INTENSITY,
    Attention,
    Constants,
    Fitted,
    FittedRange,
    Heads,
    KVUse,
    Product,
    Workload,
    constants_of,
    decode_phase,
    fitted,
    kind_of,
    limits_for,
    limits_of,
    peak_tflops,
    predict,
    prefill_phase,
    range_of,
    ridge_point,
    size_of,
)

H100 = lookup("NVIDIA H100 80GB HBM3")
CHIPS = [lookup(row["chip"], row["gpu_cores"]) for row in known_chips()]
APPLE = [chip for chip in CHIPS if chip.name.startswith("Apple")]
NAMES = ["Llama-3.1-8B", "gemma-3-1b", "gemma-4-e2b", "Qwen3-30B-A3B", "Qwen3.5-9B", "gpt-oss-20b", "Qwen3-0.6B"]
KVS = [KVSpec(), KVSpec(key_bits=8, value_bits=4)]

EIGHT_B = Workload(
    traits=("dense",), layers=32, hidden=4096, launches=500, shared_bytes=16_000_000_000, expert_bytes=0, active=0.0,
    prefill_parameters=8_000_000_000, head_parameters=0, kv=(), attention=(), products=(), query_heads=32, vocabulary=128256,
)  # fmt: skip
CONSTANTS = Constants(
    shared=0.8, kv=0.4, attend={"M1": 0.1, "M2": 0.25, "M5": 0.5}, per_key=64.0, gather_s=5e-6, launch_s=2e-6,
    older=1.5, larger=1.25, narrow=100.0, few_rows=10.0,
    prefill={"shaders": {"dense": 0.5, "mixture": 0.25, "hybrid": 0.4}, "neural": {"dense": 0.3, "mixture": 0.2, "hybrid": 0.1}},
)  # fmt: skip
M4 = Chip("Apple M4", 10, bandwidth_gbs=100.0, fp16_tflops=4.0, source="table")
SMALL = replace(
    EIGHT_B, hidden=1000, launches=1000, shared_bytes=800_000_000, prefill_parameters=390_000_000, head_parameters=10_000_000,
    kv=(KVUse(1000, None, 0),),
)  # fmt: skip
EXPERTS = Product(1000, 1000, 4, stack=16, active=1, count=30)
MIXED = replace(SMALL, traits=("mixture",), expert_bytes=8_000_000_000, active=1 / 16, products=(EXPERTS,))


@functools.cache
def work_named(name: str, kv: KVSpec = KVSpec(), bits: int = 4) -> Workload:  # noqa: B008
    entry = find(name)
    work = work_of_config(entry.config, packing=Packing(bits), kv=kv)
    assert isinstance(work, Workload), work
    return work


def test_llama_3_8b_in_fp16_on_an_h100():
    phase = decode_phase(EIGHT_B, H100, None, 0)
    assert phase.ceiling_tps == pytest.approx(209, abs=0.5)
    assert phase.bound == "memory"
    assert phase.intensity == 1.0  # two operations for each weight of two bytes
    assert phase.expected_tps is None


def test_one_pass_of_six_prompt_tokens_on_an_h100():
    phase = prefill_phase(EIGHT_B, H100, None, 6)
    assert phase.ceiling_s * 1e3 == pytest.approx(4.78, abs=0.005)
    assert phase.operations / (989e12) * 1e3 == pytest.approx(0.10, abs=0.005)
    assert phase.ceiling_tps == pytest.approx(1256, abs=1)
    assert phase.bound == "memory"


def test_each_phase_is_on_its_side_of_the_ridge():
    found = predict(EIGHT_B, H100, None, 1000, 1000)
    assert found.ridge == pytest.approx(989e3 / 3350)
    assert (found.prefill.bound, found.decode.bound) == ("compute", "memory")
    assert found.decode.intensity < found.ridge < found.prefill.intensity
    assert found.prefill.ceiling_s == pytest.approx(2 * 8e9 * 1000 / 989e12)


@given(st.integers(1, 3000))
def test_a_phase_is_bound_by_arithmetic_above_the_ridge_and_by_memory_below(tokens):
    phase = prefill_phase(EIGHT_B, H100, None, tokens)
    ridge = predict(EIGHT_B, H100, None, 1, 1).ridge
    assert phase.bound == ("compute" if phase.intensity > ridge else "memory")


def test_a_batch_decodes_together():
    work = replace(EIGHT_B, kv=(KVUse(100_000, None, 0),))
    one, four = (decode_phase(work, H100, None, 10_000, batch) for batch in (1, 4))
    assert one.ceiling_tps == pytest.approx(3350e9 / 17e9)
    assert four.ceiling_tps == pytest.approx(4 * 3350e9 / 20e9)
    assert four.operations == 4 * one.operations


def test_decoding_attends_to_the_whole_context():
    work = replace(EIGHT_B, attention=(Attention(8192, None), Attention(8192, 100)))
    with_attention, without = (decode_phase(each, H100, None, 1000).operations for each in (work, EIGHT_B))
    assert with_attention - without == 2 * 8192 * (1000 + 100)


def test_an_expected_step_worked_by_hand():
    seconds = Fitted(M4, CONSTANTS).decode_s(SMALL, 4000)
    assert seconds == pytest.approx((0.8e9 / 0.8 + 4e6 / 0.4) / 100e9 + 1000 * 2e-6)


def test_an_expected_step_of_a_mixture_worked_by_hand():
    seconds = Fitted(M4, CONSTANTS).decode_s(MIXED, 0, 2)
    experts = 8e9 * (1 - (15 / 16) ** 2)
    assert seconds == pytest.approx((0.8e9 + experts) / 0.8 / 100e9 + 1000 * 2e-6 + 30 * 5e-6)


def attending(heads: Heads | None, held: int, chip: Chip = M4) -> float:
    layer = KVUse(1000, None, 0, heads)
    return Fitted(chip, CONSTANTS).attending_s(layer, held, 100.0)


def reading(held: int) -> float:
    return held * 1000 / 0.4 / 100e9


def computing(held: int, queries: int, share: float = 0.25, peak: float = 4e12) -> float:
    return 2 * held * queries * (128 + 128 + 64) / (share * peak)


def test_fused_attention_takes_as_long_as_reading_and_computing_that_overlap():
    both = (reading(2000) ** 4 + computing(2000, 32) ** 4) ** 0.25
    assert attending(Heads(32, 8, 128, 128), 2000) == pytest.approx(both)
    assert attending(None, 2000) == pytest.approx(reading(2000))


def test_query_heads_beyond_four_for_a_key_head_take_a_turn_more_in_two_passes():
    five, eight = Heads(40, 8, 128, 128), Heads(64, 8, 128, 128)
    assert attending(five, 4096) == pytest.approx(attending(eight, 4096))
    assert attending(five, 4095) < attending(eight, 4095)  # in one pass each query head has a threadgroup of its own
    large = replace(M4, name="Apple M4 Max")
    assert attending(five, 1024, large) == pytest.approx(attending(eight, 1024, large))
    rounded = (reading(4096) ** 4 + computing(4096, 8 * 2 * SIMD_UNITS) ** 4) ** 0.25
    assert attending(five, 4096) == pytest.approx(rounded)


@pytest.mark.parametrize("heads", [Heads(16, 8, 128, 128, written_out=True), Heads(16, 8, 112, 112)])
def test_where_no_kernel_is_fused_every_query_head_reads_the_keys_anew(heads):
    assert attending(heads, 2000) == pytest.approx(2 * reading(2000))


def test_every_layer_that_attends_to_a_cache_reads_it():
    one, three = (attending(Heads(32, 8, 128, 128, layers=layers), 5000) for layers in (1, 3))
    assert three == pytest.approx(3 * one)


@pytest.mark.parametrize(
    ("name", "share"),
    [("Apple M1", 0.1), ("Apple M2", 0.25), ("Apple M4", 0.25), ("Apple M6", 0.5), ("Apple A18 Pro", 0.1)],
)
def test_attention_reaches_the_share_of_the_latest_generation_that_was_measured(name, share):
    chip = replace(M4, name=name, bandwidth_gbs=1e9)
    assert Fitted(chip, CONSTANTS).attending_s(KVUse(1, None, 0, Heads(4, 4, 128, 128)), 100, 1e9) == pytest.approx(
        computing(100, 4, share), rel=1e-6
    )


def test_an_unknown_peak_is_taken_for_a_typical_one():
    chip, typical = replace(M4, fp16_tflops=None), TYPICAL_INTENSITY * 100e9
    both = (reading(2000) ** 4 + computing(2000, 32, peak=typical) ** 4) ** 0.25
    assert attending(Heads(32, 8, 128, 128), 2000, chip) == pytest.approx(both)


def test_the_range_of_published_rows_is_known_and_tells_what_is_below_it():
    found = range_of()
    assert 100_000_000 < found.least_weight_bytes < 1_000_000_000
    assert found.longest_context >= 131_072
    assert range_of("llama.cpp") != found
    covered = FittedRange(least_weight_bytes=800_000_000, longest_context=1000)
    assert covered.covers(SMALL)
    assert not covered.covers(replace(SMALL, shared_bytes=799_999_999))
    assert covered.covers(replace(MIXED, active=None)) is None


def test_an_expected_prompt_worked_by_hand():
    seconds = Fitted(M4, CONSTANTS).prefill_s(SMALL, 5000, 0, 2048)
    operations = 2 * (390e6 * 5000 + 10e6)
    assert seconds == pytest.approx(operations * (1 + 100 * (10 / 1000) ** 2) / (0.5 * 4e12) + 3 * 1000 * 2e-6)


def test_an_expected_prompt_of_a_mixture_worked_by_hand():
    seconds = Fitted(M4, CONSTANTS).prefill_s(MIXED, 512, 0, 2048)
    operations = 2 * (390e6 * 512 + 10e6)
    idle = 100 * (10 / 1000) ** 2 + 10 / (512 / 16)  # all experts have some of so many rows
    computing = operations * (1 + idle) / (0.25 * 4e12)
    assert seconds == pytest.approx(computing + 1000 * 2e-6)


def test_one_row_of_a_mixture_waits_for_its_own_experts_alone():
    seconds = Fitted(M4, CONSTANTS).prefill_s(replace(MIXED, shared_bytes=0), 1, 0, 2048)
    assert seconds == pytest.approx(2 * 400e6 * (1 + 0.01 + 10) / (0.25 * 4e12) + 1000 * 2e-6)


def test_a_short_prompt_is_never_faster_than_one_read_of_the_weights():
    assert Fitted(M4, CONSTANTS).prefill_s(SMALL, 1, 0, 2048) == pytest.approx(0.8e9 / (0.8 * 100e9) + 1000 * 2e-6)


def test_launching_takes_longer_on_older_and_on_larger_chips():
    nothing = replace(SMALL, shared_bytes=0, prefill_parameters=0, head_parameters=0, kv=())

    def launching(name: str) -> float | None:
        return Fitted(replace(M4, name=name), CONSTANTS).decode_s(nothing, 100)

    assert launching("Apple M4") == launching("Apple M6") == pytest.approx(2e-3)
    assert launching("Apple M1 Ultra") == pytest.approx(2e-3 * 1.5**3 * 1.25**3)
    assert launching("Apple M3 Pro") == pytest.approx(2e-3 * 1.5 * 1.25)


def test_neural_accelerators_have_constants_and_a_peak_of_their_own():
    m5 = lookup("Apple M5", 10)
    assert (units_of(m5), units_of(M4), units_of(H100)) == ("neural", "shaders", "shaders")
    assert peak_tflops(m5) == m5.nax_fp16_tflops > m5.fp16_tflops
    seconds = Fitted(m5, CONSTANTS).prefill_s(SMALL, 2000, 0, 2048)
    operations = 2 * (390e6 * 2000 + 10e6) * (1 + 100 * (10 / 1000) ** 2)
    assert seconds == pytest.approx(operations / (0.3 * m5.nax_fp16_tflops * 1e12) + 2e-3)


@pytest.mark.parametrize(
    ("name", "generation", "size"),
    [
        ("Apple M1", 1, 0), ("Apple M2 Pro", 2, 1), ("Apple M4 Max", 4, 2), ("Apple M3 Ultra", 3, 3), ("Apple M12", 12, 0),
        ("Apple A18 Pro", None, 0), ("NVIDIA GeForce RTX 4090", None, 0), ("Apple M4 Something", 4, 0),
    ],
)  # fmt: skip
def test_a_chips_name_tells_its_generation_and_size(name, generation, size):
    assert (generation_of(name), size_of(name)) == (generation, size)


@pytest.mark.parametrize(
    ("traits", "kind"),
    [
        (("dense",), "dense"), (("dense", "sliding window"), "dense"), (("mixture", "hybrid"), "mixture"),
        (("dense", "hybrid"), "hybrid"), (("dense", "state space"), "hybrid"), (("mixture", "latent attention"), "mixture"),
    ],
)  # fmt: skip
def test_constants_go_by_experts_first_then_by_states(traits, kind):
    assert kind_of(replace(EIGHT_B, traits=traits)) == kind


def test_what_no_measurement_was_published_of_has_no_expected_speed():
    assert fitted(H100) is None
    assert fitted(Chip("Apple M9", None, 500.0, None, "measured")) is None
    assert fitted(Chip("unknown chip", None, None, None, "unknown")) is None
    found = predict(EIGHT_B, H100, fitted(H100), 100, 100)
    assert found.expected_tps is found.ttft_s is None
    assert found.ceiling_tps is not None


def test_an_unknown_machine_leaves_everything_unknown():
    found = predict(EIGHT_B, Chip("unknown chip", None, None, None, "unknown"), None, 100, 100)
    assert found.ridge is found.ceiling_tps is found.expected_tps is found.ttft_s is None
    assert found.prefill.bound is found.prefill.ceiling_s is found.decode.bound is None
    assert found.decode.bytes_read == 16_000_000_000


def test_an_unknown_peak_leaves_prefill_a_bound_by_memory_and_no_side():
    found = predict(EIGHT_B, replace(H100, fp16_tflops=None), None, 1000, 1000)
    assert found.prefill.ceiling_s == pytest.approx(16e9 / 3350e9)
    assert found.prefill.bound is found.ridge is None


@pytest.mark.parametrize(
    ("chip", "work"),
    [(replace(M4, fp16_tflops=None), SMALL), (replace(M4, gpu_cores=None), SMALL), (M4, replace(SMALL, hidden=None)),
     (M4, replace(SMALL, prefill_parameters=None)), (replace(M4, bandwidth_gbs=None), SMALL)],
)  # fmt: skip
def test_prefill_is_unknown_where_what_it_depends_on_is(chip, work):
    assert Fitted(chip, CONSTANTS).prefill_s(work, 100, 0, CHUNK) is None


def test_decode_needs_no_peak_and_no_cores():
    assert Fitted(replace(M4, fp16_tflops=None, gpu_cores=None), CONSTANTS).decode_s(SMALL, 10) is not None
    assert Fitted(replace(M4, bandwidth_gbs=None), CONSTANTS).decode_s(SMALL, 10) is None
    assert Fitted(M4, CONSTANTS).decode_s(replace(MIXED, active=None), 10) is None


def test_the_last_token_of_a_prompt_is_always_computed():
    cached = predict(SMALL, M4, Fitted(M4, CONSTANTS), 100, 100, cached=100)
    assert (cached.prompt, cached.cached, cached.prefill.tokens) == (100, 99, 1)
    empty = predict(SMALL, M4, Fitted(M4, CONSTANTS), 0, 0)
    assert (empty.prompt, empty.cached, empty.prefill.tokens) == (1, 0, 1)
    assert empty.ttft_s > 0


def test_limits_are_the_decode_phase():
    work, chip = work_named("Llama-3.1-8B"), lookup("Apple M4 Max", 40)
    found, phase = limits_of(4096, work, chip, fitted(chip)), decode_phase(work, chip, fitted(chip), 4096)
    assert (found.ceiling_tps, found.expected_tps) == (phase.ceiling_tps, phase.expected_tps)
    assert found.bytes_per_step == found.weight_bytes_per_token + found.kv_bytes_per_step == phase.bytes_read
    assert found.bandwidth_source == "table"


@pytest.mark.parametrize(("source", "known"), [("table", False), ("measured", True)])
def test_weights_that_stay_in_a_chips_caches_have_no_ceiling_of_its_memory(source, known):
    chip = replace(lookup("Apple M4", 10), source=source)
    small, large = (
        limits_for(64, weight_bytes_per_token=nbytes, kv_bytes_per_step=0, chip=chip)
        for nbytes in (4_000_000, 16_000_000)
    )
    assert (small.ceiling_tps is not None) is known
    assert large.ceiling_tps == 7500


def test_every_model_of_the_catalogue_has_an_expected_speed():
    for entry in catalogue():
        if entry.config is None:
            continue
        work = work_named(entry.name)
        for chip in APPLE[::5]:
            found = predict(work, chip, fitted(chip), 2048, 4096)
            assert 0 < found.expected_tps <= found.ceiling_tps
            assert (found.ttft_s is None) == (peak_tflops(chip) is None)


chips = st.sampled_from(APPLE)
works = st.sampled_from(NAMES)


@given(works, chips, st.integers(1, 50_000), st.integers(0, 50_000), st.integers(1, 5000))
def test_a_longer_prompt_is_never_read_sooner(name, chip, tokens, cached, more):
    work, latency = work_named(name), fitted(chip)
    base = prefill_phase(work, chip, latency, tokens, cached)
    for longer in (
        prefill_phase(work, chip, latency, tokens + more, cached),
        prefill_phase(work, chip, latency, tokens, cached + more),
    ):
        assert longer.ceiling_s >= base.ceiling_s
        if base.expected_s is not None:
            assert longer.expected_s >= base.expected_s


@given(works, chips, st.integers(1, 60_000), st.integers(0, 60_000))
def test_what_is_cached_is_never_read_later(name, chip, prompt, cached):
    work, latency = work_named(name), fitted(chip)
    whole, rest = (predict(work, chip, latency, prompt, prompt, cached=part) for part in (0, min(cached, prompt)))
    if whole.ttft_s is not None:
        assert rest.ttft_s <= whole.ttft_s


def test_fewer_bits_are_faster_and_so_are_packed_keys():
    chip = lookup("Apple M4 Max", 40)
    rates = [
        decode_phase(work_named("Llama-3.1-8B", bits=bits), chip, fitted(chip), 100).expected_tps
        for bits in (8, 6, 4, 3)
    ]
    assert rates == sorted(rates)
    plain, packed = (
        decode_phase(work_named("Llama-3.1-8B", kv), chip, fitted(chip), 65_536).expected_tps for kv in KVS
    )
    assert packed > plain


def test_constants_are_those_of_the_engine_asked_for():
    assert constants_of() == constants_of("mlx") != constants_of("llama.cpp")
    with pytest.raises(KeyError):
        constants_of("nonesuch")


# The domain's "Numbers to reproduce", by hand-worked cases: bytes, ceilings, roofline, KV, and the rates of the
# metrics module.

ARITHMETIC_H100 = Chip("NVIDIA H100", None, 3350.0, 989.0, "table")


def test_a_long_prompt_is_bound_by_arithmetic_above_the_ridge():
    assert ridge_point(3350, 989) == pytest.approx(295, abs=0.5)
    many = prefill_phase(EIGHT_B, ARITHMETIC_H100, None, 600)
    assert many.bound == "compute"
    assert many.ceiling_s == many.operations / 989e12


@pytest.mark.parametrize(
    ("chip", "cores", "tps"),
    [("NVIDIA GeForce RTX 4090", None, 29), ("NVIDIA GeForce RTX 3090", None, 27), ("NVIDIA A100-SXM4-80GB", None, 58),
     ("Apple M2 Ultra", 76, 23)],
)  # fmt: skip
def test_a_70b_at_4_bits(chip, cores, tps):
    limits = limits_for(1, weight_bytes_per_token=35_000_000_000, kv_bytes_per_step=0, chip=lookup(chip, cores))
    assert round(limits.ceiling_tps) == tps
    assert limits.bandwidth_source == "table"


def test_kv_of_a_13b():
    config = {"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
    layers = kv_layers(config)
    assert kv_bytes_per_token(layers, KVSpec()) == 819_200
    assert kv_bytes(layers, KVSpec(), 4096) / 1e9 == pytest.approx(3.4, abs=0.05)


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_packed_values_carry_a_scale_and_a_bias_a_group(bits):
    assert config_cost.bytes_per_value(bits, 64) == bits / 8 + 4 / 64
    assert config_cost.bytes_per_value(bits, 64, value_bytes=4) == bits / 8 + 8 / 64
    assert config_cost.bytes_per_value(16, 64, value_bytes=4) == 4


def test_keys_and_values_may_differ_and_a_window_bounds_them():
    layers = [KVLayer(2, 64, 64)] * 3
    spec = KVSpec(key_bits=8, value_bits=4, window=100, keep=4)
    token = 3 * 2 * (64 * (1 + 4 / 64) + 64 * (0.5 + 4 / 64))
    assert kv_bytes_per_token(layers, spec) == token
    assert kv_bytes(layers, spec, 50) == 50 * token
    assert kv_bytes(layers, spec, 5000) == 100 * token


def test_a_models_own_windows_keep_their_size():
    config = {"model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
              "head_dim": 256, "sliding_window": 512}  # fmt: skip
    layers = kv_layers(config)
    assert [layer.window for layer in layers] == [512] * 5 + [None]
    assert kv_bytes(layers, KVSpec(), 4096) == (5 * 512 + 4096) * 2 * 256 * 2
    assert kv_bytes(layers, KVSpec(window=1024), 4096) == (5 * 512 + 1024) * 2 * 256 * 2


def test_linear_layers_keep_no_keys_and_what_is_not_covered_stays_unknown():
    base = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    hybrid = {**base, "model_type": "qwen3_next", "full_attention_interval": 4}
    assert len(kv_layers(hybrid)) == 1
    assert len(kv_layers({**base, "model_type": "lfm2", "full_attn_idxs": [1, 3]})) == 2
    assert kv_layers({**base, "model_type": "mamba"}) == ()
    assert kv_layers({**base, "model_type": "plamo2"}) is None
    assert kv_layers({**base, "model_type": "llama", "layer_types": ["new_kind"] * 4}) is None
    assert kv_layers({}) is None


def test_latent_attention_keeps_one_latent_for_all_heads():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
              "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # fmt: skip
    assert kv_bytes_per_token(kv_layers(config), KVSpec()) == 61 * 576 * 2


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([16, 8, 4]), st.sampled_from([None, 128, 4096]))
def test_more_context_never_costs_less(first, second, bits, window):
    layers = [KVLayer(2, 64, 64), KVLayer(2, 64, 64, 512)]
    spec = KVSpec(key_bits=bits, value_bits=bits, window=window)
    few, many = sorted((first, second))
    assert kv_bytes(layers, spec, few) <= kv_bytes(layers, spec, many)


def test_what_is_unknown_stays_unknown():
    nameless = Chip("?", None, None, None, "unknown")
    assert limits_for(1, weight_bytes_per_token=1, kv_bytes_per_step=1, chip=nameless).ceiling_tps is None
    known = limits_for(1, weight_bytes_per_token=None, kv_bytes_per_step=1, chip=lookup("Apple M1", 8))
    assert known.ceiling_tps is None
    assert known.bytes_per_step is None
    assert known.expected_tps is None


def test_percentiles_by_hand():
    gaps = metrics.gap_percentiles([40.0, 10.0, 30.0, 20.0])
    assert (gaps.p50, gaps.p95, gaps.p99, gaps.max) == (20.0, 40.0, 40.0, 40.0)
    hundred = metrics.gap_percentiles([float(i) for i in range(100, 0, -1)])
    assert (hundred.p50, hundred.p95, hundred.p99, hundred.max) == (50.0, 95.0, 99.0, 100.0)
    assert metrics.gap_percentiles([5.0]) == metrics.Gaps(5.0, 5.0, 5.0, 5.0)


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_percentile_is_the_smallest_value_that_enough_reach(share):
    for n in range(1, 2000):
        rank = metrics.percentile(range(1, n + 1), share)
        hundredths = round(share * 100)
        assert (rank - 1) * 100 < hundredths * n <= rank * 100, n


def test_nothing_divided_by_nothing_is_unknown():
    assert metrics.rate(0, 1.0) is None
    assert metrics.rate(10, 0.0) is None
    assert metrics.rate(10, None) is None
    assert metrics.rate(10, 2.0) == 5.0
    assert metrics.ceiling_tps(None, 1) is None
    assert metrics.ceiling_tps(100, 0) is None
    assert metrics.achieved_gbs(None, 1.0) is None
