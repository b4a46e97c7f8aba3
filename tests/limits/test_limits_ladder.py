"""What is done where a prefill does not fit: in which order, how far, and what a refusal says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits.test_limits_peak import SHAPE
from tokamac.engine.errors import MemoryLimitError
from tokamac.engine.perf.mitigation import MitigationStep, gb, offers, refusal, relieving, steps, told_apart
from tokamac.engine.perf.peak_memory import ModelShape, Peak, predict_peak

WEIGHTS, KV, BESIDE = 1000, 200, 300


def peak_at(chunk: int) -> Peak:
    """A model whose temporaries are a byte for each token of a chunk."""
    return Peak(WEIGHTS, KV, chunk, BESIDE)


def least() -> int:
    return WEIGHTS + KV + 32


@pytest.mark.parametrize(
    ("budget", "rungs", "missing"),
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
def test_the_steps_in_their_order(budget, rungs, missing):
    found = steps(peak_at, budget, chunk=256, pool=40)
    assert (found.rungs, found.missing) == (rungs, missing)


def test_fused_attention_goes_before_smaller_chunks():
    def fused_at(chunk: int) -> Peak:
        return Peak(WEIGHTS, KV, chunk // 2, BESIDE)

    found = steps(peak_at, WEIGHTS + KV + 64 + BESIDE, chunk=256, fused_at=fused_at)
    assert (found.rungs, found.fused) == ((MitigationStep("fused", 128), MitigationStep("chunk", 128)), True)
    assert found.peak == fused_at(128)


def test_fused_attention_that_spares_nothing_is_no_step():
    found = steps(peak_at, WEIGHTS + KV + 64 + BESIDE, chunk=256, fused_at=peak_at)
    assert (found.rungs, found.fused) == ((MitigationStep("chunk", 64),), False)


def test_an_empty_pool_is_no_step():
    assert steps(peak_at, least() + BESIDE, chunk=256).rungs == (MitigationStep("chunk", 32),)


def test_a_chunk_smaller_than_the_floor_stays():
    assert steps(peak_at, 1, chunk=8).chunk == 8


def test_where_no_chunk_fits_that_which_takes_least_is_taken():
    """Small chunks may take more: few enough scores are written down for all heads at once."""
    found = steps(lambda chunk: Peak(0, 0, {256: 90, 128: 60, 64: 70, 32: 80}[chunk], 0), 50, chunk=256)
    assert (found.chunk, found.missing) == (128, 10)


@given(st.integers(0, 2500), st.integers(0, 100), st.sampled_from([32, 100, 256, 512]))
def test_what_fits_after_the_steps_fits_the_budget(budget, pool, chunk):
    found = steps(peak_at, budget, chunk=chunk, pool=pool)
    assert found.missing == max(0, found.peak.total - budget)
    assert 0 <= found.peak.prompt_cache <= BESIDE
    order = ["pool", "chunk", "prompt cache"]
    assert [order.index(rung.name) for rung in found.rungs] == sorted(order.index(rung.name) for rung in found.rungs)


@given(st.integers(1, 2500), st.integers(1, 500))
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
        "this prompt of 20,000 tokens needs 3.50 GB of memory (weights 2.00 GB, KV cache 1.00 GB, temporaries 0.50 GB), "
        "and 3.00 GB may be used"
    )
    assert error.hint.startswith("It would fit with --kv-bits 8 (")


def test_two_sizes_that_look_alike_are_told_apart():
    assert told_apart(2_040_000, 2_010_000) == ("2,040,000 bytes", "2,010,000 bytes")
    assert told_apart(2_400_000, 2_010_000) == ("2.4 MB", "2.0 MB")
    assert told_apart(5, 5) == ("0.0 MB", "0.0 MB")


def test_a_refusal_says_how_to_go_beyond_the_limit_where_the_machine_has_as_much():
    peak = Peak(4_500_000_000, 540_000_001, 0, 0)
    assert "--memory 5.041 overrides the limit" in refusal("it", peak, 10**9, [], there_is=16 << 30).hint
    assert "--memory" not in refusal("it", peak, 10**9, [], there_is=4 << 30).hint


def test_relieving_takes_every_step_there_is_and_refuses_nothing():
    peaks = {64: Peak(100, 0, 50, 30), 32: Peak(100, 0, 25, 30)}
    found = relieving(lambda chunk: peaks[max(chunk, 32)], 90, chunk=64, pool=7)
    assert [(rung.name, rung.amount) for rung in found.rungs] == [("pool", 7), ("chunk", 32), ("prompt cache", 30)]
    assert (found.peak.total, found.missing) == (125, 35)
    assert relieving(lambda chunk: peaks[chunk], 500, chunk=64).rungs == ()


def test_a_refusal_without_an_offer_says_what_else_helps():
    assert refusal("it", Peak(1, 1, 1, 0), 1, []).hint == "Close other programs, shorten it, or take a smaller model."


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MB"), (1_250_000, "1.2 MB"), (10**8, "0.10 GB"), (2**34, "17.18 GB")]
)
def test_sizes_as_text(size, text):
    assert gb(size) == text
