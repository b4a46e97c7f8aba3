"""Convert a model to a quantized MLX folder, one tensor in memory at a time.

source folder ─ check ─▶ prepare: choices, plan ─▶ write: tensor by tensor ─▶ compare with the source ─▶ card, record ─▶ rename

What a conversion finds out before it writes: inputs of layers, how much each tensor matters, what a calibrated method packs.

Each stage's result is kept in the workplace, so that a run that goes on does not measure again, and goes on with the same values.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import mlx.core as mx

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.hub.cache import nearest
from tokamac.engine.model.config import context_length
from tokamac.engine.model.safetensors import find_shards
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.memory import check_address_space, device_total
from tokamac.engine.text.tokenizer import load_tokenizer
from tokamac.quant import calibration
from tokamac.quant.calibration import text
from tokamac.quant.card import card
from tokamac.quant.choices import Choices, choose
from tokamac.quant.evaluation import sample, verify
from tokamac.quant.importance import moments
from tokamac.quant.methods.method import Quantizer, Round, Search
from tokamac.quant.options import BITS, Method, Options, Shipped
from tokamac.quant.plan import CALIBRATED, SEQUENCES, Plan, make_plan
from tokamac.quant.provenance import CARD, provenance, source_id
from tokamac.quant.report import (
    RECORD,
    Outcome,
    StageDone,
    WeightError,
    read_recorded,
    read_sizes,
    record,
    relative_error,
)
from tokamac.quant.resume import (
    WorkDir,
    check_space,
    check_target,
    conversion_key,
    is_installed,
    partial_folder,
    remove_partial,
    workplace,
    writing_to,
)
from tokamac.quant.source import Source, locate, open_adapter, open_source
from tokamac.quant.streaming import Streamed, streamable_folder, streamable_source
from tokamac.quant.writer import TensorDone, write

if TYPE_CHECKING:
    import numpy as np


Tell = Callable[[StageDone], None]

MOMENTS, CHOICES = "moments.safetensors", "choices.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that writing needs. source: what a calibrated method packed is packed in it."""

    source: Source
    quantizer: Quantizer
    plan: Plan


def check_method(source: Source, options: Options) -> None:
    """Raise OptionError where the method can't do what ``options`` ask for with this model, or has no text to look at."""
    if isinstance(options.calibration, Path):
        calibration.text(options.calibration)
    if options.how in CALIBRATED:
        CALIBRATED[options.how].check(source.config, source.module, options)


def foreseen(source: Source, options: Options) -> Plan:
    """Return the plan as far as it is known before anything is measured.

    A budget's choices are not: the plan is then that of the most bits for all that keep to it. Raises OptionError.
    """
    if options.target_bpw is None:
        return make_plan(source, options, choose(source, options))
    for bits in sorted(BITS, reverse=True):
        alike = replace(options, target_bpw=None, bits=bits)
        plan = make_plan(source, options, choose(source, alike))
        if plan.bits_per_weight <= options.target_bpw:
            told = f"which tensors get more than {bits} bits is measured when it runs; the whole has {options.target_bpw:g} at most"
            return replace(plan, notes=(*plan.notes, told))
    told = "all at 2 bits is still too large: whether larger groups bring it down far enough is found out when it runs"
    return replace(plan, notes=(*plan.notes, told))


def prepare(source: Source, options: Options, place: WorkDir, tell: Tell) -> Prepared:
    """Return what is to be written, and how; ``source`` is used up. Raises OptionError, ModelError and ConversionError.

    The plan's notes go into the finished folder, so none tells of this run alone.
    """
    quantizer = _quantizer(source, options, place, tell)
    chosen, notes = _choices(source, options, quantizer, place, tell)
    if options.how in CALIBRATED:
        method = CALIBRATED[options.how]
        packed = method.pack(source, options, chosen, sequences(source, options, method.SEQUENCES), tell)
        source.weights.clear()  # arrays that both hold would stay in memory once they are read
        source = packed
    plan = make_plan(source, options, chosen)
    return Prepared(source, quantizer, replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes)))))


def sequences(source: Source, options: Options, count: int = SEQUENCES) -> list[list[int]]:
    """Return token sequences of the calibration text, all equally long. Raises OptionError, and ModelError without a tokenizer."""
    text = calibration.text(options.calibration if isinstance(options.calibration, Path) else None)
    tokenizer = load_tokenizer(source.folder, source.config, source.folder.name)
    length = min(calibration.LENGTH, context_length(source.config) or calibration.LENGTH)
    return calibration.sequences(tokenizer, text, count, length)


def _quantizer(source: Source, options: Options, place: WorkDir, tell: Tell) -> Quantizer:
    if options.how == "round":
        return Round()
    weighed = options.how == "search" and options.calibration is not None
    return Search(_moments(source, options, place, tell) if weighed else {})


def _moments(source: Source, options: Options, place: WorkDir, tell: Tell) -> "dict[str, np.ndarray]":
    from safetensors.numpy import load, save

    kept = place.kept(MOMENTS)
    if kept is None:
        model = Streamed(
            streamable_source(source), progress=lambda done, total: tell(StageDone("calibrating", done, total))
        )
        kept = place.keep(MOMENTS, save(moments(model, sequences(source, options))))
    found: dict[str, np.ndarray] = load(kept.read_bytes())
    return found


def _choices(
    source: Source, options: Options, quantizer: Quantizer, place: WorkDir, tell: Tell
) -> tuple[Choices, tuple[str, ...]]:
    if options.target_bpw is None:
        return choose(source, options), ()
    kept = place.kept(CHOICES)
    if kept is None:
        kept = place.keep(CHOICES, _spent(source, options, quantizer, tell))
    found = json.loads(kept.read_bytes())
    chosen = {path: None if packing is None else Packing(**packing) for path, packing in found["chosen"].items()}
    return chosen, tuple(found["notes"])


def _spent(source: Source, options: Options, quantizer: Quantizer, tell: Tell) -> bytes:
    from tokamac.quant.mixed_precision import plan_budget

    try:
        ids = sequences(source, options, 1)[0]
    except ModelError:  # no tokenizer that can be read: the budget is planned without a text, and says so
        ids = None
    chosen, notes = plan_budget(source, options, quantizer, ids, tell)
    plain = {path: None if packing is None else asdict(packing) for path, packing in chosen.items()}
    return json.dumps({"chosen": plain, "notes": notes}).encode()


__all__ = ["Conversion", "ConversionRequest", "TensorDone", "convert", "default_target"]


FINISHED = "this conversion was finished before, and its folder is in its place: nothing was to be done"


class ConversionRequest(TypedDict, total=False):
    """The options of a conversion, each as Options says."""

    bits: int | None
    group_size: int | None
    mode: str
    method: Method | None
    recipe: str | None
    target_bpw: float | None
    calibration: Path | Shipped | None
    dtype: str | None
    embed_bits: int | None
    dequantize: bool
    verify: bool
    adapter: str | Path | None
    unchecked: bool


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion. Bytes and seconds.

    path: the folder. peak_memory_bytes: the most that MLX held at once, beside what it held before. quality: how close it is to its
    source; None where that was not wanted.
    notes: what a user should know.
    """

    path: Path
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: Outcome | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of the public contract."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["path"] = str(self.path)
        return {**plain, "quality": None if self.quality is None else self.quality.to_json(), "notes": list(self.notes)}


Progress = Callable[[TensorDone | StageDone], None]


@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: Literal[False] = False,
    progress: Progress | None = None,
    **asked: Unpack[ConversionRequest],
) -> Conversion: ...
@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: Literal[True],
    progress: Progress | None = None,
    **asked: Unpack[ConversionRequest],
) -> Plan: ...
@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool,
    progress: Progress | None = None,
    **asked: Unpack[ConversionRequest],
) -> Conversion | Plan: ...
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **asked: Unpack[ConversionRequest],
) -> Conversion | Plan:
    """Convert ``source`` (a folder or a Hugging Face id) to a quantized MLX folder ``out``, and say what came of it.

    out: None makes a folder here, named after the source and the bits. overwrite: replace a model folder of that name, at the end.
    dry_run: return the Plan and write nothing. progress: called after every tensor, on this thread. asked: see Options.

    MLX is used on this thread, not on an engine's. Meanwhile MLX keeps few freed buffers for reuse in the whole process, on a CPU
    none, so replies of an engine beside it are slower; its limit is put back at the end. Its count of the peak begins anew, and
    what an engine computes at the same time counts in both peaks. Start the process with MLX_ENABLE_TF32=0, as
    ``tokamac convert`` does: else a GPU that has TF32 rounds the float32 products that sensitivities and comparisons are made of,
    and the record says so.
    Raises OptionError, ModelError (the source) and ConversionError; the target is then as it was.
    """
    try:
        return _convert(source, out, _options(asked), overwrite=overwrite, dry_run=dry_run, tell=_guarded(progress))
    except _ListenerError as error:
        raise error.failure from None


class _ListenerError(Exception):
    """What whoever listens to the progress raised: no trouble with the folder that is written, though it may look like that."""

    def __init__(self, failure: OSError) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _guarded(progress: Progress | None) -> Progress:
    def tell(step: TensorDone | StageDone) -> None:
        try:
            if progress is not None:
                progress(step)
        except OSError as error:
            raise _ListenerError(error) from error

    return tell


def _convert(
    source: str | Path, out: str | Path | None, options: Options, *, overwrite: bool, dry_run: bool, tell: Progress
) -> Conversion | Plan:
    check_address_space()
    started_s = time.perf_counter()
    _check_paths(source, out)
    folder = locate(source)
    target = Path(out) if out is not None else default_target(source, options)
    if not dry_run:
        if (done := _installed(target, folder, options, overwrite=overwrite)) is not None:
            return replace(done, seconds=time.perf_counter() - started_s)
        check_target(target, folder, overwrite=overwrite)
    adapter = None if options.adapter is None else open_adapter(options.adapter)
    opened = open_source(folder, adapter=adapter, unchecked=options.unchecked)
    check_method(opened, options)
    plan = foreseen(opened, options)
    if dry_run:
        return plan
    check_space(target, plan.needed_bytes)
    with _bounded_memory() as peak, workplace(target, conversion_key(folder, options, opened.adapter)) as place:
        ready = prepare(opened, options, place, tell)
        errors = write(ready.plan, ready.source, ready.quantizer, place, tell)
        outcome = _compared(opened, ready.plan, errors, place.folder, tell) if options.verify else None
        made = provenance(folder, options, opened.adapter)
        (place.folder / RECORD).write_bytes(record(ready.plan, errors, outcome, made))
        (place.folder / CARD).write_bytes(card(ready.plan, outcome, made))
        held_bytes = peak()
    report = _report(ready.plan, target, time.perf_counter() - started_s, held_bytes, outcome)
    return replace(report, notes=(*report.notes, *place.notes))


def _options(asked: Mapping[str, Any]) -> Options:
    """Return the options of a conversion. Raises OptionError for one that there is not, and names what was probably meant."""
    known = {*(each.name for each in fields(Options)), "overwrite", "dry_run", "progress"}
    for name in asked:
        if name not in known:
            near = nearest(name, known)
            hint = f"Did you mean {near}?" if near else f"Use one of {', '.join(sorted(known))}."
            raise OptionError(f"convert has no option {name!r:.60}", hint)
    return Options(**asked)


def _installed(target: Path, folder: Path, options: Options, *, overwrite: bool) -> Conversion | None:
    """Return what this very conversion came to, where it stands at ``target`` already; None where it is to be done.

    So the same command, repeated after a crash that came once the folder was in its place, is done instead of refused. To replace
    a finished folder is work that was asked for, unless something is left of the run that made it.
    """
    try:
        if overwrite and not partial_folder(target).exists():
            return None
        if not target.is_dir() or not is_installed(target, conversion_key(folder, options)):
            return None
        find_shards(target)
        sizes = read_sizes(target)
    except (OSError, ModelError):  # what stands there is not whole
        return None
    if sizes is None:
        return None
    with writing_to(target):
        remove_partial(target)
    found = read_recorded(target)
    quality = found if isinstance(found, Outcome) and options.verify else None
    return Conversion(target, *sizes, 0.0, 0, quality, (FINISHED,))


def _check_paths(source: object, out: object) -> None:
    """Raise OptionError for what names no folder, before anything is looked for."""
    for what, path in (("source", source), *((("target", out),) if out is not None else ())):
        if not isinstance(path, str | Path):
            raise OptionError(f"the {what} is a {type(path).__name__}", "Give a folder, as a text or a Path.")
        if "\0" in str(path):
            raise OptionError(f"the {what} {str(path)!r:.60} holds a NUL character", "No path can: check the name.")


def _compared(source: Source, plan: Plan, errors: Mapping[str, WeightError], folder: Path, tell: Progress) -> Outcome:
    """Return how close the model that was written to ``folder`` is to its source, on a text that ships."""
    # What awq packs, it has scaled before: none of it can be compared, and the rest alone would say little.
    known = errors.values() if plan.options.how != "awq" else ()
    outcome = Outcome(plan.bits_per_weight, relative_error(known))
    found = sample(source.folder, source.config, source.folder.name, text(None))
    if found.unable is not None:
        return replace(outcome, unable=found.unable)

    def shown(first: int) -> Callable[[int, int], None]:
        return lambda done, total: tell(StageDone("verifying", first * total + done, 2 * total))

    try:
        sides = (streamable_source(source), streamable_folder(folder, unchecked=source.unchecked))
        reference, other = (Streamed(side, progress=shown(number)) for number, side in enumerate(sides))
        compared = verify(reference, other, found.ids)
    except (ModelError, OptionError) as error:  # what was written stays: it may be as good as its figures are unknown
        return replace(outcome, unable=error.message)
    return replace(outcome, quality=compared.quality, layers=compared.layers)


def default_target(source: str | Path, options: Options) -> Path:
    """Return a folder in the working directory named after the source: ``Qwen/Qwen3-4B`` → ``Qwen3-4B-4bit``."""
    known = source_id(Path(source)) if Path(source).is_dir() else str(source)
    name = Path(source).resolve().name if known is None else known.rstrip("/").rpartition("/")[2]
    return Path(f"{name}-{_suffix(options)}")


def _suffix(options: Options) -> str:
    if options.dequantize:
        return options.dtype or "dequantized"
    if options.target_bpw is not None:
        return f"{options.target_bpw:g}bpw"
    if options.mode != "affine":
        return options.mode
    group = "" if options.group == 64 else f"-g{options.group}"
    return f"{options.recipe or f'{options.packed_bits}bit'}{group}"


def _report(plan: Plan, target: Path, seconds: float, peak_memory_bytes: int, quality: Outcome | None) -> Conversion:
    return Conversion(
        path=target,
        weight_bytes=plan.weight_bytes,
        bits_per_weight=plan.bits_per_weight,
        source_bytes=plan.source_bytes,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        quality=quality,
        notes=plan.notes,
    )


POOL_BYTES, POOL_PART = 2 << 30, 8
"""Of freed buffers that a GPU keeps for reuse: at most so many, and at most one such part of its memory."""


def pool_bytes(kind: DeviceKind, memory_bytes: int | None) -> int:
    """Return the bytes of freed buffers to keep while converting.

    A CPU keeps none: each tensor has another size, so reuse would gain little and cost the peak. A GPU's driver takes long to make
    a buffer, and one block of a search needs dozens, the same for each block; so it keeps some until a tensor is done.
    """
    if kind == "cpu":
        return 0
    return POOL_BYTES if memory_bytes is None else min(POOL_BYTES, memory_bytes // POOL_PART)


@contextmanager
def _bounded_memory() -> Iterator[Callable[[], int]]:
    """Bound the pool of freed buffers meanwhile.

    Yields what tells the most bytes that MLX held since, beside what it holds now: an engine's weights are none of a conversion's.
    """
    mx.clear_cache()
    mx.reset_peak_memory()
    others = mx.get_active_memory()
    before = mx.set_cache_limit(pool_bytes(device_kind(), device_total()))
    try:
        yield lambda: max(0, mx.get_peak_memory() - others)
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()
