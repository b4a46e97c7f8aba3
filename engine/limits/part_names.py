"""Which part of a model a tensor belongs to, as far as its name tells."""

import re
from functools import lru_cache
from typing import Literal

PartName = Literal["embedding", "attention", "mlp", "experts", "head", "norms and other"]

NAMES_KEPT = 1 << 14
"""Names of tensors whose part is remembered: those of some twenty models."""

_NORM = re.compile(r"norm|(^|\.)ln_\w*$")

_PATTERNS: dict[PartName, re.Pattern[str]] = {
    "head": re.compile(r"(^|\.)(lm_head|embed_out|output_layer)(\.|$)|^(model\.)?(output|head)\."),
    "embedding": re.compile(
        r"(^|\.)(embed(_tokens\w*|_in|_positions)?|wte|wpe|(tok|token|word)_embeddings|embeddings?|embedders)(\.head|\.\d+)?\.\w+$"
    ),
    "experts": re.compile(r"\.experts\.(?!e_score_correction_bias)|\.switch_\w+\.|\.experts_\w+$"),
    "attention": re.compile(r"attn|attention|mixer\.|mamba\.|temporal_block|\.conv\."),
    "mlp": re.compile(
        r"mlp|feed_forward|ffn|moe|\.(fc1|fc2|w1|w2|w3|up_proj|down_proj|gate_proj|altup\w*|laurel|per_layer_\w+)\."
    ),
}  # fmt: skip


@lru_cache(maxsize=NAMES_KEPT)
def part_named(name: str) -> PartName:
    """Return what a name tells. Each is asked about several times for a model, and again for the next of its family."""
    if _NORM.search(name.rpartition(".")[0]):
        return "norms and other"
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(name)), "norms and other")
