"""``tokamac bench``: one warm-up, then runs that are each computed afresh; medians and spread, beside what the machine allows.

Every run reads a prompt of its own, so nothing is cached, and prefill is measured whole. Every run makes as many tokens as it is
asked for: what marks the end of a reply is not obeyed. ``--machine`` measures what this machine's memory and arithmetic reach, and
a model's pace on it; ``--kv-quality`` compares ways to keep keys and values (kv_quality.py); ``--parallel`` measures replies that
are made at once (bench_parallel.py).

    flags (here) → runs (bench_runs.py, peer.py) → medians, then tables, JSON and a picture (bench_report.py)
"""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.files import expanded
from tokamac.engine.options import KVSpec, Nodes, Sampling, Speculation, TemplateOptions

from .. import settings
from ..backend.keep_awake import awake
from ..options import (
    SAMPLING_FLAGS,
    TEMPLATE_FLAGS,
    adapter_of,
    add_nodes_flags,
    add_reply_flags,
    add_speculation_flags,
    check_speculation_flags,
    default_model,
    kv_spec,
    nodes_of,
    positive,
    sampling,
    speculation_of,
    template_options,
    widths,
)
from ..output import json_line, note, picked, table
from ..parser import Parser
from ..units import bandwidth, count, rate, seconds, tflops
from . import bench_parallel, bench_report, kv_quality, loading, peer
from .bench_runs import BenchPoint, MeasuredPoint, check_room, measure, points

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
    """What is asked for. ``sampling.max_tokens`` is set.

    template: what the chat template is told; where that is anything, prompts are a user's messages as it writes them.
    """

    model: str
    points: list[BenchPoint]
    runs: int
    sampling: Sampling
    kv: KVSpec
    compare: bool
    template: TemplateOptions


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "bench",
        "Measure TTFT, prefill and decode on this machine: a warm-up, then runs on prompts of their own; medians and spread, "
        "beside the ceiling and the expected rate. Several lengths make a sweep: a table, and with --plot a picture. "
        "With --parallel: several replies at once. "
        "With --kv-quality: what each KV setting costs in quality, what it saves, and which to use.",
        "  tokamac bench\n  tokamac bench mlx-community/Qwen3-4B-Instruct-2507-4bit --prompt 2048 --runs 3 --json\n"
        "  tokamac bench guide --depth 128,1024,3900 --plot decode.svg\n"
        "  tokamac bench guide --prompt 64,512 --compare mlx-lm\n"
        "  tokamac bench guide --parallel 1,2,4,8 --compare mlx-lm\n"
        "  tokamac bench guide --kv-quality --kv-window 2048",
    )
    add, sizes = made.add_argument, kv_quality.depth_list
    model = "a folder, a Hugging Face id, or guide (the one picked last, at first guide)"
    add("model", nargs="?", metavar="MODEL", help=model)
    add("--prompt", type=sizes, metavar="N[,N…]", help=f"tokens to read ({PROMPT_TOKENS}; with --depth none)")
    add("--depth", type=sizes, metavar="N[,N…]", help="contexts to time decoding at: each is read, then decoded")
    add("--runs", type=positive, metavar="N", help=f"runs after the warm-up ({RUNS})")
    at_once = "replies at once: all together and each, at every width, beside what the roofline predicts for it"
    add("--parallel", type=widths, metavar="N[,N…]", help=at_once)
    beside = "let mlx-lm answer the same prompts, run by run in turn; both take the likeliest"
    add("--compare", choices=(peer.NAME,), help=beside)
    add("--plot", type=svg_path, metavar="FILE.svg", help="draw decode rate over context, with the ceiling")
    machine = "measure what this machine can do, beside the chip table, and the model's pace on it"
    add("--machine", action="store_true", help=machine)
    add("--json", action="store_true", help="one JSON object")
    kv_quality.add_flags(made)
    add_reply_flags(made, cache=False)
    add_nodes_flags(made)
    add_speculation_flags(made, "off: a decode rate is that of steps; --draft turns it on")
    add("--no-prompt-cache", action="store_true", help="the default here: every prompt is computed afresh")
    return made


def svg_path(text: str) -> Path:
    """Return the path of a picture to be written."""
    path = expanded(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"the picture is SVG, so {text!r} must end in .svg")
    return path


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    if options.no_prompt_cache:
        note("note: --no-prompt-cache changes nothing here: every prompt is computed afresh anyway")
    check_speculation_flags(parser, options)
    sharing = nodes_of(parser, options)
    if sharing is not None and options.compare:
        parser.error("--compare runs mlx-lm on this machine alone; leave out --nodes and --hostfile")
    alone = {"--nodes": "nodes", "--hostfile": "hostfile"}
    own = {f"--{name}": name for name in ("depth", "parallel", "compare", "plot")}
    if options.kv_quality:
        _refuse(
            parser,
            options,
            {**own, **alone, "--machine": "machine", "--draft": "draft", **TEMPLATE_FLAGS},
            "--kv-quality",
        )
        return kv_quality.run(parser, options)
    kv_quality.refuse_flags(parser, options)
    if options.machine:
        _refuse(
            parser,
            options,
            {
                "--prompt": "prompt",
                "--runs": "runs",
                "--draft": "draft",
                **own,
                **alone,
                **SAMPLING_FLAGS,
                **TEMPLATE_FLAGS,
            },
            "--machine",
        )
        return _run_machine(options, options.model or default_model(), kv_spec(parser, options))
    plan = _plan(parser, options)
    if options.parallel is not None:
        _refuse(
            parser, options, {"--depth": "depth", "--plot": "plot", "--draft": "draft", **TEMPLATE_FLAGS}, "--parallel"
        )
        if len(plan.points) > 1:
            parser.error("--parallel measures prompts of one length; give --prompt one")
        return _run_parallel(plan, options, sharing)
    if options.plot is not None:
        bench_report.check_writable(options.plot)  # now, not after minutes of measuring
    guesses = _speculation(options, plan.model)
    with loading.load_for(options, plan.model, plan.kv, speculation=guesses, nodes=sharing) as engine:
        measured, version = _measured(engine, plan)
        record = bench_report.of_model(engine.spec)
        chart = None if options.plot is None else bench_report.chart(engine, measured, version)
    if any(run.generated_tokens < (plan.sampling.max_tokens or 0) for each in measured for run in each.runs):
        note("note: --stop ended some replies early, so their decode rates come from fewer tokens")
    if options.json:
        for warning in bench_report.warnings(measured):
            note(f"note: {warning}")
        json_line({**bench_report.to_json(measured, version), **record})
    else:
        print(bench_report.text(plan.model, measured, version))
    for doubt in record.get("doubts", ()):
        note(f"unchecked: {doubt}; these replies may be wrong, and so may their speed")
    if chart is not None:  # last: figures are not lost with a picture that can't be written after all
        bench_report.write(options.plot, chart)
        note(f"note: the picture is in {options.plot}")
    return 0


def _speculation(options: argparse.Namespace, model: str) -> Speculation | None:
    """Return what guesses tokens; a text that was written before, by an earlier run, says nothing of how fast a model is."""
    found = speculation_of(options, model, default=False)
    return None if found is None else replace(found, branches=False)


def _run_parallel(plan: BenchPlan, options: argparse.Namespace, nodes: Nodes | None) -> int:
    """Measure replies that are made at once, and return the exit status."""
    wanted = bench_parallel.Replies(plan.points[0].tokens, plan.sampling)
    with ExitStack() as stack:
        most = max(options.parallel)
        engine = stack.enter_context(loading.load_for(options, plan.model, plan.kv, parallel=most, nodes=nodes))
        check_room(engine.spec, plan.points, wanted.new)
        beside = stack.enter_context(_start_peer(engine, plan.kv)) if plan.compare else None
        runs = "one run" if plan.runs == 1 else f"{plan.runs} runs"
        also = f", in turn with {beside.title}" if beside is not None else ""
        at_once, sizes = (
            " / ".join(map(str, options.parallel)),
            f"{wanted.length:,} prompt tokens and {wanted.new:,} new ones",
        )
        note(f"warming up, then {runs} of {at_once} replies at once, {sizes} each{also}")
        measured = bench_parallel.measure(engine, options.parallel, plan.runs, wanted, beside)
        record, version = bench_report.of_model(engine.spec), None if beside is None else beside.version
    if options.json:
        for remark in bench_parallel.remarks(measured):
            note(f"note: {remark}")
        json_line({**bench_parallel.to_json(measured, version), **record})
    else:
        print(bench_parallel.text(plan.model, wanted, measured, version))
    for doubt in record.get("doubts", ()):
        note(f"unchecked: {doubt}; these replies may be wrong, and so may their speed")
    return 0


def _refuse(parser: Parser, options: argparse.Namespace, flags: dict[str, str], beside: str) -> None:
    """End with a usage error where one of these flags was given: beside that one it has no effect."""
    for flag, name in flags.items():
        value = getattr(options, name)
        if value is not None and value is not False:  # 0 was given
            parser.error(f"{flag} has no effect with {beside}")


def _plan(parser: Parser, options: argparse.Namespace) -> BenchPlan:
    """Return what is asked for; end with exit status 2 at a bad flag."""
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
    wanted, told = replace(wanted, max_tokens=new), template_options(parser, options)
    return BenchPlan(model, points(prompts, depths), options.runs or RUNS, wanted, kv, compare, told)


def _greedy(parser: Parser, options: argparse.Namespace) -> Sampling:
    """Return how both sides of a comparison choose. Ends with exit status 2 at a flag that would make them differ."""
    for flag, name in SAMPLING_FLAGS.items():
        value = getattr(options, name)
        same = name == "max_tokens" or (name == "temperature" and value == 0)
        if value is not None and not same:
            why = "both sides take the likeliest token, and neither ends a reply early"
            parser.error(f"{flag} has no effect with --compare: {why}")
    return Sampling(temperature=0)


def _measured(engine: "Engine", plan: BenchPlan) -> tuple[list[MeasuredPoint], str | None]:
    """Return what was measured, and the peer's version where there is one."""
    new = plan.sampling.max_tokens or 0
    check_room(engine.spec, plan.points, new)
    with ExitStack() as stack:
        beside = stack.enter_context(_start_peer(engine, plan.kv)) if plan.compare else None
        sizes = " / ".join(f"{point.tokens:,}" for point in plan.points)
        also = f", in turn with {beside.title}" if beside is not None else ""
        runs = "one run" if plan.runs == 1 else f"{plan.runs} runs"
        note(f"warming up, then {runs} of {sizes} prompt tokens and {new:,} new ones{also}")
        measured = measure(engine, plan.points, plan.runs, plan.sampling, beside, template=plan.template)
        return measured, None if beside is None else beside.version


def _start_peer(engine: "Engine", kv: KVSpec) -> peer.PeerProcess:
    """Return mlx-lm with the same folder loaded. Raises PeerError, also where the weights don't fit twice."""
    from tokamac.engine.model.safetensors import find_shards
    from tokamac.engine.perf.memory import giving_way, taken_from_others

    memory = engine.memory()
    stored = sum(shard.stat().st_size for shard in find_shards(engine.spec.path))
    peer.check_memory(held=memory.active, wanted=stored, budget=memory.budget)
    if given := taken_from_others(memory.active + stored, memory.available):
        note(f"note: for both, {giving_way(given)}")
    if kv != KVSpec():
        note(f"note: the KV flags are for the engine alone; {peer.NAME} keeps keys and values as it does by itself")
    note(f"loading the model in {peer.NAME} as well")
    return peer.PeerProcess(engine.spec.path)


def _run_machine(options: argparse.Namespace, model: str, kv: KVSpec) -> int:
    """Measure the machine and the parts of the model's steps, and return the exit status."""
    from tokamac.engine.hub import download
    from tokamac.engine.perf.bandwidth import measure_machine
    from tokamac.engine.perf.hardware import advice

    loading.fetch(model, download.resolve)  # first: seconds of measuring are not spent on a model that is not there
    note("measuring the machine, then the parts of a step of the model: a few seconds")
    report = measure_machine()
    if report.busy:
        note("note: other programs are using this machine, so its speed measures too low; it is not kept")
    if (said := advice()) is not None:
        note(f"note: {said}")
        settings.is_new(said)  # loading need not say it again
    with loading.load_for(options, model, kv) as engine:
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
