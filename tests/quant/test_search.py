"""The search of packed groups: mx.quantize's format, never a larger error, whatever the weights, blocks and streams."""

import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families import crossed
from tests.quant.models import make_source
from tokamac.engine.device import DeviceKind
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import conversion, convert
from tokamac.quant import packing as methods
from tokamac.quant.conversion import POOL_BYTES, pool_bytes
from tokamac.quant.search import Implementation, implementation, on_mlx, search, squared_error
from tokamac.quant.search.on_mlx import LARGEST, SMALLEST, MlxSearch, block_weights, search_scales, unpacked_error

# Weights to pack, ordinary and not, and the error of a packed form, group by group, in float64.

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


# The search of affine groups: mx.quantize's format, never a larger error, much less of it on the whole, whatever
# the weights.

BITS, SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
packings = st.builds(Packing, st.sampled_from(BITS), st.sampled_from(SIZES))


def both() -> list[Implementation]:
    """The one that is chosen on this device, and MLX's."""
    return [implementation(), MlxSearch()]


def rounded(weight: mx.array, packing: Packing) -> tuple[mx.array, ...]:
    return mx.quantize(weight, packing.group_size, packing.bits)


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
        (mx.zeros((4, 64)), Packing(7), None), (mx.zeros((4, 64)), Packing(4, 16), None),
        (mx.zeros((4, 64)), Packing(4, 32, "mxfp4"), None), (mx.zeros((4, 96)), Packing(4), None),
        (mx.zeros((4, 64), mx.int32), Packing(4), None), (mx.zeros((4, 64)), Packing(4), np.ones(32)),
        (mx.zeros((4, 64)), Packing(4), np.ones((4, 64))), (mx.zeros((2, 4, 64)), Packing(4), np.ones((4, 64))),
        (mx.zeros((4, 64)), Packing(4), -np.ones(64)), (mx.zeros((4, 64)), Packing(4), np.full(64, np.nan)),
        (mx.zeros((4, 64)), Packing(4), np.full(64, np.inf)),
    ],
)  # fmt: skip
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


# The squared error of packed weights: any form, any type, any size, the same on every device.

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


# The search of microscaling formats: mx.quantize's format, never a larger error, much less of it on the whole.

MXFP4, NVFP4 = Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")
MICROSCALING_TARGETS = {MXFP4: 0.90, NVFP4: 0.83}


def errors(weight, arrays, packing, importance=1.0) -> np.ndarray:
    """Squared errors group by group, in float64."""
    made = np.asarray(mx.dequantize(*arrays, **asdict(packing), dtype=mx.float32)).astype(np.float64)
    squares = (np.asarray(weight.astype(mx.float32)).astype(np.float64) - made) ** 2 * importance
    return np.nan_to_num(squares.reshape(-1, packing.group_size).sum(axis=1), nan=np.inf)


@settings(max_examples=60, deadline=None)
@given(packing=st.sampled_from((MXFP4, NVFP4)), data=st.data())
def test_microscaling_has_the_form_of_mx_quantize_and_no_group_is_worse(packing, data) -> None:
    weight = data.draw(weights(32))
    expected = mx.quantize(weight, **asdict(packing))
    found = search_scales(weight, packing)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]
    before, after = errors(weight, expected, packing), errors(weight, found, packing)
    noise = 1e-6 * (np.asarray(weight.astype(mx.float32)).astype(np.float64) ** 2).reshape(len(after), -1).max(axis=1)
    assert (after <= before + noise).all()
    assert np.isfinite(after).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", MICROSCALING_TARGETS, ids=str)
def test_microscaling_has_much_less_squared_error_than_rounding(packing, kind) -> None:
    for dtype in DTYPES:
        weight = mx.array(seeded(kind, 64, 1024) * 0.02).astype(dtype)
        before, _ = squared_error(weight, tuple(mx.quantize(weight, **asdict(packing))), packing)
        after, _ = squared_error(weight, search_scales(weight, packing), packing)
        assert after <= MICROSCALING_TARGETS[packing] * before


def test_importance_of_the_inputs_of_each_expert_is_weighed() -> None:
    weight = mx.array(seeded("gaussian", 32, 256)).reshape(2, 16, 256)
    h = np.random.default_rng(0).lognormal(sigma=2, size=(2, 256)).astype(np.float32)
    plain, weighed = (errors(weight, search_scales(weight, NVFP4, i), NVFP4, h[:, None, :]) for i in (None, h))
    assert weighed.sum() < 0.95 * plain.sum()
    assert (weighed <= plain * (1 + 1e-4)).all()


def test_a_format_that_gains_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no scales worth searching"):
        search_scales(mx.zeros((4, 64)), Packing(8, 32, "mxfp8"))


# Rounding in blocks, on several streams at once: bit for bit what mx.quantize makes of the whole weight.

affine = st.builds(Packing, st.sampled_from((2, 3, 4, 5, 6, 8)), st.sampled_from((32, 64, 128)))
microscaling = st.sampled_from((Packing(4, 32, "mxfp4"), Packing(8, 32, "mxfp8"), Packing(4, 16, "nvfp4")))


@pytest.fixture(scope="module")
def lanes():
    return tuple(mx.new_thread_local_stream(mx.default_device()) for _ in range(3))


@st.composite
def weights_round(draw, group):
    """Draw a weight (rows, in) or (experts, rows, in): contiguous, or a view of one that is transposed."""
    inputs, height = group * draw(st.integers(1, 3)), draw(st.integers(3, 23))
    if inputs % 32:
        height *= 2  # MLX on a CPU packs 32 values at a time, and takes no odd number of rows of 16
    shape = (*draw(st.sampled_from(((), (2,), (3,)))), height, inputs)
    key, scale = mx.random.key(draw(st.integers(0, 99))), draw(st.sampled_from((1e-6, 0.02, 50)))
    if draw(st.booleans()):
        made = mx.random.normal((*shape[:-2], shape[-1], shape[-2]), key=key).swapaxes(-1, -2)
    else:
        made = mx.random.normal(shape, key=key)
    return (made * scale).astype(draw(st.sampled_from(DTYPES)))


def same_bits(one, other):
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and mx.array_equal(*(x.view(mx.uint8) for x in (one, other)))
    )


@settings(max_examples=100, deadline=None)
@given(packing=st.one_of(affine, microscaling), streams=st.integers(1, 3), data=st.data())
def test_blocks_give_the_bits_of_the_whole(lanes, packing, streams, data) -> None:
    weight = data.draw(weights_round(packing.group_size))
    rows = weight.size // weight.shape[-1]
    step = data.draw(st.integers(1, rows - 2))  # rows in a block: never all of them
    blocks, quantize = [], mx.quantize

    def counted(block, *arguments, **options):
        blocks.append(block.shape[0])
        return quantize(block, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "BLOCK_WEIGHTS", step * weight.shape[-1] * streams)
        patch.setattr(methods, "_lanes", lambda: lanes[:streams])
        patch.setattr(mx, "quantize", counted)
        found = methods.Round().pack("path", weight, packing)
    expected = mx.quantize(weight, **asdict(packing))
    assert sum(blocks) == rows
    assert all(block % 2 == 0 and block - step in {0, 1} for block in blocks[:-1])
    assert blocks[-1] <= step + 1
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_what_fits_into_one_block_is_rounded_at_once() -> None:
    weight = mx.random.normal((2, 8, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    found = methods.Round().pack("path", weight, Packing(4, 32))
    assert all(same_bits(*pair) for pair in zip(found, mx.quantize(weight, 32, 4), strict=True))


def test_on_a_cpu_there_is_a_stream_for_each_core_and_no_two_alike() -> None:
    found = methods._lanes()
    assert len(found) >= 1
    assert len({id(lane) for lane in found}) == len(found)
    assert methods._lanes() is found


# What a GPU works on at a time and what its pool may keep: bounded by its memory, and never seen in the result.

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "memory", "weight_bytes", "weights"),
    [
        ("cpu", 64 * GIB, 80, SMALLEST), ("metal", None, 80, SMALLEST), ("metal", 8 * GIB, 80, 1 << 23),
        ("metal", 16 * GIB, 80, 1 << 24), ("metal", 8 * GIB, 140, 1 << 22), ("metal", 512 * GIB, 80, LARGEST),
        ("cuda", 1 * GIB, 140, SMALLEST),
    ],
)  # fmt: skip
def test_a_block_grows_with_memory(kind: DeviceKind, memory: int | None, weight_bytes: int, weights: int) -> None:
    assert block_weights(kind, memory, weight_bytes) == weights
    if memory is not None and weights > SMALLEST:
        assert weights * weight_bytes <= memory / on_mlx.PART_OF_MEMORY


@pytest.mark.parametrize(
    ("packing", "importance"),
    crossed(
        [Packing(4, 64), Packing(3, 32), Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")],
        [(1, 128), None, (3, 128)],
    ),
)
def test_the_size_of_a_block_changes_no_bit(
    packing: Packing, importance: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(11)
    weight = mx.random.normal((3 * 41, 128)).astype(mx.bfloat16)
    known = None if importance is None else np.random.default_rng(5).random(importance, dtype=np.float32)
    found = []
    for block in (128, 7 * 128, 1 << 12, LARGEST):
        monkeypatch.setattr(on_mlx, "block_here", lambda _, block=block: block)
        if packing.mode == "affine":
            arrays = MlxSearch().search(weight, packing, known)
        else:
            stack = weight.reshape(3, 41, 128)
            given = known if known is None or len(known) == 3 else known[0]
            arrays = tuple(part.reshape(3 * 41, -1) for part in search_scales(stack, packing, given))
        found.append(
            ([np.asarray(each.view(mx.uint8)) for each in arrays], on_mlx.unpacked_error(weight, arrays, packing))
        )
    first, errors = found[0]
    for arrays, measured in found[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(first, arrays, strict=True))
        assert measured == pytest.approx(errors, rel=1e-6)  # squares are added up in another order


def test_a_cpu_keeps_no_pool_and_a_gpu_a_bounded_one() -> None:
    assert pool_bytes("cpu", 64 * GIB) == 0
    assert pool_bytes("metal", 8 * GIB) == GIB
    assert pool_bytes("metal", 64 * GIB) == pool_bytes("cuda", None) == POOL_BYTES == 2 * GIB


def test_what_a_tensor_left_is_gone_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "device_kind", lambda: "metal")
    limits, kept, source = set[int](), set[int](), make_source(tmp_path, "llama")
    before = mx.set_cache_limit(POOL_BYTES)
    mx.set_cache_limit(before)

    def progress(_: object) -> None:
        kept.add(mx.get_cache_memory())
        limits.add(limit := mx.set_cache_limit(0))
        mx.set_cache_limit(limit)

    convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
    assert limits == {pool_bytes("metal", conversion.device_total())}
    assert kept == {0}
    assert mx.set_cache_limit(before) == before
