from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.rivals import predictors
from underwatt.rivals.predictors import LookupTable, PowerTrain, save_networks, saved_reference
from underwatt.testing.predictors import PredictorConformance, made_up_measurements, made_up_profile

if TYPE_CHECKING:
    from pathlib import Path

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


@needs_torch
def test_the_published_reference_is_kept_as_a_file_and_used_where_its_knobs_are_set() -> None:
    """Trained minutes long once; from it a transfer takes a second, and few modes are enough."""
    kept = saved_reference()
    rng = np.random.default_rng(0)
    clocks = [(2.0, 6.0, 12.0), (422.4, 1267.2, 2201.6), (318.75, 828.75, 1300.5), (665.6, 2133.0, 3199.0)]
    modes = [PowerMode(*map(float, mode)) for mode in product(*clocks)]
    seen = kept.predict(SettingArray.of([Setting(mode, 16) for mode in modes]))
    # What it knows of AGX Orin: more of everything is faster and draws more.
    assert np.corrcoef(seen.log_step_s, [np.log([*m.knobs().values()]).sum() for m in modes])[0, 1] < -0.7
    assert 8 < np.exp(seen.log_power_w.min()) < np.exp(seen.log_power_w.max()) < 70
    truth = [
        Measurement(Setting(mode, 16), 1.7 * float(np.exp(time)), 0.8 * float(np.exp(power)))
        for mode, time, power in zip(modes, seen.log_step_s, seen.log_power_w, strict=True)
    ]
    some = [truth[int(row)] for row in rng.permutation(len(truth))[:20]]
    asked, logs = SettingArray.of([m.setting for m in truth]), np.log([m.step_s for m in truth])
    errors = [
        np.abs(fitted.predict(asked).log_step_s - logs).mean()
        for fitted in (PowerTrain().fit(some), PowerTrain().transfer(some, None))
    ]
    assert errors[0] < 0.9 * errors[1]


@needs_torch
def test_networks_are_written_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        Measurement(Setting(PowerMode(2, 500.0, gpu, mem), 16), 100 / gpu, gpu / 100)
        for gpu in (200.0, 400.0, 800.0, 1000.0)
        for mem in (600.0, 2133.0)
    ]
    fitted = PowerTrain(epochs=5).transfer(seen, None)
    monkeypatch.setattr(predictors, "REFERENCE", tmp_path / "kept.npz")
    save_networks(fitted, predictors.REFERENCE)
    asked = SettingArray.of([m.setting for m in seen])
    one, other = fitted.predict(asked), saved_reference().predict(asked)
    np.testing.assert_allclose(one.log_step_s, other.log_step_s, atol=0.01)
    np.testing.assert_allclose(one.log_power_w, other.log_power_w, atol=0.01)


@needs_torch
def test_relative_errors_may_be_the_loss() -> None:
    """As on an Orin Nano: what is far smaller than the rest counts as much."""
    steps = np.geomspace(0.001, 1.0, 60)
    seen = [Measurement(Setting(PowerMode(gpu_mhz=1000 * at + 1), 8), at, 5.0 + at) for at in steps.tolist()]
    asked = SettingArray.of([m.setting for m in seen])

    def worst(relative: bool) -> float:
        fitted = PowerTrain(epochs=60, relative=relative).transfer(seen, None)
        return float(np.abs(np.expm1(fitted.predict(asked).log_step_s - np.log(steps))).mean())

    assert worst(relative=True) < worst(relative=False)
