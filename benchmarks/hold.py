"""Holding a budget on virtual boards, whatever happens: time against an oracle's, the verdict against the truth.

    python benchmarks/hold.py [--boards nano,…] [--cases live,…] [--seeds 0-5] [--jobs 2] [--json OUT] [--keep]

Simulated: the boards. Real: the pilot with its controller, planner, log and inbox, ResNet18's counted cost, and its
samples to target by batch size from trainings on a real GPU (known to the pilot through the proxy's runs, judged by
the target's own). Every run starts with an empty store: what it measures, it measures while it trains.

steps             high, low and high again within the board's range, each for a third of the time an oracle would need
solar             a cloudy day: a half sine over the board's range with dips to a half, another level every 10 s
live              budgets posted to the run as ``underwatt budget`` does: down, far down, close to what waiting draws,
                  up; the fourth is less than what waiting draws at most clocks
live-short        the same with a perceptron, whose steps take milliseconds, so that pauses may hold a budget; its
                  convergence is taken to be ResNet18's
low               the perceptron too, from the start at so few watts that only pauses at low clocks hold them; another
                  number with each seed
live-below        posted too: less than the board draws however it waits, and up again; that cannot be held
peak              three levels of peak watts, which bound every reading
search-disturbed  another process takes a third of the budget for a minute while the first settings are measured, and
                  again while those of a second level are
command, command-job   on a mounted Nano in real time, only where they are named: see ``_hold_command.py``

In steps and solar the room warms up by 15 °C after a third of the time (in peak too), and another process draws 0.8 W
and takes a tenth of the speed for a while.

The number of samples is scaled so that an oracle needs half an hour (in steps and solar, under the mean of the
levels): only the ratios between batch sizes are those of the record. A run that takes three times as long as that is
stopped; its time is then at least the one given.

energy_over_pct   joules drawn above the budget, of all joules: true power and budget, each as a mean over 5 s (five
                  steps with their pauses where those take longer); in peak, of the readings
time_over_pct     share of such means that are more than 2% above the budget; in peak, of readings above it
worst_over_pct    the highest of them
energy_over_1s_pct, time_over_1s_pct   the same with means over 1 s, as this benchmark judged before; steps of a second
                  with pauses between them are above the budget in these. The time does not count the sensor's own lag
                  after a load came or went
longest_over_s    the longest time without a break that a mean over 1 s was more than 2% above it, all counted
was_held          the truth: such means are more than 2% above the budget for at most 1% of the run; in peak, no true
                  reading is above it
can_hold          whether anything could have: not where waiting at the lowest clocks draws too much
said_held         the run's own verdict; null where it said none
readings_over     in peak: true means over 0.1 s that were above the budget
sensor_over       in peak: readings above it as the sensor gave them, with its noise and lag
time_over_oracle  time to the target over that of an oracle that knows the truth of every setting at every moment, the
                  target's convergence, and switches at no cost; the planner's own computing time is added to ours.
                  Null where the budget cannot be held
slowest_level     in live: the least progress at a level, as a share of the oracle's
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _hold_command
from _hold_judge import Drawn, faults, is_held, judge, report, shares_over
from _hold_truth import Truth
from _table import Column, add_output, as_table, told, write
from edge import RECORD, World, convergence, costs, make_world, virtual
from underwatt.budget import Budget, Schedule, Watts
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.convergence.curve import fit_convergence
from underwatt.errors import UnderwattError
from underwatt.events import Started
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job
from underwatt.records import WorkloadInfo
from underwatt.runlog.inbox import Inbox, post_budget
from underwatt.runlog.log import RunLog, read_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.events import Event
    from underwatt.records import WorkloadCost
    from underwatt.runlog.run_record import RunRecord

MODEL, PERCEPTRON = "resnet18", "perceptron"
CASES = ("steps", "solar", "live", "live-short", "live-below", "low", "peak", "search-disturbed")
# Steps draw 4.7 to 14.2, 1.9 to 7.4 and 4.7 to 11.3 W on these boards; three levels within that.
LEVELS_W = {"tx2-nx": (13.0, 7.0, 11.0), "nano": (7.0, 3.5, 5.5), "orin-nano": (11.0, 6.5, 9.0)}
SUN_W = {"tx2-nx": (5.5, 14.0), "nano": (3.0, 7.5), "orin-nano": (5.5, 11.5)}
# Waiting at the lowest clocks of a cool board draws 1.75, 1.0 and 3.5 W, at the clocks found 2.15, 1.35 and 4.0 W.
POSTED_W = {
    "tx2-nx": (9.0, 6.0, 3.5, 2.4, 7.0),
    "nano": (5.5, 3.2, 1.7, 1.3, 4.5),
    "orin-nano": (10.0, 7.0, 4.8, 4.3, 9.0),
}
BELOW_W = {"tx2-nx": (9.0, 1.5, 7.0), "nano": (5.5, 0.8, 4.5), "orin-nano": (10.0, 3.0, 9.0)}
LOW_W = {"tx2-nx": (2.2, 3.5), "nano": (1.25, 1.75), "orin-nano": (4.1, 4.8)}  # least and most
PEAK_W = {"tx2-nx": (11.0, 6.5, 9.0), "nano": (6.0, 3.5, 5.0), "orin-nano": (10.5, 6.5, 8.5)}
DISTURBED_W = {"tx2-nx": (10.0, 8.0), "nano": (4.0, 5.0), "orin-nano": (9.0, 8.0)}
DISTURBING_W = {"tx2-nx": 2.5, "nano": 1.5, "orin-nano": 2.0}
BOARDS = tuple(LEVELS_W)
TICK_S = 0.1
WARMER_C, EXTRA_W, SLOWER = 15.0, 0.8, 1.1
ROOM_C = 25.0
HORIZON_S = 1800.0
LONGEST = 3.0  # times as long as the oracle was to take


@dataclass(frozen=True)
class Case:
    """What is asked of a run, and what happens to its board meanwhile."""

    board: str
    kind: str
    seed: int
    schedule: Schedule  # by elapsed time
    posted: bool = False  # level by level, on the way
    peak: bool = False
    warms: bool = False
    loads_s: tuple[tuple[float, float], ...] = ()  # when another process begins and ends
    extra_w: float = EXTRA_W

    @property
    def name(self) -> str:
        """As its row is called."""
        return f"{self.board} {self.kind} {self.seed}"

    @property
    def network(self) -> str:
        """What is trained."""
        return PERCEPTRON if self.kind in ("live-short", "low") else MODEL

    @property
    def budget(self) -> Budget:
        """As the run is given it when it starts."""
        watts = Watts.PEAK if self.peak else Watts.MEAN
        if self.posted:
            return Budget(power_w=self.schedule.levels_w[0], watts=watts)
        return Budget(schedule=self.schedule, watts=watts)

    def weather(self, at_s: float) -> tuple[float, float, float]:
        """Watts of another process, how much it slows the training, and the room's temperature."""
        warmer = min(1.0, max(0.0, (at_s / HORIZON_S - 1 / 3) * 6)) if self.warms else 0.0
        busy = any(begin_s <= at_s < end_s for begin_s, end_s in self.loads_s)
        return (self.extra_w if busy else 0.0, SLOWER if busy else 1.0, ROOM_C + WARMER_C * warmer)


def make_case(board: str, kind: str, seed: int) -> Case:
    case = functools.partial(Case, board, kind, seed)
    if kind in ("steps", "solar"):
        loads_s = tuple((HORIZON_S * begin, HORIZON_S * end) for begin, end in ((0.45, 0.6), (0.8, 0.85)))
        schedule = solar(board, seed) if kind == "solar" else at_shares(LEVELS_W[board], (0, 1 / 3, 2 / 3))
        return case(schedule, warms=True, loads_s=loads_s)
    if kind in ("live", "live-short"):
        return case(at_shares(POSTED_W[board], (0, 0.2, 0.4, 0.6, 0.8)), posted=True)
    if kind == "live-below":
        return case(at_shares(BELOW_W[board], (0, 0.3, 0.5)), posted=True)
    if kind == "low":
        return case(at_shares([round(float(np.random.default_rng(seed).uniform(*LOW_W[board])), 2)], (0,)))
    if kind == "peak":
        return case(at_shares(PEAK_W[board], (0, 1 / 3, 2 / 3)), peak=True, warms=True)
    assert kind == "search-disturbed"
    late_s = float(np.random.default_rng(seed).uniform(2.0, 12.0))
    loads_s = tuple((begin_s + late_s, begin_s + late_s + 60.0) for begin_s in (0.0, HORIZON_S / 2))
    return case(at_shares(DISTURBED_W[board], (0, 0.5)), loads_s=loads_s, extra_w=DISTURBING_W[board])


def at_shares(levels_w: Sequence[float], shares: Sequence[float]) -> Schedule:
    return Schedule.of([(HORIZON_S * share, watts) for share, watts in zip(shares, levels_w, strict=True)])


def solar(board: str, seed: int) -> Schedule:
    random = np.random.default_rng(seed)
    at_s = np.arange(0.0, 3 * HORIZON_S, 10.0)
    low_w, high_w = SUN_W[board]
    sun = low_w + (high_w - low_w) * np.sin(np.pi * np.clip(at_s / (1.3 * HORIZON_S), 0, 1))
    cloud, clouds = 1.0, []
    for _ in at_s:
        cloud = float(np.clip(cloud + random.normal(0, 0.12) + 0.1 * (0.9 - cloud), 0.5, 1.0))
        clouds.append(cloud)
    watts = np.maximum(low_w, sun * np.array(clouds)).round(2)
    return Schedule.of(zip(at_s.tolist(), watts.tolist(), strict=True))


@functools.cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@functools.cache
def cost_of(network: str) -> WorkloadCost:
    if network == MODEL:
        return costs()[MODEL]
    data = torch.zeros(8, 784), torch.zeros(8, dtype=torch.long)
    return count_cost(Job(lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), data, target=1.0))


@functools.cache
def world_of(board: str, network: str) -> World:
    return make_world(board, network, cost_of(network), convergence(record(), MODEL, "target"))


@functools.cache
def truth_of(board: str, network: str, peak: bool) -> Truth:
    return Truth(world_of(board, network), virtual(board, 0).board, peak=peak)


class Run:
    """One case, trained to its end by a pilot on a simulated board, with everything that is true of it noted."""

    def __init__(self, case: Case, folder: Path, *, verbose: bool = False) -> None:
        self.case, self._folder, self._verbose = case, folder, verbose
        self.world, self.truth = world_of(case.board, case.network), truth_of(case.board, case.network, case.peak)
        self.scale = self._scale()  # so many times the samples of the record
        self._device = virtual(case.board, case.seed)
        self._ticks: list[tuple[float, float, float, float, float]] = []
        self._step_ends_s: list[float] = []
        self._to_post = list(zip(case.schedule.begins_s, case.schedule.levels_w, strict=True))[1:] * case.posted
        self._begun_s = math.nan
        self.share = self.planning_s = self.took_s = self.paused_pct = 0.0
        self.error: str | None = None

    def _scale(self) -> float:
        case, truth = self.case, self.truth
        if case.kind in ("steps", "solar"):
            return HORIZON_S * truth.rate(statistics.mean(LEVELS_W[case.board]), 40.0, 0.0, 1.0)
        at_s = np.arange(0.0, HORIZON_S, TICK_S)
        warm_c = 15.0  # what the training adds to the room's temperature, about
        rates = (
            truth.rate(case.schedule.power_w(t), room_c + warm_c, extra_w, slower)
            for t in at_s
            for extra_w, slower, room_c in [case.weather(t)]
        )
        return TICK_S * sum(rates)

    def train(self) -> None:
        """To the target, or until it takes far too long, or fails."""
        proxy = [replace(run, samples=run.samples * self.scale) for run in convergence(record(), MODEL, "proxy")]
        with RunLog(self._folder / "log.jsonl") as log, contextlib.ExitStack() as stack:
            pilot = Pilot(
                self._device,
                WorkloadInfo(self.case.network, self.case.network),
                [int(size) for size in np.unique(self.world.settings.batch_size)],
                LiveBudget(self.case.budget),
                convergence=fit_convergence(proxy),
                cost=self.world.cost,
                log=log,
                inbox=Inbox(self._folder),
                listener=self._heard,
            )
            try:
                with self._planning():
                    stack.enter_context(pilot)
                self._train(pilot)
                self.paused_pct = 100 * pilot.controller.pause_share
            except UnderwattError as exc:
                self.error = str(exc)
            self.took_s = self._elapsed_s()

    def _train(self, pilot: Pilot) -> None:
        samples = self.world.target_samples
        while self.share < 1 and self._elapsed_s() < LONGEST * HORIZON_S:
            size = pilot.batch_size
            pilot.simulate(size)
            self._step_ends_s.append(self._elapsed_s())
            self.share += size / samples[size] / self.scale
            with self._planning():
                pilot.stepped(size)

    @contextlib.contextmanager
    def _planning(self) -> Any:
        began_s = time.process_time()
        yield
        self.planning_s += time.process_time() - began_s

    def _elapsed_s(self) -> float:
        return self._device.clock.now_s() - self._begun_s

    def _heard(self, event: Event) -> None:
        if isinstance(event, Started):
            self._begun_s = self._device.clock.now_s() - event.at_s
            self._device.clock.every(TICK_S, self._tick)
        if self._verbose:
            print(f"{self._elapsed_s():8.1f} {event}")

    def _tick(self) -> None:
        at_s, board = self._elapsed_s(), self._device.board
        extra_w, slower, room_c = self.case.weather(at_s)
        board.disturb(extra_w=extra_w, slow_factor=slower, ambient_c=room_c)
        self._ticks.append((at_s, board.energy_j, board.temperature_c, self.share, self._device.read_power().power_w))
        while self._to_post and at_s >= self._to_post[0][0] - TICK_S / 2:
            post_budget(self._folder, f"{self._to_post.pop(0)[1]:g}W", "command")

    # What came of it

    def row(self) -> dict[str, Any]:
        """The figures of the run."""
        case = self.case
        found: dict[str, Any] = {"case": case.name, "board": case.board, "kind": case.kind, "seed": case.seed}
        if len(self._ticks) < 2 * round(1 / TICK_S):  # refused at the start
            return found | _nothing() | {"error": self.error, "can_hold": self._can_hold(np.arange(0, 60, TICK_S))}
        at_s, energy_j, temperature_c, share, read_w = np.array(self._ticks).T
        drawn = Drawn(at_s, energy_j, np.array(self._step_ends_s))
        sensor = self._device.board.spec.sensor
        came_s = [moment for load in case.loads_s for moment in load]
        figures = judge(drawn, self._budget_w(drawn), came_s, sensor.window_s + 3 * sensor.lag_s, peak=case.peak)
        can_hold, said = self._can_hold(at_s), read_log(self._folder / "log.jsonl")
        oracle = self._oracle(temperature_c)
        oracle_s = TICK_S * len(oracle)
        kinds = [event.kind for event in said.events]
        return found | {
            **figures,
            "sensor_over": int((read_w[1:] > self._budget_w(drawn)).sum()) if case.peak else None,
            "can_hold": can_hold,
            "said_held": _said_held(said),
            "time_over_oracle": (self.took_s + self.planning_s) / oracle_s if can_hold and not self.error else None,
            "slowest_level": self._slowest_level(at_s, share, oracle) if case.posted else None,
            "took_s": self.took_s,
            "oracle_s": oracle_s,
            "planning_s": self.planning_s,
            "measured": kinds.count("measured"),
            "changes": kinds.count("setting"),
            "paused_pct": self.paused_pct,
            "error": self.error,
        }

    def _budget_w(self, drawn: Drawn) -> Any:
        return np.array([self.case.schedule.power_w(t) for t in drawn.middle_s])

    def _can_hold(self, at_s: Any) -> bool:
        extra_w, _, room_c = np.array([self.case.weather(t) for t in at_s]).T
        least_w = self.truth.least_w(extra_w, room_c, TICK_S)
        waited = Drawn(at_s, np.cumsum(least_w) * TICK_S, np.empty(0))
        return is_held(shares_over(waited, self._budget_w(waited), peak=self.case.peak), peak=self.case.peak)

    def _oracle(self, temperature_c: Any) -> list[float]:
        """Share of the training that the oracle has done, tick by tick, to its end; as warm as the board was."""
        done, found = 0.0, list[float]()
        while done < 1:
            at, t = min(len(found), len(temperature_c) - 1), len(found) * TICK_S
            extra_w, slower, _ = self.case.weather(t)
            rate = self.truth.rate(self.case.schedule.power_w(t), float(temperature_c[at]), extra_w, slower)
            done += TICK_S * rate / self.scale
            found.append(done)
        return found

    def _slowest_level(self, at_s: Any, share: Any, oracle: list[float]) -> float | None:
        """Progress at the level where it fell furthest behind the oracle's; levels in which both trained."""
        end_s = min(at_s[-1], TICK_S * len(oracle))
        oracle_s = TICK_S * np.arange(len(oracle))
        found = []
        for begin_s, until_s, _ in self.case.schedule.pieces(0.0, end_s):
            best = np.diff(np.interp([begin_s, until_s], oracle_s, oracle))[0]
            if best > 0:
                found.append(float(np.diff(np.interp([begin_s, until_s], at_s, share))[0] / best))
        return min(found, default=None)


def _said_held(record: RunRecord) -> bool | None:
    """The run's own verdict: whether the budget was held; ``None`` where it says nothing."""
    return record.end.verdict.held if record.end and record.end.verdict else None


def _nothing() -> dict[str, Any]:
    """The figures of a run that was refused before it began."""
    zeros = ("energy_over_pct", "time_over_pct", "energy_over_1s_pct", "time_over_1s_pct")
    zeros += ("longest_over_s", "worst_over_pct", "took_s")
    return (
        dict.fromkeys(zeros, 0.0)
        | {"was_held": True, "said_held": None, "readings_over": None, "sensor_over": None}
        | {"time_over_oracle": None}
    )


def one(board: str, kind: str, seed: int, verbose: bool = False) -> dict[str, Any]:
    if kind in _hold_command.CASES:
        return _hold_command.run_case(kind, seed)
    with tempfile.TemporaryDirectory(prefix="hold-") as folder:
        run = Run(make_case(board, kind, seed), Path(folder), verbose=verbose)
        run.train()
        return run.row()


COLUMNS = (
    Column("case"),
    Column("can_hold", "can"),
    Column("was_held", "was"),
    Column("said_held", "said"),
    Column("energy_over_pct", "energy over %", ".2f"),
    Column("time_over_pct", "time over %", ".2f"),
    Column("energy_over_1s_pct", "1 s: energy %", ".2f"),
    Column("time_over_1s_pct", "1 s: time %", ".2f"),
    Column("longest_over_s", "longest s", ".1f"),
    Column("worst_over_pct", "worst %", ".1f"),
    Column("readings_over", "readings"),
    Column("sensor_over", "sensor"),
    Column("time_over_oracle", "time / oracle", ".3f"),
    Column("slowest_level", "slowest", ".2f"),
    Column("took_s", "took s", ".0f"),
    Column("planning_s", "planning s", ".1f"),
    Column("measured"),
    Column("changes"),
    Column("paused_pct", "paused %", ".1f"),
    Column("faults"),
)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--boards", type=_choice(BOARDS), default=BOARDS, help=f"of {', '.join(BOARDS)}; all")
    parser.add_argument(
        "--cases", type=_choice((*CASES, *_hold_command.CASES)), default=CASES, help=f"of {', '.join(CASES)}; all"
    )
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0-5"), help="such as 0-5, the default, or 3,4")
    parser.add_argument("--jobs", type=int, default=2, help="so many runs at a time")
    parser.add_argument("--verbose", action="store_true", help="tell every event of a run")
    options = parser.parse_args(given)
    if set(options.cases) & set(_hold_command.CASES) and (why := _hold_command.why_not()):
        parser.error(f"the cases of commands cannot be run: {why}")
    todo = [(b, c, s, options.verbose) for b in options.boards for c in options.cases for s in options.seeds]
    rows = []
    with contextlib.ExitStack() as stack:
        if options.jobs > 1 and len(todo) > 1:
            os.environ["OMP_NUM_THREADS"] = "1"
            pool = stack.enter_context(ProcessPoolExecutor(min(options.jobs, len(todo))))
            found = pool.map(one, *zip(*todo, strict=True))
        else:
            found = map(one, *zip(*todo, strict=True))
        for row in found:
            row["faults"] = ", ".join(faults(row))
            rows.append(row)
            told(row, COLUMNS)
    print(as_table(rows, COLUMNS))
    print(f"\n{report(rows)}")
    write("hold", rows, options)
    return 0


def _choice(known: Sequence[str]) -> Any:
    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return chosen


def _seeds(text: str) -> tuple[int, ...]:
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no seeds: write for instance 0-5 or 3,4") from None
    return tuple(seed for begin, *end in ends for seed in range(begin, (end or [begin])[0] + 1))


if __name__ == "__main__":
    sys.exit(main())
