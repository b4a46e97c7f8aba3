"""How a reply came about, as far as something about it could be changed: what remedies.py weighs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokamac.engine.kv.size import group_for, token_bytes
from tokamac.engine.limits.gaps import Throttle
from tokamac.engine.limits.prediction import Phase
from tokamac.engine.limits.work import KVLayer

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import LayerPlan

KV_BITS = 8
"""Bits that keep a reply the same to the eye (bench --kv-quality measures it for a model)."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What could be otherwise.

    packed_kv: what the caches would hold with keys and values of KV_BITS; None where none of them can be packed, or all are.
    bits_per_weight: stored; None where it is unknown, or where a step reads no fewer bytes for it (weights that were unpacked).
    keeps_prompts: the prompt cache is on. chunk: prompt tokens computed at once.
    throttles: what the system slowed the chip down for meanwhile.
    """

    packed_kv: tuple[KVLayer, ...] | None
    bits_per_weight: float | None
    keeps_prompts: bool
    chunk: int
    throttles: tuple[Throttle, ...] = ()


@dataclass(frozen=True, slots=True)
class Foretold:
    """A reply as it was predicted: its prefill, and the step at its middle, after ``context`` tokens.

    chunk: prompt tokens computed at once.
    """

    prefill: Phase
    decode: Phase
    context: int
    chunk: int


def packed_layers(
    layers: "Iterable[LayerPlan]", group_size: int, now: tuple[KVLayer, ...] | None = None
) -> tuple[KVLayer, ...] | None:
    """Return what the caches of a plan would hold with keys and values of KV_BITS; None where that changes none of them.

    now: the caches as a step reads them now, with their heads.
    """
    plans = tuple(layers)
    now = now or tuple(KVLayer(plan.bytes_per_token, plan.limit, plan.fixed_bytes) for plan in plans)
    packed = tuple(_packed(plan, layer, group_size) for plan, layer in zip(plans, now, strict=True))
    return None if packed == now else packed


def _packed(plan: "LayerPlan", layer: KVLayer, group_size: int) -> KVLayer:
    """Return a layer packed; as it is where its caches stay the model's, or are packed already."""
    if plan.ours is None or min(plan.key_bits, plan.value_bits) < 16:
        return layer
    seen = plan.ours.seen
    groups = [(dim, group_for(dim, group_size)) for dim in (seen.key_dim, seen.value_dim)]
    sizes = [
        token_bytes(seen.heads, dim, KV_BITS, group, seen.scale_bytes) for dim, group in groups if group is not None
    ]
    return replace(layer, bytes_per_token=sum(sizes)) if len(sizes) == len(groups) else layer
