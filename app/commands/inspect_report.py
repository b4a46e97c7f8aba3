"""What ``tokamac inspect`` prints for people: a model's parts, what a token costs, what a machine makes of it; what-if tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokamac.app.fidelity import sentence
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, bandwidth, rate, seconds, short, size

if TYPE_CHECKING:
    from pathlib import Path

    from tokamac.engine.limits.cost import Form
    from tokamac.engine.limits.hardware import Chip
    from tokamac.engine.limits.inspect import Inspection
    from tokamac.engine.limits.kv_table import KVRow, KVTable
    from tokamac.engine.limits.memory import Fit
    from tokamac.engine.limits.outcomes import Outcome
    from tokamac.engine.limits.places import Place
    from tokamac.engine.limits.prediction import Phase
    from tokamac.engine.options import KVSpec

RUNS_SHOWN = 3
"""Runs of layers named in a row of the table: models that mix kinds of layers have many short ones."""

FORMS = {"stored": "as stored", "float32": "in float32", "unpacked": "unpacked to float32"}

KNOWN = {
    "files": "",
    "config": "there are no weights in this folder: predicted from its config alone",
    "catalogue": "not downloaded: predicted from the catalogue",
}


def report(found: "Inspection", recorded: str | None = None) -> str:
    """Return what is known of a model, and of one case of it, as text. recorded: of its quality; None leaves that out."""
    parts = [[part.part, short(part.parameters), size(part.bytes), bits(part.bits_per_weight)] for part in found.parts]
    whole = ["all", short(found.parameters), size(found.weight_bytes), bits(found.bits_per_weight)]
    counted = table([["part", "weights", "bytes", "bits"], *parts, whole], right=(1, 2, 3))
    figures = [*_figures(found), *([] if recorded is None else [["quality", recorded]])]
    return "\n\n".join([_title(found), counted, table(figures)])


def quality(folder: "Path | None") -> str | None:
    """Return how close a converted model was to its source when it was made, or why that is unknown; None for no folder."""
    from tokamac.quant.recorded import read_recorded

    if folder is None:
        return None
    found = read_recorded(folder)
    if isinstance(found, str):
        return f"{UNKNOWN}: {found}"
    return sanitise_line(" ".join([sentence(found.quality, found.relative_error), *found.concerns]))


def kv_report(planned: "KVTable", context: int) -> str:
    """Return a row for each kind of layer, their sum, and what the plan notes."""
    head = ["layers", "kind", "keys", "values", "window", "a token", f"at {context:,}"]
    rows = [_kv_row(row) for row in planned.rows]
    whole = ["all", "", "", "", "", size(planned.bytes_per_token), size(planned.bytes_at_context)]
    notes = [sanitise_line(remark) for remark in planned.notes]
    return "\n".join([table([head, *rows, whole], right=(2, 3, 5, 6)), *notes])


def cases_report(found: "Sequence[Outcome]", form: "Form" = "stored") -> str:
    """Return a row for each case of one model at one place, the first what was asked for, and what is to be known of them all.

    form: how the model's weights are held there.
    """
    from tokamac.engine.limits.whatif import notes

    head = ["weights", "KV", "context", "stored", "memory", "fits", "ceiling", "expected", "first token"]
    rows = table([head, *map(_case_row, found)], right=(2, 3, 4, 6, 7, 8))
    return "\n".join([rows, *(sanitise_line(each) for each in notes(found, form))])


def chips_report(found: "Sequence[Outcome]", *, memory: bool = False) -> str:
    """Return a row for each chip, of one case. memory: whether it is said if it fits, as where the Macs' memory was named."""
    head = ["chip", "bandwidth", "ceiling", "expected", "prefill", "first token", *(["fits"] if memory else [])]
    rows = [
        [
            chip_name(each.place.chip),
            bandwidth(each.place.chip.bandwidth_gbs),
            rate(each.ceiling_tps),
            rate(each.expected_tps),
            rate(each.prefill_tps),
            seconds(each.ttft_s),
            *([fits(each.memory)] if memory else []),
        ]
        for each in found
    ]
    return table([head, *rows], right=(1, 2, 3, 4, 5))


def chip_name(chip: "Chip") -> str:
    """Return a chip's name, with its GPU cores where they are known."""
    return sanitise_line(chip.name if chip.gpu_cores is None else f"{chip.name}, {chip.gpu_cores} GPU cores")


def fits(memory: "Fit | None") -> str:
    """Return whether something fits, in a word or two."""
    verdict = None if memory is None else memory.fits
    if verdict and memory is not None and memory.from_others:
        return "tight"
    return {True: "fits", False: "does not fit", None: UNKNOWN}[verdict]


def bits(value: float | None) -> str:
    """Return bits per weight."""
    return UNKNOWN if value is None else f"{value:.2f}"


def _title(found: "Inspection") -> str:
    active = found.active_parameters
    used = f" ({short(active)} a token)" if active is not None and "mixture" in found.traits else ""
    kinds = ", ".join(found.traits)
    named = f"{sanitise_line(found.model)}  {sanitise_line(found.architecture)}, {kinds}, {short(found.parameters)} weights{used}"
    title = f"{named}, context {short(found.context_length)}"
    known = KNOWN[found.known]
    return f"{title}\n{known}" if known else title


def _figures(found: "Inspection") -> list[list[str]]:
    memory, prompt, phases = found.memory, found.case.prompt, found.prediction
    decode, prefill = (None, None) if phases is None else (phases.decode, phases.prefill)
    kept = f"{size(found.kv_bytes_per_token)} a token, {size(found.kv_bytes)} at {found.context:,} tokens"
    return [
        ["KV cache", kept],
        ["one decoded token", f"reads {size(found.bytes_per_step)} (weights {FORMS[found.form]})"],
        ["this machine" if found.place.local else "machine", f"{chip_name(found.chip)}, {_source(found.chip)}"],
        ["ceiling", f"{rate(found.ceiling_tps)}: no kernel can be faster"],
        ["expected", f"{rate(found.expected_tps)}{_bound(decode)}"],
        ["prefill", f"{rate(found.prefill_tps)}{_bound(prefill)}"],
        [
            "first token",
            f"after {seconds(found.ttft_s)}, for a prompt of {prompt:,} tokens" if found.ttft_s else UNKNOWN,
        ],
        ["memory", f"{size(memory.total)} of {size(memory.budget)}: {_verdict(memory, found.place)}"],
        ["", f"weights {size(memory.weights)}, KV cache {size(memory.kv)}, temporaries {size(memory.working)}"],
    ]


def _bound(phase: "Phase | None") -> str:
    """Return what a phase waits for, where that is known."""
    if phase is None or phase.bound is None:
        return ""
    if phase.by_host:
        return ", waits for the host (Python, launching kernels)"
    return f", waits for {'memory' if phase.bound == 'memory' else 'arithmetic'}"


def _verdict(memory: "Fit", place: "Place") -> str:
    if memory.fits is not None:
        from tokamac.engine.limits.memory import giving_way

        return f"{fits(memory)}{f': {giving_way(memory.from_others)}' if memory.fits and memory.from_others else ''}"
    return f"unknown whether it fits{'' if place.budget_rule is None else f': {place.budget_rule}'}"


def _source(chip: "Chip") -> str:
    return UNKNOWN if chip.bandwidth_gbs is None else f"{bandwidth(chip.bandwidth_gbs)} ({chip.source})"


def _case_row(found: "Outcome") -> list[str]:
    case, memory = found.case, found.memory
    weights = "as it is" if case.bits is None else f"{case.bits} bits"
    speeds = [rate(found.ceiling_tps), rate(found.expected_tps), seconds(found.ttft_s)]
    taken = size(None if memory is None else memory.total)
    return [weights, _kv_bits(case.kv), f"{case.context:,}", size(found.weight_bytes), taken, fits(memory), *speeds]


def _kv_bits(kv: "KVSpec") -> str:
    return str(kv.key_bits) if kv.key_bits == kv.value_bits else f"{kv.key_bits},{kv.value_bits}"


def _kv_row(row: "KVRow") -> list[str]:
    kept = ["-" if value is None else str(value) for value in (row.key_bits, row.value_bits)]
    window = "-" if row.window is None else f"{row.window:,}"
    if row.keep:
        window += f", {row.keep} pinned"
    return [_layers(row.layers), row.kind, *kept, window, size(row.bytes_per_token), size(row.bytes_at_context)]


def _layers(layers: tuple[int, ...]) -> str:
    """Return "0-5", or the first few runs of more and how many layers they are in all."""
    from tokamac.engine.limits.kv_table import runs

    found = [f"{first}-{last}" if last > first else str(first) for first, last in runs(layers)]
    if len(found) <= RUNS_SHOWN:
        return ", ".join(found)
    return f"{', '.join(found[:RUNS_SHOWN])} … ({len(layers)})"
