"""A job of three classes of points, and data sets whose samples tell their number, for tests of batches and steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from underwatt.jobs.job import Job


def points(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 3.0]])
    return centres[classes] + 0.3 * torch.randn(count, 2, generator=generator), classes


def make(**fields: Any) -> Job:
    return Job(**{"model": lambda: nn.Linear(2, 3), "data": points(), "target": 0.95, "lr": 0.05, **fields})


class Listed(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), 0.0]), index % 3
