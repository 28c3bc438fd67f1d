"""What is to be decided: candidate settings, how many samples each needs to the target, and the budget.

Time to target = (step time ÷ batch size) × samples to target. Energy = mean power × time. A goal says which of them
is to be small; the budget says what must be kept: watts, and where given joules and a deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from underwatt.budget import Budget, Watts
from underwatt.convergence.prior import RelativeCurve
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, Prediction, Setting

# Where a budget names no window, its mean is kept over this long.
DEFAULT_WINDOW_S = 5.0
# Chosen with benchmarks/hold.py: what one step draws beyond the budget must be a small share of what the window
# allows, or its mean would swing.
LARGEST_SWING = 0.012
# Waiting for more than this share of the time is no way to train.
LEAST_BUSY = 0.05
KEPT_STD = 1e-10  # of log watts that are no matter of chance: pauses keep them at the budget, or they were measured
# What meets a bound exactly keeps it: far below what any sensor tells, far above how logs round and KEPT_STD.
BOUND_SLACK = 1e-9
# The log of a bound may round either way.
ROUNDING = 1 + 1e-12


def allows_pauses(budget: Budget) -> bool:
    """Whether a budget can be kept by pausing between steps: mean watts can, peak watts cannot."""
    return budget.power_w is not None and budget.watts is Watts.MEAN


def by_pauses(budget: Budget, idle_w: float | None = None) -> str:
    """What to add where the watts of settings were compared with a budget as they are, and pauses would hold less."""
    is_helped = idle_w is None and allows_pauses(budget)
    return " That is without pauses; those of `underwatt run` may hold less." if is_helped else ""


def keeps(
    budget: Budget, drawn_w: Floats | float, time_s: Floats | float, energy_j: Floats | float
) -> NDArray[np.bool_] | bool:
    """Which settings keep every bound of a budget, by the watts that it bounds and what they take to the target.

    Of one setting, given as numbers, without arrays: a run asks this many times a second.
    """
    kept: NDArray[np.bool_] | bool = True
    for most, taken in ((budget.power_w, drawn_w), (budget.deadline_s, time_s), (budget.energy_j, energy_j)):
        if most is not None:
            kept = kept & (taken <= most * ROUNDING)
    return kept


def can_pause(power_w: ArrayLike, step_s: ArrayLike, budget: Budget) -> NDArray[np.bool_]:
    """Whether pauses between steps keep the mean steady: one step must not draw much of what a window allows."""
    assert budget.power_w is not None
    above = np.maximum(np.asarray(power_w, dtype=float) / budget.power_w - 1, 0.0)
    return np.asarray(above * np.asarray(step_s) <= LARGEST_SWING * (budget.window_s or DEFAULT_WINDOW_S))


def busy_share(power_w: ArrayLike, idle_w: float, budget_w: float) -> Floats:
    """The duty cycle that keeps a mean: the share of the time that may be spent in steps which draw ``power_w``.

    A device that draws P in steps and I in pauses draws any mean B between them at the duty cycle (B − I) / (P − I):
    a setting that draws more than the budget only takes longer. 0 where waiting alone draws too much.
    """
    power = np.asarray(power_w, dtype=float)
    above = np.maximum(power - idle_w, 1e-12)
    share = np.where(power <= budget_w, 1.0, (budget_w - idle_w) / above)
    return np.asarray(np.clip(share, 0.0, 1.0))


class Goal(str, Enum):
    """What a plan makes as small as the budget allows."""

    SOONEST = "soonest"
    LEAST_ENERGY = "least energy"

    @classmethod
    def _missing_(cls, value: object) -> Goal:
        raise InputError(f"There is no goal {value!r}.", hint=f"The goals are {', '.join(goal.value for goal in cls)}.")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Candidates with their samples to target, one entry each, a budget and a goal.

    With ``idle_w``, the power while no step is under way, pauses between steps may keep a budget of mean watts.
    """

    candidates: SettingArray
    log_samples: Floats  # inf where the target is never reached
    log_samples_std: Floats
    budget: Budget
    goal: Goal = Goal.SOONEST
    idle_w: float | None = None
    to_target: bool = True  # False where times are those of one sample, weighed by ``shape`` where there is one
    shape: RelativeCurve | None = None  # how batch sizes compare, where the samples to the target are not known

    @classmethod
    def of(
        cls,
        candidates: SettingArray,
        budget: Budget,
        convergence: SamplesToTarget | None = None,
        goal: Goal = Goal.SOONEST,
        *,
        idle_w: float | None = None,
    ) -> Problem:
        """The problem of reaching a target; without ``convergence``, of training one sample (highest throughput).

        Of a ``RelativeCurve``, that of one useful sample: what a sample teaches at the best of all batch sizes.
        """
        if not len(candidates):
            raise InputError("There is no setting to choose from.", hint="Offer at least one mode and batch size.")
        sizes, back = np.unique(candidates.batch_size, return_inverse=True)
        mean = std = np.zeros(len(sizes))
        if convergence is not None:
            mean, std = convergence.predict([int(size) for size in sizes])
        shape = convergence if isinstance(convergence, RelativeCurve) else None
        if shape is not None:
            std = np.zeros(len(sizes))  # their log is compared by its mean, which alone no unknown scale changes
        if not np.any(np.isfinite(mean)):
            raise InputError(
                "The target is not reached at any of the batch sizes to choose from.",
                hint="Offer other batch sizes, or choose an easier target.",
            )
        samples, spread = (np.asarray(values)[back.ravel()] for values in (mean, std))
        to_target = convergence is not None and shape is None
        return cls(candidates, samples, spread, budget, goal, idle_w, to_target, shape)

    def __len__(self) -> int:
        return len(self.candidates)

    def weighed(self, shape: RelativeCurve) -> Problem:
        """The same choice, with batch sizes compared by another shape."""
        return Problem.of(self.candidates, self.budget, shape, self.goal, idle_w=self.idle_w)

    def take(self, rows: NDArray[np.intp]) -> Problem:
        """The problem of choosing among some of the candidates."""
        samples, std = self.log_samples[rows], self.log_samples_std[rows]
        return replace(self, candidates=self.candidates.take(rows), log_samples=samples, log_samples_std=std)

    @property
    def log_steps(self) -> Floats:
        """Log of the expected steps to the target; inf where it is never reached."""
        return self.log_steps_at(slice(None))

    def log_steps_at(self, rows: int | slice) -> Floats:
        """The same of some candidates."""
        # The mean of a log-normal: the risk of needing many more samples counts.
        mean = self.log_samples[rows] + np.square(self.log_samples_std[rows]) / 2
        return np.asarray(mean - np.log(self.candidates.batch_size[rows]))

    def busy_share(self, power_w: Floats, step_s: Floats) -> Floats:
        """How much of the time steps may take where pauses keep the budget; 1 where none are needed or possible."""
        if self.idle_w is None or self.budget.power_w is None or not allows_pauses(self.budget):
            return np.ones_like(power_w)
        share = busy_share(power_w, self.idle_w, self.budget.power_w)
        possible = can_pause(power_w, step_s, self.budget) & (share >= LEAST_BUSY)
        return np.where(possible, share, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """One bound of a budget, and what each candidate makes of it, in logs."""

    name: str
    unit: str
    most: float
    log_median: Floats
    std: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """What each candidate is expected to take, in logs; ``drawn_w`` is the power that the budget bounds."""

    log_time_s: Floats
    log_power_w: Floats
    log_drawn_w: Floats
    step_std: Floats  # of log step time: what measuring would tell
    power_std: Floats
    drawn_std: Floats
    samples_std: Floats  # of log samples: what measuring would not tell

    @classmethod
    def of(cls, problem: Problem, prediction: Prediction, measurements: Sequence[Measurement] = ()) -> Outlook:
        """Predictions seen as time to target and as drawn watts; for peak watts, measurements tell their margin."""
        return cls.without_pauses(problem, prediction, measurements).with_pauses(problem)

    @classmethod
    def without_pauses(
        cls, problem: Problem, prediction: Prediction, measurements: Sequence[Measurement] = ()
    ) -> Outlook:
        """The outlook of steps that follow each other at once."""
        margin, margin_std = _peak_margin(problem.budget, measurements)
        return cls(
            log_time_s=prediction.log_step_s + problem.log_steps,
            log_power_w=prediction.log_power_w,
            log_drawn_w=prediction.log_power_w + margin,
            step_std=prediction.log_step_s_std,
            power_std=prediction.log_power_w_std,
            drawn_std=np.hypot(prediction.log_power_w_std, margin_std),
            samples_std=problem.log_samples_std,
        )

    def with_pauses(self, problem: Problem) -> Outlook:
        """The outlook where settings that draw more than the budget pause between steps: they keep it, and take longer.

        Watts that are not known well become time that is not known well.
        """
        if problem.idle_w is None or problem.budget.power_w is None or not allows_pauses(problem.budget):
            return self
        drawn_w = np.exp(self.log_drawn_w)
        step_s = np.exp(self.log_time_s - problem.log_steps)
        share = problem.busy_share(drawn_w, step_s)
        paused = share < 1
        steepness = np.where(paused, drawn_w / np.maximum(drawn_w - problem.idle_w, 1e-9), 0.0)
        kept_w = math.log(problem.budget.power_w)
        may_pause = can_pause(drawn_w, step_s, problem.budget)
        return replace(
            self,
            log_time_s=self.log_time_s - np.log(share),
            log_power_w=np.where(paused, kept_w, self.log_power_w),
            log_drawn_w=np.where(paused, kept_w, self.log_drawn_w),
            step_std=np.hypot(self.step_std, steepness * self.drawn_std),
            # Whoever can pause keeps the budget whatever the watts turn out to be.
            drawn_std=np.where(may_pause & (self.log_drawn_w <= kept_w) | paused, KEPT_STD, self.drawn_std),
        )

    @property
    def log_energy_j(self) -> Floats:
        """Energy to the target."""
        return np.asarray(self.log_time_s + self.log_power_w)

    @property
    def time_std(self) -> Floats:
        """Of log time to target."""
        return np.asarray(np.hypot(self.step_std, self.samples_std))

    @property
    def log_skew(self) -> Floats:
        """How far time and energy to the target, which are means, lie above what is as likely missed as met."""
        return np.asarray(self.samples_std**2 / 2)

    @property
    def energy_std(self) -> Floats:
        """Of log energy to target."""
        return np.asarray(np.hypot(self.time_std, self.power_std))

    def log_score(self, goal: Goal) -> tuple[Floats, Floats]:
        """What the goal makes small, and the part of its standard deviation that measuring would remove."""
        if goal is Goal.SOONEST:
            return self.log_time_s, self.step_std
        return self.log_energy_j, np.hypot(self.step_std, self.power_std)

    def chance_to_fit(self, budget: Budget) -> Floats:
        """How likely each candidate keeps every bound of the budget; zero where the target is never reached."""
        chance = np.where(np.isfinite(self.log_time_s), 1.0, 0.0)
        for bound in self.bounds(budget):
            chance = chance * ndtr((math.log(bound.most) + BOUND_SLACK - bound.log_median) / bound.std)
        return np.asarray(chance)

    def keeps(self, budget: Budget) -> NDArray[np.bool_]:
        """Which candidates keep every bound of the budget if all goes as expected."""
        bounds = (budget.power_w, budget.deadline_s, budget.energy_j)
        logs = zip(bounds, (self.log_drawn_w, self.log_time_s, self.log_energy_j), strict=True)
        expected = keeps(budget, *(math.nan if most is None else np.exp(log) for most, log in logs))
        return np.asarray(expected & np.isfinite(self.log_time_s))

    def bounds(self, budget: Budget) -> tuple[Bound, ...]:
        """The bounds of a budget, each with what the candidates make of it."""
        every = (
            ("power", "W", budget.power_w, self.log_drawn_w, self.drawn_std),
            ("deadline", "s", budget.deadline_s, self.log_time_s - self.log_skew, self.time_std),
            ("energy", "J", budget.energy_j, self.log_energy_j - self.log_skew, self.energy_std),
        )
        return tuple(Bound(name, unit, most, *rest) for name, unit, most, *rest in every if most is not None)


@dataclass(frozen=True, slots=True)
class Projection:
    """What a measured setting takes to the target, by its measured step time and power."""

    measurement: Measurement
    time_s: float
    energy_j: float
    fits: bool

    def score(self, goal: Goal) -> float:
        """What the goal makes small."""
        return self.time_s if goal is Goal.SOONEST else self.energy_j


def project(problem: Problem, row: int, measurement: Measurement) -> Projection:
    """A measured candidate, judged by the problem's samples to target and its budget."""
    budget = problem.budget
    drawn_w = budget.drawn_w(measurement) if budget.power_w is not None else measurement.power_w
    share = float(problem.busy_share(np.array([drawn_w]), np.array([measurement.step_s]))[0])
    time_s = measurement.step_s * math.exp(problem.log_steps_at(row)) / share
    power_w = measurement.power_w
    if share < 1 and budget.power_w is not None:
        drawn_w = power_w = budget.power_w
    energy_j = time_s * power_w
    fits = math.isfinite(time_s) and bool(keeps(budget, drawn_w, time_s, energy_j))
    return Projection(measurement, time_s, energy_j, fits)


def rows_of(candidates: SettingArray, setting: Setting) -> NDArray[np.intp]:
    """Where a setting stands among the candidates; nowhere if it sets other knobs."""
    if tuple(setting.mode.knobs()) != candidates.knobs:
        return np.empty(0, dtype=np.intp)
    rows = np.flatnonzero(candidates.batch_size == setting.batch_size)
    for at, value in enumerate(setting.mode.knobs().values()):
        rows = rows[candidates.values[rows, at] == value]
    return rows


def _peak_margin(budget: Budget, measurements: Sequence[Measurement]) -> tuple[float, float]:
    """How far the log of the power that is bounded lies above that of mean power, and its spread."""
    if budget.power_w is None or budget.watts is not Watts.PEAK:
        return 0.0, 0.0
    usable = [m for m in measurements if m.usable]
    if not usable:
        raise InputError(
            "A budget in peak watts needs measurements that tell how far the peak lies above the mean.",
            hint="Measure some settings, or give the budget as mean watts.",
        )
    margins = np.log([budget.drawn_w(m) / m.power_w for m in usable])
    return float(margins.mean()), float(margins.std())
