"""The parts of a model that read their weights when they are called: its layers, and the big matrices at its ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tokamac.engine.cpu import DenseEmbedding, DenseLinear, unpack
from tokamac.engine.errors import OptionError
from tokamac.quant.modules import clone, override
from tokamac.quant.observing import Inputs, Observer, observe

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
ENDS = (*EMBEDDINGS, nn.Linear, nn.QuantizedLinear)
"""Kinds of modules outside the layers that may be as big as a layer."""

ROWS = 1 << 13
"""Outputs of a linear layer at an end that are unpacked at once on a CPU: 134 MB of float32 where a layer is 4,096 wide."""

Read = Callable[[], dict[str, mx.array]]
"""Opens a checkpoint again: fresh lazy arrays by name. Evaluating one reads it, letting go of it frees it."""


@dataclass(slots=True)
class Reader:
    """Fills copies of modules with weights. Each array is handed out once, so that nothing here keeps it.

    on_cpu: in float32, and multiplied by NumPy, as the engine does on a plain CPU. observer: is told what linear layers are given.
    """

    read: Read
    on_cpu: bool
    observer: Observer | None
    _left: dict[str, mx.array] = field(default_factory=dict)

    def fill(self, path: str, template: nn.Module) -> Any:
        """Return a copy of ``template``, the module at ``path``, with its weights, not evaluated."""
        names = [name for name, _ in tree_flatten(template.parameters())]
        if any(f"{path}.{name}" not in self._left for name in names):
            self._left = self.read()  # the first call, or a module that is called again
        filled = clone(template)
        filled.update(tree_unflatten([(name, self._left.pop(f"{path}.{name}")) for name in names]))
        return filled


@dataclass(frozen=True, slots=True)
class Block:
    """A layer: evaluated as a whole before anything else is read. template: a copy of it; finished: is given its output."""

    path: str
    template: nn.Module
    reader: Reader
    finished: Callable[[mx.array], None]

    def stand_in_for(self, module: nn.Module) -> None:
        """Answer the calls of ``module``."""
        override(module, __call__=self._call)

    def _call(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Computed in a function of its own, so that the weights are gone before the next.
        output = self._compute(*args, **kwargs)
        self.finished(output if isinstance(output, mx.array) else output[0])
        return output

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.on_cpu:
            filled.set_dtype(mx.float32)
            unpack(filled)
        if self.reader.observer is not None:
            observe(filled, self.path, self.reader.observer)
        output = filled(*args, **kwargs)
        mx.eval(output)
        return output


@dataclass(frozen=True, slots=True)
class End:
    """An embedding or a linear layer outside the blocks.

    lazy: its products are left to be computed when somebody asks for them, which for the output head may be never.
    """

    path: str
    template: nn.Module
    reader: Reader
    lazy: bool

    def stand_in_for(self, module: nn.Module) -> None:
        """Answer the calls of ``module``."""
        if isinstance(module, EMBEDDINGS):
            override(module, __call__=self._look_up, as_linear=self._multiply)
        else:
            override(module, __call__=self._multiply)

    def _look_up(self, _: nn.Module, ids: mx.array) -> mx.array:
        table = self.reader.fill(self.path, self.template)
        if bool(mx.any((ids < 0) | (ids >= len(table.weight))).item()):  # MLX would read past the end
            raise OptionError("the text has tokens that the model does not know", "Use the model's own tokenizer.")
        if self.reader.on_cpu:
            table, ids = _part(table, ids.reshape(-1)), mx.arange(ids.size).reshape(ids.shape)
        rows: mx.array = table(ids)
        mx.eval(rows)
        return rows

    def _multiply(self, _: nn.Module, x: mx.array) -> mx.array:
        filled = self.reader.fill(self.path, self.template)
        if self.reader.observer is not None and not isinstance(filled, EMBEDDINGS):
            self.reader.observer(Inputs(self.path, x.reshape(-1, x.shape[-1])))
        in_pieces = self.reader.on_cpu and not self.lazy
        y = _multiplied(filled, x) if in_pieces else _product(filled, x)
        if not self.lazy:
            mx.eval(y)
        return y


def _part(module: nn.Module, rows: mx.array | slice) -> Any:
    """Return these rows of an embedding or a linear layer, in float32: all that it holds has a row for each output."""
    part = clone(module)
    size = len(part.weight)
    held = {name: array for name, array in part.parameters().items() if array.ndim and len(array) == size}
    part.update({name: array[rows] for name, array in held.items()})
    part.set_dtype(mx.float32)
    return part


def _multiplied(module: Any, x: mx.array) -> mx.array:
    """Return x Wᵀ + b by NumPy: engine/cpu.py leaves the head's product of many rows to MLX, as prefill never asks for it.

    W is unpacked piece by piece. In float32, the whole of it would be larger than any layer.
    """
    pieces = []
    for begin in range(0, len(module.weight), ROWS):
        holder = nn.Module()
        holder.piece = _part(module, slice(begin, begin + ROWS))
        unpack(holder)
        piece = holder.piece
        pieces.append(_product(DenseLinear(piece.weight, None) if isinstance(piece, DenseEmbedding) else piece, x))
    return mx.concatenate(pieces, axis=-1)


def _product(module: Any, x: mx.array) -> mx.array:
    y: mx.array = module.as_linear(x) if isinstance(module, EMBEDDINGS) else module(x)
    return y
