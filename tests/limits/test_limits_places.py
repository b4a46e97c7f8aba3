"""Places: this machine, and machines that are only named, by the chip table, with what is and is not known of them."""

import pytest

from tests.limits.test_limits_whatif import LLAMA, M4_MAX, PLACES
from tokamac.engine.errors import OptionError
from tokamac.engine.perf.bandwidth import LARGEST
from tokamac.engine.perf.hardware import table as chip_rows
from tokamac.engine.perf.machine import GIB, elsewhere, here
from tokamac.engine.perf.what_if import WhatIfCase, outcome


def test_a_place_elsewhere_is_what_the_table_says() -> None:
    assert M4_MAX.chip.bandwidth_gbs == 546
    assert M4_MAX.memory_bytes == 64 * GIB
    assert M4_MAX.latency is not None
    assert (M4_MAX.device, M4_MAX.local) == ("metal", False)


@pytest.mark.parametrize("name", ["Apple M2 Ultra", "m2 ultra", "apple m2 ultra", " M2  Ultra "])
def test_a_chip_is_found_without_its_maker_and_in_any_case(name: str) -> None:
    assert elsewhere(name).chip.bandwidth_gbs == 800


def test_one_bandwidth_needs_no_core_count_but_the_peak_stays_unknown() -> None:
    found = outcome(LLAMA, WhatIfCase(4), elsewhere("M2 Ultra"))
    assert found.expected_tps is not None
    assert (found.prefill_tps, found.ttft_s) == (None, None)
    assert "GPU cores" in (found.reason or "")


def test_two_bandwidths_of_one_name_are_told_apart_by_cores_or_refused() -> None:
    assert elsewhere("M4 Max", 32).chip.bandwidth_gbs == 410
    with pytest.raises(OptionError, match="several memory bandwidths") as refused:
        elsewhere("M4 Max")
    assert "32 or 40" in refused.value.hint


def test_cores_that_no_bin_has_are_refused() -> None:
    with pytest.raises(OptionError, match="38 GPU cores"):
        elsewhere("M4 Max", 38)
    with pytest.raises(OptionError, match="does not apply"):
        elsewhere("NVIDIA H200", 132)


def test_an_unknown_chip_names_near_ones() -> None:
    with pytest.raises(OptionError, match="M4 Mox") as refused:
        elsewhere("Apple M4 Mox")
    assert "Apple M4 Max" in refused.value.hint


def test_of_a_mac_elsewhere_two_thirds_are_sure_all_is_too_much_and_between_is_unknown() -> None:
    place = elsewhere("M3", 10, 24)
    fits = [place.fit(weights=gib * GIB, kv=0, working=0).fits for gib in (15, 16, 17, 24, 25)]
    assert fits == [True, True, None, None, False]
    assert "two thirds" in (place.budget_rule or "")


def test_without_a_size_of_memory_nothing_is_said_of_it() -> None:
    place = elsewhere("M3", 10)
    assert (place.memory_bytes, place.budget_bytes, place.budget_rule) == (None, None, None)
    assert place.fit(weights=1, kv=1, working=1).fits is None


def test_a_card_has_the_memory_that_it_has_and_no_published_pace() -> None:
    card = elsewhere("NVIDIA GeForce RTX 3090")
    assert card.memory_bytes == card.budget_bytes == 24 * GIB
    found = outcome(LLAMA, WhatIfCase(4), card)
    assert found.memory is not None
    assert found.memory.fits
    assert found.ceiling_tps is not None
    assert found.expected_tps is None
    assert "RTX 3090" in (found.reason or "")


def test_everywhere_is_the_whole_table() -> None:
    assert len(PLACES) == len(chip_rows())
    assert all(place.chip.bandwidth_gbs is not None for place in PLACES)
    assert {place.memory_bytes for place in PLACES if place.device == "metal"} == {64 * GIB}


def test_here_is_this_machine() -> None:
    place = here(LARGEST)
    assert place.local
    assert place.budget_rule is None
    assert place.memory_bytes is None or place.memory_bytes > 1 << 28
