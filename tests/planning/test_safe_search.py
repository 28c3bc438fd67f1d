"""A search during which the budget must hold: nothing is tried that may draw clearly more."""

from __future__ import annotations

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
