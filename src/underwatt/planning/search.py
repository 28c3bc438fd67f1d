"""Measure as you go: measure a few telling settings, then always the most promising one, and end with a measured one.

Every measurement has a cost, so the next one must be worth it: the search ends when the gain it may expect is small.
The setting it returns was measured and kept the budget when it was; no prediction is trusted for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from underwatt.errors import BudgetError, InputError
from underwatt.planning.problem import Outlook, Problem, Projection, project, rows_of
from underwatt.predict.base import FEWEST, Predictor, prepared, take_rows
from underwatt.predict.design import first_settings, fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, Profile, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.base import Fit, Floats
    from underwatt.records import Prediction

Measure = Callable[[Setting], Measurement]
Watch = Callable[[Measurement, str], None]

# Chosen with benchmarks/select.py and benchmarks/joint.py: telling settings to begin with, measurements at most, and
# the gain (as a share of the time or energy to target) below which another one is not worth its time.
FIRST = 3
MOST = 18
LEAST_GAIN = 0.005
# While nothing measured fits, a candidate this likely to fit is good enough to be judged by its speed.
LIKELY = 0.7
# A candidate with less chance to fit than this is given up.
HOPELESS = 0.01
# A candidate so many standard deviations behind gains nothing.
FURTHEST = 30.0
# Chosen with benchmarks/speed.py: where there are more candidates than this, only those with a prospect are thought
# about, and all of them are looked at again every so many measurements.
SHORTLIST = 4096
REFRESH_STEPS = 5


@dataclass(frozen=True, slots=True)
class Ask:
    """A setting that the search would like to see measured, and why."""

    setting: Setting
    why: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best measured setting that keeps the budget, everything that was measured on the way, and why it ended."""

    best: Projection
    measurements: tuple[Measurement, ...]
    stopped: str


@dataclass(eq=False)
class Search:
    """The search: ``run`` it with a function that measures, or ``ask``, measure in your own time, ``tell``, and again.

    ``known`` measurements are used and not made again. At most ``most`` new ones are made (twice as many while none of
    them fits). A ``caution`` above 1 shuns candidates that may not fit, for searches during which the budget must hold.
    """

    problem: Problem
    _: KW_ONLY
    references: Sequence[Profile] = ()
    known: Sequence[Measurement] = ()
    first: int = FIRST
    most: int = MOST
    least_gain: float = LEAST_GAIN
    seed: int = 0
    caution: float = 1.0
    predictor: Predictor | None = None  # our own where none is given

    def __post_init__(self) -> None:
        if self.first < 1 or self.most < 1:
            raise InputError(f"A search needs at least one measurement, not first = {self.first}, most = {self.most}.")
        knobs = self.problem.candidates.knobs
        odd = next((m.setting for m in self.known if tuple(m.setting.mode.knobs()) != knobs), None)
        if odd is not None:
            raise InputError(
                f"The known measurement of {odd} sets other knobs than the candidates.",
                hint=f"The candidates set {', '.join(knobs) or 'no knob'}.",
            )
        self.first = max(self.first, FEWEST)
        self._made: list[Measurement] = []
        self._projections: list[Projection] = []
        self._untried = np.isfinite(self.problem.log_steps)
        self._starts: list[int] = []
        self._fit: Fit | None = None
        self._shortlist: NDArray[np.intp] | None = None
        self._stopped = "every setting was measured"
        for measurement in self.known:
            self._note(measurement)

    def run(self, measure: Measure, watch: Watch | None = None) -> SearchResult:
        """Measure until a better setting is not to be expected; ``watch`` is told of each measurement and its reason.

        Raises ``BudgetError``, naming the smallest measured power, where nothing fits.
        """
        while (ask := self.ask()) is not None:
            made = measure(ask.setting)
            self.tell(made)
            if watch is not None:
                watch(made, ask.why)
        return self.result()

    def ask(self) -> Ask | None:
        """The setting to measure next; ``None`` where a better one is not to be expected."""
        still_open = self._untried & fits_memory(self.problem.candidates, self.measurements)
        distinct = len({m.setting for m in self.measurements if m.usable})
        if distinct < self.first and len(self._made) < self.most:
            self._starts = [row for row in self._starts if still_open[row]]  # one before it may have run out of memory
            if not self._starts and still_open.any():
                self._starts = self._telling(np.flatnonzero(still_open), self.first - distinct)
            if self._starts:
                return Ask(self.problem.candidates[self._starts.pop(0)], "to learn how time and power behave")
        if not still_open.any() or distinct < FEWEST:
            if still_open.any():  # too few to predict the others from
                self._stopped = _limit_reached(len(self._made))
            return None
        rows, prediction = self._predict_promising()
        at, self._stopped = self._next(self.problem.take(rows), prediction, still_open[rows])
        if at is None:
            return None
        limit = self.most if self.best else 2 * self.most
        if len(self._made) >= limit:
            self._stopped = _limit_reached(limit)
            return None
        return Ask(self.problem.candidates[int(rows[at])], self._stopped)

    def tell(self, measurement: Measurement) -> None:
        """Take in a measurement; one of a setting that is no candidate is no answer."""
        if len(rows_of(self.problem.candidates, measurement.setting)):
            self._made.append(measurement)
            self._note(measurement)

    @property
    def best(self) -> Projection | None:
        """The best measured setting so far that keeps the budget, every time it was measured."""
        broke = {known.measurement.setting for known in self._projections if not known.fits}
        fitting = [known for known in self._projections if known.measurement.setting not in broke]
        return min(fitting, key=lambda known: known.score(self.problem.goal), default=None)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Everything that is known, made by this search or before it."""
        return (*self.known, *self._made)

    def under(self, problem: Problem, *, most: int = MOST, least_gain: float = LEAST_GAIN) -> Search:
        """The search for another budget over the same candidates, with all that is known by now."""
        other = replace(self, problem=problem, known=self.measurements, most=most, least_gain=least_gain)
        other._fit = self._fit  # what was understood of the references is kept
        return other

    def result(self) -> SearchResult:
        """What the search ends with; raises ``BudgetError`` where nothing that was measured fits."""
        if self.best is not None:
            return SearchResult(self.best, tuple(self._made), self._stopped)
        budget = self.problem.budget
        if not self._projections:
            hint = "Offer smaller batch sizes, or look at the failures."
            raise BudgetError("No setting could be measured.", hint=hint)
        kept = [known for known in self._projections if budget.allows(known.measurement)]
        if not kept:
            smallest_w = min(budget.drawn_w(known.measurement) for known in self._projections)
            raise BudgetError(
                f"No measured setting keeps the budget of {budget}: the smallest power measured so far is "
                f"{smallest_w:.4g} W.",
                hint=f"Raise it to {math.ceil(10 * smallest_w) / 10:g} W, or offer lower clocks or smaller batches.",
            )
        time_s, energy_j = min(known.time_s for known in kept), min(known.energy_j for known in kept)
        raise BudgetError(
            f"No measured setting keeps the budget of {budget}: within its watts, the soonest takes {time_s:.4g} s "
            f"and the thriftiest {energy_j:.4g} J.",
            hint="Raise the deadline or the energy of the budget.",
        )

    def _note(self, measurement: Measurement) -> None:
        rows = rows_of(self.problem.candidates, measurement.setting)  # it may stand among them more than once
        self._untried[rows] = False
        if measurement.usable and len(rows):
            self._projections.append(project(self.problem, int(rows[0]), measurement))

    def _telling(self, rows: NDArray[np.intp], count: int) -> list[int]:
        """Of some rows, those that tell most about all others."""
        some, count = self.problem.candidates.take(rows), min(count, len(rows))
        return [int(row) for row in rows[first_settings(some, count, references=self.references, seed=self.seed)]]

    def _predict_promising(self) -> tuple[NDArray[np.intp], Prediction]:
        """The candidates that had a prospect when all were last looked at, and predictions for them."""
        candidates = self.problem.candidates
        if self._fit is None:
            self._fit = prepared(self.predictor or FewShot(seed=self.seed), candidates, self.references)
        fitted = self._fit(self.measurements)
        if self._shortlist is not None and len(self._made) % REFRESH_STEPS:
            return self._shortlist, fitted.predict(candidates.take(self._shortlist))
        prediction = fitted.predict(candidates)
        rows = self._shortlist = shortlist(self.problem, Outlook.of(self.problem, prediction, self.measurements))
        return rows, take_rows(prediction, rows)

    def _next(self, problem: Problem, prediction: Prediction, open_rows: NDArray[np.bool_]) -> tuple[int | None, str]:
        """Which candidate to measure next (``None``: none), and why."""
        outlook, best = Outlook.of(problem, prediction, self.measurements), self.best
        if best is None:
            chance = float(np.where(open_rows, outlook.chance_to_fit(problem.budget), 0.0).max())
            lowest = int(np.argmin(outlook.log_drawn_w))
            if chance >= HOPELESS:
                return safest_fast(problem, outlook, open_rows, self.caution), "to find a setting that fits"
            if open_rows[lowest]:
                return lowest, "to see whether the lowest setting fits"
            return None, "no setting is likely to fit"
        if not open_rows.any():
            return None, "every promising setting was measured"
        gains = expected_gain(problem, outlook, math.log(best.score(problem.goal)), self.caution)
        at = int(np.argmax(np.where(open_rows, gains, -1.0)))
        gain = max(0.0, -math.expm1(-float(gains[at])))
        if gain < self.least_gain:
            return None, f"another measurement is expected to gain {100 * gain:.1f}%"
        return at, f"expected to gain {100 * gain:.1f}%"


def expected_gain(problem: Problem, outlook: Outlook, best_log_score: float, caution: float = 1.0) -> Floats:
    """By how much (in log units) measuring each candidate is expected to improve on the best one that fits.

    Constrained expected improvement: what is gained if it reads better than the best, times its chance to fit.
    """
    score, std = outlook.log_score(problem.goal)
    lead = np.maximum((best_log_score - score) / std, -FURTHEST)  # a target that is never reached is infinitely far
    gain = std * (lead * ndtr(lead) + np.exp(-0.5 * lead**2) / math.sqrt(2 * math.pi))
    return np.asarray(np.maximum(gain, 0.0) * outlook.chance_to_fit(problem.budget) ** caution)


def safest_fast(problem: Problem, outlook: Outlook, open_rows: NDArray[np.bool_], caution: float = 1.0) -> int:
    """While nothing measured fits: the best candidate that is likely to fit, or else the likeliest one."""
    chance = np.where(open_rows, outlook.chance_to_fit(problem.budget), -1.0)
    score, _ = outlook.log_score(problem.goal)
    likely = chance >= LIKELY ** (1 / caution)
    if np.any(likely):
        return int(np.argmin(np.where(likely, score, np.inf)))
    if chance.max() > 0:
        return int(np.argmax(chance))
    return int(np.argmin(np.where(open_rows, outlook.log_drawn_w, np.inf)))


def shortlist(problem: Problem, outlook: Outlook, most: int = SHORTLIST) -> NDArray[np.intp]:
    """Rows that one or two more measurements could make the choice, and those of the lowest power, ascending."""
    if len(problem) <= most:
        return np.arange(len(problem))
    score, std = outlook.log_score(problem.goal)
    chance = outlook.chance_to_fit(problem.budget)
    # Optimistic about both: a candidate stays while it may be fast and may fit.
    promise = np.where(chance > HOPELESS, score - std - np.log(np.maximum(chance, HOPELESS)) * 0.1, np.inf)
    thrifty = np.argpartition(outlook.log_drawn_w, most // 16)[: most // 16]
    fast = np.argpartition(promise, most - len(thrifty))[: most - len(thrifty)]
    return np.union1d(thrifty, fast)


def _limit_reached(count: int) -> str:
    return "1 setting was measured" if count == 1 else f"{count} settings were measured"
