from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import observe
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.testing.predictors import made_up_measurements


def test_repeats_that_agree_are_both_kept() -> None:
    seen = made_up_measurements()
    again = replace(seen[0], step_s=1.1 * seen[0].step_s)
    assert len(observe([*seen, again])) == len(seen) + 1


def test_names_the_setting_that_disagrees() -> None:
    seen = made_up_measurements()
    with pytest.raises(PredictError) as caught:
        observe([*seen, replace(seen[3], power_w=5 * seen[3].power_w)])
    assert str(seen[3].setting) in str(caught.value)
    assert caught.value.hint


def test_settings_of_different_knobs_do_not_mix() -> None:
    seen = made_up_measurements()
    with pytest.raises(PredictError, match="same knobs"):
        observe([*seen, replace(seen[0], setting=Setting(PowerMode(), 8))])


def test_says_whose_measurements_are_wrong() -> None:
    with pytest.raises(PredictError, match="the reference X"):
        observe([], whose="the reference X")


def test_merged_has_one_row_a_setting_with_the_mean_of_its_repeats() -> None:
    settings = [Setting(PowerMode(gpu_mhz=float(mhz)), 8) for mhz in (300, 100, 300, 200)]
    readings = [
        Measurement(setting, step_s, 5.0) for setting, step_s in zip(settings, (1.0, 3.0, 1.21, 2.0), strict=True)
    ]
    merged = observe(readings).merged()
    assert merged.settings.values.ravel().tolist() == [300, 100, 200]
    assert np.exp(merged.log_step_s) == pytest.approx([1.1, 3.0, 2.0])
