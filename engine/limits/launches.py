"""About how many kernels a decode step launches on a GPU: what it takes beside reading, however few the bytes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokamac.engine.limits.attention_work import Heads, heads_of, reusing_layers
from tokamac.engine.limits.cost import Tensor, part_of
from tokamac.engine.limits.leaves import added_matrices, leaf_modules

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan

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
    return count + sum(_of_module(path.rpartition(".")[2], module) for path, module in modules if not _is_head(path))


def _unfused(heads: Heads | None) -> int:
    if heads is None or heads.fused:
        return 0
    return WRITTEN_OUT if heads.written_out else UNFUSED


def _is_head(path: str) -> bool:
    return part_of(Tensor(f"{path}.weight", "BF16", (), 0), {}) == "head"


def _of_module(name: str, module: Any) -> int:
    """Return the kernels of one module. name: the last of its path."""
    kind = type(module)
    if kind.__name__ in SCALING_ROTATIONS:
        return 4
    if "mbedding" in kind.__name__ or not _has_weights(module):
        return 0  # a row of a table is looked up: one of PER_STEP
    if "norm" in name and not kind.__module__.startswith("mlx."):
        return 2
    stack = PER_STACK if "SwitchLinear" in kind.__name__ else 0
    return 1 + stack + (len("qkv") if name in FUSED else 0)


def _has_weights(module: Any) -> bool:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    plain = any(isinstance(value, mx.array) and not name.startswith("_") for name, value in module.items())
    return plain or bool(tree_flatten(module.parameters()))
