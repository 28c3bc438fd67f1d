from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.rivals.predictors import LookupTable
from underwatt.testing.predictors import PredictorConformance, made_up_measurements

if TYPE_CHECKING:
    from underwatt.predict.base import Predictor


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
