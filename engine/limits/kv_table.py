"""What each layer of a model will keep, before any weight is read: the engine's own plan, made over a model of zeros.

mlx-lm's class is built from the config alone. Every parameter is one zero, seen as an array of its shape, so nothing is computed
and no memory is taken, however large the model; the plan is then the one that a loaded model gets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import ModelError
from tokamac.engine.limits.kv_cost import names_unknown_layers
from tokamac.engine.options import KVSpec

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan, Keep, LayerPlan
    from tokamac.engine.kv.survey import Kind


@dataclass(frozen=True, slots=True)
class KVRow:
    """Layers whose caches are alike. Bytes are of all of them together; None is unknown.

    kind: full (grows), window, state (of a fixed size), latent, own (another cache of the model's). key_bits, value_bits: 16 is the
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
        model = _hollow(dict(config), value_bytes)
    except ModelError as error:
        return error.message
    from tokamac.engine.kv import plan_caches

    return _table(plan_caches(model, config, spec), context)


def runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers: (0, 1, 2, 5) → [(0, 2), (5, 5)]."""
    found = []
    for _, group in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        found.append((members[0], members[-1]))
    return found


def _hollow(config: dict[str, Any], value_bytes: int) -> Any:
    """Return mlx-lm's module for the config, all zeros that take no memory. Raises ModelError."""
    import mlx.core as mx
    from mlx.utils import tree_map

    from tokamac.engine.config import check_config, model_classes
    from tokamac.engine.errors import ModelDamagedError, ModelUnsupportedError
    from tokamac.engine.model import BUILD_ERRORS

    make, arguments = model_classes(config)
    check_config(config, arguments)
    dtype = mx.float32 if value_bytes == 4 else mx.bfloat16

    def zeros(array: mx.array) -> mx.array:
        kept = dtype if mx.issubdtype(array.dtype, mx.floating) else array.dtype
        return mx.broadcast_to(mx.zeros((), kept), array.shape)

    try:
        model: Any = make(arguments.from_dict(config))
        model.update(tree_map(zeros, model.parameters()))
    except ImportError as error:
        raise ModelUnsupportedError(f"it needs a package that is not installed: {error}", "Install it.") from error
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())[:240]
        raise ModelDamagedError(f"its config does not make a model: {reason}", "Download it again.") from error
    return model


def _table(plan: "CachePlan", context: int) -> KVTable:
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
    keys = first.kind not in ("state", "own")
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
