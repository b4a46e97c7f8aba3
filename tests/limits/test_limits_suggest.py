"""Which models would run well: verdicts by hand, and the order of the whole catalogue."""

from dataclasses import replace

import pytest

from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.machine import Machine, elsewhere
from tokamac.engine.perf.what_if import (
    VERDICTS,
    Suggestion,
    WhatIfCase,
    WhatIfOutcome,
    rank,
    reason_of,
    suggestion,
    suggestions,
    verdict_of,
)

M4_PRO = elsewhere("M4 Pro", 20, 48)
NAMED = (
    "Qwen3-0.6B-4bit",
    "Qwen3-8B-4bit",
    "Qwen3-30B-A3B-4bit",
    "Llama-3.3-70B-Instruct-4bit",
    "gpt-oss-120b-MXFP4-Q8",
)


def of(name: str, place: Machine) -> Suggestion:
    entry = find(name)
    assert entry is not None
    repository = entry.repository(name)
    assert repository is not None
    return suggestion(entry, repository, WhatIfCase(context=4096, prompt=4096), place)


def outcome(
    total: int, *, expected: float | None = 50.0, ceiling: float | None = 60.0, place: Machine = M4_PRO
) -> WhatIfOutcome:
    fit = place.fit(weights=total, kv=0, working=0)
    return WhatIfOutcome(
        WhatIfCase(), place, weight_bytes=total, memory=fit, ceiling_tps=ceiling, expected_tps=expected
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (outcome(10 << 30), "runs well"),
        (outcome(10 << 30, expected=9.9), "slow"),
        (outcome(10 << 30, expected=None), "fits, speed unknown"),
        (outcome(10 << 30, expected=None, ceiling=None), "fits, speed unknown"),
        (outcome(10 << 30, expected=None, ceiling=9.9), "slow"),
        (outcome(30 << 30), "tight"),
        (outcome(40 << 30), "unknown whether it fits"),
        (outcome(49 << 30), "does not fit"),
        (outcome(1, place=elsewhere("M4 Pro", 20)), "unknown whether it fits"),
    ],
)
def test_a_verdict(found: WhatIfOutcome, verdict: str) -> None:
    assert verdict_of(found) == verdict


def test_best_first_is_the_most_capable_that_runs_well() -> None:
    ranked = sorted((of(name, M4_PRO) for name in NAMED), key=rank)
    assert [each.id.rpartition("/")[2] for each in ranked] == [
        "Qwen3-30B-A3B-4bit",  # 30.5B weights, 3B of them active: about a dense model of 10B
        "Qwen3-8B-4bit",
        "Qwen3-0.6B-4bit",
        "Llama-3.3-70B-Instruct-4bit",
        "gpt-oss-120b-MXFP4-Q8",
    ]
    assert [each.verdict for each in ranked] == [*["runs well"] * 3, "unknown whether it fits", "does not fit"]


def test_where_the_speed_is_unknown_what_fits_is_sorted_by_size() -> None:
    card = elsewhere("NVIDIA GeForce RTX 4090")
    ranked = sorted((of(name, card) for name in NAMED), key=rank)
    assert [each.verdict for each in ranked] == [*["fits, speed unknown"] * 3, *["does not fit"] * 2]
    assert [each.size for each in ranked[:3]] == sorted((each.size for each in ranked[:3]), reverse=True)
    assert all("RTX 4090" in each.reason for each in ranked[:3])


def test_more_bits_of_the_same_model_go_first_where_both_run_well() -> None:
    ranked = sorted((of(name, M4_PRO) for name in ("Qwen3-0.6B-4bit", "Qwen3-0.6B-8bit")), key=rank)
    assert [each.id[-4:] for each in ranked] == ["8bit", "4bit"]


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (50_398_208, "needs 50.4 MB of 34.4 GB"),
        (9_568_000_000, "needs 9.57 GB of 34.4 GB"),
        (999_960_000, "needs 1,000 MB"),
    ],
)
def test_a_small_model_needs_no_fraction_of_a_large_unit(total: int, said: str) -> None:
    found = outcome(total)
    assert reason_of(found, verdict_of(found)).startswith(said)


def test_a_reason_has_the_numbers() -> None:
    assert "GB of 34.4 GB" in of("Qwen3-8B-4bit", M4_PRO).reason
    assert "51.5 GB in all" in of("gpt-oss-120b-MXFP4-Q8", M4_PRO).reason
    assert "two thirds" in of("Llama-3.3-70B-Instruct-4bit", M4_PRO).reason


def test_the_whole_catalogue_is_there_once_in_order_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    found = suggestions(M4_PRO, 2048, progress=lambda done, total: told.append((done, total)))
    everything = [each.id for entry in catalogue() for each in entry.repositories]
    assert sorted(each.id for each in found) == sorted(everything)
    assert [VERDICTS.index(each.verdict) for each in found] == sorted(VERDICTS.index(each.verdict) for each in found)
    assert told == [(done, len(everything)) for done in range(1, len(everything) + 1)]
    assert all(each.outcome.memory is not None for each in found)


def test_a_model_whose_config_is_not_known_is_still_listed() -> None:
    entry = find("Qwen3-8B-4bit")
    assert entry is not None
    nameless = replace(entry, config=None)
    found = suggestion(nameless, nameless.repositories[0], WhatIfCase(), M4_PRO)
    assert found.verdict == "unknown whether it fits"
    assert "not known here" in found.reason
    assert (found.parameters, found.size) == (None, 0)
