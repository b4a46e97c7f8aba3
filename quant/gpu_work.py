"""How much one product of a calibration may ask of a slow Apple GPU.

A calibration text goes through a layer as thousands of rows at once: on an M1, one product of 16,384 rows by a large matrix takes
about a second. While a display is on, macOS ends a command that keeps the GPU too long (ml-explore/mlx#3267), and the conversion
with it. So rows are multiplied some at a time there, each piece evaluated before the next. None of this has run on a Mac yet: the
times follow from the chip's peak.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from tokamac.engine.device import DeviceKind, device_kind

LONGEST_S = 0.25
"""What one product may take, about: a display is then redrawn some times a second."""

REACHED = 0.5
"""The share of a chip's half-precision peak that large products reach at least, in float32 too."""

SLOWEST_TFLOPS = 2.32
"""Of an M1 with seven GPU cores: assumed of an Apple GPU that the table of chips does not know."""

STEP = 256
"""Rows of a piece are a multiple of it, so that kernels' tiles are full."""


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


def rows_here(row_operations: int) -> int | None:
    """Return ``rows_at_once`` for MLX's default device."""
    kind = device_kind()
    return rows_at_once(kind, _peak_tflops() if kind == "metal" else None, row_operations)


@cache
def _peak_tflops() -> float | None:
    from tokamac.engine.limits.hardware import detect

    return detect().fp16_tflops


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
