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

from underwatt.budget import Watts
from underwatt.errors import BudgetError, InputError
from underwatt.planning.problem import (
    DEFAULT_WINDOW_S,
    KEPT_STD,
    LARGEST_SWING,
    Outlook,
    Problem,
    Projection,
    allows_pauses,
    by_pauses,
    can_pause,
    project,
    rows_of,
)
from underwatt.predict.base import FEWEST, Predictor, prepared, take_rows
from underwatt.predict.design import first_settings, fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, PowerMode, Profile, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.budget import Budget
    from underwatt.predict.base import Fit, Floats, SettingArray
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
NEAR_LOWEST = 0.08  # in log watts
LONGEST_TRIED_S = DEFAULT_WINDOW_S  # or twice the shortest step: a longer one is over before anything can be done
# A candidate so many standard deviations behind gains nothing.
FURTHEST = 30.0
# Chosen with benchmarks/speed.py: where there are more candidates than this, only those with a prospect are thought
# about, and all of them are looked at again every so many measurements.
SHORTLIST = 4096
REFRESH_STEPS = 5
# How fast power may grow with clocks, cores and batch size, and how surely it falls with all of them, as exponents.
# On the real tables of ../shared/data 99.9% of all pairs of settings grow by less than 0.63.
GROWTH, DECLINE = 0.8, 0.2
# While the budget must hold, nothing is tried that may draw more by this share for the moment in which that is seen,
# less where a step takes longer than that, and nothing at all for a bound on peaks; so many standard deviations above
# what is predicted.
TRIED_ABOVE, SURE, SURE_OF_PEAK = 0.08, 2.0, 3.0
GLIMPSE = 1  # steps of what was given up after a moment: more than no measurement, and less than any other
LEAST_STRIDE = 0.05  # log units, of all knobs together: less is no step towards a better setting
LEAST_DOUBT = 0.025  # of log peak watts: a few measurements make a prediction look surer than it is
# A measurement this far from what was predicted, in logs and in standard deviations, may be of a device that changed.
SURPRISE, SURPRISE_STDS = 0.1, 2.5


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
    them fits, or while another is expected to gain ``much_gain``). A ``caution`` above 1 shuns candidates that may not
    fit; a ``safe`` search, for a training during which the budget must hold, asks for nothing whose upper bound is
    above it, and begins low.
    """

    problem: Problem
    _: KW_ONLY
    references: Sequence[Profile] = ()
    known: Sequence[Measurement] = ()
    first: int = FIRST
    most: int = MOST
    least_gain: float = LEAST_GAIN
    much_gain: float = math.inf
    seed: int = 0
    caution: float = 1.0
    safe: bool = False
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
        self._highest_log_w = np.full(len(self._untried), np.inf)  # by the measured settings alone
        self._starts: list[int] = []
        self._fit: Fit | None = None
        self._shortlist: NDArray[np.intp] | None = None
        self._stopped = "every setting was measured"
        self._gain = 0.0  # that was expected of what was asked for last, or of where it leads
        self._predicted = (math.nan, 0.0)  # log power of what was asked for last, and its standard deviation
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
        self._predicted = (math.nan, 0.0)
        if distinct < self.first and len(self._made) < self.most:
            self._starts = [row for row in self._starts if still_open[row]]  # one before it may have run out of memory
            if not self._starts and still_open.any():
                self._starts = self._begin_with(still_open, self.first - distinct)
            if self._starts:
                return Ask(self.problem.candidates[self._starts.pop(0)], "to learn how time and power behave")
        if not still_open.any() or distinct < FEWEST:
            if still_open.any():  # too few to predict the others from
                self._stopped = _limit_reached(len(self._made))
            return None
        rows, prediction = self._predict_promising()
        at, self._stopped = self._next(self.problem.take(rows), prediction, still_open[rows], self._highest_log_w[rows])
        if at is None:
            return None
        limit = self.most if self.best and self._gain < self.much_gain else 2 * self.most
        if len(self._made) >= limit:
            self._stopped = _limit_reached(limit)
            return None
        self._predicted = float(prediction.log_power_w[at]), float(prediction.log_power_w_std[at])
        return Ask(self.problem.candidates[int(rows[at])], self._stopped)

    @property
    def most_w(self) -> float | None:
        """What the setting that was asked for last draws at most; ``None`` where nothing is predicted."""
        log_w, std = self._predicted
        return None if math.isnan(log_w) else math.exp(log_w + SURE * std)

    def is_surprised_by(self, measurement: Measurement) -> bool:
        """Whether what was asked for last draws clearly other watts than all others let expect."""
        log_w, std = self._predicted
        return abs(math.log(measurement.power_w) - log_w) > max(SURPRISE, SURPRISE_STDS * std)

    def tell(self, measurement: Measurement) -> None:
        """Take in a measurement; one of a setting that is no candidate is no answer.

        A glimpse, of a single step, tells of a setting only while it has not been measured.
        """
        if not len(rows_of(self.problem.candidates, measurement.setting)):
            return
        same = [known for known in self.measurements if known.setting == measurement.setting]
        if measurement.steps == GLIMPSE and same:
            return
        if any(known.steps == GLIMPSE for known in same):
            self._forget(measurement.setting)
        self._made.append(measurement)
        self._note(measurement)

    def _forget(self, setting: Setting) -> None:
        self.known = tuple(known for known in self.known if known.setting != setting)
        self._made = [known for known in self._made if known.setting != setting]
        self._projections = [known for known in self._projections if known.measurement.setting != setting]

    def exclude(self, mode: PowerMode) -> None:
        """A mode cannot be set: nothing of it is asked for, and nothing was measured."""
        same = np.all(self.problem.candidates.values == [*mode.knobs().values()], axis=1)
        self._untried &= ~same

    def exclude_from(self, lowest: Sequence[float]) -> None:
        """Nothing is asked for of which every knob is at least so high."""
        self._untried &= ~np.all(self.problem.candidates.values >= lowest, axis=1)

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

    def under(self, problem: Problem, *, most: int = MOST, known: Sequence[Measurement] | None = None) -> Search:
        """The search for another budget over the same candidates, with all that is known by now, or what is ``known``.

        It ends at the usual gain.
        """
        known = self.measurements if known is None else known
        other = replace(self, problem=problem, known=known, most=most, least_gain=LEAST_GAIN)
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
                hint=f"Raise it to {math.ceil(10 * smallest_w) / 10:g} W, or offer lower clocks or smaller batches."
                + by_pauses(budget, self.problem.idle_w),
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
            if self.safe:
                highest = highest_log_w(self.problem.candidates, measurement, self.problem.budget)
                self._highest_log_w = np.minimum(self._highest_log_w, highest)

    def _begin_with(self, still_open: NDArray[np.bool_], count: int) -> list[int]:
        """What to measure before anything can be predicted; where the budget must hold, one setting after another."""
        if not self.problem.candidates.knobs:
            return self._around_middle(np.flatnonzero(still_open))[:count]
        if not self.safe:
            return self._telling(np.flatnonzero(still_open), count)
        if np.isinf(self._highest_log_w).all():
            return [gentle(self.problem.candidates, still_open)]
        sure = still_open & ((self._highest_log_w <= self._most_log_w) | self._can_surely_pause())
        if not sure.any():
            if self._pauses:
                return []
            return [int(np.argmin(np.where(still_open, self._highest_log_w, np.inf)))]
        return self._telling(np.flatnonzero(sure), 1)

    @property
    def _pauses(self) -> bool:
        """Whether pauses may keep the budget."""
        return self.problem.idle_w is not None and allows_pauses(self.problem.budget)

    def _can_surely_pause(self) -> NDArray[np.bool_]:
        """Which candidates have steps short enough for pauses to keep the budget, by what was measured alone."""
        if not self._pauses:
            return np.zeros(len(self._untried), dtype=bool)
        longest = [longest_log_s(self.problem.candidates, known) for known in self.measurements if known.usable]
        return can_pause(np.exp(self._highest_log_w), np.exp(np.min(longest, axis=0)), self.problem.budget)

    def _around_middle(self, rows: NDArray[np.intp]) -> list[int]:
        """Batch sizes alone, from the middle outwards: what a search costs is training at the extremes."""
        middle = np.median(np.log(self.problem.candidates.batch_size))
        away = np.abs(np.log(self.problem.candidates.batch_size[rows]) - middle)
        return [int(row) for row in rows[np.argsort(away, kind="stable")]]

    @property
    def _most_log_w(self) -> float:
        budget = self.problem.budget
        above = 0.0 if budget.watts is Watts.PEAK else TRIED_ABOVE
        return math.inf if budget.power_w is None else math.log(budget.power_w * (1 + above))

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
        outlook = Outlook.of(self.problem, prediction, self.measurements)
        sure = self._surely_fit(outlook, prediction.log_step_s, self._highest_log_w) if self.safe else None
        rows = self._shortlist = shortlist(self.problem, outlook, sure)
        return rows, take_rows(prediction, rows)

    def _surely_fit(self, outlook: Outlook, log_step_s: Floats, highest_log_w: Floats) -> NDArray[np.bool_]:
        """Which candidates may be tried while the budget must hold: nothing can be done about a step before it ends.

        Of a search with pauses, those that can pause.
        """
        if self._pauses:
            return np.asarray(outlook.drawn_std <= KEPT_STD)
        doubt, most_log_w = SURE * outlook.drawn_std, np.full(len(log_step_s), self._most_log_w)
        if self.problem.budget.watts is Watts.PEAK:
            doubt = SURE_OF_PEAK * np.maximum(outlook.drawn_std, LEAST_DOUBT)
        else:
            swing_s = LARGEST_SWING * (self.problem.budget.window_s or DEFAULT_WINDOW_S)
            most_log_w += np.log1p(np.minimum(TRIED_ABOVE, swing_s / np.exp(log_step_s))) - math.log1p(TRIED_ABOVE)
        return np.asarray(np.minimum(outlook.log_drawn_w + doubt, highest_log_w) <= most_log_w)

    def _lowest(self, outlook: Outlook, prediction: Prediction) -> int | None:
        """The candidate that draws least.

        While a budget must hold, it is one try: of those that draw about as little the one with the shortest steps, as
        nothing can be done about the watts of a step before it ends.
        """
        least = int(np.argmin(outlook.log_drawn_w))
        if not self.safe:
            return least
        most_log_w = float(outlook.log_drawn_w[least]) + NEAR_LOWEST
        if self._pauses:
            return None  # what needs no pauses is tried without
        if any(math.log(self.problem.budget.drawn_w(known)) <= most_log_w for known in self.measurements):
            return None
        doubt = SURE_OF_PEAK * max(float(outlook.drawn_std[least]), LEAST_DOUBT)
        if float(outlook.log_drawn_w[least]) - doubt > self._most_log_w:
            return None  # far above: a try would tell nothing
        return int(np.argmin(np.where(outlook.log_drawn_w <= most_log_w, prediction.log_step_s, np.inf)))

    def _next(
        self, problem: Problem, prediction: Prediction, open_rows: NDArray[np.bool_], highest_log_w: Floats
    ) -> tuple[int | None, str]:
        """Which candidate to measure next (``None``: none), and why."""
        outlook, best = Outlook.of(problem, prediction, self.measurements), self.best
        every_open = open_rows
        if self.safe:
            # Nothing can be done about the watts of a step before it ends: one that takes long is not tried.
            log_longest_s = max(math.log(LONGEST_TRIED_S), float(prediction.log_step_s.min()) + math.log(2))
            open_rows = (
                open_rows
                & self._surely_fit(outlook, prediction.log_step_s, highest_log_w)
                & (prediction.log_step_s <= log_longest_s)
            )
        if best is None:
            chance = float(np.where(open_rows, outlook.chance_to_fit(problem.budget), 0.0).max())
            if chance >= HOPELESS:
                return safest_fast(problem, outlook, open_rows, self.caution), "to find a setting that fits"
            lowest = self._lowest(outlook, prediction)
            if lowest is not None and every_open[lowest]:
                return lowest, "to see whether the lowest setting fits"
            return None, "no setting is likely to fit"
        if not every_open.any():
            return None, "every promising setting was measured"
        gains = expected_gain(problem, outlook, math.log(best.score(problem.goal)), self.caution)
        at = int(np.argmax(np.where(every_open, gains, -1.0)))
        gain = self._gain = max(0.0, -math.expm1(-float(gains[at])))
        if gain < self.least_gain:
            return None, f"another measurement is expected to gain {100 * gain:.1f}%"
        if not open_rows[at] and gain >= 2 * self.least_gain:  # it takes two measurements
            step = stepping_stone(problem.candidates, open_rows, at, [m.setting for m in self.measurements])
            if step is not None:
                return step, f"on the way to one that is expected to gain {100 * gain:.1f}%"
        if not open_rows[at]:
            at = int(np.argmax(np.where(open_rows, gains, -1.0)))
            gain = self._gain = max(0.0, -math.expm1(-float(gains[at])))
            if gain < self.least_gain:
                return None, f"a measurement that surely fits is expected to gain {100 * gain:.1f}%"
        return at, f"expected to gain {100 * gain:.1f}%"


def stepping_stone(
    candidates: SettingArray, sure: NDArray[np.bool_], goal: int, measured: Sequence[Setting]
) -> int | None:
    """A candidate that surely fits, nearest to one that may not, and nearer to it than all that was measured."""
    values = np.log(np.column_stack([candidates.values, candidates.batch_size]))
    distance = np.abs(values - values[goal]).sum(axis=1)
    known = np.log([[*setting.mode.knobs().values(), setting.batch_size] for setting in measured])
    nearest = float(np.abs(known - values[goal]).sum(axis=1).min())
    at = int(np.argmin(np.where(sure, distance, np.inf)))
    return at if sure[at] and distance[at] < nearest - LEAST_STRIDE else None


def gentle(candidates: SettingArray, still_open: NDArray[np.bool_]) -> int:
    """A setting low enough to begin with where nothing is known, and not so low that a step takes for ever."""
    values = np.log(np.column_stack([candidates.values, candidates.batch_size]))
    middle = (values.min(axis=0) + values.max(axis=0)) / 2
    return int(np.argmin(np.where(still_open, np.sum((values - middle) ** 2, axis=1), np.inf)))


def highest_log_w(candidates: SettingArray, measurement: Measurement, budget: Budget) -> Floats:
    """The log of the most that each candidate may draw, by one that was measured: power grows with every knob."""
    known = measurement.setting
    values = np.column_stack([candidates.values, candidates.batch_size])
    change = np.log(values / [*known.mode.knobs().values(), known.batch_size])
    growth = np.maximum(change, 0.0).sum(axis=1)
    decline = np.where(growth == 0, change.sum(axis=1), 0.0)
    return np.asarray(math.log(budget.drawn_w(measurement)) + GROWTH * growth + DECLINE * decline)


def longest_log_s(candidates: SettingArray, measurement: Measurement) -> Floats:
    """The log of the longest that a step may take, by one that was measured: a knob slows it by its share at most."""
    known = measurement.setting
    values = np.column_stack([1 / candidates.values, candidates.batch_size])
    change = np.log(values * [*known.mode.knobs().values(), 1 / known.batch_size])
    return np.asarray(math.log(measurement.step_s) + np.maximum(change, 0.0).sum(axis=1))


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


def shortlist(
    problem: Problem, outlook: Outlook, sure: NDArray[np.bool_] | None = None, most: int = SHORTLIST
) -> NDArray[np.intp]:
    """Rows that one or two more measurements could make the choice, and those of the lowest power, ascending.

    Where only ``sure`` candidates may be tried, half of them are of these.
    """
    if len(problem) <= most:
        return np.arange(len(problem))
    score, std = outlook.log_score(problem.goal)
    chance = outlook.chance_to_fit(problem.budget)
    # Optimistic about both: a candidate stays while it may be fast and may fit.
    promise = np.where(chance > HOPELESS, score - std - np.log(np.maximum(chance, HOPELESS)) * 0.1, np.inf)
    thrifty = np.argpartition(outlook.log_drawn_w, most // 16)[: most // 16]
    most -= len(thrifty)
    if sure is not None:
        most //= 2
        thrifty = np.union1d(thrifty, np.argpartition(np.where(sure, promise, np.inf), most)[:most])
    return np.union1d(thrifty, np.argpartition(promise, most)[:most])


def _limit_reached(count: int) -> str:
    return "1 setting was measured" if count == 1 else f"{count} settings were measured"
