from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
import weakref
from pathlib import Path

import pytest
import small_job
import torch
from torch import nn

from underwatt.device.registry import open_device
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard, VirtualClock
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError, JobError, OutOfMemoryError, StepError
from underwatt.jobs.command import CommandRate, CommandWorkload, Limits
from underwatt.jobs.job import Job
from underwatt.jobs.workloads import IsolatedWorkload, SimulatedWorkload, TorchWorkload, choose_workload
from underwatt.records import WorkloadCost, WorkloadInfo

EXAMPLE = f"{Path(__file__).resolve().parents[2] / 'examples' / 'jobs.py'}:resnet18_small"


@pytest.fixture
def board(tmp_path: Path) -> JetsonDevice:
    SysfsBoard.create(VirtualBoard(BOARDS["nano"]), tmp_path)
    return JetsonDevice(tmp_path)


def test_a_job_is_isolated_on_a_real_device_and_simulated_on_a_virtual_one(board: JetsonDevice) -> None:
    real, sizes = choose_workload([EXAMPLE], board)
    assert isinstance(real, IsolatedWorkload)
    simulated, same_sizes = choose_workload([EXAMPLE], open_device("virtual:nano"))
    assert isinstance(simulated, SimulatedWorkload)
    assert sizes == same_sizes == (4, 8, 16, 32, 64, 128)
    assert real.info == simulated.info


def test_words_after_the_dashes_are_a_command(board: JetsonDevice) -> None:
    words = ["python", "train.py", "--batch-size", "{batch_size}", "--lr", "{lr}"]
    command, sizes = choose_workload(words, board, rate=CommandRate(0.1, 64))
    assert isinstance(command, CommandWorkload)
    assert sizes == ()
    assert command.arguments(16)[-1] == "0.05"


def test_what_makes_no_sense_is_said(board: JetsonDevice) -> None:
    with pytest.raises(InputError, match="No job"):
        choose_workload([], board)
    with pytest.raises(InputError, match=r"train\.py:factory"):
        choose_workload(["train.py"], board)
    with pytest.raises(InputError, match="cannot be simulated"):
        choose_workload(["python", "train.py", "{batch_size}"], open_device("virtual:nano"))


LIMITS = Limits(first_beat_s=60.0, beat_s=30.0, grace_s=1.0)
SOURCE = f"""
import os, signal, sys, torch
from underwatt.jobs.job import Job
sys.path.append({str(Path(small_job.__file__).parent)!r})
from small_job import PlainSgd

class Fragile(torch.nn.Linear):
    def forward(self, inputs):
        if len(inputs) > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if len(inputs) > 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(inputs)

def fragile():
    data = torch.randn(64, 4), torch.randint(2, (64,))
    return Job(Fragile(4, 2), data, target=0.9, device="cpu", optimizer=PlainSgd)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fragile_job.py").write_text(SOURCE)
    return IsolatedWorkload(f"{tmp_path}/fragile_job.py:fragile", LIMITS)


def test_a_job_in_its_own_process_beats(work):
    run = work.start(4)
    beats = [run.step() for _ in range(20)]
    run.stop()
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(beats))
    assert work.info.name == "fragile"
    assert work.cost().parameters == 10


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (32, OutOfMemoryError, "Batch size 32"),
        (16, StepError, "killed by signal 11"),
    ],
)
def test_no_fault_of_the_job_reaches_this_process(work, batch_size, error, message):
    with pytest.raises(error, match=message):
        work.start(batch_size).step()


def test_a_wrong_address_is_found_before_anything_starts():
    with pytest.raises(JobError, match="no file"):
        IsolatedWorkload("absent.py:job")


DATA = (torch.randn(64, 4), torch.randint(2, (64,)))


class Fails(nn.Module):
    """Fails as told above a batch size."""

    def __init__(self, error: Exception, above: int = 16) -> None:
        super().__init__()
        self.layer, self.error, self.above = nn.Linear(4, 2), error, above

    def forward(self, inputs):
        if len(inputs) > self.above:
            raise self.error
        return self.layer(inputs)


def workload(model=None, **fields):
    return TorchWorkload(Job(model or nn.Linear(4, 2), DATA, target=0.9, device="cpu", name="tiny", **fields))


def test_each_step_trains_and_beats():
    run = workload().start(8)
    before = run.training.model.weight.detach().clone()
    started_s = time.monotonic()
    beats = [run.step() for _ in range(5)]
    assert started_s < beats[0].at_s < beats[-1].at_s <= time.monotonic()
    assert run.training.steps == 5
    assert not torch.equal(run.training.model.weight, before)
    run.stop()


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
)
def test_out_of_memory_in_all_its_forms(error):
    work = workload(Fails(error))
    fits = work.start(16)
    fits.step()
    fits.stop()
    run = work.start(32)
    with pytest.raises(OutOfMemoryError, match="Batch size 32 does not fit") as caught:
        run.step()
    # Nothing that the error holds may keep the memory occupied.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    run.stop()


def test_stop_lets_go_of_the_model_even_after_out_of_memory():
    run = workload(Fails(RuntimeError("CUDA out of memory"))).start(32)
    model = weakref.ref(run.training.model)
    with pytest.raises(OutOfMemoryError) as caught:
        run.step()
    run.stop()
    run.stop()
    gc.collect()
    assert model() is None
    assert caught.value.message
    with pytest.raises(StepError, match="stopped"):
        run.step()


def test_any_other_fault_is_a_step_error_that_keeps_its_cause():
    run = workload(Fails(ValueError("shapes\ndiffer"))).start(32)
    with pytest.raises(
        StepError, match=r"The job failed in a step at batch size \d+: ValueError: shapes \(.*line \d+: raise"
    ) as caught:
        run.step()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_that_cannot_be_built():
    def broken():
        raise KeyError("width")

    with pytest.raises(StepError, match="KeyError: 'width'"):
        workload(broken).start(1)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum().item() else inputs


def test_a_cost_that_cannot_be_counted_is_none_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        work = workload(Reads())
        assert work.cost() is None
        assert work.cost() is None
    assert caplog.text.count("cannot be counted") == 1


def test_cost_is_there_otherwise():
    assert workload().cost().parameters == 10


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


def test_steps_pass_in_the_time_of_the_board():
    work = SimulatedWorkload(INFO, COST, Board())
    run = work.start(8)
    assert [run.step().at_s for _ in range(3)] == pytest.approx([0.08, 0.16, 0.24])
    run.stop()
    assert (work.info, work.cost()) == (INFO, COST)


def test_what_does_not_fit_the_board_says_so():
    with pytest.raises(OutOfMemoryError):
        SimulatedWorkload(INFO, COST, Board()).start(32).step()
