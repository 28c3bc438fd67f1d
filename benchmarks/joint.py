"""Batch size and power limit chosen together, on the public Zeus traces of any GPU.

    python benchmarks/joint.py --train summary_train.csv --power summary_power_v100.csv --json out.json [--sizes lower]

Each workload that stands in both files is one table of batch size × power limit, with mean power and epoch time of
every setting (the mean of its rows, where it has several); caps are 0.4 to 0.8 of its highest limit. The *hard* target,
on which every method is judged, is the hardest one that nine in ten of the runs reach, at the batch sizes that reach at
least two targets: at the others nothing could be judged. Methods know convergence only through the *proxy* target:
targets ordered by difficulty, the one three quarters of the way from the easiest to the hard one. Harder means more
epochs, so that it makes no difference whether a metric rises or falls. The truth is the mean of the epochs of the runs
that reached the hard target; batch sizes that no run took there have no truth and are left out for all methods.

``underwatt`` measures as it goes and knows the proxy's runs at four batch sizes; ``cold`` measures as it goes and knows
no run of this workload: batch sizes are weighed by other trainings, this one left out of the prior. ``table`` measures
every setting and knows the proxy at every batch size; ``fastest-epoch`` measures every setting, and takes all batch
sizes to learn alike; ``largest-batch`` and ``default-batch`` (the middle of the batch sizes that are offered, which in
these traces is close to the best) measure one batch size from the highest limit down, until one fits.

``--sizes lower`` offers only the lower half of the batch sizes, ``upper`` only the upper one, to all methods and to the
oracle: a method that owes its figure to where the middle happens to lie shows there.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _repeats import without_repeats
from _table import Column, add_output, as_table, write
from underwatt.budget import Budget
from underwatt.convergence.curve import fit_convergence, samples_to_target
from underwatt.convergence.prior import shape_prior, usual_shape
from underwatt.errors import BudgetError, InputError, UnderwattError
from underwatt.planning.problem import Problem
from underwatt.planning.search import Search
from underwatt.predict.base import SettingArray
from underwatt.records import to_json
from underwatt.rivals.compare import Table, default_batch, fastest_throughput, largest_batch, published
from underwatt.store.exchange import read_file
from underwatt.studies.study import spread_batch_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from underwatt.records import ConvergenceRun, Measurement, Setting

CAPS = (0.4, 0.5, 0.6, 0.7, 0.8)
LEAST_REACHED = 0.9
PROXY_PLACE = 0.75
PROXY_BATCH_SIZES = 4


@dataclass(frozen=True)
class Row:
    """One method under one cap; ``time_over_oracle`` is 1 for the best choice there is."""

    method: str
    dataset: str
    cap_w: float
    measured: int
    time_over_oracle: float
    over_w: float


@dataclass(frozen=True)
class Case:
    """One workload: its settings, what the methods may know of convergence, and the truth."""

    dataset: str
    measurements: tuple[Measurement, ...]
    proxy_runs: tuple[ConvergenceRun, ...]
    hard_epochs: Mapping[int, float]
    proxy: float
    hard: float

    @property
    def settings(self) -> SettingArray:
        """The settings, in the order of the measurements."""
        return SettingArray.of([m.setting for m in self.measurements])

    def time(self, measurement: Measurement) -> float:
        """Time to the hard target."""
        return measurement.step_s / measurement.setting.batch_size * self.hard_epochs[measurement.setting.batch_size]


Choice = tuple["Measurement", int]  # what a method chose, and how many settings it measured for it


def underwatt(case: Case, cap_w: float) -> Choice:
    sizes = spread_batch_sizes([m.setting.batch_size for m in case.measurements], PROXY_BATCH_SIZES)
    prior = shape_prior(without=case.dataset.split()[0])
    known = [run for run in case.proxy_runs if run.batch_size in sizes]
    curve = fit_convergence(known, resolution_samples=1.0, prior=prior)
    table = {m.setting: m for m in case.measurements}
    found = Search(Problem.of(case.settings, Budget(power_w=cap_w), curve)).run(table.__getitem__)
    return found.best.measurement, len(found.measurements)


def cold(case: Case, cap_w: float) -> Choice:
    shape = usual_shape(without=case.dataset.split()[0])
    table = {m.setting: m for m in case.measurements}
    found = Search(Problem.of(case.settings, Budget(power_w=cap_w), shape)).run(table.__getitem__)
    return found.best.measurement, len(found.measurements)


def table(case: Case, cap_w: float) -> Choice:
    problem = Problem.of(case.settings, Budget(power_w=cap_w), samples_to_target(mean_epochs(case.proxy_runs)))
    row = published(Table.measured(problem, case.measurements), cap_w)
    return case.measurements[_found(row, cap_w)], len(case.measurements)


def fastest_epoch(case: Case, cap_w: float) -> Choice:
    row = fastest_throughput(_truth(case, cap_w), cap_w)
    return case.measurements[_found(row, cap_w)], len(case.measurements)


def _walked(rule: Callable[[Table, float], int | None]) -> Callable[[Case, float], Choice]:
    """A rule that walks down the limits of a batch size, then those of the next smaller one, until one fits.

    It measured all limits of the batch sizes that it tried in vain, and of its choice those at and above it. Where it
    starts is what it chooses without a cap.
    """

    def choose(case: Case, cap_w: float) -> Choice:
        chosen = case.measurements[_found(rule(_truth(case, cap_w), cap_w), cap_w)].setting
        first = case.measurements[_found(rule(_truth(case, cap_w), math.inf), cap_w)].setting
        row = next(m for m in case.measurements if m.setting == chosen)
        settings = [m.setting for m in case.measurements]
        in_vain = sum(chosen.batch_size < setting.batch_size <= first.batch_size for setting in settings)
        same = [setting for setting in settings if setting.batch_size == chosen.batch_size]
        return row, in_vain + sum(_limit_w(setting) >= _limit_w(chosen) for setting in same)

    return choose


def _limit_w(setting: Setting) -> float:
    return setting.mode.power_limit_w or 0.0


METHODS: dict[str, Callable[[Case, float], Choice]] = {
    "underwatt": underwatt,
    "cold": cold,
    "largest-batch": _walked(largest_batch),
    "default-batch": _walked(default_batch),
    "fastest-epoch": fastest_epoch,
    "table": table,
}


def _truth(case: Case, cap_w: float) -> Table:
    return Table.measured(Problem.of(case.settings, Budget(power_w=cap_w)), case.measurements)


def _found(row: int | None, cap_w: float) -> int:
    if row is None:
        raise BudgetError(f"Nothing fits {cap_w:g} W.")
    return row


def mean_epochs(runs: Sequence[ConvergenceRun]) -> dict[int, float]:
    """Mean epochs of the runs that reached the target, by batch size."""
    reached: dict[int, list[float]] = {}
    for run in runs:
        if run.reached:
            reached.setdefault(run.batch_size, []).append(run.samples)
    return {size: mean(epochs) for size, epochs in reached.items()}


def proxy_and_hard(runs: Sequence[ConvergenceRun]) -> tuple[float, float] | None:
    """The proxy and the hard target of a workload; ``None`` where it has no easier target than the hard one."""
    met: dict[int, set[float]] = {}
    for run in runs:
        if run.reached:
            met.setdefault(run.batch_size, set()).add(run.target)
    by_target: dict[float, list[ConvergenceRun]] = {}
    for run in runs:
        if len(met.get(run.batch_size, ())) > 1:  # the others learn next to nothing, at any target
            by_target.setdefault(run.target, []).append(run)

    def difficulty(target: float) -> tuple[float, float]:
        epochs = [run.samples for run in by_target[target] if run.reached]
        return 1 - len(epochs) / len(by_target[target]), mean(epochs) if epochs else math.inf

    usual = [target for target in by_target if difficulty(target)[0] <= 1 - LEAST_REACHED]
    ordered = sorted(usual, key=difficulty)
    if len(ordered) < 2:
        return None
    place = min(round(PROXY_PLACE * (len(ordered) - 1)), len(ordered) - 2)
    return ordered[place], ordered[-1]


def read_cases(train: Path, power: Path) -> list[Case]:
    """Every workload that stands in both files."""
    convergence = {workload.name: runs for workload, runs in read_file(train).convergence}
    profiles = read_file(power).profiles
    if not convergence or not profiles:
        raise InputError("--train takes a Zeus train trace and --power a Zeus power trace.")
    names = [profile.workload.name.split()[0] for profile in profiles if profile.workload.name in convergence]
    cases = []
    for profile in profiles:
        name = profile.workload.name
        targets = proxy_and_hard(convergence.get(name, ()))
        if targets is None:
            lacks = "no two targets of it that most runs reach" if name in convergence else "no runs of it"
            print(f"{name}: left out, as {train.name} has {lacks}", file=sys.stderr)
            continue
        proxy, hard = ([run for run in convergence[name] if run.target == target] for target in targets)
        truth = mean_epochs(hard)
        kept = tuple(m for m in without_repeats(profile.measurements) if m.setting.batch_size in truth)
        dataset = name.split()[0] if names.count(name.split()[0]) == 1 else name
        if not kept:
            print(f"{name}: left out, as {power.name} has none of the batch sizes that got there", file=sys.stderr)
            continue
        cases.append(Case(dataset, kept, tuple(proxy), truth, *targets))
    if not cases:
        raise InputError(f"{train} and {power} have no workload in common that could be judged.")
    return cases


def half(case: Case, sizes: str) -> Case:
    """The case with half of its batch sizes; the middle one of an odd number is in the upper half."""
    every = sorted({m.setting.batch_size for m in case.measurements})
    kept = set(every[: len(every) // 2] if sizes == "lower" else every[len(every) // 2 :])
    return replace(
        case,
        measurements=tuple(m for m in case.measurements if m.setting.batch_size in kept),
        proxy_runs=tuple(run for run in case.proxy_runs if run.batch_size in kept),
    )


def run(cases: Sequence[Case], methods: Sequence[str]) -> list[Row]:
    """Every method on every workload under every cap that some setting keeps."""
    rows = []
    for case in cases:
        highest_w = max(m.setting.mode.power_limit_w or 0.0 for m in case.measurements)
        for share in CAPS:
            cap_w = share * highest_w
            fitting = [case.time(m) for m in case.measurements if m.power_w <= cap_w]
            if not fitting:
                print(f"{case.dataset}: skipped {cap_w:g} W, which no setting keeps", file=sys.stderr)
                continue
            for method in methods:
                try:
                    chosen, measured = METHODS[method](case, cap_w)
                except BudgetError as exc:
                    print(f"{case.dataset}: {method} finds nothing under {cap_w:g} W ({exc.message})", file=sys.stderr)
                    rows.append(Row(method, case.dataset, cap_w, len(case.measurements), math.inf, 0.0))
                    continue
                over_w = max(0.0, chosen.power_w - cap_w)
                rows.append(Row(method, case.dataset, cap_w, measured, case.time(chosen) / min(fitting), over_w))
    return rows


COLUMNS = (
    Column("method"),
    Column("cases"),
    Column("nothing"),
    Column("geomean", form=".3f"),
    Column("worst", form=".2f"),
    Column("over_cap", "over cap"),
    Column("measured", form=".1f"),
)


def summary(rows: Sequence[Row]) -> str:
    """Each method in a line; a case in which a method finds nothing is its worst, and out of its geometric mean."""
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        same = [row for row in rows if row.method == method]
        ratios = [row.time_over_oracle for row in same]
        found = [ratio for ratio in ratios if math.isfinite(ratio)]
        lines.append(
            {
                "method": method,
                "cases": len(same),
                "nothing": len(ratios) - len(found),
                "geomean": float(np.exp(np.mean(np.log(found)))) if found else math.inf,
                "worst": max(ratios),
                "over_cap": sum(row.over_w > 0 for row in same),
                "measured": mean(row.measured for row in same),
            }
        )
    return as_table(lines, COLUMNS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="Zeus train trace")
    parser.add_argument("--power", type=Path, required=True, help="Zeus power trace")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--sizes", choices=("all", "lower", "upper"), default="all", help="batch sizes that are offered"
    )
    add_output(parser)
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        parser.error(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    try:
        cases = read_cases(options.train, options.power)
        if options.sizes != "all":
            cases = [half(case, options.sizes) for case in cases]
        for case in cases:
            print(f"{case.dataset}: {len(case.measurements)} settings, proxy {case.proxy:g}, judged on {case.hard:g}")
        rows = run(cases, methods)
    except UnderwattError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    write("joint", to_json(rows), options)
    if not rows:
        print("nothing to compare: no cap is kept by any setting", file=sys.stderr)
        return 1
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
