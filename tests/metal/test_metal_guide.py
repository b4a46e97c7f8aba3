"""The embedded model from end to end on Metal's paths."""

from tokamac.engine import Engine, Finished, Message, Sampling
from tokamac.engine.perf import macos
from tokamac.engine.perf.macos import EVERY_S


def reply(engine: Engine, text: str) -> Finished:
    last = list(engine.generate([Message("user", text)], Sampling(temperature=0, max_tokens=40)))[-1]
    assert isinstance(last, Finished)
    return last


def test_the_guide_answers_and_no_process_is_started_in_a_reply(metal, mac):
    with Engine.load("guide") as engine:
        assert engine.spec.device == "metal"
        assert max(metal.wired) > engine.spec.weight_bytes
        started = len(metal.processes)
        mac.asked.clear()
        last = reply(engine, "Why is decode memory-bound?")
        assert "memory" in last.text
        assert last.metrics.ceiling_tps is not None
        assert mac.asked["output"] == 0
        assert metal.processes[started:] == []
    assert metal.wired[-1] == 0


def test_what_macos_slows_the_chip_down_for_is_in_the_diagnosis(mac):
    with Engine.load("guide") as engine:
        assert reply(engine, "What is the ceiling?").diagnosis.throttles == ()
        mac.asked.clear()
        mac.states[macos.THERMAL_PRESSURE] = 2
        mac.low_power_mode = True
        last = reply(engine, "What is prefill?")
        assert last.diagnosis.throttles == ("thermal", "low power")
        assert mac.asked["low_power"] == mac.asked["notified"] <= 2 + last.metrics.total_s / EVERY_S
        assert all("thermal" in outlier.causes and "low power" not in outlier.causes for outlier in last.outliers)
