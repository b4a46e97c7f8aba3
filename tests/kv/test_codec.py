"""What a codec writes down can be read back, multiplied as it lies, and weighed to the byte."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.models import codec, largest_difference
from tokamac.engine import OptionError
from tokamac.engine.kv.codec import AFFINE_BITS, Affine, Plain, rotation_block
from tokamac.engine.options import bytes_per_value, group_for

DIMS = (32, 64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("bits", [*AFFINE_BITS, 16])
@pytest.mark.parametrize("rotate", [False, True])
def test_products_with_packed_data_equal_products_with_decoded_data(bits: int, rotate: bool) -> None:
    coded = codec(bits, 32, rotated_dim=96 if rotate else None)
    x = mx.random.normal((1, 2, 40, 96), key=mx.random.key(1))
    queries = mx.random.normal((1, 2, 3, 96), key=mx.random.key(2))
    weights = mx.softmax(mx.random.normal((1, 2, 3, 40), key=mx.random.key(3)), axis=-1)
    encoded = coded.encode(x)
    decoded = coded.decode(encoded)
    assert largest_difference(coded.dot(queries, encoded), queries @ decoded.swapaxes(-1, -2)) < 1e-4
    assert largest_difference(coded.mix(weights, encoded), weights @ decoded) < 1e-5


@given(dim=st.sampled_from(DIMS), rotate=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_more_bits_are_never_farther_off(dim: int, rotate: bool, seed: int) -> None:
    x = mx.random.normal((1, 1, 8, dim), key=mx.random.key(seed))
    group = group_for(dim, 64)
    if group is None:
        return
    errors = []
    for bits in sorted(AFFINE_BITS):
        coded = codec(bits, group, rotated_dim=dim if rotate else None)
        errors.append(float(mx.square(coded.decode(coded.encode(x)) - x).mean().item()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


@given(bits=st.sampled_from((*AFFINE_BITS, 16)), heads=st.integers(1, 4), dim=st.sampled_from((32, 64, 96, 128)))
@settings(max_examples=20, deadline=None)
def test_bytes_per_token_equal_the_arrays_bytes(bits: int, heads: int, dim: int) -> None:
    group = group_for(dim, 64)
    assert group is not None
    for dtype, scale_bytes in ((mx.float32, 4), (mx.bfloat16, 2)):
        coded = codec(bits, group)
        encoded = coded.encode(mx.ones((1, heads, 7, dim), dtype))
        assert sum(array.nbytes for array in encoded) == 7 * coded.token_bytes(heads, dim, scale_bytes)


def test_the_promised_ratios_hold() -> None:
    def of_16_bit(keys: int, values: int) -> float:
        return (bytes_per_value(keys, 64, 2) + bytes_per_value(values, 64, 2)) / 4

    assert of_16_bit(8, 8) <= 0.54
    assert of_16_bit(8, 4) <= 0.41
    assert of_16_bit(4, 4) <= 0.29


def test_the_largest_group_that_divides_is_taken() -> None:
    assert [group_for(dim, 64) for dim in (32, 64, 80, 96, 128)] == [32, 64, None, 32, 64]
    assert group_for(128, 128) == 128
    assert group_for(128, 32) == 32


def test_rotation_keeps_products_and_spreads_outliers() -> None:
    keys = mx.random.normal((1, 1, 200, 64), key=mx.random.key(5))
    keys[..., 7] *= 40  # one channel far larger than the rest, as some models' keys have
    queries = mx.random.normal((1, 1, 50, 64), key=mx.random.key(6))
    exact = queries @ keys.swapaxes(-1, -2)
    errors = {}
    for rotate in (False, True):
        coded = codec(4, 64, rotated_dim=64 if rotate else None)
        errors[rotate] = largest_difference(coded.dot(queries, coded.encode(keys)), exact)
    assert errors[True] < 0.8 * errors[False]


def test_rotating_twice_gives_the_same_again() -> None:
    for dim in DIMS:
        coded = Affine(8, 32, rotation_block(dim))
        x = mx.random.normal((2, dim), key=mx.random.key(dim))
        assert largest_difference(coded.rotate(coded.rotate(x)), x) < 1e-5
    assert rotation_block(72) is None


@pytest.mark.parametrize(
    "wrong", [(1, 64, None), (7, 64, None), (16, 64, None), (4, 48, None), (4, 64, 12), (4, 64, 8)]
)
def test_unknown_combinations_fail_at_construction(wrong: tuple[int, int, int | None]) -> None:
    with pytest.raises(OptionError):
        Affine(*wrong)


def test_plain_is_untouched() -> None:
    x = mx.random.normal((1, 1, 3, 5))
    assert Plain().decode(Plain().encode(x)) is x
