"""Real Trainers of Lightning and Transformers on a virtual Jetson Nano at a tight budget: with and without us.

    python benchmarks/trainers.py --json OUT [--trainers lightning,transformers] [--jobs long,short] [--seeds N]
                                  [--first SEED]
    python benchmarks/trainers.py --methods "" --join PIECE.json ... --json OUT       what was run in pieces, as one

Simulated: the board. Real: the trainers, the trainings, their scores, the callback and its search (from nothing, while
it trains; its computing time is added). Both methods train the same number of epochs from the same weights.

long        a small network that costs on the board what a larger one does (``LARGER``, as in ``cold.py``), so that a
            training takes half an hour there and seconds here. Its learning rate is that of a small grid with which
            ``fixed`` meets the target soonest.
short       the same network at its own cost: a minute or some, hardly longer than a search, under a learning rate so
            small that it lasts at all. What is shown is that a search does not take what it cannot give back.

underwatt   the callback, offered batch sizes; every sample of every epoch is counted
fixed       the trainer's own batch size, the GPU clock as high as the budget allows and all else at its highest: what
            lowering one clock gives, known beforehand by the board's truth
killed      as ``underwatt``, killed in the middle and gone on with from the last checkpoint: only its samples count

``time_s`` is the device's time when a test of the model first met the target, ``final`` the score after the last epoch.
``best_mode_s`` is what ``fixed`` would have taken in the fastest of all modes that truly keep the budget, which nobody
knows (by the board's true time of a step). The budget lies a fifth of the way from the least to the most watts that the
clock alone gives at the own batch size.
"""

# ruff: noqa: ARG002, D101 - the signatures and names are those of the trainers
from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import lightning.pytorch as pl
import transformers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from _table import Column, add_output, as_table, told, write
from _trainer_cases import Case, Counting, cases
from edge import virtual
from underwatt.adapters.lightning import LightningCallback
from underwatt.adapters.transformers import TransformersCallback
from underwatt.control.controller import Controller
from underwatt.predict.base import SettingArray
from underwatt.rivals.compare import by_clock_alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.records import PowerMode, WorkloadCost

BOARD = "nano"
METHODS = ("underwatt", "fixed", "killed")
JOBS = ("long", "short")


@dataclass
class Course:
    """What a training came to: scores at moments of the device's time."""

    device: Any
    begun_s: float
    thought_s: float = 0.0
    scores: list[tuple[float, float]] = field(default_factory=list)

    def scored(self, score: float) -> None:
        """The model was tested."""
        self.scores.append((self.device.clock.now_s() - self.begun_s + self.thought_s, score))


class KilledError(Exception):
    """Stands for a kill: nothing after it is done."""


@dataclass
class Fixed:
    """The time that steps and tests take on a board at whose setting nothing changes."""

    device: Any
    cost: WorkloadCost

    def step(self, samples: int) -> None:
        """A step of the training."""
        self.device.run_step(self.cost, samples)

    def test(self, samples: int) -> None:
        """A batch of a test."""
        self.device.run_step(self.cost.of_test(), samples)


class LightningFixed(Callback):
    def __init__(self, fixed: Fixed) -> None:
        self.fixed = fixed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.fixed.step(len(batch["labels"]))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.fixed.test(len(batch["labels"]))


class TransformersFixed(transformers.TrainerCallback):
    def __init__(self, fixed: Fixed, samples: int) -> None:
        self.fixed, self.samples = fixed, samples

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        left = self.samples - args.train_batch_size * (
            state.global_step % math.ceil(self.samples / args.train_batch_size)
        )
        self.fixed.step(min(args.train_batch_size, left))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.fixed.test(args.eval_batch_size)


class Module(pl.LightningModule):
    def __init__(self, model: Counting, case: Case, course: Course, dies_at: float) -> None:
        super().__init__()
        self.model, self.case, self.course, self.dies_at = model, case, course, dies_at
        self.right: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        if len(self.model.seen) >= self.dies_at:
            raise KilledError
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any) -> None:
        self.right.append(self.model(**batch)["right"])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.course.scored(float(torch.cat(self.right).mean()))
        self.right.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.case.lr)


def by_lightning(
    case: Case, model: Counting, ours: Any, course: Course, folder: Path, dies_at: float, *, resume: bool
) -> None:
    saving = ModelCheckpoint(folder, every_n_train_steps=50, save_last=True)
    trainer = pl.Trainer(
        max_epochs=case.epochs,
        callbacks=[ours, saving] if math.isfinite(dies_at) or resume else [ours],
        logger=False,
        enable_checkpointing=math.isfinite(dies_at) or resume,
        num_sanity_val_steps=0,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, test = (DataLoader(part, case.batch_size, shuffle=part is case.data[0]) for part in case.data)
    again = str(folder / "last.ckpt") if resume else None
    trainer.fit(Module(model, case, course, dies_at), train, test, ckpt_path=again, weights_only=False)


class Noting(transformers.TrainerCallback):
    def __init__(self, course: Course, model: Counting, dies_at: float) -> None:
        self.course, self.model, self.dies_at = course, model, dies_at

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if len(self.model.seen) >= self.dies_at:
            raise KilledError

    def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
        self.course.scored(metrics["eval_right"])


def by_transformers(
    case: Case, model: Counting, ours: Any, course: Course, folder: Path, dies_at: float, *, resume: bool
) -> None:
    is_saving = math.isfinite(dies_at) or resume
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=case.epochs,
        per_device_train_batch_size=case.batch_size,
        learning_rate=case.lr,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="steps" if is_saving else "no",
        save_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
        logging_strategy="no",
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=case.data[0],
        eval_dataset=case.data[1],
        callbacks=[ours, Noting(course, model, dies_at)],
        compute_metrics=lambda found: {"right": float(np.mean(found.predictions))},
    )
    trainer.train(resume_from_checkpoint=resume or None)


TRAIN = {"lightning": by_lightning, "transformers": by_transformers}
CALLBACKS = {"lightning": LightningCallback, "transformers": TransformersCallback}


@dataclass(frozen=True)
class Truth:
    """What the board would take at the trainer's own batch size: for those who need not measure."""

    budget_w: float
    mode: PowerMode  # by the clock alone
    best_ratio: float  # of the time of a step in the best of all modes to that


def truth_of(case: Case, cost: WorkloadCost) -> Truth:
    device = virtual(BOARD, 0)
    space, board = device.space, device.board
    settings = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), (case.batch_size,))
    modes = [settings[row].mode for row in range(len(settings))]
    clock_alone = np.flatnonzero(by_clock_alone(settings))
    watts = {int(row): board.true_power_w(cost, modes[row], case.batch_size) for row in clock_alone}
    low_w, high_w = min(watts.values()), max(watts.values())
    budget_w = round(low_w + 0.2 * (high_w - low_w), 2)

    def fastest(rows: Any) -> PowerMode:
        fitting = [row for row in rows if board.true_power_w(cost, modes[row], case.batch_size) <= budget_w]
        return modes[min(fitting, key=lambda row: board.true_step_s(cost, modes[row], case.batch_size))]

    mode, best = fastest(watts), fastest(range(len(modes)))
    own_s, best_s = (board.true_step_s(cost, one, case.batch_size) for one in (mode, best))
    return Truth(budget_w, mode, best_s / own_s)


def thinking(course: Course) -> Any:
    """Have the controller's own computing time counted; gives what undoes that."""
    own = Controller.after_step

    def counted(self: Any, batch_size: int) -> None:
        began = time.process_time()
        own(self, batch_size)
        course.thought_s += time.process_time() - began

    Controller.after_step = counted  # type: ignore[method-assign]
    return lambda: setattr(Controller, "after_step", own)


def train(case: Case, cost: WorkloadCost, truth: Truth, method: str, seed: int) -> dict[str, Any]:
    device, samples = virtual(BOARD, seed), len(case.data[0])
    course, seen = Course(device, device.clock.now_s()), []
    steps = case.epochs * math.ceil(samples / case.batch_size)
    lives = (steps / 8, math.inf) if method == "killed" else (math.inf,)  # batches grow, so that this is the middle
    undo = thinking(course)
    with tempfile.TemporaryDirectory() as folder:
        for life, dies_at in enumerate(lives):
            torch.manual_seed(seed)
            model = Counting(case.make())
            if method == "fixed":
                device.apply(truth.mode)
                fixed = Fixed(device, cost)
                ours: Any = LightningFixed(fixed) if case.trainer == "lightning" else TransformersFixed(fixed, samples)
            else:
                ours = CALLBACKS[case.trainer](
                    budget_w=truth.budget_w, batch_sizes=case.sizes, device=device, cost=cost, name=f"{case.trainer}"
                )
            try:
                TRAIN[case.trainer](case, model, ours, course, Path(folder), dies_at, resume=life > 0)
            except KilledError:
                seen += model.seen[: 50 * ((len(model.seen) - 1) // 50)]  # up to the last checkpoint
            else:
                seen += model.seen
    undo()
    numbers = [number for batch in seen for number in batch]
    epochs = [sorted(numbers[begin : begin + samples]) for begin in range(0, len(numbers), samples)]
    met = [at_s for at_s, score in course.scores if score >= case.target]
    return {
        "trainer": case.trainer,
        "job": case.job,
        "device": device.info.name,
        "budget_w": truth.budget_w,
        "seed": seed,
        "method": method,
        "time_s": round(met[0], 3) if met else None,
        "best_mode_s": round(met[0] * truth.best_ratio, 3) if met and method == "fixed" else None,
        "reached": bool(met),
        "final": round(course.scores[-1][1], 4),
        "whole_s": round(course.scores[-1][0], 3),
        "each_sample_once": epochs == [list(range(samples))] * case.epochs,
        "batch_sizes": sorted({len(batch) for batch in seen}),
    }


COLUMNS = (
    Column("trainer"),
    Column("job"),
    Column("method"),
    Column("seed"),
    Column("budget_w", "W", ".2f"),
    Column("time_s", "to target s", ".1f"),
    Column("best_mode_s", "in the best mode s", ".1f"),
    Column("whole_s", "in all s", ".1f"),
    Column("final", "", ".4f"),
    Column("each_sample_once", "each sample once"),
    Column("here_s", "here s"),
)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{job}: {line}"
        for job in dict.fromkeys(row["job"] for row in rows)
        for line in (
            *speeds([row for row in rows if row["job"] == job]),
            *finals([row for row in rows if row["job"] == job]),
        )
    ]


def speeds(rows: list[dict[str, Any]]) -> Iterator[str]:
    ours = {(row["trainer"], row["seed"]): row for row in rows if row["method"] == "underwatt"}
    others = [(row, ours.get((row["trainer"], row["seed"]), {})) for row in rows if row["method"] == "fixed"]
    for what, key, own in (
        ("to the target as its own batch size and clock", "time_s", "time_s"),
        ("to the target as its own batch size, best mode", "best_mode_s", "time_s"),
        ("to the end as its own batch size and clock", "whole_s", "whole_s"),
    ):
        for trainers in (*([name] for name in dict.fromkeys(row["trainer"] for row in rows)), None):
            pairs = [(row[key], mine.get(own)) for row, mine in others if not trainers or row["trainer"] in trainers]
            if ratios := [theirs_s / ours_s for theirs_s, ours_s in pairs if theirs_s and ours_s]:
                yield (
                    f"{trainers[0] if trainers else 'both'}: {statistics.geometric_mean(ratios):.2f} times as fast "
                    f"{what} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} of {len(pairs)} pairs)"
                )


def finals(rows: list[dict[str, Any]]) -> Iterator[str]:
    for trainer in dict.fromkeys(row["trainer"] for row in rows):
        scores = {
            method: {row["seed"]: row["final"] for row in rows if (row["trainer"], row["method"]) == (trainer, method)}
            for method in ("underwatt", "fixed")
        }
        if min(map(len, scores.values())) > 1:
            means = {method: statistics.mean(found.values()) for method, found in scores.items()}
            noise = statistics.stdev(scores["fixed"].values())
            yield (
                f"{trainer}: final score {means['underwatt']:.4f} with, {means['fixed']:.4f} without; between seeds "
                f"it differs by {noise:.4f} (one standard deviation, without)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    parser.add_argument("--trainers", default="lightning,transformers")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--join", type=Path, nargs="*", default=(), help="files of rows that were made before")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = [row for path in arguments.join for row in json.loads(path.read_text(encoding="utf-8"))]
    methods = [method for method in arguments.methods.split(",") if method]
    for trainer, job in product(arguments.trainers.split(","), arguments.jobs.split(",")) if methods else ():
        case = cases()[trainer, job]
        cost = case.cost()
        truth = truth_of(case, cost)
        for seed, method in product(range(arguments.first, arguments.first + arguments.seeds), methods):
            if method == "killed" and seed != arguments.first:
                continue
            began_s = time.monotonic()
            rows.append(train(case, cost, truth, method, seed))
            rows[-1]["here_s"] = round(time.monotonic() - began_s)
            told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    print(*summary(rows), sep="\n")
    write("trainers", rows, arguments)


if __name__ == "__main__":
    main()
