"""``tokamac convert``: a Hugging Face model folder in, a quantized MLX folder out."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from tokamac.app.commands import loading
from tokamac.app.options import Parser
from tokamac.app.output import Progress, json_line, note
from tokamac.app.tui.units import seconds, size
from tokamac.quant.options import BITS, DTYPES, GROUP_SIZES, Options


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "convert",
        "Convert a Hugging Face model to a quantized MLX folder, tensor by tensor. The result also loads in mlx_lm.",
        "  tokamac convert Qwen/Qwen3-4B-Instruct-2507\n  tokamac convert ~/models/mine -o mine-8bit --bits 8 --dry-run",
    )
    made.add_argument("source", metavar="SOURCE", help="a folder or a Hugging Face id (downloaded first)")
    made.add_argument(
        "-o", "--output", metavar="DIR", help="the new folder (default: here, named after source and bits)"
    )
    made.add_argument("--bits", type=int, choices=BITS, default=4, help="bits of a weight (4)")
    made.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=64, help="weights that share a scale (64)")
    made.add_argument("--dtype", choices=DTYPES, help="of what is not packed (default: as in the source)")
    made.add_argument(
        "--overwrite", action="store_true", help="replace a model folder of that name, once the new one is whole"
    )
    made.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    made.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Convert, or say what would be done; return the exit status."""
    if not options.source.strip() or options.output == "":
        parser.error("SOURCE and -o must not be empty")
    from tokamac.engine import hub
    from tokamac.quant.conversion import default_target

    packing = Options(options.bits, options.group_size, options.dtype)
    target = Path(options.output).expanduser() if options.output else default_target(options.source, packing)
    if options.dry_run:
        return _plan(loading.on_disk(options.source), target, options)
    return _convert(loading.fetch(options.source, hub.resolve), target, options)


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {"bits": options.bits, "group_size": options.group_size, "dtype": options.dtype}


def _plan(folder: Path, target: Path, options: argparse.Namespace) -> int:
    from tokamac.quant import convert

    plan = convert(folder, target, dry_run=True, **_arguments(options))
    packed = sum(tensor.bits is not None for tensor in plan.tensors)
    if options.json:
        facts = {
            name: getattr(plan, name) for name in ("weight_bytes", "bits_per_weight", "source_bytes", "output_bytes")
        }
        peak = plan.peak_memory_bytes
        json_line(
            {"event": "plan", "path": str(target), **facts, "seconds": None, "peak_memory_bytes": peak, "quality": None}
        )
        return 0
    print(f"{folder} → {target}  (nothing is written)")
    print(
        f"size       {size(plan.source_bytes)} → {size(plan.output_bytes)}, {plan.bits_per_weight:.2f} bits per weight"
    )
    print(f"tensors    {len(plan.tensors)}, of which {packed} at {options.bits} bits in groups of {options.group_size}")
    print(f"memory     {size(plan.peak_memory_bytes)} at most")
    for text in plan.notes:
        note(f"note: {text}")
    return 0


def _convert(folder: Path, target: Path, options: argparse.Namespace) -> int:
    from tokamac.quant import TensorDone, convert

    bar = Progress("converting", plain=not options.json)

    def tell(step: TensorDone) -> None:
        bar.update(step.done_bytes, step.total_bytes, step.name)
        if options.json:
            json_line({"event": "tensor", "name": step.name, "done": step.done, "total": step.total})

    try:
        report = convert(folder, target, overwrite=options.overwrite, progress=tell, **_arguments(options))
    finally:
        bar.clear()
    for text in report.notes:
        note(f"note: {text}")
    if options.json:
        result = {name: value for name, value in report.to_json().items() if name != "notes"}
        json_line({"event": "converted", **result})
        return 0
    sizes = f"{size(report.weight_bytes)} (from {size(report.source_bytes)})"
    print(f"{report.path}: {sizes}, {report.bits_per_weight:.2f} bits per weight")
    print(f"took {seconds(report.seconds)} and {size(report.peak_memory_bytes)} of memory at most")
    print(f"next: tokamac chat {shlex.quote(_as_folder(report.path))}")
    return 0


def _as_folder(path: str) -> str:
    """Return a path that can't be taken for a Hugging Face id or a flag."""
    return path if path.startswith(("/", ".", "~")) else f"./{path}"
