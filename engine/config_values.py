"""Values that no model's config has: numbers that are not finite, and sizes far beyond any model's.

MLX computes on with both: a NaN in an epsilon is a NaN in every logit, and three million layers are built one by one. So they are
refused where a config is read, before anything is made of them.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from tokamac.engine.errors import ModelDamagedError

Config = dict[str, Any]

LARGEST_FLOAT32 = 3.4028235e38
MAY_BE_INFINITE = re.compile(r"time_step_(limit|max)$")
"""Bounds of a recurrence's step, where infinity means none."""
NEVER_NEGATIVE = re.compile(r"(eps|epsilon)$")
ALWAYS_POSITIVE = re.compile(r"^(rope_theta|rotary_emb_base|rope_local_base_freq|default_theta)$")
OTHER_PARTS = re.compile(r"^(?!text_|llm_|language_)\w+_config$")
"""Settings of encoders for images and sound, and of packing."""

LAYERS, WIDTHS, HEADS, WORDS = 4096, 1 << 22, 1 << 16, 1 << 24
"""Far more than any model has: of layers, numbers in a token or a head, heads or experts of a layer, and tokens of a vocabulary."""
SIZES: dict[str, tuple[int, int]] = {
    # key: (at least, at most)
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim"), (1, WIDTHS)),
    **dict.fromkeys(("head_dim", "intermediate_size", "n_inner", "moe_intermediate_size"), (0, WIDTHS)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), (0, HEADS)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, HEADS)),
    "vocab_size": (1, WORDS),
}
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "hybrid_override_pattern")
"""Keys that say something of each layer, and by their length how many there are."""


def check_values(config: Config) -> None:
    """Raise ModelDamagedError for a config with a value that no model has."""
    for problem in _problems(config):
        raise ModelDamagedError(f"config.json sets {problem}", "The file is damaged: download the model again.")


def _problems(config: Config) -> Iterator[str]:
    """Yield what of a config, its language part included, can't be right."""
    for key, value in config.items():
        if isinstance(value, dict):
            if not OTHER_PARTS.match(key):
                yield from (f"{key}.{problem}" for problem in _problems(value))
            continue
        for each in value if isinstance(value, list) else (value,):
            if (problem := _problem(key, each)) is not None:
                yield problem
        if key in PER_LAYER and isinstance(value, list | str) and len(value) > LAYERS:
            yield f"{key} for {len(value):,} layers, and no model has more than {LAYERS:,}"


def _problem(key: str, value: Any) -> str | None:
    """Return what is wrong with a value of ``key``, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{key} to {value!r:.40}, which is no number" if key in SIZES and isinstance(value, str) else None
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT32 and not MAY_BE_INFINITE.search(key):
        return f"{key} to {value}, which is no finite number"
    if isinstance(value, float) and math.isnan(value):
        return f"{key} to {value}, which is no number"
    if (NEVER_NEGATIVE.search(key) and value < 0) or (ALWAYS_POSITIVE.search(key) and value <= 0):
        return f"{key} to {value}, which is too small"
    least, most = SIZES.get(key, (None, None))
    if least is not None and most is not None and not least <= value <= most:
        shown = f"{value:,}" if abs(value) < 10**15 else f"{value:.1e}" if abs(value) < 10**300 else "a huge number"
        return f"{key} to {shown}, which is {f'less than {least}' if value < least else f'more than {most:,}'}"
    return None
