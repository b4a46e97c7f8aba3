"""Where mlx-lm's classes hard-code, or approximate, what a config sets: put right after a model is built.

``correct(module, config)`` replaces rotary embeddings whose scaling, partial width or long-context factors the class does not
honour, four families' activation, and what else a class is known to compute otherwise than the model. Everything else the class
got right stays as it is. Parameter names do not change. MLX is imported when a model is corrected, not with this file: config rules
ask ``corrects`` without it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx import nn


Config = dict[str, Any]

PLAIN_ROPE = frozenset({
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox", "helium", "mixtral",
    "phi", "qwen3_moe", "solar_open", "stablelm", "starcoder2",
})  # fmt: skip
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
    if key == "clip_qkv":
        return kind == "olmo"
    if key in ("indexer_types", "index_topk_freq"):  # the second says when the first is to be worked out
        return kind == "glm_moe_dsa" and (config.get("indexer_types") or ["shared"])[0] == "full"
    if key in ACTIVATION_KEYS:
        return kind in FEED_FORWARD and config.get(key) in GELU_ERF + GELU_TANH
    return False


def correct(model: "nn.Module", config: Config) -> None:
    """Put right what the class of ``model`` computes otherwise than its normalised config says. Weights may be loaded or not."""
    from mlx import nn

    from .corrected_layers import FeedForward

    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert text is not None
    _correct_ropes(model, text)
    if names := FEED_FORWARD.get(str(text.get("model_type"))):
        wanted = next((text[key] for key in ACTIVATION_KEYS if text.get(key)), None)
        if text.get("model_type") == "gemma":
            wanted = "gelu_pytorch_tanh"  # transformers overrules Gemma 1's files, which say "gelu"
        for layer in model.layers:
            layer.mlp = FeedForward(layer.mlp, names, nn.gelu_approx if wanted in GELU_TANH else nn.gelu)
    if family := _FAMILIES.get(str(text.get("model_type"))):
        family(model, text)


def use_short_factors(model: "nn.Module") -> None:
    """Let a model with LongRoPE compute with the factors of its pretraining context; it is built with those of longer ones."""
    from .corrected_layers import LongRoPE

    for module in model.modules():
        if isinstance(module, LongRoPE):
            module.choose(long=False)


def _correct_ropes(model: "nn.Module", config: Config) -> None:
    from mlx import nn
    from mlx_lm.models.rope_utils import SuScaledRoPE, YarnRoPE

    from .corrected_layers import longrope, yarn

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

    from .corrected_layers import longrope, yarn

    if config.get("model_type") in PARTIAL_IGNORED:
        rope.dims = int(rope.dims * (config.get("partial_rotary_factor") or 1.0))
    if kind is None:
        return rope
    if kind in ("yarn", "longrope"):
        return (yarn if kind == "yarn" else longrope)(rope.dims, rope.traditional, config)
    longest = config.get("max_position_embeddings")
    scaled: nn.Module = initialize_rope(rope.dims, rope.base, rope.traditional, config["rope_scaling"], longest)
    return scaled


def _multiply_keys(model: "nn.Module", config: Config) -> None:
    """Apply Falcon H1's ``key_multiplier``: mlx-lm looks for it under a name of weights that no checkpoint has."""
    for layer in model.layers:
        layer.self_attn.scale *= config["key_multiplier"]


def _set_mamba2_norms(model: "nn.Module", config: Config) -> None:
    """Give Mamba 2's norms the config's epsilon, and its gated ones their groups: mlx-lm's norm the whole width."""
    from .corrected_layers import GroupedNorm

    groups = config.get("n_groups") or 1
    for layer in model.layers:
        layer.norm.eps = config["layer_norm_epsilon"]
        if groups > 1:
            layer.mixer.norm = GroupedNorm(layer.mixer.norm, groups)


def _scale_tied_head(model: "nn.Module", config: Config) -> None:
    """Let MiniCPM divide by hidden_size / dim_model_base before a tied head too, as mlx-lm does before one of its own."""
    from .corrected_layers import TiedHead

    if config.get("tie_word_embeddings"):
        model.args.tie_word_embeddings = False
        model.lm_head = TiedHead(model.model)


def _bias_routing(model: "nn.Module", config: Config) -> None:
    from .corrected_layers import BiasedRouting

    for layer in model.layers:
        if "switch_mlp" in layer.mlp:
            layer.mlp = BiasedRouting(layer.mlp, config["moe_num_experts"])


def _weigh_by_share(model: "nn.Module", config: Config) -> None:  # noqa: ARG001
    from .corrected_layers import ShareOfAll

    for layer in model.layers:
        if "switch_mlp" in layer.feed_forward:
            layer.feed_forward = ShareOfAll(layer.feed_forward)


def _set_latent_eps(model: "nn.Module", config: Config) -> None:  # noqa: ARG001
    """Give norms within latent attention the epsilon that they have by nature, not the config's."""
    for layer in model.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in layer.self_attn:
                layer.self_attn[name].eps = 1e-6


def _correct_indexers(model: "nn.Module", config: Config) -> None:
    """Give indexers' norms their epsilon, and let layers without an indexer of their own use the last one's choice (GLM 5.2)."""
    from .corrected_layers import Choice, SharedIndexer, remembering

    kinds = config.get("indexer_types") or ["full"] * len(model.layers)
    chosen = Choice()
    for layer, kind in zip(model.layers, kinds, strict=False):
        layer.self_attn.indexer.k_norm.eps = 1e-6
        if kind == "shared":
            layer.self_attn.indexer = SharedIndexer(chosen)
        elif "shared" in kinds:
            chosen = Choice()
            layer.self_attn.indexer = remembering(layer.self_attn.indexer, chosen)


def _set_recurrent_eps(model: "nn.Module", config: Config) -> None:
    for layer in model.layers:
        layer.temporal_pre_norm.eps = layer.channel_pre_norm.eps = config["rms_norm_eps"]


def _make_olmo(model: "nn.Module", config: Config) -> None:
    """Make OLMo 1 of a Llama: norms without weights, and queries, keys and values within a limit."""
    from mlx import nn

    from .corrected_layers import ClippedAttention

    def norm() -> nn.Module:
        return nn.LayerNorm(config["hidden_size"], eps=1e-5, affine=False)

    model.model.norm = norm()
    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
        if limit := config.get("clip_qkv"):
            layer.self_attn = ClippedAttention(layer.self_attn, float(limit))


_FAMILIES: dict[str, Callable[["nn.Module", Config], None]] = {
    "deepseek_v32": _correct_indexers,
    "ernie4_5_moe": _bias_routing,
    "falcon_h1": _multiply_keys,
    "glm4_moe_lite": _set_latent_eps,
    "kimi_linear": _set_latent_eps,
    "glm_moe_dsa": _correct_indexers,
    "jamba": _weigh_by_share,
    "mamba2": _set_mamba2_norms,
    "minicpm": _scale_tied_head,
    "minicpm3": _scale_tied_head,
    "olmo": _make_olmo,
    "recurrent_gemma": _set_recurrent_eps,
}
