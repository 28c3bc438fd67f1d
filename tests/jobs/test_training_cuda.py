"""Nothing waits for a real GPU to say the loss; skipped where there is none. Nothing is set on the card."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from run_world import log_of

from underwatt.adapters.tuner import tune
from underwatt.device.registry import open_device
from underwatt.events import Measured, Progressed
from underwatt.jobs.training import LatestLoss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def work_for(seconds: float) -> tuple[torch.Tensor, int]:
    """A matrix, and how many times to multiply it so that the GPU is busy for so long."""
    matrix = torch.randn(4096, 4096, device="cuda") / 64
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        begin.record()
        for _ in range(20):
            matrix @ matrix
        end.record()
        end.synchronize()
    return matrix, max(1, round(20 * 1e3 * seconds / begin.elapsed_time(end)))


def queue(matrix: torch.Tensor, times: int, value: float) -> torch.Tensor:
    for _ in range(times):
        product = matrix @ matrix
    return product.sum() * 0 + value


def test_a_loss_is_not_waited_for_and_comes_with_a_later_step() -> None:
    matrix, times = work_for(0.5)
    latest = LatestLoss()
    begun_s = time.monotonic()
    loss = queue(matrix, times, 0.25)
    queued_s = time.monotonic() - begun_s
    assert latest.of(loss) is None
    assert time.monotonic() - begun_s < queued_s + 0.1, "the GPU is still busy"
    torch.cuda.synchronize()
    assert latest.of(loss) == pytest.approx(0.25)


def test_half_precision_and_a_row_of_one_are_numbers_too() -> None:
    for loss in (torch.tensor(0.5, device="cuda", dtype=torch.bfloat16), torch.tensor([0.5], device="cuda")):
        latest = LatestLoss()
        latest.of(loss)
        torch.cuda.synchronize()
        assert latest.of(loss) == pytest.approx(0.5)


def test_steps_of_over_a_second_leave_no_gap_in_the_readings_and_are_measured(tmp_path: Path) -> None:
    """The thread that reads power told of the loss, and so waited for the steps: gaps of 5 s, and no measurement."""
    matrix, times = work_for(1.3)
    with tune(
        device=open_device("nvml:"), budget_w=10_000.0, batch_sizes=(8,), set_modes=False, folder=tmp_path
    ) as tuner:
        until_s = time.monotonic() + 20
        value = 0.0
        while time.monotonic() < until_s:
            tuner.starts(8)
            value += 1.0
            tuner.step(queue(matrix, times, value))
    log = log_of(tmp_path)
    assert float(np.diff(log.power.at_s).max()) < 1.0
    losses = [event.loss for event in log.of(Progressed) if event.loss is not None]
    assert losses == sorted(losses)
    assert losses[-1] >= value - 3
    assert log.of(Measured), "steps of over a second can be measured"
