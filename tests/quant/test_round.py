"""Rounding in blocks, on several streams at once: bit for bit what mx.quantize makes of the whole weight."""

from dataclasses import asdict

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.search_weights import DTYPES
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import methods

affine = st.builds(Packing, st.sampled_from((2, 3, 4, 5, 6, 8)), st.sampled_from((32, 64, 128)))
microscaling = st.sampled_from((Packing(4, 32, "mxfp4"), Packing(8, 32, "mxfp8"), Packing(4, 16, "nvfp4")))


@pytest.fixture(scope="module")
def lanes():
    return tuple(mx.new_thread_local_stream(mx.default_device()) for _ in range(3))


@st.composite
def weights(draw, group):
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
    weight = data.draw(weights(packing.group_size))
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
