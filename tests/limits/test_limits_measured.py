"""A pace made of timed parts: its arithmetic by hand, and the parts of a real tiny model timed, kept and found again."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits.test_limits_config_cost import FAMILIES, built
from tests.limits.test_limits_prediction import EIGHT_B
from tests.tiny import make_tiny
from tokamac.engine.device import device_kind
from tokamac.engine.kv import plan_caches
from tokamac.engine.model.config import normalise
from tokamac.engine.model.cpu import is_unpacked
from tokamac.engine.model.loader import load_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import bandwidth, timing
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.timing import (
    PASSES,
    ROWS,
    AttentionLatency,
    LatencyProfiler,
    MeasuredLatency,
    PartLatency,
    TimedModel,
    attention_depths,
    can_measure,
    interpolate,
    kept_tflops,
)
from tokamac.engine.perf.workload import Product, work_of

MATRIX = Product(64, 32, None, count=3)
HEAD = Product(128, 32, None, head=True)
PACE = MeasuredLatency(
    products=((MATRIX, PartLatency(1e-3, 256e-3)), (HEAD, PartLatency(5e-3, 5e-3))),
    attention=(AttentionLatency(2, None, ((0, 1e-3), (1000, 2e-3)), ((0, 10e-3), (1000, 265e-3))),),
    kernel=PartLatency(1e-4, 1e-4),
    other_kernels=10,
    sampling_s=7e-3,
)


def test_rows_take_time_in_proportion():
    timed = PartLatency(1.0, 1.0 + 2 * (ROWS - 1))
    assert [timed.of(rows) for rows in (1, 2, 11, ROWS, 2 * ROWS)] == [1, 3, 21, 511, 1023]


def test_a_depth_between_two_is_on_their_line():
    points = ((0, 1.0), (100, 2.0), (300, 6.0))
    assert [interpolate(points, depth) for depth in (0, 50, 100, 200, 300, 400)] == [1, 1.5, 2, 4, 6, 8]
    assert interpolate(((10, 1.0), (20, 3.0)), 0) == 0  # no time is below nothing


@given(st.lists(st.floats(0, 1), min_size=2, max_size=4).map(sorted), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_greater_depth_never_takes_less(seconds, depth, more):
    points = tuple(zip((0, 64, 1024, 4096), seconds, strict=False))
    assert interpolate(points, depth) <= interpolate(points, depth + more) + 1e-12


@pytest.mark.parametrize(
    ("limit", "depths"),
    [(None, (64, 1024, 4096)), (100_000, (64, 1024, 4096)), (2000, (64, 1024, 2000)), (576, (64, 576)), (48, (0, 48)),
     (1024, (64, 1024)), (64, (0, 64)), (65, (64, 65))],
)  # fmt: skip
def test_attention_is_timed_at_two_depths_or_more(limit, depths):
    assert attention_depths(limit) == depths


def test_a_step_is_the_sum_of_its_parts():
    multiplying, attending, others = 3 * 1e-3 + 5e-3, 2 * 1.5e-3, 10 * 1e-4
    assert PACE.decode_s(EIGHT_B, 500) == pytest.approx(multiplying + attending + others + 7e-3)


def test_several_sequences_were_not_timed():
    assert PACE.decode_s(EIGHT_B, 500, batch=2) is None


def test_a_windowed_layer_takes_no_longer_beyond_its_window():
    layer = replace(PACE.attention[0], limit=100)
    assert layer.of(1, 100) == layer.of(1, 10_000) == pytest.approx(2 * 1.1e-3)


def test_a_prompt_is_its_chunks_and_the_first_step():
    # 301 tokens after 100: 200 at depth 100, 100 at depth 300, and the last token's step after 401.
    def chunk(rows: int, depth: int) -> float:
        row, many = 1e-3 + depth * 1e-6, 10e-3 + depth * 255e-6
        attending = 2 * (row + (many - row) * (rows - 1) / 255)
        return 3 * rows * 1e-3 + attending + 10 * 1e-4

    expected = chunk(200, 100) + chunk(100, 300) + PACE.decode_s(EIGHT_B, 401)
    assert PACE.prefill_s(EIGHT_B, 301, 100, 200) == pytest.approx(expected)
    assert PACE.prefill_s(EIGHT_B, 1, 100, 200) == PACE.decode_s(EIGHT_B, 101)


@pytest.mark.parametrize(("tokens", "cached", "chunk"), [(1, 0, 16), (40_000, 0, 100), (5001, 77, 250), (900, 9000, 7)])
def test_a_long_prompt_is_the_sum_of_its_chunks_though_they_are_not_walked(tokens, cached, chunk):
    bent = AttentionLatency(2, 1500, ((0, 1e-3), (64, 1.5e-3), (1024, 4e-3)), ((0, 9e-3), (512, 20e-3), (4096, 60e-3)))
    pace = replace(PACE, attention=(*PACE.attention, bent, replace(bent, limit=None), replace(bent, limit=48)))
    end, expected = cached + tokens - 1, pace.decode_s(EIGHT_B, cached + tokens)
    for at in range(cached, end, chunk):
        rows = min(chunk, end - at)
        expected += pace._products(rows) + pace._attention_and_kernels(rows, at)
    assert pace.prefill_s(EIGHT_B, tokens, cached, chunk) == pytest.approx(expected)


def test_a_prompt_of_any_length_is_a_few_sums(monkeypatch):
    asked = []
    around = MeasuredLatency._attention_and_kernels
    monkeypatch.setattr(MeasuredLatency, "_attention_and_kernels", lambda *given: asked.append(given) or around(*given))
    assert PACE.prefill_s(EIGHT_B, 100_000_000, 0, 16) > 0
    assert len(asked) < 50


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is timed a few times only: no test here looks at how long one took."""
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "LEAST_TRIALS", 1)
    monkeypatch.setattr(timing, "measure_tflops", lambda device: 0.5)
    monkeypatch.setattr(timing, "is_busy", lambda _: False)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(
        make_tiny(tmp_path_factory.mktemp("tiny")), dtype=None, device=device_kind(), progress=lambda *_: None
    )


def subject_of(loaded: Any, kv: KVSpec | None = None, machine: str = "a machine") -> TimedModel:
    plan = plan_caches(loaded.module, loaded.config, kv or KVSpec())
    work = work_of(loaded.module, loaded.config, cost_of_model(loaded.module, loaded.config), plan)
    return TimedModel(work, plan, is_unpacked(loaded.module), device_kind(), machine)


def test_all_parts_are_timed_kept_and_found_again(loaded, tmp_path):
    file = tmp_path / "cache" / "parts.json"
    first = LatencyProfiler(subject_of(loaded), file)
    # The machine's peak; three kinds of matrices twice, and the head; three depths twice; small kernels twice; sampling.
    assert first.missing == 1 + 3 * 2 + 1 + 3 * 2 + 2 + 1
    assert first.latency() is None
    assert sum(1 for _ in first.steps()) == 17 * PASSES
    assert first.missing == 0
    pace = first.latency()
    assert isinstance(pace, MeasuredLatency)
    kept = json.loads(file.read_text())
    assert len(kept) == 17 * PASSES
    assert all(seconds > 0 for seconds in kept.values())
    again = LatencyProfiler(subject_of(loaded), file)
    assert again.missing == 0
    assert again.latency() == pace
    assert list(again.steps()) == []


def test_the_pace_of_a_loaded_model_counts_what_it_has(loaded, tmp_path):
    found = LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    list(found.steps())
    pace = found.latency()
    assert sum(product.count for product, _ in pace.products) == 2 * 7 + 1
    assert [layer.layers for layer in pace.attention] == [2]
    # Of a layer's two norms, two rotations, two sums and the gated product; the last norm, the table's row, sampling, copying.
    assert pace.other_kernels == 2 * 7 + 4
    assert pace.decode_s(subject_of(loaded).work, 100) > 0
    assert pace.prefill_s(subject_of(loaded).work, 1000, 0, 256) > pace.decode_s(subject_of(loaded).work, 1000)


def test_a_part_that_came_out_longer_at_less_depth_was_noise(loaded, tmp_path):
    file = tmp_path / "parts.json"
    measure = LatencyProfiler(subject_of(loaded), file)
    list(measure.steps())
    kept = json.loads(file.read_text())
    shallow = [key for key in kept if "at 64 x 1" in key]
    file.write_text(json.dumps({**kept, **dict.fromkeys(shallow, 5.0)}))
    pace = LatencyProfiler(subject_of(loaded), file).latency()
    assert [seconds for _, seconds in pace.attention[0].row] == [5.0, 5.0, 5.0]
    assert pace.decode_s(measure._model.work, 5000) == pace.decode_s(measure._model.work, 64)


@pytest.mark.parametrize(
    "kv", [KVSpec(key_bits=8, value_bits=8), KVSpec(key_bits=4, value_bits=16), KVSpec(window=256, keep=4)], ids=str
)
def test_other_caches_are_parts_of_their_own(loaded, tmp_path, kv):
    file = tmp_path / "parts.json"
    list(LatencyProfiler(subject_of(loaded), file).steps())
    other = LatencyProfiler(subject_of(loaded, kv), file)
    assert other.missing == 2 * len(attention_depths(256 + 64 if kv.window else None))
    list(other.steps())
    assert isinstance(other.latency(), MeasuredLatency)


def test_another_machine_recipe_or_form_knows_nothing(loaded, tmp_path, monkeypatch):
    file, subject = tmp_path / "parts.json", subject_of(loaded)
    list(LatencyProfiler(subject, file).steps())
    assert LatencyProfiler(replace(subject, machine="another, or another MLX"), file).missing == 17
    assert (
        LatencyProfiler(replace(subject, unpacked=not subject.unpacked), file).missing == 16
    )  # all but the machine's peak
    monkeypatch.setattr(timing, "RECIPE", timing.RECIPE + 1)
    assert LatencyProfiler(subject, file).missing == 16


def test_what_a_busy_machine_timed_is_used_and_not_kept(loaded, tmp_path, monkeypatch):
    file = tmp_path / "parts.json"
    monkeypatch.setattr(timing, "is_busy", lambda _: True)
    busy = LatencyProfiler(subject_of(loaded), file)
    list(busy.steps())
    assert isinstance(busy.latency(), MeasuredLatency)
    assert not file.exists()


def test_measuring_can_be_left_and_taken_up_again(loaded, tmp_path):
    file = tmp_path / "parts.json"
    left = LatencyProfiler(subject_of(loaded), file).steps()
    for _ in range(17 + 5):
        next(left)
    left.close()
    again = LatencyProfiler(subject_of(loaded), file)
    assert (again.missing, again.remaining) == (0, 17 * (PASSES - 1) - 5)
    assert isinstance(again.latency(), MeasuredLatency)
    assert sum(1 for _ in again.steps()) == 17 * (PASSES - 1) - 5
    assert LatencyProfiler(subject_of(loaded), file).remaining == 0


def test_of_three_times_the_quickest_counts_and_of_three_rates_the_highest(loaded, tmp_path, monkeypatch):
    seconds, peaks = iter([0.25, 0.125, 0.5]), iter([0.5, 1.0, 0.25])
    monkeypatch.setattr(timing, "time_sampling", lambda _: next(seconds))
    monkeypatch.setattr(timing, "measure_tflops", lambda _: next(peaks))
    measure = LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    list(measure.steps())
    assert measure.latency().sampling_s == 0.125
    assert measure.peak_tflops == 1.0


def test_what_was_disturbed_in_one_pass_is_timed_again_another_time(loaded, tmp_path, monkeypatch):
    file, measure = tmp_path / "parts.json", LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    steps = measure.steps()
    monkeypatch.setattr(timing, "is_busy", lambda _: True)
    next(steps)
    monkeypatch.setattr(timing, "is_busy", lambda _: False)
    list(steps)
    again = LatencyProfiler(subject_of(loaded), file)
    assert (again.missing, again.remaining) == (0, 1)


def test_the_load_that_measuring_makes_is_not_taken_for_others(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 0.0, 0.0))
    assert bandwidth.is_busy()
    assert not bandwidth.is_busy(own_s=30.0)  # half of a minute's load
    assert bandwidth.is_busy(own_s=20.0)


@pytest.mark.parametrize("damage", ["", "not JSON", "[1, 2]", '"text"', "{", "[" * 100_000, "\x00\xff"])
def test_a_damaged_file_is_as_good_as_none(loaded, tmp_path, damage):
    file = tmp_path / "parts.json"
    file.write_bytes(damage.encode("latin-1"))
    measure = LatencyProfiler(subject_of(loaded), file)
    assert measure.missing == 17
    list(measure.steps())
    assert LatencyProfiler(subject_of(loaded), file).missing == 0


@pytest.mark.parametrize("wrong", [0, -1, "1", None, True, 1e9, float("nan"), [1]])
def test_a_value_that_can_not_be_right_is_measured_again(loaded, tmp_path, wrong):
    file = tmp_path / "parts.json"
    list(LatencyProfiler(subject_of(loaded), file).steps())
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, next(iter(kept)): wrong}))
    assert LatencyProfiler(subject_of(loaded), file).remaining == 1


def test_where_nothing_can_be_written_the_pace_is_known_all_the_same(loaded, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("no folder")
    measure = LatencyProfiler(subject_of(loaded), blocked / "parts.json")
    list(measure.steps())
    assert isinstance(measure.latency(), MeasuredLatency)
    assert LatencyProfiler(subject_of(loaded), blocked / "parts.json").missing == 17


def test_the_file_is_its_owners_alone(loaded, tmp_path):
    file = tmp_path / "parts.json"
    list(LatencyProfiler(subject_of(loaded), file).steps())
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_model_whose_caches_stay_its_own_is_not_measured(loaded, tmp_path):
    assert can_measure(plan_caches(loaded.module, loaded.config, KVSpec()))
    config = normalise(FAMILIES["qwen3_5"])
    model = built(config)
    plan = plan_caches(model, config, KVSpec())
    assert not can_measure(plan)
    work = work_of(model, config, cost_of_model(model, config), plan)
    measure = LatencyProfiler(TimedModel(work, plan, False, device_kind(), "a machine"), tmp_path / "parts.json")
    assert (measure.missing, list(measure.steps()), measure.latency()) == (0, [], None)


@pytest.mark.parametrize("unknown", ["hidden", "vocabulary", "query_heads", "prefill_parameters"])
def test_a_model_of_which_a_size_is_unknown_is_not_measured(loaded, tmp_path, unknown):
    subject = subject_of(loaded)
    measure = LatencyProfiler(replace(subject, work=replace(subject.work, **{unknown: None})), tmp_path / "parts.json")
    assert (measure.missing, measure.latency()) == (0, None)


@pytest.mark.parametrize(
    "product",
    [
        Product(64, 128, None), Product(64, 128, 4), Product(64, 128, 4, 32, "mxfp4"), Product(64, 128, None, stack=4, active=2),
        Product(64, 128, 8, 32, stack=4, active=2),
    ],
    ids=lambda product: product.key,
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 8])
def test_every_packing_of_a_product_can_be_timed(product, rows):
    assert timing.time_product(product, rows, 1 << 20, unpacked=False) > 0


def test_the_machines_peak_is_kept_for_all_models(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(timing.measurement_store, "store_file", lambda name: tmp_path / name)
    assert kept_tflops("a machine") is None
    measure = LatencyProfiler(subject_of(loaded))
    assert measure.peak_tflops is None
    list(measure.steps())
    assert measure.peak_tflops == kept_tflops("a machine") == 0.5
    assert Path(tmp_path / timing.FILE).exists()
