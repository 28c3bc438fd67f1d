from __future__ import annotations

from dataclasses import replace

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import Budget, parse_budget
from underwatt.planning.choice import READING_STD, choose_measured, choose_setting, outlook_as_known, without_repeats
from underwatt.planning.problem import Problem
from underwatt.planning.search import search_setting
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Prediction, Setting, Status
from underwatt.rivals.choices import choose_published


def _flat(count: int) -> Prediction:
    return Prediction(np.zeros(count), np.full(count, 0.3), np.zeros(count), np.full(count, 0.3))


def test_only_measured_candidates_change() -> None:
    problem = world.problem(Budget(power_w=7.0))
    measured = world.truth(world.at(1000.0, 400.0, 16))
    failed = Measurement(world.at(500.0, 200.0, 8), status=Status.FAILED)
    elsewhere = world.truth(world.at(777.0, 400.0, 16))
    outlook, known = outlook_as_known(problem, _flat(len(problem)), [measured, failed, elsewhere])
    (row,) = np.flatnonzero(known)
    assert problem.candidates[int(row)] == measured.setting
    assert np.exp(outlook.log_power_w[row]) == pytest.approx(measured.power_w)
    assert np.exp(outlook.log_time_s[row] - problem.log_steps[row]) == pytest.approx(measured.step_s)
    assert outlook.step_std[row] == READING_STD
    assert np.all(outlook.log_power_w[~known] == 0)
    assert np.all(outlook.power_std[~known] == 0.3)


def test_a_recorded_interval_and_repeats_say_how_sure_it_is() -> None:
    problem = world.problem(Budget(power_w=7.0))
    one = replace(
        world.truth(world.at(1000.0, 400.0, 16)), power_w_ci95=0.196 * world.truth(world.at(1000.0, 400.0, 16)).power_w
    )
    for count in (1, 4):
        outlook, known = outlook_as_known(problem, _flat(len(problem)), [one] * count)
        assert outlook.power_std[known][0] == pytest.approx(0.1 / count**0.5)


def test_predictions_are_left_as_they_were() -> None:
    problem = world.problem(Budget(power_w=7.0))
    prediction = _flat(len(problem))
    outlook_as_known(problem, prediction, world.everything()[:5])
    assert np.all(prediction.log_power_w == 0)


def test_every_chooser_means_the_same_by_keeping_a_budget() -> None:
    settings = [Setting(PowerMode(gpu_mhz=float(mhz)), 8) for mhz in (300, 600, 900)]
    measured = [
        Measurement(setting, 1 / setting.mode.gpu_mhz, watts, power_w_ci95=0.2)  # type: ignore[operator]
        for setting, watts in zip(settings, (6.0, 9.7, 9.94), strict=True)
    ]
    problem = Problem.of(SettingArray.of(settings), parse_budget("10W"))
    logs = [np.log([getattr(m, name) for m in measured]) for name in ("step_s", "power_w")]
    guess = Prediction(logs[0], np.full(3, 0.1), logs[1], np.full(3, 0.1))
    kept = settings[1]  # 9.94 ± 0.2 W might be over, 9.7 ± 0.2 W is not
    assert choose_measured(problem, guess, measured).setting == kept
    assert choose_setting(problem, guess, measurements=measured).setting == kept
    assert choose_published(measured, {8: 1000.0}, problem.budget).setting == kept
    assert search_setting(problem, lambda s: measured[settings.index(s)]).best.measurement.setting == kept


def test_repeats_of_a_table_become_their_mean_in_the_order_of_the_first() -> None:
    one, other = world.truth(world.at(500.0, 200.0, 4)), world.truth(world.at(500.0, 300.0, 4))
    failed = Measurement(one.setting, status=Status.FAILED)
    merged = without_repeats([one, other, replace(one, power_w=3 * one.power_w, step_s=2 * one.step_s), failed])
    assert [m.setting for m in merged] == [one.setting, other.setting]
    assert merged[0].power_w == pytest.approx(2 * one.power_w)
    assert merged[0].step_s == pytest.approx(1.5 * one.step_s)
    assert merged[1] == other
