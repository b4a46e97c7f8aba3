"""Peak arithmetic where no table knows it: a large matrix product.

It is what prefill's ceiling is made of, so the best of several products counts, and each is large enough to keep all units
busy. On a CPU this is NumPy's float32 product, which the engine reads prompts with there; on a GPU MLX's half-precision one.
"""

import time
from collections.abc import Callable

from tokamac.engine.device import DeviceKind
from tokamac.engine.limits.metrics import rate

SIDE: dict[DeviceKind, int] = {"cpu": 1536, "cuda": 8192, "metal": 4096}
"""Rows and columns: a product takes tens of milliseconds, far above what starting it costs."""

BUDGET_S = 0.5


def measure_tflops(device: DeviceKind) -> float:
    """Return the best rate of a square matrix product, in 10^12 operations a second."""
    side = SIDE[device]
    multiply = _numpy_product(side) if device == "cpu" else _mlx_product(side)
    operations_per_s = rate(2 * side**3, best_s(multiply, BUDGET_S))
    assert operations_per_s is not None  # a product takes time
    return operations_per_s / 1e12


def best_s(run: Callable[[], object], budget_s: float) -> float:
    """Return the shortest time of repeated runs within a budget, in seconds; the first only warms up."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    while (began := time.perf_counter()) < end or best == float("inf"):
        run()
        best = min(best, time.perf_counter() - began)
    return best


def _numpy_product(side: int) -> Callable[[], object]:
    import numpy as np

    values = np.full((side, side), 0.5, dtype=np.float32)
    return lambda: values @ values


def _mlx_product(side: int) -> Callable[[], object]:
    """Never run on a plain CPU."""
    import mlx.core as mx

    values = mx.full((side, side), 0.5, dtype=mx.bfloat16)
    mx.eval(values)
    return lambda: mx.eval(values @ values)
