"""The predicted peak of a prefill: by hand, by what must hold for any shape, and against caches and models as they are."""

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.seeded import write_model
from tests.limits.unfused import CALLS
from tokamac.engine import Engine, KVSpec, Sampling
from tokamac.engine.events import Finished
from tokamac.engine.kv import attention, plan_caches
from tokamac.engine.kv.attention_kernel import AttentionDevice
from tokamac.engine.kv.cache import PACKED_TOKENS_CPU, PACKED_TOKENS_GPU
from tokamac.engine.kv.codec import ROTATED_KEY_BITS
from tokamac.engine.kv.layout import Slots
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.perf import peak_memory
from tokamac.engine.perf.peak_memory import LayerCache, ModelShape, grown, predict_peak, rounded, shape_of

LAYER = LayerCache(heads=2, key_dim=64, value_dim=64, value_bytes=4)
CPU, METAL = AttentionDevice("cpu"), AttentionDevice("metal")
SHAPE = ModelShape(
    weights=1000,
    hidden=256,
    heads=4,
    queries=256,
    mlp=768,
    experts=0,
    experts_used=0,
    expert_mlp=0,
    vocabulary=16,
    value_bytes=4,
    order="at once",
    device=CPU,
    layers=(LAYER,) * 6,
)


def test_a_first_chunk_by_hand():
    """256 tokens, nothing held: the highest moment is feeding, 4 × 256 + 2 × 768 numbers a token of 4 bytes."""
    found = predict_peak(SHAPE, held=0, new=256, chunk=256)
    assert found.kv == 6 * 256 * (128 + 128) * 4
    assert found.working == 256 * 4 * (4 * 256 + 2 * 768)
    assert found.total == 1000 + found.kv + found.working


def test_growing_values_lie_twice_by_hand():
    """Where caches are long, the highest moment is when a layer's values grow: the larger array, and the part filled in.

    8,192 tokens by 256: the last growth is from 7,936 slots to 7,936 + 496, in steps of 256: 8,448.
    """
    found = predict_peak(SHAPE, held=0, new=8192, chunk=256)
    a_token = 128 * 4
    entry = 256 * 4 * (2 * 256 + 256 + 128 + 128)
    before, after = 7936, 8448
    keys = 256 * 4 * 3 * 128 + 256 * 4 * 96 + (after + (after - before)) * a_token - 2 * (after - before) * a_token
    values = (after + (after - before)) * a_token - (after - before) * a_token
    assert found.kv == 6 * after * 2 * a_token
    assert found.working == entry + max(keys, values)


def test_packed_keys_and_values_are_unpacked_by_hand():
    """4 bits in groups of 64: a token's keys take 128 / 2 bytes and two groups of two scales of 4.

    The highest moment is when values are unpacked: beside the keys, the integers and what they become.
    """
    narrow = replace(SHAPE, mlp=64).packed(4, 4)  # or feeding would be higher
    found = predict_peak(narrow, held=12_288, new=4096, chunk=4096)
    a_token = 128 // 2 + 2 * 2 * 4
    entry = 4096 * 4 * (2 * 256 + 256 + 128 + 128)
    unpacked = 16_384 * 128 * 4
    larger, filled_in, encoded = (tokens * a_token for tokens in (16_384, 4096, 4096))
    assert found.kv == 6 * 2 * larger
    assert (
        found.working == entry + 3 * unpacked + larger + filled_in + encoded - filled_in
    )  # of kv they have grown already


def test_a_mixture_sorts_a_copy_for_every_expert_used():
    mixture = replace(SHAPE, mlp=0, experts=8, experts_used=2, expert_mlp=512)
    found = predict_peak(mixture, held=0, new=256, chunk=256)
    assert found.working == 256 * 4 * (4 * 256 + 2 * (2 * 256 + 2 * 512) + 2 * 8)


def test_scores_count_where_the_device_writes_them_down():
    ahead = replace(SHAPE, order="ahead")
    plain, fused = (predict_peak(replace(ahead, device=on), held=3840, new=256, chunk=256) for on in (CPU, METAL))
    assert plain.working - fused.working >= 4 * 256 * 4096 * 4  # heads, queries, keys, bytes


def test_a_window_bounds_what_is_held():
    windowed = SHAPE.windowed(512, 64)
    short, long = (predict_peak(windowed, held=0, new=tokens, chunk=256) for tokens in (4096, 65_536))
    assert short.total == long.total
    assert long.kv == 6 * (512 + 64) * 2 * 128 * 4


def test_what_is_kept_beside_is_added():
    alone, beside = (predict_peak(SHAPE, held=0, new=99, chunk=99, prompt_cache=size) for size in (0, 12_345))
    assert beside.total == alone.total + 12_345


def test_the_constants_are_those_of_the_caches_and_of_numpy():
    assert (peak_memory.NUMPY_SCORES, peak_memory.NUMPY_SCORES_PACKED) == (attention.WORTH, attention.WORTH_PACKED)
    assert (peak_memory.PACKED_TOKENS, peak_memory.PACKED_TOKENS_GPU) == (PACKED_TOKENS_CPU, PACKED_TOKENS_GPU)
    assert peak_memory.ROTATED_KEY_BITS == ROTATED_KEY_BITS


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_predicted_room_is_the_room_that_caches_make(counts: list[int]):
    slots, held, room = Slots(None), 0, 0
    for count in counts:
        held, room = held + count, grown(room, held + count)
        slots._grow((mx.zeros((1, 1, 1, 1)),), held) if held > slots.capacity else None
        assert room == slots.capacity
    assert rounded(1) == 256


SHAPES = st.builds(
    lambda order, device, bits, layers, window, experts: replace(
        (SHAPE if window is None else SHAPE.windowed(window, 64)).packed(*bits),
        order=order,
        device=device,
        layers=(SHAPE if window is None else SHAPE.windowed(window, 64)).packed(*bits).layers[:layers],
        experts=8 if experts else 0,
        experts_used=experts,
        expert_mlp=512,
    ),
    st.sampled_from(["at once", "by layer", "ahead"]),
    st.sampled_from([CPU, METAL, AttentionDevice("cuda")]),
    st.sampled_from([(16, 16), (8, 8), (8, 4), (4, 4), (16, 8)]),
    st.integers(1, 6),
    st.sampled_from([None, 300, 1024]),
    st.integers(0, 4),
)


@given(SHAPES, st.integers(0, 3000), st.integers(1, 5000), st.integers(1, 3000), st.sampled_from([32, 100, 256, 512]))
def test_more_tokens_never_take_less(shape: ModelShape, held: int, new: int, more: int, chunk: int):
    """But for one thing that is so: a plain CPU's attention takes less once scores are many enough for NumPy, head by head."""
    shape = shape if shape.order == "ahead" else replace(shape, device=METAL)
    fewer = predict_peak(shape, held=held, new=new, chunk=chunk)
    after = predict_peak(shape, held=held, new=new + more, chunk=chunk)
    assert after.total >= fewer.total, (fewer, after)


@given(SHAPES, st.integers(1, 5000), st.integers(0, 500), st.integers(1, 3000))
def test_a_longer_reply_never_takes_less(shape: ModelShape, new: int, reply: int, more: int):
    shorter = predict_peak(shape, held=0, new=new, chunk=256, reply=reply)
    assert predict_peak(shape, held=0, new=new, chunk=256, reply=reply + more).total >= shorter.total


def every_call(slots: int, held: int, new: int, chunk: int, limits: set[int | None]) -> dict[tuple[bool, ...], object]:
    """The last call of each kind, by a walk over all of them: (room before, tokens computed, tokens held at its end)."""
    last: dict[tuple[bool, ...], object] = {}
    for start in range(held, held + new, chunk):
        stop = min(start + chunk, held + new)
        before, slots = slots, grown(slots, stop)
        few = [(stop - start) * stop < scores for scores in (peak_memory.NUMPY_SCORES, peak_memory.NUMPY_SCORES_PACKED)]
        grew = [min(slots, limit or slots) > min(before, limit or before) for limit in limits]
        last[stop - start == chunk, *grew, *few] = before, stop - start, stop
    return last


@given(
    st.integers(0, 5000),
    st.integers(0, 3000),
    st.integers(0, 40_000),
    st.sampled_from([1, 7, 64, 256, 300, 2048]),
    st.sampled_from([set(), {None}, {None, 1000}, {320, 4352}]),
)
def test_calls_left_out_are_none_that_could_be_the_highest(
    held: int, room: int, new: int, chunk: int, limits: set[int | None]
) -> None:
    found = peak_memory._high_calls(held + room, held, new, chunk, 0, limits)
    assert {(before, call.new, call.held) for before, call in found} == {
        *every_call(held + room, held, new, chunk, limits).values()
    }


def test_a_peak_looks_at_few_calls_however_long_the_context() -> None:
    calls = itertools.islice(peak_memory._distinct_calls(0, 0, 1_000_000_000, 16), 2000)
    assert len([*calls]) < 1000


def test_a_shape_from_a_config():
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 272,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    plan = plan_caches(skeleton_model(config, 4), config, KVSpec(key_bits=8, value_bits=4, window=512))
    shape = shape_of(config, plan, weights=7, value_bytes=4, order="at once", device=CPU)
    assert (shape.weights, shape.hidden, shape.queries, shape.mlp, shape.experts) == (7, 64, 128, 128, 0)
    layer = shape.layers[0]
    assert (layer.heads, layer.key_dim, layer.key_bits, layer.value_bits) == (2, 32, 8, 4)
    assert layer.limit == 512 + 64
    assert (layer.fixed_bytes, layer.block) == (
        4 * 2 * 32 * 4,
        (512 - 4) // 2,
    )  # four pinned keys, and how far they move at once
    assert layer.key_bytes + layer.value_token_bytes == plan.layers[0].bytes_per_token


@pytest.mark.parametrize(
    "kv",
    [KVSpec(), KVSpec(key_bits=8, value_bits=4, group_size=32), KVSpec(window=512), KVSpec(window=512, keep=256)],
    ids=["16-bit", "8,4", "window of 512", "half of it pinned"],
)
@pytest.mark.usefixtures("settled_memory")
def test_the_peak_of_a_real_prefill(tmp_path, kv):
    """MLX's count on this machine: of bytes, not a time. Work is launched a little ahead, so it varies by a few per cent."""
    folder = write_model(
        tmp_path, max_position_embeddings=4096, hidden_size=128, intermediate_size=384, vocab_size=2048
    )
    others = mx.get_active_memory()  # what other tests of this process hold counts in MLX's peak
    with Engine.load(folder, kv=kv, prompt_cache=None) as engine:
        *_, last = engine.generate([7] * 3000, Sampling(temperature=0, max_tokens=2))
    assert isinstance(last, Finished)
    assert last.predicted_peak_bytes is not None
    assert last.metrics.peak_memory_bytes is not None
    assert last.predicted_peak_bytes == pytest.approx(last.metrics.peak_memory_bytes - others, rel=0.15)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.usefixtures("settled_memory")
def test_the_peak_of_scores_that_are_written_down(tmp_path, call):
    predicted, real = call.measure(tmp_path)
    assert 0.9 <= predicted / real <= 1.15, (predicted, real)
