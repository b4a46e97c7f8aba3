"""``tokamac bench``: one warm-up, then runs that are each computed afresh; medians and spread, beside what the machine allows.

Every run reads a prompt of its own, so nothing is cached, and prefill is measured whole. Every run makes as many tokens as it is
asked for: what marks the end of a reply is not obeyed. ``--kv-quality`` compares ways to keep keys and values (kv_quality.py).

    flags (here) → runs (bench_runs.py, peer.py) → medians, then tables, JSON and a picture (bench_report.py)

``tokamac bench --machine``: what this machine's memory and arithmetic reach, beside the chip table, and a model's pace on it.
"""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app import settings
from tokamac.app.commands import bench_report, kv_quality, loading, peer
from tokamac.app.commands.bench_runs import BenchPoint, MeasuredPoint, check_room, measure, points
from tokamac.app.keep_awake import awake
from tokamac.app.options import (
    SAMPLING_FLAGS,
    TEMPLATE_FLAGS,
    adapter_of,
    add_adapter_flag,
    add_kv_flags,
    add_memory_flag,
    add_sampling_flags,
    add_template_flags,
    add_unchecked_flag,
    default_model,
    kv_spec,
    memory_limit,
    positive,
    sampling,
    template_options,
)
from tokamac.app.output import json_line, note, table
from tokamac.app.parser import Parser
from tokamac.app.units import bandwidth, count, rate, seconds, tflops
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.perf.bandwidth import MachineReport
    from tokamac.engine.perf.roofline import Prediction


CONTEXTS = (64, 1024, 4096)


def run_machine(
    model: str,
    kv: KVSpec,
    *,
    memory: int | None,
    json_wanted: bool,
    unchecked: bool = False,
    adapter: str | None = None,
) -> int:
    """Measure the machine and the parts of the model's steps, and return the exit status."""
    from tokamac.engine.hub import download
    from tokamac.engine.perf.bandwidth import measure_machine
    from tokamac.engine.perf.hardware import advice

    loading.fetch(model, download.resolve)  # first: seconds of measuring are not spent on a model that is not there
    note("measuring the machine, then the parts of a step of the model: a few seconds")
    report = measure_machine()
    if report.busy:
        note("note: other programs use this machine, so what it can do comes out too low; it is not kept")
    if (said := advice()) is not None:
        note(f"note: {said}")
        settings.is_new(said)  # loading need not say it again
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


PROMPT_TOKENS = 512
NEW_TOKENS = 128
RUNS = 5


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is asked for. ``sampling.max_tokens`` is set. memory: bytes the model may take; None is the system's limit.

    unchecked, adapter: as for loading.
    template: what the chat template is told; where that is anything, prompts are a user's messages as it writes them.
    """

    model: str
    points: list[BenchPoint]
    runs: int
    sampling: Sampling
    kv: KVSpec
    memory: int | None
    compare: bool
    unchecked: bool
    adapter: str | None
    template: TemplateOptions


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "bench",
        "Measure TTFT, prefill and decode on this machine: a warm-up, then runs on prompts of their own; medians and spread, "
        "beside the ceiling and the expected rate. Several lengths make a sweep: a table, and with --plot a picture. "
        "With --kv-quality: what each KV setting costs in quality, what it saves, and which to use.",
        "  tokamac bench\n  tokamac bench mlx-community/Qwen3-4B-Instruct-2507-4bit --prompt 2048 --runs 3 --json\n"
        "  tokamac bench guide --depth 128,1024,3900 --plot decode.svg\n"
        "  tokamac bench guide --prompt 64,512 --compare mlx-lm\n"
        "  tokamac bench guide --kv-quality --kv-window 2048",
    )
    made.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a Hugging Face id, or guide (the one picked last, at first guide)",
    )
    made.add_argument(
        "--prompt",
        type=kv_quality.depth_list,
        metavar="N[,N…]",
        help=f"tokens to read ({PROMPT_TOKENS}; with --depth none)",
    )
    made.add_argument(
        "--depth",
        type=kv_quality.depth_list,
        metavar="N[,N…]",
        help="contexts to time decoding at: each is read, then decoded",
    )
    made.add_argument("--runs", type=positive, metavar="N", help=f"runs after the warm-up ({RUNS})")
    made.add_argument(
        "--compare",
        choices=(peer.NAME,),
        help="let mlx-lm answer the same prompts, run by run in turn; both take the likeliest",
    )
    made.add_argument(
        "--plot", type=svg_path, metavar="FILE.svg", help="draw decode rate over context, with the ceiling"
    )
    made.add_argument(
        "--machine",
        action="store_true",
        help="measure what this machine can do, beside the chip table, and the model's pace on it",
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    kv_quality.add_flags(made)
    add_adapter_flag(made)
    add_unchecked_flag(made)
    add_sampling_flags(made)
    add_template_flags(made)
    add_kv_flags(made, cache=False)
    add_memory_flag(made)
    made.add_argument(
        "--no-prompt-cache", action="store_true", help="what holds here anyway: every prompt is computed afresh"
    )
    return made


def _refuse_beside_machine(parser: Parser, options: argparse.Namespace) -> None:
    """End with a usage error where a flag would have no effect: no reply is made."""
    own = {f"--{name}": name for name in ("prompt", "depth", "runs", "compare", "plot")}
    flags = {**own, **SAMPLING_FLAGS, **TEMPLATE_FLAGS}
    for flag, name in flags.items():
        if getattr(options, name) is not None:
            parser.error(f"{flag} has no effect with --machine")


def svg_path(text: str) -> Path:
    """Return the path of a picture to be written."""
    path = Path(text).expanduser()
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"the picture is SVG, so {text!r} must end in .svg")
    return path


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    if options.no_prompt_cache:
        note("note: --no-prompt-cache changes nothing here: every prompt is computed afresh anyway")
    if options.kv_quality:
        for name in ("depth", "compare", "plot", "machine"):
            if getattr(options, name):
                parser.error(f"--{name} has no effect with --kv-quality")
        for flag, name in TEMPLATE_FLAGS.items():
            if getattr(options, name) is not None:
                parser.error(f"{flag} has no effect with --kv-quality")
        return kv_quality.run(parser, options)
    kv_quality.refuse_flags(parser, options)
    if options.machine:
        _refuse_beside_machine(parser, options)
        limit, kv = memory_limit(options), kv_spec(parser, options)
        model = options.model or default_model()
        added = adapter_of(options, model)
        return run_machine(
            model, kv, memory=limit, json_wanted=options.json, unchecked=options.unchecked, adapter=added
        )
    plan = _plan(parser, options)
    if options.plot is not None:
        bench_report.check_writable(options.plot)  # now, not after minutes of measuring
    with loading.load(
        plan.model, kv=plan.kv, prompt_cache=None, memory=plan.memory, unchecked=plan.unchecked, adapter=plan.adapter
    ) as engine:
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


def _plan(parser: Parser, options: argparse.Namespace) -> BenchPlan:
    """Return what is asked for; end with exit status 2 at a bad flag."""
    wanted, kv = sampling(parser, options), kv_spec(parser, options)
    new = wanted.max_tokens or NEW_TOKENS
    model = options.model or default_model()
    added = adapter_of(options, model)
    if options.compare is not None and added is not None:
        parser.error(f"--compare: {peer.NAME} runs without the adapter {added}; add --adapter none, or leave --compare")
    if options.compare is not None:
        wanted = _greedy(parser, options)
        if options.thinking_budget is not None:
            parser.error(f"--thinking-budget has no effect on {peer.NAME}, so --compare can't be fair with it")
    depths = options.depth or ()
    prompts = options.prompt or (() if depths else (PROMPT_TOKENS,))
    return BenchPlan(
        model=model,
        points=points(prompts, depths),
        runs=options.runs or RUNS,
        sampling=replace(wanted, max_tokens=new),
        kv=kv,
        memory=memory_limit(options),
        compare=options.compare is not None,
        unchecked=options.unchecked,
        adapter=added,
        template=template_options(parser, options),
    )


def _greedy(parser: Parser, options: argparse.Namespace) -> Sampling:
    """Return how both sides of a comparison choose. Ends with exit status 2 at a flag that would make them differ."""
    for flag, name in SAMPLING_FLAGS.items():
        value = getattr(options, name)
        same = name == "max_tokens" or (name == "temperature" and value == 0)
        if value is not None and not same:
            parser.error(
                f"{flag} has no effect with --compare: both sides take the likeliest token, and none ends a reply"
            )
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
