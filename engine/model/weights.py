"""What published checkpoints store otherwise than mlx-lm's classes take it: names, layouts, and fp8.

``adapt(module, config)`` puts these steps around the class's own ``sanitize``, which mlx-lm's loader calls with the arrays of a
folder by name. So the engine and a conversion read the same. Arrays are lazy: nothing is computed here.
"""

import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ModelUnsupportedError
from .stored_heads import place_in_head

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn


Config = dict[str, Any]
Weights = dict[str, "mx.array"]
Step = Callable[["nn.Module", Config, Weights], Weights]

OTHER_PARTS = (
    "vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|mm_projector|vit_large_projector|"
    "patch_merge_mlp|audio_tower|embed_vision|embed_audio"
)
"""What sees and hears in a checkpoint, as alternatives of an expression."""

MXFP8: Config = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
MXFP4: Config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
NVFP4: Config = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
"""MLX's microscaling formats, as a config's ``quantization`` says them."""

FP8_SCALES = (".weight_scale_inv", ".weight_scale")
NO_FP8 = ("bitnet", "mxfp4", "mxfp8", "awq", "gptq")
"""Methods of packing whose bytes and scales by these names are something else."""
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.((?:gate|up|down)_proj\.weight)$")
ERNIE_BIAS = "moe_statics.e_score_correction_bias"


def adapt(module: "nn.Module", config: Config) -> None:
    """Let ``module`` take the weights of published checkpoints, as well as those that its class takes."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert text is not None
    kind = str(text.get("model_type"))
    own: Callable[[nn.Module, Weights], Weights] | None = getattr(type(module), "sanitize", None)
    reference = weakref.ref(module)  # or module and function would hold each other, and its arrays, until a collection

    def sanitize(weights: Weights) -> Weights:
        module = reference()
        assert module is not None
        # Heads for further tokens are loaded apart (extra_heads.py); not every class that has no place for them drops them.
        weights = {name: value for name, value in weights.items() if place_in_head(name, text) is None}
        weights = _language_part(module, config, weights)
        weights = unpack_fp8(weights, config)
        for step in _BEFORE.get(kind, ()):
            weights = step(module, text, weights)
        given = dict(weights)
        if own is not None:
            weights = own(module, weights)
        if step_after := _AFTER.get(kind):
            weights = step_after(module, text, weights, given)
        return _stack_experts(module, weights)

    module.sanitize = sanitize


def is_fp8(config: Config) -> bool:
    """Return whether a config says that weights are fp8 numbers with scales, which are unpacked while they are loaded."""
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(given, dict) or config.get("quantization"):
        return False
    method = given.get("quant_method")
    if method == "fp8":
        # Power-of-two scales of 32 by 32 blocks are mxfp8, which MLX computes with as it is.
        return not (given.get("scale_fmt") == "ue8m0" and list(given.get("weight_block_size") or ()) == [32, 32])
    if method == "compressed-tensors":
        return given.get("format") in {"float-quantized", "naive-quantized"} and _eight_bits(given)
    algorithm = given.get("quant_algo") or (given.get("quantization") or {}).get("quant_algo")
    return method in ("modelopt", None) and algorithm == "FP8"


def packing_kept(config: Config) -> Config | None:
    """Return how MLX packs alike what a published model packed, as its config.json would say it; None where it does not.

    DeepSeek V4's fp8 and fp4 numbers have scales that are powers of two, which is what MLX calls mxfp8 and mxfp4; Nvidia's fp4
    is nvfp4. So they are computed with as they are stored. Compressors, router and both ends are not packed.
    """
    given = config.get("quantization_config")
    if config.get("model_type") != "deepseek_v4" or not isinstance(given, dict) or config.get("quantization"):
        return None
    if given.get("quant_method") != "fp8" or given.get("scale_fmt") != "ue8m0":
        return None
    experts = MXFP8
    if given.get("group_size") == NVFP4["group_size"]:
        experts = NVFP4
    elif "fp4" in (config.get("expert_dtype"), given.get("expert_dtype")):
        experts = MXFP4
    plain = (
        *("compressor.kv_proj", "compressor.gate_proj", "indexer.weights_proj"),
        *("indexer.compressor.kv_proj", "indexer.compressor.gate_proj"),
    )
    entries: Config = {"model.embed_tokens": False, "lm_head": False}
    for layer in range(config.get("num_hidden_layers") or 0):
        stem = f"model.layers.{layer}"
        entries |= {f"{stem}.self_attn.{name}": False for name in plain}
        entries |= {f"{stem}.mlp.experts.switch_mlp.{name}_proj": dict(experts) for name in ("gate", "up", "down")}
    return {**MXFP8, **entries}


def without_fp8(config: Config) -> Config:
    """Return a config that says nothing of fp8 any more: that of the weights as they are once they are loaded."""
    given = config.get("quantization_config")
    if config.get("quantization") and isinstance(given, dict) and "quant_method" in given:
        # Which modules are packed, and how, mlx-lm's loader sees in the weights.
        whole = {key: config["quantization"][key] for key in MXFP8}
        return {**config, "quantization": whole, "quantization_config": None}
    if not is_fp8(config):
        return config
    plain = {**config, "quantization_config": None}
    if isinstance(text := config.get("text_config"), dict) and text.get("quantization_config"):
        plain["text_config"] = {**text, "quantization_config": None}
    return plain


def unpack_fp8(weights: Weights, config: Config) -> Weights:
    """Return weights with every fp8 array times its scales, in bfloat16; lazy.

    A scale is for the whole array, for each row, or for each of the blocks that divide both sides of it.
    """
    import mlx.core as mx

    if _packed_otherwise(config):
        return weights
    unpacked = dict(weights)
    for name in weights:
        stem = name.removesuffix(".weight")
        scales = next((stem + end for end in FP8_SCALES if stem + end in weights), None)
        if stem == name or scales is None or weights[name].dtype != mx.uint8:
            continue
        scale = weights[scales]
        if not mx.issubdtype(scale.dtype, mx.floating):
            continue
        unpacked[name] = times_scales(mx.from_fp8(weights[name], dtype=mx.bfloat16), scale, _block(config))
        for other in (scales, f"{stem}.input_scale", f"{stem}.activation_scale"):
            unpacked.pop(other, None)
    return unpacked


def times_scales(values: "mx.array", scale: "mx.array", block: tuple[int, int] | None) -> "mx.array":
    """values (R, C) or (E, R, C), scale () or (R, 1) or of its blocks → values × scale, bfloat16."""
    import mlx.core as mx

    scale = scale.astype(mx.float32)
    rows, columns = values.shape[-2:]
    if scale.size > 1 and scale.ndim == values.ndim and scale.shape[-2:] not in ((rows, 1), (rows, columns)):
        tall, wide = block or (-(-rows // scale.shape[-2]), -(-columns // scale.shape[-1]))
        scale = mx.repeat(mx.repeat(scale, tall, axis=-2), wide, axis=-1)[..., :rows, :columns]
    elif scale.size > 1 and scale.ndim == values.ndim - 1:
        scale = scale[..., None] if scale.shape[-1] == rows else scale[..., None, None]
    elif scale.size == 1:
        scale = scale.reshape(())
    return (values * scale).astype(mx.bfloat16)


def _block(config: Config) -> tuple[int, int] | None:
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    size = given.get("weight_block_size")
    return (int(size[0]), int(size[1])) if isinstance(size, list) and len(size) == 2 else None


def _packed_otherwise(config: Config) -> bool:
    given = config.get("quantization_config")
    return bool(config.get("quantization")) or (isinstance(given, dict) and given.get("quant_method") in NO_FP8)


def _eight_bits(given: Config) -> bool:
    groups = given.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    return all(each.get("num_bits") == 8 and each.get("type") == "float" for each in weights)


def _language_part(module: "nn.Module", config: Config, weights: Weights) -> Weights:
    """Return the weights of the language model alone, under the names that mlx-lm's wrappers of one share."""
    if not isinstance(config.get("text_config"), dict):
        return weights
    kept = {name: value for name, value in weights.items() if not re.match(rf"(model\.)?({OTHER_PARTS})\.", name)}
    if "language_model" not in module:
        return kept
    named = {}
    for name, value in kept.items():
        if name.startswith("model.language_model."):
            name = "language_model.model." + name.removeprefix("model.language_model.")  # noqa: PLW2901
        elif name.startswith("lm_head."):
            name = f"language_model.{name}"  # noqa: PLW2901
        named[name] = value
    return named


def _stack_experts(module: "nn.Module", weights: Weights) -> Weights:
    """Return weights with experts stacked that are still one by one: transformers saves them so, whatever it was given."""
    import mlx.core as mx

    single = [(EXPERT.match(name), name) for name in weights]
    stacks: dict[str, dict[int, str]] = {}
    for found, name in single:
        if found is not None:
            stacks.setdefault(f"{found[1]}.switch_mlp.{found[3]}", {})[int(found[2])] = name
    if not stacks:
        return weights
    from mlx.utils import tree_flatten

    wanted = {name for name, _ in tree_flatten(module.parameters())}
    stacked = dict(weights)
    for name, parts in stacks.items():
        if name in wanted and sorted(parts) == list(range(len(parts))):
            stacked[name] = mx.stack([stacked.pop(parts[index]) for index in range(len(parts))])
    return stacked


def _kimi_dense_names(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Transformers saves Kimi Linear's dense layers under the name of its mixtures."""
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj\.)")
    return {dense.sub("mlp.", name): value for name, value in weights.items()}


def _qwen3_vl_experts(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Turn stacked experts that transformers 5 saved, (experts, out, in), to the order of the published ones."""
    width = config["hidden_size"]
    turned = dict(weights)
    for name, value in weights.items():
        if name.endswith(".experts.gate_up_proj") and value.shape[-1] == width != value.shape[-2]:
            down = name.replace("gate_up_proj", "down_proj")
            turned[name], turned[down] = value.swapaxes(-1, -2), weights[down].swapaxes(-1, -2)
    return turned


def _gpt2_names(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Most GPT-2 checkpoints have a prefix, a mask in each layer, and the tied head a second time."""
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    return {
        name: value for name, value in bare.items() if not re.search(r"\.attn\.(masked_)?bias$|^lm_head\.weight$", name)
    }


def _gpt_oss_floats(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Unpacked experts are stored as (experts, in, out) with gate and up in turn; MLX has (experts, out, in), apart."""
    if not any(name.endswith("experts.gate_up_proj") for name in weights):
        return weights
    split: Weights = {}
    for name, value in weights.items():
        stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if ".experts." not in name:
            split[name] = value
        elif stem.endswith("gate_up_proj"):
            rows = value if kind == "bias" else value.swapaxes(-1, -2)
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                at = (slice(None), slice(first, None, 2))
                split[f"{stem.removesuffix('gate_up_proj')}{part}.{kind}"] = rows[at]
        else:
            split[f"{stem}.{kind}"] = value if kind == "bias" else value.swapaxes(-1, -2)
    return split


def _olmo_hybrid_norms(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Published layers with a state name their norms otherwise than mlx-lm does."""
    named = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    pattern = re.compile("|".join(named))
    return {pattern.sub(lambda found: named[found[0]], name): value for name, value in weights.items()}


def _longcat_experts(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Transformers saves weights, which nothing multiplies with, for the experts that pass their input through."""
    last = config["n_routed_experts"]

    def is_multiplied(name: str) -> bool:
        found = EXPERT.match(name)
        return found is None or int(found[2]) < last

    return {name: value for name, value in weights.items() if is_multiplied(name)}


def _keep_ernie_bias(module: "nn.Module", config: Config, weights: Weights, given: Weights) -> Weights:  # noqa: ARG001
    """Keep the bias that chooses ERNIE's experts, which mlx-lm's own step drops.

    Raises ModelUnsupportedError for a checkpoint without it: mlx-lm's conversions have none.
    """
    biases = {name: value for name, value in given.items() if name.endswith(ERNIE_BIAS)}
    if not biases:
        raise ModelUnsupportedError(
            "this conversion of ERNIE 4.5 lacks the bias that chooses its experts",
            "Convert the original with `tokamac convert`, which keeps it.",
        )
    return weights | biases


def _drop_tied_head(module: "nn.Module", config: Config, weights: Weights, given: Weights) -> Weights:  # noqa: ARG001
    tied = config.get("tie_word_embeddings") is True
    return {name: value for name, value in weights.items() if not (tied and name.startswith("lm_head."))}


def _finish_lfm2(module: "nn.Module", config: Config, weights: Weights, given: Weights) -> Weights:  # noqa: ARG001
    """Let the language model inside LFM2-VL have its own step, which its wrapper in mlx-lm leaves out."""
    if "language_model" not in module:
        return weights
    prefix = "language_model."
    inner = module.language_model.sanitize({name.removeprefix(prefix): value for name, value in weights.items()})
    return {prefix + name: value for name, value in inner.items()}


_BEFORE: dict[str, tuple[Step, ...]] = {
    "gpt2": (_gpt2_names,),
    "gpt_oss": (_gpt_oss_floats,),
    "kimi_linear": (_kimi_dense_names,),
    "longcat_flash": (_longcat_experts,),
    "olmo_hybrid": (_olmo_hybrid_norms,),
    "qwen3_vl_moe_text": (_qwen3_vl_experts,),
}
_AFTER: dict[str, Callable[["nn.Module", Config, Weights, Weights], Weights]] = {
    "ernie4_5_moe": _keep_ernie_bias,
    "lfm2": _finish_lfm2,
    "minicpm": _drop_tied_head,
    "minicpm3": _drop_tied_head,
}
