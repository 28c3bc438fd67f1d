"""What the trainers of ``trainers.py`` train: small networks, their data, and what a step costs on the board."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import transformers
from torch.utils.data import Dataset

from data import digits, grammar_text
from edge import costs
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job

if TYPE_CHECKING:
    from underwatt.records import WorkloadCost

LENGTH, NOISE = 32, 0.4
LARGER = {"lightning": "resnet18", "transformers": "char_transformer"}


class Numbered(Dataset[dict[str, Any]]):
    """Samples that bring their own number, which the model counts."""

    def __init__(self, rows: list[dict[str, Any]], noise: float = 0.0) -> None:
        self.rows, self.noise = rows, noise  # the noise is another one each time a picture is seen

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.noise:
            row = row | {"images": row["images"] + self.noise * torch.randn(row["images"].shape)}
        return {**row, "number": torch.tensor(index)}


class Counting(torch.nn.Module):
    """A network that notes which samples it was trained on, step by step."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, []

    def forward(self, number: Any = None, labels: Any = None, **inputs: Any) -> Any:
        if self.training and number is not None and number.device.type != "meta":
            self.seen.append(number.tolist())
        found = self.net(**inputs)
        logits = getattr(found, "logits", found)
        if logits.dim() == 3:  # a text: each character tells the next one
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        right = (logits.argmax(-1) == labels).float().mean()
        return {"loss": loss, "right": right.expand(len(labels))}


def convolutions() -> torch.nn.Module:
    class Net(torch.nn.Sequential):
        def forward(self, images: Any) -> Any:
            return super().forward(images)

    return Net(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 16, 10),
    )


def letters() -> torch.nn.Module:
    sizes = {"vocab_size": 128, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    # Weights that are shared can only be saved by a Trainer that knows the model, and this one is wrapped.
    sizes["tie_word_embeddings"] = False
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def pictures() -> tuple[Numbered, Numbered]:
    """scikit-learn's digits with much noise on them, a fifth held out: it takes a while to see through."""
    images, classes = digits()
    chance = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=chance).tolist()
    noisy = images + NOISE * torch.randn(images.shape, generator=chance)
    held_out = len(images) // 5
    train = [{"images": images[at], "labels": classes[at]} for at in order[held_out:]]
    return Numbered(train, NOISE), Numbered([{"images": noisy[at], "labels": classes[at]} for at in order[:held_out]])


def sentences() -> tuple[Numbered, Numbered]:
    codes = torch.tensor(list(grammar_text(1500, seed=0).encode("ascii")))
    rows = [{"input_ids": part, "labels": part} for part in codes.split(LENGTH) if len(part) == LENGTH]
    return Numbered(rows[200:]), Numbered(rows[:200])


@dataclass(frozen=True)
class Case:
    """A trainer's job: what people would have in their script."""

    trainer: str
    job: str
    make: Any
    data: tuple[Numbered, Numbered]
    batch_size: int
    lr: float
    target: float
    epochs: int
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128)

    def cost(self) -> WorkloadCost:
        """What a step costs on the board, by shapes."""
        if self.job == "long":
            return costs()[LARGER[self.trainer]]
        keys = [key for key in self.data[0].rows[0] if key != "labels"]

        def forward(model: Any, batch: Any) -> Any:
            return model(**{key: batch[key] for key in keys}, labels=batch["labels"])["loss"], None

        rows = self.data[0].rows
        return count_cost(
            Job(lambda: Counting(self.make()), rows, target=1.0, forward=forward, loss=lambda one, _: one)
        )


def cases() -> dict[tuple[str, str], Case]:
    every = (
        Case("lightning", "long", convolutions, pictures(), 16, 4e-3, 0.76, 20),
        Case("lightning", "short", convolutions, pictures(), 16, 2e-4, 0.72, 70),
        Case("transformers", "long", letters, sentences(), 8, 2e-3, 0.87, 10),
        Case("transformers", "short", letters, sentences(), 8, 3e-4, 0.80, 24),
    )
    return {(case.trainer, case.job): case for case in every}
