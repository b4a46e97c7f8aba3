"""``tokamac convert``: a Hugging Face or MLX model folder in, a quantized MLX folder out.

The work is done by ``tokamac.quant.convert`` (quant/conversion.py shows how it goes). Here: the flags, how far it has come (a bar
for people, JSON lines for programs), the plan of a dry run, and at the end sizes, quality and the speeds to expect.
"""

import argparse
import resource
import shlex
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.device import multiply_in_float32
from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.files import expanded
from tokamac.engine.perf.memory import check_address_space
from tokamac.engine.units import sizes
from tokamac.quant.options import BITS, DTYPES, GROUP_SIZES, METHODS, MODES, SHIPPED, UNQUANTIZED, Options

from ..backend.keep_awake import awake
from ..options import add_unchecked_flag
from ..output import Progress, json_line, note, table
from ..parser import Parser
from ..sanitise import sanitise_line
from ..units import UNKNOWN, count, rate, seconds, short, size
from ..verdict import closeness
from . import loading

if TYPE_CHECKING:
    from tokamac.quant import Conversion, Plan, TensorDone
    from tokamac.quant.report import StageDone

CONTEXT = 4096
"""Tokens of context that the speeds at the end are expected at."""

CONVERTING = "converting"

REST_S = 0.25
"""Between two JSON lines of one stage: the last of them always comes."""

RESULT_FIELDS = ("path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes", "quality")
"""The public contract's names, in its order."""

_EXAMPLES = """\
  tokamac convert Qwen/Qwen3-4B-Instruct-2507
  tokamac convert ~/models/mine -o mine-8bit --bits 8 --dry-run
  tokamac convert ~/models/mine --target-bpw 4.5
  tokamac convert ~/models/mine --method gptq --calibration=notes.txt
  tokamac convert ~/models/mine-4bit --dequantize --dtype bfloat16"""


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "convert",
        "Convert a Hugging Face or MLX model to a quantized MLX folder, tensor by tensor, and compare the two at the end. The "
        "folder appears once it is complete; after an interruption, the same command continues. It also loads in mlx_lm, "
        "where that has the architecture.",
        _EXAMPLES,
    )
    made.add_argument("source", metavar="SOURCE", help="a folder or a Hugging Face id (downloaded first)")
    target = made.add_mutually_exclusive_group()
    target.add_argument(
        "-o", "--output", metavar="DIR", help="the new folder (default: here, named after source and bits)"
    )
    target.add_argument(
        "--into", metavar="DIR", help="the folder for the new folder, which is named after source and bits"
    )
    _add_packing(made)
    _add_finding(made)
    made.add_argument(
        "--adapter",
        metavar="DIR|ID",
        help="a LoRA or DoRA adapter, from mlx-lm or PEFT, to add to the weights before they are packed",
    )
    add_unchecked_flag(
        made, "convert a model although something in its config would be computed otherwise; a note says what"
    )
    run = made.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    run.add_argument(
        "--overwrite", action="store_true", help="replace a model folder of that name, once the new one is complete"
    )
    run.add_argument(
        "--no-verify", dest="verify", action="store_false", help="don't compare the result with its source"
    )
    run.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    return made


def _add_packing(made: Parser) -> None:
    group = made.add_argument_group("how weights are packed")
    group.add_argument("--bits", type=int, choices=BITS, help="bits of a weight (4)")
    group.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="weights that share a scale (64)")
    group.add_argument(
        "--mode", choices=MODES, default="affine", help="affine groups, or a microscaling format (affine)"
    )
    group.add_argument("--recipe", metavar="NAME", help="a rule that gives some tensors more bits, such as mixed_4_6")
    group.add_argument(
        "--target-bpw", type=float, metavar="X", help="average bits per weight, spent where they help most"
    )
    group.add_argument(
        "--embed-bits", type=int, choices=(*BITS, UNQUANTIZED), help="for the embedding and the head; 16 is not packed"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="of what is not packed, and of scales (default: as in the source)"
    )
    group.add_argument("--dequantize", action="store_true", help="unpack what is packed, and pack nothing")


def _add_finding(made: Parser) -> None:
    group = made.add_argument_group("how the packed values are found")
    group.add_argument(
        "--method",
        choices=METHODS,
        help="search: least squared error in MLX's format; round: MLX's own; gptq, awq: mlx-lm's, by a text (search; for "
        "mxfp8 round)",
    )
    group.add_argument(
        "--calibration",
        nargs="?",
        const=True,
        metavar="FILE",
        help="a text for search, gptq or awq to look at; without FILE "
        "the one that comes with tokamac (put it last, or write --calibration=FILE)",
    )


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Convert, or say what would be done; return the exit status."""
    if not options.source.strip() or "" in (options.output, options.into):
        parser.error("SOURCE, -o and --into must not be empty")
    multiply_in_float32()  # sensitivities and divergences as small as 1e-5 are compared
    request = requested(parser, options)
    check_address_space()  # before the libraries that end the process where there is none
    target = _target(options, request)
    progress = ConversionProgress(json=options.json)
    if options.dry_run:
        return _plan(loading.on_disk(options.source), target, options, request, progress)
    return _convert(progress.fetch(options.source), target, options, request, progress)


def _target(options: argparse.Namespace, request: dict[str, Any]) -> Path:
    """Return the new folder, as an absolute path: who reads it need not know where the command was run."""
    from tokamac.quant.conversion import default_target

    if options.output:
        return expanded(options.output, strict=True).absolute()
    name = default_target(options.source, Options(**request))
    return (expanded(options.into or "", strict=True) / name).absolute()


def requested(parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
    """Return what Options takes; end with exit status 2 where the flags contradict each other."""
    request = {field.name: getattr(options, field.name) for field in fields(Options)}
    if (text := request["calibration"]) is not None:
        request["calibration"] = SHIPPED if text is True else expanded(text)
    try:
        Options(**request)
    except OptionError as error:
        parser.error(error.one_line().rstrip("."))
    return request


def _plan(
    folder: Path, target: Path, options: argparse.Namespace, request: dict[str, Any], progress: "ConversionProgress"
) -> int:
    from tokamac.quant import convert
    from tokamac.quant.evaluation import comparison_s
    from tokamac.quant.plan import conversion_s
    from tokamac.quant.resume import SPARE_BYTES, free_bytes

    try:
        plan = convert(folder, target, dry_run=True, progress=progress.show, **request)
    finally:
        progress.clear()
    checking_s = comparison_s(folder, unchecked=plan.options.unchecked) if plan.options.verify else None
    estimate = Estimate(conversion_s(plan), checking_s)
    disk, notes = DiskSpace(plan.needed_bytes + SPARE_BYTES, free_bytes(target)), plan.notes
    if options.json:
        json_line({**plan_json(plan, target, disk, estimate), "notes": list(notes)})
        return 0
    print(plan_text(plan, target, disk, estimate))
    for text in notes:
        note(f"note: {text}")
    return 0


def _convert(
    folder: Path, target: Path, options: argparse.Namespace, request: dict[str, Any], progress: "ConversionProgress"
) -> int:
    from tokamac.quant import convert

    try:
        report = convert(folder, target, overwrite=options.overwrite, progress=progress.show, **request)
    except KeyboardInterrupt as stopped:
        progress.clear()
        left = bool(getattr(stopped, "__notes__", ()))  # quant notes on it that there is something to continue from
        note(f"tokamac: interrupted. {'The same command continues from here.' if left else 'Nothing was written.'}")
        raise
    finally:
        progress.clear()
    for text in report.notes:
        note(f"note: {text}")
    for text in () if report.quality is None else report.quality.concerns:
        note(f"warning: {text}")
    speeds = expected_speeds(folder, report.path)
    if options.json:
        json_line({"event": "expected", **asdict(speeds), "context": CONTEXT})
        plain = report.to_json()
        json_line({"event": "converted", **{name: plain[name] for name in RESULT_FIELDS}})
    else:
        print(summary(report, speeds))
    return 0


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Bytes that the new folder needs, and that are free on its disk."""

    needed: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.needed <= self.free


@dataclass(frozen=True, slots=True)
class Estimate:
    """About how many seconds converting takes, and comparing the result with its source; None is unknown, or not wanted."""

    converting_s: float | None
    checking_s: float | None


def plan_text(plan: "Plan", target: Path, disk: DiskSpace, estimate: Estimate) -> str:
    """Return the plan for people."""
    from tokamac.quant.card import packing_name
    from tokamac.quant.report import by_part

    rows = [
        [row.part, packing_name(row.packing), count(row.tensors), short(row.parameters), size(row.nbytes)]
        for row in by_part(plan)
    ]
    head = ["part", "packing", "tensors", "weights", "size"]
    whole = ["all", "", count(len(plan.tensors)), short(plan.parameters), size(plan.weight_bytes)]
    bpw = plan.options.target_bpw
    bits = f"{plan.bits_per_weight:.2f} bits per weight" if bpw is None else f"at most {bpw:.2f} bits per weight"
    needed, free = sizes(disk.needed, disk.free)
    most = size(plan.weight_bytes + plan.needed_bytes - plan.output_bytes)
    figures = [
        ["weights", f"{size(plan.source_bytes)} → {most}, {bits}"],
        ["memory", f"{size(plan.peak_memory_bytes)} at most"],
        ["disk", f"{needed} needed, {free} free: {'fits' if disk.fits else 'does not fit'}"],
        ["time", _time(plan, estimate)],
    ]
    title = sanitise_line(f"{plan.source} → {target}  (nothing is written)")
    return "\n\n".join([title, table([head, *rows, whole], right=(2, 3, 4)), table(figures)])


def _time(plan: "Plan", estimate: Estimate) -> str:
    options = plan.options
    if estimate.converting_s is not None:
        said = f"about {seconds(estimate.converting_s)}"
        if options.calibration is not None:
            said += ", plus reading the calibration text"
        if options.verify:
            about = "" if estimate.checking_s is None else f"about {seconds(estimate.checking_s)} for "
            said += f", plus {about}a quality check"
        return said
    if options.target_bpw is not None:
        return f"{UNKNOWN}: how sensitive each tensor is has to be measured"
    return f"{UNKNOWN}: {options.how} runs the model over a text"


def plan_json(plan: "Plan", target: Path, disk: DiskSpace, estimate: Estimate) -> dict[str, Any]:
    """Return the plan as one line of JSON, under the names that the finished conversion has."""
    from tokamac.quant.report import by_part

    return {
        "event": "plan",
        "path": str(target),
        "weight_bytes": plan.weight_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "seconds": estimate.converting_s,
        "quality_seconds": estimate.checking_s,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "quality": None,
        "parameters": plan.parameters,
        "parts": [asdict(row) for row in by_part(plan)],
        "disk": {**asdict(disk), "fits": disk.fits},
        "notes": list(plan.notes),
    }


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second that decoding is expected to reach on this machine, before and after; None is unknown.

    reason: why one is unknown.
    """

    before_tps: float | None
    after_tps: float | None
    reason: str | None = None


def expected_speeds(before: Path, after: Path) -> Speeds:
    """Return what to expect of two folders, from their headers and this machine alone."""
    from tokamac.engine.perf.inspection import inspect_model

    found: list[float | None] = []
    reasons: list[str] = []
    for folder in (before, after):
        try:
            inspected = inspect_model(folder, CONTEXT)
        except TokamacError as error:  # a source of a form that only mlx-lm's conversion reads has no speed of its own
            found.append(None)
            reasons.append(error.message)
        else:
            found.append(inspected.expected_tps)
            if inspected.expected_tps is None and inspected.reason is not None:
                reasons.append(inspected.reason)
    return Speeds(found[0], found[1], next(iter(reasons), None))


def summary(report: "Conversion", speeds: Speeds) -> str:
    """Return the result for people."""
    found, compared = report.quality, "not compared with the source"
    if found is not None:
        compared = closeness(found.quality, found.relative_error)
        if found.unable is not None:
            compared += f"; no text was compared: {sanitise_line(found.unable)}"
    rows = [
        [
            "size",
            f"{size(report.source_bytes)} → {size(report.weight_bytes)}, {report.bits_per_weight:.2f} bits per weight",
        ],
        ["quality", compared],
        ["speed", speeds_text(speeds, f", {CONTEXT:,} tokens in")],
        ["took", f"{seconds(report.seconds)}, and {size(report.peak_memory_bytes)} of memory at most"],
    ]
    path = str(report.path)
    return "\n".join([sanitise_line(path), table(rows), sanitise_line(f"next: tokamac chat {shlex.quote(path)}")])


def speeds_text(speeds: Speeds, where: str) -> str:
    """Return the speeds for people, and why they are unknown. where: what is said of the machine's state."""
    said = f"{rate(speeds.before_tps)} → {rate(speeds.after_tps)} expected here{where}"
    if speeds.before_tps is None and speeds.after_tps is None:
        said = UNKNOWN
    return f"{said} ({sanitise_line(speeds.reason)})" if speeds.reason else said


class ConversionProgress:
    """Shows stage after stage. ``json``: as lines on stdout; the bar is then only drawn where a terminal sees it."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._stage = ""
        self._bar = Progress("", plain=False)
        self._written_s = 0.0

    def fetch(self, source: str) -> Path:
        """Return the folder of the source, downloaded first if need be."""
        from tokamac.engine.hub import download

        if not self._json:
            return loading.fetch(source, download.resolve)
        return download.resolve(
            source, progress=lambda at: self._write("downloading", at.done, at.total, "bytes", None)
        )

    def show(self, step: "TensorDone | StageDone") -> None:
        """Take a step of ``tokamac.quant.convert``."""
        from tokamac.quant.report import StageDone

        peak, memory = _peak_memory()
        if isinstance(step, StageDone):
            self._enter(step.stage, "steps")
            self._bar.update(step.done, step.total, memory)
            self._write(step.stage, step.done, step.total, "steps", peak)
        else:
            self._enter(CONVERTING, "bytes")
            tensors = f"{count(step.done)} of {count(step.total)} tensors"
            self._bar.update(step.done_bytes, step.total_bytes, f"{tensors}, {memory}, {step.name}")
            if self._json:
                json_line({"event": "tensor", "name": step.name, "done": step.done, "total": step.total})
            self._write(CONVERTING, step.done_bytes, step.total_bytes, "bytes", peak)

    def clear(self) -> None:
        """Take the bar off the terminal."""
        self._bar.clear()

    def _enter(self, stage: str, unit: str) -> None:
        if stage != self._stage:
            self._bar.clear()
            self._stage, self._written_s = stage, 0.0
            self._bar = Progress(stage, unit=unit, plain=not self._json)

    def _write(self, stage: str, done: int, total: int | None, unit: str, peak: int | None) -> None:
        now_s = time.monotonic()
        if not self._json or (done != total and now_s - self._written_s < REST_S):
            return
        self._written_s = now_s
        at = {"stage": stage, "done": done, "total": total, "unit": unit, "peak_memory_bytes": peak}
        json_line({"event": "stage", **at})


def _peak_memory() -> tuple[int, str]:
    """Return the most bytes that MLX held, and a text that names the whole process's too."""
    import mlx.core as mx

    arrays, most = int(mx.get_peak_memory()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = most if sys.platform == "darwin" else 1024 * most  # bytes on macOS, kilobytes on Linux
    return arrays, f"peak {size(arrays)} of arrays, {size(whole)} in all"
