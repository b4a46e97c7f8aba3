"""Timed parts of a model: their arithmetic by hand, and those of a real tiny model, timed in quiet time, stored and
found again."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.perf.conftest import TimedMachine
from tests.engine.perf.test_config_cost import FAMILIES, built
from tests.engine.perf.test_roofline import EIGHT_B
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.engine import Engine, Sampling, cpu, runtime
from tokamac.engine.cpu.layers import DenseLinear
from tokamac.engine.cpu.stepping import steps_of, take_steps
from tokamac.engine.device import device_kind
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.model.config import normalise, read_config
from tokamac.engine.model.loader import load_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import bandwidth, hardware, timing
from tokamac.engine.perf.bandwidth import Sample
from tokamac.engine.perf.config_cost import work_of
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.hardware import Chip, detect
from tokamac.engine.perf.roofline import Product
from tokamac.engine.perf.timing import (
    PASSES,
    ROWS,
    AttentionLatency,
    HandoverLatency,
    LatencyProfiler,
    MeasuredLatency,
    PartLatency,
    TimedModel,
    attention_depths,
    can_measure,
    interpolate,
    kept_tflops,
)
from tokamac.engine.runtime import AGAIN_S, MOST_AGAIN_S, QUIET_S, IdleProfiler, MachineSpeed
from tokamac.engine.text import stream
from tokamac.engine.text.stream import ReplyText
from tokamac.engine.text.tokenizer import load_tokenizer

MATRIX = Product(64, 32, None, count=3)
HEAD = Product(128, 32, None, head=True)
LATENCY = MeasuredLatency(
    products=((MATRIX, PartLatency(1e-3, 256e-3)), (HEAD, PartLatency(5e-3, 5e-3))),
    attention=(AttentionLatency(2, None, ((0, 1e-3), (1000, 2e-3)), ((0, 10e-3), (1000, 265e-3))),),
    kernel=PartLatency(1e-4, 1e-4),
    other_kernels=10,
    sampling_s=7e-3,
)


def test_rows_take_time_in_proportion():
    timed = PartLatency(1.0, 1.0 + 2 * (ROWS - 1))
    assert [timed.seconds(rows) for rows in (1, 2, 11, ROWS, 2 * ROWS)] == [1, 3, 21, 511, 1023]


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


def test_a_windowed_layer_takes_no_longer_beyond_its_window():
    layer = replace(LATENCY.attention[0], limit=100)
    assert layer.seconds(1, 100) == layer.seconds(1, 10_000) == pytest.approx(2 * 1.1e-3)


def test_a_prompt_is_its_chunks_and_the_first_step():
    # 301 tokens after 100: 200 at depth 100, 100 at depth 300, and the last token's step after 401.
    def chunk(rows: int, depth: int) -> float:
        row, many = 1e-3 + depth * 1e-6, 10e-3 + depth * 255e-6
        attending = 2 * (row + (many - row) * (rows - 1) / 255)
        return 3 * rows * 1e-3 + attending + 10 * 1e-4

    expected = chunk(200, 100) + chunk(100, 300) + LATENCY.decode_s(EIGHT_B, 401)
    assert LATENCY.prefill_s(EIGHT_B, 301, 100, 200) == pytest.approx(expected)
    assert LATENCY.prefill_s(EIGHT_B, 1, 100, 200) == LATENCY.decode_s(EIGHT_B, 101)


@pytest.mark.parametrize(("tokens", "cached", "chunk"), [(1, 0, 16), (40_000, 0, 100), (5001, 77, 250), (900, 9000, 7)])
def test_a_long_prompt_is_the_sum_of_its_chunks_though_they_are_not_walked(tokens, cached, chunk):
    bent = AttentionLatency(2, 1500, ((0, 1e-3), (64, 1.5e-3), (1024, 4e-3)), ((0, 9e-3), (512, 20e-3), (4096, 60e-3)))
    latency = replace(LATENCY, attention=(*LATENCY.attention, bent, replace(bent, limit=None), replace(bent, limit=48)))
    end, expected = cached + tokens - 1, latency.decode_s(EIGHT_B, cached + tokens)
    for at in range(cached, end, chunk):
        rows = min(chunk, end - at)
        expected += latency._products(rows) + latency._attention_and_kernels(rows, at)
    assert latency.prefill_s(EIGHT_B, tokens, cached, chunk) == pytest.approx(expected)


@dataclass(eq=False)
class Hurried:
    """A machine on which each part is timed a few times only. busy: others use it. peak: how fast it multiplies."""

    busy: bool = False
    peak: Callable[[], float] = lambda: 0.5


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hurried:
    machine = Hurried()
    for module, name, instead in (
        (timing, "BUDGET_S", 0.0),
        (bandwidth, "BUDGET_S", 0.0),
        (timing, "LEAST_TRIALS", 1),
        (timing, "measure_tflops", lambda _: machine.peak()),
        (timing, "is_busy", lambda _: machine.busy),
        (runtime, "is_busy", lambda: machine.busy),
        (hardware, "store_file", lambda name: tmp_path / "kept" / name),
    ):
        monkeypatch.setattr(module, name, instead)
    return machine


def called(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
    """Have a function's calls noted: what it was given, and what it returned."""
    call = getattr(owner, name)

    def noted(*given: Any, **options: Any) -> Any:
        found = call(*given, **options)
        note(found, *given)
        return found

    monkeypatch.setattr(owner, name, noted)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(
        make_tiny(tmp_path_factory.mktemp("tiny")), dtype=None, device=device_kind(), progress=lambda *_: None
    )


def subject_of(loaded: Any, kv: KVSpec | None = None, machine: str = "a machine") -> TimedModel:
    plan = plan_caches(loaded.module, loaded.config, kv or KVSpec())
    work = work_of(loaded.module, loaded.config, cost_of_model(loaded.module, loaded.config), plan)
    return TimedModel(work, plan, loaded.by_kernels, device_kind(), machine)


def test_all_parts_are_timed_kept_and_found_again(loaded, tmp_path):
    file = tmp_path / "cache" / "parts.json"
    first = LatencyProfiler(subject_of(loaded), file)
    # The machine's peak; three kinds of matrices twice, and the head; three depths twice; small kernels twice; sampling.
    assert first.missing == 1 + 3 * 2 + 1 + 3 * 2 + 2 + 1
    assert first.latency() is None
    assert sum(1 for _ in first.steps()) == 17 * PASSES
    assert first.missing == 0
    latency = first.latency()
    assert isinstance(latency, MeasuredLatency)
    kept = json.loads(file.read_text())
    assert len(kept) == 17 * PASSES
    assert all(seconds > 0 for seconds in kept.values())
    again = LatencyProfiler(subject_of(loaded), file)
    assert again.missing == 0
    assert again.latency() == latency
    assert list(again.steps()) == []


def test_the_latency_of_a_loaded_model_counts_what_it_has(loaded, tmp_path):
    found = LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    list(found.steps())
    latency = found.latency()
    assert sum(product.count for product, _ in latency.products) == 2 * 7 + 1
    assert [layer.layers for layer in latency.attention] == [2]
    # Of a layer's two norms, two rotations, two sums and the gated product; the last norm, the table's row, sampling, copying.
    assert latency.other_kernels == 2 * 7 + 4
    assert latency.decode_s(subject_of(loaded).work, 100) > 0
    assert latency.prefill_s(subject_of(loaded).work, 1000, 0, 256) > latency.decode_s(subject_of(loaded).work, 1000)


def test_a_part_that_came_out_longer_at_less_depth_was_noise(loaded, tmp_path):
    file = tmp_path / "parts.json"
    measure = LatencyProfiler(subject_of(loaded), file)
    list(measure.steps())
    kept = json.loads(file.read_text())
    shallow = [key for key in kept if "at 64 x 1" in key]
    file.write_text(json.dumps({**kept, **dict.fromkeys(shallow, 5.0)}))
    latency = LatencyProfiler(subject_of(loaded), file).latency()
    assert [seconds for _, seconds in latency.attention[0].row] == [5.0, 5.0, 5.0]
    assert latency.decode_s(measure._model.work, 5000) == latency.decode_s(measure._model.work, 64)


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
        LatencyProfiler(replace(subject, by_kernels=not subject.by_kernels), file).missing == 16
    )  # all but the machine's peak
    monkeypatch.setattr(timing, "RECIPE", timing.RECIPE + 1)
    assert LatencyProfiler(subject, file).missing == 16


def test_what_a_busy_machine_timed_is_used_and_not_kept(loaded, tmp_path, hurried):
    file, hurried.busy = tmp_path / "parts.json", True
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


def test_of_three_times_the_quickest_counts_and_of_three_rates_the_highest(loaded, tmp_path, monkeypatch, hurried):
    seconds, peaks = iter([0.25, 0.125, 0.5]), iter([0.5, 1.0, 0.25])
    hurried.peak = lambda: next(peaks)
    for name in ("time_token", "time_sampling"):
        monkeypatch.setattr(timing, name, lambda *_: next(seconds))
    measure = LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    list(measure.steps())
    assert measure.latency().sampling_s == 0.125
    assert measure.peak_tflops == 1.0


def test_what_was_disturbed_in_one_pass_is_timed_again_another_time(loaded, tmp_path, hurried):
    file, measure = tmp_path / "parts.json", LatencyProfiler(subject_of(loaded), tmp_path / "parts.json")
    steps = measure.steps()
    hurried.busy = True
    next(steps)
    hurried.busy = False
    list(steps)
    again = LatencyProfiler(subject_of(loaded), file)
    assert (again.missing, again.remaining) == (0, 1)


def test_the_load_that_measuring_makes_is_not_taken_for_others(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 0.0, 0.0))
    assert bandwidth.is_busy()
    assert not bandwidth.is_busy(own_s=30.0)  # half of a minute's load
    assert bandwidth.is_busy(own_s=20.0)


def test_a_damaged_file_is_as_good_as_none(loaded, tmp_path):
    file = tmp_path / "parts.json"
    for damage in (b"", b"not JSON", b"[1, 2]", b'"text"', b"{", b"[" * 100_000, b"\x00\xff"):
        file.write_bytes(damage)
        measure = LatencyProfiler(subject_of(loaded), file)
        assert measure.missing == 17, damage[:9]
    list(measure.steps())
    assert LatencyProfiler(subject_of(loaded), file).missing == 0


def test_a_value_that_can_not_be_right_is_measured_again(loaded, tmp_path):
    file = tmp_path / "parts.json"
    list(LatencyProfiler(subject_of(loaded), file).steps())
    kept = json.loads(file.read_text())
    for wrong in (0, -1, "1", None, True, 1e9, float("nan"), [1]):
        file.write_text(json.dumps({**kept, next(iter(kept)): wrong}))
        assert LatencyProfiler(subject_of(loaded), file).remaining == 1, wrong


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
    assert timing.time_product(product, rows, 1 << 20, by_kernels=False) > 0


def test_the_machines_peak_is_kept_for_all_models(loaded, tmp_path):
    assert kept_tflops("a machine") is None
    measure = LatencyProfiler(subject_of(loaded))
    assert measure.peak_tflops is None
    list(measure.steps())
    assert measure.peak_tflops == kept_tflops("a machine") == 0.5
    assert (tmp_path / "kept" / timing.FILE).exists()


# Handing over between MLX and NumPy: its arithmetic by hand, and a layer's parts run in turn, kept and put into a
# latency.

DEPTHS = (64, 1024, 4096)


def test_handing_over_is_added_for_each_layer():
    handing = HandoverLatency(3, None, ((100, 1e-3), (1000, 4e-3)))
    latency = replace(LATENCY, handover=(handing, HandoverLatency(2, 50, ((0, 0.0), (50, 5e-3)))))
    for context, more in ((100, 3 * 1e-3 + 2 * 5e-3), (550, 3 * 2.5e-3 + 2 * 5e-3), (1900, 3 * 7e-3 + 2 * 5e-3)):
        assert latency.decode_s(EIGHT_B, context) == pytest.approx(LATENCY.decode_s(EIGHT_B, context) + more)


def test_a_chunk_is_not_charged_for_a_steps_handing_over():
    latency = replace(LATENCY, handover=(HandoverLatency(3, None, ((0, 1.0), (1000, 1.0))),))
    assert latency.prefill_s(EIGHT_B, 301, 100, 200) == pytest.approx(
        LATENCY.prefill_s(EIGHT_B, 301, 100, 200) + 3 * 1.0
    )


seconds = st.floats(0, 1)


@given(st.lists(st.tuples(seconds, seconds), min_size=3, max_size=3), st.integers(0, 10**5), st.integers(0, 10**5))
def test_more_context_is_never_faster_where_handing_over_falls_with_depth(steps, context, more):
    attention, whole, at, apart = [], [], 0.0, 0.0
    for longer, extra in steps:  # both grow; what is between them may fall
        apart += longer
        at = max(at, apart + extra)
        attention.append(apart)
        whole.append(at)
    points = tuple(zip(DEPTHS, attention, strict=True))
    left = tuple((depth, w - a) for depth, w, a in zip(DEPTHS, whole, attention, strict=True))
    latency = replace(
        LATENCY, attention=(AttentionLatency(1, None, points, points),), handover=(HandoverLatency(1, None, left),)
    )
    assert latency.decode_s(EIGHT_B, context) <= latency.decode_s(EIGHT_B, context + more) * (1 + 1e-9)


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy multiplies a row with the tiny model's MLP and head, as with a larger model's; its attention's products are MLX's."""
    monkeypatch.setattr(cpu, "LAZY_WEIGHTS", 20_000)


def subject_by_kernels(loaded: Any, kv: KVSpec | None = None) -> TimedModel:
    return replace(subject_of(loaded, kv), by_kernels=True)


def turns_in(file: Path) -> dict[str, float]:
    return {key: seconds for key, seconds in json.loads(file.read_text()).items() if "in turn" in key}


def test_layers_that_are_mlxs_alone_hand_nothing_over(loaded, tmp_path):
    measure = LatencyProfiler(subject_by_kernels(loaded), tmp_path / "parts.json")
    list(measure.steps())
    assert turns_in(tmp_path / "parts.json") == {}
    assert measure.latency().handover == ()


def test_what_a_gpu_multiplies_is_mlxs_whatever_its_size(loaded, tmp_path, by_numpy):
    measure = LatencyProfiler(replace(subject_of(loaded), by_kernels=False), tmp_path / "parts.json")
    list(measure.steps())
    assert measure.latency().handover == ()


@pytest.mark.parametrize(
    ("kv", "depths"),
    [(KVSpec(), (64, 1024, 4096)), (KVSpec(key_bits=8, value_bits=8), (64, 1024, 4096)), (KVSpec(window=256, keep=4), (64, 320))],
    ids=str,
)  # fmt: skip
def test_a_layer_that_numpy_has_a_share_in_is_timed_at_each_depth(loaded, tmp_path, by_numpy, kv, depths):
    file, subject = tmp_path / "parts.json", subject_by_kernels(loaded, kv)
    measure = LatencyProfiler(subject, file)
    list(measure.steps())
    assert len(turns_in(file)) == PASSES * len(depths)
    (handing,) = measure.latency().handover
    assert (handing.layers, handing.limit) == (2, kv.window and kv.window + 64)
    assert tuple(depth for depth, _ in handing.points) == depths
    assert LatencyProfiler(subject, file).latency() == measure.latency()


def test_a_step_takes_what_its_layers_take_in_turn(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_by_kernels(loaded)
    list(LatencyProfiler(subject, file).steps())
    file.write_text(json.dumps({**json.loads(file.read_text()), **dict.fromkeys(turns_in(file), 5.0)}))
    latency = LatencyProfiler(subject, file).latency()
    # Two layers of 5 s, and what is no layer's: the head, the last norm, the table's row and two kernels, and sampling.
    head = next(timed.row_s for product, timed in latency.products if product.head)
    assert latency.decode_s(subject.work, 1024) == pytest.approx(
        2 * 5.0 + head + 4 * latency.kernel.row_s + latency.sampling_s
    )


def test_layers_that_came_out_quicker_at_more_depth_are_not_expected_to_be(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_by_kernels(loaded)
    list(LatencyProfiler(subject, file).steps())
    falling = {key: 5.0 / int(key.partition(" pass ")[0].split()[-2]) for key in turns_in(file)}
    assert len(set(falling.values())) == 3
    file.write_text(json.dumps({**json.loads(file.read_text()), **falling}))
    latency = LatencyProfiler(subject, file).latency()
    steps = [latency.decode_s(subject.work, depth) for depth in (64, 500, 1024, 2000, 4096, 8000)]
    assert steps == pytest.approx([steps[0]] * 6)


def test_parts_that_take_no_longer_in_turn_hand_over_for_nothing(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_by_kernels(loaded)
    list(LatencyProfiler(subject, file).steps())
    file.write_text(json.dumps({**json.loads(file.read_text()), **dict.fromkeys(turns_in(file), 1e-9)}))
    latency = LatencyProfiler(subject, file).latency()
    assert [seconds for _, seconds in latency.handover[0].points] == [0.0, 0.0, 0.0]
    assert latency.decode_s(subject.work, 700) == replace(latency, handover=()).decode_s(subject.work, 700)


def test_a_layer_in_turn_goes_to_numpy_as_often_as_a_step_does(loaded, by_numpy, monkeypatch):
    subject, seen = subject_by_kernels(loaded), []

    def note(_: Any, layer: DenseLinear, x: Any) -> None:
        seen.append((x.shape[-1], layer.weight.shape[0], id(layer)))

    called(monkeypatch, DenseLinear, "_multiply", note)
    layers, depth = subject.plan.layers, 64
    assert timing.time_layer(subject, layers[0], depth, len(layers)) > 0
    of_a_layer = [(128, 256), (128, 256), (256, 128)]  # gate and up, which share an input; down
    runs = 2  # the first warms up
    assert [(columns, rows) for columns, rows, _ in seen] == of_a_layer * len(layers) * runs
    assert len({matrix for _, _, matrix in seen}) == len(of_a_layer) * len(
        layers
    )  # each layer reads weights of its own


def test_a_layer_in_turn_leaves_its_caches_as_they_were(loaded, by_numpy, monkeypatch):
    made = []
    called(monkeypatch, timing, "filled_caches", lambda found, *_: made.append(found))
    subject = subject_by_kernels(loaded)
    timing.time_layer(subject, subject.plan.layers[0], 64, 2)
    assert [cache.offset for cache in made[0]] == [64, 64]


def test_layers_in_turn_are_as_many_as_memory_is_given_for(loaded, by_numpy, monkeypatch):
    subject = subject_by_kernels(loaded)
    layers = list(subject.plan.layers)
    assert subject.layers_in_turn(layers, 1024) == 2
    monkeypatch.setattr(timing, "LARGEST", 1)
    assert subject.layers_in_turn(layers, 1024) == 1


@pytest.mark.parametrize(
    ("product", "by_kernels", "waits"),
    [
        (Product(1024, 1025, None), True, True), (Product(1024, 1025, None), False, False),
        (Product(1024, 1024, None), True, False), (Product(1024, 1025, None, stack=4, active=2), True, False),
        (Product(64, 64, 4), True, True), (Product(64, 64, 4), False, False), (Product(64, 64, 4, stack=4), True, True),
    ],
    ids=str,
)  # fmt: skip
def test_packed_matrices_and_large_plain_ones_wait_for_their_input(product, by_kernels, waits):
    assert timing.waits(product, by_kernels=by_kernels) == waits


GUIDE = Path(__file__).parents[3] / "assets" / "guide" / "model"


def test_a_tokens_time_is_also_that_of_its_text(monkeypatch):
    tokenizer, texts = load_tokenizer(GUIDE, read_config(GUIDE), "guide"), []

    class Noted(ReplyText):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            texts.append(self)

    monkeypatch.setattr(stream, "ReplyText", Noted)
    assert timing.time_token(4096, tokenizer) > 0
    (text,) = texts
    assert set(text.answer.split()) == {"a"}
    assert timing.time_token(4096, None) > 0
    assert len(texts) == 1


# Decode steps that a CPU's kernels compute whole.

on_a_cpu = pytest.mark.skipif(device_kind() != "cpu", reason="steps by kernels are a CPU's alone")


@pytest.fixture(scope="module")
def stepped() -> TimedModel:
    loaded = load_model(GUIDE, dtype=None, device=device_kind(), progress=lambda *_: None)
    subject = subject_of(loaded)
    assert take_steps(loaded.module, subject.plan, lambda: subject.plan.make(None)) == ""
    return replace(subject, stepped=True, steps=steps_of(loaded.module))


@on_a_cpu
@pytest.mark.parametrize("most", [0, timing.TIMED_WHOLE], ids=["by halves", "whole"])
def test_a_step_by_kernels_is_its_layers_and_its_ends_once(stepped, tmp_path, monkeypatch, most):
    def seconds(_steps: Any, _layers: Any, first: int, last: int, depth: int, rows: int) -> float:
        if rows == 1:
            return 2.0 + (last - first) * (3.0 + depth / 1000)
        return 5.0 + (last - first - 1) * (30.0 + depth / 100)  # of the last layer, keys and values alone

    monkeypatch.setattr(timing, "time_step", seconds)
    monkeypatch.setattr(timing, "TIMED_WHOLE", most)
    measure = LatencyProfiler(stepped, tmp_path / "parts.json")
    list(measure.steps())
    latency, layers = measure.latency(), stepped.work.layers
    assert layers > 2
    assert latency.handover == ()
    for depth in (64, 700, 4096, 9000):
        whole = 2.0 + layers * (3.0 + depth / 1000)
        assert latency.decode_s(stepped.work, depth) == pytest.approx(whole + latency.sampling_s)
    assert latency.decode_s(stepped.work, 64, batch=2) is None
    pieces = [5.0 + (layers - 1) * (30.0 + depth / 100) for depth in (1024, 1088, 1152, 1216)]
    first = latency.decode_s(stepped.work, 1024 + 225)  # the last token makes the reply's first
    assert latency.prefill_s(stepped.work, 225, 1024, 256) == pytest.approx(first + sum(pieces[:3]) + pieces[3] / 2)
    read_by_name = LatencyProfiler(replace(stepped, steps=None), tmp_path / "parts.json")
    assert read_by_name.latency() == latency


@on_a_cpu
def test_halves_of_a_models_layers_are_timed_as_they_run(stepped, tmp_path, monkeypatch):
    made = []
    called(monkeypatch, timing, "filled_caches", lambda found, *_: made.append(found))
    layers = stepped.plan.layers
    assert timing.time_step(stepped.steps, layers, 3, len(layers), 64) > 0
    assert [cache.offset for (cache,) in made] == [64] * (len(layers) - 3)


@on_a_cpu
def test_steps_and_layers_through_mlx_are_kept_apart(stepped, tmp_path):
    measure = LatencyProfiler(stepped, tmp_path / "parts.json")
    list(measure.steps())
    by_layers = replace(stepped, stepped=False, steps=None)
    assert LatencyProfiler(by_layers, tmp_path / "parts.json").latency() is None


# When the machine's latency is measured: in quiet time, a part at a time, never beside a request; and what becomes
# known by it.

CHIP = Chip("unknown chip", None, 10.0, None, "measured")


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def measure(loaded: Any) -> LatencyProfiler:
    return measuring_of(loaded)


def measuring_of(loaded: Any) -> LatencyProfiler:
    return LatencyProfiler(subject_of(loaded))


def idle_until_done(paced: IdleProfiler) -> int:
    """Call ``idle`` until there is no more to do; return how often it did something."""
    count = 0
    while (wait := paced.idle()) is not None:
        assert wait == 0.0
        count += 1
    return count


def test_measuring_waits_for_quiet_and_then_takes_a_part_at_a_time(measure: LatencyProfiler) -> None:
    clock, machine = Clock(), MachineSpeed(CHIP)
    paced, all_of_them = IdleProfiler(machine, measure, clock), measure.missing
    assert paced.idle() == QUIET_S
    clock.now += 1
    assert paced.idle() == QUIET_S - 1
    assert measure.missing == all_of_them
    clock.now += QUIET_S - 1
    assert paced.idle() == 0.0
    assert measure.missing == all_of_them - 1
    for _ in range(all_of_them - 2):
        paced.idle()
    assert machine.latency is None
    paced.idle()
    assert isinstance(machine.latency, MeasuredLatency)  # known, and made truer by the passes that follow
    assert idle_until_done(paced) == (PASSES - 1) * all_of_them
    assert paced.idle() is None


def test_a_quicker_part_quickens_the_latency(loaded: Any, monkeypatch: pytest.MonkeyPatch, hurried: Hurried) -> None:
    clock, machine, taken = Clock(), MachineSpeed(CHIP), iter([0.5, 0.75, 0.625])
    hurried.peak = lambda: next(taken)
    for name in ("time_token", "time_sampling"):
        monkeypatch.setattr(timing, name, lambda *_: 2.0 / clock.now)
    measure = measuring_of(loaded)
    paced, all_of_them = IdleProfiler(machine, measure, clock), measure.missing
    paced.idle()
    found = []
    for _ in range(PASSES):
        clock.now += QUIET_S
        for _ in range(all_of_them):
            paced.idle()
        found.append((machine.latency.sampling_s, machine.chip.fp16_tflops))
    assert [peak for _, peak in found] == [0.5, 0.75, 0.75]
    assert found[0][0] > found[1][0] > found[2][0] == 2.0 / clock.now


def test_a_request_postpones_measuring_until_quiet_has_come_back(measure: LatencyProfiler) -> None:
    clock = Clock()
    paced = IdleProfiler(MachineSpeed(CHIP), measure, clock)
    paced.idle()
    clock.now += QUIET_S
    assert paced.idle() == 0.0
    known = measure.missing
    paced.later()
    clock.now += 60  # the reply takes a minute, in which the thread is never idle
    assert paced.idle() == QUIET_S
    assert measure.missing == known
    clock.now += QUIET_S
    assert paced.idle() == 0.0
    assert measure.missing == known - 1


def test_a_busy_machine_is_looked_at_again_later(measure: LatencyProfiler, hurried: Hurried) -> None:
    clock, all_of_them = Clock(), measure.missing
    paced = IdleProfiler(MachineSpeed(CHIP), measure, clock)
    paced.idle()
    clock.now += QUIET_S
    hurried.busy = True
    assert paced.idle() == AGAIN_S
    assert measure.missing == all_of_them
    hurried.busy = False
    assert paced.idle() == 0.0


def test_finishing_measures_the_rest_now_busy_or_not(measure: LatencyProfiler, hurried: Hurried) -> None:
    hurried.busy = True
    machine = MachineSpeed(CHIP)
    paced = IdleProfiler(machine, measure, Clock())
    paced.finish()
    assert isinstance(machine.latency, MeasuredLatency)
    assert paced.idle() is None
    paced.finish()  # there is nothing left to do


def test_finishing_goes_on_where_idle_time_had_come_to(measure: LatencyProfiler, loaded: Any) -> None:
    clock, machine = Clock(), MachineSpeed(CHIP)
    paced = IdleProfiler(machine, measure, clock)
    paced.idle()
    clock.now += QUIET_S
    for _ in range(3):
        paced.idle()
    assert measure.remaining == PASSES * measure.missing + (PASSES - 1) * 3
    paced.finish()
    assert isinstance(machine.latency, MeasuredLatency)
    assert (measure.missing, measure.remaining) == (0, 0)
    assert measuring_of(loaded).remaining == 0  # what idle time had come to was kept, and not begun anew


def test_after_the_end_nothing_is_measured(measure: LatencyProfiler) -> None:
    clock, machine, all_of_them = Clock(), MachineSpeed(CHIP), measure.missing
    paced = IdleProfiler(machine, measure, clock)
    paced.end()
    clock.now += 2 * QUIET_S
    assert paced.idle() is None
    paced.finish()
    assert (machine.latency, measure.missing) == (None, all_of_them)


def test_what_is_known_is_handed_over_at_once(measure: LatencyProfiler) -> None:
    list(measure.steps())
    machine = MachineSpeed(CHIP)
    assert IdleProfiler(machine, measure, Clock()).idle() is None
    assert isinstance(machine.latency, MeasuredLatency)
    assert (machine.chip.fp16_tflops, machine.chip.peak_source) == (0.5, "measured")


def test_a_model_that_can_not_be_measured_leaves_the_latency_unknown() -> None:
    machine = MachineSpeed(CHIP)
    assert IdleProfiler(machine, None, Clock()).idle() is None
    assert machine.latency is None


def test_a_part_that_the_device_can_not_compute_ends_measuring(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> float:
        raise ValueError("[quantized_matmul] no kernel")

    monkeypatch.setattr(timing, "time_product", refuse)
    clock, machine = Clock(), MachineSpeed(CHIP)
    paced = IdleProfiler(machine, measuring_of(loaded), clock)
    paced.idle()
    clock.now += QUIET_S
    idle_until_done(paced)  # the engine's thread goes on
    assert paced.idle() is None
    assert machine.latency is None
    with pytest.raises(ValueError, match="no kernel"):
        IdleProfiler(machine, measuring_of(loaded), clock).finish()  # asked for, it is told


def quiet_for(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let idle time begin after so long without a request."""
    monkeypatch.setattr(runtime, "QUIET_S", seconds)


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    quiet_for(monkeypatch, 3600.0)  # nothing by itself
    with Engine.load(folder, prompt_cache=None) as engine:
        yield engine


def expected(engine: Engine) -> float | None:
    *_, finished = engine.generate([1, 2, 3], Sampling(temperature=0.0, max_tokens=4))
    return finished.metrics.expected_tps


def test_an_engine_knows_what_to_expect_once_it_has_measured(engine: Engine) -> None:
    published = engine.limits(100).expected_tps
    if published is not None:
        pytest.skip("this machine's speed is published")
    assert expected(engine) is None
    assert engine.predict(100).ttft_s is None
    engine.measure()
    limits, foretold = engine.limits(100), engine.predict(100)
    assert limits.ceiling_tps is None or limits.expected_tps <= limits.ceiling_tps
    assert foretold.expected_tps == limits.expected_tps
    assert foretold.ttft_s is not None
    assert expected(engine) is not None


def test_measuring_happens_on_the_engines_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, published = set(), engine.limits(100).expected_tps
    called(monkeypatch, timing, "typical_s", lambda *_: threads.add(threading.current_thread()))
    engine.measure()
    assert threading.current_thread() not in threads
    assert len(threads) == (published is None)


def test_idle_time_measures_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_for(monkeypatch, 0.0)
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.memory()  # a request after which the thread is idle
        until(lambda: engine.limits(10).expected_tps is not None, "a latency")


def test_idle_time_measures_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, timed_machine: TimedMachine) -> None:
    if detect().bandwidth_gbs is not None:
        pytest.skip("this chip is in the table")
    quiet_for(monkeypatch, 3600.0)  # not before the reply
    timed_machine.samples = (Sample(1e-9, 0.0),)
    with Engine.load(folder, prompt_cache=None) as engine:
        assert engine.limits(10).bandwidth_gbs == 1e-9
        *_, finished = engine.generate([1, 2, 3], Sampling(temperature=0.0, max_tokens=20))
        assert finished.metrics.ceiling_tps is None
        limits = engine.limits(10)
        assert (limits.bandwidth_gbs, limits.ceiling_tps) == (None, None)
        assert "when the machine is idle" in limits.bandwidth_condition
        timed_machine.samples = (Sample(1e5, 0.1),)
        told = threading.Event()
        engine.call_when_measured(told.set)
        quiet_for(monkeypatch, 0.0)
        engine.memory()  # a request after which the thread is idle
        assert told.wait(PATIENCE_S)
        assert engine.limits(10).bandwidth_gbs == 1e5
        *_, finished = engine.generate([1, 2, 3], Sampling(temperature=0.0, max_tokens=20))
        assert (finished.metrics.ceiling_tps or 0) > (finished.metrics.decode_tps or 0)


def test_a_machine_that_is_never_idle_is_timed_more_and_more_rarely(timed_machine: TimedMachine) -> None:
    timed_machine.samples = (Sample(5.0, 0.9),)
    clock, machine = Clock(), MachineSpeed(Chip("Test CPU", None, None, None, "unknown"), bytes_read=1)
    paced = IdleProfiler(machine, None, clock)
    waits = []
    for _ in range(40):
        waits.append(paced.idle())
        clock.now += waits[-1] or 0.0
    rests = [wait for wait in waits[1:] if wait]
    assert rests[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert max(rests) == MOST_AGAIN_S
    assert machine.chip.bandwidth_gbs is None


def test_closing_amid_measuring_gives_the_memory_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_for(monkeypatch, 0.0)
    mx.clear_cache()
    before = mx.get_active_memory()
    started = threading.Event()
    called(monkeypatch, timing, "time_product", lambda *_: started.set())
    engine = Engine.load(folder, prompt_cache=None)
    engine.memory()  # a request after which the thread is idle
    if engine.limits(10).expected_tps is None:
        assert started.wait(PATIENCE_S)
    engine.close()
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() < 1000


def test_measuring_leaves_no_unused_memory_behind(engine: Engine) -> None:
    engine.measure()
    assert mx.get_cache_memory() < 1_000_000
