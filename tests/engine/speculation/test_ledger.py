"""The ledger loses no more than it may on any text, and gains nearly what the best width would."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine.speculation.ledger import TUNING, DraftingCosts, DraftLedger, PassCosts, bucket_of

CONTEXT = 1000


def known(cost: Callable[[int], float]) -> PassCosts:
    """Costs that are what they were predicted to be."""
    return PassCosts(lambda rows, _: cost(rows))


def run(ledger: DraftLedger, outcomes: Sequence[tuple[int, int]], least: int = 0) -> tuple[int, float]:
    """Decode with drafts of which (match, so many tokens come true); return tokens, and the steps that they took."""
    tokens, steps = 0, 0.0
    for match, right in outcomes:
        plan = ledger.choose("any", match, TUNING.long, CONTEXT)
        if not plan.width:
            tokens, steps = tokens + 1, steps + 1
            ledger.stepped()
            ledger.acceptance.observe("any", match, true=right > 0)
        else:
            accepted = min(right, plan.width)
            cost = ledger.costs.steps(plan.width + 1, CONTEXT)
            tokens, steps = tokens + accepted + 1, steps + cost
            ledger.spent(accepted + 1, cost)
            for place in range(min(accepted + 1, plan.width)):
                ledger.acceptance.observe("any", match + place, true=place < accepted)
        if least:
            assert steps - tokens <= TUNING.credit + TUNING.share * tokens + 1e-6
    return tokens, steps


costs = st.sampled_from([0.02, 0.1, 0.3, 0.7, 1.0, 1.5]).map(lambda slope: lambda rows: 1 + slope * (rows - 1))
traces = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=400)


@settings(max_examples=150, deadline=None)
@given(costs, traces)
def test_no_more_is_lost_than_one_in_a_hundred(cost: Callable[[int], float], trace: list[tuple[int, int]]) -> None:
    run(DraftLedger(known(cost)), trace, least=1)


def test_what_is_always_wrong_is_parked_within_its_credit() -> None:
    ledger = DraftLedger(known(lambda rows: 1 + 0.1 * (rows - 1)))
    tokens, steps = run(ledger, [(40, 0)] * 1000)
    assert tokens / steps >= 0.985


@pytest.mark.parametrize("slope", [0.03, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("likely", [0.0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("match", [5, 20])
def test_a_text_that_stays_as_it_is_gets_nearly_the_best_width(slope: float, likely: float, match: int) -> None:
    draw = random.Random(1)

    def outcome() -> tuple[int, int]:
        right = 0
        while right < TUNING.long and draw.random() < likely:
            right += 1
        return match, right

    def cost(rows: int) -> float:
        return 1 + slope * (rows - 1)

    tokens, steps = run(DraftLedger(known(cost)), [outcome() for _ in range(4000)])
    widths = (0, *TUNING.short, *((TUNING.half, TUNING.long) if match >= TUNING.sure else ()))
    best = max(sum(likely**place for place in range(width + 1)) / cost(width + 1) for width in widths)
    assert tokens / steps >= 0.95 * best


def test_a_pass_that_costs_what_it_brings_is_left() -> None:
    ledger = DraftLedger(known(lambda rows: float(rows)))
    assert run(ledger, [(50, 31)] * 100) == (100, 100.0)


def test_costs_are_what_was_measured_near_them() -> None:
    costs = known(lambda rows: 1 + 0.5 * (rows - 1))
    assert costs.steps(8, CONTEXT) == 4.5
    for _ in range(6):
        costs.observe_pass(8, CONTEXT, 2.0)
    assert costs.steps(8, CONTEXT) == 2.5  # what was expected is one of five
    assert costs.steps(8, 100_000) == 2.5  # nothing nearer is known
    assert costs.steps(4, CONTEXT) == pytest.approx(1 + 1.5 * 2.0 / 4.0)  # overrated alike, but for half a step
    assert costs.steps(32, CONTEXT) == pytest.approx(1 + 15.5 * 2.0 / 4.0)


@pytest.mark.parametrize("rise", [0.0, 1e-12, 1e-4, 0.04])
@pytest.mark.parametrize("read", [9, 31, 400])
def test_where_reading_should_cost_nothing_a_draft_that_read_much_is_timed_as_any(rise: float, read: int) -> None:
    costs = DraftingCosts(lambda rows: 2.0 if rows > 500 else 1.0 + rise * (rows > 8))
    costs.step = 0.2
    costs.observe(read, 3, 1.2)
    assert costs.drafting(3) == pytest.approx(3 * (0.4 + 0.2) / 2, rel=0.05)  # it took twice what was expected
    assert costs.reading(read) == pytest.approx(0.2 * rise)
    assert costs.reading(501) == pytest.approx(0.2)


def test_how_much_longer_it_takes_to_read_is_measured_where_it_should_take_longer() -> None:
    costs = DraftingCosts(lambda rows: 1 + rows / 50)
    costs.observe(52, 1, costs.drafting(1) + 3.0)
    assert costs.reading(52) == pytest.approx(2.0)  # three steps where one was expected
    assert costs.reading(102) == pytest.approx(4.0)
    costs.observe(52, 1, 0.0)
    assert costs.reading(52) == pytest.approx(4 / 3)


@pytest.mark.parametrize("rise", [0.0, 1e-12, 1e-4, 0.04])
def test_a_pass_that_should_cost_nothing_says_little_of_wider_ones(rise: float) -> None:
    costs = known(lambda rows: 1 + rise if 1 < rows < 8 else float(rows > 7) + 1)
    costs.observe_pass(3, CONTEXT, 3.0)
    assert costs.steps(3, CONTEXT) == pytest.approx(2.0, rel=0.05)
    assert costs.steps(2, CONTEXT) == costs.steps(3, CONTEXT)
    assert costs.steps(8, CONTEXT) == pytest.approx(2.0, rel=0.05)
    assert costs.steps(1, CONTEXT) == 1.0


def test_a_plain_step_is_timed_by_medians_and_dear_passes_are_forgotten_in_time() -> None:
    costs = known(lambda _: 2.0)
    assert costs.plain_s(CONTEXT) is None
    for seconds in (1.0, 1.0, 9.0, 1.0):
        costs.observe_plain(CONTEXT, seconds)
    assert costs.plain_s(CONTEXT) == 1.0 == costs.plain_s(50_000)
    for _ in range(4):
        costs.observe_pass(8, CONTEXT, 9.5)
    assert costs.steps(8, CONTEXT) == 8.0
    for _ in range(3 * 128):
        costs.observe_plain(CONTEXT, 1.0)
    assert costs.steps(8, CONTEXT) < 8.0


def test_longer_matches_are_counted_apart() -> None:
    assert [bucket_of(match) for match in (0, 3, 5, 15, 31, 32, 10_000)] == [0, 3, 4, 7, 8, 9, 9]
