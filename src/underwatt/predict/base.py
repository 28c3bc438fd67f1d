"""What a predictor is: fitted on measurements, it gives time and power of any setting, and how sure it is.

Ours is found by the name "underwatt"; others through the entry point group ``underwatt.predictors``, where an entry
point names a class, or a function, that takes no argument and gives a ``Predictor``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from underwatt.errors import InputError, PredictError, UnderwattError
from underwatt.records import KNOBS, Measurement, PowerMode, Setting

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from underwatt.records import Prediction, Profile

Floats = NDArray[np.float64]
Columns = TypeVar("Columns")

ENTRY_POINT_GROUP = "underwatt.predictors"
# By name, not imported: the core does not know the methods that it is compared with.
OWN_PREDICTORS = {
    "underwatt": "underwatt.predict.fewshot:FewShot",
    "powertrain": "underwatt.rivals.predictors:PowerTrain",
    "lookup": "underwatt.rivals.predictors:LookupTable",
}
# Fewer different settings say nothing about the others.
FEWEST = 3
# Repeats of one setting differ by some percent; a factor of two means that something else was running.
MOST_REPEAT_RATIO = 2.0
# Half the width of a 90% interval, in standard deviations.
Z90 = 1.645


class FittedPredictor(Protocol):
    """Answers for one workload on one device.

    One that cannot answer for every setting says with a method ``knows(settings)``, one truth value each, for which.
    """

    def predict(self, settings: SettingArray) -> Prediction:
        """Log time and log power of each setting, with the standard deviation of what a measurement would read.

        Raises ``PredictError`` for settings of other knobs than it was fitted on.
        """
        ...


class Predictor(Protocol):
    """A way to predict. Fitting leaves it unchanged: the same inputs give the same answers.

    One that is slow to understand references may also have ``prepare(candidates, references)``, which does that once
    and returns a function that fits measurements of these candidates' knobs; see ``prepared``.
    """

    name: str

    def fit(self, measurements: Sequence[Measurement], references: Sequence[Profile] = ()) -> FittedPredictor:
        """Learn from measurements, and from profiles of other workloads or devices where the method can.

        Raises ``PredictError`` for fewer than three different settings, values that cannot be, repeats that
        contradict each other, and references that share no knob with the measurements.
        """
        ...


Fit = Callable[[Sequence[Measurement]], FittedPredictor]


def prepared(predictor: Predictor, candidates: SettingArray, references: Sequence[Profile] = ()) -> Fit:
    """A function that fits measurements, for those who fit again and again to predict the same candidates."""
    prepare = getattr(predictor, "prepare", None)
    return partial(predictor.fit, references=references) if prepare is None else prepare(candidates, references)


def predictor_names() -> list[str]:
    """The names that a predictor may be chosen by; ours first."""
    return [*OWN_PREDICTORS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def load_predictor(name: str = "underwatt") -> Predictor:
    """The predictor of that name; only this one is imported."""
    if name in OWN_PREDICTORS:
        return cast("Predictor", resolve_name(OWN_PREDICTORS[name])())
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast("Predictor", point.load()())
        except UnderwattError:
            raise
        except Exception as exc:
            raise PredictError(
                f"The predictor {name!r} cannot be loaded from {point.value}: {exc}.",
                hint="Repair or uninstall the package that it came with, or choose another predictor.",
            ) from exc
    raise PredictError(f"There is no predictor {name!r}.", hint=f"The predictors are {', '.join(predictor_names())}.")


@dataclass(frozen=True, slots=True, eq=False)
class SettingArray:
    """Settings as columns, for there may be a hundred thousand: one row a setting, one column a knob of ``knobs``."""

    knobs: tuple[str, ...]
    values: Floats
    batch_size: Floats

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
        if not all(np.all(np.isfinite(numbers) & (numbers > 0)) for numbers in (self.values, self.batch_size)):
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
    def product(cls, knobs: tuple[str, ...], modes: Floats, batch_sizes: ArrayLike) -> SettingArray:
        """Every mode (one row each, as ``ModeSpace.matrix`` gives them) at every batch size."""
        sizes = np.asarray(batch_sizes, dtype=float).ravel()
        values = np.repeat(np.asarray(modes, dtype=float), len(sizes), axis=0)
        return cls(knobs, values, np.tile(sizes, len(modes)))

    def __len__(self) -> int:
        return len(self.batch_size)

    def __getitem__(self, index: int) -> Setting:
        knobs = dict(zip(self.knobs, self.values[index].tolist(), strict=True))
        return Setting(PowerMode.of(knobs), int(self.batch_size[index]))

    def take(self, rows: NDArray[np.intp] | slice) -> SettingArray:
        """Some of the settings."""
        return SettingArray(self.knobs, self.values[rows], self.batch_size[rows])

    def column(self, name: str) -> Floats | None:
        """The values of one knob, or ``None`` where these settings have no such knob."""
        return self.values[:, self.knobs.index(name)] if name in self.knobs else None

    def matrix(self) -> Floats:
        """Knobs and, last, the batch size."""
        return np.column_stack([self.values, self.batch_size])


def check_same_knobs(asked: SettingArray, fitted: tuple[str, ...]) -> None:
    """Refuse settings of other knobs than the measured ones: their effect was never seen."""
    if asked.knobs != fitted:
        measured, wanted = (", ".join(knobs) or "no knob" for knobs in (fitted, asked.knobs))
        raise PredictError(
            f"The measurements set {measured}, but predictions are asked for {wanted}.",
            hint="Ask for settings of the knobs that were measured, or measure settings of these knobs.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """What was measured, one row a measurement; a setting measured twice has two rows."""

    settings: SettingArray
    log_step_s: Floats
    log_power_w: Floats

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


def observe(measurements: Sequence[Measurement], *, whose: str = "the workload") -> Observations:
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
    repeats = by_setting(usable)
    if len(repeats) < FEWEST:
        raise PredictError(
            f"Predicting {whose} needs at least {FEWEST} different measured settings, and there are {len(repeats)}.",
            hint="Measure more settings; ten, spread out, are usually enough.",
        )
    for setting, same in repeats.items():
        times, powers = [m.step_s for m in same], [m.power_w for m in same]
        fast, slow, low, high = min(times), max(times), min(powers), max(powers)
        if slow > MOST_REPEAT_RATIO * fast or high > MOST_REPEAT_RATIO * low:
            raise PredictError(
                f"Repeats of {setting} disagree: {fast:.4g} to {slow:.4g} s, {low:.4g} to {high:.4g} W.",
                hint="Measure it again with nothing else running, and delete the wrong one.",
            )
    return Observations(settings, np.log([m.step_s for m in usable]), np.log([m.power_w for m in usable]))


def by_setting(measurements: Sequence[Measurement]) -> dict[Setting, list[Measurement]]:
    """The usable measurements of each setting: its repeats."""
    repeats: dict[Setting, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.usable:
            repeats.setdefault(measurement.setting, []).append(measurement)
    return repeats


def take_rows(record: Columns, rows: NDArray[np.intp] | slice) -> Columns:
    """Some rows of a record whose fields are all columns."""
    return type(record)(*(getattr(record, field.name)[rows] for field in fields(cast("Any", record))))
