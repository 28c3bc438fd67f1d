"""A power budget for Transformers: one callback more for the ``Trainer``.

trainer = Trainer(model, args, train_dataset=data, callbacks=[
    TransformersCallback(budget_w=10, batch_sizes=(8, 16, 32, 64))])
"""

# ruff: noqa: ARG002 - the signatures are those of Transformers
from __future__ import annotations

import functools
import inspect
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._files import write_atomically
from underwatt._imports import require
from underwatt.adapters.callback_base import TrainerBudget
from underwatt.errors import InputError
from underwatt.jobs._torch import torch

require("accelerate", extra="transformers")
require("transformers", extra="transformers")

# After the check, whose error is the better one.
from transformers.trainer import Trainer  # noqa: E402
from transformers.trainer_callback import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments


STATE = "underwatt.pt"  # in a checkpoint's folder


class TransformersCallback(TrainerBudget, TrainerCallback):
    """Holds a power budget while a Transformers ``Trainer`` trains; everything is put back when that ends, however.

    Power mode, pauses and, where ``batch_sizes`` are offered, the batch size are tuned under way; an epoch is the same
    data at any of them, and a checkpoint knows which of its samples are left. A step is one step of the optimizer;
    evaluation and saving count for none, and are paced all the same. Logging, evaluation and saving every so many
    steps go on to count steps.
    """

    _guarded: Trainer | None = None
    _loss: float | None = None
    _limit_samples = math.inf
    _own_steps = 1  # of an epoch
    _passes = 0  # of the step under way, but for the last one

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Take part in what a trainer tells no callback: its loader, where it goes on, and an exception."""
        trainer = self._guarded = _trainer_under_construction()
        for name, around in (
            ("train", self._train),
            ("set_initial_training_values", self._count_steps),
            ("_init_training_state", self._find_place),
        ):
            if hasattr(trainer, name):  # the last two only in newer ones: without, the batch size stays
                setattr(
                    trainer,
                    name,
                    functools.wraps(getattr(trainer, name))(functools.partial(around, getattr(trainer, name))),
                )

    def _train(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        except BaseException as exc:
            self._end(error=exc)
            raise

    def _count_steps(self, count: Any, args: TrainingArguments, loader: Any, *more: Any) -> Any:
        """How many steps an epoch and the training have: as many as come, where batches change; else as ever."""
        found = count(args, loader, *more)
        parts = args.gradient_accumulation_steps
        why_not = "" if hasattr(self._guarded, "_init_training_state") else "this version of Transformers keeps it"
        if args.n_gpu > 1:
            why_not = "several GPUs share each batch"
        if not self._vary(loader, parts, why_not):
            return found
        assert self._batches is not None
        epochs, self._own_steps, examples, samples, total, _, max_steps = found
        length, step_size = len(self._batches.sampler), self._batches.batch_size * parts
        most = math.ceil(length / parts)
        if args.max_steps > 0:
            whole, rest = divmod(args.max_steps, self._own_steps)
            self._limit_samples = whole * length + rest * step_size
            epochs = sys.maxsize if self._schedule == "steps" else epochs
        else:
            self._limit_samples = args.num_train_epochs * length
        return epochs, most, examples, samples, total, most * parts, max_steps

    def _find_place(self, find: Any, *args: Any) -> Any:
        """Which epoch to go on with; its batches are skipped by their samples, not by their number."""
        found, checkpoint = find(*args), args[3]
        self._resumed = {}
        if self._batches is None or checkpoint is None:
            return found
        assert self._guarded is not None
        path = Path(checkpoint) / STATE
        if path.is_file():
            self._resumed = torch.load(path, map_location="cpu", weights_only=True)
            return self._resumed["passes"] - any(len(one["rest"]) for one in self._resumed["ranks"]), 0
        raise InputError(
            f"The checkpoint {checkpoint} does not say which samples of its epoch are left.",
            hint="It was made without batch_sizes, or not to its end: go on without them, or from the one before it.",
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take hold of the device."""
        if self._guarded is None:
            raise InputError(
                "This callback was added to a Trainer that was made before, and would leave the device changed after "
                "an error.",
                hint="Give it to the Trainer when that is made: Trainer(…, callbacks=[TransformersCallback(…)]).",
            )
        self._loss, scheduler = None, kwargs.get("lr_scheduler")
        whole = state.train_batch_size or args.train_batch_size
        self._begin(
            found_batch_size=whole // max(1, args.n_gpu),  # of one device
            parts=args.gradient_accumulation_steps,
            model=kwargs["model"],
            steps=state.max_steps,
            made=state.global_step,
            rank=args.process_index if state.is_world_process_zero else max(1, args.process_index),
            processes=args.world_size,
            optimizer=kwargs.get("optimizer"),
            schedulers=[scheduler] if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else [],
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a step; the last one is that with which the samples are trained on."""
        self._passes = 0
        self._step_begins()
        if self._batches is not None and (self._schedule == "samples" or args.max_steps <= 0):
            state.max_steps = state.global_step + self._steps_left(self._limit_samples)
            assert self._guarded is not None
            for one in self._guarded.callback_handler.callbacks:  # their progress bars, on a terminal or in a notebook
                if (bar := getattr(one, "training_bar", None) or getattr(one, "training_tracker", None)) is not None:
                    bar.total = state.max_steps

    on_train_end = TrainerBudget._end

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """A pass is done, and its gradients are kept; at the end of an epoch a step has fewer of them."""
        self._passes += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End a step; evaluation and saving may follow it."""
        self._step_ended(self._loss, self._passes + 1)
        control.should_training_stop = control.should_training_stop or self._is_spent
        if self._batches is not None:
            state.epoch = self._trained / len(self._batches.sampler)
        self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluation and saving may follow an epoch."""
        if control.should_evaluate:
            self._test_begins()
        elif control.should_save:
            self._saving_begins()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait between the batches of an evaluation where the budget asks for it."""
        self._batch_tested(args.eval_batch_size)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The evaluation is over; a checkpoint may follow it."""
        self._other_work_ended()
        if control.should_save:
            self._saving_begins()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep beside the checkpoint what of the epoch is left."""
        if (kept := self._state()) and state.is_world_process_zero:
            folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
            write_atomically(folder / STATE, lambda file: torch.save(kept, file))
        self._other_work_ended()

    def on_log(self, *_: Any, logs: Mapping[str, float] | None = None, **__: Any) -> None:
        """Keep the loss for our own log."""
        self._loss = (logs or {}).get("loss", self._loss)


def _trainer_under_construction() -> Trainer:
    """The ``Trainer`` whose constructor is calling: Transformers hands a callback everything but this one."""
    frame = inspect.currentframe()
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            return trainer
        frame = frame.f_back
    raise InputError("This callback is for a Transformers Trainer.", hint="Give it as Trainer(…, callbacks=[…]).")
