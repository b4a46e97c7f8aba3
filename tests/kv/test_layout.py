"""Slots and positions, against the rule of the contract and a dictionary that remembers everything."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine import OptionError
from tokamac.engine.kv.layout import GROWTH, STEP, Growing, Ring, Slots, Span, visible

rings = st.integers(2, 24).flatmap(
    lambda window: st.builds(Ring, st.just(window), st.integers(0, window - 1), st.integers(0, 9))
)


def sees(ring: Ring, p: int, q: int) -> bool:
    return q <= p and (q < ring.keep or q > p - (ring.window - ring.keep))


@given(ring=rings, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_ring_shows_every_token_what_the_rule_says_and_nothing_else(ring: Ring, cuts: list[int]) -> None:
    slots: dict[int, int] = {}  # slot → the position it holds
    start = 0
    for count in cuts:
        before = [slots[slot] for slot in range(ring.used(start))]
        for span in ring.spans(start, count):
            slots.update({span.slot + i: start + span.token + i for i in range(span.length)})
        rows = range(start, start + count)
        columns = [slots[slot] for slot in range(ring.used(start + count))]
        if not ring.fits(start, count):
            columns = [*before, *rows]
        mask = ring.mask(start, count, as_array=True)
        assert isinstance(mask, mx.array)
        for p, row in zip(rows, mask.tolist(), strict=True):
            shown = sorted(q for q, visible in zip(columns, row, strict=True) if visible)
            assert shown == [q for q in range(p + 1) if sees(ring, p, q)]
            assert len(shown) <= ring.window
        start += count


@given(ring=rings, count=st.integers(1, 60), back=st.integers(0, 12), again=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_ring_says_how_far_it_can_be_rewound_and_keeps_its_word(
    ring: Ring, count: int, back: int, again: int
) -> None:
    slots: dict[int, int] = {}

    def write(start: int, count: int) -> None:
        for span in ring.spans(start, count):
            slots.update({span.slot + i: start + span.token + i for i in range(span.length)})

    write(0, count)
    assert ring.rewindable(count, count) >= min(count, ring.spare)
    offset = count - min(back, ring.rewindable(count, count))
    needed = [q for q in range(offset) if sees(ring, offset, q)]
    assert set(needed) <= set(slots.values())
    high = max(count, offset + again)
    for position in range(offset, offset + again):  # one by one, so that each is written before it is read
        write(position, 1)
        mask = ring.mask(position, 1, as_array=True)
        assert isinstance(mask, mx.array)
        shown = sorted(slots[slot] for slot, visible in enumerate(mask[0].tolist()) if visible)
        assert shown == [q for q in range(position + 1) if sees(ring, position, q)]
    assert ring.rewindable(offset + again, high) <= offset + again


def test_a_mask_is_left_out_where_everything_is_seen() -> None:
    ring = Ring(window=16, keep=4, spare=8)
    assert ring.mask(0, 16) == "causal"
    assert ring.mask(15, 1) is None
    assert isinstance(ring.mask(16, 1), mx.array)
    assert Growing().mask(1000, 1) is None
    assert Growing().mask(0, 7) == "causal"


def test_a_model_that_asks_for_a_window_of_a_growing_cache_gets_it() -> None:
    mask = Growing().mask(5, 1, reach=3)
    assert isinstance(mask, mx.array)
    assert mask.tolist() == [[False, False, False, True, True, True]]
    assert Ring(window=8, spare=0).mask(4, 1, reach=8) is None
    narrowed = Ring(window=8, spare=0).mask(4, 1, reach=2)
    assert isinstance(narrowed, mx.array)
    assert narrowed.tolist() == [[False, False, False, True, True]]


@given(ring=rings, start=st.integers(0, 90), held=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(1, 70)))
@settings(max_examples=150, deadline=None)
def test_one_tokens_row_is_what_comparing_positions_gives(ring: Ring, start: int, held: int, reach: int | None) -> None:
    row = ring.mask(start, 1, as_array=True)
    assert isinstance(row, mx.array)
    compared = visible(mx.array([start]), ring._positions(start + 1), ring.window, ring.keep, None)
    assert row.dtype == mx.bool_
    assert row.tolist() == compared.tolist()
    last = Growing().mask(held - 1, 1, reach=reach, as_array=True)
    assert isinstance(last, mx.array)
    assert last.tolist() == visible(mx.array([held - 1]), mx.arange(held), None, 0, reach).tolist()


def test_a_ring_without_spare_slots_shows_one_token_all_it_holds() -> None:
    ring = Ring(window=8, keep=2, spare=0)
    assert all(ring.mask(start, 1) is None for start in range(40))
    mask = ring.mask(20, 1, as_array=True)
    assert isinstance(mask, mx.array)
    assert mask.tolist() == [[True] * 8]


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(OptionError, match="leaves no room"):
        Ring(window=8, keep=8)
    with pytest.raises(OptionError):
        Ring(window=8, keep=-1)
    with pytest.raises(OptionError):
        Ring(window=8, spare=-1)


def test_growing_copies_a_bounded_number_of_tokens_per_append_at_any_depth() -> None:
    slots, copied = Slots(None), 0
    for position in range(0, 40_000, 50):
        before = slots.capacity
        slots.write((mx.zeros((1, 1, 50, 1)),), [Span(0, position, 50)], position + 50)
        copied += before if slots.capacity != before else 0
    assert copied <= (GROWTH + 1) * 40_000
    assert slots.capacity <= 40_000 * (1 + 1 / GROWTH) + STEP


def test_stores_that_share_arrays_do_not_see_each_others_writes() -> None:
    one = Slots(None)
    one.write((mx.ones((1, 1, 4, 2)),), [Span(0, 0, 4)], 4)
    other = one.copy()
    other.write((mx.zeros((1, 1, 1, 2)),), [Span(0, 0, 1)], 4)
    one.write((2 * mx.ones((1, 1, 1, 2)),), [Span(0, 3, 1)], 4)
    assert one.read(4)[0][0, 0, :, 0].tolist() == [1, 1, 1, 2]
    assert other.read(4)[0][0, 0, :, 0].tolist() == [0, 1, 1, 1]
