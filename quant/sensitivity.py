"""A tensor's sensitivity α: nats per token for its relative squared error."""

# measured: read a text with that tensor alone packed coarsely; needs the model in float32.
# guessed: the layer's share of its output, times the tensor kind's usual α. by kind: the usual α.

# Measuring replays the text: layers before the changed one answer from memory.

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
from tokamac.engine.kv.attention import attending_uncached, install_seam
from tokamac.engine.model.weights import text_config
from tokamac.engine.perf import memory
from tokamac.engine.perf.config_cost import Packing

from .options import Options
from .packing import FLOAT_BYTES, Quantizer, packable, part
from .report import StageDone, StageProgress
from .source import Source, check_finite, clone, dequantized, fresh, leaves, not_finite, override
from .streaming import Streamed, streamable_source

if TYPE_CHECKING:
    import numpy as np

    from tokamac.engine.cpu.layers import DenseEmbedding

AlphaBasis = Literal["measured", "guessed", "by kind"]
Errors = dict[str, dict[Packing | None, float]]  # by module path and packing, the relative squared error

# Where α is taken. It is no constant: codes of least squared error shrink a weight, the more the coarser they are, and
# errors that all point one way cost more than noise of the same size. Between and beyond these two it follows from
# them.
REFERENCE_BITS = (2, 4)

REFERENCE_GROUP = 64

# Read for each tensor. Both readings say the same words, so little text is needed: on the model that ships, 128 tokens
# led to as good a choice as 512.
TOKENS = 128

FLOOR = 0.1  # of the median α: the least that is believed of a tensor. A short text may not use some weights at all.

TINY = 1e-12  # α where no error matters: so small that only sizes count, and a logarithm can still be taken

# Multiplications that measuring may take: about half an hour of two CPU cores, or of a large GPU.
CPU_PRODUCTS, GPU_PRODUCTS = 1e14, 1e16

GPU_SHARE = 0.6  # the share of what MLX may use that the model may take, where a GPU computes

# By the end of a name, what packing a tensor costs beside others of its layer, which count 1: values and what leaves
# attention and the feed-forward part most, as in mlx-lm's and llama.cpp's mixed recipes.
KINDS = (("v_proj", 4.0), ("o_proj", 4.0), ("out_proj", 4.0), ("down_proj", 2.0), ("fc2", 2.0))

HEAD = 8.0  # the same for the output head, tied to the embedding or not, beside a layer that changes everything

# Packed of each tensor, in whole rows, evenly spread: rows of a matrix are alike enough to know the error to about a
# per cent.
SAMPLE_WEIGHTS = 1 << 18


@dataclass(frozen=True, slots=True)
class ErrorTrial:
    source: Source
    options: Options
    quantizer: Quantizer
    ids: Sequence[int]
    progress: StageProgress


@dataclass(frozen=True, slots=True)
class Alpha:
    """Nats per token for a relative squared error of 1, by bits, ascending."""

    taken: tuple[tuple[int, float], ...]

    def loss(self, bits: int | None) -> float:
        """Interpolate log α at ``bits``; beyond the ends, the nearest."""
        (few, first), (many, last) = self.taken[0], self.taken[-1]
        if bits is None or bits >= many:
            return last
        if bits <= few:
            return first
        share = (bits - few) / (many - few)
        return math.exp((1 - share) * math.log(first) + share * math.log(last))

    def at_least(self, floor: float) -> "Alpha":
        return Alpha(tuple((bits, max(value, floor)) for bits, value in self.taken))


def alpha_basis(source: Source, ids: Sequence[int]) -> AlphaBasis:
    if not ids:
        return "by kind"
    tokens, weights = min(len(ids), TOKENS), sum(array.size for array in source.weights.values())
    products = tokens * weights * len(REFERENCE_BITS) * sum(1 for _ in packable(source)) / 2
    bearable = products <= (CPU_PRODUCTS if device_kind() == "cpu" else GPU_PRODUCTS)
    return "measured" if bearable and fits(source, tokens) else "guessed"


def find_alphas(basis: AlphaBasis, trial: ErrorTrial, errors: Errors) -> dict[str, Alpha]:
    """Return each tensor's α. Raises ConversionError for non-finite weights."""
    if basis == "measured":
        return _measured(trial, errors)
    source, shares = trial.source, _shares(trial) if basis == "guessed" else {}
    tied, layers = all(part(source, path) != "head" for path in errors), layer_numbers(source.module)
    return {
        path: Alpha(((0, _usual(source, path, tied=tied) * shares.get(layers.get(id(module)), 1.0)),))
        for path, module in packable(source)
    }


def references(packings: Sequence[Packing | None]) -> tuple[Packing, ...]:
    among = [packing for packing in packings if packing is not None and packing.mode == "affine"]

    def nearest(bits: int) -> Packing:
        return min(among, key=lambda each: (abs((each.bits or 0) - bits), abs(each.group_size - REFERENCE_GROUP)))

    return tuple(dict.fromkeys(map(nearest, REFERENCE_BITS))) if among else ()


def packed_type(source: Source, options: Options, path: str) -> mx.Dtype:
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
    kind = part(source, path)
    if kind == "head" or (kind == "embedding" and tied):
        return HEAD
    return next((value for ending, value in KINDS if path.endswith(ending)), 1.0)


def sample(weight: mx.array) -> mx.array:
    step = max(1, min(weight.shape[-2], weight.size // SAMPLE_WEIGHTS))
    return weight[..., ::step, :]


def relative_errors(
    path: str,
    weight: mx.array,
    packings: Sequence[Packing],
    quantizer: Quantizer,
    importance: "np.ndarray | None" = None,
) -> dict[Packing, float]:
    """Return Σ h (w − ŵ)² ÷ Σ h w² of each packing; 0 for zeros. Raises ConversionError if not finite.

    weight: (out, in) or (experts, out, in). importance h: (in,) or (experts, in), or None.
    """
    exact = weight.astype(mx.float32)
    h = mx.ones(1) if importance is None else mx.expand_dims(mx.array(importance, mx.float32), -2)
    whole = _sum(h * mx.square(exact))
    if not math.isfinite(whole):
        raise not_finite(f"{path}.weight")
    errors = {packing: _sum(h * mx.square(coarse(path, weight, packing, quantizer) - exact)) for packing in packings}
    return {packing: error / whole if whole else 0.0 for packing, error in errors.items()}


def coarse(path: str, weight: mx.array, packing: Packing, quantizer: Quantizer) -> mx.array:
    return dequantized(quantizer.pack(path, weight, packing), packing).astype(mx.float32)


def _sum(values: mx.array) -> float:
    found: Any = mx.sum(values).item()
    return float(found)


@dataclass(slots=True)
class _FirstAnswers:
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
    """Reads ``ids`` once when made, with the whole model in float32: check ``fits`` first.

    Raises ConversionError for non-finite weights.
    """

    # float32, since the differences are smaller than half precision's rounding.

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
        weight: mx.array = self._modules[path].weight
        return weight

    def divergence(self, path: str, weight: mx.array) -> float:
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
        """Return log-probabilities (n, vocabulary), replaying the layers before ``first``."""
        self._answers.first = first
        self._answers.calls.clear()
        with attending_uncached():
            logits = self._model(self._ids)[0].astype(mx.float32)
        found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        return found


def peak_bytes(source: Source, tokens: int) -> int:
    text, sizes = text_config(source.config), [array.size for array in source.weights.values()]
    outputs = tokens * int(text.get("hidden_size") or 0) * len(source.module.layers)
    chances = 6 * tokens * int(text.get("vocab_size") or 0)  # two readings, and what comparing them takes
    return FLOAT_BYTES * (sum(sizes) + 3 * max(sizes) + outputs + chances)


def fits(source: Source, tokens: int) -> bool:
    needed, budget = peak_bytes(source, tokens), memory.array_budget()
    if device_kind() != "cpu":
        return budget is not None and needed <= GPU_SHARE * budget
    from tokamac.engine.cpu.layers import MEMORY_SHARE

    total, weights = memory.machine_total(), FLOAT_BYTES * sum(array.size for array in source.weights.values())
    return total is not None and budget is not None and needed <= budget and weights <= MEMORY_SHARE * total


def layer_numbers(model: Any) -> dict[int, int]:
    numbered = reversed(list(enumerate(model.layers)))  # the first layer counts, where several share a module
    return {id(part): number for number, layer in numbered for part in layer.modules()}


def _divergences(exact: mx.array, other: mx.array) -> mx.array:
    """Return KL(exact ‖ other) (n,) of log-probabilities (n, vocabulary)."""
    # Σ p (eᵈ − 1 − d) with d = log q − log p equals Σ p log (p ÷ q), because both add up to 1. No term is negative, so small
    # divergences are not lost among large terms that cancel.
    d = other - exact
    return mx.sum(mx.exp(exact) * (mx.expm1(d) - d), axis=-1)


def _loaded(source: Source) -> Any:
    install_seam()
    model, weights = clone(source.module).eval(), fresh(source)
    for name in list(weights):
        array = weights.pop(name)
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32)
            check_finite(name, array)
        mx.eval(array)
        model.update(tree_unflatten([(name, array)]))
    if device_kind() == "cpu":
        from tokamac.engine.cpu.layers import DenseEmbedding, unpack

        unpack(model)
        for _, module in leaves(model):
            if isinstance(module, DenseEmbedding):
                _multiply_rows(module)
    return model


def _multiply_rows(embedding: "DenseEmbedding") -> None:
    from tokamac.engine.cpu.layers import DenseLinear

    head = DenseLinear(embedding.weight, None)
    override(embedding, as_linear=lambda _, x: head(x))


def _with_weight(module: Any, weight: mx.array) -> nn.Module:
    if device_kind() == "cpu":
        from tokamac.engine.cpu.layers import DenseEmbedding, DenseLinear

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
