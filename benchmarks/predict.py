"""How well a few measurements predict the rest: every method on any table of measured power modes.

    python benchmarks/predict.py --reference A.csv --target B.csv --samples 10,20,50 --repeats 10 --json out.json

Each repeat measures some rows of the target, fits, and is scored on every row that was not measured. ``underwatt`` and
``underwatt-noref`` choose their rows with the package's own sample design, which sees knob values and never a
time or power of the target; the other methods take random rows, as published.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _repeats import read_profile
from _table import Column, add_output, as_table, write
from underwatt.errors import InputError, UnderwattError
from underwatt.predict.base import Z90, SettingArray, observe
from underwatt.predict.design import first_settings
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, Prediction, Profile
from underwatt.rivals.predictors import PowerTrain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from underwatt.predict.base import FittedPredictor
    from underwatt.rivals.predictors import FittedPowerTrain

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One repeat of one method: errors in percent, covered shares in percent, seconds."""

    method: str
    samples: int
    repeat: int
    time_mape: float
    power_mape: float
    time_cover90: float
    power_cover90: float
    fit_s: float
    predict_s: float


class Method(Protocol):
    """Which rows to measure, and what to make of them."""

    def choose(self, settings: SettingArray, samples: int, repeat: int) -> NDArray[np.intp]:
        """Rows to measure."""
        ...

    def fit(self, measured: Sequence[Measurement], repeat: int) -> FittedPredictor:
        """A predictor fitted on measured rows."""
        ...


class Random:
    """Measures random rows."""

    def choose(self, settings: SettingArray, samples: int, repeat: int) -> NDArray[np.intp]:
        """Rows to measure."""
        return np.random.default_rng(repeat).permutation(len(settings))[:samples]


class Underwatt:
    """The default predictor with its own sample design."""

    def __init__(self, references: Sequence[Profile]) -> None:
        self._references = references

    def choose(self, settings: SettingArray, samples: int, repeat: int) -> NDArray[np.intp]:
        """Rows to measure."""
        return first_settings(settings, samples, references=self._references, seed=repeat)

    def fit(self, measured: Sequence[Measurement], repeat: int) -> FittedPredictor:
        """A predictor fitted on measured rows."""
        return FewShot(seed=repeat).fit(measured, self._references)


class PublishedPowerTrain(Random):
    """The published networks; those trained on the reference are shared by all repeats. Without them: from scratch."""

    def __init__(self, pretrained: FittedPowerTrain | None, *, relative: bool = False) -> None:
        self._pretrained, self._relative = pretrained, relative

    def fit(self, measured: Sequence[Measurement], repeat: int) -> FittedPredictor:
        """A predictor fitted on measured rows."""
        return PowerTrain(seed=repeat, relative=self._relative).transfer(measured, self._pretrained)


class Nearest(Random):
    """The nearest measured row, in logs of the knobs scaled to their ranges."""

    def fit(self, measured: Sequence[Measurement], repeat: int) -> FittedPredictor:  # noqa: ARG002
        """A predictor fitted on measured rows."""
        seen = observe(measured)
        logs = np.log(seen.settings.matrix())
        scale = np.where(np.ptp(logs, axis=0) > 0, np.ptp(logs, axis=0), 1.0)

        def nearest(points: Floats) -> NDArray[np.intp]:
            squares = [(((points - point) / scale) ** 2).sum(axis=1) for point in logs]
            return np.asarray(np.argmin(np.stack(squares), axis=0))

        others = np.array([_nearest_other(logs / scale, at) for at in range(len(logs))])
        return _Simple(
            lambda points: seen.log_step_s[nearest(points)],
            lambda points: seen.log_power_w[nearest(points)],
            float(np.std(seen.log_step_s - seen.log_step_s[others])),
            float(np.std(seen.log_power_w - seen.log_power_w[others])),
        )


class Linear(Random):
    """Log time and log power as linear functions of the logs of the knobs, slightly ridged."""

    def fit(self, measured: Sequence[Measurement], repeat: int) -> FittedPredictor:  # noqa: ARG002
        """A predictor fitted on measured rows."""
        seen = observe(measured)
        logs = np.log(seen.settings.matrix())
        centre = logs.mean(axis=0)

        def design(points: Floats) -> Floats:
            return np.column_stack([np.ones(len(points)), points - centre])

        a = design(logs)
        solve = np.linalg.inv(a.T @ a + 1e-3 * np.eye(a.shape[1])) @ a.T
        time_slopes, power_slopes = solve @ seen.log_step_s, solve @ seen.log_power_w
        spare = max(1, len(seen) - np.linalg.matrix_rank(a))
        return _Simple(
            lambda points: design(points) @ time_slopes,
            lambda points: design(points) @ power_slopes,
            float(np.sqrt(((seen.log_step_s - a @ time_slopes) ** 2).sum() / spare)),
            float(np.sqrt(((seen.log_power_w - a @ power_slopes) ** 2).sum() / spare)),
        )


class _Simple:
    """Two functions of the logs of the settings, and one spread each."""

    def __init__(
        self,
        log_time: Callable[[Floats], Floats],
        log_power: Callable[[Floats], Floats],
        time_std: float,
        power_std: float,
    ) -> None:
        self._log_time, self._log_power = log_time, log_power
        self._stds = time_std, power_std

    def predict(self, settings: SettingArray) -> Prediction:
        """Log time and log power of each setting."""
        points = np.log(settings.matrix())
        time_std, power_std = (np.full(len(settings), std) for std in self._stds)
        return Prediction(self._log_time(points), time_std, self._log_power(points), power_std)


def _nearest_other(points: Floats, at: int) -> int:
    squares = ((points - points[at]) ** 2).sum(axis=1)
    squares[at] = np.inf
    return int(np.argmin(squares))


METHODS: dict[str, Callable[[Sequence[Profile]], Method]] = {
    "underwatt": lambda references: Underwatt(references),
    "underwatt-noref": lambda references: Underwatt(()),  # noqa: ARG005
    "powertrain": lambda references: PublishedPowerTrain(PowerTrain().pretrain(references[0]) if references else None),
    "lookup-nearest": lambda references: Nearest(),  # noqa: ARG005
    "linear": lambda references: Linear(),  # noqa: ARG005
}


def evaluate(method: str, maker: Method, target: Profile, samples: int, repeat: int) -> Row:
    """One repeat: choose, fit, predict, and score on every row that was not measured."""
    everything = observe(target.measurements)
    chosen = maker.choose(everything.settings, samples, repeat)
    started = time.perf_counter()
    fitted = maker.fit([target.measurements[at] for at in chosen], repeat)
    fit_s = time.perf_counter() - started
    rest = np.setdiff1d(np.arange(len(everything)), chosen)
    started = time.perf_counter()
    predicted = fitted.predict(everything.settings.take(rest))
    predict_s = time.perf_counter() - started
    time_error = predicted.log_step_s - everything.log_step_s[rest]
    power_error = predicted.log_power_w - everything.log_power_w[rest]
    return Row(
        method,
        samples,
        repeat,
        time_mape=mape(time_error),
        power_mape=mape(power_error),
        time_cover90=100 * float(np.mean(np.abs(time_error) <= Z90 * predicted.log_step_s_std)),
        power_cover90=100 * float(np.mean(np.abs(power_error) <= Z90 * predicted.log_power_w_std)),
        fit_s=fit_s,
        predict_s=predict_s,
    )


def mape(log_error: Floats) -> float:
    return 100 * float(np.mean(np.abs(np.expm1(log_error))))


def run(
    references: Sequence[Profile], target: Profile, methods: Sequence[str], counts: Sequence[int], repeats: int
) -> list[Row]:
    """Every method at every count of samples."""
    rows = []
    for method in methods:
        maker = METHODS[method](references)
        for samples in counts:
            for repeat in range(repeats):
                rows.append(evaluate(method, maker, target, samples, repeat))
                print(f"\r{method} {samples} samples, repeat {repeat + 1} of {repeats}    ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return rows


COLUMNS = (
    Column("method"),
    Column("samples"),
    Column("time_mape", "time %", ".2f"),
    Column("power_mape", "power %", ".2f"),
    Column("time_cover90", "time in 90%", ".1f"),
    Column("power_cover90", "power in 90%", ".1f"),
    Column("fit_s", "fit s", ".2f"),
    Column("predict_s", "predict s", ".3f"),
)


def table(rows: Sequence[Row]) -> str:
    """Medians over the repeats, as text."""
    medians = []
    for method, samples in dict.fromkeys((row.method, row.samples) for row in rows):
        same = [asdict(row) for row in rows if (row.method, row.samples) == (method, samples)]
        middle = {key: median(row[key] for row in same) for key in same[0] if key != "method"}
        medians.append({"method": method, **middle, "samples": samples})
    return as_table(medians, COLUMNS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, action="append", default=[], help="table of another workload")
    parser.add_argument("--target", type=Path, required=True, help="table to predict")
    parser.add_argument("--samples", default="10,20,50", help="how many rows to measure")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    add_output(parser)
    options = parser.parse_args(arguments)
    options.methods = options.methods.split(",")
    unknown = [method for method in options.methods if method not in METHODS]
    if unknown:
        parser.error(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    try:
        options.samples = [int(count) for count in options.samples.split(",")]
    except ValueError:
        parser.error(f"--samples takes counts like 10,20,50, not {options.samples!r}")
    if options.repeats < 1 or min(options.samples) < 3:
        parser.error("there must be at least 1 repeat and 3 samples")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        target = read_profile(options.target)
        if max(options.samples) >= len(target.measurements):
            raise InputError(f"{options.target} has {len(target.measurements)} rows: nothing would be left to predict.")
        references = [read_profile(path) for path in options.reference]
        rows = run(references, target, options.methods, options.samples, options.repeats)
    except UnderwattError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(table(rows))
    write("predict", [asdict(row) for row in rows], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
