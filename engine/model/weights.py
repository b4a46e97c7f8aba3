"""Published checkpoints for mlx-lm's classes: names, layouts, fp8, multi-token prediction heads. No MLX at import."""

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ModelError, ModelUnsupportedError
from .safetensors import find_shards, read_header

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

# mtp       a layer after the last one, which reads a hidden state and the token after it
# medusa    blocks in ``medusa_lm_head.safetensors``, the i-th predicting the i-th token after the next

# mlx-lm's classes drop them. Conversions keep mtp heads in ``mtp.safetensors``: older mlx-lm versions take
# some of their names for a sign of an unconverted model.


HeadKind = Literal["mtp", "medusa"]

MTP_FILE, MEDUSA_FILE = "mtp.safetensors", "medusa_lm_head.safetensors"
VISION_FILE = "vision.safetensors"  # what sees or hears, of a converted model: mlx-lm reads model*.safetensors alone

# Keys that say how many layers predict further.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")

PACKED = ("scales", "biases", "weight_scale_inv", "weight_scale")  # what stands beside a packed weight

_DEEPSEEK = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"})
_QWEN = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})

_LATER_LAYER = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.(.+)$")
_MTP = re.compile(r"^(?:model\.|language_model\.)*mtp\.(.+)$")
_MEDUSA = re.compile(rf"^(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias|{'|'.join(PACKED)})$")

# Of each form, what fuses a hidden state with a token, by its published name; all else is the layer's.
_FUSED_DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
_FUSED_QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
FUSED = ("enorm", "hnorm", "eh_proj", "norm")
# Copies of the model's own embedding and head, which are taken instead.
_SHARED = ("embed_tokens.", "shared_head.head.")


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """Heads of one kind, sizes as stored.

    count: layers (mtp) or tokens (medusa). files: by tensor name. names: places by tensor name: ``enorm``,
    ``layer.…`` (mtp), ``heads.0.0.linear.…`` (medusa). less_one: norms stored minus one (Qwen).
    """

    kind: HeadKind
    count: int
    nbytes: int
    files: Mapping[str, Path]
    names: Mapping[str, str]
    blocks: int = 0
    less_one: bool = False
    types: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""

    def held_bytes(self, *, floats: bool) -> int:
        grown = {"F8_E4M3": 4 if floats else 2, "F16": 2 if floats else 1, "BF16": 2 if floats else 1}
        return sum(nbytes * grown.get(kind, 1) for kind, nbytes in self.types.items())

    @property
    def named(self) -> str:
        if self.kind == "medusa":
            return f"{self.count} Medusa heads"
        layer = "a layer for multi-token prediction"
        return layer if self.count <= 1 else f"{layer}, the first of {self.count}"


def find_heads(folder: Path, config: Mapping[str, Any]) -> tuple[StoredHeads, ...]:
    """Return all heads a folder's config or files mention, unusable ones included."""
    found = (_find_mtp(folder, config), _find_medusa(folder, config))
    return tuple(each for each in found if each is not None)


def place_in_head(name: str, config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return a tensor's layer beyond the last (from 0) and place, else None; place "" copies the model's own."""
    kind = str(config.get("model_type"))
    if kind in _QWEN and (found := _MTP.match(name)) is not None:
        rest = found[1]
        if layer := re.match(r"layers\.(\d+)\.(.+)$", rest):
            return int(layer[1]), f"layer.{layer[2]}"
        return 0, _fused(rest, _FUSED_QWEN) or f"unknown.{rest}"
    layers = config.get("num_hidden_layers")
    if kind in _DEEPSEEK and isinstance(layers, int) and (found := _LATER_LAYER.match(name)) is not None:
        beyond, rest = int(found[1]) - layers, found[2]
        if beyond >= 0:
            return beyond, "" if rest.startswith(_SHARED) else _fused(rest, _FUSED_DEEPSEEK) or f"layer.{rest}"
    return None


def name_in_file(place: str, kind: HeadKind, config: Mapping[str, Any]) -> str:
    """Return the file name of a place in the first layer or Medusa heads; inverse of ``place_in_head``."""
    if kind == "medusa":
        return place.removeprefix("heads.")
    text = text_config(config)
    qwen = str(text.get("model_type")) in _QWEN
    parts = {part: name for name, part in (_FUSED_QWEN if qwen else _FUSED_DEEPSEEK).items()}
    before = "mtp." if qwen else f"model.layers.{text['num_hidden_layers']}."
    stem, _, leaf = place.rpartition(".")
    if stem in parts:
        return f"{before}{parts[stem]}.{leaf}"
    return f"{before}{'layers.0.' if qwen else ''}{place.removeprefix('layer.')}"


def _fused(rest: str, parts: Mapping[str, str]) -> str:
    stem, _, leaf = rest.rpartition(".")
    return f"{parts[stem]}.{leaf}" if stem in parts else ""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def _find_mtp(folder: Path, config: Mapping[str, Any]) -> StoredHeads | None:
    text = text_config(config)
    kind = str(text.get("model_type"))
    named = next((text[key] for key in COUNTS if isinstance(text.get(key), int)), 0)
    if kind not in _QWEN | _DEEPSEEK:
        none = f"Tokamac does not know how those of {kind} models are computed"
        return (
            StoredHeads("mtp", named, 0, {}, {}, trouble=none)
            if named > 0 and text.get("use_mtp") is not False
            else None
        )
    files, names, count, types, unsanitized = dict[str, Path](), dict[str, str](), 0, Counter[str](), False
    own = folder / MTP_FILE
    try:
        shards = [*find_shards(folder), *([own] if own.is_file() else [])]
        for shard in shards:
            for name, entry in read_header(shard).items():
                unsanitized |= name.endswith("conv1d.weight") and entry["shape"][-1:] != [1]
                if (found := place_in_head(name, text)) is None:
                    continue
                count = max(count, found[0] + 1)
                if found[0] == 0 and found[1]:
                    files[name], names[name] = shard, found[1]
                    types[entry["dtype"]] += _nbytes(entry)
    except ModelError as error:
        return StoredHeads("mtp", named, 0, {}, {}, trouble=error.message)
    if not names:
        gone = (
            "the checkpoint does not hold them: most conversions leave them out, Tokamac's from the original keeps them"
        )
        return StoredHeads("mtp", named, 0, {}, {}, trouble=gone) if named > 0 else None
    less_one = kind in _QWEN and unsanitized
    found_heads = StoredHeads("mtp", count, types.total(), files, names, less_one=less_one, types=types)
    return replace(found_heads, trouble=_mtp_trouble(text, names))


def _mtp_trouble(text: Mapping[str, Any], names: Mapping[str, str]) -> str:
    if text.get("mtp_use_dedicated_embeddings"):
        return "they have an embedding of their own, which Tokamac does not know"
    if unknown := next((name for name, place in names.items() if place.startswith("unknown.")), ""):
        return f"they hold {unknown!r:.60}, which Tokamac does not know"
    places = set(names.values())
    if missing := next((part for part in FUSED if f"{part}.weight" not in places), ""):
        return f"they are not whole: {missing} is missing"
    return "" if any(place.startswith("layer.") for place in places) else "they are not whole: the layer is missing"


def _find_medusa(folder: Path, config: Mapping[str, Any]) -> StoredHeads | None:
    file = folder / MEDUSA_FILE
    text = text_config(config)
    named = text.get("medusa_num_heads")
    if not file.is_file():
        gone = f"the config names them, and there is no {MEDUSA_FILE}"
        return StoredHeads("medusa", named, 0, {}, {}, trouble=gone) if isinstance(named, int) and named > 0 else None
    try:
        header = read_header(file)
    except ModelError as error:
        return StoredHeads("medusa", 0, 0, {}, {}, trouble=error.message)
    types = Counter[str]()
    for entry in header.values():
        types[entry["dtype"]] += _nbytes(entry)
    names = {name: _MEDUSA.match(name) for name in header}
    known = {name: found for name, found in names.items() if found is not None}
    files = dict.fromkeys(known, file)
    places = {name: f"heads.{found[1]}.{found[2]}.{found[3] or ''}{found[4]}" for name, found in known.items()}
    count = 1 + max((int(found[1]) for found in known.values()), default=-1)
    blocks = max((int(found[2]) for found in known.values()), default=0)
    heads = StoredHeads("medusa", count, types.total(), files, places, blocks, types=types)
    shapes = {places[name]: header[name]["shape"] for name in known}
    unknown = next((name for name, found in names.items() if found is None), "")
    return replace(heads, trouble=_medusa_trouble(text, heads, shapes, unknown))


def _medusa_trouble(text: Mapping[str, Any], heads: StoredHeads, shapes: Mapping[str, list[int]], unknown: str) -> str:
    if unknown:
        return f"they hold {unknown!r:.60}, which Tokamac does not know"
    for key, found in (("medusa_num_heads", heads.count), ("medusa_num_layers", heads.blocks)):
        if isinstance(text.get(key), int) and text[key] > found:
            return f"they are not whole: the config has {key} {text[key]}, the file {found}"
    width, words = text.get("hidden_size"), text.get("vocab_size")
    wanted: dict[str, Callable[[list[int]], bool]] = {}
    for head in range(heads.count):
        for block in range(heads.blocks):
            wanted[f"heads.{head}.{block}.linear.weight"] = lambda shape: shape[0] == width
            wanted[f"heads.{head}.{block}.linear.bias"] = lambda shape: shape == [width]
        wanted[f"heads.{head}.{heads.blocks}.weight"] = lambda shape: shape[0] == words
    for place, fits in wanted.items():
        if place not in shapes:
            return f"they are not whole: {place.removeprefix('heads.')} is missing"
        if not math.prod(shapes[place]) or not fits(shapes[place]):
            return f"they are another model's: {place.removeprefix('heads.')} is {shapes[place]}"
    return ""


def _nbytes(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


Config = dict[str, Any]
Weights = dict[str, "mx.array"]
Step = Callable[["nn.Module", Config, Weights], Weights]

# What sees and hears in a checkpoint, as alternatives of an expression.
OTHER_PARTS = (
    "vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|mm_projector|vit_large_projector|"
    "patch_merge_mlp|audio_tower|embed_vision|embed_audio"
)

MXFP8: Config = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
MXFP4: Config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
# MLX's microscaling formats, as a config's `quantization` says them.
NVFP4: Config = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

FP8_SCALES = (".weight_scale_inv", ".weight_scale")
# Methods of packing whose bytes and scales by these names are something else.
NO_FP8 = ("bitnet", "mxfp4", "mxfp8", "awq", "gptq")
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.((?:gate|up|down)_proj\.weight)$")
ERNIE_BIAS = "moe_statics.e_score_correction_bias"


def adapt(module: "nn.Module", config: Config) -> None:
    """Wrap the module's ``sanitize``, so that engine and conversion read alike."""
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
        weights = _backbone_alone(module, _language_part(module, config, weights))
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
    # DeepSeek V4's fp8/fp4 scales are powers of two: MLX's mxfp8/mxfp4; Nvidia's fp4 is nvfp4.
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
    """Multiply fp8 arrays by their scales (per array, row or block) to bfloat16; lazy."""
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


def _backbone_alone(module: "nn.Module", weights: Weights) -> Weights:
    """Name what an embedding model stores as the language model that it is part of; its head is not there."""
    if "model" not in module or not any(name.startswith(("embed_tokens.", "layers.")) for name in weights):
        return weights
    named = {f"model.{name}": value for name, value in weights.items() if not name.startswith("dense.")}
    if "lm_head" in module:
        named |= {
            name.replace("model.embed_tokens.", "lm_head."): value
            for name, value in named.items()
            if ".embed_tokens." in name
        }
    return named


def _stack_experts(module: "nn.Module", weights: Weights) -> Weights:
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
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj\.)")
    return {dense.sub("mlp.", name): value for name, value in weights.items()}


def _qwen3_vl_experts(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Transpose experts saved by transformers 5, (experts, out, in), to the published order."""
    width = config["hidden_size"]
    turned = dict(weights)
    for name, value in weights.items():
        if name.endswith(".experts.gate_up_proj") and value.shape[-1] == width != value.shape[-2]:
            down = name.replace("gate_up_proj", "down_proj")
            turned[name], turned[down] = value.swapaxes(-1, -2), weights[down].swapaxes(-1, -2)
    return turned


def _gpt2_names(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Strip the prefix, masks and duplicate tied head of most GPT-2 checkpoints."""
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    return {
        name: value for name, value in bare.items() if not re.search(r"\.attn\.(masked_)?bias$|^lm_head\.weight$", name)
    }


def _gpt_oss_floats(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    """Convert (experts, in, out) with interleaved gate and up to MLX's separate (experts, out, in)."""
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
    named = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    pattern = re.compile("|".join(named))
    return {pattern.sub(lambda found: named[found[0]], name): value for name, value in weights.items()}


def _longcat_experts(module: "nn.Module", config: Config, weights: Weights) -> Weights:  # noqa: ARG001
    last = config["n_routed_experts"]

    def is_multiplied(name: str) -> bool:
        found = EXPERT.match(name)
        return found is None or int(found[2]) < last

    return {name: value for name, value in weights.items() if is_multiplied(name)}


def _keep_ernie_bias(module: "nn.Module", config: Config, weights: Weights, given: Weights) -> Weights:  # noqa: ARG001
    """Keep ERNIE's selection bias, which mlx-lm drops. Raises ModelUnsupportedError if absent."""
    # mlx-lm's conversions have none.
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
    """Run LFM2's own ``sanitize``, which mlx-lm's LFM2-VL wrapper omits."""
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
