"""Verified in one pass or decoded one by one, the tokens are the same: any class, layout and bits, whatever is drafted."""

from itertools import cycle
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.kv.models import FAMILIES, SPECS, VOCABULARY, config_of, largest_difference, model_of, tokens
from tests.engine.speculation.scripted import Decoding, Knowing, always_right, always_wrong, at_random
from tests.families import LAYOUTS, crossed, walked
from tokamac.engine import OptionError
from tokamac.engine.kv.plan import plan_caches

DRAFTERS = {"right": always_right, "wrong": always_wrong, "at random": at_random}


def prompt_of(length: int) -> list[int]:
    ids: list[int] = tokens(length, 5)[0].tolist()  # type: ignore[assignment]
    return ids


def check_goes_on(found: Decoding, make: Any) -> None:
    """Whatever was taken back, the caches go on as ones that never went further."""
    lane = found.lane
    fresh = make(0)
    more = tokens(3, 9)
    model = found.model
    model(mx.array([lane.cached_ids]), cache=fresh)
    assert largest_difference(model(more, cache=lane.caches), model(more, cache=fresh)) < 1e-3


@pytest.mark.parametrize(("spec", "ahead"), crossed(SPECS, [True, False]))
@pytest.mark.parametrize("name", walked(FAMILIES, LAYOUTS))
def test_every_layout_and_bits_say_the_same_and_go_on_the_same(name: str, spec: str, ahead: bool) -> None:
    model, config = model_of(name), config_of(name)
    try:
        plan = plan_caches(model, config, SPECS[spec])
    except OptionError:
        assert name == "deepseek_v3"  # latent attention is neither packed nor bounded
        return
    prompt = prompt_of(9)
    plain = Decoding(model, plan.make(0), prompt, most=90, ahead=ahead).run()
    for drafter in DRAFTERS.values():
        found = Decoding(
            model, plan.make(0), prompt, drafter=drafter([*prompt, *plain], VOCABULARY), most=90, ahead=ahead
        )
        assert found.run() == plain
        if spec == "growing":
            check_goes_on(found, plan.make)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_beside_a_recurrent_state_a_ring_takes_back_whole_passes(name: str) -> None:
    """What came true is read again with each wrong draft, and then has to be taken back with it."""
    model = model_of(name)
    make = plan_caches(model, config_of(name), SPECS["ring"]).make
    prompt = prompt_of(30)
    plain = Decoding(model, make(0), prompt, most=150).run()
    right = cycle([20, 5])
    drafter = Knowing([*prompt, *plain], lambda: next(right), VOCABULARY, width=31)
    assert Decoding(model, make(0), prompt, drafter=drafter, most=150).run() == plain
