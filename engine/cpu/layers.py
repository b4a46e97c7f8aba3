"""Linear layers on a CPU: packed ones by this package's kernels, plain ones by NumPy, and what rounding rows costs."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..events import RoundingCost
from ..model.head import are_asked_for, asking_for_logits
from ..perf.memory import machine_total
from . import stays_lazy
from .formats import *  # fmt: skip
from .machine_code import address_of, prepare_step_beside
from .products import Floats, PackedMatrix, Words, prepare

# MLX's reference BLAS is some 30 times slower. Weights stay MLX arrays, viewed by NumPy without copies.
# Conversions also unpack packed layers, one at a time (``unpack``).
#
# NumPy evaluates its input eagerly, at the cost of an MLX thread switch: about a row times LAZY_WEIGHTS
# weights. Below that, decode steps stay in MLX's lazy graph.


MEMORY_SHARE = 0.25  # the share of the machine's memory that unpacked weights may take

UNPACKED = (nn.Linear, nn.Embedding)
ALL = (*UNPACKED, nn.QuantizedLinear, nn.QuantizedEmbedding)


class DenseLinear(nn.Linear):
    """y = x Wᵀ + b in float32, with contiguous Wᵀ, the fastest layout in both libraries."""

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
        return stays_lazy(self.weight.size)

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., in) → (..., out)."""
        y = x @ self._transposed if self.lazy and _sequences(x) else self._multiply(x)
        return y if self._bias is None else y + self._bias

    def _multiply(self, x: mx.array) -> mx.array:
        rows = np.asarray(x).reshape(-1, x.shape[-1]) @ self._matrix
        return mx.array(rows.reshape(*x.shape[:-1], -1))


class DenseHead(DenseLinear):
    """The output head. Prompt rows stay lazy: unused logits cost nothing."""

    def _multiply(self, x: mx.array) -> mx.array:
        return super()._multiply(x) if _sequences(x) or are_asked_for() else x @ self._transposed


class DenseEmbedding(nn.Embedding):
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
    return x.size // int(x.shape[-1]) if x.ndim < 2 or x.shape[-2] == 1 else 0


def unpack(model: nn.Module) -> None:
    """Replace linear layers and embeddings by dense ones if they fit in MEMORY_SHARE. Head rows are eager."""
    found = list(_replaceable(model, ALL))
    if sum(_unpacked_bytes(module) for _, module in found) <= MEMORY_SHARE * (machine_total() or 0):
        for path, module in found:
            # One at a time: the packed weight is freed before the next is unpacked.
            model.update_modules(tree_unflatten([(path, _replacement(module, head=False))]))


def replace_plain(model: nn.Module, is_head: Callable[[nn.Module], bool]) -> bool:
    """Replace plain linear layers and embeddings.

    Returns whether decode now waits for the device between layers (so computing ahead gains nothing).
    """
    for path, module in list(_replaceable(model, UNPACKED)):
        model.update_modules(tree_unflatten([(path, _replacement(module, head=is_head(module)))]))
    return any(isinstance(module, DenseLinear) and not module.lazy for module in model.modules())


def logits_width(model: nn.Module) -> int:
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


# A product evaluates its input eagerly, which costs a hand-over to MLX's thread. Parameters, names and types
# stay, so code that counts, adapts or compares sees MLX's layers.


# By MLX's name: the kind of numbers, and how their scales are stored; None: as floating numbers.
MODES = {"affine": (AFFINE, None), "mxfp4": (FP4, E8M0), "nvfp4": (FP4, E4M3), "mxfp8": (FP8, E8M0)}

# How long a load waits for kernels before it says so. Kept ones take some milliseconds; compiling takes some seconds, once.
NOTICEABLE_S = 1.0

STORED = {mx.float32: FLOAT32, mx.bfloat16: BFLOAT16, mx.float16: FLOAT16}


class PackedLinear(nn.QuantizedLinear):
    """y = x Wᵀ + b in float32."""

    _matrix: PackedMatrix

    def __call__(self, x: mx.array) -> mx.array:
        """x (…, in) → (…, out)."""
        y = _product(self._matrix, x)
        return y + self["bias"] if "bias" in self else y


class PackedHead(PackedLinear):
    """The output head. Prompt rows stay lazy: unused logits cost nothing."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (…, in) → (…, vocabulary)."""
        return super().__call__(x) if is_a_step(x) or are_asked_for() else nn.QuantizedLinear.__call__(self, x)


class PackedEmbedding(nn.QuantizedEmbedding):
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
    """y = x Wᵀ + b in float32 of chosen experts, stored as one matrix, one below the other."""

    _matrix: PackedMatrix

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:  # noqa: ARG002
        """x (…, M, in), broadcast indices (…) → (…, M, out). sorted_indices: only for MLX."""
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


# What MLX's layers become. Subclasses of them may mean something else.
PACKED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: PackedLinear,
    nn.QuantizedEmbedding: PackedEmbedding,
    QuantizedSwitchLinear: PackedExperts,
}

PackedLayer = PackedLinear | PackedEmbedding | PackedExperts


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLayer) for module in model.modules())


def is_a_step(x: mx.array) -> bool:
    return x.ndim < 2 or x.shape[-2] == 1


def _product(matrix: PackedMatrix, x: mx.array) -> mx.array:
    rows = np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
    return mx.array(matrix.multiply(rows).reshape(*x.shape[:-1], -1))


def packable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    leaves = tree_flatten(model.leaf_modules(), is_leaf=lambda value: isinstance(value, nn.Module))
    for path, module in leaves:
        if type(module) in PACKED and _format(module) is not None:
            yield path, module


class Compiling:
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
                prepare_step_beside()
            if experts:
                address_of("several")
            for each, stored in formats:
                if each is not None:
                    prepare(each, stored, rounded=rounded and can_round(each))
        except Exception as error:
            self._error = error

    def wait(self, noticeable: Callable[[], None]) -> None:
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
    how = MODES[module.mode][1]
    return STORED[module.scales.dtype] if how is None else how


def _seen(array: mx.array) -> Any:
    """Return a NumPy view; half types as bits, as NumPy lacks one of them and numba the other."""
    array = mx.contiguous(array)
    mx.eval(array)
    seen = np.asarray(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)
    return seen.reshape(-1, seen.shape[-1])


def keep_packed(model: nn.Module) -> Callable[[], None]:
    """Save packable layers' scales and biases; call the result to restore them after a cast."""
    kept = [(module, module.scales, module.get("biases")) for _, module in packable(model)]

    def restore() -> None:
        for module, scales, biases in kept:
            module.scales = scales
            if biases is not None:
                module.biases = biases

    return restore


def use_kernels(model: nn.Module, *, logits: int | None) -> bool:
    """Replace linear layers and embeddings: packed ones by kernels, plain ones by dense float32.

    logits: ``logits_width``, to recognise the head; None: its prompt rows are eager. Returns whether decode now
    waits for the device between layers.
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


#     added      KL(exact ‖ with rounded rows)
#     packing    KL(exact ‖ with noise in each product, as much as rounding its weights to their steps made)
#
# Original weights aren't available: a uniform error within a step gives a product's noise variance
# scale² ÷ 12 · |x|², summed over groups. Cleverer rounding lost less; embeddings and other formats are ignored.


TOKENS = 32  # of the text. Both figures are squares of errors, so their quotient needs few.

TEXT = """A river begins where water collects: a spring in the hills, the edge of a melting field of snow, or a marsh that fills \
after rain. Small streams join, and each makes the next one wider. Where the land is steep the water cuts a valley; where it is \
flat, it slows, bends, and leaves the sand that it carried. In 1885 nearly 40 mills stood along these banks."""


def round_rows(model: nn.Module, *, rounds: bool) -> bool:
    found = list(_roundable(model))
    for module in found:
        module._matrix = replace(module._matrix, rounds=rounds)
    return bool(found)


def rounds_rows(model: nn.Module) -> bool:
    return any(module._matrix.rounds for module in _roundable(model))


def measure_cost(model: nn.Module, ids: Sequence[int]) -> RoundingCost | None:
    """Return rounding's cost on ``ids``, given exact products; None for NaN logits. Deterministic: seeded noise."""
    exact = _log_probabilities(model, ids)
    round_rows(model, rounds=True)
    added = _divergence(exact, _log_probabilities(model, ids))
    round_rows(model, rounds=False)
    modules, random = list(_roundable(model)), np.random.default_rng(0)
    for module in modules:
        module._matrix = _Noisy(module, random)
    packing = _divergence(exact, _log_probabilities(model, ids))
    for module in modules:
        module._matrix = module._matrix.exact
    return RoundingCost(added, packing) if math.isfinite(added) and math.isfinite(packing) else None


def _roundable(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, PackedLayer) and can_round(module._matrix.format):
            yield module


class _Noisy:
    def __init__(self, module: Any, random: np.random.Generator) -> None:
        self.exact: PackedMatrix = module._matrix
        self._scales, self._random = module.scales, random

    def multiply(self, x: Floats) -> Floats:
        return self._with_noise(self.exact.multiply(x), self._sizes(x), self._scales)

    def multiply_chosen(self, x: Floats, rows: Words, parts: Words, outs: int) -> Floats:
        y, sizes = self.exact.multiply_chosen(x, rows, parts, outs), self._sizes(x)[rows]
        for part in np.unique(parts):
            at = parts == part
            y[at] = self._with_noise(y[at], sizes[at], self._scales[int(part)])
        return y

    def _sizes(self, x: Floats) -> Floats:
        """Return squared rows summed per group: (N, groups)."""
        return np.asarray(np.square(x).reshape(len(x), -1, self.exact.group_size).sum(axis=-1))

    def _with_noise(self, y: Floats, sizes: Floats, scales: mx.array) -> Floats:
        variances = np.square(np.asarray(scales.astype(mx.float32))) / np.float32(12)
        noise = self._random.standard_normal(y.shape, np.float32)
        return np.asarray(y + np.sqrt(sizes @ variances.T) * noise, np.float32)


def _log_probabilities(model: nn.Module, ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return log-probabilities (n, vocabulary) of what follows each id."""
    from mlx_lm.models.cache import make_prompt_cache

    with asking_for_logits():
        logits = np.asarray(
            model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0].astype(mx.float32), np.float64
        )
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def _divergence(of: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    return float((np.exp(of) * (of - other)).sum(axis=-1).mean())
