"""What follows the batch size beside the data: the learning rate, and the schedulers that it has.

Each takes the place of something for a while and puts it back when it is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.jobs.job import scaled_lr, usual_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.jobs.job import LrRule


class RateFollower:
    """Has an optimizer's learning rate follow the batch size, for the length of each of its steps.

    Outside its own ``step`` the optimizer has its own rate, so that a learning-rate scheduler, wherever a loop calls
    it, and a checkpoint never see ours.
    """

    def __init__(self, optimizer: Any, lr_batch_size: int, rule: LrRule | None = None) -> None:
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate and Lightning wrap it
        self._lr_batch_size = lr_batch_size
        self._rule: LrRule = rule if rule is not None else usual_rule(self.optimizer)
        self._batch_size = lr_batch_size
        self._own: Sequence[Any] = ()  # rates, while ours are in their place
        self._hooks: tuple[Any, ...] = ()
        if not hasattr(self.optimizer, "register_step_pre_hook"):
            raise InputError(
                f"The learning rate of a {type(optimizer).__name__} cannot be followed: it is no PyTorch optimizer.",
                hint="Give an optimizer of torch.optim, or leave it out and set the rate by the batch size yourself.",
            )

    def follow(self, batch_size: int) -> None:
        """Take the rate of a batch size from the optimizer's next step on."""
        self._batch_size = batch_size
        if not self._hooks:
            self._hooks = (
                self.optimizer.register_step_pre_hook(self._scale),
                self.optimizer.register_step_post_hook(self._back),
            )

    def close(self) -> None:
        """Leave the optimizer alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._back()

    def _scale(self, *_: Any) -> None:
        self._back()  # where a step raised, nobody has done it
        groups = self.optimizer.param_groups
        self._own = [group["lr"] for group in groups]
        for group in groups:
            if group["lr"]:  # a warm-up may begin at zero, a schedule end there, and a frozen group stay there
                group["lr"] = scaled_lr(group["lr"], self._lr_batch_size, self._batch_size, self._rule)

    def _back(self, *_: Any) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._own, strict=False):
            group["lr"] = lr
        self._own = ()


class ScheduleFollower:
    """Has a learning-rate scheduler that is stepped with the optimizer count samples: a step for each ``batch_size``.

    So a schedule made for a number of steps spans the same data, however many steps that takes now.
    """

    def __init__(self, scheduler: Any, batch_size: int) -> None:
        self._scheduler, self._batch_size, self._size = scheduler, batch_size, batch_size
        self._own = own = type(scheduler)
        self.left_over = 0  # samples that no step was made for yet

        def step(_: Any, *args: Any, **kwargs: Any) -> None:
            self.left_over += self._size
            while self.left_over >= self._batch_size:
                self.left_over -= self._batch_size
                own.step(scheduler, *args, **kwargs)

        # By its class: what a scheduler's own dictionary holds goes into checkpoints.
        scheduler.__class__ = type(own.__name__, (own,), {"step": step})

    def follow(self, batch_size: int) -> None:
        """The step under way is of this batch size."""
        self._size = batch_size

    def close(self) -> None:
        """Let every step count again."""
        self._scheduler.__class__ = self._own
