"""The judge of trainings on a GPU: windows end where the card's counter moves, and a change of budget lies in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import _gpu_judge
from underwatt.events import BudgetChanged

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGETS = [BudgetChanged(at_s=0.0, power_w=300.0), BudgetChanged(at_s=50.0, power_w=200.0)]


def moves(path: Path, watts: Callable[[float], float], late: tuple[int, ...] = ()) -> _gpu_judge.Counter:
    """A counter that moves ten times a second; where it was looked at late, its moment is a tenth of a second off."""
    at_s = 1000.0 + np.arange(1000) / 10
    drawn_j = np.cumsum([0.1 * watts(at - 1000.05) for at in at_s])  # each in the middle of its tenth of a second
    gaps_s = np.where(np.isin(np.arange(len(at_s)), late), 0.1, 0.005)
    shown_s = at_s + np.where(gaps_s > 0.05, 0.1, 0.0)
    rows = zip(shown_s.tolist(), drawn_j.tolist(), gaps_s.tolist(), strict=True)
    path.write_text("".join(f"{at:.4f},{energy:.3f},{gap:.4f}\n" for at, energy, gap in rows), encoding="ascii")
    return _gpu_judge.Counter.read(path, 1000.0)


def test_a_budget_kept_exactly_has_no_window_above_it_across_a_change_either(tmp_path: Path) -> None:
    counter = moves(tmp_path / "moves", lambda at_s: 300.0 if at_s <= 50.0 else 200.0)
    ends_s, over = _gpu_judge.windows_over(counter, BUDGETS, 5.0)
    assert ends_s[0] == pytest.approx(5.0, abs=0.11)
    assert np.abs(over).max() < 0.005


def test_a_second_above_the_budget_is_a_fifth_of_it_in_a_window(tmp_path: Path) -> None:
    counter = moves(tmp_path / "moves", lambda at_s: 300.0 + 150.0 * (20.0 < at_s <= 21.0) - 100.0 * (at_s > 50.0))
    ends_s, over = _gpu_judge.windows_over(counter, BUDGETS, 5.0)
    assert over.max() == pytest.approx(0.1, abs=0.005)
    assert 20.9 <= ends_s[np.argmax(over)] <= 25.1


def test_a_move_that_was_seen_late_begins_and_ends_no_window(tmp_path: Path) -> None:
    counter = moves(tmp_path / "moves", lambda at_s: 300.0 if at_s <= 50.0 else 200.0, late=(100, 101, 300))
    assert counter.late == 3
    assert np.abs(_gpu_judge.windows_over(counter, BUDGETS, 5.0)[1]).max() < 0.005


def test_long_steps_are_judged_five_at_a_time_with_their_pauses(tmp_path: Path) -> None:
    """Steps of two seconds at 600 W that are paid for exactly, each: windows of any other length are far off."""
    budgets = [BudgetChanged(at_s=0.0, power_w=300.0)]
    begins_s = np.cumsum(np.concatenate([[1.0], np.tile([6.0, 6.0, 1.5], 6)]))  # the third is a small one
    busy = [(begin_s, begin_s + (end_s - begin_s) / 3) for begin_s, end_s in pairwise(begins_s.tolist())]
    counter = moves(
        tmp_path / "moves", lambda at_s: 600.0 if any(begin_s < at_s < end_s for begin_s, end_s in busy) else 150.0
    )
    _, over = _gpu_judge.windows_of_steps(counter, budgets, begins_s)
    assert len(over) == len(begins_s) - 5
    assert np.abs(over).max() < 0.01
    assert np.abs(_gpu_judge.windows_over(counter, budgets, 22.5)[1]).max() > 0.03
