"""A course to the target: which setting at which watts of a schedule, when the target is reached, and whether in time.

A run with a deadline takes the thriftiest course that surely makes it, and the soonest where none does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from underwatt.budget import DAY_S, clock
from underwatt.errors import BudgetError
from underwatt.planning.ahead import HORIZON_S, look_ahead
from underwatt.planning.choice import Expectation, front
from underwatt.planning.problem import BOUND_SLACK, LEAST_BUSY, Goal, can_pause
from underwatt.predict.base import take_rows
from underwatt.records import Setting  # noqa: TC001 - the codec reads what a plan is made of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from underwatt.budget import Schedule
    from underwatt.planning.ahead import Ahead
    from underwatt.planning.choice import Candidates
    from underwatt.planning.problem import Problem
    from underwatt.predict.base import Floats


TRIES = 4  # the time to spare depends on the settings, and these on it

# Ways to train, and the one that is headed for.


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Settings to train with: what each takes to the target if used alone, and what it draws.

    ``latest_s`` is exceeded with the accepted risk only. ``number`` says which setting a row is: with pauses of
    different lengths, one makes several.
    """

    time_s: Floats
    latest_s: Floats
    drawn_w: Floats  # that the budget bounds
    power_w: Floats
    number: NDArray[np.intp]

    @classmethod
    def of(cls, known: Candidates, usable: NDArray[np.bool_], risk: float, *, drawn_risk: float | None = None) -> Ways:
        """The usable ones of some candidates; what was not measured may draw more with the accepted risk only."""
        seen = known.outlook
        latest = seen.log_time_s - seen.log_skew + ndtri(1 - risk) * seen.time_std
        z = ndtri(1 - (risk if drawn_risk is None else drawn_risk))
        drawn = seen.log_drawn_w + z * seen.drawn_std - BOUND_SLACK
        rows = np.flatnonzero(usable)
        time_s, latest_s, drawn_w, power_w = (
            np.exp(values[rows]) for values in (seen.log_time_s, latest, drawn, seen.log_power_w)
        )
        return cls(time_s, latest_s, drawn_w, power_w, rows)

    def with_pauses(self, problem: Problem, step_s: Floats, levels_w: Iterable[float], margin: float) -> Ways:
        """Also with pauses between the steps, so long that they keep a level less a margin, where there may be any."""
        every = [self]
        for level_w in sorted(set(levels_w)):
            kept_w = level_w * (1 - margin)
            under = replace(problem, budget=problem.budget.constant(kept_w))
            share = under.busy_share(self.drawn_w, step_s)
            rows = np.flatnonzero((share < 1) & (share >= LEAST_BUSY) & can_pause(self.drawn_w, step_s, under.budget))
            time_s, latest_s = self.time_s[rows] / share[rows], self.latest_s[rows] / share[rows]
            drawn_w, power_w = np.full(len(rows), level_w), np.full(len(rows), kept_w)
            every.append(Ways(time_s, latest_s, drawn_w, power_w, self.number[rows]))
        parts = ("time_s", "latest_s", "drawn_w", "power_w", "number")
        return Ways(*(np.concatenate([getattr(one, part) for one in every]) for part in parts))

    def worth_it(self) -> Ways:
        """Those that no other beats both in time and in watts: a course needs no others, and is found much sooner."""
        watts = (self.drawn_w, self.power_w)
        rows = np.unique(np.concatenate([front(time_s, w) for time_s in (self.time_s, self.latest_s) for w in watts]))
        return take_rows(self, rows)


class Arrival(str, Enum):
    """Whether a deadline is made: surely, as far as is expected, or not."""

    IN_TIME = "in time"
    CLOSE = "close"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Heading:
    """The course that is taken, with what is expected of it; ``arrival`` is ``None`` where there is no deadline."""

    ahead: Ahead
    arrival: Arrival | None = None

    def said(self, deadline_s: float) -> str:
        """Whether the deadline is made, and what follows, in a sentence or two."""
        finish_s, deadline = self.ahead.finish_s, hours(deadline_s)
        fast = "Training goes as fast as the budget allows."
        if math.isinf(finish_s):
            return f"The deadline of {deadline} cannot be made: within this budget the target is not reached. {fast}"
        when = f"the target is expected after {hours(finish_s)}"
        if self.arrival is Arrival.IN_TIME:
            return f"The deadline of {deadline} can be made: {when}. The thriftiest way that makes it is taken."
        if self.arrival is Arrival.CLOSE:
            return f"The deadline of {deadline} may be missed: {when}, but that is not certain. {fast}"
        return f"The deadline of {deadline} cannot be made: {when}, {hours(finish_s - deadline_s)} late. {fast}"


def head_for(
    ways: Ways,
    schedule: Schedule,
    *,
    deadline_s: float | None = None,
    share: float = 1.0,
    begin_s: float = 0.0,
    energy_j: float | None = None,
    idle_w: float | None = None,
) -> Heading:
    """The course to take, in the moments of the schedule; see ``look_ahead``.

    Soonest where there is no deadline, or it may be missed; else the thriftiest that surely makes it.
    """

    def ahead(time_s: Floats, deadline_s: float | None = None) -> Ahead:
        return look_ahead(
            time_s,
            ways.drawn_w,
            ways.power_w,
            schedule,
            share=share,
            begin_s=begin_s,
            energy_j=energy_j,
            deadline_s=deadline_s,
            idle_w=idle_w,
        )

    found, arrival = ahead(ways.time_s), None
    if deadline_s is not None:
        arrival = Arrival.LATE if found.finish_s > deadline_s else Arrival.CLOSE
        if arrival is Arrival.CLOSE and ahead(ways.latest_s).finish_s <= deadline_s:
            found, arrival = _thriftiest(ways, ahead, begin_s, deadline_s, share), Arrival.IN_TIME
    numbers = ((begin, end, None if row is None else int(ways.number[row])) for begin, end, row in found.pieces)
    return Heading(replace(found, pieces=tuple(numbers)), arrival)


def _thriftiest(
    ways: Ways, ahead: Callable[[Floats, float], Ahead], begin_s: float, deadline_s: float, share: float
) -> Ahead:
    """The course of the least expected energy that leaves as much time to spare as its settings may need."""
    spare = np.maximum(ways.latest_s / ways.time_s, 1.0)
    factor = 1.0
    for _ in range(TRIES):
        due_s = begin_s + (deadline_s - begin_s) / factor
        found = ahead(ways.time_s, due_s)
        if found.finish_s > due_s:
            break
        needed = max((float(spare[row]) for _, _, row in found.pieces if row is not None), default=1.0)
        if needed <= factor:
            return found
        factor = needed
    return _as_expected(ahead(ways.latest_s, deadline_s), ways, share)


def _as_expected(found: Ahead, ways: Ways, share: float) -> Ahead:
    """A course that was laid out for times on the safe side, with the end and the energy that are expected of it."""
    energy_j, left = 0.0, share
    for begin_s, end_s, row in found.pieces:
        rate = 0.0 if row is None else 1 / float(ways.time_s[row])
        power_w = 0.0 if row is None else float(ways.power_w[row])
        seconds = min(end_s - begin_s, left / rate) if rate else end_s - begin_s
        energy_j, left = energy_j + power_w * seconds, left - rate * seconds
        if left <= 1e-9 * share:
            return replace(found, finish_s=begin_s + seconds, energy_j=energy_j)
    return found


def hours(seconds: float) -> str:
    """A time as people say it: 45 s, 2 min 5 s, 1 h 20 min, 3.5 days."""
    if seconds >= 3 * DAY_S:
        return f"{seconds / DAY_S:.1f} days"
    large, small, unit = ("h", "min", 60) if seconds >= 3600 else ("min", "s", 1)
    first, second = divmod(round(seconds / unit), 60)
    said = [f"{first} {large}"] * (first > 0) + [f"{second} {small}"] * (second > 0 or first == 0)
    return " ".join(said)


# A plan over a schedule.


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """What is done while a schedule allows so many watts; ``chosen`` is ``None`` where nothing keeps them: it waits."""

    power_w: float
    chosen: Expectation | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """From when to when which watts hold, in seconds since the start, and what is trained with; ``None`` is waiting."""

    begin_s: float
    end_s: float
    power_w: float
    setting: Setting | None


@dataclass(frozen=True, slots=True)
class Course:
    """A plan over a schedule: what is done at each of its levels, and when, until the target is reached.

    Without convergence nothing is known of the target: then there are only the levels, and no stretches.
    """

    starts_at: str  # the time of day; empty where the schedule counts from the start
    levels: tuple[LevelChoice, ...]  # from the lowest
    stretches: tuple[Stretch, ...]
    finish_s: float | None
    energy_j: float | None


def plan_course(
    known: Candidates, usable: NDArray[np.bool_], schedule: Schedule, start_s: float, risk: float
) -> Course:
    """The course over a schedule from a time of day on, under the energy, deadline and goal of the problem.

    Raises ``BudgetError`` where the target is not reached in them, naming what would be enough.
    """
    problem, ways = known.problem, Ways.of(known, usable, risk)
    starts_at = clock(round(start_s) % DAY_S) if schedule.period_s is not None else ""
    schedule = schedule.starting_at(start_s)
    chosen = {level_w: _fastest(ways, level_w) for level_w in sorted(set(schedule.levels_w))}
    if not problem.to_target:
        return Course(starts_at, _levels(known, chosen), (), None, None)
    heading = _surely_within_energy(known, ways, schedule, risk)
    _check(ways, schedule, heading, problem)
    taken = [
        (Stretch(begin_s, end_s, level_w, None if row is None else problem.candidates[row]), row)
        for first_s, last_s, row in heading.ahead.pieces
        for begin_s, end_s, level_w in schedule.pieces(first_s, min(last_s, heading.ahead.finish_s))
    ]
    chosen |= {stretch.power_w: row for stretch, row in reversed(taken)}  # what is done at a level first
    stretches = tuple(stretch for stretch, _ in taken)
    return Course(starts_at, _levels(known, chosen), stretches, heading.ahead.finish_s, heading.ahead.energy_j)


def _surely_within_energy(known: Candidates, ways: Ways, schedule: Schedule, risk: float) -> Heading:
    """The course whose energy, as it may turn out with the accepted risk, is within the budget's."""
    problem, seen = known.problem, known.outlook
    budget, spare = problem.budget, np.exp(ndtri(1 - risk) * seen.energy_std - seen.log_skew)
    deadline_s = (budget.deadline_s or HORIZON_S) if problem.goal is Goal.LEAST_ENERGY else None
    factor = 1.0
    for _ in range(TRIES):
        energy_j = None if budget.energy_j is None else budget.energy_j / factor
        heading = head_for(ways, schedule, deadline_s=deadline_s, energy_j=energy_j)
        needed = max((float(spare[row]) for _, _, row in heading.ahead.pieces if row is not None), default=1.0)
        if energy_j is None or needed <= factor:
            break
        factor = needed
    return heading


def _fastest(ways: Ways, level_w: float) -> int | None:
    fitting = np.flatnonzero(ways.drawn_w <= level_w)
    return int(ways.number[fitting[np.argmin(ways.time_s[fitting])]]) if len(fitting) else None


def _levels(known: Candidates, chosen: dict[float, int | None]) -> tuple[LevelChoice, ...]:
    rows = sorted({row for row in chosen.values() if row is not None})
    expected = dict(zip(rows, known.expect(np.array(rows, dtype=np.intp)), strict=True))
    return tuple(LevelChoice(w, None if row is None else expected[row]) for w, row in sorted(chosen.items()))


def _check(ways: Ways, schedule: Schedule, heading: Heading, problem: Problem) -> None:
    """Raise ``BudgetError`` where the target is not reached, or not surely in time."""
    budget, ahead = problem.budget, heading.ahead
    if math.isinf(ahead.finish_s):
        raise BudgetError(
            f"The target is not reached within {budget}: not in {hours(HORIZON_S)}, or not with its energy.",
            hint="Raise the watts or the energy of the budget, or choose an easier target.",
        )
    if budget.deadline_s is None:
        return
    surely = look_ahead(ways.latest_s, ways.drawn_w, ways.power_w, schedule, energy_j=budget.energy_j)
    if surely.finish_s > budget.deadline_s:
        raise BudgetError(
            f"The target is not surely reached within {budget}: it is expected after {hours(ahead.finish_s)}"
            + (f", and may take {hours(surely.finish_s)}." if math.isfinite(surely.finish_s) else "."),
            hint="Raise the deadline, the watts or the energy of the budget, or accept a higher risk.",
        )
