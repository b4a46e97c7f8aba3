"""Several sequences in one pass are, bit by bit, what each is alone: any class, any layout, any bits, coming and going."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from tests.engine.kv.models import FAMILIES, SPECS, config_of, model_of, tiny_llama, tokens
from tests.families import LAYOUTS, walked
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.kv.cache import forward, nbytes, why_alone
from tokamac.engine.kv.plan import plan_caches

Lane = list[Any]


def begin(model: Any, make: Callable[[], Lane], length: int, seed: int) -> Lane:
    """Return the caches of a sequence that has read a prompt."""
    caches = make()
    model(tokens(length, seed), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def step_together_and_alone(model: Any, lanes: list[Lane], alone: list[Lane], ids: list[mx.array]) -> bool:
    """Run the next tokens of all lanes both ways; return whether the logits are the same, bit by bit."""
    expected = mx.concatenate([model(each, cache=caches) for each, caches in zip(ids, alone, strict=True)], axis=0)
    found = forward(model, mx.concatenate(ids, axis=0), lanes)
    mx.eval(expected, found, [[cache.state for cache in caches] for caches in (*lanes, *alone)])
    return bool(mx.array_equal(found, expected))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", walked(FAMILIES, LAYOUTS))
def test_lanes_join_and_leave_at_every_step(name: str, spec: str) -> None:
    model, config = model_of(name), config_of(name)
    try:
        plan = plan_caches(model, config, SPECS[spec])
    except OptionError:
        assert name == "deepseek_v3"  # latent attention is neither packed nor bounded
        return
    assert not why_alone(model, config, plan.make)
    running: list[tuple[Lane, Lane]] = []
    for at in range(24):
        if at % 3 == 0:
            running.append((begin(model, plan.make, 1 + 7 * at % 40, at), begin(model, plan.make, 1 + 7 * at % 40, at)))
        if at % 5 == 4:
            running.pop(at % len(running))
        ids = [tokens(1, 100 * at + number) for number in range(len(running))]
        assert step_together_and_alone(model, [one for one, _ in running], [other for _, other in running], ids)
    for one, other in running:
        assert nbytes(one) == nbytes(other)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=5),
    count=st.integers(1, 6),
    spec=st.sampled_from(sorted(SPECS)),
)
@settings(max_examples=25, deadline=None)
def test_any_lengths_and_any_number_of_tokens_at_once(lengths: list[int], count: int, spec: str) -> None:
    model = tiny_llama()
    make = plan_caches(model, {"model_type": "llama"}, SPECS[spec]).make
    lanes, alone = (
        [begin(model, make, length, seed) if length else make() for seed, length in enumerate(lengths)]
        for _ in range(2)
    )
    assert step_together_and_alone(model, lanes, alone, [tokens(count, 60 + seed) for seed in range(len(lengths))])


def test_what_was_taken_back_from_one_row_leaves_the_others_as_they_are() -> None:
    model = tiny_llama()
    make = plan_caches(model, {"model_type": "llama"}, SPECS["packed ring"]).make
    lanes, alone = ([begin(model, make, length, length) for length in (5, 30)] for _ in range(2))
    assert step_together_and_alone(model, lanes, alone, [tokens(4, 1), tokens(4, 2)])
    for caches in (lanes[1], alone[1]):
        for cache in caches:
            assert cache.trim(3) == 3
    assert step_together_and_alone(model, lanes, alone, [tokens(1, 3), tokens(1, 4)])
    assert [cache.offset for caches in lanes for cache in caches] == [10, 10, 32, 32]


def test_modules_of_others_behave_as_before() -> None:
    model, config = model_of("deepseek_v3"), config_of("deepseek_v3")
    before = model(tokens(7), cache=make_prompt_cache(model))
    assert not why_alone(model, config, plan_caches(model, config, KVSpec()).make)
    assert mx.array_equal(model(tokens(7), cache=make_prompt_cache(model)), before)
