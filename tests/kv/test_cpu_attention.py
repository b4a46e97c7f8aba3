"""NumPy's attention says what MLX's does: masks of every kind, shared heads, sinks."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine.kv import attention


def arrays(heads: int, repeats: int, count: int, total: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    random = np.random.default_rng(seed)
    shapes = ((1, heads * repeats, count, 32), (1, heads, total, 32), (1, heads, total, 16))
    return tuple(mx.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes)  # type: ignore[return-value]


def difference(a: mx.array, b: mx.array) -> float:
    return float(mx.max(mx.abs(a - b)).item())


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 20),
    st.sampled_from(["causal", "bool", "add", None]),
)
def test_it_agrees_with_the_fused_kernel(heads: int, repeats: int, count: int, before: int, kind: str | None) -> None:
    queries, keys, values = arrays(heads, repeats, count, before + count)
    mask: mx.array | str | None = kind
    if kind == "bool":
        mask = mx.tri(count, before + count, before, dtype=mx.bool_)
    elif kind == "add":
        mask = mx.random.normal((count, before + count), key=mx.random.key(3))
    ours = attention.attend_in_numpy(queries, keys, values, scale=0.2, mask=mask, sinks=None)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    assert difference(ours, theirs) < 1e-5


def test_sinks_take_weight_and_give_nothing() -> None:
    queries, keys, values = arrays(2, 2, 5, 9)
    sinks = mx.array([0.5, -1.0, 3.0, 0.0])
    ours = attention.attend_in_numpy(queries, keys, values, scale=0.2, mask="causal", sinks=sinks)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask="causal", sinks=sinks)
    assert difference(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("count", "total", "dtype", "worth"),
    [
        (256, 4096, mx.float32, True),
        (1, 40_000, mx.float32, False),
        (8, 64, mx.float32, False),
        (256, 4096, mx.float16, False),
    ],
)
def test_only_large_float32_work_on_a_cpu_goes_there(count: int, total: int, dtype: mx.Dtype, worth: bool) -> None:
    queries, keys = mx.zeros((1, 2, count, 8), dtype), mx.zeros((1, 2, total, 8), dtype)
    assert attention.prefers_numpy(queries, keys) is (worth and mx.default_device() == mx.Device(mx.cpu))
