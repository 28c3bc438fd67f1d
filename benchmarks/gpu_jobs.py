"""Two networks that nothing here was tuned with: a vision transformer as a job, and an MLP mixer for a ``Trainer``.

Their data is made up, and learnable: each class has a picture of its own under the noise. ``UNDERWATT_SMALL=1`` makes
both small enough for a CPU, to try the benchmark without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from underwatt import Job

SMALL = bool(os.environ.get("UNDERWATT_SMALL"))
CLASSES, PATCH, PIXELS = 10, 4, 32
TRAIN, TEST = (2_000, 500) if SMALL else (20_000, 2_500)
RUN_SIZES = (4, 8, 16) if SMALL else (64, 128, 256, 512)
TRAINER_SIZE = 8 if SMALL else 256


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Faint pictures under noise, and which they are."""
    shown = torch.randn(CLASSES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=chance)
    return torch.randn(count, 3, PIXELS, PIXELS, generator=chance) + 0.1 * shown[labels], labels


class Patches(nn.Module):
    """Pictures as rows of patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """Each patch as one row."""
        return self.cut(images).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Attention among patches."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.place = nn.Parameter(0.02 * torch.randn(1, (PIXELS // PATCH) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.layers(self.patches(images) + self.place).mean(1))


class Mixer(nn.Module):
    """An MLP mixer with the face that a Transformers ``Trainer`` expects."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        places = (PIXELS // PATCH) ** 2
        self.patches = Patches(width)
        self.across = nn.ModuleList(_mlp(places) for _ in range(depth))
        self.within = nn.ModuleList(_mlp(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Scores of the classes, and the loss where labels are given."""
        rows, norms = self.patches(images), iter(self.norms)
        for across, within in zip(self.across, self.within, strict=True):
            rows = rows + across(next(norms)(rows).transpose(1, 2)).transpose(1, 2)
            rows = rows + within(next(norms)(rows))
        logits = self.head(rows.mean(1))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def vit() -> Job:
    """For ``underwatt run``: trained until somebody ends it."""
    sizes = (48, 2, 3) if SMALL else (384, 8, 6)
    return Job(
        lambda: VisionTransformer(*sizes),
        pictures(TRAIN, 1),
        target=2.0,  # no accuracy is
        test_data=pictures(TEST, 2),
        lr=3e-4,
        batch_sizes=RUN_SIZES,
        num_workers=2 if SMALL else 4,
        synthetic=True,
    )


def mixer() -> Mixer:
    return Mixer(*((48, 2) if SMALL else (512, 8)))


class Pictures(torch.utils.data.Dataset[dict[str, Any]]):
    """For a ``Trainer``, one by one."""

    def __init__(self, count: int, seed: int) -> None:
        self._images, self._labels = pictures(count, seed)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"images": self._images[at], "labels": self._labels[at]}
