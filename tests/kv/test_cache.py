"""One layer's cache, against the plain reference: shapes, windows, keeps, bits and cuts at random."""

import random

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.models import codec, largest_difference, seen
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.codec import Codec
from tokamac.engine.kv.layout import Growing, Layout, Ring

DIM, HEADS, REPEATS = 32, 2, 2
BITS = st.sampled_from((16, 8, 6, 5, 4, 3, 2))


def random_kv(count: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries (1, H·R, count, D), keys and values (1, H, count, D)."""
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    shape = (1, HEADS, count, DIM)
    return (
        mx.random.normal((1, HEADS * REPEATS, count, DIM), key=a),
        mx.random.normal(shape, key=b),
        mx.random.normal(shape, key=c),
    )


def step(cache: Cache, kv: tuple[mx.array, mx.array, mx.array], start: int, count: int) -> mx.array:
    """Feed tokens start…start + count; return what they gather."""
    queries, keys, values = (x[..., start : start + count, :] for x in kv)
    mask = cache.make_mask(count)
    handed = cache.update_and_fetch(keys, values)
    out = cache.attend(queries, *handed, scale=DIM**-0.5, mask=mask)
    mx.eval(out, cache.state)
    return out


def expected(
    kv: tuple[mx.array, mx.array, mx.array], codecs: tuple[Codec, Codec], window: int | None, keep: int
) -> mx.array:
    queries, keys, values = kv
    keys, values = (coded.decode(coded.encode(x)) for coded, x in zip(codecs, (keys, values), strict=True))
    mask = seen(queries.shape[2], window, keep)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5, mask=mask)


@given(
    bits=st.tuples(BITS, BITS),
    rotate=st.booleans(),
    window=st.one_of(st.none(), st.integers(2, 20)),
    keep=st.integers(0, 6),
    spare=st.integers(0, 8),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    direct=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_cache_gathers_what_the_reference_does(  # noqa: PLR0917
    bits: tuple[int, int],
    rotate: bool,
    window: int | None,
    keep: int,
    spare: int,
    cuts: list[int],
    direct: bool,
    seed: int,
) -> None:
    keep = 0 if window is None else min(keep, window - 1)
    layout: Layout = Growing() if window is None else Ring(window, keep, spare)
    codecs = codec(bits[0], rotated_dim=DIM if rotate else None), codec(bits[1], rotated_dim=DIM if rotate else None)
    kv = random_kv(sum(cuts), seed)
    cache, start, parts = Cache(layout, *codecs, direct=direct), 0, []
    for count in cuts:
        parts.append(step(cache, kv, start, count))
        start += count
    assert largest_difference(mx.concatenate(parts, axis=2), expected(kv, codecs, window, keep)) < 1e-4
    assert cache.offset == start
    assert cache.size() == min(start, window or start)


@pytest.mark.parametrize(
    ("ring", "bits"),
    [(None, (8, 4)), (Ring(24, 3, 12), (16, 16)), (Ring(24, 3, 12), (8, 4)), (Ring(24, 0, 12), (4, 8))],
    ids=str,
)
def test_a_thousand_speculative_steps_equal_never_having_gone_further(ring: Ring | None, bits: tuple[int, int]) -> None:
    dice = random.Random(11)
    codecs = codec(bits[0]), codec(bits[1])
    cache = Cache(ring or Growing(), *codecs)
    kv = random_kv(2200, 5)
    wrong = random_kv(2200, 6)  # drafts that will be taken back
    held, parts = 0, []
    for _ in range(1000):
        draft, good = dice.randint(1, 6), dice.randint(0, 2)
        queries, keys, values = (
            mx.concatenate([x[..., held : held + good, :], y[..., held : held + draft, :]], axis=2)
            for x, y in zip(kv, wrong, strict=True)
        )
        mask = cache.make_mask(good + draft)
        handed = cache.update_and_fetch(keys, values)
        out = cache.attend(queries, *handed, scale=DIM**-0.5, mask=mask)
        assert cache.rewindable >= draft
        assert cache.trim(draft) == draft
        held += good
        assert cache.offset == held
        parts.append(out[:, :, :good])
    mx.eval(parts)
    limit = 700  # the reference is quadratic
    whole = mx.concatenate(parts, axis=2)
    assert whole.shape[2] == held > limit
    short = tuple(x[..., :limit, :] for x in kv)
    wanted = expected((short[0], short[1], short[2]), codecs, ring.window if ring else None, ring.keep if ring else 0)
    assert largest_difference(whole[:, :, :limit], wanted) < 1e-4


@given(
    window=st.integers(4, 20),
    keep=st.integers(0, 3),
    spare=st.integers(0, 12),
    count=st.integers(1, 80),
    back=st.integers(1, 40),
    chunk=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_taking_back_then_going_on_equals_never_having_gone_further(  # noqa: PLR0917
    window: int, keep: int, spare: int, count: int, back: int, chunk: int
) -> None:
    layout, codecs = Ring(window, keep, spare), (codec(8), codec(4))
    kv, other = random_kv(count + 40, 1), random_kv(count, 2)
    cache = Cache(layout, *codecs)
    went_back = min(back, count)
    for start in range(0, count, chunk):
        length = min(chunk, count - start)
        # The tokens to be taken back are others than those that follow.
        mixed = tuple(
            mx.concatenate([x[..., : count - went_back, :], y[..., count - went_back : count, :]], axis=2)
            for x, y in zip(kv, other, strict=True)
        )
        step(cache, (mixed[0], mixed[1], mixed[2]), start, length)
    allowed = went_back <= cache.rewindable
    assert cache.trim(went_back) == (went_back if allowed else 0)
    if not allowed:
        assert cache.offset == count
        return
    start = count - went_back
    out = [step(cache, kv, start, 3), step(cache, kv, start + 3, 1), step(cache, kv, start + 4, 36)]
    total = start + 40
    short = tuple(x[..., :total, :] for x in kv)
    wanted = expected((short[0], short[1], short[2]), codecs, window, keep)[:, :, start:]
    assert largest_difference(mx.concatenate(out, axis=2), wanted) < 1e-4


@pytest.mark.parametrize("layout", [Growing(), Ring(300, 4, 64)], ids=str)
@pytest.mark.parametrize("bits", [(16, 16), (8, 4), (4, 16)])
def test_bytes_reported_equal_bytes_held(layout: Layout, bits: tuple[int, int]) -> None:
    codecs = codec(bits[0]), codec(bits[1])
    cache = Cache(layout, *codecs)
    assert cache.nbytes == 0
    assert cache.empty()
    kv = random_kv(900, 0)
    step(cache, kv, 0, 500)
    step(cache, kv, 500, 400)
    keys, values, *_ = cache.state
    assert cache.nbytes == sum(array.nbytes for array in (*keys, *values))
    slots = keys[0].shape[2]
    assert slots == 364 if layout.window else 900 <= slots <= 1024
    assert cache.nbytes == slots * sum(coded.token_bytes(HEADS, DIM, 4) for coded in codecs)


def test_a_full_ring_grows_no_more() -> None:
    cache = Cache(Ring(64, 4, 64), codec(4), codec(4))
    kv = random_kv(600, 0)
    step(cache, kv, 0, 200)
    full = cache.nbytes
    for start in range(200, 600, 50):
        step(cache, kv, start, 50)
    assert cache.nbytes == full


def test_what_cannot_be_taken_back_is_refused_and_said() -> None:
    cache = Cache(Ring(16, 2, 4), codec(16), codec(16))
    kv = random_kv(60, 0)
    step(cache, kv, 0, 20)
    assert cache.rewindable == 20
    step(cache, kv, 20, 30)
    assert cache.rewindable == 4
    assert cache.is_trimmable()
    assert cache.trim(5) == 0
    assert cache.offset == 50
    assert cache.trim(4) == 4
    assert cache.rewindable == 0
    assert not cache.is_trimmable()
    assert cache.trim(0) == cache.trim(-3) == 0
    assert cache.offset == 46


def test_a_copy_shares_until_one_of_the_two_writes() -> None:
    kv, other = random_kv(80, 0), random_kv(80, 1)
    first = Cache(Ring(16, 2, 8), codec(8), codec(4))
    step(first, kv, 0, 40)
    second = first.copy()
    step(second, other, 40, 3)
    alone = Cache(Ring(16, 2, 8), codec(8), codec(4))
    step(alone, kv, 0, 40)
    assert largest_difference(step(first, kv, 40, 5), step(alone, kv, 40, 5)) == 0
    assert second.offset == 43


def test_state_can_be_put_back() -> None:
    kv = random_kv(80, 0)
    first = Cache(Ring(16, 2, 8), codec(8), codec(4))
    step(first, kv, 0, 40)
    second = Cache(Ring(16, 2, 8), codec(8), codec(4))
    second.state = first.state
    assert second.rewindable == first.rewindable
    assert largest_difference(step(first, kv, 40, 5), step(second, kv, 40, 5)) == 0


@pytest.mark.parametrize("count", [1, 50])
def test_a_shared_cache_hands_out_the_same_again(count: int) -> None:
    kv = random_kv(100, 0)
    cache = Cache(Ring(16, 2, 8), codec(8), codec(4), shared=True)
    step(cache, kv, 0, 40)
    queries, keys, values = (x[..., 40 : 40 + count, :] for x in kv)
    mask = cache.make_mask(count)
    handed = cache.update_and_fetch(keys, values)
    first = cache.attend(queries, *handed, scale=1.0, mask=mask)
    again = cache.attend(queries, *cache.keys_and_values(), scale=1.0, mask=mask)
    assert largest_difference(first, again) == 0


def test_asking_a_cache_for_what_it_was_not_planned_to_share_fails() -> None:
    with pytest.raises(RuntimeError, match="planned"):
        Cache(Growing(), codec(16), codec(16)).keys_and_values()
