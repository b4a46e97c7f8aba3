"""A vision projector (``mmproj-*.gguf``) beside a GGUF model: its settings and arrays, as engine/vision's towers name them."""

# Keys and names are those of llama.cpp's converter: `v.` is the tower, `mm.` leads from it into the language model.

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelDamagedError, ModelUnsupportedError
from .architectures import Place
from .blocks import FLOATS, MINUS_ONE, PACKINGS, Order
from .checkpoint import StoredPart, projector_of
from .file import GgufFile, read_gguf
from .places import damaged

if TYPE_CHECKING:
    import mlx.core as mx

Config = dict[str, Any]
BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)")
DEEP = re.compile(r"v\.deepstack\.(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class ProjectorKind:
    """settings: of the file and the text's width, the config and the image processor's settings. blocks, layer, top: names."""

    model_type: str
    settings: "Callable[[ProjectorKeys], tuple[Config, Config]]"
    blocks: str
    layer: Mapping[str, str]
    top: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProjectorKeys:
    file: GgufFile
    width: int

    def number(self, key: str, default: float | None = None) -> Any:
        """Raises ModelDamagedError."""
        value = self.file.metadata.get(f"clip.vision.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise damaged(self.file.files[0], f"it has no number for clip.vision.{key}")
        return value

    def flags(self, key: str) -> list[Any]:
        value = self.file.metadata.get(f"clip.vision.{key}")
        return value if isinstance(value, list) else []

    def rows(self, tensor: str) -> int:
        """Raises ModelDamagedError."""
        if tensor not in self.file.tensors:
            raise damaged(self.file.files[0], f"it has no tensor {tensor}")
        return self.file.tensors[tensor].shape[0]

    @property
    def side(self) -> int:
        """Of a picture, in patches."""
        return int(self.number("image_size")) // int(self.number("patch_size"))


def _gemma3(keys: ProjectorKeys) -> tuple[Config, Config]:
    return {"mm_tokens_per_image": (keys.side // int(keys.number("projector.scale_factor", 4))) ** 2}, {}


def _idefics3(keys: ProjectorKeys) -> tuple[Config, Config]:
    tile = int(keys.number("image_size"))
    sizes = {"size": keys.number("preproc_image_size", 4 * tile), "max_image_size": tile}
    settings = {name: {"longest_edge": int(edge)} for name, edge in sizes.items()}
    return {"scale_factor": int(keys.number("projector.scale_factor", 2))}, settings


def _internvl(keys: ProjectorKeys) -> tuple[Config, Config]:
    vision: Config = {"attention_bias": "v.blk.0.attn_q.bias" in keys.file.tensors}
    vision |= {"use_qk_norm": "v.blk.0.attn_q_norm.weight" in keys.file.tensors}
    vision |= {"norm_type": "layer_norm" if "v.blk.0.ln1.bias" in keys.file.tensors else "rms_norm"}
    side = int(keys.number("image_size"))
    ratio = 1 / int(keys.number("projector.scale_factor", 2))
    return {"downsample_ratio": ratio, "vision_config": vision}, {"size": {"height": side, "width": side}}


def _lfm2(keys: ProjectorKeys) -> tuple[Config, Config]:
    merge = int(keys.number("projector.scale_factor", 2))
    config: Config = {"projector_hidden_size": keys.rows("mm.1.weight")}
    config |= {"projector_use_layernorm": "mm.input_norm.weight" in keys.file.tensors}
    config |= {"vision_config": {"num_patches": keys.rows("v.position_embd.weight")}}
    return config, {"encoder_patch_size": int(keys.number("patch_size")), "downsample_factor": merge}


def _qwen(keys: ProjectorKeys) -> tuple[Config, Config]:
    depth, every = int(keys.number("block_count")), int(keys.number("n_wa_pattern", 0))
    vision: Config = {"depth": depth, "num_heads": keys.number("attention.head_count"), "out_hidden_size": keys.width}
    vision |= {"spatial_merge_size": int(keys.number("spatial_merge_size", 2)), "temporal_patch_size": 2}
    vision["deepstack_visual_indexes"] = [at for at, deep in enumerate(keys.flags("is_deepstack_layers")) if deep]
    vision["num_position_embeddings"] = keys.side**2
    vision["window_size"] = int(keys.number("window_size", 8 * keys.number("patch_size")))
    vision["fullatt_block_indexes"] = [at for at in range(depth) if every and (at + 1) % every == 0]
    bounds = {"min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels"}
    told = {name: int(keys.number(key, 0)) for name, key in bounds.items()}
    return {"vision_config": vision}, {**told}  # 0: the family's own


def _pixtral(keys: ProjectorKeys) -> tuple[Config, Config]:
    config = {"spatial_merge_size": int(keys.number("spatial_merge_size", 1)), "vision_feature_layer": -1}
    config |= {"multimodal_projector_bias": "mm.1.bias" in keys.file.tensors}
    vision = {"model_type": "pixtral", "hidden_act": "silu" if keys.file.metadata.get("clip.use_silu") else "gelu"}
    return config | {"vision_config": vision}, {"size": {"longest_edge": int(keys.number("image_size"))}}


SIGLIP = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"},
    **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
}
EMBEDDINGS = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
QWEN = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
IN_PARTS = ("attn_q", "attn_k", "attn_v")  # of what Qwen's towers hold as one
PATCHES = "v.patch_embd"


def _in(part: str) -> dict[str, str]:
    return {name: f"{part}.{own}" for name, own in EMBEDDINGS.items()}


KINDS = {
    "gemma3": ProjectorKind(
        "gemma3", _gemma3, "vision_tower.encoder.layers", SIGLIP,
        {**_in("vision_tower"), "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
         "mm.input_projection": "multi_modal_projector.mm_input_projection_weight"},
    ),
    "idefics3": ProjectorKind(
        "idefics3", _idefics3, "vision_model.encoder.layers", SIGLIP, {**_in("vision_model"), "mm.model.fc": "connector"}
    ),
    "internvl": ProjectorKind(
        "internvl", _internvl, "vision_tower.encoder.layer",
        {**{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}, "attn_out": "attention.projection_layer",
         "attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm", "ls1": "lambda_1", "ls2": "lambda_2",
         "ln1": "layernorm_before", "ln2": "layernorm_after", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {PATCHES: "vision_tower.embeddings.patch_embeddings.projection",
         "v.position_embd": "vision_tower.embeddings.position_embeddings",
         "v.class_embd": "vision_tower.embeddings.cls_token", "mm.model.mlp.0": "multi_modal_projector.layer_norm",
         "mm.model.mlp.1": "multi_modal_projector.linear_1", "mm.model.mlp.3": "multi_modal_projector.linear_2"},
    ),
    "lfm2": ProjectorKind(
        "lfm2_vl", _lfm2, "vision_tower.encoder.layers", SIGLIP,
        {**_in("vision_tower"), "mm.input_norm": "multi_modal_projector.layer_norm",
         "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"},
    ),
    "pixtral": ProjectorKind(
        "mistral3", _pixtral, "vision_tower.transformer.layers",
        {**{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}, "attn_out": "attention.o_proj",
         "ln1": "attention_norm", "ln2": "ffn_norm",
         **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}},
        {PATCHES: "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
         "mm.input_norm": "multi_modal_projector.norm", "mm.1": "multi_modal_projector.linear_1",
         "mm.2": "multi_modal_projector.linear_2", "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer"},
    ),
    "qwen2.5vl_merger": ProjectorKind(
        "qwen2_5_vl", _qwen, "blocks",
        {**QWEN, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        {PATCHES: "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"},
    ),
    "qwen3vl_merger": ProjectorKind(
        "qwen3_vl", _qwen, "blocks", {**QWEN, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {PATCHES: "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
         "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"},
    ),
}  # fmt: skip
COPIES = ("v.token_embd.img_break",)  # of what the language model's file has
# Parameters, not a module's.
WHOLE = ("mm_input_projection_weight", ".position_embeddings", ".cls_token", ".lambda_1", ".lambda_2")


def settings_beside(folder: Path, text: Mapping[str, Any]) -> tuple[Config, Config] | str:
    """Return config and image processor's settings for the projector beside a GGUF folder's files; else why there is none.

    Raises ModelDamagedError.
    """
    path = projector_of(folder)
    if path is None:
        return "its file holds no tower, and no vision projector (mmproj-….gguf) lies beside it"
    file = read_gguf(path)
    names = (file.metadata.get(f"clip.{part}projector_type") for part in ("vision.", "", "audio."))
    name = next(filter(None, names), "")
    if (kind := KINDS.get(str(name))) is None:
        return f"the vision projector beside it is of the kind {str(name)[:40]}, which is not supported yet"
    keys = ProjectorKeys(file, int(text["hidden_size"]))
    config, settings = kind.settings(keys)
    vision = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "image_size": "image_size"}
    vision |= {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}
    found = {name: int(keys.number(key)) for name, key in {**vision, "patch_size": "patch_size"}.items()}
    found["layer_norm_eps"] = keys.number("attention.layer_norm_epsilon", 1e-6)
    settings |= {f"image_{key}": keys.flags(f"image_{key}") for key in ("mean", "std")}
    settings["projector"] = [
        path.name,
        path.stat().st_size,
        path.stat().st_mtime_ns,
    ]  # what the prompt cache tells apart
    model_type = (
        "qwen3_5" if kind.model_type == "qwen3_vl" and "qwen3_5" in str(text["model_type"]) else kind.model_type
    )
    whole = {**config, "model_type": model_type, "text_config": dict(text)}
    return whole | {"vision_config": found | config.get("vision_config", {})}, settings


def arrays_beside(folder: Path) -> "dict[str, mx.array]":
    """Return the arrays of the projector beside a GGUF folder's files by the tower's names.

    Raises ModelDamagedError, ModelUnsupportedError.
    """
    import mlx.core as mx

    path = projector_of(folder)
    if path is None:
        raise ModelDamagedError(f"the vision projector beside {folder.name} is gone", "Load the model again.")
    file = read_gguf(path)
    kind = KINDS[str(file.metadata.get("clip.vision.projector_type") or file.metadata.get("clip.projector_type"))]
    found: dict[str, mx.array] = {}
    deep = sorted({int(match[1]) for name in file.tensors if (match := DEEP.match(name))})
    up, down = (file.tensors.get(f"v.blk.0.ffn_{part}.weight") for part in ("up", "down"))
    # Files of the first converter call the wide one down.
    turned = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if up and down and up.shape[0] < down.shape[0] else {}
    merged = "attn_qkv" in kind.layer
    for name, tensor in file.tensors.items():
        if name in COPIES:
            continue
        second = name == f"{PATCHES}.weight.1"
        stem, _, leaf = name.removesuffix(".1" if second else "").rpartition(".")
        stem = name if name == "v.class_embd" else stem
        if (block := BLOCK.fullmatch(stem)) is not None:
            part = turned.get(block[2], block[2])
            own = kind.layer.get(part) or (part if merged and part in IN_PARTS else None)
            own = own and f"{kind.blocks}.{block[1]}.{own}"
        elif (level := DEEP.fullmatch(stem)) is not None:
            own = f"deepstack_merger_list.{deep.index(int(level[1]))}.{level[2].replace('fc', 'linear_fc')}"
        else:
            own = kind.top.get(stem)
        if own is None or (tensor.kind not in FLOATS and tensor.kind not in PACKINGS):
            raise ModelUnsupportedError(f"{path} holds {name:.80} ({tensor.kind.name}), which is not known here", "")
        # Pixtral's queries and keys are stored for a rotation of neighbours, as Llama's are.
        heads = int(file.metadata.get("clip.vision.attention.head_count") or 1) if kind.model_type == "mistral3" else 0
        turned_by = tensor.shape[0] // heads if heads and own.endswith((".q_proj", ".k_proj")) else 0
        change = MINUS_ONE if stem == "mm.soft_emb_norm" else ""
        leaf = "" if own.endswith(WHOLE) else leaf
        place = Place(own + ".1" * second, leaf, tensor.shape, Order(turned=turned_by), change)
        found |= StoredPart(tensor, place).read()
    return _joined(found, kind)


def _joined(found: "dict[str, mx.array]", kind: ProjectorKind) -> "dict[str, mx.array]":
    """Put together what the converter took apart: queries, keys and values, and the two pictures of a patch."""
    import mlx.core as mx

    for name in [name for name in found if ".attn_q." in name and kind.blocks == "blocks"]:
        parts = [found.pop(name.replace(".attn_q.", f".{part}.")) for part in IN_PARTS]
        found[name.replace(".attn_q.", ".attn.qkv.")] = mx.concatenate(parts)
    if (second := found.pop("patch_embed.proj.1.weight", None)) is not None:
        found["patch_embed.proj.weight"] = mx.stack([found["patch_embed.proj.weight"], second], axis=2)
    if kind.model_type == "internvl":
        for part in ("cls_token", "position_embeddings"):
            name = f"vision_tower.embeddings.{part}"
            found[name] = found[name].reshape(1, -1, found[name].shape[-1])
    if kind.model_type == "lfm2_vl":  # whose patches have colours last
        name = "vision_tower.embeddings.patch_embedding.weight"
        found[name] = mx.moveaxis(found[name], 1, -1).reshape(len(found[name]), -1)
    return found
