"""The predicted peak of a prefill, and what is done where it does not fit: smaller chunks, other mitigations,
refusals."""

import functools
import gc
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from tests.engine.helpers import CONFIG, finish, within, write_model
from tests.engine.inside import replies_of, runner_of, runtime_of, store_of
from tests.engine.kv.models import work_of_config
from tests.families import walked
from tests.waiting import until
from tokamac.app.cli import main
from tokamac.engine import Engine, Event, MemoryPressure, Message, PrefillProgress, Sampling, TextChunk
from tokamac.engine.chunking import DEEP, DENSE_S, LARGEST, LEAST, MIXTURE_S, Chunking, prompt_peak, whole_chunks
from tokamac.engine.chunking import PROMPT as COMPARED_PROMPT
from tokamac.engine.errors import MemoryLimitError
from tokamac.engine.generation import Generation
from tokamac.engine.kv import attention
from tokamac.engine.kv.attention import install_seam
from tokamac.engine.kv.costs import AttentionDevice, grown, rounded
from tokamac.engine.kv.layout import Slots
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.model.loader import load_model, skeleton_model
from tokamac.engine.options import KVSpec, PromptCacheSpec, Speculation
from tokamac.engine.perf import memory, peak_memory
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import cost_of_model
from tokamac.engine.perf.footprint import MitigationStep, offers, refusal, relieving, steps, weigh
from tokamac.engine.perf.hardware import known_chips, lookup
from tokamac.engine.perf.peak_memory import LayerCache, ModelShape, Peak, predict_peak, shape_of
from tokamac.engine.perf.roofline import Workload, fitted
from tokamac.engine.prompt_cache.cache import LEAST_MEMORY
from tokamac.engine.schedule.decoding import Decoder

# Attention that writes its scores down, measured: MLX's own products on the CPU device stand for those that a GPU
# runs where no kernel is fused, since the arrays are the same. Counts of bytes, the same on every run.

DEFAULT_KV = KVSpec()


@dataclass(frozen=True)
class Unfused:
    """A call whose attention writes its scores down: ``new`` tokens after ``held``."""

    head_dim: int
    heads: int
    kv_heads: int
    held: int
    new: int
    kv: KVSpec = DEFAULT_KV

    def measure(self, folder: Path) -> tuple[int, int]:
        """Return the predicted peak and MLX's, weights and caches included."""
        install_seam()
        write_model(
            folder,
            num_hidden_layers=4,  # the last one's attention is not computed, since no logits are asked for
            head_dim=self.head_dim,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
        )
        loaded = load_model(folder, dtype=None, device="metal", progress=lambda *_: None)
        plan = plan_caches(loaded.module, loaded.config, self.kv)
        weights = cost_of_model(loaded.module, loaded.config).weight_bytes
        shape = shape_of(
            loaded.config, plan, weights=weights, value_bytes=4, order="ahead", device=AttentionDevice("cpu")
        )
        others = mx.get_active_memory() - weights
        caches = plan.make()
        for cache in caches:
            some = mx.zeros((1, self.kv_heads, self.held, self.head_dim))
            cache.update_and_fetch(some, some)
            mx.eval(cache.state)
        del some
        found = predict_peak(shape, held=self.held, new=self.new, chunk=self.new, slots=caches[0].slots)
        run = Generation(loaded.module, caches, [7] * self.held)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        with patch.object(attention, "prefers_numpy", lambda *_, **__: False):  # NumPy attends head by head
            assert list(run.prefill([7] * self.new, self.new)) == [self.new]
        return found.total, mx.get_peak_memory() - others


CALLS = (
    Unfused(256, 8, 1, held=2040, new=32), Unfused(256, 8, 8, held=1000, new=24), Unfused(128, 8, 2, held=2040, new=32),
    Unfused(128, 4, 4, held=600, new=64), Unfused(256, 8, 2, held=2040, new=9),
    Unfused(256, 8, 1, held=3500, new=32, kv=KVSpec(key_bits=8, value_bits=4)),
    Unfused(256, 8, 1, held=2040, new=32, kv=KVSpec(window=512)),
    Unfused(128, 4, 4, held=1200, new=80, kv=KVSpec(window=1024)),
)  # fmt: skip


# The predicted peak of a prefill: by hand, by what must hold for any shape, and against caches and models as they
# are.

LAYER = LayerCache(heads=2, key_dim=64, value_dim=64, value_bytes=4)
CPU, METAL = AttentionDevice("cpu"), AttentionDevice("metal")
SHAPE = ModelShape(
    weights=1000, hidden=256, heads=4, queries=256, mlp=768, experts=0, experts_used=0, expert_mlp=0, vocabulary=16,
    value_bytes=4, order="at once", device=CPU, layers=(LAYER,) * 6,
)  # fmt: skip


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


def test_a_store_grows_in_place_by_hand():
    """4 bits, a piece of 64 after 7,936 tokens: 8,448 slots, of keys first, beside 7,936 of both, and 512 to be added."""
    narrow = replace(SHAPE.packed(4, 4), piece=64)
    found = predict_peak(narrow, held=7936, new=512, chunk=512, slots=7936)
    a_token = 128 // 2 + 2 * 2 * 4
    assert found.kv == 6 * 2 * 8448 * a_token
    assert found.working == 8448 * a_token  # values, whose keys have grown already
    assert predict_peak(narrow, held=7936, new=512, chunk=512, slots=8448).working == 0


def test_a_window_too_small_for_a_piece_is_computed_by_the_class():
    windowed = SHAPE.windowed(512, 32)
    for new in (500, 5000):
        by_kernels = predict_peak(replace(windowed, piece=64), held=0, new=new, chunk=256)
        assert (by_kernels == predict_peak(windowed, held=0, new=new, chunk=256)) == (new == 5000)


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


@hypothesis_given(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_predicted_room_is_the_room_that_caches_make(counts: list[int]):
    slots, held, room = Slots(None), 0, 0
    for count in counts:
        held, room = held + count, grown(room, held + count)
        slots.grow((mx.zeros((1, 1, 1, 1)),), held) if held > slots.capacity else None
        assert room == slots.capacity
    assert rounded(1) == 256


SHAPES = st.builds(
    lambda order, device, bits, layers, window, experts, piece: replace(
        (SHAPE if window is None else SHAPE.windowed(window, 64)).packed(*bits),
        order=order,
        device=device,
        layers=(SHAPE if window is None else SHAPE.windowed(window, 64)).packed(*bits).layers[:layers],
        experts=8 if experts else 0,
        experts_used=experts,
        expert_mlp=512,
        piece=piece,
    ),
    st.sampled_from(["at once", "ahead"]),
    st.sampled_from([CPU, METAL, AttentionDevice("cuda")]),
    st.sampled_from([(16, 16), (8, 8), (8, 4), (4, 4), (16, 8)]),
    st.integers(1, 6),
    st.sampled_from([None, 300, 1024]),
    st.integers(0, 4),
    st.sampled_from([None, 32, 100]),
)


@hypothesis_given(
    SHAPES, st.integers(0, 3000), st.integers(1, 5000), st.integers(1, 3000), st.sampled_from([32, 100, 256, 512])
)
def test_more_tokens_never_take_less(shape: ModelShape, held: int, new: int, more: int, chunk: int):
    """But for one thing that is so: a plain CPU's attention takes less once scores are many enough for NumPy, head by head."""
    shape = shape if shape.order == "ahead" else replace(shape, device=METAL)
    fewer = predict_peak(shape, held=held, new=new, chunk=chunk)
    after = predict_peak(shape, held=held, new=new + more, chunk=chunk)
    assert after.total >= fewer.total, (fewer, after)


@hypothesis_given(SHAPES, st.integers(1, 5000), st.integers(0, 500), st.integers(1, 3000))
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


@hypothesis_given(
    st.integers(0, 5000),
    st.integers(0, 3000),
    st.integers(0, 40_000),
    st.sampled_from([1, 7, 64, 256, 300, 2048]),
    st.sampled_from([set(), {None}, {None, 1000}, {320, 4352}]),
)
def test_no_call_left_out_is_the_highest(held: int, room: int, new: int, chunk: int, limits: set[int | None]) -> None:
    found = peak_memory._high_calls(held + room, held, new, chunk, 0, limits)
    assert {(before, call.new, call.held) for before, call in found} == {
        *every_call(held + room, held, new, chunk, limits).values()
    }


def test_a_peak_looks_at_few_calls_however_long_the_context() -> None:
    calls = itertools.islice(peak_memory._distinct_calls(0, 0, 1_000_000_000, 16), 2000)
    assert len([*calls]) < 1000


def test_a_shape_from_a_config():
    plan = plan_caches(skeleton_model(CONFIG, 4), CONFIG, KVSpec(key_bits=8, value_bits=4, window=512))
    shape = shape_of(CONFIG, plan, weights=7, value_bytes=4, order="at once", device=CPU)
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
    predicted, real = peak_of_a_prefill(tmp_path, kv, None)
    assert predicted == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize(
    "kv",
    [KVSpec(), KVSpec(key_bits=8, value_bits=4, group_size=32), KVSpec(window=512, keep=0)],
    ids=["16-bit", "8,4", "window of 512"],
)
@pytest.mark.usefixtures("settled_memory")
def test_the_peak_of_a_real_prefill_by_kernels(tmp_path, kv):
    predicted, real = peak_of_a_prefill(tmp_path, kv, 4)
    assert predicted == pytest.approx(real, rel=0.05)


def peak_of_a_prefill(path: Path, kv: KVSpec, bits: int | None) -> tuple[int, int]:
    """Return what is predicted of a prompt of 3,000 tokens, and MLX's count, without what other tests of this process hold."""
    wide = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048}
    folder = write_model(path, bits=bits, max_position_embeddings=4096, **wide)
    others = mx.get_active_memory()
    with Engine.load(folder, kv=kv, prompt_cache=None) as engine:
        *_, last = engine.generate([7] * 3000, Sampling(temperature=0, max_tokens=2))
    assert last.predicted_peak_bytes is not None
    return last.predicted_peak_bytes, last.metrics.peak_memory_bytes - others


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.usefixtures("settled_memory")
def test_the_peak_of_scores_that_are_written_down(tmp_path, call):
    predicted, real = call.measure(tmp_path)
    assert 0.9 <= predicted / real <= 1.15, (predicted, real)


# What is done where a prefill does not fit: in which order, how far, and what a refusal says.

WEIGHTS, KV, BESIDE = 1000, 200, 300


def peak_at(chunk: int) -> Peak:
    """A model whose temporaries are a byte for each token of a chunk."""
    return Peak(WEIGHTS, KV, chunk, BESIDE)


def least() -> int:
    return WEIGHTS + KV + 32


@pytest.mark.parametrize(
    ("budget", "taken", "missing"),
    [
        (None, (), 0),
        (WEIGHTS + KV + 256 + BESIDE + 40, (), 0),
        (WEIGHTS + KV + 256 + BESIDE, (MitigationStep("pool", 40),), 0),
        (WEIGHTS + KV + 255 + BESIDE, (MitigationStep("pool", 40), MitigationStep("chunk", 128)), 0),
        (WEIGHTS + KV + 64 + BESIDE, (MitigationStep("pool", 40), MitigationStep("chunk", 64)), 0),
        (
            least() + BESIDE - 1,
            (MitigationStep("pool", 40), MitigationStep("chunk", 32), MitigationStep("prompt cache", 1)),
            0,
        ),
        (least(), (MitigationStep("pool", 40), MitigationStep("chunk", 32), MitigationStep("prompt cache", BESIDE)), 0),
        (least() - 1, (MitigationStep("pool", 40), MitigationStep("chunk", 32)), BESIDE + 1),
    ],
)
def test_the_steps_in_their_order(budget, taken, missing):
    found = steps(peak_at, budget, chunk=256, pool=40)
    assert (found.steps, found.missing) == (taken, missing)


def test_fused_attention_goes_before_smaller_chunks():
    def fused_at(chunk: int) -> Peak:
        return Peak(WEIGHTS, KV, chunk // 2, BESIDE)

    found = steps(peak_at, WEIGHTS + KV + 64 + BESIDE, chunk=256, fused_at=fused_at)
    assert (found.steps, found.fused) == ((MitigationStep("fused", 128), MitigationStep("chunk", 128)), True)
    assert found.peak == fused_at(128)


def test_fused_attention_that_spares_nothing_is_no_step():
    found = steps(peak_at, WEIGHTS + KV + 64 + BESIDE, chunk=256, fused_at=peak_at)
    assert (found.steps, found.fused) == ((MitigationStep("chunk", 64),), False)


def test_an_empty_pool_is_no_step():
    assert steps(peak_at, least() + BESIDE, chunk=256).steps == (MitigationStep("chunk", 32),)


def test_a_chunk_smaller_than_the_floor_stays():
    assert steps(peak_at, 1, chunk=8).chunk == 8


def test_where_no_chunk_fits_that_which_takes_least_is_taken():
    """Small chunks may take more: few enough scores are written down for all heads at once."""
    found = steps(lambda chunk: Peak(0, 0, {256: 90, 128: 60, 64: 70, 32: 80}[chunk], 0), 50, chunk=256)
    assert (found.chunk, found.missing) == (128, 10)


@hypothesis_given(st.integers(0, 2500), st.integers(0, 100), st.sampled_from([32, 100, 256, 512]))
def test_what_fits_after_the_steps_fits_the_budget(budget, pool, chunk):
    found = steps(peak_at, budget, chunk=chunk, pool=pool)
    assert found.missing == max(0, found.peak.total - budget)
    assert 0 <= found.peak.prompt_cache <= BESIDE
    order = ["pool", "chunk", "prompt cache"]
    assert [order.index(step.name) for step in found.steps] == sorted(order.index(step.name) for step in found.steps)


@hypothesis_given(st.integers(1, 2500), st.integers(1, 500))
def test_a_larger_budget_never_asks_for_more(budget, more):
    tight, loose = (steps(peak_at, given, chunk=512) for given in (budget, budget + more))
    assert loose.chunk >= tight.chunk
    assert loose.missing <= tight.missing


def peak_of(shape: ModelShape) -> Peak:
    return predict_peak(shape, held=0, new=20_000, chunk=256)


def offered(budget: int) -> dict[str, int]:
    found = offers(SHAPE, peak_of, budget, spare=lambda window: 64, longest=20_000)
    return {offer.flags: offer.total for offer in found}


def test_the_bits_that_harm_least_are_offered_first():
    whole, eight, mixed, four = (peak_of(SHAPE.packed(*bits)).total for bits in ((16, 16), (8, 8), (8, 4), (4, 4)))
    assert four < mixed < eight < whole
    assert "--kv-bits 8" in offered(eight)
    assert offered(eight)["--kv-bits 8"] == eight
    assert next(iter(offered(eight - 1))) == "--kv-bits 8,4"
    assert next(iter(offered(four))) == "--kv-bits 4"


def test_what_is_offered_fits_and_the_next_larger_window_does_not():
    budget = peak_of(SHAPE.packed(4, 4)).total - 1
    found = offered(budget)
    (flags,) = found
    window = int(flags.removeprefix("--kv-window "))
    assert found[flags] == peak_of(SHAPE.windowed(window, 64)).total <= budget
    assert peak_of(SHAPE.windowed(window + 256, 64)).total > budget


def test_nothing_is_offered_that_does_not_fit():
    assert offered(1000) == {}


def test_a_refusal_has_its_numbers_and_what_would_fit():
    found = list(offers(SHAPE, peak_of, peak_of(SHAPE.packed(8, 8)).total, spare=lambda _: 64, longest=300))
    error = refusal("this prompt of 20,000 tokens", Peak(2_000_000_000, 10**9, 5 * 10**8, 0), 3 * 10**9, found)
    assert isinstance(error, MemoryLimitError)
    assert error.message == (
        "this prompt of 20,000 tokens needs 3.50 GB of memory (weights 2.00 GB, KV cache 1.00 GB, temporaries 500 MB), "
        "and 3.00 GB may be used"
    )
    assert error.hint.startswith("It would fit with --kv-bits 8 (")


def test_a_refusal_says_how_to_go_beyond_the_limit_where_the_machine_has_as_much():
    peak = Peak(4_500_000_000, 540_000_001, 0, 0)
    assert "--memory 5.041 overrides the limit" in refusal("it", peak, 10**9, [], there_is=16 << 30).hint
    assert "--memory" not in refusal("it", peak, 10**9, [], there_is=4 << 30).hint


def test_relieving_takes_every_step_there_is_and_refuses_nothing():
    peaks = {64: Peak(100, 0, 50, 30), 32: Peak(100, 0, 25, 30)}
    found = relieving(lambda chunk: peaks[max(chunk, 32)], 90, chunk=64, pool=7)
    assert [(step.name, step.amount) for step in found.steps] == [("pool", 7), ("chunk", 32), ("prompt cache", 30)]
    assert (found.peak.total, found.missing) == (125, 35)
    assert relieving(lambda chunk: peaks[chunk], 500, chunk=64).steps == ()


def test_a_refusal_without_an_offer_says_what_else_helps():
    assert refusal("it", Peak(1, 1, 1, 0), 1, []).hint == "Close other programs, shorten it, or take a smaller model."


# Memory that is short: the ladder on a real engine, refusals before anything is computed, and what the user is
# told.

GREEDY = Sampling(temperature=0, max_tokens=6)
PROMPT = [5 + i * i % 250 for i in range(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values weigh more than its temporaries: 8 layers of 4 heads, 16 kB a token."""
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("ladder"), max_position_embeddings=2048, **shape)


@pytest.fixture
def others(settled_memory: None) -> int:
    """Bytes that other tests of this process hold: they take from an engine's budget as another engine does."""
    return mx.get_active_memory()


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Set what MLX's arrays may take."""
    return lambda budget: monkeypatch.setattr(
        memory, "system_limit", lambda: None if budget is None else memory.Limit(budget, "physical")
    )


@pytest.fixture
def engine(folder: Path, others: int) -> Iterator[Engine]:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        yield loaded


def squeezed(events: list[Event]) -> list[MemoryPressure]:
    return [event for event in events if isinstance(event, MemoryPressure)]


def total(engine: Engine, chunk: int, tokens: int = len(PROMPT), kv: tuple[int, int] = (16, 16)) -> int:
    """Return the predicted peak of a prompt."""
    shape = runtime_of(engine).shape.packed(*kv)
    return predict_peak(shape, held=0, new=tokens - 1, chunk=chunk, reply=1).total


def between(engine: Engine, chunk: int, tokens: int = len(PROMPT)) -> int:
    """Return a budget that chunks of this size fit, and twice as large ones do not."""
    return (total(engine, chunk, tokens) + total(engine, 2 * chunk, tokens)) // 2


def test_nothing_is_done_where_the_budget_is_unknown(engine, allow):
    allow(None)
    assert not squeezed(list(engine.generate(PROMPT, GREEDY)))


def test_smaller_chunks_give_the_same_reply(folder, allow, others):
    with Engine.load(folder, prompt_cache=None) as engine:
        plain = finish(list(engine.generate(PROMPT, GREEDY)))
        allow(others + between(engine, 64))
        events = list(engine.generate(PROMPT, GREEDY))
        (told,) = squeezed(events)
        assert told.chunk == 64
        assert told.predicted_bytes == total(engine, 64)
        assert told.predicted_bytes <= told.budget_bytes
    assert finish(events).text == plain.text
    assert (finish(events).metrics.peak_memory_bytes or 0) < (plain.metrics.peak_memory_bytes or 0)


def test_other_prompts_are_let_go_of_and_the_reply_is_the_same(engine, allow, others):
    allow(None)
    other = [260 - token for token in PROMPT]
    first = finish(list(engine.generate(other, GREEDY)))
    plain = finish(list(engine.generate(PROMPT, GREEDY)))
    list(engine.generate(other, GREEDY))
    store = store_of(engine)
    kept = store.aside
    assert kept > 0
    allow(others + total(engine, 32) + kept // 2)
    events = list(engine.generate([*PROMPT[:-1], 9], GREEDY))  # differs from its first token on from what is live
    (told,) = squeezed(events)
    assert told.cache_bytes > 0
    allow(None)
    assert finish(list(engine.generate(PROMPT, GREEDY))).text == plain.text
    assert finish(list(engine.generate(other, GREEDY))).text == first.text


def test_a_prompt_that_can_not_fit_is_refused_with_numbers_and_an_offer(engine, allow, others):
    allow(others + total(engine, 256, kv=(8, 8)) + 10**5)
    numbers = r"1,500 tokens needs .* MB of memory \(weights .*, KV cache .*, temporaries .*\), and .* MB may be used"
    with pytest.raises(MemoryLimitError, match=numbers) as told:
        list(engine.generate(PROMPT, GREEDY))
    assert "--kv-bits 8 (" in told.value.hint
    assert "--kv-window " in told.value.hint
    assert not store_of(engine).nbytes  # nothing was computed
    allow(None)
    assert finish(list(engine.generate(PROMPT, GREEDY))).text


def test_what_is_offered_works(folder, allow, others):
    with Engine.load(folder, prompt_cache=None) as engine:
        budget = total(engine, 256, kv=(8, 8)) + 10**6
    allow(others + budget)
    with Engine.load(folder, kv=KVSpec(key_bits=8, value_bits=8), prompt_cache=None) as smaller:
        events = list(smaller.generate(PROMPT, GREEDY))
    assert not [event for event in squeezed(events) if event.chunk]
    peak = finish(events).metrics.peak_memory_bytes
    assert peak - others <= 1.1 * budget


def test_warming_is_refused_as_well_but_not_in_idle_time(engine, allow):
    allow(runtime_of(engine).shape.weights)
    with pytest.raises(MemoryLimitError, match="may be used"):
        list(engine.warm(PROMPT))
    engine.warm_ahead([Message("user", "x" * 900)])  # says nothing: it is said when the prompt is sent
    assert engine.memory().active > 0


def test_a_model_that_can_not_fit_is_refused_before_a_weight_is_read(folder, allow, monkeypatch):
    allow(10_000)
    monkeypatch.setattr("tokamac.engine.loading.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(MemoryLimitError, match=r"this model, with 32 tokens, needs .* and 10\.0 kB may be used"):
        Engine.load(folder)


def test_a_context_that_does_not_fit_is_told_and_left_as_it_is(folder, engine, allow):
    allow(total(engine, 256, tokens=1200))  # between 1,024 tokens and 1,280
    with Engine.load(folder, prompt_cache=None) as loaded:
        assert loaded.spec.capacity == 2048
        (note,) = [note for note in loaded.spec.notes if "context" in note]
    assert note.startswith("of the context of 2,048 tokens, about 1,024 fit into the ")
    assert "with --kv-bits 8,8 about 2,048" in note


def test_a_reply_ends_with_what_it_has_where_its_caches_would_not_fit(folder, allow, others):
    long = Sampling(temperature=0, max_tokens=400)
    prompt = PROMPT[:200]
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        whole = finish(list(engine.generate(prompt, long)))
        assert whole.metrics.generated_tokens > 350
        store_of(engine).clear()
        shape, slots = runtime_of(engine).shape, 512  # caches may grow to these from 256, and no further
        budget = predict_peak(shape, held=256, new=0, chunk=1, slots=256, reply=1).total + 100_000
        allow(others + budget)
        events = list(engine.generate(prompt, long))
        ended = finish(events)
        (told,) = squeezed(events)
        assert (told.ended, ended.reason) == (True, "length")
        assert len(prompt) + ended.metrics.generated_tokens == slots + 1  # the last token's keys need no room
        assert whole.text.startswith(ended.text)
        assert (ended.metrics.peak_memory_bytes or 0) <= 1.1 * (others + budget)
        allow(None)
        again = finish(list(engine.generate(prompt, long)))
        assert again.metrics.cached_tokens == len(prompt) - 1
        assert again.text == whole.text


@pytest.mark.parametrize(("kept", "bits"), [(PromptCacheSpec(disk=False), None), (None, (8, 8))])
def test_of_two_replies_whose_caches_would_not_fit_grown_one_waits_for_the_other(folder, allow, others, kept, bits):
    """Once memory is short neither ends before its time, and neither has another text than alone."""
    long = Sampling(temperature=0, max_tokens=90)
    prompts = [PROMPT[:200], [260 - token for token in PROMPT[:200]]]
    # MLX rounds a pass of several tokens otherwise than one, and when guesses are verified is a matter of time.
    with Engine.load(folder, prompt_cache=kept, parallel=2, speculation=None) as engine:
        engine.tokenizer.eos_ids = frozenset()
        single = [finish(list(engine.generate(prompt, long, kv_bits=bits))) for prompt in prompts]
        store_of(engine).clear()
        gc.collect()  # the tree's nodes know one another
        shape = runtime_of(engine).shape.packed(*bits or (16, 16))
        alone = predict_peak(shape, held=256, new=0, chunk=1, slots=256, reply=1)
        beside = predict_peak(shape, held=200, new=0, chunk=1, slots=0, reply=1).kv
        allow(others + alone.total + beside + beside // 2)  # one may grow from 256 slots beside another that has not
        streams = [engine.generate(prompt, long, kv_bits=bits) for prompt in prompts]
        with ThreadPoolExecutor(2) as threads:
            heard = list(threads.map(list, streams))
    assert [finish(events).text for events in heard] == [end.text for end in single]
    assert [finish(events).metrics.generated_tokens for events in heard] == [90, 90]
    told = [each for events in heard for each in squeezed(events)]
    assert [each.waits for each in told if each.waits or each.ended] == [True]


@pytest.mark.parametrize("kept", [PromptCacheSpec(disk=False), None])
def test_a_reply_in_the_background_gives_its_memory_to_one_awaited(folder, allow, others, kept, monkeypatch):
    """It goes on afterwards, and says the same."""
    long = Sampling(temperature=0, max_tokens=200)
    prompt, other = PROMPT[:200], [5 + number * number % 250 for number in range(700)]
    step = Decoder.step
    with Engine.load(folder, prompt_cache=kept, parallel=2) as engine, ThreadPoolExecutor(1) as thread:
        engine.tokenizer.eos_ids = frozenset()
        single = finish(list(engine.generate(prompt, long)))
        store_of(engine).clear()
        gc.collect()
        shape = runtime_of(engine).shape
        held = predict_peak(shape, held=200, new=0, chunk=1, slots=0, reply=1).kv
        budget = total(engine, 64, tokens=len(other) + 6) + held // 2
        assert predict_peak(shape, held=256, new=0, chunk=1, slots=256, reply=1).total < budget  # it can grow alone
        monkeypatch.setattr(Decoder, "step", lambda *given: (time.sleep(0.005), step(*given))[1])
        behind = engine.generate(prompt, long, background=True)
        until(lambda: isinstance(next(behind), TextChunk))
        heard = thread.submit(list, behind)
        allow(others + budget)
        ended = finish(within(lambda: list(engine.generate(other, GREEDY))))
        assert not heard.done()
        assert finish(within(heard.result)).text == single.text
    assert ended.metrics.generated_tokens == 6


@pytest.mark.parametrize(("kept", "bits"), [(PromptCacheSpec(disk=False), None), (None, (8, 8))])
def test_what_a_reply_holds_whose_reader_is_far_behind_goes_to_one_that_needs_it(folder, allow, others, kept, bits):
    """It is computed again once the reader has caught up: the reply is the same."""
    long = Sampling(temperature=0, max_tokens=100)
    prompt, other = PROMPT[:200], [260 - token for token in PROMPT[:400]]
    with (
        patch("tokamac.engine.schedule.stream.LOOK_AHEAD", 2),
        Engine.load(folder, prompt_cache=kept, parallel=2) as engine,
    ):
        engine.tokenizer.eos_ids = frozenset()
        single = finish(list(engine.generate(prompt, long, kv_bits=bits)))
        store_of(engine).clear()
        gc.collect()
        shape = runtime_of(engine).shape.packed(*bits or (16, 16))
        held = predict_peak(shape, held=200, new=0, chunk=1, slots=0, reply=1).kv
        unread = engine.generate(prompt, long, kv_bits=bits)
        assert isinstance(next(unread), PrefillProgress)
        until(lambda: not replies_of(engine).schedule.busy)
        assert 0 < unread.live().metrics.generated_tokens < 100
        allow(others + total(engine, 64, tokens=len(other) + 6, kv=bits or (16, 16)) + held // 2)
        ended = finish(within(lambda: list(engine.generate(other, GREEDY, kv_bits=bits))))
        assert ended.metrics.generated_tokens == 6
        allow(None)
        assert finish(list(unread)).text == single.text


def test_other_prompts_go_before_a_reply_ends(folder, allow, others):
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        prompt, other = PROMPT[:200], [260 - token for token in PROMPT[:500]]
        list(engine.generate(other, GREEDY))
        long = Sampling(temperature=0, max_tokens=100)
        plain = finish(list(engine.generate(prompt, long)))
        list(engine.generate(other, GREEDY))
        kept = store_of(engine).aside
        shape = runtime_of(engine).shape
        needed = predict_peak(shape, held=256, new=0, chunk=1, slots=256, reply=1).total
        allow(others + needed + kept // 2)
        events = list(engine.generate([*prompt[:-1], 9], long))
        told = squeezed(events)
        assert sum(each.cache_bytes for each in told) > 0
        assert not any(each.ended for each in told)
        assert finish(events).metrics.generated_tokens == 100
        allow(None)
        assert finish(list(engine.generate(prompt, long))).text == plain.text


def test_a_limit_that_changes_holds_for_all_that_share_the_memory(folder):
    """Other KV bits, the prompt cache and a draft model: each asked what the limit was when the model was loaded."""
    draft = Speculation(lookup=False, branches=False, draft=folder)
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False), speculation=draft) as engine:
        runner, store = runner_of(engine), store_of(engine)
        drafting = runner.speculation._draft.model
        list(engine.generate(PROMPT[:200], GREEDY, kv_bits=(8, 8)))
        engine.limit_memory(12_345_678_900)
        assert store._budget() == 1_234_567_890
        engine.limit_memory(20_000)
        assert store._budget() == LEAST_MEMORY
        assert store._beside(200) <= 20_000
        assert not drafting.fits(1)
        for bits in (None, (8, 8)):
            with pytest.raises(MemoryLimitError, match="may be used"):
                list(engine.generate(PROMPT, GREEDY, kv_bits=bits))
        engine.limit_memory(None)
        assert drafting.fits(1)
        assert finish(list(engine.generate(PROMPT[:200], GREEDY, kv_bits=(8, 8)))).text


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.mark.usefixtures("no_input")
def test_ask_refuses_with_exit_status_1(folder, allow, capsys):
    allow(10_000)
    assert main(["ask", "hello", "-m", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs" in err
    assert "may be used" in err


@pytest.mark.usefixtures("no_input")
def test_ask_says_what_was_done(folder, allow, others, capsys, tmp_path):
    with Engine.load(folder, prompt_cache=None) as engine:
        ids = engine.tokenizer.encode(engine.tokenizer.render([Message("user", "a b " * 300)]))
        budget = between(engine, 64, len(ids))
    allow(others + budget)
    flags = ["-m", str(folder), "--max-tokens", "3", "--temp", "0", "--no-prompt-cache"]
    assert main(["ask", "a b " * 300, *flags]) == 0
    assert "memory is short" in capsys.readouterr().err
    assert main(["ask", "a b " * 300, *flags, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (told,) = [event for event in events if event["event"] == "memory_pressure"]
    assert told["chunk"] == 64
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b " * 300 + "\nshort\n")
    assert main(["ask", "--each", str(prompts), *flags]) == 0
    out, err = capsys.readouterr()
    assert err.count("memory is short") == 1
    long, short = map(json.loads, out.splitlines())
    assert long["memory_pressure"][-1]["chunk"] == 64
    assert short["text"]


# How prompts are cut: by model, chip and depth, with hardly a loss beside mlx-lm's chunks, on every chip of the
# table.

CHIPS = [lookup(row["chip"], row["gpu_cores"]) for row in known_chips()]
APPLE = [chip for chip in CHIPS if chip.name.startswith("Apple")]
MODELS = [entry.name for entry in catalogue() if entry.config is not None]
LENT = 1.1  # what the prefill of a prompt may take of its time in chunks of 2,048, mlx-lm's


@functools.cache
def work_named(name: str) -> Workload:
    entry = find(name)
    work = work_of_config(entry.config, packing=Packing(4))
    assert isinstance(work, Workload), work
    return work


def chunking(name: str, chip_name: str, cores: int | None = None) -> Chunking:
    return Chunking(work_named(name), "metal", fitted(lookup(chip_name, cores)))


@pytest.mark.parametrize("name", walked(MODELS, MODELS[::4]))
def test_a_prompt_takes_hardly_longer_than_in_chunks_of_2048_on_any_chip(name: str) -> None:
    work, slow = work_named(name), []
    for chip in APPLE:
        latency = fitted(chip)
        chunk = Chunking(work, "metal", latency).tokens_at(0)
        ours, theirs = (latency.prefill_s(work, 8192, 0, size) for size in (chunk, 2048))
        if ours is not None and theirs is not None and ours > LENT * theirs:
            slow.append((chip.name, chip.gpu_cores, chunk, ours / theirs))
    assert not slow


@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "Llama-3.3-70B"])
def test_a_chunk_is_halved_while_it_takes_too_long_and_that_costs_little(name: str) -> None:
    work = work_named(name)
    longest_s = MIXTURE_S if work.expert_bytes else DENSE_S
    for chip in APPLE:
        latency = fitted(chip)
        chunk = Chunking(work, "metal", latency).tokens_at(0)
        seconds = latency.prefill_s(work, COMPARED_PROMPT, 0, chunk)
        if seconds is None or seconds * chunk / COMPARED_PROMPT <= longest_s:
            continue
        half = latency.prefill_s(work, COMPARED_PROMPT, 0, chunk // 2)
        assert chunk == LEAST or half > LENT * latency.prefill_s(work, COMPARED_PROMPT, 0, 2048), chip


def test_dense_models_keep_512_where_that_is_quick_and_mixtures_take_more():
    assert chunking("Qwen3-8B", "Apple M4 Max", 40).tokens_at(0) == 512
    assert chunking("Qwen3-8B", "Apple M1", 8).tokens_at(0) < 512
    assert chunking("Qwen3-30B-A3B", "Apple M4 Max", 40).tokens_at(0) > 512
    assert chunking("Qwen3-Next-80B-A3B", "Apple M4 Max", 40).tokens_at(0) > 512


def test_without_a_published_latency_a_mixture_gets_rows_for_its_experts():
    assert Chunking(work_named("Qwen3-8B"), "metal", None).tokens_at(0) == 512
    assert Chunking(work_named("Qwen3-30B-A3B"), "metal", None).tokens_at(0) == 1024  # 8 of 128 experts
    assert Chunking(work_named("Qwen3-Next-80B-A3B"), "cuda", None).tokens_at(0) == LARGEST  # 10 of 512
    assert Chunking(work_named("Qwen3-8B"), "cuda", None).tokens_at(0) == 2048


@hypothesis_given(
    st.sampled_from(["Qwen3-30B-A3B", "gpt-oss-120b", "gemma-3-1b"]), st.sampled_from(APPLE), st.integers(0, 1 << 20)
)
def test_chunks_never_grow_with_depth_and_are_small_deep_down(name, chip, depth):
    cut = Chunking(work_named(name), "metal", fitted(chip))
    sizes = [cut.tokens_at(at) for at in (depth, depth + 1, 2 * depth, 4 * depth)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(LEAST <= size <= LARGEST and size & (size - 1) == 0 for size in sizes)
    if depth >= DEEP:
        assert sizes[0] <= 512


def test_on_a_cpu_the_model_alone_decides():
    small, large = work_named("gemma-3-270m"), work_named("Qwen3-8B")
    unused = fitted(lookup("Apple M1", 8))
    for latency in (None, unused):
        assert Chunking(small, "cpu", latency).tokens_at(0) == 256
        assert Chunking(large, "cpu", latency).tokens_at(200_000) == LEAST


@hypothesis_given(st.integers(0, 300_000), st.integers(0, 300_000))
def test_bands_cover_a_prompt_in_order(start, more):
    cut = chunking("Qwen3-30B-A3B", "Apple M2 Pro", 19)
    bands = list(cut.bands(start, start + more))
    assert [begin for begin, _, _ in bands] == [start, *(end for _, end, _ in bands)][: len(bands)]
    assert sum(end - begin for begin, end, _ in bands) == more
    assert all(cut.tokens_at(begin) == cut.tokens_at(end - 1) == size for begin, end, size in bands)
    assert all(one[2] > two[2] for one, two in itertools.pairwise(bands))


def test_whole_chunks_end_at_the_last_cut():
    cut = Chunking(work_named("Qwen3-8B"), "metal", None)
    assert [whole_chunks(cut, tokens) for tokens in (0, 511, 512, 1500, 70_000)] == [0, 0, 512, 1024, 69_632]


def test_the_peak_of_a_deep_prompt_is_that_of_its_small_chunks_or_of_the_large_ones_before():
    entry = find("Qwen3-30B-A3B")
    weighed = weigh(entry.config, "metal", packing=Packing(4))
    shape = weighed.shape(weighed.plan(KVSpec()), "metal")
    cut = chunking("Qwen3-30B-A3B", "Apple M4 Max", 40)
    assert cut.tokens_at(0) > cut.tokens_at(DEEP)
    peak = prompt_peak(shape, cut, held=0, new=2 * DEEP)
    small = predict_peak(shape, held=DEEP, new=DEEP, chunk=cut.tokens_at(DEEP))
    large = predict_peak(shape, held=0, new=DEEP, chunk=cut.tokens_at(0))
    assert peak.total == max(small.total, large.total)
    assert peak.working < predict_peak(shape, held=0, new=2 * DEEP, chunk=cut.tokens_at(0)).working
    assert prompt_peak(shape, cut, held=100, new=0, reply=1).total > 0
