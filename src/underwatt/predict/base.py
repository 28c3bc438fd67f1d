"""What a predictor is: fitted on measurements, it gives time and power of any setting, and how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from underwatt.errors import PredictError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.predict.settings import SettingArray
    from underwatt.records import Measurement, Prediction, Profile


class FittedPredictor(Protocol):
    """Answers for one workload on one device."""

    def predict(self, settings: SettingArray) -> Prediction:
        """Log time and log power of each setting, with the standard deviation of what a measurement would read.

        Raises ``PredictError`` for settings of other knobs than it was fitted on.
        """
        ...


class Predictor(Protocol):
    """A way to predict. Fitting leaves it unchanged: the same inputs give the same answers."""

    name: str

    def fit(self, measurements: Sequence[Measurement], references: Sequence[Profile] = ()) -> FittedPredictor:
        """Learn from measurements, and from profiles of other workloads or devices where the method can.

        Raises ``PredictError`` for fewer than three different settings, values that cannot be, repeats that
        contradict each other, and references that share no knob with the measurements.
        """
        ...


def check_same_knobs(asked: SettingArray, fitted: tuple[str, ...]) -> None:
    """Refuse settings of other knobs than the measured ones: their effect was never seen."""
    if asked.knobs != fitted:
        raise PredictError(
            f"The measurements set {_names(fitted)}, but predictions are asked for {_names(asked.knobs)}.",
            hint="Ask for settings of the knobs that were measured, or measure settings of these knobs.",
        )


def _names(knobs: tuple[str, ...]) -> str:
    return ", ".join(knobs) or "no knob"
