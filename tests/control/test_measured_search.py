from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from nano_world import COST, board, settings_of

from underwatt.budget import parse_budget
from underwatt.control.measured_search import comparable, measure_as_you_go
from underwatt.device.session import Session
from underwatt.errors import BudgetError
from underwatt.planning.choice import choose_measured, forecast
from underwatt.planning.problem import Problem
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Setting, Status
from underwatt.store.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def test_it_ends_with_a_measured_setting_that_fits_and_everything_is_stored(tmp_path: Path) -> None:
    device, workload = board()
    found_mode = dict(device.snapshot())
    problem = Problem.of(settings_of(device), parse_budget("5W"))
    reasons: list[str] = []
    stored_when_told: list[int] = []
    with Store(tmp_path / "store.db") as store, Session(device) as session:
        number = store.profile_id(device.info, workload.info)

        def watch(found: Measurement, why: str) -> None:
            reasons.append(why)
            stored_when_told.append(len(store.measurements(number)))
            assert store.measurements(number)[-1] == found or found.status is not Status.OK

        found = measure_as_you_go(session, workload, problem, store, watch=watch)
        kept = store.measurements(number)
    best = found.best.measurement
    assert found.best.fits
    assert best.power_w + best.power_w_ci95 <= 5.0
    assert device.board.true_power_w(COST, best.setting.mode, best.setting.batch_size) <= 5.05
    assert stored_when_told == list(range(1, len(found.measurements) + 1))
    assert reasons[0] == "to learn how time and power behave"
    assert any("gain" in why for why in reasons)
    assert [m.setting for m in kept] == [m.setting for m in found.measurements]
    assert dict(device.snapshot()) == found_mode
    part, prediction = forecast(problem, kept)
    assert choose_measured(part, prediction, kept).setting == best.setting


def test_interrupted_it_goes_on_with_what_is_stored(tmp_path: Path) -> None:
    device, workload = board()
    problem = Problem.of(settings_of(device, (8, 32)), parse_budget("5W"))

    def stop_after_four(_found: Measurement, _why: str) -> None:
        if len(store.measurements(1)) == 4:
            raise KeyboardInterrupt

    with Store(tmp_path / "store.db") as store:
        with pytest.raises(KeyboardInterrupt), Session(device) as session:
            measure_as_you_go(session, workload, problem, store, watch=stop_after_four)
        device, workload = board()
        reasons: list[str] = []
        with Session(device) as session:
            found = measure_as_you_go(session, workload, problem, store, watch=lambda _found, why: reasons.append(why))
        kept = store.measurements(1)
        with Session(device) as session:
            again = measure_as_you_go(session, workload, problem, store)
    assert len(kept) == 4 + len(found.measurements)
    assert "to learn how time and power behave" not in reasons
    assert len({m.setting for m in kept}) == len(kept)
    assert len(again.measurements) <= 2


def test_a_budget_that_nothing_keeps_names_the_smallest(tmp_path: Path) -> None:
    device, workload = board()
    problem = Problem.of(settings_of(device, (8,)), parse_budget("0.5W"))
    with (
        Store(tmp_path / "store.db") as store,
        Session(device) as session,
        pytest.raises(BudgetError, match="smallest"),
    ):
        measure_as_you_go(session, workload, problem, store)


def test_only_comparable_measurements_count() -> None:
    device, _ = board()
    problem = Problem.of(settings_of(device, (8,)), parse_budget("5W"))
    same = Measurement(problem.candidates[0], 0.1, 3.0)
    failed = Measurement(problem.candidates[1], status=Status.FAILED)
    other = Measurement(Setting(PowerMode(gpu_mhz=921.6), 8), 0.1, 3.0)
    assert comparable([same, failed, other], problem) == (same,)


def test_too_few_settings_to_predict_from_are_chosen_among_as_measured() -> None:
    settings = [Setting(PowerMode(), 8), Setting(PowerMode(), 16)]
    problem = Problem.of(SettingArray.of([*settings, Setting(PowerMode(), 64)]), parse_budget("10W"))
    measured = [Measurement(settings[0], 0.1, 5.0), Measurement(settings[1], 0.15, 6.0)]
    part, prediction = forecast(problem, measured)
    assert len(part) == 2
    plan = choose_measured(part, prediction, measured)
    assert plan.setting == settings[1]
    assert np.isfinite(plan.chosen.time_s.high)
