"""Counts the workload of a model from a module, loaded or a skeleton, its config and its cache plan.

So a model that was never downloaded counts as a loaded one. Kernels are counted from the modules, roughly: they are what a step on
a GPU takes beside reading, however few the bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .config_cost import COMPRESSED, STATE, STATELESS_KV
from .cost import (
    Cost,
    Tensor,
    active_share,
    added_matrices,
    cost_of_tensors,
    experts_of,
    first_of,
    leaf_modules,
    part_named,
    part_of,
    text_config,
)
from .workload import TERNARY, Attention, Heads, KVUse, Product, Trait, Workload

if TYPE_CHECKING:
    from ..kv.plan import CachePlan, LayerPlan


SPARSE = "compressed_sparse_attention"
"""Layers that choose among compressed entries."""

CAPPED = frozenset({"gemma2", "vaultgemma"})
"""Families that cap their scores where the config does not say."""


def attention_of(config: Mapping[str, Any], layers: "Sequence[LayerPlan]") -> tuple[Attention, ...] | None:
    """Return the attention of every layer that has keys, of its own or another's; None where the config does not tell its size.

    Latent attention multiplies with the dims that its config names, unfolded, as prefill does.
    """
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
    """Return the heads that read a layer's cache; None where they are unknown. Packed keys and values are multiplied by kernels of
    which no measurement was published: they are taken to compute no faster than the others."""
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
    """Return the query heads of a layer; None where the config does not say."""
    text = text_config(config)
    heads = first_of(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
    kinds, sliding = text.get("layer_types"), text.get("attention_other_setting")  # Step 3.5's
    if isinstance(sliding, dict) and isinstance(kinds, list) and kinds[layer] == "sliding_attention":
        heads = sliding.get("num_attention_heads")
    if isinstance(heads, list):
        heads = heads[layer]
    return heads if isinstance(heads, int) else None


def reusing_layers(config: Mapping[str, Any]) -> int:
    """Return how many of the upper layers attend to keys and values of lower ones (gemma3n, gemma4, afm7)."""
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
    """Yield the attention of the layers that reuse keys: those of the last layer of their kind that made some."""
    count, kinds = reusing_layers(config), text_config(config).get("layer_types")
    made = {attention.layer: attention for attention in own}
    if not count or not made:
        return
    first = max(made) + 1
    for layer in range(first, first + count):
        alike = [index for index in made if not isinstance(kinds, list) or kinds[index] == kinds[layer]]
        yield replace(made[max(alike, default=first - 1)])


def chosen_entries(config: Mapping[str, Any], layer: int) -> tuple[int, int] | None:
    """Return (tokens to an entry, entries that a query attends to) of a layer that chooses among compressed entries, else None."""
    text = text_config(config)
    kind = text["layer_types"][layer]
    return (text["compress_rates"][kind], text["index_topk"]) if kind == SPARSE else None


def _compressed(text: Mapping[str, Any], width: int, layer: int) -> Iterator[Attention]:
    """Yield the attention of a layer that compresses (DeepSeek V4): its window, the keys that choose among entries, and these."""
    kind = text["layer_types"][layer]
    every = text["compress_rates"][kind]
    yield Attention(width, text["sliding_window"], layer)
    if kind == SPARSE:
        yield Attention(text["index_n_heads"] * text["index_head_dim"], None, layer, every)
    yield Attention(width, text["index_topk"] if kind == SPARSE else None, layer, every)


PER_LAYER = 8
"""Kernels of an attention layer beside its modules: two rotations, two cache writes, attention, two residual sums, the gated
product. A layer with a state instead of keys has about as many."""

UNFUSED = 3
"""More of a layer whose attention no kernel fuses: the scaled queries, scores, their softmax and the values, for one kernel."""

WRITTEN_OUT = 6
"""More of a layer that writes its attention out for a soft cap: its quotient, tangent and product besides (gemma2)."""

PER_REUSING_LAYER = 5
"""Of a layer that attends to another's keys: one rotation, and no cache writes."""

PER_STACK = 2
"""Kernels beside each expert stack's product: choosing, sorting and weighing the experts comes to about six for three stacks."""

SCALING_ROTATIONS = frozenset({"SuScaledRoPE", "YarnRoPE"})
"""Of mlx-lm's rotary modules, those that multiply a slice of their input and write it back (mlx_lm/models/rope_utils.py)."""

FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "c_attn"})
"""Products that make queries, keys and values at once."""

PER_ADAPTED = 4
"""Of a layer with an adapter: its two products, the scale and the sum."""

PER_STEP = 4
"""Kernels once a step: the embedding's row, the head, sampling, and the copy to the host."""


def launches(model: Any, config: Mapping[str, Any], plan: "CachePlan") -> int:
    """Return about how many kernels a decode step launches: one for each module that holds weights, and what goes with them.

    A norm that a model file defines itself takes two: it adds one to its weight each time (gemma). Rotations for long contexts
    scale queries and keys first, and write them back: two more each. Queries, keys and values of one product are cut apart:
    three copies.
    """
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
    """The kernels of one module. name: the last of its path."""
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


SLIDING_BY_CLASS = frozenset(
    {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "cohere2"}
)
"""Families whose every model slides, whether or not the config lists its layers."""

HYBRID_MARKS = (
    "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern", "attn_layer_period", "mamba_d_state",
    "linear_attn_config",
)  # fmt: skip
"""Keys by which configs say which layers attend, and so that the others keep a state; some families list the layers instead."""


def traits_of(config: Mapping[str, Any]) -> tuple[Trait, ...]:
    """Return the kinds a config belongs to, most telling first; a mixture may well slide, and a hybrid be dense."""
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
    """Return whether a model sees or hears beside reading: of such a one, the language part alone is used."""
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
    """Return the products of mlx-lm's module, loaded or a skeleton.

    A mixture that does not say how many of its experts a token chooses gets one of each stack.
    """
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
    """used: of a stack's matrices by a token; None: all of them (MLA keeps one a head)."""
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
    """The product with one of an adapter's matrices: (in, r) and (r, out), or of a stack (r, in) and (out, r)."""
    *stack, rows, columns = matrix.shape
    whole = stack[0] if stack else 1
    if not stack:
        rows, columns = columns, rows
    return Product(rows, columns, None, stack=whole, active=whole if used is None else min(used, whole), head=head)


def _is_looked_up(path: str, module: Any, config: Mapping[str, Any]) -> bool:
    """Whether a table is never the output head: positions, and the inputs of single layers (gemma3n)."""
    return cost_of_tensors([_tensor(path, module)], config).weight_bytes_per_token == 0


def _tensor(path: str, module: Any) -> Tensor:
    return Tensor(f"{path}.weight", "BF16", tuple(module.weight.shape), int(module.weight.nbytes))


def work_of(model: Any, config: Mapping[str, Any], cost: Cost, plan: "CachePlan") -> Workload:
    """Return the work of mlx-lm's module for a normalised config; ``cost`` is of the form its weights are held in."""
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
