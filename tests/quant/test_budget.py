"""Spending a budget: never more than there is, as good as trying everything, and the same every time."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine.errors import OptionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.mixed_precision import Candidate, smallest_bytes, spend, total_bytes, total_error


def candidate(nbytes, error):
    return Candidate(None, nbytes, float(error))


def packings(parameters, alpha):
    """Affine packings of a tensor, error falling fourfold with every bit."""
    return [
        Candidate(
            Packing(bits, group), parameters * bits // 8 + 4 * parameters // group, alpha * 4.0**-bits * group**0.5
        )
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 64, 128)
    ]


def best_by_trying(candidates, budget):
    fitting = [choice for choice in product(*candidates.values()) if sum(each.nbytes for each in choice) <= budget]
    return min((sum(each.error for each in choice) for choice in fitting), default=None)


options = st.lists(st.builds(candidate, st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5)
models = st.dictionaries(st.text("abc", min_size=1, max_size=3), options, min_size=1, max_size=5)


@given(models, st.integers(1, 200))
def test_no_choice_within_the_budget_has_less_error(candidates, budget):
    best = best_by_trying(candidates, budget)
    if best is None:
        with pytest.raises(OptionError):
            spend(candidates, budget)
        return
    chosen = spend(candidates, budget)
    assert total_bytes(chosen) <= budget
    assert total_error(chosen) == pytest.approx(best)
    assert all(chosen[name] in candidates[name] for name in candidates)


@given(models, st.integers(0, 100))
def test_more_to_spend_never_has_more_error(candidates, more):
    least = smallest_bytes(candidates)
    assert total_error(spend(candidates, least + more)) <= total_error(spend(candidates, least))


def test_a_case_worked_by_hand():
    # 10 bytes more: on "a" they save 8, on "b" 5; 6 of them on "c" save 6, and with the 4 left "d" saves 3.
    candidates = {
        "a": [candidate(10, 10), candidate(20, 2)],
        "b": [candidate(10, 9), candidate(20, 4)],
        "c": [candidate(10, 7), candidate(16, 1)],
        "d": [candidate(10, 5), candidate(14, 2)],
    }
    chosen = spend(candidates, 50)
    assert [each.nbytes for each in chosen.values()] == [10, 10, 16, 14]
    assert total_error(chosen) == 10 + 9 + 1 + 2


def test_bytes_go_where_they_help_most():
    candidates = {"sensitive": packings(1 << 16, 100.0), "robust": packings(1 << 16, 1.0)}
    budget = 2 * next(each.nbytes for each in candidates["robust"] if each.packing == Packing(4, 64))
    chosen = spend(candidates, budget)
    assert chosen["sensitive"].packing.bits > 4 > chosen["robust"].packing.bits


@pytest.mark.parametrize("order", [1, -1])
def test_ties_are_settled_the_same_way_whatever_is_listed_first(order):
    tensors = {name: packings(1 << 14, 1.0)[::order] for name in ("a", "b", "c", "d")}
    chosen = spend(tensors, 4 * 10_000)
    assert chosen == spend(tensors, 4 * 10_000)
    assert sorted(each.nbytes for each in chosen.values()) == sorted(
        each.nbytes for each in spend({name: each[::-1] for name, each in tensors.items()}, 4 * 10_000).values()
    )


def test_a_large_model_is_within_a_thousandth_of_the_bound_that_nothing_can_beat():
    candidates = {f"layer {i}": packings(1 << (12 + i % 9), 1.0 + (i * 37 % 101)) for i in range(400)}
    budget = 2 * smallest_bytes(candidates)
    chosen = spend(candidates, budget)
    assert 0.999 * budget <= total_bytes(chosen) <= budget
    # For every price of a byte, the cheapest choice at that price less what the budget costs bounds the error from below.
    prices = [10.0 ** (power / 40) for power in range(-400, 0)]
    bound = max(
        sum(min(each.error + price * each.nbytes for each in options) for options in candidates.values())
        - price * budget
        for price in prices
    )
    assert total_error(chosen) <= 1.001 * bound + 1e-6


def test_too_small_a_budget_is_refused():
    with pytest.raises(OptionError, match="smallest packing takes 12"):
        spend({"a": [candidate(5, 0)], "b": [candidate(7, 0), candidate(9, 0)]}, 11)
