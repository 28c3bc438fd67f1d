"""Batch sizes that change under way in real Lightning and Transformers trainings; only the board is simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from profile_helpers import COST
from torch.utils.data import DataLoader, Dataset

from underwatt.adapters.lightning import LightningCallback
from underwatt.adapters.transformers import TransformersCallback
from underwatt.device.registry import open_device
from underwatt.events import Noted
from underwatt.runlog.log import read_log

SAMPLES, OWN = 1001, 16
SIZES = (8, 16, 32, 64)
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
]


class BoomError(Exception):
    """Stands for a kill: nothing after it is done."""


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points, each with its own number."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"inputs": row, "labels": (row.sum() > 0).long(), "number": torch.tensor(index)}


class Net(torch.nn.Module):
    """Remembers the numbers that it was trained on, batch by batch, and can break."""

    def __init__(self, breaks_at: int = -1) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(8, 2), torch.nn.Dropout(0.2)
        self.seen: list[list[int]] = []
        self.breaks_at = breaks_at

    def forward(self, inputs: Any, labels: Any, number: Any) -> dict[str, torch.Tensor]:
        if self.training:
            if len(self.seen) == self.breaks_at:
                raise BoomError
            self.seen.append(number.tolist())
        return {"loss": torch.nn.functional.cross_entropy(self.layer(self.drop(inputs)), labels)}


class Module(pl.LightningModule):
    def __init__(self, net: Net, schedule: Callable[[Any, int], Any] | None) -> None:
        super().__init__()
        self.net, self.schedule, self.lrs = net, schedule, []

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: Any) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train_lightning(
    folder: Path,
    *,
    net: Net,
    epochs: int = 3,
    parts: int = 1,
    workers: int = 0,
    resume: bool = False,
    drop_last: bool = False,
    **more: Any,
) -> Any:
    """Train with the callback; the module."""
    pl.seed_everything(0, verbose=False)
    net.layer.reset_parameters()
    budget = callback(LightningCallback, folder, more)
    schedule = more.pop("lr_schedule", None)
    saving = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=more.pop("save_steps", 7), save_top_k=-1, save_last=True
    )
    trainer = pl.Trainer(
        callbacks=[budget, saving],
        max_epochs=epochs,
        accumulate_grad_batches=parts,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    module = Module(net, schedule)
    loader = DataLoader(Points(), OWN, shuffle=True, num_workers=workers, drop_last=drop_last)
    trainer.fit(module, loader, DataLoader(Points(), 64), ckpt_path=str(folder / "last.ckpt") if resume else None)
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler, "the loader was not put back"
    return trainer


def train_transformers(
    folder: Path,
    *,
    net: Net,
    epochs: int = 3,
    parts: int = 1,
    workers: int = 0,
    resume: bool = False,
    drop_last: bool = False,
    **more: Any,
) -> Any:
    torch.manual_seed(0)
    net.layer.reset_parameters()
    budget = callback(TransformersCallback, folder, more)
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=epochs,
        per_device_train_batch_size=OWN,
        gradient_accumulation_steps=parts,
        dataloader_num_workers=workers,
        dataloader_drop_last=drop_last,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=1e-2,
        remove_unused_columns=False,
        logging_steps=5,
        **{"save_steps": 7, **more},
    )
    trainer = transformers.Trainer(net, args, train_dataset=Points(), eval_dataset=Points(), callbacks=[budget])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def callback(kind: Any, folder: Path, more: dict[str, Any]) -> Any:
    given = {"budget_w": 4.0, "batch_sizes": SIZES, "cost": COST, "device": open_device("virtual:nano")}
    ours = {"budget_w", "batch_sizes", "schedule", "convergence", "lr_rule", "device", "cost"} & set(more)
    return kind(folder=folder / "run", **given | {name: more.pop(name) for name in ours})


def epochs_of(seen: list[list[int]]) -> list[list[int]]:
    numbers = [number for batch in seen for number in batch]
    return [sorted(numbers[begin : begin + SAMPLES]) for begin in range(0, len(numbers), SAMPLES)]


def last_log(folder: Path) -> Any:
    return read_log(max(folder.glob("run*/log.jsonl"), key=lambda path: path.stat().st_mtime))


TRAINERS = pytest.mark.parametrize("train", [train_lightning, train_transformers])


@TRAINERS
@pytest.mark.parametrize(("parts", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_every_sample_of_an_epoch_is_trained_once_while_the_batch_size_changes(
    train: Any, parts: int, workers: int, tmp_path: Path
) -> None:
    net = Net()
    trained = train(tmp_path, net=net, epochs=3, parts=parts, workers=workers)
    assert epochs_of(net.seen) == [list(range(SAMPLES))] * 3
    sizes = [len(batch) for batch in net.seen]
    assert len(set(sizes)) > 3, "the batch size never changed"
    end = last_log(tmp_path).end
    assert (end.outcome, end.restored, end.samples) == ("finished", True, 3 * SAMPLES)
    steps = getattr(trained, "global_step", None) or trained.state.global_step
    assert steps == end.steps == math.ceil(len(sizes) / parts)
    if train is train_transformers:
        assert trained.state.epoch == 3.0


@TRAINERS
@pytest.mark.parametrize(("breaks_at", "workers"), [(11, 0), (60, 0), (60, 2)])
def test_a_training_that_was_killed_goes_on_with_the_samples_that_are_left(
    train: Any, breaks_at: int, workers: int, tmp_path: Path
) -> None:
    first, second = Net(breaks_at), Net()
    with pytest.raises(BoomError):
        train(tmp_path, net=first, workers=workers)
    at = json_step(tmp_path, train)
    assert 0 < at < breaks_at
    train(tmp_path, net=second, workers=workers, resume=True)
    assert epochs_of(first.seen[:at] + second.seen) == [list(range(SAMPLES))] * 3


def json_step(folder: Path, train: Any) -> int:
    """The step of the newest checkpoint."""
    if train is train_lightning:
        return int(torch.load(folder / "last.ckpt", weights_only=False)["global_step"])
    return max(int(path.name.split("-")[1]) for path in (folder / "trainer").glob("checkpoint-*"))


@TRAINERS
def test_going_on_is_exact(train: Any, tmp_path: Path) -> None:
    """At one batch size, which is not the trainer's own, a training in two parts ends with the very weights of one."""
    weights = []
    for name, breaks_at in (("whole", -1), ("killed", 50)):
        net = Net(breaks_at)
        try:
            train(tmp_path / name, net=net, batch_sizes=(32,))
        except BoomError:
            net = Net()
            train(tmp_path / name, net=net, batch_sizes=(32,), resume=True)
        weights.append(torch.cat([value.detach().flatten() for value in net.parameters()]))
    assert torch.equal(*weights)


@TRAINERS
@pytest.mark.parametrize("breaks_at", [31, 32, 33])
def test_a_training_that_was_killed_at_the_turn_of_an_epoch_goes_on(train: Any, breaks_at: int, tmp_path: Path) -> None:
    first, second = Net(breaks_at), Net()
    with pytest.raises(BoomError):
        train(tmp_path, net=first, batch_sizes=(32,), save_steps=1)
    assert json_step(tmp_path, train) == breaks_at
    train(tmp_path, net=second, batch_sizes=(32,), save_steps=1, resume=True)
    assert len(first.seen + second.seen) == 3 * 32
    assert epochs_of(first.seen + second.seen) == [list(range(SAMPLES))] * 3


@TRAINERS
@pytest.mark.parametrize(("breaks_at", "then"), [(30, 64), (62, 32), (70, 64)])
def test_going_on_where_the_last_batch_is_dropped(train: Any, breaks_at: int, then: int, tmp_path: Path) -> None:
    first, second, own = Net(breaks_at), Net(), SAMPLES // 32
    with pytest.raises(BoomError):
        train(tmp_path, net=first, batch_sizes=(32,), save_steps=1, drop_last=True)
    assert json_step(tmp_path, train) == breaks_at
    train(tmp_path, net=second, batch_sizes=(then,), save_steps=1, drop_last=True, resume=True)
    whole, begun = divmod(breaks_at, own)
    rest = max(1, (SAMPLES - begun * 32) // then) if begun else 0
    assert len(second.seen) == rest + (3 - whole - (begun > 0)) * (SAMPLES // then)
    numbers = [number for batch in first.seen[whole * own :] + second.seen[:rest] for number in batch]
    assert len(set(numbers)) == len(numbers), "none of this epoch twice"


def steps_and_rate(train: Any, trained: Any) -> tuple[int, float]:
    """Steps of the optimizer, and the rate that its schedule has come to."""
    if train is train_lightning:
        return trained.global_step, trained.optimizers[0].param_groups[0]["lr"]
    return trained.state.global_step, trained.optimizer.param_groups[0]["lr"]


@TRAINERS
@pytest.mark.parametrize(("count", "steps"), [("samples", 25), ("steps", 100)])
def test_steps_mean_samples_or_steps_as_the_user_says(train: Any, count: str, steps: int, tmp_path: Path) -> None:
    net = Net()
    schedule = {"lr_schedule": lambda o, n: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, n)}
    more = schedule if train is train_lightning else {"lr_scheduler_type": "linear"}
    epochs = -1 if train is train_lightning else 3
    trained = train(tmp_path, net=net, epochs=epochs, batch_sizes=(64,), max_steps=100, schedule=count, **more)
    made, rate = steps_and_rate(train, trained)
    # The first batches are the trainer's own: they were prepared before the first step.
    assert made == pytest.approx(steps, abs=2)
    assert rate == pytest.approx(0.0, abs=4e-4)
    if count == "samples":
        assert len(set(map(tuple, net.seen))) == len(net.seen)
        assert sum(map(len, net.seen)) == pytest.approx(100 * OWN, abs=64 + OWN)


@TRAINERS
def test_the_learning_rate_follows_by_its_rule(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step
    net = Net()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    more = {} if train is train_lightning else {"lr_scheduler_type": "constant"}
    train(tmp_path, net=net, epochs=2, **more)
    # PyTorch wraps a step with the hooks that scale its rate, inside of which ours is.
    assert rates == pytest.approx([1e-2 * math.sqrt(len(batch) / OWN) for batch in net.seen], rel=1e-6)


@TRAINERS
def test_mixed_precision_and_evaluation_go_on_as_ever(train: Any, tmp_path: Path) -> None:
    more: dict[str, Any] = {"precision": "bf16-mixed", "val_check_interval": 20}
    if train is train_transformers:
        more = {"bf16": True, "eval_strategy": "steps", "eval_steps": 20}
    net = Net()
    train(tmp_path, net=net, epochs=2, **more)
    assert epochs_of(net.seen) == [list(range(SAMPLES))] * 2


class OwnBatches(torch.utils.data.BatchSampler):
    """A batch sampler of the user's."""


def own_loader(trainer: Any) -> Any:
    data = Points()
    return DataLoader(data, batch_sampler=OwnBatches(range(len(data)), OWN, False))


def test_where_it_cannot_it_says_so_and_tunes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes() -> str:
        return " ".join(event.text for event in last_log(tmp_path).of(Noted))

    train_lightning(tmp_path, net=Net(), epochs=1, val_check_interval=0.5)
    assert "val_check_interval is a part of an epoch" in notes()
    train_lightning(tmp_path, net=Net(), epochs=1, limit_train_batches=10)
    assert "number of batches in an epoch is limited" in notes()
    monkeypatch.setattr(transformers.Trainer, "get_train_dataloader", own_loader)
    net = Net()
    train_transformers(tmp_path, net=net, epochs=1)
    assert "it has a batch sampler of its own. Power mode and pauses are tuned." in notes()
    assert {len(batch) for batch in net.seen} == {OWN, SAMPLES % OWN}
