"""What a model costs from its config alone: no weight, no header, no download.

Weights: mlx-lm's class is built as a skeleton (model/skeleton.py) and packed by MLX's own code; the arrays that come out have the
shapes and types of the real ones and are counted as a loaded model's are. Keys and values are pure arithmetic:

    KV bytes per token = Σ over layers that keep KV of kv_heads × (key_dim × bytes per key + value_dim × bytes per value)
    bytes per value    = the model's type, or packed: bits/8 + 2 × scale_bytes ÷ group_size

A layer with a window of its own stops growing at it, or at the user's where that is smaller; a linear-attention or state-space
layer does not grow at all. A loaded model's plan (engine/kv/plan.py) gives the same, by test; this also covers models that mlx-lm
has no class for, and those whose class can't be made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import ModelError, ModelUnsupportedError, OptionError
from ..kv.sizes import bytes_per_value, group_for
from ..model.config import ignored_windows
from ..model.skeleton import skeleton_model
from ..model.weights import is_fp8
from ..options import KVSpec
from .cost import (
    HEAD_IF_STORED,
    Cost,
    Form,
    cost_of_tensors,
    first_of,
    groups_of,
    part_of,
    tensors_of,
    text_config,
)

FULL = frozenset({
    "full_attention", "attention", "global", "full", "global_attention", "deepseek_sparse_attention",
    "indexed_attention", "minimax_m3_sparse",
})  # fmt: skip
SLIDING = frozenset({"sliding_attention", "local", "sliding", "local_attention", "chunked_attention"})
EMPTY = frozenset({"mlp", "moe"})
"""Layers that only feed forward, where a config lists them beside those that attend."""
STATE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm"})

COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Layers that compress several tokens into one entry (DeepSeek V4)."""

KNOWN_LAYERS = FULL | SLIDING | STATE | EMPTY | COMPRESSED

LATENT = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"})
"""Multi-head latent attention whose cache holds the latent and the rotary key, once for all heads (mlx-lm 0.32)."""

STATELESS_KV = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
"""No layer keeps keys or values."""

ONE_TO_ONE = frozenset({"gpt2", "gptj", "gpt_neox"})
"""Every head has keys of its own, whatever the config says."""

UNPACKED = LATENT | frozenset({"stablelm"})
"""Families whose attention does not take keys and values as a cache hands them out, so no flag applies to their caches."""

EXPANDED = frozenset({"deepseek_v2", "minicpm3"})
"""Multi-head latent attention whose cache holds every head's keys and values, unfolded (mlx-lm 0.32)."""

UNMOVED = EXPANDED | frozenset({
    "gpt2", "gptj", "gpt_bigcode", "hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "ministral3", "nanochat", "nemotron_h",
    "phi", "phixtral",
})  # fmt: skip
"""Families whose keys are no rotary embeddings, or are worked on after that, so pinned ones are not moved."""

UNKNOWN = frozenset({
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41",
    "gemma3n", "gemma4", "gemma4_text", "gemma4_unified_text", "glm_moe_dsa", "kimi_k3", "kimi_linear",
    "longcat_flash", "longcat_flash_ngram", "nemotron-nas",
    "plamo2",
    "recurrent_gemma", "iquestloopcoder", "mimo_v2_flash",
    "minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text",
})  # fmt: skip
"""Families whose layers differ in ways this arithmetic does not cover: their cost stays unknown until they are loaded."""


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A layer that keeps keys and values: (heads, dims of a key, dims of a value); ``window`` tokens at most, None for all.

    free: the user's flags apply to it. moves: so do pinned keys, along with a window (``kv.rotary``).
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    free: bool = True
    moves: bool = True


def kv_layers(config: Mapping[str, Any]) -> tuple[KVLayer, ...] | None:
    """Return the layers of a model that keep keys and values; None where the config is of a kind not covered here."""
    text = text_config(config)
    kind = str(text.get("model_type", ""))
    listed = first_of(text, "layer_types", "layers_block_type")
    layers = first_of(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers is None and isinstance(listed, list):  # Nemotron 3's files name the layers and do not count them
        layers = len(listed)
    if kind in STATELESS_KV:
        return ()
    names = None if kind in UNKNOWN or not isinstance(layers, int) else _layer_types(text, layers)
    shape = _shape(text, kind)
    if names is None or shape is None:
        return None
    window = first_of(text, "sliding_window", "attention_chunk_size")
    if any(name in SLIDING for name in names) and not isinstance(window, int):
        return None
    missed = ignored_windows(config, len(names))  # by mlx-lm's classes, not by our caches
    return tuple(
        KVLayer(*shape, window if name in SLIDING else own, kind not in UNPACKED, kind not in UNMOVED)
        for name, own in zip(names, missed, strict=True)
        if name not in STATE | EMPTY
    )


def names_unknown_layers(config: Mapping[str, Any]) -> bool:
    """Whether the config lists a kind of layer that nothing here knows: then what a class makes of it is not to be trusted."""
    listed = first_of(text_config(config), "layer_types", "layers_block_type")
    return isinstance(listed, list) and any(name not in KNOWN_LAYERS for name in listed)


def no_spare(window: int) -> int:  # noqa: ARG001
    """No slots beside those of the window."""
    return 0


def kv_bytes_per_token(layers: Sequence[KVLayer], spec: KVSpec, *, value_bytes: int = 2) -> int:
    """Return the bytes one more token takes while no window is full. value_bytes: of the model's own type."""
    return sum(_layer_bytes(layer, spec, value_bytes) for layer in layers)


def kv_bytes(
    layers: Sequence[KVLayer],
    spec: KVSpec,
    context: int,
    *,
    value_bytes: int = 2,
    spare: Callable[[int], int] = no_spare,
) -> int:
    """Return the bytes kept, and read by every step, at ``context`` tokens.

    The user's window bounds the layers that have no smaller one of their own. spare: the slots to rewind into that a window of N
    tokens has beside it (``kv.plan.spare_slots``).
    """
    return sum(_kept(layer, spec, context, spare) * _layer_bytes(layer, spec, value_bytes) for layer in layers)


def pinned_bytes(layers: Sequence[KVLayer], spec: KVSpec, context: int, *, value_bytes: int = 2) -> int:
    """Return the bytes of the pinned tokens' keys as the model made them, which are kept beside a window that rolls so that they
    can be moved along (``kv.pinned``); no step reads them. Layers without positions, which a config does not name, are counted too.
    """
    if spec.window is None or not spec.rolls or not isinstance(spec.keep, int):
        return 0
    moving = (layer for layer in layers if layer.free and layer.moves and layer.window is None)
    return min(context, spec.keep) * value_bytes * sum(layer.heads * layer.key_dim for layer in moving)


def value_bytes_of(config: Mapping[str, Any]) -> int:
    """Return the bytes of the checkpoint's own floating type: 4 for float32, else 2."""
    text = text_config(config)
    return 4 if str(first_of(text, "dtype", "torch_dtype")).endswith("float32") else 2


def _kept(layer: KVLayer, spec: KVSpec, context: int, spare: Callable[[int], int]) -> int:
    windows = (layer.window, spec.window if layer.free else None)
    window = min((each for each in windows if each is not None), default=None)
    if window is None:
        return context
    return min(context, window + spare(window) if layer.free else window)


def _layer_bytes(layer: KVLayer, spec: KVSpec, value_bytes: int) -> int:
    parts = ((layer.key_dim, spec.key_bits), (layer.value_dim, spec.value_bits))
    return round(layer.heads * sum(dim * _value(bits, dim, layer, spec, value_bytes) for dim, bits in parts))


def _value(bits: int, dim: int, layer: KVLayer, spec: KVSpec, value_bytes: int) -> float:
    """Return the bytes of a number, in groups that divide the head dimension. Raises OptionError where none does."""
    if bits == 16 or not layer.free:
        return bytes_per_value(16, spec.group_size, value_bytes)
    group = group_for(dim, spec.group_size)
    if group is None:
        raise OptionError(
            f"{dim} numbers per head can't be packed: no group size up to {spec.group_size} divides them",
            "Use 16 bits for keys and values of this model.",
        )
    return bytes_per_value(bits, group, value_bytes)


def _shape(text: Mapping[str, Any], kind: str) -> tuple[int, int, int] | None:
    """Return (kv heads, dims of a key, dims of a value) of an attention layer."""
    if kind in LATENT:
        latent, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
        return (1, latent, rope) if isinstance(latent, int) and isinstance(rope, int) else None
    if kind in EXPANDED:
        dims = [text.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        if not all(isinstance(value, int) for value in dims) and kind == "deepseek_v2":
            return None
        heads, plain, rope, value = (value or 0 for value in dims)
        return heads, plain + rope, value or int(text.get("hidden_size", 0)) // heads
    heads, hidden = first_of(text, "num_attention_heads", "n_head", "n_heads"), first_of(text, "hidden_size", "n_embd")
    if not isinstance(heads, int) or heads <= 0:
        return None
    shared = heads if kind in ONE_TO_ONE else 1 if text.get("multi_query") else None
    kv_heads = shared or first_of(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    head_dim = text.get("head_dim") or (hidden // heads if isinstance(hidden, int) else None)
    return (kv_heads, head_dim, head_dim) if isinstance(kv_heads, int) and isinstance(head_dim, int) else None


def _layer_types(text: Mapping[str, Any], layers: int) -> list[str] | None:
    """Return the kind of every layer; None where a name is not known."""
    kind, pattern = str(text.get("model_type", "")), text.get("sliding_window_pattern")
    listed, every = first_of(text, "layer_types", "layers_block_type"), text.get("full_attention_interval")
    letters, period = text.get("hybrid_override_pattern"), text.get("attn_layer_period")
    if isinstance(listed, list):
        known = all(name in KNOWN_LAYERS for name in listed)
        return [str(name) for name in listed] if known and len(listed) == layers else None
    attending = text.get("full_attn_idxs")
    if isinstance(attending, list):  # lfm2
        return ["full" if i in attending else "conv" for i in range(layers)]
    if isinstance(every, int) and every > 0:
        return ["full" if (i + 1) % every == 0 else "mamba" for i in range(layers)]
    if (
        isinstance(letters, str | list) and len(letters) == layers
    ):  # nemotron_h: * attends, M is Mamba, - and E feed forward
        return ["full" if letter == "*" else "mamba" for letter in letters]
    if isinstance(period, int) and period > 0:  # jamba
        return ["full" if i % period == int(text.get("attn_layer_offset") or 0) else "mamba" for i in range(layers)]
    if kind in ("jamba", "nemotron_h"):
        return None
    if kind == "gpt_oss":
        return ["sliding" if i % 2 == 0 else "full" for i in range(layers)]
    if isinstance(pattern, str) and pattern:
        return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(layers)]
    if kind.startswith("gemma3") or kind == "cohere2":
        period = pattern if isinstance(pattern, int) and pattern > 0 else {"cohere2": 4}.get(kind, 6)
        return ["full" if (i + 1) % period == 0 else "sliding" for i in range(layers)]
    return ["full"] * layers


Choice = bool | dict[str, Any]
"""What MLX does with a module: leaves it, packs it like the rest, or packs it with these parameters."""

Rule = Callable[[str, Any], Choice]

KEPT_PACKED = {"mxfp4": (4, 32), "mxfp8": (8, 32)}
"""Other packers' methods whose weights mlx-lm takes over as they are: (bits, group size)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed: bits per weight (None: not at all, 16-bit floats), weights per scale, and MLX's mode."""

    bits: int | None
    group_size: int = 64
    mode: str = "affine"


def cost_of_config(config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored") -> Cost | str:
    """Return the cost of the model that a normalised config (engine/model/config.py) describes, or the reason why it is unknown.

    packing: instead of the config's own, what mlx-lm's conversion of a 16-bit checkpoint would make: every layer whose rows
    the group size divides is packed, with more bits where the model's class asks for them. form: how weights lie in memory.
    """
    try:
        model = skeleton_model(config, 2 if packing else value_bytes_of(config))
        pack(model, config, packing)
    except ModelError as error:
        return error.message
    return cost_of_skeleton(model, config, form=form)


def cost_of_skeleton(model: Any, config: Mapping[str, Any], *, form: Form = "stored") -> Cost:
    """Return the cost of a skeleton, packed or not; the head that its class made counts only if checkpoints store it."""
    tensors = tensors_of(model)
    if not _stores_head(config):
        tensors = [tensor for tensor in tensors if part_of(tensor, config) != "head"]
    return cost_of_tensors(tensors, config, groups=groups_of(model), form=form)


def _stores_head(config: Mapping[str, Any]) -> bool:
    """Whether the head that the class made is there: some classes wait for the checkpoint to tell."""
    text = text_config(config)
    return text.get("model_type") not in HEAD_IF_STORED or text.get("tie_word_embeddings") is False


def pack(model: Any, config: Mapping[str, Any], packing: Packing | None) -> None:
    """Pack a skeleton in place. Raises ModelUnsupportedError for what MLX can't pack, or only the files can tell."""
    from mlx import nn

    from ..model.loader import BUILD_ERRORS

    try:
        packing, rule = (packing, _conversion(model, packing)) if packing else _own(model, config)
        if packing.bits is None:
            return
        # Modules that can't be packed at all stay as they are.
        nn.quantize(
            model,
            **asdict(packing),
            class_predicate=lambda path, module: "to_quantized" in dir(module) and rule(path, module),
        )
    except ModelError:
        raise
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())[:240]
        raise ModelUnsupportedError(
            f"it can't be packed like this: {reason}", "Choose other bits or groups."
        ) from error


def _conversion(model: Any, packing: Packing) -> Rule:
    """Return what mlx-lm's conversion does: the class's own wishes (``quant_predicate``) go before the packing asked for."""
    wish: Rule = getattr(model, "quant_predicate", None) or _everything

    def rule(path: str, module: Any) -> Choice:
        return module.weight.shape[-1] % packing.group_size == 0 and wish(path, module)

    return rule


def _everything(path: str, module: Any) -> Choice:  # noqa: ARG001
    return True


def _own(model: Any, config: Mapping[str, Any]) -> tuple[Packing, Rule]:
    """Return the config's own packing: MLX's, with an entry for each module that differs, or another packer's."""
    given = config.get("quantization") or config.get("quantization_config")
    given = given or text_config(config).get("quantization_config") or {}
    if not given or is_fp8(dict(config)):
        return Packing(None), _everything
    if "quant_method" in given and not config.get("quantization"):
        return _foreign(model, given)
    packing = Packing(int(given["bits"]), int(given["group_size"]), str(given.get("mode", "affine")))
    wishes = _conversion(model, packing)

    def rule(path: str, module: Any) -> Choice:
        entry = given.get(path)
        # A wish for other bits would have been written down, so that without an entry the module is packed like the rest.
        return entry if isinstance(entry, bool | dict) else bool(wishes(path, module))

    return packing, rule


def _foreign(model: Any, given: Mapping[str, Any]) -> tuple[Packing, Rule]:
    """Return what mlx-lm does with another packer's method. Raises ModelUnsupportedError."""
    method = str(given["quant_method"])
    if method == "bitnet":
        from mlx_lm.models.bitlinear_layers import bitnet_quantize

        bitnet_quantize(model, dict(given))  # in place: four ternary weights to a byte
        return Packing(None), _everything
    if method not in KEPT_PACKED:
        raise ModelUnsupportedError(
            f"its weights were packed by {method}: what mlx-lm makes of them only the files can tell",
            "Ask for another packing.",
        )
    bits, group_size = KEPT_PACKED[method]
    spared = tuple(f"{pattern}*" for pattern in given.get("modules_to_not_convert") or ())
    return Packing(bits, group_size, method), lambda path, _: not any(fnmatchcase(path, each) for each in spared)
