"""What each layer of a model will keep, before any weight is read: the engine's own plan, made over a model of zeros.

The plan made over a model of zeros (hollow.py) is the one that a loaded model gets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import ModelError
from tokamac.engine.limits.hollow import hollow_model
from tokamac.engine.limits.kv_cost import names_unknown_layers
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan, Keep, LayerPlan
    from tokamac.engine.kv.survey import Kind


@dataclass(frozen=True, slots=True)
class KVRow:
    """Layers whose caches are alike. Bytes are of all of them together; None is unknown.

    kind: full (grows), window, state (of a fixed size), latent, compressed (an entry for so many tokens, which is what
    ``bytes_per_token`` is the mean of), own (another cache of the model's). key_bits, value_bits: 16 is the
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


def kv_table(config: Mapping[str, Any], spec: KVSpec, context: int, *, value_bytes: int) -> KVTable | str:
    """Return what the engine would plan for the model of this normalised config, or the reason why that can't be said.

    value_bytes: of a number in the type that the engine holds the model in. Raises OptionError for a flag that it can't honour.
    """
    if names_unknown_layers(config):
        return "its config names kinds of layers that are not known here"
    try:
        model = hollow_model(config, value_bytes)
    except ModelError as error:
        return error.message
    from tokamac.engine.kv import plan_caches

    return table_of_plan(plan_caches(model, config, spec), context)


def runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers: (0, 1, 2, 5) → [(0, 2), (5, 5)]."""
    found = []
    for _, group in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        found.append((members[0], members[-1]))
    return found


def table_of_plan(plan: "CachePlan", context: int) -> KVTable:
    """Return a plan as a table, at a context of so many tokens."""
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
    return [f"keys of {count} layers are rotated before they are packed, so that few bits do them less harm"] * bool(
        count
    )


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
