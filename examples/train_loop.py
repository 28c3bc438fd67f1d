"""A plain training loop as people write it, with a schedule and mixed precision, under a power budget.

    python examples/train_loop.py        # on a simulated Jetson Nano; UNDERWATT_DEVICE=nvml:0 names a real device

Lines that end with ``# +`` are what Underwatt adds; ``# -`` is a line that one of them stands for. Without the one and
with the other it is the script as it was, which a test runs too.
"""

from __future__ import annotations

import math

import torch

# - from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

import underwatt  # +
from data import board, digits

EPOCHS, BATCH = 3, 32


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def main() -> None:
    torch.manual_seed(0)
    model, dataset = network(), TensorDataset(*digits())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * math.ceil(len(dataset) / BATCH))
    scaler = torch.amp.GradScaler("cpu")
    followed = {"optimizer": optimizer, "scheduler": schedule, "lr_batch_size": BATCH, **board(network, digits())}  # +
    # - if True:
    with underwatt.tune(budget_w=3, batch_sizes=(8, 16, 32, 64), **followed) as tuner:  # +
        # - loader = DataLoader(dataset, BATCH, shuffle=True)
        loader = tuner.loader(dataset, shuffle=True)  # +
        for _ in range(EPOCHS):
            for images, classes in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(images), classes)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                tuner.step(loss)  # +
    print(f"loss {float(loss):.3f}, rate {schedule.get_last_lr()[0]:.6f}")


if __name__ == "__main__":
    main()
