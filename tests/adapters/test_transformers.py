"""The Transformers callback on real trainings; only the board is simulated."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
from profile_helpers import COST
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from underwatt.adapters.callback_base import NOT_OFFERED
from underwatt.adapters.transformers import TransformersCallback
from underwatt.device.registry import open_device
from underwatt.errors import InputError, MissingExtraError, OutOfMemoryError
from underwatt.events import Measured, Noted, Progressed, Started
from underwatt.runlog.inbox import post_budget, running_runs
from underwatt.runlog.log import read_log

EXAMPLES = Path(__file__).parents[2] / "examples"


class At(TrainerCallback):
    """Does something after a step of the optimizer."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.do()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.layer(inputs), labels)}


def data() -> list[dict[str, torch.Tensor]]:
    rows = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    return [{"inputs": row, "labels": (row.sum() > 0).long()} for row in rows]


def trainer(
    *callbacks: TrainerCallback, folder: Path, steps: int = 40, kind: type[Trainer] = Trainer, **more: Any
) -> Trainer:
    torch.manual_seed(0)
    more = {
        "per_device_train_batch_size": 16,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **more,
    }
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=5,
        **more,
    )
    return kind(Net(), args, train_dataset=data(), eval_dataset=data(), callbacks=list(callbacks))


def weights(trained: Trainer) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in trained.model.parameters()])


def test_a_training_under_a_budget_that_falls(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    seen: list[dict[str, str]] = []
    budget = TransformersCallback(budget_w=6, device=device, cost=COST, folder=tmp_path / "run")
    tuned = trainer(
        budget,
        At(20, lambda: seen.append(dict(device.snapshot()))),
        At(100, lambda: post_budget(tmp_path / "run", "4W", "command")),
        folder=tmp_path,
        steps=250,
    )
    tuned.train()

    record = read_log(tmp_path / "run" / "log.jsonl")
    at_s, watts = record.budget_steps
    assert watts.tolist() == [6, 4]
    assert record.start.job == "Net (18 parameters)"
    assert record.start.batch_sizes == (16,)
    assert record.end is not None
    assert (record.end.outcome, record.end.restored, record.end.steps) == ("finished", True, 250)
    assert record.energy_over_j(window_s=1.0, lag_s=2.5) < 0.01 * record.energy_j()
    late = record.power.at_s > at_s[1] + 2.0
    assert record.power.power_w[late].mean() <= 4.0
    assert record.power.power_w[record.power.at_s < at_s[1]].max() > 4.8  # or holding 4 W would prove nothing
    assert NOT_OFFERED in record.of(Noted)[0].text
    losses = [event.loss for event in record.of(Progressed) if event.loss is not None]
    assert losses[-1] < losses[0]
    left_s = [event.time_left_s for event in record.of(Progressed) if event.time_left_s is not None]
    assert left_s[-1] < 1.5 < left_s[0], "a trainer knows how many steps there are, and so does the search"
    assert seen[0] != before
    assert dict(device.snapshot()) == before
    assert running_runs() == ()

    alone = trainer(folder=tmp_path, steps=250)  # and the budget has changed nothing about what was learnt
    alone.train()
    assert torch.equal(weights(tuned), weights(alone))


def test_the_trainers_progress_bar_ends_where_the_training_does(tmp_path: Path) -> None:
    budget = TransformersCallback(budget_w=6, device="virtual:nano", cost=COST, batch_sizes=(8, 16, 32))
    tuned = trainer(budget, folder=tmp_path, steps=100, disable_tqdm=False)
    [progress] = [one for one in tuned.callback_handler.callbacks if isinstance(one, ProgressCallback)]
    seen: list[tuple[int, int]] = []
    close = progress.on_train_end

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((progress.training_bar.n, progress.training_bar.total))
        close(*args, **kwargs)

    progress.on_train_end = note
    tuned.train()
    [(done, total)] = seen
    assert done == total == tuned.state.global_step != 100


class BoomError(Exception):
    pass


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(BoomError("no more"), "failed"), (KeyboardInterrupt(), "interrupted")],
    ids=["error", "ctrl-c"],
)
def test_the_board_is_put_back_after(error: BaseException, outcome: str, tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    seen: list[dict[str, str]] = []
    budget = TransformersCallback(budget_w=4, device=device, cost=COST, folder=tmp_path / "run")
    made = trainer(
        budget, At(20, lambda: seen.append(dict(device.snapshot()))), At(25, lambda: fail(error)), folder=tmp_path
    )
    with pytest.raises(type(error)):
        made.train()
    assert seen[0] != before
    assert dict(device.snapshot()) == before
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored, end.steps) == (outcome, True, 25)
    assert running_runs() == ()


def test_a_step_is_one_of_the_optimizer(tmp_path: Path) -> None:
    budget = TransformersCallback(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run", name="mine")
    trainer(budget, folder=tmp_path, gradient_accumulation_steps=4).train()
    record = read_log(tmp_path / "run" / "log.jsonl")
    assert record.start.job == "mine in 4 parts"
    assert record.start.batch_sizes == (64,)
    assert record.end is not None
    assert record.end.steps == 40


def test_a_step_of_fewer_passes_at_the_end_of_an_epoch_counts_as_such(tmp_path: Path) -> None:
    """Every third step of two seconds had 3 passes of 38, was paid for as a whole one, and counted as one."""
    seen = []

    class Seen(TransformersCallback):
        def _step_ended(self, loss: Any = None, passes: int = 0) -> None:
            seen.append(passes)
            super()._step_ended(loss, passes)

    budget = Seen(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run")
    trainer(budget, folder=tmp_path, steps=9, gradient_accumulation_steps=4).train()  # ten batches an epoch
    assert seen == [4, 4, 2] * 3
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert end.samples == 3 * 160


def test_evaluation_and_saving_belong_to_no_step(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    slow_s = 7.0

    class Slow(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            device.clock.sleep(slow_s)
            return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            device.clock.sleep(slow_s)
            return super()._save_checkpoint(*args, **kwargs)

    budget = TransformersCallback(budget_w=6, device=device, cost=COST, folder=tmp_path / "run")
    plan = {"eval_strategy": "steps", "eval_steps": 50, "save_strategy": "steps", "save_steps": 60}
    trainer(budget, folder=tmp_path, steps=200, kind=Slow, **plan).train()
    record = read_log(tmp_path / "run" / "log.jsonl")
    assert record.end is not None
    assert record.end.at_s > 7 * slow_s
    assert len(record.of(Measured)) >= 3
    assert all(event.measurement.step_s < 1 for event in record.of(Measured))
    assert all(math.isnan(event.step_s) or event.step_s < 1 for event in record.of(Progressed))


def test_what_cannot_be_held_is_said_before_the_first_step(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    with pytest.raises(InputError, match="needs budget_w or budget"):
        TransformersCallback(device=device)
    with pytest.raises(InputError, match="told what a step costs"):
        trainer(TransformersCallback(budget_w=6, device=device, folder=tmp_path / "run"), folder=tmp_path).train()
    budget = TransformersCallback(budget_w=6, device=device, cost=COST, batch_size=1024)
    with pytest.raises(OutOfMemoryError):
        trainer(budget, folder=tmp_path).train()
    late = trainer(folder=tmp_path)
    late.add_callback(TransformersCallback(budget_w=6, device=device, cost=COST))
    with pytest.raises(InputError, match="when that is made"):
        late.train()
    assert dict(device.snapshot()) == before
    assert running_runs() == ()


def test_a_training_that_begins_again_has_a_folder_of_its_own(tmp_path: Path) -> None:
    budget = TransformersCallback(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run")
    again = trainer(budget, folder=tmp_path, steps=3)
    for _ in range(2):
        again.train()
    for name in ("run", "run-2"):
        record = read_log(tmp_path / name / "log.jsonl")
        assert record.end is not None
        assert (record.end.outcome, record.end.steps, len(record.of(Started))) == ("finished", 3, 1)


def test_a_batch_size_that_the_trainer_halves_itself(tmp_path: Path) -> None:
    device = open_device("virtual:nano")
    before = dict(device.snapshot())
    errors = [RuntimeError("CUDA out of memory.")]
    budget = TransformersCallback(budget_w=6, device=device, cost=COST, folder=tmp_path / "run")
    stumbling = trainer(
        budget, At(5, lambda: fail(errors.pop()) if errors else None), folder=tmp_path, auto_find_batch_size=True
    )
    stumbling.train()
    assert read_log(tmp_path / "run" / "log.jsonl").start.batch_sizes == (16,)
    second = read_log(tmp_path / "run-2" / "log.jsonl")
    assert second.start.batch_sizes == (14,)
    assert second.end is not None
    assert second.end.steps == 40
    assert dict(device.snapshot()) == before


def test_only_the_first_process_controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TransformersCallback(budget_w=6, device="virtual:nano", cost=COST, folder=tmp_path / "run")
    made = trainer(budget, folder=tmp_path, steps=3)
    monkeypatch.setattr(made, "is_world_process_zero", lambda: False)
    made.train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_without_transformers_the_hint_says_how_to_get_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "underwatt.adapters.transformers")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'underwatt\[transformers\]'"):
        import underwatt.adapters.transformers  # noqa: F401


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["train_transformers.py", "--steps", "30", "--folder", str(tmp_path / "run")])
    runpy.run_path(str(EXAMPLES / "train_transformers.py"), run_name="__main__")
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("finished", True)
    assert end.samples == pytest.approx(30 * 16, abs=64), "the data of so many batches of its own"


def test_a_training_ends_where_the_joules_are_spent(tmp_path: Path) -> None:
    budget = TransformersCallback(
        budget="6W, 40J", device=open_device("virtual:nano"), cost=COST, folder=tmp_path / "run"
    )
    trainer(budget, folder=tmp_path, steps=5000).train()
    end = read_log(tmp_path / "run" / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("energy spent", True)
    assert 40 <= end.energy_j < 44
    assert 0 < end.steps < 5000
