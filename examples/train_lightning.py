"""Lightning under a power budget: one callback more, which also changes the batch size under way.

    python examples/train_lightning.py   # on a simulated Jetson Nano; UNDERWATT_DEVICE=nvml:0 names a real device

Lines that end with ``# +`` are what Underwatt adds; ``# -`` is a line that one of them stands for. Without the one and
with the other it is the script as it was, which a test runs too.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from data import board, digits
from underwatt import LightningCallback  # +


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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="out/train_lightning")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(*digits()), batch_size=32, shuffle=True)
    where = {"folder": options.folder, **board(network, digits())}  # +
    budget = LightningCallback(budget_w=3, batch_sizes=(8, 16, 32, 64), **where)  # +
    trainer = lightning.Trainer(
        callbacks=[budget],  # +
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), loader)


if __name__ == "__main__":
    main()
