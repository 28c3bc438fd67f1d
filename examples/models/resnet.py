"""ResNet18 for 32×32 images: the first layer is a 3×3 convolution without pooling."""

from __future__ import annotations

from torch import Tensor, nn


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv3x3(inputs, outputs, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            conv3x3(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Features of the next block."""
        return nn.functional.relu(self.body(images) + self.around(images))


class ResNet18(nn.Module):
    """Four stages of two blocks; ``width`` is the channels of the first stage (64 in the paper)."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            layers += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.features(images).mean((2, 3)))
