"""Whose turn it is, with a clock that is only counted: nobody waits long, no prompt starves, the background stays behind."""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamac.engine.schedule.schedule import ALONE_S, BACKGROUND_SHARE, STALL_S, Act, Demand, Policy, beside_s


@dataclass
class Simulated:
    """A machine: a step takes ``step_s``, and ``row_s`` more for each reply; a piece takes as long as it may."""

    step_s: float = 0.02
    row_s: float = 0.001
    policy: Policy = field(default_factory=Policy)
    now: float = 0.0
    acts: list[tuple[float, Act, float]] = field(default_factory=list)

    def turn(self, demands: list[Demand]) -> Act:
        act = self.policy.choose(demands)
        took = act.within_s if act.reads is not None else self.step_s + self.row_s * len(act.decodes)
        self.acts.append((self.now, act, took))
        self.now += took
        self.policy.spent(act, took)
        return act

    def share(self, chosen: list[bool]) -> float:
        """Return the share of the time that the chosen acts took."""
        return sum(took for (_, _, took), is_one in zip(self.acts, chosen, strict=True) if is_one) / self.now


def test_nothing_is_done_where_nothing_is_asked_for() -> None:
    assert Policy().choose([]) is None


def test_a_prompt_that_nobody_waits_behind_is_read_in_large_pieces() -> None:
    machine = Simulated()
    assert machine.turn([Demand(1, reads=True)]) == Act(reads=1, within_s=ALONE_S)


def test_a_prompt_of_the_background_is_read_in_small_pieces_since_somebody_may_come() -> None:
    machine = Simulated()
    demands = [Demand(1, reads=True, background=True)]
    assert machine.turn(demands) == Act(reads=1, within_s=STALL_S, background=True)
    for step_s in (0.01, 3.0):  # also beside a slow step of its kind
        machine.step_s = step_s
        acts = [machine.turn([*demands, Demand(2, reads=False, background=True)]) for _ in range(6)]
        assert {act.within_s for act in acts if act.reads is not None} == {STALL_S}


def test_prompts_are_read_one_after_another_and_the_first_to_come_first() -> None:
    machine = Simulated()
    for _ in range(5):
        assert machine.turn([Demand(4, reads=True), Demand(2, reads=True), Demand(7, reads=True)]).reads == 2


def test_all_that_are_written_get_a_token_between_two_pieces_of_a_prompt() -> None:
    machine = Simulated()
    demands = [Demand(1, reads=False), Demand(2, reads=False), Demand(3, reads=True)]
    kinds = [machine.turn(demands) for _ in range(6)]
    assert [(act.decodes, act.reads) for act in kinds] == [((1, 2), None), ((), 3)] * 3


@settings(max_examples=60)
@given(
    written=st.integers(1, 8),
    reading=st.integers(0, 4),
    background=st.integers(0, 3),
    step_s=st.floats(0.001, 0.5),
    row_s=st.floats(0, 0.05),
)
def test_nobody_waits_longer_than_the_stall_budget_and_a_step_and_no_prompt_starves(
    written: int, reading: int, background: int, step_s: float, row_s: float
) -> None:
    machine = Simulated(step_s, row_s)
    demands = [Demand(number, reads=False) for number in range(written)]
    demands += [Demand(20 + number, reads=True) for number in range(reading)]
    demands += [Demand(40 + number, reads=number % 2 == 0, background=True) for number in range(background)]
    for _ in range(200):
        machine.turn(demands)
    step = step_s + row_s * written
    behind = step_s + row_s * background
    ends = [at + took for at, act, took in machine.acts if act.decodes == tuple(range(written))]
    gaps = [later - sooner for sooner, later in itertools.pairwise(ends)]
    longest = (
        max(STALL_S, step) + (max(STALL_S, behind) if background else 0.0) + step
    )  # one piece, one turn aside, the step
    assert max(gaps) <= longest * 1.0001
    if reading:
        read = [act.reads is not None and not act.background for _, act, _ in machine.acts]
        write = [act.reads is None and not act.background for _, act, _ in machine.acts]
        assert machine.share(read) >= 0.9 * machine.share(write)
    if background:
        aside = [act.background for _, act, _ in machine.acts]
        first_s = max(STALL_S, behind)  # how long a turn takes is known once there was one
        assert machine.share(aside) <= BACKGROUND_SHARE + first_s / machine.now


def test_what_runs_in_the_background_has_all_the_time_where_nobody_waits() -> None:
    machine = Simulated()
    for _ in range(50):
        assert machine.turn([Demand(1, reads=False, background=True)]).background
    assert machine.turn([Demand(1, reads=False, background=True), Demand(2, reads=True)]).reads == 2


@pytest.mark.parametrize("step_s", [0.01, 0.3])
def test_a_prompt_takes_at_most_about_twice_as_long_beside_replies(step_s: float) -> None:
    machine, left = Simulated(step_s), 20.0
    while left > 0:
        act = machine.turn([Demand(1, reads=False), Demand(2, reads=True)])
        left -= act.within_s if act.reads is not None else 0.0
    assert machine.now <= 2.2 * 20.0


@settings(max_examples=60)
@given(reading_s=st.floats(0.01, 30), step_s=st.floats(0.001, 0.5))
def test_a_prompt_beside_others_takes_as_long_as_is_predicted(reading_s: float, step_s: float) -> None:
    machine = Simulated(step_s, row_s=0.0)
    machine.turn([Demand(1, reads=False)])
    began, left = machine.now, reading_s
    while left > 1e-9:
        act = machine.policy.choose([Demand(1, reads=False), Demand(2, reads=True)])
        took = min(act.within_s, left) if act.reads is not None else step_s
        left -= took if act.reads is not None else 0.0
        machine.now += took
        machine.policy.spent(act, took)
    assert machine.now - began == pytest.approx(
        beside_s(reading_s, step_s), abs=1e-6 + step_s * (reading_s % max(STALL_S, step_s) < 1e-6)
    )
    assert beside_s(reading_s, step_s) <= 2 * reading_s
