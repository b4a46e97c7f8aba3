"""How many tokens a model was made for, from its normalised config."""

from collections.abc import Mapping
from typing import Any

from tokamac.engine.limits.cost import first_of, text_config

TRAINED_FURTHER = frozenset({"cohere", "cohere2"})
"""Families whose ``model_max_length`` is what they were made for, and ``max_position_embeddings`` a smaller number."""


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a model of this normalised config was made for; None where it does not say."""
    text = text_config(config)
    named = first_of(text, "n_positions", "max_position_embeddings", "max_seq_len", "seq_length", "model_max_length")
    trained = text.get("model_max_length") if text.get("model_type") in TRAINED_FURTHER else None
    known = [length for length in (named, trained) if isinstance(length, int) and not isinstance(length, bool)]
    return max(known, default=None)


def pretraining_length(config: Mapping[str, Any]) -> int | None:
    """Return up to how many tokens a model with LongRoPE has its short factors; None for any other."""
    scaling = text_config(config).get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        return int(scaling["original_max_position_embeddings"])
    return None
