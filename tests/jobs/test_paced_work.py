"""Whatever a run does is paced, and takes time and watts on a virtual board: starting, testing, writing checkpoints."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_world import NET, Hurt, virtual
from train_world import blobs, log_in, train

from underwatt.budget import Budget, parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.errors import InputError
from underwatt.events import Measured, Scored
from underwatt.jobs.identity import job_info
from underwatt.jobs.job import Effort, Job
from underwatt.jobs.runs import Run, RunOptions
from underwatt.jobs.training import Training
from underwatt.jobs.training_loop import train_under_budget
from underwatt.reports.gather_run import happened
from underwatt.store.store import Store

SIZES = (16, 32, 64)


class Truth:
    """What a board truly drew, ten times a second."""

    def __init__(self, device: Any) -> None:
        self._device, self._counted = device, [(device.clock.now_s(), device.board.energy_j)]
        device.clock.every(0.1, lambda: self._counted.append((device.clock.now_s(), device.board.energy_j)))

    def worst(self, budget_w: float, since_s: float, window_s: float = 5.0) -> float:
        """The highest mean of any window, as a share above the budget."""
        at_s, energy_j = np.array(self._counted).T
        begins = (at_s >= since_s) & (at_s + window_s <= at_s[-1])
        drawn_j = np.interp(at_s[begins] + window_s, at_s, energy_j) - energy_j[begins]
        return float(drawn_j.max()) / window_s / budget_w - 1


def heavy_test(test_samples: int = 1280) -> Job:
    """Blobs with a test that takes longer than the training between two of them."""
    chance = torch.Generator().manual_seed(2)
    targets = torch.randint(4, (test_samples,), generator=chance)
    inputs = torch.randn(test_samples, 8, generator=chance)
    test_data = (inputs, torch.arange(test_samples), targets)
    return blobs(test_data=test_data, target=2.0, batch_sizes=SIZES)


def train_for(pilot: Pilot, seconds: float) -> None:
    """Steps of the batch size that is wanted."""
    until_s = pilot.elapsed_s + seconds
    while pilot.elapsed_s < until_s:
        size = pilot.batch_size
        pilot.simulate(size)
        pilot.stepped(size)


def run_heavily(folder: Path, device: Any, budget: str, limit: int, *, share: float = 1.0) -> None:
    """Train as a run does, at the cost of a real network."""
    job = heavy_test()
    with Store(folder / "store.db") as store, contextlib.ExitStack() as stack:
        live = LiveBudget(parse_budget(budget))
        run = Run(RunOptions(), device, live, folder, store, SIZES)
        training = Training(job, SIZES[0])
        stack.callback(training.close)
        pilot = stack.enter_context(run.pilot(stack, job_info(job), cost=NET))
        train_under_budget(pilot, training, Effort(640, limit), folder, test_share=share)


@pytest.mark.parametrize("counter", [True, False], ids=["joules", "watts"])
def test_a_run_that_tests_heavily_holds_its_budget_by_pauses(tmp_path: Path, counter: bool) -> None:
    """On a GPU 49 tests in 29 s of training had windows of 5 s 18% above the budget: tests were not paced."""
    device = Hurt(virtual(), knobs=False, counter=counter)
    truth = Truth(device)
    run_heavily(tmp_path, device, "8W", 12_000)
    tests = log_in(tmp_path).of(Scored)
    assert sum(test.took_s or 0.0 for test in tests) > 0.3 * device.clock.now_s()
    # A window that begins with a step and ends with one holds the excess of one more: here 0.2 s of 3 W, 1.6% of it.
    assert truth.worst(8.0, since_s=2.0) < 0.02
    assert log_in(tmp_path).verdict().held


def test_a_run_that_tests_heavily_holds_its_budget_by_clocks(tmp_path: Path) -> None:
    device = virtual()
    truth = Truth(device)
    run_heavily(tmp_path, device, "8W", 40_000)
    scored = log_in(tmp_path).of(Scored)
    assert truth.worst(8.0, since_s=scored[len(scored) // 2].at_s) < 0.02
    assert log_in(tmp_path).verdict().held


def test_what_tests_draw_is_not_taken_for_the_steps_of_a_measurement(tmp_path: Path) -> None:
    """A test between paused steps made a setting of 11.3 W measure 5.3 W, and the steps after it went unpaused."""
    device = Hurt(virtual(), knobs=False)
    run_heavily(tmp_path, device, "8W", 4_000)
    for event in log_in(tmp_path).of(Measured):
        true_w = device.board.true_power_w(NET, device.board.mode, event.measurement.setting.batch_size)
        assert event.measurement.power_w == pytest.approx(true_w, rel=0.15)


@pytest.mark.parametrize("test_s", [2.0, 5.0, 10.0, 30.0])
def test_a_test_whose_batches_nobody_tells_of_is_paid_back_once(test_s: float) -> None:
    """As ``with tuner.testing():`` in one's own loop: on a Nano 5 s were followed by 247 s of waiting."""
    device = Hurt(virtual("nano"), knobs=False)
    with Pilot(device, job_info(heavy_test()), (8, 16, 32), LiveBudget(Budget(power_w=4.0)), cost=NET) as pilot:
        train_for(pilot, 60.0)
        begin_s, begin_j = pilot.elapsed_s, device.board.energy_j
        with pilot.testing():
            while pilot.elapsed_s < begin_s + test_s:
                device.run_step(NET.of_test(), 32)
            ended_s, drawn_j = pilot.elapsed_s, device.board.energy_j - begin_j
        waited_s = pilot.elapsed_s - ended_s
        waiting_w = (device.board.energy_j - begin_j - drawn_j) / waited_s
        needed_s = (drawn_j - 4.0 * (ended_s - begin_s)) / (4.0 - waiting_w)
        assert 0.95 * needed_s - 0.5 < waited_s < 1.1 * needed_s + 1.0
        train_for(pilot, 30.0)
        mean_w = (device.board.energy_j - begin_j) / (pilot.elapsed_s - begin_s)
    assert 0.95 * 4.0 < mean_w < 1.02 * 4.0


def test_tests_take_a_small_share_of_the_time(tmp_path: Path) -> None:
    device = virtual()
    run_heavily(tmp_path, device, "8W", 30_000, share=0.1)
    tests = log_in(tmp_path).of(Scored)
    assert len(tests) > 3
    took_s = sum(test.took_s or 0.0 for test in tests)
    assert 0.06 * tests[-1].at_s < took_s < 0.12 * tests[-1].at_s


def test_by_default_they_take_a_twentieth_and_a_run_says_so(tmp_path: Path) -> None:
    job = heavy_test()
    train(tmp_path / "run", job, every=0, limit=9_000)
    log = log_in(tmp_path / "run")
    tests = log.of(Scored)
    # The first where forward over the test data is a twentieth of the work so far and nothing is being measured, the
    # last where it is given up.
    assert tests[0].samples >= 8533
    assert tests[-1].samples >= 9_000
    assert "of the model took" in happened(log)


def test_whoever_says_how_often_gets_it_so(tmp_path: Path) -> None:
    train(tmp_path / "run", heavy_test(), every=640, limit=3_000)
    assert [test.samples // 640 for test in log_in(tmp_path / "run").of(Scored)] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="Testing cannot take"):
        RunOptions(test_share=share).share_of_tests()


def test_starting_testing_and_writing_take_time_and_watts_on_a_virtual_board(tmp_path: Path) -> None:
    device = virtual()
    done: list[tuple[float, float]] = []
    job = heavy_test(test_samples=64)
    with Store(tmp_path / "store.db") as store, contextlib.ExitStack() as stack:
        run = Run(RunOptions(), device, LiveBudget(Budget(power_w=9.0)), tmp_path, store, SIZES)
        pilot = stack.enter_context(run.pilot(stack, job_info(job), cost=NET))
        for work in (pilot.moving_state, pilot.testing):
            begin_s, begin_j, idle_w = device.clock.now_s(), device.board.energy_j, device.board.power_w
            with work() as tested:
                if tested is not None:
                    tested(64)
            seconds = device.clock.now_s() - begin_s
            done.append((seconds, (device.board.energy_j - begin_j) / max(seconds, 1e-9) / idle_w))
    for seconds, times_idle in done:
        assert seconds > 0.01
        assert times_idle > 1.1


def test_a_test_that_fails_waits_for_nothing(tmp_path: Path) -> None:
    device = Hurt(virtual(), knobs=False)
    job = heavy_test()
    with Store(tmp_path / "store.db") as store, contextlib.ExitStack() as stack:
        run = Run(RunOptions(), device, LiveBudget(Budget(power_w=4.0)), tmp_path, store, SIZES)
        pilot = stack.enter_context(run.pilot(stack, job_info(job), cost=NET))
        ended_s = math.nan

        def test() -> None:
            nonlocal ended_s
            with pilot.testing():
                device.run_step(NET, 64)
                ended_s = device.clock.now_s()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            test()
        assert device.clock.now_s() == ended_s
