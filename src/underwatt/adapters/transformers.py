"""A power budget for Transformers: one callback more for the ``Trainer``.

trainer = Trainer(model, args, train_dataset=data, callbacks=[TransformersCallback(budget_w=10)])
"""

# ruff: noqa: ARG002 - the signatures are those of Transformers
from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.adapters.callback_base import FixedBatchBudget
from underwatt.errors import InputError

require("accelerate", extra="transformers")
require("transformers", extra="transformers")

# After the check, whose error is the better one.
from transformers.trainer import Trainer  # noqa: E402
from transformers.trainer_callback import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments


class TransformersCallback(FixedBatchBudget, TrainerCallback):
    """Holds a power budget while a Transformers ``Trainer`` trains; everything is put back when that ends, however.

    It cannot change the batch size of a training under way, so it tunes the power mode and pauses only. A step is one
    step of the optimizer; evaluation and saving count for none, and are paced all the same. Of several processes only
    the first controls, and only its own device. A smaller last batch counts as a whole one.
    """

    _guarded: Trainer | None = None
    _loss: float | None = None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Have ``train`` put everything back where it raises: callbacks are told nothing of an exception."""
        trainer = self._guarded = _trainer_under_construction()
        train = trainer.train

        @functools.wraps(train)
        def guarded_train(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException as exc:
                self._end(error=exc)
                raise

        trainer.train = guarded_train  # type: ignore[method-assign]

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
        self._loss = None
        if state.is_world_process_zero:
            whole = state.train_batch_size or args.train_batch_size
            self._begin(
                found_batch_size=whole // max(1, args.n_gpu),  # of one device
                parts=args.gradient_accumulation_steps,
                model=kwargs["model"],
                processes=args.world_size,
            )

    on_step_begin = FixedBatchBudget._step_begins
    on_train_end = FixedBatchBudget._end

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End a step; evaluation and saving may follow it."""
        self._step_ended(self._loss)
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

    on_save = FixedBatchBudget._other_work_ended

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
