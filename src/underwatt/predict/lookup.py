"""A table of what was measured, and nothing else: the method of "Accelerated Training on Low-Power Edge Devices"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.base import check_same_knobs
from underwatt.predict.observations import observe
from underwatt.records import Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.predict.settings import SettingArray
    from underwatt.records import Measurement, Profile

# A reading of a setting measured once is off by about this much; repeats say more.
READING_STD = (0.025, 0.015)


@dataclass(frozen=True, slots=True, eq=False)
class FittedLookupTable:
    """Mean and spread of each measured setting."""

    knobs: tuple[str, ...]
    _rows: Mapping[tuple[float, ...], int]
    _figures: NDArray[np.float64]  # one row a setting: log time, its std, log power, its std

    def knows(self, settings: SettingArray) -> NDArray[np.bool_]:
        """Which of the settings were measured."""
        check_same_knobs(settings, self.knobs)
        return np.array([tuple(row) in self._rows for row in settings.matrix().tolist()], dtype=bool)

    def predict(self, settings: SettingArray) -> Prediction:
        """What was measured; raises ``PredictError`` for a setting that was not."""
        unknown = np.flatnonzero(~self.knows(settings))
        if len(unknown):
            raise PredictError(
                f"{len(unknown)} of {len(settings)} settings were never measured: {settings[int(unknown[0])]}, …",
                hint="Measure them, ask only for measured ones, or use the default predictor.",
            )
        at = [self._rows[tuple(row)] for row in settings.matrix().tolist()]
        time, time_std, power, power_std = self._figures[at].reshape(len(at), 4).T
        return Prediction(time, time_std, power, power_std)


class LookupTable:
    """Answers for measured settings only, with the mean of their repeats; references are of no use to it."""

    name = "lookup"

    def fit(
        self,
        measurements: Sequence[Measurement],
        references: Sequence[Profile] = (),  # noqa: ARG002 - part of the interface
    ) -> FittedLookupTable:
        """Gather the measurements by setting."""
        seen = observe(measurements)
        repeats: dict[tuple[float, ...], list[int]] = {}
        for at, row in enumerate(seen.settings.matrix().tolist()):
            repeats.setdefault(tuple(row), []).append(at)
        figures = np.empty((len(repeats), 4))
        for row, at_rows in zip(figures, repeats.values(), strict=True):
            for column, logs in enumerate((seen.log_step_s[at_rows], seen.log_power_w[at_rows])):
                spread = float(logs.std(ddof=1)) if len(at_rows) > 1 else 0.0
                row[2 * column : 2 * column + 2] = logs.mean(), max(READING_STD[column], spread)
        return FittedLookupTable(seen.settings.knobs, {key: at for at, key in enumerate(repeats)}, figures)
