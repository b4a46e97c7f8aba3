"""The squared error of affine groups, compiled by numba."""

import numpy as np

from tokamac.quant.search.jit import compiled

LANES = 8
"""Sums that run side by side: an addition need not wait for the one before, and all sizes of groups are multiples of it."""


@compiled
def squared_error_groups(
    weights: np.ndarray, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> tuple[float, float]:
    """Return Σ (weight − (scale · q + bias))² and Σ weight², in float64 from the difference on, which nothing float32 overflows.

    weights (groups, size) float32; words (groups, size · bits / 32) uint32; scales, biases (groups,) float32.
    """
    mask = np.uint64(2**bits - 1)
    error, total = np.zeros(LANES), np.zeros(LANES)
    codes = np.empty(weights.shape[1], np.float32)
    for group in range(weights.shape[0]):
        if 32 % bits == 0:
            each = 32 // bits
            for word in range(words.shape[1]):
                held = words[group, word]
                for i in range(each):
                    codes[word * each + i] = np.float32(held >> np.uint32(i * bits) & np.uint32(mask))
        else:
            for i in range(weights.shape[1]):
                word, shift = i * bits // 32, i * bits % 32
                pair = np.uint64(words[group, word])
                if shift + bits > 32:
                    pair |= np.uint64(words[group, word + 1]) << np.uint64(32)
                codes[i] = np.float32(pair >> np.uint64(shift) & mask)
        scale, bias = scales[group], biases[group]
        for i in range(0, weights.shape[1], LANES):
            for lane in range(LANES):
                value = np.float64(weights[group, i + lane])
                rest = value - np.float64(codes[i + lane] * scale + bias)
                error[lane] += rest * rest
                total[lane] += value * value
    return error.sum(), total.sum()
