"""``tokamac convert``: a Hugging Face or MLX model folder in, a quantized MLX folder out.

How far a conversion has come: a bar for people, JSON lines for programs.

What ``tokamac convert --dry-run`` says: what becomes of which part of a model, and what that takes.

What ``tokamac convert`` says at the end: sizes, quality, the speed to expect before and after, and what to type next.
"""

import argparse
import resource
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.keep_awake import awake
from tokamac.app.options import add_unchecked_flag
from tokamac.app.output import Progress, json_line, note, table
from tokamac.app.parser import Parser
from tokamac.app.sanitise import sanitise_line
from tokamac.app.units import UNKNOWN, count, rate, seconds, short, size, sizes
from tokamac.app.verdict import closeness
from tokamac.engine.device import multiply_in_float32
from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.events import LoadProgress
from tokamac.quant.options import BITS, DTYPES, GROUP_SIZES, METHODS, MODES, SHIPPED, UNQUANTIZED, Options

if TYPE_CHECKING:
    from tokamac.quant import Conversion, Plan, TensorDone
    from tokamac.quant.report import StageDone


CONVERTING = "converting"

REST_S = 0.25
"""Between two JSON lines of one stage: the last of them always comes."""


class Shown:
    """Shows stage after stage. ``json``: as lines on stdout; the bar is then only drawn where a terminal sees it."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._stage = ""
        self._bar = Progress("", plain=False)
        self._said_s = 0.0

    def fetch(self, source: str) -> Path:
        """Return the folder of the source, downloaded first if need be."""
        from tokamac.engine.hub import download

        if not self._json:
            return loading.fetch(source, download.resolve)
        return download.resolve(source, progress=self._downloaded)

    def tell(self, step: "TensorDone | StageDone") -> None:
        """Take a step of ``tokamac.quant.convert``."""
        from tokamac.quant.report import StageDone

        if isinstance(step, StageDone):
            self._enter(step.stage, "steps")
            self._bar.update(step.done, step.total, _memory())
            self._say(step.stage, step.done, step.total, "steps")
        else:
            self._enter(CONVERTING, "bytes")
            tensors = f"{count(step.done)} of {count(step.total)} tensors"
            self._bar.update(step.done_bytes, step.total_bytes, f"{tensors}, {_memory()}, {step.name}")
            if self._json:
                json_line({"event": "tensor", "name": step.name, "done": step.done, "total": step.total})
            self._say(CONVERTING, step.done_bytes, step.total_bytes, "bytes")

    def clear(self) -> None:
        """Take the bar off the terminal."""
        self._bar.clear()

    def _enter(self, stage: str, unit: str) -> None:
        if stage != self._stage:
            self._bar.clear()
            self._stage, self._said_s = stage, 0.0
            self._bar = Progress(stage, unit=unit, plain=not self._json)

    def _say(self, stage: str, done: int, total: int, unit: str) -> None:
        now_s = time.monotonic()
        if not self._json or (done < total and now_s - self._said_s < REST_S):
            return
        self._said_s = now_s
        at = {"stage": stage, "done": done, "total": total, "unit": unit, "peak_memory_bytes": _mlx_peak_bytes()}
        json_line({"event": "stage", **at})

    def _downloaded(self, at: LoadProgress) -> None:
        now_s = time.monotonic()
        if at.done == at.total or now_s - self._said_s >= REST_S:
            self._said_s = now_s
            where = {"done": at.done, "total": at.total, "unit": "bytes", "peak_memory_bytes": None}
            json_line({"event": "stage", "stage": "downloading", **where})


def _memory() -> str:
    return f"peak {size(_mlx_peak_bytes())} of arrays, {size(_process_peak_bytes())} in all"


def _mlx_peak_bytes() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _process_peak_bytes() -> int:
    """Return the most memory that this process had. The system counts kilobytes on Linux and bytes on macOS."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


ASKED = (
    "bits", "group_size", "mode", "method", "recipe", "target_bpw", "calibration", "dtype", "embed_bits", "dequantize", "verify",
    "adapter", "unchecked",
)  # fmt: skip
"""Flags that are options of a conversion, as ``Options`` names them."""

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
        "folder appears whole or not at all; after an interruption the same command goes on. It also loads in mlx_lm, "
        "where that has the architecture.",
        _EXAMPLES,
    )
    made.add_argument("source", metavar="SOURCE", help="a folder or a Hugging Face id (downloaded first)")
    made.add_argument(
        "-o", "--output", metavar="DIR", help="the new folder (default: here, named after source and bits)"
    )
    _add_packing(made)
    _add_finding(made)
    made.add_argument(
        "--adapter",
        metavar="DIR|ID",
        help="a LoRA or DoRA adapter, of mlx-lm or PEFT, to add to the weights before they are packed",
    )
    add_unchecked_flag(
        made, "convert a model although something in its config would be computed otherwise; a note says what"
    )
    run = made.add_argument_group("the run")
    run.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    run.add_argument(
        "--overwrite", action="store_true", help="replace a model folder of that name, once the new one is whole"
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
        "--target-bpw", type=float, metavar="X", help="bits per weight of the whole, spent where they help most"
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
    if not options.source.strip() or options.output == "":
        parser.error("SOURCE and -o must not be empty")
    multiply_in_float32()  # sensitivities and divergences as small as 1e-5 are compared
    asked = asked_of(parser, options)
    from tokamac.quant.conversion import default_target

    target = Path(options.output).expanduser() if options.output else default_target(options.source, Options(**asked))
    shown = Shown(json=options.json)
    if options.dry_run:
        return _plan(loading.on_disk(options.source), target, options, asked, shown)
    return _convert(shown.fetch(options.source), target, options, asked, shown)


def asked_of(parser: Parser, options: argparse.Namespace) -> dict[str, Any]:
    """Return what Options takes; end with exit status 2 where the flags contradict each other."""
    asked = {name: getattr(options, name) for name in ASKED}
    if asked["calibration"] is not None:
        asked["calibration"] = SHIPPED if asked["calibration"] is True else Path(asked["calibration"]).expanduser()
    try:
        Options(**asked)
    except OptionError as error:
        parser.error(error.one_line().rstrip("."))
    return asked


def _plan(folder: Path, target: Path, options: argparse.Namespace, asked: dict[str, Any], shown: Shown) -> int:
    from tokamac.quant import convert
    from tokamac.quant.plan import conversion_s

    try:
        plan = convert(folder, target, dry_run=True, progress=shown.tell, **asked)
    finally:
        shown.clear()
    seconds = conversion_s(plan)
    disk = disk_for(target, plan)
    if options.json:
        json_line(plan_json(plan, target, disk, seconds))
        return 0
    print(report(plan, target, disk, seconds))
    for text in plan.notes:
        note(f"note: {text}")
    return 0


def _convert(folder: Path, target: Path, options: argparse.Namespace, asked: dict[str, Any], shown: Shown) -> int:
    from tokamac.quant import convert

    try:
        report = convert(folder, target, overwrite=options.overwrite, progress=shown.tell, **asked)
    except KeyboardInterrupt as stopped:
        shown.clear()
        left = bool(getattr(stopped, "__notes__", ()))  # quant notes on it that something is left to go on with
        note(f"tokamac: interrupted. {'The same command goes on from here.' if left else 'Nothing was written.'}")
        raise
    finally:
        shown.clear()
    _tell(folder, report, options)
    return 0


def _tell(folder: Path, report: "Conversion", options: argparse.Namespace) -> None:

    for text in report.notes:
        note(f"note: {text}")
    for text in () if report.quality is None else report.quality.concerns:
        note(f"warning: {text}")
    speeds = speeds_of(folder, report.path)
    if options.json:
        json_line(speeds_json(speeds))
        json_line(to_json(report))
        return
    print(summary(report, speeds))


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Room on the disk of the new folder, bytes."""

    needed: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.needed <= self.free


def disk_for(target: Path, plan: "Plan") -> DiskSpace:
    """Return what ``plan`` needs of the disk that ``target`` will be on, and what it has."""
    from tokamac.quant.resume import SPARE_BYTES, free_bytes

    return DiskSpace(plan.needed_bytes + SPARE_BYTES, free_bytes(target))


def report(plan: "Plan", target: Path, disk: DiskSpace, converting_s: float | None) -> str:
    """Return the plan for people. converting_s: about how long it takes; None is unknown."""
    from tokamac.quant.card import packing_name
    from tokamac.quant.report import by_part

    head = ["part", "packing", "tensors", "weights", "size"]
    rows = [
        [row.part, packing_name(row.packing), count(row.tensors), short(row.parameters), size(row.nbytes)]
        for row in by_part(plan)
    ]
    whole = ["all", "", count(len(plan.tensors)), short(plan.parameters), size(plan.weight_bytes)]
    parts = table([head, *rows, whole], right=(2, 3, 4))
    title = sanitise_line(f"{plan.source} → {target}  (nothing is written)")
    return "\n\n".join([title, parts, table(_figures(plan, disk, converting_s))])


def plan_json(plan: "Plan", target: Path, disk: DiskSpace, converting_s: float | None) -> dict[str, Any]:
    """Return the plan as one line of JSON, under the names that the finished conversion has."""
    from tokamac.quant.report import by_part

    return {
        "event": "plan",
        "path": str(target),
        "weight_bytes": plan.weight_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "seconds": converting_s,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "quality": None,
        "parameters": plan.parameters,
        "parts": [
            {**asdict(row), "packing": None if row.packing is None else asdict(row.packing)} for row in by_part(plan)
        ],
        "disk": {**asdict(disk), "fits": disk.fits},
        "notes": list(plan.notes),
    }


def _figures(plan: "Plan", disk: DiskSpace, converting_s: float | None) -> list[list[str]]:
    needed, free = sizes(disk.needed, disk.free)
    room, target = "fits" if disk.fits else "does not fit", plan.options.target_bpw
    bits = f"{plan.bits_per_weight:.2f} bits per weight" if target is None else f"at most {target:.2f} bits per weight"
    return [
        [
            "weights",
            f"{size(plan.source_bytes)} → {size(plan.weight_bytes + plan.needed_bytes - plan.output_bytes)}, {bits}",
        ],
        ["memory", f"{size(plan.peak_memory_bytes)} at most"],
        ["disk", f"{needed} needed, {free} free: {room}"],
        ["time", _time(plan, converting_s)],
    ]


def _time(plan: "Plan", converting_s: float | None) -> str:
    options = plan.options
    if converting_s is not None:
        calibrating = ["looking at the calibration text"] if options.calibration is not None else []
        apart = " and ".join([*calibrating, *(["comparing at the end"] if options.verify else [])])
        return f"about {seconds(converting_s)} to convert{f', not counting {apart}' if apart else ''}"
    if options.target_bpw is not None:
        return f"{UNKNOWN}: how sensitive each tensor is has to be measured"
    return f"{UNKNOWN}: {options.how} runs the model over a text"


CONTEXT = 4096

_FIELDS = (
    "path", "weight_bytes", "bits_per_weight", "source_bytes", "seconds", "peak_memory_bytes",
)  # fmt: skip
"""The public contract's names, in its order; the quality comes last."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second that decoding is expected to reach on this machine, before and after; None is unknown."""

    before_tps: float | None
    after_tps: float | None


def speeds_of(source: Path, converted: Path) -> Speeds:
    """Return what to expect of both folders, from their headers and this machine alone."""
    return Speeds(_expected_tps(source), _expected_tps(converted))


def speeds_json(speeds: Speeds) -> dict[str, Any]:
    """Return the line that goes before the result."""
    return {"event": "expected", "before_tps": speeds.before_tps, "after_tps": speeds.after_tps, "context": CONTEXT}


def to_json(report: "Conversion") -> dict[str, Any]:
    """Return the result, under the names of the public contract."""
    plain = report.to_json()
    return {"event": "converted", **{name: plain[name] for name in (*_FIELDS, "quality")}}


def summary(report: "Conversion", speeds: Speeds) -> str:
    """Return the result for people."""
    sizes = f"{size(report.source_bytes)} → {size(report.weight_bytes)}, {report.bits_per_weight:.2f} bits per weight"
    expected = f"{rate(speeds.before_tps)} → {rate(speeds.after_tps)} expected here, {CONTEXT:,} tokens in"
    took = f"{seconds(report.seconds)}, and {size(report.peak_memory_bytes)} of memory at most"
    rows = [["size", sizes], ["quality", _compared(report)], ["speed", expected], ["took", took]]
    following = f"next: tokamac chat {shlex.quote(as_folder(str(report.path)))}"
    return "\n".join([sanitise_line(str(report.path)), table(rows), sanitise_line(following)])


def _compared(report: "Conversion") -> str:
    found = report.quality
    if found is None:
        return "not compared with the source"
    said = closeness(found.quality, found.relative_error)
    return said if found.unable is None else f"{said}; no text was compared: {sanitise_line(found.unable)}"


def as_folder(path: str) -> str:
    """Return a path that can't be taken for a Hugging Face id or a flag."""
    return path if path.startswith(("/", ".", "~")) else f"./{path}"


def _expected_tps(folder: Path) -> float | None:
    from tokamac.engine.perf.inspection import inspect_model

    try:
        return inspect_model(folder, CONTEXT).expected_tps
    except TokamacError:  # a source of a form that only mlx-lm's conversion reads has no speed of its own
        return None
