from __future__ import annotations

import math

import numpy as np
import planning_world as world
import pytest
from hypothesis import given, settings, strategies as st

from underwatt.budget import Budget, Schedule, parse_budget
from underwatt.errors import BudgetError
from underwatt.planning.choice import Candidates
from underwatt.planning.course import Arrival, Course, Ways, head_for, hours, plan_course
from underwatt.planning.problem import Goal, Problem
from underwatt.records import Prediction

# Thrifty, in between, fast.
TIME_S, POWER_W = np.array([900.0, 300.0, 200.0]), np.array([3.5, 7.0, 13.0])
OPEN = Schedule.constant(20.0)


def ways(spread: float = 1.0) -> Ways:
    return Ways(TIME_S, TIME_S * spread, POWER_W, POWER_W, np.array([10, 11, 12]))


def numbers(heading) -> list[int | None]:
    return [number for _, _, number in heading.ahead.pieces]


def test_without_a_deadline_it_is_the_soonest() -> None:
    heading = head_for(ways(), OPEN)
    assert (heading.arrival, numbers(heading), heading.ahead.finish_s) == (None, [12], 200.0)


def test_with_time_enough_it_is_the_thriftiest() -> None:
    heading = head_for(ways(), OPEN, deadline_s=400.0)
    assert (heading.arrival, numbers(heading)) == (Arrival.IN_TIME, [11])
    assert "can be made: the target is expected after 5 min" in heading.said(400.0)


def test_time_is_left_for_what_is_not_certain() -> None:
    heading = head_for(ways(1.2), OPEN, deadline_s=320.0)  # 300 s may become 360
    assert (heading.arrival, numbers(heading)) == (Arrival.IN_TIME, [12, 11])
    assert 200 < heading.ahead.finish_s <= 320 / 1.2 * (1 + 1e-6)


def test_a_deadline_that_may_be_missed_is_raced_for() -> None:
    heading = head_for(ways(1.2), OPEN, deadline_s=220.0)
    assert (heading.arrival, numbers(heading)) == (Arrival.CLOSE, [12])
    assert "may be missed" in heading.said(220.0)


def test_one_that_cannot_be_made_is_said_with_how_much_it_lacks() -> None:
    heading = head_for(ways(), OPEN, deadline_s=140.0)
    assert (heading.arrival, numbers(heading)) == (Arrival.LATE, [12])
    assert "cannot be made: the target is expected after 3 min 20 s, 1 min late" in heading.said(140.0)
    never = head_for(ways(), Schedule.constant(1.0), deadline_s=140.0)
    assert never.arrival is Arrival.LATE
    assert "not reached" in never.said(140.0)


@settings(deadline=None, max_examples=60)
@given(st.floats(100, 3000), st.floats(0.05, 1.0), st.floats(0, 500), st.floats(1.0, 1.5))
def test_a_course_that_is_in_time_ends_in_time_and_uses_no_more_than_the_soonest(
    deadline_s: float, share: float, begin_s: float, spread: float
) -> None:
    heading = head_for(ways(spread), OPEN, deadline_s=deadline_s, share=share, begin_s=begin_s)
    soonest = head_for(ways(spread), OPEN, share=share, begin_s=begin_s)
    if heading.arrival is Arrival.IN_TIME:
        assert begin_s + spread * (heading.ahead.finish_s - begin_s) <= deadline_s * (1 + 1e-6)
        assert heading.ahead.energy_j <= soonest.ahead.energy_j * (1 + 1e-6)
    else:
        assert heading.ahead == soonest.ahead
        assert (heading.arrival is Arrival.LATE) is (soonest.ahead.finish_s > deadline_s)
    assert heading.said(deadline_s)


def test_pauses_make_a_setting_fit_a_lower_level() -> None:
    problem = Problem.of(world.candidates(), Budget(power_w=10.0), world.Curve(), idle_w=2.0)
    paused = ways().with_pauses(problem, np.full(3, 0.01), [5.0, 10.0], margin=0.0)
    heading = head_for(paused, Schedule.constant(5.0))
    assert numbers(heading) == [11]
    assert heading.ahead.finish_s == pytest.approx(300 / ((5 - 2) / (7 - 2)))
    assert heading.ahead.energy_j == pytest.approx(5 * heading.ahead.finish_s)
    assert numbers(head_for(ways(), Schedule.constant(5.0))) == [10]


def test_steps_too_long_to_pause_between_make_no_way() -> None:
    problem = Problem.of(world.candidates(), Budget(power_w=10.0), world.Curve(), idle_w=2.0)
    assert len(ways().with_pauses(problem, np.full(3, 60.0), [5.0], margin=0.0).time_s) == 3


# Plans over a schedule


def known(budget: str, *, curve: world.Curve | None = None, goal: Goal = Goal.SOONEST) -> tuple[Candidates, Schedule]:
    """Everything was measured."""
    wanted = parse_budget(budget)
    problem = Problem.of(world.candidates(), wanted.constant(), curve or world.Curve(), goal)
    unknown = np.full(len(problem), np.nan)
    candidates = Candidates(problem, Prediction(unknown, unknown, unknown, unknown), world.everything())
    assert wanted.schedule is not None
    return candidates, wanted.schedule


def course(budget: str, hour: float = 0.0, **more) -> Course:
    candidates, schedule = known(budget, **more)
    return plan_course(candidates, candidates.runs, schedule, hour * 3600, 0.05)


def test_each_level_has_the_setting_that_a_plan_for_it_alone_has() -> None:
    found = course("08:00-18:00=12W,else=7W", hour=18 - 5 / 3600)
    assert found.starts_at == "17:59:55"
    for level in found.levels:
        problem = world.problem(Budget(power_w=level.power_w))
        fitting = [m for m in world.everything() if m.power_w <= level.power_w]
        rows = {world.candidates()[row]: row for row in range(len(problem))}
        best = min(fitting, key=lambda m: m.step_s * math.exp(problem.log_steps[rows[m.setting]]))
        assert level.chosen is not None
        assert level.chosen.setting == best.setting
    assert [stretch.power_w for stretch in found.stretches[:2]] == [12.0, 7.0]
    assert found.stretches[0].end_s == pytest.approx(5.0)
    assert found.stretches[-1].end_s == found.finish_s


def test_a_deadline_that_a_schedule_leaves_no_time_for_is_an_error_that_says_how_long_it_takes() -> None:
    soonest = course("08:00-18:00=12W,else=7W", hour=9)
    assert soonest.finish_s is not None
    with pytest.raises(BudgetError, match="expected after"):
        course(f"08:00-18:00=12W,else=7W,{soonest.finish_s / 2}s", hour=9)
    in_time = course(f"08:00-18:00=12W,else=7W,{soonest.finish_s * 1.01}s", hour=9)
    assert in_time.stretches == soonest.stretches
    with pytest.raises(BudgetError, match="expected after"):
        course(f"08:00-18:00=12W,else=7W,{soonest.finish_s * 1.01}s", hour=9, curve=world.Curve(std=0.3))


def test_energy_that_does_not_suffice_is_an_error() -> None:
    with pytest.raises(BudgetError, match="not reached within"):
        course("08:00-18:00=12W,else=7W,1J", hour=9)


def test_the_least_energy_is_looked_for_over_all_levels() -> None:
    soonest, thrifty = (course("08:00-18:00=12W,else=7W", hour=9, goal=goal) for goal in Goal)
    assert soonest.energy_j is not None
    assert thrifty.energy_j is not None
    assert thrifty.energy_j < soonest.energy_j


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (720, "12 min"),
        (4800, "1 h 20 min"),
        (7200, "2 h"),
        (8000, "2 h 13 min"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert hours(seconds) == said
    assert hours(5 * 86_400) == "5.0 days"
