from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.rivals.predictors import PowerTrain
from underwatt.testing.predictors import PredictorConformance, made_up_measurements, made_up_profile

if TYPE_CHECKING:
    from underwatt.predict.base import Predictor

torch = pytest.importorskip("torch", reason="PowerTrain needs PyTorch")


class TestPowerTrain(PredictorConformance):
    def make(self) -> Predictor:
        return PowerTrain(epochs=30)


def test_fitting_leaves_the_random_numbers_of_others_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    PowerTrain(epochs=2).fit(made_up_measurements())
    assert torch.rand(1) == expected


def test_a_reference_helps_where_samples_are_few() -> None:
    seen = made_up_measurements(slower=2.0)
    asked = SettingArray.of([m.setting for m in seen])
    truth = np.log([m.step_s for m in seen])
    few = seen[::4]
    reference = made_up_profile(made_up_measurements())
    alone, helped = (
        np.abs(PowerTrain(epochs=100).fit(few, references).predict(asked).log_step_s - truth).mean()
        for references in ((), (reference,))
    )
    assert helped < alone


def test_refuses_a_reference_of_other_knobs() -> None:
    other = [
        Measurement(Setting(PowerMode(gpu_mhz=mhz), 8), step_s=1 / mhz, power_w=mhz / 50)
        for mhz in (200.0, 400.0, 800.0, 1000.0)
    ]
    with pytest.raises(PredictError, match="same knobs"):
        PowerTrain(epochs=1).fit(made_up_measurements(), [made_up_profile(other)])
