"""A model in memory that reads a short text again and again, each time with another weight changed: what does that do to its words?

The layers' outputs of the first reading are kept. When a weight in layer k is changed, the layers before k answer from memory, and
only k and those behind it are computed.

    ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ layer k−1 ─▶ │ layer k, changed ─▶ … ─▶ norm ─▶ head ─▶ KL against the first reading
                        └──────── remembered ───────┘
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from tokamac.engine.cpu import MEMORY_SHARE, DenseEmbedding, DenseLinear, unpack
from tokamac.engine.device import device_kind
from tokamac.engine.limits import memory
from tokamac.engine.limits.cost import text_config
from tokamac.quant.finite import check_finite
from tokamac.quant.modules import clone, leaves, override
from tokamac.quant.source import Source, fresh

FLOAT_BYTES = 4
"""Everything is computed in float32: the differences looked for are smaller than half precision's rounding."""

GPU_SHARE = 0.6
"""The share of what MLX may use that the model may take, where a GPU computes."""


@dataclass(slots=True)
class _Tape:
    """What the layers answered in the first reading, call by call; layers before ``first`` answer so again."""

    first: int = 0
    answers: dict[tuple[int, int], Any] = field(default_factory=dict)
    _calls: Counter[int] = field(default_factory=Counter)

    def rewind(self, first: int) -> None:
        """Begin another reading, in which the layers from ``first`` on are computed."""
        self.first = first
        self._calls.clear()

    def call(self, number: int, own: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Answer the call of a layer."""
        key = (number, self._calls[number])
        self._calls[number] += 1
        if number < self.first:
            return self.answers[key]
        answer = own(layer, *args, **kwargs)
        if key not in self.answers:
            mx.eval(answer)
            self.answers[key] = answer
        return answer


class Replay:
    """Reads ``ids`` once when it is made. Check ``fits`` before: the whole model is loaded, in float32.

    Raises ConversionError for weights that are not finite.
    """

    def __init__(self, source: Source, ids: Sequence[int]) -> None:
        self._ids = mx.array([list(ids)])
        self._model = _loaded(source)
        self._tape = _Tape()
        self._layer_of = layer_numbers(self._model)
        self._layers = len(self._model.layers)
        for number, layer in enumerate(self._model.layers):
            override(layer, __call__=partial(self._tape.call, number, type(layer).__call__))
        self._modules = dict(leaves(self._model))
        self._exact = self._read(0)

    def weight(self, path: str) -> mx.array:
        """Return the weight of the module at ``path``, float32."""
        weight: mx.array = self._modules[path].weight
        return weight

    def divergence(self, path: str, weight: mx.array) -> float:
        """Return KL(first reading ‖ reading with ``weight`` at ``path``), the mean over the text, in nats a token."""
        module = self._modules[path]
        # What stands outside the layers may be used before them (an embedding): then everything is computed again.
        before = self._layers if _is_head(module, path) else 0
        first = self._layer_of.get(id(module), before)
        self._put(path, _with_weight(module, weight))
        try:
            mean: Any = mx.mean(_divergence(self._exact, self._read(first))).item()
            return float(mean)
        finally:
            self._put(path, module)

    def _put(self, path: str, module: nn.Module) -> None:
        self._model.update_modules(tree_unflatten([(path, module)]))

    def _read(self, first: int) -> mx.array:
        self._tape.rewind(first)
        logits = self._model(self._ids)[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # (n, vocabulary)
        mx.eval(found)
        return found


def peak_bytes(source: Source, tokens: int) -> int:
    """Return about the most memory of a Replay of so many tokens: the model in float32, outputs of layers, chances of words."""
    text, sizes = text_config(source.config), [array.size for array in source.weights.values()]
    outputs = tokens * int(text.get("hidden_size") or 0) * len(source.module.layers)
    chances = 6 * tokens * int(text.get("vocab_size") or 0)  # two readings, and what comparing them takes
    return FLOAT_BYTES * (sum(sizes) + 3 * max(sizes) + outputs + chances)


def fits(source: Source, tokens: int) -> bool:
    """Return whether a Replay of so many tokens fits the memory. On a CPU engine/cpu.py must agree to unpack the model."""
    needed, budget = peak_bytes(source, tokens), memory.array_budget()
    if device_kind() != "cpu":
        return budget is not None and needed <= GPU_SHARE * budget
    total, weights = memory.machine_total(), FLOAT_BYTES * sum(array.size for array in source.weights.values())
    return total is not None and budget is not None and needed <= budget and weights <= MEMORY_SHARE * total


def layer_numbers(model: Any) -> dict[int, int]:
    """Return the number of the layer that each module is part of, by the module's identity."""
    numbered = reversed(list(enumerate(model.layers)))  # the first layer counts, where several share a module
    return {id(part): number for number, layer in numbered for part in layer.modules()}


def _divergence(exact: mx.array, other: mx.array) -> mx.array:
    """Return KL(exact ‖ other) (n,) of log-probabilities (n, vocabulary).

    As Σ p (eᵈ − 1 − d) with d = log q − log p, which equals Σ p log (p ÷ q) because both add up to 1: no term is negative, so small
    divergences are not lost among large terms that cancel.
    """
    d = other - exact
    return mx.sum(mx.exp(exact) * (mx.expm1(d) - d), axis=-1)


def _loaded(source: Source) -> Any:
    model, weights = clone(source.module).eval(), fresh(source)
    for name in list(weights):
        array = weights.pop(name)
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32)
            check_finite(name, array)
        mx.eval(array)
        model.update(tree_unflatten([(name, array)]))
    if device_kind() == "cpu":
        unpack(model)
        _multiply_rows(model)
    return model


def _multiply_rows(model: nn.Module) -> None:
    """Let NumPy multiply many rows at a tied head too: engine/cpu.py leaves that to MLX, as prefill never asks for it."""
    for _, module in leaves(model):
        if isinstance(module, DenseEmbedding):
            _head_by_rows(module)


def _head_by_rows(embedding: DenseEmbedding) -> None:
    head = DenseLinear(embedding.weight, None)
    override(embedding, as_linear=lambda _, x: head(x))


def _with_weight(module: Any, weight: mx.array) -> nn.Module:
    """Return a copy of a leaf with another weight."""
    if isinstance(module, DenseLinear | DenseEmbedding):
        weight = mx.contiguous(weight.T).T
        mx.eval(weight)
        if isinstance(module, DenseLinear):
            return DenseLinear(weight, module.get("bias"))
        embedding = DenseEmbedding(weight)
        _head_by_rows(embedding)
        return embedding
    copied: nn.Module = clone(module)
    copied.weight = weight
    return copied


def _is_head(module: nn.Module, path: str) -> bool:
    return path.endswith("lm_head") and not isinstance(module, nn.Embedding | DenseEmbedding)
