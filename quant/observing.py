"""What the linear layers of a model are given while it runs: the seam for everything that is measured on a text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.cpu import DenseLinear
from tokamac.quant.gpu_work import in_pieces
from tokamac.quant.modules import Method, override

LINEAR = (nn.Linear, nn.QuantizedLinear, DenseLinear)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one call gave a linear layer: rows (n, in), in the order of the tokens, maybe not yet evaluated.

    path: of the layer's module. experts: of a stack of experts, which one read each row (n,), integers; stack: of how many.
    Both are None where the layer is no stack; a token that was sent to k experts makes k rows.
    """

    path: str
    rows: mx.array
    experts: mx.array | None = None
    stack: int | None = None


Observer = Callable[[Inputs], None]


def observe(module: nn.Module, path: str, observer: Observer) -> None:
    """Tell ``observer`` of every call of a linear layer in ``module``, which stands at ``path`` in its model.

    Linear layers and stacks of experts (mlx-lm's SwitchLinear), packed or not. Nothing is told of other layers that hold a
    matrix: convolutions, embeddings (also where they serve as the output head), products per attention head.
    """
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    seen: set[int] = set()
    for name, layer in module.named_modules():
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        tell = partial(_tell, observer, ".".join(filter(None, (path, name))))
        if isinstance(layer, LINEAR):
            override(layer, __call__=_linear(type(layer).__call__, tell))
        elif isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
            override(layer, __call__=_stack(type(layer).__call__, tell))


def _tell(
    observer: Observer, path: str, rows: mx.array, experts: mx.array | None = None, stack: int | None = None
) -> None:
    observer(Inputs(path, rows, experts, stack))


def _linear(own: Method, tell: Callable[..., None]) -> Method:
    def call(layer: Any, x: mx.array) -> Any:
        tell(x.reshape(-1, x.shape[-1]))
        return in_pieces(partial(own, layer), x, outputs=layer.weight.shape[0])

    return call


def _stack(own: Method, tell: Callable[..., None]) -> Method:
    def call(layer: Any, x: mx.array, indices: mx.array, **kwargs: Any) -> Any:
        # x (..., m, in) and indices (...) are matched by broadcasting: one row of a token for each expert it is sent to.
        batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        rows = mx.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, x.shape[-1])
        experts = mx.broadcast_to(mx.expand_dims(indices, -1), (*batch, x.shape[-2])).reshape(-1)
        tell(rows, experts, layer.num_experts)
        return own(layer, x, indices, **kwargs)

    return call
