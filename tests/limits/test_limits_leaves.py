"""Leaves are those of MLX, for every family; and what was weighed once is not weighed again, unless something else is asked."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tokamac.engine.device import DeviceKind
from tokamac.engine.model.config import read_config
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import leaf_modules
from tokamac.engine.perf.footprint import Footprint, module_of, weigh
from tokamac.engine.perf.machine import elsewhere
from tokamac.engine.perf.what_if import WhatIfCase, outcome

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_leaves_are_those_that_mlx_finds(family: str) -> None:
    model = module_of(read_config(GOLDEN / family))
    theirs = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    ours = leaf_modules(model)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert all(our is their for (_, our), (_, their) in zip(ours, theirs, strict=True))


def test_a_module_among_plain_values_is_found_and_one_without_modules_below_is_a_leaf() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = [1, 2]
            self.named = {"inner": [nn.Linear(2, 2), nn.RMSNorm(2)], "empty": {}}
            self.bare = nn.Module()

    model = Odd()
    theirs = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    assert [path for path, _ in leaf_modules(model)] == [path for path, _ in theirs]
    assert {path for path, _ in theirs} == {"named.inner.0", "named.inner.1", "bare"}
    assert leaf_modules(nn.Linear(2, 2)) == []


def test_a_module_that_was_found_goes_at_once_with_its_last_owner() -> None:
    """Or the weights that a load replaces would stay until the next full search for garbage: twice the memory."""
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        held = weakref.ref(leaf_modules(model)[0][1])
        assert held() is not None
        del model
        assert held() is None
    finally:
        gc.enable()


@pytest.fixture
def config() -> Any:
    return read_config(GOLDEN / FAMILIES[0])


@pytest.mark.parametrize(
    ("device", "memory_bytes", "packing"),
    [("cpu", 1 << 34, None), ("metal", 1, None), ("metal", 1 << 34, Packing(8)), ("metal", 1 << 34, Packing(8, 32))],
)
def test_what_was_weighed_stays_and_whatever_differs_is_weighed_anew(
    config: Any, device: DeviceKind, memory_bytes: int, packing: Packing | None
) -> None:
    first = weigh(config, "metal", 1 << 34)
    assert isinstance(first, Footprint)
    assert weigh(dict(config), "metal", 1 << 34) is first
    assert weigh(config, device, memory_bytes, packing=packing) is not first
    assert weigh({**config, "vocab_size": config["vocab_size"] * 2}, "metal", 1 << 34) is not first


def test_what_is_said_of_a_case_does_not_depend_on_what_was_asked_before(config: Any) -> None:
    place = elsewhere("Apple M4 Max", 40, 64)
    case = WhatIfCase(context=512, prompt=512)
    before = outcome(config, case, place)
    packed = outcome(config, replace(case, kv=KVSpec(key_bits=8, value_bits=8)), place)
    assert packed.kv_bytes != before.kv_bytes
    assert outcome(config, case, place) == before
    assert outcome(config, replace(case, context=1024), place).kv_bytes != before.kv_bytes
