"""Where mlx-lm's classes hard-code, or approximate, what a config sets: put right after a model is built.

``correct(module, config)`` replaces rotary embeddings whose scaling, partial width or long-context factors the class does not
honour, and four families' activation. Everything else the class got right stays as it is. Parameter names do not change.
MLX is imported when a model is corrected, not with this file: config rules ask ``corrects`` without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx import nn

Config = dict[str, Any]

PLAIN_ROPE = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox"),
        *("helium", "mixtral", "phi", "qwen3_moe", "stablelm", "starcoder2"),
    }
)
"""Model types whose class makes a plain ``nn.RoPE`` in every attention layer and reads no ``rope_scaling``."""

PARTIAL_IGNORED = frozenset({"glm"})
"""Of those, the ones that rotate whole heads whatever ``partial_rotary_factor`` says."""

FEED_FORWARD = {
    # model type: names of (up, down, gate) in its feed-forward block; the class has one GELU, its checkpoints another.
    "gemma": ("up_proj", "down_proj", "gate_proj"),
    "starcoder2": ("c_fc", "c_proj", None),
    "gpt_neox": ("dense_h_to_4h", "dense_4h_to_h", None),
    "gpt_bigcode": ("c_fc", "c_proj", None),
}
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function")
GELU_ERF = ("gelu",)
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def corrects(config: Config, key: str) -> bool:
    """Return whether ``correct`` will honour this key of the config, though the model's class does not read it."""
    kind = config.get("model_type")
    if key == "rope_scaling":
        return kind in PLAIN_ROPE
    if key == "partial_rotary_factor":
        return kind in PARTIAL_IGNORED
    if key in ACTIVATION_KEYS:
        return kind in FEED_FORWARD and config.get(key) in GELU_ERF + GELU_TANH
    return False


def context_limit(config: Config) -> int | None:
    """Return how many tokens can be served, where that is fewer than ``max_position_embeddings``; else None.

    See ``corrected_layers.longrope``.
    """
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        return int(scaling["original_max_position_embeddings"])
    return None


def correct(model: "nn.Module", config: Config) -> None:
    """Put right what the class of ``model`` computes otherwise than its normalised config says. Weights may be loaded or not."""
    from mlx import nn

    from tokamac.engine.corrected_layers import FeedForward

    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert text is not None
    _correct_ropes(model, text)
    if names := FEED_FORWARD.get(str(text.get("model_type"))):
        wanted = next((text[key] for key in ACTIVATION_KEYS if text.get(key)), None)
        if text.get("model_type") == "gemma":
            wanted = "gelu_pytorch_tanh"  # transformers overrules Gemma 1's files, which say "gelu"
        for layer in model.layers:
            layer.mlp = FeedForward(layer.mlp, names, nn.gelu_approx if wanted in GELU_TANH else nn.gelu)


def _correct_ropes(model: "nn.Module", config: Config) -> None:
    from mlx import nn
    from mlx_lm.models.rope_utils import SuScaledRoPE, YarnRoPE

    from tokamac.engine.corrected_layers import longrope, yarn

    scaling = config.get("rope_scaling")
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
    plain = config.get("model_type") in PLAIN_ROPE
    for _, parent in model.named_modules():
        for name, rope in list(parent.items()):
            if plain and type(rope) is nn.RoPE:
                parent[name] = _scaled(rope, config, kind)
            elif type(rope) is YarnRoPE and kind == "yarn":
                parent[name] = yarn(rope.dims, rope.traditional, config)
            elif type(rope) is SuScaledRoPE and kind == "longrope":
                parent[name] = longrope(rope.dim, False, config)


def _scaled(rope: "nn.RoPE", config: Config, kind: str | None) -> "nn.Module":
    from mlx_lm.models.rope_utils import initialize_rope

    from tokamac.engine.corrected_layers import longrope, yarn

    if config.get("model_type") in PARTIAL_IGNORED:
        rope.dims = int(rope.dims * (config.get("partial_rotary_factor") or 1.0))
    if kind is None:
        return rope
    if kind in ("yarn", "longrope"):
        return (yarn if kind == "yarn" else longrope)(rope.dims, rope.traditional, config)
    longest = config.get("max_position_embeddings")
    scaled: nn.Module = initialize_rope(rope.dims, rope.base, rope.traditional, config["rope_scaling"], longest)
    return scaled
