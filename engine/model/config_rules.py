"""Which keys of a config change what a model computes, and whether mlx-lm's class for it reads them.

A key that matters, is set to something, and is read by nothing would be a wrong answer in silence: here it is an error. Whether
a class, mlx-lm's or ours, reads a key is found in its source: it must be a field of the class's arguments, and be used.
``corrections.py`` sets right what some classes hard-code; those cases are no errors. Biases and other parameters need no rule:
weights that a class has no place for, or lacks, stop the load.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..architectures import MODEL_MODULES
from ..errors import ModelUnsupportedError
from .corrections import ACTIVATION_KEYS, GELU_ERF, GELU_TANH, corrects
from .weights import is_fp8


def read_by(args_class: type[Any]) -> frozenset[str]:
    """Return the fields of a class's arguments that its source uses."""
    module = importlib.import_module(args_class.__module__)
    fields = {field.name for field in dataclasses.fields(args_class)}
    return frozenset(fields & {name for part in modules(module) for name in _uses(part)})


@functools.cache
def read_within(module: ModuleType) -> frozenset[str]:
    """Return what any arguments class in reach of a module has as a field and uses: for configs nested in another."""
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
    """Return a model's module and those of the models it builds on."""
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
    """Parsed once: to parse a module takes longer than all else that is done with a config."""
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
    """A key that matters, unless ``neutral`` says its value changes nothing. Any of ``aliases`` may be read in its stead.

    parameters: a pattern of a class's source that has the parameters which the key asks for, whether it reads the key or not:
    weights must fit a class in both directions, so a class that has them always applies them.
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
    """Return whether a model rotates queries and keys at all: some files have the keys of it and no rotation."""
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

WINDOWED_BY_PLAN = frozenset({
    "gemma2", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip
"""Model types with plain attention whose windows the KV plan applies (engine/kv), whatever mlx-lm's class does."""

WINDOW_KEYS = {"sliding_window", "sliding_window_size", "attention_window_size"}

ROPE_KINDS = {"phi3": {"longrope"}, "phimoe": {"longrope"}, "nemotron": {"linear"}, "qwen2_moe": {"linear"}}
"""Kinds of rotary scaling that a class takes, where they are fewer than mlx-lm's ``initialize_rope`` knows."""
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

PACKERS = {"awq", "gptq", "mxfp4", "mxfp8", "bitnet", "compressed-tensors", "modelopt", "fp8"}
"""Quantization methods whose weights mlx-lm can unpack."""
COMPRESSED_FORMS = {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized"}
HINT = "Its text would be wrong. Choose another model, a newer Tokamac, or load it as it is (--unchecked)."


def check_config(config: Config, args_class: type[Any]) -> None:
    """Refuse a normalised config that sets something which changes the model and which mlx-lm's class does not read.

    Raises ModelUnsupportedError, naming the key and its value.
    """
    for doubt in doubts_of(config, args_class):
        raise doubt


def doubts_of(config: Config, args_class: type[Any]) -> Iterator[ModelUnsupportedError]:
    """Yield what of a normalised config its class would compute otherwise; a model may still be built, at one's own risk.

    Raises ModelUnsupportedError for a config that makes no model at all: keys are missing, or weights packed in an unknown way.
    """
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
    """Refuse values of keys that a class reads and applies wrongly."""
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
    """Refuse what DBRX's class has built in, or asks for, within the parts of its config."""
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
    """Return the source of a model's module and of those that it builds on."""
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
    """Return how compressed-tensors or ModelOpt packed the weights, where mlx-lm does not know that form; else None."""
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
