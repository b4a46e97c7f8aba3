"""Read ``config.json`` and normalise it for mlx-lm's model classes."""

# Transformers 5 moved rotary settings to ``rope_parameters``, renamed keys, and writes null for derived
# values; mlx-lm reads the older names and silently defaults others. ``normalise`` adds the older names, and
# transformers' defaults where mlx-lm's differ (``ABSENT``). Keys are never removed: mlx-lm merges the result
# over the file.

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..architectures import find_classes
from ..device import broken_library, cannot_import
from ..errors import ModelDamagedError, ModelUnsupportedError, access_hint
from ..files import CONFIG_BYTES, is_file, read_bytes, read_text
from ..perf.cost import first_of
from .config_rules import correct
from .weights import adapt, packing_kept, text_config

Config = dict[str, Any]
AnyConfig = Mapping[str, Any]


LARGEST_FLOAT32 = 3.4028235e38
MAY_BE_INFINITE = re.compile(r"time_step_(limit|max)$")  # bounds of a recurrence's step, where infinity means none
NEVER_NEGATIVE = re.compile(r"(eps|epsilon)$")
ALWAYS_POSITIVE = re.compile(r"^(rope_theta|rotary_emb_base|rope_local_base_freq|default_theta)$")
# Settings of encoders for images and sound, and of packing.
OTHER_PARTS = re.compile(r"^(?!text_|llm_|language_)\w+_config$")

# Far more than any model has: of layers, numbers in a token or a head, heads or experts of a layer, and tokens of a
# vocabulary.
LAYERS, WIDTHS, HEADS, WORDS = 4096, 1 << 22, 1 << 16, 1 << 24
SIZES: dict[str, tuple[int, int]] = {
    # key: (at least, at most)
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim"), (1, WIDTHS)),
    **dict.fromkeys(("head_dim", "intermediate_size", "n_inner", "moe_intermediate_size"), (0, WIDTHS)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), (0, HEADS)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, HEADS)),
    "vocab_size": (1, WORDS),
}
# Keys that say something of each layer, and by their length how many there are.
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "hybrid_override_pattern")

ABSENT: dict[str, dict[str, Any]] = {
    # What a key means that a config does not have: transformers' default, where mlx-lm's class would take something else.
    # A checkpoint is made to be read by transformers, or by code that came with it. A test compares both libraries.
    "afmoe": {"num_experts_per_tok": 6, "num_dense_layers": 1, "route_scale": 1.0, "sliding_window": 1024}
    | {"mup_enabled": False},
    # Keys that older checkpoints had and mlx-lm requires; transformers now takes them as given.
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "arcee": {"rms_norm_eps": 1e-5},
    "bitnet": {"tie_word_embeddings": False, "rope_theta": 500_000.0},
    "cohere": {"rope_theta": 500_000.0},
    "cohere2": {"rope_theta": 10_000.0},
    "deepseek_v3": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
    "deepseek_v32": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
    "ernie4_5_moe": {"moe_k": 6, "moe_layer_start_index": 1},
    "exaone": {"tie_word_embeddings": False},
    "exaone_moe": {"rope_theta": 10_000.0},
    "falcon_h1": {"attention_out_multiplier": 1.0, "embedding_multiplier": 1.0, "key_multiplier": 1.0}
    | {"lm_head_multiplier": 1.0, "mamba_norm_before_gate": True, "mlp_multipliers": [1.0, 1.0], "rope_theta": 10_000.0}
    | {"ssm_in_multiplier": 1.0, "ssm_multipliers": [1.0] * 5, "ssm_out_multiplier": 1.0, "tie_word_embeddings": False},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma3_text": {"sliding_window": 4096},
    "gemma4_text": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    | {"hidden_size_per_layer_input": 0},
    "glm": {"tie_word_embeddings": False, "attention_bias": True},
    "glm4_moe_lite": {"rope_theta": 10_000.0},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "granite": {"tie_word_embeddings": False, "rope_theta": 10_000.0},
    "granitemoe": {"tie_word_embeddings": False},
    "granitemoehybrid": {"tie_word_embeddings": False, "time_step_limit": [0.0, math.inf]},
    "iquestcoder": {"tie_word_embeddings": False},
    "jamba": {"tie_word_embeddings": False},
    "kimi_linear": {"num_experts_per_token": 8, "routed_scaling_factor": 2.446},
    "llama": {"tie_word_embeddings": False},
    # transformers knows no other attention, experts that pass through alone, and always scales.
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mimo_v2_flash": {"attention_value_scale": 0.707},
    # MiniCPM's first file has no base: its own code, which transformers lacks, takes 10,000.
    "minicpm": {"rope_theta": 10_000.0},
    "minicpm3": {"rope_theta": 10_000.0, "tie_word_embeddings": True},
    "minimax_m2": {"shared_intermediate_size": 0},
    "ministral3": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "num_attention_heads": 32},
    "olmo": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},  # OLMo's norms have this by nature
    "olmo2": {"tie_word_embeddings": False},
    "olmoe": {"tie_word_embeddings": False},
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "qwen2": {"tie_word_embeddings": False, "rope_theta": 10_000.0},
    "qwen2_moe": {"rope_theta": 10_000.0},
    "qwen3": {"rope_theta": 10_000.0},
    "qwen3_moe": {"rope_theta": 10_000.0},
    "qwen3_next": {"norm_topk_prob": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "seed_oss": {"tie_word_embeddings": False, "attention_bias": True},
    "smollm3": {"rope_theta": 2_000_000.0},
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
    "starcoder2": {"rope_theta": 10_000.0},
    "step3p5": {"moe_router_scaling_factor": 1.0},
    "vaultgemma": {"rms_norm_eps": 1e-6, "sliding_window": 4096},
}


# Transformers writes non-finite floats as {"__float__": "Infinity"}, so that the file stays JSON.
FLOAT_TAGS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

# Kinds of rotary scaling that need the context length of pretraining.
PRETRAINED_LENGTH = ("llama3", "yarn", "longrope")

RENAMED: dict[str, dict[str, str]] = {
    # model type: {the name mlx-lm reads: the name transformers 5 writes}
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "qwen3_vl_moe_text": {"num_experts": "num_local_experts"},
    "gemma4_text": {"moe_intermediate_size": "expert_intermediate_size"},
    "gemma4_unified_text": {"moe_intermediate_size": "expert_intermediate_size"},
    "mellum": {"num_experts": "num_local_experts"},
    "step3p5": {
        "num_attention_groups": "num_key_value_heads",
        "num_key_value_heads": "num_attention_groups",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    },
    "gpt2": {"n_ctx": "n_positions"},
    "lfm2": {"block_dim": "hidden_size"},
    "bailing_hybrid": {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
    },
}
# mlx-lm requires `head_dim` here, or has a default of its own; transformers takes hidden_size / num_attention_heads.
HEAD_DIM_REQUIRED = ("qwen3_moe", "exaone4", "exaone_moe", "falcon_h1", "glm4_moe")
SCALING_REQUIRED = ("deepseek_v2", "minicpm3")  # classes that look into `rope_scaling` whether it is there or not
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt says how it packed a model, where the config does not
# What the language part of these models is; their files call it by several names.
LANGUAGE_PART_TYPES = {"step3p7": "step3p5", "minimax_m3_vl": "minimax_m3"}
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
OTHER_TASKS = re.compile(
    r"For(?!CausalLM|ConditionalGeneration)\w*(Classification|Answering|MaskedLM|Choice|Detection|Segmentation)$"
)

# Families whose `model_max_length` is what they were made for, and `max_position_embeddings` a smaller number.
TRAINED_FURTHER = frozenset({"cohere", "cohere2"})
# Families whose window counts only if `use_sliding_window` is on.
SWITCHED = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"})


MODULES = "modules.json"  # of sentence-transformers: what a model's states go through to become an embedding


def embeds(folder: Path) -> bool:
    return is_file(folder / MODULES)


def read_config(folder: Path) -> Config:
    """Return the normalised config with ModelOpt's packing. Raises ModelDamagedError."""
    path = folder / "config.json"
    again = "Download or convert the model again."
    try:
        config = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelDamagedError(f"{path} is missing", f"Is this a model folder? {again}") from error
    except OSError as error:
        raise ModelDamagedError(
            f"{path} can't be read: {error.strerror or error}", access_hint(error, "Check its permissions.")
        ) from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
        raise ModelDamagedError(f"{path} is not valid JSON: {error}", again) from error
    except RecursionError as error:
        raise ModelDamagedError(f"{path} is nested too deeply to be a config", again) from error
    if not isinstance(config, dict):
        raise ModelDamagedError(f"{path} holds no JSON object", again)
    try:
        check_values(_untag(config))
        return normalise(_with_modelopt(folder, config))
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError, OverflowError) as error:
        raise ModelDamagedError(f"{path} holds values that can't be right: {error}", again) from error


def _with_modelopt(folder: Path, config: Config) -> Config:
    """Add NVIDIA ModelOpt's packing from its own file. Raises ModelDamagedError."""
    # mlx-lm reads that file too, but knows one of its algorithms.
    text = config.get("text_config")
    whole = config if not isinstance(text, dict) else {**text, **config}
    path = folder / MODELOPT
    if whole.get("quantization") or whole.get("quantization_config") or not path.exists():
        return config
    try:
        found = json.loads(read_bytes(path, CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        found = None
    settings = found.get("quantization", found) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(settings, dict):
        raise ModelDamagedError(f"{path} holds no JSON object", "Download the model again.")
    packs = settings.get("quant_algo")  # null where only keys and values are to be packed
    return {**config, "quantization_config": {"quant_method": "modelopt", **found} if packs else None}


def normalise(config: Config) -> Config:
    copy: Config = _untag(config)
    for part in LANGUAGE_PARTS:
        if isinstance(copy.get(part), dict):
            if isinstance(copy.get("tie_word_embeddings"), bool):  # the outer key is the one that transformers obeys
                copy[part]["tie_word_embeddings"] = copy["tie_word_embeddings"]
            if copy.get("model_type") in LANGUAGE_PART_TYPES:
                copy[part]["model_type"] = LANGUAGE_PART_TYPES[copy["model_type"]]
            copy[part] = normalise(copy[part])
            if copy[part].get("vocab_size"):  # gemma3's class reads it from outside
                copy.setdefault("vocab_size", copy[part]["vocab_size"])
    for write in (
        _names,
        _experts,
        _heads,
        _rotary,
        _steps,
        _compressed_layers,
        _layers,
        _full_layers,
        _recurrent,
        _window,
    ):
        write(copy)
    if (packing := packing_kept(copy)) is not None:
        copy["quantization"] = packing
    nested = any(isinstance(copy.get(part), dict) for part in LANGUAGE_PARTS)
    for key, value in () if nested else ABSENT.get(str(copy.get("model_type")), {}).items():
        if copy.get(key) is None:
            copy[key] = value
    _heads(copy)  # again: what follows from heads that the file does not give, under each of its names
    _names(copy)
    return copy


def _untag(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in FLOAT_TAGS:
            return FLOAT_TAGS[value["__float__"]]
        return {key: _untag(entry) for key, entry in value.items()}
    return [_untag(entry) for entry in value] if isinstance(value, list) else value


def _names(config: Config) -> None:
    if config.get("model_type") == "deepseek_ref" and "DeepseekV4ForCausalLM" in (config.get("architectures") or ()):
        config["model_type"] = "deepseek_v4"  # as SGLang's fp8 files of it spell it
    for ours, theirs in RENAMED.get(str(config.get("model_type")), {}).items():
        if config.get(ours) is None and theirs in config:
            config[ours] = config[theirs]
    for one, other in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        if config.get(one) is not None:
            config.setdefault(other, config[one])
    if config.get("model_file") is not None:
        config["model_file"] = None  # code from a model folder is never run; the architecture is known or refused


def _experts(config: Config) -> None:
    for key in ("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"):
        given = config.get(key)
        if config.get("model_type") == "hunyuan_v1_moe" and isinstance(given, list) and len(set(given)) == 1:
            config[key] = given[0]


def _heads(config: Config) -> None:
    if "n_inner" in config and config["n_inner"] is None and isinstance(config.get("n_embd"), int):
        config["n_inner"] = 4 * config["n_embd"]
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or heads < 1:
        return
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    wanted = "head_dim" in config or config.get("model_type") in HEAD_DIM_REQUIRED
    if wanted and config.get("head_dim") is None and isinstance(width, int):
        config["head_dim"] = width // heads


def _rotary(config: Config) -> None:
    given = config.get("rope_parameters")
    if not isinstance(given, dict) or not given:
        given = config.get("rope_scaling") or {}
    local = None
    if any(isinstance(entry, dict) for entry in given.values()):  # one set per kind of layer
        local = given.get("sliding_attention")
        given = given.get("full_attention") or local or {}
    given = {key: value for key, value in given.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in given:
            config[key] = given[key]
    if isinstance(local, dict) and local.get("rope_theta") is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    config["rope_scaling"] = _scaling(config, given)
    if config.get("model_type") == "minimax_m2" and isinstance(config.get("head_dim"), int):
        config.setdefault("rotary_dim", int(config["head_dim"] * (config.get("partial_rotary_factor") or 1.0)))
    if config.get("model_type") in ("minimax_m3", "minimax_m3_vl_text"):
        if isinstance(config.get("head_dim"), int) and config.get("partial_rotary_factor") is not None:
            config["rotary_dim"] = int(config["head_dim"] * config["partial_rotary_factor"])
        if config["rope_scaling"] and not config.get("rope_parameters"):  # its class reads this key alone
            if config.get("rope_theta") is None:
                config["rope_theta"] = 5_000_000.0
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], **config["rope_scaling"]}
    if config.get("model_type") == "gpt_neox":
        for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
            config.setdefault(new, config.get(old))
            config[old] = config[new]


def _scaling(config: Config, given: Config) -> Config | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    scaling = {key: value for key, value in given.items() if key != "rope_theta"}
    if kind == "default" and config.get("model_type") in SCALING_REQUIRED:
        return {"type": kind, "rope_type": kind, "factor": 1.0}
    if kind == "default" and not set(scaling) - {"type", "rope_type", "partial_rotary_factor"}:
        return None
    scaling |= {"type": kind, "rope_type": kind}
    longest = config.get("max_position_embeddings")
    if kind in PRETRAINED_LENGTH:
        own = scaling.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = config.get("original_max_position_embeddings") or own or longest
        if kind == "longrope":  # phi3's class reads it here
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if kind == "yarn" and "factor" not in scaling and longest:
        scaling["factor"] = longest / scaling["original_max_position_embeddings"]
    if kind == "linear":
        scaling["factor"] = float(scaling["factor"])  # phi3's class insists
    return scaling


def _layers(config: Config) -> None:
    """Derive the older forms, a period or a letter per layer, from ``layer_types``."""
    sparse = config.get("mlp_layer_types")
    if config.get("model_type") == "exaone_moe" and isinstance(sparse, list):
        config["is_moe_layer"] = [kind == "sparse" for kind in sparse]
    if config.get("model_type") == "vaultgemma" and config.get("layer_types") is None:
        named = ("sliding_attention", "full_attention")
        config["layer_types"] = [named[i % 2] for i in range(config.get("num_hidden_layers") or 0)]
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return
    full = [kind == "full_attention" for kind in kinds]
    period = full.index(True) + 1 if any(full) else len(full) + 1
    regular = full == [(i + 1) % period == 0 for i in range(len(full))]
    if config.get("model_type") == "granitemoehybrid":
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        config["layer_types"] = [names.get(kind, kind) for kind in kinds]
    elif config.get("model_type") == "exaone4":
        letters = "".join("G" if whole else "L" for whole in full)
        config["sliding_window_pattern"] = letters if config.get("sliding_window") else None
    elif regular and set(kinds) <= {"full_attention", "sliding_attention"}:
        config["sliding_window_pattern"] = period
    elif regular and set(kinds) <= {"full_attention", "linear_attention"}:
        config["full_attention_interval"] = period


def _steps(config: Config) -> None:
    """Restore Step 3.5's published per-layer settings from transformers' form."""
    # Its lists end with layers for multi-token prediction, which are never built.
    layers = config.get("num_hidden_layers")
    if config.get("model_type") != "step3p5" or not isinstance(layers, int):
        return
    per_layer = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta")
    for key in (*per_layer, "partial_rotary_factors"):
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    kinds = config["layer_types"] = config.get("layer_types") or ["full_attention"] * layers
    if config.get("moe_layers_enum") is None:
        given = config.get("mlp_layer_types") or ["dense"] * 3 + ["sparse"] * (layers - 3)
        config["moe_layers_enum"] = ",".join(str(i) for i, kind in enumerate(given) if kind == "sparse")
    ropes = config.get("rope_parameters")
    if isinstance(ropes, dict) and all(isinstance(ropes.get(kind), dict) for kind in kinds):
        config["rope_theta"] = [ropes[kind].get("rope_theta", 10_000.0) for kind in kinds]
        config["partial_rotary_factors"] = [ropes[kind].get("partial_rotary_factor", 1.0) for kind in kinds]
        config["yarn_only_types"] = ["full_attention"]
        config["partial_rotary_factor"] = config["rope_local_base_freq"] = None  # said layer by layer
    sliding = {str(i) for i, kind in enumerate(kinds) if kind == "sliding_attention"}
    heads = config.get("num_sliding_attention_heads") or config.get("num_attention_heads")
    alike = {"num_attention_heads": heads}
    given = config.get("per_layer_config")
    if isinstance(given, dict) and set(given) == sliding and all(each == alike for each in given.values()):
        config["per_layer_config"] = None
        config["attention_other_setting"] = {**alike, "num_attention_groups": config["num_attention_groups"]}


def _compressed_layers(config: Config) -> None:
    """Convert DeepSeek V4's published per-layer ratios to transformers 5's form."""
    count = config.get("num_hidden_layers")
    if config.get("model_type") != "deepseek_v4" or not isinstance(count, int):
        return
    sliding, sparse, heavy = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    rates = config.get("compress_rates") or {}
    config["compress_rates"] = {
        sparse: config.get("compress_rate_csa", rates.get(sparse, 4)),
        heavy: config.get("compress_rate_hca", rates.get(heavy, 128)),
    }
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and isinstance(ratios, list):
        named = {0: sliding, 4: sparse, 128: heavy}
        kinds = [named.get(ratio, str(ratio)) for ratio in ratios]
    if kinds is None:
        kinds = [sparse if index >= 2 and index % 2 else heavy for index in range(count)]
    hashed = config.get("num_hash_layers")
    mixtures = config.get("mlp_layer_types")
    if mixtures is None:
        mixtures = ["hash_moe"] * (3 if hashed is None else hashed) + ["moe"] * count
    # Layers that predict further tokens may be listed too.
    config["layer_types"], config["mlp_layer_types"] = kinds[:count], mixtures[:count]


def _full_layers(config: Config) -> None:
    """Write Gemma 4's full-attention heads, per layer in transformers 5.23."""
    given = config.get("per_layer_config")
    if config.get("model_type") not in ("gemma4_text", "gemma4_unified_text") or not isinstance(given, dict):
        return
    full = {str(i) for i, kind in enumerate(config.get("layer_types") or []) if kind == "full_attention"}
    first: Config = next(iter(given.values()), {})
    if given and (set(given) != full or any(entry != first for entry in given.values())):
        return  # config_rules.py refuses it
    if set(first) <= {"head_dim", "num_key_value_heads"}:
        config["global_head_dim"] = first.get("head_dim", config["head_dim"])
        config["num_global_key_value_heads"] = first.get("num_key_value_heads", config["num_key_value_heads"])


def _recurrent(config: Config) -> None:
    expand, width = config.get("expand"), config.get("hidden_size")
    if config.get("model_type") == "mamba2" and isinstance(expand, int) and isinstance(width, int):
        config.setdefault("intermediate_size", expand * width)


def _window(config: Config) -> None:
    """Make MiMo V2's window include the query, as mlx-lm's do."""
    # ``sliding_window_size`` excludes it (SGLang, transformers); transformers' ``sliding_window`` is one larger.
    if config.get("model_type") != "mimo_v2_flash":
        return
    before, named = config.get("sliding_window_size"), config.get("sliding_window")
    if isinstance(before, int) and named in (None, before):
        config["sliding_window"], config["sliding_window_size"] = before, before + 1
    elif isinstance(named, int) and before in (None, named - 1):
        config["sliding_window"], config["sliding_window_size"] = named - 1, named


def check_values(config: Config) -> None:
    """Raise ModelDamagedError for impossible values, such as NaN or three million layers."""
    for problem in _problems(config):
        raise ModelDamagedError(f"config.json sets {problem}", "The file is damaged: download the model again.")


def _problems(config: Config) -> Iterator[str]:
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{key} to {value!r:.40}, which is not a number" if key in SIZES and isinstance(value, str) else None
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT32 and not MAY_BE_INFINITE.search(key):
        return f"{key} to {value}, which is not a finite number"
    if isinstance(value, float) and math.isnan(value):
        return f"{key} to {value}, which is not a number"
    if (NEVER_NEGATIVE.search(key) and value < 0) or (ALWAYS_POSITIVE.search(key) and value <= 0):
        return f"{key} to {value}, which is too small"
    least, most = SIZES.get(key, (None, None))
    if least is not None and most is not None and not least <= value <= most:
        shown = f"{value:,}" if abs(value) < 10**15 else f"{value:.1e}" if abs(value) < 10**300 else "a huge number"
        return f"{key} to {shown}, which is {f'less than {least}' if value < least else f'more than {most:,}'}"
    return None


def model_classes(config: Config) -> tuple[Callable[..., Any], type[Any]]:
    """Return the model factory, with corrections.py applied, and its ModelArgs, mlx-lm's or ours (architectures/).

    Raises ModelDamagedError without a model type, ModelUnsupportedError without a class or for no language model.
    """
    # Code in a model folder is never run.
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelDamagedError(
            "config.json names no model_type", "This is not a language model's folder, or it is damaged."
        )
    _refuse_other_tasks(config, kind)
    other = "Choose a decoder language model; mlx-lm's models folder lists most of the architectures."
    if kind == "olmo" and "hidden_size" not in config:
        raise ModelUnsupportedError("this is OLMo 1 in Ai2's own form", "Use the model's -hf version.")
    try:
        model, arguments = find_classes(config)
    except ImportError as error:
        broken = cannot_import(error)
        raise ModelUnsupportedError(
            *(broken_library(error) if broken is None else (broken.message, broken.hint))
        ) from error
    except (ValueError, AttributeError) as error:
        brought = " The code that came with it is not run." if config.get("auto_map") else ""
        raise ModelUnsupportedError(
            f"Tokamac and mlx-lm have no language model of the kind {kind!r}", other + brought
        ) from error

    def build(args: Any) -> Any:
        module = model(args)
        correct(module, config)
        adapt(module, config)
        return module

    return build, arguments


def _refuse_other_tasks(config: Config, kind: str) -> None:
    named = config.get("architectures") or []
    for architecture in [named] if isinstance(named, str) else named:
        if OTHER_TASKS.search(str(architecture)):
            raise ModelUnsupportedError(
                f"{architecture} is not a language model that writes text", "Choose a chat model."
            )
    if config.get("is_encoder_decoder") is True:
        raise ModelUnsupportedError(f"{kind} is an encoder-decoder model", "Choose a decoder language model.")


def context_length(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    named = first_of(text, "n_positions", "max_position_embeddings", "max_seq_len", "seq_length", "model_max_length")
    trained = text.get("model_max_length") if text.get("model_type") in TRAINED_FURTHER else None
    known = [length for length in (named, trained) if isinstance(length, int) and not isinstance(length, bool)]
    return max(known, default=None)


def pretraining_length(config: Mapping[str, Any]) -> int | None:
    scaling = text_config(config).get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        return int(scaling["original_max_position_embeddings"])
    return None


def ignored_windows(config: AnyConfig, layers: int) -> tuple[int | None, ...]:
    text = config.get("text_config", config)
    family = text.get("model_type", config.get("model_type"))
    off = family in SWITCHED and not text.get("use_sliding_window", False)
    slides, default = _SLIDES.get(family, (None, None))
    window = text.get("sliding_window", default)
    if slides is None or off or not isinstance(window, int) or window < 1:
        return (None,) * layers
    named = text.get("layer_types")
    if named is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in named[:layers])
    return tuple(window if slides(text, index) else None for index in range(layers))


def unbounded(config: AnyConfig) -> str:
    """Return why this model's growing caches can't have a window, or ""."""
    return _UNBOUNDED.get(str(config.get("model_type")), "")


def _has_no_rope(config: AnyConfig, index: int) -> bool:
    roped = config.get("no_rope_layers")  # the opposite of its name: 1 where a layer has rotary positions
    return not roped[index] if roped is not None else (index + 1) % int(config.get("no_rope_layer_interval", 4)) == 0


def _is_upper(config: AnyConfig, index: int) -> bool:
    return index >= int(config.get("max_window_layers", 28))


# Families whose layers slide and whose class in mlx-lm ignores it: a growing cache is wrong beyond the window. Read in
# transformers 5.7; a layer that slides sees the last `sliding_window` tokens, its own included. Where mlx-lm slides by
# itself (its `RotatingKVCache`), nothing here applies.
_SLIDES: dict[str, tuple[Callable[[AnyConfig, int], bool], int | None]] = {
    # family: (which layers slide, the window that transformers assumes where the config has no such key)
    **dict.fromkeys(("mistral", "qwen3_moe"), (lambda *_: True, 4096)),
    # mlx-lm's ministral3 slides where layer_types say so; transformers writes none.
    **dict.fromkeys(("ministral3", "mixtral", "phi3", "phimoe", "starcoder2"), (lambda *_: True, None)),
    **dict.fromkeys(("qwen2", "qwen3"), (_is_upper, 4096)),
    "gemma2": (lambda _, index: index % 2 == 0, 4096),
    "qwen2_moe": (lambda config, index: index % 2 == 0 and not _is_upper(config, index), 4096),
    "smollm3": (_has_no_rope, None),
}

_UNBOUNDED = {
    # Its queries would be rotated as if nothing had ever left the window.
    "afm7": "its upper layers tell their position by how many keys they are given",
}
