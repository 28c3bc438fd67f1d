"""Virtual boards that can be hurt, and a controller on one of them, for tests of the run core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underwatt.adapters.tuner import Tuner, tune
from underwatt.budget import Budget
from underwatt.control.controller import Controller
from underwatt.control.headroom import READ_MARGIN, Headroom
from underwatt.control.knowledge import Knowledge
from underwatt.control.live_budget import LiveBudget
from underwatt.control.state import ControlOptions
from underwatt.convergence.curve import SamplesToTarget
from underwatt.device.base import permitted_space
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.errors import ApplyError, SensorError
from underwatt.events import Event, Noted
from underwatt.measure.meter import Meter, measure_idle
from underwatt.planning.problem import Problem, allows_pauses
from underwatt.predict.base import SettingArray
from underwatt.records import DeviceState, Measurement, PowerMode, PowerSample, Setting, WorkloadCost
from underwatt.runlog.log import read_log

SIZES = (8, 16, 32, 64)
# A small convolutional network, about as counted: steps of 0.05 to 0.5 s on the small boards.
NET = WorkloadCost(
    flops_per_sample=1.1e9,
    bytes_per_sample=14e6,
    bytes_per_step=0.3e9,
    kernels_per_step=150,
    load_bytes_per_sample=12_296,
    parameters=3e6,
    state_bytes=50e6,
    activation_bytes_per_sample=1.6e6,
)
# The same network with activations so large that a Nano holds no batch of 32.
HUGE = replace(NET, activation_bytes_per_sample=90e6)


def virtual(board: str = "tx2-nx", seed: int = 0) -> VirtualJetson:
    device = open_device(f"virtual:{board}?seed={seed}")
    assert isinstance(device, VirtualJetson)
    return device


def made_room(
    *, knobs: bool = True, idle_w: float | None = 3.0, power_w: float = 8.0
) -> tuple[Headroom, LiveBudget, Knowledge]:
    """What a budget leaves on a board of which nothing is known yet."""
    space = virtual().space if knobs else virtual().space.only(())
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), SIZES)
    live = LiveBudget(Budget(power_w=power_w))
    problem = Problem.of(candidates, live.budget, idle_w=idle_w)
    knowledge = Knowledge(problem)
    room = Headroom(problem, live, knowledge, READ_MARGIN, may_pause=True, budget_w=power_w)
    return room, live, knowledge


class Hurt:
    """A virtual board whose sensor can be lost, whose clocks can be refused, whose knobs can be out of reach."""

    def __init__(self, device: VirtualJetson, *, knobs: bool = True, counter: bool = False) -> None:
        self.device = device
        self._counter = counter  # whether it counts joules, as data-centre GPUs do
        self.board = device.board
        self.info, self.clock, self.space = device.info, device.clock, device.space
        self.silent: Callable[[], bool] = lambda: False
        self.surge_w: Callable[[], float] = lambda: 0.0  # on top of what is read
        self.refuses: Callable[[PowerMode], bool] = lambda _: False
        self.applied: list[PowerMode] = []
        self.steps: list[tuple[float, int]] = []
        self._knobs = knobs

    def capabilities(self) -> tuple[Any, ...]:
        found = self.device.capabilities()
        return found if self._knobs else tuple(replace(item, usable=item.kind != "knob") for item in found)

    def read_power(self) -> PowerSample:
        if self.silent():
            raise SensorError("The sensor is gone.")
        sample = self.device.read_power()
        sample = replace(sample, power_w=sample.power_w + self.surge_w())
        return replace(sample, energy_j=self.board.energy_j) if self._counter else sample

    def read_state(self) -> DeviceState:
        return self.device.read_state()

    def apply(self, mode: PowerMode) -> None:
        assert self._knobs or not mode.knobs(), "nobody may set a knob of this board"
        self.applied.append(mode)
        if self.refuses(mode):
            raise ApplyError("The kernel refused the write.")
        self.device.apply(mode)

    def snapshot(self, mode: PowerMode | None = None) -> Any:
        return self.device.snapshot(mode)

    def restore(self, snapshot: Any) -> None:
        self.device.restore(snapshot)

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        self.device.run_step(cost, batch_size)
        self.steps.append((self.clock.now_s(), batch_size))

    def close(self) -> None:
        self.device.close()


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Each sample is its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def tuned(device: Any, *, folder: Path | None = None, cost: WorkloadCost = NET, **more: Any) -> Tuner:
    if "budget" not in more:
        more.setdefault("budget_w", 9.0)
    more.setdefault("batch_sizes", SIZES)
    more.setdefault("options", QUICK)
    return tune(device=device, cost=cost, folder=folder, **more)


def train(tuner: Tuner, seconds: float, *, samples: int = 2000, each: Callable[[], None] = lambda: None) -> list[int]:
    """Pass after pass until so many simulated seconds have gone; the numbers of all samples, as they were trained."""
    until_s, seen = tuner.elapsed_s + seconds, []
    while tuner.elapsed_s < until_s:
        for batch in tuner.loader(Numbers(samples), shuffle=True):
            each()
            seen += batch.tolist()
            tuner.step()
            if tuner.elapsed_s >= until_s:
                break
    return seen


@dataclass
class Run:
    """A controller under way on a board, all that it said, and a loop that trains."""

    device: Any
    meter: Meter
    controller: Controller
    events: list[Event]
    cost: WorkloadCost
    begun_s: float

    @property
    def elapsed_s(self) -> float:
        return float(self.device.clock.now_s()) - self.begun_s

    def step(self) -> int:
        setting = self.controller.setting
        assert setting is not None
        self.device.run_step(self.cost, setting.batch_size)
        self.meter.beat()
        self.controller.after_step(setting.batch_size)
        return setting.batch_size

    def train(self, seconds: float, until: Callable[[], bool] = lambda: False) -> tuple[float, float]:
        """Train for a while; mean true watts and samples a second over it."""
        begin_s, begin_j, samples = self.elapsed_s, self.device.board.energy_j, 0
        while self.elapsed_s < begin_s + seconds and not until():
            samples += self.step()
        took_s = self.elapsed_s - begin_s
        return (self.device.board.energy_j - begin_j) / took_s, samples / took_s

    def holds(self) -> bool:
        return self.controller.phase.value == "holding"

    def said(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]

    def notes(self, level: str) -> list[str]:
        return [event.text for event in self.said("note") if event.level == level]

    def true_power_w(self) -> float:
        setting = self.controller.setting
        assert setting is not None
        board = self.device.board
        return float(board.true_power_w(self.cost, setting.mode, setting.batch_size, temperature_c=board.temperature_c))


@contextlib.contextmanager
def running(
    device: Any,
    live: LiveBudget,
    *,
    cost: WorkloadCost = NET,
    sizes: Sequence[int] = SIZES,
    known: Sequence[Measurement] = (),
    options: ControlOptions | None = None,
    begin: bool = True,
    convergence: SamplesToTarget | None = None,
) -> Iterator[Run]:
    """A controller on a board; the board is put back afterwards."""
    events: list[Event] = []
    with Session(device) as session:
        idle_w = measure_idle(device) if allows_pauses(live.budget) else None
        begun_s = device.clock.now_s()
        with Meter(device) as meter:
            space = permitted_space(device)
            candidates = SettingArray.product(tuple(k.name for k in space.knobs), space.matrix(), sizes)
            controller = Controller(
                session,
                meter,
                Problem.of(candidates, live.budget, convergence, idle_w=idle_w),
                live,
                known=known,
                options=options,
                tell=lambda event: events.append(replace(event, at_s=device.clock.now_s() - begun_s)),
                begun_s=begun_s,
            )
            run = Run(device, meter, controller, events, cost, begun_s)
            if begin:
                controller.begin()
            yield run


def seen_before(device: Any, cost: WorkloadCost = NET, sizes: Sequence[int] = SIZES) -> tuple[Measurement, ...]:
    """Measurements of an earlier training: some modes from slow to fast, each at every batch size."""
    board, found = device.board, []
    space = board.space
    for share in np.linspace(0.0, 1.0, 12):
        mode = PowerMode.of({k.name: k.values[round(share * (len(k.values) - 1))] for k in space.knobs})
        for size in sizes:
            step_s, power_w = board.true_step_s(cost, mode, size), board.true_power_w(cost, mode, size)
            found.append(
                Measurement(
                    Setting(mode, size),
                    step_s=step_s,
                    power_w=power_w,
                    peak_w=1.05 * power_w,
                    step_s_ci95=0.01 * step_s,
                    power_w_ci95=0.01 * power_w,
                )
            )
    return tuple(found)


# A search that soon is content, for tests of what comes after it.
QUICK = ControlOptions(most_a_level=2, least_gain=0.05)


def watts(power_w: float, **more: Any) -> LiveBudget:
    return LiveBudget(Budget(power_w=power_w, **more))


def windows_w(trace: Sequence[tuple[float, float]], window_s: float) -> np.ndarray[Any, Any]:
    """Mean watts in each window, from (time, joules so far)."""
    at_s, energy_j = np.array(trace).T
    starts = np.arange(at_s[0], at_s[-1] - window_s, window_s)
    return np.asarray(np.diff(np.interp(np.append(starts, starts[-1] + window_s), at_s, energy_j)) / window_s)


@contextlib.contextmanager
def experienced(device: Any, live: LiveBudget) -> Iterator[Run]:
    """A run on a board that was measured before, so that it holds the budget soon."""
    with running(device, live, known=seen_before(device), options=QUICK) as run:
        yield run


def settle(run: Run, seconds: float = 120.0) -> None:
    """Train until a while has passed without a change."""
    run.train(seconds, until=lambda: run.holds() and run.elapsed_s - run.events[-1].at_s > 12)
    assert run.holds()


def log_of(folder: Path) -> Any:
    return read_log(folder / "log.jsonl")


def notes(folder: Path, level: str = "warning") -> list[str]:
    return [event.text for event in log_of(folder).of(Noted) if event.level == level]


def found_mode(device: Any) -> dict[str, str]:
    return dict(device.snapshot())
