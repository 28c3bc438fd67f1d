from __future__ import annotations

import pytest

from underwatt.drivers.virtual.board import VirtualClock
from underwatt.errors import OutOfMemoryError
from underwatt.jobs.simulated import SimulatedWorkload
from underwatt.measure.workload import Beat
from underwatt.records import WorkloadCost, WorkloadInfo

COST = WorkloadCost(1e9, 1e6, 1e6, 100, 1e3, 1e6, 4e6, 1e6)
INFO = WorkloadInfo("net", "1234")


class Board:
    """A board on which a step takes a hundredth of a second for each sample, and sixteen samples fit."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def run_step(self, cost, batch_size):
        assert cost is COST
        if batch_size > 16:
            raise OutOfMemoryError("It does not fit.")
        self.clock.advance(0.01 * batch_size)


class Real:
    """A real job of three steps."""

    def __init__(self) -> None:
        self.steps, self.batch_size, self.stopped = 0, 0, False

    def start(self, batch_size):
        self.batch_size = batch_size
        return self

    def step(self):
        self.steps += 1
        return Beat(1e9) if self.steps <= 3 else None

    def stop(self):
        self.stopped = True


def test_steps_pass_in_the_time_of_the_board():
    work = SimulatedWorkload(INFO, COST, Board())
    run = work.start(8)
    assert [run.step().at_s for _ in range(3)] == pytest.approx([0.08, 0.16, 0.24])
    run.stop()
    assert (work.info, work.cost()) == (INFO, COST)


def test_what_does_not_fit_the_board_says_so():
    with pytest.raises(OutOfMemoryError):
        SimulatedWorkload(INFO, COST, Board()).start(32).step()


def test_real_training_goes_along_and_its_end_is_the_end():
    real = Real()
    run = SimulatedWorkload(INFO, COST, Board(), real=real).start(8)
    assert [beat.at_s for beat in iter(run.step, None)] == pytest.approx([0.08, 0.16, 0.24])
    run.stop()
    assert (real.batch_size, real.stopped) == (8, True)
