"""The search of affine groups: mx.quantize's format, never a larger error, much less of it on the whole, whatever the weights."""

import subprocess
import sys
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.search_weights import DTYPES, KINDS, group_errors, seeded, weights
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.search import Implementation, implementation, search
from tokamac.quant.search.on_mlx import MlxSearch

BITS, SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
packings = st.builds(Packing, st.sampled_from(BITS), st.sampled_from(SIZES))


def both() -> list[Implementation]:
    """The one that is chosen on this device, and MLX's."""
    return [implementation(), MlxSearch()]


def rounded(weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
    return mx.quantize(weight, packing.group_size, packing.bits)


@settings(max_examples=60, deadline=None)
@given(packing=packings, data=st.data())
def test_shapes_and_types_are_those_of_mx_quantize_and_no_group_is_worse(packing, data) -> None:
    weight = data.draw(weights(packing.group_size))
    expected = rounded(weight, packing)
    before = group_errors(weight, expected, packing)
    for each in both():
        found = each.search(weight.reshape(-1, weight.shape[-1]), packing, None)
        found = tuple(part.reshape(like.shape) for part, like in zip(found, expected, strict=True))
        assert [part.dtype for part in found] == [part.dtype for part in expected]
        assert all(np.isfinite(np.asarray(part.astype(mx.float32))).all() for part in found[1:])
        assert (group_errors(weight, found, packing) <= before).all(), each.name


@settings(max_examples=40, deadline=None)
@given(packing=packings, data=st.data())
def test_no_group_is_worse_where_inputs_matter_differently(packing, data) -> None:
    weight = data.draw(weights(packing.group_size))
    importance = data.draw(importances(weight.shape[-1]))
    h = importance.reshape(-1, packing.group_size)
    h = np.where(h.max(axis=1, keepdims=True) > 0, h, 1)
    errors = partial(group_errors, weight, packing=packing, importance=h)
    before = errors(rounded(weight, packing))
    for each in both():
        found = each.search(weight.reshape(-1, weight.shape[-1]), packing, importance[None])
        assert (errors(found) <= before).all(), each.name


@st.composite
def importances(draw, inputs: int) -> np.ndarray:
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    h = generator.lognormal(sigma=draw(st.sampled_from((0.1, 2.0))), size=inputs)
    h[generator.random(inputs) < draw(st.sampled_from((0.0, 0.5, 1.0)))] = 0
    return (h * draw(st.sampled_from((1.0, 1e-30, 1e30)))).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_codes_of_mlx_come_out_where_nothing_better_can_be_found(bits, dtype) -> None:
    steps = (mx.arange(64) * (2**bits - 1) // 63).astype(dtype)  # exactly what the codes can say, in steps of 1
    weight = mx.stack([steps, -steps, steps * 0, steps * 0 + 3])
    for found, expected in zip(search(weight, Packing(bits)), rounded(weight, Packing(bits)), strict=True):
        assert mx.array_equal(found, expected)


@pytest.mark.parametrize("bits", BITS)
def test_words_are_laid_out_as_mlx_does(bits) -> None:
    weight = mx.array(seeded("gaussian", 64, 128))
    words, scales, biases = search(weight, Packing(bits, 32))
    codes = mx.round((weight.reshape(64, -1, 32) - biases[..., None]) / scales[..., None]).reshape(64, -1)
    codes = mx.clip(codes, 0, 2**bits - 1)
    ones = mx.ones_like(scales)
    found = mx.dequantize(words, ones, ones * 0, 32, bits)
    assert mx.mean(found == codes).item() > 0.999  # values between two codes may go to either
    assert mx.abs(found - codes).max().item() <= 1


TARGETS = [(64, 4, 0.82), (64, 3, 0.76), (64, 2, 0.70), (32, 4, 0.76), (64, 5, 0.83), (64, 6, 0.84), (64, 8, 0.84)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "bits", "most"), TARGETS)
def test_much_less_squared_error_than_rounding(kind, size, bits, most) -> None:
    packing = Packing(bits, size)
    for dtype in DTYPES:
        weight = mx.array(seeded(kind, 128, 1024) * 0.02).astype(dtype)
        after = group_errors(weight, search(weight, packing), packing).sum()
        assert after <= most * group_errors(weight, rounded(weight, packing), packing).sum(), dtype


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("weighted", [False, True])
def test_every_implementation_finds_the_same_quality(bits, weighted) -> None:
    packing = Packing(bits, 64)
    weight = mx.array(seeded("student", 64, 1024)).astype(mx.bfloat16)
    h = np.random.default_rng(1).lognormal(size=1024).astype(np.float32) if weighted else np.ones(1024, np.float32)
    one, other = (
        group_errors(
            weight, each.search(weight, packing, h[None] if weighted else None), packing, h.reshape(-1, 64)
        ).sum()
        for each in both()
    )
    assert abs(other / one - 1) < 0.005


def test_importance_lowers_the_error_that_it_weighs() -> None:
    weight, packing = mx.array(seeded("gaussian", 64, 512)), Packing(3)
    h = np.random.default_rng(2).lognormal(sigma=2, size=512).astype(np.float32)
    weighed = partial(group_errors, weight, packing=packing, importance=h.reshape(-1, 64))
    assert weighed(search(weight, packing, h)).sum() < 0.8 * weighed(search(weight, packing)).sum()


def test_a_stack_of_experts_is_searched_expert_by_expert() -> None:
    weight, packing = mx.array(seeded("gaussian", 24, 256)).reshape(3, 8, 256), Packing(4, 32)
    h = np.random.default_rng(3).lognormal(size=(3, 256)).astype(np.float32)
    alone = [search(weight[i], packing, h[i]) for i in range(3)]
    for each, parts in zip(search(weight, packing, h), zip(*alone, strict=True), strict=True):
        assert mx.array_equal(each, mx.stack(list(parts)))


def test_a_large_weight_gives_what_its_pieces_give() -> None:
    weight, packing = mx.random.normal((2049, 512), key=mx.random.key(0)).astype(mx.bfloat16), Packing(4)
    h = np.random.default_rng(4).lognormal(size=512).astype(np.float32)
    pieces = [search(weight[begin : begin + 100], packing, h) for begin in range(0, 2049, 100)]
    for each, parts in zip(search(weight, packing, h), zip(*pieces, strict=True), strict=True):
        assert mx.array_equal(each, mx.concatenate(list(parts)))


def test_a_view_is_read_in_its_own_order() -> None:
    weight = mx.array(seeded("gaussian", 64, 64))
    for each, expected in zip(
        search(weight.T, Packing(4)), search(mx.array(np.array(weight).T), Packing(4)), strict=True
    ):
        assert mx.array_equal(each, expected)


def test_a_group_too_small_for_mlx_is_kept() -> None:
    weight = mx.array(seeded("gaussian", 4, 64) * 1e-9)
    found = group_errors(weight, search(weight, Packing(4)), Packing(4)).sum()
    assert found < 0.01 * float((np.asarray(weight).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize(
    ("weight", "packing", "importance"),
    [
        (mx.zeros((4, 64)), Packing(7), None),
        (mx.zeros((4, 64)), Packing(4, 16), None),
        (mx.zeros((4, 64)), Packing(4, 32, "mxfp4"), None),
        (mx.zeros((4, 96)), Packing(4), None),
        (mx.zeros((4, 64), mx.int32), Packing(4), None),
        (mx.zeros((4, 64)), Packing(4), np.ones(32)),
        (mx.zeros((4, 64)), Packing(4), np.ones((4, 64))),
        (mx.zeros((2, 4, 64)), Packing(4), np.ones((4, 64))),
        (mx.zeros((4, 64)), Packing(4), -np.ones(64)),
        (mx.zeros((4, 64)), Packing(4), np.full(64, np.nan)),
        (mx.zeros((4, 64)), Packing(4), np.full(64, np.inf)),
    ],
)
def test_what_can_not_be_searched_is_refused(weight, packing, importance) -> None:
    with pytest.raises(ValueError, match=r"can't be|does not fit|must be"):
        search(weight, packing, importance)


def test_importing_it_loads_neither_mlx_nor_numba() -> None:
    code = "import sys, tokamac.quant.search; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx.core", "numba", "numpy"} & set(modules)


def test_without_numba_mlx_searches_and_says_so() -> None:
    code = """
import sys
sys.modules["numba"] = None  # as if it were not installed
import mlx.core as mx
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.search import implementation, search
print(implementation().name, *(each.shape for each in search(mx.ones((2, 64)), Packing(4))))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "mlx (2, 8) (2, 1) (2, 1)\n"


def test_numba_searches_where_mlx_computes_on_the_cpu() -> None:
    pytest.importorskip("numba")
    assert implementation().name == ("numba" if mx.default_device() == mx.Device(mx.cpu) else "mlx")


def test_kernels_work_where_nothing_can_be_kept_on_disk() -> None:
    pytest.importorskip("numba")
    from tokamac.quant.search.kernels import compiled

    made: dict = {}
    exec("def twice(x):\n    return 2 * x", made)  # of no file: numba finds no folder for it
    assert compiled(made["twice"])(21) == 42
