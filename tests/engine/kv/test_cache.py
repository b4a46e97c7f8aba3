"""Caches against plain references: codec and layout, one layer, a whole model, and when they grow."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from tests.engine.kv.models import (
    VOCABULARY,
    MovingReference,
    Reference,
    Taken,
    bypassed,
    codec,
    feed,
    follow,
    largest_difference,
    llama_move,
    offset,
    overhear,
    reference_logits,
    seeded,
    seen,
    tiny_llama,
    tokens,
    trim,
)
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.kv import attention
from tokamac.engine.kv.cache import Cache, GrowthWatcher, nbytes, rewindable
from tokamac.engine.kv.costs import GROWTH, STEP, group_for
from tokamac.engine.kv.layout import (
    AFFINE_BITS,
    Affine,
    Codec,
    Growing,
    Layout,
    Plain,
    Ring,
    Slots,
    Span,
    rotation_block,
    visible,
)
from tokamac.engine.kv.plan import CachePlan, plan_caches

# What a codec writes down can be read back, multiplied as it lies, and weighed to the byte.

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


# Slots and positions, against the rule of the contract and a dictionary that remembers everything.

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
        for p, row in zip(rows, mask.tolist(), strict=True):
            shown = sorted(q for q, visible in zip(columns, row, strict=True) if visible)
            assert shown == [q for q in range(p + 1) if sees(ring, p, q)]
            assert len(shown) <= ring.window
        start += count


@given(ring=rings, count=st.integers(1, 60), back=st.integers(0, 12), again=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_ring_says_how_far_it_can_be_rewound_and_is_right(ring: Ring, count: int, back: int, again: int) -> None:
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
    assert mask.tolist() == [[False, False, False, True, True, True]]
    assert Ring(window=8, spare=0).mask(4, 1, reach=8) is None
    narrowed = Ring(window=8, spare=0).mask(4, 1, reach=2)
    assert narrowed.tolist() == [[False, False, False, True, True]]


@given(ring=rings, start=st.integers(0, 90), held=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(1, 70)))
@settings(max_examples=150, deadline=None)
def test_one_tokens_row_is_what_comparing_positions_gives(ring: Ring, start: int, held: int, reach: int | None) -> None:
    row = ring.mask(start, 1, as_array=True)
    compared = visible(mx.array([start]), ring._positions(start + 1), ring.window, ring.keep, None)
    assert row.dtype == mx.bool_
    assert row.tolist() == compared.tolist()
    last = Growing().mask(held - 1, 1, reach=reach, as_array=True)
    assert last.tolist() == visible(mx.array([held - 1]), mx.arange(held), None, 0, reach).tolist()


def test_a_ring_without_spare_slots_shows_one_token_all_it_holds() -> None:
    ring = Ring(window=8, keep=2, spare=0)
    assert all(ring.mask(start, 1) is None for start in range(40))
    mask = ring.mask(20, 1, as_array=True)
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


# One layer's cache, against the plain reference: shapes, windows, keeps, bits and cuts at random.

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


@given(
    rings=st.booleans(),
    window=st.integers(4, 20),
    keep=st.integers(0, 3),
    spare=st.integers(0, 12),
    count=st.integers(1, 80),
    back=st.integers(1, 40),
    chunk=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_taking_back_then_going_on_equals_never_having_gone_further(  # noqa: PLR0917
    rings: bool, window: int, keep: int, spare: int, count: int, back: int, chunk: int
) -> None:
    layout, codecs = Ring(window, keep, spare) if rings else Growing(), (codec(8), codec(4))
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
    wanted = expected((short[0], short[1], short[2]), codecs, window if rings else None, keep)[:, :, start:]
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


# A seeded model with our caches, against plain references: full attention masked by position, each token encoded
# once.

LLAMA = {"model_type": "llama"}
EXACT_DIM = 32


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


def following(plan: CachePlan, taken: list[Taken]) -> list[Any]:
    """Return new caches that encode what others were given."""
    caches = plan.make()
    for cache, its in zip(caches, taken, strict=True):
        follow(cache, its)
    return caches


def reference(spec: KVSpec) -> Reference:
    rotated = EXACT_DIM if spec.key_bits <= 4 else None
    keep = spec.keep if isinstance(spec.keep, int) else 0
    codecs = codec(spec.key_bits, rotated_dim=rotated), codec(spec.value_bits)
    if spec.window is None or not keep:
        return Reference(*codecs, spec.window, keep)
    return MovingReference(*codecs, spec.window, keep, llama_move(spec.key_bits))


@given(
    bits=st.sampled_from([(16, 16), (16, 16), (8, 8), (8, 4), (4, 4), (16, 5), (3, 16), (6, 2)]),
    window=st.one_of(st.none(), st.integers(8, 40)),
    keep=st.integers(0, 7),
    times=st.floats(0.3, 6.0),
    cuts=st.lists(st.integers(1, 90), max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_model_equals_the_reference_however_its_prompt_is_cut(  # noqa: PLR0917
    llama: Any, bits: tuple[int, int], window: int | None, keep: int, times: float, cuts: list[int], seed: int
) -> None:
    spec = KVSpec(key_bits=bits[0], value_bits=bits[1], group_size=32, window=window, keep=keep)
    ids = tokens(max(2, int((window or 30) * times)), seed)
    caches = plan_caches(llama, LLAMA, spec).make()
    taken = [overhear(cache) for cache in caches]
    logits = feed(llama, caches, ids, cuts)
    wanted = reference_logits(llama, ids, lambda _: reference(spec), taken)
    assert largest_difference(logits, wanted) < 1e-4
    assert offset(caches) == ids.shape[1]
    assert bypassed(caches) == []


def test_the_default_is_bit_for_bit_mlx_lms_own_cache(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    monkeypatch.setattr(
        attention, "NUMPY_SCORES", 1 << 62
    )  # the same kernel on both sides: what differs is the caches'
    ids, cuts = tokens(300), [130, 1, 1, 1, 100]
    caches, theirs = plan_caches(llama, LLAMA, KVSpec()).make(), make_prompt_cache(llama)
    assert largest_difference(feed(llama, caches, ids, cuts), feed(llama, theirs, ids, cuts)) == 0
    assert nbytes(theirs) == sum(cache.nbytes for cache in theirs)
    assert nbytes(caches) == sum(cache.nbytes for cache in caches)


@given(
    back=st.integers(1, 64),
    prompt=st.integers(65, 300),
    bits=st.sampled_from([(16, 16), (8, 4)]),
    cut=st.integers(1, 99),
)
@settings(max_examples=10, deadline=None)
def test_a_model_taken_back_after_wrapping_goes_on(
    llama: Any, back: int, prompt: int, bits: tuple[int, int], cut: int
) -> None:
    spec = KVSpec(*bits, 32, window=32, keep=4)
    plan = plan_caches(llama, LLAMA, spec)
    ids, other = tokens(prompt), tokens(back, seed=9)
    caches = plan.make()
    taken = [overhear(cache) for cache in caches]
    feed(llama, caches, mx.concatenate([ids, other], axis=1), [cut])
    assert rewindable(caches) >= 64
    assert trim(caches, back) == back
    for its in taken:
        its.trim(back)
    went_on = feed(llama, caches, tokens(40, seed=4), [1, 1])
    straight = following(plan, taken)
    feed(llama, straight, ids, [])
    assert largest_difference(went_on, feed(llama, straight, tokens(40, seed=4), [])) < 1e-4


def gpt_oss() -> Any:
    from mlx_lm.models import gpt_oss as module

    args = module.ModelArgs(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY, hidden_size=64,
        intermediate_size=32, head_dim=32, num_attention_heads=4, num_key_value_heads=2, sliding_window=16,
        rope_theta=10_000, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = seeded(module.Model(args))
    for layer in model.layers:
        layer.self_attn.sinks = layer.self_attn.sinks + mx.array([0.5, 2.0, -1.0, 3.0])
    return model


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
def test_sinks_inside_the_model_work_with_any_bits(bits: tuple[int, int]) -> None:
    model, ids = gpt_oss(), tokens(96)
    spec = KVSpec(*bits, 32)
    plan = plan_caches(model, {"model_type": "gpt_oss"}, spec)
    assert [(layer.kind, layer.window) for layer in plan.layers] == [("window", 16), ("full", None)]
    rotated = EXACT_DIM if bits[0] <= 4 else None

    def by_position(index: int) -> Reference:
        return Reference(codec(bits[0], rotated_dim=rotated), codec(bits[1]), 16 if index == 0 else None, 0)

    for cuts in ([], [1] * 95, [30, 1, 1, 40]):
        caches = plan.make()
        taken = [overhear(cache) for cache in caches]
        logits = feed(model, caches, ids, cuts)
        assert largest_difference(logits, reference_logits(model, ids, by_position, taken)) < 1e-4
        assert bypassed(caches) == []


def gemma2() -> Any:
    from mlx_lm.models import gemma2 as module

    args = module.ModelArgs(
        model_type="gemma2", hidden_size=64, num_hidden_layers=3, intermediate_size=64, num_attention_heads=4, head_dim=32,
        rms_norm_eps=1e-6, vocab_size=VOCABULARY, num_key_value_heads=2, attn_logit_softcapping=5.0, query_pre_attn_scalar=32,
    )  # fmt: skip
    return seeded(module.Model(args))


def gemma2_logits(model: Any, ids: mx.array, windows: list[int | None], codecs: tuple[Any, Any]) -> mx.array:
    """Run gemma 2 layer by layer with mlx-lm's own code, each layer with its own mask."""
    hidden = model.model.embed_tokens(ids) * model.args.hidden_size**0.5
    for layer, window in zip(model.layers, windows, strict=True):
        hidden = layer(hidden, seen(ids.shape[1], window, 0), Reference(*codecs, window, 0))
    out = model.model.embed_tokens.as_linear(model.model.norm(hidden))
    return (mx.tanh(out / model.final_logit_softcapping) * model.final_logit_softcapping)[0]


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_gemma2_slides_in_every_second_layer_as_its_config_says(bits: tuple[int, int]) -> None:
    model, ids = gemma2(), tokens(3 * 20)
    config = {"model_type": "gemma2", "sliding_window": 20}
    plan = plan_caches(model, config, KVSpec(*bits, 32))
    assert [layer.window for layer in plan.layers] == [20, None, 20]
    assert "slide over 20 tokens" in plan.notes[0]
    wanted = gemma2_logits(model, ids, [20, None, 20], (codec(bits[0]), codec(bits[1])))
    unmasked = gemma2_logits(model, ids, [None, None, None], (codec(bits[0]), codec(bits[1])))
    assert largest_difference(wanted, unmasked) > 0.1  # the window matters here
    for cuts in ([], [1] * 59, [25, 1, 1, 30]):
        caches = plan.make()
        assert largest_difference(feed(model, caches, ids, cuts), wanted) < 1e-3
        assert bypassed(caches) == []


def test_a_model_whose_layers_slide_in_part_gets_a_mask_for_each() -> None:
    model, ids = tiny_llama(layers=3), tokens(3 * 20)
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    plan = plan_caches(model, config, KVSpec(8, 8, 32))
    assert [layer.window for layer in plan.layers] == [None, 20, 20]

    hidden = model.model.embed_tokens(ids)
    for layer, window in zip(model.layers, [None, 20, 20], strict=True):
        hidden = layer(hidden, seen(60, window, 0), Reference(codec(8), codec(8), window, 0))
    wanted = model.model.embed_tokens.as_linear(model.model.norm(hidden))[0]
    for cuts in ([], [1] * 59, [25, 1, 1, 30]):
        assert largest_difference(feed(model, plan.make(), ids, cuts), wanted) < 1e-3


# When caches are made larger: known before the token that does it.


def write(cache: Cache, tokens: int) -> None:
    some = mx.zeros((1, 1, tokens, 8))
    cache.update_and_fetch(some, some)


def test_growth_is_known_before_the_token_that_causes_it():
    cache = Cache(Growing(), Plain(), Plain())
    write(cache, STEP - 1)
    room = GrowthWatcher([cache])
    assert not room.will_grow(cache.offset)
    write(cache, 1)
    assert room.will_grow(cache.offset)
    assert not room.grew()
    write(cache, 1)
    assert room.grew()
    assert not room.will_grow(cache.offset)


def test_a_ring_grows_to_its_limit_and_no_further():
    cache = Cache(Ring(window=STEP, spare=64), Plain(), Plain())
    room = GrowthWatcher([cache])
    grew = []
    for _ in range(2 * STEP):
        foreseen = room.will_grow(cache.offset)
        write(cache, 1)
        assert room.grew() == foreseen
        grew += [cache.offset] if foreseen else []
    assert grew == [1, STEP + 1]


def test_mlx_lms_own_caches_are_asked_about_at_every_step():
    room = GrowthWatcher([KVCache()])
    assert [held for held in range(1, 3 * STEP) if room.will_grow(held)] == [STEP, 2 * STEP]


# A prefix that several caches hold once is as good as a copy each.

HEADS, DIM = 2, 32


def some_kv(count: int, seed: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, HEADS, count, DIM), key=mx.random.key(2 * seed + part)) for part in (0, 1))
    return keys, values


def attended(cache: Cache, keys: mx.array, values: mx.array) -> mx.array:
    """Add some tokens, and return what three query heads a key head make of them."""
    count = keys.shape[2]
    queries = mx.random.normal((1, 3 * HEADS, count, DIM), key=mx.random.key(count))
    mask = cache.make_mask(count)
    return cache.attend(queries, *cache.update_and_fetch(keys, values), scale=DIM**-0.5, mask=mask)


def held(cache: Cache) -> list[mx.array]:
    return [array[..., : cache.offset, :] for array in cache.arrays]


@given(
    key_bits=st.sampled_from([16, 8, 4]),
    value_bits=st.sampled_from([16, 8, 4]),
    rotated=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "trim", "share", "own", "copy"]), st.integers(0, 2), st.integers(1, 24)),
        max_size=14,
    ),
)
@settings(max_examples=60, deadline=None)
def test_shared_prefixes_equal_own(
    key_bits: int, value_bits: int, rotated: bool, steps: list[tuple[str, int, int]]
) -> None:
    codecs = codec(key_bits, rotated_dim=DIM if rotated else None), codec(value_bits)
    pairs = [(Cache(Growing(), *codecs), Cache(Growing(), *codecs)) for _ in range(3)]  # one may share, one never does
    for number, (what, which, count) in enumerate([("add", 0, 20), ("share", 0, 15), *steps]):
        shares, alone = pairs[which]
        if what == "add":
            found, expected = (attended(cache, *some_kv(count, number)) for cache in (shares, alone))
            assert largest_difference(found, expected) < 1e-5
        elif what == "trim":
            assert shares.trim(count) == alone.trim(count)
        elif what == "own":
            shares.own_prefix()
            assert not shares.prefix
        elif what == "copy":
            pairs[(which + 1) % 3] = shares.copy(), alone.copy()
        elif shares.offset >= count:
            prefix = shares.share_prefix(count)
            tokens = sum(each.tokens for each in prefix)
            other, copied = Cache(Growing(), *codecs), alone.copy()
            other.begin_with(prefix)
            copied.trim(alone.offset - tokens)
            pairs[(which + 1) % 3] = other, copied
        for one, another in pairs:
            assert one.offset == another.offset
            assert one.rewindable == another.rewindable
            if one.offset:
                assert all(mx.array_equal(*arrays) for arrays in zip(held(one), held(another), strict=True))


def test_what_is_shared_counts_once_and_nobody_writes_to_it() -> None:
    first, second = Cache(Growing(), Plain(), Plain()), Cache(Growing(), Plain(), Plain())
    attended(first, *some_kv(1000, 0))
    before = nbytes([first])
    second.begin_with(first.share_prefix(1000))
    assert nbytes([first]) == nbytes([second]) == nbytes([first, second]) <= before
    attended(second, *some_kv(1, 1))
    second.trim(500)
    assert second.offset == 501
    attended(second, *some_kv(1, 2))
    assert mx.array_equal(held(first)[0], some_kv(1000, 0)[0])
    with pytest.raises(ValueError, match="empty"):
        second.begin_with(first.prefix)


def test_a_prefix_that_could_not_be_computed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = Cache(Growing(), codec(8), Plain()), Cache(Growing(), codec(8), Plain())
    attended(cache, *some_kv(40, 0))
    attended(alone, *some_kv(40, 0))

    def no_memory(*_: object) -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        with pytest.raises(RuntimeError, match="allocate"):
            cache.share_prefix(15)
    assert not cache.prefix
    assert all(mx.array_equal(*arrays) for arrays in zip(held(cache), held(alone), strict=True))
    assert largest_difference(*(attended(each, *some_kv(3, 2)) for each in (cache, alone))) < 1e-5


@pytest.mark.parametrize("shared", [None, (30, 15), (15, 30), (0, 15), (15, 0)])
def test_what_came_since_a_copy_is_taken_back_whatever_was_shared(shared: tuple[int, int] | None) -> None:
    cache, alone = Cache(Growing(), Plain(), Plain()), Cache(Growing(), Plain(), Plain())
    attended(cache, *some_kv(40, 0))
    attended(alone, *some_kv(40, 0))
    before, since = shared or (0, 0)
    if before:
        cache.share_prefix(before)
    earlier = cache.copy()
    attended(cache, *some_kv(10, 1))
    if since:
        cache.share_prefix(since)
    elif before:
        cache.own_prefix()
    cache.restore(earlier)
    assert sum(each.tokens for each in cache.prefix) == max(before, since)
    for number in range(2):
        assert cache.offset == alone.offset == 40 + 3 * number
        assert all(mx.array_equal(*arrays) for arrays in zip(held(cache), held(alone), strict=True))
        found, expected = (attended(each, *some_kv(3, 2)) for each in (cache, alone))
        assert largest_difference(found, expected) < 1e-5
    assert earlier.offset == 40


@pytest.mark.parametrize("cache", [Cache(Ring(8), Plain(), Plain()), Cache(Growing(), Plain(), Plain(), shared=True)])
def test_a_window_and_keys_that_other_layers_read_are_not_shared(cache: Cache) -> None:
    assert not cache.can_share
