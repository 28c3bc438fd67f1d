from __future__ import annotations

import math

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import Budget
from underwatt.planning.problem import Outlook
from underwatt.planning.search import expected_gain, safest_fast, shortlist
from underwatt.records import Prediction


def _view(budget_w: float, std: float = 0.05):
    problem = world.problem(Budget(power_w=budget_w))
    stds = np.full(len(problem), std)
    table = world.everything()
    prediction = Prediction(np.log([m.step_s for m in table]), stds, np.log([m.power_w for m in table]), stds)
    return problem, Outlook.of(problem, prediction)


def test_gain_is_the_mean_of_what_readings_would_gain() -> None:
    problem, outlook = _view(1e6)
    row = 40
    best = float(outlook.log_time_s[row]) - 0.02
    readings = outlook.log_time_s[row] + 0.05 * np.random.default_rng(0).normal(size=400_000)
    drawn = np.maximum(best - readings, 0).mean()
    assert expected_gain(problem, outlook, best)[row] == pytest.approx(drawn, rel=0.02)


def test_what_cannot_fit_gains_nothing() -> None:
    problem, outlook = _view(5.0, std=0.001)
    gains = expected_gain(problem, outlook, 1e3)
    assert np.all(gains[np.exp(outlook.log_drawn_w) > 5.1] < 1e-6)
    assert gains.max() > 1


def test_never_reaching_the_target_gains_nothing() -> None:
    problem = world.problem(Budget(power_w=100.0), curve=world.Curve(hopeless=True))
    _, outlook = _view(100.0)
    stds = np.full(len(problem), 0.05)
    hopeless = Outlook.of(problem, Prediction(np.zeros(len(problem)), stds, outlook.log_power_w, stds))
    gains = expected_gain(problem, hopeless, 20.0)
    assert np.all(gains[problem.candidates.batch_size == 64] == 0)
    assert np.all(np.isfinite(gains))


def test_while_nothing_fits_it_takes_the_fastest_likely_one_or_else_the_likeliest() -> None:
    problem, outlook = _view(6.0)
    everything = np.ones(len(problem), dtype=bool)
    row = safest_fast(problem, outlook, everything)
    chance = outlook.chance_to_fit(problem.budget)
    assert chance[row] >= 0.7
    assert outlook.log_time_s[row] == outlook.log_time_s[chance >= 0.7].min()
    tight, outlook = _view(3.3)
    row = safest_fast(tight, outlook, everything)
    assert outlook.log_drawn_w[row] == outlook.log_drawn_w.min()
    impossible, outlook = _view(1e-9, std=0.001)
    assert safest_fast(impossible, outlook, everything) == int(np.argmin(outlook.log_drawn_w))


def test_shortlist_keeps_the_promising_and_the_thriftiest() -> None:
    problem, outlook = _view(6.0, std=0.02)
    rows = shortlist(problem, outlook, most=48)
    assert len(rows) <= 48
    fitting = np.flatnonzero(np.exp(outlook.log_drawn_w) <= 6.0)
    best = fitting[np.argsort(outlook.log_time_s[fitting])[:5]]
    assert set(best) <= set(rows)
    assert int(np.argmin(outlook.log_drawn_w)) in rows
    assert len(shortlist(problem, outlook, most=len(problem))) == len(problem)
    assert math.isfinite(outlook.log_time_s[rows].max())
