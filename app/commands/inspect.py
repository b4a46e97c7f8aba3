"""``tokamac inspect``: what a model weighs, what a token costs, and what this machine makes of it at most."""

import argparse
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.options import Parser, add_kv_flags, kv_spec, positive
from tokamac.app.output import json_line, note, table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, rate, short, size
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.limits.inspect import Inspection
    from tokamac.engine.limits.kv_table import KVRow, KVTable

CONTEXT = 4096

# The public contract's names, in its order; what else the inspection knows is for people.
_FIELDS = (
    "model", "architecture", "parameters", "weight_bytes", "bits_per_weight", "kv_bytes_per_token", "bytes_per_step", "chip",
    "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "memory",
)  # fmt: skip
RUNS_SHOWN = 3
"""Runs of layers named in a row of the table: models that mix kinds of layers have many short ones."""

_CHIP_FIELDS = ("name", "gpu_cores", "bandwidth_gbs", "fp16_tflops")


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "inspect",
        "Show a model's size, bits per weight, KV bytes per token, bytes read per decoded token, the ceiling here, and "
        "whether it fits. With KV flags, or where layers differ: what the cache of each layer will be.",
        "  tokamac inspect guide\n  tokamac inspect guide --kv-bits 8,4 --kv-window 1024\n"
        "  tokamac inspect ~/models/mine --context 32768 --kv-bits 8,4 --json",
    )
    made.add_argument("model", metavar="MODEL", help="a folder, a Hugging Face id that is on disk, or guide")
    made.add_argument(
        "--context", type=positive, default=CONTEXT, metavar="N", help=f"tokens in the context ({CONTEXT})"
    )
    add_kv_flags(made, cache=False, full=False)
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Inspect, and return the exit status."""
    kv = kv_spec(parser, options)
    folder = loading.on_disk(options.model)
    from tokamac.engine.limits.inspect import inspect_model

    found = inspect_model(folder, options.context, kv)
    if options.json:
        json_line(_contract(found, options.model))
        return 0
    _print(found, options.model)
    if found.kv_table is not None and (kv != KVSpec() or len(found.kv_table.rows) > 1):
        print(f"\n{_kv_table(found.kv_table, found.context)}")
    if found.kv_reason is not None:
        note(f"note: KV bytes are counted from the config alone, since the caches can't be planned: {found.kv_reason}")
    if found.context_length is not None and options.context > found.context_length:
        note(f"note: the model was made for {found.context_length:,} tokens of context")
    return 0


def _contract(found: "Inspection", name: str) -> dict[str, Any]:
    everything = {**found.to_json(), "model": name}
    everything["chip"] = {key: everything["chip"][key] for key in _CHIP_FIELDS}
    return {key: everything[key] for key in _FIELDS}


def _print(found: "Inspection", name: str) -> None:
    chip, memory = found.chip, found.memory
    bandwidth = UNKNOWN if chip.bandwidth_gbs is None else f"{chip.bandwidth_gbs:,.3g} GB/s ({chip.source})"
    print(
        f"{name}  {sanitise_line(found.architecture)}, {short(found.parameters)} weights, context {short(found.context_length)}"
    )
    print()
    parts = [[part.part, short(part.parameters), size(part.bytes), _bits(part.bits_per_weight)] for part in found.parts]
    whole = ["all", short(found.parameters), size(found.weight_bytes), _bits(found.bits_per_weight)]
    print(table([["part", "weights", "bytes", "bits"], *parts, whole], right=(1, 2, 3)))
    print()
    held = {"stored": "as stored", "float32": "in float32", "unpacked": "unpacked to float32"}[found.form]
    verdict = {True: "fits", False: "does not fit", None: "unknown whether it fits"}[memory.fits]
    rows = [
        ["KV cache", f"{size(found.kv_bytes_per_token)} a token, {size(memory.kv)} at {found.context:,} tokens"],
        ["one decoded token", f"reads {size(found.bytes_per_step)} (weights {held})"],
        ["this machine", f"{chip.name}, {bandwidth}"],
        ["ceiling", f"{rate(found.ceiling_tps)}: no kernel can be faster"],
        ["memory", f"{size(memory.total)} of {size(memory.budget)}: {verdict}"],
    ]
    print(table(rows))


def _kv_table(planned: "KVTable", context: int) -> str:
    """Return a row for each kind of layer, their sum, and what the plan notes."""
    head = ["layers", "kind", "keys", "values", "window", "a token", f"at {context:,}"]
    rows = [_kv_row(row) for row in planned.rows]
    whole = ["all", "", "", "", "", size(planned.bytes_per_token), size(planned.bytes_at_context)]
    notes = [sanitise_line(remark) for remark in planned.notes]
    return "\n".join([table([head, *rows, whole], right=(2, 3, 5, 6)), *notes])


def _kv_row(row: "KVRow") -> list[str]:
    bits = ["-" if value is None else str(value) for value in (row.key_bits, row.value_bits)]
    window = "-" if row.window is None else f"{row.window:,}"
    if row.keep:
        window += f", {row.keep} pinned"
    return [_layers(row.layers), row.kind, *bits, window, size(row.bytes_per_token), size(row.bytes_at_context)]


def _layers(layers: tuple[int, ...]) -> str:
    """Return "0-5", or the first few runs of more and how many layers they are in all."""
    from tokamac.engine.limits.kv_table import runs

    found = [f"{first}-{last}" if last > first else str(first) for first, last in runs(layers)]
    if len(found) <= RUNS_SHOWN:
        return ", ".join(found)
    return f"{', '.join(found[:RUNS_SHOWN])} … ({len(layers)})"


def _bits(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
