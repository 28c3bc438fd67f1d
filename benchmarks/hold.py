"""Holding a budget that changes, on virtual boards, with heat and a disturbing load; training time against an oracle.

    python benchmarks/hold.py --json OUT [--cases a,b] [--seeds N] [--first-seed N]

Simulated: the boards. Real: the controller, the planner, ResNet18's counted cost, and its samples to target by batch
size from trainings on a real GPU (known to the controller through the proxy's runs, judged by the target's own).

Every run starts with an empty store: what it measures, it measures while it trains. In each, the room warms up by
15 °C after a third of the time, and another process draws 0.8 W and takes a tenth of the speed for a while.

steps   15 W, 7 W and 12 W, each for a third of the time an oracle would need; on boards of another range, the same
        shape within it
solar   a cloudy day: a half sine over the board's range with dips to a half, another level every 10 s

The number of samples is scaled so that an oracle under the mean of the levels needs half an hour: only the ratios
between batch sizes are those of the record.

energy_over_pct   joules drawn above the budget, of all joules: true power and budget, each as a mean over 1 s
time_over_pct     share of the time more than 2% above it, not counting the sensor's own lag after a load came or went
time_over_oracle  time to the target over that of an oracle that knows the truth of every setting at every moment, the
                  target's convergence, and switches at no cost; the planner's own computing time is added to ours
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, told, write
from edge import RECORD, World, convergence, costs, make_world, virtual
from underwatt.budget import Budget, Schedule
from underwatt.control.controller import Controller
from underwatt.control.live_budget import LiveBudget
from underwatt.convergence.curve import fit_convergence
from underwatt.device.session import Session
from underwatt.measure.meter import Meter, measure_idle
from underwatt.planning.problem import Problem, can_pause

if TYPE_CHECKING:
    from underwatt.events import Event

MODEL = "resnet18"
# 15, 7 and 12 W where the board's range allows them; the same shape within the range of the others.
LEVELS_W = {"tx2-nx": (15.0, 7.0, 12.0), "nano": (7.0, 3.5, 5.5), "orin-nano": (18.0, 10.0, 15.0)}
SUN_W = {"tx2-nx": (5.0, 15.0), "nano": (3.0, 8.0), "orin-nano": (9.5, 20.0)}
BOARDS = tuple(LEVELS_W)
GRID_W = 0.02  # of the watts at which the oracle's rate is tabled
SCHEDULES = ("steps", "solar")
TICK_S, WINDOW_S, TOLERANCE = 0.1, 1.0, 0.02
WARMER_C, EXTRA_W, SLOWER = 15.0, 0.8, 1.1
ROOM_C = 25.0
MINUTES = 30.0


@dataclass
class Weather:
    """What happens to the board, by shares of the time that the oracle would need undisturbed."""

    horizon_s: float
    lag_s: float
    changes_s: list[float] = field(default_factory=list)

    def at(self, at_s: float) -> tuple[float, float, float]:
        """Watts of another process, how much it slows the training, and the room's temperature."""
        share = at_s / self.horizon_s
        busy = 0.45 <= share < 0.6 or 0.8 <= share < 0.85
        room_c = ROOM_C + WARMER_C * min(1.0, max(0.0, (share - 1 / 3) * 6))
        return (EXTRA_W, SLOWER, room_c) if busy else (0.0, 1.0, room_c)


def schedule_of(board: str, kind: str, horizon_s: float, seed: int) -> Schedule:
    if kind == "steps":
        high_w, low_w, middle_w = LEVELS_W[board]
        return Schedule.of([(0.0, high_w), (horizon_s / 3, low_w), (2 * horizon_s / 3, middle_w)])
    random = np.random.default_rng(seed)
    at_s = np.arange(0.0, 3 * horizon_s, 10.0)
    low_w, high_w = SUN_W[board]
    sun = low_w + (high_w - low_w) * np.sin(np.pi * np.clip(at_s / (1.3 * horizon_s), 0, 1))
    cloud, clouds = 1.0, []
    for _ in at_s:
        cloud = float(np.clip(cloud + random.normal(0, 0.12) + 0.1 * (0.9 - cloud), 0.5, 1.0))
        clouds.append(cloud)
    watts = np.maximum(low_w, sun * np.array(clouds)).round(2)
    return Schedule.of(zip(at_s.tolist(), watts.tolist(), strict=True))


class Truth:
    """Fastest true progress at every budget, temperature and load."""

    def __init__(self, world: World, board: Any) -> None:
        self._world, self._board = world, board
        settings = world.settings
        base = board.true_power_w
        cold = world.power_w
        # Static power grows with temperature, alike for all settings: one setting tells the slope.
        setting = settings[0]
        at = [base(world.cost, setting.mode, setting.batch_size, temperature_c=c) for c in (25.0, 75.0)]
        self._slope = (at[1] - at[0]) / 50
        self._reference_w = base(world.cost, setting.mode, setting.batch_size)
        self._cold_c = 25.0 + (self._reference_w - at[0]) / self._slope
        order = np.argsort(cold)
        self._power_w = cold[order]
        # It may pause too, at the clocks of the setting, where its steps are short enough to keep the mean steady.
        resting = virtual(board.spec.name, 0)
        idle_w = {mode: _idle_w(resting, mode) for mode in dict.fromkeys(setting.mode for setting in settings)}
        waits_w = np.array([idle_w[settings[int(row)].mode] for row in order])
        self._grid_w = np.arange(waits_w.min(), self._power_w[-1] + GRID_W, GRID_W)
        rates = 1 / world.time_s[order]
        samples = np.array([world.target_samples[int(size)] for size in settings.batch_size[order]])
        step_s = world.time_s[order] / samples * settings.batch_size[order]

        def fastest(left_w: float) -> float:
            share = np.clip((left_w - waits_w) / (self._power_w - waits_w), 0.0, 1.0)
            return float((rates * share * can_pause(self._power_w, step_s, Budget(power_w=left_w))).max())

        self._rate = np.array([fastest(float(left_w)) for left_w in self._grid_w])

    def rate(self, budget_w: float, temperature_c: float, extra_w: float, slower: float) -> float:
        """Share of the training a second, at best."""
        left_w = budget_w - extra_w - self._slope * (temperature_c - self._cold_c)
        return float(np.interp(left_w, self._grid_w, self._rate, left=0.0)) / slower


def _idle_w(device: Any, mode: Any) -> float:
    device.apply(mode)
    return float(device.board.power_w)


def one(board: str, kind: str, seed: int, world: World, record: dict[str, Any], verbose: bool) -> dict[str, Any]:
    device = virtual(board, seed)
    truth = Truth(world, device.board)
    horizon_s = MINUTES * 60.0
    scale = horizon_s * truth.rate(statistics.mean(LEVELS_W[board]), 40.0, 0.0, 1.0)  # so many times the samples
    sensor = device.board.spec.sensor
    weather = Weather(horizon_s, sensor.window_s + 3 * sensor.lag_s)
    schedule = schedule_of(board, kind, horizon_s, seed)
    curve = fit_convergence(convergence(record, MODEL, "proxy"))
    budget = Budget(power_w=schedule.power_w(0.0))
    ticks: list[tuple[float, float, float]] = []
    thought_s, share, oracle_share, oracle_s = 0.0, 0.0, 0.0, math.nan
    with Session(device) as session:
        idle_w = measure_idle(device)
        begun_s = device.clock.now_s()
        meter = Meter(device)
        with meter:

            def tick() -> None:
                at_s = device.clock.now_s() - begun_s
                extra_w, slower, room_c = weather.at(at_s)
                device.board.disturb(extra_w=extra_w, slow_factor=slower, ambient_c=room_c)
                ticks.append((at_s, device.board.energy_j, device.board.temperature_c))

            timer = device.clock.every(TICK_S, tick)
            problem = Problem.of(world.settings, budget, curve, idle_w=idle_w)
            live = LiveBudget(Budget(schedule=schedule))
            events: list[str] = []

            def tell(event: Event) -> None:
                events.append(event.kind)
                if verbose:
                    print(f"{device.clock.now_s() - begun_s:8.1f} {event}")

            controller = Controller(session, meter, problem, live, begun_s=begun_s, tell=tell)
            wall = time.process_time()
            controller.begin()
            thought_s += time.process_time() - wall
            while share < 1:
                setting = controller.setting
                device.board.run_step(world.cost, setting.batch_size)
                meter.beat()
                share += setting.batch_size / world.target_samples[setting.batch_size] / scale
                controller.progressed(share)
                wall = time.process_time()
                controller.after_step(setting.batch_size)
                thought_s += time.process_time() - wall
            timer.cancel()
        took_s = device.clock.now_s() - begun_s
    at_s, energy_j, temperature_c = np.array(ticks).T
    i = 0
    while oracle_share < 1:
        t = i * TICK_S
        temp = temperature_c[min(i, len(temperature_c) - 1)]
        extra_w, slower, _ = weather.at(t)
        oracle_share += TICK_S * truth.rate(schedule.power_w(t), float(temp), extra_w, slower) / scale
        i += 1
    oracle_s = i * TICK_S
    figures = judge(at_s, energy_j, schedule, weather)
    return {
        "case": f"{board} {kind} {seed}",
        **figures,
        "time_over_oracle": (took_s + thought_s) / oracle_s,
        "took_s": took_s,
        "oracle_s": oracle_s,
        "planning_s": thought_s,
        "measured": events.count("measured"),
        "changes": events.count("setting"),
        "paused_pct": 100 * controller.pause_share,
    }


def judge(at_s: Any, energy_j: Any, schedule: Schedule, weather: Weather) -> dict[str, float]:
    power_w = np.diff(energy_j) / np.diff(at_s)
    middle_s = (at_s[1:] + at_s[:-1]) / 2
    budget_w = np.array([schedule.power_w(t) for t in middle_s])
    window = round(WINDOW_S / TICK_S)
    kernel = np.ones(window) / window
    drawn_w, allowed_w = np.convolve(power_w, kernel, "valid"), np.convolve(budget_w, kernel, "valid")
    over_w = drawn_w - allowed_w
    total_j = energy_j[-1] - energy_j[0]
    loads = [weather.at(t)[0] for t in middle_s]
    came_s = middle_s[1:][np.diff(loads) != 0]
    end_s = middle_s[window - 1 :]
    excused = np.zeros(len(end_s), dtype=bool)
    for moment in came_s:
        excused |= (end_s >= moment) & (end_s < moment + weather.lag_s)
    clear = (over_w > TOLERANCE * allowed_w) & ~excused
    return {
        "energy_over_pct": 100 * float(np.maximum(over_w, 0).sum() * TICK_S / total_j),
        "time_over_pct": 100 * float(clear.mean()),
    }


COLUMNS = (
    Column("case"),
    Column("energy_over_pct", "energy over %", ".2f"),
    Column("time_over_pct", "time over %", ".2f"),
    Column("time_over_oracle", "time / oracle", ".3f"),
    Column("took_s", "took s", ".0f"),
    Column("planning_s", "planning s", ".1f"),
    Column("measured"),
    Column("changes"),
    Column("paused_pct", "paused %", ".1f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    parser.add_argument("--cases", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    cost = costs()[MODEL]
    rows = []
    for board in BOARDS:
        world = make_world(board, MODEL, cost, convergence(record, MODEL, "target"))
        for kind in SCHEDULES:
            if arguments.cases and f"{board}:{kind}" not in arguments.cases.split(","):
                continue
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                rows.append(one(board, kind, seed, world, record, arguments.verbose))
                told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    write("hold", rows, arguments)


if __name__ == "__main__":
    main()
