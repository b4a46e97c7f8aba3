"""What guessing ahead would gain: by hand, as a ledger decides, and whose timings it rests on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, draft_for
from tokamac.engine.perf.footprint import Footprint, weigh
from tokamac.engine.perf.inspection import ModelRef, model_ref
from tokamac.engine.perf.roofline import decode_phase
from tokamac.engine.perf.what_if import Machine, WeighedModel, WhatIfCase, elsewhere, load
from tokamac.engine.speculation.gain import SpeculationGain, gain_of, speculation_gain, tokens_a_pass
from tokamac.engine.speculation.ledger import (
    TUNING,
    Acceptance,
    DraftLedger,
    PassCosts,
    draft_step,
    pass_steps,
    row_costs,
    timings,
    weight_bits,
)

M3_MAX, M4_PRO = elsewhere("Apple M3 Max", 40, 64), elsewhere("Apple M4 Pro", 20, 48)
M1, M2, M5_MAX = elsewhere("Apple M1", 8, 16), elsewhere("Apple M2", 10, 16), elsewhere("Apple M5 Max", 40, 64)
CARD = elsewhere("NVIDIA A100-SXM4-80GB")
CASE = WhatIfCase(context=1, prompt=1)  # next to no keys and values: a pass is its products


def weighed(name: str, place: Machine, bits: int | None = None) -> WeighedModel:
    ref, case = model_ref(name), WhatIfCase(bits)
    found = weigh(ref.config, place.device, packing=case.packing(ref.packing))
    assert isinstance(found, Footprint)
    return load(found, KVSpec(), place)


# The table ----------------------------------------------------------------------------------------------------------------


def test_every_row_says_on_what_it_was_timed_and_who_says_so() -> None:
    for each in timings():
        assert each.timed_on
        assert len(each.source) > 40
        assert each.rows[0] == (1, 1.0)
        assert all(
            before[0] < after[0] and before[1] <= after[1]
            for before, after in zip(each.rows, each.rows[1:], strict=False)
        )


@pytest.mark.parametrize(
    ("place", "bits", "timed_on"),
    [
        (M1, None, "Apple M1 and M2"), (M2, 8, "Apple M1 and M2"), (M3_MAX, None, "Apple M3 Max, 4 bits"),
        (M3_MAX, 2, "Apple M4 Pro, 2 bits"), (M3_MAX, 8, "Apple chips, 8 and 16 bits"),
        (M1, 16, "Apple chips, 8 and 16 bits"), (M4_PRO, None, "Apple M4 Pro, 4 bits"),
        (M5_MAX, 6, "Apple M5 Max, 4 bits"),
    ],
)  # fmt: skip
def test_the_nearest_timings_count(place: Machine, bits: int | None, timed_on: str) -> None:
    model = weighed("Qwen3-8B", place, bits)
    assert weight_bits(model.work) == (bits or 4)
    assert row_costs(place.device, place.chip, model.work).timed_on == timed_on


def test_a_pass_takes_what_was_timed_and_never_less_than_the_roofline() -> None:
    dense, mixture = weighed("Qwen3-8B", M3_MAX), weighed("Qwen3-30B-A3B", M3_MAX)

    def steps(model: WeighedModel, rows: int) -> float:
        return pass_steps(model.work, model.latency, M3_MAX.chip, 1, rows, device="metal")

    assert steps(dense, 1) == 1
    assert [steps(dense, rows) for rows in (4, 8)] == [1.28, 2.5]
    assert steps(dense, 7) == pytest.approx((2.04 + 2.5) / 2)
    for rows in (2, 4, 64):  # each token chooses other experts, which are read as well; many rows wait for arithmetic
        alone, several = (
            decode_phase(mixture.work, M3_MAX.chip, mixture.latency, 1, each).expected_s for each in (1, rows)
        )
        assert alone
        assert several
        assert steps(mixture, rows) >= several / alone > 1
    assert pass_steps(dense.work, None, M3_MAX.chip, 1, 64, device="metal") == pytest.approx(
        2 * 3.98
    )  # nothing known but the table


def test_a_step_of_a_draft_model_is_by_time_where_that_is_known_else_by_bytes() -> None:
    model, draft = weighed("Qwen3-8B", M3_MAX), weighed("Qwen3-0.6B", M3_MAX)
    times = [decode_phase(each.work, M3_MAX.chip, each.latency, 1).expected_s or 0 for each in (draft, model)]
    timed = draft_step((draft.work, draft.latency), (model.work, model.latency), M3_MAX.chip, 1)
    assert timed == pytest.approx(times[0] / times[1])
    read = [each.work.step_bytes(1) or 0 for each in (draft, model)]
    assert draft_step((draft.work, None), (model.work, None), M3_MAX.chip, 1) == pytest.approx(read[0] / read[1])
    assert (
        draft_step((draft.work, None), (weighed("Llama-3.3-70B", M3_MAX).work, None), M3_MAX.chip, 1)
        == TUNING.least_step
    )


# The gain -----------------------------------------------------------------------------------------------------------------


def test_tokens_a_pass_by_hand() -> None:
    assert [tokens_a_pass(0.5, width) for width in (0, 1, 2, 3)] == [1, 1.5, 1.75, 1.875]
    assert [tokens_a_pass(likely, 7) for likely in (0, 1)] == [1, 8]


def test_guesses_that_are_free_by_hand() -> None:
    lookup = gain_of(model_ref("Qwen3-8B"), CASE, M3_MAX, 0.7).guessers[0]
    assert [each.width for each in lookup.widths] == [*TUNING.short, 15, 31]
    three = lookup.widths[2]
    assert three.tokens == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert three.steps == 1.28
    assert three.gain == lookup.gain == pytest.approx(2.533 / 1.28)
    assert (lookup.best, lookup.step, lookup.memory_bytes) == (3, 0, 0)


def test_a_draft_model_takes_its_steps_and_its_memory() -> None:
    found = gain_of(model_ref("Qwen3-8B"), CASE, M3_MAX, 0.7, model_ref("Qwen3-0.6B"))
    lookup, draft, heads = found.guessers
    assert (draft.source, draft.name) == ("draft", "mlx-community/Qwen3-0.6B-4bit")
    for free, each in zip(lookup.widths, draft.widths, strict=False):
        # the first reads two tokens, which cost as one there
        assert each.steps == pytest.approx((free.steps or 0) + each.width * draft.step, rel=1e-3)
    assert draft.memory_bytes == pytest.approx(335_372_288 + 114_688, rel=1e-3)
    assert 0.05 < draft.step < 0.5
    assert heads.step == pytest.approx((4_257_671_168 - 350e6) / 36 / 4_257_671_168 + 350e6 / 4_257_671_168, rel=0.01)
    assert found.plain_tps
    assert found.expected_tps(draft) == pytest.approx(found.plain_tps * (draft.gain or 0))


def test_where_a_row_costs_a_step_nothing_gains() -> None:
    found = gain_of(model_ref("Qwen3-8B"), CASE, M1, 0.95, model_ref("Qwen3-0.6B"))
    assert [(each.best, each.gain) for each in found.guessers] == [(0, 1.0)] * 3
    assert "up to 8 tokens" in found.notes[0]


def test_what_nobody_timed_is_unknown_or_said() -> None:
    found = gain_of(model_ref("Qwen3-8B"), CASE, CARD, 0.7)
    assert all(each.best is each.gain is None for each in found.guessers)
    assert found.guessers[0].widths[0].tokens == 1.7
    assert "not published" in found.notes[0]
    other = gain_of(model_ref("Qwen3-8B"), CASE, elsewhere("Apple M6"), 0.7)
    assert "of Apple M6 no timings" in other.notes[0]


def test_no_share_beyond_all_comes_true() -> None:
    with pytest.raises(OptionError, match=r"share of 1\.5"):
        gain_of(model_ref("Qwen3-8B"), CASE, M3_MAX, 1.5)


class Alike(Acceptance):
    """Every guess is as likely."""

    def __init__(self, likely: float) -> None:
        super().__init__()
        self.likely = likely

    def rate(self, source: str, match: int) -> float:
        """Return it."""
        return self.likely


@given(st.sampled_from([M1, M3_MAX, M4_PRO, M5_MAX]), st.floats(0, 1), st.sampled_from([4, 8]))
def test_a_ledger_that_may_lose_enough_takes_the_predicted_width(place: Machine, likely: float, bits: int) -> None:
    model = weighed("Qwen3-8B", place, bits)
    ledger = DraftLedger(
        PassCosts(lambda rows, at: pass_steps(model.work, model.latency, place.chip, at, rows, device="metal"))
    )
    ledger.acceptance, ledger.balance = Alike(likely), 100.0
    found: SpeculationGain = speculation_gain(model, 1, likely, None)
    most = max(each.width for each in found.guessers[0].widths)
    plan = ledger.choose("lookup", TUNING.sure, min(most, TUNING.long), 1)
    assert plan.width == found.guessers[0].best
    assert (plan.worth or 1.0) == pytest.approx(found.guessers[0].gain)
    assert ledger.balance > TUNING.cap
    assert plan.width == 0 or plan.worth > TUNING.worth


# Draft models of the catalogue --------------------------------------------------------------------------------------------


def test_a_draft_model_has_the_same_tokenizer_and_at_most_half_of_the_bytes() -> None:
    known = {each.id: draft_for(each.id) for entry in catalogue() for each in entry.repositories}
    assert known["mlx-community/Qwen3-8B-4bit"] == known["mlx-community/Qwen3-30B-A3B-4bit"]
    named = {name: draft.id for name, draft in known.items() if draft is not None}
    assert named["mlx-community/Qwen3-8B-4bit"] == "mlx-community/Qwen3-0.6B-4bit"
    assert named["mlx-community/Llama-3.3-70B-Instruct-4bit"] == "mlx-community/Llama-3.2-1B-Instruct-4bit"
    assert known["mlx-community/Qwen3-0.6B-4bit"] is known["mlx-community/gemma-3-27b-it-qat-4bit"] is None
    own = draft_for("guide")
    assert (own.id, (own.published_bytes or 0) < 1e6) == ("guide-draft", True)
    by_id = {each.id: (entry, each) for entry in catalogue() for each in entry.repositories}
    for name, draft in named.items():
        (entry, own), (other, _) = by_id[name], by_id[draft]
        assert entry.tokens == other.tokens
        assert entry is not other
        vocabularies = {(each.config or {})["vocab_size"] for each in (entry, other)}
        assert len(vocabularies) == 1
        assert own.published_bytes is None or (draft_for(name) or own).published_bytes <= own.published_bytes / 2  # type: ignore[operator]


def test_a_model_that_can_not_be_weighed_is_named() -> None:
    unknown = replace(model_ref("Qwen3-8B"), name="odd", config={"model_type": "nothing"})
    assert isinstance(unknown, ModelRef)
    with pytest.raises(OptionError, match="odd can't be weighed"):
        gain_of(unknown, CASE, M3_MAX)
