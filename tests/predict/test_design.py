from __future__ import annotations

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.predict.design import first_settings, fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, Setting, Status
from underwatt.testing.predictors import made_up_measurements, made_up_profile

SEEN = made_up_measurements()
ALL = SettingArray.of([m.setting for m in SEEN])


def _out_of_memory(batch_size: int) -> Measurement:
    return Measurement(Setting(SEEN[0].setting.mode, batch_size), status=Status.OUT_OF_MEMORY)


def test_first_settings_are_different_ones_and_depend_on_the_seed_only() -> None:
    grid = np.array([[f, g] for f in np.linspace(500, 2000, 30) for g in np.linspace(200, 1200, 30)])
    many = SettingArray.product(("cpu_mhz", "gpu_mhz"), grid, [8, 32])
    first = first_settings(many, 10, seed=1)
    assert len(set(first.tolist())) == 10
    assert first.tolist() == first_settings(many, 10, seed=1).tolist()
    assert first.tolist() != first_settings(many, 10, seed=2).tolist()


def test_first_settings_reach_across_the_space() -> None:
    rows = ALL.matrix()[first_settings(ALL, 6)]
    everything = ALL.matrix()
    for column in range(rows.shape[1]):
        assert np.log(np.ptp(rows[:, column]) + 1) > 0.8 * np.log(np.ptp(everything[:, column]) + 1)


def test_chosen_settings_leave_less_uncertain_than_random_ones() -> None:
    def left_uncertain(rows: list[int]) -> float:
        return float(FewShot().fit([SEEN[at] for at in rows]).predict(ALL).log_step_s_std.mean())

    rng = np.random.default_rng(0)
    by_chance = [left_uncertain(rng.permutation(len(SEEN))[:6].tolist()) for _ in range(7)]
    assert left_uncertain(first_settings(ALL, 6).tolist()) < np.median(by_chance)


def test_a_batch_that_ran_out_of_memory_and_larger_ones_are_left_out() -> None:
    assert fits_memory(ALL, [_out_of_memory(32)]).tolist() == [m.setting.batch_size < 32 for m in SEEN]
    assert fits_memory(ALL, [_out_of_memory(20), SEEN[-1]]).tolist() == [m.setting.batch_size == 8 for m in SEEN]
    assert fits_memory(ALL, SEEN).all()


def test_a_reference_guides_the_first_ten_and_not_the_rest() -> None:
    guided = first_settings(ALL, 12, references=[made_up_profile(SEEN)])
    assert len(set(guided.tolist())) == 12
    assert guided[:10].tolist() == first_settings(ALL, 10, references=[made_up_profile(SEEN)]).tolist()
    assert guided.tolist() != first_settings(ALL, 12).tolist()


def test_refuses_more_settings_than_there_are() -> None:
    with pytest.raises(PredictError, match="can be measured"):
        first_settings(ALL, len(ALL) + 1)
    with pytest.raises(PredictError, match="can be measured"):
        first_settings(ALL, 0)
