"""What every predictor must do, as tests: subclass, say how to make yours, and pytest runs them.

class TestMine(PredictorConformance):
    def make(self) -> Predictor:
        return Mine()
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray, prepared
from underwatt.records import DeviceInfo, Measurement, PowerMode, Profile, Setting, Status, WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.predict.base import Predictor
    from underwatt.records import Prediction


def made_up_measurements(*, slower: float = 1.0, count: int = 24) -> tuple[Measurement, ...]:
    """Settings of a made-up device: two clocks, two batch sizes, a smooth time and power."""
    knobs = [(b, cpu, gpu) for b in (8, 32) for cpu in (500.0, 1000.0, 2000.0) for gpu in (200.0, 400.0, 800.0, 1200.0)]
    return tuple(
        Measurement(
            Setting(PowerMode(cpu_mhz=cpu_mhz, gpu_mhz=gpu_mhz), batch_size),
            step_s=slower * (0.5 * batch_size / gpu_mhz + 3.0 / cpu_mhz),
            power_w=5.0 + 10.0 * (gpu_mhz / 1200.0) ** 2 + 2.0 * cpu_mhz / 2000.0,
        )
        for batch_size, cpu_mhz, gpu_mhz in knobs[:count]
    )


def made_up_profile(measurements: Sequence[Measurement], name: str = "made up") -> Profile:
    """A profile around measurements."""
    return Profile(DeviceInfo("test", name, name, f"test:{name}"), WorkloadInfo(name, name), tuple(measurements))


SEEN = made_up_measurements()
ASKED = SettingArray.of([m.setting for m in SEEN])


def _median_error(predicted: Prediction) -> float:
    """Of log step times, against what was measured."""
    return float(np.median(np.abs(predicted.log_step_s - np.log([m.step_s for m in SEEN]))))


class PredictorConformance:
    """Subclass and implement ``make``."""

    @abstractmethod
    def make(self) -> Predictor:
        """A predictor to test, quick enough for a test."""

    def test_has_a_name(self) -> None:
        """People choose predictors by name."""
        assert self.make().name

    def test_answers_for_measured_settings(self) -> None:
        """Finite figures of the right shape, near what was measured."""
        predicted = self.make().fit(SEEN).predict(ASKED)
        assert len(predicted) == len(SEEN)
        for figures in (predicted.log_step_s, predicted.log_power_w):
            assert figures.shape == (len(SEEN),)
            assert np.all(np.isfinite(figures))
        for std in (predicted.log_step_s_std, predicted.log_power_w_std):
            assert std.shape == (len(SEEN),)
            assert np.all(std > 0)
        assert _median_error(predicted) < 0.5

    def test_same_inputs_same_answers(self) -> None:
        """Fitting twice, or after another fit, changes nothing."""
        predictor = self.make()
        first = predictor.fit(SEEN).predict(ASKED)
        predictor.fit(made_up_measurements(slower=3.0))
        again = predictor.fit(SEEN).predict(ASKED)
        np.testing.assert_array_equal(first.log_step_s, again.log_step_s)
        np.testing.assert_array_equal(first.log_power_w_std, again.log_power_w_std)

    def test_prepared_it_fits_again_and_again(self) -> None:
        """A search fits after each measurement, to predict the same candidates."""
        fit = prepared(self.make(), ASKED, [made_up_profile(made_up_measurements(slower=2.0))])
        first = fit(SEEN).predict(ASKED)
        fit(made_up_measurements(slower=3.0))
        np.testing.assert_array_equal(first.log_step_s, fit(SEEN).predict(ASKED).log_step_s)
        assert _median_error(first) < 0.5

    def test_takes_references(self) -> None:
        """A reference is welcome, and of no harm where the method has no use for it."""
        reference = made_up_profile(made_up_measurements(slower=2.0))
        assert _median_error(self.make().fit(SEEN, [reference]).predict(ASKED)) < 0.5

    def test_leaves_out_what_was_not_measured(self) -> None:
        """Settings that ran out of memory carry no figures, and do not disturb."""
        failed = Measurement(Setting(SEEN[0].setting.mode, 4096), status=Status.OUT_OF_MEMORY)
        plain = self.make().fit(SEEN).predict(ASKED)
        mixed = self.make().fit((*SEEN, failed)).predict(ASKED)
        np.testing.assert_array_equal(plain.log_step_s, mixed.log_step_s)

    def test_no_settings_no_answers(self) -> None:
        """Asking about nothing is allowed."""
        assert len(self.make().fit(SEEN).predict(ASKED.take(slice(0, 0)))) == 0

    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_refuses_too_few(self, count: int) -> None:
        """Two settings say nothing about a third."""
        with pytest.raises(PredictError, match="at least 3"):
            self.make().fit(SEEN[:count])

    def test_refuses_one_setting_over_and_over(self) -> None:
        """Repeats of one setting say nothing about another."""
        with pytest.raises(PredictError, match="at least 3"):
            self.make().fit([SEEN[0]] * 10)

    @pytest.mark.parametrize(
        "changes", [{"step_s": math.nan}, {"power_w": -1.0}, {"step_s": 0.0}, {"power_w": math.inf}]
    )
    def test_refuses_what_cannot_be(self, changes: dict[str, float]) -> None:
        """NaN, zero, negative and infinite readings are errors, never input."""
        with pytest.raises(PredictError, match="cannot be"):
            self.make().fit([replace(SEEN[0], **changes), *SEEN[1:]])  # type: ignore[arg-type]

    def test_refuses_repeats_that_contradict(self) -> None:
        """Two readings of one setting that differ by a factor of three are not averaged in silence."""
        with pytest.raises(PredictError, match="disagree"):
            self.make().fit([*SEEN, replace(SEEN[0], step_s=3 * SEEN[0].step_s)])

    def test_refuses_other_knobs(self) -> None:
        """A knob that was never turned has no known effect."""
        fitted = self.make().fit(SEEN)
        other = SettingArray.of([Setting(PowerMode(power_limit_w=100.0), 8)])
        with pytest.raises(PredictError, match="measurements set"):
            fitted.predict(other)
