"""What a predictor is: fitted on measurements, it gives time and power of any setting, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from underwatt.errors import InputError, PredictError
from underwatt.records import KNOBS, PowerMode, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from underwatt.records import Measurement, Prediction, Profile


# Settings as columns: a hundred thousand of them are arrays here, not objects.


@dataclass(frozen=True, slots=True, eq=False)
class SettingArray:
    """Many settings: one row a setting, one column a knob in the order of ``knobs``, batch sizes beside them."""

    knobs: tuple[str, ...]
    values: NDArray[np.float64]
    batch_size: NDArray[np.float64]

    def __post_init__(self) -> None:
        if list(self.knobs) != [name for name in KNOBS if name in self.knobs]:
            raise InputError(
                f"Knobs {self.knobs} are unknown, twice there, or out of order.",
                hint=f"Name some of {', '.join(KNOBS)}, in this order.",
            )
        if self.values.shape != (len(self.batch_size), len(self.knobs)):
            raise InputError(
                f"{len(self.batch_size)} settings of {len(self.knobs)} knobs cannot be a {self.values.shape} array.",
                hint="Give one row a setting and one column a knob.",
            )
        if not (_positive(self.values) and _positive(self.batch_size)):
            raise InputError("Every knob and batch size of a setting must be a positive number.")

    @classmethod
    def of(cls, settings: Sequence[Setting]) -> SettingArray:
        """Columns from records; all of them must set the same knobs."""
        knobs = tuple(settings[0].mode.knobs()) if settings else ()
        odd = next((setting for setting in settings if tuple(setting.mode.knobs()) != knobs), None)
        if odd is not None:
            raise InputError(
                f"These settings do not set the same knobs: {settings[0]}; {odd}.",
                hint="Keep settings that leave a knob alone apart from settings that set it.",
            )
        rows = [list(setting.mode.knobs().values()) for setting in settings]
        values = np.array(rows, dtype=float).reshape(len(settings), len(knobs))
        return cls(knobs, values, np.array([setting.batch_size for setting in settings], dtype=float))

    @classmethod
    def product(cls, knobs: tuple[str, ...], modes: NDArray[np.float64], batch_sizes: ArrayLike) -> SettingArray:
        """Every mode (one row each, as ``ModeSpace.matrix`` gives them) at every batch size."""
        sizes = np.asarray(batch_sizes, dtype=float).ravel()
        values = np.repeat(np.asarray(modes, dtype=float), len(sizes), axis=0)
        return cls(knobs, values, np.tile(sizes, len(modes)))

    def __len__(self) -> int:
        return len(self.batch_size)

    def __getitem__(self, index: int) -> Setting:
        mode = dict(zip(self.knobs, self.values[index].tolist(), strict=True))
        cores = mode.pop("cpu_cores", None)
        return Setting(PowerMode(cpu_cores=None if cores is None else int(cores), **mode), int(self.batch_size[index]))

    def take(self, rows: NDArray[np.intp] | slice) -> SettingArray:
        """Some of the settings."""
        return SettingArray(self.knobs, self.values[rows], self.batch_size[rows])

    def column(self, name: str) -> NDArray[np.float64] | None:
        """The values of one knob, or ``None`` where these settings have no such knob."""
        return self.values[:, self.knobs.index(name)] if name in self.knobs else None

    def matrix(self) -> NDArray[np.float64]:
        """Knobs and, last, the batch size."""
        return np.column_stack([self.values, self.batch_size])


def _positive(values: NDArray[np.float64]) -> bool:
    return bool(np.all(np.isfinite(values) & (values > 0)))


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


# Measurements made ready for fitting: checked, in logs, as columns.

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
