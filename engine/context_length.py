"""How many tokens a model was made for, from its normalised config."""

from collections.abc import Mapping
from typing import Any

from tokamac.engine.corrections import context_limit
from tokamac.engine.limits.cost import first_of, text_config


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a model of this normalised config was made for; None where it does not say."""
    text = text_config(config)
    named = first_of(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    known = [length for length in (named, context_limit(text)) if isinstance(length, int)]
    return min(known, default=None)
