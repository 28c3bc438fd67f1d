"""The fastest setting within the budget: chosen from predictions, or found by measuring as you go."""

from underwatt.plan.budget import Budget, Watts, parse_budget
from underwatt.plan.pareto import front
from underwatt.plan.planner import Planner
from underwatt.plan.problem import Goal, Outcome, Outlook, Problem
from underwatt.plan.published import choose_published
from underwatt.plan.search import SearchResult, search_setting
from underwatt.plan.select import Expectation, Interval, Plan, choose_measured, choose_setting

__all__ = [
    "Budget",
    "Expectation",
    "Goal",
    "Interval",
    "Outcome",
    "Outlook",
    "Plan",
    "Planner",
    "Problem",
    "SearchResult",
    "Watts",
    "choose_measured",
    "choose_published",
    "choose_setting",
    "front",
    "parse_budget",
    "search_setting",
]
