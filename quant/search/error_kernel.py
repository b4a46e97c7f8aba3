"""The squared error of affine groups, compiled by numba."""

import numpy as np

from tokamac.quant.search.jit import compiled


@compiled
def squared_error_groups(
    weights: np.ndarray, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> tuple[float, float]:
    """Return Σ (weight − (scale · q + bias))² and Σ weight², in float64 from the difference on, which nothing float32 overflows.

    weights (groups, size) float32; words (groups, size · bits / 32) uint32; scales, biases (groups,) float32.
    """
    mask = np.uint64(2**bits - 1)
    error, total = 0.0, 0.0
    for group in range(weights.shape[0]):
        scale, bias = scales[group], biases[group]
        for i in range(weights.shape[1]):
            word, shift = i * bits // 32, i * bits % 32
            pair = np.uint64(words[group, word])
            if shift + bits > 32:
                pair |= np.uint64(words[group, word + 1]) << np.uint64(32)
            code = np.float32(pair >> np.uint64(shift) & mask)
            value = np.float64(weights[group, i])
            rest = value - np.float64(code * scale + bias)
            error += rest * rest
            total += value * value
    return error, total
