"""llama.cpp's architectures as configs and names of mlx-lm's classes: one row of a table each."""

# Names of tensors and keys are those of llama.cpp's converter (gguf-py: constants.py, tensor_mapping.py), what it does to
# weights is undone: rows of q and k are interleaved where its rotation works on neighbours (``turned``), Gemma's norms have
# the 1 that its class adds (``less_one``), arrays lose dimensions of length 1 (``shapes``). What a file does not say is
# ``given``, as llama.cpp has it in its own code.

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ModelUnsupportedError
from .file import GgufFile, GgufTensor
from .places import damaged

Config = dict[str, Any]

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
# Read for the config, or of no use: rotary factors, and what quantizers leave behind.
NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*\.attn_rot_embd")
BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
MOST_LAYERS = 4096  # far more than any model has
ROTARY_TOLERANCE = 1e-3  # relative, of stored rotary factors against those that the config makes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. wide: its activations leave float16's range, so a GPU computes it in bfloat16."""

    model_type: str
    layer: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    stem: str = "model.layers"
    turned: bool = False
    less_one: bool = False
    wide: bool = False
    partial: bool = False
    head_dim: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    more: "Callable[[HyperParameters], Config] | None" = None
    bare: frozenset[str] = frozenset()  # names of modules whose array has no name of its own


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """A file's hyper-parameters. Methods raise ModelDamagedError for one that is missing or of another type."""

    file: GgufFile

    def find(self, key: str) -> Any:
        """Return a value or None; floats as shortest decimals."""
        value = self.file.metadata.get(f"{self.file.architecture}.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.find(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise damaged(self.file.files[0], f"it has no number for {self.file.architecture}.{key}")
        return value

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def shape(self, name: str) -> Shape:
        if name not in self.file.tensors:
            raise damaged(self.file.files[0], f"it has no tensor {name}")
        return self.file.tensors[name].shape

    def factors(self, name: str) -> list[float]:
        tensor = self.file.tensors[name]
        if tensor.kind.name != "F32" or math.prod(tensor.shape) > 1 << 16:
            raise damaged(self.file.files[0], f"{name} holds no rotary factors")
        return [float(value) for value in tensor.read().view(np.float32).reshape(-1)]

    @property
    def layers(self) -> int:
        """Without those that predict further tokens."""
        count = int(self.number("block_count")) - int(self.number("nextn_predict_layers", 0))
        if not 0 < count <= MOST_LAYERS:
            raise damaged(self.file.files[0], f"it tells of {count:,} layers")
        return count

    @property
    def head_dim(self) -> int:
        heads = self.number("attention.head_count") or 1
        return int(self.number("attention.key_length", self.number("embedding_length") // heads))

    @property
    def slides(self) -> list[bool] | None:
        """Which layers slide, where the file tells it for each or by a period."""
        pattern = self.find("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return [bool(each) for each in pattern[: self.layers]]
        return None if not pattern else [(index + 1) % int(pattern) != 0 for index in range(self.layers)]


def config_of(file: GgufFile) -> Config:
    """Return what config.json would hold. Raises ModelUnsupportedError for an unknown architecture."""
    family, params = family_of(file), HyperParameters(file)
    config: Config = {
        "model_type": family.model_type,
        "num_hidden_layers": params.layers,
        "vocab_size": params.shape("token_embd.weight")[0],
        "rope_theta": params.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not params.has("output.weight"),
        "attention_bias": params.has("blk.0.attn_q.bias"),
        "mlp_bias": params.has("blk.0.ffn_up.bias"),
        "torch_dtype": dtype_of(file),
        **family.given,
    }
    if family.head_dim:
        config["head_dim"] = params.head_dim
    for name, key in {**KEYS, **family.keys}.items():
        if params.find(key) is not None:
            config[name] = params.number(key) if key != "attention.head_count_kv" else _kv_heads(params)
    if (scaling := _rope_scaling(params)) is not None:
        config["rope_scaling"] = scaling
    if family.partial:
        config["partial_rotary_factor"] = params.number("rope.dimension_count", params.head_dim) / params.head_dim
    return config | (family.more(params) if family.more else {})


def family_of(file: GgufFile) -> Architecture:
    """Raises ModelUnsupportedError, naming the architecture."""
    name = file.architecture
    family = FAMILIES.get(name)
    if family is None:
        raise ModelUnsupportedError(
            f"{file.files[0]} is a GGUF file of the architecture {name:.60}, which is not known here",
            "Use the model's safetensors version, for example from mlx-community.",
        )
    if name == "llama" and HyperParameters(file).find("expert_count"):
        return MIXTRAL
    if name == "olmo2" and HyperParameters(file).find("attention.sliding_window"):
        return OLMO3
    if name == "deepseek2" and HyperParameters(file).find("expert_gating_func") == SIGMOID:
        return DEEPSEEK_V3
    return family


def dtype_of(file: GgufFile) -> str:
    """Return the type that a GPU computes in: float16 where it fits."""
    stored = {tensor.kind.name for tensor in file.tensors.values()}
    return "bfloat16" if "BF16" in stored or family_of(file).wide else "float16"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes; ``module`` is its whole name if ``leaf`` is empty."""

    module: str
    leaf: str
    shape: Shape
    turned: int = 0
    less_one: bool = False


def place_of(file: GgufFile, tensor: GgufTensor) -> Place | None:
    """Return a tensor's place in mlx-lm's class, None for one that isn't read. Raises ModelUnsupportedError."""
    family, params = family_of(file), HyperParameters(file)
    if NOT_WEIGHTS.match(tensor.name):
        return None
    if (found := BLOCK.fullmatch(tensor.name)) is None:
        stem, _, leaf = tensor.name.rpartition(".")
        module = {**TOP, **family.top}.get(stem)
    else:
        index, stem, leaf = int(found[1]), found[2], found[3]
        if index >= params.layers:
            return None
        part = {**LAYER, **family.layer}.get(stem)
        module = None if part is None else f"{family.stem}.{index}.{part}"
    if module is None:
        raise ModelUnsupportedError(
            f"{file.files[0]} holds {tensor.name:.80}, which {family.model_type} models are not known to have",
            "Use the model's safetensors version.",
        )
    turned = params.head_dim if family.turned and stem in ("attn_q", "attn_k") else 0
    if turned and (turned < 2 or turned % 2 or (tensor.rows if len(tensor.shape) > 1 else tensor.shape[0]) % turned):
        raise damaged(tensor.file, f"{tensor.name:.80} does not hold heads of {turned} rows")
    reshape = family.shapes.get(stem)
    return Place(
        module,
        "" if stem in family.bare else leaf,
        tensor.shape if reshape is None else reshape(tensor.shape),
        turned=turned,
        less_one=family.less_one and stem.endswith("norm"),
    )


def _kv_heads(params: HyperParameters) -> int:
    """Return the heads of layers that have any: LFM2's convolutions have none."""
    heads = params.find("attention.head_count_kv")
    return max(heads) if isinstance(heads, list) and heads else int(params.number("attention.head_count_kv"))


def _rope_scaling(params: HyperParameters) -> Config | None:
    if params.has("rope_freqs.weight"):
        return _llama3(params)
    kind = params.find("rope.scaling.type")
    if params.has("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "long_factor": params.factors("rope_factors_long.weight"),
            "short_factor": params.factors("rope_factors_short.weight"),
            "original_max_position_embeddings": params.number("rope.scaling.original_context_length"),
        }
    if kind in (None, "none") or params.number("rope.scaling.factor", 1.0) in (0, 1):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelUnsupportedError(
            f"{params.file.files[0]} scales its positions by {kind!r:.40}, which is not known here",
            "Use the model's safetensors version.",
        )
    scaling = {"rope_type": kind, "factor": params.number("rope.scaling.factor")}
    if kind == "yarn":
        for name, key in YARN.items():
            if params.find(key) is not None:
                scaling[name] = params.number(key)
    return scaling


YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
LOW, HIGH = 1.0, 4.0  # of Llama 3's scaling: its own, and nobody else's differ


def _llama3(params: HyperParameters) -> Config | None:
    """Return Llama 3's scaling from the factors that llama.cpp's converter made of it."""
    # It is 1 for short waves, `factor` for long ones, and between them 1 / ((1 - s) / factor + s) with
    # s = (original / wave - LOW) / (HIGH - LOW): so one such place tells the original length.
    factors = np.array(params.factors("rope_freqs.weight"))
    factor = float(factors.max(initial=1.0))
    if factor == 1.0:
        return None
    base, width = params.number("rope.freq_base", 10_000.0), 2 * len(factors)
    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    with np.errstate(divide="ignore"):
        smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > ROTARY_TOLERANCE) & (smooth < 1 - ROTARY_TOLERANCE)
    length = float(np.median(waves[between] * (LOW + (HIGH - LOW) * smooth[between]))) if between.any() else 8192.0
    length = float(params.number("rope.scaling.original_context_length", round(length)))
    again = np.clip((length / waves - LOW) / (HIGH - LOW), 0, 1)
    if not np.allclose(1 / ((1 - again) / factor + again), factors, rtol=ROTARY_TOLERANCE):
        raise ModelUnsupportedError(
            f"{params.file.files[0]} has rotary factors of a kind that is not known here",
            "Use the model's safetensors version.",
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 6),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(length),
    }


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
    first = next((name for name in params.file.tensors if name.endswith("ffn_gate_exps.weight")), "")
    config: Config = {"moe_intermediate_size": params.shape(first)[1]}
    config["intermediate_size"] = params.number("feed_forward_length", config["moe_intermediate_size"])
    shared = first.replace("_exps", "_shexp")
    return config | ({"shared_expert_intermediate_size": params.shape(shared)[0]} if params.has(shared) else {})


def _sliding(period: int) -> Callable[[HyperParameters], Config]:
    def more(params: HyperParameters) -> Config:
        slides = params.slides or [(index + 1) % period != 0 for index in range(params.layers)]
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}

    return more


def _phi3(params: HyperParameters) -> Config:
    original = params.number("rope.scaling.original_context_length", params.number("context_length"))
    window = params.find("attention.sliding_window")  # 0 in Phi-4, which has none
    return {"original_max_position_embeddings": original} | ({"sliding_window": window} if window else {})


def _lfm2(params: HyperParameters) -> Config:
    heads = params.find("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * params.layers
    types = ["full_attention" if each else "conv" for each in heads[: params.layers]]
    return {"layer_types": types, "block_ff_dim": params.number("feed_forward_length")}


def _exaone4(params: HyperParameters) -> Config:
    if not params.find("attention.sliding_window"):
        return {"sliding_window": None, "sliding_window_pattern": None}
    slides = params.slides or [(index + 1) % 4 != 0 for index in range(params.layers)]
    return {"sliding_window_pattern": "".join("L" if each else "G" for each in slides)}


def _gpt_oss(params: HyperParameters) -> Config:
    scaling = _rope_scaling(params)
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
    if (scaling := _rope_scaling(params)) is not None:
        # Stored as a tenth of what it is: llama.cpp keeps an old mistake.
        log = float(params.number("rope.scaling.yarn_log_multiplier", 0.0)) * 10
        config["rope_scaling"] = scaling | {"mscale": log or 1.0, "mscale_all_dim": log}
    return config | _experts(params)


def _first(shape: Shape) -> Shape:
    return (1, *shape)


def _last(shape: Shape) -> Shape:
    return (*shape, 1)


SIGMOID = 2  # expert_gating_func
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
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **SHARED,
}
DEEPSEEK_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "kv_lora_rank": "attention.kv_lora_rank",
}
GEMMA: Config = {"hidden_activation": "gelu_pytorch_tanh"}

MIXTRAL = Architecture(
    "mixtral",
    {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {f"ffn_{part}_exps": f"block_sparse_moe.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    turned=True,
    keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)
OLMO3 = Architecture("olmo3", NORM_AFTER, keys=WINDOW, more=_sliding(4))
DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    LATENT
    | {"attn_k_b": "self_attn.embed_q", "attn_v_b": "self_attn.unembed_out"}
    | {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
    head_dim=False,
    wide=True,
    keys=DEEPSEEK_KEYS,
    given={"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    more=_deepseek,
    bare=frozenset({"exp_probs_b"}),
)
FAMILIES: dict[str, Architecture] = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2", head_dim=False),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", keys=EXPERT_KEYS, head_dim=False, shapes=GATE_ROW, more=_experts,
                       given={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3moe": Architecture("qwen3_moe", keys=EXPERT_KEYS, more=_experts,
                       given={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gemma": Architecture("gemma", {"ffn_norm": "post_attention_layernorm"}, less_one=True, wide=True, given=GEMMA),
    "gemma2": Architecture("gemma2", SANDWICH, less_one=True, wide=True, keys=CAPS | WINDOW, given=GEMMA,
                     more=_gemma_scale(46)),
    "gemma3": Architecture("gemma3_text", SANDWICH, less_one=True, wide=True, more=_gemma_scale(62),
                     keys=WINDOW | {"rope_local_base_freq": "rope.freq_base_swa"},
                     given=GEMMA | {"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0}),
    "phi3": Architecture("phi3", FUSED, partial=True, head_dim=False, more=_phi3),
    "granite": Architecture("granite", turned=True, head_dim=False, keys=GRANITE),
    "olmo2": Architecture("olmo2", NORM_AFTER),
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
        "lfm2",
        {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
         "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
         "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
         "ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"},
        {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}, head_dim=False,
        keys={"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"},
        given={"conv_bias": False,
               "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
        shapes={"shortconv.conv": _last}, more=_lfm2,
    ),
}  # fmt: skip
