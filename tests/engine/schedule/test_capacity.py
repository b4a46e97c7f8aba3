"""How many replies at once: by hand, and what must hold for every model of the catalogue on every chip of the table."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.perf.test_what_if import LLAMA, M4_MAX, NAMES, PLACES
from tokamac.engine.chunking import slots_after
from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import find
from tokamac.engine.perf.footprint import Footprint, weigh
from tokamac.engine.perf.roofline import Workload, constants_of
from tokamac.engine.perf.what_if import Machine, WeighedModel, WhatIfCase, elsewhere, load, outcome_at
from tokamac.engine.schedule.capacity import (
    AS_ONE,
    SEVERAL_UNTIMED,
    WIDTHS,
    Capacity,
    WidthOutcome,
    capacity,
    capacity_of,
)
from tokamac.engine.schedule.schedule import beside_s

# Weights of the llama: of one of its two tables of words, and of one of its 32 layers.
EMBEDDING, LAYER = 128_256 * 4096, 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
MULTIPLIED = EMBEDDING + 32 * LAYER
KV_BYTES = 32 * 2 * 8 * 128 * 2  # of a token
CASE = WhatIfCase(16, context=1000, prompt=600)


def llama(case: WhatIfCase = CASE, place: Machine = M4_MAX) -> WeighedModel:
    weighed = weigh(LLAMA, place.device, packing=case.packing())
    assert isinstance(weighed, Footprint)
    return load(weighed, case.kv, place)


def by_replies(found: Capacity) -> dict[int, WidthOutcome]:
    return {each.replies: each for each in found.widths}


# By hand ------------------------------------------------------------------------------------------------------------------


def test_weights_are_read_once_and_keys_and_values_by_each() -> None:
    found = by_replies(capacity(llama(), CASE))
    weights = 2 * (MULTIPLIED + 65 * 4096)
    for replies in (1, 2, 8):
        step_s = (weights + replies * 1000 * KV_BYTES) / 546e9
        assert found[replies].ceiling_tps == pytest.approx(replies / step_s)
        assert found[replies].each_tps == pytest.approx((found[replies].expected_tps or 0) / replies)
        assert found[replies].waits == "memory"


@pytest.mark.parametrize(
    ("bits", "bytes_of_weight", "first"), [(16, 2, 30), (8, 1 + 4 / 64, 16), (4, 1 / 2 + 4 / 64, 9)]
)
def test_arithmetic_is_the_limit_from_the_ridges_width_on(bits: int, bytes_of_weight: float, first: int) -> None:
    """At a context of one token a reply adds two operations for each weight, and next to no bytes."""
    case = WhatIfCase(bits, context=1, prompt=1)
    found = capacity(llama(case), case, range(1, 41))
    assert found.ridge == pytest.approx(16_160 / 546, rel=1e-3)
    assert 2 * (first - 1) / bytes_of_weight < (found.ridge or 0) < 2 * first / bytes_of_weight
    assert found.arithmetic_from == first
    waits = [each.waits for each in found.widths if each.replies <= 40]
    assert waits == ["memory"] * (first - 1) + ["compute"] * (41 - first)
    at_most = 16.16e12 / (2 * MULTIPLIED)  # of all together, whatever their number
    assert by_replies(found)[40].ceiling_tps == pytest.approx(at_most, rel=1e-3)


def test_of_many_rows_arithmetic_takes_what_it_takes_of_a_prompt() -> None:
    case = WhatIfCase(4, context=1, prompt=1)
    one, many = capacity(llama(case), case, (1, 128)).widths[:2]
    share = constants_of().prefill["shaders"]["dense"]
    products_s = 2 * 128 * MULTIPLIED / (share * 16.16e12)
    read_s = (MULTIPLIED * (1 / 2 + 4 / 64) + 2 * 65 * 4096) / (constants_of().shared * 546e9)
    others_s = 1 / (one.expected_tps or 1) - read_s  # launches, and next to no attention
    assert 128 / (many.expected_tps or 1) == pytest.approx(products_s + others_s, rel=0.01)
    assert many.expected_tps == pytest.approx(share * (many.ceiling_tps or 0), rel=0.05)


def test_of_long_replies_the_caches_are_read_more_than_the_weights_and_arithmetic_never_limits() -> None:
    case = WhatIfCase(4, context=8192, prompt=2048)
    found = capacity(llama(case), case)
    weights = (MULTIPLIED * (1 / 2 + 4 / 64)) + 65 * 4096 * 2
    assert found.caches_from == int(weights / (8192 * KV_BYTES)) + 1
    assert found.arithmetic_from is None


def test_memory_is_the_weights_once_and_a_cache_for_each() -> None:
    loaded = llama()
    one, two, nine = (loaded.fit(CASE, replies) for replies in (1, 2, 9))
    assert one == outcome_at(loaded, CASE).memory
    assert {each.weights for each in (one, two, nine)} == {2 * (2 * EMBEDDING + 32 * LAYER + 65 * 4096)}
    assert (two.kv, nine.kv) == (2 * one.kv, 9 * one.kv)
    assert one.kv == 1000 * KV_BYTES
    each = two.total - one.total
    room, row = (1024 - 1000) * KV_BYTES, 3 * 4 * 128_256  # room to grow, and a row of logits
    assert 0 <= each - one.kv - room - row < 2 << 20
    assert nine.total == one.total + 8 * each


def test_as_many_fit_as_the_memory_has_room_for_and_not_one_more() -> None:
    found = capacity(llama(), CASE)
    fitting = found.fitting
    assert fitting is not None
    each = llama().fit(CASE, 2).total - llama().fit(CASE).total
    assert fitting == 1 + int((64 * 2**30 * 2 / 3 - llama().fit(CASE).total) // each)
    assert by_replies(found)[fitting].memory.fits
    assert found.or_more  # macOS may give a GPU more than two thirds


@pytest.mark.parametrize(("memory_gb", "fits"), [(12, False), (16, None)])
def test_of_a_model_too_large_for_the_memory_none_fits_or_perhaps_one(memory_gb: float, fits: bool | None) -> None:
    found = capacity(llama(place=elsewhere("Apple M4", 10, memory_gb)), CASE)  # of 16.1 GB of weights
    assert (found.fitting, found.or_more) == (0, fits is None)
    assert found.widths[0].memory.fits is fits


def test_without_the_machines_memory_it_is_unknown_how_many_fit() -> None:
    found = capacity(llama(place=elsewhere("Apple M4 Max", 40)), CASE)
    assert (found.fitting, found.or_more, found.memory_bytes) == (None, False, None)
    assert [each.replies for each in found.widths] == list(WIDTHS)


def test_the_most_that_fit_are_a_row_of_their_own() -> None:
    found = capacity(llama(), CASE, (1, 3))
    assert [each.replies for each in found.widths] == [1, 3, found.fitting]


def test_a_newcomer_waits_for_the_steps_between_the_pieces_of_its_prompt() -> None:
    found = by_replies(capacity(llama(), CASE, range(1, 4)))
    alone, beside_two = found[1], found[3]
    step_s = 2 / (found[2].expected_tps or 1)
    assert alone.newcomer_ttft_s == outcome_at(llama(), CASE).ttft_s
    assert beside_two.newcomer_ttft_s == pytest.approx(beside_s(alone.newcomer_ttft_s or 0, step_s))


@dataclass(frozen=True)
class OneAtATime:
    """A latency that knows a step of one reply alone, as a measured machine's does."""

    def decode_s(self, work: Workload, context: int, batch: int = 1) -> float | None:
        return 0.1 if batch == 1 else None

    def prefill_s(self, work: Workload, tokens: int, cached: int, chunk: int) -> float | None:
        return 1.0


def test_what_is_not_known_of_several_says_so() -> None:
    found = capacity(replace(llama(), latency=OneAtATime()), CASE)
    one, two = found.widths[:2]
    assert one.expected_tps == 10
    assert (two.expected_tps, two.each_tps) == (None, None)
    assert two.ceiling_tps is not None
    assert (two.newcomer_ttft_s, by_replies(found)[4].newcomer_ttft_s) == (pytest.approx(1.9), None)
    assert found.notes == (SEVERAL_UNTIMED,)


def test_packed_weights_have_a_note_and_others_none() -> None:
    case = WhatIfCase(4)
    assert capacity(llama(case), case).notes == (AS_ONE,)
    assert capacity(llama(), CASE).notes == ()


def test_what_can_not_be_weighed_or_kept_is_refused() -> None:
    with pytest.raises(OptionError, match="unheard_of"):
        capacity_of({**LLAMA, "model_type": "unheard_of"}, CASE, M4_MAX)
    with pytest.raises(OptionError, match="48 numbers per head"):
        capacity_of({**LLAMA, "head_dim": 48}, WhatIfCase(4, kv=KVSpec(8, 8)), M4_MAX)
    assert capacity_of(LLAMA, CASE, M4_MAX) == capacity(llama(), CASE)


# Every model and chip -----------------------------------------------------------------------------------------------------


@cache
def weighed(name: str) -> Footprint | str:
    entry = find(name)
    return weigh(entry.config, "metal", packing=WhatIfCase(4).packing())


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    place=st.sampled_from(PLACES),
    context=st.integers(1, 40_000),
    filled=st.floats(0, 1),
    widths=st.sets(st.integers(1, 300), min_size=2, max_size=6),
)
def test_together_never_slower_each_never_faster_and_memory_grows_by_the_same(
    name: str, place: Machine, context: int, filled: float, widths: set[int]
) -> None:
    model = weighed(name)
    if isinstance(model, str):
        return
    case = WhatIfCase(4, context=context, prompt=max(1, round(filled * context)))
    loaded = load(model, case.kv, place)
    if loaded.limits(context) is None:
        return
    found = capacity(loaded, case, sorted(widths))
    one, two = loaded.fit(case).total, loaded.fit(case, 2).total
    for fewer, more in pairwise(found.widths):
        for name_of in ("ceiling_tps", "expected_tps"):
            before, after = getattr(fewer, name_of), getattr(more, name_of)
            assert (before is None) == (after is None)
            if before is not None and after is not None:
                assert after >= before * (1 - 1e-9)
                assert after / more.replies <= before / fewer.replies * (1 + 1e-9)
        assert more.memory.total - fewer.memory.total == (more.replies - fewer.replies) * (two - one)
    for each in found.widths:
        assert (each.expected_tps or 0) <= (each.ceiling_tps or 0) * (1 + 1e-9)
        assert each.memory.kv == each.replies * loaded.plan.bytes_at(context)
        if found.ridge is not None and each.waits is not None and each.replies <= 300:
            assert (each.waits == "compute") == (
                found.arithmetic_from is not None and each.replies >= found.arithmetic_from
            )
    if found.fitting is not None:
        assert all(each.memory.fits is True for each in found.widths if each.replies <= found.fitting)
        assert loaded.fit(case, found.fitting + 1).fits is not True


@settings(max_examples=40, deadline=None)
@given(prompt=st.integers(1, 20_000), reply=st.integers(0, 2000))
def test_caches_have_room_for_the_reply_and_a_sixteenth_more_at_most(prompt: int, reply: int) -> None:
    slots = slots_after(llama().chunking, prompt, reply)
    assert prompt + reply <= slots <= (prompt + reply) * 17 / 16 + 256
    assert slots % 256 == 0
