"""Sliding windows that a model's config names and mlx-lm's class for it ignores.

Read in transformers 5.7 (modelling and configuration files of the families below): a layer that slides sees the last
``sliding_window`` tokens, its own included. mlx-lm gives all of these growing caches, which is wrong beyond the window. Where
mlx-lm slides by itself (its ``RotatingKVCache``), nothing here applies.
"""

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]

SLIDING = "sliding_attention"
SWITCHED = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"})
"""Families whose window counts only if ``use_sliding_window`` is on."""


def ignored_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Return for each of the ``layers`` the window it should have had, or None."""
    text = config.get("text_config", config)
    family = text.get("model_type", config.get("model_type"))
    if family not in _SLIDES:
        return (None,) * layers
    if family in SWITCHED and not text.get("use_sliding_window", False):
        return (None,) * layers
    slides, default = _SLIDES[family]
    window = text.get("sliding_window", default)
    if not isinstance(window, int) or window < 1:
        return (None,) * layers
    named = text.get("layer_types")
    if named is not None:
        return tuple(window if kind == SLIDING else None for kind in named[:layers])
    return tuple(window if slides(text, index) else None for index in range(layers))


def unbounded(config: Config) -> str:
    """Return why no window can be laid over this model's growing caches, or "" where one can."""
    return _UNBOUNDED.get(str(config.get("model_type")), "")


def _all_layers(config: Config, index: int) -> bool:  # noqa: ARG001
    return True


def _every_second(config: Config, index: int) -> bool:  # noqa: ARG001
    return index % 2 == 0


def _upper_layers(config: Config, index: int) -> bool:
    return index >= int(config.get("max_window_layers", 28))


def _every_second_lower_layer(config: Config, index: int) -> bool:
    return index % 2 == 0 and index < int(config.get("max_window_layers", 28))


def _layers_without_rope(config: Config, index: int) -> bool:
    roped = config.get(
        "no_rope_layers"
    )  # the name says the opposite of what it holds: 1 where a layer has rotary positions
    if roped is not None:
        return not roped[index]
    return (index + 1) % int(config.get("no_rope_layer_interval", 4)) == 0


_SLIDES: dict[str, tuple[Callable[[Config, int], bool], int | None]] = {
    # family: (which layers slide, the window that transformers assumes where the config has no such key)
    "mistral": (_all_layers, 4096),
    "ministral3": (_all_layers, None),  # mlx-lm's class slides where layer_types say so; transformers writes none
    "mixtral": (_all_layers, None),
    "phi3": (_all_layers, None),
    "phimoe": (_all_layers, None),
    "starcoder2": (_all_layers, None),
    "gemma2": (_every_second, 4096),
    "qwen2": (_upper_layers, 4096),
    "qwen3": (_upper_layers, 4096),
    "qwen2_moe": (_every_second_lower_layer, 4096),
    "qwen3_moe": (_all_layers, 4096),
    "smollm3": (_layers_without_rope, None),
}
_UNBOUNDED = {
    # Its queries would be rotated as if nothing had ever left the window.
    "afm7": "its upper layers tell their position by how many keys they are given",
}
