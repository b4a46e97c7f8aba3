"""Layers shared by several of our architectures."""

from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from ..errors import ModelUnsupportedError

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    # transformers' names
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "silu": nn.silu,
    "swish": nn.silu,
}


class GatedFeedForward(nn.Module):
    """down(activation(gate x) · up x)."""

    def __init__(self, hidden: int, width: int, activation_name: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self._activation = activation(activation_name)

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, D) → the same shape."""
        out: mx.array = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Return a config's activation. Raises ModelUnsupportedError."""
    if name not in ACTIVATIONS:
        raise ModelUnsupportedError(f"its activation {name!r} is not known", "Choose another model.")
    return ACTIVATIONS[name]


def route_evenly(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the top-k experts and their shares, unordered: logits (B, T, E) → two of (B, T, k)."""
    chosen = mx.stop_gradient(mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k])
    return chosen, mx.softmax(mx.take_along_axis(logits, chosen, axis=-1).astype(mx.float32), axis=-1)


def router_bits(name: str) -> property:
    """Return a ``quant_predicate`` with 8 bits for routers: paths ending with ``name``."""

    def predicate(path: str, module: nn.Module) -> bool | dict[str, int]:  # noqa: ARG001
        return {"group_size": 64, "bits": 8} if path.endswith(name) else True

    return property(lambda self: predicate)  # noqa: ARG005
