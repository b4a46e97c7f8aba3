"""How far a tensor's packings are from it: the relative squared error of each, measured on some of its rows.

Σ h (w − ŵ)² ÷ Σ h w²    h: the mean squared input of a weight's channel, where it is known; else 1
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from tokamac.engine.limits.config_cost import Packing
from tokamac.quant.finite import not_finite
from tokamac.quant.method import Quantizer

if TYPE_CHECKING:
    import numpy as np

SAMPLE_WEIGHTS = 1 << 18
"""Packed of each tensor, in whole rows, evenly spread: rows of a matrix are alike enough to know the error to about a per cent."""


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
    """Return the relative squared error of each packing; 0 of a tensor that is all zeros.

    weight: (out, in), or (experts, out, in), of the type it will be packed in. importance: h, finite, (in,) or (experts, in).
    Raises ConversionError for weights that are not finite.
    """
    exact = weight.astype(mx.float32)
    weighed = mx.ones(1) if importance is None else mx.expand_dims(mx.array(importance, mx.float32), -2)
    whole = _sum(weighed * mx.square(exact))
    if not math.isfinite(whole):
        raise not_finite(f"{path}.weight")
    found = {}
    for packing in packings:
        error = _sum(weighed * mx.square(coarse(path, weight, packing, quantizer) - exact))
        found[packing] = error / whole if whole else 0.0
    return found


def coarse(path: str, weight: mx.array, packing: Packing, quantizer: Quantizer) -> mx.array:
    """Return what ``weight`` is worth once it is packed: (…, out, in) float32."""
    words, scales, *biases = quantizer.pack(path, weight, packing)
    made: mx.array = mx.dequantize(words, scales, biases[0] if biases else None, **asdict(packing))
    return made.astype(mx.float32)


def _sum(values: mx.array) -> float:
    found: Any = mx.sum(values).item()
    return float(found)
