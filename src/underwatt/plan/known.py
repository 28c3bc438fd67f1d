"""Candidates that were measured count as measured: what was read replaces what was predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.plan.problem import Outlook, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.plan.problem import Problem
    from underwatt.records import Measurement, Prediction, Setting

# A setting measured once is known about this well, in log units, where its own interval was not recorded.
READING_STD = 0.005
LEAST_STD = 1e-4
# Whether a measured setting keeps the watts is no matter of chance: its interval is in what it is taken to draw.
MEASURED_STD = 1e-10


def outlook_as_known(
    problem: Problem, prediction: Prediction, measurements: Sequence[Measurement]
) -> tuple[Outlook, NDArray[np.bool_]]:
    """The outlook with measured candidates as they were measured, and which those are.

    Repeats count with their mean, except for the watts that the budget bounds: there the highest counts, its interval
    included.
    """
    columns = {name: np.array(getattr(prediction, name)) for name in prediction.__dataclass_fields__}
    measured = np.zeros(len(problem), dtype=bool)
    highest_w: list[tuple[NDArray[np.intp], float]] = []
    for setting, same in _repeats(measurements).items():
        rows = rows_of(problem.candidates, setting)
        measured[rows] = True
        for name in ("step_s", "power_w"):
            columns[f"log_{name}"][rows] = np.log([getattr(m, name) for m in same]).mean()
            columns[f"log_{name}_std"][rows] = _std(same, name)
        if problem.budget.power_w is not None:
            highest_w.append((rows, max(problem.budget.drawn_w(m) for m in same)))
    outlook = Outlook.without_pauses(problem, replace(prediction, **columns), measurements)
    log_drawn_w, drawn_std = np.array(outlook.log_drawn_w), np.array(outlook.drawn_std)
    for rows, drawn_w in highest_w:
        log_drawn_w[rows], drawn_std[rows] = math.log(drawn_w), MEASURED_STD
    return replace(outlook, log_drawn_w=log_drawn_w, drawn_std=drawn_std).with_pauses(problem), measured


def without_repeats(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """One measurement a setting, in the order of the first: usable repeats become their mean."""
    return tuple(
        same[0]
        if len(same) == 1
        else replace(
            same[0],
            step_s=sum(m.step_s for m in same) / len(same),
            power_w=sum(m.power_w for m in same) / len(same),
            peak_w=max(m.peak_w for m in same),
        )
        for same in _repeats(measurements).values()
    )


def _repeats(measurements: Sequence[Measurement]) -> dict[Setting, list[Measurement]]:
    repeats: dict[Setting, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.usable:
            repeats.setdefault(measurement.setting, []).append(measurement)
    return repeats


def _std(same: Sequence[Measurement], name: str) -> float:
    widths = [getattr(m, f"{name}_ci95") / 1.96 / getattr(m, name) for m in same]
    known = [width for width in widths if math.isfinite(width)]
    once = math.sqrt(sum(width**2 for width in known) / len(known)) if known else READING_STD
    return max(once / math.sqrt(len(same)), LEAST_STD)
