"""What several architectures of ours share."""

from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from tokamac.engine.errors import ModelUnsupportedError

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


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Return the function that a config names. Raises ModelUnsupportedError."""
    if name not in ACTIVATIONS:
        raise ModelUnsupportedError(f"its activation {name!r} is not known", "Choose another model.")
    return ACTIVATIONS[name]
