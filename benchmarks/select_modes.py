"""The fastest power mode within a budget: what each method returns, and how many modes it measured for it.

    python benchmarks/select.py --reference A.csv --target B.csv --budgets 17:50:1 --repeats 3 --json out.json

The target's table answers each measurement. ``time_penalty_pct`` compares the returned row with the fastest row of the
table within the budget, lucky readings included, and ``over_w`` is above zero where the returned row exceeds it.
``underwatt`` measures as it goes and returns a measured mode; should it find none that fits, its penalty is infinite
(null in the file) and it is charged with measuring the whole table. ``powertrain`` measures 50 random modes and returns
what its networks predict to be the fastest that fits, ``powertrain-scratch`` the same from networks that saw no
reference; ``vendor`` the fastest of the vendor's modes that fits (the rows nearest to them); ``random50`` the best of
50 random modes that fits (or the one of least power); ``maxn`` every knob at its highest. A table with several batch
sizes is judged by time per sample, and a setting that stands in it several times by the mean of its rows. A table of
fewer modes than a method draws is measured whole. A method that a table is too small for is said to be, and has no
rows; the exit code is then 1, as where no row keeps any of the budgets.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _repeats import read_profile, without_repeats
from _table import Column, add_output, as_table, write
from underwatt.budget import Budget
from underwatt.errors import BudgetError, UnderwattError
from underwatt.planning.problem import Outlook, Problem
from underwatt.planning.search import Search
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, Profile, to_json
from underwatt.rivals.compare import Table, maximum_mode, oracle
from underwatt.rivals.predictors import PowerTrain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from underwatt.records import PowerMode
    from underwatt.rivals.predictors import FittedPowerTrain

RANDOM_MODES = 50

Choice = tuple[int | None, int]  # the returned row (none: nothing was found), and how many modes were measured


@dataclass(frozen=True)
class Row:
    """One method at one budget."""

    method: str
    budget_w: float
    repeat: int
    measured: int
    time_penalty_pct: float  # infinite where nothing was found
    over_w: float


class Bench:
    """A target table, the references, and each method as a function of budget and repeat."""

    def __init__(
        self,
        references: Sequence[Profile],
        target: Profile,
        pretrained: FittedPowerTrain | None = None,
        vendors_modes: Mapping[str, PowerMode] | None = None,
    ) -> None:
        self._references, self._vendors_modes = references, vendors_modes or {}
        self._measurements = without_repeats(target.measurements)
        self._rows = {m.setting: at for at, m in enumerate(self._measurements)}
        self._settings = SettingArray.of([m.setting for m in self._measurements])
        self._pretrained = pretrained
        self._predicted: dict[tuple[int, bool], Table] = {}
        self.methods: dict[str, Callable[[float, int], Choice]] = {
            "underwatt": self.underwatt,
            "powertrain": self.powertrain,
            "powertrain-scratch": self.from_scratch,
            "vendor": self.vendor,
            "random50": self.random50,
            "maxn": self.maxn,
        }
        self.truth = Table.measured(self._problem(1.0), self._measurements)

    def _problem(self, budget_w: float) -> Problem:
        return Problem.of(self._settings, Budget(power_w=budget_w))

    def _measure(self, row: int) -> Measurement:
        return self._measurements[row]

    def _random(self, repeat: int) -> list[int]:
        order = np.random.default_rng(repeat).permutation(len(self._measurements))
        return [int(row) for row in order[:RANDOM_MODES]]

    def underwatt(self, budget_w: float, repeat: int) -> Choice:
        """Measure as you go."""
        try:
            search = Search(self._problem(budget_w), references=self._references, seed=repeat)
            found = search.run(lambda setting: self._measurements[self._rows[setting]])
        except BudgetError:
            return None, len(self._measurements)
        return self._rows[found.best.measurement.setting], len(found.measurements)

    def powertrain(self, budget_w: float, repeat: int, *, scratch: bool = False) -> Choice:
        """Fifty random modes, two networks, and their word taken for it; the same modes serve every budget."""
        if (repeat, scratch) not in self._predicted:
            self._predicted[repeat, scratch] = self._transfer(repeat, scratch)
        predicted = self._predicted[repeat, scratch]
        row = oracle(predicted, budget_w)
        if row is None:
            row = int(np.argmin(predicted.drawn_w))
        return row, len(self._random(repeat))

    def from_scratch(self, budget_w: float, repeat: int) -> Choice:
        """The same from networks that know nothing before."""
        return self.powertrain(budget_w, repeat, scratch=True)

    def _transfer(self, repeat: int, scratch: bool) -> Table:
        network = PowerTrain(seed=repeat)
        if self._pretrained is None and self._references and not scratch:
            self._pretrained = PowerTrain().pretrain(self._references[0])
        measured = [self._measurements[row] for row in self._random(repeat)]
        fitted = network.transfer(measured, None if scratch else self._pretrained)
        problem = self._problem(1.0)
        return Table.predicted(problem, Outlook.of(problem, fitted.predict(self._settings)))

    def vendor(self, budget_w: float, repeat: int) -> Choice:  # noqa: ARG002
        """The fastest of the vendor's modes that fits, the thriftiest where none does; none without these."""
        logs = np.log(self._settings.values)
        rows = set()
        for mode in self._vendors_modes.values():
            wanted = np.log([mode.knobs()[name] for name in self._settings.knobs])
            rows.add(int(np.argmin(np.abs(logs - wanted).sum(axis=1))))
        fitting = [row for row in rows if self.truth.drawn_w[row] <= budget_w]
        if fitting:
            return min(fitting, key=lambda row: float(self.truth.time_s[row])), 0
        return min(rows, key=lambda row: float(self.truth.drawn_w[row]), default=None), 0

    def random50(self, budget_w: float, repeat: int) -> Choice:
        """The best of fifty random modes."""
        rows = self._random(repeat)
        fitting = [row for row in rows if self.truth.drawn_w[row] <= budget_w]
        if not fitting:
            return min(rows, key=lambda row: float(self.truth.drawn_w[row])), len(rows)
        return min(fitting, key=lambda row: float(self.truth.time_s[row])), len(rows)

    def maxn(self, budget_w: float, repeat: int) -> Choice:  # noqa: ARG002
        """Every knob at its highest."""
        return maximum_mode(self.truth), 0


def run(bench: Bench, budgets_w: Sequence[float], methods: Sequence[str], repeats: int) -> list[Row]:
    """Every method at every budget that some row keeps; a method that cannot be run on these tables has no rows."""
    rows: list[Row] = []
    truth = bench.truth
    methods = [method for method in methods if _can_run(bench, method, float(truth.drawn_w.max()))]
    for budget_w in budgets_w:
        best = oracle(truth, budget_w)
        if best is None:
            print(f"skipped {budget_w:g} W, which no row keeps", file=sys.stderr)
            continue
        for method in methods:
            for repeat in range(repeats):
                row, measured = bench.methods[method](budget_w, repeat)
                if row is None:
                    print(f"{method} finds nothing within {budget_w:g} W, repeat {repeat}", file=sys.stderr)
                    rows.append(Row(method, budget_w, repeat, measured, math.inf, 0.0))
                    continue
                penalty = 100 * (truth.time_s[row] / truth.time_s[best] - 1)
                over_w = max(0.0, float(truth.drawn_w[row]) - budget_w)
                rows.append(Row(method, budget_w, repeat, measured, float(penalty), over_w))
        print(f"\r{budget_w:g} W    ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return rows


def _can_run(bench: Bench, method: str, budget_w: float) -> bool:
    """Whether a method works with these tables at all, tried at a budget that every row keeps; says so where not."""
    try:
        bench.methods[method](budget_w, 0)
    except UnderwattError as exc:
        print(f"{method} is left out: {exc}", file=sys.stderr)
        return False
    return True


COLUMNS = (
    Column("method"),
    Column("cases"),
    Column("mean", "mean %", ".2f"),
    Column("median", "median %", ".2f"),
    Column("percentile_95", "95th %", ".2f"),
    Column("worst", "worst %", ".2f"),
    Column("over", form=".0%"),
    Column("over_1_w", "over 1 W", ".0%"),
    Column("nothing"),
    Column("measured", form=".1f"),
)


def summary(rows: Sequence[Row]) -> str:
    """Each method in a line; penalties count where the budget was kept, and finding nothing is an infinite one."""
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        same = [row for row in rows if row.method == method]
        kept = np.array([row.time_penalty_pct for row in same if row.over_w == 0] or [np.nan])
        over_w = np.array([row.over_w for row in same])
        lines.append(
            {
                "method": method,
                "cases": len(same),
                "mean": kept.mean(),
                "median": _share(kept, 50),
                "percentile_95": _share(kept, 95),
                "worst": kept.max(),
                "over": np.mean(over_w > 0),
                "over_1_w": np.mean(over_w > 1),
                "nothing": np.isinf(kept).sum(),
                "measured": np.mean([row.measured for row in same]),
            }
        )
    return as_table(lines, COLUMNS)


def _share(penalties: np.ndarray[Any, Any], percent: float) -> float:
    """A percentile that infinite penalties may be in; NaN of nothing."""
    if np.isnan(penalties).any():
        return math.nan
    huge = 1e9  # interpolating between infinities is no number
    found = float(np.percentile(np.minimum(penalties, huge), percent))
    return found if found < huge / 1e3 else math.inf


def parse_budgets(text: str) -> list[float]:
    """Watts from ``first:last:step``, the last included."""
    try:
        first, last, step = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"budgets are first:last:step, such as 17:50:1, not {text!r}") from None
    if not (0 < first <= last and step > 0):
        raise argparse.ArgumentTypeError(f"{text!r} holds no positive budget")
    return [first + at * step for at in range(int((last - first) / step + 1e-9) + 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    names = ("underwatt", "powertrain", "random50", "maxn")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, action="append", default=[], help="table of another workload")
    parser.add_argument("--target", type=Path, required=True, help="table that answers measurements")
    parser.add_argument("--budgets", type=parse_budgets, default="17:50:1", help="watts, first:last:step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(names))
    add_output(parser)
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    unknown = [method for method in methods if method not in names]
    if unknown:
        parser.error(f"unknown method {unknown[0]!r}: choose from {', '.join(names)}")
    if options.repeats < 1:
        parser.error("there must be at least 1 repeat")
    try:
        bench = Bench([read_profile(path) for path in options.reference], read_profile(options.target))
        rows = run(bench, options.budgets, methods, options.repeats)
    except UnderwattError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    write("select", to_json(rows), options)
    if not rows:
        smallest_w = float(bench.truth.drawn_w.min())
        print(f"nothing to compare: the smallest power in {options.target.name} is {smallest_w:g} W", file=sys.stderr)
        return 1
    print(summary(rows))
    return 0 if {row.method for row in rows} == set(methods) else 1


if __name__ == "__main__":
    sys.exit(main())
