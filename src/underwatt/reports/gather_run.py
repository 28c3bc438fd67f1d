"""What a run's log says: the profile it adds to, its power against the budget, and where its energy went."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from underwatt.budget import Budget, parse_budget
from underwatt.control.judge import TOLERANCE
from underwatt.errors import InputError
from underwatt.events import (
    BudgetChanged,
    Ended,
    Measured,
    Noted,
    Planned,
    Progressed,
    Resumed,
    Scored,
    SettingChanged,
)
from underwatt.measure.steady import SENSOR_LAG_S
from underwatt.planning.course import hours
from underwatt.records import Profile, to_json
from underwatt.reports.report_records import (
    Along,
    Change,
    EnergyOverTime,
    EnergySpent,
    Level,
    Levels,
    PowerTrace,
    Share,
)
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
    set_command,
    watts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.records import Setting
    from underwatt.runlog.run_record import Points, RunRecord
    from underwatt.store.store import ProfileSummary

    Floats = NDArray[np.float64]

MOST_POINTS, MOST_STRETCHES, MOST_ENERGY_POINTS = 4000, 240, 400  # of a drawing
MOST_LEVELS = 4  # of the budget that are told one by one
MOST_ALONG = 400  # points of a curve beside the watts
SHOWN_CLOCKS = ("gpu_mhz", "power_limit_w", "cpu_mhz")  # the first that there is
# What a run did in the end, by the outcome in its log.
OUTCOMES = {
    "reached": "reached its target",
    "finished": "finished",
    "limit": "ended at its limit, before the target",
    "plateau": "ended on a plateau, before the target",
    "interrupted": "was interrupted",
    "failed": "failed",
    "energy spent": "ended because its energy was spent",
    "diverged": "diverged (its loss or weights were not finite)",
}


def profile_of(record: RunRecord) -> Profile:
    """The settings that a run measured, as a profile."""
    measured = tuple(event.measurement for event in record.of(Measured))
    return Profile(record.start.device, record.start.workload, measured)


def is_of(record: RunRecord, profile: Profile | ProfileSummary) -> bool:
    """Whether a run trained the workload of a profile on its device."""
    start = record.start
    return (start.device.id, start.workload.id) == (profile.device.id, profile.workload.id)


def with_run(profile: Profile, record: RunRecord) -> Profile:
    """A profile with what the run measured, where it does not hold it already."""
    known = [to_json(measurement) for measurement in profile.measurements]
    new = tuple(m for m in profile_of(record).measurements if to_json(m) not in known)
    return replace(profile, measurements=(*profile.measurements, *new))


def given_budget(record: RunRecord) -> Budget | None:
    """The budget that a run began with; of a schedule, its first level."""
    try:
        given = parse_budget(record.start.budget)
    except InputError:
        given = None
    if given is not None and given.schedule is None:
        return given
    levels_w = [step.power_w for step in record.of(BudgetChanged) if step.power_w is not None]
    return Budget(power_w=levels_w[0]) if levels_w else None


def budget_of(record: RunRecord) -> Budget | None:
    """The budget that a run last decided under; before it decided, the one it began with."""
    budget, plans = given_budget(record), record.of(Planned)
    decided_w = float(record.budget_at(plans[-1].at_s)) if plans else math.inf
    return budget if budget is None or math.isinf(decided_w) else replace(budget, power_w=decided_w)


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


def stretches(points: Points, most: int = MOST_STRETCHES) -> tuple[Floats, Floats, Floats, Floats]:
    """Middle, lowest, mean and highest reading of at most ``most`` stretches of equally many points."""
    at_s, count = points.at_s, len(points.at_s)
    edges = np.unique(np.linspace(0, count, min(most, count) + 1).astype(np.intp))
    starts = edges[:-1]
    return (
        (at_s[starts] + at_s[edges[1:] - 1]) / 2,
        np.minimum.reduceat(points.low_w, starts),
        np.add.reduceat(points.mean_w * points.readings, starts) / np.add.reduceat(points.readings, starts),
        np.maximum.reduceat(points.high_w, starts),
    )


def trace_figure(record: RunRecord) -> PowerTrace | None:
    """The power of a run against its budget; nothing where no reading was logged."""
    points, tally = record.points, record.tally
    at_s, power_w = points.at_s, points.high_w
    if not len(at_s):
        return None
    # A reading at the moment of a change stands for the time before it.
    bound_w = record.budget_at(np.nextafter(at_s, -np.inf))
    rows = thin(power_w, bound_w)
    over = power_w > bound_w
    mean_at_s, low_w, mean_w, high_w = map(_plain, stretches(points))
    steps_s, steps_w = record.budget_steps
    bounded = np.isfinite(steps_w)
    verdict = record.verdict()
    windows_s = tuple(sorted(set(record.windows_s[bounded].tolist())))
    shown_over = rows[over[rows]]
    return PowerTrace(
        simulated=record.start.simulated,
        at_s=_plain(at_s[rows]),
        power_w=_plain(power_w[rows]),
        readings=tally.readings,
        mean_at_s=mean_at_s,
        low_w=low_w,
        mean_w=mean_w,
        high_w=high_w,
        budget_at_s=_plain(steps_s[bounded]),
        budget_w=_plain(steps_w[bounded]),
        over_at_s=_plain(at_s[shown_over]),
        over_power_w=_plain(power_w[shown_over]),
        readings_over=tally.readings_over,
        windows_s=windows_s,
        bounded_s=verdict.bounded_s,
        judged_s=verdict.judged_s,
        time_over_s=verdict.over_s,
        energy_over_j=tally.energy_over_j,
        changes=_changes(record),
        message=_trace_message(record, windows_s),
    )


def _trace_message(record: RunRecord, windows_s: tuple[float, ...]) -> str:
    energy_j, time_s = spent(record)
    tally, verdict, most_w = record.tally, record.verdict(), float(record.points.high_w.max())
    text = f"{counted(tally.readings, 'reading')} over {duration(time_s)}: {watts(most_w)} at most; "
    text += f"{mean_power(energy_j, time_s)}."
    if not windows_s:
        return text
    over, energy_over_j = tally.readings_over / tally.readings, tally.energy_over_j
    together = energy(energy_over_j) if energy_over_j else "0 J"
    singly = f"{figures(100 * over, 2)}% of all single readings lie above the line, by {together} together."
    if record.said is not None:
        return f"{record.said} {text} {singly}"
    ways = [f"means over {window_s:g} s" if window_s else "single readings" for window_s in windows_s]
    judged = f"Of {duration(verdict.bounded_s)} under a budget, {duration(verdict.judged_s)} were judged"
    more = f"more than {percent(TOLERANCE)}"
    if not verdict.is_enough:
        held = f"{judged}: too short to say whether it was held"
        if verdict.over_s:
            held += f", but power was {more} above it for {duration(verdict.over_s)}"
    elif verdict.over_s:
        held = f"{judged}, by {listed(ways)}: above it by {more} for {duration(verdict.over_s)}"
    else:
        held = f"{judged}, by {listed(ways)}: never above it by {more}"
    lag = ""
    if verdict.judged_s < verdict.bounded_s:
        within = f"within {SENSOR_LAG_S:g} s of a change of setting or budget"
        lag = f" Not judged are readings that came down {within}: the sensor averages."
    return f"{text} {held}.{lag} {singly}"


def spent(record: RunRecord) -> tuple[float, float]:
    """Joules and seconds of a whole run, as its end tells them; of one that has not ended, by its readings."""
    end = record.end
    if end is not None and math.isfinite(end.energy_j):
        return end.energy_j, end.at_s
    return record.tally.energy_j, record.tally.span_s


def _changes(record: RunRecord) -> tuple[Change, ...]:
    found = []
    for event in record.events:
        match event:
            case BudgetChanged():
                told = event.kind, f"{allowed(event)} ({event.why})"
            case SettingChanged():
                told = event.state, f"{event.setting}: {event.why}"
            case Noted():
                told = event.level, event.text
            case Resumed():
                told = event.kind, "the run went on after a stop"
            case Ended():
                told = event.kind, event.outcome
            case _:
                continue
        found.append(Change(event.at_s, *told))
    return tuple(found)


def along_figure(record: RunRecord) -> Along | None:
    """Scores, speed, clock and temperature of a run over time; nothing where it told nothing of them."""
    told, tests = record.of(Progressed), record.of(Scored)
    rows = np.unique(np.linspace(0, len(told) - 1, min(len(told), MOST_ALONG)).round().astype(int)) if told else ()
    shown = [told[row] for row in rows]
    pairs = [(one, next_one) for one, next_one in pairwise(shown) if next_one.at_s > one.at_s]
    if not pairs and not tests:
        return None
    # What a resumed run had lost was trained twice: it counts for none.
    speeds = [max(0, after.samples - before.samples) / (after.at_s - before.at_s) for before, after in pairs]
    running = [(one.at_s, one.running.knobs()) for one in shown if one.running is not None]
    clock = next((name for name in SHOWN_CLOCKS if any(name in knobs for _, knobs in running)), "")
    clocks = [(at_s, float(knobs[clock])) for at_s, knobs in running if clock in knobs]
    warm = [(one.at_s, one.temperature_c) for one in shown if one.temperature_c is not None]
    finite = [test for test in tests if math.isfinite(test.value)]
    return Along(
        record.start.simulated,
        max(told[-1].at_s if told else 0.0, tests[-1].at_s if tests else 0.0),
        tuple(test.at_s for test in finite),
        tuple(test.value for test in finite),
        record.start.target,
        tuple(after.at_s for _, after in pairs),
        _plain(np.array(speeds)),
        clock,
        tuple(at_s for at_s, _ in clocks),
        tuple(value for _, value in clocks),
        tuple(at_s for at_s, _ in warm),
        tuple(degrees_c for _, degrees_c in warm),
        _along_message(record, finite),
    )


def _along_message(record: RunRecord, tests: list[Scored]) -> str:
    samples = (
        record.end.samples if record.end is not None else max((p.samples for p in record.of(Progressed)), default=0)
    )
    text = (
        f"{counted(samples, 'sample')}, {figures(samples / max(spent(record)[1], 1e-9))} a second, all pauses counted."
    )
    if not tests:
        return text
    aim, last = record.start.target, tests[-1]
    rises = (last.value if aim is None else aim) >= tests[0].value
    best = max(tests, key=lambda test: test.value if rises else -test.value)
    reached = "" if aim is None else f" (target {aim:g})"
    return (
        f"{text} The best of {counted(len(tests), 'score')} was {best.value:.4g}{reached}, after {duration(best.at_s)}."
    )


def levels_figure(record: RunRecord) -> Levels | None:
    """What was done at each level of the budget; nothing where there was but one."""
    budgets, settings, told = record.of(BudgetChanged), record.of(SettingChanged), record.of(Progressed)
    names = [allowed(one) for one in budgets]
    if len(set(names)) < 2 or not settings:
        return None
    end_s = max(spent(record)[1], record.events[-1].at_s)
    edges = sorted({*(one.at_s for one in budgets), *(one.at_s for one in settings), end_s})
    edges_s = np.array([edge for edge in edges if edge <= end_s])
    joules = np.interp(edges_s, record.points.at_s, np.cumsum(record.points.energy_j)) if len(record.points.at_s) else 0
    samples = np.interp(edges_s, [p.at_s for p in told], [p.samples for p in told]) if told else np.zeros(len(edges_s))
    pieces = np.diff([edges_s, joules + np.zeros(len(edges_s)), samples]).T
    held: dict[str, dict[Setting, Floats]] = {}
    longest: dict[str, dict[Setting, float]] = {}
    for begin_s, piece in zip(edges_s, pieces, strict=False):
        budget = [name for name, one in zip(names, budgets, strict=True) if one.at_s <= begin_s]
        setting = [one for one in settings if one.at_s <= begin_s]
        if not budget or not setting:
            continue
        name, used = budget[-1], setting[-1]
        of_level = held.setdefault(name, {})
        of_level[used.setting] = of_level.get(used.setting, np.zeros(3)) + piece
        weight = piece[0] * (1.0 if used.state != "searching" else 1e-3)  # what was only tried is no decision
        longest.setdefault(name, {})[used.setting] = longest.get(name, {}).get(used.setting, 0.0) + weight
    rows = []
    for name, of_level in held.items():
        chosen = max(longest[name], key=lambda one: longest[name][one])
        whole_s, level_j, level_samples = sum(of_level.values(), np.zeros(3)).tolist()
        if whole_s <= 0:
            continue
        share, command = of_level[chosen][0] / whole_s, set_command(record.start.device, chosen.mode)
        rows.append(Level(name, whole_s, chosen, share, level_samples / whole_s, level_j / whole_s, command))
    text = f"The budget had {counted(len(rows), 'level')}; this was held longest at each."
    return Levels(tuple(rows), text) if len(rows) > 1 else None


def energy_figures(
    record: RunRecord, expected_j: float | None = None, budget: Budget | None = None
) -> tuple[EnergyOverTime, EnergySpent | None] | None:
    """Energy over time, and by setting; nothing where no reading was logged.

    ``expected_j`` is what a whole training was expected to take under ``budget``, which may be one of several.
    """
    at_s = record.points.at_s
    if len(at_s) < 2:
        return None
    total_j = np.cumsum(record.points.energy_j)
    rows = np.unique(np.linspace(0, len(at_s) - 1, MOST_ENERGY_POINTS).round().astype(int))
    energy_j, time_s = spent(record)
    message = f"The run took {energy(energy_j)} in {duration(time_s)}."
    if expected_j is not None and math.isfinite(expected_j):
        expected = f"the plan expects {energy(expected_j)} to the target"
        message += f" With {budget} all along, {expected}, search not included."
    over_time = EnergyOverTime(
        record.start.simulated,
        _plain(at_s[rows]),
        _plain(total_j[rows]),
        expected_j,
        "" if budget is None else str(budget),
        None if budget is None else budget.energy_j,
        message,
    )
    return over_time, _by_setting(record, at_s, total_j)


def _by_setting(record: RunRecord, at_s: Floats, total_j: Floats) -> EnergySpent | None:
    events = record.of(SettingChanged)
    if not events:
        return None
    edges_s = np.array([*(event.at_s for event in events), at_s[-1]])
    pieces = np.maximum(np.diff([edges_s, np.interp(edges_s, at_s, total_j)]), 0.0).T
    spent: dict[Setting, Floats] = {}
    for event, piece in zip(events, pieces, strict=True):
        spent[event.setting] = spent.get(event.setting, 0.0) + piece
    found = (Share(setting, *both.tolist()) for setting, both in spent.items())
    shares = tuple(sorted(found, key=lambda share: -share.energy_j))
    whole = sum(share.energy_j for share in shares)
    most = shares[0]
    rest = f", the rest at {counted(len(shares) - 1, 'other setting')}" if len(shares) > 1 else ""
    message = f"{percent(most.energy_j / whole) if whole else 'None'} of the energy was spent at {most.setting}{rest}."
    return EnergySpent(shares, message)


def happened(record: RunRecord) -> str:
    """How the run went, under which budgets, in one sentence."""
    end, under, damage = record.end, _under(record), f" {record.warning}" if record.warning else ""
    if end is None:
        return f"The run{under} has not ended, or was cut off.{damage}"
    how = OUTCOMES.get(end.outcome, end.outcome)
    score = "" if end.score is None else f" with a score of {end.score:.4g}"
    why = f": {end.error.rstrip('.')}" if end.error else ""
    knows_energy = math.isfinite(end.energy_j)
    took = [duration(end.at_s), *([energy(end.energy_j)] if knows_energy else []), counted(end.samples, "sample")]
    mean = f", {mean_power(*spent(record))}" if knows_energy else ""
    text = (
        f"The training{under} {how}{score} after {listed(took)}{mean}{why}.{_deadline(record)}{_tests(record)}{damage}"
    )
    return text if end.restored else f"{text} The device was not put back as it was: run `underwatt restore`."


def _deadline(record: RunRecord) -> str:
    """Whether it was made; nothing where there was none, or the training ended before it without being done."""
    late_s, deadline_s = record.late_s, record.deadline_s
    if late_s is None or deadline_s is None:
        return ""
    how = f"missed by {duration(late_s)}" if late_s > 0 else f"made, {duration(-late_s)} early"
    return f" The deadline of {hours(deadline_s)} was {how}."


def _tests(record: RunRecord) -> str:
    """How much of the time testing took; nothing where that is not known."""
    tests = [test.took_s for test in record.of(Scored) if test.took_s is not None]
    share = sum(tests) / max(record.end.at_s, 1e-9) if record.end else 0.0
    return f" {counted(len(tests), 'test')} of the model took {100 * share:.1f}% of the time." if tests else ""


def _under(record: RunRecord) -> str:
    """The levels of the budget, in the order in which they held."""
    steps = sorted(record.of(BudgetChanged), key=lambda step: step.at_s)
    levels = [level for level, _ in groupby((step.power_w, step.watts == "peak") for step in steps)]
    if not levels or levels == [(None, False)]:
        return ""
    if len(levels) > MOST_LEVELS:
        bounds = [power_w for power_w, _ in levels if power_w is not None]
        peak = " peak" if all(is_peak for _, is_peak in levels) else ""
        return f" under budgets from {bound(min(bounds))} to {bound(max(bounds))}{peak}"
    told = ("no bound" if power_w is None else bound(power_w) + " peak" * is_peak for power_w, is_peak in levels)
    return f" under {', then '.join(told)}"


def _plain(values: Floats) -> tuple[float, ...]:
    """Rounded far below what a sensor tells, so that the file stays small."""
    return tuple(np.round(values, 4).tolist())
