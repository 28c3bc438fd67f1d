from __future__ import annotations

import gc
import logging
import time
import weakref

import pytest
import torch
from torch import nn

from underwatt.errors import OutOfMemoryError, StepError
from underwatt.jobs.job import Job
from underwatt.jobs.torch_job import TorchWorkload

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
    with pytest.raises(StepError, match=r"The job failed in a step at batch size \d+: ValueError: shapes\.") as caught:
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
