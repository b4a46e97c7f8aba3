"""Weight sizes and bytes read per decoded token, from arrays or headers alike."""

# bytes per decoded token = all weights, a tied table once, without an input embedding that is only looked up,
#                           and of a mixture's experts only the active share

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..model.safetensors import find_shards, read_header
from ..model.weights import OTHER_PARTS, text_config

ADDED = (".lora_a", ".lora_b", ".gain")  # how the names of an adapter's arrays end (engine/model/adapters.py)


PartName = Literal["embedding", "attention", "mlp", "experts", "head", "norms and other"]

NAMES_KEPT = 1 << 14  # names of tensors whose part is remembered: those of some twenty models

_NORM = re.compile(r"norm|(^|\.)ln_\w*$")

_PATTERNS: dict[PartName, re.Pattern[str]] = {
    "head": re.compile(r"(^|\.)(lm_head|embed_out|output_layer)(\.|$)|^(model\.)?(output|head)\."),
    "embedding": re.compile(
        r"(^|\.)(embed(_tokens\w*|_in|_positions)?|wte|wpe|(tok|token|word)_embeddings|embeddings?|embedders)(\.head|\.\d+)?\.\w+$"
    ),
    "experts": re.compile(r"\.experts\.(?!e_score_correction_bias)|\.switch_\w+\.|\.experts_\w+$"),
    "attention": re.compile(r"attn|attention|mixer\.|mamba\.|temporal_block|\.conv\."),
    "mlp": re.compile(
        r"mlp|feed_forward|ffn|moe|\.(fc1|fc2|w1|w2|w3|up_proj|down_proj|gate_proj|altup\w*|laurel|per_layer_\w+)\."
    ),
}  # fmt: skip


PARTS: tuple[PartName, ...] = ("embedding", "attention", "mlp", "experts", "head", "norms and other")

# How weights lie in memory: as in the files (GPU); or packed matrices as in the files, and all other numbers as
# float32, the scales of MLA's packed heads, too (a plain CPU: engine/cpu).
Form = Literal["stored", "float32"]

FLOATS = ("F64", "F32", "F16", "BF16")

_DTYPES = {
    "mlx.core.float64": "F64", "mlx.core.float32": "F32", "mlx.core.float16": "F16", "mlx.core.bfloat16": "BF16",
    "mlx.core.uint32": "U32", "mlx.core.uint8": "U8", "mlx.core.int32": "I32",
    "mlx.core.int64": "I64",
}  # fmt: skip

# What other packers keep beside their weights.
OTHER_SCALES = frozenset({"qzeros", "g_idx", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale"})

# Embeddings that are never the output head, tied or not.
_LOOKED_UP = re.compile(r"per_layer|wpe|embed_positions|embedders")

# Weights of checkpoints that mlx-lm leaves out of a text model.
_NOT_LOADED = re.compile(rf"(^|\.)({OTHER_PARTS}|mtp\w*)\.|inv_freq$")


_HEADS = re.compile(r"\.(embed_q|unembed_out)$")  # MLA's, one matrix for each: MLX multiplies them everywhere

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")

# Families whose class in mlx-lm has an output head of its own if the checkpoint stores one, whatever its config says.
HEAD_IF_STORED = frozenset({"gemma3_text", "recurrent_gemma"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array: safetensors type, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights of one kind: count, bytes, bytes read per token."""

    parameters: int
    nbytes: int
    nbytes_per_token: int

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.nbytes / self.parameters if self.parameters else None


@dataclass(frozen=True, slots=True)
class Cost:
    """A model's weights by part. ``parameters`` counts weights, not packed words.

    weight_bytes_per_token: None if a mixture's active experts are unknown.
    """

    parts: Mapping[PartName, WeightPart]
    parameters: int
    active_parameters: int | None
    weight_bytes: int
    weight_bytes_per_token: int | None

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.weight_bytes / self.parameters if self.parameters else None


def cost_of_model(model: Any, config: Mapping[str, Any], *, form: Form = "stored") -> Cost:
    """Return a module's cost from shapes and types; computes nothing."""
    return cost_of_tensors(tensors_of(model), config, groups=groups_of(model), form=form)


def tensors_of(model: Any) -> list[Tensor]:
    from mlx.utils import tree_flatten

    arrays = tree_flatten(model.parameters())
    return [Tensor(name, _DTYPES.get(str(x.dtype), "U8"), tuple(x.shape), int(x.nbytes)) for name, x in arrays]


def groups_of(model: Any) -> dict[str, int]:
    return {name: module.group_size for name, module in leaf_modules(model) if "scales" in module}


def cost_of_folder(
    folder: Path, config: Mapping[str, Any], *, form: Form = "stored", added: Iterable[Tensor] = ()
) -> Cost:
    """Return a folder's cost from headers. Raises ModelDamagedError, ModelUnsupportedError."""
    headers: dict[str, Any] = {}
    for shard in find_shards(folder):
        headers.update(read_header(shard))
    tensors = [
        Tensor(name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in headers.items()
    ]
    return cost_of_tensors([*_loaded(tensors, config), *added], config, form=form)


def bits_per_weight(bits: float, group_size: int, scale_bytes: int = 2) -> float:
    return bits + 2 * 8 * scale_bytes / group_size


def cost_of_tensors(
    tensors: Iterable[Tensor],
    config: Mapping[str, Any],
    *,
    groups: Mapping[str, int] | None = None,
    form: Form = "stored",
) -> Cost:
    by_name = {tensor.name: tensor for tensor in tensors}
    has_head = any(part_of(tensor, config) == "head" for tensor in by_name.values())
    active = active_share(config)
    counts: dict[PartName, list[int]] = {part: [0, 0, 0] for part in PARTS}
    active_parameters, known = 0, True
    for tensor in by_name.values():
        part = part_of(tensor, config)
        weights = _weights(tensor, by_name, config, groups)
        nbytes = _nbytes(tensor, by_name, form)
        share = (1, 1)
        if part == "embedding" and (has_head or _LOOKED_UP.search(tensor.name)):
            share = (0, 1)
        elif part == "experts":
            known, share = known and active is not None, active or (1, 1)
        for index, value in enumerate((weights, nbytes, nbytes * share[0] // share[1])):
            counts[part][index] += value
        active_parameters += weights * share[0] // share[1]
    parts = {part: WeightPart(*values) for part, values in counts.items()}
    return Cost(
        parts=parts,
        parameters=sum(part.parameters for part in parts.values()),
        active_parameters=active_parameters if known else None,
        weight_bytes=sum(part.nbytes for part in parts.values()),
        weight_bytes_per_token=sum(part.nbytes_per_token for part in parts.values()) if known else None,
    )


def leaf_modules(model: Any) -> list[tuple[str, Any]]:
    # MLX's ``leaf_modules`` rewalks at every depth: a quarter of weighing time.
    found: list[tuple[str, Any]] = []
    _collect(model, "", found)
    return found


def added_matrices(model: Any) -> list[tuple[str, Any]]:
    from mlx.utils import tree_flatten

    return [each for each in tree_flatten(model.parameters()) if each[0].rpartition(".")[2] in ("lora_a", "lora_b")]


def _collect(value: Any, path: str, found: list[tuple[str, Any]]) -> None:
    # No closure: a recursive one is a reference cycle that would keep a model's weights alive.
    from mlx import nn

    before = len(found)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)  # a module is a dict of what it holds
    for key, each in pairs:
        if isinstance(each, dict | list):
            _collect(each, f"{path}.{key}" if path else str(key), found)
    if path and len(found) == before and isinstance(value, nn.Module):
        found.append((path, value))


@lru_cache(maxsize=NAMES_KEPT)
def part_named(name: str) -> PartName:
    if _NORM.search(name.rpartition(".")[0]):
        return "norms and other"
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(name)), "norms and other")


def part_of(tensor: Tensor, config: Mapping[str, Any]) -> PartName:
    part = part_named(tensor.name)
    return "experts" if part == "mlp" and _stacked(tensor, config) else part


def _loaded(tensors: Iterable[Tensor], config: Mapping[str, Any]) -> list[Tensor]:
    text = text_config(config)
    tied = bool(text.get("tie_word_embeddings", False)) and text.get("model_type") not in HEAD_IF_STORED
    unused = (_predicts_further, _passes_through)
    kept = [
        tensor
        for tensor in tensors
        if not (_NOT_LOADED.search(tensor.name) or any(is_unused(tensor, text) for is_unused in unused))
    ]
    return [tensor for tensor in kept if not (tied and part_of(tensor, config) == "head")]


def _predicts_further(tensor: Tensor, text: Mapping[str, Any]) -> bool:
    """Whether a tensor is in a layer beyond the last: DeepSeek's and GLM's MTP."""
    layers, found = text.get("num_hidden_layers"), _LAYER.search(tensor.name)
    return isinstance(layers, int) and found is not None and int(found[1]) >= layers


def _passes_through(tensor: Tensor, text: Mapping[str, Any]) -> bool:
    experts, found = text.get("n_routed_experts"), _EXPERT.search(tensor.name)
    if text.get("model_type") != "longcat_flash" or not isinstance(experts, int):
        return False
    return found is not None and int(found[1]) >= experts


def first_of(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _stacked(tensor: Tensor, config: Mapping[str, Any]) -> bool:
    experts = experts_of(config)
    return len(tensor.shape) == 3 and experts is not None and tensor.shape[0] == experts


def experts_of(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    value = first_of(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return value if isinstance(value, int) and value > 0 else None


def active_share(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (experts per token, experts), or None."""
    text, experts = text_config(config), experts_of(config)
    used = first_of(
        text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"
    )
    return (used, experts) if experts and isinstance(used, int) and 0 < used <= experts else None


def _packed(tensor: Tensor, by_name: Mapping[str, Tensor]) -> Tensor | None:
    owner, _, leaf = tensor.name.rpartition(".")
    return by_name.get(f"{owner}.scales") if leaf == "weight" and tensor.dtype == "U32" else None


def _weights(
    tensor: Tensor, by_name: Mapping[str, Tensor], config: Mapping[str, Any], groups: Mapping[str, int] | None
) -> int:
    owner, _, leaf = tensor.name.rpartition(".")
    grouped = leaf in ("scales", "biases", "global_scale") and f"{owner}.weight" in by_name
    if grouped or leaf in OTHER_SCALES or (leaf == "scale" and f"{owner}.weight" in by_name):
        return 0
    if leaf == "qweight":
        return tensor.size * 32 // int((config.get("quantization_config") or {}).get("bits", 4))
    if leaf == "weight" and (tensor.dtype == "I8" or f"{owner}.weight_scale_2" in by_name):
        return 2 * tensor.size  # fp4: two numbers to a byte
    if leaf == "weight" and tensor.dtype == "U8" and f"{owner}.weight_scale" in by_name:
        return 4 * tensor.size  # bitnet: four weights of three values each to a byte
    scales = _packed(tensor, by_name)
    if scales is None:
        return tensor.size
    return scales.size * (groups[owner] if groups and owner in groups else _group_size(owner, config))


def _group_size(owner: str, config: Mapping[str, Any]) -> int:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    entry = quantization.get(owner)
    return int((entry if isinstance(entry, dict) else quantization).get("group_size", 64))


def _nbytes(tensor: Tensor, by_name: Mapping[str, Tensor], form: Form) -> int:
    if form == "stored":
        return tensor.nbytes
    owner, _, leaf = tensor.name.rpartition(".")
    weight = by_name.get(f"{owner}.weight")
    packed = weight is not None and _packed(weight, by_name) is not None and not _HEADS.search(owner)
    kept = tensor.dtype not in FLOATS or (packed and leaf in ("scales", "biases"))
    return tensor.nbytes if kept else 4 * tensor.size
