"""Figures that let a reader check what a plan rests on: samples to the target, and predicted against measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from underwatt.predict.validate import Z90, hold_back, judge
from underwatt.report.figures import Checked, Convergence, Parity
from underwatt.report.words import figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.converge.curve import ConvergenceCurve
    from underwatt.records import ConvergenceRun, Measurement, Profile

# Ten fits to a thousand settings take most of a minute; so many say as much about the predictions.
MOST_CHECKED = 250
CURVE_POINTS = 60


def convergence_figure(
    runs: Sequence[ConvergenceRun], curve: ConvergenceCurve, batch_sizes: Sequence[int], chosen_batch_size: int | None
) -> Convergence:
    """Trainings and the fitted curve, over the batch sizes that were trained with or may be chosen."""
    of_target = tuple(run for run in runs if run.target == curve.target)
    sizes = sorted({run.batch_size for run in of_target} | set(batch_sizes))
    fine = np.geomspace(sizes[0], sizes[-1], CURVE_POINTS).round().astype(int).tolist()
    asked = sorted({*sizes, *fine})
    mean, _ = curve.predict(asked)
    low, high = curve.interval(asked)
    reachable = [at for at, value in enumerate(mean) if math.isfinite(value)]
    best = min(reachable, key=lambda at: float(mean[at]))
    seeds = len({run.seed for run in of_target})
    never = sorted({run.batch_size for run in of_target} - {run.batch_size for run in of_target if run.reached})
    message = (
        f"From {len(of_target)} trainings at {len({r.batch_size for r in of_target})} batch sizes "
        f"({seeds} seed{'s' if seeds != 1 else ''}): reaching {curve.target:g} takes the fewest samples, about "
        f"{figures(math.exp(mean[best]))}, near batch size {asked[best]}."
    )
    if chosen_batch_size is not None and math.isfinite(at_chosen := float(curve.predict([chosen_batch_size])[0][0])):
        message += f" The choice, {chosen_batch_size}, takes about {figures(math.exp(at_chosen))}."
    if never:
        message += f" Never reached at {', '.join(map(str, never))}."
    return Convergence(
        target=curve.target,
        runs=of_target,
        batch_sizes=tuple(asked[at] for at in reachable),
        samples=tuple(float(np.exp(mean[at])) for at in reachable),
        low=tuple(float(low[at]) for at in reachable),
        high=tuple(float(high[at]) for at in reachable),
        chosen_batch_size=chosen_batch_size,
        message=message,
    )


def parity_figure(
    measurements: Sequence[Measurement], references: Sequence[Profile] = (), *, most: int = MOST_CHECKED
) -> Parity:
    """Every measured setting (of very many: some, spread evenly) predicted from the others."""
    usable = [m for m in measurements if m.usable]
    settings = list(dict.fromkeys(m.setting for m in usable))
    rows = np.unique(np.linspace(0, len(settings) - 1, min(most, len(settings))).round().astype(int))
    checked = {settings[row] for row in rows.tolist()}
    held = hold_back([m for m in usable if m.setting in checked], references)
    verdict = judge(held, "underwatt")
    predicted = held.predicted
    step_s = _checked(
        "step_s",
        np.array([m.step_s for m in held.measurements]),
        predicted.log_step_s,
        predicted.log_step_s_std,
        verdict.time_mape,
        verdict.time_cover90,
    )
    power_w = _checked(
        "power_w",
        np.array([m.power_w for m in held.measurements]),
        predicted.log_power_w,
        predicted.log_power_w_std,
        verdict.power_mape,
        verdict.power_cover90,
    )
    return Parity(
        settings=tuple(m.setting for m in held.measurements),
        step_s=step_s,
        power_w=power_w,
        measured=len(settings),
        grade=verdict.grade,
        message=verdict.verdict,
    )


def _checked(
    quantity: str,
    measured: NDArray[np.float64],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    mean_error: float,
    covered: float,
) -> Checked:
    low, middle, high = (tuple(np.exp(mean + z * std).tolist()) for z in (-Z90, 0.0, Z90))
    return Checked(quantity, tuple(measured.tolist()), middle, low, high, mean_error, covered)
