"""Predicts whether a model fits a device, before weights are read, from a skeleton and its cache plan."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import files
from ..chunking import Chunking, prompt_peak
from ..device import DeviceKind
from ..errors import MemoryLimitError, ModelError
from ..kv.costs import STEP
from ..model.config import read_config
from ..options import KVSpec
from . import memory
from .config_cost import (
    Packing,
    cost_of_skeleton,
    names_unknown_layers,
    pack,
    value_bytes_of,
    work_of,
)
from .cost import (
    ADDED,
    Cost,
    Form,
    Tensor,
    bits_per_weight,
    cost_of_folder,
    leaf_modules,
    tensors_of,
)
from .hardware import Chip, attention_device, detect
from .peak_memory import ModelShape, Order, Peak, predict_peak, shape_of
from .roofline import Workload

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, Keep, Kind, LayerPlan
    from ..model.adapters import Adapter

# What to do where a prefill would not fit into memory.

LEAST_CHUNK = 32  # tokens; below, a prefill takes many times as long and hardly less memory

# Bits of keys and values to offer, those that harm least first (BENCHMARKS.md, `tokamac bench --kv-quality`).
OFFERS = ((8, 8), (8, 4), (4, 4))

_WHERE = "In the chat that is /settings, in Python KVSpec."  # where those who gave no flags set the same

WINDOW_STEP = 256

StepName = Literal["pool", "fused", "chunk", "prompt cache"]


@dataclass(frozen=True, slots=True)
class MitigationStep:
    name: StepName
    amount: int


@dataclass(frozen=True, slots=True)
class Mitigation:
    """Steps in order and the resulting peak. missing: bytes still lacking."""

    steps: tuple[MitigationStep, ...]
    chunk: int
    peak: Peak
    missing: int
    fused: bool = False


@dataclass(frozen=True, slots=True)
class FittingFlags:
    flags: str
    total: int


def steps(
    peak_at: Callable[[int], Peak],
    budget: int | None,
    *,
    chunk: int,
    pool: int = 0,
    fused_at: Callable[[int], Peak] | None = None,
) -> Mitigation:
    """Return steps to fit ``budget``. peak_at: by chunk size; fused_at: with fused attention."""
    peak = peak_at(chunk)
    if budget is None or peak.total + pool <= budget:
        return Mitigation((), chunk, peak, 0)
    taken = [MitigationStep("pool", pool)] if pool else []
    saved = 0 if fused_at is None or peak.total <= budget else peak.total - fused_at(chunk).total
    if fused_at is not None and saved > 0:
        taken.append(MitigationStep("fused", saved))
        peak_at = fused_at
    smaller, peak = _smaller(peak_at, budget, chunk, min(LEAST_CHUNK, chunk))
    if smaller != chunk:
        taken.append(MitigationStep("chunk", smaller))
    if 0 < (over := peak.total - budget) <= peak.prompt_cache:
        taken.append(MitigationStep("prompt cache", over))
        peak = replace(peak, prompt_cache=peak.prompt_cache - over)
    return Mitigation(tuple(taken), smaller, peak, max(0, peak.total - budget), fused=saved > 0)


def relieving(
    peak_at: Callable[[int], Peak],
    goal: int,
    *,
    chunk: int,
    pool: int = 0,
    fused_at: Callable[[int], Peak] | None = None,
) -> Mitigation:
    found = steps(peak_at, goal, chunk=chunk, pool=pool, fused_at=fused_at)
    held = found.peak.prompt_cache
    if not found.missing or not held:
        return found
    peak = replace(found.peak, prompt_cache=0)
    taken = (*found.steps, MitigationStep("prompt cache", held))
    return Mitigation(taken, found.chunk, peak, max(0, peak.total - goal), fused=found.fused)


def _smaller(peak_at: Callable[[int], Peak], budget: int, chunk: int, least: int) -> tuple[int, Peak]:
    """Halve the chunk until it fits; else return the one with the least peak."""
    # Not always the smallest: MLX stores few enough scores for all heads together.
    tried = [(chunk, peak_at(chunk))]
    while tried[-1][1].total > budget and chunk > least:
        chunk = max(least, chunk // 2)
        tried.append((chunk, peak_at(chunk)))
    if tried[-1][1].total <= budget:
        return tried[-1]
    return min(tried, key=lambda each: each[1].total)


def offers(
    shape: ModelShape,
    peak_of: Callable[[ModelShape], Peak],
    budget: int,
    *,
    spare: Callable[[int], int],
    longest: int,
) -> Iterator[FittingFlags]:
    """Yield fitting flags: the first bits, and the largest window."""
    for bits in OFFERS:
        smaller = shape.packed(*bits)
        fewer = smaller != shape and _token_bytes(smaller) < _token_bytes(shape)
        if fewer and (total := peak_of(smaller).total) <= budget:
            yield FittingFlags(
                f"--kv-bits {bits[0]},{bits[1]}" if bits[0] != bits[1] else f"--kv-bits {bits[0]}", total
            )
            break
    if not all(layer.ours for layer in shape.layers):
        return  # no window applies to a cache of the model's own
    low, high = 0, (longest - 1) // WINDOW_STEP
    while low < high:  # the peak never falls as the window grows
        middle = (low + high + 1) // 2
        window = middle * WINDOW_STEP
        fits = peak_of(shape.windowed(window, spare(window))).total <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    if low:
        window = low * WINDOW_STEP
        yield FittingFlags(f"--kv-window {window}", peak_of(shape.windowed(window, spare(window))).total)


def refusal(
    what: str, peak: Peak, budget: int, found: list[FittingFlags], *, there_is: int | None = None
) -> MemoryLimitError:
    parts = {
        "weights": peak.weights,
        "KV cache": peak.kv,
        **({"temporaries": peak.working} if peak.working >= peak.image else {"seeing a picture": peak.image}),
        "prompt cache": peak.prompt_cache,
    }
    listed = ", ".join(f"{name} {files.size(part)}" for name, part in parts.items() if part)
    would = " or ".join(f"{offer.flags} ({files.size(offer.total)})" for offer in found)
    hint = (
        f"It would fit with {would}. {_WHERE}"
        if would
        else "Close other programs, shorten it, or take a smaller model."
    )
    needed, most = files.sizes(peak.total, budget)
    return MemoryLimitError(
        f"{what} needs {needed} of memory ({listed}), and {most} may be used", f"{hint}{override(peak.total, there_is)}"
    )


def override(needed: int, there_is: int | None) -> str:
    if there_is is None or needed > there_is:
        return ""
    return f" --memory {math.ceil(needed / 1e6) / 1e3:g} overrides the limit, as memory_gb of /settings does, and in Python memory."


def _token_bytes(shape: ModelShape) -> int:
    return sum(layer.key_bytes + layer.value_token_bytes for layer in shape.layers)


# Footprints that are remembered: one model in all its packings, asked for again with each other context, cache or chip.
MODELS_KEPT = 12

# In which order arrays are computed (peak_shape.Order), by the form of the weights.
ORDERS: Mapping[Form, Order] = {"float32": "at once", "stored": "ahead"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model on a device. stored: in files; held: in memory. module: a skeleton."""

    config: Mapping[str, Any]
    stored: Cost
    held: Cost
    form: Form
    value_bytes: int
    module: Any = field(repr=False, compare=False)
    _planned: "dict[KVSpec, tuple[CachePlan, Workload]]" = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def planned(self, kv: KVSpec) -> "tuple[CachePlan, Workload]":
        """Return cache plan and workload. Raises OptionError."""
        if kv not in self._planned:
            plan = self.plan(kv)
            self._planned[kv] = plan, work_of(self.module, self.config, self.held, plan)
        return self._planned[kv]

    def plan(self, kv: KVSpec) -> "CachePlan":
        """Raises OptionError for unsupported flags."""
        from ..kv.plan import plan_caches

        return plan_caches(self.module, self.config, kv)

    def shape(self, plan: "CachePlan", device: DeviceKind, chip: Chip | None = None) -> ModelShape:
        return shape_of(
            self.config,
            plan,
            weights=self.held.weight_bytes,
            value_bytes=self.value_bytes,
            order=ORDERS[self.form],
            device=attention_device(device, chip),
        )


def weigh(
    config: Mapping[str, Any],
    device: DeviceKind,
    *,
    packing: Packing | None = None,
    folder: Path | None = None,
    adapter: "Adapter | None" = None,
) -> Footprint | str:
    """Weigh a config, or return why not. Raises ModelUnsupportedError for a misfit adapter."""
    files = folder if packing is None else None
    if files is not None or adapter is not None:  # files come and go
        return _weigh(config, device, packing, files, adapter)
    return _weigh_again(_ConfigKey(repr(config), config), device, packing)


@dataclass(frozen=True, slots=True)
class _ConfigKey:
    text: str
    config: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=MODELS_KEPT)
def _weigh_again(key: _ConfigKey, device: DeviceKind, packing: Packing | None) -> Footprint | str:
    return _weigh(key.config, device, packing, None)


def _weigh(
    config: Mapping[str, Any],
    device: DeviceKind,
    packing: Packing | None,
    files: Path | None,
    adapter: "Adapter | None" = None,
) -> Footprint | str:
    if names_unknown_layers(config):
        return "its config names kinds of layers that Tokamac does not know"
    value_bytes = 2 if packing else value_bytes_of(config)
    try:
        form = form_on(device)
        counted = files is not None and adapter is None  # by its files alone
        module = module_of(config, packing=packing, form=form if counted else "stored")
    except ModelError as error:
        return error.message
    added = _add(adapter, module, config)
    try:
        stored = _cost(module, config, "stored", files, added)
        if form == "stored":
            return Footprint(config, stored, stored, form, value_bytes, module)
        held = _cost(module, config, form, files, added)
        if not counted:
            module = module_of(config, packing=packing, form=form)
            _add(adapter, module, config)
    except ModelError as error:
        return error.message
    return Footprint(config, stored, held, form, 4, module)


def form_on(device: DeviceKind) -> Form:
    return "float32" if device == "cpu" else "stored"


def module_of(config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored") -> Any:
    """Return a skeleton in ``form``. Raises ModelUnsupportedError, ModelDamagedError."""
    from ..model.loader import skeleton_model  # it loads MLX

    stored_bytes = 2 if packing else value_bytes_of(config)
    model = skeleton_model(config, stored_bytes if form == "stored" else 4)
    pack(model, config, packing)
    if form == "float32" and stored_bytes == 2:
        _keep_scales(model)
    return model


def _keep_scales(model: Any) -> None:
    """Keep stored types of scales and biases (engine/cpu/layers.py)."""
    import mlx.core as mx
    from mlx_lm.models.mla import QuantizedMultiLinear

    for _, leaf in leaf_modules(model):
        heads = isinstance(leaf, QuantizedMultiLinear)  # MLA's: MLX multiplies them
        for name in ("scales", "biases"):
            if name in leaf and not heads and mx.issubdtype(leaf[name].dtype, mx.floating):
                leaf[name] = mx.broadcast_to(mx.zeros((), mx.bfloat16), leaf[name].shape)


def _add(adapter: "Adapter | None", module: Any, config: Mapping[str, Any]) -> list[Tensor]:
    if adapter is None:
        return []
    from ..model.adapters import attach, changes_of

    attach(module, changes_of(adapter, module, config), lazy=True)
    return [tensor for tensor in tensors_of(module) if tensor.name.endswith(ADDED)]


def _cost(module: Any, config: Mapping[str, Any], form: Form, folder: Path | None, added: list[Tensor]) -> Cost:
    if folder is None:
        return cost_of_skeleton(module, config, form=form)
    return cost_of_folder(folder, config, form=form, added=added)


SMALL_BITS = 4  # what a model that does not fit is offered to be packed to


def check_fits(
    folder: Path, kv: KVSpec, device: DeviceKind, asked: int | None = None, *, more: int = 0
) -> tuple[str, ...]:
    """Raise MemoryLimitError if weights and a few tokens don't fit; OptionError. Returns user notes."""
    # A model that can't be weighed passes: loading reports the reason.
    limit = memory.allowed(asked)
    if limit is None:
        return ()
    budget = limit.bytes
    weighed = weigh(read_config(folder), device, folder=folder)
    if isinstance(weighed, str):
        return ()
    shape = weighed.shape(weighed.plan(kv), device, detect())
    shape = replace(shape, weights=shape.weights + more)
    least = predict_peak(shape, held=0, new=LEAST_CHUNK, chunk=LEAST_CHUNK)
    if least.total > budget:
        refused = refusal(f"this model, with {LEAST_CHUNK} tokens,", least, budget, [])
        raise _with_smaller(refused, weighed.stored, limit, override(least.total, memory.device_total()))
    left = memory.available()
    given = memory.taken_from_others(least.total, None if left is None else left - memory.held())
    return (f"to make room for this model, {memory.giving_way(given)}",) if given else ()


def context_notes(
    shape: ModelShape, capacity: int | None, *, chunking: Chunking, asked: int | None = None
) -> tuple[str, ...]:
    shape = replace(shape, force_fused=True)  # as a prompt that is short of memory asks for it
    budget = memory.array_budget() if asked is None else asked
    if capacity is None or budget is None or _context_peak(shape, capacity, chunking) <= budget:
        return ()
    fits = _fitting(shape, capacity, chunking, budget)
    note = f"of the context of {capacity:,} tokens, about {fits:,} fit into the {files.size(budget)} of memory that may be used"
    for bits in OFFERS:
        smaller = shape.packed(*bits)
        if smaller != shape and (more := _fitting(smaller, capacity, chunking, budget)) > fits:
            return (f"{note}; with --kv-bits {bits[0]},{bits[1]} about {more:,}",)
    return (note,)


def planned_bytes(shape: ModelShape, capacity: int | None, *, chunking: Chunking) -> int:
    return _context_peak(shape, capacity or chunking.tokens_at(0), chunking)


def order_of(device: DeviceKind, dtype: str | None) -> Order:
    return "at once" if device == "cpu" and dtype in (None, "float32") else "ahead"


def value_bytes(config: Mapping[str, Any], device: DeviceKind, dtype: str | None) -> int:
    if dtype is not None:
        return 4 if dtype == "float32" else 2
    return 4 if device == "cpu" else value_bytes_of(config)


def _context_peak(shape: ModelShape, tokens: int, chunking: Chunking) -> int:
    return prompt_peak(shape, chunking, held=0, new=max(0, tokens - 1), reply=1).total


def _fitting(shape: ModelShape, capacity: int, chunking: Chunking, budget: int) -> int:
    low, high = 0, capacity // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _context_peak(shape, middle * STEP, chunking) <= budget else (low, middle - 1)
    return low * STEP


def _with_smaller(error: MemoryLimitError, stored: Cost, limit: memory.Limit, beyond: str) -> MemoryLimitError:
    packed = round(stored.parameters * bits_per_weight(SMALL_BITS, 64) / 8)
    if packed < min(stored.weight_bytes, limit.bytes):
        hint = f"At {SMALL_BITS} bits its weights would take about {files.size(packed)}: tokamac convert --bits {SMALL_BITS}."
    else:
        hint = f"Take a smaller model, or {memory.REMEDIES.get(limit.source, memory.CLOSE)}."
    return MemoryLimitError(error.message, hint + beyond)


@dataclass(frozen=True, slots=True)
class KVRow:
    """Layers with equal caches, bytes in total.

    kind: full, window, state (fixed size), latent, compressed (mean ``bytes_per_token``), own. key_bits: 16 is the
    model's type. free: flags apply.
    """

    layers: tuple[int, ...]
    kind: "Kind"
    key_bits: int | None
    value_bits: int | None
    window: int | None
    keep: "Keep | None"
    free: bool
    bytes_per_token: int | None
    bytes_at_context: int | None


@dataclass(frozen=True, slots=True)
class KVTable:
    rows: tuple[KVRow, ...]
    notes: tuple[str, ...]
    bytes_per_token: int | None
    bytes_at_context: int | None


def runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers: (0, 1, 2, 5) → [(0, 2), (5, 5)]."""
    found = []
    for _, group in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        found.append((members[0], members[-1]))
    return found


def table_of_plan(plan: "CachePlan", context: int) -> KVTable:
    alike: dict[tuple[Any, ...], list[LayerPlan]] = {}
    for layer in plan.layers:
        alike.setdefault(_signature(layer), []).append(layer)
    rows = tuple(_row(layers, context) for layers in alike.values())
    return KVTable(
        rows,
        (*plan.notes, *_spares(plan, context), *_rotations(plan)),
        _sum(row.bytes_per_token for row in rows),
        _sum(row.bytes_at_context for row in rows),
    )


def _signature(layer: "LayerPlan") -> tuple[Any, ...]:
    return (
        *(layer.kind, layer.key_bits, layer.value_bits, layer.group_size, layer.window, layer.keep),
        *(layer.ours is None, layer.bytes_per_token, layer.fixed_bytes),
    )


def _row(layers: "list[LayerPlan]", context: int) -> KVRow:
    first = layers[0]
    known = first.ours is not None or first.bytes_per_token > 0 or first.fixed_bytes > 0 or first.kind == "state"
    keys = first.kind not in ("state", "compressed", "own")
    return KVRow(
        layers=tuple(layer.index for layer in layers),
        kind=first.kind,
        key_bits=first.key_bits if keys else None,
        value_bits=first.value_bits if keys else None,
        window=first.window,
        keep=first.keep,
        free=first.ours is not None,
        bytes_per_token=sum(layer.bytes_per_token for layer in layers) if known else None,
        bytes_at_context=sum(layer.bytes_at(context) for layer in layers) if known else None,
    )


def _spares(plan: "CachePlan", context: int) -> list[str]:
    held = {(layer.window, layer.limit) for layer in plan.layers if layer.ours is not None}
    return [
        f"a window of {window:,} tokens holds {limit - window:,} more, unseen, so that a conversation can be taken back"
        for window, limit in sorted((window, limit) for window, limit in held if window and limit and window < context)
    ]


def _rotations(plan: "CachePlan") -> list[str]:
    count = sum(layer.rotated for layer in plan.layers)
    note = f"keys of {count} layers are rotated before they are packed, so that few bits do them less harm"
    return [note] if count else []


def _sum(values: Iterable[int | None]) -> int | None:
    known = tuple(values)
    return None if None in known else sum(value or 0 for value in known)
