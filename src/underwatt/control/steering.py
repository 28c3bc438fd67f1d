"""Where joules or time are bounded: which measured setting to train with now, and whether a deadline can be made.

The course itself is planning's (``planning/course.py``); here are the settings as the device is now, and the words.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from underwatt.budget import Schedule
from underwatt.control.headroom import UNBOUNDED_W
from underwatt.planning.choice import RISK, Candidates, forecast
from underwatt.planning.course import Arrival, Ways, head_for, hours
from underwatt.predict.base import FEWEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.control.headroom import Headroom
    from underwatt.planning.course import Heading
    from underwatt.predict.base import Floats
    from underwatt.records import Measurement, Profile, Setting

BRIEF_S = 10.0  # a change of setting is worth nothing for less
MOST_LEVELS = 8  # of a schedule, for which pauses are thought of while settings are only predicted
NOT_KNOWN = (
    "Whether the deadline of {} can be made is not known: nothing says how many samples the target takes. "
    "Training goes as fast as the budget allows; `underwatt converge JOB` finds out."
)


class Steering:
    """Looks ahead; says whether a deadline can be made as soon as that can be told, and when it changes."""

    def __init__(self, note: Callable[[str, str], None], references: Sequence[Profile] = ()) -> None:
        self._note, self._references = note, references
        self._said: Arrival | None = None
        self._has_said_unknown = False

    def foresee(self, room: Headroom, elapsed_s: float, energy_j: float, share_left: float) -> Headroom:
        """Before settings are searched for: whether a deadline can be made, by predictions; and what is searched for.

        Done once; from then on, ``course`` goes by what was measured.
        """
        deadline_s, known = room.live.budget.deadline_s, room.knowledge.measurements()
        if deadline_s is None or self._said is not None:
            return room
        if not room.base.to_target:
            if not self._has_said_unknown:
                self._note("warning", NOT_KNOWN.format(hours(deadline_s)))
                self._has_said_unknown = True
            return room
        if len(known) < FEWEST:
            return room
        heading = _heading(room, _predicted_ways(room, known, self._references), elapsed_s, energy_j, share_left)
        return self._heard(room, heading, elapsed_s, share_left)

    def course(
        self, room: Headroom, elapsed_s: float, energy_j: float, share_left: float
    ) -> tuple[Headroom, Setting | None]:
        """The setting for now of the course ahead, none where it is the soonest anyway; and what is searched for."""
        budget, known = room.live.budget, room.knowledge.measurements()
        is_bounded = budget.deadline_s is not None or (budget.energy_j is not None and room.live.schedule is not None)
        if not is_bounded or not known or not room.base.to_target or share_left <= 0:
            return replace(room, pace_s=None), None
        heading = _heading(room, _measured_ways(room, known), elapsed_s, energy_j, share_left)
        number = _number_now(room, heading)
        return self._heard(room, heading, elapsed_s, share_left), None if number is None else known[number].setting

    def _heard(self, room: Headroom, heading: Heading, elapsed_s: float, share_left: float) -> Headroom:
        deadline_s, arrival = room.live.budget.deadline_s, heading.arrival
        if deadline_s is None or arrival is None:
            return room
        if arrival is not self._said:
            self._said = arrival
            self._note("info" if arrival is Arrival.IN_TIME else "warning", heading.said(deadline_s))
        in_time = arrival is Arrival.IN_TIME
        return replace(room, pace_s=(deadline_s - elapsed_s) / share_left if in_time else None)


def _number_now(room: Headroom, heading: Heading) -> int | None:
    """What the course asks for at the watts in force; what it asks for briefly only where there is nothing else."""
    brief = None
    for begin_s, end_s, number in heading.ahead.pieces:
        if room.live.power_w(begin_s) != room.budget_w:
            break
        if number is not None and end_s - begin_s >= BRIEF_S:
            return number
        brief = number if brief is None else brief
    return brief


def _heading(room: Headroom, ways: Ways, elapsed_s: float, energy_j: float, share_left: float) -> Heading:
    budget = room.live.budget
    return head_for(
        ways.worth_it(),
        room.live.schedule or Schedule.constant(UNBOUNDED_W),
        deadline_s=budget.deadline_s,
        share=share_left,
        begin_s=elapsed_s,
        energy_j=None if budget.energy_j is None else max(0.0, budget.energy_j - energy_j),
        idle_w=None if budget.energy_j is None else room.idle_w,
    )


def _measured_ways(room: Headroom, known: Sequence[Measurement]) -> Ways:
    """The measured settings as the device is now, with pauses where they may hold a level."""
    base, drift, budget = room.base, room.knowledge.drift, room.live.budget
    sizes = base.candidates.batch_size.tolist()
    rows = {size: row for row, size in enumerate(sizes)}
    at = np.array([rows[m.setting.batch_size] for m in known])
    step_s = np.array([m.step_s * drift.slow_factor for m in known])
    time_s, std = step_s * np.exp(base.log_steps[at]), base.log_samples_std[at]
    drawn_w = np.array([(m.power_w if budget.power_w is None else budget.drawn_w(m)) + drift.extra_w for m in known])
    ways = Ways(
        time_s,
        time_s * np.exp(ndtri(1 - RISK) * std - std**2 / 2),
        drawn_w / (1 - room.margin),
        np.array([m.power_w + drift.extra_w for m in known]),
        np.arange(len(known)),
    )
    return _paused(room, ways, step_s, room.live.schedule.levels_w if room.live.schedule else ())


def _predicted_ways(room: Headroom, known: Sequence[Measurement], references: Sequence[Profile]) -> Ways:
    """All settings, as they are predicted from those that were measured."""
    problem = replace(room.base, budget=room.live.budget, idle_w=None)
    problem, prediction = forecast(problem, known, references)
    candidates = Candidates(problem, prediction, known)
    ways = Ways.of(candidates, candidates.runs, RISK, drawn_risk=0.5)
    levels_w = sorted(set(room.live.schedule.levels_w)) if room.live.schedule else []
    some = np.unique(np.linspace(0, max(len(levels_w) - 1, 0), MOST_LEVELS).round().astype(int))[: len(levels_w)]
    step_s = ways.time_s / np.exp(problem.log_steps[ways.number])
    return _paused(room, ways, step_s, [levels_w[at] for at in some.tolist()])


def _paused(room: Headroom, ways: Ways, step_s: Floats, levels_w: Sequence[float]) -> Ways:
    if not room.can_pause or math.isinf(room.budget_w):
        return ways
    problem = replace(room.base, budget=room.live.budget, idle_w=room.idle_w)
    return ways.with_pauses(problem, step_s, levels_w, room.margin)
