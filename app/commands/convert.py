"""``tokamac convert``: quantize a Hugging Face or MLX model folder into an MLX folder."""

# Wraps ``tokamac.quant.convert`` (quant/conversion.py) with flags, progress (bar or JSON lines), the dry-run plan, and a
# report of sizes, quality and expected speeds.

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
from tokamac.engine.files import expanded, sizes
from tokamac.engine.gguf.places import name_of
from tokamac.engine.perf.memory import check_address_space
from tokamac.quant.options import BITS, DTYPES, GROUP_SIZES, METHODS, MODES, NO_TEXT, SHIPPED, UNQUANTIZED, Options

from ..backend.keep_awake import awake
from ..options import positive
from ..parser import Parser
from ..reports.verdict import changed_text, closeness
from ..text.sanitise import sanitise_line
from ..text.terminal import Progress, json_line, note, table
from ..text.units import UNKNOWN, count, rate, seconds, short, size
from . import loading
from .inspect import add_place_flags, place_of

if TYPE_CHECKING:
    from tokamac.quant import Conversion, Plan, TensorDone
    from tokamac.quant.report import StageDone

CONTEXT = 4096  # tokens of context that the speeds at the end are expected at

CONVERTING = "converting"

REST_S = 0.25  # between two JSON lines of one stage: the last of them always comes

# The public contract's names, in its order.
RESULT_FIELDS = ("path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes", "quality")

_EXAMPLES = """\
  tokamac convert Qwen/Qwen3-4B-Instruct-2507
  tokamac convert ~/models/mine -o mine-8bit --bits 8 --dry-run
  tokamac convert ~/models/mine --target-bpw 4.5
  tokamac convert ~/models/mine --method gptq --calibration=notes.txt
  tokamac convert model-Q4_K_M.gguf -o model
  tokamac convert ~/models/mine-4bit --dequantize --dtype bfloat16"""


def parser() -> Parser:
    made = Parser(
        "convert",
        "Quantize a Hugging Face or MLX model into an MLX folder, tensor by tensor, and compare the two. The folder appears "
        "once it is complete; after an interruption, the same command resumes. It also loads in mlx_lm, if that has the "
        "architecture.",
        _EXAMPLES,
    )
    made.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder, a Hugging Face ID (downloaded first), or a GGUF file, whose packing is kept unless bits are given",
    )
    target = made.add_mutually_exclusive_group()
    target.add_argument(
        "-o", "--output", metavar="DIR", help="output folder (default: here, named after source and bits)"
    )
    target.add_argument(
        "--into", metavar="DIR", help="parent of the output folder, which is named after source and bits"
    )
    _add_packing(made)
    _add_finding(made)
    add_place_flags(made)
    made.add_argument(
        "--adapter", metavar="DIR|ID", help="LoRA or DoRA adapter of mlx-lm or PEFT to merge into the weights first"
    )
    unchecked = "convert a model even if part of its config is computed differently here; a note says what"
    made.add_argument("--unchecked", action="store_true", help=unchecked)
    run = made.add_argument_group("run")
    run.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    run.add_argument(
        "--overwrite", action="store_true", help="replace an existing model folder, once the new one is complete"
    )
    run.add_argument("--no-verify", dest="verify", action="store_false", help="skip the comparison with the source")
    run.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    return made


def _add_packing(made: Parser) -> None:
    group = made.add_argument_group("quantization")
    group.add_argument("--bits", type=int, choices=BITS, help="bits per weight (default: 4)")
    group.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="weights that share a scale (default: 64)")
    group.add_argument(
        "--mode", choices=MODES, default="affine", help="affine, or a microscaling format (default: affine)"
    )
    group.add_argument("--recipe", metavar="NAME", help="mixed-precision recipe of mlx-lm, such as mixed_4_6")
    target = group.add_mutually_exclusive_group()
    target.add_argument(
        "--target-bpw", type=float, metavar="X", help="average bits per weight, spent where they help most"
    )
    target.add_argument(
        "--target-kl", type=float, metavar="X", help="fewest bits that lose at most X nats a token, such as 0.05"
    )
    target.add_argument(
        "--fit",
        type=positive,
        metavar="N",
        help="the most bits that leave room for a context of N tokens, here or on --chip, and a tenth of the memory",
    )
    group.add_argument(
        "--embed-bits",
        type=int,
        choices=(*BITS, UNQUANTIZED),
        help="bits of the embedding and the head; 16 is not quantized (default: up to 8, while they add a fifth at most)",
    )
    group.add_argument("--dtype", choices=DTYPES, help="type of scales and unquantized weights (default: the source's)")
    eyes = group.add_mutually_exclusive_group()
    eyes.add_argument(
        "--keep-vision",
        action="store_true",
        default=None,
        help="keep what sees or hears, as it is (default: where there is any)",
    )
    eyes.add_argument("--no-vision", dest="keep_vision", action="store_false", help="leave out what sees or hears")
    group.add_argument("--vision-bits", type=int, choices=BITS, help="bits of what sees (default: as the source)")
    group.add_argument("--dequantize", action="store_true", help="write a quantized model as floats")


def _add_finding(made: Parser) -> None:
    group = made.add_argument_group("method")
    group.add_argument(
        "--method",
        choices=METHODS,
        help="search: least squared error; gptq: that, and later weights make good for earlier ones; awq: that, of scaled "
        "channels; round: MLX's own (default: search; round for mxfp8)",
    )
    group.add_argument(
        "--calibration",
        nargs="?",
        const=True,
        metavar="none|FILE",
        help="text that weighs errors, for search, gptq or awq (default: the built-in one); none: weigh all alike",
    )


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    if not options.source.strip() or "" in (options.output, options.into):
        parser.error("SOURCE, -o and --into must not be empty")
    multiply_in_float32()  # sensitivities and divergences as small as 1e-5 are compared
    if options.fit is None and (options.chip or options.gpu_cores or options.memory):
        parser.error("--chip, --gpu-cores and --memory have no effect without --fit")
    request = requested(parser, options)
    check_address_space()  # before the libraries that end the process where there is none
    progress = ConversionProgress(json=options.json)
    folder = loading.on_disk(options.source) if options.dry_run else progress.fetch(options.source)
    if options.fit is not None:
        request["target_bpw"] = _fitting(parser, options, folder)
    act = _plan if options.dry_run else _convert
    return act(folder, _target(options, request), options, request, progress)


def _fitting(parser: Parser, options: argparse.Namespace, folder: Path) -> float:
    from tokamac.engine.model.config import read_config
    from tokamac.engine.perf.what_if import bits_that_fit, here

    found = bits_that_fit(read_config(folder), options.fit, place_of(parser, options) or here())
    note(f"note: {found:g} bits per weight leave room for {options.fit:,} tokens")
    return found


def _target(options: argparse.Namespace, request: dict[str, Any]) -> Path:
    """Return the new folder as an absolute path: readers may run elsewhere."""
    from tokamac.quant.conversion import default_target

    if options.output:
        return expanded(options.output, strict=True).absolute()
    name = default_target(options.source, Options(**request))
    return (expanded(options.into or "", strict=True) / name).absolute()


def requested(parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments for Options; exits with status 2 at contradictory flags."""
    request = {field.name: getattr(options, field.name) for field in fields(Options)}
    if (text := request["calibration"]) is not None:
        request["calibration"] = SHIPPED if text is True else text if text == NO_TEXT else expanded(text)
    checked = request if options.fit is None else {**request, "target_bpw": UNQUANTIZED}
    try:
        Options(**checked)
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
    """Bytes needed, and free on the target disk."""

    needed: int
    free: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds of conversion and comparison; None is unknown or not wanted."""

    converting_s: float | None
    checking_s: float | None


def plan_text(plan: "Plan", target: Path, disk: DiskSpace, estimate: Estimate) -> str:
    from tokamac.quant.report import by_part
    from tokamac.quant.writer import packing_name

    rows = [
        [row.part, packing_name(row.packing), count(row.tensors), short(row.parameters), size(row.nbytes)]
        for row in by_part(plan)
    ]
    head = ["part", "packing", "tensors", "weights", "size"]
    whole = ["all", "", count(len(plan.tensors)), short(plan.parameters), size(plan.weight_bytes)]
    bpw = plan.options.target_bpw
    upper = plan.bits_per_weight if bpw is None else bpw
    bits = f"{'at most ' if plan.options.measures else ''}{upper:.2f} bits per weight"
    needed, free = sizes(disk.needed, disk.free)
    most = size(plan.weight_bytes + plan.needed_bytes - plan.output_bytes)
    figures = [
        ["weights", f"{size(plan.source_bytes)} → {most}, {bits}"],
        ["memory", f"{size(plan.peak_memory_bytes)} at most"],
        ["disk", f"{needed} needed, {free} free: {'fits' if disk.fits else 'does not fit'}"],
        ["time", _time(plan, estimate)],
    ]
    title = sanitise_line(f"{name_of(plan.source)} → {target}  (nothing is written)")
    return "\n\n".join([title, table([head, *rows, whole], right=(2, 3, 4)), table(figures)])


def _time(plan: "Plan", estimate: Estimate) -> str:
    options = plan.options
    if estimate.converting_s is not None:
        said = f"about {seconds(estimate.converting_s)}"
        if options.text is not None:
            said += ", plus reading the calibration text"
        if options.verify:
            about = "" if estimate.checking_s is None else f"about {seconds(estimate.checking_s)} for "
            said += f", plus {about}a quality check"
        return said
    if options.measures:
        return f"{UNKNOWN}: how sensitive each tensor is has to be measured"
    return f"{UNKNOWN}: {options.how} runs the model over a text"


def plan_json(plan: "Plan", target: Path, disk: DiskSpace, estimate: Estimate) -> dict[str, Any]:
    """Return the plan as one JSON line, with the finished conversion's field names."""
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
    """Expected decode tokens/s before and after; None is unknown, ``reason`` says why."""

    before_tps: float | None
    after_tps: float | None
    reason: str | None = None


def expected_speeds(before: Path, after: Path) -> Speeds:
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
    found, compared = report.quality, "not compared with the source"
    if found is not None:
        compared = closeness(found.quality, found.relative_error, found.grade)
        if found.unable is not None:
            compared += f"; no text was compared: {sanitise_line(found.unable)}"
    rows = [
        [
            "size",
            f"{size(report.source_bytes)} → {size(report.weight_bytes)}, {report.bits_per_weight:.2f} bits per weight",
        ],
        ["quality", compared],
        ["speed", speeds_text(speeds, f" at {CONTEXT:,} tokens of context")],
        ["took", f"{seconds(report.seconds)}, and a peak of {size(report.peak_memory_bytes)} of memory"],
    ]
    path = str(report.path)
    after = f"next: tokamac chat {shlex.quote(path)}"
    changed = [] if found is None else changed_text(found.changed)
    worse = "" if found is None else found.advice
    return "\n".join([sanitise_line(path), table(rows), *changed, sanitise_line(after), *([worse] if worse else [])])


def speeds_text(speeds: Speeds, where: str) -> str:
    said = f"{rate(speeds.before_tps)} → {rate(speeds.after_tps)} expected here{where}"
    if speeds.before_tps is None and speeds.after_tps is None:
        said = UNKNOWN
    return f"{said} ({sanitise_line(speeds.reason)})" if speeds.reason else said


class ConversionProgress:
    """Shows stages. json: as lines on stdout, the bar only on a terminal."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._stage = ""
        self._bar = Progress("", plain=False)
        self._written_s = 0.0

    def fetch(self, source: str) -> Path:
        from tokamac.engine.hub import download

        if not self._json:
            return loading.fetch(source, download.resolve)
        return download.resolve(
            source, progress=lambda at: self._write("downloading", at.done, at.total, "bytes", None)
        )

    def show(self, step: "TensorDone | StageDone") -> None:
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
    """Return MLX's peak bytes, and a text that adds the whole process's."""
    import mlx.core as mx

    arrays, most = int(mx.get_peak_memory()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = most if sys.platform == "darwin" else 1024 * most  # bytes on macOS, kilobytes on Linux
    return arrays, f"peak {size(arrays)} of arrays, {size(whole)} in all"
