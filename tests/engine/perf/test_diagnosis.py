"""The verdict on a reply, worked by hand on a machine of round numbers, and the host's part of a step."""

import gc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kv.models import tiny_llama
from tests.engine.kv.test_plan import hybrid, recurrent
from tests.engine.perf.test_peak_memory import work_named
from tests.tiny import make_tiny
from tokamac.app.reports.verdict import headline, lines, remark, sentence
from tokamac.engine import Engine, Message, Sampling
from tokamac.engine.kv.attention import install_seam
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.metrics import Metrics, rate
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.diagnosis import MOST, WORTH_S, Diagnosis, Situation, diagnose, packed_layers
from tokamac.engine.perf.footprint import module_of
from tokamac.engine.perf.hardware import Chip, known_chips, lookup
from tokamac.engine.perf.roofline import (
    Fitted,
    Heads,
    Host,
    HostLimited,
    KVUse,
    Workload,
    calls_of,
    decode_phase,
    fitted,
    measure_host,
    prefill_phase,
    range_of,
)
from tokamac.engine.perf.what_if import Machine, WhatIfCase, elsewhere, outcome

CHIP = Chip("Test", 10, bandwidth_gbs=400.0, fp16_tflops=20.0, source="table")
KV = KVUse(bytes_per_token=131_072, limit=None, fixed_bytes=0)
WORK = Workload(
    traits=("dense",), layers=32, hidden=4096, launches=500, shared_bytes=4_000_000_000, expert_bytes=0, active=0.0,
    prefill_parameters=7_500_000_000, head_parameters=500_000_000, kv=(KV,), attention=(), products=(),
    query_heads=32, vocabulary=1000,
)  # fmt: skip

MIXTURE = replace(
    WORK,
    traits=("mixture",),
    shared_bytes=1_000_000_000,
    expert_bytes=24_000_000_000,
    active=1 / 8,
    prefill_parameters=2_000_000_000,
)

SHARING = replace(WORK, kv=(replace(KV, heads=Heads(queries=640, keys=32, key_dim=128, value_dim=128)),))


class RoundLatency:
    """Four fifths of both roofs, and a millisecond a step: 12.5 ms for the weights, 3.125 ns for a byte of keys and values."""

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float:
        return (work.step_bytes(context, batch) or 0) / 320e9 + 1e-3

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float:
        del chunk
        return max((work.prefill_operations(tokens, cached) or 0) / 16e12, (work.weight_bytes() or 0) / 320e9)


LATENCY = RoundLatency()
PLAIN = Situation(packed_kv=None, bits_per_weight=4.5, keeps_prompts=True, chunk=512)
PACKED = (replace(KV, bytes_per_token=69_632),)  # 8.5 of 16 bits


def reply(
    prompt: int,
    generated: int,
    prefill_s: float,
    step_s: float,
    *,
    wait_s: float = 0.0,
    cached: int = 0,
    work: Workload = WORK,
) -> Metrics:
    """The metrics of a reply with even gaps, as the recorder would tell them."""
    context = prompt + generated // 2
    step = decode_phase(work, CHIP, LATENCY, context)
    ttft_s = wait_s + prefill_s
    return Metrics(
        prompt_tokens=prompt, cached_tokens=cached, prefill_tokens=prompt - cached, generated_tokens=generated,
        ttft_s=ttft_s, prefill_s=prefill_s, total_s=ttft_s + (generated - 1) * step_s,
        prefill_tps=rate(prompt - cached, prefill_s), decode_tps=rate(1, step_s) if generated > 1 else None,
        itl_ms=None, kv_bytes=None, weight_bytes_per_token=work.weight_bytes(),
        kv_bytes_per_step=work.kv_bytes(context), achieved_gbs=None, ceiling_tps=step.ceiling_tps,
        expected_tps=step.expected_tps, peak_memory_bytes=None,
    )  # fmt: skip


def verdict(metrics: Metrics, situation: Situation = PLAIN, work: Workload = WORK) -> Diagnosis:
    found = diagnose(metrics, work, CHIP, LATENCY, situation)
    assert found is not None
    return found


def test_a_long_prompt_is_bound_by_arithmetic():
    """4,000 × 15 GFLOP and the head's 1 are 60.001 TFLOP: 3.00 s at 20 TFLOP/s, 3.75 s at four fifths of that."""
    found = verdict(reply(4000, 50, prefill_s=4.0, step_s=0.016, wait_s=0.1))
    assert found.slowest.name == "prefill"
    assert found.slowest.bound == "compute"
    assert found.slowest.of_ceiling == pytest.approx(0.750, abs=1e-3)
    assert found.slowest.of_expected == pytest.approx(0.9375, abs=1e-3)
    assert not found.slowest.behind
    assert found.part("wait").seconds == pytest.approx(0.1)


def test_a_long_prompt_is_helped_by_half_of_it():
    """Half the prompt is 1.875 s less to read; 2,000 tokens less in each of 49 steps are 262 MB, 0.819 ms: 40 ms in all."""
    (only,) = verdict(reply(4000, 50, prefill_s=4.0, step_s=0.016)).remedies
    assert (only.name, only.to) == ("shorter context", 2000)
    assert only.gain_s == pytest.approx(1.875 + 0.0401, abs=1e-3)
    assert only.before_tps == pytest.approx(62.5)
    assert only.after_tps == pytest.approx(1 / (0.016 - 0.000819), abs=0.01)


def test_a_prompt_that_was_not_kept_would_have_cost_a_step_at_least():
    """All but the last token there already: the weights are read once, 12.5 ms, instead of 3.75 s."""
    found = verdict(reply(4000, 50, prefill_s=4.0, step_s=0.016), replace(PLAIN, keeps_prompts=False))
    assert found.remedies[0].name == "prompt cache"
    assert found.remedies[0].gain_s == pytest.approx(3.7376, abs=1e-3)
    assert found.remedies[0].after_tps is None


def test_decode_is_bound_by_memory_and_packed_keys_and_values_help_by_their_bytes():
    """At 16,512 tokens a step reads 4 GB and 2.164 GB: 15.4 ms at least, 20.3 expected. At 8.5 bits: 1.014 GB less, 3.170 ms."""
    metrics = reply(16384, 256, prefill_s=0.02, step_s=0.025, cached=16383)
    found = verdict(metrics, replace(PLAIN, packed_kv=PACKED))
    assert found.slowest.name == "decode"
    assert found.slowest.bound == "memory"
    assert found.slowest.of_ceiling == pytest.approx(0.01541 / 0.025, abs=1e-3)
    assert found.slowest.of_expected == pytest.approx(0.02026 / 0.025, abs=1e-3)
    shorter, packed = found.remedies
    assert shorter.name == "shorter context"
    assert (packed.name, packed.to) == ("packed keys and values", 8)
    assert packed.gain_s == pytest.approx(255 * 0.003170, rel=1e-3)
    assert packed.before_tps == pytest.approx(40.0)
    assert packed.after_tps == pytest.approx(1 / (0.025 - 0.003170), rel=1e-4)


def test_weights_of_16_bits_are_helped_by_4():
    """16 GB at 16 bits are 4.5 GB at 4.5: 11.5 GB less a step, 35.94 ms at four fifths of 400 GB/s."""
    work = replace(WORK, shared_bytes=16_000_000_000)
    metrics = reply(100, 101, prefill_s=0.1, step_s=0.055, work=work)
    (only,) = verdict(metrics, replace(PLAIN, bits_per_weight=16.0), work).remedies
    assert (only.name, only.to) == ("packed weights", 4)
    assert only.gain_s == pytest.approx(100 * 11.5e9 / 320e9, rel=1e-3)


def test_a_reply_that_waited_is_said_to_have_waited():
    found = verdict(reply(100, 10, prefill_s=0.06, step_s=0.014, wait_s=3.0))
    assert (found.slowest.name, found.slowest.bound, found.remedies) == ("wait", None, ())


def test_a_machine_that_is_held_up_is_told_and_what_that_cost():
    """Expected 13.8 ms a step, measured 30: 46 % of the expected, 42 % of the ceiling, 16.2 ms lost a step."""
    found = verdict(reply(100, 101, prefill_s=0.1, step_s=0.030))
    assert found.slowest.behind
    assert found.slowest.bound == "overhead"
    (only,) = found.remedies
    assert only.name == "quiet machine"
    assert only.gain_s == pytest.approx(100 * (0.030 - 0.013562), abs=0.02)


@pytest.mark.parametrize(
    ("throttles", "name"),
    [(("thermal",), "cool chip"), (("low power",), "full power"), (("thermal", "low power"), "full power")],
)
def test_where_the_system_slowed_the_chip_down_the_remedy_ends_that(throttles, name):
    slow, plain = reply(100, 101, prefill_s=0.1, step_s=0.030), verdict(reply(100, 101, prefill_s=0.1, step_s=0.030))
    found = verdict(slow, replace(PLAIN, throttles=throttles))
    assert found.throttles == throttles
    assert found.remedies == (replace(plain.remedies[0], name=name),)


def test_what_slowed_the_chip_down_is_told_of_a_reply_that_was_quick_as_well():
    found = verdict(reply(100, 101, prefill_s=0.1, step_s=0.0136), replace(PLAIN, throttles=("low power",)))
    assert (found.throttles, found.remedies) == (("low power",), ())


def test_what_both_phases_lost_is_told_of_both():
    """Four tokens: 12.5 ms to read the weights once, measured 3.6 s; a step 13.5 ms, measured 30: 10 steps."""
    (only,) = verdict(reply(4, 11, prefill_s=3.6, step_s=0.030)).remedies
    assert only.name == "quiet machine"
    assert (only.before_s, only.after_s) == (3.6, pytest.approx(0.0125, abs=1e-4))
    assert (only.before_tps, only.after_tps) == (pytest.approx(1 / 0.030), pytest.approx(1 / 0.013504, rel=1e-3))
    assert only.gain_s == pytest.approx(3.5875 + 10 * 0.016496, abs=1e-3)


def test_of_a_phase_that_went_as_expected_nothing_is_told():
    """A reply whose prompt alone was held up, and one whose steps alone were."""
    (reading,) = verdict(reply(4, 11, prefill_s=3.6, step_s=0.0136)).remedies
    assert (reading.before_tps, reading.after_tps, reading.before_s) == (None, None, 3.6)
    (writing,) = verdict(reply(100, 101, prefill_s=0.1, step_s=0.030)).remedies
    assert (writing.before_s, writing.after_s) == (None, None)


def test_without_a_latency_nothing_is_promised():
    metrics = replace(reply(4000, 50, prefill_s=4.0, step_s=0.016), expected_tps=None)
    found = diagnose(metrics, WORK, CHIP, None, Situation(PACKED, 16.0, keeps_prompts=False, chunk=512))
    assert found.remedies == ()
    assert found.slowest.of_expected is None
    assert found.slowest.of_ceiling == pytest.approx(0.750, abs=1e-3)


def test_without_a_token_there_is_nothing_to_explain():
    metrics = replace(reply(10, 1, prefill_s=0.1, step_s=1.0), ttft_s=None, prefill_s=None, total_s=None)
    assert diagnose(metrics, WORK, CHIP, LATENCY, PLAIN) is None


def test_of_an_unknown_peak_it_is_only_said_what_a_long_prompt_did_not_wait_for():
    chip = replace(CHIP, fp16_tflops=None)
    found = diagnose(reply(4000, 50, prefill_s=4.0, step_s=0.030), WORK, chip, None, PLAIN)
    assert (found.part("prefill").bound, found.part("prefill").of_ceiling) == ("not memory", None)
    assert found.part("decode").bound == "not memory"


@pytest.mark.parametrize("peak_tflops", [None, 20.0])
def test_of_an_unknown_bandwidth_nothing_is_said_of_what_a_phase_waited_for(peak_tflops: float | None):
    chip = Chip("Test", None, None, peak_tflops, "unknown")
    metrics = replace(reply(4000, 50, prefill_s=4.0, step_s=0.016), ceiling_tps=None, expected_tps=None)
    found = diagnose(metrics, WORK, chip, None, PLAIN)
    assert [(part.bound, part.of_ceiling) for part in found.parts] == [(None, None)] * 3


def test_a_short_prompt_that_took_far_longer_than_either_roof_allows_waited_for_neither():
    assert verdict(reply(4, 10, prefill_s=0.5, step_s=0.014)).part("prefill").bound == "overhead"
    assert verdict(reply(4, 10, prefill_s=0.02, step_s=0.014)).part("prefill").bound == "memory"


def test_a_prompt_of_many_passes_waits_for_arithmetic_however_slow_the_kernels_are():
    assert verdict(reply(4000, 10, prefill_s=60.0, step_s=0.014)).part("prefill").bound == "compute"


def test_a_step_that_computes_longer_than_it_reads_waits_for_arithmetic():
    """16 GFLOP a step at 1 TFLOP/s are 16 ms, reading 4 GB takes 10."""
    chip = replace(CHIP, fp16_tflops=1.0)
    found = diagnose(reply(4, 10, prefill_s=0.02, step_s=0.020), WORK, chip, None, PLAIN)
    assert found.part("decode").bound == "compute"


def test_every_number_of_a_formula_is_there_before_it():
    chip = lookup("Apple M4 Max", 40)
    found = diagnose(reply(4000, 50, prefill_s=4.0, step_s=0.016), WORK, chip, fitted(chip), PLAIN)
    seen: set[str] = set()
    for term in found.terms:
        named = {part.partition("}")[0] for part in term.formula.split("{")[1:]}
        assert named <= seen, term
        seen.add(term.key)
    assert all(term.value is not None for term in found.terms if term.key != "achieved")


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("work", [WORK, MIXTURE, SHARING], ids=["dense", "mixture", "many query heads"])
def test_the_formula_of_what_is_expected_gives_what_is_expected(work: Workload, batch: int):
    """The constants in the words are those in the arithmetic: put in, they give the same but for their rounding."""
    chip = lookup("Apple M4 Max", 40)
    latency = fitted(chip)
    step = decode_phase(work, chip, latency, 4025, batch)
    measured = reply(4000, 50, prefill_s=4.0, step_s=0.016, work=work)
    ceiling_tps = 546e9 / (step.bytes_read or 1)
    metrics = replace(
        measured, batch_width=float(batch), ceiling_tps=ceiling_tps, expected_tps=(step.expected_tps or 0) / batch
    )
    found = diagnose(metrics, work, chip, latency, PLAIN)
    terms = {term.key: term for term in found.terms}
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}
    values = {f"{{{key}}}": repr((term.value or 0.0) * scale.get(term.unit, 1)) for key, term in terms.items()}
    for key in ("step", "intensity", "ridge", "ceiling", "expected", "rate", "least", "wanted"):
        text = terms[key].formula
        for written, meant in {"×": "*", "÷": "/", "−": "-", "%": "*0.01", **values}.items():
            text = text.replace(written, meant)
        own = scale.get(terms[key].unit, 1)
        assert eval(text, {"max": max}) / own == pytest.approx((terms[key].value or 0), rel=2e-3), (key, text)


# What never happens -------------------------------------------------------------------------------------------------------

REPLIES = st.builds(
    reply,
    prompt=st.integers(1, 60_000),
    generated=st.integers(1, 3000),
    prefill_s=st.floats(1e-4, 300),
    step_s=st.floats(1e-4, 3),
    wait_s=st.floats(0, 10),
)
SITUATIONS = st.builds(
    Situation,
    packed_kv=st.sampled_from([None, PACKED]),
    bits_per_weight=st.sampled_from([None, 4.25, 4.5, 8.5, 16.0]),
    keeps_prompts=st.booleans(),
    chunk=st.sampled_from([256, 2048]),
)


@given(REPLIES, SITUATIONS)
def test_gains_are_worth_a_sentence_in_order_few_and_less_than_the_reply_took(metrics: Metrics, situation: Situation):
    found = verdict(metrics, situation).remedies
    gains = [remedy.gain_s for remedy in found]
    assert len(found) <= MOST
    assert gains == sorted(gains, reverse=True)
    assert all(WORTH_S <= gain <= (metrics.total_s or 0) for gain in gains)
    assert all((remedy.after_tps or 1) >= (remedy.before_tps or 0) for remedy in found if remedy.before_tps)


@given(REPLIES, SITUATIONS)
def test_what_is_told_of_both_phases_is_the_seconds_that_are_promised(metrics: Metrics, situation: Situation):
    for remedy in verdict(metrics, situation).remedies:
        reading_s = (remedy.before_s or 0.0) - (remedy.after_s or 0.0)
        step_s = 1 / remedy.before_tps - 1 / (remedy.after_tps or 1) if remedy.before_tps else 0.0
        told_s = reading_s + (metrics.generated_tokens - 1) * step_s
        assert told_s == pytest.approx(remedy.gain_s, rel=1e-6), remedy
        assert reading_s >= 0


@given(REPLIES, SITUATIONS)
def test_nothing_is_promised_that_the_bandwidth_forbids(metrics: Metrics, situation: Situation):
    lightest = replace(WORK, kv=PACKED, shared_bytes=round(WORK.shared_bytes * 4.5 / 16))
    bound = decode_phase(lightest, CHIP, LATENCY, metrics.generated_tokens // 2).ceiling_tps
    most = max(bound, metrics.decode_tps or 0.0)  # who measured more than physics allows is not told otherwise
    assert all((remedy.after_tps or 0) <= most * 1.001 for remedy in verdict(metrics, situation).remedies)


@given(REPLIES, SITUATIONS)
def test_the_parts_are_the_whole(metrics: Metrics, situation: Situation):
    found = verdict(metrics, situation)
    assert sum(part.seconds for part in found.parts) == pytest.approx(metrics.total_s)
    assert found.slowest.seconds == max(part.seconds for part in found.parts)


# From a real reply --------------------------------------------------------------------------------------------------------


def test_every_finished_reply_carries_its_diagnosis(tmp_path: Path):
    with Engine.load(make_tiny(tmp_path / "tiny"), prompt_cache=None) as engine:
        *_, end = engine.generate([Message("user", "Hello")], Sampling(max_tokens=8))
        assert sum(part.seconds for part in end.diagnosis.parts) == pytest.approx(end.metrics.total_s)
        one = {term.key: term.value for term in end.diagnosis.terms}
        assert one["step"] == end.metrics.weight_bytes_per_token + end.metrics.kv_bytes_per_step
        assert one["rate"] == end.metrics.decode_tps


# What can be packed -------------------------------------------------------------------------------------------------------


def layers_of(model, kv=KVSpec(), kind="llama"):  # noqa: B008  # frozen
    return plan_caches(model, {"model_type": kind}, kv).layers


def test_packed_caches_are_those_that_the_flag_would_make():
    for head_dim in (32, 64, 96):
        model = tiny_llama(head_dim=head_dim)
        packed = packed_layers(layers_of(model), 64)
        wanted = layers_of(model, KVSpec(key_bits=8, value_bits=8))
        assert [layer.bytes_per_token for layer in packed] == [layer.bytes_per_token for layer in wanted]


def test_what_is_packed_or_can_not_be_packed_is_no_remedy():
    model = tiny_llama()
    assert packed_layers(layers_of(model, KVSpec(key_bits=8, value_bits=8)), 64) is None
    assert packed_layers(layers_of(tiny_llama(head_dim=16)), 64) is None
    assert packed_layers(layers_of(recurrent(), kind="mamba"), 64) is None


def test_of_a_hybrid_only_the_layers_with_keys_shrink():
    before = layers_of(hybrid(), kind="qwen3_next")
    after = packed_layers(before, 32)
    shrunk = [old.ours is not None for old in before]
    assert [new.bytes_per_token < old.bytes_per_token for new, old in zip(after, before, strict=True)] == shrunk
    assert [layer.fixed_bytes for layer in after] == [layer.fixed_bytes for layer in before]


# The host's part of a step: measured without computing anything, a floor under every expected time, and named where
# it decides.

NAMES = ["gemma-3-270m", "Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-30B-A3B"]
APPLE = [lookup(row["chip"], row["gpu_cores"]) for row in known_chips() if row["chip"].startswith("Apple")]
M4 = lookup("Apple M4", 10)


def kernels(chip_name: str = "Apple M4", cores: int = 10) -> Fitted:
    found = fitted(lookup(chip_name, cores))
    assert found is not None
    return found


hosts = st.builds(Host, st.floats(1e-5, 0.1), st.floats(0, 1e-3))


@settings(deadline=None)  # the first of a model takes longer
@given(st.sampled_from(NAMES), st.sampled_from(APPLE), hosts, st.integers(1, 100_000), st.integers(1, 9_000))
def test_expected_is_never_above_what_the_host_allows_nor_the_device(name, chip, host, context, tokens):
    work, device = work_named(name), fitted(chip)
    latency = HostLimited(device, host)
    decode = decode_phase(work, chip, latency, context)
    assert decode.expected_s >= max(host.step_s, decode_phase(work, chip, device, context).expected_s)
    assert decode.by_host == (decode.expected_s == host.step_s)
    prompt, alone = (prefill_phase(work, chip, each, tokens, chunk=512) for each in (latency, device))
    if alone.expected_s is not None:
        assert prompt.expected_s >= max(alone.expected_s, calls_of(tokens, 512) * host.step_s)


def test_a_prompt_is_its_chunks_and_the_step_of_its_last_token():
    assert [calls_of(tokens, 512) for tokens in (1, 2, 513, 514)] == [1, 2, 2, 3]


def test_of_a_mac_that_is_only_named_the_speed_of_a_small_model_is_unknown():
    place = elsewhere("Apple M4", 10, 16)
    for entry in catalogue():
        if entry.config is None or entry.name not in NAMES:
            continue
        found = outcome(entry.config, WhatIfCase(bits=4), place)
        small = (work_named(entry.name).weight_bytes() or 0) < range_of().least_weight_bytes
        assert (found.expected_tps is None) == (found.ttft_s is None) == small
        assert found.ceiling_tps is not None
        assert ("waits for the processor" in (found.reason or "")) == small


def test_on_this_machine_it_is_what_the_host_allows():
    """As ``inspect`` sees it: the model is a skeleton, and its steps are built, never computed."""
    entry = find("gemma-3-270m")
    here = Machine(M4, 16 << 30, None, kernels(), "metal", local=True)
    found = outcome(entry.config, WhatIfCase(bits=4), here)
    assert found.expected_tps <= decode_phase(work_named("gemma-3-270m"), M4, kernels(), 4096).expected_tps
    assert found.ttft_s is not None
    assert found.reason is None


def test_measuring_builds_a_step_and_computes_nothing():
    entry = find("Llama-3.3-70B")
    install_seam()
    model = module_of(entry.config, packing=Packing(4))
    plan = plan_caches(model, entry.config, KVSpec())
    gc.collect()
    before, pool = mx.get_active_memory(), mx.get_cache_memory()
    mx.reset_peak_memory()
    host = measure_host(model, lambda: plan.make(None))
    assert 0 < host.step_s < 5
    assert host.wait_s > 0
    gc.collect()
    assert mx.get_peak_memory() - before < 1 << 20
    assert mx.get_active_memory() + mx.get_cache_memory() - before - pool < 1 << 20


def test_a_model_whose_step_can_not_be_built_leaves_the_host_unknown():
    def broken(ids: mx.array, cache: list[object]) -> mx.array:
        raise ValueError("shapes do not fit")

    assert measure_host(broken, list) is None


SMALL = replace(
    work_named("gemma-3-270m"), shared_bytes=100_000_000, prefill_parameters=200_000_000, head_parameters=0, kv=(), attention=()
)  # fmt: skip


def told(prefill_s: float, step_s: float) -> tuple[Diagnosis, str]:
    metrics = reply(100, 101, prefill_s, step_s, work=SMALL)
    found = diagnose(metrics, SMALL, M4, HostLimited(kernels(), Host(step_s=0.01, wait_s=1e-4)), PLAIN)
    assert found is not None
    return found, "\n".join(
        [remark(metrics, found), *headline(metrics, found), sentence(metrics, found), *lines(found)]
    )


def test_a_reply_bound_by_the_host_is_told_so_and_no_quiet_machine_is_recommended():
    found, text = told(prefill_s=0.08, step_s=0.025)
    assert [part.bound for part in found.parts] == [None, "host", "host"]
    assert not any(part.behind for part in found.parts)
    assert found.remedies == ()
    assert "limited by the processor, which prepares each step (Python, launching kernels)" in text
    assert "unusually slow" not in text
    assert "nothing else running" not in text
    assert "expected = 1 ÷ max(host, " in text
    assert "expected = 2 × (host + round trip) = 2 × (10.0 ms + 0.10 ms) = 20.2 ms" in text


def test_where_the_device_is_slower_the_host_is_not_named():
    work = work_named("Llama-3.1-8B")
    metrics = reply(100, 101, 1.0, 0.05, work=work)
    found = diagnose(metrics, work, M4, HostLimited(kernels(), Host(step_s=0.002)), PLAIN)
    assert found.part("decode").bound == "memory"
    assert all(part.bound != "host" for part in found.parts)
    terms = {term.key: term for term in found.terms}
    assert terms["host"].value == 0.002
    assert "max({host}, {weights} ÷ " in terms["expected"].formula


def test_a_reply_beside_three_others_is_judged_by_the_step_that_all_four_share():
    """4 GB of weights are read once for all: (4 + 4 × keys and values) ÷ 320 GB/s + 1 ms, and alone a quarter of these."""
    alone = decode_phase(WORK, CHIP, LATENCY, 225)
    shared = decode_phase(WORK, CHIP, LATENCY, 225, 4)
    assert alone.expected_s < shared.expected_s < 4 * alone.expected_s
    metrics = replace(
        reply(100, 250, prefill_s=0.1, step_s=shared.expected_s),
        batch_width=3.96,
        expected_tps=1 / shared.expected_s,
        kv_bytes_per_step=WORK.kv_bytes(225, 4),
    )
    found = verdict(metrics)
    terms = {term.key: term.value for term in found.terms}
    assert found.part("decode").of_expected == pytest.approx(1.0)
    assert found.part("decode").bound == "memory"
    assert not found.part("decode").behind
    assert terms["width"] == 3.96
    assert terms["alone"] == pytest.approx(1 / alone.expected_s)
    assert terms["kv"] == 4 * WORK.kv_bytes(225)
    assert terms["step"] == shared.bytes_read
    assert "width" not in {term.key for term in verdict(replace(metrics, batch_width=1.0)).terms}
