"""A training as a ``Job`` with a step of its own: Underwatt has the loop, and leaves the trained model.

    python examples/train_job.py         # on a simulated Jetson Nano; UNDERWATT_DEVICE=nvml:0 names a real device

Lines that end with ``# +`` are what Underwatt adds; ``# -`` is a line that one of them stands for. Without the one and
with the other it is the script as it was, which a test runs too.
"""

from __future__ import annotations

import os

import torch

# - from torch.utils.data import DataLoader, TensorDataset
import underwatt  # +
from data import digits

SAMPLES, BATCH = 6000, 32


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def make_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """The last layer learns faster, and weights of the first one are kept small."""
    groups = [{"params": model[1].parameters(), "weight_decay": 0.1}, {"params": model[3].parameters(), "lr": 2 * lr}]
    return torch.optim.AdamW(groups, lr=lr)


def train_step(model: torch.nn.Module, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One step, in mixed precision and with clipped gradients."""
    images, classes = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def main() -> None:
    torch.manual_seed(0)
    how = {"train_step": train_step, "optimizer": make_optimizer, "lr": 5e-3, "lr_batch_size": BATCH}  # +
    job = underwatt.Job(network, digits(), limit_samples=SAMPLES, batch_sizes=(8, 16, 32, 64), **how)  # +
    result = underwatt.run(job, budget="3W", device=os.environ.get("UNDERWATT_DEVICE", "virtual:nano"))  # +
    weights = torch.load(result.model)  # +
    # - model = network()
    # - optimizer, loader = make_optimizer(model, 5e-3), DataLoader(TensorDataset(*digits()), BATCH, shuffle=True)
    # - for _ in range(SAMPLES // len(loader.dataset)):
    # -     for batch in loader:
    # -         train_step(model, batch, optimizer)
    # - weights = model.state_dict()
    print(f"{sum(value.numel() for value in weights.values())} weights")


if __name__ == "__main__":
    main()
