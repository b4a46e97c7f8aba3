"""GPTQ by mlx-lm: rounds a weight column by column, compensating in later columns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx import nn

from tokamac.engine.device import device_kind
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.engine.perf.config_cost import Packing

from .options import Options
from .packing import (
    FLOAT_BYTES,
    OTHERWISE,
    Choices,
    Silent,
    attention_bytes,
    check_plain,
    packed_layer,
    running,
    uniform,
    with_packed,
    working,
)
from .report import StageDone, StageProgress, WeightError
from .search import squared_error
from .source import Packed, Source, fresh, layer_paths, leaves
from .streaming import LENGTH, Inputs, Streamed, rows_here, streamable_source

# Frantar et al., arXiv 2210.17323. Needs H = Σ x xᵀ (in × in) per linear layer over the calibration tokens.

# mlx-lm sums all H beside the whole model: 39 GB for 8 billion weights. Here layers run one by one and are
# packed before the next; inputs come from unpacked layers either way, so the result is the same.


# Of `calibration.LENGTH` tokens: as many as the shipped text fills, about. The paper's authors read 128 of 2,048.
SEQUENCES = 32

STAGE = "packing by gptq"

BITS = (2, 4, 8)  # mlx-lm's GPTQ writes no others: a word must hold a whole number of codes


def check(config: Mapping[str, Any], module: Any, options: Options) -> None:  # noqa: ARG001
    check_plain("gptq", options)
    if options.packed_bits not in BITS:
        raise OptionError(
            f"gptq packs 2, 4 or 8 bits, not {options.packed_bits}",
            "Choose one of these with --bits, or use --method search.",
        )
    if not any(_is_linear(layer) for _, layer in leaves(module)):
        raise OptionError("gptq packs linear layers, and this model has none", OTHERWISE)


def pack(
    source: Source, options: Options, chosen: Choices, sequences: Sequence[Sequence[int]], progress: StageProgress
) -> Source:
    """Return ``source`` with the linear layers packed that ``chosen`` packs uniformly.

    sequences: of equal length. Raises ConversionError, and OptionError for unknown tokens.
    """
    packer = _Packer(source, uniform(options), _paths(source, options, chosen))

    def layer_done(done: int, total: int) -> None:
        packer.pack()
        progress(StageDone(STAGE, done, total))

    Streamed(streamable_source(source), progress=layer_done).observe(sequences, packer.add)
    packer.pack()  # the output head, which is no layer
    if unseen := packer.wanted - packer.packed.keys():
        raise ConversionError(f"gptq saw no input of {min(unseen)} on this text", OTHERWISE)
    return with_packed(source, packer.packed, changed={})


def peak_bytes(source: Source, options: Options, chosen: Choices) -> int:
    """Return about the peak bytes of ``pack``: packed weights; a layer's weights, H and activations."""
    packing, paths = uniform(options), _paths(source, options, chosen)
    shapes = {path: tuple(source.weights[f"{path}.weight"].shape) for path in paths}
    packed = sum(math.prod(shape) for shape in shapes.values()) * (packing.bits or 0) // 8
    layers = [
        [shape for path, shape in shapes.items() if path.startswith(f"{layer}.")]
        for layer in layer_paths(source.module)
    ]
    of_layer = max(sum(math.prod(shape) + shape[-1] ** 2 for shape in layer) for layer in layers)
    of_weight = max((4 * math.prod(shape) + 5 * shape[-1] ** 2 for shape in shapes.values()), default=0)
    activations = 5 * SEQUENCES * LENGTH * max((max(shape[-2:]) for layer in layers for shape in layer), default=0)
    return packed + FLOAT_BYTES * (of_layer + of_weight + activations) + attention_bytes(source.config, SEQUENCES)


class _Packer:
    def __init__(self, source: Source, packing: Packing, paths: Sequence[str]) -> None:
        self.packed: dict[str, Packed] = {}
        self.wanted = frozenset(paths)
        self._source, self._packing = source, packing
        self._left = fresh(source)
        self._templates = dict(leaves(source.module))
        self._sums: dict[str, mx.array] = {}

    def add(self, inputs: Inputs) -> None:
        # A model may run a layer again: it is packed by then, for what came first.
        if inputs.path not in self.wanted or inputs.path in self.packed:
            return
        squares = _squares(inputs.rows)
        before = self._sums.get(inputs.path)
        self._sums[inputs.path] = squares if before is None else before + squares
        mx.eval(self._sums[inputs.path])

    def pack(self) -> None:
        for path in list(self._sums):
            name = f"{path}.weight"
            dtype = self._source.weights[name].dtype
            weight = working(name, self._left.pop(name))
            layer = _packed(_layer(self._templates[path], weight), self._sums.pop(path), self._packing, dtype)
            packed = packed_layer(layer, path, self._packing, dtype)
            error = WeightError(*squared_error(weight, packed.arrays, self._packing))
            self.packed[path] = replace(packed, error=error)


def _squares(rows: mx.array) -> mx.array:
    """Return Σ x xᵀ over rows (n, in): float32 (in, in)."""
    import numpy as np

    rows = rows.astype(mx.float32)
    if device_kind() == "cpu":  # NumPy's matrix product is some thirty times faster there: see engine/cpu/layers.py
        x = np.asarray(rows)
        return mx.array(x.T @ x)
    step = rows_here(2 * rows.shape[-1] ** 2) or max(len(rows), 1)
    total = mx.zeros((rows.shape[-1], rows.shape[-1]))
    for begin in range(0, len(rows), step):
        piece = rows[begin : begin + step]
        total = total + piece.T @ piece
        mx.eval(total)
    return total


def _packed(layer: nn.Module, squares: mx.array, packing: Packing, dtype: mx.Dtype) -> Any:
    from mlx_lm.quant import gptq

    holder = nn.Module()
    holder.layer = layer

    class Known(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.H = squares

    with running("gptq", gptq, tqdm=Silent(), Catcher=Known, mx=_storing(dtype)):
        # No data: nothing is left to run. No fallback: the holder has no other layer.
        gptq.gptq_quantize(holder, [], packing.bits, packing.group_size, packing.bits, packing.group_size)
    return holder.layer


def _storing(dtype: mx.Dtype) -> SimpleNamespace:
    # At 8 bits, scales that are rounded to bfloat16 afterwards cost a third of the precision.

    def quantize(weight: mx.array, **how: Any) -> tuple[mx.array, ...]:
        words, *steps = mx.quantize(weight, **how)
        return (words, *(step.astype(dtype).astype(step.dtype) for step in steps))

    return SimpleNamespace(**{**vars(mx), "quantize": quantize})


def _layer(template: Any, weight: mx.array) -> Any:
    from mlx_lm.models.switch_layers import SwitchLinear

    made = SwitchLinear(1, 1, 1, bias=False) if isinstance(template, SwitchLinear) else nn.Linear(1, 1, bias=False)
    made.weight = weight
    return made


def _paths(source: Source, options: Options, chosen: Choices) -> list[str]:
    packing = uniform(options)
    return [path for path, layer in leaves(source.module) if _is_linear(layer) and chosen.get(path) == packing]


def _is_linear(layer: Any) -> bool:
    """Whether GPTQ packs a layer: by exact class, since a subclass may differ."""
    from mlx_lm.models.switch_layers import SwitchLinear

    return type(layer) in (nn.Linear, SwitchLinear)
