"""Data for the example jobs: real where a folder of it is named in UNDERWATT_DATA, made up where that is said."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underwatt import Job, count_cost
from underwatt.errors import JobError, MissingExtraError

SEQUENCE = 64


def board(network: Any, data: Any, *, is_loss: bool = False) -> dict[str, Any]:
    """Where the examples train: on the device that UNDERWATT_DEVICE names, else on a simulated Jetson Nano.

    A simulated board has to be told what a step costs; the training is real. ``is_loss``: the network gives its loss.
    """
    if device := os.environ.get("UNDERWATT_DEVICE"):
        return {"device": device}
    how: dict[str, Any] = {"forward": lambda net, batch: (net(**batch).loss, None), "loss": lambda loss, _: loss}
    return {"device": "virtual:nano", "cost": count_cost(Job(network, data, target=1.0, **(how if is_loss else {})))}


def data_folder() -> Path:
    folder = os.environ.get("UNDERWATT_DATA")
    if not folder or not Path(folder).is_dir():
        raise JobError(
            "This job needs real data, and UNDERWATT_DATA names no folder.",
            hint="Set UNDERWATT_DATA to the folder that holds text/ and cifar10/.",
        )
    return Path(folder)


def synthetic_images(count: int = 2048, size: int = 32, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Noise in the shape of images: right for speed and power, nothing to learn in it."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, size, size, generator=generator)
    return images, torch.randint(classes, (count,), generator=generator)


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """The images of ``split`` ("train" or "test"), scaled to mean 0 and deviation 1, in a fixed shuffled order."""
    path = data_folder() / "cifar10" / "cifar10_subset.tar"
    if not path.is_file():
        raise JobError(f"There is no {path.name} in {path.parent}.", hint="Put it there, or use a synthetic job.")
    try:
        from PIL import Image
    except ImportError as exc:
        raise MissingExtraError("Decoding the images needs Pillow.", hint="Install it: pip install pillow") from exc
    images, classes = [], []
    with tarfile.open(path) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[-3] == split:
                file = tar.extractfile(member)
                assert file is not None
                pixels = Image.open(io.BytesIO(file.read())).convert("RGB")
                images.append(torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8))
                classes.append(parts[-2])
    names = sorted(set(classes))
    stacked = torch.stack(images).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).float() / 255
    scaled = (stacked - stacked.mean((0, 2, 3), keepdim=True)) / stacked.std((0, 2, 3), keepdim=True)
    order = torch.randperm(len(scaled), generator=torch.Generator().manual_seed(0))
    return scaled[order], torch.tensor([names.index(name) for name in classes])[order]


def digits() -> tuple[Tensor, Tensor]:
    """The 8×8 digits that come with scikit-learn: real, small, learnt in seconds."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(bunch.target)


class TextWindows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each with the characters that follow."""

    def __init__(self, codes: Tensor, stride: int) -> None:
        self.codes, self.stride = codes, stride

    def __len__(self) -> int:
        return max(0, (len(self.codes) - SEQUENCE - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.codes[index * self.stride : index * self.stride + SEQUENCE + 1]
        return window[:-1], window[1:]


def text_windows(text: str, vocabulary: str) -> tuple[TextWindows, TextWindows]:
    """Training windows from the first nine tenths, test windows from the rest."""
    code = {character: index for index, character in enumerate(vocabulary)}
    codes = torch.tensor([code.get(character, 0) for character in text])
    cut = len(codes) * 9 // 10
    return TextWindows(codes[:cut], stride=SEQUENCE // 2), TextWindows(codes[cut:], stride=SEQUENCE)


def real_text(name: str) -> str:
    path = data_folder() / "text" / name
    if not path.is_file():
        raise JobError(f"There is no {name} in {path.parent}.", hint="Put it there, or use the small job.")
    return path.read_text(encoding="utf-8")


def grammar_text(sentences: int, seed: int) -> str:
    """Sentences of a small made-up grammar: a text to learn that needs no download."""
    rng = random.Random(seed)
    nouns = ["the board", "a small fan", "the old clock", "her battery", "the quiet model", "a warm chip"]
    verbs = ["waits for", "measures", "cools", "follows", "wakes", "is slower than"]
    ends = ["at night", "in the sun", "without a sound", "once more", "for an hour"]
    return "\n".join(
        f"{rng.choice(nouns)} {rng.choice(verbs)} {rng.choice(nouns)} {rng.choice(ends)}." for _ in range(sentences)
    )
