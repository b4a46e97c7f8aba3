"""Rows rounded to whole numbers: products against float64, bit by bit across rows and threads, and when a model is computed so."""

import itertools
import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if sys.platform != "linux":
    pytest.skip("these kernels are a plain CPU's", allow_module_level=True)

from tests.engine.model.test_cpu import packed, rows_of, unpacked
from tokamac.engine.model.cpu import products
from tokamac.engine.model.cpu.byte_tiles import can_round
from tokamac.engine.model.cpu.packed import matrix_of
from tokamac.engine.model.cpu.pool import Pool
from tokamac.engine.model.cpu.products import PackedMatrix
from tokamac.engine.model.cpu.tiles import FORMATS, FP8, WeightFormat

if not can_round(WeightFormat(4)):
    pytest.skip("this CPU does not multiply bytes", allow_module_level=True)

WIDTHS = [format.bits for format in FORMATS if can_round(format)]
STORED = [*((bits, mx.bfloat16) for bits in WIDTHS), (4, mx.float32), (4, mx.float16)]


def rounding_matrix(layer: Any) -> PackedMatrix:
    return replace(matrix_of(layer), rounds=True)


def rounded(x: np.ndarray, group_size: int) -> np.ndarray:
    """Return what rows stand for once they are rounded, in float64."""
    groups = x.astype(np.float64).reshape(len(x), -1, group_size)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 127
    whole = np.rint(np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0))
    return np.asarray((whole * scales).reshape(x.shape))


@settings(deadline=None, max_examples=60)
@given(
    stored=st.sampled_from(STORED),
    group=st.sampled_from([32, 64, 128]),
    outs=st.integers(1, 41),
    groups=st.integers(1, 19),
    rows=st.integers(1, 23),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 99),
)
def test_the_error_is_that_of_half_a_step_of_a_groups_scale(  # noqa: PLR0917  # drawn by name
    stored: tuple[int, mx.Dtype], group: int, outs: int, groups: int, rows: int, spread: float, seed: int
) -> None:
    bits, dtype = stored
    layer = packed(outs, groups * group, (bits, group, "affine"), dtype, seed=seed)
    x = rows_of(rows, groups * group, seed=seed) * np.float32(2.0**spread)
    x[0, :group] = 0
    found, weights = rounding_matrix(layer).multiply(x), unpacked(layer)
    steps = np.repeat(np.abs(x).reshape(rows, groups, group).max(axis=-1) / 127, group, axis=-1).astype(np.float64)
    bound = (steps / 2) @ np.abs(weights).T * 1.001
    # Whole numbers are summed exactly; what is rounded are the sums over groups, with and without biases.
    size = (
        np.abs(x).astype(np.float64) @ np.abs(weights).T + np.abs(x).sum(axis=1, keepdims=True) * np.abs(weights).max()
    )
    assert (np.abs(found - x.astype(np.float64) @ weights.T) <= bound + 2e-6 * size).all()
    assert (np.abs(found - rounded(x, group) @ weights.T) <= 0.02 * bound + 2e-6 * size).all()


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from(WIDTHS),
    group=st.sampled_from([32, 64, 128]),
    outs=st.integers(1, 41),
    groups=st.integers(1, 19),
    rows=st.integers(1, 23),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_bits_alone_and_among_others(  # noqa: PLR0917  # drawn by name
    bits: int, group: int, outs: int, groups: int, rows: int, seed: int
) -> None:
    layer = packed(outs, groups * group, (bits, group, "affine"), mx.bfloat16, seed=seed)
    matrix, x = rounding_matrix(layer), rows_of(rows, groups * group, seed=seed)
    together = matrix.multiply(x)
    for row in range(rows):
        assert np.array_equal(matrix.multiply(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_threads_and_pieces_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = rounding_matrix(packed(1030, 256, (4, 64, "affine"))), rows_of(rows, 256)
    found = matrix.multiply(x)
    monkeypatch.setattr(products, "shares", lambda rows, outs, columns, threads: (-(-outs // 4), 1))
    for threads in (1, 2, 5):
        pool = Pool(threads)
        monkeypatch.setattr(products, "POOL", pool)
        for _ in range(20):
            assert np.array_equal(matrix.multiply(x), found)
        pool.end()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_a_row_none_and_no_other(value: float) -> None:
    matrix, x = rounding_matrix(packed(20, 256, (4, 64, "affine"))), rows_of(3, 256)
    clean = matrix.multiply(x)
    for at in (0, 70, 255):
        spoiled = x.copy()
        spoiled[1, at] = value
        found = matrix.multiply(spoiled)
        assert np.isnan(found[1]).all()
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    matrix = rounding_matrix(packed(20, 128, (8, 64, "affine")))
    assert not matrix.multiply(np.full((1, 128), 2.0**-125, np.float32)).any()


def test_matrices_that_take_the_same_rows_say_so() -> None:
    four, other, eight = (packed(outs, 256, (bits, 64, "affine")) for outs, bits in ((8, 4), (12, 4), (8, 8)))
    pairs = itertools.product((four, other, eight), repeat=2)
    same = [rounding_matrix(a).preparation == rounding_matrix(b).preparation for a, b in pairs]
    assert same == [True, True, False, True, True, False, False, False, True]
    assert matrix_of(four).preparation == matrix_of(other).preparation != rounding_matrix(four).preparation
    assert matrix_of(eight).preparation is None


def test_other_numbers_are_not_rounded() -> None:
    assert not can_round(WeightFormat(8, FP8))
    with pytest.raises(AssertionError):
        rounding_matrix(packed(8, 64, (8, 32, "mxfp8")))
