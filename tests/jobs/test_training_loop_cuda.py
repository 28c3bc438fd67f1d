"""Memory that really runs out, and a training that goes on, on a real GPU; skipped where there is none.

Nothing is set on the card: batch sizes and pauses alone.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from run_world import Numbers, log_of
from train_world import blobs, happening, log_in, same, state_in, train

from underwatt.adapters.tuner import tune
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.device.registry import open_device
from underwatt.events import Noted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

FLOATS = 2**20  # of activations for each sample: 4 MiB
SAMPLES, MOST_EPOCHS = 20_000, 60


def gpu_budget() -> LiveBudget:
    return LiveBudget(Budget(power_w=10_000.0))


def test_memory_that_runs_out_in_a_users_loop_costs_no_sample(tmp_path: Path) -> None:
    device = open_device("nvml:")
    found = dict(device.snapshot())
    weight = torch.ones(FLOATS, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(2**30 / total)  # 1 GiB: room for 16 samples, not for 256
    epochs: list[list[int]] = []
    sizes: set[int] = set()
    failed = 0
    try:
        with tune(
            device=device, budget_w=10_000.0, batch_sizes=(4, 16, 256), set_modes=False, folder=tmp_path
        ) as tuner:
            while not failed and len(epochs) < MOST_EPOCHS:
                epochs.append([])
                for batch in tuner.loader(Numbers(SAMPLES)):
                    with tuner.training():
                        optimizer.zero_grad()
                        failed += len(batch) == 256
                        grown = weight[None, :] * batch[:, None].cuda().float()
                        (grown * grown).mean().backward()
                        optimizer.step()
                        epochs[-1] += batch.tolist()
                        sizes.add(len(batch))
                        tuner.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed == 1, "the large batch was tried, and not again"
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs), "every sample once an epoch"
    assert 256 not in sizes
    assert any("256 does not fit" in note.text for note in log_of(tmp_path).of(Noted))
    assert dict(device.snapshot()) == found


def test_a_training_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    job = blobs(target=1.01, device="cuda")
    options = {"device": open_device("nvml:"), "live": gpu_budget(), "set_modes": False}
    train(tmp_path / "whole", job, limit=1600, **options)
    left = 37

    def stop(_: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), happening(stop):
        train(tmp_path / "parts", job, limit=1600, **options)
    assert state_in(tmp_path / "parts")["steps"] == 37
    assert train(tmp_path / "parts", job, limit=1600, resume=True, **options).outcome == "limit"
    assert same(state_in(tmp_path / "parts"), state_in(tmp_path / "whole")), "bit by bit"
    assert log_in(tmp_path / "parts").end.restored
