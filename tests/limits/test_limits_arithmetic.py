"""The domain's "Numbers to reproduce", by hand-worked cases: bytes, ceilings, roofline, KV, and the rates of the metrics module."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits.test_limits_prediction import EIGHT_B
from tokamac.engine import metrics
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import config_cost
from tokamac.engine.perf.config_cost import KVLayer, kv_bytes, kv_bytes_per_token, kv_layers
from tokamac.engine.perf.hardware import Chip, lookup
from tokamac.engine.perf.roofline import limits_for, prefill_phase, ridge_point
from tokamac.engine.perf.workload import visible_pairs

H100 = Chip("NVIDIA H100", None, 3350.0, 989.0, "table")


def test_llama_3_8b_in_fp16_on_an_h100():
    assert metrics.ceiling_tps(3350, 16_000_000_000) == pytest.approx(209, abs=0.5)


def test_one_pass_of_six_prompt_tokens():
    one = prefill_phase(EIGHT_B, replace(H100, fp16_tflops=990.0), None, 6)
    arithmetic_s = one.operations / 990e12
    assert one.ceiling_s * 1e3 == pytest.approx(4.78, abs=0.005)
    assert arithmetic_s * 1e3 == pytest.approx(0.10, abs=0.005)
    assert arithmetic_s / one.ceiling_s == pytest.approx(0.020, abs=0.0005)
    assert one.ceiling_tps == pytest.approx(1256, abs=1)
    assert one.bound == "memory"


def test_a_long_prompt_is_bound_by_arithmetic_above_the_ridge():
    assert ridge_point(3350, 989) == pytest.approx(295, abs=0.5)
    many = prefill_phase(EIGHT_B, H100, None, 600)
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


def test_thirty_tokens_a_second_of_35_gigabytes():
    assert metrics.achieved_gbs(35_000_000_000, 30.0) == 1050


def test_kv_of_a_13b():
    config = {"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
    layers = kv_layers(config)
    assert kv_bytes_per_token(layers, KVSpec()) == 819_200
    assert kv_bytes(layers, KVSpec(), 4096) / 1e9 == pytest.approx(3.4, abs=0.05)


def test_kv_of_a_7b_at_2048_tokens():
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    assert kv_bytes(kv_layers(config), KVSpec(), 2048) / 1e9 == pytest.approx(1.07, abs=0.005)


def test_fourteen_steps_with_and_without_a_cache():
    assert sum(visible_pairs(1, cached, None) for cached in range(14)) == visible_pairs(14, 0, None) == 105


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


@pytest.mark.parametrize("n", [2, 5, 20])
def test_steps_of_50_ms_read_20_tokens_a_second(n):
    assert metrics.decode_rate([7.0 + 0.05 * i for i in range(n)]) == pytest.approx(20.0, rel=1e-9)


@pytest.mark.parametrize("n", [0, 1])
def test_one_token_has_no_rate(n):
    assert metrics.decode_rate([1.0] * n) is None
    assert metrics.gaps_ms([1.0] * n) == ()
    assert metrics.gap_percentiles(()) is None


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
