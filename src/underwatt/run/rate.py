"""The learning rate of an optimizer, following the batch size for the length of each step.

Between steps the optimizer has its own rate again, so that a learning-rate scheduler never sees ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt.workload.lr import LrRule, scaled_lr

if TYPE_CHECKING:
    from collections.abc import Sequence


class RateFollower:
    """Scales the rates of an optimizer's parameter groups."""

    def __init__(self, optimizer: Any, lr_batch_size: int, rule: LrRule | None = None) -> None:
        self._optimizer = optimizer
        self._lr_batch_size = lr_batch_size
        self._rule: LrRule = rule if rule is not None else usual_rule(optimizer)
        self._own: Sequence[float] | None = None

    def follow(self, batch_size: int) -> None:
        """Take the rate of a batch size for the step that begins."""
        self.back()
        groups = self._optimizer.param_groups
        self._own = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = scaled_lr(group["lr"], self._lr_batch_size, batch_size, self._rule)

    def back(self) -> None:
        """Give the optimizer its own rates again."""
        if self._own is not None:
            for group, lr in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = lr
            self._own = None


def usual_rule(optimizer: Any) -> LrRule:
    """Linear for SGD, the square root for all others."""
    return "linear" if type(optimizer).__name__ == "SGD" else "sqrt"
