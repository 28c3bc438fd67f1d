"""MobileNetV2 for 32×32 images: the first two reductions are left out, as the images are small already."""

from __future__ import annotations

from torch import Tensor, nn

# expansion, channels, blocks, stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def conv_bn(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*conv_bn(inputs, hidden), nn.ReLU6(inplace=True)]
        layers += [*conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True)]
        self.body = nn.Sequential(*layers, *conv_bn(hidden, outputs))
        self.has_way_around = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        """Features of the next block."""
        features = self.body(images)
        return images + features if self.has_way_around else features


class MobileNetV2(nn.Module):
    """The published stages; ``width`` multiplies all channels."""

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        inputs = _scaled(32, width)
        layers: list[nn.Module] = [*conv_bn(3, inputs, 3), nn.ReLU6(inplace=True)]
        for expansion, channels, blocks, stride in STAGES:
            outputs = _scaled(channels, width)
            for block in range(blocks):
                layers.append(InvertedResidual(inputs, outputs, stride if block == 0 else 1, expansion))
                inputs = outputs
        last = _scaled(1280, width)
        self.features = nn.Sequential(*layers, *conv_bn(inputs, last), nn.ReLU6(inplace=True))
        self.head = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.features(images).mean((2, 3)))


def _scaled(channels: int, width: float) -> int:
    """Channels in steps of eight, which hardware likes."""
    return max(8, round(channels * width / 8) * 8)
