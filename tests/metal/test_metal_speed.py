"""The first reply of a Mac, and what its speed is held against."""

from tokamac.engine import Engine, Finished, Message, Sampling
from tokamac.engine.perf.roofline import HostLimited


def test_the_guide_is_expected_to_be_no_faster_than_the_host_builds_its_steps():
    with Engine.load("guide") as engine:
        pace = engine._runner.runtime.machine.pace
        assert isinstance(pace, HostLimited)
        assert pace.host is not None
        assert engine.predict(100, 200).decode.expected_s >= pace.host.step_s
        last = list(engine.generate([Message("user", "What is prefill?")], Sampling(temperature=0, max_tokens=20)))[-1]
    assert isinstance(last, Finished)
    assert last.metrics.expected_tps is not None
    assert last.metrics.expected_tps <= 1.001 / pace.host.step_s
    assert last.diagnosis is not None
    assert all(remedy.name != "quiet machine" for remedy in last.diagnosis.remedies)
