"""Write a plan: tensor by tensor, each read, checked, cast, packed, appended to its shard, noted in the journal and let go."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from tokamac.engine.errors import ConversionError

from .methods import Quantizer
from .modules import AGAIN, check_finite, not_finite
from .plan import HeadsPlan, Plan, TensorPlan
from .report import WeightError
from .resume import TensorEntry, WorkDir
from .search import squared_error
from .shards import FLOATS, INDEX, ShardWriter
from .source import HeadSource, Packed, Source


@dataclass(frozen=True, slots=True)
class TensorDone:
    """A tensor is written: ``done`` of ``total`` tensors, and of the source's bytes."""

    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """What a tensor becomes: itself, cast, or packed words, scales and biases, evaluated.

    error: where it was packed now, and can be compared with the source; None where it was not, or is taken over as it was.
    """

    arrays: tuple[mx.array, ...]
    error: WeightError | None


def write(
    plan: Plan, source: Source, quantizer: Quantizer, work: WorkDir, progress: Callable[[TensorDone], None]
) -> dict[str, WeightError]:
    """Write the model into ``work``, behind what an earlier run wrote there; return the errors of what was packed, by tensor.

    Entries of ``source`` are popped as they are written, or found written. progress: called after every tensor, and first for the
    last one that was there. Raises ConversionError, naming the tensor, where one can't be read or holds NaN or infinities; OSError.
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
    for each, heads in zip(plan.heads, source.heads, strict=True):
        _write_heads(each, heads, quantizer, work.folder)
    (work.folder / INDEX).write_bytes(plan.index_json)
    (work.folder / "config.json").write_bytes(plan.config_json)
    for file in plan.copies:
        shutil.copyfile(file, work.folder / file.name)
    return {entry.tensor: entry.error for entry in work.entries if entry.error is not None}


def _as_planned(plan: Plan, work: WorkDir) -> int:
    """Return how many of the tensors that are there, from the first one on, are what the plan would write."""
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


def _write_heads(plan: HeadsPlan, heads: HeadSource, quantizer: Quantizer, folder: Path) -> None:
    """Write heads for further tokens, from the beginning: they are small beside a model."""
    (folder / plan.shard.name).unlink(missing_ok=True)
    with ShardWriter(folder, [plan.shard]) as writer:
        for tensor in plan.tensors:
            for output, array in zip(tensor.outputs, converted(tensor, heads.source, quantizer).arrays, strict=True):
                writer.append(output.name, array)
            mx.clear_cache()
        writer.mark()


def _pop(tensor: TensorPlan, source: Source) -> tuple[mx.array, Packed | None]:
    path, _, leaf = tensor.name.rpartition(".")
    return source.weights.pop(tensor.name), source.packed.pop(path, None) if leaf == "weight" else None


def converted(plan: TensorPlan, source: Source, quantizer: Quantizer) -> PackedTensor:
    """Return what a tensor becomes. Its entries in ``source`` are popped: they would keep what was read.

    Raises ConversionError, naming the tensor, where it can't be read, or holds NaN or infinities, packed or not.
    """
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
    """Raise ConversionError where a tensor, as the source has it or as it was cast, holds what is no finite number."""
    _check(plan.name, given)
    if cast is not given:
        _check(plan.name, cast, f"It does not fit {plan.dtype}: choose another --dtype.")


def _check(name: str, array: mx.array, hint: str = AGAIN) -> None:
    """Evaluate an array. Raises ConversionError where it can't be read, or holds what is no finite number."""
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
