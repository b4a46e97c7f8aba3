"""``tokamac inspect``: what a model weighs, what a token costs, and what this machine, or another one, makes of it."""

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.commands.measuring import measure_it
from tokamac.app.commands.place import add_place_flags, place_of
from tokamac.app.options import add_adapter_flag, add_kv_flags, given_adapter, kv_spec, positive
from tokamac.app.output import json_line, note
from tokamac.app.parser import Parser
from tokamac.engine.options import GROUP_SIZES, KVSpec

if TYPE_CHECKING:
    from tokamac.engine.limits.inspect import Inspection
    from tokamac.engine.limits.outcomes import Case, Outcome
    from tokamac.engine.limits.places import Place
    from tokamac.engine.limits.subject import Subject

CONTEXT = 4096

BITS = (2, 3, 4, 5, 6, 8, 16)

POINTS = 64
"""Contexts that a curve is drawn through."""

# The public contract's names, in its order; --table adds what else is known.
_FIELDS = (
    "model", "architecture", "parameters", "weight_bytes", "bits_per_weight", "kv_bytes_per_token", "bytes_per_step", "chip",
    "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "memory",
)  # fmt: skip


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "inspect",
        "Show a model's size, bits per weight, KV bytes per token, bytes read per decoded token, whether it fits, the ceiling, the "
        "speed to expect and the wait for the first token: here, or on another machine. A model of the catalogue need not be "
        "downloaded, and of any other its config.json is enough. With KV flags, or where layers differ: what each layer keeps.",
        "  tokamac inspect guide\n  tokamac inspect guide --kv-bits 8,4 --kv-window 1024\n"
        '  tokamac inspect Qwen3-8B-4bit --chip "Apple M4 Max" --gpu-cores 40 --memory 64 --table\n'
        "  tokamac inspect ~/models/mine --context 32768 --kv-bits 8,4 --json",
    )
    made.add_argument("model", metavar="MODEL", help="a folder, a Hugging Face id, a name of the catalogue, or guide")
    made.add_argument(
        "--context", type=positive, metavar="N", help=f"tokens held while decoding ({CONTEXT}, or --prompt)"
    )
    made.add_argument(
        "--prompt", type=positive, metavar="N", help="tokens to compute for the first one (the whole context)"
    )
    group = made.add_argument_group("weights (what is left out is as they are)")
    group.add_argument("--bits", type=int, choices=BITS, help="as if packed with so many bits; 16 is not packed")
    group.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="weights that share a scale (64)")
    add_place_flags(made)
    add_kv_flags(made, cache=False, full=False)
    add_adapter_flag(made)
    shown = made.add_argument_group("what if")
    shown.add_argument("--table", action="store_true", help="also in other precisions, KV bits and contexts")
    shown.add_argument(
        "--chips", action="store_true", help="also on every chip of the table; --memory is then that of every Mac in it"
    )
    shown.add_argument(
        "--plot", action="store_true", help="draw decode over context, and the roofline with both phases"
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Inspect, and return the exit status."""
    kv = kv_spec(parser, options)
    _check(parser, options)
    place = _place(parser, options)
    case = _case(parser, options, kv)
    from tokamac.engine.limits.address_space import LEAST_TO_INSPECT, check_address_space

    check_address_space(LEAST_TO_INSPECT)  # before the libraries that end the process where there is none
    from tokamac.engine.limits.inspect import inspect
    from tokamac.engine.limits.subject import subject_of

    subject = subject_of(options.model)
    if given_adapter(options.adapter or ""):
        from tokamac.engine import hub
        from tokamac.engine.adapters import read_adapter

        name = given_adapter(options.adapter)
        subject = replace(subject, adapter=read_adapter(loading.fetch(name, hub.resolve_adapter), name))
    found = inspect(subject, case, place)
    if options.json:
        json_line({**_json(options, subject, found), **_adapter(subject)})
        return 0
    _print(options, subject, found)
    if (added := subject.adapter) is not None:
        note(f"note: with the adapter {added.name}, {added.parameters:,} numbers beside the model's own")
    _remarks(found)
    return 0


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if options.group_size is not None and options.bits in (None, 16):
        parser.error("--group-size has no effect without --bits below 16")
    if options.json and options.plot:
        parser.error("--plot draws, so it does not go with --json")
    if options.adapter is not None:
        for name in ("table", "chips", "plot"):
            if getattr(options, name):
                parser.error(f"--{name} is of the model alone, so it does not go with --adapter")


def _place(parser: Parser, options: argparse.Namespace) -> "Place | None":
    """Return the machine that is named; None is this one. With --chips alone, --memory is of the table's, and not of this one."""
    of_table = options.chips and options.chip is None
    return place_of(parser, argparse.Namespace(**{**vars(options), "memory": None}) if of_table else options)


def _case(parser: Parser, options: argparse.Namespace, kv: KVSpec) -> "Case":
    from tokamac.engine.errors import OptionError
    from tokamac.engine.limits.outcomes import Case

    context = options.context or max(CONTEXT, options.prompt or 0)
    try:
        return Case(options.bits, options.group_size or 64, kv, context, options.prompt or context)
    except OptionError as error:
        parser.error(f"--prompt: {error.one_line().rstrip('.')}")


def _json(options: argparse.Namespace, subject: "Subject", found: "Inspection") -> dict[str, Any]:
    """Return the contract's object; with --table and --chips what else is known, and their rows."""
    everything = {**found.to_json(), "quality": _quality(subject)}
    if not (options.table or options.chips):
        return {key: everything[key] for key in _FIELDS}
    if options.table:
        everything["table"] = [_row(each) for each in _table(subject, found)]
    if options.chips:
        everything["chips"] = [_row(each) for each in _chips(options, subject, found)]
    return everything


def _adapter(subject: "Subject") -> dict[str, Any]:
    """Return what is added to the model; nothing where nothing is."""
    added = subject.adapter
    return {} if added is None else {"adapter": {"name": added.name, "digest": added.digest}}


def _quality(subject: "Subject") -> dict[str, Any] | None:
    """Return what was recorded of the model's quality when it was converted; None where nothing can be said."""
    from tokamac.quant.recorded import read_recorded

    recorded = None if subject.folder is None else read_recorded(subject.folder)
    return None if recorded is None or isinstance(recorded, str) else recorded.to_json()


def _row(found: "Outcome") -> dict[str, Any]:
    case, chip = found.case, found.place.chip
    return {
        "bits": case.bits,
        "key_bits": case.kv.key_bits,
        "value_bits": case.kv.value_bits,
        "context": case.context,
        "prompt": case.prompt,
        "chip": {"name": chip.name, "gpu_cores": chip.gpu_cores},
        "weight_bytes": found.weight_bytes,
        "bits_per_weight": found.bits_per_weight,
        "kv_bytes": found.kv_bytes,
        "memory": None if found.memory is None else asdict(found.memory),
        "ceiling_tps": found.ceiling_tps,
        "expected_tps": found.expected_tps,
        "prefill_tps": found.prefill_tps,
        "ttft_s": found.ttft_s,
        "reason": found.reason,
    }


def _print(options: argparse.Namespace, subject: "Subject", found: "Inspection") -> None:
    from tokamac.app.commands import inspect_report as reports

    as_it_is = subject.folder if found.case.bits is None else None
    print(reports.report(found, reports.quality(as_it_is)))
    planned = found.kv_table
    if planned is not None and (found.case.kv != KVSpec() or len(planned.rows) > 1):
        print(f"\n{reports.kv_report(planned, found.context)}")
    if options.table:
        print(f"\n{reports.cases_report(_table(subject, found), found.form)}")
    if options.chips:
        of_table = _chips(options, subject, found)
        print(f"\n{reports.chips_report(of_table, memory=options.memory is not None)}")
    if options.plot:
        _plot(subject, found)


def _plot(subject: "Subject", found: "Inspection") -> None:
    from tokamac.app.commands.plots import decode_plot, roofline_plot
    from tokamac.engine.limits.whatif import UNBOUNDED_CONTEXT, curve

    last = max(found.context_length or UNBOUNDED_CONTEXT, found.context)
    contexts = sorted({max(1, round(last * step / POINTS)) for step in range(POINTS + 1)})
    points = curve(subject.config, found.case, found.place, contexts, own=subject.packing)
    drawn = decode_plot(points, found.model)
    print(f"\n{drawn}" if drawn else "\ndecode over context: unknown")
    roof = None if found.prediction is None else roofline_plot(found.prediction, found.chip)
    print(f"\n{roof}" if roof else "\nroofline: unknown, since the chip's bandwidth or its peak arithmetic is")


def _remarks(found: "Inspection") -> None:
    """Say on stderr what is not as it may seem."""
    from tokamac.engine.limits.fitted import units_of
    from tokamac.engine.limits.neural import FROM, advice

    if found.place.local and (said := advice()) is not None:
        note(f"note: {said}")
    elif not found.place.local and units_of(found.chip) == "neural":
        needed = ".".join(map(str, FROM))
        note(
            f"note: prefill is that of neural accelerators, which takes macOS {needed} or later and MLX's wheel for it"
        )
    if found.kv_reason is not None:
        note(f"note: KV bytes are counted from the config alone, since the caches can't be planned: {found.kv_reason}")
    if found.reason is not None and found.kv_reason is None:
        measurable = found.place.local and found.ceiling_tps is not None and found.known != "config"
        note(f"note: {found.reason}{measure_it(found.model, here=found.known == 'files') if measurable else ''}")
    if found.context_length is not None and found.context > found.context_length:
        note(f"note: the model was made for {found.context_length:,} tokens of context")


def _table(subject: "Subject", found: "Inspection") -> "tuple[Outcome, ...]":
    from tokamac.engine.limits.whatif import table

    return table(subject.config, found.case, found.place, own=subject.packing)


def _chips(options: argparse.Namespace, subject: "Subject", found: "Inspection") -> "tuple[Outcome, ...]":
    from tokamac.engine.limits.whatif import everywhere, on_chips

    return on_chips(subject.config, found.case, everywhere(options.memory), own=subject.packing)
