"""What can be said of a model whose caches can't be planned: keys and values by its config, the ceiling by the bytes alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokamac.engine.errors import OptionError
from tokamac.engine.limits import kv_cost
from tokamac.engine.limits.cost import Cost, first_of, text_config
from tokamac.engine.limits.limits import limits_for
from tokamac.engine.limits.memory import Fit
from tokamac.engine.limits.outcomes import Case
from tokamac.engine.limits.places import Place
from tokamac.engine.options import KVSpec

CHUNK = 512
"""Prompt tokens computed at once, for the estimate of temporaries; the engine's own is of this order on every device."""


@dataclass(frozen=True, slots=True)
class Bare:
    """Bytes and the ceiling; None is unknown."""

    kv_bytes_per_token: int | None
    kv_bytes: int | None
    bytes_per_step: int | None
    ceiling_tps: float | None
    memory: Fit


def bare_cost(config: Mapping[str, Any], held: Cost, case: Case, place: Place, *, value_bytes: int) -> Bare:
    """Return what the config says of a model whose weights are known.

    An unknown size of keys and values counts as nothing in memory. Raises OptionError for flags that the caches can't take.
    """
    per_token, kept = _kv(config, case.kv, case.context, value_bytes)
    limits = limits_for(
        case.context, weight_bytes_per_token=held.weight_bytes_per_token, kv_bytes_per_step=kept, chip=place.chip
    )
    working = working_bytes(config, value_bytes=value_bytes)
    fit = place.fit(weights=held.weight_bytes, kv=kept or 0, working=working)
    return Bare(per_token, kept, limits.bytes_per_step, limits.ceiling_tps, fit)


def working_bytes(config: Mapping[str, Any], *, chunk: int = CHUNK, value_bytes: int = 2) -> int:
    """Return a rough size of the largest temporaries of one layer's prefill chunk, and the logits of one token.

    The widest layer's activations three times over (gate, up and their product), the residual twice, queries, keys and values.
    """
    text = text_config(config)
    hidden = int(first_of(text, "hidden_size", "n_embd") or 0)
    used = int(first_of(text, "num_experts_per_tok", "num_experts_per_token") or 1)
    dense = int(first_of(text, "intermediate_size", "n_inner") or 4 * hidden)
    width = max(dense, used * int(text.get("moe_intermediate_size") or 0))
    return chunk * value_bytes * (3 * width + 5 * hidden) + 4 * int(text.get("vocab_size") or 0)


def _kv(config: Mapping[str, Any], spec: KVSpec, context: int, value_bytes: int) -> tuple[int | None, int | None]:
    """Return (bytes a token, bytes at this context); None where the config does not say."""
    from tokamac.engine.kv.plan import spare_slots

    layers = kv_cost.kv_layers(config)
    if layers is None:
        return None, None
    if (spec.quantized or spec.window is not None) and not all(layer.free for layer in layers):
        raise OptionError("this model's caches can be neither packed nor bounded", "Leave out the KV flags.")
    return (
        kv_cost.kv_bytes_per_token(layers, spec, value_bytes=value_bytes),
        kv_cost.kv_bytes(layers, spec, context, value_bytes=value_bytes, spare=spare_slots)
        + kv_cost.pinned_bytes(layers, spec, context, value_bytes=value_bytes),
    )
