"""A model run over a short text with the weights of one layer in memory at a time, and what its linear layers are given meanwhile.

    ids ─▶ embedding ─▶ layer ─▶ layer ─▶ … ─▶ norm ─▶ head ─▶ log-probabilities
           each: read its weights, compute, evaluate, let them go

The model is mlx-lm's own, called as a whole. In a copy of its modules, every layer and the big matrices at both ends answer a
call by a copy of theirs with freshly read weights. All other parameters are lazy arrays of the first copy; so is a
layer's parameter that the model takes without calling the layer: correct as well, and kept until the run ends.

On a CPU a layer is cast to float32 and unpacked for its call, and NumPy multiplies (engine/model/cpu/dense.py); elsewhere it
keeps the checkpoint's types. No cache is used: the text is computed in one piece.

A calibration text goes through a layer as thousands of rows at once: on an M1, one product of 16,384 rows by a large matrix takes
about a second. While a display is on, macOS ends a command that keeps the GPU too long (ml-explore/mlx#3267), and the conversion
with it. So rows are multiplied some at a time there, each piece evaluated before the next. None of this has run on a Mac yet: the
times follow from the chip's peak.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.device import DeviceKind, device_kind
from tokamac.engine.errors import OptionError
from tokamac.engine.model.config import read_config
from tokamac.engine.model.loader import build_model
from tokamac.engine.model.safetensors import find_shards

from .modules import Method, clone, override
from .source import Source, fresh

LONGEST_S = 0.25
"""What one product may take, about: a display is then redrawn some times a second."""

REACHED = 0.5
"""The share of a chip's half-precision peak that large products reach at least, in float32 too."""

SLOWEST_TFLOPS = 2.32
"""Of an M1 with seven GPU cores: assumed of an Apple GPU that the table of chips does not know."""

STEP = 256
"""Rows of a piece are a multiple of it, so that kernels' tiles are full."""

ROWS = 1 << 13
"""Outputs of a linear layer at an end that are unpacked at once on a CPU: 134 MB of float32 where a layer is 4,096 wide."""

LINEAR = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
ENDS = (*EMBEDDINGS, nn.Linear, nn.QuantizedLinear)
"""Kinds of modules outside the layers that may be as big as a layer."""

Watch = Callable[[int, mx.array], None]
"""Is given a layer's number and its output (1, n, dims), evaluated."""

LayersDone = Callable[[int, int], None]
"""Is told the layers computed so far, and all."""

Read = Callable[[], dict[str, mx.array]]
"""Opens a checkpoint again: fresh lazy arrays by name. Evaluating one reads it, letting go of it frees it."""


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


@dataclass(frozen=True, slots=True)
class Streamable:
    """A model whose weights can be read as often as need be.

    module: mlx-lm's, packed or not as the weights are; its own arrays are neither read nor changed.
    read: names every parameter of the module. A run opens it twice, and keeps no more than the module docstring says.
    """

    module: nn.Module
    read: Read


def streamable_folder(folder: Path, *, unchecked: bool = False) -> Streamable:
    """Return the model in ``folder``, packed or not, built as the engine builds it. unchecked: see there. Raises ModelError."""
    find_shards(folder)

    def opened() -> nn.Module:
        return build_model(folder, read_config(folder), unchecked=unchecked)[0]

    return Streamable(opened(), lambda: dict(tree_flatten(opened().parameters())))


def streamable_source(source: Source) -> Streamable:
    """Return a conversion's source, unpacked, as its folder has it: whatever was popped from ``source.weights``."""
    return Streamable(source.module, lambda: fresh(source))


class Streamed:
    """A model that is run layer by layer, any number of times.

    device: decides which types are computed in; None asks MLX. progress: is called after every layer, on this thread.
    """

    def __init__(
        self, model: Streamable, *, device: DeviceKind | None = None, progress: LayersDone | None = None
    ) -> None:
        self._model = model
        self._on_cpu = (device or device_kind()) == "cpu"
        self._progress = progress

    @property
    def layers(self) -> int:
        """How many layers (transformer blocks) the model has."""
        module: Any = self._model.module
        return len(module.layers)

    def run(self, ids: Sequence[int], *, observer: Observer | None = None, watch: Watch | None = None) -> mx.array:
        """Return (n, vocabulary) float32, evaluated: row i holds the log-probabilities of what follows ids[i]."""
        model = self._open(observer, watch, lazy_ends=False)
        logits = model(mx.array([list(ids)]))[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        return found

    def observe(self, batch: Sequence[Sequence[int]], observer: Observer) -> None:
        """Run sequences of equal length side by side, for what ``observer`` is told. No logits are computed.

        Memory beside a layer's weights: some four times tokens × widest layer × 4 bytes, 1 GB for 4,096 tokens of an 8B model.
        """
        model = self._open(observer, None, lazy_ends=True)
        model(mx.array([list(ids) for ids in batch]))

    def _open(self, observer: Observer | None, watch: Watch | None, *, lazy_ends: bool) -> Any:
        model = clone(self._model.module).eval()
        model.update(tree_unflatten(list(self._model.read().items())))
        if self._on_cpu:
            model.set_dtype(mx.float32)
        numbers = {id(layer): number for number, layer in enumerate(model.layers)}
        reader = _Reader(self._model.read, self._on_cpu, observer)
        finished = partial(_finished, len(numbers), watch, self._progress)
        for path, module in _streamed_modules(model, numbers):
            # The copy comes first: it must not have the override.
            if id(module) in numbers:
                layer = _Layer(path, clone(module), reader, partial(finished, numbers[id(module)]))
                override(module, __call__=layer.call)
            elif isinstance(module, EMBEDDINGS):
                end = _End(path, clone(module), reader, lazy_ends)
                override(module, __call__=end.look_up, as_linear=end.multiply)
            elif isinstance(module, ENDS):
                override(module, __call__=_End(path, clone(module), reader, lazy_ends).multiply)
        return model


def _finished(total: int, watch: Watch | None, progress: LayersDone | None, number: int, output: mx.array) -> None:
    mx.clear_cache()  # the pool would keep what the layer's weights took
    if watch is not None:
        watch(number, output)
    if progress is not None:
        progress(number + 1, total)


def _streamed_modules(model: nn.Module, layers: dict[int, int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, and every module that is part of none, each once, with its path."""
    modules = list(model.named_modules())
    seen = {
        id(part) for _, module in modules if id(module) in layers for part in module.modules() if part is not module
    }
    for path, module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


@dataclass(slots=True)
class _Reader:
    """Fills copies of modules with weights. Each array is handed out once, so that nothing here keeps it."""

    read: Read
    on_cpu: bool  # in float32, and multiplied by NumPy, as the engine does on a plain CPU
    observer: Observer | None
    left: dict[str, mx.array] = field(default_factory=dict)

    def fill(self, path: str, template: nn.Module) -> Any:
        """Return a copy of ``template``, the module at ``path``, with its weights, not evaluated."""
        names = [name for name, _ in tree_flatten(template.parameters())]
        if any(f"{path}.{name}" not in self.left for name in names):
            self.left = self.read()  # the first call, or a module that is called again
        filled = clone(template)
        filled.update(tree_unflatten([(name, self.left.pop(f"{path}.{name}")) for name in names]))
        return filled


@dataclass(frozen=True, slots=True)
class _Layer:
    """Answers a layer's calls: evaluated as a whole before anything else is read. finished: is given its output."""

    path: str
    template: nn.Module
    reader: _Reader
    finished: Callable[[mx.array], None]

    def call(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Computed in a function of its own, so that the weights are gone before the next.
        output = self._compute(*args, **kwargs)
        self.finished(output if isinstance(output, mx.array) else output[0])
        return output

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.on_cpu:
            from tokamac.engine.model.cpu.dense import unpack

            filled.set_dtype(mx.float32)
            unpack(filled)
        if self.reader.observer is not None:
            observe(filled, self.path, self.reader.observer)
        output = filled(*args, **kwargs)
        mx.eval(output)
        return output


@dataclass(frozen=True, slots=True)
class _End:
    """Answers the calls of an embedding or a linear layer outside the layers."""

    path: str
    template: nn.Module
    reader: _Reader
    lazy: bool  # products are computed when somebody asks for them, which for the output head may be never

    def look_up(self, _: nn.Module, ids: mx.array) -> mx.array:
        table = self.reader.fill(self.path, self.template)
        if bool(mx.any((ids < 0) | (ids >= len(table.weight))).item()):  # MLX would read past the end
            raise OptionError("the text has tokens that the model does not know", "Use the model's own tokenizer.")
        if self.reader.on_cpu:
            table, ids = _rows_of(table, ids.reshape(-1)), mx.arange(ids.size).reshape(ids.shape)
        rows: mx.array = table(ids)
        mx.eval(rows)
        return rows

    def multiply(self, _: nn.Module, x: mx.array) -> mx.array:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.observer is not None and not isinstance(filled, EMBEDDINGS):
            self.reader.observer(Inputs(self.path, x.reshape(-1, x.shape[-1])))
        in_float32 = self.reader.on_cpu and not self.lazy
        y = _multiplied(filled, x) if in_float32 else _product(filled, x)
        if not self.lazy:
            mx.eval(y)
        return y


def _rows_of(module: nn.Module, rows: mx.array | slice) -> Any:
    """Return these rows of an embedding or a linear layer, in float32: all that it holds has a row for each output."""
    part = clone(module)
    size = len(part.weight)
    whole = {name: array for name, array in part.parameters().items() if array.ndim and len(array) == size}
    part.update({name: array[rows] for name, array in whole.items()})
    part.set_dtype(mx.float32)
    return part


def _multiplied(module: Any, x: mx.array) -> mx.array:
    """Return x Wᵀ + b by NumPy: an embedding leaves its product of many rows to MLX, as prefill never asks for it."""
    from tokamac.engine.model.cpu.dense import DenseEmbedding, DenseLinear, unpack

    pieces = []  # unpacked one by one: in float32, the whole of W would be larger than any layer
    for begin in range(0, len(module.weight), ROWS):
        holder = nn.Module()
        holder.piece = _rows_of(module, slice(begin, begin + ROWS))
        unpack(holder)
        piece = holder.piece
        pieces.append(_product(DenseLinear(piece.weight, None) if isinstance(piece, DenseEmbedding) else piece, x))
    return mx.concatenate(pieces, axis=-1)


def _product(module: Any, x: mx.array) -> mx.array:
    y: mx.array = module.as_linear(x) if isinstance(module, EMBEDDINGS) else module(x)
    return y


def observe(module: nn.Module, path: str, observer: Observer) -> None:
    """Tell ``observer`` of every call of a linear layer in ``module``, at ``path`` in its model.

    Linear layers and stacks of experts (mlx-lm's SwitchLinear), packed or not. Other layers with a matrix are not observed:
    convolutions, embeddings (also where they serve as the output head), products per attention head.
    """
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    first = {
        id(layer): (name, layer) for name, layer in reversed(module.named_modules())
    }  # one may stand at two places
    for name, layer in first.values():
        own, whole = type(layer).__call__, ".".join(filter(None, (path, name)))
        if isinstance(layer, LINEAR):
            override(layer, __call__=_observed_linear(own, whole, observer))
        elif isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
            override(layer, __call__=_observed_stack(own, whole, observer))


def _observed_linear(own: Method, path: str, observer: Observer) -> Method:
    def call(layer: Any, x: mx.array) -> Any:
        observer(Inputs(path, x.reshape(-1, x.shape[-1])))
        return in_pieces(partial(own, layer), x, outputs=layer.weight.shape[0])

    return call


def _observed_stack(own: Method, path: str, observer: Observer) -> Method:
    def call(layer: Any, x: mx.array, indices: mx.array, **kwargs: Any) -> Any:
        # x (..., m, in) and indices (...) are matched by broadcasting: one row of a token for each expert it is sent to.
        batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        rows = mx.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, x.shape[-1])
        experts = mx.broadcast_to(mx.expand_dims(indices, -1), (*batch, x.shape[-2])).reshape(-1)
        observer(Inputs(path, rows, experts, layer.num_experts))
        return own(layer, x, indices, **kwargs)

    return call


def activation_statistics(model: Streamed, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the mean squared input of every channel of the linear layers over a text.

    A weight's rounding error matters as far as its channel is used: E‖(Ŵ − W) x‖² is Σ (ŵ − w)² E[x²] where channels are
    uncorrelated. So these are the weights of a least-squares search for the codes.

    Args:
        model: Is run once.
        sequences: Token ids, of equal length, run side by side, so that each weight is read once.

    Returns:
        By module path, float32 (in,), and (experts, in) of a stack of experts: an expert's own are those of the tokens that were
        sent to it; where there were none, the mean over all rows of its stack. Layers that ``observe`` tells nothing of have no
        entry, nor have those whose inputs were not finite: a weight that is no number is refused by its own name later.

    Raises:
        OptionError: For tokens the model does not know.
        ModelError: Where it can't be read.
    """
    sums: dict[str, _SquareSum] = {}

    def add(inputs: Inputs) -> None:
        if inputs.path not in sums:
            sums[inputs.path] = _SquareSum(inputs)
        sums[inputs.path].add(inputs)

    model.observe(sequences, add)
    means = {path: each.mean() for path, each in sums.items()}
    return {path: mean for path, mean in means.items() if math.isfinite(float(mean.sum(dtype="float64")))}


class _SquareSum:
    """Squares added up, on the host in float64. Where the layer is no stack of experts, all rows are those of one expert."""

    def __init__(self, first: Inputs) -> None:
        experts, self._stacked = first.stack or 1, first.stack is not None
        self._squares = np.zeros((experts, first.rows.shape[-1]))
        self._rows = np.zeros(experts, np.int64)

    def add(self, inputs: Inputs) -> None:
        squares = mx.square(inputs.rows.astype(mx.float32))
        if inputs.experts is None:
            self._squares += np.asarray(mx.sum(squares, axis=0))
            self._rows += len(squares)
        else:
            self._squares += np.asarray(mx.zeros(self._squares.shape).at[inputs.experts].add(squares))
            self._rows += np.bincount(np.asarray(inputs.experts), minlength=len(self._rows))

    def mean(self) -> np.ndarray:
        overall = self._squares.sum(axis=0) / self._rows.sum()
        own = self._squares / np.maximum(self._rows, 1)[:, None]
        means = np.where(self._rows[:, None] > 0, own, overall).astype(np.float32)
        return means if self._stacked else means.reshape(-1)


def in_pieces(product: Callable[[mx.array], mx.array], x: mx.array, outputs: int) -> mx.array:
    """Return ``product`` of x (…, in) as (…, outputs), some rows at a time where there are many: it takes each row alone."""
    rows, inputs = x.size // x.shape[-1], x.shape[-1]
    most = rows_here(2 * inputs * outputs)
    if most is None or rows <= most:
        return product(x)
    flat, pieces = x.reshape(rows, inputs), []
    for begin in range(0, rows, most):
        pieces.append(product(flat[begin : begin + most]))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces).reshape(*x.shape[:-1], -1)


def rows_here(row_operations: int) -> int | None:
    """Return ``rows_at_once`` for MLX's default device."""
    kind = device_kind()
    return rows_at_once(kind, _peak_tflops() if kind == "metal" else None, row_operations)


def rows_at_once(kind: DeviceKind, peak_tflops: float | None, row_operations: int) -> int | None:
    """Return how many rows one product may take; None where there is no bound: on CPUs and on CUDA.

    Args:
        kind: what MLX computes on.
        peak_tflops: the GPU's half-precision peak, 10^12 operations a second; None where it is unknown.
        row_operations: what a row takes: twice the size of the matrix that it is multiplied by.
    """
    if kind != "metal":
        return None
    operations = (peak_tflops or SLOWEST_TFLOPS) * 1e12 * REACHED * LONGEST_S
    return max(int(operations / row_operations) // STEP * STEP, STEP)


@cache
def _peak_tflops() -> float | None:
    from tokamac.engine.perf.hardware import detect

    return detect().fp16_tflops
