"""What a peak depends on: a model's sizes, its caches layer by layer, and how the device computes. Values, no MLX."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.kv.size import group_for, token_bytes
from tokamac.engine.limits.attention_work import chosen_entries
from tokamac.engine.limits.cost import first_of, text_config

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan, LayerPlan

Order = Literal["at once", "by layer", "ahead"]
"""When arrays are computed, and so how many of a layer's are there together.

at once: each product when it is asked for (a plain CPU with unpacked weights: NumPy multiplies). by layer: attention waits for
all before it (a plain CPU in float32 with packed weights: NumPy attends, MLX multiplies). ahead: MLX launches work, and allocates
for it, before earlier work has ended (GPUs, and half precision on a CPU).
"""

_SINKS = frozenset({"gpt_oss", "mimo_v2_flash", "deepseek_v4", "deepseek_v41"})
"""Families whose attention has a logit per head that takes weight and gives nothing."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a query of a compressing layer attends to (DeepSeek V4). near: the last tokens, one by one. every: tokens to an entry.

    chosen: entries that it attends to at most, by ``index_heads`` heads' scores; None is all. size: numbers of an entry.
    """

    near: int
    every: int
    chosen: int | None
    index_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer. heads, key_dim, value_dim: of keys and values, 0 where it keeps none of ours.

    bits: 16 is the model's own type, of ``value_bytes`` each. window, spare: slots seen, and beside them to rewind into; None
    where it grows. other_bytes_per_token: of a cache that is the model's own. fixed_bytes: of such a one, or beside the slots.
    block: positions by which the pinned keys of its window move at once (engine/kv/layout.py); 0 where none do.
    written_out: attention is two products of ours, whatever kernels there are (for a soft cap). sinks: see ``stepwise``.
    seen: what a query sees of a cache that compresses, None of any other.
    """

    heads: int
    key_dim: int
    value_dim: int
    value_bytes: int
    key_bits: int = 16
    value_bits: int = 16
    group_size: int = 64
    window: int | None = None
    spare: int = 0
    other_bytes_per_token: int = 0
    fixed_bytes: int = 0
    block: int = 0
    written_out: bool = False
    sinks: bool = False
    seen: Compressed | None = None

    @property
    def ours(self) -> bool:
        """Whether the KV flags apply to it."""
        return self.heads > 0

    @property
    def limit(self) -> int | None:
        """Slots at most."""
        return None if self.window is None else self.window + self.spare

    @property
    def key_numbers(self) -> int:
        """Numbers in the keys of one token."""
        return self.heads * self.key_dim

    @property
    def value_numbers(self) -> int:
        """Numbers in the values of one token."""
        return self.heads * self.value_dim

    @property
    def key_bytes(self) -> int:
        """Bytes that the keys of one token take."""
        return self._held(self.key_dim, self.key_bits)

    @property
    def value_token_bytes(self) -> int:
        """Bytes that the values of one token take."""
        return self._held(self.value_dim, self.value_bits)

    def _held(self, dim: int, bits: int) -> int:
        group = group_for(dim, self.group_size) or self.group_size
        return token_bytes(self.heads, dim, bits, group, self.value_bytes)

    def packable(self) -> bool:
        """Whether keys and values of this layer can be packed at all."""
        return self.ours and all(group_for(dim, self.group_size) is not None for dim in (self.key_dim, self.value_dim))


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as it is held here. Widths in numbers a token; bytes as said.

    weights: bytes of all weights, in the form they are held. queries: of all heads of a layer. mlp: of the widest dense
    feed-forward layer, or of the shared experts. expert_mlp: of one expert, ``experts_used`` of which compute a token.
    value_bytes: of an activation. device: what attends, and so which kernels there are. force_fused: prefill asks for a fused
    kernel wherever there is one, also where MLX takes another path because it is quicker.
    """

    weights: int
    hidden: int
    heads: int
    queries: int
    mlp: int
    experts: int
    experts_used: int
    expert_mlp: int
    vocabulary: int
    value_bytes: int
    order: Order
    device: AttentionDevice
    layers: tuple[LayerCache, ...]
    force_fused: bool = False

    def packed(self, key_bits: int, value_bits: int) -> "Shape":
        """Return the same model with keys and values of so many bits, where they can be packed."""
        layers = tuple(
            replace(layer, key_bits=key_bits, value_bits=value_bits) if layer.packable() else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def windowed(self, window: int, spare: int) -> "Shape":
        """Return the same model with a window on every layer that has no smaller one."""
        layers = tuple(
            replace(layer, window=window, spare=spare) if layer.ours and (layer.window or window) >= window else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)


def shape_of(
    config: Mapping[str, Any],
    plan: "CachePlan",
    *,
    weights: int,
    value_bytes: int,
    order: Order,
    device: AttentionDevice,
) -> Shape:
    """Return the shape of a model from its normalised config and the plan of its caches."""
    text = text_config(config)
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads") or 1
    dense, experts, used, width, shared = _feed_forward(text, hidden)
    capped = bool(text.get("attn_logit_softcapping"))
    sinks = text.get("model_type", config.get("model_type")) in _SINKS
    return Shape(
        weights=weights,
        hidden=hidden,
        heads=heads,
        queries=heads * (_number(text, "head_dim") or hidden // heads),
        mlp=max(dense, shared),
        experts=experts,
        experts_used=used,
        expert_mlp=width,
        vocabulary=_number(text, "vocab_size"),
        value_bytes=value_bytes,
        order=order,
        device=device,
        layers=tuple(
            replace(
                _layer(layer, plan.spec.group_size, value_bytes),
                written_out=capped,
                sinks=sinks,
                seen=_compressed(text, layer),
            )
            for layer in plan.layers
        ),
    )


def _layer(layer: "LayerPlan", group_size: int, value_bytes: int) -> LayerCache:
    if layer.ours is None:
        return LayerCache(
            0, 0, 0, value_bytes, other_bytes_per_token=layer.bytes_per_token, fixed_bytes=layer.fixed_bytes
        )
    seen, limit = layer.ours.seen, layer.limit
    return LayerCache(
        seen.heads,
        seen.key_dim,
        seen.value_dim,
        value_bytes,
        layer.key_bits,
        layer.value_bits,
        group_size,
        layer.window,
        0 if limit is None or layer.window is None else limit - layer.window,
        fixed_bytes=0 if layer.window is None else layer.pinned_bytes(layer.window),
        block=layer.block,
    )


def _compressed(text: Mapping[str, Any], layer: "LayerPlan") -> Compressed | None:
    if layer.kind != "compressed":
        return None
    chosen = chosen_entries(text, layer.index)
    every = text["compress_rates"][text["layer_types"][layer.index]]
    most = None if chosen is None else chosen[1]
    return Compressed(text["sliding_window"], every, most, text["index_n_heads"], text["head_dim"])


def _feed_forward(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int, int, int]:
    """Return widths: a dense layer's, then of a mixture its experts, those used, an expert's, and that of the shared ones."""
    dense = _number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    experts = _number(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    used = _number(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
    if not experts or not used:
        return dense, 0, 0, 0, 0
    own = _number(text, "moe_intermediate_size")
    width = own or dense
    shared = _number(text, "shared_expert_intermediate_size") or _number(text, "n_shared_experts") * width
    # A mixture with a width of its own may have dense layers besides; one without has none (Mixtral, gpt-oss).
    return dense if own else 0, experts, used, width, shared


def _number(text: Mapping[str, Any], *keys: str) -> int:
    found = first_of(text, *keys)
    return found if isinstance(found, int) else 0
