"""The squared error of packed weights: any form, any type, any size, the same on every device."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.search_weights import DTYPES, group_errors, seeded, weights
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.search import squared_error
from tokamac.quant.search.on_mlx import unpacked_error

BITS, SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MODES = (Packing(4, 32, "mxfp4"), Packing(8, 32, "mxfp8"), Packing(4, 16, "nvfp4"))


def packed(weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(weight, **asdict(packing)))


def squares(weight: mx.array) -> float:
    return float((np.asarray(weight.astype(mx.float32)).astype(np.float64) ** 2).sum())


def test_a_case_worked_by_hand() -> None:
    weight = mx.array([[1.0, 2.0] + [0.0] * 62])
    words = mx.array([[0x12] + [0] * 7], dtype=mx.uint32)  # codes 2, 1, 0, …
    error, total = squared_error(weight, (words, mx.array([[0.5]]), mx.array([[0.25]])), Packing(4))
    assert error == 0.25**2 + 1.25**2 + 62 * 0.25**2
    assert total == 5


@settings(max_examples=60, deadline=None)
@given(packing=st.builds(Packing, st.sampled_from(BITS), st.sampled_from(SIZES)), data=st.data())
def test_affine_groups_agree_with_float64(packing, data) -> None:
    weight = data.draw(weights(packing.group_size))
    arrays = packed(weight, packing)
    expected = group_errors(weight, arrays, packing).sum()
    error, total = squared_error(weight, arrays, packing)
    if np.isfinite(expected):
        noise = 1e-6 * max(expected, 1e-9 * squares(weight))
        assert abs(error - expected) <= noise + 1e-4 * expected
    else:
        assert not np.isfinite(error)
    assert total == pytest.approx(squares(weight), rel=1e-6, abs=1e-80)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [*(Packing(b, 64) for b in BITS), *MODES], ids=str)
def test_any_form_agrees_with_unpacking_all_of_it(packing, dtype) -> None:
    weight = mx.array(seeded("student", 24, 512) * 0.02).astype(dtype).reshape(3, 8, 512)
    words, scales, *biases = packed(weight, packing)
    wide = (each.astype(mx.float32) for each in (scales, *biases)) if biases else (scales,)
    made = np.asarray(mx.dequantize(words, *wide, **asdict(packing), dtype=mx.float32)).astype(np.float64)
    expected = ((np.asarray(weight.astype(mx.float32)).astype(np.float64) - made) ** 2).sum()
    for measured in (squared_error, by_unpacking):
        error, total = measured(weight, (words, scales, *biases), packing)
        assert error == pytest.approx(expected, rel=1e-5)
        assert total == pytest.approx(squares(weight), rel=1e-6)


def by_unpacking(weight: mx.array, arrays: tuple[mx.array, ...], packing: Packing) -> tuple[float, float]:
    """The way that GPUs take."""
    return unpacked_error(weight.reshape(-1, weight.shape[-1]), [a.reshape(-1, a.shape[-1]) for a in arrays], packing)


@pytest.mark.parametrize("packing", [Packing(4, 64), MODES[0]], ids=str)
def test_a_large_weight_is_the_sum_of_its_pieces(packing) -> None:
    weight = mx.random.normal((2049, 1024), key=mx.random.key(0)).astype(mx.bfloat16)
    arrays = packed(weight, packing)
    pieces = [
        squared_error(weight[rows], tuple(each[rows] for each in arrays), packing)
        for rows in (slice(0, 1000), slice(1000, 2049))
    ]
    assert squared_error(weight, arrays, packing) == pytest.approx(tuple(np.sum(pieces, axis=0)), rel=1e-6)


def test_a_column_of_zeros_has_none() -> None:
    weight = mx.zeros((4, 64))
    assert squared_error(weight, packed(weight, Packing(4)), Packing(4)) == (0, 0)
    assert by_unpacking(weight, packed(weight, Packing(4)), Packing(4)) == (0, 0)
