"""The scenarios of "Accelerated Training on Low-Power Edge Devices" on a virtual Jetson Nano and TX2 NX.

    python benchmarks/edge.py --json OUT [--convergence FILE]

Simulated: the boards (time, power, sensor; their constants come from ``drivers.virtual.board_specs``, never from
here). Real: the networks' counted costs, and samples to target by batch size from trainings on a real GPU
(``record_convergence.py``; proxy and target are different data). Methods know convergence through the *proxy* runs; all
are judged by the target's own runs and the boards' own truth.

baseline   largest batch that fits, GPU clock as high as the budget allows, all else at its highest (given for free):
           the same function as in `underwatt plan`
table      the published method: every GPU clock × batch size measured, proxy convergence, smallest T × N that fits
underwatt  measure as you go over all modes × batch sizes, through the simulated sensor; the choice was measured to fit
oracle     the best of all settings by the truth

A case in which Underwatt finds nothing is a row with null for its time, speedup and energy, and counts as a failure:
as a speedup of zero, as never within reach of the oracle, as more energy. Only budgets that the baseline or the oracle
cannot keep are left out.

Budgets: five per board and model, evenly between the least and the most that the baseline's batch size draws.
"""

from __future__ import annotations

import argparse
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

from _table import Column, add_output, as_table, told, write
from models.efficientvit import EfficientViT
from models.mobilenet import MobileNetV2
from models.resnet import ResNet18
from models.transformer import CharTransformer
from underwatt.budget import Budget, parse_budget
from underwatt.convergence.curve import fit_convergence
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
    from collections.abc import Sequence

BOARDS = ("nano", "tx2-nx")
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
BUDGETS_PER_CASE = 5
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


def best_within(world: World, rows: list[int], budget_w: float, score: np.ndarray[Any, Any]) -> int | None:
    within = [row for row in rows if world.power_w[row] <= budget_w]
    return min(within, key=lambda row: float(score[row]), default=None)


def run_underwatt(world: World, proxy: list[ConvergenceRun], budget: Budget, seed: int) -> tuple[int | None, int]:
    """The row that Underwatt chooses (``None`` where it finds none that fits), and how many settings it measured."""
    device = virtual(world.board, seed)
    workload = SimulatedWorkload(WorkloadInfo(world.model, world.model), world.cost, device)
    settling = Settling()
    asked = 0
    problem = Problem.of(world.settings, budget, fit_convergence(proxy))
    with Session(device) as session:

        def ask(setting: Setting) -> Measurement:
            nonlocal asked
            asked += 1
            return measure(session, workload.start(setting.batch_size), setting, settling=settling)

        try:
            found = Search(problem, seed=seed).run(ask)
        except BudgetError:
            return None, asked
    return world.row(found.best.measurement.setting), asked


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--convergence", type=Path, default=RECORD, help="a record made by record_convergence.py")
    arguments = parser.parse_args(given)
    try:
        rows = run(json.loads(arguments.convergence.read_text()))
    except (UnderwattError, OSError, ValueError, KeyError) as exc:
        print(f"error: {arguments.convergence.name}: {exc}", file=sys.stderr)
        return 2
    write("edge", rows, arguments)
    if not rows:
        print("nothing to compare: the baseline keeps none of the budgets", file=sys.stderr)
        return 1
    print(as_table(rows, COLUMNS))
    report(rows)
    return 0


COLUMNS = (
    Column("device"),
    Column("model"),
    Column("budget_w", "budget W", ".2f"),
    Column("baseline_s", "baseline s", ".0f"),
    Column("table_s", "table s", ".0f"),
    Column("underwatt_s", "underwatt s", ".0f"),
    Column("oracle_s", "oracle s", ".0f"),
    Column("speedup", form=".2f"),
    Column("energy_ratio", "energy ratio", ".2f"),
    Column("measured"),
)


def run(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every network on every board, told as it goes."""
    rows = []
    for model, cost in costs().items():
        proxy = convergence(record, model, "proxy")
        for board in BOARDS:
            world = make_world(board, model, cost, convergence(record, model, "target"))
            for row in one_world(world, proxy):
                rows.append(row)
                told(row, COLUMNS)
    return rows


def one_world(world: World, proxy: list[ConvergenceRun]) -> list[dict[str, Any]]:
    by_size = mean_samples(proxy, [int(b) for b in np.unique(world.settings.batch_size)])
    true_samples = np.array([world.target_samples[int(b)] for b in world.settings.batch_size])
    proxy_time_s = world.time_s / true_samples * np.array([by_size[int(b)] for b in world.settings.batch_size])
    grid = np.flatnonzero(by_clock_alone(world.settings)).tolist()
    drawn_w = world.power_w[[row for row in grid if world.settings.batch_size[row] == max(by_size)]]
    known = Table(world.settings, world.time_s, world.time_s / true_samples, world.power_w)
    budgets_w = np.linspace(drawn_w.min(), drawn_w.max(), BUDGETS_PER_CASE + 1)[1:]
    found = []
    for seed, budget_w in enumerate(np.floor(budgets_w * 20) / 20):
        baseline = largest_batch(known, budget_w)
        table = best_within(world, grid, budget_w, proxy_time_s)
        oracle = best_within(world, list(range(len(world.settings))), budget_w, world.time_s)
        if baseline is None or table is None or oracle is None:
            print(f"{world.board} {world.model} {budget_w:g} W: the baseline cannot keep it, left out")
            continue
        chosen, measured = run_underwatt(world, proxy, parse_budget(f"{budget_w}W"), seed)
        time_s, power_w = world.time_s, world.power_w
        ours: dict[str, Any] = dict.fromkeys(("underwatt_s", "speedup", "energy_ratio", "over_w", "chosen"))
        if chosen is not None:
            baseline_j = time_s[baseline] * power_w[baseline]
            ours = {
                "underwatt_s": float(time_s[chosen]),
                "speedup": float(time_s[baseline] / time_s[chosen]),
                "energy_ratio": float(time_s[chosen] * power_w[chosen] / baseline_j),
                "over_w": float(power_w[chosen] - budget_w),
                "chosen": str(world.settings[chosen]),
            }
        found.append(
            {
                "device": world.board,
                "model": world.model,
                "budget_w": float(budget_w),
                "baseline_s": float(time_s[baseline]),
                "table_s": float(time_s[table]),
                "oracle_s": float(time_s[oracle]),
                "measured": measured,
                "proxy_cost": float(time_s[table] / time_s[best_within(world, grid, budget_w, world.time_s)]),
                **ours,
            }
        )
    return found


def report(rows: list[dict[str, Any]]) -> None:
    speedups = [row["speedup"] or 0.0 for row in rows]
    failed = [row for row in rows if row["underwatt_s"] is None]
    kept = [row for row in rows if row["underwatt_s"] is not None]
    print(f"\n{len(rows)} cases on simulated boards, {len(failed)} of them failures: nothing was found")
    overall = statistics.geometric_mean(speedups) if min(speedups) > 0 else 0.0
    print(
        f"  speedup over the paper's baseline: up to {max(speedups):.2f}, geometric mean {overall:.2f}, "
        f"least {min(speedups):.2f}"
    )
    print(
        f"  published table method: geometric mean "
        f"{statistics.geometric_mean(row['baseline_s'] / row['table_s'] for row in rows):.2f}"
    )
    print(f"  time over the oracle's: mean {statistics.mean(over_oracle(row) for row in rows):.3f}")
    thrifty = [row["energy_ratio"] is not None and row["energy_ratio"] <= 1 for row in rows]
    print(f"  energy at or below the baseline's in {statistics.mean(thrifty):.0%}")
    print(f"  settings measured: mean {statistics.mean(row['measured'] for row in rows):.1f}")
    worst = max((row["over_w"] / row["budget_w"] for row in kept), default=math.nan)
    print(f"  true power over the budget: worst {worst:+.2%}")
    for model in dict.fromkeys(row["model"] for row in rows):
        extra = [100 * (row["proxy_cost"] - 1) for row in rows if row["model"] == model]
        print(f"  batch by proxy instead of target, {model}: +{statistics.mean(extra):.1f}%, worst +{max(extra):.1f}%")
    for row in rows:
        if row["underwatt_s"] is None:
            print(f"  failure: {row['device']} {row['model']} at {row['budget_w']:g} W: nothing was found")
        elif row["speedup"] < 1:
            print(f"  slower: {row['device']} {row['model']} at {row['budget_w']:g} W: {row['speedup']:.2f}")


def over_oracle(row: dict[str, Any]) -> float:
    """Time as a multiple of the oracle's; infinite where nothing was found."""
    return math.inf if row["underwatt_s"] is None else float(row["underwatt_s"] / row["oracle_s"])


if __name__ == "__main__":
    sys.exit(main())
