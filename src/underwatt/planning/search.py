"""Measure as you go: measure a few telling settings, then always the most promising one, and end with a measured one.

Every measurement has a cost, so the next one must be worth it: the search ends when the gain it may expect is small.
The setting it returns was measured and kept the budget when it was; no prediction is trusted for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import BudgetError, InputError
from underwatt.planning.choice import RISK, choose_setting
from underwatt.planning.problem import Outcome, Outlook, normal_cdf, outcome, rows_of
from underwatt.predict.base import FEWEST
from underwatt.predict.design import first_settings, fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.planning.problem import Problem

    Floats = NDArray[np.float64]
    from collections.abc import Sequence

    from underwatt.planning.choice import Plan
    from underwatt.records import Prediction, Profile


# Which candidate to measure next: where the expected gain within the budget is largest.

# While nothing measured fits, a candidate this likely to fit is good enough to be judged by its speed.
LIKELY = 0.7
# A candidate with less chance to fit than this is given up.
HOPELESS = 0.01
# A candidate so many standard deviations behind gains nothing.
FURTHEST = 30.0
# So many candidates are enough to think about; the others have no prospect for a while.
SHORTLIST = 4096


def expected_gain(problem: Problem, outlook: Outlook, best_log_score: float, caution: float = 1.0) -> Floats:
    """By how much (in log units) measuring each candidate is expected to improve on the best one that fits.

    Constrained expected improvement: what is gained if it reads better than the best, times its chance to fit. A
    ``caution`` above 1 shuns candidates that may not fit, for searches during which the budget must hold.
    """
    score, std = outlook.log_score(problem.goal)
    lead = np.maximum((best_log_score - score) / std, -FURTHEST)  # a target that is never reached is infinitely far
    gain = std * (lead * normal_cdf(lead) + np.exp(-0.5 * lead**2) / math.sqrt(2 * math.pi))
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


# Predictions for a problem's candidates that keep up with measurements, even where there are very many candidates.


class Forecast:
    """Understands the references once, and remembers which candidates have a prospect."""

    def __init__(self, problem: Problem, references: Sequence[Profile] = (), seed: int = 0) -> None:
        self._problem = problem
        self._prepared = FewShot(seed=seed).prepare(problem.candidates, references)
        self._shortlist: NDArray[np.intp] | None = None

    def on(self, problem: Problem) -> Forecast:
        """The same candidates under another budget: what was understood of the references is kept."""
        other = object.__new__(Forecast)
        other._problem, other._prepared, other._shortlist = problem, self._prepared, None
        return other

    def of_all(self, measurements: Sequence[Measurement]) -> Prediction:
        """Predictions for every candidate."""
        return self._look(measurements)[1]

    def of_promising(self, measurements: Sequence[Measurement]) -> tuple[NDArray[np.intp], Prediction]:
        """The candidates that had a prospect when all were last looked at, and predictions for them."""
        if self._shortlist is None:
            rows, prediction = self._look(measurements)
            return rows, _take(prediction, rows)
        rows = self._shortlist
        return rows, self._prepared.fit(measurements).predict(self._problem.candidates.take(rows))

    def _look(self, measurements: Sequence[Measurement]) -> tuple[NDArray[np.intp], Prediction]:
        prediction = self._prepared.fit(measurements).predict(self._problem.candidates)
        self._shortlist = shortlist(self._problem, Outlook.of(self._problem, prediction, measurements))
        return self._shortlist, prediction

    def forget(self) -> None:
        """Look at all candidates the next time."""
        self._shortlist = None


def _take(prediction: Prediction, rows: NDArray[np.intp]) -> Prediction:
    return type(prediction)(*(getattr(prediction, name)[rows] for name in prediction.__dataclass_fields__))


Measure = Callable[[Setting], Measurement]
Watch = Callable[[Measurement, str], None]

FIRST = 3
MOST = 18
LEAST_GAIN = 0.005
# Where there are very many candidates, all of them are predicted only at every so many steps.
REFRESH_STEPS = 5


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best measured setting that keeps the budget, everything that was measured on the way, and why it ended."""

    best: Outcome
    measurements: tuple[Measurement, ...]
    expected_gain: float  # of one more measurement, as a share of the time (or energy) to target
    stopped: str


def search_setting(
    problem: Problem,
    measure: Measure,
    *,
    references: Sequence[Profile] = (),
    known: Sequence[Measurement] = (),
    first: int = FIRST,
    most: int = MOST,
    least_gain: float = LEAST_GAIN,
    seed: int = 0,
    watch: Watch | None = None,
) -> SearchResult:
    """Measure until a better setting is not to be expected; ``known`` measurements are used and not made again.

    At most ``most`` new measurements are made (twice as many while none of them fits). ``watch`` is told of each new
    one and why it was made. Raises ``BudgetError``, naming the smallest measured power, where nothing fits.
    """
    search = Search(
        problem, references=references, known=known, first=first, most=most, least_gain=least_gain, seed=seed
    )
    while (ask := search.ask()) is not None:
        made = measure(ask.setting)
        search.tell(made)
        if watch is not None:
            watch(made, ask.why)
    return search.result()


@dataclass(frozen=True, slots=True)
class Ask:
    """A setting that the search would like to see measured, and why."""

    setting: Setting
    why: str


class Search:
    """The search as a conversation, for those who measure in their own time: ``ask``, measure, ``tell``, and again."""

    def __init__(
        self,
        problem: Problem,
        *,
        references: Sequence[Profile] = (),
        known: Sequence[Measurement] = (),
        first: int = FIRST,
        most: int = MOST,
        least_gain: float = LEAST_GAIN,
        seed: int = 0,
        caution: float = 1.0,
        forecast: Forecast | None = None,
    ) -> None:
        if first < 1 or most < 1:
            raise InputError(f"A search needs at least one measurement, not first = {first}, most = {most}.")
        self._problem = problem
        self._log = _Log(problem, known)
        self._references, self._seed, self._caution = references, seed, caution
        self._first, self._most, self._least_gain = max(first, FEWEST), most, least_gain
        self._starts: list[int] = []
        self._forecast = forecast
        self._gain, self._stopped = 0.0, "every setting was measured"

    def ask(self) -> Ask | None:
        """The setting to measure next; ``None`` where a better one is not to be expected."""
        log = self._log
        if log.distinct < self._first and len(log.made) < self._most:
            self._starts = [row for row in self._starts if log.open[row]]  # one before it may have run out of memory
            if not self._starts and log.open.any():
                wanted = self._first - log.distinct
                self._starts = _starts(self._problem, log, self._references, wanted, self._seed)
            if self._starts:
                return Ask(self._problem.candidates[self._starts.pop(0)], "to learn how time and power behave")
        if not log.open.any() or log.distinct < FEWEST:
            if log.open.any():  # too few to predict the others from
                self._stopped = _limit_reached(len(log.made))
            return None
        if self._forecast is None:
            self._forecast = Forecast(self._problem, self._references, self._seed)
        if len(log.made) % REFRESH_STEPS == 0:
            self._forecast.forget()
        rows, prediction = self._forecast.of_promising(log.all)
        part = self._problem.take(rows)
        best = log.best()
        outlook = Outlook.of(part, prediction, log.all)
        step = _next(part, outlook, log.open[rows], best, self._least_gain, self._caution)
        self._gain, self._stopped = step.gain, step.why
        if step.at is None:
            return None
        limit = self._most if best else 2 * self._most
        if len(log.made) >= limit:
            self._stopped = _limit_reached(limit)
            return None
        return Ask(self._problem.candidates[int(rows[step.at])], step.why)

    def tell(self, measurement: Measurement) -> None:
        """Take in a measurement of one of the candidates."""
        rows = rows_of(self._problem.candidates, measurement.setting)
        if len(rows):
            self._log.add(rows, measurement)

    @property
    def best(self) -> Outcome | None:
        """The best measured setting that keeps the budget, so far."""
        return self._log.best()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Everything that is known, made by this search or before it."""
        return tuple(self._log.all)

    def under(self, problem: Problem, *, most: int = MOST, least_gain: float = LEAST_GAIN) -> Search:
        """The search for another budget over the same candidates, with all that is known by now."""
        forecast = self._forecast.on(problem) if self._forecast else None
        return Search(
            problem,
            references=self._references,
            known=self.measurements,
            first=self._first,
            most=most,
            least_gain=least_gain,
            seed=self._seed,
            caution=self._caution,
            forecast=forecast,
        )

    def result(self) -> SearchResult:
        """What the search ends with; raises ``BudgetError`` where nothing that was measured fits."""
        best = self._log.best()
        if best is None:
            raise _nothing_fits(self._problem, self._log)
        return SearchResult(best, tuple(self._log.made), self._gain, self._stopped)


@dataclass(frozen=True, slots=True)
class _Next:
    """Which candidate to measure next (``None``: none), what that is expected to gain, and why."""

    at: int | None
    gain: float
    why: str


def _next(
    problem: Problem,
    outlook: Outlook,
    open_rows: NDArray[np.bool_],
    best: Outcome | None,
    least_gain: float,
    caution: float,
) -> _Next:
    if best is None:
        chance = float(np.where(open_rows, outlook.chance_to_fit(problem.budget), 0.0).max())
        lowest = int(np.argmin(outlook.log_drawn_w))
        if chance < HOPELESS:
            if not open_rows[lowest]:
                return _Next(None, 0.0, "no setting is likely to fit")
            return _Next(lowest, 0.0, "to see whether the lowest setting fits")
        return _Next(safest_fast(problem, outlook, open_rows, caution), 0.0, "to find a setting that fits")
    if not open_rows.any():
        return _Next(None, 0.0, "every promising setting was measured")
    gains = np.where(open_rows, expected_gain(problem, outlook, math.log(best.score(problem.goal)), caution), -1.0)
    at = int(np.argmax(gains))
    gain = max(0.0, -math.expm1(-float(gains[at])))
    if gain < least_gain:
        return _Next(None, gain, f"another measurement is expected to gain {100 * gain:.1f}%")
    return _Next(at, gain, f"expected to gain {100 * gain:.1f}%")


class _Log:
    """What was measured so far, and which candidates are still worth measuring."""

    def __init__(self, problem: Problem, known: Sequence[Measurement]) -> None:
        self._problem = problem
        self.all: list[Measurement] = []
        self.made: list[Measurement] = []
        self.outcomes: list[Outcome] = []
        self._untried = np.isfinite(problem.log_steps)
        for measurement in known:
            self.all.append(measurement)
            if tuple(measurement.setting.mode.knobs()) != problem.candidates.knobs:
                raise InputError(
                    f"The known measurement of {measurement.setting} sets other knobs than the candidates.",
                    hint=f"The candidates set {', '.join(problem.candidates.knobs) or 'no knob'}.",
                )
            self._note(rows_of(problem.candidates, measurement.setting), measurement)
        self.open = self._still_open()

    def add(self, rows: NDArray[np.intp], measurement: Measurement) -> None:
        """Note a new measurement of a candidate, which may stand among them more than once."""
        self.all.append(measurement)
        self.made.append(measurement)
        self._note(rows, measurement)
        self.open = self._still_open()

    def best(self) -> Outcome | None:
        """The best measured candidate that fits, every time it was measured."""
        goal = self._problem.goal
        broke = {known.measurement.setting for known in self.outcomes if not known.fits}
        fitting = [known for known in self.outcomes if known.measurement.setting not in broke]
        return min(fitting, key=lambda known: known.score(goal), default=None)

    @property
    def distinct(self) -> int:
        """How many different settings were measured with success."""
        return len({m.setting for m in self.all if m.usable})

    def _note(self, rows: NDArray[np.intp], measurement: Measurement) -> None:
        self._untried[rows] = False
        if measurement.usable and len(rows):
            self.outcomes.append(outcome(self._problem, int(rows[0]), measurement))

    def _still_open(self) -> NDArray[np.bool_]:
        return np.asarray(self._untried & fits_memory(self._problem.candidates, self.all))


def _limit_reached(count: int) -> str:
    return "1 setting was measured" if count == 1 else f"{count} settings were measured"


def _starts(problem: Problem, log: _Log, references: Sequence[Profile], count: int, seed: int) -> list[int]:
    """Telling candidates that were not tried yet."""
    rows = np.flatnonzero(log.open)
    chosen = first_settings(
        problem.candidates.take(rows), min(count, len(rows)), references=references, measurements=log.all, seed=seed
    )
    return [int(rows[at]) for at in chosen]


def _nothing_fits(problem: Problem, log: _Log) -> BudgetError:
    budget = problem.budget
    if not log.outcomes:
        return BudgetError("No setting could be measured.", hint="Offer smaller batch sizes, or look at the failures.")
    drawn_w = {id(known): budget.drawn_w(known.measurement) for known in log.outcomes}
    smallest_w = min(drawn_w.values())
    if budget.power_w is not None and smallest_w > budget.power_w:
        return BudgetError(
            f"No measured setting keeps the budget of {budget}: the smallest power measured so far is "
            f"{smallest_w:.4g} W.",
            hint=f"Raise it to {math.ceil(10 * smallest_w) / 10:g} W, or offer lower clocks or smaller batches.",
        )
    kept = [known for known in log.outcomes if budget.power_w is None or drawn_w[id(known)] <= budget.power_w]
    time_s, energy_j = min(known.time_s for known in kept), min(known.energy_j for known in kept)
    return BudgetError(
        f"No measured setting keeps the budget of {budget}: within its watts, the soonest takes {time_s:.4g} s "
        f"and the thriftiest {energy_j:.4g} J.",
        hint="Raise the deadline or the energy of the budget.",
    )


# Plan, and plan again when another measurement came in: the second time in a fraction of a second.


class Planner:
    """Predicts a problem's candidates from measurements and references, and chooses among them."""

    def __init__(self, problem: Problem, references: Sequence[Profile] = (), *, seed: int = 0) -> None:
        self._problem = problem
        self._forecast = Forecast(problem, references, seed)

    def plan(self, measurements: Sequence[Measurement], *, risk: float = RISK) -> Plan:
        """Choose among all candidates; needs at least three measured settings."""
        prediction = self._forecast.of_all(measurements)
        return choose_setting(self._problem, prediction, measurements=measurements, risk=risk)

    def replan(self, measurements: Sequence[Measurement], *, risk: float = RISK) -> Plan:
        """Choose among the candidates that had a prospect in the last plan; its front holds only those."""
        rows, prediction = self._forecast.of_promising(measurements)
        return choose_setting(self._problem.take(rows), prediction, measurements=measurements, risk=risk)
