"""A plan from predictions: the best setting that keeps the budget at an accepted risk, and what surrounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from underwatt.budget import Budget  # noqa: TC001 - the codec reads what a plan is made of
from underwatt.errors import BudgetError, InputError
from underwatt.planning.problem import BOUND_SLACK, KEPT_STD, Goal, Outlook, by_pauses, rows_of
from underwatt.predict.base import FEWEST, by_setting, take_rows
from underwatt.predict.design import fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from underwatt.planning.problem import Problem
    from underwatt.predict.base import Floats, Predictor
    from underwatt.records import Measurement, Profile, Setting

RISK = 0.05
INTERVAL = 0.9
# A setting measured once is known about this well, in log units, where its own interval was not recorded.
READING_STD = 0.005
LEAST_STD = 1e-4


@dataclass(frozen=True, slots=True)
class Interval:
    """An expected value, and the bounds that hold the truth nine times in ten."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one setting is expected to take to the target; ``chance_over`` is its chance to break the budget."""

    setting: Setting
    time_s: Interval
    power_w: Interval  # mean power
    energy_j: Interval
    chance_over: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen setting, what it is expected to take, its neighbours on the front, and why it was chosen."""

    chosen: Expectation
    budget: Budget
    goal: Goal
    risk: float  # the accepted chance to break the budget
    faster: Expectation | None  # the next faster setting on the front that draws more
    thriftier: Expectation | None  # the next slower setting on the front that draws less and spends less energy
    front: tuple[Expectation, ...]  # from the fastest to the one that draws least
    reason: str
    # Time over that of the batch size that would be best if it were known how this training learns; none where it is.
    unsure: Interval | None = None

    @property
    def setting(self) -> Setting:
        """Power mode and batch size to train with."""
        return self.chosen.setting


def forecast(
    problem: Problem,
    measurements: Sequence[Measurement],
    references: Sequence[Profile] = (),
    predictor: Predictor | None = None,
) -> tuple[Problem, Prediction]:
    """Predictions for the candidates, by our own predictor where none is given, and the problem they are for.

    That problem has fewer candidates where there are too few measurements to predict from (then only the measured ones
    are left), or where the predictor cannot answer for all of them.
    """
    repeats = by_setting(measurements)
    if len(repeats) < FEWEST:
        rows = [rows_of(problem.candidates, setting) for setting in repeats]
        part = problem.take(np.sort(np.concatenate(rows)))
        unknown = np.full(len(part), np.nan)  # planning puts what was measured in its place
        return part, Prediction(unknown, unknown, unknown, unknown)
    fitted = (predictor or FewShot()).fit(measurements, references)
    knows = getattr(fitted, "knows", None)
    if knows is not None:
        problem = problem.take(np.flatnonzero(knows(problem.candidates)))
    return problem, fitted.predict(problem.candidates)


def choose_setting(
    problem: Problem, prediction: Prediction, *, measurements: Sequence[Measurement] = (), risk: float = RISK
) -> Plan:
    """Choose among the candidates by predictions, one for each; measured settings count as measured.

    A setting is taken only where its chance to break the budget is at most ``risk``. Batch sizes that ran out of memory
    are left out. Raises ``BudgetError``, naming the smallest feasible budget, where no setting is left.
    """
    if not 0 < risk < 1:
        raise InputError(f"The accepted risk must lie between 0 and 1, not {risk:g}.", hint="Try 0.05.")
    known = Candidates(problem, prediction, measurements)
    allowed = known.runs & (known.chance >= 1 - risk)
    if not np.any(allowed):
        raise _infeasible(known, risk)
    return _plan(known, allowed, f"at a risk of at most {100 * risk:g}%", risk)


def choose_measured(problem: Problem, prediction: Prediction, measurements: Sequence[Measurement]) -> Plan:
    """The plan of the best setting that was measured and kept the budget: what a search ends with.

    Predictions, one for each candidate, only serve to show the front around it.
    """
    known = Candidates(problem, prediction, measurements)
    allowed = known.runs & known.measured & known.outlook.keeps(problem.budget)
    if not np.any(allowed):
        raise BudgetError(
            f"No measured setting keeps the budget of {problem.budget}.",
            hint="Measure more settings, or raise the budget.",
        )
    return _plan(known, allowed, "when measured", 0.5)


class Candidates:
    """The candidates as they are known: measured where they were, predicted elsewhere."""

    def __init__(self, problem: Problem, prediction: Prediction, measurements: Sequence[Measurement]) -> None:
        if len(prediction) != len(problem):
            raise InputError(f"{len(prediction)} predictions cannot describe {len(problem)} candidates.")
        self.problem = problem
        self.outlook, self.measured = outlook_as_known(problem, prediction, measurements)
        self.runs = fits_memory(problem.candidates, measurements) & np.isfinite(self.outlook.log_time_s)
        if not np.any(self.runs):
            raise InputError("Every batch size to choose from runs out of memory.", hint="Offer smaller batch sizes.")
        self.chance = self.outlook.chance_to_fit(problem.budget)

    def expect(self, rows: NDArray[np.intp]) -> list[Expectation]:
        """Some candidates as records."""
        some = take_rows(self.outlook, rows)
        columns = (
            (self.problem.candidates[row] for row in rows),
            _intervals(some.log_time_s, some.time_std, some.log_skew),
            _intervals(some.log_power_w, some.power_std, 0.0),
            _intervals(some.log_energy_j, some.energy_std, some.log_skew),
            (1 - self.chance[rows]).tolist(),
            self.measured[rows].tolist(),
        )
        return [Expectation(*values) for values in zip(*columns, strict=True)]


def _plan(known: Candidates, allowed: NDArray[np.bool_], how: str, risk: float) -> Plan:
    """The best of the allowed candidates, with its surroundings."""
    problem, time, power = known.problem, known.outlook.log_time_s, known.outlook.log_power_w
    score, _ = known.outlook.log_score(problem.goal)
    equal = np.flatnonzero(allowed & (score == score[allowed].min()))  # of these the one that draws least
    row = int(equal[np.argmin(power[equal])])
    rows = front(np.where(known.runs, time, np.inf), power)
    described = np.append(rows, row)
    around = dict(zip(described.tolist(), known.expect(described), strict=True))
    # The choice need not be on the front: what may be predicted to beat it altogether is none of its neighbours.
    energy = known.outlook.log_energy_j
    faster = rows[(time[rows] < time[row]) & (power[rows] > power[row])].tolist()
    less = (power[rows] < power[row]) & (energy[rows] < energy[row])
    thriftier = rows[(time[rows] > time[row]) & less].tolist()
    return Plan(
        chosen=around[row],
        budget=problem.budget,
        goal=problem.goal,
        risk=risk,
        faster=around[faster[-1]] if faster else None,
        thriftier=around[thriftier[0]] if thriftier else None,
        front=tuple(around[at] for at in rows.tolist()),
        reason=_reason(problem, around[row], int(allowed.sum()), how),
        unsure=_unsure(known, allowed, row),
    )


def _unsure(known: Candidates, allowed: NDArray[np.bool_], row: int) -> Interval | None:
    """What it may cost that only other trainings say how batch sizes learn."""
    problem = known.problem
    if problem.shape is None:
        return None
    sample_s = np.exp(known.outlook.log_time_s - problem.log_samples)
    sizes = problem.candidates.batch_size
    best_s = {int(size): float(sample_s[allowed & (sizes == size)].min()) for size in np.unique(sizes[allowed])}
    expected, high = problem.shape.regret(best_s, int(sizes[row]))
    return Interval(1 + expected, 1.0, 1 + high)


def _intervals(log_expected: Floats, std: Floats, log_skew: Floats | float) -> list[Interval]:
    median, reach = log_expected - log_skew, ndtri(0.5 + INTERVAL / 2) * std
    logs = zip(log_expected.tolist(), (median - reach).tolist(), (median + reach).tolist(), strict=True)
    return [Interval(*map(math.exp, three)) for three in logs]


def front(time_s: ArrayLike, power_w: ArrayLike) -> NDArray[np.intp]:
    """Rows on the Pareto front, the fastest first.

    Energy is time × power: a setting that another beats in both is beaten in energy too, so the front of time and
    power is the front of all three. Rows without a finite time or power are never on it; of equal rows one is.
    """
    time, power = np.asarray(time_s, dtype=float), np.asarray(power_w, dtype=float)
    known = np.flatnonzero(np.isfinite(time) & np.isfinite(power))
    order = known[np.argsort(time[known])]
    # Few draw no more than all that are faster, and only among these do ties need to be put in order.
    known = np.sort(order[power[order] <= np.minimum.accumulate(power[order])])
    order = known[np.lexsort((power[known], time[known]))]
    lowest_before = np.concatenate([[np.inf], np.minimum.accumulate(power[order])[:-1]])
    return np.asarray(order[power[order] < lowest_before]) if len(order) else order


def outlook_as_known(
    problem: Problem, prediction: Prediction, measurements: Sequence[Measurement]
) -> tuple[Outlook, NDArray[np.bool_]]:
    """The outlook with measured candidates as they were measured, and which those are.

    Repeats count with their mean, except for the watts that the budget bounds: there the highest counts, its interval
    included.
    """
    seen = take_rows(Outlook.without_pauses(problem, prediction, measurements), np.arange(len(problem)))  # a copy
    log_steps, measured = problem.log_steps, np.zeros(len(problem), dtype=bool)
    for setting, same in by_setting(measurements).items():
        rows = rows_of(problem.candidates, setting)
        measured[rows] = True
        log_step_s, seen.step_std[rows] = _mean([(m.step_s, m.step_s_ci95) for m in same])
        seen.log_time_s[rows] = log_step_s + log_steps[rows]
        seen.log_power_w[rows], seen.power_std[rows] = _mean([(m.power_w, m.power_w_ci95) for m in same])
        seen.log_drawn_w[rows], seen.drawn_std[rows] = seen.log_power_w[rows], seen.power_std[rows]
        if problem.budget.power_w is not None:
            drawn_w = max(problem.budget.drawn_w(m) for m in same)
            seen.log_drawn_w[rows], seen.drawn_std[rows] = math.log(drawn_w), KEPT_STD
    return seen.with_pauses(problem), measured


def _mean(readings: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean of the logs of repeats, given with their 95% intervals, and its standard deviation."""
    variances = [(ci95 / 1.96 / value) ** 2 for value, ci95 in readings if math.isfinite(ci95)]
    once = math.sqrt(sum(variances) / len(variances)) if variances else READING_STD
    mean = float(np.log([value for value, _ in readings]).mean())
    return mean, max(once / math.sqrt(len(readings)), LEAST_STD)


def _infeasible(candidates: Candidates, risk: float) -> BudgetError:
    """Which bound cannot be kept, and the smallest that could."""
    budget, z = candidates.problem.budget, float(ndtri(1 - risk))
    keeps = candidates.runs
    for bound in candidates.outlook.bounds(budget):
        value = bound.log_median + z * bound.std - BOUND_SLACK
        row = int(np.argmin(np.where(keeps, value, np.inf)))
        smallest = float(np.exp(value[row]))
        keeps = keeps & (value <= math.log(bound.most))
        if not np.any(keeps):
            named = f"{_round_up(smallest)} {bound.unit}"
            known = "measured" if candidates.measured[row] else "predicted, its uncertainty included"
            return BudgetError(
                f"No setting keeps the budget of {budget} with {100 * (1 - risk):g}% certainty: "
                f"the smallest feasible {bound.name} is {named} ({known}).",
                hint=f"Raise the {bound.name} of the budget to {named}, accept a higher risk, or measure "
                "more settings: what was measured needs no margin."
                + (by_pauses(budget, candidates.problem.idle_w) if bound.name == "power" else ""),
            )
    return BudgetError(
        f"No setting keeps all of {budget} together with {100 * (1 - risk):g}% certainty.",
        hint="Each bound can be kept by itself: raise one of them, or accept a higher risk.",
    )


def _round_up(value: float) -> str:
    """Three figures, never below the value: a budget set to it is feasible."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.6g}"


def _reason(problem: Problem, chosen: Expectation, allowed: int, how: str) -> str:
    if problem.goal is Goal.LEAST_ENERGY:
        aim = "reaches the target with the least energy"
    else:
        aim = "reaches the target soonest" if problem.to_target else "trains the most samples a second"
        if problem.shape is not None:
            aim += f", batch sizes weighed by {problem.shape.said()},"
    known = "it was measured" if chosen.measured else f"its own risk is {100 * chosen.chance_over:.1f}%"
    among = f"of the {allowed:,} (of {len(problem):,}) settings that keep {problem.budget} {how}"
    return f"{chosen.setting} {aim} {among}; {known}."
