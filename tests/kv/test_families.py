"""Every family that the golden cases hold: nothing may pass our caches by, and the default must be mlx-lm's own to the bit."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.kv.models import feed, largest_difference, seeded, tokens
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.config import model_classes, read_config
from tokamac.engine.kv import Cache, bypassed, plan_caches
from tokamac.engine.kv.probe import leaves

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
LEFT_ALONE = {
    # family: why none of its caches is ours
    "deepseek_v3": "latent attention",
    "stablelm": "does not take keys and values as the cache hands them out",
}
CUTS = [12, 1, 1, 5, 1]


def build(family: str) -> tuple[Any, dict[str, Any]]:
    config = read_config(GOLDEN / family)
    made, arguments = model_classes(config)
    return seeded(made(arguments.from_dict(config))), config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_through_the_seam_and_is_exact_by_default(family: str) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, config = build(family)
    ids = tokens(24)
    plan = plan_caches(model, config, KVSpec())
    caches = plan.make()
    wanted = feed(model, make_prompt_cache(model), ids, CUTS)
    assert largest_difference(feed(model, caches, ids, CUTS), wanted) == 0
    assert bypassed(caches) == []
    ours = [cache for _, cache in leaves(caches) if isinstance(cache, Cache)]
    if family in LEFT_ALONE:
        assert not ours
        assert LEFT_ALONE[family] in " ".join(plan.notes)
        return
    assert ours
    try:
        packed = plan_caches(model, config, KVSpec(8, 8)).make()
    except OptionError as error:
        assert "no group size" in error.message  # noqa: PT017, the tiny model's heads are too small for any group
        return
    off = feed(model, packed, ids, CUTS) - wanted
    assert float((mx.linalg.norm(off) / mx.linalg.norm(wanted)).item()) < 0.1
    assert bypassed(packed) == []
