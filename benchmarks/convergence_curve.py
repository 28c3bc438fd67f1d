"""How well does the convergence curve predict batch sizes that were not run? On traces of real trainings.

    python benchmarks/convergence_curve.py --train summary_train.csv --json OUT

Batch sizes are left out: the curve is fitted to the runs at three or four of them (the smallest, the largest and some
evenly between; and random choices) and asked about the others. Error is a factor: 1.1 means 10% too many or too few
samples. Beside it: straight lines between the points (log samples over log batch size, flat beyond them) and the
gradient-noise law E·(1 + b/B) alone. Coverage: how often the truth lies in the curve's 90% interval, widened by what
the truth itself is unsure of. ``easy`` rows: the curve of an easier target, fitted to all its batch sizes, used for a
harder one; the factor is that of the ratio between batch sizes, and ``regret`` what the batch size that it calls best
costs in samples. Any file that ``underwatt store import`` reads as convergence runs will do.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.convergence.curve import fit_convergence, targets_of
from underwatt.errors import InputError
from underwatt.store.exchange import read_file
from underwatt.studies.study import spread_batch_sizes

if TYPE_CHECKING:
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.records import ConvergenceRun

Z90 = 1.6449
RANDOM_CHOICES = 6
FARTHEST = 3  # targets apart that are shown


def choices(sizes: list[int], count: int, rng: random.Random) -> list[tuple[str, list[int]]]:
    if len(sizes) <= count:
        return []
    return [("spread", list(spread_batch_sizes(sizes, count)))] + [
        ("random", sorted(rng.sample(sizes, count))) for _ in range(RANDOM_CHOICES)
    ]


def straight_lines(at: list[int], values: list[float], asked: list[int]) -> list[float]:
    return list(np.interp(np.log(asked), np.log(at), values))


def noise_law(at: list[int], values: list[float], asked: list[int]) -> list[float]:
    """The best E·(1 + b/B) by least squares on the log."""
    best: tuple[float, float, float] = (math.inf, 0.0, 1.0)
    for log2 in np.arange(-2.0, 20.0, 0.05):
        rise = np.log1p(np.array(at) / 2.0**log2)
        scale = float(np.mean(np.array(values) - rise))
        error = float(np.sum((np.array(values) - rise - scale) ** 2))
        best = min(best, (error, scale, 2.0**log2))
    return [best[1] + math.log1p(size / best[2]) for size in asked]


def left_out_rows(name: str, target: float, runs: list[ConvergenceRun], resolution: float) -> list[dict[str, Any]]:
    rng = random.Random(f"{name} {target}")
    truth = {o.batch_size: o for o in fit_convergence(runs, resolution_samples=resolution).observed if o.reached}
    sizes = sorted({run.batch_size for run in runs})
    rows: list[dict[str, Any]] = []
    for count in (3, 4):
        for kind, picked in choices(sizes, count, rng):
            known = [run for run in runs if run.batch_size in picked]
            asked = [size for size in truth if size not in picked]
            if not asked or not any(run.reached for run in known):
                continue
            curve = fit_convergence(known, resolution_samples=resolution)
            at = [o.batch_size for o in curve.observed if o.reached]
            values = [o.log_samples for o in curve.observed if o.reached]
            mean, std = curve.predict(asked)
            methods = {
                "curve": list(mean),
                "straight lines": straight_lines(at, values, asked),
                "noise law": noise_law(at, values, asked),
            }
            for method, predicted in methods.items():
                for size, value, sure in zip(asked, predicted, std, strict=True):
                    error = value - truth[size].log_samples
                    width = Z90 * math.hypot(float(sure), truth[size].log_samples_std)
                    rows.append(
                        {"workload": name, "target": target, "method": method, "points": count, "choice": kind}
                        | {"batch_size": size, "factor": math.exp(min(abs(error), 50.0))}
                        | {"within_90": bool(abs(error) <= width) if method == "curve" else None}
                    )
    return rows


def easy_rows(name: str, runs: list[ConvergenceRun], resolution: float) -> list[dict[str, Any]]:
    """Every target predicted by every easier one; easier is what takes fewer samples."""
    curves: list[ConvergenceCurve] = []
    for target in targets_of(runs):
        try:
            curves.append(fit_convergence(runs, target, resolution_samples=resolution))
        except InputError:
            continue
    curves.sort(key=lambda curve: min(o.log_samples for o in curve.observed))
    rows = []
    for hard_at, hard in enumerate(curves):
        truth = {o.batch_size: o.log_samples for o in hard.observed if o.reached}
        sizes = sorted(truth)
        for distance, easy in enumerate(reversed(curves[:hard_at]), start=1):
            predicted = np.array(easy.predict(sizes)[0])
            actual = np.array([truth[size] for size in sizes])
            # What it calls best among all sizes it may choose from; one that fails the hard target costs without end.
            everything = [o.batch_size for o in hard.observed]
            chosen = everything[int(np.argmin(easy.predict(everything)[0]))]
            regret = math.exp(truth[chosen] - min(truth.values())) if chosen in truth else math.inf
            finite = np.isfinite(predicted)
            offset = np.median((predicted - actual)[finite])
            factors = np.exp(np.abs(predicted - actual - offset)[finite])
            rows.append(
                {"workload": name, "hard": hard.target, "easy": easy.target, "targets_apart": distance}
                | {"times_harder": math.exp(float(actual.min() - predicted[finite].min()))}
                | {"factor_median": float(np.median(factors)), "factor_90": float(np.quantile(factors, 0.9))}
                | {"chosen": chosen, "regret": regret if math.isfinite(regret) else None}
            )
    return rows


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for workload in (row["workload"], "all"):
            groups[workload, row["points"], row["choice"], row["method"]].append(row)
    return [
        dict(zip(("workload", "points", "choice", "method"), key, strict=True))
        | {"cases": len(some), "factor_median": float(np.median([r["factor"] for r in some]))}
        | {"factor_90": float(np.quantile([r["factor"] for r in some], 0.9))}
        | {"coverage_90": float(np.mean([r["within_90"] for r in some])) if key[3] == "curve" else None}
        for key, some in sorted(groups.items())
    ]


def by_distance(easy: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How well an easier target serves, by how many targets lie between."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in easy:
        if row["targets_apart"] <= FARTHEST:
            groups[row["workload"], row["targets_apart"]].append(row)
    found = []
    for (workload, apart), some in sorted(groups.items()):
        regrets = [row["regret"] or math.inf for row in some]
        figures = {name: float(np.median([row[name] for row in some])) for name in ("factor_median", "factor_90")}
        worst = {"regret_median": float(np.median(regrets)), "regret_worst": max(regrets)}
        found.append({"workload": workload, "targets_apart": apart, **figures, **worst})
    return found


LEFT_OUT = (
    Column("workload"),
    Column("points"),
    Column("choice"),
    Column("method"),
    Column("factor_median", "median", ".3f"),
    Column("factor_90", "90%", ".2f"),
    Column("coverage_90", "covered", ".0%"),
    Column("cases"),
)
EASIER = (
    Column("workload"),
    Column("targets_apart", "apart"),
    Column("factor_median", "factor", ".3f"),
    Column("factor_90", "90%", ".2f"),
    Column("regret_median", "regret", ".3f"),
    Column("regret_worst", "worst", ".2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    add_output(parser)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    easy: list[dict[str, Any]] = []
    for workload, runs in read_file(options.train).convergence:
        # A trace in whole epochs was looked at once an epoch; one in samples says nothing, so nothing is assumed.
        counts = [run.samples for run in runs if run.reached]
        resolution = 1.0 if counts and all(count == round(count) for count in counts) else 0.0
        for target in targets_of(runs):
            some = [run for run in runs if run.target == target]
            if any(run.reached for run in some):
                rows += left_out_rows(workload.name, target, some, resolution)
        easy += easy_rows(workload.name, list(runs), resolution)
    summary = summarise(rows)
    print(as_table(summary, LEFT_OUT))
    print("\nan easier target for a harder one: ratios between batch sizes")
    print(as_table(by_distance(easy), EASIER))
    write("convergence_curve", {"summary": summary, "rows": rows, "easy": easy}, options)


if __name__ == "__main__":
    main()
