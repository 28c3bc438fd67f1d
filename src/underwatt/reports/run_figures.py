"""Figures of a run: its power against the budget, what it did, and where its energy went."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from underwatt.events import BudgetChanged, Ended, Noted, Resumed, SettingChanged
from underwatt.measure.steady import SENSOR_LAG_S
from underwatt.reports.figures import Change, EnergyOverTime, EnergySpent, PowerTrace, Share
from underwatt.reports.sources import OUTCOMES
from underwatt.reports.words import (
    allowed,
    bound,
    counted,
    duration,
    energy,
    figures,
    listed,
    mean_power,
    percent,
    watts,
)
from underwatt.runlog.record import TOLERANCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    from underwatt.budget import Budget
    from underwatt.records import Setting
    from underwatt.runlog.record import RunRecord, Verdict


# Long traces made short without hiding anything: of each stretch the extremes stay, and its worst excess.

MOST_POINTS = 4000
MOST_STRETCHES = 240


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Lowest, mean and highest reading of stretches of a trace, at the middle of each."""

    at_s: Floats
    low_w: Floats
    mean_w: Floats
    high_w: Floats


def thin(power_w: Floats, bound_w: Floats, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Rows to show, ascending, at most ``most`` of them.

    Of each stretch the lowest and the highest reading are kept and the one that is furthest above its bound, which
    need not be the highest where the bound changes: a stretch with an excess shows an excess. ``power_w`` is finite.
    """
    count = len(power_w)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 3) + 1).astype(np.intp)
    excess = power_w - bound_w
    kept = [0, count - 1]
    for start, end in pairwise(edges.tolist()):
        stretch = power_w[start:end]
        kept += [start + int(stretch.argmin()), start + int(stretch.argmax()), start + int(excess[start:end].argmax())]
    return np.unique(np.asarray(kept, dtype=np.intp))


def stretches(at_s: Floats, power_w: Floats, most: int = MOST_STRETCHES) -> Stretches:
    """The trace as at most ``most`` stretches of equally many readings."""
    edges = np.unique(np.linspace(0, len(power_w), min(most, len(power_w)) + 1).astype(np.intp))
    starts = edges[:-1]
    if not len(starts):
        empty = np.empty(0)
        return Stretches(empty, empty, empty, empty)
    counts = np.diff(edges)
    return Stretches(
        at_s=(at_s[starts] + at_s[edges[1:] - 1]) / 2,
        low_w=np.minimum.reduceat(power_w, starts),
        mean_w=np.add.reduceat(power_w, starts) / counts,
        high_w=np.maximum.reduceat(power_w, starts),
    )


MOST_ENERGY_POINTS = 400
MOST_LEVELS = 4


def trace_figure(record: RunRecord) -> PowerTrace | None:
    """The power of a run against its budget; nothing where no reading was logged."""
    at_s, power_w, _ = _readings(record)
    if not len(at_s):
        return None
    # A reading at the moment of a change stands for the time before it.
    bound_w = np.asarray(record.budget_at(np.nextafter(at_s, -np.inf)), dtype=float)
    rows = thin(power_w, bound_w)
    over = power_w > bound_w
    parts = stretches(at_s, power_w)
    steps_s, steps_w = (np.asarray(column, dtype=float) for column in record.budget_steps)
    bounded = np.isfinite(steps_w)
    verdict = record.verdict()
    windows_s = tuple(sorted(set(record.windows_s[bounded].tolist())))
    energy_over_j = float(record.energy_over_j())
    shown_over = rows[over[rows]]
    return PowerTrace(
        simulated=record.start.simulated,
        at_s=_plain(at_s[rows]),
        power_w=_plain(power_w[rows]),
        readings=len(at_s),
        mean_at_s=_plain(parts.at_s),
        low_w=_plain(parts.low_w),
        mean_w=_plain(parts.mean_w),
        high_w=_plain(parts.high_w),
        budget_at_s=_plain(steps_s[bounded]),
        budget_w=_plain(steps_w[bounded]),
        over_at_s=_plain(at_s[shown_over]),
        over_power_w=_plain(power_w[shown_over]),
        readings_over=int(over.sum()),
        windows_s=windows_s,
        bounded_s=verdict.bounded_s,
        judged_s=verdict.judged_s,
        time_over_s=verdict.over_s,
        energy_over_j=energy_over_j,
        changes=_changes(record),
        message=_trace_message(record, power_w, bound_w, windows_s, verdict),
    )


def _trace_message(
    record: RunRecord, power_w: Floats, bound_w: Floats, windows_s: tuple[float, ...], verdict: Verdict
) -> str:
    energy_j, time_s = spent(record)
    highest = watts(float(power_w.max()))
    text = f"{counted(len(power_w), 'reading')} over {duration(time_s)}: {highest} at most; "
    text += f"{mean_power(energy_j, time_s)}."
    if not windows_s:
        return text
    over, energy_over_j = float((power_w > bound_w).mean()), record.energy_over_j()
    ways = [f"means over {window_s:g} s" if window_s else "single readings" for window_s in windows_s]
    judged = f"Of {duration(verdict.bounded_s)} under a budget, {duration(verdict.judged_s)} were judged"
    if not verdict.is_enough:
        held = f"{judged}: too short to say whether it was held"
        if verdict.over_s:
            held += f", but power was more than {percent(TOLERANCE)} above it for {duration(verdict.over_s)}"
    else:
        how = (
            f"never above it by more than {percent(TOLERANCE)}"
            if verdict.over_s == 0
            else f"above it by more than {percent(TOLERANCE)} for {duration(verdict.over_s)}"
        )
        held = f"{judged}, by {listed(ways)}: {how}"
    lag = (
        f" Not judged are readings that came down within {SENSOR_LAG_S:g} s of a change of setting or budget: the "
        "sensor averages."
        if verdict.judged_s < verdict.bounded_s
        else ""
    )
    return (
        f"{text} {held}.{lag} {figures(100 * over, 2)}% of all single readings lie above the line, by "
        f"{energy(energy_over_j) if energy_over_j else '0 J'} together."
    )


def spent(record: RunRecord) -> tuple[float, float]:
    """Joules and seconds of a whole run, as its end tells them; of one that has not ended, by its readings."""
    end = record.end
    if end is not None and math.isfinite(end.energy_j):
        return end.energy_j, end.at_s
    return record.energy_j(), float(record.span_s().sum())


def _changes(record: RunRecord) -> tuple[Change, ...]:
    found = []
    for event in record.events:
        match event:
            case BudgetChanged():
                found.append(Change(event.at_s, event.kind, f"{allowed(event)} ({event.why})"))
            case SettingChanged():
                found.append(Change(event.at_s, event.state, f"{event.setting}: {event.why}"))
            case Noted():
                found.append(Change(event.at_s, event.level, event.text))
            case Resumed():
                found.append(Change(event.at_s, event.kind, "the run went on after a stop"))
            case Ended():
                found.append(Change(event.at_s, event.kind, event.outcome))
    return tuple(found)


def energy_figures(
    record: RunRecord, expected_j: float | None = None, budget: Budget | None = None
) -> tuple[EnergyOverTime, EnergySpent | None] | None:
    """Energy over time, and by setting; nothing where no reading was logged.

    ``expected_j`` is what a whole training was expected to take under ``budget``, which may be one of several.
    """
    at_s, power_w, span_s = _readings(record)
    if len(at_s) < 2:
        return None
    total_j = np.cumsum(power_w * span_s)
    rows = np.unique(np.linspace(0, len(at_s) - 1, MOST_ENERGY_POINTS).round().astype(int))
    simulated = record.start.simulated
    energy_j, time_s = spent(record)
    message = f"The run took {energy(energy_j)} in {duration(time_s)}."
    if expected_j is not None and math.isfinite(expected_j):
        expected = f"the plan expects {energy(expected_j)} to the target"
        message += f" With {budget} all along, {expected}, search not included."
    over_time = EnergyOverTime(
        simulated,
        _plain(at_s[rows]),
        _plain(total_j[rows]),
        expected_j,
        "" if budget is None else str(budget),
        None if budget is None else budget.energy_j,
        message,
    )
    return over_time, _spent(record, at_s, total_j, simulated)


def _spent(record: RunRecord, at_s: Floats, total_j: Floats, simulated: bool) -> EnergySpent | None:
    events = record.of(SettingChanged)
    if not events:
        return None
    edges_s = np.array([*(event.at_s for event in events), at_s[-1]])
    at_edges_j = np.interp(edges_s, at_s, total_j)
    spent: dict[Setting, tuple[float, float]] = {}
    for at, event in enumerate(events):
        time_s, energy_j = spent.get(event.setting, (0.0, 0.0))
        spent[event.setting] = (
            time_s + max(0.0, float(edges_s[at + 1] - edges_s[at])),
            energy_j + max(0.0, float(at_edges_j[at + 1] - at_edges_j[at])),
        )
    shares = tuple(
        Share(setting, time_s, energy_j)
        for setting, (time_s, energy_j) in sorted(spent.items(), key=lambda item: -item[1][1])
    )
    whole = sum(share.energy_j for share in shares)
    most = shares[0]
    rest = f", the rest at {counted(len(shares) - 1, 'other setting')}" if len(shares) > 1 else ""
    message = f"{percent(most.energy_j / whole) if whole else 'None'} of the energy was spent at {most.setting}{rest}."
    return EnergySpent(simulated, shares, message)


def happened(record: RunRecord) -> str:
    """How the run went, under which budgets, in one sentence."""
    end, under = record.end, _under(record)
    if end is None:
        return f"The run{under} has not ended, or was cut off."
    how = OUTCOMES.get(end.outcome, end.outcome)
    score = "" if end.score is None else f" with a score of {end.score:.4g}"
    why = f": {end.error.rstrip('.')}" if end.error else ""
    knows_energy = math.isfinite(end.energy_j)
    took = [duration(end.at_s), *([energy(end.energy_j)] if knows_energy else []), counted(end.samples, "sample")]
    mean = f", {mean_power(*spent(record))}" if knows_energy else ""
    text = f"The training{under} {how}{score} after {listed(took)}{mean}{why}."
    return text if end.restored else f"{text} The device was not put back as it was: run `underwatt restore`."


def _under(record: RunRecord) -> str:
    """The levels of the budget, in the order in which they held."""
    levels_w = [level_w for level_w, _ in groupby(record.budget_steps[1].tolist())]
    if not levels_w or levels_w == [math.inf]:
        return ""
    if len(levels_w) > MOST_LEVELS:
        bounds = [level_w for level_w in levels_w if math.isfinite(level_w)]
        return f" under budgets from {bound(min(bounds))} to {bound(max(bounds))}"
    return f" under {', then '.join(bound(level_w) if math.isfinite(level_w) else 'no bound' for level_w in levels_w)}"


def _readings(record: RunRecord) -> tuple[Floats, Floats, Floats]:
    """When was read what, and for how long it stands."""
    at_s, power_w = np.asarray(record.power.at_s, dtype=float), np.asarray(record.power.power_w, dtype=float)
    fine = np.isfinite(power_w) & np.isfinite(at_s)
    return at_s[fine], power_w[fine], record.span_s()[fine]


def _plain(values: Floats) -> tuple[float, ...]:
    """Rounded far below what a sensor tells, so that the file stays small."""
    return tuple(np.round(values, 4).tolist())
