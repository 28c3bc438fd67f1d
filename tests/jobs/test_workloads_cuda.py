"""What only a real GPU shows; skipped where there is none."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from underwatt.errors import OutOfMemoryError
from underwatt.jobs.job import Job
from underwatt.jobs.workloads import TorchWorkload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Deep(nn.Module):
    """A few heavy layers; above a batch size it asks for more memory than any GPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)), nn.Linear(4096, 10))

    def forward(self, inputs):
        if len(inputs) > 4096:
            torch.empty(2**45, device=inputs.device)
        return self.layers(inputs)


def workload() -> TorchWorkload:
    data = (torch.randn(512, 4096), torch.randint(10, (512,)))
    return TorchWorkload(Job(Deep, data, target=0.9, device="cuda"))


def test_beats_keep_the_pace_of_the_gpu():
    run = workload().start(2048)
    for _ in range(5):
        run.step()
    torch.cuda.synchronize()
    started_s = time.monotonic()
    beats = [run.step() for _ in range(20)]
    torch.cuda.synchronize()
    whole_s = time.monotonic() - started_s
    run.stop()
    assert (beats[-1].at_s - beats[0].at_s) / 19 == pytest.approx(whole_s / 20, rel=0.15)


def test_out_of_memory_is_translated_and_the_memory_comes_back():
    work = workload()
    before = torch.cuda.memory_allocated()
    run = work.start(8192)
    with pytest.raises(OutOfMemoryError, match="Batch size 8192") as caught:
        run.step()
    run.stop()
    assert caught.value.message
    assert torch.cuda.memory_allocated() == before
    fits = work.start(64)
    fits.step()
    fits.stop()
    assert torch.cuda.memory_allocated() == before
