"""A power budget for Lightning: one callback more for the ``Trainer``.

trainer = Trainer(callbacks=[LightningCallback(budget_w=10, batch_sizes=(8, 16, 32, 64))])
"""

# ruff: noqa: ARG002 - the signatures are Lightning's
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.adapters.callback_base import TrainerBudget, _batch_size_of

require("lightning.pytorch", extra="lightning")

from lightning.pytorch.callbacks import Callback  # noqa: E402 - after the check, whose error is the better one

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LightningCallback(TrainerBudget, Callback):
    """Holds a power budget while a Lightning ``Trainer`` fits; everything is put back when that ends, however it ends.

    Power mode, pauses and, where ``batch_sizes`` are offered, the batch size are tuned under way; an epoch is the same
    data at any of them, and a checkpoint knows which of its samples are left. A step is one step of the optimizer;
    validation and checkpoints count for none, and are paced all the same. Validation every so many batches, and all
    else that counts batches, goes on to do so.
    """

    _step_is_under_way = False
    _global_step = _passes = 0  # of the optimizer; of this step
    _limit_samples = math.inf
    _own_max_steps: int | None = None
    _checkpoint: dict[str, Any] | None = None  # as it was loaded

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take hold of the device, and of the loader."""
        self._step_is_under_way, self._global_step, self._passes = False, trainer.global_step, 0
        parts, found = trainer.accumulate_grad_batches, _batch_size_of(trainer.train_dataloader)
        self._resumed, self._checkpoint = self._checkpoint or {}, None
        steps = trainer.estimated_stepping_batches  # before our batches, whose number nobody knows
        is_varied = self._take_loader(trainer)
        self._begin(
            found_batch_size=found,
            parts=parts,
            model=pl_module,
            steps=steps,
            made=trainer.global_step,
            rank=trainer.global_rank if trainer.is_global_zero else max(1, trainer.global_rank),
            processes=trainer.world_size,
            optimizer=trainer.optimizers[0] if trainer.optimizers else None,
            schedulers=[
                config.scheduler
                for config in trainer.lr_scheduler_configs
                if config.interval == "step" and not config.reduce_on_plateau
            ],
        )
        if is_varied:
            self._open_loader(trainer)

    def _take_loader(self, trainer: Trainer) -> bool:
        loop, batches = trainer.fit_loop, trainer.num_training_batches
        if not self._vary(trainer.train_dataloader, trainer.accumulate_grad_batches, _why_not(trainer)):
            return False
        assert self._batches is not None
        samples, self._limit_samples, self._own_max_steps = len(self._batches.sampler), math.inf, None
        if self._schedule == "samples" and loop.max_steps > 0:  # so many own steps are so many samples
            epochs, steps = divmod(loop.max_steps, math.ceil(batches / trainer.accumulate_grad_batches))
            step_size = self._batches.batch_size * trainer.accumulate_grad_batches
            self._limit_samples, self._own_max_steps = epochs * samples + steps * step_size, loop.max_steps
        return True

    def _open_loader(self, trainer: Trainer) -> None:
        """Have Lightning begin its epoch with our batches, whose number it does not know."""
        loop = trainer.fit_loop
        assert loop._combined_loader is not None
        assert loop._data_fetcher is not None
        assert self._batches is not None
        if hasattr(self._batches.sampler, "set_epoch"):
            self._batches.sampler.set_epoch(trainer.current_epoch)
        loop._combined_loader.limits = [math.inf]
        loop.max_batches = math.inf
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = math.inf
        iter(loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take hold of a loader that was made anew for this epoch."""
        if self._batches is not None and trainer.train_dataloader is not self._batches.loader:
            followers, self._followers = self._followers, []
            self._take_loader(trainer)
            self._followers = followers
            self._open_loader(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Begin a step, unless gradients are being added up for one already; whatever else went on is over."""
        self._other_work_ended()
        if not self._step_is_under_way:
            self._step_is_under_way = True
            self._step_begins()
            if self._own_max_steps is not None:
                trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + self._steps_left(self._limit_samples)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step where the optimizer has made one."""
        self._passes += 1
        if trainer.global_step != self._global_step:
            passes, self._passes = self._passes, 0
            self._step_is_under_way, self._global_step = False, trainer.global_step
            self._step_ended(outputs.get("loss") if isinstance(outputs, Mapping) else outputs, passes)
            trainer.should_stop = trainer.should_stop or self._is_spent

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch, for a checkpoint."""
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what is left of an epoch."""
        self._checkpoint = state_dict

    on_validation_start = TrainerBudget._test_begins
    on_validation_end = TrainerBudget._other_work_ended
    on_save_checkpoint = TrainerBudget._saving_begins  # Lightning does not say when one is written

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Wait between the batches of a validation where the budget asks for it."""
        self._batch_tested(_batch_size_of(trainer.val_dataloaders) or self._own_size)

    def on_train_end(self, trainer: Trainer, *_: Any, error: BaseException | None = None, **__: Any) -> None:
        """Put everything back."""
        if self._own_max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps, self._own_max_steps = self._own_max_steps, None
        self._end(error=error)

    teardown = on_train_end  # where Lightning leaves the training by another way

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put everything back after an error, Ctrl-C or SIGTERM."""
        self.on_train_end(trainer, error=exception)


def _why_not(trainer: Trainer) -> str:
    """What about this trainer forbids another number of batches in an epoch."""
    if not trainer.lightning_module.automatic_optimization:
        return "the module optimizes by hand"
    if trainer.limit_train_batches != 1.0 or getattr(trainer, "overfit_batches", False):
        return "the number of batches in an epoch is limited"
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval != 1.0:
        return "val_check_interval is a part of an epoch, so the number of batches must be known"
    return ""
