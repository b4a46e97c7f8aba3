"""The arrays, caches and peak of a model on one device, and whether they fit, before any weight is read.

A model is weighed from its config or the headers of its files: mlx-lm's class is built as a skeleton (model/skeleton.py), and the
plan of caches made over it is the one that a loaded model gets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import units
from ..chunking import Chunking, prompt_peak
from ..device import DeviceKind
from ..errors import MemoryLimitError, ModelError
from ..kv.sizes import STEP
from ..model.config import read_config
from ..model.skeleton import skeleton_model
from ..options import KVSpec
from . import memory
from .config_cost import (
    Packing,
    cost_of_config,
    cost_of_skeleton,
    names_unknown_layers,
    pack,
    value_bytes_of,
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
from .mitigation import LEAST_CHUNK, OFFERS, override, refusal
from .model_work import work_of
from .peak_memory import ModelShape, Order, predict_peak, shape_of
from .workload import Workload

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, Keep, Kind, LayerPlan
    from ..model.adapters import Adapter


MODELS_KEPT = 12
"""Footprints that are remembered: one model in all its packings, asked for again with each other context, cache or chip."""

ORDERS: Mapping[Form, Order] = {"float32": "at once", "stored": "ahead"}
"""In which order arrays are computed (peak_shape.Order), by the form of the weights."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model as one device holds it. stored: in files; held: in memory, in ``form``. module: mlx-lm's, a skeleton."""

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
        """Return the plan of its caches and its workload with them. Raises OptionError for a flag that they can't take."""
        if kv not in self._planned:
            plan = self.plan(kv)
            self._planned[kv] = plan, work_of(self.module, self.config, self.held, plan)
        return self._planned[kv]

    def plan(self, kv: KVSpec) -> "CachePlan":
        """Return the plan of its caches. Raises OptionError for a flag that they can't take."""
        from ..kv import plan_caches

        return plan_caches(self.module, self.config, kv)

    def shape(self, plan: "CachePlan", device: DeviceKind, chip: Chip | None = None) -> ModelShape:
        """Return what its peak of memory depends on. chip: None is one without neural accelerators."""
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
    """Return the model of a normalised config on a device, or the reason why it can't be weighed.

    packing: instead of the config's own. folder: has the model's files, whose headers say what is stored, unless it is repacked.
    adapter: added to it; raises ModelUnsupportedError where it does not fit.
    """
    files = folder if packing is None else None
    if files is not None or adapter is not None:  # files come and go
        return _weigh(config, device, packing, files, adapter)
    return _weigh_again(_ConfigKey(repr(config), config), device, packing)


@dataclass(frozen=True, slots=True)
class _ConfigKey:
    """A config, hashed by its text."""

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
        module = module_of(config, packing=packing)
    except ModelError as error:
        return error.message
    added = _add(adapter, module, config)
    try:
        stored = _cost(module, config, "stored", files, added)
        form = form_on(device)
        if form == "stored":
            return Footprint(config, stored, stored, form, value_bytes, module)
        held = _cost(module, config, form, files, added)
        module = module_of(config, packing=packing, form=form)
        _add(adapter, module, config)
    except ModelError as error:
        return error.message
    return Footprint(config, stored, held, form, 4, module)


def form_on(device: DeviceKind) -> Form:
    """Return how the engine holds weights there."""
    return "float32" if device == "cpu" else "stored"


def module_of(config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored") -> Any:
    """Return the skeleton of mlx-lm's module with its weights in this form. Raises ModelUnsupportedError and ModelDamagedError."""
    stored_bytes = 2 if packing else value_bytes_of(config)
    model = skeleton_model(config, stored_bytes if form == "stored" else 4)
    pack(model, config, packing)
    if form == "float32" and stored_bytes == 2:
        _keep_scales(model)
    return model


def _keep_scales(model: Any) -> None:
    """Give the packed matrices of a skeleton in float32 their scales and biases as they are stored (engine/model/cpu/packed.py)."""
    import mlx.core as mx
    from mlx_lm.models.mla import QuantizedMultiLinear

    for _, leaf in leaf_modules(model):
        heads = isinstance(leaf, QuantizedMultiLinear)  # MLA's: MLX multiplies them
        for name in ("scales", "biases"):
            if name in leaf and not heads and mx.issubdtype(leaf[name].dtype, mx.floating):
                leaf[name] = mx.broadcast_to(mx.zeros((), mx.bfloat16), leaf[name].shape)


def work_of_config(
    config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored", kv: KVSpec | None = None
) -> Workload | str:
    """Return the workload of a model that need not be on disk, or the reason why it is unknown.

    packing: instead of the config's own. Raises OptionError for a KV flag that the model's caches can't take.
    """
    from ..kv import plan_caches

    cost = cost_of_config(config, packing=packing, form=form)
    if isinstance(cost, str):
        return cost
    try:
        model = module_of(config, packing=packing, form=form)
    except ModelError as error:
        return error.message
    return work_of(model, config, cost, plan_caches(model, config, kv or KVSpec()))


def _add(adapter: "Adapter | None", module: Any, config: Mapping[str, Any]) -> list[Tensor]:
    """Put an adapter into a skeleton, and return its tensors."""
    if adapter is None:
        return []
    from ..model.adapters import attach, changes_of

    attach(module, changes_of(adapter, module, config), lazy=True)
    return [tensor for tensor in tensors_of(module) if tensor.name.endswith(ADDED)]


def _cost(module: Any, config: Mapping[str, Any], form: Form, folder: Path | None, added: list[Tensor]) -> Cost:
    if folder is None:
        return cost_of_skeleton(module, config, form=form)
    return cost_of_folder(folder, config, form=form, added=added)


SMALL_BITS = 4
"""What a model that does not fit is offered to be packed to."""


def check_fits(
    folder: Path, kv: KVSpec, device: DeviceKind, asked: int | None = None, *, more: int = 0
) -> tuple[str, ...]:
    """Raise MemoryLimitError where not even the weights and a few tokens fit, before any weight is read.

    A model that can't be weighed passes: loading says what is wrong with it. Raises OptionError for KV flags that it can't take.
    asked: the limit, where the user set one. more: bytes of weights that are in none of its files.
    Returns what the user should know of what loading costs other programs.
    """
    budget = memory.array_budget() if asked is None else asked
    if budget is None:
        return ()
    weighed = weigh(read_config(folder), device, folder=folder)
    if isinstance(weighed, str):
        return ()
    shape = weighed.shape(weighed.plan(kv), device, detect())
    shape = replace(shape, weights=shape.weights + more)
    least = predict_peak(shape, held=0, new=LEAST_CHUNK, chunk=LEAST_CHUNK)
    if least.total > budget:
        refused = refusal(f"this model, with {LEAST_CHUNK} tokens,", least, budget, [])
        raise _with_smaller(refused, weighed.stored, budget, override(least.total, memory.device_total()))
    left = memory.available()
    given = memory.taken_from_others(least.total, None if left is None else left - memory.held())
    return (f"to make room for this model, {memory.giving_way(given)}",) if given else ()


def context_notes(
    shape: ModelShape, capacity: int | None, *, chunking: Chunking, asked: int | None = None
) -> tuple[str, ...]:
    """Return what the user should know of a context that can't be filled here; nothing where all of it fits, or that is unknown."""
    shape = replace(shape, force_fused=True)  # as a prompt that is short of memory asks for it
    budget = memory.array_budget() if asked is None else asked
    if capacity is None or budget is None or _context_peak(shape, capacity, chunking) <= budget:
        return ()
    fits = _fitting(shape, capacity, chunking, budget)
    note = f"of the context of {capacity:,} tokens, about {fits:,} fit into the {units.size(budget)} of memory that may be used"
    for bits in OFFERS:
        smaller = shape.packed(*bits)
        if smaller != shape and (more := _fitting(smaller, capacity, chunking, budget)) > fits:
            return (f"{note}; with --kv-bits {bits[0]},{bits[1]} about {more:,}",)
    return (note,)


def planned_bytes(shape: ModelShape, capacity: int | None, *, chunking: Chunking) -> int:
    """Return the peak with the whole context in use; with one chunk where its length is unknown."""
    return _context_peak(shape, capacity or chunking.at(0), chunking)


def order_of(device: DeviceKind, dtype: str | None) -> Order:
    """Return when arrays are computed."""
    return "at once" if device == "cpu" and dtype in (None, "float32") else "ahead"


def value_bytes(config: Mapping[str, Any], device: DeviceKind, dtype: str | None) -> int:
    """Return the bytes of an activation: of the type asked for, else of float32 on a CPU and of the checkpoint's on a GPU."""
    if dtype is not None:
        return 4 if dtype == "float32" else 2
    return 4 if device == "cpu" else value_bytes_of(config)


def _context_peak(shape: ModelShape, tokens: int, chunking: Chunking) -> int:
    return prompt_peak(shape, chunking, held=0, new=max(0, tokens - 1), reply=1).total


def _fitting(shape: ModelShape, capacity: int, chunking: Chunking, budget: int) -> int:
    """Return the most tokens that fit, in whole steps of growth."""
    low, high = 0, capacity // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _context_peak(shape, middle * STEP, chunking) <= budget else (low, middle - 1)
    return low * STEP


def _with_smaller(error: MemoryLimitError, stored: Cost, budget: int, beyond: str) -> MemoryLimitError:
    """Return the refusal with what would help: fewer bits, where that would fit; then how to go beyond the limit."""
    packed = round(stored.parameters * bits_per_weight(SMALL_BITS, 64) / 8)
    if packed < min(stored.weight_bytes, budget):
        hint = f"At {SMALL_BITS} bits its weights would take about {units.size(packed)}: tokamac convert --bits {SMALL_BITS}."
    else:
        hint = "Take a smaller model, or close other programs."
    return MemoryLimitError(error.message, hint + beyond)


@dataclass(frozen=True, slots=True)
class KVRow:
    """Layers whose caches are alike. Bytes are of all of them together; None is unknown.

    kind: full (grows), window, state (of a fixed size), latent, compressed (an entry for several tokens, so that
    ``bytes_per_token`` is a mean), own (another cache of the model's). key_bits, value_bits: 16 is the
    model's own type; None for what is no keys and values. window, keep: None where it grows. free: whether flags apply to them.
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
    """The caches of a model at a context. notes: what the user should know. Bytes are None if those of any layer are unknown."""

    rows: tuple[KVRow, ...]
    notes: tuple[str, ...]
    bytes_per_token: int | None
    bytes_at_context: int | None


def runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers: (0, 1, 2, 5) → [(0, 2), (5, 5)]."""
    found = []
    for _, group in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        found.append((members[0], members[-1]))
    return found


def table_of_plan(plan: "CachePlan", context: int) -> KVTable:
    """Return a plan as a table, at ``context`` tokens."""
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
    """Say what a window holds beside it, where the context fills it."""
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
