"""What a run's log says of the profile that it adds to, and of the budget that it decided under."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.budget import Budget, parse_budget
from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Measured, Planned
from underwatt.records import Profile, to_json

if TYPE_CHECKING:
    from underwatt.runlog.record import RunRecord
    from underwatt.store.store import ProfileSummary

# What a run did in the end, by the outcome in its log.
OUTCOMES = {
    "reached": "reached its target",
    "finished": "finished",
    "limit": "ended at its limit, before the target",
    "interrupted": "was interrupted",
    "failed": "failed",
    "energy spent": "ended because its energy was spent",
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
