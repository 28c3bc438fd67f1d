from __future__ import annotations

import itertools
import sys

import pytest

from underwatt.errors import JobError, OutOfMemoryError, StepError
from underwatt.jobs.choose import IsolatedWorkload
from underwatt.jobs.command import Limits

LIMITS = Limits(first_beat_s=60.0, beat_s=30.0, grace_s=1.0)
SOURCE = """
import os, signal, torch
from underwatt.jobs.job import Job

class Fragile(torch.nn.Linear):
    def forward(self, inputs):
        if len(inputs) > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if len(inputs) > 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(inputs)

def fragile():
    return Job(Fragile(4, 2), (torch.randn(64, 4), torch.randint(2, (64,))), target=0.9, device="cpu")
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
