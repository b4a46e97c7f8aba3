"""Hunyuan A13B: the dense Hunyuan with a mixture of experts, one shared."""

from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models import hunyuan_v1_dense
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.switch_layers import SwitchGLU

from ._layers import GatedFeedForward, route_evenly, router_bits

Each = int | list[int]  # one number for all layers, or a list of them


@dataclass
class ModelArgs(hunyuan_v1_dense.ModelArgs):
    num_experts: Each = 1
    moe_topk: Each = 1
    moe_intermediate_size: Each | None = None
    num_shared_expert: Each = 1

    def __post_init__(self) -> None:
        """Accept any rotary scaling; mlx-lm's class accepts only one with an alpha."""


def _at(given: Each, layer: int) -> int:
    return given[layer] if isinstance(given, list) else given


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden, experts, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → logits (B, T, E)."""
        logits: mx.array = self.wg(x)
        return logits


class Mixture(nn.Module):
    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        experts = _at(args.num_experts, layer)
        width = args.intermediate_size if args.moe_intermediate_size is None else args.moe_intermediate_size
        shared = args.intermediate_size * _at(args.num_shared_expert, layer)
        self._k = _at(args.moe_topk, layer)
        self.gate = Router(args.hidden_size, experts)
        self.switch_mlp = SwitchGLU(args.hidden_size, _at(width, layer), experts)
        self.shared_mlp = GatedFeedForward(args.hidden_size, shared, "silu")

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        chosen, shares = route_evenly(self.gate(x), self._k)
        mixed = (self.switch_mlp(x, chosen) * shares[..., None]).sum(axis=-2).astype(x.dtype)
        out: mx.array = mixed + self.shared_mlp(x)
        return out


class Model(hunyuan_v1_dense.Model):
    """Token ids (B, T) → logits (B, T, V)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        scaling, alpha = args.rope_scaling, (args.rope_scaling or {}).get("alpha")
        for index, layer in enumerate(self.layers):
            layer.mlp = Mixture(args, index)
            if scaling and not alpha:
                layer.self_attn.rope = initialize_rope(
                    layer.self_attn.head_dim, args.rope_theta, False, scaling, args.max_position_embeddings
                )

    quant_predicate = router_bits("mlp.gate.wg")
