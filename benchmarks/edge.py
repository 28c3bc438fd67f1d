"""The scenarios of "Accelerated Training on Low-Power Edge Devices" on a virtual Jetson Nano and TX2 NX.

    python benchmarks/edge.py --json OUT [--methods cold,published] [--watts mean,peak] [--boards nano,tx2-nx]

Simulated: the boards (time, power, sensor; their constants come from ``drivers.virtual.board_specs``, never from
here). Real: the networks' counted costs, and samples to target by batch size from trainings on a real GPU
(``record_convergence.py``; proxy and target are different data). All methods are judged by the target's own runs and
the boards' own truth.

baseline   largest batch that fits, GPU clock as high as the budget allows, all else at its highest (given for free):
           the same function as in `underwatt plan`
published  the published method: every GPU clock × batch size measured, proxy convergence, smallest T × N that fits
underwatt  measure as you go over all modes × batch sizes, through the simulated sensor, with the proxy's runs; the
           choice was measured to fit
cold       what `underwatt run` does with an empty store and no convergence runs: it measures by training steps, and
           holds the best, with pauses where they help. Batch sizes are weighed by the other networks' trainings and
           the Zeus traces; this network's own are left out of the prior
oracle     the best of all settings by the truth

Ablations: ``samples`` is cold where all batch sizes are taken to learn alike; ``published-cold`` is published, weighed
as cold; ``published-true`` is published with the target's own convergence, which nobody has.

A row has null where a method finds nothing: as a speedup of zero. Only budgets that the baseline or the oracle cannot
keep are left out. ``over_w`` is true power (the mean, or the highest tenth of a second) less the budget; of cold and
samples that of the minute after the search, pauses included.

Budgets: five per board and network, evenly between the least and the most that the baseline's batch size draws, as mean
watts, and as peak watts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch

from _hold_truth import highest_w
from _table import Column, add_output, as_table, told, write
from models.efficientvit import EfficientViT
from models.mobilenet import MobileNetV2
from models.resnet import ResNet18
from models.transformer import CharTransformer
from underwatt.budget import Budget, Watts, parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.control.state import Phase
from underwatt.convergence.curve import fit_convergence
from underwatt.convergence.prior import RelativeCurve, shape_prior, usual_shape
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.physics import Clocks, step_power, step_times
from underwatt.errors import BudgetError, InputError, OutOfMemoryError, UnderwattError
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.measurement import measure
from underwatt.measure.steady import Settling
from underwatt.planning.problem import Problem
from underwatt.planning.search import Search
from underwatt.predict.base import SettingArray
from underwatt.records import ConvergenceRun, Measurement, Setting, WorkloadCost, WorkloadInfo
from underwatt.rivals.compare import Table, by_clock_alone, largest_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BOARDS = ("nano", "tx2-nx")
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
BUDGETS_PER_CASE = 5
SEARCHED_S, JUDGED_S = 600.0, 60.0  # a run searches for so long at most, and is judged over so long
RECORD = Path(__file__).with_name("results") / "convergence_h200.json"
CHARACTERS, SEQUENCE = 96, 64


def costs() -> dict[str, WorkloadCost]:
    """What a step of each network costs, counted on shapes alone."""
    images = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
    text = torch.zeros(8, SEQUENCE, dtype=torch.long), torch.zeros(8, SEQUENCE, dtype=torch.long)
    jobs = {
        "resnet18": Job(ResNet18, images, target=1.0),
        "mobilenetv2": Job(MobileNetV2, images, target=1.0),
        "efficientvit": Job(EfficientViT, images, target=1.0),
        "char_transformer": Job(lambda: CharTransformer(CHARACTERS), text, target=1.0),
    }
    return {name: count_cost(job) for name, job in jobs.items()}


def convergence(record: dict[str, Any], model: str, role: str) -> list[ConvergenceRun]:
    return [
        ConvergenceRun(
            run["batch_size"],
            run["target"],
            math.nan if run["samples"] is None else run["samples"],
            run["seed"],
            run["lr"],
        )
        for run in record["runs"]
        if run["model"] == model and run["role"] == role and run["seed"] in record["complete_seeds"]
    ]


@dataclass(frozen=True)
class World:
    """The truth about one network on one board: nothing a method may look at, except through a measurement."""

    board: str
    model: str
    cost: WorkloadCost
    settings: SettingArray
    time_s: np.ndarray[Any, Any]  # to the target
    power_w: np.ndarray[Any, Any]
    target_samples: dict[int, float]

    def row(self, setting: Setting) -> int:
        """Where a setting stands."""
        same = np.all(np.isclose(self.settings.values, list(setting.mode.knobs().values())), axis=1)
        return int(np.flatnonzero(same & (self.settings.batch_size == setting.batch_size))[0])


def make_world(board: str, model: str, cost: WorkloadCost, runs: list[ConvergenceRun]) -> World:
    device = virtual(board, 0)
    sizes = [size for size in BATCH_SIZES if fits(device, cost, size)]
    knobs = tuple(knob.name for knob in device.space.knobs)
    settings = SettingArray.product(knobs, device.space.matrix(), sizes)
    physics = device.board.spec.physics
    clocks = Clocks(*(settings.column(name) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")))
    times = step_times(physics.step_constants(cost), clocks, settings.batch_size)
    samples = mean_samples(runs, sizes)
    needed = np.array([samples[int(b)] for b in settings.batch_size])
    time_s = times.step_s / settings.batch_size * needed
    return World(board, model, cost, settings, time_s, step_power(physics.power, clocks, times).total_w, samples)


def mean_samples(runs: list[ConvergenceRun], sizes: list[int]) -> dict[int, float]:
    """Mean samples to target by batch size; a batch size at which a run never got there needs infinitely many."""
    found = {b: [run.samples for run in runs if run.batch_size == b] for b in sizes}
    if lacking := [b for b, values in found.items() if not values]:
        raise InputError(
            f"The convergence record has no complete runs at batch size {', '.join(map(str, lacking))}.",
            hint="Record every batch size of this benchmark, with record_convergence.py.",
        )
    return {b: statistics.mean(s if math.isfinite(s) else math.inf for s in values) for b, values in found.items()}


def virtual(board: str, seed: int) -> VirtualJetson:
    device = open_device(f"virtual:{board}?seed={seed}")
    assert isinstance(device, VirtualJetson)
    return device


def fits(device: VirtualJetson, cost: WorkloadCost, batch_size: int) -> bool:
    try:
        device.board.check_memory(cost, batch_size)
    except OutOfMemoryError:
        return False
    return True


# A choice: the time to the target that follows from it, and the mean and the bounded watts that it truly draws.
Choice = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """One network on one board under one budget, and what a method may know."""

    world: World
    proxy: list[ConvergenceRun]
    budget: Budget
    drawn_w: np.ndarray[Any, Any]  # true watts that the budget bounds
    seed: int

    @property
    def budget_w(self) -> float:
        """The watts of the budget."""
        return self.budget.power_w or math.inf

    def at(self, row: int | None) -> Choice | None:
        """What a row of the world takes."""
        if row is None:
            return None
        return float(self.world.time_s[row]), float(self.world.power_w[row]), float(self.drawn_w[row])

    def by_samples(self, log_samples: dict[int, float], rows: np.ndarray[Any, Any]) -> Choice | None:
        """The best of some rows that truly fit, by the samples that a method takes each batch size to need."""
        sizes = self.world.settings.batch_size
        true = np.array([self.world.target_samples[int(size)] for size in sizes])
        time_s = self.world.time_s / true * np.exp([log_samples[int(size)] for size in sizes])
        fitting = rows & (self.drawn_w <= self.budget_w)
        return self.at(int(np.argmin(np.where(fitting, time_s, np.inf))) if fitting.any() else None)


def baseline(case: Case) -> Choice | None:
    world = case.world
    return case.at(largest_batch(Table(world.settings, world.time_s, world.time_s, case.drawn_w), case.budget_w))


def published(case: Case) -> Choice | None:
    means = mean_samples(case.proxy, list(case.world.target_samples))
    return _by_clock(case, {size: math.log(samples) for size, samples in means.items()})


def published_true(case: Case) -> Choice | None:
    return _by_clock(case, {size: math.log(samples) for size, samples in case.world.target_samples.items()})


def published_cold(case: Case) -> Choice | None:
    sizes = list(case.world.target_samples)
    logs, _ = usual_shape(without=case.world.model).predict(sizes)
    return _by_clock(case, dict(zip(sizes, logs.tolist(), strict=True)))


def _by_clock(case: Case, log_samples: dict[int, float]) -> Choice | None:
    return case.by_samples(log_samples, by_clock_alone(case.world.settings))


def oracle(case: Case) -> Choice | None:
    true = {size: math.log(samples) for size, samples in case.world.target_samples.items()}
    return case.by_samples(true, np.ones(len(case.world.settings), dtype=bool))


def underwatt(case: Case) -> Choice | None:
    """Measured as it goes; ``None`` where nothing that fits is found."""
    world, device = case.world, virtual(case.world.board, case.seed)
    workload = SimulatedWorkload(WorkloadInfo(world.model, world.model), world.cost, device)
    settling = Settling()
    curve = fit_convergence(case.proxy, prior=shape_prior(without=world.model))
    with Session(device) as session:

        def ask(setting: Setting) -> Measurement:
            return measure(session, workload.start(setting.batch_size), setting, settling=settling)

        try:
            found = Search(Problem.of(world.settings, case.budget, curve), seed=case.seed).run(ask)
        except BudgetError:
            return None
    return case.at(world.row(found.best.measurement.setting))


def cold(case: Case) -> Choice | None:
    return run_by_training(case, usual_shape(without=case.world.model))


def samples(case: Case) -> Choice | None:
    return run_by_training(case, None)


def run_by_training(case: Case, shape: RelativeCurve | None) -> Choice | None:
    """What a run of training steps ends with: it searches, then holds for a minute, in which it is judged."""
    world, device = case.world, virtual(case.world.board, case.seed)
    live = LiveBudget.from_now(case.budget, simulated=True)
    sizes = list(world.target_samples)
    with contextlib.ExitStack() as stack:
        try:
            pilot = stack.enter_context(
                Pilot(device, WorkloadInfo(world.model, world.model), sizes, live, convergence=shape, cost=world.cost)
            )
            _train_for(pilot, SEARCHED_S, until=lambda: pilot.controller.phase is Phase.HOLDING)
        except BudgetError:
            return None
        begun_s, begun_j, highest_w, done = device.clock.now_s(), device.board.energy_j, 0.0, 0.0
        while device.clock.now_s() - begun_s < JUDGED_S:
            size = pilot.batch_size
            highest_w = max(highest_w, float(case.drawn_w[world.row(pilot.setting)]))
            _train_for(pilot, 0.0)
            done += size / world.target_samples[size]
        took_s = device.clock.now_s() - begun_s
        mean_w = (device.board.energy_j - begun_j) / took_s
    return took_s / done, mean_w, highest_w if case.budget.watts is Watts.PEAK else mean_w


def _train_for(pilot: Pilot, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
    """Train a step, and more until something is so, or for so long."""
    begun_s = pilot.elapsed_s
    while True:
        size = pilot.batch_size
        pilot.simulate(size)
        pilot.stepped(size)
        if until() or pilot.elapsed_s - begun_s > seconds:
            return


METHODS: dict[str, Callable[[Case], Choice | None]] = {
    "baseline": baseline,
    "published": published,
    "underwatt": underwatt,
    "cold": cold,
    "oracle": oracle,
    "samples": samples,
    "published-cold": published_cold,
    "published-true": published_true,
}


def cases_of(world: World, proxy: list[ConvergenceRun], watts: Watts) -> list[Case]:
    """The budgets of one network on one board, as mean or as peak watts; those that can be kept."""
    drawn_w = world.power_w
    if watts is Watts.PEAK:
        columns = (world.settings.column(name) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz"))
        drawn_w = highest_w(world, virtual(world.board, 0).board, Clocks(*columns))
    grid = by_clock_alone(world.settings) & (world.settings.batch_size == max(world.target_samples))
    budgets_w = np.linspace(drawn_w[grid].min(), drawn_w[grid].max(), BUDGETS_PER_CASE + 1)[1:]
    found = []
    for seed, budget_w in enumerate(np.floor(budgets_w * 20) / 20):
        case = Case(world, proxy, parse_budget(f"{budget_w}W {watts.value}"), drawn_w, seed)
        if baseline(case) is None or oracle(case) is None:
            print(f"{world.board} {world.model} {budget_w:g} W {watts.value}: cannot be kept, left out")
        else:
            found.append(case)
    return found


def rows_of(case: Case, methods: Sequence[str]) -> list[dict[str, Any]]:
    """One row a method."""
    first, best, rows = baseline(case), oracle(case), []
    assert first is not None
    assert best is not None
    for method in methods:
        found = METHODS[method](case)
        row: dict[str, Any] = {
            "board": case.world.board,
            "network": case.world.model,
            "budget_w": case.budget_w,
            "watts": case.budget.watts.value,
            "method": method,
            **dict.fromkeys(("time_s", "speedup", "over_oracle", "energy_ratio", "over_w")),
        }
        if found is not None:
            time_s, power_w, drawn_w = found
            row |= {"time_s": time_s, "speedup": first[0] / time_s, "over_oracle": time_s / best[0]}
            row |= {"energy_ratio": time_s * power_w / (first[0] * first[1]), "over_w": drawn_w - case.budget_w}
        rows.append(row)
    return rows


COLUMNS = (
    Column("board"),
    Column("network"),
    Column("budget_w", "budget W", ".2f"),
    Column("watts"),
    Column("method"),
    Column("time_s", "time s", ".0f"),
    Column("speedup", form=".2f"),
    Column("over_oracle", "over oracle", ".3f"),
    Column("energy_ratio", "energy ratio", ".2f"),
    Column("over_w", "over W", ".2f"),
)


def run(
    record: dict[str, Any], methods: Sequence[str], watts: Sequence[Watts], boards: Sequence[str] = BOARDS
) -> list[dict[str, Any]]:
    """Every network on every board, told as it goes."""
    rows = []
    for model, cost in costs().items():
        proxy = convergence(record, model, "proxy")
        for board in boards:
            world = make_world(board, model, cost, convergence(record, model, "target"))
            for case in [case for kind in watts for case in cases_of(world, proxy, kind)]:
                for row in rows_of(case, methods):
                    rows.append(row)
                    told(row, COLUMNS)
    return rows


SUMMARY = (
    Column("method"),
    Column("cases"),
    Column("nothing", "nothing found"),
    Column("geomean", "speedup", ".2f"),
    Column("least", form=".2f"),
    Column("most", form=".2f"),
    Column("over_oracle", "over oracle", ".3f"),
    Column("worst", form=".2f"),
    Column("energy", "energy ratio", ".2f"),
    Column("over", "over budget", "+.2%"),
)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each method in a line: speedups over the baseline, time over the oracle's, and the worst of true watts."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        same = [row for row in rows if row["method"] == method]
        found = [row for row in same if row["time_s"] is not None]
        speedups = [row["speedup"] or 0.0 for row in same]
        over = [row["over_oracle"] for row in found]
        lines.append(
            {
                "method": method,
                "cases": len(same),
                "nothing": len(same) - len(found),
                "geomean": statistics.geometric_mean(speedups) if min(speedups) > 0 else 0.0,
                "least": min(speedups),
                "most": max(speedups),
                "over_oracle": statistics.geometric_mean(over) if len(found) == len(same) else math.inf,
                "worst": max(over, default=math.inf) if len(found) == len(same) else math.inf,
                "energy": statistics.geometric_mean(row["energy_ratio"] for row in found) if found else None,
                "over": max((row["over_w"] / row["budget_w"] for row in found), default=None),
            }
        )
    return lines


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--convergence", type=Path, default=RECORD, help="a record made by record_convergence.py")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--watts", default="mean,peak", help="what budgets bound")
    parser.add_argument("--boards", default=",".join(BOARDS))
    arguments = parser.parse_args(given)
    methods = arguments.methods.split(",")
    if unknown := [method for method in methods if method not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    try:
        watts = [Watts(kind) for kind in arguments.watts.split(",")]
        rows = run(json.loads(arguments.convergence.read_text()), methods, watts, arguments.boards.split(","))
    except (UnderwattError, OSError, ValueError, KeyError) as exc:
        print(f"error: {arguments.convergence.name}: {exc}", file=sys.stderr)
        return 2
    write("edge", rows, arguments)
    if not rows:
        print("nothing to compare: the baseline keeps none of the budgets", file=sys.stderr)
        return 1
    for kind in watts:
        same = [row for row in rows if row["watts"] == kind.value]
        print(f"\n{kind.value} watts, simulated boards")
        print(as_table(summary(same), SUMMARY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
