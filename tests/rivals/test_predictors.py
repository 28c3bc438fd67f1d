from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.rivals.predictors import LookupTable, PowerTrain
from underwatt.testing.predictors import PredictorConformance, made_up_measurements, made_up_profile

if TYPE_CHECKING:
    from underwatt.predict.base import Predictor

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PowerTrain needs PyTorch")


class TestLookupTable(PredictorConformance):
    def make(self) -> Predictor:
        return LookupTable()


def test_gives_back_what_was_measured_and_refuses_the_rest() -> None:
    seen = made_up_measurements()
    fitted = LookupTable().fit(seen[:10])
    asked = SettingArray.of([m.setting for m in seen])
    assert fitted.knows(asked).tolist() == [True] * 10 + [False] * (len(seen) - 10)
    predicted = fitted.predict(asked.take(slice(0, 10)))
    np.testing.assert_allclose(np.exp(predicted.log_step_s), [m.step_s for m in seen[:10]])
    with pytest.raises(PredictError, match="never measured"):
        fitted.predict(asked)


def test_repeats_are_averaged_and_widen_the_spread() -> None:
    seen = made_up_measurements()
    again = replace(seen[0], step_s=1.5 * seen[0].step_s)
    predicted = LookupTable().fit([*seen, again]).predict(SettingArray.of([seen[0].setting, seen[1].setting]))
    assert np.isclose(np.exp(predicted.log_step_s[0]), seen[0].step_s * np.sqrt(1.5))
    assert predicted.log_step_s_std[0] > predicted.log_step_s_std[1]


@needs_torch
class TestPowerTrain(PredictorConformance):
    def make(self) -> Predictor:
        return PowerTrain(epochs=30)


@needs_torch
def test_fitting_leaves_the_random_numbers_of_others_alone() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    PowerTrain(epochs=2).fit(made_up_measurements())
    assert torch.rand(1) == expected


@needs_torch
def test_a_reference_helps_where_samples_are_few() -> None:
    seen = made_up_measurements(slower=2.0)
    asked = SettingArray.of([m.setting for m in seen])
    truth = np.log([m.step_s for m in seen])
    few = seen[::5]  # all knobs vary in these
    reference = made_up_profile(made_up_measurements())
    alone, helped = (
        np.abs(PowerTrain(epochs=100).fit(few, references).predict(asked).log_step_s - truth).mean()
        for references in ((), (reference,))
    )
    assert helped < alone


@needs_torch
def test_refuses_a_reference_of_other_knobs() -> None:
    other = [
        Measurement(Setting(PowerMode(gpu_mhz=mhz), 8), step_s=1 / mhz, power_w=mhz / 50)
        for mhz in (200.0, 400.0, 800.0, 1000.0)
    ]
    with pytest.raises(PredictError, match="same knobs"):
        PowerTrain(epochs=1).fit(made_up_measurements(), [made_up_profile(other)])


@needs_torch
def test_refuses_to_say_anything_of_a_knob_that_never_varied() -> None:
    seen = made_up_measurements()
    one_clock = [m for m in seen if m.setting.mode.gpu_mhz == seen[0].setting.mode.gpu_mhz]
    fitted = PowerTrain(epochs=1).fit(one_clock, [made_up_profile(seen)])
    assert len(fitted.predict(SettingArray.of([m.setting for m in one_clock]))) == len(one_clock)
    with pytest.raises(PredictError, match="never saw gpu_mhz vary"):
        fitted.predict(SettingArray.of([m.setting for m in seen]))
