"""The learning rate of an optimizer, following the batch size for the length of each of its steps.

Outside its own ``step`` the optimizer has its own rate, so that a learning-rate scheduler, wherever a loop calls it,
and a checkpoint never see ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.workload.lr import LrRule, scaled_lr

if TYPE_CHECKING:
    from collections.abc import Sequence


class RateFollower:
    """Scales the rates of an optimizer's parameter groups while it steps."""

    def __init__(self, optimizer: Any, lr_batch_size: int, rule: LrRule | None = None) -> None:
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate and Lightning wrap it
        self._lr_batch_size = lr_batch_size
        self._rule: LrRule = rule if rule is not None else usual_rule(self._optimizer)
        self._batch_size = lr_batch_size
        self._own: Sequence[Any] | None = None
        self._hooks: tuple[Any, ...] = ()
        if not hasattr(self._optimizer, "register_step_pre_hook"):
            raise InputError(
                f"The learning rate of a {type(optimizer).__name__} cannot be followed: it is no PyTorch optimizer.",
                hint="Leave optimizer out, and set the rate by tuner.batch_size yourself.",
            )

    def follow(self, batch_size: int) -> None:
        """Take the rate of a batch size from the optimizer's next step on."""
        self._batch_size = batch_size
        if not self._hooks:
            self._hooks = (
                self._optimizer.register_step_pre_hook(self._scale),
                self._optimizer.register_step_post_hook(self._back),
            )

    def close(self) -> None:
        """Leave the optimizer alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._back()

    def _scale(self, *_: Any) -> None:
        self._back()  # where a step raised, nobody has done it
        groups = self._optimizer.param_groups
        self._own = [group["lr"] for group in groups]
        for group in groups:
            if group["lr"]:  # a warm-up may begin at zero, a schedule end there, and a frozen group stay there
                group["lr"] = scaled_lr(group["lr"], self._lr_batch_size, self._batch_size, self._rule)

    def _back(self, *_: Any) -> None:
        if self._own is not None:
            for group, lr in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = lr
            self._own = None


def usual_rule(optimizer: Any) -> LrRule:
    """Linear for SGD, the square root for all others."""
    return "linear" if type(optimizer).__name__ == "SGD" else "sqrt"
