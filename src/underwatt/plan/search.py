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
from underwatt.plan.acquire import HOPELESS, expected_gain, safest_fast
from underwatt.plan.forecast import Forecast
from underwatt.plan.problem import Outcome, Outlook, outcome, rows_of
from underwatt.predict import first_settings, fits_memory
from underwatt.predict.observations import FEWEST
from underwatt.records import Measurement, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.plan.problem import Problem
    from underwatt.records import Profile

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
