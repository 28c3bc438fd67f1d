"""Measurements made ready for fitting: checked, in logs, as columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError, PredictError
from underwatt.predict.settings import SettingArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.records import Measurement, Setting

FEWEST = 3
# Repeats of one setting differ by some percent; a factor of two means that something else was running.
MOST_REPEAT_RATIO = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """What was measured, one row a measurement; a setting measured twice has two rows."""

    settings: SettingArray
    log_step_s: NDArray[np.float64]
    log_power_w: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.log_step_s)

    def merged(self) -> Observations:
        """One row a setting: the mean of its repeats. A repeat would otherwise give away its twin when left out."""
        _, first, group = np.unique(self.settings.matrix(), axis=0, return_index=True, return_inverse=True)
        group, order = group.ravel(), np.argsort(first)  # settings stay in the order they were measured in
        counts = np.bincount(group)
        means = [(np.bincount(group, logs) / counts)[order] for logs in (self.log_step_s, self.log_power_w)]
        return Observations(self.settings.take(first[order]), *means)

    def take(self, rows: NDArray[np.intp] | slice) -> Observations:
        """Some of the rows."""
        return Observations(self.settings.take(rows), self.log_step_s[rows], self.log_power_w[rows])


def observe(measurements: Sequence[Measurement], *, whose: str = "the workload", fewest: int = FEWEST) -> Observations:
    """Check measurements and turn them into columns; those that ended without a time and a power are left out.

    Raises ``PredictError`` for nonsense. Repeats of a setting are kept as they are, each a reading with its own
    noise, unless they differ by more than a factor of two.
    """
    usable = [m for m in measurements if m.usable]
    for m in usable:
        for name, value in (("step time", m.step_s), ("power", m.power_w)):
            if not (math.isfinite(value) and value > 0):
                raise PredictError(
                    f"The {name} measured for {whose} at {m.setting} is {value:g}, which cannot be.",
                    hint="Measure this setting again, or delete it from the profile.",
                )
    try:
        settings = SettingArray.of([m.setting for m in usable])
    except InputError as exc:
        raise PredictError(exc.message, hint=exc.hint) from exc
    distinct = {m.setting for m in usable}
    if len(distinct) < fewest:
        raise PredictError(
            f"Predicting {whose} needs at least {fewest} different measured settings, and there are {len(distinct)}.",
            hint="Measure more settings; ten, spread out, are usually enough.",
        )
    _check_repeats(usable)
    return Observations(
        settings,
        np.log([m.step_s for m in usable]),
        np.log([m.power_w for m in usable]),
    )


def _check_repeats(measurements: Sequence[Measurement]) -> None:
    ranges: dict[Setting, list[float]] = {}
    for m in measurements:
        r = ranges.setdefault(m.setting, [m.step_s, m.step_s, m.power_w, m.power_w])
        ranges[m.setting] = [min(r[0], m.step_s), max(r[1], m.step_s), min(r[2], m.power_w), max(r[3], m.power_w)]
    for setting, (fast, slow, low, high) in ranges.items():
        if slow > MOST_REPEAT_RATIO * fast or high > MOST_REPEAT_RATIO * low:
            raise PredictError(
                f"Repeats of {setting} disagree: {fast:.4g} to {slow:.4g} s, {low:.4g} to {high:.4g} W.",
                hint="Measure it again with nothing else running, and delete the wrong one.",
            )
