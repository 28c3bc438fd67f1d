"""Example jobs: ``underwatt profile examples/jobs.py:resnet18`` and the like.

Jobs without a data set in their name are for speed and power: their images are noise, and they say so. Learning
rates are those of the paper (square root of the batch size). The ``_small`` jobs train on two CPU cores.
"""

from __future__ import annotations

from torch import nn

from data import cifar10, digits, grammar_text, real_text, synthetic_images, text_windows
from models.efficientvit import EfficientViT
from models.mobilenet import MobileNetV2
from models.resnet import ResNet18
from models.transformer import CharTransformer
from underwatt.jobs.job import Job

ASCII = "\n" + "".join(map(chr, range(32, 127)))
PAPER_LR = 5e-4


def _synthetic(model: type[nn.Module], **sizes: float) -> Job:
    count = 256 if sizes else 2048
    return Job(lambda: model(**sizes), synthetic_images(count), target=0.5, lr=PAPER_LR, synthetic=True)


def resnet18() -> Job:
    return _synthetic(ResNet18)


def resnet18_small() -> Job:
    return _synthetic(ResNet18, width=16)


def mobilenetv2() -> Job:
    return _synthetic(MobileNetV2)


def mobilenetv2_small() -> Job:
    return _synthetic(MobileNetV2, width=0.25)


def efficientvit() -> Job:
    return _synthetic(EfficientViT)


def efficientvit_small() -> Job:
    return _synthetic(EfficientViT, width=16)


def _cifar10(model: type[nn.Module]) -> Job:
    images, classes = cifar10("train")
    cut = len(images) * 4 // 5
    return Job(
        model,
        (images[:cut], classes[:cut]),
        target=0.6,
        test_data=cifar10("test"),
        proxy_data=(images[cut:], classes[cut:]),
        lr=PAPER_LR,
    )


def resnet18_cifar10() -> Job:
    return _cifar10(ResNet18)


def mobilenetv2_cifar10() -> Job:
    return _cifar10(MobileNetV2)


def efficientvit_cifar10() -> Job:
    return _cifar10(EfficientViT)


def char_transformer() -> Job:
    data, test = text_windows(real_text("austen_sense.txt"), ASCII)
    proxy, proxy_test = text_windows(real_text("tinyshakespeare.txt"), ASCII)
    return Job(
        lambda: CharTransformer(len(ASCII)),
        data,
        target=0.5,
        test_data=test,
        proxy_data=proxy,
        proxy_test_data=proxy_test,
        lr=1e-3,
    )


def char_transformer_small() -> Job:
    data, test = text_windows(grammar_text(1500, seed=0), ASCII)
    proxy, proxy_test = text_windows(grammar_text(500, seed=1), ASCII)
    return Job(
        lambda: CharTransformer(len(ASCII), dim=48, layers=2, heads=3),
        data,
        target=0.7,
        test_data=test,
        proxy_data=proxy,
        proxy_test_data=proxy_test,
        lr=4e-3,
    )


def digits_small() -> Job:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    return Job(model, digits(), target=0.97, lr=5e-3)
