"""llama.cpp's architectures as mlx-lm's classes: one row of a table each."""

# Names of tensors and keys are those of llama.cpp's converter (gguf-py: constants.py, tensor_mapping.py), what it does to
# weights is undone: rows of q and k are interleaved where its rotation works on neighbours (``turned``), Gemma's norms have
# the 1 that its class adds (``less_one``), arrays lose dimensions of length 1 (``shapes``), heads stand in another order
# (``parts``). What a file does not say is ``given``, as llama.cpp has it in its own code.

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .blocks import Order
from .parameters import Config, HyperParameters, Shape, rope_scaling
from .places import damaged

Parts = dict[str, tuple[Order, Shape]]  # modules that have rows of one tensor: which, and the array's shape

KEYS = {
    # config.json's key: the file's, after the architecture's name
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
EXPERT_KEYS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
NORM_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = NORM_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. wide: its activations leave float16's range, so a GPU computes it in bfloat16."""

    model_type: str
    layer: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    stem: str = "model.layers"
    turned: bool = False
    less_one: bool = False
    logs: frozenset[str] = frozenset()  # names whose logarithm the class has
    wide: bool = False
    partial: bool = False
    head_dim: bool = True
    nested: bool = False  # its class reads a config within a config
    keys: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    parts: Mapping[str, Callable[[HyperParameters, Shape], Parts]] = field(default_factory=dict)
    more: Callable[[HyperParameters], Config] | None = None
    bare: frozenset[str] = frozenset()  # names of modules whose array has no name of its own


def _gemma_scale(largest: int) -> Callable[[HyperParameters], Config]:
    """The 27B models divide scores by another width than their heads': llama.cpp knows them by their layers."""

    def more(params: HyperParameters) -> Config:
        scale = params.head_dim
        if params.layers == largest:
            scale = params.number("embedding_length") // params.number("attention.head_count")
        return {"query_pre_attn_scalar": scale} | _period(params)

    return more


def _period(params: HyperParameters) -> Config:
    pattern = params.find("attention.sliding_window_pattern")
    return {"sliding_window_pattern": pattern} if isinstance(pattern, int) and pattern else {}


def _experts(params: HyperParameters) -> Config:
    first = next((name for name in params.file.tensors if name.endswith("ffn_down_exps.weight")), "")
    config: Config = {"moe_intermediate_size": params.shape(first)[-1]}
    config["intermediate_size"] = params.number("feed_forward_length", config["moe_intermediate_size"])
    shared = first.replace("_exps", "_shexp")
    return config | ({"shared_expert_intermediate_size": params.shape(shared)[-1]} if params.has(shared) else {})


def _hunyuan_moe(params: HyperParameters) -> Config:
    widths = _experts(params)
    shared = params.shape("blk.0.ffn_down_shexp.weight")[-1]
    return widths | {"num_shared_expert": max(1, shared // widths["intermediate_size"])}


def _sliding(period: int) -> Callable[[HyperParameters], Config]:
    def more(params: HyperParameters) -> Config:
        slides = params.slides or [(index + 1) % period != 0 for index in range(params.layers)]
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}

    return more


def _phi3(params: HyperParameters) -> Config:
    original = params.number("rope.scaling.original_context_length", params.number("context_length"))
    window = params.find("attention.sliding_window")  # 0 in Phi-4, which has none
    return {"original_max_position_embeddings": original} | ({"sliding_window": window} if window else {})


def _ministral3(params: HyperParameters) -> Config:
    scaling = rope_scaling(params) or {"rope_type": "default"}
    rope = {
        "original_max_position_embeddings": params.number("context_length"),
        "rope_theta": params.number("rope.freq_base", 1e6),
        "llama_4_scaling_beta": params.number("attention.temperature_scale", 0.0),
        "mscale": 1.0,
        "mscale_all_dim": params.number("rope.scaling.yarn_log_multiplier", 0.0),
    }
    return {"rope_parameters": rope | scaling, "rope_scaling": None}


def _lfm2(params: HyperParameters) -> Config:
    heads = params.find("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * params.layers
    types = ["full_attention" if each else "conv" for each in heads[: params.layers]]
    dims = {"block_dim": params.number("embedding_length"), "block_ff_dim": params.number("feed_forward_length")}
    return {"layer_types": types, **dims}


def _lfm2_moe(params: HyperParameters) -> Config:
    return _lfm2(params) | _experts(params)


def _exaone4(params: HyperParameters) -> Config:
    if not params.find("attention.sliding_window"):
        return {"sliding_window": None, "sliding_window_pattern": None}
    slides = params.slides or [(index + 1) % 4 != 0 for index in range(params.layers)]
    return {"sliding_window_pattern": "".join("L" if each else "G" for each in slides)}


def _gpt_oss(params: HyperParameters) -> Config:
    scaling = rope_scaling(params)
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(params.layers)]
    # Its ends of interpolation are not rounded to whole dimensions.
    return {"layer_types": types} | ({} if scaling is None else {"rope_scaling": scaling | {"truncate": False}})


def _deepseek(params: HyperParameters) -> Config:
    rotated = params.number("rope.dimension_count")
    config = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": params.number("attention.key_length_mla", params.head_dim) - rotated,
        "v_head_dim": params.number("attention.value_length_mla", params.find("attention.value_length")),
        "num_key_value_heads": params.number("attention.head_count"),
        "q_lora_rank": params.find("attention.q_lora_rank"),
        "norm_topk_prob": bool(params.find("expert_weights_norm")),
        "moe_layer_freq": 1,
    }
    if (scaling := rope_scaling(params)) is not None:
        # Stored as a tenth of what it is: llama.cpp keeps an old mistake.
        log = float(params.number("rope.scaling.yarn_log_multiplier", 0.0)) * 10
        config["rope_scaling"] = scaling | {"mscale": log or 1.0, "mscale_all_dim": log}
    return config | _experts(params)


def _linear(params: HyperParameters) -> Config:
    keys, key_dim, each, value_dim = _linear_heads(params)
    rope = {"rope_type": "default", "rope_theta": params.number("rope.freq_base", 10_000.0)}
    rope["partial_rotary_factor"] = params.number("rope.dimension_count", params.head_dim) / params.head_dim
    config = {
        "linear_num_key_heads": keys,
        "linear_key_head_dim": key_dim,
        "linear_num_value_heads": keys * each,
        "linear_value_head_dim": value_dim,
        "full_attention_interval": params.number("full_attention_interval", 4),
        "rope_parameters": rope | (rope_scaling(params) or {}),
    }
    return config | (_experts(params) if params.find("expert_count") else {})


def _linear_heads(params: HyperParameters) -> tuple[int, int, int, int]:
    keys, values = int(params.number("ssm.group_count")), int(params.number("ssm.time_step_rank"))
    if not 0 < keys <= values <= MOST_PARTS or values % keys:
        raise damaged(params.file.files[0], f"it tells of {keys:,} heads of keys and {values:,} of values")
    return keys, int(params.number("ssm.state_size")), values // keys, int(params.number("ssm.inner_size")) // values


def _tile(keys: int, each: int) -> tuple[int, ...]:
    # llama.cpp has heads of values by turns: the first of each head of keys, then the second.
    return tuple(at * keys + key for key in range(keys) for at in range(each))


def _tiled(module: str, *, single: bool = False, after: bool = False) -> Callable[[HyperParameters, Shape], Parts]:
    def parts(params: HyperParameters, shape: Shape) -> Parts:
        keys, key_dim, each, value_dim = _linear_heads(params)
        begin, size = 2 * keys * key_dim if after else 0, 1 if single else value_dim
        runs = tuple((begin + at * size, begin + (at + 1) * size) for at in _tile(keys, each))
        return {module: (Order(((0, begin), *runs) if after else runs), shape)}

    return parts


def _tiled_columns(params: HyperParameters, shape: Shape) -> Parts:
    keys, _, each, _ = _linear_heads(params)
    return {"linear_attn.out_proj": (Order(columns=_tile(keys, each)), shape)}


def _grouped(params: HyperParameters, shape: Shape) -> Parts:
    keys, key_dim, each, value_dim = _linear_heads(params)
    fields: dict[str, tuple[int, ...]] = {"in_proj_b": (each,), "in_proj_a": (each,)}
    if shape[0] != 2 * keys * each:  # in the first files
        fields = {"in_proj_qkv": (key_dim, key_dim, each * value_dim), "in_proj_z": (each * value_dim,)}
    found, at, span = Parts(), 0, sum(map(sum, fields.values()))
    for module, widths in fields.items():
        runs = list[tuple[int, int]]()
        for width in widths:
            runs += [(key * span + at, key * span + at + width) for key in range(keys)]
            at += width
        found[f"linear_attn.{module}"] = Order(tuple(runs)), (keys * sum(widths), *shape[1:])
    return found


def halves(shape: Shape, first: str, second: str) -> Parts:
    experts, rows, width = shape if len(shape) == 3 and shape[0] <= MOST_PARTS else (0, 0, 0)
    return {
        module: (
            Order(tuple((at * rows + begin, at * rows + begin + rows // 2) for at in range(experts))),
            (experts, rows // 2, width),
        )
        for module, begin in ((first, 0), (second, rows // 2))
    }


def _stacked(module: str) -> Callable[[HyperParameters, Shape], Parts]:
    def parts(_: HyperParameters, shape: Shape) -> Parts:
        count, rows, width = shape if len(shape) == 3 and shape[0] <= MOST_PARTS else (0, 0, 0)
        return {f"{module}.{at}": (Order(((at * rows, (at + 1) * rows),)), (rows, width)) for at in range(count)}

    return parts


def _glm4_moe(params: HyperParameters) -> Config:
    more = {"norm_topk_prob": bool(params.find("expert_weights_norm")), **_experts(params)}
    return more | {"use_qk_norm": params.has("blk.0.attn_q_norm.weight")}


def _falcon_h1(params: HyperParameters) -> Config:
    heads = params.number("ssm.time_step_rank")
    return {
        "mamba_d_head": params.number("ssm.inner_size") // heads,
        "mamba_rms_norm": params.has("blk.0.ssm_norm.weight"),
        "mamba_conv_bias": params.has("blk.0.ssm_conv1d.bias"),
        # Its weights have been multiplied.
        **{f"{name}_multiplier": 1.0 for name in MULTIPLIED},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def _nemotron_h(params: HyperParameters) -> Config:
    names = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [
        next((kind for name, kind in names.items() if params.has(f"blk.{at}.{name}.weight")), "")
        for at in range(params.layers)
    ]
    heads = params.number("ssm.time_step_rank")
    dense = f"blk.{kinds.index('mlp')}.ffn_up.weight" if "mlp" in kinds else ""
    return {
        "layers_block_type": kinds,
        "intermediate_size": params.shape(dense)[0] if dense else params.least("feed_forward_length"),
        "mamba_head_dim": params.number("ssm.inner_size") // heads,
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in params.file.tensors),
        "norm_topk_prob": bool(params.find("expert_weights_norm")),
        "moe_latent_size": next(
            (tensor.shape[0] for name, tensor in params.file.tensors.items() if ".ffn_latent_down." in name), None
        ),
    }


def _per_layer(params: HyperParameters) -> Config:
    table = params.file.tensors.get("per_layer_token_embd.weight")
    slides = params.slides
    if slides is None:
        raise damaged(params.file.files[0], "it does not tell which layers slide")
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "num_kv_shared_layers": params.number("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": params.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else params.shape("token_embd.weight")[0],
    }


def _gemma4(params: HyperParameters) -> Config:
    config, widths = _per_layer(params), params.find("feed_forward_length")
    kinds, heads = config["layer_types"], params.find("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * len(kinds)
    sliding, full = ([count for kind, count in zip(kinds, heads, strict=False) if kind == each] for each in KINDS)
    whole = kinds.index("full_attention") if full else 0
    rotated = params.factors("rope_freqs.weight") if params.has("rope_freqs.weight") else [1.0]
    return config | {
        "head_dim": params.number("attention.key_length_swa"),
        "global_head_dim": params.number("attention.key_length"),
        "num_key_value_heads": (sliding or full)[0],
        "num_global_key_value_heads": (full or sliding)[0],
        "attention_k_eq_v": bool(full) and not params.has(f"blk.{whole}.attn_v.weight"),
        "use_double_wide_mlp": isinstance(widths, list) and len(set(widths)) > 1,
        "final_logit_softcapping": params.find("final_logit_softcapping"),
        "enable_moe_block": params.has("blk.0.ffn_gate_inp.weight"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": params.number("rope.freq_base_swa", 10_000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": params.number("rope.freq_base", 1e6),
                # Dimensions that don't rotate have a huge factor.
                "partial_rotary_factor": sum(factor < UNROTATED for factor in rotated) / len(rotated),
            },
        },
    }


def _gemma3n(params: HyperParameters) -> Config:
    scales = params.find("activation_sparsity_scale")  # so many standard deviations above the mean
    if not isinstance(scales, list) or not scales:
        raise damaged(params.file.files[0], "it does not tell how sparse its activations are")
    return _per_layer(params) | {
        "laurel_rank": params.shape("blk.0.laurel_l.weight")[0],
        "activation_sparsity_pattern": [round((1 + math.erf(scale / math.sqrt(2))) / 2, 6) for scale in scales],
        "final_logit_softcapping": params.number("final_logit_softcapping", 30.0),
    }


def _first(shape: Shape) -> Shape:
    return (1, *shape)


def _channels(shape: Shape) -> Shape:
    return (*shape, 1) if len(shape) == 2 else shape  # a bias stays


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _state_space(module: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{name}": f"{module}.{part}" for name, part in {**parts, "out": "out_proj"}.items()}


SIGMOID = 2  # expert_gating_func
MOST_PARTS = 4096  # heads or experts of a layer, far more than any has
UNROTATED = 1e20
KINDS = ("sliding_attention", "full_attention")
MULTIPLIED = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
FUSED = {"ffn_up": "mlp.gate_up_proj", "attn_qkv": "self_attn.qkv_proj"}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
GATE_ROW = {"ffn_gate_inp_shexp": _first}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
WINDOW = {"sliding_window": "attention.sliding_window"}
LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
LATENT = SHARED | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}  # fmt: skip
DEEPSEEK_KEYS = {
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "kv_lora_rank": "attention.kv_lora_rank",
}  # fmt: skip
GEMMA: Config = {"hidden_activation": "gelu_pytorch_tanh"}
STATE_SHAPES = {"ssm_a": _flat, "ssm_d": _flat, "ssm_norm": _flat, "ssm_conv1d": _channels}
STATE_LOGS, STATE_BARE = frozenset({"ssm_a"}), frozenset({"ssm_dt"})
STATE_KEYS = {"conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size", "n_groups": "ssm.group_count"}
LINEAR = NORM_AFTER | _state_space("linear_attn") | {
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
}  # fmt: skip
TILED = {
    "attn_qkv": _tiled("linear_attn.in_proj_qkv", after=True),
    "ssm_conv1d": _tiled("linear_attn.conv1d", after=True),
    "attn_gate": _tiled("linear_attn.in_proj_z"),
    "ssm_out": _tiled_columns,
    **{stem: _tiled(LINEAR[stem], single=True) for stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")},
}
PER_LAYER = SANDWICH | {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
PER_LAYER_TOP = {
    "per_layer_token_embd": "embed_tokens_per_layer", "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}  # fmt: skip
HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
MIXTRAL = Architecture(
    "mixtral",
    {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {f"ffn_{part}_exps": f"block_sparse_moe.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    turned=True,
    keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)
BIASED = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
LFM2_TOP = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
LFM2_KEYS = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
OLMO3 = Architecture("olmo3", NORM_AFTER, keys=WINDOW, more=_sliding(4))
DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    LATENT | BIASED | {"attn_k_b": "self_attn.embed_q", "attn_v_b": "self_attn.unembed_out"},
    head_dim=False, wide=True, keys=DEEPSEEK_KEYS, bare=frozenset({"exp_probs_b"}), more=_deepseek,
    given={"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)  # fmt: skip
QWEN35 = Architecture(
    "qwen3_5_text", LINEAR, {name: f"language_model.{place}" for name, place in TOP.items()},
    "language_model.model.layers", logs=STATE_LOGS, bare=STATE_BARE, shapes=STATE_SHAPES | GATE_ROW, parts=TILED,
    keys=EXPERT_KEYS | {"linear_conv_kernel_dim": "ssm.conv_kernel"}, more=_linear,
)  # fmt: skip
FAMILIES: dict[str, Architecture] = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2", head_dim=False),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", keys=EXPERT_KEYS, head_dim=False, shapes=GATE_ROW, more=_experts,
                       given={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), Architecture(
        "qwen3_moe", keys=EXPERT_KEYS, more=_experts,
        given={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []})),
    "olmoe": Architecture("olmoe", keys=EXPERT_KEYS, given={"norm_topk_prob": False}),
    # Without pictures, positions in a plane are those in a line.
    "qwen2vl": Architecture("qwen2", head_dim=False),
    "qwen3vl": Architecture("qwen3"),
    "gemma": Architecture("gemma", {"ffn_norm": "post_attention_layernorm"}, less_one=True, wide=True, given=GEMMA),
    "gemma2": Architecture("gemma2", SANDWICH, less_one=True, wide=True, keys=CAPS | WINDOW, given=GEMMA,
                     more=_gemma_scale(46)),
    "gemma3": Architecture("gemma3_text", SANDWICH, less_one=True, wide=True, more=_gemma_scale(62),
                     keys=WINDOW | {"rope_local_base_freq": "rope.freq_base_swa"},
                     given=GEMMA | {"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0}),
    "phi3": Architecture("phi3", FUSED, partial=True, head_dim=False, more=_phi3),
    "granite": Architecture("granite", turned=True, head_dim=False, keys=GRANITE),
    "granitemoe": Architecture("granitemoe", {**MIXTRAL.layer, "ffn_gate_inp": "block_sparse_moe.router.layer"},
                               turned=True, head_dim=False, keys={**GRANITE, **MIXTRAL.keys}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", HUNYUAN),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", HUNYUAN | {"ffn_gate_inp": "mlp.gate.wg"}
                                | {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
                                more=_hunyuan_moe, keys={"num_experts": "expert_count", "moe_topk": "expert_used_count"}),
    "minimax-m2": Architecture("minimax_m2",
                               {**MIXTRAL.layer, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}, wide=True,
                               keys={**MIXTRAL.keys, "rotary_dim": "rope.dimension_count"}, bare=frozenset({"exp_probs_b"})),
    "dots1": Architecture("dots1", SHARED | BIASED
                          | {f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}, wide=True,
                          keys=DEEPSEEK_KEYS, bare=frozenset({"exp_probs_b"}), more=_glm4_moe,
                          given={"n_group": 1, "topk_group": 1, "scoring_func": "noaux_tc"}),
    "mistral3": Architecture("ministral3", turned=True, more=_ministral3),
    "olmo2": Architecture("olmo2", NORM_AFTER),
    "nemotron": Architecture("nemotron", less_one=True, partial=True, keys={"norm_eps": LAYER_NORM["layer_norm_eps"]},
                             given={"hidden_act": "relu2"}),
    "stablelm": Architecture("stablelm", partial=True, head_dim=False, keys=LAYER_NORM,
                             more=lambda params: {"use_qkv_bias": params.has("blk.0.attn_q.bias"),
                                                  "use_parallel_residual": bool(params.find("use_parallel_residual"))}),
    "smollm3": Architecture("smollm3", turned=True, given={"no_rope_layer_interval": 4}),
    "starcoder2": Architecture("starcoder2", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, head_dim=False,
                         keys={"norm_epsilon": "attention.layer_norm_epsilon"},
                         given={"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "command-r": Architecture("cohere", keys=LAYER_NORM | {"logit_scale": "logit_scale"}, head_dim=False,
                        more=lambda params: {"use_qk_norm": params.has("blk.0.attn_q_norm.weight")}),
    "cohere2": Architecture("cohere2", keys=LAYER_NORM | WINDOW | {"logit_scale": "logit_scale"},
                      given={"sliding_window_pattern": 4}, more=_period),
    "exaone4": Architecture("exaone4", NORM_AFTER, keys=WINDOW, more=_exaone4),
    "glm4": Architecture("glm4", FUSED | {"post_attention_norm": "post_self_attn_layernorm",
                                    "post_ffw_norm": "post_mlp_layernorm"}, partial=True),
    "ernie4_5": Architecture("ernie4_5", more=lambda params: {"use_bias": params.has("blk.0.attn_q.bias")}),
    "seed_oss": Architecture("seed_oss", {"post_attention_norm": "post_attention_layernorm"},
                       more=lambda params: {"attention_out_bias": params.has("blk.0.attn_output.bias")}),
    "arcee": Architecture("arcee", turned=True),
    # Qwen3-Next's class has in one matrix what may be of two types here; Qwen3.5's computes the same from two.
    "qwen3next": replace(QWEN35, model_type="qwen3_5_moe_text", parts={"ssm_ba": _grouped, "ssm_in": _grouped}),
    "qwen35": QWEN35,
    "qwen35moe": replace(QWEN35, model_type="qwen3_5_moe_text"),
    "glm4moe": Architecture("glm4_moe", NORM_AFTER | SHARED | BIASED,
                      partial=True, wide=True, keys=DEEPSEEK_KEYS, bare=frozenset({"exp_probs_b"}),
                      given={"n_group": 1, "topk_group": 1}, more=_glm4_moe),
    "exaone": Architecture(
        "exaone",
        {"attn_norm": "ln_1", **{f"attn_{part}": f"attn.attention.{part}_proj" for part in "qkv"},
         "attn_output": "attn.attention.out_proj", "ffn_norm": "ln_2", "ffn_gate": "mlp.c_fc_0", "ffn_up": "mlp.c_fc_1",
         "ffn_down": "mlp.c_proj"},
        {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f"}, "transformer.h",
        keys={"rms_norm_eps": "", "layer_norm_epsilon": "attention.layer_norm_rms_epsilon", "num_layers": "block_count"},
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _state_space("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"}  # with a leaf or without
        | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        {"output_norm": "model.final_layernorm"}, logs=STATE_LOGS, bare=STATE_BARE | {"ffn_norm"},
        shapes=STATE_SHAPES, more=_falcon_h1,
        keys={"mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_d_ssm": "ssm.inner_size",
              "mamba_n_groups": "ssm.group_count", "mamba_n_heads": "ssm.time_step_rank"},
        given={"mamba_norm_before_gate": False},
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        "nemotron_h",
        _state_space("mixer")
        | {"attn_norm": "norm", **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
           "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
           "ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias",
           "ffn_up_exps": "mixer.switch_mlp.fc1", "ffn_down_exps": "mixer.switch_mlp.fc2",
           "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
           **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")}},
        {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}, "backbone.layers",
        logs=STATE_LOGS, bare=STATE_BARE | {"exp_probs_b"}, shapes=STATE_SHAPES, more=_nemotron_h,
        keys=STATE_KEYS | DEEPSEEK_KEYS
        | {"rms_norm_eps": "", "layer_norm_epsilon": "attention.layer_norm_rms_epsilon", "mamba_num_heads": "ssm.time_step_rank",
           "moe_intermediate_size": "expert_feed_forward_length",
           "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        given={"mamba_proj_bias": False, "use_bias": False, "n_group": 1, "topk_group": 1},
    )),
    "gemma3n": Architecture(
        "gemma3n",
        PER_LAYER
        | {"altup_correct_coef": "altup.correction_coefs", "altup_correct_scale": "altup.correct_output_scale",
           "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
           "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
           "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm"},
        {name: f"model.language_model.{place}" for name, place in PER_LAYER_TOP.items()}
        | {"token_embd": "model.language_model.embed_tokens", "output_norm": "model.language_model.norm"},
        "model.language_model.layers", wide=True, nested=True, bare=frozenset({"altup_correct_scale"}), more=_gemma3n,
        keys=WINDOW | {"rope_local_base_freq": "rope.freq_base_swa", "altup_num_inputs": "altup.num_inputs",
                       "altup_active_idx": "altup.active_idx"},
        given=GEMMA | {"rope_local_base_freq": 10_000.0, "altup_coef_clip": 120.0, "altup_correct_scale": True},
        parts={"altup_proj": _stacked("model.language_model.altup_projections"),
               "altup_unembd_proj": _stacked("model.language_model.altup_unembed_projections")},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        PER_LAYER
        | {"layer_output_scale": "layer_scalar", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
           "ffn_down_exps.scale": "router.per_expert_scale", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
           **{f"post_ffw_norm_{at}": f"post_feedforward_layernorm_{at}" for at in (1, 2)},
           **{f"ffn_{part}_exps": f"experts.switch_glu.{part}_proj" for part in ("gate", "up", "down")}},
        {name: f"model.{place}" for name, place in PER_LAYER_TOP.items()},
        wide=True, keys=WINDOW | {"num_experts": "expert_count", "top_k_experts": "expert_used_count",
                                  "moe_intermediate_size": "expert_feed_forward_length"},
        given=GEMMA, bare=frozenset({"layer_output_scale"}), more=_gemma4,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
         "ffn_gate_inp": "mlp.router",
         **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}},
        wide=True, bare=frozenset({"attn_sinks"}), more=_gpt_oss,
        keys=WINDOW | {"intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
                       "num_experts_per_tok": "expert_used_count"},
    ),
    "deepseek2": Architecture("deepseek_v2", LATENT | {"attn_kv_b": "self_attn.kv_b_proj"}, head_dim=False, wide=True,
                        keys=DEEPSEEK_KEYS, more=_deepseek,
                        given={"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}),
    "lfm2": Architecture(
        "lfm2", LFM2 | {"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"},
        LFM2_TOP, head_dim=False, keys=LFM2_KEYS,
        given={"conv_bias": False,
               "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
        shapes={"shortconv.conv": _channels}, more=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        LFM2 | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"}
        | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
        | {f"ffn_{part}_exps": f"feed_forward.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
        LFM2_TOP, head_dim=False,
        keys=LFM2_KEYS | EXPERT_KEYS | {"num_dense_layers": "leading_dense_block_count"},
        given={"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True},
        shapes={"shortconv.conv": _channels}, bare=frozenset({"exp_probs_b"}), more=_lfm2_moe,
    ),
}  # fmt: skip
