"""The Lightning callback on real trainings; only the board is simulated."""

from __future__ import annotations

import contextlib
import math
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from profile_helpers import COST
from torch.utils.data import DataLoader, TensorDataset

from underwatt.adapters.callback_base import NOT_OFFERED
from underwatt.adapters.lightning import LightningCallback
from underwatt.adapters.tuner import Tuner
from underwatt.device.registry import open_device
from underwatt.errors import InputError, MissingExtraError, OutOfMemoryError
from underwatt.events import Measured, Noted, Progressed, Started
from underwatt.runlog.inbox import post_budget, running_runs
from underwatt.runlog.log import read_log
from underwatt.store.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = 160
# What Lightning says of our tiny trainings, and of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), classes)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class At(Callback):
    """Does something after a step of the optimizer."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.do()


class Watch(Callback):
    """Notes the board's state at each step, between our callback's."""

    def __init__(self, device: Any) -> None:
        self.device, self.seen = device, []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(dict(self.device.snapshot()))


def loader(batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size, shuffle=True)


def fit(*callbacks: Callback, steps: int = 40, batch_size: int = 16, validate: bool = False, **more: Any) -> Net:
    seed_everything(0, verbose=False)
    more = {"enable_checkpointing": False, "max_steps": steps, "max_epochs": -1, **more}
    trainer = Trainer(
        callbacks=list(callbacks),
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    net = Net()
    trainer.fit(net, loader(batch_size), loader(batch_size) if validate else None)
    return net


def test_a_training_under_a_budget_that_falls(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    budget = LightningCallback(
        budget_w=6, device=device, cost=COST, folder=tmp_path / "run", store=tmp_path / "store.db"
    )
    watch = Watch(device)
    net = fit(budget, watch, At(100, lambda: post_budget(tmp_path / "run", "4W", "command")), steps=250)

    record = read_log(tmp_path / "run" / "log.jsonl")
    at_s, watts = record.budget_steps
    assert watts.tolist() == [6, 4]
    assert record.end is not None
    assert (record.end.outcome, record.end.restored, record.end.steps) == ("finished", True, 250)
    assert record.energy_over_j(window_s=1.0, lag_s=2.5) < 0.01 * record.energy_j()
    late = record.power.at_s > at_s[1] + 2.0
    assert record.power.power_w[late].mean() <= 4.0
    assert record.power.power_w[record.power.at_s < at_s[1]].max() > 4.8  # or holding 4 W would prove nothing
    assert NOT_OFFERED in record.of(Noted)[0].text
    assert any(seen != before for seen in watch.seen)
    assert dict(device.snapshot()) == before
    assert running_runs() == ()
    with Store(tmp_path / "store.db") as store:
        (summary,) = store.summaries()
        profile = store.profile(summary.id)
    assert profile.workload.name == "Net (18 parameters)"
    assert {m.setting.batch_size for m in profile.measurements} == {16}

    left_s = [event.time_left_s for event in record.of(Progressed) if event.time_left_s is not None]
    assert left_s[-1] < 1.5 < left_s[0], "a trainer knows how many steps there are, and so does the search"

    alone = fit(steps=250)  # and the budget has changed nothing about what was learnt
    assert torch.equal(net.layer.weight, alone.layer.weight)


class BoomError(Exception):
    pass


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "seen", "outcome"),
    [(BoomError("no more"), BoomError, "failed"), (KeyboardInterrupt(), SystemExit, "interrupted")],
    ids=["error", "ctrl-c"],
)
def test_the_board_is_put_back_after(
    error: BaseException, seen: type[BaseException], outcome: str, tmp_path: Path
) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    budget = LightningCallback(budget_w=4, device=device, cost=COST, folder=tmp_path)
    watch = Watch(device)
    on_sigint = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(seen):
            fit(budget, watch, At(25, lambda: fail(error)))
    finally:
        signal.signal(signal.SIGINT, on_sigint)  # Lightning leaves Ctrl-C switched off
    assert watch.seen[-1] != before
    assert dict(device.snapshot()) == before
    end = read_log(tmp_path / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored, end.steps) == (outcome, True, 25)
    assert running_runs() == ()


def test_a_step_is_one_of_the_optimizer(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    fit(LightningCallback(budget_w=6, device=device, cost=COST, folder=tmp_path), steps=40, accumulate_grad_batches=4)
    record = read_log(tmp_path / "log.jsonl")
    assert record.start.job == "Net (18 parameters) in 4 parts"
    assert record.start.batch_sizes == (64,)
    assert record.end is not None
    assert record.end.steps == 40


def fit_slowly(tmp_path: Path, slow_s: float, *callbacks: Callback, **more: Any) -> Any:
    """Train 200 steps with validation and checkpoints that take their time on the board; the log."""
    device = open_device("virtual:nano")

    class Slow(Net):
        def validation_step(self, batch: Any) -> None:
            device.clock.sleep(slow_s / 10)  # ten batches

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            device.clock.sleep(slow_s)

    seed_everything(0, verbose=False)
    budget = LightningCallback(budget_w=6, device=device, cost=COST, folder=tmp_path / "run")
    trainer = Trainer(
        max_epochs=20,
        callbacks=[budget, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(Slow(), loader(), loader())
    return read_log(tmp_path / "run" / "log.jsonl")


def test_validation_and_checkpoints_belong_to_no_step(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=60)
    record = fit_slowly(tmp_path, 7.0, saving, check_val_every_n_epoch=5)
    assert record.end.steps == 200
    assert record.end.at_s > 7 * 7.0
    assert len(record.of(Measured)) >= 3
    assert all(event.measurement.step_s < 1 for event in record.of(Measured))
    assert all(math.isnan(event.step_s) or event.step_s < 1 for event in record.of(Progressed))


def test_validation_while_gradients_are_added_up_ends_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint follows the validation, and the step that was under way goes on after it."""
    away, spells = [0], [0]
    testing = Tuner.testing

    @contextlib.contextmanager
    def watched(tuner: Tuner) -> Iterator[None]:
        with testing(tuner):
            away[0] += 1
            spells[0] += 1
            yield
            away[0] -= 1

    class Trains(Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            assert not away[0]

        def on_before_backward(self, *_: Any) -> None:
            assert not away[0], "a training pass is taken for something else"

    monkeypatch.setattr(Tuner, "testing", watched)
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=False)
    fit(
        LightningCallback(budget_w=6, device="virtual:nano", cost=COST),
        saving,
        Trains(),
        steps=12,
        validate=True,
        enable_checkpointing=True,
        accumulate_grad_batches=4,
        val_check_interval=3,  # of ten batches an epoch: the second one falls into a step
    )
    assert spells[0] > 10


def test_what_validation_draws_is_not_taken_for_the_steps(tmp_path: Path) -> None:
    def first_watts(name: str, **more: Any) -> Any:
        record = fit_slowly(tmp_path / name, 2.0, enable_checkpointing=False, **more)
        return record.of(Measured)[0].measurement.power_w

    undisturbed_w = first_watts("none", limit_val_batches=0)
    assert first_watts("often", check_val_every_n_epoch=4) == pytest.approx(undisturbed_w, rel=0.05)


def test_what_cannot_be_held_is_said_before_the_first_step(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    with pytest.raises(InputError, match="needs budget_w or budget"):
        LightningCallback(device=device)
    with pytest.raises(InputError, match="told what a step costs"):
        fit(LightningCallback(budget_w=6, device=device, folder=tmp_path / "run"))
    with pytest.raises(OutOfMemoryError):
        fit(LightningCallback(budget_w=6, device=device, cost=COST), batch_size=1024)
    assert dict(device.snapshot()) == before
    assert running_runs() == ()


def test_a_batch_size_that_cannot_be_found_is_asked_for() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(16, 8), torch.ones(16, dtype=torch.long))] * 5)

    def train(**more: Any) -> LightningCallback:
        budget = LightningCallback(budget_w=6, device="virtual:nano", cost=COST, **more)
        Trainer(
            max_epochs=1,
            callbacks=[budget],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Net(), DataLoader(Stream(), batch_size=None))
        return budget

    with pytest.raises(InputError, match="batch_size=32"):
        train()
    train(batch_size=16)


def test_each_training_has_a_folder_of_its_own(tmp_path: Path) -> None:
    budget = LightningCallback(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run", name="mine")
    for _ in range(3):
        fit(budget, steps=3)
    for name in ("run", "run-2", "run-3"):
        record = read_log(tmp_path / name / "log.jsonl")
        assert record.start.job == "mine"
        assert len(record.of(Started)) == 1


def test_only_the_first_process_controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = LightningCallback(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "is_global_zero", property(lambda _: False))
        fit(budget, steps=3)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(Trainer, "world_size", property(lambda _: 2))
    fit(budget, steps=3)
    notes = read_log(tmp_path / "run" / "log.jsonl").of(Noted)
    assert any("decides for all" in note.text for note in notes)


def test_without_lightning_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "underwatt.adapters.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'underwatt\[lightning\]'"):
        import underwatt.adapters.lightning  # noqa: F401


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["train_lightning.py", "--epochs", "2", "--folder", str(tmp_path / "run")])
    runpy.run_path(str(EXAMPLES / "train_lightning.py"), run_name="__main__")
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored, end.samples) == ("finished", True, 2 * 1797)


def test_a_training_ends_where_the_joules_are_spent(tmp_path: Path) -> None:
    budget = LightningCallback(budget="6W, 40J", device=open_device("virtual:nano"), cost=COST, folder=tmp_path / "run")
    fit(budget, steps=5000)
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("energy spent", True)
    assert 40 <= end.energy_j < 44
    assert 0 < end.steps < 5000
