"""``tokamac inspect``: what a model weighs, what a token costs, and what this machine makes of it at most."""

import argparse
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.options import Parser, add_kv_flags, kv_spec, positive
from tokamac.app.output import json_line, note, table
from tokamac.app.tui.units import UNKNOWN, rate, short, size

if TYPE_CHECKING:
    from tokamac.engine.limits.inspect import Inspection

CONTEXT = 4096

# The public contract's names, in its order; what else the inspection knows is for people.
_FIELDS = (
    "model", "architecture", "parameters", "weight_bytes", "bits_per_weight", "kv_bytes_per_token", "bytes_per_step", "chip",
    "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "memory",
)  # fmt: skip
_CHIP_FIELDS = ("name", "gpu_cores", "bandwidth_gbs", "fp16_tflops")


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "inspect",
        "Show a model's size, bits per weight, KV bytes per token, bytes read per decoded token, the ceiling here, and "
        "whether it fits.",
        "  tokamac inspect guide\n  tokamac inspect ~/models/mine --context 32768 --kv-bits 8,4 --json",
    )
    made.add_argument("model", metavar="MODEL", help="a folder, a Hugging Face id that is on disk, or guide")
    made.add_argument(
        "--context", type=positive, default=CONTEXT, metavar="N", help=f"tokens in the context ({CONTEXT})"
    )
    add_kv_flags(made, cache=False, ring=False)
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
    print(f"{name}  {found.architecture}, {short(found.parameters)} weights, context {short(found.context_length)}")
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


def _bits(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
