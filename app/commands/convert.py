"""``tokamac convert``: a Hugging Face or MLX model folder in, a quantized MLX folder out."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.commands.convert_progress import Shown
from tokamac.app.keep_awake import awake
from tokamac.app.options import add_unchecked_flag
from tokamac.app.output import json_line, note
from tokamac.app.parser import Parser
from tokamac.engine.device import multiply_in_float32
from tokamac.engine.errors import OptionError
from tokamac.quant.options import BITS, DTYPES, GROUP_SIZES, METHODS, MODES, SHIPPED, UNQUANTIZED, Options

if TYPE_CHECKING:
    from tokamac.quant import Conversion

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
    from tokamac.app.commands import convert_plan
    from tokamac.quant import convert
    from tokamac.quant.pace import conversion_s

    try:
        plan = convert(folder, target, dry_run=True, progress=shown.tell, **asked)
    finally:
        shown.clear()
    seconds = conversion_s(plan)
    disk = convert_plan.disk_for(target, plan)
    if options.json:
        json_line(convert_plan.to_json(plan, target, disk, seconds))
        return 0
    print(convert_plan.report(plan, target, disk, seconds))
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
    from tokamac.app.commands import convert_report

    for text in report.notes:
        note(f"note: {text}")
    for text in () if report.quality is None else report.quality.concerns:
        note(f"warning: {text}")
    speeds = convert_report.speeds_of(folder, report.path)
    if options.json:
        json_line(convert_report.speeds_json(speeds))
        json_line(convert_report.to_json(report))
        return
    print(convert_report.summary(report, speeds))
