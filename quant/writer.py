"""Writes a plan tensor by tensor (read, check, cast, pack, append, journal, free), and its model card."""

import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from tokamac.engine import files
from tokamac.engine.architectures import loads_in_mlx_lm
from tokamac.engine.errors import ConversionError
from tokamac.engine.perf.config_cost import Packing

from .options import CALIBRATED, NO_TEXT, SHIPPED, Options
from .packing import Quantizer
from .plan import FLOATS, INDEX, BesidePlan, Plan, ShardWriter, TensorPlan
from .report import RECORD, Outcome, Provenance, WeightError, by_part, with_error
from .resume import TensorEntry, WorkDir
from .search import squared_error
from .source import AGAIN, Beside, Packed, Source, check_finite, not_finite


@dataclass(frozen=True, slots=True)
class TensorDone:
    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor's outputs, evaluated. error: None where it was not packed now."""

    arrays: tuple[mx.array, ...]
    error: WeightError | None


def write(
    plan: Plan, source: Source, quantizer: Quantizer, work: WorkDir, progress: Callable[[TensorDone], None]
) -> dict[str, WeightError]:
    """Write the model after any earlier run's tensors; return packing errors by tensor.

    Pops ``source`` entries. progress: per tensor, first for the last resumed one. Raises ConversionError, naming an
    unreadable or non-finite tensor; OSError.
    """
    work.cut(_as_planned(plan, work))
    total, total_bytes, done_bytes = len(plan.tensors), sum(tensor.source_bytes for tensor in plan.tensors), 0
    arrays_there = sum(len(tensor.outputs) for tensor in plan.tensors[: work.resumed])
    with ShardWriter(work.folder, plan.shards, arrays_there) as writer:
        for done, tensor in enumerate(plan.tensors, start=1):
            if done <= work.resumed:
                _pop(tensor, source)
            else:
                _write(tensor, converted(tensor, source, quantizer), writer, work)
                mx.clear_cache()  # the next tensor has another size
            done_bytes += tensor.source_bytes
            if done >= work.resumed:
                progress(TensorDone(tensor.name, done, total, done_bytes, total_bytes))
    for each, beside in zip(plan.beside, source.beside, strict=True):
        _write_beside(each, beside, quantizer, work.folder)
    (work.folder / INDEX).write_bytes(plan.index_json)
    (work.folder / "config.json").write_bytes(plan.config_json)
    for file in plan.copies:
        copy = work.folder / file.relative_to(source.folder)
        if copy.parent != work.folder:
            copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    return {entry.tensor: entry.error for entry in work.entries if entry.error is not None}


def _as_planned(plan: Plan, work: WorkDir) -> int:
    ends = {name: (shard.name, end) for shard in plan.shards for name, end in shard.ends.items()}
    alike = {shard.name for shard in plan.shards if _begins_with(work.folder / shard.name, shard.header)}
    for number, (entry, tensor) in enumerate(zip(work.entries, plan.tensors, strict=False)):
        planned = (tensor.name, *ends[tensor.outputs[-1].name])
        if (entry.tensor, entry.shard, entry.end) != planned or entry.shard not in alike:
            return number
    return min(len(work.entries), len(plan.tensors))


def _begins_with(file: Path, header: bytes) -> bool:
    if not file.exists():
        return False
    with file.open("rb") as opened:
        return opened.read(len(header)) == header


def _write(tensor: TensorPlan, packed: PackedTensor, writer: ShardWriter, work: WorkDir) -> None:
    for output, array in zip(tensor.outputs, packed.arrays, strict=True):
        writer.append(output.name, array)
    at = writer.mark()
    work.add(TensorEntry(tensor.name, at.shard, at.end, at.checksum, packed.error), synced=at.complete)


def _write_beside(plan: BesidePlan, beside: Beside, quantizer: Quantizer, folder: Path) -> None:
    (folder / plan.shard.name).unlink(missing_ok=True)
    with ShardWriter(folder, [plan.shard]) as writer:
        for tensor in plan.tensors:
            for output, array in zip(tensor.outputs, converted(tensor, beside.source, quantizer).arrays, strict=True):
                writer.append(output.name, array)
            mx.clear_cache()
        writer.mark()


def _pop(tensor: TensorPlan, source: Source) -> tuple[mx.array, Packed | None]:
    path, _, leaf = tensor.name.rpartition(".")
    return source.weights.pop(tensor.name), source.packed.pop(path, None) if leaf == "weight" else None


def converted(plan: TensorPlan, source: Source, quantizer: Quantizer) -> PackedTensor:
    """Return a tensor's outputs, popping its source. Raises ConversionError if unreadable or non-finite."""
    weight, packed = _pop(plan, source)
    if plan.kept and packed is not None:
        words, *rest = packed.arrays
        floats = [each.astype(FLOATS[plan.dtype]) if mx.issubdtype(each.dtype, mx.floating) else each for each in rest]
        for each in floats:
            _check(plan.name, each)
        mx.eval(words, *floats)
        return PackedTensor((words, *floats), packed.error)
    given = weight
    if plan.dtype != plan.source_dtype:
        weight = weight.astype(FLOATS[plan.dtype])
    if plan.packing is None:
        _check_cast(plan, given, weight)
        return PackedTensor((weight,), None)
    _read(plan.name, weight)
    arrays = quantizer.pack(plan.name.rpartition(".")[0], weight, plan.packing)
    mx.eval(*arrays)
    error = WeightError(*squared_error(weight, arrays, plan.packing))
    if not math.isfinite(error.squared_weights + error.squared_error):  # no pass of its own is needed to see that
        _check_cast(plan, given, weight)
        raise not_finite(f"{plan.name}, once packed,", "Its range is too wide: use another --mode, or --dequantize.")
    return PackedTensor(arrays, error)


def _check_cast(plan: TensorPlan, given: mx.array, cast: mx.array) -> None:
    _check(plan.name, given)
    if cast is not given:
        _check(plan.name, cast, f"It does not fit {plan.dtype}: choose another --dtype.")


def _check(name: str, array: mx.array, hint: str = AGAIN) -> None:
    _read(name, array)
    if mx.issubdtype(array.dtype, mx.floating):
        check_finite(name, array, hint=hint)


def _read(name: str, weight: mx.array) -> None:
    try:
        mx.eval(weight)
    except (RuntimeError, ValueError) as error:
        raise ConversionError(
            f"{name} can't be read: {error}", "Check the disk, or download the model again."
        ) from error


# Names come from others: report.py has removed Markdown and YAML syntax. No time, path or memory figure, so
# that the same conversion gives the same bytes.


HERE = "path/to/this/folder"  # stands for the model in commands: where it lies is not known when the card is written

METHODS = {
    "round": "by rounding to the nearest step between a group's two ends (`mx.quantize`)",
    "search": "by searching, for every group, the scale and bias of least squared error",
    "gptq": "by GPTQ with searched scales, which uses a calibration text",
    "awq": "by AWQ, which scales input channels by a calibration text, with the scales of least squared error",
}


def card(plan: Plan, result: Outcome | None, made: Provenance) -> bytes:
    sections = (_front_matter(plan, made), _what(plan, made), _quality(result), _use(plan), _again(plan.options, made))
    return ("\n\n".join("\n".join(lines) for lines in sections) + "\n").encode()


def command(options: Options, source: str) -> str:
    """Return the shell command for the same conversion; a user's own text is named FILE."""
    words = ["tokamac", "convert", source, *_flags(options)]
    return " ".join(shlex.quote(word) for word in words)


def packing_name(packing: Packing | None) -> str:
    if packing is None:
        return "not packed"
    group = f"groups of {packing.group_size}"
    return f"{packing.bits} bits, {group}" if packing.mode == "affine" else f"{packing.mode}, {group}"


def _front_matter(plan: Plan, made: Provenance) -> Iterator[str]:
    base = made.id or made.card.get("base_model")
    packings = {tensor.packing for tensor in plan.tensors if tensor.packing is not None}
    tags = sorted({f"{p.bits}-bit" if p.mode == "affine" else p.mode for p in packings})
    yield "---"
    yield "library_name: mlx"
    # In quotes whatever a word looks like: ``no`` and ``1.0`` are no text in YAML without them.
    yield f'pipeline_tag: "{made.card.get("pipeline_tag", "text-generation")}"'
    licence = ("license", "license_name", "license_link")
    yield from (f'{key}: "{made.card[key]}"' for key in licence if key in made.card)
    if base is not None:
        yield f'base_model: "{base}"'
        if not plan.options.dequantize:
            yield "base_model_relation: quantized"
    yield "tags:"
    yield from (f'- "{tag}"' for tag in ("mlx", "tokamac", *tags))
    yield "---"


def _what(plan: Plan, made: Provenance) -> Iterator[str]:
    options = plan.options
    named = f"[{made.name}](https://huggingface.co/{made.id})" if made.id else f"`{made.name}`"
    versions = ", ".join(f"{name} {number or 'of unknown version'}" for name, number in made.versions.items())
    yield f"# {made.name} at {plan.bits_per_weight:.2f} bits per weight, for MLX"
    yield ""
    yield f"Converted from {named}: {files.size(plan.source_bytes)} became {files.size(plan.weight_bytes)}."
    yield f"Made with {versions}{', products of float32 in TF32 where the GPU has it' if made.tf32 else ''}."
    if made.adapter is not None:
        yield f"The adapter `{made.adapter['name']}` was added to its weights first."
    yield from plan.carried
    if not options.dequantize and any(each.packing and not each.kept for each in plan.tensors) | (
        options.how in CALIBRATED
    ):
        weighed = options.how == "search" and options.text is not None
        how = ", with errors weighted by each channel's inputs on a calibration text" if weighed else ""
        yield f"Weights were packed {METHODS[options.how]}{how}."
    yield ""
    yield "| part | packing | tensors | weights | size |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for row in by_part(plan):
        counts = f"{row.tensors:,} | {row.parameters:,} | {files.size(row.nbytes)}"
        yield f"| {row.part} | {packing_name(row.packing)} | {counts} |"


def _quality(result: Outcome | None) -> Iterator[str]:
    yield "## How close it is to its source"
    yield ""
    if result is None:
        yield "It was not compared with its source."
        return
    if result.concerns:
        yield from (f"**Warning.** {concern}" for concern in result.concerns)
        yield result.advice
        yield ""
    yield "| measure | value |"
    yield "| --- | ---: |"
    yield from (f"| {name} | {value} |" for name, value in _measures(result))
    if result.changed:
        yield from ("", "Where its next word is another than the source's:", "")
        yield from (f"- {_literal(each)}" for each in result.changed)
    yield ""
    if result.quality is None:
        yield "No text was compared."
    else:
        yield f"Both models' next-token distributions were compared at {result.quality.positions:,} positions of a text."


def _literal(text: str) -> str:
    """Return a text of the vocabulary as an inline code span of Markdown, which nothing in it ends."""
    plain = "".join(each if each.isprintable() else "·" for each in text)
    return f"`` {plain.replace('``', '·')} ``"


def _measures(result: Outcome) -> Iterator[tuple[str, str]]:
    yield "relative error of the packed weights", with_error(result.relative_error)
    if (found := result.quality) is not None:
        yield "verdict", result.grade or "unknown"
        yield "KL divergence, nats a token", with_error(found.kl, found.kl_se)
        yield "same most likely token", "unknown" if found.top1 is None else f"{100 * found.top1:.1f} %"
        yield "perplexity", with_error(found.perplexity, found.perplexity_se)
        yield "the source's perplexity", with_error(found.reference_perplexity, found.reference_perplexity_se)
        yield "perplexity ÷ the source's", with_error(found.perplexity_ratio, found.perplexity_ratio_se)


def _use(plan: Plan) -> Iterator[str]:
    yield from ("## Run it", "", "```sh", f"tokamac chat {HERE}")
    if loads_in_mlx_lm(str(plan.config.get("model_type"))):
        yield f'mlx_lm.generate --model {HERE} --prompt "Hello"'
    yield "```"


def _again(options: Options, made: Provenance) -> Iterator[str]:
    yield from ("## Reproduce it", "", "```sh", command(options, made.id or "SOURCE"), "```", "")
    yield f"`{RECORD}` lists every tensor, the options, the versions and the hashes of what it was made from."


def _flags(options: Options) -> Iterator[str]:
    valued = {
        "--mode": None if options.mode == "affine" else options.mode,
        "--bits": options.bits,
        "--group-size": options.group_size,
        "--method": options.method,
        "--recipe": options.recipe,
        "--target-bpw": None if options.target_bpw is None else f"{options.target_bpw:g}",
        "--target-kl": None if options.target_kl is None else f"{options.target_kl:g}",
        "--embed-bits": options.embed_bits,
        "--vision-bits": options.vision_bits,
        "--dtype": options.dtype,
    }
    yield from (word for flag, value in valued.items() if value is not None for word in (flag, str(value)))
    plain = {
        ("--dequantize",): options.dequantize,
        ("--no-vision",): options.keep_vision is False,
        ("--calibration",): options.calibration == SHIPPED,
        ("--calibration", NO_TEXT): options.calibration == NO_TEXT,
        ("--calibration", "FILE"): isinstance(options.calibration, Path),
        ("--adapter", "ADAPTER"): options.adapter is not None,
        ("--unchecked",): options.unchecked,
        ("--no-verify",): not options.verify,
    }
    yield from (word for words, given in plain.items() if given for word in words)
