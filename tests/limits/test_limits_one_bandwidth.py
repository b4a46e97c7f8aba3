"""One model has one bandwidth: its engine, the inspection, the picker's list and the what-if table agree at a context."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tokamac.app.backend.advice import answers
from tokamac.app.backend.protocol import Answer, Question
from tokamac.engine import Engine
from tokamac.engine.device import device_kind
from tokamac.engine.perf import bandwidth, measurement_store
from tokamac.engine.perf.hardware import detect
from tokamac.engine.perf.inspection import inspect, model_ref, prospect
from tokamac.engine.perf.machine import elsewhere, here
from tokamac.engine.perf.what_if import WhatIfCase

CONTEXT = 300


@dataclass(frozen=True)
class Sizes:
    """What is kept of this machine's bandwidth, GB/s by bytes: a CPU's caches make small sets faster."""

    gbs: dict[int, float]


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """A cache folder in which every size of model has a bandwidth of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if detect().bandwidth_gbs is not None:
        pytest.skip("the table knows this chip: it has one bandwidth for all")
    machine, known, size = measurement_store.machine_key(detect(), device_kind()), {}, bandwidth.SMALLEST
    while size <= bandwidth.LARGEST:
        known[size] = 3e10 / size
        size *= 2
    measurement_store.keep(bandwidth.store_file(), {f"{machine} | {size} bytes": gbs for size, gbs in known.items()})
    return Sizes(known)


def last(question: Question) -> Answer:
    *_, found = answers(question)
    assert isinstance(found, Answer)
    return found


def test_every_reckoning_of_a_model_has_the_same_ceiling_at_the_same_context(sizes: Sizes) -> None:
    with Engine.load("guide", prompt_cache=None) as engine:
        limits = engine.limits(CONTEXT)
    assert limits.bandwidth_gbs == sizes.gbs[bandwidth.bucket(limits.weight_bytes_per_token or 0)]
    case = WhatIfCase(context=CONTEXT, prompt=CONTEXT)
    asked = Question("table", "guide", context=CONTEXT, prompt=CONTEXT)
    (listed,) = last(Question("disk", "", context=CONTEXT, prompt=CONTEXT, names=("guide",))).models
    table = last(asked)
    said = {
        "inspect": inspect(model_ref("guide"), case).ceiling_tps,
        "inspect, of a place for all models": inspect(model_ref("guide"), case, here()).ceiling_tps,
        "the list": prospect("guide", case, here()).outcome.ceiling_tps,
        "the picker": listed.figures.ceiling_tps,
        "what if": table.cases[0].figures.ceiling_tps,
    }
    assert said == dict.fromkeys(said, pytest.approx(limits.ceiling_tps))
    assert listed.context == CONTEXT


def test_in_a_list_every_model_has_the_bandwidth_of_its_own_size(sizes: Sizes, tmp_path: Path) -> None:
    tiny, case, place = make_tiny(tmp_path / "tiny"), WhatIfCase(context=64, prompt=64), here()
    found = [prospect(str(model), case, place).outcome.place.chip for model in (tiny, "guide", tiny)]
    assert [chip.bandwidth_gbs for chip in found] == [
        sizes.gbs[bandwidth.SMALLEST], inspect(model_ref("guide"), case).chip.bandwidth_gbs, sizes.gbs[bandwidth.SMALLEST],
    ]  # fmt: skip
    assert found[0].bandwidth_gbs != found[1].bandwidth_gbs
    assert all(chip.source == "measured" for chip in found)


def test_a_place_of_the_table_has_one_bandwidth_for_all() -> None:
    place = elsewhere("M4 Max", 40, 64)
    assert place.reading(1) is place
