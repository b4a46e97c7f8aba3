"""The host's part of a step: measured without computing anything, a floor under every expected time, and named where it decides."""

import gc
from dataclasses import replace

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits.test_limits_diagnosis import PLAIN, reply
from tests.limits.test_limits_prefill_chunk import work_named
from tokamac.app.verdict import brief, lines, sentence
from tokamac.engine.kv import install_seam, plan_caches
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.diagnosis import Diagnosis, diagnose
from tokamac.engine.perf.footprint import module_of
from tokamac.engine.perf.hardware import lookup, table
from tokamac.engine.perf.machine import Machine, elsewhere
from tokamac.engine.perf.roofline import (
    Fitted,
    Host,
    HostLimited,
    calls_of,
    decode_phase,
    fitted,
    measure_host,
    prefill_phase,
    range_of,
)
from tokamac.engine.perf.what_if import WhatIfCase, outcome

NAMES = ["gemma-3-270m", "Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-30B-A3B"]
APPLE = [lookup(row["chip"], row["gpu_cores"]) for row in table() if row["chip"].startswith("Apple")]
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
    pace = HostLimited(device, host)
    decode = decode_phase(work, chip, pace, context)
    assert decode.expected_s >= max(host.step_s, decode_phase(work, chip, device, context).expected_s)
    assert decode.by_host == (decode.expected_s == host.step_s)
    prompt, alone = (prefill_phase(work, chip, each, tokens, chunk=512) for each in (pace, device))
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
    assert entry is not None
    here = Machine(M4, 16 << 30, None, kernels(), "metal", local=True)
    found = outcome(entry.config, WhatIfCase(bits=4), here)
    assert found.expected_tps is not None
    assert found.expected_tps <= decode_phase(work_named("gemma-3-270m"), M4, kernels(), 4096).expected_tps
    assert found.ttft_s is not None
    assert found.reason is None


def test_measuring_builds_a_step_and_computes_nothing():
    entry = find("Llama-3.3-70B")
    assert entry is not None
    install_seam()
    model = module_of(entry.config, packing=Packing(4))
    plan = plan_caches(model, entry.config, KVSpec())
    gc.collect()
    before, pool = mx.get_active_memory(), mx.get_cache_memory()
    mx.reset_peak_memory()
    host = measure_host(model, lambda: plan.make(None))
    assert host is not None
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
    return found, "\n".join([brief(metrics, found), sentence(metrics, found), *lines(found)])


def test_a_reply_bound_by_the_host_is_told_so_and_no_quiet_machine_is_recommended():
    found, text = told(prefill_s=0.08, step_s=0.025)
    assert [part.bound for part in found.parts] == [None, "host", "host"]
    assert not any(part.behind for part in found.parts)
    assert found.remedies == ()
    assert "bound by the host (Python, launching kernels)" in text
    assert "unusually slow" not in text
    assert "undisturbed" not in text
    assert "expected = 1 ÷ max(host, " in text
    assert "expected = 2 × (host + round trip) = 2 × (10.0 ms + 0.10 ms) = 20.2 ms" in text


def test_where_the_device_is_slower_the_host_is_not_named():
    work = work_named("Llama-3.1-8B")
    metrics = reply(100, 101, 1.0, 0.05, work=work)
    found = diagnose(metrics, work, M4, HostLimited(kernels(), Host(step_s=0.002)), PLAIN)
    assert found is not None
    assert found.part("decode").bound == "memory"
    assert all(part.bound != "host" for part in found.parts)
    terms = {term.key: term for term in found.terms}
    assert terms["host"].value == 0.002
    assert "max({host}, {weights} ÷ " in terms["expected"].formula
