"""What a model weighs, and what one decoded token reads of it.

Two ways to the same numbers: from a loaded model's arrays, or from config.json and the safetensors headers alone. Both make a list
of tensors (name, type, shape, bytes); everything after that is shared, so they agree. Which part of a model a tensor belongs to is
told by its name.

    bytes per decoded token = all weights, less the input embedding where it is only looked up (one row is read), a tied table once,
                              and of a mixture's experts only the active share
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..model.safetensors import find_shards, read_header
from ..model.weights import OTHER_PARTS

ADDED = (".lora_a", ".lora_b", ".gain")
"""How the names of an adapter's arrays end (engine/model/adapted_layers.py)."""


PartName = Literal["embedding", "attention", "mlp", "experts", "head", "norms and other"]

NAMES_KEPT = 1 << 14
"""Names of tensors whose part is remembered: those of some twenty models."""

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

Form = Literal["stored", "float32"]
"""How weights lie in memory: as in the files (GPU); or packed matrices as in the files, and all other numbers as float32, the
scales of MLA's packed heads, too (a plain CPU: engine/model/cpu)."""

FLOATS = ("F64", "F32", "F16", "BF16")

_DTYPES = {
    "mlx.core.float64": "F64", "mlx.core.float32": "F32", "mlx.core.float16": "F16", "mlx.core.bfloat16": "BF16",
    "mlx.core.uint32": "U32", "mlx.core.uint8": "U8", "mlx.core.int32": "I32",
    "mlx.core.int64": "I64",
}  # fmt: skip

OTHER_SCALES = frozenset({"qzeros", "g_idx", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale"})
"""What other packers keep beside their weights."""

_LOOKED_UP = re.compile(r"per_layer|wpe|embed_positions|embedders")
"""Embeddings that are never the output head, tied or not."""

_NOT_LOADED = re.compile(rf"(^|\.)({OTHER_PARTS}|mtp\w*)\.|inv_freq$")
"""Weights of checkpoints that mlx-lm leaves out of a text model."""


_HEADS = re.compile(r"\.(embed_q|unembed_out)$")
"""MLA's, one matrix for each: MLX multiplies them everywhere."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")

HEAD_IF_STORED = frozenset({"gemma3_text", "recurrent_gemma"})
"""Families whose class in mlx-lm has an output head of its own if the checkpoint stores one, whatever its config says."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array: its type as safetensors names it (F32, BF16, U32 …), shape, and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        """How many elements it has; a packed one has fewer than weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights of one kind: how many, in how many bytes, and how many bytes one decoded token reads of them."""

    parameters: int
    nbytes: int
    nbytes_per_token: int

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits ÷ weights, scales and biases included; None where there are no weights."""
        return 8 * self.nbytes / self.parameters if self.parameters else None


@dataclass(frozen=True, slots=True)
class Cost:
    """A model's weights by part. Bytes; ``parameters`` are weights, not packed words.

    active_parameters: what one token is multiplied with: experts in use only, no looked-up embedding.
    weight_bytes_per_token: None for a mixture that doesn't say how many experts are active.
    """

    parts: Mapping[PartName, WeightPart]
    parameters: int
    active_parameters: int | None
    weight_bytes: int
    weight_bytes_per_token: int | None

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits ÷ weights, scales and biases included."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else None


def cost_of_model(model: Any, config: Mapping[str, Any], *, form: Form = "stored") -> Cost:
    """Return the cost of an mlx-lm model: of its arrays as they are, or as another form would hold them.

    Only shapes and types are looked at: arrays that were never computed stay so.
    """
    return cost_of_tensors(tensors_of(model), config, groups=groups_of(model), form=form)


def tensors_of(model: Any) -> list[Tensor]:
    """Return the arrays of an mlx-lm model, as safetensors would describe them. Computes none of them."""
    from mlx.utils import tree_flatten

    arrays = tree_flatten(model.parameters())
    return [Tensor(name, _DTYPES.get(str(x.dtype), "U8"), tuple(x.shape), int(x.nbytes)) for name, x in arrays]


def groups_of(model: Any) -> dict[str, int]:
    """Return how many weights share a scale, by the path of every packed module."""
    return {name: module.group_size for name, module in leaf_modules(model) if "scales" in module}


def cost_of_folder(
    folder: Path, config: Mapping[str, Any], *, form: Form = "stored", added: Iterable[Tensor] = ()
) -> Cost:
    """Return the cost of a model folder from its headers; no weight is read and no MLX is needed. added: tensors of an adapter.

    Raises ModelDamagedError and ModelUnsupportedError for what is missing, cut off, or pickled.
    """
    headers: dict[str, Any] = {}
    for shard in find_shards(folder):
        headers.update(read_header(shard))
    tensors = [
        Tensor(name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in headers.items()
    ]
    return cost_of_tensors([*_loaded(tensors, config), *added], config, form=form)


def bits_per_weight(bits: float, group_size: int, scale_bytes: int = 2) -> float:
    """Return the stored bits per weight of affine groups: each group adds one scale and one bias."""
    return bits + 2 * 8 * scale_bytes / group_size


def cost_of_tensors(
    tensors: Iterable[Tensor],
    config: Mapping[str, Any],
    *,
    groups: Mapping[str, int] | None = None,
    form: Form = "stored",
) -> Cost:
    """Return the cost of the tensors a model is made of.

    groups: group size by module path, where known from the modules; else config.json's quantization says it.
    """
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
    """Return each module below ``model`` that has none below itself, with its path, in the model's order.

    MLX's own ``leaf_modules`` walks all that is below each module again at every depth: a quarter of the time of weighing a model.
    """
    found: list[tuple[str, Any]] = []
    _collect(model, "", found)
    return found


def added_matrices(model: Any) -> list[tuple[str, Any]]:
    """Return the matrices of adapters (mlx_lm.tuner's ``lora_a`` and ``lora_b``) with their paths, in the model's order."""
    from mlx.utils import tree_flatten

    return [each for each in tree_flatten(model.parameters()) if each[0].rpartition(".")[2] in ("lora_a", "lora_b")]


def _collect(value: Any, path: str, found: list[tuple[str, Any]]) -> None:
    """Add what is below ``value``. No closure: one that calls itself is a cycle, and would hold a model's weights for long."""
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
    """Return what a name tells. Each is asked about several times for a model, and again for the next of its family."""
    if _NORM.search(name.rpartition(".")[0]):
        return "norms and other"
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(name)), "norms and other")


def part_of(tensor: Tensor, config: Mapping[str, Any]) -> PartName:
    """Return which part of a model a tensor belongs to, by its name; an expert stack also by its first axis."""
    part = part_named(tensor.name)
    return "experts" if part == "mlp" and _stacked(tensor, config) else part


def _loaded(tensors: Iterable[Tensor], config: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a checkpoint that a text model keeps."""
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
    """Whether a tensor is of a layer beyond the last: DeepSeek and GLM store there what predicts the token after the next."""
    layers, found = text.get("num_hidden_layers"), _LAYER.search(tensor.name)
    return isinstance(layers, int) and found is not None and int(found[1]) >= layers


def _passes_through(tensor: Tensor, text: Mapping[str, Any]) -> bool:
    """Whether a tensor is of an expert of LongCat's that passes its input through: transformers saves some that nothing uses."""
    experts, found = text.get("n_routed_experts"), _EXPERT.search(tensor.name)
    if text.get("model_type") != "longcat_flash" or not isinstance(experts, int):
        return False
    return found is not None and int(found[1]) >= experts


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model: multimodal checkpoints nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def first_of(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of ``keys`` that is set, else None."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _stacked(tensor: Tensor, config: Mapping[str, Any]) -> bool:
    experts = experts_of(config)
    return len(tensor.shape) == 3 and experts is not None and tensor.shape[0] == experts


def experts_of(config: Mapping[str, Any]) -> int | None:
    """Return how many experts each mixture of a model has; None where it has none."""
    text = text_config(config)
    value = first_of(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return value if isinstance(value, int) and value > 0 else None


def active_share(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (experts used by a token, experts); None where the config doesn't say."""
    text, experts = text_config(config), experts_of(config)
    used = first_of(
        text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"
    )
    return (used, experts) if experts and isinstance(used, int) and 0 < used <= experts else None


def _packed(tensor: Tensor, by_name: Mapping[str, Tensor]) -> Tensor | None:
    """Return the scales of a packed weight, else None."""
    owner, _, leaf = tensor.name.rpartition(".")
    return by_name.get(f"{owner}.scales") if leaf == "weight" and tensor.dtype == "U32" else None


def _weights(
    tensor: Tensor, by_name: Mapping[str, Tensor], config: Mapping[str, Any], groups: Mapping[str, int] | None
) -> int:
    """Return how many weights a tensor stands for: a scale or a bias of a group stands for none."""
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
    """Return the bytes a tensor takes in this form."""
    if form == "stored":
        return tensor.nbytes
    owner, _, leaf = tensor.name.rpartition(".")
    weight = by_name.get(f"{owner}.weight")
    packed = weight is not None and _packed(weight, by_name) is not None and not _HEADS.search(owner)
    kept = tensor.dtype not in FLOATS or (packed and leaf in ("scales", "biases"))
    return tensor.nbytes if kept else 4 * tensor.size
