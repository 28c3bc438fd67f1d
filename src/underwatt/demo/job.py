"""What the demo trains: handwritten digits, learnt for real, at the simulated cost of a larger network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.jobs.job import Job

if TYPE_CHECKING:
    from torch import nn

BATCH_SIZES = (8, 16, 32, 64, 128)
TARGET = 0.9
PAPER_LR = 5e-4
# Of 1,797 images. What convergence is studied on has none in common with what is trained and tested on later.
TRAIN, TEST, PROXY, PROXY_TEST = slice(700), slice(700, 1100), slice(1100, 1500), slice(1500, None)


def digits() -> Job:
    """The 8×8 digits that come with scikit-learn, and a network with one hidden layer to tell them apart."""
    torch = require("torch", extra="torch")
    bunch = require("sklearn.datasets", extra="demo").load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, classes = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]

    def part(rows: slice) -> tuple[Any, Any]:
        return images[rows], classes[rows]

    return Job(
        _network,
        part(TRAIN),
        target=TARGET,
        test_data=part(TEST),
        proxy_data=part(PROXY),
        proxy_test_data=part(PROXY_TEST),
        lr=PAPER_LR,
        batch_sizes=BATCH_SIZES,
        device="cpu",
        name="digits at the cost of ResNet18",
    )


def _network() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
