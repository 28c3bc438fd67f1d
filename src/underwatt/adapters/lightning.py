"""A power budget for Lightning: one callback more for the ``Trainer``.

trainer = Trainer(callbacks=[LightningCallback(budget_w=10)])
"""

# ruff: noqa: ARG002 - the signatures are Lightning's
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.adapters.callback_base import FixedBatchBudget

require("lightning.pytorch", extra="lightning")

from lightning.pytorch.callbacks import Callback  # noqa: E402 - after the check, whose error is the better one

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LightningCallback(FixedBatchBudget, Callback):
    """Holds a power budget while a Lightning ``Trainer`` fits; everything is put back when that ends, however it ends.

    It cannot change the batch size of a training under way, so it tunes the power mode and pauses only. A step is one
    step of the optimizer; validation and checkpoints count for none, and are paced all the same. Of several processes
    only the first controls, and only its own device. A smaller last batch counts as a whole one.
    """

    _step_is_under_way = False
    _global_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take hold of the device."""
        self._step_is_under_way, self._global_step = False, trainer.global_step
        if trainer.is_global_zero:
            self._begin(
                found_batch_size=_batch_size_of(trainer.train_dataloader),
                parts=trainer.accumulate_grad_batches,
                model=pl_module,
                processes=trainer.world_size,
            )

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Begin a step, unless gradients are being added up for one already; whatever else went on is over."""
        self._other_work_ended()
        if not self._step_is_under_way:
            self._step_is_under_way = True
            self._step_begins()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step where the optimizer has made one."""
        if trainer.global_step != self._global_step:
            self._step_is_under_way, self._global_step = False, trainer.global_step
            self._step_ended(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    on_validation_start = FixedBatchBudget._test_begins
    on_validation_end = FixedBatchBudget._other_work_ended
    on_save_checkpoint = FixedBatchBudget._saving_begins  # Lightning does not say when one is written

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Wait between the batches of a validation where the budget asks for it."""
        self._batch_tested(_batch_size_of(trainer.val_dataloaders) or self._batch_size)

    on_train_end = FixedBatchBudget._end
    teardown = FixedBatchBudget._end  # where Lightning leaves the training by another way

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put everything back after an error, Ctrl-C or SIGTERM."""
        self._end(error=exception)


def _batch_size_of(loader: Any) -> int | None:
    """The batch size of a PyTorch loader; none of several loaders, or of one that makes its batches itself."""
    found = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None
