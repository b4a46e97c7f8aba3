"""When the machine's pace is measured: in quiet time, a part at a time, never beside a request; and what becomes known by it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.tiny import make_tiny
from tokamac.engine import Engine, Finished, Sampling, runner
from tokamac.engine.device import device_kind
from tokamac.engine.kv import plan_caches
from tokamac.engine.model.cpu import is_unpacked
from tokamac.engine.model.loader import load_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import measurement_store, timing
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.hardware import Chip
from tokamac.engine.perf.timing import PASSES, LatencyProfiler, MeasuredLatency, TimedModel
from tokamac.engine.perf.workload import work_of
from tokamac.engine.runner import AGAIN_S, QUIET_S, IdleProfiler
from tokamac.engine.runtime import MachineSpeed

CHIP = Chip("unknown chip", None, 10.0, None, "measured")


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part is timed a few times only, on a machine that is never busy, and kept apart from other tests'."""
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "LEAST_TRIALS", 1)
    monkeypatch.setattr(timing, "measure_tflops", lambda device: 0.5)
    monkeypatch.setattr(timing, "is_busy", lambda _: False)
    monkeypatch.setattr(runner, "is_busy", lambda: False)
    monkeypatch.setattr(measurement_store, "store_file", lambda name: tmp_path / "kept" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_model(folder, dtype=None, device=device_kind(), progress=lambda *_: None)


@pytest.fixture
def measure(loaded: Any) -> LatencyProfiler:
    return measuring_of(loaded)


def measuring_of(loaded: Any) -> LatencyProfiler:
    plan = plan_caches(loaded.module, loaded.config, KVSpec())
    work = work_of(loaded.module, loaded.config, cost_of_model(loaded.module, loaded.config), plan)
    return LatencyProfiler(TimedModel(work, plan, is_unpacked(loaded.module), device_kind(), "a machine"))


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
    assert machine.pace is None
    paced.idle()
    assert isinstance(machine.pace, MeasuredLatency)  # known, and made truer by the passes that follow
    assert idle_until_done(paced) == (PASSES - 1) * all_of_them
    assert paced.idle() is None


def test_a_part_found_quicker_in_a_later_pass_quickens_the_pace(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, machine, taken = Clock(), MachineSpeed(CHIP), iter([0.5, 0.75, 0.625])
    monkeypatch.setattr(timing, "measure_tflops", lambda _: next(taken))
    monkeypatch.setattr(timing, "time_sampling", lambda _: 2.0 / clock.now)
    measure = measuring_of(loaded)
    paced, all_of_them = IdleProfiler(machine, measure, clock), measure.missing
    paced.idle()
    found = []
    for _ in range(PASSES):
        clock.now += QUIET_S
        for _ in range(all_of_them):
            paced.idle()
        assert machine.pace is not None
        found.append((machine.pace.sampling_s, machine.chip.fp16_tflops))
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


def test_a_busy_machine_is_looked_at_again_later(measure: LatencyProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, all_of_them = Clock(), measure.missing
    paced = IdleProfiler(MachineSpeed(CHIP), measure, clock)
    paced.idle()
    clock.now += QUIET_S
    monkeypatch.setattr(runner, "is_busy", lambda: True)
    assert paced.idle() == AGAIN_S
    assert measure.missing == all_of_them
    monkeypatch.setattr(runner, "is_busy", lambda: False)
    assert paced.idle() == 0.0


def test_finishing_measures_the_rest_now_busy_or_not(measure: LatencyProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "is_busy", lambda: True)
    machine = MachineSpeed(CHIP)
    paced = IdleProfiler(machine, measure, Clock())
    paced.finish()
    assert isinstance(machine.pace, MeasuredLatency)
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
    assert isinstance(machine.pace, MeasuredLatency)
    assert (measure.missing, measure.remaining) == (0, 0)
    assert measuring_of(loaded).remaining == 0  # what idle time had come to was kept, and not begun anew


def test_after_the_end_nothing_is_measured(measure: LatencyProfiler) -> None:
    clock, machine, all_of_them = Clock(), MachineSpeed(CHIP), measure.missing
    paced = IdleProfiler(machine, measure, clock)
    paced.end()
    clock.now += 2 * QUIET_S
    assert paced.idle() is None
    paced.finish()
    assert (machine.pace, measure.missing) == (None, all_of_them)


def test_what_is_known_is_handed_over_at_once(measure: LatencyProfiler) -> None:
    list(measure.steps())
    machine = MachineSpeed(CHIP)
    assert IdleProfiler(machine, measure, Clock()).idle() is None
    assert isinstance(machine.pace, MeasuredLatency)
    assert (machine.chip.fp16_tflops, machine.chip.peak_source) == (0.5, "measured")


def test_a_model_that_can_not_be_measured_leaves_the_pace_unknown() -> None:
    machine = MachineSpeed(CHIP)
    assert IdleProfiler(machine, None, Clock()).idle() is None
    assert machine.pace is None


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
    assert machine.pace is None
    with pytest.raises(ValueError, match="no kernel"):
        IdleProfiler(machine, measuring_of(loaded), clock).finish()  # asked for, it is told


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(runner, "QUIET_S", 3600.0)  # nothing by itself
    with Engine.load(folder, prompt_cache=None) as engine:
        yield engine


def expected(engine: Engine) -> float | None:
    *_, finished = engine.generate([1, 2, 3], Sampling(temperature=0.0, max_tokens=4))
    assert isinstance(finished, Finished)
    return finished.metrics.expected_tps


def test_an_engine_knows_what_to_expect_once_it_has_measured(engine: Engine) -> None:
    published = engine.limits(100).expected_tps
    if published is not None:
        pytest.skip("this machine's speed is published")
    assert expected(engine) is None
    assert engine.predict(100).ttft_s is None
    engine.measure()
    limits, foretold = engine.limits(100), engine.predict(100)
    assert limits.expected_tps is not None
    assert limits.ceiling_tps is None or limits.expected_tps <= limits.ceiling_tps
    assert foretold.expected_tps == limits.expected_tps
    assert foretold.ttft_s is not None
    assert expected(engine) is not None


def test_measuring_happens_on_the_engines_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, published = set(), engine.limits(100).expected_tps
    typical_s = timing.typical_s

    def noted(run: Callable[[], Any], **options: float) -> float:
        threads.add(threading.current_thread())
        return typical_s(run, **options)

    monkeypatch.setattr(timing, "typical_s", noted)
    engine.measure()
    assert threading.current_thread() not in threads
    assert len(threads) == (published is None)


def test_a_second_engine_finds_what_the_first_measured(engine: Engine, folder: Path) -> None:
    engine.measure()
    with Engine.load(folder, prompt_cache=None) as second:
        assert second.limits(100).expected_tps == engine.limits(100).expected_tps


def test_idle_time_measures_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = threading.Event()
    monkeypatch.setattr(runner, "QUIET_S", 0.0)
    take = IdleProfiler._take

    def noted(self: IdleProfiler) -> None:
        take(self)
        if self._machine.pace is not None:
            measured.set()

    monkeypatch.setattr(IdleProfiler, "_take", noted)
    with Engine.load(folder, prompt_cache=None) as engine:
        engine.memory()  # a request after which the thread is idle
        assert measured.wait(60)
        assert engine.limits(10).expected_tps is not None


def test_closing_amid_measuring_gives_the_memory_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUIET_S", 0.0)
    mx.clear_cache()
    before = mx.get_active_memory()
    started = threading.Event()
    time_product = timing.time_product

    def noted(*given: Any, **options: Any) -> float:
        found = time_product(*given, **options)
        started.set()
        return found

    monkeypatch.setattr(timing, "time_product", noted)
    engine = Engine.load(folder, prompt_cache=None)
    engine.memory()  # a request after which the thread is idle
    if engine.limits(10).expected_tps is None:
        assert started.wait(60)
    engine.close()
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() < 1000


def test_measuring_leaves_no_unused_memory_behind(engine: Engine) -> None:
    engine.measure()
    assert mx.get_cache_memory() < 1_000_000
