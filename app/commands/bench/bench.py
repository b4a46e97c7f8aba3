"""``tokamac bench``: a warm-up, then uncached runs; medians and spread against the machine's limits."""

# Each run has its own prompt, so prefill is measured whole, and ignores end-of-sequence tokens. ``--machine`` measures
# memory and compute; ``--kv-quality``: kv_quality.py; ``--parallel``: parallel.py.
#
#     flags (here) → runs (runs.py, peer.py) → medians, then tables, JSON and a plot (report.py)

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.files import expanded
from tokamac.engine.options import KVSpec, Nodes, Sampling, Speculation, TemplateOptions

from ... import settings
from ...backend.keep_awake import awake
from ...options import (
    MODEL,
    SAMPLING_FLAGS,
    TEMPLATE_FLAGS,
    adapter_of,
    add_nodes_flags,
    add_reply_flags,
    add_speculation_flags,
    check_speculation_flags,
    default_model,
    kv_spec,
    model_name,
    nodes_of,
    positive,
    sampling,
    speculation_of,
    template_options,
    widths,
)
from ...parser import Parser
from ...text.terminal import json_line, note, picked, table
from ...text.units import bandwidth, count, rate, seconds, tflops
from .. import loading
from . import kv_quality, parallel, peer, report
from .runs import BenchPoint, check_room, measure, points

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.perf.bandwidth import MachineReport
    from tokamac.engine.perf.roofline import Prediction

PROMPT_TOKENS = 512
NEW_TOKENS = 128
RUNS = 5
MACHINE_CONTEXTS = (64, 1024, 4096)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A benchmark; ``sampling.max_tokens`` is set. template: if not empty, prompts are user messages."""

    model: str
    points: list[BenchPoint]
    runs: int
    sampling: Sampling
    kv: KVSpec
    compare: bool
    template: TemplateOptions

    @property
    def new(self) -> int:
        return self.sampling.max_tokens or 0


def parser() -> Parser:
    made = Parser(
        "bench",
        "Measure time to first token, prefill and decode on this machine, beside the limit and the expected speed: medians and "
        "spread after a warm-up. Several lengths of --prompt or --depth make a table, and --plot a picture. --parallel measures "
        "replies in parallel, --kv-quality what each KV setting costs in quality and saves.",
        "  tokamac bench\n  tokamac bench mlx-community/Qwen3-4B-Instruct-2507-4bit --prompt 2048 --runs 3 --json\n"
        "  tokamac bench guide --depth 128,1024,3900 --plot decode.svg\n"
        "  tokamac bench guide --prompt 64,512 --compare mlx-lm\n"
        "  tokamac bench guide --parallel 1,2,4,8 --compare mlx-lm\n"
        "  tokamac bench guide --kv-quality --kv-window 2048",
    )
    add, sizes = made.add_argument, kv_quality.depth_list
    made.add_model(model_name, f"{MODEL} (default: the model used last)")
    add(
        "--prompt",
        type=sizes,
        metavar="N[,N…]",
        help=f"tokens of the prompt (default: {PROMPT_TOKENS}; none with --depth)",
    )
    add("--depth", type=sizes, metavar="N[,N…]", help="contexts to measure decode at")
    add("--runs", type=positive, metavar="N", help=f"runs after the warm-up (default: {RUNS})")
    at_once = "N replies in parallel: total and each, beside the prediction"
    add("--parallel", type=widths, metavar="N[,N…]", help=at_once)
    beside = "run mlx-lm on the same prompts, in turn; both greedy"
    add("--compare", choices=(peer.NAME,), help=beside)
    add("--plot", type=svg_path, metavar="FILE.svg", help="draw decode speed over context, with its limit")
    machine = "measure this machine beside the chip table, and the model's pace on it"
    add("--machine", action="store_true", help=machine)
    add("--json", action="store_true", help="one JSON object")
    kv_quality.add_flags(made)
    add_reply_flags(made, cache=False)
    add_nodes_flags(made)
    add_speculation_flags(made, "off, so that rates are those of plain steps; --draft turns it on")
    add("--no-prompt-cache", action="store_true", help="no effect: bench always computes every prompt from scratch")
    return made


def svg_path(text: str) -> Path:
    path = expanded(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"the picture is SVG, so {text!r} must end in .svg")
    return path


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    if options.no_prompt_cache:
        note("note: --no-prompt-cache has no effect: bench always computes every prompt from scratch")
    check_speculation_flags(parser, options)
    sharing = nodes_of(parser, options)
    if sharing is not None and options.compare:
        parser.error("--compare runs mlx-lm on this machine alone; leave out --nodes and --hostfile")
    own, alone = ("depth", "parallel", "compare", "plot"), ("nodes", "hostfile")
    if options.kv_quality:
        _refuse(parser, options, "--kv-quality", (*own, *alone, "machine", "draft"), TEMPLATE_FLAGS)
        return kv_quality.run(parser, options)
    kv_quality.refuse_flags(parser, options)
    if options.machine:
        others = ("prompt", "runs", "draft", *own, *alone)
        _refuse(parser, options, "--machine", others, {**SAMPLING_FLAGS, **TEMPLATE_FLAGS})
        return _run_machine(options, options.model or default_model(), kv_spec(parser, options))
    plan = _plan(parser, options)
    if options.parallel is not None:
        _refuse(parser, options, "--parallel", ("depth", "plot", "draft"), TEMPLATE_FLAGS)
        if len(plan.points) > 1:
            parser.error("--parallel measures one prompt length: give --prompt one")
        return _run_parallel(plan, options, sharing)
    if options.plot is not None:
        report.check_writable(options.plot)  # now, not after minutes of measuring
    guesses = _speculation(options, plan.model)
    with loading.load(options, plan.model, plan.kv, speculation=guesses, nodes=sharing) as engine:
        sizes = " / ".join(f"{point.tokens:,}" for point in plan.points)
        with _peer(engine, plan, f"{sizes} prompt tokens and {plan.new:,} new ones") as beside:
            measured = measure(engine, plan.points, plan.runs, plan.sampling, beside, template=plan.template)
            version = None if beside is None else beside.version
        record = report.of_model(engine.spec)
        chart = None if options.plot is None else report.chart(engine, measured, version)
    if any(run.generated_tokens < plan.new for each in measured for run in each.runs):
        note("note: --stop ended some replies early, so their decode rates come from fewer tokens")
    if options.json:
        _write_json(report.to_json(measured, version), record, report.warnings(measured))
    else:
        print(report.text(plan.model, measured, version))
    _note_doubts(record)
    if chart is not None:  # last: figures are not lost with a picture that can't be written after all
        report.write(options.plot, chart)
        note(f"note: the picture is in {options.plot}")
    return 0


def _speculation(options: argparse.Namespace, model: str) -> Speculation | None:
    # Excludes lookup in texts of earlier runs, which says nothing about a model's speed.
    found = speculation_of(options, model, default=False)
    return None if found is None else replace(found, branches=False)


def _run_parallel(plan: BenchPlan, options: argparse.Namespace, nodes: Nodes | None) -> int:
    wanted = parallel.Replies(plan.points[0].tokens, plan.sampling)
    widths = " / ".join(map(str, options.parallel))
    sizes = f"{wanted.length:,} prompt tokens and {wanted.new:,} new ones"
    with loading.load(options, plan.model, plan.kv, parallel=max(options.parallel), nodes=nodes) as engine:
        with _peer(engine, plan, f"{widths} parallel replies, {sizes} each") as beside:
            measured = parallel.measure(engine, options.parallel, plan.runs, wanted, beside)
            version = None if beside is None else beside.version
        record = report.of_model(engine.spec)
    if options.json:
        _write_json(parallel.to_json(measured, version), record, parallel.remarks(measured))
    else:
        print(parallel.text(plan.model, wanted, measured, version))
    _note_doubts(record)
    return 0


def _write_json(plain: dict[str, Any], record: dict[str, Any], remarks: Sequence[str]) -> None:
    for remark in remarks:
        note(f"note: {remark}")
    json_line({**plain, **record})


def _note_doubts(record: dict[str, Any]) -> None:
    for doubt in record.get("doubts", ()):
        note(f"unchecked: {doubt}; these replies may be wrong, and so may their speed")


def _refuse(
    parser: Parser, options: argparse.Namespace, beside: str, names: Sequence[str], others: Mapping[str, str]
) -> None:
    """Exit with a usage error for flags without effect next to ``beside``. others: flags by their own names."""
    for flag, name in {**{f"--{name}": name for name in names}, **others}.items():
        value = getattr(options, name)
        if value is not None and value is not False:  # 0 was given
            parser.error(f"{flag} has no effect with {beside}")


def _plan(parser: Parser, options: argparse.Namespace) -> BenchPlan:
    """Exits with status 2 at a bad flag."""
    wanted, kv = sampling(parser, options), kv_spec(parser, options)
    new = wanted.max_tokens or NEW_TOKENS
    model, compare = options.model or default_model(), options.compare is not None
    if compare and (added := adapter_of(options, model)) is not None:
        parser.error(f"--compare: {peer.NAME} runs without the adapter {added}; add --adapter none, or leave --compare")
    if compare and options.draft is not None:
        parser.error(f"--compare: {peer.NAME} runs without a draft model; leave --draft or --compare")
    if compare:
        wanted = _greedy(parser, options)
        if options.thinking_budget is not None:
            parser.error(f"--thinking-budget has no effect on {peer.NAME}, so --compare can't be fair with it")
    depths = options.depth or ()
    prompts = options.prompt or (() if depths else (PROMPT_TOKENS,))
    # Of a fixed length, whatever it says.
    wanted = replace(wanted, max_tokens=new, loop_check=bool(options.loop_check))
    told = template_options(parser, options)
    return BenchPlan(model, points(prompts, depths), options.runs or RUNS, wanted, kv, compare, told)


def _greedy(parser: Parser, options: argparse.Namespace) -> Sampling:
    """Return greedy sampling for both sides; exits with status 2 at a flag that would make them differ."""
    for flag, name in SAMPLING_FLAGS.items():
        value = getattr(options, name)
        same = name == "max_tokens" or (name == "temperature" and value == 0)
        if value is not None and not same:
            why = "both sides take the likeliest token, and neither ends a reply early"
            parser.error(f"{flag} has no effect with --compare: {why}")
    return Sampling(temperature=0)


@contextmanager
def _peer(engine: "Engine", plan: BenchPlan, what: str) -> Iterator[peer.PeerProcess | None]:
    """Yield what is measured in turn with the engine; None is nothing. Raises ContextError and PeerError."""
    check_room(engine.spec, plan.points, plan.new)
    with _start_peer(engine, plan.kv) if plan.compare else nullcontext() as beside:
        runs = "one run" if plan.runs == 1 else f"{plan.runs} runs"
        also = f", in turn with {beside.title}" if beside is not None else ""
        note(f"warming up, then {runs} of {what}{also}")
        yield beside


def _start_peer(engine: "Engine", kv: KVSpec) -> peer.PeerProcess:
    """Start mlx-lm on the same folder. Raises PeerError, also if the weights don't fit twice."""
    from tokamac.engine.gguf.checkpoint import mlx_folder
    from tokamac.engine.model.safetensors import find_shards
    from tokamac.engine.perf.memory import giving_way, taken_from_others

    memory = engine.memory()
    stored = sum(shard.stat().st_size for shard in find_shards(engine.spec.path))
    peer.check_memory(held=memory.active, wanted=stored, budget=memory.budget)
    if given := taken_from_others(memory.active + stored, memory.available):
        note(f"note: for both, {giving_way(given)}")
    if kv != KVSpec():
        note(f"note: KV flags apply to the engine alone; {peer.NAME} uses its own cache")
    note(f"loading the model in {peer.NAME} as well")
    return peer.PeerProcess(mlx_folder(engine.spec.path))


def _run_machine(options: argparse.Namespace, model: str, kv: KVSpec) -> int:
    from tokamac.engine.hub import download
    from tokamac.engine.perf.bandwidth import measure_machine
    from tokamac.engine.perf.hardware import advice

    loading.fetch(model, download.resolve)  # first: seconds of measuring are not spent on a model that is not there
    note("measuring the machine, then the parts of a step of the model: a few seconds")
    report = measure_machine()
    if report.busy:
        note("note: other programs are using this machine, so the measured speed is too low and is not kept")
    if (said := advice()) is not None:
        note(f"note: {said}")
        settings.is_new(said)  # loading need not say it again
    with loading.load(options, model, kv) as engine:
        engine.measure()
        most = engine.spec.capacity or max(MACHINE_CONTEXTS)
        found = [engine.predict(context, context) for context in MACHINE_CONTEXTS if context <= most]
    if options.json:
        json_line(_machine_json(report, model, found))
    else:
        print(_machine_text(report, model, found))
    return 0


def _machine_text(report: "MachineReport", model: str, found: "list[Prediction]") -> str:
    chip = report.table
    kind = "float32" if report.device == "cpu" else "half precision"
    rows = [
        ["", "measured", "chip table"],
        ["copy, read and written", bandwidth(report.copy_gbs), bandwidth(chip.bandwidth_gbs)],
        ["matrix × vector, read", bandwidth(report.read_gbs), bandwidth(chip.bandwidth_gbs)],
        [f"matrix product, {kind}", tflops(report.tflops), tflops(chip.fp16_tflops)],
    ]
    lines = [["context", "ceiling", "expected decode", "expected first token"]]
    lines += [[count(at.context), rate(at.ceiling_tps), rate(at.expected_tps), seconds(at.ttft_s)] for at in found]
    parts = [f"{chip.label}, computing on {report.device}", table(rows, right=(1, 2)), f"{model} here:"]
    return "\n\n".join([*parts, table(lines, right=(0, 1, 2, 3))])


def _machine_json(report: "MachineReport", model: str, found: "list[Prediction]") -> dict[str, Any]:
    return {
        "chip": picked(report.table, "name", "gpu_cores", "bandwidth_gbs", "fp16_tflops"),
        "device": report.device,
        "measured": picked(report, "copy_gbs", "read_gbs", "tflops", "busy"),
        "model": model,
        "expected": [picked(at, "context", "ceiling_tps", "expected_tps", "ttft_s") for at in found],
    }
