"""The one place where mlx-lm is touched: nobody else may notice."""

import importlib
import sys
from typing import Any

import mlx.core as mx
import pytest

from tests.kv.models import bypassed, feed, largest_difference, tiny_llama, tokens
from tokamac.engine import KVSpec
from tokamac.engine.kv import install_seam, plan_caches
from tokamac.engine.kv.attention import NAME


@pytest.fixture
def original() -> Any:
    """mlx-lm's own function, whatever is installed by now."""
    from mlx_lm.models import base

    return getattr(getattr(base, NAME), "__wrapped__", getattr(base, NAME))


def test_installing_twice_changes_nothing_more() -> None:
    from mlx_lm.models import base

    install_seam()
    first = getattr(base, NAME)
    install_seam()
    assert getattr(base, NAME) is first
    assert not hasattr(first.__wrapped__, "__wrapped__")


def test_modules_imported_before_and_after_are_covered(original: Any) -> None:
    from mlx_lm.models import base

    early = importlib.import_module("mlx_lm.models.llama")
    setattr(early, NAME, original)  # as if it had been imported before anything was installed
    install_seam()
    assert getattr(early, NAME) is getattr(base, NAME)
    sys.modules.pop("mlx_lm.models.olmo2", None)
    late = importlib.import_module("mlx_lm.models.olmo2")
    assert getattr(late, NAME) is getattr(base, NAME)


def test_a_stranger_who_rebound_the_name_is_left_alone() -> None:
    module = importlib.import_module("mlx_lm.models.qwen2")
    install_seam()
    ours = getattr(module, NAME)

    def theirs(*args: Any, **kwargs: Any) -> None: ...

    try:
        setattr(module, NAME, theirs)
        install_seam()
        assert getattr(module, NAME) is theirs
    finally:
        setattr(module, NAME, ours)


def test_other_users_of_mlx_lm_see_it_unchanged(original: Any) -> None:
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    model, ids = tiny_llama(), tokens(60)
    makers = (KVCache, lambda: RotatingKVCache(16, keep=2), lambda: QuantizedKVCache(32, 8))
    install_seam()
    seam = getattr(llama, NAME)
    for make in makers:
        results = []
        for bound in (seam, original):
            setattr(llama, NAME, bound)
            results.append(feed(model, [make(), make()], ids, [20, 1, 1]))
        setattr(llama, NAME, seam)
        assert largest_difference(*results) == 0
    without = [model(ids)[0]]
    assert largest_difference(without[0], feed(model, [KVCache(), KVCache()], ids, [])) < 1e-4


def test_quantized_strangers_still_cannot_have_sinks() -> None:
    from mlx_lm.models import base
    from mlx_lm.models.cache import QuantizedKVCache

    install_seam()
    x = mx.zeros((1, 1, 1, 32))
    with pytest.raises(ValueError, match="sinks"):
        getattr(base, NAME)(x, x, x, QuantizedKVCache(32, 8), 1.0, None, mx.zeros((1,)))


def test_gemma2_is_unchanged_for_strangers() -> None:
    from mlx_lm.models import gemma2
    from mlx_lm.models.cache import KVCache

    from tests.kv.test_exact import gemma2 as make

    model, ids = make(), tokens(30)
    install_seam()
    ours = gemma2.Attention.__call__
    with_door = feed(model, [KVCache() for _ in model.layers], ids, [10, 1])
    try:
        gemma2.Attention.__call__ = ours.__wrapped__
        without = feed(model, [KVCache() for _ in model.layers], ids, [10, 1])
    finally:
        gemma2.Attention.__call__ = ours
    assert largest_difference(with_door, without) == 0


def test_calls_are_counted_so_that_a_bypass_shows() -> None:
    model = tiny_llama()
    caches = plan_caches(model, {}, KVSpec()).make()
    feed(model, caches, tokens(5), [2, 1])
    assert [cache.seam_calls for cache in caches] == [3, 3]
    caches = plan_caches(model, {}, KVSpec()).make()
    caches[1].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
    assert bypassed(caches) == [(1,)]
