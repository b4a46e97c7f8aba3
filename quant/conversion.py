"""Convert a model to a quantized MLX folder, one tensor in memory at a time.

source folder ─ check ─▶ plan ─▶ for each tensor: read, check, cast, pack, append ─▶ config, tokenizer ─▶ rename
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, overload

import mlx.core as mx

from tokamac.engine.errors import ConversionError
from tokamac.quant.folder import check_space, check_target, whole_folder, write_file
from tokamac.quant.options import Options
from tokamac.quant.plan import Plan, TensorPlan, make_plan
from tokamac.quant.shards import INDEX, Writer
from tokamac.quant.source import Source, locate, open_source


@dataclass(frozen=True, slots=True)
class TensorDone:
    """A tensor is written: ``done`` of ``total`` tensors, and of the source's bytes."""

    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion. Bytes and seconds. quality is measured by a later version: None now.

    peak_memory_bytes: the most that MLX held at once. notes: what a user should know.
    """

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of the public contract."""
        return asdict(self)


Progress = Callable[[TensorDone], None]


@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: str | None = None,
    embed_bits: int | None = None,
    overwrite: bool = False,
    dry_run: Literal[False] = False,
    progress: Progress | None = None,
) -> Conversion: ...
@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: str | None = None,
    embed_bits: int | None = None,
    overwrite: bool = False,
    dry_run: Literal[True],
    progress: Progress | None = None,
) -> Plan: ...
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: str | None = None,
    embed_bits: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion | Plan:
    """Convert ``source`` (a folder or a Hugging Face id) to a quantized MLX folder ``out``, and say what came of it.

    out: None makes a folder here, named after the source and the bits. overwrite: replace a model folder of that name, at the end.
    bits, group_size, dtype, embed_bits: see Options. dry_run: return the Plan and write nothing.
    progress: called after every tensor, on this thread.
    Raises OptionError, ModelError (the source) and ConversionError; the target is then as it was.
    """
    options = Options(bits, group_size, dtype, embed_bits)
    started_s = time.perf_counter()
    folder = locate(source)
    target = Path(out) if out is not None else default_target(source, options)
    if not dry_run:
        check_target(target, folder, overwrite=overwrite)
    opened = open_source(folder)
    plan = make_plan(opened, options)
    if dry_run:
        return plan
    check_space(target, plan.output_bytes)
    with _lean_memory(), whole_folder(target) as partial:
        _write(plan, opened, partial, progress or (lambda _: None))
        peak = mx.get_peak_memory()
    return _report(plan, target, time.perf_counter() - started_s, peak)


def default_target(source: str | Path, options: Options) -> Path:
    """Return a folder in the working directory named after the source: ``Qwen/Qwen3-4B`` → ``Qwen3-4B-4bit``."""
    name = Path(source).resolve().name if Path(source).is_dir() else str(source).rstrip("/").rpartition("/")[2]
    group = "" if options.group_size == 64 else f"-g{options.group_size}"
    return Path(f"{name}-{options.bits}bit{group}")


def _report(plan: Plan, target: Path, seconds: float, peak_memory_bytes: int) -> Conversion:
    return Conversion(
        path=str(target),
        weight_bytes=plan.weight_bytes,
        bits_per_weight=plan.bits_per_weight,
        source_bytes=plan.source_bytes,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        notes=plan.notes,
    )


def _write(plan: Plan, source: Source, folder: Path, progress: Progress) -> None:
    done_bytes, total_bytes = 0, sum(tensor.source_bytes for tensor in plan.tensors)
    with Writer(folder, plan.shards) as writer:
        for done, tensor in enumerate(plan.tensors, start=1):
            # Popped: the source's dictionary must not keep what was read.
            for output, array in zip(tensor.outputs, converted(tensor, source.weights.pop(tensor.name)), strict=True):
                writer.append(output.name, array)
            done_bytes += tensor.source_bytes
            progress(TensorDone(tensor.name, done, len(plan.tensors), done_bytes, total_bytes))
    write_file(folder / INDEX, plan.index_json)
    write_file(folder / "config.json", plan.config_json)
    for file in plan.copies:
        shutil.copyfile(file, folder / file.name)


_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def converted(plan: TensorPlan, weight: mx.array) -> tuple[mx.array, ...]:
    """Return the arrays that a tensor becomes, evaluated: itself, cast; or packed words, scales and biases.

    Raises ConversionError, naming the tensor, where it holds NaN or infinities.
    """
    if mx.issubdtype(weight.dtype, mx.floating):
        _check_finite(plan.name, weight, "Download the model again, or ask its author.")
        if plan.dtype != plan.source_dtype:
            weight = weight.astype(_DTYPES[plan.dtype])
            _check_finite(plan.name, weight, f"It does not fit {plan.dtype}: choose another --dtype.")
    arrays: tuple[mx.array, ...] = (weight,)
    if plan.bits is not None:
        arrays = tuple(mx.quantize(weight, group_size=plan.group_size, bits=plan.bits))
    mx.eval(*arrays)
    return arrays


def _check_finite(name: str, weight: mx.array, hint: str) -> None:
    try:
        finite = bool(mx.all(mx.isfinite(weight)).item())
    except (RuntimeError, ValueError) as error:  # the read itself failed
        raise ConversionError(
            f"{name} can't be read: {error}", "Check the disk, or download the model again."
        ) from error
    if not finite:
        raise ConversionError(f"{name} holds values that are not finite numbers", hint)


@contextmanager
def _lean_memory() -> Iterator[None]:
    """Keep no pool of freed buffers meanwhile: each tensor has another size, so reuse would gain little and cost the peak."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
