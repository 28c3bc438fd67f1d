"""A budget for a trainer that owns its loop: what the adapters for Lightning and Transformers have in common.

Such a trainer made its loader before the first step, so its batch size stays; the power mode and pauses are tuned.
"""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt.adapters.tuner import one_budget, tune
from underwatt.device.signals import uninterrupted
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from underwatt.adapters.tuner import Tuner
    from underwatt.budget import Budget, Schedule
    from underwatt.control.state import ControlOptions
    from underwatt.device.base import Device
    from underwatt.records import Profile, WorkloadCost

CANNOT = "The trainer's batch size cannot be changed while it trains: only the power mode and pauses are tuned."


class FixedBatchBudget:
    """Holds a budget for somebody else's loop; an adapter calls the methods below from the loop's events.

    The arguments are those of ``underwatt.tune``. ``batch_size`` is that of one device in one pass forward, and is
    found from the trainer where it is not given. ``name``, by which a store knows what was measured, is the model's
    class and size where it is not given. Where ``folder`` holds a log already, the next of folder-2, folder-3, … is
    used: each training has its own.
    """

    def __init__(
        self,
        *,
        budget_w: float | None = None,
        budget: str | Budget | Schedule | None = None,
        batch_size: int | None = None,
        device: str | Device = "",
        name: str = "",
        store: Path | str | None = None,
        folder: Path | str | None = None,
        references: Sequence[Profile] = (),
        cost: WorkloadCost | None = None,
        set_modes: bool = True,
        options: ControlOptions | None = None,
    ) -> None:
        self._given_batch_size, self._name, self._folder = batch_size, name, folder
        self._tune = partial(
            tune,
            budget=one_budget("A callback", budget_w, budget),
            device=device,
            store=store,
            references=references,
            cost=cost,
            set_modes=set_modes,
            options=options,
        )
        self._tuner: Tuner | None = None  # none where nothing is under way, and in all processes but the first
        self._other_work = contextlib.ExitStack()
        self._tested: Callable[[int], None] | None = None  # while the model is tested
        self._batch_size = self._parts = 0

    def _begin(self, *, found_batch_size: int | None, parts: int, model: nn.Module, processes: int) -> None:
        """Take hold of the device; a step is ``parts`` passes whose gradients are added up."""
        self._end()  # a trainer that ran out of memory may begin again
        batch_size = self._given_batch_size or found_batch_size
        if not batch_size:
            raise InputError(
                "The batch size of this trainer cannot be found.", hint="Give it to the callback: batch_size=32."
            )
        name = self._name or _name_of(model)
        self._batch_size, self._parts = batch_size * parts, parts
        tuner = self._tune(
            batch_sizes=(self._batch_size,),
            # A step in parts takes longer than a whole one, so what is measured is kept apart.
            name=name if parts == 1 else f"{name} in {parts} parts",
            folder=_own_folder(self._folder),
        )
        self._tuner = tuner.__enter__()
        tuner.note("info", CANNOT)
        if processes > 1:
            tuner.note("warning", f"Of {processes} processes only the first controls, and only its own device.")

    # What follows may be an event of a trainer as it is: what that hands over is not looked at.

    def _step_begins(self, *_: Any, **__: Any) -> None:
        """An optimizer step begins; whatever else went on is over."""
        if self._tuner is not None:
            self._other_work.close()
            self._tuner.starts(self._batch_size, self._parts)

    def _step_ended(self, loss: Any = None) -> None:
        """An optimizer step is done; waits where the budget asks for it."""
        if self._tuner is not None:
            self._tuner.step(loss)

    def _test_begins(self, *_: Any, **__: Any) -> None:
        """A test of the model begins, and lasts until the next step at most."""
        if self._tuner is not None:
            self._other_work.close()
            self._tested = self._other_work.enter_context(self._tuner.testing())
            self._other_work.callback(self._forget_test)

    def _batch_tested(self, samples: int) -> None:
        """A batch of the test is done; waits where the budget asks for it."""
        if self._tested is not None:
            self._tested(samples)

    def _forget_test(self) -> None:
        self._tested = None

    def _saving_begins(self, *_: Any, **__: Any) -> None:
        """A checkpoint is about to be written, which lasts until the next step at most."""
        if self._tuner is not None:
            self._other_work.close()
            self._other_work.enter_context(self._tuner.saving())

    def _other_work_ended(self, *_: Any, **__: Any) -> None:
        """The test, or the writing, is over."""
        self._other_work.close()

    @uninterrupted
    def _end(self, *_: Any, error: BaseException | None = None, **__: Any) -> None:
        """Put everything back; may be called again."""
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            try:
                self._other_work.close()
            finally:
                tuner.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _name_of(model: nn.Module) -> str:
    """Class and size: models of one class may be of any size."""
    from torch.nn.parameter import is_lazy

    count = sum(weight.numel() for weight in model.parameters() if not is_lazy(weight))
    return f"{type(model).__name__} ({count:,} parameters)"


def _own_folder(folder: Path | str | None) -> Path | None:
    """The folder, or one beside it, that holds no run yet."""
    if folder is None:
        return None
    first = Path(folder)
    beside = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return first if not (first / "log.jsonl").exists() else next(p for p in beside if not (p / "log.jsonl").exists())
