"""Convert a model to a quantized MLX folder, one tensor in memory at a time."""

# Open the source, plan (a dry run ends here), measure, write tensor by tensor, compare, describe, install.
# Measurements and written tensors stay in a WorkDir beside the target, so that an interrupted run continues.

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import mlx.core as mx

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.hub.names import nearest
from tokamac.engine.model.adapters import Adapter
from tokamac.engine.model.config import context_length
from tokamac.engine.model.safetensors import find_shards
from tokamac.engine.model.weights import VISION_FILE
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.memory import check_address_space, device_total
from tokamac.engine.text.tokenizer import load_tokenizer

from . import streaming
from .evaluation import sample, verify
from .options import BITS, CALIBRATED, NO_TEXT, SHIPPED, Method, NoText, Options, Shipped
from .packing import Choices, Quantizer, Round, Search, choose, worthwhile_embed_bits
from .plan import CALIBRATED_METHODS, Plan, make_plan, searched_sequences
from .report import (
    CARD,
    RECORD,
    Outcome,
    StageDone,
    StageProgress,
    WeightError,
    provenance,
    read_recorded,
    read_sizes,
    record,
    relative_error,
    remedy,
    source_id,
)
from .resume import (
    WorkDir,
    check_space,
    check_target,
    conversion_key,
    is_installed,
    open_work_dir,
    partial_folder,
    remove_partial,
    writing_to,
)
from .source import Source, locate, open_adapter, open_source
from .streaming import Streamed, activation_statistics, streamable_folder, streamable_source
from .writer import TensorDone, card, write

UNWEIGHED = "no text weighs the errors: there is no tokenizer that can read one for this model"

FINISHED = "this conversion is already complete: there was nothing to do"

# The most bytes of freed buffers that a GPU keeps for reuse, and the part of its memory that they may take.
POOL_BYTES, POOL_PART = 2 << 30, 8

Progress = Callable[[TensorDone | StageDone], None]


class ConversionRequest(TypedDict, total=False):
    bits: int | None
    group_size: int | None
    mode: str
    method: Method | None
    recipe: str | None
    target_bpw: float | None
    target_kl: float | None
    calibration: Path | Shipped | NoText | None
    dtype: str | None
    embed_bits: int | None
    dequantize: bool
    verify: bool
    adapter: str | Path | None
    unchecked: bool
    keep_vision: bool | None
    vision_bits: int | None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion. Bytes and seconds.

    peak_memory_bytes: MLX's peak above its previous use. quality: against the source; None if not requested.
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


@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: Literal[False] = False,
    progress: Progress | None = None,
    **options: Unpack[ConversionRequest],
) -> Conversion: ...
@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: Literal[True],
    progress: Progress | None = None,
    **options: Unpack[ConversionRequest],
) -> Plan: ...
@overload
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool,
    progress: Progress | None = None,
    **options: Unpack[ConversionRequest],
) -> Conversion | Plan: ...
def convert(
    source: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ConversionRequest],
) -> Conversion | Plan:
    """Convert ``source`` to a quantized MLX folder.

    Runs MLX on this thread, with a small buffer pool; peaks include other engines' use. Set MLX_ENABLE_TF32=0 first, or
    TF32 rounds what is compared.

    Args:
        source: A folder, a GGUF file (its packing is carried over unless bits are given) or a Hugging Face id.
        out: The new folder; None makes one here, named after the source and the bits.
        overwrite: Replace a model folder of that name, at the end.
        dry_run: Return the Plan and write nothing.
        progress: Called after every tensor, on this thread.
        **options: See Options.

    Raises:
        OptionError: For options that don't fit together or don't fit the model.
        ModelError: For a source that can't be read.
        ConversionError: For what can't be converted or written; the target is then as it was.
    """
    try:
        return _convert(source, out, _checked(options), overwrite=overwrite, dry_run=dry_run, tell=_guarded(progress))
    except _ListenerError as error:
        raise error.failure from None


class _ListenerError(Exception):
    """Wraps a progress callback's exception: its OSError must not look like a write failure."""

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
    adapter = None if options.adapter is None else open_adapter(options.adapter)
    if not dry_run:
        if (done := _installed(target, folder, options, adapter, overwrite=overwrite)) is not None:
            return replace(done, seconds=time.perf_counter() - started_s)
        check_target(target, folder, overwrite=overwrite)
    towers = options.keep_vision is not False
    opened = open_source(folder, adapter=adapter, unchecked=options.unchecked, towers=towers)
    asked = options.keep_vision or options.vision_bits is not None
    if asked and not any(each.file == VISION_FILE for each in opened.beside):
        raise OptionError("this model has no part that sees or hears", "Leave out what is asked of it.")
    _check_method(opened, options)
    key = conversion_key(folder, options, adapter)
    options, unread = settled(opened, options)
    opened = replace(opened, notes=(*opened.notes, *unread))
    plan = foreseen(opened, options)
    if dry_run:
        return plan
    check_space(target, plan.needed_bytes)
    with _bounded_memory() as peak, open_work_dir(target, key) as work:
        packed, quantizer, plan = _prepare(opened, options, work, tell)
        errors = write(plan, packed, quantizer, work, tell)
        outcome = _compared(opened, plan, errors, work.folder, tell) if options.verify else None
        made = provenance(folder, options, opened.adapter)
        (work.folder / RECORD).write_bytes(record(plan, errors, outcome, made))
        (work.folder / CARD).write_bytes(card(plan, outcome, made))
        peak_bytes = peak()
    return Conversion(
        path=target,
        weight_bytes=plan.weight_bytes,
        bits_per_weight=plan.bits_per_weight,
        source_bytes=plan.source_bytes,
        seconds=time.perf_counter() - started_s,
        peak_memory_bytes=peak_bytes,
        quality=outcome,
        notes=(*plan.notes, *work.notes),
    )


def _checked(options: Mapping[str, Any]) -> Options:
    """Return the options. Raises OptionError, with a suggestion, for an unknown one."""
    known = {*(each.name for each in fields(Options)), "overwrite", "dry_run", "progress"}
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = f"Did you mean {near}?" if near else f"Use one of {', '.join(sorted(known))}."
            raise OptionError(f"convert has no option {name!r:.60}", hint)
    return Options(**options)


def _check_paths(source: object, out: object) -> None:
    for what, path in (("source", source), *((("target", out),) if out is not None else ())):
        if not isinstance(path, str | Path):
            raise OptionError(f"the {what} is a {type(path).__name__}", "Give a folder, as a text or a Path.")
        if "\0" in str(path):
            raise OptionError(f"the {what} {str(path)!r:.60} holds a NUL character", "No path can: check the name.")


def default_target(source: str | Path, options: Options) -> Path:
    known = source_id(Path(source)) if Path(source).is_dir() else str(source)
    name = Path(source).resolve().name if known is None else known.rstrip("/").rpartition("/")[2]
    name, of_gguf = name.removesuffix(".gguf").replace(":", "-"), ":" in name or name.endswith(".gguf")
    if of_gguf and options.as_stored:
        suffix = "mlx"
    elif options.dequantize:
        suffix = options.dtype or "dequantized"
    elif options.target_bpw is not None:
        suffix = f"{options.target_bpw:g}bpw"
    elif options.target_kl is not None:
        suffix = f"{options.target_kl:g}kl"
    elif options.mode != "affine":
        suffix = options.mode
    else:
        group = "" if options.group == 64 else f"-g{options.group}"
        suffix = f"{options.recipe or f'{options.packed_bits}bit'}{group}"
    return Path(f"{name}-{suffix}")


def _installed(
    target: Path, folder: Path, options: Options, adapter: Adapter | None, *, overwrite: bool
) -> Conversion | None:
    # So the same command, repeated after a crash that came once the folder was in its place, is done instead of refused. To replace
    # a finished folder is work that was asked for, unless something is left of the run that made it.
    try:
        if overwrite and not partial_folder(target).exists():
            return None
        if not target.is_dir() or not is_installed(target, conversion_key(folder, options, adapter)):
            return None
        find_shards(target)
        sizes = read_sizes(target)
    except (OSError, ModelError):  # the folder is not whole
        return None
    if sizes is None:
        return None
    with writing_to(target):
        remove_partial(target)
    found = read_recorded(target)
    quality = found if isinstance(found, Outcome) and options.verify else None
    return Conversion(target, *sizes, 0.0, 0, quality, (FINISHED,))


def _check_method(source: Source, options: Options) -> None:
    if isinstance(options.calibration, Path):
        streaming.calibration_text(options.calibration)
    if options.how in CALIBRATED_METHODS:
        CALIBRATED_METHODS[options.how].check(source.config, source.module, options)


def settled(source: Source, options: Options) -> tuple[Options, tuple[str, ...]]:
    """Fill in what options leave to the model; with notes."""
    planned = options.recipe is not None or options.measures
    notes: tuple[str, ...] = ()
    if source.carried and options.as_stored:  # what is packed anew has 8 bits: no text would show
        return replace(options, calibration=options.calibration or NO_TEXT), notes
    if options.embed_bits is None and not (planned or options.dequantize or options.how == "round"):
        options = replace(options, embed_bits=worthwhile_embed_bits(source, options))
    if options.calibration is None and options.text is not None and options.how not in CALIBRATED:
        found = sample(source.folder, source.config, source.folder.name, streaming.calibration_text(None))
        notes = () if found.unable is None else (UNWEIGHED,)
        options = replace(options, calibration=SHIPPED if found.unable is None else NO_TEXT)
    return options, notes


def foreseen(source: Source, options: Options) -> Plan:
    """Return the plan before any measurement; with a target, the most uniform bits that may be."""
    if not options.measures:
        return make_plan(source, options, choose(source, options))
    for bits in sorted(BITS, reverse=True):
        alike = replace(options, target_bpw=None, target_kl=None, bits=bits)
        plan = make_plan(source, options, choose(source, alike))
        if options.target_bpw is None:
            note = f"the conversion measures which tensors need fewer bits for {options.target_kl:g} nats a token"
            return replace(plan, notes=(*plan.notes, note))
        if plan.bits_per_weight <= options.target_bpw:
            more = f"the conversion measures which tensors get more than {bits} bits"
            return replace(plan, notes=(*plan.notes, f"{more}; the whole model gets {options.target_bpw:g} at most"))
    note = (
        "2 bits for every tensor is still too large: whether larger groups are enough is known once the conversion runs"
    )
    return replace(plan, notes=(*plan.notes, note))


def _prepare(source: Source, options: Options, work: WorkDir, tell: StageProgress) -> tuple[Source, Quantizer, Plan]:
    quantizer = _quantizer(source, options, work, tell)
    notes: tuple[str, ...] = ()
    if not options.measures:
        chosen = choose(source, options)
    else:
        chosen, notes = _budgeted(source, options, quantizer, work, tell)
    if options.how in CALIBRATED_METHODS:
        method = CALIBRATED_METHODS[options.how]
        packed = method.pack(source, options, chosen, _sequences(source, options, method.SEQUENCES), tell)
        source.weights.clear()  # arrays that both hold would stay in memory once they are read
        source = packed
    plan = make_plan(source, options, chosen)
    # The plan's notes go into the finished folder, so none tells of this run alone.
    return source, quantizer, replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))


def _quantizer(source: Source, options: Options, work: WorkDir, tell: StageProgress) -> Quantizer:
    if options.how == "round":
        return Round()
    if options.how != "search" or options.text is None:
        return Search()
    from safetensors.numpy import load, save

    def measured() -> bytes:
        def progress(done: int, total: int) -> None:
            tell(StageDone("calibrating", done, total))

        model = Streamed(streamable_source(source), progress=progress)
        data: bytes = save(activation_statistics(model, _sequences(source, options, searched_sequences(source))))
        return data

    return Search(load(work.stage("moments.safetensors", measured)))


def _budgeted(
    source: Source, options: Options, quantizer: Quantizer, work: WorkDir, tell: StageProgress
) -> tuple[Choices, tuple[str, ...]]:
    from .plan import plan_budget

    def spent() -> bytes:
        try:
            ids = _sequences(source, options, 1)[0]
        except ModelError:  # no tokenizer that can be read: the budget is planned without a text, and says so
            ids = None
        chosen, notes = plan_budget(source, options, quantizer, ids, tell)
        plain = {path: None if packing is None else asdict(packing) for path, packing in chosen.items()}
        return json.dumps({"chosen": plain, "notes": notes}).encode()

    found = json.loads(work.stage("choices.json", spent))
    chosen = {path: None if packing is None else Packing(**packing) for path, packing in found["chosen"].items()}
    return chosen, tuple(found["notes"])


def _sequences(source: Source, options: Options, count: int) -> list[list[int]]:
    text = streaming.calibration_text(options.calibration if isinstance(options.calibration, Path) else None)
    tokenizer = load_tokenizer(source.folder, source.config, source.folder.name)
    length = min(streaming.LENGTH, context_length(source.config) or streaming.LENGTH)
    return streaming.calibration_sequences(tokenizer, text, count, length)


def _compared(
    source: Source, plan: Plan, errors: Mapping[str, WeightError], folder: Path, tell: StageProgress
) -> Outcome:
    # What awq packs, it has scaled before: none of it can be compared, and the rest alone would say little.
    known = errors.values() if plan.options.how != "awq" else ()
    options = plan.options
    better = remedy(options.bits, options.group_size, options.embed_bits)
    outcome = Outcome(plan.bits_per_weight, relative_error(known), remedy=better)
    found = sample(source.folder, source.config, source.folder.name, streaming.calibration_text(None))
    if found.unable is not None:
        return replace(outcome, unable=found.unable)

    def shown(first: int) -> Callable[[int, int], None]:
        return lambda done, total: tell(StageDone("verifying", first * total + done, 2 * total))

    try:
        sides = (streamable_source(source), streamable_folder(folder, unchecked=source.unchecked))
        reference, other = (Streamed(side, progress=shown(number)) for number, side in enumerate(sides))
        compared = verify(reference, other, found.ids, found.tokenizer)
    except (ModelError, OptionError) as error:  # what was written stays: it may be as good as its figures are unknown
        return replace(outcome, unable=error.message)
    return replace(outcome, quality=compared.quality, layers=compared.layers, changed=compared.changed)


def pool_bytes(kind: DeviceKind, memory_bytes: int | None) -> int:
    """Return the bytes of freed buffers to keep."""
    # A CPU keeps none: tensor sizes differ, so reuse gains little. A GPU allocates slowly, and a search block needs
    # dozens of equal buffers, so it keeps some until a tensor is done.
    if kind == "cpu":
        return 0
    return POOL_BYTES if memory_bytes is None else min(POOL_BYTES, memory_bytes // POOL_PART)


@contextmanager
def _bounded_memory() -> Iterator[Callable[[], int]]:
    mx.clear_cache()
    mx.reset_peak_memory()
    others = mx.get_active_memory()
    before = mx.set_cache_limit(pool_bytes(device_kind(), device_total()))
    try:
        yield lambda: max(0, mx.get_peak_memory() - others)
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()
