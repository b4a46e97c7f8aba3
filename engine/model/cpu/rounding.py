"""What rounding a model's rows to whole numbers (byte_tiles.py) adds to its answers' error, beside what its packing costs.

Both are measured on the model itself, over a short text, in nats a token from what it computes exactly:

    added      KL(exact ‖ with rounded rows)
    packing    KL(exact ‖ with noise in each product, as much as rounding its weights to their steps made)

The weights that were packed are not there to compare with, so noise stands for them: an error spread evenly over a step, in each
weight, is in a product one with the variance scale² ÷ 12 · |x|², summed over its groups. Weights that were rounded more cleverly
lost less; what embeddings and other packings lost is left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from ..head import asking_for_logits
from ..rounding_cost import RoundingCost
from .byte_tiles import can_round
from .packed import PackedLayer
from .products import Floats, PackedMatrix, Words

TOKENS = 32
"""Of the text. Both figures are squares of errors, so their quotient needs few."""

TEXT = """A river begins where water collects: a spring in the hills, the edge of a melting field of snow, or a marsh that fills \
after rain. Small streams join, and each makes the next one wider. Where the land is steep the water cuts a valley; where it is \
flat, it slows, bends, and leaves the sand that it carried. In 1885 nearly 40 mills stood along these banks."""


def round_rows(model: nn.Module, *, rounds: bool) -> bool:
    """Have products with the packed weights of ``model`` round their rows, or not. Returns whether any can."""
    found = list(_roundable(model))
    for module in found:
        module._matrix = replace(module._matrix, rounds=rounds)
    return bool(found)


def rounds_rows(model: nn.Module) -> bool:
    """Return whether any of them rounds its rows."""
    return any(module._matrix.rounds for module in _roundable(model))


def measure_cost(model: nn.Module, ids: Sequence[int]) -> RoundingCost | None:
    """Return what rounding costs a model whose products are exact, over a text of ``ids``; None where logits are no numbers.

    The same model gives the same figures: the noise is seeded, and no product depends on threads.
    """
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
    """Products with weights that have an error of up to half a step, as far as it can be told from outside."""

    def __init__(self, module: Any, random: np.random.Generator) -> None:
        self.exact: PackedMatrix = module._matrix
        self._scales, self._random = module.scales, random

    def multiply(self, x: Floats) -> Floats:
        """As PackedMatrix.multiply."""
        return self._with_noise(self.exact.multiply(x), self._sizes(x), self._scales)

    def multiply_chosen(self, x: Floats, rows: Words, parts: Words, outs: int) -> Floats:
        """As PackedMatrix.multiply_chosen."""
        y, sizes = self.exact.multiply_chosen(x, rows, parts, outs), self._sizes(x)[rows]
        for part in np.unique(parts):
            at = parts == part
            y[at] = self._with_noise(y[at], sizes[at], self._scales[int(part)])
        return y

    def _sizes(self, x: Floats) -> Floats:
        """Return the squares of rows, summed over each group: (N, groups)."""
        return np.asarray(np.square(x).reshape(len(x), -1, self.exact.group_size).sum(axis=-1))

    def _with_noise(self, y: Floats, sizes: Floats, scales: mx.array) -> Floats:
        """scales (out, groups)."""
        variances = np.square(np.asarray(scales.astype(mx.float32))) / np.float32(12)
        noise = self._random.standard_normal(y.shape, np.float32)
        return np.asarray(y + np.sqrt(sizes @ variances.T) * noise, np.float32)


def _log_probabilities(model: nn.Module, ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return log-probabilities (n, vocabulary) of what follows each of ``ids``."""
    from mlx_lm.models.cache import make_prompt_cache

    with asking_for_logits():
        logits = np.asarray(
            model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0].astype(mx.float32), np.float64
        )
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def _divergence(of: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the mean KL divergence in nats."""
    return float((np.exp(of) * (of - other)).sum(axis=-1).mean())
