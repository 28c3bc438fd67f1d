"""The same training three ways on a virtual Jetson Nano at a tight budget, profiling counted.

    python benchmarks/tune.py --json OUT [--seeds N] [--cpuidle off]

Simulated: the board. Real: the controller and planner, ResNet18's counted cost, samples to target by batch size from
trainings on a real GPU (known through the proxy's runs, judged by the target's own).

underwatt   searches while it trains, with an empty store; its computing time is added
baseline    the largest batch, the GPU clock as high as the budget allows, all else at its highest: given for free
published   every GPU clock at every batch size measured first (its table), then the best of the table

Of the two others only the time by the board's truth is counted, at the temperature of the table's truth, and for
``published`` the time that measuring its table takes on the board. The training is as long as an oracle needs
``--minutes`` for. With ``--cpuidle off`` idle cores stay awake, as ``jetson_clocks`` has it: pauses then save less.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, told, write
from edge import RECORD, World, convergence, costs, make_world
from underwatt.budget import Budget
from underwatt.control.controller import Controller
from underwatt.control.live_budget import LiveBudget
from underwatt.convergence.curve import fit_convergence
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.physics import Clocks, step_power, step_times
from underwatt.errors import OutOfMemoryError
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.measurement import measure
from underwatt.measure.meter import Meter, measure_idle
from underwatt.measure.steady import Settling
from underwatt.planning.problem import Problem
from underwatt.records import WorkloadInfo
from underwatt.rivals.compare import Table, by_clock_alone, largest_batch

BOARD, MODEL = "nano", "resnet18"
KNOBS = ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")


def truth_table(world: World) -> Table:
    return Table(world.settings, world.time_s, world.time_s, world.power_w)


def board(seed: int, cpuidle: str) -> VirtualJetson:
    device = open_device(f"virtual:{BOARD}?seed={seed}&cpuidle={cpuidle}")
    assert isinstance(device, VirtualJetson)
    return device


def world_of(cpuidle: str) -> World:
    """The network on the board, whose idle cores sleep or do not."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    world = make_world(BOARD, MODEL, costs()[MODEL], convergence(record, MODEL, "target"))
    if cpuidle == "on":
        return world
    physics, columns = board(0, cpuidle).board.spec.physics, map(world.settings.column, KNOBS)
    clocks = Clocks(*columns)
    times = step_times(physics.step_constants(world.cost), clocks, world.settings.batch_size)
    return replace(world, power_w=step_power(physics.power, clocks, times, cpuidle=False).total_w)


def tuned_s(world: World, device: VirtualJetson, budget_w: float, scale: float, curve: Any) -> tuple[float, int]:
    """Time to the target with the search inside, computing time included, and how many settings were measured."""
    measured = []
    with Session(device) as session:
        idle_w = measure_idle(device)
        begun_s, share, thought_s = device.clock.now_s(), 0.0, 0.0
        with Meter(device) as meter:
            budget = Budget(power_w=budget_w)
            problem = Problem.of(world.settings, budget, curve, idle_w=idle_w)
            controller = Controller(
                session, meter, problem, LiveBudget(budget), tell=lambda event: measured.append(event.kind)
            )
            controller.begin()
            while share < 1:
                assert controller.setting is not None
                size = controller.setting.batch_size
                device.board.run_step(world.cost, size)
                meter.beat()
                share += size / world.target_samples[size] / scale
                controller.progressed(share)
                began = time.process_time()
                controller.after_step(size)
                thought_s += time.process_time() - began
        return device.clock.now_s() - begun_s + thought_s, measured.count("measured")


def published(world: World, device: VirtualJetson, budget_w: float, curve: Any) -> tuple[float, float, int]:
    """Time to the target and time to measure the whole table first; how many settings that are."""
    workload = SimulatedWorkload(WorkloadInfo(MODEL, MODEL), world.cost, device)
    rows = np.flatnonzero(by_clock_alone(world.settings))
    found = []
    with Session(device) as session:
        begun_s, settling = device.clock.now_s(), Settling()
        for row in rows:
            setting = world.settings[int(row)]
            try:
                found.append((int(row), measure(session, workload.start(setting.batch_size), setting, None, settling)))
            except OutOfMemoryError:
                continue
        profiling_s = device.clock.now_s() - begun_s
    logs = dict(zip(world.target_samples, curve.predict(list(world.target_samples))[0], strict=True))
    fitting = [
        (m.step_s / m.setting.batch_size * math.exp(logs[m.setting.batch_size]), row)
        for row, m in found
        if m.usable and m.power_w <= budget_w
    ]
    return float(world.time_s[min(fitting)[1]]), profiling_s, len(found)


COLUMNS = (
    Column("budget_w", "budget W", ".2f"),
    Column("seed"),
    Column("oracle_s", "oracle s", ".0f"),
    Column("underwatt_s", "underwatt s", ".0f"),
    Column("measured"),
    Column("baseline_s", "baseline s", ".0f"),
    Column("published_s", "published s", ".0f"),
    Column("published_profiling_s", "its table s", ".0f"),
    Column("faster_than_baseline", "× baseline", ".2f"),
    Column("faster_than_published", "× published", ".2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cpuidle", choices=("on", "off"), default="on", help="whether idle cores sleep")
    arguments = parser.parse_args()
    world = world_of(arguments.cpuidle)
    curve = fit_convergence(convergence(json.loads(RECORD.read_text(encoding="utf-8")), MODEL, "proxy"))
    table = truth_table(world)
    feasible = world.power_w[
        by_clock_alone(world.settings) & (world.settings.batch_size == world.settings.batch_size.max())
    ]
    low_w, high_w = float(feasible.min()), float(feasible.max())
    rows = []
    for share in (0.05, 0.2, 0.5):
        budget_w = round(low_w + share * (high_w - low_w), 2)
        oracle_s = float(world.time_s[world.power_w <= budget_w].min())
        scale = arguments.minutes * 60 / oracle_s
        row = largest_batch(table, budget_w)
        assert row is not None
        baseline_s = float(world.time_s[row]) * scale
        for seed in range(arguments.seeds):
            ours_s, count = tuned_s(world, board(seed, arguments.cpuidle), budget_w, scale, curve)
            choice_s, profiling_s, measured = published(world, board(seed, arguments.cpuidle), budget_w, curve)
            rows.append(
                {
                    "budget_w": budget_w,
                    "seed": seed,
                    "oracle_s": oracle_s * scale,
                    "underwatt_s": ours_s,
                    "measured": count,
                    "baseline_s": baseline_s,
                    "published_s": choice_s * scale,
                    "published_profiling_s": profiling_s,
                    "published_measured": measured,
                    "faster_than_baseline": baseline_s / ours_s,
                    "faster_than_published": (choice_s * scale + profiling_s) / ours_s,
                }
            )
            told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    write("tune", rows, arguments)


if __name__ == "__main__":
    main()
