"""Linear layers of plain weights on a CPU: dense float32, many rows through NumPy's BLAS.

MLX's CPU backend multiplies matrices with a reference BLAS some thirty times slower than NumPy's on the same cores. The weights
stay MLX arrays, which NumPy views without a copy: memory and cost are counted as for any other model. Conversions also have packed
ones unpacked, a layer at a time (``unpack``).

A product with NumPy evaluates its input at once, which costs MLX a thread switch: about as long as multiplying one row with
LAZY_WEIGHTS weights. Below that, a decode step stays in MLX's lazy graph: one row, or one of each of several sequences.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from ...perf.memory import machine_total
from ..head import are_asked_for

MEMORY_SHARE = 0.25
"""The share of the machine's memory that unpacked weights may take."""

LAZY_WEIGHTS = 1 << 20
"""Weights up to which a decode step is multiplied by MLX. Measured on two x86 cores, for one row: MLX 0.34 ns a weight, NumPy 0.1
ms + 0.08 ns. For rows of several sequences as well: eight replies of the guide at once made 105 tok/s together so, and 52 with
NumPy, whose threads spin against MLX's."""

PLAIN = (nn.Linear, nn.Embedding)
ALL = (*PLAIN, nn.QuantizedLinear, nn.QuantizedEmbedding)


def stays_lazy(weights: int) -> bool:
    """Return whether a matrix of ``weights`` weights multiplies a decode step in MLX's graph, rather than at once by NumPy."""
    return weights <= LAZY_WEIGHTS


class DenseLinear(nn.Linear):
    """y = x Wᵀ + b in float32, with W (out, in) laid out so that Wᵀ is contiguous: both libraries multiply that fastest."""

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._bias = bias
        self._transposed = weight.T  # underscored names are not parameters; these are views
        self._matrix = np.asarray(self._transposed)

    @property
    def lazy(self) -> bool:
        """Whether a decode step stays in MLX's graph."""
        return stays_lazy(self.weight.size)

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., in) → (..., out)."""
        y = x @ self._transposed if self.lazy and _sequences(x) else self._multiply(x)
        return y if self._bias is None else y + self._bias

    def _multiply(self, x: mx.array) -> mx.array:
        rows = np.asarray(x).reshape(-1, x.shape[-1]) @ self._matrix
        return mx.array(rows.reshape(*x.shape[:-1], -1))


class DenseHead(DenseLinear):
    """The output head. A product of a prompt's rows stays lazy: nobody asks for it, so it costs nothing."""

    def _multiply(self, x: mx.array) -> mx.array:
        return super()._multiply(x) if _sequences(x) or are_asked_for() else x @ self._transposed


class DenseEmbedding(nn.Embedding):
    """Token vectors, and the output head where the two are tied."""

    def __init__(self, weight: mx.array) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self._head = (DenseHead(weight, None),)  # in a tuple it is not a submodule: the weights are one parameter

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (...) → (..., dims)."""
        return self.weight[ids]

    def as_linear(self, x: mx.array) -> mx.array:
        """x (..., dims) → (..., vocabulary)."""
        return self._head[0](x)


def _sequences(x: mx.array) -> int:
    """Return of how many sequences ``x`` (..., in) is a decode step; 0 where it is a piece of a prompt."""
    return x.size // int(x.shape[-1]) if x.ndim < 2 or x.shape[-2] == 1 else 0


def unpack(model: nn.Module) -> None:
    """Replace the linear layers and embeddings of ``model``, packed or not, by dense ones, if they fit in MEMORY_SHARE.

    Products of many rows are taken to be asked for, those of a head, too.
    """
    found = list(_replaceable(model, ALL))
    if sum(_unpacked_bytes(module) for _, module in found) <= MEMORY_SHARE * (machine_total() or 0):
        for path, module in found:
            # One at a time: the packed weight is freed before the next is unpacked.
            model.update_modules(tree_unflatten([(path, _replacement(module, head=False))]))


def replace_plain(model: nn.Module, is_head: Callable[[nn.Module], bool]) -> bool:
    """Replace the plain linear layers and embeddings of ``model``.

    Returns whether a decode step now has to wait for the device between layers (so computing ahead gains nothing).
    """
    for path, module in list(_replaceable(model, PLAIN)):
        model.update_modules(tree_unflatten([(path, _replacement(module, head=is_head(module)))]))
    return any(isinstance(module, DenseLinear) and not module.lazy for module in model.modules())


def logits_width(model: nn.Module) -> int:
    """Return how many logits a whole model writes a token: its forward pass is built for one, lazily."""
    from mlx_lm.models.cache import make_prompt_cache

    return int(model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model)).shape[-1])


def _replaceable(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    leaves = tree_flatten(model.leaf_modules(), is_leaf=lambda value: isinstance(value, nn.Module))
    for path, module in leaves:
        if type(module) in kinds:  # subclasses may mean something else
            yield path, module


def _replacement(module: nn.Module, *, head: bool) -> nn.Module:
    weight = mx.contiguous(_dense(module).T).T  # (out, in), a view of a contiguous (in, out)
    mx.eval(weight)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return DenseEmbedding(weight)
    bias = module.bias.astype(mx.float32) if "bias" in module else None
    return (DenseHead if head else DenseLinear)(weight, bias)


def _dense(module: nn.Module) -> mx.array:
    if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        weight: mx.array = module.weight
        return weight.astype(mx.float32)
    dense: mx.array = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    return dense.astype(mx.float32)


def _unpacked_bytes(module: nn.Module) -> int:
    packed = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    values = module.weight.size * 32 // module.bits if packed else module.weight.size
    return int(values * 4)
