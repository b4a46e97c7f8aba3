"""When caches are made larger: known before the token that does it."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from tokamac.engine.kv.cache import Cache, GrowthWatcher
from tokamac.engine.kv.codec import Plain
from tokamac.engine.kv.layout import STEP, Growing, Ring


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
