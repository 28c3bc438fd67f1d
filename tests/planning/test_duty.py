from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.budget import Budget, parse_budget
from underwatt.planning.problem import DEFAULT_WINDOW_S, LARGEST_SWING, allows_pauses, busy_share, can_pause


@given(st.floats(0.5, 400.0), st.floats(0.0, 1.0), st.floats(0.01, 2.0))
def test_training_for_the_share_draws_exactly_the_budget(power_w: float, idle: float, budget: float) -> None:
    idle_w, budget_w = idle * power_w, budget * power_w
    share = float(busy_share(power_w, idle_w, budget_w))
    assert 0 <= share <= 1
    mean_w = share * power_w + (1 - share) * idle_w
    if budget_w >= power_w:
        assert share == 1
    elif budget_w > idle_w:
        assert mean_w == pytest.approx(budget_w, rel=1e-6)
    else:
        assert share == 0


def test_many_settings_at_once() -> None:
    shares = busy_share(np.array([5.0, 10.0, 16.0]), 4.0, 10.0)
    assert shares == pytest.approx([1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("text", "allowed"), [("10W", True), ("10W mean over 60s", True), ("10W peak", False), ("5Wh", False)]
)
def test_only_a_mean_can_be_kept_by_pauses(text: str, allowed: bool) -> None:
    assert allows_pauses(parse_budget(text)) is allowed


@given(st.floats(1.0, 100.0), st.floats(1.01, 5.0), st.floats(0.001, 2.0), st.one_of(st.none(), st.floats(1.0, 60.0)))
def test_one_step_must_not_draw_much_of_what_a_window_allows(
    budget_w: float, times: float, step_s: float, window_s: float | None
) -> None:
    budget = Budget(power_w=budget_w, window_s=window_s)
    beyond_j = (times - 1) * budget_w * step_s
    allowed_j = LARGEST_SWING * budget_w * (window_s or DEFAULT_WINDOW_S)
    if abs(beyond_j / allowed_j - 1) > 1e-6:
        assert bool(can_pause(times * budget_w, step_s, budget)) == (beyond_j < allowed_j)
    assert can_pause(0.9 * budget_w, step_s, budget), "where nothing is beyond the budget, any step will do"
