"""Weights to pack, ordinary and not, and the error of a packed form, group by group, in float64."""

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from tokamac.engine.perf.config_cost import Packing

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
KINDS = ("gaussian", "student", "laplace")


def seeded(kind: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Return (rows, inputs) float32 of a distribution; "student" has 5 degrees of freedom."""
    generator = np.random.default_rng(seed)
    shape = (rows, inputs)
    values = {
        "gaussian": lambda: generator.standard_normal(shape),
        "student": lambda: generator.standard_t(5, shape),
        "laplace": lambda: generator.laplace(size=shape),
    }
    return values[kind]().astype(np.float32)


@st.composite
def weights(draw: st.DrawFn, size: int) -> mx.array:
    """Draw a weight (…, in) that groups of ``size`` divide, with all that is awkward in it."""
    lead = draw(st.sampled_from(((1,), (3,), (33,), (2, 5), (3, 1))))
    dtype = draw(st.sampled_from(DTYPES))
    values = seeded(
        draw(st.sampled_from(KINDS)), int(np.prod(lead)), size * draw(st.integers(1, 3)), draw(st.integers(0, 99))
    )
    largest = float(mx.finfo(dtype).max)
    scale = draw(st.sampled_from((1.0, 0.02, 1e-6, 1e-30, 3e-39, 1e-7, largest / 8, largest)))
    values = np.clip(values.astype(np.float64) * scale, -largest, largest) + draw(
        st.sampled_from((0.0, scale, -20 * scale))
    )
    groups = values.reshape(-1, size)
    for group, change in draw(
        st.dictionaries(st.integers(0, len(groups) - 1), st.sampled_from(CHANGES), max_size=4)
    ).items():
        change(groups[group], scale)
    values = np.clip(groups.reshape(*lead, -1), -largest, largest).astype(np.float32)
    return mx.array(values).astype(dtype)


def _zero(group: np.ndarray, scale: float) -> None:
    group[:] = 0


def _constant(group: np.ndarray, scale: float) -> None:
    group[:] = group[0]


def _outlier(group: np.ndarray, scale: float) -> None:
    group[3] = 1000 * scale


def _two_values(group: np.ndarray, scale: float) -> None:
    group[:] = np.where(group > 0, scale, -scale / 3)


def _tiny(group: np.ndarray, scale: float) -> None:
    group *= 1e-38 / scale


CHANGES = (_zero, _constant, _outlier, _two_values, _tiny)


def group_errors(
    weight: mx.array, arrays: tuple[mx.array, ...], packing: Packing, importance: np.ndarray | None = None
) -> np.ndarray:
    """Return Σ h · (w − packed)² of every group, in float64; infinite where the packed form is not finite.

    The codes are MLX's to decode; scale · q + bias is taken exactly. importance: h, (groups in a row, size).
    """
    words, scales, biases = (each.reshape(-1, each.shape[-1]) for each in arrays)
    ones = mx.ones(scales.shape, mx.float32)
    codes = np.asarray(mx.dequantize(words, ones, ones * 0, packing.group_size, packing.bits))
    scale, bias = (np.asarray(each.astype(mx.float32)).astype(np.float64).reshape(-1, 1) for each in (scales, biases))
    exact = np.asarray(weight.astype(mx.float32)).astype(np.float64).reshape(-1, packing.group_size)
    with np.errstate(invalid="ignore"):
        squares = (exact - (codes.reshape(exact.shape).astype(np.float64) * scale + bias)) ** 2
    if importance is not None:
        squares = (squares.reshape(-1, *importance.shape) * importance.astype(np.float64)).reshape(exact.shape)
    return np.nan_to_num(squares.sum(axis=1), nan=np.inf)
