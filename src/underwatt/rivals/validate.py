"""Can the predictions be trusted? Every measured setting predicted from the others, and a verdict in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.base import FEWEST, Z90, by_setting, observe
from underwatt.predict.fewshot import FewShot
from underwatt.records import Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.predict.base import Predictor
    from underwatt.records import Measurement, Profile, Setting

MOST_FOLDS = 10
# Mean errors (percent) up to which predictions are called good, and up to which they are called usable.
GOOD = (8.0, 4.0)
USABLE = (20.0, 10.0)
LEAST_COVERED = 0.7
ADVICE = {
    "good": "Trust the predictions to pick settings.",
    "usable": "Use the predictions to decide what to measure next, and measure a setting before relying on it.",
    "poor": "Do not rely on these predictions: measure more settings, spread out over clocks and batch sizes.",
}


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Errors of predictions for settings that were measured but held back; percent and shares of one."""

    predictor: str
    measured: int
    time_mape: float
    power_mape: float
    time_cover90: float
    power_cover90: float
    worst: Setting  # the measured setting whose time is predicted worst
    worst_error: float  # percent
    grade: str  # "good", "usable" or "poor"
    verdict: str


def hold_back(
    measurements: Sequence[Measurement], references: Sequence[Profile] = (), *, predictor: Predictor | None = None
) -> tuple[list[Measurement], Prediction]:
    """Hold back each measured setting in turn (in at most ten groups), and predict it from the rest.

    The usable measurements, and what was predicted for each by a predictor that had not seen its setting.
    """
    predictor = predictor or FewShot()
    settings = observe(measurements).settings
    usable = [m for m in measurements if m.usable]
    distinct = list(by_setting(usable))
    if len(distinct) <= FEWEST:
        raise PredictError(
            f"Checking predictions needs more than {FEWEST} different measured settings, "
            f"and there are {len(distinct)}.",
            hint="Measure more settings; ten, spread out, are usually enough.",
        )
    folds = min(MOST_FOLDS, len(distinct))
    shuffled = np.random.default_rng(0).permutation(len(distinct))
    fold_of = {distinct[at]: where % folds for where, at in enumerate(shuffled)}
    fold = np.array([fold_of[m.setting] for m in usable])
    columns = {name: np.empty(len(usable)) for name in Prediction.__dataclass_fields__}
    for held_back in range(folds):
        rows = np.flatnonzero(fold == held_back)
        fitted = predictor.fit([m for m, f in zip(usable, fold, strict=True) if f != held_back], references)
        predicted = fitted.predict(settings.take(rows))
        for name, column in columns.items():
            column[rows] = getattr(predicted, name)
    return usable, Prediction(**columns)


def cross_validate(
    measurements: Sequence[Measurement], references: Sequence[Profile] = (), *, predictor: Predictor | None = None
) -> ValidationReport:
    """Predict each measured setting from the others, and compare with what was measured."""
    predictor = predictor or FewShot()
    return judge(*hold_back(measurements, references, predictor=predictor), predictor.name)


def judge(usable: Sequence[Measurement], predicted: Prediction, predictor: str) -> ValidationReport:
    """What predictions of held-back settings are worth."""
    off = np.stack([predicted.log_step_s, predicted.log_power_w]) - np.log([(m.step_s, m.power_w) for m in usable]).T
    stds = np.stack([predicted.log_step_s_std, predicted.log_power_w_std])
    errors = 100 * np.abs(np.exp(off) - 1)
    worst = int(np.argmax(errors[0]))
    mapes, covers = errors.mean(axis=1).tolist(), (np.abs(off) <= Z90 * stds).mean(axis=1).tolist()
    grade = _grade(mapes, covers)
    return ValidationReport(
        predictor=predictor,
        measured=len(usable),
        time_mape=mapes[0],
        power_mape=mapes[1],
        time_cover90=covers[0],
        power_cover90=covers[1],
        worst=usable[worst].setting,
        worst_error=float(errors[0, worst]),
        grade=grade,
        verdict=_verdict(grade, mapes, covers, len({m.setting for m in usable})),
    )


def _grade(mapes: Sequence[float], covers: Sequence[float]) -> str:
    if mapes[0] > USABLE[0] or mapes[1] > USABLE[1]:
        return "poor"
    if mapes[0] <= GOOD[0] and mapes[1] <= GOOD[1] and min(covers) >= LEAST_COVERED:
        return "good"
    return "usable"


def _verdict(grade: str, mapes: Sequence[float], covers: Sequence[float], settings: int) -> str:
    honest = "the stated intervals held" if min(covers) >= LEAST_COVERED else "the stated intervals were too narrow"
    return (
        f"Held-back settings (of {settings} measured) were predicted within {mapes[0]:.1f}% in time and "
        f"{mapes[1]:.1f}% in power on average, and {honest} ({100 * covers[0]:.0f}% and {100 * covers[1]:.0f}% "
        f"of readings inside 90% intervals). {ADVICE[grade]}"
    )
