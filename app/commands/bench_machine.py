"""``tokamac bench --machine``: what this machine's memory and arithmetic reach, beside the chip table, and a model's pace on it."""

from typing import TYPE_CHECKING, Any

from tokamac.app import told
from tokamac.app.commands import loading
from tokamac.app.output import json_line, note, table
from tokamac.app.tui.units import bandwidth, count, rate, seconds, tflops
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.limits.machine import MachineReport
    from tokamac.engine.limits.prediction import Prediction

CONTEXTS = (64, 1024, 4096)


def run(
    model: str,
    kv: KVSpec,
    *,
    memory: int | None,
    json_wanted: bool,
    unchecked: bool = False,
    adapter: str | None = None,
) -> int:
    """Measure the machine and the parts of the model's steps, and return the exit status."""
    from tokamac.engine import hub
    from tokamac.engine.limits.machine import measure_machine
    from tokamac.engine.limits.neural import advice

    loading.fetch(model, hub.resolve)  # first: seconds of measuring are not spent on a model that is not there
    note("measuring the machine, then the parts of a step of the model: a few seconds")
    report = measure_machine()
    if report.busy:
        note("note: other programs use this machine, so what it can do comes out too low; it is not kept")
    if (said := advice()) is not None:
        note(f"note: {said}")
        told.is_new(said)  # loading need not say it again
    with loading.load(model, kv=kv, prompt_cache=None, memory=memory, unchecked=unchecked, adapter=adapter) as engine:
        engine.measure()
        most = engine.spec.capacity or max(CONTEXTS)
        found = [engine.predict(context, context) for context in CONTEXTS if context <= most]
    if json_wanted:
        json_line(_to_json(report, model, found))
    else:
        print(_text(report, model, found))
    return 0


def _text(report: "MachineReport", model: str, found: "list[Prediction]") -> str:
    chip = report.table
    cores = "" if chip.gpu_cores is None else f", {chip.gpu_cores} GPU cores"
    kind = "float32" if report.device == "cpu" else "half precision"
    rows = [
        ["", "measured", "chip table"],
        ["copy, read and written", bandwidth(report.copy_gbs), bandwidth(chip.bandwidth_gbs)],
        ["matrix × vector, read", bandwidth(report.read_gbs), bandwidth(chip.bandwidth_gbs)],
        [f"matrix product, {kind}", tflops(report.tflops), tflops(chip.fp16_tflops)],
    ]
    head = ["context", "ceiling", "expected decode", "expected first token"]
    lines = [
        [count(each.context), rate(each.ceiling_tps), rate(each.expected_tps), seconds(each.ttft_s)] for each in found
    ]
    parts = [f"{chip.name}{cores}, computing on {report.device}", table(rows, right=(1, 2)), f"{model} here:"]
    return "\n\n".join([*parts, table([head, *lines], right=(0, 1, 2, 3))])


def _to_json(report: "MachineReport", model: str, found: "list[Prediction]") -> dict[str, Any]:
    chip = report.table
    return {
        "chip": {
            "name": chip.name,
            "gpu_cores": chip.gpu_cores,
            "bandwidth_gbs": chip.bandwidth_gbs,
            "fp16_tflops": chip.fp16_tflops,
        },
        "device": report.device,
        "measured": {
            "copy_gbs": report.copy_gbs,
            "read_gbs": report.read_gbs,
            "tflops": report.tflops,
            "busy": report.busy,
        },
        "model": model,
        "expected": [
            {
                "context": each.context,
                "ceiling_tps": each.ceiling_tps,
                "expected_tps": each.expected_tps,
                "ttft_s": each.ttft_s,
            }
            for each in found
        ],
    }
