"""A vision transformer in the style of EfficientViT: convolutional stem, depthwise blocks, linear attention.

After Cai et al., "EfficientViT: Lightweight Multi-Scale Attention" (2023), reduced to its ideas: attention with a
ReLU kernel costs time linear in the number of positions, and sees a second scale through a depthwise convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.mobilenet import InvertedResidual, conv_bn


class LinearAttention(nn.Module):
    """ReLU linear attention over two scales."""

    def __init__(self, channels: int, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.second_scale = nn.Conv2d(3 * channels, 3 * channels, 5, padding=2, groups=3 * channels, bias=False)
        self.out = nn.Sequential(*conv_bn(2 * channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        """The images with what each position gathers from all others added."""
        batch, _, height, width = images.shape
        first = self.qkv(images)
        both = torch.cat([first, self.second_scale(first)], 1)
        query, key, value = both.reshape(batch, -1, 3 * self.head_dim, height * width).chunk(3, 2)
        query, key = query.relu(), key.relu()
        # (d × n) · (n × d) first: this order is what makes it linear.
        gathered = (value @ key.transpose(-1, -2)) @ query
        weight = key.sum(-1, keepdim=True).transpose(-1, -2) @ query
        return images + self.out((gathered / (weight + 1e-6)).reshape(batch, -1, height, width))


class EfficientViT(nn.Module):
    """Stem, two convolutional stages, two stages with attention; ``width`` is the channels of the stem."""

    def __init__(self, classes: int = 10, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv_bn(3, width, 3), nn.Hardswish(inplace=True)]
        inputs = width
        for stage in range(4):
            outputs = width * (stage + 1)
            layers.append(InvertedResidual(inputs, outputs, 1 if stage == 0 else 2, 4))
            for _ in range(blocks - 1):
                if stage >= 2:
                    layers.append(LinearAttention(outputs))
                layers.append(InvertedResidual(outputs, outputs, 1, 4))
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.features(images).mean((2, 3)))
