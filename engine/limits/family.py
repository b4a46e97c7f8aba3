"""What kind of model a config describes, by the names the field uses: it decides what a step reads and how fast kernels are."""

from collections.abc import Mapping
from typing import Any, Literal

from tokamac.engine.limits.cost import first_of, text_config
from tokamac.engine.limits.kv_cost import COMPRESSED, STATE, STATELESS_KV

Trait = Literal[
    "dense", "mixture", "sliding window", "latent attention", "compressed attention", "hybrid", "state space"
]
"""dense: every weight is read for every token. mixture: of experts, only some are active. sliding window: some layers see only the
last tokens. latent attention: keys and values are compressed together (MLA). compressed attention: so many tokens become one entry.
hybrid: some layers keep a state of fixed size instead of keys and values (linear attention, state space, convolution). state space:
all of them do."""

SLIDING_BY_CLASS = frozenset(
    {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "cohere2"}
)
"""Families whose every model slides, whether or not the config lists its layers."""

HYBRID_MARKS = (
    "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern", "attn_layer_period", "mamba_d_state",
    "linear_attn_config",
)  # fmt: skip
"""Keys by which configs say which layers attend, and so that the others keep a state; some families list the layers instead."""


def traits_of(config: Mapping[str, Any]) -> tuple[Trait, ...]:
    """Return the kinds a config belongs to, most telling first; a mixture may well slide, and a hybrid be dense."""
    text = text_config(config)
    found: list[Trait] = ["mixture" if _is_mixture(text) else "dense"]
    if str(text.get("model_type")) in STATELESS_KV:
        return (*found, "state space")
    if _is_hybrid(text):
        found.append("hybrid")
    if isinstance(text.get("kv_lora_rank"), int):
        found.append("latent attention")
    if COMPRESSED.intersection(text.get("layer_types") or ()):
        found.append("compressed attention")
    if _slides(text):
        found.append("sliding window")
    return tuple(found)


def leaves_out_senses(config: Mapping[str, Any]) -> bool:
    """Return whether a model sees or hears beside reading: of such a one, the language part alone is used."""
    return any(isinstance(config.get(part), dict) and config[part] for part in ("vision_config", "audio_config"))


def _is_mixture(text: Mapping[str, Any]) -> bool:
    experts = first_of(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return isinstance(experts, int) and experts > 1 and text.get("enable_moe_block") is not False


def _is_hybrid(text: Mapping[str, Any]) -> bool:
    listed = first_of(text, "layer_types", "layers_block_type", "block_types", "_block_types")
    if isinstance(listed, list):
        return any(name in STATE for name in listed)
    return any(text.get(mark) for mark in HYBRID_MARKS)


def _slides(text: Mapping[str, Any]) -> bool:
    listed = first_of(text, "layer_types", "layers_block_type")
    if isinstance(listed, list):
        return any("sliding" in str(name) or "chunked" in str(name) for name in listed)
    if str(text.get("model_type")) in SLIDING_BY_CLASS:
        return True
    window = first_of(text, "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
    return isinstance(window, int) and text.get("use_sliding_window") is not False
