"""Handing over between MLX and NumPy: its arithmetic by hand, and a layer's parts run in turn, kept and put into a pace."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits.test_limits_measured import PACE, subject_of
from tests.limits.test_limits_prediction import EIGHT_B
from tests.tiny import make_tiny
from tokamac.engine.device import device_kind
from tokamac.engine.model import cpu
from tokamac.engine.model.loader import load_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import timing
from tokamac.engine.perf.timing import (
    PASSES,
    AttentionLatency,
    HandoverLatency,
    LatencyProfiler,
    MeasuredLatency,
    TimedModel,
)
from tokamac.engine.perf.workload import Product

DEPTHS = (64, 1024, 4096)


def test_handing_over_is_added_for_each_layer():
    handing = HandoverLatency(3, None, ((100, 1e-3), (1000, 4e-3)))
    pace = replace(PACE, handover=(handing, HandoverLatency(2, 50, ((0, 0.0), (50, 5e-3)))))
    for context, more in ((100, 3 * 1e-3 + 2 * 5e-3), (550, 3 * 2.5e-3 + 2 * 5e-3), (1900, 3 * 7e-3 + 2 * 5e-3)):
        assert pace.decode_s(EIGHT_B, context) == pytest.approx(PACE.decode_s(EIGHT_B, context) + more)


def test_a_chunk_is_not_charged_for_a_steps_handing_over():
    pace = replace(PACE, handover=(HandoverLatency(3, None, ((0, 1.0), (1000, 1.0))),))
    assert pace.prefill_s(EIGHT_B, 301, 100, 200) == pytest.approx(PACE.prefill_s(EIGHT_B, 301, 100, 200) + 3 * 1.0)


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
    pace = replace(
        PACE, attention=(AttentionLatency(1, None, points, points),), handover=(HandoverLatency(1, None, left),)
    )
    assert pace.decode_s(EIGHT_B, context) <= pace.decode_s(EIGHT_B, context + more) * (1 + 1e-9)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is timed a few times only: no test here looks at how long one took."""
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "LEAST_TRIALS", 1)
    monkeypatch.setattr(timing, "measure_tflops", lambda device: 0.5)
    monkeypatch.setattr(timing, "is_busy", lambda _: False)


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy multiplies a row with the tiny model's MLP and head, as with a larger model's; its attention's products are MLX's."""
    monkeypatch.setattr(cpu, "LAZY_WEIGHTS", 20_000)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, dtype=None, device=device_kind(), progress=lambda *_: None)


def subject_unpacked(loaded: Any, kv: KVSpec | None = None) -> TimedModel:
    return replace(subject_of(loaded, kv), unpacked=True)


def turns_in(file: Path) -> dict[str, float]:
    return {key: seconds for key, seconds in json.loads(file.read_text()).items() if "in turn" in key}


def test_layers_that_are_mlxs_alone_hand_nothing_over(loaded, tmp_path):
    measure = LatencyProfiler(subject_unpacked(loaded), tmp_path / "parts.json")
    list(measure.steps())
    assert turns_in(tmp_path / "parts.json") == {}
    assert measure.latency().handover == ()


def test_packed_weights_are_mlxs_whatever_their_size(loaded, tmp_path, by_numpy):
    measure = LatencyProfiler(replace(subject_of(loaded), unpacked=False), tmp_path / "parts.json")
    list(measure.steps())
    assert measure.latency().handover == ()


@pytest.mark.parametrize(
    ("kv", "depths"),
    [(KVSpec(), (64, 1024, 4096)), (KVSpec(key_bits=8, value_bits=8), (64, 1024, 4096)), (KVSpec(window=256, keep=4), (64, 320))],
    ids=str,
)  # fmt: skip
def test_a_layer_that_numpy_has_a_share_in_is_timed_at_each_depth(loaded, tmp_path, by_numpy, kv, depths):
    file, subject = tmp_path / "parts.json", subject_unpacked(loaded, kv)
    measure = LatencyProfiler(subject, file)
    list(measure.steps())
    assert len(turns_in(file)) == PASSES * len(depths)
    (handing,) = measure.latency().handover
    assert (handing.layers, handing.limit) == (2, kv.window and kv.window + 64)
    assert tuple(depth for depth, _ in handing.points) == depths
    assert LatencyProfiler(subject, file).latency() == measure.latency()


def test_a_step_takes_what_its_layers_take_in_turn(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_unpacked(loaded)
    list(LatencyProfiler(subject, file).steps())
    file.write_text(json.dumps({**json.loads(file.read_text()), **dict.fromkeys(turns_in(file), 5.0)}))
    pace = LatencyProfiler(subject, file).latency()
    assert isinstance(pace, MeasuredLatency)
    # Two layers of 5 s, and what is no layer's: the head, the last norm, the table's row and two kernels, and sampling.
    head = next(timed.row_s for product, timed in pace.products if product.head)
    assert pace.decode_s(subject.work, 1024) == pytest.approx(2 * 5.0 + head + 4 * pace.kernel.row_s + pace.sampling_s)


def test_layers_that_came_out_quicker_at_more_depth_are_not_expected_to_be(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_unpacked(loaded)
    list(LatencyProfiler(subject, file).steps())
    falling = {key: 5.0 / int(key.partition(" pass ")[0].split()[-2]) for key in turns_in(file)}
    assert len(set(falling.values())) == 3
    file.write_text(json.dumps({**json.loads(file.read_text()), **falling}))
    pace = LatencyProfiler(subject, file).latency()
    steps = [pace.decode_s(subject.work, depth) for depth in (64, 500, 1024, 2000, 4096, 8000)]
    assert steps == pytest.approx([steps[0]] * 6)


def test_parts_that_take_no_longer_in_turn_hand_over_for_nothing(loaded, tmp_path, by_numpy):
    file, subject = tmp_path / "parts.json", subject_unpacked(loaded)
    list(LatencyProfiler(subject, file).steps())
    file.write_text(json.dumps({**json.loads(file.read_text()), **dict.fromkeys(turns_in(file), 1e-9)}))
    pace = LatencyProfiler(subject, file).latency()
    assert [seconds for _, seconds in pace.handover[0].points] == [0.0, 0.0, 0.0]
    assert pace.decode_s(subject.work, 700) == replace(pace, handover=()).decode_s(subject.work, 700)


def test_a_layer_in_turn_goes_to_numpy_as_often_as_a_step_does(loaded, by_numpy, monkeypatch):
    subject, seen = subject_unpacked(loaded), []
    multiply = cpu.DenseLinear._multiply

    def noted(self: cpu.DenseLinear, x: Any) -> Any:
        seen.append((x.shape[-1], self.weight.shape[0], id(self)))
        return multiply(self, x)

    monkeypatch.setattr(cpu.DenseLinear, "_multiply", noted)
    layers, depth = subject.plan.layers, 64
    assert timing.time_layer(subject, layers[0], depth, len(layers)) > 0
    of_a_layer = [(128, 256), (128, 256), (256, 128)]  # gate and up, which share an input; down
    runs = 2  # the first warms up
    assert [(columns, rows) for columns, rows, _ in seen] == of_a_layer * len(layers) * runs
    assert len({matrix for _, _, matrix in seen}) == len(of_a_layer) * len(
        layers
    )  # each layer reads weights of its own


def test_a_layer_in_turn_leaves_its_caches_as_they_were(loaded, by_numpy, monkeypatch):
    filled, made = timing.filled_caches, []

    def noted(*given: Any) -> Any:
        made.append(filled(*given))
        return made[-1]

    monkeypatch.setattr(timing, "filled_caches", noted)
    subject = subject_unpacked(loaded)
    timing.time_layer(subject, subject.plan.layers[0], 64, 2)
    assert [cache.offset for cache in made[0]] == [64, 64]


def test_layers_in_turn_are_as_many_as_memory_is_given_for(loaded, by_numpy, monkeypatch):
    subject = subject_unpacked(loaded)
    layers = list(subject.plan.layers)
    assert subject.layers_in_turn(layers, 1024) == 2
    monkeypatch.setattr(timing, "LARGEST", 1)
    assert subject.layers_in_turn(layers, 1024) == 1


@pytest.mark.parametrize(
    ("product", "unpacked", "numpy"),
    [
        (Product(1024, 1025, None), True, True), (Product(1024, 1025, None), False, False),
        (Product(1024, 1024, None), True, False), (Product(1024, 1025, None, stack=4, active=2), True, False),
    ],
    ids=str,
)  # fmt: skip
def test_numpy_multiplies_large_plain_matrices(product, unpacked, numpy):
    assert timing.by_numpy(product, unpacked=unpacked) == numpy
