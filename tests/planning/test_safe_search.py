"""A search during which the budget must hold: nothing is tried that may draw clearly more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import parse_budget
from underwatt.planning.problem import can_pause, rows_of
from underwatt.planning.search import TRIED_ABOVE, Search
from underwatt.records import Measurement, Setting

TRUTH = {m.setting: m for m in world.everything()}


# Under a bound on peaks, in which nothing above it is tried, one step of a coarse clock table may be given away.
@pytest.mark.parametrize(
    ("budget", "above", "slower"),
    [("6W", TRIED_ABOVE, 1.1), ("8W", TRIED_ABOVE, 1.1), ("12W", TRIED_ABOVE, 1.1), ("8W peak", 0.0, 1.2)],
)
def test_nothing_clearly_above_the_budget_is_tried_and_the_choice_is_good(
    budget: str, above: float, slower: float
) -> None:
    problem = world.problem(parse_budget(budget))
    tried = []

    def measure(setting):
        tried.append(problem.budget.drawn_w(TRUTH[setting]))
        return TRUTH[setting]

    found = Search(problem, safe=True, caution=4.0, most=30).run(measure)
    assert max(tried) <= problem.budget.power_w * (1 + above)
    plain = Search(problem, most=30).run(lambda setting: TRUTH[setting])
    assert found.best.time_s <= slower * plain.best.time_s


def test_a_search_that_need_not_hold_it_tries_more() -> None:
    problem = world.problem(parse_budget("6W"))
    tried = []

    def measure(setting):
        tried.append(TRUTH[setting].power_w)
        return TRUTH[setting]

    Search(problem, most=30).run(measure)
    assert max(tried) > 6.0 * (1 + TRIED_ABOVE)


def test_what_takes_longer_than_a_moment_must_fit_the_closer() -> None:
    """One step of 9 s at 12% above the budget, in which nothing can be done, was above it for longer than a fall."""
    search = Search(world.problem(parse_budget("6W")), safe=True)
    drawn_w, step_s = np.array([6.4, 6.4, 6.03, 5.9]), np.array([0.2, 9.0, 9.0, 9.0])
    outlook = SimpleNamespace(log_drawn_w=np.log(drawn_w), drawn_std=np.zeros(4))
    assert search._surely_fit(outlook, np.log(step_s), np.full(4, np.inf)).tolist() == [True, False, True, True]


def test_with_pauses_only_what_can_pause_is_tried() -> None:
    """Where waiting holds the budget, how much a step draws is no matter, but how long it takes is."""
    problem = replace(world.problem(parse_budget("4W")), idle_w=2.0)
    tried = []

    def measure(setting: Setting) -> Measurement:
        short = replace(TRUTH[setting], step_s=TRUTH[setting].step_s / 20)
        tried.append(short)
        return short

    search = Search(problem, safe=True, caution=4.0, most=30)
    while (ask := search.ask()) is not None:
        search.tell(measure(ask.setting))
    assert len(tried) > 3
    assert max(one.power_w for one in tried) > 6.0
    assert sum(bool(can_pause(one.power_w, one.step_s, problem.budget)) for one in tried[3:]) >= 0.8 * len(tried[3:])


def test_what_is_barred_is_not_asked_for_until_something_else_is() -> None:
    problem = world.problem(parse_budget("8W"))
    search, candidates = Search(problem, most=30), problem.candidates
    high = candidates.values[:, 0] > np.median(candidates.values[:, 0])
    search.bar(high)
    asked = []
    for _ in range(6):
        if (ask := search.ask()) is not None:
            asked.append(ask.setting)
            search.tell(TRUTH[ask.setting])
    rows = [int(rows_of(candidates, setting)[0]) for setting in asked]
    assert rows
    assert not high[rows].any()
    search.bar(~high)
    ask = search.ask()
    assert ask is None or high[int(rows_of(candidates, ask.setting)[0])]
