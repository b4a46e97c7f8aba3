"""GPTQ: rounds a weight column by column; later columns make good for earlier errors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from tokamac.engine.device import device_kind
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.engine.perf.config_cost import Packing

from .options import Options
from .packing import (
    FLOAT_BYTES,
    OTHERWISE,
    Choices,
    Ends,
    attention_bytes,
    check_plain,
    packed_arrays,
    uniform,
    with_packed,
    working,
)
from .report import StageDone, StageProgress, WeightError
from .search import search, squared_error
from .search.on_mlx import pack_codes
from .source import Packed, Source, fresh, layer_paths, leaves
from .streaming import LENGTH, Inputs, Streamed, rows_here, streamable_source

# Frantar et al., arXiv 2210.17323. Needs H = Σ x xᵀ (in × in) per linear layer over the calibration tokens. Scales are the
# search's, of each group as the columns before left it: between its two ends, as mlx-lm has them, GPTQ was worse than none
# on a model of 135M (KL 0.29 nats where the same search without it had 0.07, and with it 0.06).

# Layers run one by one and are packed before the next; their inputs come from unpacked layers.


# Of `calibration.LENGTH` tokens: as many as the shipped text fills, about. The paper's authors read 128 of 2,048.
SEQUENCES = 32

STAGE = "packing by gptq"

DAMPING = 0.01  # of H's mean diagonal, added to it, as in the paper: few tokens say little of some directions


def check(config: Mapping[str, Any], module: Any, options: Options) -> None:  # noqa: ARG001
    check_plain("gptq", options)
    if not any(is_linear(layer) for _, layer in leaves(module)):
        raise OptionError("gptq packs linear layers, and this model has none", OTHERWISE)


def pack(
    source: Source, options: Options, chosen: Choices, sequences: Sequence[Sequence[int]], progress: StageProgress
) -> Source:
    """Return ``source`` with the linear layers packed that ``chosen`` packs uniformly.

    sequences: of equal length. Raises ConversionError, and OptionError for unknown tokens.
    """
    packer = _Packer(source, uniform(options), _paths(source, options, chosen))
    ends = Ends(source, chosen, packer.wanted)

    def add(inputs: Inputs) -> None:
        packer.add(inputs)
        ends.add(inputs.path, inputs.rows)

    def layer_done(done: int, total: int) -> None:
        packer.pack()
        progress(StageDone(STAGE, done, total))

    Streamed(streamable_source(source), progress=layer_done).observe(sequences, add)
    packer.pack()  # the output head, which is no layer
    if unseen := packer.wanted - packer.packed.keys():
        raise ConversionError(f"gptq saw no input of {min(unseen)} on this text", OTHERWISE)
    return with_packed(source, {**packer.packed, **ends.packed()}, changed={})


def peak_bytes(source: Source, options: Options, chosen: Choices, sequences: int | None = None) -> int:
    """Return about the peak bytes of ``pack``: packed weights; a layer's weights, H and activations."""
    packing, paths = uniform(options), _paths(source, options, chosen)
    shapes = {path: tuple(source.weights[f"{path}.weight"].shape) for path in paths}
    packed = sum(math.prod(shape) for shape in shapes.values()) * (packing.bits or 0) // 8
    layers = [
        [shape for path, shape in shapes.items() if path.startswith(f"{layer}.")]
        for layer in layer_paths(source.module)
    ]
    of_layer = max(sum(math.prod(shape) + shape[-1] ** 2 for shape in layer) for layer in layers)
    of_weight = max((4 * math.prod(shape) + 8 * shape[-1] ** 2 for shape in shapes.values()), default=0)
    count = sequences or SEQUENCES
    activations = 5 * count * LENGTH * max((max(shape[-2:]) for layer in layers for shape in layer), default=0)
    return packed + FLOAT_BYTES * (of_layer + of_weight + activations) + attention_bytes()


class _Packer:
    def __init__(self, source: Source, packing: Packing, paths: Sequence[str]) -> None:
        self.packed: dict[str, Packed] = {}
        self.wanted = frozenset(paths)
        self._source, self._packing = source, packing
        self._left = fresh(source)
        self._sums: dict[str, np.ndarray] = {}

    def add(self, inputs: Inputs) -> None:
        # A model may run a layer again: it is packed by then, for what came first.
        if inputs.path not in self.wanted or inputs.path in self.packed:
            return
        squares = squares_of(inputs.rows)
        before = self._sums.get(inputs.path)
        self._sums[inputs.path] = squares if before is None else before + squares

    def pack(self) -> None:
        for path in list(self._sums):
            name = f"{path}.weight"
            dtype = self._source.weights[name].dtype
            weight = working(name, self._left.pop(name))
            arrays = gptq_arrays(weight, self._sums.pop(path), self._packing, dtype)
            packed = packed_arrays(arrays, path, self._packing)
            error = WeightError(*squared_error(weight, packed.arrays, self._packing))
            self.packed[path] = replace(packed, error=error)


def squares_of(rows: mx.array) -> np.ndarray:
    """Return Σ x xᵀ over rows (n, in): float32 (in, in)."""
    rows = rows.astype(mx.float32)
    if device_kind() == "cpu":  # NumPy's matrix product is some thirty times faster there: see engine/cpu/layers.py
        x = np.asarray(rows)
        return np.asarray(x.T @ x)
    step = rows_here(2 * rows.shape[-1] ** 2) or max(len(rows), 1)
    total = mx.zeros((rows.shape[-1], rows.shape[-1]))
    for begin in range(0, len(rows), step):
        piece = rows[begin : begin + step]
        total = total + piece.T @ piece
        mx.eval(total)
    return np.array(total)


def gptq_arrays(weight: mx.array, squares: np.ndarray, packing: Packing, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return words, scales and biases in ``mx.quantize``'s layout, scales and biases in ``dtype``.

    weight: (…, in) float32. squares: H (in, in). Raises ConversionError for an H that is not finite.
    """
    # On the host: BLAS has the products, and each of the many small steps would wait for a GPU.
    shape, bits, size = weight.shape, packing.bits or 0, packing.group_size
    left, top = np.array(weight).reshape(-1, shape[-1]), 2**bits - 1
    inverse, importance = _inverse_root(squares), np.diag(squares)
    codes, steps = np.empty_like(left), []
    for begin in range(0, shape[-1], size):
        group = slice(begin, begin + size)
        columns, factors, errors = left[:, group], inverse[group, group], np.empty((len(left), size), np.float32)
        _, *found = search(mx.array(columns).astype(dtype), packing, importance[group])
        steps.append(found)
        scale, bias = (np.array(each.astype(mx.float32))[:, 0] for each in found)
        scale = np.where(scale == 0, 1, scale)  # a group of one value has no step: its codes are all 0
        for column in range(size):
            code = np.clip(np.rint((columns[:, column] - bias) / scale), 0, top)
            codes[:, begin + column] = code
            errors[:, column] = (columns[:, column] - (code * scale + bias)) / factors[column, column]
            columns[:, column + 1 :] -= np.outer(errors[:, column], factors[column, column + 1 :])
        left[:, begin + size :] -= errors @ inverse[group, begin + size :]
    words = pack_codes(mx.array(codes.reshape(-1, size)), bits)
    scales, biases = (mx.concatenate(list(each), axis=-1) for each in zip(*steps, strict=True))
    return tuple(each.reshape(*shape[:-1], -1) for each in (words, scales, biases))


def _inverse_root(squares: np.ndarray) -> np.ndarray:
    """Return the upper U (in, in) with H⁻¹ = Uᵀ U, float32, of the damped H."""
    if not np.isfinite(squares).all():
        raise ConversionError("gptq saw inputs that are not finite", OTHERWISE)
    damped, diagonal = squares.astype(np.float64), np.diag(squares)
    unseen = diagonal <= 0
    damped[np.diag_indices_from(damped)] = np.where(unseen, 1, diagonal + DAMPING * (diagonal.mean() or 1))
    root: np.ndarray = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return root


def _paths(source: Source, options: Options, chosen: Choices) -> list[str]:
    packing = uniform(options)
    return [path for path, layer in leaves(source.module) if is_linear(layer) and chosen.get(path) == packing]


def is_linear(layer: Any) -> bool:
    """Whether GPTQ packs a layer: by exact class, since a subclass may differ."""
    from mlx_lm.models.switch_layers import SwitchLinear

    return type(layer) in (nn.Linear, SwitchLinear)
