from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.rivals.validate import cross_validate
from underwatt.testing.predictors import made_up_measurements


def test_smooth_measurements_are_trusted() -> None:
    report = cross_validate(made_up_measurements())
    assert report.grade == "good"
    assert report.time_mape < 5
    assert "Trust" in report.verdict
    assert report.measured == 24
    assert report.predictor == "underwatt"


def test_noise_is_not_trusted() -> None:
    rng = np.random.default_rng(0)
    wild = [replace(m, step_s=float(np.exp(rng.normal(0, 1.5)))) for m in made_up_measurements()]
    report = cross_validate(wild)
    assert report.grade == "poor"
    assert "Do not rely" in report.verdict
    assert report.worst_error >= report.time_mape


def test_repeats_of_a_setting_are_held_back_together() -> None:
    rng = np.random.default_rng(0)
    wild = [replace(m, step_s=float(np.exp(rng.normal(0, 1.5)))) for m in made_up_measurements()]
    assert cross_validate([*wild, *wild]).grade == "poor"


def test_needs_more_settings_than_a_fit_does() -> None:
    with pytest.raises(PredictError, match="more than 3"):
        cross_validate(made_up_measurements(count=3))
