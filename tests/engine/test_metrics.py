"""Gaps between tokens and their causes, and what a reply in progress says of its steps."""

import itertools
import math
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.helpers import made
from tests.engine.inside import runner_of, worker_of
from tests.mac import RecordedMac
from tokamac.engine import Engine, KVSpec, Sampling, metrics
from tokamac.engine.events import Finished, Live
from tokamac.engine.metrics import (
    MOST,
    Gap,
    GapLog,
    Mark,
    Outlier,
    ProcessWatch,
    PromptBeside,
    Recorder,
    StepCost,
    outliers,
)
from tokamac.engine.perf import hardware
from tokamac.engine.perf.hardware import EVERY_S, PowerShare, ThrottleWatch, on_battery, throttles
from tokamac.engine.schedule.decoding import POOL_CLEAR_STEPS

# Gaps that stand out, by hand; what may be named as their cause; and who watches the process for it.


def found(gaps_ms, marks=(), *, ahead=False, throttled=()):
    """Outliers of gaps in ms, the first of which is token 2's, as a reply would tell them."""
    times = [0.0]
    for ms in gaps_ms:
        times.append(times[-1] + ms / 1e3)
    figures, longest = GapLog().read(times)
    return outliers(longest, figures.p50, marks, ahead=ahead, throttled=throttled)


def test_a_gap_of_more_than_two_medians_stands_out():
    (only,) = found([10.0, 10.0, 20.5, 10.0, 19.5])
    assert (only.token, only.gap_ms, only.causes) == (4, pytest.approx(20.5), ())


def test_a_small_models_gap_must_also_be_a_millisecond_longer():
    assert found([0.2, 0.2, 1.1, 0.2]) == ()
    (only,) = found([0.2, 0.2, 1.3, 0.2])
    assert only.token == 4


def test_even_gaps_and_no_gaps_have_no_outliers():
    assert found([5.0] * 50) == ()
    assert GapLog().read([]) == (None, [])
    assert GapLog().read([1.0]) == (None, [])


def test_the_longest_come_first_and_no_more_than_a_few():
    gaps = [10.0] * 40
    for place, ms in ((3, 50.0), (7, 90.0), (9, 49.0), (20, 30.0), (21, 31.0), (22, 32.0), (23, 33.0)):
        gaps[place] = ms
    told = found(gaps)
    assert len(told) == MOST
    assert [outlier.token for outlier in told] == [9, 5, 11, 25, 24]


def test_a_cause_is_what_was_marked_in_that_gap_and_nothing_else():
    gaps = [10.0, 10.0, 40.0, 10.0, 10.0, 10.0]
    assert found(gaps, [Mark(4, "pool cleared")])[0].causes == ("pool cleared",)
    assert found(gaps, [Mark(3, "pool cleared"), Mark(5, "kv growth")])[0].causes == ()
    both = [Mark(4, "pool cleared"), Mark(4, "kv growth"), Mark(4, "kv growth")]
    assert found(gaps, both)[0].causes == ("pool cleared", "kv growth")


def test_one_step_ahead_the_device_pays_a_gap_later_but_the_system_never_does():
    gaps = [10.0, 10.0, 40.0, 10.0, 10.0, 10.0]
    assert found(gaps, [Mark(3, "kv growth")], ahead=True)[0].causes == ("kv growth",)
    assert found(gaps, [Mark(2, "kv growth")], ahead=True)[0].causes == ()
    assert found(gaps, [Mark(3, "swap", 100.0)], ahead=True)[0].causes == ()


def test_what_took_less_than_half_of_the_excess_is_not_its_cause():
    gaps = [10.0, 10.0, 40.0, 10.0, 10.0]  # 30 ms more than the median
    assert found(gaps, [Mark(4, "swap", 14.0)])[0].causes == ()
    assert found(gaps, [Mark(4, "swap", 15.0)])[0].causes == ("swap",)


def test_of_several_prompts_the_one_that_took_longest_is_told_and_only_of_its_gap():
    gaps = [10.0, 10.0, 90.0, 10.0, 10.0, 50.0, 10.0]
    short, long = PromptBeside(300), PromptBeside(2000, background=True)
    marks = [Mark(4, "another prompt", 45.0, short), Mark(4, "another prompt", 70.0, long), Mark(7, "swap")]
    told = [(each.token, each.causes, each.prompt) for each in found(gaps, marks)]
    assert told == [(4, ("another prompt",), long), (7, ("swap",), None)]
    (slow, *_) = found(gaps, [Mark(4, "another prompt", 30.0, long)])
    assert (slow.causes, slow.prompt) == ((), None)


def test_heat_is_said_of_every_outlier():
    gaps = [10.0, 10.0, 40.0, 10.0, 10.0, 30.0, 10.0]
    told = found(gaps, [Mark(4, "pool cleared")], throttled=("thermal",))
    assert [outlier.causes for outlier in told] == [("pool cleared", "thermal"), ("thermal",)]


@given(st.lists(st.floats(0.01, 1e3), max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_a_log_read_in_parts_says_what_the_whole_series_says(gaps_ms, stops):
    times = [7.0]
    for ms in gaps_ms:
        times.append(times[-1] + ms / 1e3)
    log, growing = GapLog(), []
    for stop in [*sorted(stops), len(times)]:
        growing.extend(times[len(growing) : stop])
        figures, longest = log.read(growing)
    whole = metrics.gaps_ms(times)
    assert figures == metrics.gap_percentiles(whole)
    ranked = sorted((Gap(ms, token) for token, ms in enumerate(whole, 2)), reverse=True)
    assert longest == ranked[:MOST]


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40), st.lists(st.integers(1, 45), max_size=10))
def test_every_outlier_is_long_and_every_cause_was_marked(gaps_ms, tokens):
    marks = [Mark(token, "kv growth") for token in sorted(tokens)]
    times = [0.0]
    for ms in gaps_ms:
        times.append(times[-1] + ms / 1e3)
    median = metrics.gap_percentiles(metrics.gaps_ms(times)).p50
    for outlier in found(gaps_ms, marks, ahead=True):
        assert outlier.gap_ms > 2 * median
        assert outlier.gap_ms > median + 1
        assert outlier.gap_ms == metrics.gaps_ms(times)[outlier.token - 2]
        assert bool(outlier.causes) == bool({outlier.token, outlier.token - 1} & set(tokens))


def test_two_threads_may_read_one_log():
    times = [i / 1e3 for i in range(20_000)]
    growing, log, seen = times[:1], GapLog(), []

    def read():
        while len(growing) < len(times):
            seen.append(log.read(growing)[0])

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for at in times[1:]:
        growing.append(at)
    for thread in threads:
        thread.join()
    assert log.read(growing)[0] == metrics.gap_percentiles(metrics.gaps_ms(times))


class Watched:
    """A ProcessWatch whose clock and counters are set by hand: seconds, faults, seconds computed."""

    def __init__(self, *, computes=True):
        self.marks = []
        self.now_s, self.faults, self.computed_s = 0.0, 0, 0.0
        self.watch = ProcessWatch(
            lambda cause, most_ms: self.marks.append((cause, pytest.approx(most_ms))),
            computes=computes,
            usage=lambda: SimpleNamespace(ru_majflt=self.faults, ru_utime=self.computed_s, ru_stime=0.0),
            clock=lambda: self.now_s,
        )

    def token(self, *, after_ms, computed_ms, faults=0):
        self.now_s += after_ms / 1e3
        self.computed_s += computed_ms / 1e3
        self.faults += faults
        self.watch.look()


def test_steps_that_compute_all_the_time_are_not_marked():
    watched = Watched()
    for _ in range(3):
        watched.token(after_ms=20, computed_ms=20)
        watched.token(after_ms=20, computed_ms=35)  # two threads
    assert watched.marks == []


def test_time_in_which_nothing_was_computed_was_taken():
    watched = Watched()
    watched.token(after_ms=30, computed_ms=10)
    watched.token(after_ms=10, computed_ms=5)  # less than two ticks of the system's clock: not known well enough
    assert watched.marks == [("processor taken", 20.0)]


def test_a_gpu_leaves_the_processor_idle_and_nothing_is_said():
    watched = Watched(computes=False)
    watched.token(after_ms=100, computed_ms=1)
    assert watched.marks == []


def test_who_waits_for_a_disk_is_not_said_to_lack_a_processor():
    watched = Watched()
    watched.token(after_ms=100, computed_ms=10, faults=60)
    watched.token(after_ms=10, computed_ms=10)
    assert watched.marks == [("swap", 60.0)]


def test_after_short_steps_the_system_is_seldom_asked_and_what_they_idled_is_no_standstill():
    watched = Watched()
    asked = []
    usage = watched.watch._usage
    watched.watch._usage = lambda: asked.append(watched.now_s) or usage()
    for _ in range(80):
        watched.token(after_ms=0.9, computed_ms=0.1)
    assert (len(asked), watched.marks) == (10, [])
    watched.token(after_ms=0.9, computed_ms=0.9)
    watched.token(after_ms=30, computed_ms=1)  # a long one is looked into at once
    assert watched.marks == [("processor taken", 29.0)]


def test_a_slow_reader_is_marked_with_what_it_took():
    watched = Watched()
    for _ in range(2):
        watched.now_s += 0.02
        watched.watch.waited_s += 0.02
    watched.token(after_ms=10, computed_ms=10)
    watched.token(after_ms=10, computed_ms=10)
    assert watched.marks == [("slow reader", 40.0)]


def test_the_real_counters_see_a_process_that_stands_still():
    marks = []
    watch = ProcessWatch(lambda cause, most_ms: marks.append((cause, most_ms)), computes=True)
    watch.look()
    marks.clear()
    time.sleep(0.1)
    watch.look()
    assert marks
    assert {cause for cause, _ in marks} <= {"processor taken", "swap"}
    assert all(0 < most_ms < math.inf for _, most_ms in marks)


@pytest.mark.parametrize(("level", "held_back"), [(None, None), (0, False), (1, False), (2, True), (4, True)])
def test_what_macos_says_of_heat(level, held_back):
    states = {} if level is None else {hardware.THERMAL_PRESSURE: level}
    assert hardware.throttled(RecordedMac(states=states)) is held_back


def test_both_reasons_are_told_and_what_is_not_said_is_none():
    hot = {hardware.THERMAL_PRESSURE: 2}
    assert throttles(RecordedMac(states=hot, low_power_mode=True)) == ("thermal", "low power")
    assert throttles(RecordedMac(low_power_mode=True)) == ("low power",)
    assert throttles(RecordedMac()) == throttles(RecordedMac(states={}, low_power_mode=None)) == ()


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
    ],
)
def test_what_powers_the_machine_is_read_where_the_system_tells(tmp_path, supplies, expected):
    for supply, told in supplies.items():
        (tmp_path / supply).mkdir()
        for name, text in told.items():
            (tmp_path / supply / name).write_text(f"{text}\n")
    assert on_battery(None, tmp_path) is (expected and sys.platform == "linux")
    assert on_battery(RecordedMac(unplugged=expected)) is expected
    assert on_battery(RecordedMac(unplugged=None)) is False


def test_another_share_holds_on_battery_and_the_source_is_asked_for_now_and_then():
    now_s, unplugged, asked = 0.0, False, 0

    def battery():
        nonlocal asked
        asked += 1
        return unplugged

    share = PowerShare(80, 30, battery, lambda: now_s)
    assert (share(), share(), asked) == (0.8, 0.8, 1)
    unplugged = True
    assert share() == 0.8
    now_s = PowerShare.LOOKS_S
    assert (share(), asked) == (0.3, 2)
    assert PowerShare(50, None, battery, lambda: now_s)() == 0.5
    assert asked == 2


class Clocked:
    """A watch on a Mac, with a clock of its own."""

    def __init__(self, **said):
        self.now_s, self.mac = 100.0, RecordedMac(**said)
        self.watch = ThrottleWatch(self.mac, clock=lambda: self.now_s)

    def look(self, *, after_s, now=False):
        self.now_s += after_s
        self.watch.look(now=now)


def test_the_system_is_asked_at_the_first_token_then_seldom_and_at_the_end():
    clocked = Clocked()
    for _ in range(110):
        clocked.look(after_s=EVERY_S / 50)
    assert clocked.mac.asked["notified"] == 3
    clocked.look(after_s=0.0, now=True)
    assert clocked.mac.asked["notified"] == clocked.mac.asked["low_power"] == 4


def test_a_state_that_was_seen_is_remembered_for_the_reply():
    clocked = Clocked()
    clocked.look(after_s=0.0)
    assert clocked.watch.seen == ()
    clocked.mac.states[hardware.THERMAL_PRESSURE] = 3
    clocked.look(after_s=EVERY_S)
    clocked.mac.states[hardware.THERMAL_PRESSURE] = 0
    clocked.look(after_s=EVERY_S)
    assert clocked.watch.seen == clocked.watch.explains_gaps == ("thermal",)


def test_low_power_mode_explains_a_gap_only_where_it_came_meanwhile():
    all_along, later = Clocked(low_power_mode=True), Clocked()
    for clocked in (all_along, later):
        clocked.look(after_s=0.0)
        clocked.mac.low_power_mode = True
        clocked.look(after_s=EVERY_S)
        assert clocked.watch.seen == ("low power",)
    assert all_along.watch.explains_gaps == ()
    assert later.watch.explains_gaps == ("low power",)


def test_where_nobody_tells_nothing_is_seen():
    watch = ThrottleWatch(None)
    watch.look(now=True)
    assert watch.seen == watch.explains_gaps == ()


def test_an_outlier_is_a_plain_value():
    assert Outlier(2, 3.0) == Outlier(2, 3.0, ())


# What a reply in progress, and one that has ended, says of its steps; on a tiny model.

GREEDY = Sampling(temperature=0, max_tokens=40)


@pytest.fixture
def engine(tiny: Path):
    with Engine.load(tiny, prompt_cache=None) as loaded:
        loaded.tokenizer.eos_ids = frozenset()
        yield loaded


def reply(engine: Engine, prompt: int, new: int) -> tuple[list[Live], Finished]:
    """Return what was live at each event, and the end."""
    seen, last = [], None
    for event in engine.generate([5 + i % 40 for i in range(prompt)], Sampling(temperature=0, max_tokens=new)):
        last = event
        if (live := engine.live()) is not None:
            seen.append(live)
    assert isinstance(last, Finished)
    return seen, last


def test_the_expected_rate_of_a_step_is_the_metrics():
    recorder = Recorder(clock=iter([0.0, 0.1, 0.2, 0.3]).__next__)
    recorder.accept()
    recorder.begin_prefill(3, 0)
    recorder.token()
    assert recorder.metrics(StepCost(10, 2, 1.0, 77.0), kv_bytes=0, peak_memory_bytes=None).expected_tps == 77.0
    assert recorder.metrics(StepCost(10, 2, 1.0), kv_bytes=0, peak_memory_bytes=None).expected_tps is None


def test_a_pass_of_several_tokens_is_no_stutter_whoever_looks_first():
    """A live figure is read before the outliers are: what came several in a pass is none of them, however long the pass took."""
    times = [0.0, 0.002, 0.004, 0.012, 0.01201, 0.01202, 0.01402, 0.03]  # tokens 4 to 6 came in a pass
    recorder = Recorder(clock=iter(times).__next__)
    for token in range(1, len(times) + 1):
        recorder.token(several=token in {4, 5, 6})
        recorder.metrics(StepCost(None, None, None), kv_bytes=None, peak_memory_bytes=None)
    assert [each.token for each in recorder.outliers(ahead=True)] == [8]


def test_a_mark_belongs_to_the_token_that_comes_next():
    recorder = Recorder(clock=iter([0.0, 0.01, 0.02, 0.06, 0.07]).__next__)
    for _ in range(3):
        recorder.token()
    recorder.mark("pool cleared")
    recorder.token()
    recorder.token()
    (outlier,) = recorder.outliers(ahead=False)
    assert (outlier.token, outlier.gap_ms, outlier.causes) == (4, pytest.approx(40.0), ("pool cleared",))


def test_a_reply_says_what_its_last_step_read(engine: Engine):
    seen, _ = reply(engine, 8, 120)
    written = [live for live in seen if live.metrics.generated_tokens > 1]
    assert written
    for live in written:
        assert live.bytes_per_step == engine.limits(live.context_tokens).bytes_per_step
        assert live.achieved_gbs == metrics.achieved_gbs(live.bytes_per_step, live.now_tps)
    before = [live for live in seen if live.metrics.generated_tokens < 2]
    assert all(live.achieved_gbs is None and live.outliers == () for live in before)


@given(st.lists(st.one_of(st.just(0.0), st.floats(0.0001, 3)), max_size=200))
def test_the_rate_now_is_of_a_second_and_twenty_tokens_at_least(gaps):
    """Tokens that came several in a pass have no time between them."""
    times = [*itertools.accumulate(gaps, initial=10.0)]
    now = metrics.recent_rate(times)
    assert (now is not None) == metrics.is_shown(len(gaps), times[-1] - times[0])
    if now is not None:
        spans = [(len(times) - 1 - begin, times[-1] - times[begin]) for begin in range(len(times) - 1)]
        assert any(
            now == pytest.approx(count / seconds) for count, seconds in spans if metrics.is_shown(count, seconds)
        )


def test_the_ends_percentiles_are_those_of_all_gaps(engine: Engine):
    recorders = []
    core, answer = runner_of(engine), runner_of(engine).reply

    def noted(request, cancelled, **more):
        recorders.append(request.recorder)
        return answer(request, cancelled, **more)

    core.reply = noted
    _, end = reply(engine, 8, 60)
    gaps = metrics.gaps_ms(recorders[0].token_times)
    assert end.metrics.itl_ms == metrics.gap_percentiles(gaps)
    for outlier in end.outliers:
        assert outlier.gap_ms == gaps[outlier.token - 2]
        assert outlier.gap_ms > 2 * end.metrics.itl_ms.p50


@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(key_bits=8, value_bits=4), KVSpec(window=300, keep=4)])
def test_growth_and_clearing_are_marked_where_they_happen(tiny: Path, kv: KVSpec):
    """The first step holds 250 tokens, in arrays of 256: what the eighth adds no longer fits."""
    with Engine.load(tiny, kv=kv, prompt_cache=None, speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        marks, ahead = marks_of(engine, 250, 260)
    assert [mark.token for mark in marks if mark.cause == "kv growth"] == [8 - ahead]
    assert [mark.token for mark in marks if mark.cause == "pool cleared"] == [POOL_CLEAR_STEPS - ahead]


def marks_of(engine: Engine, prompt: int, new: int):
    """Return what was marked in a reply, and whether steps are launched ahead."""
    recorder = Recorder()
    runtime = runner_of(engine).runtime
    sampling = Sampling(temperature=0, max_tokens=new)

    def run():
        ids = [5 + i % 40 for i in range(prompt)]
        runner = runner_of(engine)
        return Counter(
            type(e).__name__ for e in made(runner, runner.reply(runner.request(ids, sampling, recorder), lambda: False))
        )

    assert worker_of(engine).call(run)["Finished"] == 1
    assert [mark.token for mark in recorder.marks] == sorted(mark.token for mark in recorder.marks)
    return recorder.marks, runtime.ahead


def test_a_reader_who_keeps_the_engine_waiting_is_told_as_such(engine: Engine):
    recorder = Recorder()
    runner = runner_of(engine)

    def read():
        slept_at = []

        def sleep(_):
            if not slept_at and len(recorder.token_times) >= 20:
                slept_at.append(len(recorder.token_times))
                time.sleep(0.5)

        *_, last = made(runner, runner.reply(runner.request([5, 6, 7], GREEDY, recorder), lambda: False), sleep)
        return slept_at[0], last

    slept_at, end = worker_of(engine).call(read)
    (gap,) = (each for each in end.outliers if each.token == slept_at + 1)  # a busy machine has others
    assert gap.causes[0] == "slow reader"
