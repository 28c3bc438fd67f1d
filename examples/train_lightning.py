"""Lightning under a power budget: ``LightningCallback`` is all that a training script gains.

    python examples/train_lightning.py --device nvml:0 --budget 300W

Without ``--device`` the board is a simulated Jetson Nano, which has to be told what a step costs; the training is real.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from data import digits
from underwatt import Job, LightningCallback, count_cost


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


class Digits(lightning.LightningModule):
    """A small network and how to train it, as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        images, classes = batch
        return torch.nn.functional.cross_entropy(self.network(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="virtual:nano")
    parser.add_argument("--budget", default="3W")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="out/train_lightning")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(*digits()), batch_size=32, shuffle=True, drop_last=True)
    cost = count_cost(Job(network, digits(), target=0.9)) if options.device.startswith("virtual") else None
    budget = LightningCallback(budget=options.budget, device=options.device, folder=options.folder, cost=cost)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        callbacks=[budget],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), loader)


if __name__ == "__main__":
    main()
