"""Packed layers on a plain CPU: MLX's own, whose products go to this package's kernels and take no memory but the packed weights.

A product evaluates its input at once, which costs a hand-over to MLX's thread and back. The layers keep their parameters, names and
types, so whatever counts, adapts or compares them sees MLX's layers.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..head import are_asked_for
from .byte_tiles import can_round
from .dense import replace_plain
from .products import PackedMatrix, prepare, several
from .step import prepare_beside
from .tiles import AFFINE, BFLOAT16, E4M3, E8M0, FLOAT16, FLOAT32, FORMATS, FP4, FP8, LANES, WeightFormat

MODES = {"affine": (AFFINE, None), "mxfp4": (FP4, E8M0), "nvfp4": (FP4, E4M3), "mxfp8": (FP8, E8M0)}
"""By MLX's name: the kind of numbers, and how their scales are stored; None: as floating numbers."""

NOTICEABLE_S = 1.0
"""How long a load waits for kernels before it says so. Kept ones take half as long; compiling takes some seconds, once."""

STORED = {mx.float32: FLOAT32, mx.bfloat16: BFLOAT16, mx.float16: FLOAT16}


class PackedLinear(nn.QuantizedLinear):
    """y = x Wᵀ + b in float32."""

    _matrix: PackedMatrix

    def __call__(self, x: mx.array) -> mx.array:
        """x (…, in) → (…, out)."""
        y = _product(self._matrix, x)
        return y + self["bias"] if "bias" in self else y


class PackedHead(PackedLinear):
    """The output head. A product of a prompt's rows stays lazy: nobody asks for it, so it costs nothing."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (…, in) → (…, vocabulary)."""
        return super().__call__(x) if is_a_step(x) or are_asked_for() else nn.QuantizedLinear.__call__(self, x)


class PackedEmbedding(nn.QuantizedEmbedding):
    """Token vectors, and the output head where the two are tied."""

    _matrix: PackedMatrix

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (…) → (…, dims)."""
        biases = self.get("biases")
        floats = self["scales"].dtype != mx.uint8
        rows: mx.array = mx.dequantize(
            self["weight"][ids],
            self["scales"][ids].astype(mx.float32) if floats else self["scales"][ids],
            None if biases is None else biases[ids].astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=mx.float32,
        )
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        """x (…, dims) → (…, vocabulary)."""
        return _product(self._matrix, x) if is_a_step(x) or are_asked_for() else super().as_linear(x)


class PackedExperts(QuantizedSwitchLinear):
    """y = x Wᵀ + b in float32 with the chosen ones of a stack. Their matrices are one here, one below the other."""

    _matrix: PackedMatrix

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:  # noqa: ARG002
        """x (…, M, in), indices (…), which broadcast → (…, M, out). sorted_indices: for MLX, which gains by it."""
        given = x.astype(mx.float32)
        mx.eval(given, indices)
        lead, many = np.broadcast_shapes(x.shape[:-2], indices.shape), x.shape[-2]
        matrices = np.arange(math.prod(x.shape[:-2])).reshape(x.shape[:-2])
        rows = np.broadcast_to(matrices, lead).reshape(-1, 1) * many + np.arange(many)
        chosen = np.broadcast_to(np.asarray(indices), lead).reshape(-1, 1)
        y = self._matrix.multiply_chosen(
            np.ascontiguousarray(np.asarray(given).reshape(-1, x.shape[-1])),
            rows.reshape(-1),
            np.broadcast_to(chosen, rows.shape).reshape(-1).astype(np.int64),
            self.output_dims,
        )
        found = mx.array(y.reshape(*lead, many, -1))
        return found + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else found


PACKED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: PackedLinear,
    nn.QuantizedEmbedding: PackedEmbedding,
    QuantizedSwitchLinear: PackedExperts,
}
"""What MLX's layers become. Subclasses of them may mean something else."""

PackedLayer = PackedLinear | PackedEmbedding | PackedExperts


def is_packed(model: nn.Module) -> bool:
    """Whether any layer of ``model`` multiplies packed weights by the kernels."""
    return any(isinstance(module, PackedLayer) for module in model.modules())


def is_a_step(x: mx.array) -> bool:
    """Whether ``x`` (…, in) is a decode step of one or several sequences, rather than a piece of a prompt."""
    return x.ndim < 2 or x.shape[-2] == 1


def _product(matrix: PackedMatrix, x: mx.array) -> mx.array:
    rows = np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
    return mx.array(matrix.multiply(rows).reshape(*x.shape[:-1], -1))


def packable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each layer that the kernels can multiply, and the layer."""
    leaves = tree_flatten(model.leaf_modules(), is_leaf=lambda value: isinstance(value, nn.Module))
    for path, module in leaves:
        if type(module) in PACKED and _format(module) is not None:
            yield path, module


class Compiling:
    """Compiles the kernels that the packable layers of ``model`` need, in a thread of its own, while the weights are read.

    rounded: also those for rounded rows, where there are such.
    """

    def __init__(self, model: nn.Module, *, rounded: bool) -> None:
        found = [module for _, module in packable(model)]
        formats = {(_format(module), _stored(module)) for module in found}
        experts = any(type(module) is QuantizedSwitchLinear for module in found)
        arguments = (formats, rounded, experts)
        self._thread = threading.Thread(target=self._compile, args=arguments, name="tokamac-compile", daemon=True)
        self._error: Exception | None = None
        self._thread.start()

    def _compile(self, formats: set[tuple[WeightFormat | None, int]], rounded: bool, experts: bool) -> None:
        try:
            if formats:
                prepare_beside()
            if experts:
                several()
            for each, stored in formats:
                if each is not None:
                    prepare(each, stored, rounded=rounded and can_round(each))
        except Exception as error:
            self._error = error

    def wait(self, noticeable: Callable[[], None]) -> None:
        """Return when all are compiled. ``noticeable`` is called where that takes NOTICEABLE_S or longer: the first time."""
        self._thread.join(NOTICEABLE_S)
        if self._thread.is_alive():
            noticeable()
            self._thread.join()
        if self._error is not None:
            raise self._error


def _format(module: Any) -> WeightFormat | None:
    kind, _ = MODES.get(module.mode, ("", None))
    found = WeightFormat(module.bits, kind)
    if found not in FORMATS or module.group_size % LANES or module.get("global_scale") is not None:
        return None
    return found


def matrix_of(module: Any) -> PackedMatrix:
    """Return the weights of a packable layer as the kernels read them: no copy. Those of experts are one below the other."""
    found = _format(module)
    assert found is not None
    biases = module.get("biases")
    return PackedMatrix(
        _seen(module.weight),
        _seen(module.scales),
        None if biases is None else _seen(biases),
        found,
        module.group_size,
        _stored(module),
    )


def _stored(module: Any) -> int:
    """Return how the scales of a packable layer are stored."""
    how = MODES[module.mode][1]
    return STORED[module.scales.dtype] if how is None else how


def _seen(array: mx.array) -> Any:
    """Return an array as NumPy sees it; halves as their bits, which NumPy has no type for in one case, and numba in the other."""
    array = mx.contiguous(array)
    mx.eval(array)
    seen = np.asarray(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)
    return seen.reshape(-1, seen.shape[-1])


def keep_packed(model: nn.Module) -> Callable[[], None]:
    """Remember the scales and biases of the packable layers; what is returned puts them back, after all were given other types."""
    kept = [(module, module.scales, module.get("biases")) for _, module in packable(model)]

    def restore() -> None:
        for module, scales, biases in kept:
            module.scales = scales
            if biases is not None:
                module.biases = biases

    return restore


def use_kernels(model: nn.Module, *, logits: int | None) -> bool:
    """Replace the linear layers and embeddings of ``model``: packed ones stay packed, plain ones become dense float32.

    logits: how many the model writes a token (``logits_width``), by which its output head is known outside its layers, whatever its
    name; None: a head's products of many rows are asked for, too. Returns whether a decode step now has to wait for the device
    between layers (so computing ahead gains nothing).
    """
    inside = {id(module) for layer in (model.layers if logits else ()) for module in layer.modules()}

    def is_head(module: Any) -> bool:
        return logits is not None and len(module.weight) == logits and id(module) not in inside

    found = list(packable(model))
    for _, module in found:
        module._matrix = matrix_of(module)
        kind = PACKED[type(module)]
        module.__class__ = PackedHead if kind is PackedLinear and is_head(module) else kind
    return replace_plain(model, is_head) or bool(found)
