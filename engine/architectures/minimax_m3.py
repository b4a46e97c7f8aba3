"""MiniMax M3's language model, as mlx-lm computes it within the vision model."""

import re
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import minimax_m3_vl

PREFIX = "language_model."
SAVED = (
    # What transformers calls a part when it saves this part alone, and what the maker's files call it.
    (r"mlp\.experts\.(\w+)$", r"block_sparse_moe.switch_mlp.\1.weight"),
    (r"mlp\.gate\.e_score", "block_sparse_moe.e_score"),
    (r"mlp\.(gate|shared_experts)\.", r"block_sparse_moe.\1."),
    (r"self_attn\.indexer\.", "self_attn.index_"),
)


@dataclass
class ModelArgs(minimax_m3_vl.TextArgs):
    """Arguments of the language part."""


class Model(minimax_m3_vl.Model):
    """Token ids (B, T) → logits (B, T, V)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(minimax_m3_vl.ModelArgs(text_config=args, model_type=args.model_type))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {}
        for name, value in weights.items():
            full = PREFIX + name.removeprefix(PREFIX)
            for saved, own in SAVED:
                full = re.sub(saved, own, full)
            if full.endswith(".mlp.gate_up_proj.weight"):
                stem = full.removesuffix("gate_up_proj.weight")
                named[f"{stem}gate_proj.weight"], named[f"{stem}up_proj.weight"] = mx.split(value, 2)
            else:
                named[full] = value
        taken: dict[str, mx.array] = super().sanitize(named)
        return taken
