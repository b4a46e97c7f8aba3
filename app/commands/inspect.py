"""``tokamac inspect``: a model's size and cost per token, and its speed here or on another machine."""

# Tables, JSON, what-if tables, and plots as wide as the terminal (decode rate over context, roofline). The flags that
# name another machine are shared with ``models suggest``.

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tokamac.engine import metrics
from tokamac.engine.gguf.places import TABLE
from tokamac.engine.options import GROUP_SIZES, SPLITS, KVSpec

from ..options import (
    ADAPTER,
    MODEL,
    NO_DRAFT,
    add_flags,
    add_kv_flags,
    gigabytes,
    given_adapter,
    given_draft,
    kv_spec,
    memory_limit,
    model_name,
    nodes_count,
    positive,
    shares,
    widths,
)
from ..parser import Parser
from ..reports.verdict import changed_text, closeness
from ..reports.what_if import ROOMY, at_once_json, at_once_text, gains_json, gains_text, worth_json, worth_text
from ..text.sanitise import sanitise_line
from ..text.terminal import is_terminal, json_line, note, picked, table
from ..text.units import UNKNOWN, bandwidth, lowest, rate, rates, seconds, short, size
from . import loading

if TYPE_CHECKING:
    from pathlib import Path

    from tokamac.engine.lab.without_cache import CacheWorth
    from tokamac.engine.perf.footprint import KVRow, KVTable
    from tokamac.engine.perf.hardware import Chip
    from tokamac.engine.perf.inspection import Inspection, ModelRef, NodesOutcome
    from tokamac.engine.perf.memory import MemoryFit
    from tokamac.engine.perf.roofline import Phase, Prediction
    from tokamac.engine.perf.what_if import DecodePoint, Machine, WhatIfCase, WhatIfOutcome
    from tokamac.engine.schedule.capacity import Capacity
    from tokamac.engine.speculation.gain import SpeculationGain


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("another machine (default: this one)")
    group.add_argument("--chip", metavar="NAME", help='chip, such as "Apple M4 Max"')
    cores = "GPU cores, where a chip comes in several sizes"
    group.add_argument("--gpu-cores", type=positive, metavar="N", help=cores)
    memory = "memory; without --chip, the limit on this machine"
    group.add_argument("--memory", type=gigabytes, metavar="GB", help=memory)


def place_of(parser: Parser, options: argparse.Namespace) -> "Machine | None":
    """Return the named machine; None: this one. Raises OptionError; exits with status 2 at flags without effect."""
    if options.chip is None:
        if options.gpu_cores is not None:
            parser.error("--gpu-cores has no effect without --chip")
        if (limit := memory_limit(options)) is None:
            return None
        from tokamac.engine.perf.what_if import here

        return here(limit=limit)
    from tokamac.engine.errors import OptionError
    from tokamac.engine.perf.what_if import elsewhere

    try:
        return elsewhere(options.chip, options.gpu_cores, options.memory)
    except OptionError as error:
        parser.error(f"--chip: {error.one_line().rstrip('.')}")


def measure_it(model: str, *, here: bool) -> str:
    """Return the command that measures ``model`` here. here: it needs no download."""
    name = shlex.quote(model)
    pull = "" if here else f"tokamac models pull {name}, then "
    return f"; measure it: {pull}tokamac bench {name} --machine"


LINK_NAMES = ("thunderbolt5", "ethernet")
CONTEXT = 4096
BITS = (2, 3, 4, 5, 6, 8, 16)
POINTS = 64  # contexts that a curve is drawn through

# The public contract's names, in its order; --table adds what else is known.
_FIELDS = (
    "model", "architecture", "parameters", "weight_bytes", "bits_per_weight", "kv_bytes_per_token", "bytes_per_step", "chip",
    "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "memory",
)  # fmt: skip


def parser() -> Parser:
    made = Parser(
        "inspect",
        "Show a model's size, bits per weight, KV bytes per token, memory, speed limit, expected speed and time to first token, on "
        "this machine or another. A config.json is enough, and nothing at all for models of the catalogue. KV flags add a table "
        "of what each layer keeps.",
        "  tokamac inspect guide\n  tokamac inspect guide --kv-bits 8,4 --kv-window 1024\n"
        '  tokamac inspect Qwen3-8B-4bit --chip "Apple M4 Max" --gpu-cores 40 --memory 64 --table\n'
        '  tokamac inspect Qwen3-8B-4bit --chip "Apple M4 Max" --gpu-cores 40 --memory 128 --parallel 1,2,4,8\n'
        '  tokamac inspect Qwen3-8B-4bit --chip "Apple M4 Max" --gpu-cores 40 --acceptance 0.5,0.7,0.9\n'
        '  tokamac inspect Qwen3-8B-4bit --chip "Apple M4 Max" --gpu-cores 40 --memory 64 --nodes 2 --link thunderbolt5\n'
        "  tokamac inspect ~/models/mine --context 32768 --kv-bits 8,4 --json",
    )
    made.add_model(_inspected, MODEL, required=True)
    held, computed = f"tokens in the context (default: {CONTEXT}, or --prompt)", "tokens of the prompt"
    made.add_argument("--context", type=positive, metavar="N", help=held)
    made.add_argument("--prompt", type=positive, metavar="N", help=f"{computed} (default: the whole context)")
    group = made.add_argument_group("weights (default: as they are stored)")
    group.add_argument("--bits", type=int, choices=BITS, help="as if quantized to this many bits; 16 is not quantized")
    group.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="weights that share a scale (default: 64)")
    add_place_flags(made)
    add_kv_flags(made, cache=False, full=False)
    made.add_argument("--adapter", metavar="DIR|ID", help=ADAPTER)
    made.add_argument(
        "--draft", type=_inspected, metavar="MODEL", help="add a draft model: memory of both, and the time of its steps"
    )
    shown = made.add_argument_group("what if")
    shown.add_argument("--table", action="store_true", help="also other precisions, KV bits and contexts")
    chips = "also every known chip; --memory then applies to each Mac"
    shown.add_argument("--chips", action="store_true", help=chips)
    cache = "also without a KV cache: time of a reply, sizes by layout and bits, requests that fit"
    shown.add_argument("--no-cache", action="store_true", help=cache)
    several = "also N replies in parallel: total and each, memory, bottleneck, and how many fit"
    shown.add_argument("--parallel", type=widths, metavar="N[,N…]", help=several)
    guesses = (
        "also the gain of speculative decoding at these acceptance rates, such as 0.7; with --draft, of that model"
    )
    shown.add_argument("--acceptance", type=shares, metavar="P[,P…]", help=guesses)
    nodes = made.add_argument_group("several such machines")
    nodes.add_argument("--nodes", type=nodes_count, metavar="N", help="also split over N of them")
    add_flags(nodes, "--split")
    nodes.add_argument("--link", choices=LINK_NAMES, help="connection between them (default: thunderbolt5)")
    nodes.add_argument("--link-latency", type=float, metavar="US", help="latency of a short message, in µs")
    nodes.add_argument("--link-rate", type=float, metavar="GBITS", help="bandwidth, in Gbit/s")
    plot = "draw decode over context, and the roofline with both phases"
    shown.add_argument("--plot", action="store_true", help=plot)
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def _inspected(written: str) -> str:
    """Resolve a model; catalogue names stay."""
    from ..models.local import is_short

    if not is_short(written) or written == NO_DRAFT:
        return written
    from tokamac.engine.perf.catalogue import find

    return model_name(written) if find(written) is None else written


def run(parser: Parser, options: argparse.Namespace) -> int:
    kv = kv_spec(parser, options)
    _check(parser, options)
    # With --chips alone, --memory is of the table's machines, and not of this one.
    of_table = options.chips and options.chip is None
    place = place_of(parser, argparse.Namespace(**{**vars(options), "memory": None}) if of_table else options)
    case = _case(parser, options, kv)
    from tokamac.engine.perf.memory import LEAST_TO_INSPECT, check_address_space

    check_address_space(LEAST_TO_INSPECT)  # before the libraries that end the process where there is none
    from tokamac.engine.perf.inspection import inspect, model_ref, with_heads

    subject = model_ref(options.model)
    if name := given_adapter(options.adapter or ""):
        from tokamac.engine.hub import download
        from tokamac.engine.model.adapters import read_adapter

        subject = replace(subject, adapter=read_adapter(loading.fetch(name, download.resolve_adapter), name))
    found = inspect(subject, case, place)
    if subject.folder is not None and case.bits is None:
        found = with_heads(found, subject.folder, subject.config)
    if name := given_draft(options.draft or ""):
        found = _with_draft(found, subject, name)
    added, draft = subject.adapter, found.draft
    if options.json:
        also: dict[str, Any] = {} if added is None else {"adapter": {"name": added.name, "digest": added.digest}}
        if draft is not None:
            beside = {"weight_bytes": draft.memory.weights, "kv_bytes": draft.memory.kv, "step": found.draft_step}
            also["draft"] = {"name": draft.model, **beside}
        if found.heads:
            also["heads"] = found.to_json()["heads"]
        json_line({**_json(options, subject, found), **also})
        return 0
    _print(options, subject, found)
    if added is not None:
        note(f"note: with the adapter {added.name}, {added.parameters:,} parameters more")
    if draft is not None:
        sizes = f"{size(draft.memory.weights)} of weights, {size(draft.memory.kv)} of KV cache at this context"
        step = (
            "" if found.draft_step is None else f"; one of its steps takes about {found.draft_step:.2f} of the model's"
        )
        note(f"note: with the draft model {sanitise_line(draft.model)}: {sizes}, in the memory above{step}")
    for each in found.heads:
        what = sanitise_line(each.named)
        if each.trouble:
            note(f"note: its own draft heads ({what}) are not used: {sanitise_line(each.trouble)}")
        else:
            gain = "in the memory above; their gain is unknown until a reply measures it"
            note(f"note: its own draft heads: {what}, {size(each.nbytes)} as stored, {gain}")
    _remarks(found)
    return 0


def _with_draft(found: "Inspection", subject: "ModelRef", name: str) -> "Inspection":
    """Add a draft model. Raises OptionError if both are local and their vocabularies differ."""
    from tokamac.engine.perf.inspection import inspect, model_ref, with_draft
    from tokamac.engine.perf.what_if import WhatIfCase
    from tokamac.engine.speculation.draft_model import check_same_tokens

    draft, case = model_ref(name), found.case
    if subject.folder is not None and draft.folder is not None:
        check_same_tokens(draft.folder, name, subject.folder, subject.name)
    bits = KVSpec(case.kv.key_bits, case.kv.value_bits, case.kv.group_size)
    beside = WhatIfCase(kv=bits, context=case.context, prompt=case.prompt)
    return with_draft(found, inspect(draft, beside, found.place))


def _check(parser: Parser, options: argparse.Namespace) -> None:
    for flag in ("split", "link", "link_latency", "link_rate"):
        if options.nodes is None and getattr(options, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} has no effect without --nodes")
    for flag in ("link_latency", "link_rate"):
        if (given := getattr(options, flag)) is not None and not 0 < given < math.inf:
            parser.error(f"--{flag.replace('_', '-')} must be above 0")
    if options.nodes is not None and options.adapter is not None:
        parser.error("--adapter: a model on several nodes takes no adapter")
    if options.group_size is not None and options.bits in (None, 16):
        parser.error("--group-size has no effect without --bits below 16")
    if options.json and options.plot:
        parser.error("--plot has no effect with --json")
    for flag in ("adapter", "draft"):
        for name in ("table", "chips", "no_cache", "parallel", "plot"):
            if getattr(options, flag) is not None and getattr(options, name):
                parser.error(f"--{name.replace('_', '-')} is of the model alone, so it does not go with --{flag}")


def _case(parser: Parser, options: argparse.Namespace, kv: KVSpec) -> "WhatIfCase":
    from tokamac.engine.errors import OptionError
    from tokamac.engine.perf.what_if import WhatIfCase

    context = options.context or max(CONTEXT, options.prompt or 0)
    try:
        return WhatIfCase(options.bits, options.group_size or 64, kv, context, options.prompt or context)
    except OptionError as error:
        parser.error(f"--prompt: {error.one_line().rstrip('.')}")


def _json(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> dict[str, Any]:
    """Return the public JSON object; --table and --chips add rows."""
    gguf = _gguf_json(subject.folder)
    everything = {**found.to_json(), "quality": _quality(subject), **gguf}
    if options.nodes is not None:
        told = _on_nodes(options, subject, found)
        at = {"reason": told} if isinstance(told, str) else {**asdict(told), "expected_tps": told.expected_tps}
        everything["nodes"] = at
    if not (
        options.table or options.chips or options.no_cache or options.parallel or options.acceptance or options.nodes
    ):
        return {key: everything[key] for key in (*_FIELDS, *gguf)}
    if options.table:
        everything["table"] = [_row(each) for each in _table(subject, found)]
    if options.chips:
        everything["chips"] = [_row(each) for each in _chips(options, subject, found)]
    if options.no_cache:
        worth = _worth(subject, found)
        everything["without_cache"] = {"reason": worth} if isinstance(worth, str) else worth_json(worth)
    if options.acceptance:
        everything["speculation"] = gains_json(_gains(options, subject, found))
    if options.parallel:
        several = _capacity(options, subject, found)
        everything["parallel"] = {"reason": several} if isinstance(several, str) else at_once_json(several)
    return everything


def _gguf_json(folder: "Path | None") -> dict[str, Any]:
    if folder is None or not (folder / TABLE).is_file():
        return {}
    from tokamac.engine.gguf.checkpoint import kept_of, projector_of

    types = [
        {**asdict(each), "bits_on_disk": each.bits(each.file_bytes), "bits_in_memory": each.bits(each.nbytes)}
        for each in kept_of(folder)
    ]
    projector = projector_of(folder)
    return {"gguf": {"types": types, "projector": None if projector is None else str(projector)}}


def _quality(subject: "ModelRef") -> dict[str, Any] | None:
    from tokamac.quant.report import read_recorded

    recorded = None if subject.folder is None else read_recorded(subject.folder)
    return None if recorded is None or isinstance(recorded, str) else recorded.to_json()


def _row(found: "WhatIfOutcome") -> dict[str, Any]:
    case, chip = found.case, found.place.chip
    return {
        "bits": case.bits,
        "key_bits": case.kv.key_bits,
        "value_bits": case.kv.value_bits,
        "context": case.context,
        "prompt": case.prompt,
        "chip": picked(chip, "name", "gpu_cores"),
        **picked(found, "weight_bytes", "bits_per_weight", "kv_bytes"),
        "memory": None if found.memory is None else asdict(found.memory),
        **picked(found, "ceiling_tps", "expected_tps", "prefill_tps", "ttft_s", "reason"),
    }


def _print(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> None:
    as_it_is = subject.folder if found.case.bits is None else None
    print(report(found, quality(as_it_is)))
    if as_it_is is not None and (as_it_is / TABLE).is_file():
        from tokamac.engine.gguf.checkpoint import kept_of, projector_of

        print("\n" + "\n".join(map(str, kept_of(as_it_is))))
        if (projector := projector_of(as_it_is)) is not None:
            print(f"{sanitise_line(projector.name)} beside it is a vision projector, read when a picture comes")
    planned = found.kv_table
    if planned is not None and (found.case.kv != KVSpec() or len(planned.rows) > 1):
        print(f"\n{kv_report(planned, found.context)}")
    if options.table:
        print(f"\n{cases_report(_table(subject, found))}")
    if options.chips:
        print(f"\n{chips_report(_chips(options, subject, found), memory=options.memory is not None)}")
    if options.no_cache:
        worth = _worth(subject, found)
        told = f"the gain of a KV cache is unknown: {worth}" if isinstance(worth, str) else worth_text(worth, columns())
        print(f"\n{told}")
    if options.acceptance:
        print(f"\n{gains_text(_gains(options, subject, found), columns())}")
    if options.parallel:
        several = _capacity(options, subject, found)
        unknown = f"how many parallel replies fit is unknown: {several}"
        print(f"\n{unknown if isinstance(several, str) else at_once_text(several, columns())}")
    if options.nodes is not None:
        together = _on_nodes(options, subject, found)
        unknown = f"several machines: {together}"
        print(f"\n{unknown if isinstance(together, str) else nodes_text(together, found.place)}")
    if options.plot:
        _plot(subject, found)


def _on_nodes(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> "NodesOutcome | str":
    from tokamac.engine.errors import OptionError
    from tokamac.engine.perf.inspection import LINKS, on_nodes

    link = LINKS[options.link or LINK_NAMES[0]]
    if options.link_latency is not None:
        link = replace(link, latency_s=options.link_latency / 1e6, source=f"{link.source}; latency as given")
    if options.link_rate is not None:
        link = replace(link, gbits=options.link_rate, source=f"{link.source}; rate as given")
    try:
        return on_nodes(subject, found.case, found.place, options.nodes, split=options.split or SPLITS[0], link=link)
    except OptionError as error:
        return error.message


def nodes_text(found: "NodesOutcome", place: "Machine") -> str:
    link, hops = found.link, found.nodes - 1 if found.split == "tensor" else 1
    told = "a part of every layer each" if found.split == "tensor" else "some layers each, one after another"
    speed = ", ".join(
        [
            UNKNOWN if link.gbits is None else f"{link.gbits:g} Gb/s",
            f"latency {UNKNOWN}" if link.latency_s is None else f"{link.latency_s * 1e6:g} µs a message",
        ]
    )
    read = f"{size(found.read_bytes)} read{' on each' if found.split == 'tensor' else ' in all'}"
    sent = f"{found.messages} messages of {size(found.message_bytes)}"
    formula = f"{UNKNOWN}: {found.reason}"
    if found.expected_tps is not None:
        own, between = (found.reading_s or 0.0) * 1e3, (found.linking_s or 0.0) * 1e3
        hopping = f"{hops} × " if hops > 1 else ""
        formula = (
            f"{rate(found.expected_tps)} = 1 s ÷ ({own:.2f} ms reading + {between:.2f} ms for {found.messages} × "
            f"({hopping}latency + bytes ÷ link rate))"
        )
    rows = [
        ["nodes", f"{found.nodes} like this, {told}"],
        [
            "memory of each",
            f"{size(found.memory.total)} of {size(found.memory.budget)}: {_verdict(found.memory, place)}",
        ],
        ["one decoded token", f"{read}; {sent}"],
        ["link", f"{link.name}: {speed}"],
        ["", link.source],
        ["ceiling", f"{rate(found.ceiling_tps)}{'' if found.ceiling_tps is None else ', without the link'}"],
        ["expected", formula],
    ]
    return table(rows)


def _worth(subject: "ModelRef", found: "Inspection") -> "CacheWorth | str":
    from tokamac.engine.lab.without_cache import cache_worth
    from tokamac.engine.perf.footprint import weigh
    from tokamac.engine.perf.what_if import contexts_up_to

    place, packing = found.place, found.case.packing(subject.packing)
    weighed = weigh(subject.config, place.device, packing=packing)
    return (
        weighed if isinstance(weighed, str) else cache_worth(weighed, found.case, place, contexts_up_to(subject.config))
    )


def _capacity(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> "Capacity | str":
    from tokamac.engine.errors import OptionError
    from tokamac.engine.schedule.capacity import capacity_of

    try:
        return capacity_of(subject.config, found.case, found.place, options.parallel, own=subject.packing)
    except OptionError as error:
        return error.message


def _gains(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> "list[SpeculationGain]":
    """Return speculation gains per acceptance rate; default draft: one known to fit."""
    from tokamac.engine.perf.catalogue import draft_for
    from tokamac.engine.perf.inspection import model_ref
    from tokamac.engine.speculation.gain import gain_of

    named, known = given_draft(options.draft or ""), draft_for(options.model)
    name = named or (known.id if known is not None and options.draft is None else None)
    draft = None if name is None else model_ref(name)
    return [gain_of(subject, found.case, found.place, share, draft) for share in options.acceptance]


def columns() -> int:
    """Return the terminal's width; unlimited without one."""
    return shutil.get_terminal_size((ROOMY, 24)).columns if is_terminal(sys.stdout) else ROOMY


def _plot(subject: "ModelRef", found: "Inspection") -> None:
    from tokamac.engine.perf.what_if import UNBOUNDED_CONTEXT, curve

    last = max(found.context_length or UNBOUNDED_CONTEXT, found.context)
    contexts = sorted({max(1, round(last * step / POINTS)) for step in range(POINTS + 1)})
    points = curve(subject.config, found.case, found.place, contexts, own=subject.packing)
    drawn = decode_plot(points, found.model)
    print(f"\n{drawn}" if drawn else "\ndecode over context: unknown")
    roof = None if found.prediction is None else roofline_plot(found.prediction, found.chip)
    print(f"\n{roof}" if roof else "\nroofline: unknown, since the chip's bandwidth or its peak arithmetic is")


def _remarks(found: "Inspection") -> None:
    from tokamac.engine.perf.hardware import FROM, advice, units_of

    if found.place.local and (said := advice()) is not None:
        note(f"note: {said}")
    elif not found.place.local and units_of(found.chip) == "neural":
        needed = f"macOS {'.'.join(map(str, FROM))} or later and MLX's wheel for it"
        note(f"note: prefill is that of neural accelerators, which takes {needed}")
    if found.kv_reason is not None:
        note(f"note: KV bytes are those of the config, since the caches can't be planned: {found.kv_reason}")
    if found.reason is not None and found.kv_reason is None:
        measurable = found.place.local and found.ceiling_tps is not None and found.known != "config"
        note(f"note: {found.reason}{measure_it(found.model, here=found.known == 'files') if measurable else ''}")
    if found.context_length is not None and found.context > found.context_length:
        note(f"note: the model was made for {found.context_length:,} tokens of context")


def _table(subject: "ModelRef", found: "Inspection") -> "tuple[WhatIfOutcome, ...]":
    from tokamac.engine.perf.what_if import table

    return table(subject.config, found.case, found.place, own=subject.packing)


def _chips(options: argparse.Namespace, subject: "ModelRef", found: "Inspection") -> "tuple[WhatIfOutcome, ...]":
    from tokamac.engine.perf.what_if import everywhere, on_chips

    return on_chips(subject.config, found.case, everywhere(options.memory), own=subject.packing)


RUNS_SHOWN = 3  # runs of layers named in a row of the table: models that mix kinds of layers have many short ones

FORMS = {"stored": "as stored", "float32": "in float32 where not packed"}

KNOWN = {
    "files": "",
    "config": "there are no weights in this folder: predicted from its config alone",
    "catalogue": "not downloaded: predicted from the catalogue",
}


def report(found: "Inspection", recorded: "Sequence[str] | None" = None) -> str:
    """Format a model and one case. recorded: its quality, and lines on what changed; None omits that."""
    parts = [[part.part, short(part.parameters), size(part.bytes), bits(part.bits_per_weight)] for part in found.parts]
    whole = ["all", short(found.parameters), size(found.weight_bytes), bits(found.bits_per_weight)]
    counted = table([["part", "weights", "bytes", "bits"], *parts, whole], right=(1, 2, 3))
    said, *changed = recorded or [""]
    figures = [*_figures(found), *([["quality", said]] if said else [])]
    return "\n\n".join([_title(found), counted, "\n".join([table(figures), *changed])])


def quality(folder: "Path | None") -> list[str] | None:
    """Describe a converted model's quality and where its words changed, or why it is unknown; None for no folder."""
    from tokamac.quant.report import read_recorded

    if folder is None:
        return None
    if (folder / TABLE).is_file():
        return ["that of the file's own numbers, but for the errors below; what its maker lost is not recorded"]
    found = read_recorded(folder)
    if isinstance(found, str):
        return [f"{UNKNOWN}: {found}"]
    advice = [found.advice] if found.advice else found.concerns
    said = [closeness(found.quality, found.relative_error, found.grade), *advice]
    return [sanitise_line(". ".join(said)), *changed_text(found.changed)]


def kv_report(planned: "KVTable", context: int) -> str:
    head = ["layers", "kind", "keys", "values", "window", "a token", f"at {context:,}"]
    rows = [_kv_row(row) for row in planned.rows]
    whole = ["all", "", "", "", "", size(planned.bytes_per_token), size(planned.bytes_at_context)]
    notes = [sanitise_line(remark) for remark in planned.notes]
    return "\n".join([table([head, *rows, whole], right=(2, 3, 5, 6)), *notes])


def cases_report(found: "Sequence[WhatIfOutcome]") -> str:
    from tokamac.engine.perf.what_if import notes

    head = ["weights", "KV", "context", "stored", "memory", "fits", "ceiling", "expected", "first token"]
    rows = table([head, *map(_case_row, found)], right=(2, 3, 4, 6, 7, 8))
    return "\n".join([rows, *(sanitise_line(each) for each in notes(found))])


def chips_report(found: "Sequence[WhatIfOutcome]", *, memory: bool = False) -> str:
    """Format a case on each chip. memory: include whether it fits."""
    head = ["chip", "bandwidth", "ceiling", "expected", "prefill", "first token", *(["fits"] if memory else [])]
    rows = [
        [
            sanitise_line(each.place.chip.label),
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


def fits(memory: "MemoryFit | None") -> str:
    verdict = None if memory is None else memory.fits
    if verdict and memory is not None and memory.from_others:
        return "tight"
    return {True: "fits", False: "does not fit", None: UNKNOWN}[verdict]


def bits(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _title(found: "Inspection") -> str:
    active = found.active_parameters
    used = f" ({short(active)} a token)" if active is not None and "mixture" in found.traits else ""
    kinds = ", ".join(found.traits)
    named = f"{sanitise_line(found.model)}  {sanitise_line(found.architecture)}, {kinds}, {short(found.parameters)} weights{used}"
    title = f"{named}, context {short(found.context_length)}"
    known = KNOWN[found.known]
    return f"{title}\n{known}" if known else title


def picture_text(tokens: int, least: int, most: int) -> str:
    by_size = "whatever its size" if least == most else f"of 1,024 × 768 pixels; {least:,} to {most:,} by its size"
    return f"{tokens:,} tokens, {by_size}"


def _figures(found: "Inspection") -> list[list[str]]:
    memory, prompt, phases = found.memory, found.case.prompt, found.prediction
    decode, prefill = (None, None) if phases is None else (phases.decode, phases.prefill)
    kept = f"{size(found.kv_bytes_per_token)} a token, {size(found.kv_bytes)} at {found.context:,} tokens"
    chip = found.chip
    known = chip.bandwidth_gbs is not None
    speed = f"{bandwidth(chip.bandwidth_gbs)} ({chip.source})" if known else f"memory speed {UNKNOWN}"
    first = f"after {seconds(found.ttft_s)}, for a prompt of {prompt:,} tokens" if found.ttft_s else UNKNOWN
    return [
        ["KV cache", kept],
        ["one decoded token", f"reads {size(found.bytes_per_step)} (weights {FORMS[found.form]})"],
        *([] if found.picture is None else [["a picture", picture_text(*found.picture)]]),
        *([] if found.rounding is None else [["what weights multiply", str(found.rounding)]]),
        ["this machine" if found.place.local else "machine", f"{sanitise_line(found.chip.label)}, {speed}"],
        *([["", chip.condition]] if chip.condition else []),
        ["ceiling", f"{rate(found.ceiling_tps)}{'' if found.ceiling_tps is None else ': the hardware limit'}"],
        ["expected", f"{rates(found.expected_tps, found.expected_range)}{_bound(decode)}"],
        ["prefill", f"{rate(found.prefill_tps)}{_bound(prefill)}"],
        ["first token", first],
        ["memory", f"{size(memory.total)} of {size(memory.budget)}: {_verdict(memory, found.place)}"],
        ["", f"weights {size(memory.weights)}, KV cache {size(memory.kv)}, temporaries {size(memory.working)}"],
    ]


def _bound(phase: "Phase | None") -> str:
    if phase is None or phase.bound is None:
        return ""
    if phase.by_host:
        return ", waits for the host (Python, launching kernels)"
    return f", waits for {'memory' if phase.bound == 'memory' else 'arithmetic'}"


def _verdict(memory: "MemoryFit", place: "Machine") -> str:
    if memory.fits is not None:
        from tokamac.engine.perf.memory import giving_way

        return f"{fits(memory)}{f': {giving_way(memory.from_others)}' if memory.fits and memory.from_others else ''}"
    return f"unknown whether it fits{'' if place.budget_rule is None else f': {place.budget_rule}'}"


def _case_row(found: "WhatIfOutcome") -> list[str]:
    case, memory = found.case, found.memory
    weights = "as it is" if case.bits is None else f"{case.bits} bits"
    speeds = [rate(found.ceiling_tps), rate(found.expected_tps), seconds(found.ttft_s)]
    taken = size(None if memory is None else memory.total)
    kv = str(case.kv.key_bits) if case.kv.key_bits == case.kv.value_bits else f"{case.kv.key_bits},{case.kv.value_bits}"
    return [weights, kv, f"{case.context:,}", size(found.weight_bytes), taken, fits(memory), *speeds]


def _kv_row(row: "KVRow") -> list[str]:
    kept = ["-" if value is None else str(value) for value in (row.key_bits, row.value_bits)]
    window = "-" if row.window is None else f"{row.window:,}"
    if row.keep:
        window += f", {row.keep} pinned"
    return [_layers(row.layers), row.kind, *kept, window, size(row.bytes_per_token), size(row.bytes_at_context)]


def _layers(layers: tuple[int, ...]) -> str:
    """Format layer numbers as "0-5", or the first runs and a count."""
    from tokamac.engine.perf.footprint import runs

    found = [f"{first}-{last}" if last > first else str(first) for first, last in runs(layers)]
    if len(found) <= RUNS_SHOWN:
        return ", ".join(found)
    return f"{', '.join(found[:RUNS_SHOWN])} … ({len(layers)})"


WIDEST, NARROWEST, HEIGHT = 100, 40, 18
TICKS = 5
HEADROOM = 1.2  # the axis ends so far above the highest point that the legend covers no curve

LEGEND_SHARE = 0.3  # the same on a logarithmic axis, as a share of the powers of ten below


def decode_plot(points: "Sequence[DecodePoint]", title: str) -> str | None:
    """Plot tokens/s over context: ceiling and expected; None if both are unknown."""
    ceiling = [(at.context, at.ceiling_tps) for at in points if at.ceiling_tps is not None]
    expected = [(at.context, at.expected_tps) for at in points if at.expected_tps is not None]
    if not ceiling:
        return None

    def draw(plot: Any) -> None:
        _line(plot, ceiling, "ceiling, tok/s", "blue", braille=True)
        if expected:
            _line(plot, expected, "expected, tok/s", "green", braille=False)
        last = max(context for context, _ in ceiling)
        ticks = [round(last * part / (TICKS - 1)) for part in range(TICKS)]
        plot.xticks(ticks, [short(tick) for tick in ticks])
        plot.xlim(0, last)
        plot.ylim(0, HEADROOM * max(tps for _, tps in ceiling))
        plot.xlabel("context, tokens")

    return _picture(f"{title}: decode over context", draw)


def roofline_plot(predicted: "Prediction", chip: "Chip") -> str | None:
    """Plot operations/s over operations/byte with both phases; None without a roof."""
    # A phase is drawn at its expected speed, or on the roof where that is unknown.
    if chip.bandwidth_gbs is None or predicted.ridge is None:
        return None
    gbs, ridge = chip.bandwidth_gbs, predicted.ridge
    peak_tflops = ridge * gbs / 1e3
    both = (("decode", predicted.decode), ("prefill", predicted.prefill))
    phases = [(name, phase) for name, phase in both if phase.intensity]
    reach = [phase.intensity for _, phase in phases if phase.intensity is not None]
    left, right = min([*reach, ridge]) / 4, max([*reach, ridge]) * 4
    low = lowest(left * gbs / 1e3, (_reached_tflops(phase) for _, phase in phases))

    def draw(plot: Any) -> None:
        plot.xscale("log")
        plot.yscale("log")
        roof = [(left, left * gbs / 1e3), (ridge, peak_tflops), (right, peak_tflops)]
        _line(plot, roof, f"roof: {gbs:,.3g} GB/s, {peak_tflops:,.3g} TFLOP/s", "blue", braille=True)
        for (name, phase), colour in zip(phases, ("green", "magenta"), strict=False):
            _mark(plot, name, phase, colour)
        for set_ticks, begin, end in ((plot.xticks, left, right), (plot.yticks, low, peak_tflops)):
            powers = [
                10.0**exponent for exponent in range(math.ceil(math.log10(begin)), math.floor(math.log10(end)) + 1)
            ]
            set_ticks(powers, [f"{power:g}" for power in powers])
        # On a logarithmic axis plotext takes limits as exponents.
        plot.ylim(math.log10(low), math.log10(peak_tflops) + LEGEND_SHARE * math.log10(peak_tflops / low))
        plot.xlabel("operations a byte")

    return _picture(f"{sanitise_line(chip.name)}: roofline, TFLOP/s", draw)


def _mark(plot: Any, name: str, phase: "Phase", colour: str) -> None:
    reached = _reached_tflops(phase)
    if reached is None or phase.intensity is None:
        return
    roof = "the host" if phase.by_host else "memory" if phase.bound == "memory" else "arithmetic"
    side = f", waits for {roof}" if phase.bound else ""
    plot.scatter([phase.intensity], [reached], marker=name[0].upper(), label=f"{name}{side}", **_coloured(colour))


def _reached_tflops(phase: "Phase") -> float | None:
    took_s = phase.ceiling_s if phase.expected_s is None else phase.expected_s
    reached = None if phase.operations is None else metrics.rate(phase.operations, took_s)
    return None if reached is None else reached / 1e12


def _line(plot: Any, points: Sequence[tuple[float, float]], label: str, colour: str, *, braille: bool) -> None:
    xs, ys = zip(*points, strict=True)
    solid = "braille" if "utf" in (sys.stdout.encoding or "").casefold() else "*"
    marker = solid if braille else "."
    plot.plot(list(xs), list(ys), marker=marker, label=label, **_coloured(colour))


def _picture(title: str, draw: Callable[[Any], None]) -> str:
    import plotext as plot

    plot.clear_figure()
    plot.theme("clear")
    plot.plotsize(max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns)), HEIGHT)
    plot.title(sanitise_line(title))
    draw(plot)
    text = str(plot.build())
    plot.clear_figure()
    lines = text if _colours() else plot.uncolorize(text)
    return "\n".join(line.rstrip() for line in lines.splitlines())


def _coloured(colour: str) -> dict[str, str]:
    return {"color": colour} if _colours() else {}


def _colours() -> bool:
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
