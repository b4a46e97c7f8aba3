"""What a reply in progress, and one that has ended, says of its steps; on a tiny model."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tokamac.engine import Engine, KVSpec, Sampling, metrics
from tokamac.engine.events import Finished, Live
from tokamac.engine.metrics import Recorder, StepCost

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


def test_a_mark_belongs_to_the_token_that_comes_next():
    recorder = Recorder(clock=iter([0.0, 0.01, 0.02, 0.06, 0.07]).__next__)
    for _ in range(3):
        recorder.token()
    recorder.mark("pool cleared")
    recorder.token()
    recorder.token()
    (outlier,) = recorder.outliers(ahead=False)
    assert (outlier.token, outlier.gap_ms, outlier.causes) == (4, pytest.approx(40.0), ("pool cleared",))


def test_a_reply_says_what_its_last_step_read_and_how_fast(engine: Engine):
    seen, _ = reply(engine, 8, 120)
    written = [live for live in seen if live.metrics.generated_tokens > metrics.RECENT_GAPS]
    assert written
    for live in written:
        assert live.bytes_per_step == engine.limits(live.context_tokens).bytes_per_step
        now = metrics.achieved_gbs(live.bytes_per_step, metrics.recent_rate(live.gaps_ms))
        assert live.achieved_gbs == now
    before = [live for live in seen if live.metrics.generated_tokens < 2]
    assert all(live.achieved_gbs is None and live.outliers == () for live in before)


def test_the_ends_percentiles_are_those_of_all_gaps(engine: Engine):
    recorders = []
    core, answer = engine._runner, engine._runner.reply

    def noted(prompt, sampling, recorder, cancelled, **more):
        recorders.append(recorder)
        return answer(prompt, sampling, recorder, cancelled, **more)

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
    with Engine.load(tiny, kv=kv, prompt_cache=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        marks, ahead = marks_of(engine, 250, 260)
    assert [mark.token for mark in marks if mark.cause == "kv growth"] == [8 - ahead]
    assert [mark.token for mark in marks if mark.cause == "pool cleared"] == [257]


def marks_of(engine: Engine, prompt: int, new: int):
    """Return what was marked in a reply, and whether steps are launched ahead."""
    recorder = Recorder()
    runtime = engine._runner.runtime
    sampling = Sampling(temperature=0, max_tokens=new)

    def run():
        ids = [5 + i % 40 for i in range(prompt)]
        return Counter(type(e).__name__ for e in engine._runner.reply(ids, sampling, recorder, lambda: False).events())

    assert engine._worker.call(run)["Finished"] == 1
    assert [mark.token for mark in recorder.marks] == sorted(mark.token for mark in recorder.marks)
    return recorder.marks, runtime.ahead


def test_a_reader_who_keeps_the_engine_waiting_is_told_as_such(engine: Engine):
    recorder = Recorder()
    events = engine._runner.reply([5, 6, 7], GREEDY, recorder, lambda: False).events()

    def read():
        slept_at = None
        for event in events:
            if slept_at is None and len(recorder.token_times) >= 20:
                slept_at = len(recorder.token_times)
                time.sleep(0.5)
            last = event
        return slept_at, last

    slept_at, end = engine._worker.call(read)
    assert end.outliers[0].token == slept_at + 1
    assert end.outliers[0].causes == ("slow reader",)
