"""What a model weighs, keeps and computes, from its config, module and cache plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, ModelUnsupportedError, OptionError
from ..kv.costs import bytes_per_value, group_for
from ..model.config import ignored_windows
from ..model.weights import is_fp8, text_config
from ..options import KVSpec
from .cost import (
    HEAD_IF_STORED,
    Cost,
    Form,
    Tensor,
    active_share,
    added_matrices,
    cost_of_tensors,
    experts_of,
    first_of,
    groups_of,
    leaf_modules,
    part_named,
    part_of,
    tensors_of,
)
from .roofline import TERNARY, Attention, Heads, KVUse, Product, Trait, Workload

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, LayerPlan

# KV bytes per token = Σ over KV layers of kv_heads × (key_dim × bytes per key + value_dim × bytes per value)
# bytes per value    = the model's type, or packed: bits/8 + 2 × scale_bytes ÷ group_size

# Weights come from a packed skeleton (model/loader.py). A window bounds a layer's KV; linear-attention and state-space
# layers don't grow. Tests compare with loaded plans; this also covers models without an mlx-lm class.


FULL = frozenset({
    "full_attention", "attention", "global", "full", "global_attention", "deepseek_sparse_attention",
    "indexed_attention", "minimax_m3_sparse",
})  # fmt: skip
SLIDING = frozenset({"sliding_attention", "local", "sliding", "local_attention", "chunked_attention"})
EMPTY = frozenset({"mlp", "moe"})  # layers that only feed forward, where a config lists them beside those that attend
STATE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm"})

# Layers that compress several tokens into one entry (DeepSeek V4).
COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})

KNOWN_LAYERS = FULL | SLIDING | STATE | EMPTY | COMPRESSED

# Multi-head latent attention whose cache holds the latent and the rotary key, once for all heads (mlx-lm 0.32).
LATENT = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"})

STATELESS_KV = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})  # no layer keeps keys or values

ONE_TO_ONE = frozenset({"gpt2", "gptj", "gpt_neox"})  # every head has keys of its own, whatever the config says

# Families whose attention does not take keys and values as a cache hands them out, so no flag applies to their caches.
UNPACKED = LATENT | frozenset({"stablelm"})

# Multi-head latent attention whose cache holds every head's keys and values, unfolded (mlx-lm 0.32).
EXPANDED = frozenset({"deepseek_v2", "minicpm3"})

# Families whose keys are no rotary embeddings, or are worked on after that, so pinned ones are not moved.
UNMOVED = EXPANDED | frozenset({
    "gpt2", "gptj", "gpt_bigcode", "hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "ministral3", "nanochat", "nemotron_h",
    "phi", "phixtral",
})  # fmt: skip

# Families whose layers differ in ways this arithmetic does not cover: their cost stays unknown until they are loaded.
UNKNOWN = frozenset({
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41",
    "gemma3n", "gemma4", "gemma4_text", "gemma4_unified_text", "glm_moe_dsa", "kimi_k3", "kimi_linear",
    "longcat_flash", "longcat_flash_ngram", "nemotron-nas",
    "plamo2",
    "recurrent_gemma", "iquestloopcoder", "mimo_v2_flash",
    "minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A KV layer: (heads, key dim, value dim). free: the user's flags apply. moves: pinned keys move."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    free: bool = True
    moves: bool = True


def kv_layers(config: Mapping[str, Any]) -> tuple[KVLayer, ...] | None:
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
    """Whether the config lists an unknown layer kind, so a class's result isn't trustworthy."""
    listed = first_of(text_config(config), "layer_types", "layers_block_type")
    return isinstance(listed, list) and any(name not in KNOWN_LAYERS for name in listed)


def kv_bytes_per_token(layers: Sequence[KVLayer], spec: KVSpec, *, value_bytes: int = 2) -> int:
    return sum(_layer_bytes(layer, spec, value_bytes) for layer in layers)


def kv_bytes(
    layers: Sequence[KVLayer],
    spec: KVSpec,
    context: int,
    *,
    value_bytes: int = 2,
    spare: Callable[[int], int] = lambda _: 0,
) -> int:
    """Return bytes kept and read per step at ``context``. spare: extra slots per window."""
    return sum(_kept(layer, spec, context, spare) * _layer_bytes(layer, spec, value_bytes) for layer in layers)


def pinned_bytes(layers: Sequence[KVLayer], spec: KVSpec, context: int, *, value_bytes: int = 2) -> int:
    """Return the bytes of original pinned keys, kept but not read by steps."""
    if spec.window is None or not spec.rolls or not isinstance(spec.keep, int):
        return 0
    moving = (layer for layer in layers if layer.free and layer.moves and layer.window is None)
    return min(context, spec.keep) * value_bytes * sum(layer.heads * layer.key_dim for layer in moving)


def value_bytes_of(config: Mapping[str, Any]) -> int:
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
    """Bytes per number. Raises OptionError if no group divides the head dimension."""
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


# What MLX does with a module: leaves it, packs it like the rest, or packs it with these parameters.
Choice = bool | dict[str, Any]

Rule = Callable[[str, Any], Choice]

# Other packers' methods whose weights mlx-lm takes over as they are: (bits, group size).
KEPT_PACKED = {"mxfp4": (4, 32), "mxfp8": (8, 32)}


@dataclass(frozen=True, slots=True)
class Packing:
    """Weight packing: bits (None: 16-bit floats), weights per scale, MLX's mode."""

    bits: int | None
    group_size: int = 64
    mode: str = "affine"


def cost_of_config(config: Mapping[str, Any], *, packing: Packing | None = None, form: Form = "stored") -> Cost | str:
    """Return a config's cost, or why it is unknown. packing: as if converted from 16 bits by mlx-lm."""
    from ..model.loader import skeleton_model  # it loads MLX, which who only shows a cost does not need

    try:
        model = skeleton_model(config, 2 if packing else value_bytes_of(config))
        pack(model, config, packing)
    except ModelError as error:
        return error.message
    return cost_of_skeleton(model, config, form=form)


def cost_of_skeleton(model: Any, config: Mapping[str, Any], *, form: Form = "stored") -> Cost:
    tensors = tensors_of(model)
    text = text_config(config)
    if text.get("model_type") in HEAD_IF_STORED and text.get("tie_word_embeddings") is not False:
        tensors = [tensor for tensor in tensors if part_of(tensor, config) != "head"]
    return cost_of_tensors(tensors, config, groups=groups_of(model), form=form)


def pack(model: Any, config: Mapping[str, Any], packing: Packing | None) -> None:
    """Pack a skeleton in place. Raises ModelUnsupportedError."""
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
    wish: Rule = getattr(model, "quant_predicate", None) or _everything

    def rule(path: str, module: Any) -> Choice:
        return module.weight.shape[-1] % packing.group_size == 0 and wish(path, module)

    return rule


def _everything(path: str, module: Any) -> Choice:  # noqa: ARG001
    return True


def _own(model: Any, config: Mapping[str, Any]) -> tuple[Packing, Rule]:
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
    """Return mlx-lm's handling of a foreign method. Raises ModelUnsupportedError."""
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


SPARSE = "compressed_sparse_attention"  # layers that choose among compressed entries

CAPPED = frozenset({"gemma2", "vaultgemma"})  # families that cap their scores where the config does not say


def attention_of(config: Mapping[str, Any], layers: "Sequence[LayerPlan]") -> tuple[Attention, ...] | None:
    own: list[Attention] = []
    for layer in layers:
        if layer.kind == "state":
            continue
        width = _width(config, layer)
        if width is None:
            return None
        if layer.kind == "compressed":
            own.extend(_compressed(text_config(config), width, layer.index))
        else:
            own.append(Attention(width, layer.window, layer.index))
    return (*own, *_reusing(config, own))


def heads_of(config: Mapping[str, Any], layer: "LayerPlan", attention: Sequence[Attention]) -> Heads | None:
    # Packed KV kernels have no published measurement: taken as no faster than others.
    queries = query_heads(config, layer.index)
    if layer.ours is None or queries is None:
        return None
    seen = layer.ours.seen
    if seen.heads < 1 or queries % seen.heads:
        return None
    text = text_config(config)
    capped = bool(text.get("attn_logit_softcapping", text.get("model_type") in CAPPED))
    layers = sum(each.layer == layer.index for each in attention)
    return Heads(queries, seen.heads, seen.key_dim, seen.value_dim, capped or not seen.through, max(layers, 1))


def query_heads(config: Mapping[str, Any], layer: int = 0) -> int | None:
    text = text_config(config)
    heads = first_of(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
    kinds, sliding = text.get("layer_types"), text.get("attention_other_setting")  # Step 3.5's
    if isinstance(sliding, dict) and isinstance(kinds, list) and kinds[layer] == "sliding_attention":
        heads = sliding.get("num_attention_heads")
    if isinstance(heads, list):
        heads = heads[layer]
    return heads if isinstance(heads, int) else None


def reusing_layers(config: Mapping[str, Any]) -> int:
    """Return how many upper layers reuse lower ones' KV (gemma3n, gemma4, afm7)."""
    return int(first_of(text_config(config), "num_kv_shared_layers", "num_kv_reuse_layers") or 0)


def _width(config: Mapping[str, Any], layer: "LayerPlan") -> int | None:
    text, heads = text_config(config), query_heads(config, layer.index)
    if heads is None:
        return None
    if layer.ours is not None:
        return heads * (layer.ours.seen.key_dim + layer.ours.seen.value_dim)
    if layer.kind == "latent":
        index = (text.get("index_n_heads"), text.get("index_head_dim"))
        if layer.path[1:] == (1,) and isinstance(index[0], int) and isinstance(index[1], int):
            return index[0] * index[1]  # scores that choose what to attend to (DeepSeek-V3.2)
        dims = [text.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        return heads * sum(dims) if all(isinstance(dim, int) for dim in dims) else None  # type: ignore[arg-type]
    dim, hidden = text.get("head_dim"), first_of(text, "hidden_size", "n_embd")
    known = isinstance(dim, int) or isinstance(hidden, int)
    return 2 * heads * (dim or hidden // heads) if known else None


def _reusing(config: Mapping[str, Any], own: Sequence[Attention]) -> Iterator[Attention]:
    count, kinds = reusing_layers(config), text_config(config).get("layer_types")
    made = {attention.layer: attention for attention in own}
    if not count or not made:
        return
    first = max(made) + 1
    for layer in range(first, first + count):
        alike = [index for index in made if not isinstance(kinds, list) or kinds[index] == kinds[layer]]
        yield replace(made[max(alike, default=first - 1)])


def chosen_entries(config: Mapping[str, Any], layer: int) -> tuple[int, int] | None:
    """Return (tokens per entry, entries attended to), or None."""
    text = text_config(config)
    kind = text["layer_types"][layer]
    return (text["compress_rates"][kind], text["index_topk"]) if kind == SPARSE else None


def _compressed(text: Mapping[str, Any], width: int, layer: int) -> Iterator[Attention]:
    kind = text["layer_types"][layer]
    every = text["compress_rates"][kind]
    yield Attention(width, text["sliding_window"], layer)
    if kind == SPARSE:
        yield Attention(text["index_n_heads"] * text["index_head_dim"], None, layer, every)
    yield Attention(width, text["index_topk"] if kind == SPARSE else None, layer, every)


# Kernels of an attention layer beside its modules: two rotations, two cache writes, attention, two residual sums, the
# gated product. A layer with a state instead of keys has about as many.
PER_LAYER = 8

# More of a layer whose attention no kernel fuses: the scaled queries, scores, their softmax and the values, for one
# kernel.
UNFUSED = 3

# More of a layer that writes its attention out for a soft cap: its quotient, tangent and product besides (gemma2).
WRITTEN_OUT = 6

PER_REUSING_LAYER = 5  # of a layer that attends to another's keys: one rotation, and no cache writes

# Kernels beside each expert stack's product: choosing, sorting and weighing the experts comes to about six for three
# stacks.
PER_STACK = 2

# Of mlx-lm's rotary modules, those that multiply a slice of their input and write it back
# (mlx_lm/models/rope_utils.py).
SCALING_ROTATIONS = frozenset({"SuScaledRoPE", "YarnRoPE"})

# Products that make queries, keys and values at once.
FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "c_attn"})

PER_ADAPTED = 4  # of a layer with an adapter: its two products, the scale and the sum

PER_STEP = 4  # kernels once a step: the embedding's row, the head, sampling, and the copy to the host


def launches(model: Any, config: Mapping[str, Any], plan: "CachePlan") -> int:
    # Norms defined by a model file take two (gemma adds 1 to the weight), long-context rotations two more each,
    # fused QKV three copies.
    count = PER_STEP + PER_LAYER * len({layer.index for layer in plan.layers})
    count += PER_REUSING_LAYER * reusing_layers(config)
    count += sum(_unfused(heads_of(config, layer, ())) for layer in plan.layers)
    modules = leaf_modules(model)
    count += PER_ADAPTED * len(added_matrices(model)) // 2
    return count + sum(
        _module_kernels(path.rpartition(".")[2], module)
        for path, module in modules
        if part_named(f"{path}.weight") != "head"
    )


def _unfused(heads: Heads | None) -> int:
    if heads is None or heads.fused:
        return 0
    return WRITTEN_OUT if heads.written_out else UNFUSED


def _module_kernels(name: str, module: Any) -> int:
    kind = type(module)
    if kind.__name__ in SCALING_ROTATIONS:
        return 4
    if "mbedding" in kind.__name__ or not _has_weights(module):
        return 0  # a row of a table is looked up: one of PER_STEP
    if "norm" in name and not kind.__module__.startswith("mlx."):
        return 2
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    stack = PER_STACK if isinstance(module, SwitchLinear | QuantizedSwitchLinear) else 0
    return 1 + stack + (len("qkv") if name in FUSED else 0)


def _has_weights(module: Any) -> bool:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    plain = any(isinstance(value, mx.array) and not name.startswith("_") for name, value in module.items())
    return plain or bool(tree_flatten(module.parameters()))


# Families whose every model slides, whether or not the config lists its layers.
SLIDING_BY_CLASS = frozenset(
    {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "cohere2"}
)

# Keys by which configs say which layers attend, and so that the others keep a state; some families list the layers
# instead.
HYBRID_MARKS = (
    "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern", "attn_layer_period", "mamba_d_state",
    "linear_attn_config",
)  # fmt: skip


def traits_of(config: Mapping[str, Any]) -> tuple[Trait, ...]:
    text = text_config(config)
    mixture = (experts_of(text) or 0) > 1 and text.get("enable_moe_block") is not False
    found: list[Trait] = ["mixture" if mixture else "dense"]
    if str(text.get("model_type")) in STATELESS_KV:
        return (*found, "state space")
    if _is_hybrid(text):
        found.append("hybrid")
    if isinstance(text.get("kv_lora_rank"), int):
        found.append("latent attention")
    if COMPRESSED.intersection(text.get("layer_types") or ()):
        found.append("compressed attention")
    if _slides(text):
        found.append("sliding window")
    return tuple(found)


def leaves_out_senses(config: Mapping[str, Any]) -> bool:
    return any(isinstance(config.get(part), dict) and config[part] for part in ("vision_config", "audio_config"))


def _is_hybrid(text: Mapping[str, Any]) -> bool:
    listed = first_of(text, "layer_types", "layers_block_type", "block_types", "_block_types")
    if isinstance(listed, list):
        return any(name in STATE for name in listed)
    return any(text.get(mark) for mark in HYBRID_MARKS)


def _slides(text: Mapping[str, Any]) -> bool:
    listed = first_of(text, "layer_types", "layers_block_type")
    if isinstance(listed, list):
        return any("sliding" in str(name) or "chunked" in str(name) for name in listed)
    if str(text.get("model_type")) in SLIDING_BY_CLASS:
        return True
    window = first_of(text, "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
    return isinstance(window, int) and text.get("use_sliding_window") is not False


def products_of(model: Any, config: Mapping[str, Any]) -> tuple[Product, ...]:
    leaves = leaf_modules(model)
    matrices = {path: module for path, module in leaves if "weight" in module and module.weight.ndim in (2, 3)}
    parts = {path: part_of(_tensor(path, module), config) for path, module in matrices.items()}
    used, experts = active_share(config) or (1, 1)
    found: dict[Product, Fraction] = {}
    for path, module in matrices.items():
        part = parts[path]
        if part == "embedding" and ("head" in parts.values() or _is_looked_up(path, module, config)):
            continue
        product = _product(module, used if part == "experts" else None, head=part in ("embedding", "head"))
        listed = part == "experts" and module.weight.ndim == 2  # one module an expert (dbrx): some of them are chosen
        found[product] = found.get(product, Fraction(0)) + (Fraction(used, experts) if listed else 1)
    for path, matrix in added_matrices(model):
        part = part_of(Tensor(path, "BF16", tuple(matrix.shape), int(matrix.nbytes)), config)
        if part == "embedding" and ("head" in parts.values() or path.endswith("lora_a")):
            continue  # its rows are looked up, as the table's are
        product = _added(matrix, used if part == "experts" else None, head=part in ("embedding", "head"))
        found[product] = found.get(product, Fraction(0)) + 1
    in_order = sorted(found.items(), key=lambda item: item[0].head)  # wherever the class keeps its head
    return tuple(replace(product, count=int(count)) for product, count in in_order)


def _product(module: Any, used: int | None, *, head: bool) -> Product:
    """used: matrices of a stack per token; None: all (MLA has one per head)."""
    *stack, rows, columns = module.weight.shape
    bits = module.bits if "scales" in module else None
    if "weight_scale" in module:
        rows, bits = 4 * rows, 2
    packed = "scales" in module
    whole = stack[0] if stack else 1
    return Product(
        rows=rows,
        columns=columns * 32 // bits if packed else columns,
        bits=bits,
        group_size=module.group_size if packed else 64,
        mode=module.mode if packed else "affine" if bits is None else TERNARY,
        stack=whole,
        active=whole if used is None else min(used, whole),
        head=head,
    )


def _added(matrix: Any, used: int | None, *, head: bool) -> Product:
    *stack, rows, columns = matrix.shape
    whole = stack[0] if stack else 1
    if not stack:
        rows, columns = columns, rows
    return Product(rows, columns, None, stack=whole, active=whole if used is None else min(used, whole), head=head)


def _is_looked_up(path: str, module: Any, config: Mapping[str, Any]) -> bool:
    """Whether a table is never the head: positions, per-layer inputs (gemma3n)."""
    return cost_of_tensors([_tensor(path, module)], config).weight_bytes_per_token == 0


def _tensor(path: str, module: Any) -> Tensor:
    return Tensor(f"{path}.weight", "BF16", tuple(module.weight.shape), int(module.weight.nbytes))


def work_of(model: Any, config: Mapping[str, Any], cost: Cost, plan: "CachePlan") -> Workload:
    experts = cost.parts["experts"]
    shared = [part for name, part in cost.parts.items() if name != "experts"]
    known = cost.active_parameters is not None
    products, attention = products_of(model, config), attention_of(config, plan.layers)
    head = next((each for each in products if each.head), None)
    counted = known and attention is not None and head is not None
    return Workload(
        traits=traits_of(config),
        layers=len(model.layers),
        hidden=head.columns if head is not None else None,
        launches=launches(model, config, plan),
        shared_bytes=sum(part.nbytes_per_token for part in shared),
        expert_bytes=experts.nbytes,
        active=(experts.nbytes_per_token / experts.nbytes if experts.nbytes else 0.0) if known else None,
        prefill_parameters=sum(each.parameters for each in products if not each.head) if counted else None,
        head_parameters=sum(each.parameters for each in products if each.head),
        kv=tuple(_kv_layer(layer, config, attention or ()) for layer in plan.layers),
        attention=attention or (),
        products=products,
        query_heads=query_heads(config),
        vocabulary=head.rows if head is not None else None,
    )


def _kv_layer(layer: "LayerPlan", config: Mapping[str, Any], attention: Sequence[Attention]) -> KVUse:
    read = KVUse(layer.bytes_per_token, layer.limit, layer.fixed_bytes, heads_of(config, layer, attention))
    chosen = chosen_entries(config, layer.index) if layer.kind == "compressed" else None
    if chosen is None:
        return read
    text = text_config(config)
    share = text["head_dim"] / (text["head_dim"] + text["index_head_dim"])  # the rest are the keys that choose
    return replace(read, picked_bytes_per_token=round(layer.bytes_per_token * share), picked=chosen[0] * chosen[1])
