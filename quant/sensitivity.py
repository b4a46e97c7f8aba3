"""How much a model's words suffer from a relative squared error of one tensor: its α, found in one of three ways.

measured: a text is read with that tensor alone packed coarsely; needs the model in memory, in float32.
guessed: the share of what leaves a layer that the layer itself has added, times what is usual for the kind of tensor.
by kind: what is usual for the kind of tensor, alone.

To measure, the model reads a short text again and again, each time with another weight changed. The layers' outputs of the first
reading are kept: the layers before the changed one answer from memory, and only that one and those behind it are computed.

    ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ layer k−1 ─▶ │ layer k, changed ─▶ … ─▶ norm ─▶ head ─▶ KL against the first reading
                        └──────── remembered ───────┘
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from tokamac.engine.device import device_kind
from tokamac.engine.perf import memory
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import text_config

from .choices import packable, part
from .methods import FLOAT_BYTES, Quantizer, dequantized
from .modules import check_finite, clone, leaves, not_finite, override
from .options import Options
from .report import StageDone, StageProgress
from .source import Source, fresh
from .streaming import Streamed, streamable_source

if TYPE_CHECKING:
    import numpy as np

    from tokamac.engine.model.cpu.dense import DenseEmbedding

AlphaBasis = Literal["measured", "guessed", "by kind"]
Errors = dict[str, dict[Packing | None, float]]
"""By module path and packing, the relative squared error."""

REFERENCE_BITS = (2, 4)
"""Where α is taken. It is no constant: codes of least squared error shrink a weight, the more the coarser they are, and errors that
all point one way cost more than noise of the same size. Between and beyond these two it follows from them."""

REFERENCE_GROUP = 64

TOKENS = 256
"""Read for each tensor. Both readings say the same words, so little text is needed: on the model that ships, 128 tokens led to as
good a choice as 512."""

FLOOR = 0.1
"""Of the median α: the least that is believed of a tensor. A short text may not use some weights at all."""

TINY = 1e-12
"""α where no error matters: so small that only sizes count, and a logarithm can still be taken."""

CPU_PRODUCTS, GPU_PRODUCTS = 1e14, 1e16
"""Multiplications that measuring may take: about half an hour of two CPU cores, or of a large GPU."""

GPU_SHARE = 0.6
"""The share of what MLX may use that the model may take, where a GPU computes."""

KINDS = (("v_proj", 4.0), ("o_proj", 4.0), ("out_proj", 4.0), ("down_proj", 2.0), ("fc2", 2.0))
"""By the end of a name, what packing a tensor costs beside others of its layer, which count 1: values and what leaves attention and
the feed-forward part most, as in mlx-lm's and llama.cpp's mixed recipes."""

HEAD = 8.0
"""The same for the output head, tied to the embedding or not, beside a layer that changes everything."""

SAMPLE_WEIGHTS = 1 << 18
"""Packed of each tensor, in whole rows, evenly spread: rows of a matrix are alike enough to know the error to about a per cent."""


@dataclass(frozen=True, slots=True)
class ErrorTrial:
    """What is measured on: a model, what it shall become, the method that will pack it, and tokens of a text (none: there is none).

    progress: is called as the work goes on.
    """

    source: Source
    options: Options
    quantizer: Quantizer
    ids: Sequence[int]
    progress: StageProgress


@dataclass(frozen=True, slots=True)
class Alpha:
    """Nats a token for a relative squared error of 1, by the bits at which it was taken, fewest first."""

    taken: tuple[tuple[int, float], ...]

    def at(self, bits: int | None) -> float:
        """Return α at ``bits``: between two that were taken by a straight line in log α; beyond them, the nearest."""
        (few, first), (many, last) = self.taken[0], self.taken[-1]
        if bits is None or bits >= many:
            return last
        if bits <= few:
            return first
        share = (bits - few) / (many - few)
        return math.exp((1 - share) * math.log(first) + share * math.log(last))

    def at_least(self, floor: float) -> "Alpha":
        """Return the same, with no value below ``floor``."""
        return Alpha(tuple((bits, max(value, floor)) for bits, value in self.taken))


def alpha_basis(source: Source, ids: Sequence[int]) -> AlphaBasis:
    """Return how α can be found: measured where the model fits the memory and the work is bearable."""
    if not ids:
        return "by kind"
    tokens, weights = min(len(ids), TOKENS), sum(array.size for array in source.weights.values())
    products = tokens * weights * len(REFERENCE_BITS) * sum(1 for _ in packable(source)) / 2
    bearable = products <= (CPU_PRODUCTS if device_kind() == "cpu" else GPU_PRODUCTS)
    return "measured" if bearable and fits(source, tokens) else "guessed"


def find_alphas(basis: AlphaBasis, trial: ErrorTrial, errors: Errors) -> dict[str, Alpha]:
    """Return α of every tensor in ``errors``. Raises ConversionError for weights that are not finite."""
    if basis == "measured":
        return _measured(trial, errors)
    source, shares = trial.source, _shares(trial) if basis == "guessed" else {}
    tied, layers = all(part(source, path) != "head" for path in errors), layer_numbers(source.module)
    return {
        path: Alpha(((0, _usual(source, path, tied=tied) * shares.get(layers.get(id(module)), 1.0)),))
        for path, module in packable(source)
    }


def references(packings: Sequence[Packing | None]) -> tuple[Packing, ...]:
    """Return the packings at which α is taken, fewest bits first: as near as there are to REFERENCE_BITS and REFERENCE_GROUP."""
    among = [packing for packing in packings if packing is not None and packing.mode == "affine"]

    def nearest(bits: int) -> Packing:
        return min(among, key=lambda each: (abs((each.bits or 0) - bits), abs(each.group_size - REFERENCE_GROUP)))

    return tuple(dict.fromkeys(map(nearest, REFERENCE_BITS))) if among else ()


def packed_type(source: Source, options: Options, path: str) -> mx.Dtype:
    """Return the type of a weight when it is packed: that of the options, else its own."""
    own = source.weights[f"{path}.weight"].dtype
    return own if options.dtype is None else getattr(mx, options.dtype)


def _measured(trial: ErrorTrial, errors: Errors) -> dict[str, Alpha]:
    replay, found = Replay(trial.source, trial.ids[:TOKENS]), dict[str, Alpha]()
    for done, (path, by_packing) in enumerate(errors.items(), start=1):
        # Packed from the type it will be packed from: a scale's rounding may send a token to another expert.
        weight = replay.weight(path).astype(packed_type(trial.source, trial.options, path))
        taken = tuple(
            (
                packing.bits or 0,
                replay.divergence(path, coarse(path, weight, packing, trial.quantizer))
                / (by_packing[packing] or math.inf),
            )
            for packing in references(tuple(by_packing))
        )
        found[path] = Alpha(taken or ((0, 0.0),))
        mx.clear_cache()  # each tensor has another size: the pool would hold them all
        trial.progress(StageDone("measuring sensitivity", done, len(errors)))
    floor = max(FLOOR * median([alpha.taken[-1][1] for alpha in found.values()]), TINY)
    return {path: alpha.at_least(floor) for path, alpha in found.items()}


def _shares(trial: ErrorTrial) -> dict[int | None, float]:
    """Return, by layer, the squared size of what it adds to what runs through it, relative to what leaves it."""
    before, found = mx.zeros(()), dict[int | None, float]()

    def watch(number: int, output: mx.array) -> None:
        nonlocal before
        after = output.astype(mx.float32)
        found[number] = _sum(mx.square(after - before)) / (_sum(mx.square(after)) or 1.0)
        before = after

    def progress(done: int, total: int) -> None:
        trial.progress(StageDone("measuring sensitivity", done, total))

    Streamed(streamable_source(trial.source), progress=progress).run(trial.ids, watch=watch)
    return found


def _usual(source: Source, path: str, *, tied: bool) -> float:
    """Return what packing a tensor costs beside others, by its kind. tied: the embedding is the output head."""
    kind = part(source, path)
    if kind == "head" or (kind == "embedding" and tied):
        return HEAD
    return next((value for ending, value in KINDS if path.endswith(ending)), 1.0)


def sample(weight: mx.array) -> mx.array:
    """Return evenly spread rows of (…, out, in), about SAMPLE_WEIGHTS weights in all: of a stack of experts, some rows of each."""
    step = max(1, min(weight.shape[-2], weight.size // SAMPLE_WEIGHTS))
    return weight[..., ::step, :]


def relative_errors(
    path: str,
    weight: mx.array,
    packings: Sequence[Packing],
    quantizer: Quantizer,
    importance: "np.ndarray | None" = None,
) -> dict[Packing, float]:
    """Return the relative squared error Σ h (w − ŵ)² ÷ Σ h w² of each packing; 0 of a tensor that is all zeros.

    weight: (out, in), or (experts, out, in), of the type it will be packed in. importance: h, the mean squared input of a channel,
    finite, (in,) or (experts, in); None counts all alike. Raises ConversionError for weights that are not finite.
    """
    exact = weight.astype(mx.float32)
    h = mx.ones(1) if importance is None else mx.expand_dims(mx.array(importance, mx.float32), -2)
    whole = _sum(h * mx.square(exact))
    if not math.isfinite(whole):
        raise not_finite(f"{path}.weight")
    errors = {packing: _sum(h * mx.square(coarse(path, weight, packing, quantizer) - exact)) for packing in packings}
    return {packing: error / whole if whole else 0.0 for packing, error in errors.items()}


def coarse(path: str, weight: mx.array, packing: Packing, quantizer: Quantizer) -> mx.array:
    """Return what ``weight`` is worth once it is packed: (…, out, in) float32."""
    return dequantized(quantizer.pack(path, weight, packing), packing).astype(mx.float32)


def _sum(values: mx.array) -> float:
    found: Any = mx.sum(values).item()
    return float(found)


@dataclass(slots=True)
class _FirstAnswers:
    """What the layers answered in the first reading, by layer and call; those before ``first`` answer so again."""

    # An object of its own: a layer that referred to its model would keep all weights alive.
    first: int = 0
    answers: dict[tuple[int, int], Any] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)

    def answer(self, number: int, own: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        key = (number, self.calls[number])
        self.calls[number] += 1
        if number < self.first:
            return self.answers[key]
        answer = own(layer, *args, **kwargs)
        if key not in self.answers:
            mx.eval(answer)
            self.answers[key] = answer
        return answer


class Replay:
    """Reads ``ids`` once when it is made. Check ``fits`` before: the whole model is loaded, in float32.

    Everything is computed in float32: the differences looked for are smaller than half precision's rounding.
    Raises ConversionError for weights that are not finite.
    """

    def __init__(self, source: Source, ids: Sequence[int]) -> None:
        self._ids = mx.array([list(ids)])
        self._model = _loaded(source)
        self._layer_of = layer_numbers(self._model)
        self._answers = _FirstAnswers()
        for number, layer in enumerate(self._model.layers):
            override(layer, __call__=partial(self._answers.answer, number, type(layer).__call__))
        self._modules = dict(leaves(self._model))
        self._exact = self._read(0)

    def weight(self, path: str) -> mx.array:
        """Return the weight of the module at ``path``, float32."""
        weight: mx.array = self._modules[path].weight
        return weight

    def divergence(self, path: str, weight: mx.array) -> float:
        """Return KL(first reading ‖ reading with ``weight`` at ``path``), the mean over the text, in nats a token."""
        module = self._modules[path]
        # What is outside the layers may be used before them (an embedding): then everything is computed again.
        head = path.endswith("lm_head") and not isinstance(module, nn.Embedding)
        first = self._layer_of.get(id(module), len(self._model.layers) if head else 0)
        self._put(path, _with_weight(module, weight))
        try:
            return _sum(_divergences(self._exact, self._read(first))) / self._ids.size
        finally:
            self._put(path, module)

    def _put(self, path: str, module: nn.Module) -> None:
        self._model.update_modules(tree_unflatten([(path, module)]))

    def _read(self, first: int) -> mx.array:
        """Return log-probabilities (n, vocabulary), the layers before ``first`` answering as they did."""
        self._answers.first = first
        self._answers.calls.clear()
        logits = self._model(self._ids)[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        return found


def peak_bytes(source: Source, tokens: int) -> int:
    """Return about the most memory of a Replay of ``tokens`` tokens: the model in float32, outputs of layers, chances of words."""
    text, sizes = text_config(source.config), [array.size for array in source.weights.values()]
    outputs = tokens * int(text.get("hidden_size") or 0) * len(source.module.layers)
    chances = 6 * tokens * int(text.get("vocab_size") or 0)  # two readings, and what comparing them takes
    return FLOAT_BYTES * (sum(sizes) + 3 * max(sizes) + outputs + chances)


def fits(source: Source, tokens: int) -> bool:
    """Return whether a Replay of ``tokens`` tokens fits the memory. On a CPU ``unpack`` must agree to unpack the model."""
    needed, budget = peak_bytes(source, tokens), memory.array_budget()
    if device_kind() != "cpu":
        return budget is not None and needed <= GPU_SHARE * budget
    from tokamac.engine.model.cpu.dense import MEMORY_SHARE

    total, weights = memory.machine_total(), FLOAT_BYTES * sum(array.size for array in source.weights.values())
    return total is not None and budget is not None and needed <= budget and weights <= MEMORY_SHARE * total


def layer_numbers(model: Any) -> dict[int, int]:
    """Return the number of the layer that each module is part of, by the module's identity."""
    numbered = reversed(list(enumerate(model.layers)))  # the first layer counts, where several share a module
    return {id(part): number for number, layer in numbered for part in layer.modules()}


def _divergences(exact: mx.array, other: mx.array) -> mx.array:
    """Return KL(exact ‖ other) (n,) of log-probabilities (n, vocabulary)."""
    # Σ p (eᵈ − 1 − d) with d = log q − log p equals Σ p log (p ÷ q), because both add up to 1. No term is negative, so small
    # divergences are not lost among large terms that cancel.
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
        from tokamac.engine.model.cpu.dense import DenseEmbedding, unpack

        unpack(model)
        for _, module in leaves(model):
            if isinstance(module, DenseEmbedding):
                _multiply_rows(module)
    return model


def _multiply_rows(embedding: "DenseEmbedding") -> None:
    """Let NumPy multiply many rows at a tied head too: the layer leaves that to MLX, as prefill never asks for it."""
    from tokamac.engine.model.cpu.dense import DenseLinear

    head = DenseLinear(embedding.weight, None)
    override(embedding, as_linear=lambda _, x: head(x))


def _with_weight(module: Any, weight: mx.array) -> nn.Module:
    """Return a copy of a leaf with another weight."""
    if device_kind() == "cpu":
        from tokamac.engine.model.cpu.dense import DenseEmbedding, DenseLinear

        if isinstance(module, DenseLinear | DenseEmbedding):
            weight = mx.contiguous(weight.T).T
            mx.eval(weight)
            if isinstance(module, DenseLinear):
                return DenseLinear(weight, module.get("bias"))
            embedding = DenseEmbedding(weight)
            _multiply_rows(embedding)
            return embedding
    copied: nn.Module = clone(module)
    copied.weight = weight
    return copied
