"""The heads of a checkpoint that predict tokens beyond the next: which there are, where, and whether they can be used.

    mtp       a layer of the model's own kind after the last one, which reads a hidden state and the token after it
    medusa    blocks beside a model (``medusa_lm_head.safetensors``), the i-th of which predicts the i-th token after the next

Told from config and headers alone, without MLX. mlx-lm's classes drop them; a conversion keeps those of the first kind in a file of
their own, ``mtp.safetensors``, which mlx-lm does not read: older versions of it take some names in it for a sign that nothing was
converted.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelError
from .safetensors import find_shards, read_header

HeadKind = Literal["mtp", "medusa"]

MTP_FILE, MEDUSA_FILE = "mtp.safetensors", "medusa_lm_head.safetensors"

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Keys that say how many layers predict further."""

PACKED = ("scales", "biases", "weight_scale_inv", "weight_scale")
"""What stands beside a packed weight."""

_DEEPSEEK = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"})
_QWEN = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})

_LATER_LAYER = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.(.+)$")
_MTP = re.compile(r"^(?:model\.|language_model\.)*mtp\.(.+)$")
_MEDUSA = re.compile(rf"^(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias|{'|'.join(PACKED)})$")

# Of each form, what fuses a hidden state with a token, by its published name; all else is the layer's.
_FUSED_DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
_FUSED_QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
FUSED = ("enorm", "hnorm", "eh_proj", "norm")
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own embedding and head, which are taken instead."""


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """Heads of one kind in a model folder. Bytes as they are stored.

    count: of layers (mtp) or of tokens predicted (medusa). blocks: of each Medusa head, before its matrix.
    files: by the name of each tensor, the file that holds it. names: by the same, its place in the head: ``enorm``, ``hnorm``,
    ``eh_proj``, ``norm`` or ``layer.…`` (mtp), ``heads.0.0.linear.…`` (medusa).
    less_one: its norms are stored less one, as Qwen's are before they are converted.
    types: bytes by the type of numbers. trouble: why they can't be used; "" where they can.
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
        """Return the bytes in memory. floats: what is not packed becomes float32, as on a CPU; fp8 is unpacked anywhere."""
        grown = {"F8_E4M3": 4 if floats else 2, "F16": 2 if floats else 1, "BF16": 2 if floats else 1}
        return sum(nbytes * grown.get(kind, 1) for kind, nbytes in self.types.items())

    @property
    def named(self) -> str:
        """What it is, in words."""
        if self.kind == "medusa":
            return f"{self.count} Medusa heads"
        layer = "a layer for multi-token prediction"
        return layer if self.count <= 1 else f"{layer}, the first of {self.count}"


def find_heads(folder: Path, config: Mapping[str, Any]) -> tuple[StoredHeads, ...]:
    """Return the heads that a folder's normalised config or its files tell of, those that can't be used included."""
    found = (_find_mtp(folder, config), _find_medusa(folder, config))
    return tuple(each for each in found if each is not None)


def place_in_head(name: str, config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return of which layer beyond the last a tensor is, from 0 on, and its place in it; None for one of the model itself.

    config: of the language part. The place is "" for a copy of what the model has itself.
    """
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
    """Return the name of a tensor of the first layer, or of Medusa heads, by its place: what ``place_in_head`` reads.

    config: normalised.
    """
    if kind == "medusa":
        return place.removeprefix("heads.")
    text = _text(config)
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


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def _find_mtp(folder: Path, config: Mapping[str, Any]) -> StoredHeads | None:
    text = _text(config)
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
    text = _text(config)
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
