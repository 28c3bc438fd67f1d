"""Time to a target from a cold start: real trainings of small networks, in simulated time on virtual boards.

    python benchmarks/cold.py --json OUT [--seeds 5] [--methods cold,warm,…] [--jobs …] [--devices …] [--workers 2]

Real: the trainings (three networks that a CPU core trains in seconds), the search, the controller, what it learns.
Simulated: the boards, on which each network costs what a larger one does (``LARGER``), as if that had so many times its
layers (``DEEPER``), so that a training takes some ten minutes to an hour. One tight budget for each job and board. The
clock of the board runs from the call to its end: search, pauses and tests of the model are all paid for. Only the time
that this machine thinks is not in it.

cold        ``underwatt.run`` with an empty store
warm        the same with samples to target known: from the trainings of the other seeds, at every batch size
samples     the same with every batch size taken to learn alike, so that samples a second count: as before the prior
published   every GPU clock at every batch size measured first (its table, which it pays for), then the best of
            it by the same samples to target as ``warm`` knows
baseline    the largest batch that fits, the GPU clock as high as the budget allows: given for free
best-fixed  in hindsight, the one setting that keeps the budget with the least mean time over the seeds

Fixed batch sizes are trained once for each seed; the modes' times are the board's truth. All test the model as often as
``underwatt.run`` does. Ratios are of means over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from _table import Column, add_output, as_table, told, write
from data import digits, grammar_text, text_windows
from edge import costs, fits
from jobs import ASCII
from models.transformer import CharTransformer
from underwatt import api
from underwatt.budget import Schedule
from underwatt.control.live_budget import LiveBudget
from underwatt.convergence.curve import fit_convergence
from underwatt.demo.trainings import Joules
from underwatt.device.session import Session
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.physics import Clocks, step_power, step_times
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.errors import OutOfMemoryError
from underwatt.jobs.cost import count_cost
from underwatt.jobs.data import train_and_test
from underwatt.jobs.identity import job_info
from underwatt.jobs.job import Job
from underwatt.jobs.runs import Run, RunOptions, run_job
from underwatt.jobs.training import EVALUATION_BATCH, Training
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.measurement import measure
from underwatt.measure.steady import Settling
from underwatt.predict.base import SettingArray
from underwatt.records import ConvergenceRun, WorkloadCost, WorkloadInfo
from underwatt.rivals.compare import Table, by_clock_alone, largest_batch
from underwatt.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

METHODS = ("cold", "warm", "samples", "published", "baseline", "best-fixed")
SIZES = (8, 16, 32, 64, 128, 256)
LARGER = {"scattered": "resnet18", "noisy": "mobilenetv2", "text": "char_transformer"}
DEEPER = {"nano": 3, "tx2-nx": 8, "orin-nano": 20}
TIGHT = 0.2  # of the way from the least to the most that the largest batch draws at any GPU clock
LIMIT = 100_000  # samples


# The jobs


def placed_digits(count: int, seed: int, side: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Real digits, each at a random place of a larger noisy image."""
    images, classes = digits()
    chance = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(images), (count,), generator=chance)
    made = noise * torch.randn(count, 1, side, side, generator=chance)
    for image, digit, (top, left) in zip(
        made, images[chosen], torch.randint(side - 7, (count, 2), generator=chance).tolist(), strict=True
    ):
        image[:, top : top + 8, left : left + 8] += digit
    return made, classes[chosen]


def scattered(seed: int) -> Job:
    """A small convolutional network with AdamW."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(24 * 9, 10),
        )

    data, test = placed_digits(8000, 0, 12, 0.15), placed_digits(240, 1, 12, 0.15)
    return Job(model, data, target=0.82, test_data=test, lr=6e-3, batch_sizes=SIZES, seed=seed, name="scattered")


def noisy(seed: int) -> Job:
    """A fully connected network with SGD and momentum."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    data, test = placed_digits(8000, 2, 8, 0.3), placed_digits(240, 3, 8, 0.3)
    return Job(
        model, data, target=0.87, test_data=test, optimizer=sgd, lr=0.04, batch_sizes=SIZES, seed=seed, name="noisy"
    )


def text(seed: int) -> Job:
    """A small character transformer with AdamW."""
    parts = text_windows(grammar_text(4000, 0), ASCII)
    data, test = (
        tuple(torch.stack([part[at][side][:32] for at in range(count)]) for side in (0, 1))
        for part, count in zip(parts, (4000, 112), strict=True)
    )
    return Job(
        lambda: CharTransformer(len(ASCII), dim=32, layers=1, heads=2, length=32),
        data,
        target=0.87,
        test_data=test,
        lr=8e-3,
        batch_sizes=SIZES,
        seed=seed,
        name="text",
    )


JOBS: dict[str, Callable[[int], Job]] = {"scattered": scattered, "noisy": noisy, "text": text}


class LargerNetwork(VirtualJetson):
    """A board on which a small network costs what a larger one does."""

    def __init__(self, board: VirtualBoard, small: WorkloadCost, large: WorkloadCost) -> None:
        super().__init__(board)
        self._costs = {small: large, small.of_test(): large.of_test(), small.of_transfer(): large.of_transfer()}

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Let one step, or a part of a test, pass in simulated time."""
        self.board.run_step(self._costs[cost], batch_size)


@cache
def larger_cost(job: str, device: str) -> WorkloadCost:
    cost, times = costs()[LARGER[job]], DEEPER[device]
    names = ("flops_per_sample", "bytes_per_sample", "bytes_per_step", "kernels_per_step", "load_bytes_per_sample")
    return replace(cost, **{name: times * getattr(cost, name) for name in names})


@dataclass(frozen=True)
class World:
    """The truth of one network on one board: nothing a method may look at, except through a measurement."""

    device: str
    cost: WorkloadCost
    settings: SettingArray
    step_s: Floats
    power_w: Floats
    budget_w: float

    @property
    def fitting(self) -> NDArray[np.bool_]:
        """Which settings are within the budget."""
        return np.asarray(self.power_w <= self.budget_w)

    def test_s(self, samples: int) -> Floats:
        """What a test of so many samples takes at each setting, in batches as ``underwatt.run`` has them."""
        size = np.minimum(EVALUATION_BATCH, 3 * self.settings.batch_size)
        whole, rest = np.divmod(samples, size)
        constants = BOARDS[self.device].physics.step_constants(self.cost.of_test())
        return np.asarray(
            whole * step_times(constants, clocks_of(self.settings), size).step_s
            + np.where(rest > 0, step_times(constants, clocks_of(self.settings), rest).step_s, 0.0)
        )


def clocks_of(settings: SettingArray) -> Clocks:
    return Clocks(*(settings.column(name) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")))  # type: ignore[arg-type]


@cache
def world_of(job: str, device: str) -> World:
    board, cost = VirtualJetson(VirtualBoard(BOARDS[device])), larger_cost(job, device)
    sizes = [size for size in SIZES if fits(board, cost, size)]
    settings = SettingArray.product(tuple(knob.name for knob in board.space.knobs), board.space.matrix(), sizes)
    clocks, physics = clocks_of(settings), board.board.spec.physics
    times = step_times(physics.step_constants(cost), clocks, settings.batch_size)
    power_w = step_power(physics.power, clocks, times).total_w
    drawn_w = power_w[by_clock_alone(settings) & (settings.batch_size == max(sizes))]
    budget_w = math.ceil(20 * (drawn_w.min() + TIGHT * (drawn_w.max() - drawn_w.min()))) / 20
    return World(device, cost, settings, times.step_s, power_w, budget_w)


# Fixed batch sizes


@dataclass(frozen=True)
class Trained:
    """A training at one batch size: what it took to the first test that met the target."""

    steps: int
    tests: int
    samples: int
    reached: bool
    test_samples: int

    def time_s(self, world: World) -> Floats:
        """At every setting of a world; only those of this batch size mean something."""
        return np.asarray(self.steps * world.step_s + self.tests * world.test_s(self.test_samples))


def train_fixed(name: str, batch_size: int, seed: int) -> Trained:
    """Train at a batch size, tested when ``underwatt.run`` would test."""
    torch.set_num_threads(1)
    job = JOBS[name](seed)
    train, test = map(len, train_and_test(job))
    every, tested_at, tests, reached = max(train // 5, test, *SIZES), 0, 0, False
    with contextlib.closing(Training(job, batch_size)) as training:
        while not reached and training.samples < LIMIT:
            training.step()
            if training.samples - tested_at >= every:
                tested_at, tests = training.samples, tests + 1
                reached = job.reached(training.evaluate())
        return Trained(training.steps, tests, training.samples, reached, test)


@dataclass(frozen=True)
class Fixed:
    """All trainings of one job at fixed batch sizes."""

    job: str
    seeds: int
    trained: dict[tuple[int, int], Trained]  # by batch size and seed

    def known_to(self, seed: int) -> list[ConvergenceRun]:
        """What the trainings of the other seeds tell of samples to the target."""
        made = JOBS[self.job](seed)
        return [
            ConvergenceRun(size, made.target, one.samples if one.reached else math.nan, other, made.lr_at(size))
            for (size, other), one in self.trained.items()
            if other != seed
        ]

    def time_s(self, world: World, seed: int) -> Floats:
        """Time to the target of every setting; inf where it was not reached."""
        time_s = np.full(len(world.settings), np.inf)
        for size in np.unique(world.settings.batch_size).astype(int).tolist():
            one, same = self.trained[size, seed], world.settings.batch_size == size
            time_s[same] = one.time_s(world)[same] if one.reached else np.inf
        return time_s

    def best(self, world: World) -> int:
        """The setting that fits with the least mean time over the seeds."""
        mean_s = np.mean([self.time_s(world, seed) for seed in range(self.seeds)], axis=0)
        return int(np.argmin(np.where(world.fitting, mean_s, np.inf)))


def published(world: World, fixed: Fixed, seed: int) -> tuple[int, float]:
    """The setting that the published method chooses, and the time that measuring its table took."""
    device = VirtualJetson(VirtualBoard(BOARDS[world.device], seed=seed))
    workload = SimulatedWorkload(WorkloadInfo(fixed.job, fixed.job), world.cost, device)
    rows, found, begun_s = np.flatnonzero(by_clock_alone(world.settings)), [], device.clock.now_s()
    with Session(device) as session:
        settling = Settling()
        for row in rows.tolist():
            setting = world.settings[row]
            with contextlib.suppress(OutOfMemoryError):
                found.append((row, measure(session, workload.start(setting.batch_size), setting, None, settling)))
        profiling_s = device.clock.now_s() - begun_s
    logs = dict(zip(SIZES, fit_convergence(fixed.known_to(seed)).predict(SIZES)[0], strict=True))
    fitting = [
        (m.step_s / m.setting.batch_size * math.exp(logs[m.setting.batch_size]), row)
        for row, m in found
        if m.usable and m.power_w <= world.budget_w
    ]
    return min(fitting)[1], profiling_s


def fixed_rows(world: World, fixed: Fixed, methods: Sequence[str]) -> list[dict[str, Any]]:
    table = Table(world.settings, world.step_s, world.step_s / world.settings.batch_size, world.power_w)
    rows = []
    for method in methods:
        for seed in range(fixed.seeds):
            extra_s, row = 0.0, fixed.best(world)
            if method == "baseline":
                found = largest_batch(table, world.budget_w)
                assert found is not None, "budgets lie within what the largest batch draws"
                row = found
            elif method == "published":
                row, extra_s = published(world, fixed, seed)
            one = fixed.trained[int(world.settings.batch_size[row]), seed]
            rows.append(row_of(fixed.job, world, seed, method, float(one.time_s(world)[row]) + extra_s, one.reached))
    return rows


# Runs


def train_run(
    name: str, where: str, method: str, seed: int, known: list[ConvergenceRun]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One training by a method; its row, and what else there is to say of it."""
    torch.set_num_threads(1)
    world, job, began_s = world_of(name, where), JOBS[name](seed), time.process_time()
    device = LargerNetwork(VirtualBoard(BOARDS[where], seed=seed), count_cost(job), world.cost)
    joules, begun_s, sizes = Joules(device), device.clock.now_s(), []
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.db") as store:
        if method == "warm":
            store.add_convergence(job_info(job), known)
        how = RunOptions(
            budget=world.budget_w, device=device, store=store, folder=Path(folder) / "run", limit_samples=LIMIT
        )

        def watch(pilot: Any) -> None:
            if not sizes or sizes[-1][1] != pilot.batch_size:
                sizes.append((pilot.samples, pilot.batch_size))

        if method == "samples":
            live = LiveBudget.from_now(how.whole_budget(), simulated=True)
            result = run_job(Run(how, device, live, Path(folder) / "run", store, SIZES, None, watch=watch), job)
        else:
            result = api.run(job, how, listener=lambda _event: None, watch=watch)
        verdict = result.verdict
    time_s = device.clock.now_s() - begun_s
    judged = joules.under(Schedule.constant(world.budget_w))
    more = {
        "samples": result.samples,
        "sizes": sizes,
        "mean_over": judged.energy_j() / time_s / world.budget_w - 1,
        "over_pct": 100 * judged.time_over_s() / time_s,
        "verdict": verdict.judgement.value,
        "cpu_s": time.process_time() - began_s,
    }
    return row_of(name, world, seed, method, time_s, result.outcome == "reached"), more


def row_of(job: str, world: World, seed: int, method: str, time_s: float, reached: bool) -> dict[str, Any]:
    return {
        "job": job,
        "device": world.device,
        "budget_w": world.budget_w,
        "seed": seed,
        "method": method,
        "time_s": time_s,
        "reached": reached,
    }


COLUMNS = (
    Column("job"),
    Column("device"),
    Column("budget_w", "budget W", ".2f"),
    Column("seed"),
    Column("method"),
    Column("time_s", "time s", ".0f"),
    Column("reached"),
)


def all_rows(
    names: Sequence[str], devices: Sequence[str], methods: Sequence[str], seeds: int, workers: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every row, told as it comes; and what else the runs showed."""
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        # The smallest batches take longest, and come first.
        asked = {(n, b, s): pool.submit(train_fixed, n, b, s) for n in names for b in SIZES for s in range(seeds)}
        fixed = {
            n: Fixed(n, seeds, {(b, s): asked[n, b, s].result() for b in SIZES for s in range(seeds)}) for n in names
        }
        under_way = [
            pool.submit(train_run, name, device, method, seed, fixed[name].known_to(seed))
            for name in names
            for device in devices
            for method in methods
            if method in ("cold", "warm", "samples")
            for seed in range(seeds)
        ]
        for name in names:
            for device in devices:
                found = fixed_rows(world_of(name, device), fixed[name], [m for m in METHODS[3:] if m in methods])
                rows += found
                for row in found:
                    told(row, COLUMNS)
        for done in as_completed(under_way):
            row, more = done.result()
            rows.append(row)
            runs.append(row | more)
            told(runs[-1], (*COLUMNS, *MORE))
    order = [(n, d, m, s) for n in names for d in devices for m in METHODS for s in range(seeds)]
    at = {(row["job"], row["device"], row["method"], row["seed"]): row for row in rows}
    return [at[key] for key in order if key in at], runs


MORE = (
    Column("samples"),
    Column("sizes"),
    Column("mean_over", "mean over the budget", "+.2%"),
    Column("over_pct", "time over %", ".2f"),
    Column("verdict"),
    Column("cpu_s", "cpu s", ".0f"),
)


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean times over seeds by job and device, as multiples of the best fixed setting's."""
    cells: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        cell = cells.setdefault((row["job"], row["device"], row["method"]), [])
        cell.append(row["time_s"] if row["reached"] else math.inf)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (job, device, method), times_s in cells.items():
        best_s = cells.get((job, device, "best-fixed"))
        row = found.setdefault((job, device), {"job": job, "device": device})
        row[method] = statistics.mean(times_s)
        if best_s and method != "best-fixed":
            row[method] /= statistics.mean(best_s)
            apart = [(one - other) / statistics.mean(best_s) for one, other in zip(times_s, best_s, strict=True)]
            if len(apart) > 1 and all(map(math.isfinite, apart)):  # seed by seed: both trained from the same start
                row[f"{method} se"] = statistics.stdev(apart) / math.sqrt(len(apart))
    return list(found.values())


def report(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    compared = compare(rows)
    others = [method for method in METHODS if method in methods and method != "best-fixed"]
    columns = [Column("job"), Column("device"), Column("best-fixed", "best fixed s", ".0f")]
    for method in others:
        columns += [Column(method, form=".3f"), Column(f"{method} se", "± se", ".3f")]
    print("Mean time over seeds; of the methods as a multiple of the best fixed setting's, with its standard error")
    print(as_table(compared, columns))
    for method in others:
        ratios = [row[method] for row in compared]
        print(
            f"{method}: geometric mean {math.exp(statistics.mean(map(math.log, ratios))):.3f}, worst {max(ratios):.3f}"
        )
    over = [run for run in runs if run["mean_over"] > 0 or run["verdict"] == "not held"]
    worst = max((run["mean_over"] for run in runs), default=math.nan)
    print(f"over budget: {len(over)} of {len(runs)} runs; true mean power at worst {worst:+.2%} of the budget")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--devices", default=",".join(DEEPER))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="trainings at once, one a core")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    if arguments.seeds < 2 and {"warm", "published"} & set(methods):
        parser.error("warm and published know the trainings of the other seeds: two at least are needed")
    names, devices = arguments.jobs.split(","), arguments.devices.split(",")
    rows, runs = all_rows(names, devices, methods, arguments.seeds, arguments.workers)
    report(rows, runs, methods)
    write("cold", rows, arguments)


if __name__ == "__main__":
    main()
