"""The data of ``record_convergence.py``: who plays which role, decoded once, then held on the GPU as tensors."""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEQUENCE = 64
ASCII = "\n" + "".join(map(chr, range(32, 127)))
TEXTS = {
    "pretrain": ("wikitext2_valid.txt", "wikitext2_test.txt"),
    "proxy": ("tinyshakespeare.txt",),
    "target": ("austen_sense.txt", "austen_persuasion.txt"),
}
# Classes in alphabetical order are dealt out in turn; no role sees a class of another.
CLASS_ROLES = ("target", "proxy", "pretrain")
TRAIN_PER_CLASS = 1200  # of 1,500: keeps the decoded file under 50 MiB
TEST_CHUNK = 500

DATA_ROLES = {
    "image": (
        "CIFAR10 subset. Its ten classes in alphabetical order are dealt out in turn to target (airplane, cat, frog, "
        f"truck), proxy (automobile, deer, horse) and pretraining (bird, dog, ship): no class is shared. The first "
        f"{TRAIN_PER_CLASS} training images of each class are trained on, its 250 test images held out. Scaled by the "
        "mean and deviation of each channel over the pretraining images."
    ),
    "text": (
        "Pretraining WikiText-2 (valid and test), proxy tiny Shakespeare, target two novels of Austen. Of each file "
        "the first nine tenths are trained on (windows of 64 characters, 32 apart), the last tenth is held out "
        "(windows 64 apart; as many as are evaluated, evenly spread). 96 characters, all others as one."
    ),
}


@dataclass
class Split:
    """Data of one role: what is trained on and what is held out."""

    train: tuple[Tensor, Tensor]  # images and classes, or a text's codes and where its windows begin
    test: tuple[Tensor, Tensor]
    classes: int
    is_text: bool

    def __len__(self) -> int:
        return len(self.train[1])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at some indices."""
        return self._take(self.train, indices)

    def tests(self, most: int) -> int:
        """How many samples are evaluated."""
        return min(most, len(self.test[1]))

    def test_batches(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out samples, evenly spread where there are more than wanted."""
        count = self.tests(most)
        chosen = torch.arange(count, device=self.test[1].device) * len(self.test[1]) // count
        for at in range(0, count, TEST_CHUNK):
            yield self._take(self.test, chosen[at : at + TEST_CHUNK])

    def _take(self, parts: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_text:
            return parts[0].index_select(0, indices), parts[1].index_select(0, indices)
        codes, starts = parts
        places = starts.index_select(0, indices)[:, None] + torch.arange(SEQUENCE + 1, device=codes.device)
        windows = codes[places]
        return windows[:, :-1], windows[:, 1:]


def prepare(source: Path, folder: Path) -> None:
    """Decode the images and copy the texts into one small folder."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[str, np.ndarray]]] = {"train": [], "test": []}
    with tarfile.open(source / "cifar10" / "cifar10_subset.tar") as tar:
        for member in sorted((m for m in tar if m.isfile()), key=lambda m: m.name):
            split, name = member.name.split("/")[-3:-1]
            file = tar.extractfile(member)
            if file is not None and split in found:
                found[split].append((name, np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))))
    names = sorted({name for name, _ in found["train"]})
    arrays = {}
    for split, most in (("train", TRAIN_PER_CLASS), ("test", TRAIN_PER_CLASS)):
        kept = [(names.index(n), image) for name in names for n, image in _of(found[split], name)[:most]]
        arrays[f"{split}_images"] = np.stack([image for _, image in kept]).transpose(0, 3, 1, 2)
        arrays[f"{split}_classes"] = np.array([index for index, _ in kept], np.int64)
    np.savez_compressed(folder / "images.npz", names=np.array(names), **arrays)
    (folder / "text").mkdir(exist_ok=True)
    for files in TEXTS.values():
        for file_name in files:
            shutil.copy(source / "text" / file_name, folder / "text" / file_name)


def _of(images: list[tuple[str, np.ndarray]], name: str) -> list[tuple[str, np.ndarray]]:
    return [entry for entry in images if entry[0] == name]


def load_roles(folder: Path, device: torch.device, *, small: bool = False) -> dict[tuple[str, str], Split]:
    """Every (kind, role) on the device; ``small`` keeps a little of each, to try the program."""
    roles: dict[tuple[str, str], Split] = {}
    with np.load(folder / "images.npz") as file:
        arrays = {key: file[key] for key in ("train_images", "train_classes", "test_images", "test_classes")}
    role_of = np.array([CLASS_ROLES[i % len(CLASS_ROLES)] for i in range(int(arrays["train_classes"].max()) + 1)])
    pretraining = arrays["train_images"][role_of[arrays["train_classes"]] == "pretrain"] / 255
    mean, deviation = (f(pretraining, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    for role in CLASS_ROLES:
        own = np.flatnonzero(role_of == role)
        parts = []
        for split in ("train", "test"):
            here = np.flatnonzero(np.isin(arrays[f"{split}_classes"], own))[:: 20 if small else 1]
            images = (arrays[f"{split}_images"][here] / 255 - mean) / deviation
            classes = np.searchsorted(own, arrays[f"{split}_classes"][here])
            parts.append((_on(images.astype(np.float32), device), _on(classes.astype(np.int64), device)))
        roles["image", role] = Split(parts[0], parts[1], len(own), is_text=False)
    for role, files in TEXTS.items():
        roles["text", role] = text_split([folder / "text" / name for name in files], device, small=small)
    return roles


def text_split(files: list[Path], device: torch.device, *, small: bool = False) -> Split:
    """The data of one role from its texts."""
    code = {character: index for index, character in enumerate(ASCII)}
    texts = [file.read_text(encoding="utf-8")[: 20_000 if small else None] for file in files]
    coded = [np.array([code.get(character, 0) for character in text], np.int64) for text in texts]
    cuts = [len(codes) * 9 // 10 for codes in coded]
    train = _windows([codes[:cut] for codes, cut in zip(coded, cuts, strict=True)], SEQUENCE // 2, device)
    test = _windows([codes[cut:] for codes, cut in zip(coded, cuts, strict=True)], SEQUENCE, device)
    return Split(train, test, len(ASCII), is_text=True)


def _windows(texts: list[np.ndarray], stride: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts end to end, and the places where windows begin that lie inside one of them."""
    starts, offset = [], 0
    for codes in texts:
        starts.append(np.arange(offset, offset + len(codes) - SEQUENCE, stride))
        offset += len(codes)
    return _on(np.concatenate(texts), device), _on(np.concatenate(starts).astype(np.int64), device)


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
