"""A report from what is known: every figure that the data allow, and for the others what would provide them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt import __version__
from underwatt.convergence.curve import fit_convergence, targets_of
from underwatt.convergence.prior import RelativeCurve, shape_prior, usual_shape
from underwatt.errors import UnderwattError
from underwatt.events import Planned
from underwatt.predict.base import Z90
from underwatt.reports.gather_plan import decide, energy_by_setting, front_figure, heat_maps, make_plan
from underwatt.reports.gather_run import along_figure, energy_figures, happened, levels_figure, trace_figure
from underwatt.reports.report_records import (
    Checked,
    Convergence,
    Decision,
    Measurements,
    Missing,
    Parity,
    Report,
    Title,
)
from underwatt.reports.words import duration, figures, percent, set_command
from underwatt.rivals.validate import hold_back, judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.budget import Budget
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.convergence.prior import Evidence
    from underwatt.predict.base import SettingArray
    from underwatt.records import ConvergenceRun, Measurement, PowerMode, Profile, Setting
    from underwatt.reports.gather_plan import PlanToExplain
    from underwatt.runlog.run_record import RunRecord


# Ten fits to a thousand settings take most of a minute; so many say as much about the predictions.
MOST_CHECKED = 250
CURVE_POINTS = 60
_RUN, _CONVERGE, _PROFILE = "underwatt run JOB --budget 10W", "underwatt converge JOB", "underwatt profile JOB"


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
    asked = {settings[row] for row in rows.tolist()}
    held, predicted = hold_back([m for m in usable if m.setting in asked], references)
    verdict = judge(held, predicted, "underwatt")

    def checked(quantity: str, mean_error: float) -> Checked:
        mean, std = (getattr(predicted, f"log_{quantity}{end}") for end in ("", "_std"))
        measured = tuple(getattr(m, quantity) for m in held)
        low, middle, high = (tuple(np.exp(mean + z * std).tolist()) for z in (-Z90, 0.0, Z90))
        return Checked(quantity, measured, middle, low, high, mean_error)

    return Parity(
        settings=tuple(m.setting for m in held),
        step_s=checked("step_s", verdict.time_mape),
        power_w=checked("power_w", verdict.power_mape),
        measured=len(settings),
        message=verdict.verdict,
    )


def build_report(
    profile: Profile,
    candidates: SettingArray | None,
    *,
    made_at: str,
    convergence: Sequence[ConvergenceRun] = (),
    target: float | None = None,
    budget: Budget | None = None,
    record: RunRecord | None = None,
    references: Sequence[Profile] = (),
    stock_modes: Mapping[str, PowerMode] | None = None,
    others: Sequence[Evidence] = (),
) -> Report:
    """Every figure of a workload on a device.

    ``candidates`` are the settings to choose from (``None``: too little was measured to choose), ``convergence`` the
    runs of the workload, ``record`` one training of it, ``others`` what other trainings say of how this one learns.
    """
    missing: list[Missing] = []
    curve = _curve(convergence, target, others, missing)
    planned = _planned(profile, candidates, budget, curve, record, references, stock_modes, missing)
    found: dict[str, Any] = {}
    if planned is not None:
        sentence, key_figures = decide(planned, None if isinstance(curve, RelativeCurve) else curve.target)
        command = set_command(profile.device, planned.chosen.setting.mode)
        found["decision"] = Decision(sentence, planned.reason, key_figures, command)
        found["front"] = front_figure(planned)
        found["time_map"], found["power_map"] = heat_maps(planned) or (None, None)
        found["energy_by_setting"] = energy_by_setting(planned, found["front"])
    if not isinstance(curve, RelativeCurve):
        sizes = () if candidates is None else sorted({int(size) for size in candidates.batch_size})
        chosen = None if planned is None else planned.chosen.setting.batch_size
        found["convergence"] = convergence_figure(convergence, curve, sizes, chosen)
    try:
        found["parity"] = parity_figure(profile.measurements, references)
    except UnderwattError as exc:
        missing.append(Missing("Predicted against measured", exc.message, _PROFILE))
    if record is not None:
        found |= {"verdict": record.verdict(), "happened": happened(record)}
    found |= _of_run(record, planned, budget, missing)
    return Report(
        title=Title(
            workload=profile.workload.name,
            device=profile.device.name,
            simulated=profile.device.simulated,
            about_watts=profile.device.about_watts,
            budget="" if budget is None else str(budget),
            target=None if record is None else record.start.target,
            made_at=made_at,
            version=__version__,
        ),
        measurements=_measurements(profile),
        assumptions=_assumptions(profile, planned, record, references, curve),
        missing=tuple(missing),
        **found,
    )


def _curve(
    runs: Sequence[ConvergenceRun], target: float | None, others: Sequence[Evidence], missing: list[Missing]
) -> ConvergenceCurve | RelativeCurve:
    made_for = targets_of(runs)
    if not runs:
        why = "No convergence runs of this workload are stored."
    elif target is not None and target not in made_for:
        made = ", ".join(f"{one:g}" for one in made_for)
        why = f"The convergence runs are for {made}, the target is {target:g}."
    else:
        try:
            aim = runs[-1].target if target is None else target
            return fit_convergence(runs, aim, prior=shape_prior(others))
        except UnderwattError as exc:
            why = exc.message
    missing.append(Missing("Convergence", why, _CONVERGE))
    return usual_shape(others)


def _planned(
    profile: Profile,
    candidates: SettingArray | None,
    budget: Budget | None,
    curve: ConvergenceCurve | RelativeCurve,
    record: RunRecord | None,
    references: Sequence[Profile],
    stock_modes: Mapping[str, PowerMode] | None,
    missing: list[Missing],
) -> PlanToExplain | None:
    command = "underwatt report --budget 10W"
    if candidates is None:
        why, command = "Too few settings were measured to predict others.", _PROFILE
    elif budget is None:
        why = "No budget was given."
    else:
        decided = None if record is None else decided_by(record, budget)
        idle_w = None if record is None else record.start.idle_w
        try:
            return make_plan(profile, candidates, budget, curve, references, stock_modes, decided, idle_w)
        except UnderwattError as exc:
            why = str(exc)
    missing.append(Missing("Decision, front, heat maps and energy", why, command))
    return None


def decided_by(record: RunRecord, budget: Budget) -> tuple[Setting, str] | None:
    """What a run chose last under this budget, and why."""
    plans = [
        plan
        for plan in record.of(Planned)
        if budget.power_w is None or float(record.budget_at(plan.at_s)) == budget.power_w
    ]
    return (plans[-1].chosen, plans[-1].reason) if plans else None


def _measurements(profile: Profile) -> Measurements | None:
    rows = profile.measurements
    if not rows:
        return None
    knobs = tuple(dict.fromkeys(knob for row in rows for knob in row.setting.mode.knobs()))
    lost, cost_s = len(rows) - len(profile.usable()), sum(row.cost_s for row in rows)
    failed = f", {lost} of them without a result" if lost else ""
    cost = f" in {duration(cost_s)} of measuring" if math.isfinite(cost_s) and cost_s > 0 else ""
    return Measurements(knobs, rows, f"{len(rows):,} measurements{failed}{cost}.")


def _of_run(
    record: RunRecord | None, planned: PlanToExplain | None, budget: Budget | None, missing: list[Missing]
) -> dict[str, Any]:
    trace = None if record is None else trace_figure(record)
    if record is None or trace is None:
        why = "There is no run to show." if record is None else "The run logged no power."
        missing.append(Missing("Power and energy over time", why, _RUN))
        return {}
    expected_j = planned.chosen.energy_j.expected if planned is not None and planned.per == "target" else None
    over_time, spent = energy_figures(record, expected_j, budget) or (None, None)
    shown = {"trace": trace, "energy_over_time": over_time, "energy_spent": spent}
    return shown | {"along": along_figure(record), "levels": levels_figure(record)}


def _assumptions(
    profile: Profile,
    planned: PlanToExplain | None,
    record: RunRecord | None,
    references: Sequence[Profile],
    curve: ConvergenceCurve | RelativeCurve,
) -> tuple[str, ...]:
    found = []
    if profile.device.simulated:
        found.append(
            f"{profile.device.name} is simulated: its times, watts and joules come from a model of the board, "
            "not from hardware. The predictor's physics is of the same family as the simulator's, so predictions look "
            "better here than on a board."
        )
    if record is not None and record.start.simulated:
        found.append("The run's seconds are simulated seconds.")
    if planned is not None:
        chosen = (
            "The run held settings that it had measured. One that was not measured counts as keeping the budget"
            if planned.by_run
            else "A setting that was not measured may be chosen"
        )
        found.append(
            f"{chosen} where its predicted risk to exceed the budget is at most {100 * planned.plan.risk:g}%; bands "
            "and intervals hold the truth nine times in ten."
        )
        if isinstance(curve, RelativeCurve):
            found.append(
                f"No convergence runs for this target: batch sizes are weighed by {curve.said()}. So times are those "
                "of one useful sample: what a sample teaches at the best of all batch sizes."
            )
            if planned.plan.unsure is not None:
                cost = planned.plan.unsure
                found.append(
                    f"Not knowing how this training learns costs {percent(cost.expected - 1)} of the time on average, "
                    f"and nine times in ten less than {percent(cost.high - 1)}; `{_CONVERGE}` would make it sure."
                )
    if not isinstance(curve, RelativeCurve):
        found.append(
            "Samples to the target come from training on the data given to `underwatt converge`; other data may need "
            "another number."
        )
    for reference in references:
        simulated = " (simulated)" if reference.device.simulated else ""
        found.append(f"Predictions may lean on {reference.workload.name} on {reference.device.name}{simulated}.")
    found.append("Measured time and power are taken to hold for the whole training: same data, same cooling.")
    return tuple(found)
