"""The engine's thread alone: calls that go first, waits that end, and its end when nobody refers to the engine."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.deadline import DEADLINE_S, until, within
from tokamac.engine import Engine, Event, Finished, PrefillProgress, Sampling
from tokamac.engine.worker import LOOK_AHEAD, EventStream, Worker, _Job

GREEDY = Sampling(temperature=0, max_tokens=8)


def finish(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


def test_a_call_that_nobody_waits_for_any_more_is_not_run() -> None:
    worker, hold, ran = Worker("test", at_end=lambda: None), threading.Event(), threading.Event()
    worker.submit(hold.wait)
    future = worker._put(_Job(ran.set, is_call=True))  # as ``call`` does, which an interruption ends
    assert future.cancel()
    hold.set()
    within(worker.close)
    assert not ran.is_set()


def test_jobs_answered_early_are_not_run_again_and_keep_their_order() -> None:
    worker, order = Worker("test", at_end=lambda: None), list[str]()
    started, go = threading.Event(), threading.Event()

    def long() -> None:
        started.set()
        assert go.wait(DEADLINE_S)
        worker.answer()

    reply = worker.submit(long)
    started.wait(DEADLINE_S)
    callers = []
    for name in ("a", "b"):
        callers.append(threading.Thread(target=worker.call, args=(lambda name=name: order.append(name),), daemon=True))
        callers[-1].start()
        until(lambda: len(worker._waiting) == len(callers))
    later = worker.submit(lambda: order.append("later"))
    go.set()
    reply.result(DEADLINE_S)
    later.result(DEADLINE_S)
    within(worker.close)
    assert order == ["a", "b", "later"]


@pytest.mark.parametrize("ending", ["read", "cancel", "abandon", "before it rests"])
def test_a_stream_that_rests_goes_on_once(ending: str) -> None:
    asked: list[str] = []
    stream = EventStream()
    for done in range(LOOK_AHEAD):
        stream.put(PrefillProgress(done, LOOK_AHEAD, 0))
    assert stream.is_ahead
    if ending == "before it rests":
        stream.cancel()
    stream.rest(lambda: asked.append("again"))
    events = stream.read()
    if ending == "read":
        for _ in range(LOOK_AHEAD // 2 - 1):
            next(events)
        assert not asked
        next(events)
    elif ending != "before it rests":
        getattr(stream, ending)()
    assert asked == ["again"]
    stream.cancel()
    stream.end()
    list(events)
    assert asked == ["again"]
    assert not stream.is_ahead


def test_idle_work_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    worker, asked = Worker("test", at_end=lambda: None), threading.Event()

    def fail() -> float:
        asked.set()
        raise BaseException("as foreign code may")

    worker.when_idle = fail
    assert within(lambda: worker.call(lambda: 1)) == 1
    assert asked.wait(DEADLINE_S)
    until(lambda: "idle work" in caplog.text)
    asked.clear()
    assert within(lambda: worker.call(lambda: 2)) == 2
    assert asked.wait(DEADLINE_S)  # and it is tried again, after other work
    within(worker.close)


def test_an_engine_that_nobody_refers_to_closes_itself(tiny: Path) -> None:
    engine = Engine.load(tiny, prompt_cache=None)
    finish(engine.chat().send("hello", GREEDY))
    gone, thread = weakref.ref(engine), engine._worker._thread
    model = weakref.ref(engine._runner.runtime.model)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    gc.collect()
    assert model() is None


def test_a_reply_keeps_its_engine(tiny: Path) -> None:
    events = Engine.load(tiny, prompt_cache=None).generate([5, 6, 7], GREEDY)
    gc.collect()
    assert within(lambda: finish(events)).metrics.generated_tokens == 8


@pytest.mark.parametrize("ending", ["del engine", "del events, engine", "pass"])
def test_a_process_ends_cleanly_whatever_it_still_held(tiny: Path, ending: str) -> None:
    code = f"""
from tokamac.engine import Engine, KVSpec
engine = Engine.load({str(tiny)!r}, kv=KVSpec(window=64, keep=4), prompt_cache=None)
events = engine.generate([5, 6, 7])
next(events)
{ending}
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "over", "")
