"""What mlx-lm's classes read of a config, and corrections where they hard-code or approximate it."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..architectures import MODEL_MODULES
from ..errors import ModelUnsupportedError
from .weights import is_fp8

if TYPE_CHECKING:
    from mlx import nn

# Parameter names don't change. MLX is imported lazily: config rules ask ``corrects`` without it.


# Model types whose class makes a plain `nn.RoPE` in every attention layer and reads no `rope_scaling`.
PLAIN_ROPE = frozenset({
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox", "helium", "mixtral",
    "phi", "qwen3_moe", "solar_open", "stablelm", "starcoder2",
})  # fmt: skip

PARTIAL_IGNORED = frozenset({"glm"})  # of those, the ones that rotate whole heads whatever `partial_rotary_factor` says

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


def corrects(config: dict[str, Any], key: str) -> bool:
    """Whether ``correct`` honours a key that the model's class doesn't read."""
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


def correct(model: "nn.Module", config: dict[str, Any]) -> None:
    """Apply all corrections for a normalised config, with or without weights loaded."""
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
    """Switch LongRoPE to its pretraining factors; models are built with the long ones."""
    from .corrected_layers import LongRoPE

    for module in model.modules():
        if isinstance(module, LongRoPE):
            module.choose(long=False)


def _correct_ropes(model: "nn.Module", config: dict[str, Any]) -> None:
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


def _scaled(rope: "nn.RoPE", config: dict[str, Any], kind: str | None) -> "nn.Module":
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


def _multiply_keys(model: "nn.Module", config: dict[str, Any]) -> None:
    """Apply Falcon H1's ``key_multiplier``."""
    # mlx-lm looks for it under a weight name that no checkpoint has.
    for layer in model.layers:
        layer.self_attn.scale *= config["key_multiplier"]


def _set_mamba2_norms(model: "nn.Module", config: dict[str, Any]) -> None:
    """Give Mamba 2's norms the config's epsilon and groups; mlx-lm's gated norm spans the whole width."""
    from .corrected_layers import GroupedNorm

    groups = config.get("n_groups") or 1
    for layer in model.layers:
        layer.norm.eps = config["layer_norm_epsilon"]
        if groups > 1:
            layer.mixer.norm = GroupedNorm(layer.mixer.norm, groups)


def _scale_tied_head(model: "nn.Module", config: dict[str, Any]) -> None:
    from .corrected_layers import TiedHead

    if config.get("tie_word_embeddings"):
        model.args.tie_word_embeddings = False
        model.lm_head = TiedHead(model.model)


def _bias_routing(model: "nn.Module", config: dict[str, Any]) -> None:
    from .corrected_layers import BiasedRouting

    for layer in model.layers:
        if "switch_mlp" in layer.mlp:
            layer.mlp = BiasedRouting(layer.mlp, config["moe_num_experts"])


def _weigh_by_share(model: "nn.Module", config: dict[str, Any]) -> None:  # noqa: ARG001
    from .corrected_layers import ShareOfAll

    for layer in model.layers:
        if "switch_mlp" in layer.feed_forward:
            layer.feed_forward = ShareOfAll(layer.feed_forward)


def _set_latent_eps(model: "nn.Module", config: dict[str, Any]) -> None:  # noqa: ARG001
    for layer in model.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in layer.self_attn:
                layer.self_attn[name].eps = 1e-6


def _correct_indexers(model: "nn.Module", config: dict[str, Any]) -> None:
    """Fix indexer norms' epsilon, and share the last choice with layers without an indexer (GLM 5.2)."""
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


def _set_recurrent_eps(model: "nn.Module", config: dict[str, Any]) -> None:
    for layer in model.layers:
        layer.temporal_pre_norm.eps = layer.channel_pre_norm.eps = config["rms_norm_eps"]


def _make_olmo(model: "nn.Module", config: dict[str, Any]) -> None:
    """Turn a Llama into OLMo 1: norms without weights, clipped queries, keys and values."""
    from mlx import nn

    from .corrected_layers import ClippedAttention

    def norm() -> nn.Module:
        return nn.LayerNorm(config["hidden_size"], eps=1e-5, affine=False)

    model.model.norm = norm()
    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
        if limit := config.get("clip_qkv"):
            layer.self_attn = ClippedAttention(layer.self_attn, float(limit))


_FAMILIES: dict[str, Callable[["nn.Module", dict[str, Any]], None]] = {
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


# A key that is set but not read would silently give wrong answers, so it is an error unless corrections.py
# handles it. "Read" means a field of the arguments class that its source uses. Biases need no rule: weights
# that don't match the class's parameters stop the load.


def read_by(args_class: type[Any]) -> frozenset[str]:
    module = importlib.import_module(args_class.__module__)
    fields = {field.name for field in dataclasses.fields(args_class)}
    return frozenset(fields & {name for part in modules(module) for name in _uses(part)})


@functools.cache
def read_within(module: ModuleType) -> frozenset[str]:
    parts = modules(module)
    fields = {
        field.name
        for part in parts
        for value in vars(part).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
    }
    return frozenset(fields & {name for part in parts for name in _uses(part)})


@functools.cache
def modules(module: ModuleType) -> tuple[ModuleType, ...]:
    found: dict[str, ModuleType] = {}
    queue = [module]
    while queue:
        part = queue.pop()
        if part.__name__ in found:
            continue
        found[part.__name__] = part
        for value in vars(part).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
            near = importlib.import_module(name) if str(name).startswith(MODEL_MODULES) else None
            if near is not None and hasattr(near, "ModelArgs"):
                queue.append(near)
    return tuple(found.values())


@functools.cache
def _uses(module: ModuleType) -> frozenset[str]:
    # Cached: parsing a module takes longer than everything else done with a config.
    return frozenset(_names(ast.parse(inspect.getsource(module))))


def _names(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


Config = dict[str, Any]
Neutral = Callable[[Config, Any], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A key that matters unless ``neutral`` accepts its value; any of ``aliases`` may be read instead.

    parameters: source pattern of classes that have the key's parameters and so always apply them.
    """

    key: str
    neutral: Neutral
    aliases: tuple[str, ...] = ()
    parameters: str = ""


def _is(*values: Any) -> Neutral:
    return lambda _, value: value in values


def _head_dim(config: Config) -> float:
    heads = config.get("num_attention_heads") or 1
    return float(config.get("head_dim") or (config.get("hidden_size") or 0) // heads or 1)


def _all_or_llama4(config: Config, value: Any) -> bool:
    # llama4's class skips every fourth layer's rotation by itself.
    skips = [int((i + 1) % 4 != 0) for i in range(len(value))]
    return all(value) or (config.get("model_type") == "llama4_text" and value == skips)


def _no_window(config: Config, value: Any) -> bool:
    return config.get("use_sliding_window") is False or value >= (config.get("max_position_embeddings") or value + 1)


def _only_sections(_: Config, value: Any) -> bool:
    # The sections of a rotation for pictures: a text's three positions are the same, so that it rotates as usual.
    plain = value.get("rope_type", "default") in ("default", "mrope") if isinstance(value, dict) else False
    return plain and not set(value) - SECTION_KEYS


SECTION_KEYS = {"type", "rope_type", "mrope_section", "mrope_interleaved", "partial_rotary_factor"}
QK_NORM = r"\bq_norm\b|\bquery_layernorm\b|\bq_layernorm\b"

RULES = (
    Rule("rope_theta", _is(), ("rope_parameters", "rotary_emb_base", "attn_config")),
    Rule("rope_scaling", _only_sections, ("rope_parameters",)),
    Rule("rope_local_base_freq", lambda config, value: bool(value == config.get("rope_theta")), ("rope_parameters",)),
    Rule("partial_rotary_factor", _is(1, 1.0), ("rope_parameters", "rotary_pct", "rotary_dim", "rope_dim")),
    Rule("alibi", _is(False)),
    Rule("no_rope_layers", _all_or_llama4),
    Rule(
        "head_dim",
        lambda config, value: bool(value * (config.get("num_attention_heads") or 1) == config.get("hidden_size")),
        ("qk_rope_head_dim",),
    ),
    Rule("per_layer_config", lambda config, value: not value or "global_head_dim" in config),
    Rule(
        "num_key_value_heads",
        lambda config, value: bool(value == (config.get("num_attention_heads") or config.get("n_head"))),
        ("num_attention_groups", "attn_config", "kv_lora_rank"),
    ),
    Rule("query_pre_attn_scalar", lambda config, value: bool(value == _head_dim(config))),
    Rule("attention_multiplier", lambda config, value: bool(abs(value - _head_dim(config) ** -0.5) < 1e-6)),
    Rule("attn_logit_softcapping", _is(0, 0.0)),
    Rule("final_logit_softcapping", _is(0, 0.0)),
    Rule("embedding_multiplier", _is(1, 1.0)),
    Rule("residual_multiplier", _is(1, 1.0)),
    Rule("logits_scaling", _is(1, 1.0)),
    Rule("logit_scale", _is(1, 1.0)),
    Rule("rope_interleave", _is(True)),
    Rule("scale_attn_weights", _is(True)),
    Rule("scale_attn_by_inverse_layer_idx", _is(False)),
    Rule("clip_qkv", _is(0, False)),
    Rule("use_qk_norm", _is(False), parameters=QK_NORM),
    Rule("qk_layernorm", _is(False), parameters=QK_NORM),
    Rule("use_parallel_residual", _is(False)),
    Rule("use_bidirectional_attention", _is(False, "vision")),  # "vision" is about the tokens of a picture
    # 1e-5 is what MLX's norms take when a class passes nothing.
    Rule("rms_norm_eps", _is(1e-5)),
    Rule("layer_norm_eps", _is(1e-5)),
    Rule("norm_eps", _is(1e-5)),
    Rule("norm_epsilon", _is(1e-5)),
    Rule("layer_norm_epsilon", _is(1e-5)),
    Rule("num_experts_per_tok", _is(0), ("moe_k", "moe_topk", "moe_top_k", "top_k_experts")),
    Rule("norm_topk_prob", _is(False)),
    Rule("routed_scaling_factor", _is(1, 1.0)),
    Rule("n_group", _is(0, 1)),
    Rule("first_k_dense_replace", _is(0), ("is_moe_layer", "mlp_layer_types")),
    Rule("mlp_only_layers", _is([])),
    Rule("decoder_sparse_step", _is(1)),
    Rule("swiglu_limit", _is(0, 0.0)),
    Rule("swiglu_alpha", _is(1, 1.0)),
    Rule("index_topk_freq", _is(1)),
    Rule("indexer_types", lambda _, value: "shared" not in value),
)
ROTARY_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")


def _rotates(config: Config) -> bool:
    # Some files have rotary keys but no rotation.
    kind = config.get("model_type")
    return not (kind in {"nemotron_h", "jamba"} or (kind == "kimi_linear" and config.get("mla_use_nope") is True))


HARD_CODED: dict[str, Config] = {
    # model type: {key: the value its class has built in}
    "deepseek_v4": {"num_key_value_heads": 1},
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "llama4_text": {"num_experts_per_tok": 1},
    "nanochat": {"final_logit_softcapping": 15.0},
    "recurrent_gemma": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "num_key_value_heads": 1},
}
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    # Keys that files have and that the reference does not read either: it divides by the sum of the chosen, whatever they say.
    "hunyuan_v1_moe": frozenset({"norm_topk_prob", "routed_scaling_factor"}),
}
KNOWN_WRONG: dict[str, str] = {
    # Where mlx-lm's class differs from the model whatever its config says, found by comparing with transformers.
    "minimax": "mlx-lm's class of that name is for MiniMax M2, and MiniMax 01 keeps a state in most of its layers",
    "phi3small": "mlx-lm adds its causal mask as numbers, so a token sees those after it",
}

# Model types with plain attention whose windows the KV plan applies (engine/kv), whatever mlx-lm's class does.
WINDOWED_BY_PLAN = frozenset({
    "gemma2", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip

WINDOW_KEYS = {"sliding_window", "sliding_window_size", "attention_window_size"}

# Kinds of rotary scaling that a class takes, where they are fewer than mlx-lm's `initialize_rope` knows.
ROPE_KINDS = {"phi3": {"longrope"}, "phimoe": {"longrope"}, "nemotron": {"linear"}, "qwen2_moe": {"linear"}}
KNOWN_ROPE_KINDS = frozenset({
    "default", "linear", "dynamic", "llama3", "yarn", "deepseek_yarn", "telechat3-yarn", "longrope", "proportional", "mrope",
})  # fmt: skip

ACTIVATIONS = {
    # transformers' name: how mlx-lm's sources spell it
    "silu": r"\bsilu\b|swiglu|SwitchGLU\(",
    "gelu": r"nn\.gelu\(|nn\.GELU\(\)",
    "gelu_pytorch_tanh": r"gelu_approx|GELU\(approx=|geglu",
    "relu2": r"relu2|ReLU2|relu_squared",
    "relu": r"nn\.relu\([^)]*\)(?!\.square)|nn\.ReLU\(\)",
    "xielu": r"XieLU",
    "swigluoai": r"SwigluOAI",
}
SAME_ACTIVATION = {
    **{"swish": "silu", "sqrelu": "relu2"},
    **dict.fromkeys(("gelu_new", "gelu_fast"), "gelu_pytorch_tanh"),
}

# Quantization methods whose weights mlx-lm can unpack.
PACKERS = {"awq", "gptq", "mxfp4", "mxfp8", "bitnet", "compressed-tensors", "modelopt", "fp8"}
COMPRESSED_FORMS = {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized"}
HINT = "Its text would be wrong. Choose another model, a newer Tokamac, or load it as it is (--unchecked)."


def check_config(config: Config, args_class: type[Any]) -> None:
    """Raise ModelUnsupportedError, with key and value, for a setting that the class ignores."""
    for doubt in doubts_of(config, args_class):
        raise doubt


def doubts_of(config: Config, args_class: type[Any]) -> Iterator[ModelUnsupportedError]:
    """Yield each setting the class would compute differently. Raises ModelUnsupportedError if no model results."""
    module = importlib.import_module(args_class.__module__)
    kind = str(config.get("model_type"))
    if kind in KNOWN_WRONG:
        yield ModelUnsupportedError(f"{kind} models would be computed wrongly: {KNOWN_WRONG[kind]}", HINT)
    _require_fields(config, args_class)
    _check_packing(config)
    read = read_within(module) if _arranges(args_class) else read_by(args_class)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            yield from _check_part(part, read if part is config else read_within(module), module)


def _check_part(config: Config, read: frozenset[str], module: ModuleType) -> Iterator[ModelUnsupportedError]:
    kind = str(config.get("model_type"))
    wrapper = isinstance(config.get("text_config"), dict)
    built_in = HARD_CODED.get(kind, {})
    for rule in () if wrapper else RULES:
        value = config.get(rule.key)
        if value is None or read.intersection((rule.key, *rule.aliases)) or corrects(config, rule.key):
            continue
        if rule.key in WITHOUT_EFFECT.get(kind, ()):
            continue
        if rule.key in ROTARY_KEYS and not _rotates(config):
            continue
        if rule.parameters and re.search(rule.parameters, _source(module)):
            continue
        if value != built_in[rule.key] if rule.key in built_in else not rule.neutral(config, value):
            yield _refusal(kind, rule.key, value)
    if wrapper:
        return
    yield from _check_rope(config, read, kind)
    yield from _check_layers(config, read, kind)
    yield from _check_activation(config, read, kind, module)
    yield from _check_tied(config, read, kind, module)
    yield from _check_families(config, kind)


def _check_families(config: Config, kind: str) -> Iterator[ModelUnsupportedError]:
    if kind == "falcon_h1" and config.get("attention_in_multiplier", 1.0) != 1.0:  # of values nothing is multiplied
        yield _refusal(kind, "attention_in_multiplier", config["attention_in_multiplier"])
    if kind == "gemma" and config.get("hidden_act") not in (None, *GELU_ERF, *GELU_TANH):
        yield _refusal(kind, "hidden_act", config["hidden_act"])
    if kind == "dbrx":
        yield from _check_dbrx(config)
    offset, period = config.get("expert_layer_offset"), config.get("expert_layer_period")
    if kind == "jamba" and isinstance(offset, int) and isinstance(period, int) and 2 * offset % max(period, 1):
        yield _refusal(kind, "expert_layer_offset", offset)  # it is added where the model subtracts it


def _check_dbrx(config: Config) -> Iterator[ModelUnsupportedError]:
    experts, attention = config.get("ffn_config") or {}, config.get("attn_config") or {}
    if experts.get("moe_normalize_expert_weights", 1) != 1:
        yield _refusal("dbrx", "moe_normalize_expert_weights", experts["moe_normalize_expert_weights"])
    if (experts.get("ffn_act_fn") or {}).get("name", "silu") != "silu":
        yield _refusal("dbrx", "ffn_act_fn", experts["ffn_act_fn"])
    for key in ("clip_qkv", "rope_theta"):
        if not isinstance(attention.get(key), int | float):
            yield _refusal("dbrx", f"attn_config.{key}", attention.get(key))


def _check_rope(config: Config, read: frozenset[str], kind: str) -> Iterator[ModelUnsupportedError]:
    scaling = config.get("rope_scaling") or {}
    rope = scaling.get("rope_type", "default")
    if rope not in ROPE_KINDS.get(kind, KNOWN_ROPE_KINDS) | {"default"}:
        yield _refusal(kind, "rope_scaling.rope_type", rope)
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if not isinstance(local, dict) or "rope_parameters" in read:
        return
    # Every class that has a rotary base of its own for sliding layers gives them no scaling; olmo3's and step3p5's likewise.
    if "rope_local_base_freq" in read or kind in {"olmo3", "step3p5"}:
        if local.get("rope_type", "default") != "default":
            yield _refusal(kind, "rope_parameters.sliding_attention", local)
    elif scaling and local.get("rope_type") != rope:
        yield _refusal(kind, "rope_parameters.sliding_attention", local)


def _check_layers(config: Config, read: frozenset[str], kind: str) -> Iterator[ModelUnsupportedError]:
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    listed: list[Any] = kinds if isinstance(kinds, list) else []
    full = [name == "full_attention" for name in listed]
    plain = isinstance(kinds, list) and set(listed) <= {"full_attention", "sliding_attention"}

    def regular(period: int) -> list[bool]:
        return [period > 0 and (i + 1) % period == 0 for i in range(len(listed))]

    if "layer_types" not in read:
        slides = plain and "sliding_window_pattern" in read and kind != "exaone4"
        linear = "linear_attention" in listed and "full_attention_interval" in read
        if (slides and full != regular(config.get("sliding_window_pattern") or 0)) or (
            linear and full != regular(config.get("full_attention_interval") or 1)
        ):
            yield _refusal(kind, "layer_types", kinds)
    windowed = isinstance(window, int) and not _no_window(config, window)
    slides_somewhere = not plain or "sliding_attention" in listed
    if windowed and slides_somewhere and kind not in WINDOWED_BY_PLAN and not read & WINDOW_KEYS:
        yield _refusal(kind, "sliding_window", window)


def _check_activation(
    config: Config, read: frozenset[str], kind: str, module: ModuleType
) -> Iterator[ModelUnsupportedError]:
    key = next((key for key in ACTIVATION_KEYS if config.get(key)), "")
    wanted = config.get(key)
    if not isinstance(wanted, str) or key in read or corrects(config, key):
        return
    source = _source(module)
    spelled = ACTIVATIONS.get(SAME_ACTIVATION.get(wanted, wanted))
    found = any(re.search(pattern, source) for pattern in ACTIVATIONS.values())
    if found and (spelled is None or not re.search(spelled, source)):
        yield _refusal(kind, key, wanted)


def _check_tied(config: Config, read: frozenset[str], kind: str, module: ModuleType) -> Iterator[ModelUnsupportedError]:
    source = _source(module)
    tied, able = config.get("tie_word_embeddings"), "as_linear" in source or "tie_word_embeddings" in read
    if (tied is True and not able) or (tied is True and kind == "helium"):  # helium's class makes a head even so
        yield _refusal(kind, "tie_word_embeddings", True)
    if kind == "lfm2":
        return  # always tied: a head of its own would not load, and mlx-lm's class for LFM2-VL writes false here
    if tied is False and "tie_word_embeddings" not in read and "as_linear" in source and "lm_head = " not in source:
        yield _refusal(kind, "tie_word_embeddings", False)


@functools.cache
def _source(module: ModuleType) -> str:
    return "".join(inspect.getsource(part) for part in modules(module))


def _check_packing(config: Config) -> None:
    packing = config.get("quantization_config")
    method = packing.get("quant_method") if isinstance(packing, dict) else None
    if config.get("quantization") or is_fp8(config):
        return
    form = _form(packing) if isinstance(packing, dict) else None
    if (method is not None and method not in PACKERS) or form is not None:
        raise ModelUnsupportedError(
            f"its weights are packed by {method}{f' as {form}' if form else ''}, which mlx-lm can't unpack",
            "Choose the original model, or one quantized with MLX, AWQ or GPTQ.",
        )


def _form(packing: Config) -> str | None:
    method, settings = packing.get("quant_method"), packing.get("quantization") or packing
    if method == "compressed-tensors" and packing.get("format") not in COMPRESSED_FORMS:
        return str(packing.get("format"))
    if method == "modelopt" and settings.get("quant_algo") != "NVFP4":
        return str(settings.get("quant_algo"))
    return None


def _arranges(args_class: type[Any]) -> bool:
    # A class with a from_dict of its own takes the language model's keys flat or nested.
    return "from_dict" in vars(args_class)


def _require_fields(config: Config, args_class: type[Any]) -> None:
    nested = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    present = {*config, *(nested or {}), "text_config"} if _arranges(args_class) else set(config)
    for field in dataclasses.fields(args_class):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in present:
            raise ModelUnsupportedError(
                f"config.json of this {config.get('model_type')} model has no {field.name!r}, which its class needs",
                "The file may be damaged or from another version: download the model again, or choose another.",
            )


def _refusal(kind: str, key: str, value: Any) -> ModelUnsupportedError:
    shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
    return ModelUnsupportedError(f"config.json sets {key} to {shown}, which mlx-lm's {kind} class does not read", HINT)
