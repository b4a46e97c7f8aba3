"""The search of microscaling formats: mx.quantize's format, never a larger error, much less of it on the whole."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.search_weights import DTYPES, KINDS, seeded, weights
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.search import squared_error
from tokamac.quant.search.on_mlx import search_scales

MXFP4, NVFP4 = Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")
TARGETS = {MXFP4: 0.90, NVFP4: 0.83}


def errors(weight, arrays, packing, importance=1.0) -> np.ndarray:
    """Squared errors group by group, in float64."""
    made = np.asarray(mx.dequantize(*arrays, **asdict(packing), dtype=mx.float32)).astype(np.float64)
    squares = (np.asarray(weight.astype(mx.float32)).astype(np.float64) - made) ** 2 * importance
    return np.nan_to_num(squares.reshape(-1, packing.group_size).sum(axis=1), nan=np.inf)


@settings(max_examples=60, deadline=None)
@given(packing=st.sampled_from((MXFP4, NVFP4)), data=st.data())
def test_shapes_and_types_are_those_of_mx_quantize_and_no_group_is_worse(packing, data) -> None:
    weight = data.draw(weights(32))
    expected = mx.quantize(weight, **asdict(packing))
    found = search_scales(weight, packing)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]
    before, after = errors(weight, expected, packing), errors(weight, found, packing)
    noise = 1e-6 * (np.asarray(weight.astype(mx.float32)).astype(np.float64) ** 2).reshape(len(after), -1).max(axis=1)
    assert (after <= before + noise).all()
    assert np.isfinite(after).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", TARGETS, ids=str)
def test_much_less_squared_error_than_rounding(packing, kind) -> None:
    for dtype in DTYPES:
        weight = mx.array(seeded(kind, 64, 1024) * 0.02).astype(dtype)
        before, _ = squared_error(weight, tuple(mx.quantize(weight, **asdict(packing))), packing)
        after, _ = squared_error(weight, search_scales(weight, packing), packing)
        assert after <= TARGETS[packing] * before


def test_importance_of_the_inputs_of_each_expert_is_weighed() -> None:
    weight = mx.array(seeded("gaussian", 32, 256)).reshape(2, 16, 256)
    h = np.random.default_rng(0).lognormal(sigma=2, size=(2, 256)).astype(np.float32)
    plain, weighed = (errors(weight, search_scales(weight, NVFP4, i), NVFP4, h[:, None, :]) for i in (None, h))
    assert weighed.sum() < 0.95 * plain.sum()
    assert (weighed <= plain * (1 + 1e-4)).all()


def test_a_format_that_gains_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no scales worth searching"):
        search_scales(mx.zeros((4, 64)), Packing(8, 32, "mxfp8"))
