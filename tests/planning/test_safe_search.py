"""A search during which the budget must hold: nothing is tried that may draw clearly more."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import parse_budget
from underwatt.planning.search import TRIED_ABOVE, Search

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
