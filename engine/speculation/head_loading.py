"""Loads a model's own heads for further tokens, where it has any that can be used; where not, says why."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import units
from ..device import DeviceKind
from ..errors import ModelError, OptionError
from ..events import ModelNote
from ..kv import plan_caches
from ..kv.plan import CachePlan
from ..kv.rewind import most_taken_back
from ..model.extra_heads import ModelEnds, PredictionHead, build_heads, plain_config
from ..model.head import open_door
from ..model.loader import LoadedModel, fill
from ..model.stored_heads import StoredHeads
from ..options import KVSpec
from ..perf.cost import cost_of_model
from ..perf.memory import MemoryLimit
from .head_drafters import LONGEST, LayerDrafter, LayerDrafts, LoadedHeads, MedusaDrafter
from .ledger import SHORT, DraftingCosts

if TYPE_CHECKING:
    from ..model.extra_heads import MedusaHeads

NOT_USED = "its own heads for further tokens ({}) are not used: {}"


def load_heads(
    found: Sequence[StoredHeads],
    model: LoadedModel,
    kv: KVSpec,
    *,
    dtype: str | None,
    device: DeviceKind,
    reading: Callable[[int], float],
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
) -> tuple[tuple[LoadedHeads, ...], tuple[ModelNote, ...]]:
    """Return the heads that can be used, ready to guess, and what the user should know of each. Opens the model's door to them.

    kv: of the model, whose bits their caches take where they can. reading: steps that a pass over so many rows takes. limit: of
    what arrays may take.
    """
    loaded: list[LoadedHeads] = []
    notes = [NOT_USED.format(stored.named, stored.trouble) for stored in found if stored.trouble]
    for stored in found:
        if stored.trouble:
            continue
        try:
            heads = _load(stored, model, kv, dtype, device, reading, limit, progress)
        except (ModelError, OptionError) as error:
            notes.append(NOT_USED.format(stored.named, error.message))
            continue
        loaded.append(heads)
        notes.append(f"its own heads guess ahead: {stored.named}, {units.size(heads.weight_bytes + heads.kv_bytes)}")
    if loaded:
        open_door(model.module)
    return tuple(loaded), tuple(ModelNote(note, "heads") for note in notes)


def _load(  # noqa: PLR0917
    stored: StoredHeads,
    model: LoadedModel,
    kv: KVSpec,
    dtype: str | None,
    device: DeviceKind,
    reading: Callable[[int], float],
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
) -> LoadedHeads:
    ends = ModelEnds(model.module, model.config)
    module: Any = build_heads(stored, model.config, ends)
    plan = None if stored.kind == "medusa" else _plan(module, plain_config(model.config), kv)
    fill(module, model.folder, dtype=dtype, device=device, progress=progress)
    if plan is None:
        return _medusa(stored, module)
    cost = cost_of_model(module, plain_config(model.config))

    layer = LayerDrafts(PredictionHead(module, ends), plan, fits=limit.fits)
    if device != "cpu":
        _warm_up(layer)
    costs = DraftingCosts(reading)
    return LoadedHeads(
        stored.named,
        cost.weight_bytes,
        plan.bytes_at(LONGEST),
        (cost.weight_bytes_per_token or cost.weight_bytes) + ends.head_bytes,
        costs,
        partial(LayerDrafter, layer, costs),
        layer.forget,
    )


def _medusa(stored: StoredHeads, heads: "MedusaHeads") -> LoadedHeads:
    held = sum(each.nbytes for each in _arrays(heads))
    costs = DraftingCosts(lambda _: 1.0)
    return LoadedHeads(stored.named, held, 0, held // stored.count, costs, partial(MedusaDrafter, heads, costs))


def _arrays(module: Any) -> list[mx.array]:
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(module.parameters())]


def _plan(module: Any, config: dict[str, Any], kv: KVSpec) -> CachePlan:
    """Return the plan of a layer's caches, with the model's bits where it can have them. Raises OptionError."""
    try:
        plan = plan_caches(module, config, KVSpec(kv.key_bits, kv.value_bits, kv.group_size))
    except OptionError:
        plan = plan_caches(module, config, KVSpec())
    if most_taken_back(plan.make()) < SHORT[-1]:
        raise OptionError("its caches can't take back what was guessed", "Use it without its heads.")
    return plan


def _warm_up(layer: LayerDrafts) -> None:
    caches = layer.plan.make()
    for rows in (8, 2, 1):
        hidden = layer.head(mx.zeros((1, rows), mx.uint32), None, caches)
        mx.eval(layer.head.logits(hidden))
    mx.clear_cache()
