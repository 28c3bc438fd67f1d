"""How the learning rate follows the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from underwatt.errors import JobError

RuleName = Literal["sqrt", "linear", "none"]
# A callable gets (learning rate, its batch size, the new batch size) and returns the new learning rate.
LrRule: TypeAlias = RuleName | Callable[[float, int, int], float]

RULES: tuple[str, ...] = get_args(RuleName)


def scaled_lr(lr: float, base_batch_size: int, batch_size: int, rule: LrRule) -> float:
    """The learning rate at ``batch_size``, given the one that suits ``base_batch_size``.

    ``sqrt`` keeps the noise of adaptive optimizers (Adam, AdamW) alike across batch sizes, ``linear`` that of SGD.
    """
    if callable(rule):
        scaled = rule(lr, base_batch_size, batch_size)
    elif rule == "sqrt":
        scaled = lr * math.sqrt(batch_size / base_batch_size)
    elif rule == "linear":
        scaled = lr * batch_size / base_batch_size
    elif rule == "none":
        scaled = lr
    else:
        raise JobError(
            f"There is no learning-rate rule {rule!r}.", hint=f"Use {', '.join(RULES)}, or a function of your own."
        )
    if not (math.isfinite(scaled) and scaled > 0):
        raise JobError(
            f"The learning rate at batch size {batch_size} comes out as {scaled!r}.",
            hint="Give a positive base learning rate and a rule that keeps it positive.",
        )
    return scaled
