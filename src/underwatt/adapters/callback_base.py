"""A budget for a trainer that owns its loop: what the adapters for Lightning and Transformers have in common.

Where batch sizes are offered and the trainer's loader allows it, batches are made one by one, as large as the budget
asks for. Worker processes prepare some ahead, so a step counts with the samples it had. Of several processes the first
one decides, and tells the others after each step: all take the same batch size at the same step, and wait together.
The watts of the budget are those of all devices on its machine that take part.
"""

from __future__ import annotations

import contextlib
import math
import socket
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from underwatt.adapters.follow import LoaderFollower, why_fixed
from underwatt.adapters.tuner import one_budget, tune
from underwatt.device.registry import open_device
from underwatt.device.signals import uninterrupted
from underwatt.errors import InputError, StepError
from underwatt.jobs._torch import torch
from underwatt.jobs.data import fillable
from underwatt.jobs.job import as_batch_sizes
from underwatt.jobs.rates import RateFollower, ScheduleFollower

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from underwatt.adapters.tuner import Tuner
    from underwatt.budget import Budget, Schedule
    from underwatt.control.state import ControlOptions
    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.device.base import Device
    from underwatt.jobs.job import LrRule
    from underwatt.records import Profile, WorkloadCost

NOT_OFFERED = "no other ones were offered (batch_sizes=…)"


class TrainerBudget:
    """Holds a budget for somebody else's loop; an adapter calls the methods below from the loop's events.

    ``batch_sizes`` are those that may be used, of one device in one pass forward, as is ``batch_size``, the trainer's
    own, which is found where it is not given; without ``batch_sizes`` it stays. The learning rate, which suits the own
    batch size, follows by ``lr_rule``. ``schedule`` says what the trainer's numbers of steps mean, its schedulers' and
    its ``max_steps``: ``"samples"``, the data of so many own batches, or ``"steps"``. The other arguments are those of
    ``underwatt.tune``; ``convergence`` goes by the samples of a whole step on one device. ``name``, by which a store
    knows what was measured, is the model's class and size where it is not given. Where ``folder`` holds a log already,
    the next of folder-2, folder-3, … is used: each training has its own.
    """

    def __init__(
        self,
        *,
        budget_w: float | str | None = None,
        budget: str | Budget | Schedule | None = None,
        batch_sizes: str | int | Sequence[int] = (),
        batch_size: int | None = None,
        lr_rule: LrRule | None = None,
        schedule: Literal["samples", "steps"] = "samples",
        convergence: SamplesToTarget | Mapping[int, float] | None = None,
        device: str | Device = "",
        name: str = "",
        store: Path | str | None = None,
        folder: Path | str | None = None,
        references: Sequence[Profile] = (),
        cost: WorkloadCost | None = None,
        set_modes: bool = True,
        options: ControlOptions | None = None,
    ) -> None:
        if schedule not in ("samples", "steps"):
            raise InputError(f"A schedule cannot be counted in {schedule!r}.", hint='Give "samples" or "steps".')
        self._given_batch_size, self._name, self._folder = batch_size, name, folder
        self._offered, self._lr_rule, self._schedule = (
            tuple(sorted(set(as_batch_sizes(batch_sizes)))),
            lr_rule,
            schedule,
        )
        self._tune = partial(
            tune,
            budget=one_budget("A callback", budget_w, budget),
            convergence=convergence,
            store=store,
            references=references,
            cost=cost,
            set_modes=set_modes,
            options=options,
        )
        self._device = device
        self._local_gpus = ""  # of all processes on this machine, where there are several
        self._tuner: Tuner | None = None  # none where nothing is under way, and in all processes but the first
        self._other_work = contextlib.ExitStack()
        self._tested: Callable[[int], None] | None = None  # while the model is tested
        self._own_size = self._parts = self._processes = 1  # of a pass; passes in a step; processes in all
        self._size = 0  # of the next pass
        self._step_size = 0  # samples of the step under way, as far as they are known
        self._is_spent = False  # the budget's joules: the trainer is to end
        self._batches: LoaderFollower | None = None  # where the batch size is changed ...
        self._sizes: tuple[int, ...] = ()  # ... to one of these, ...
        self._why_not = ""  # ... or why it is not
        self._followers: list[RateFollower | ScheduleFollower] = []
        self._group: Any = None  # of the processes, for our own messages
        self._trained = 0  # samples in all, by this process
        self._resumed: dict[str, Any] = {}  # of a training that goes on; its random numbers wait for the first step

    # Before the first step

    def _vary(self, loader: Any, parts: int, why_not: str = "") -> bool:
        """Have a loader's batches as large as the budget asks for; whether that can be done."""
        self._stop_following()
        self._why_not = (NOT_OFFERED if not self._offered else why_not) or why_fixed(loader)
        if self._why_not:
            return False
        self._batches = batches = LoaderFollower(loader, lambda: self._size, parts)
        self._size = batches.batch_size
        self._sizes, _ = fillable(self._offered, len(batches.sampler) // parts)
        return True

    def _begin(
        self,
        *,
        found_batch_size: int | None,
        parts: int,
        model: nn.Module,
        steps: float,
        made: int,
        rank: int = 0,
        processes: int = 1,
        optimizer: Any = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        """Take hold of the device; a step is ``parts`` passes whose gradients are added up.

        The training has ``steps`` of the own size in all, as far as that is known, and ``made`` so many of them.
        """
        self._end_tuner()  # a trainer that ran out of memory may begin again
        batch_size = self._given_batch_size or found_batch_size
        if not batch_size:
            raise InputError(
                "The batch size of this trainer cannot be found.", hint="Give it to the callback: batch_size=32."
            )
        self._size = self._own_size = batch_size
        self._parts, self._processes, self._step_size = parts, processes, batch_size * parts
        if self._group is None and processes > 1 and torch.distributed.is_initialized():
            self._group = torch.distributed.new_group(backend="gloo")
            self._local_gpus = _gpus_here(self._group, processes)
        if self._batches is not None:
            self._followers = [RateFollower(optimizer, self._step_size, self._lr_rule)]
            if self._schedule == "samples":
                self._followers += [ScheduleFollower(one, self._step_size) for one in schedulers]
        self._go_on(rank)
        if rank == 0:
            self._take_hold(model, processes)
            assert self._tuner is not None
            self._tuner.lasts(steps * self._step_size - (self._trained or made * self._step_size))
        self._agree()

    def _take_hold(self, model: nn.Module, processes: int) -> None:
        parts, name = self._parts, self._name or _name_of(model)
        sizes = self._sizes if self._batches is not None else (self._own_size,)
        device = self._device or self._local_gpus or ""
        opened = open_device(device) if isinstance(device, str) else device
        whose = f"{opened.info.name} together" if "," in opened.info.address else opened.info.name
        tuner = self._tune(
            device=opened,
            batch_sizes=tuple(size * parts for size in sizes),
            # A step in parts takes longer than a whole one, so what is measured is kept apart.
            name=name if parts == 1 else f"{name} in {parts} parts",
            folder=_own_folder(self._folder),
        )
        self._tuner = tuner.__enter__()
        if self._why_not:
            tuner.note("info", f"The batch size stays as it is: {self._why_not}. Power mode and pauses are tuned.")
        if processes > 1:
            tuner.note("info", f"The first of {processes} processes decides for all; its budget is that of {whose}.")

    # What a checkpoint holds

    def _state(self) -> dict[str, Any]:
        """Where the training stands, for a checkpoint; all processes ask for it at the same step."""
        if self._batches is None:
            return {}
        mine = {
            "rest": torch.tensor(self._batches.state(), dtype=torch.int64),
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state_all(),
        }
        ranks: list[Any] = [mine]
        if self._group is not None:
            ranks = [None] * self._processes
            torch.distributed.all_gather_object(ranks, mine, group=self._group)
        return {
            "ranks": ranks,
            "passes": self._batches.passes,
            "trained": self._trained,
            "left_over": [one.left_over for one in self._followers if isinstance(one, ScheduleFollower)],
        }

    def _go_on(self, rank: int) -> None:
        """Take up what a checkpoint held, if this training goes on from one."""
        state, self._trained = self._resumed, self._resumed.get("trained", 0)
        if self._batches is None or not state:
            self._resumed = {}
            return
        if len(state["ranks"]) != self._processes:
            raise InputError(
                f"The checkpoint is of {len(state['ranks'])} processes, and these are {self._processes}.",
                hint="Go on with as many processes, so that no sample of the epoch is lost or comes twice.",
            )
        self._batches.passes = state["passes"]
        self._resumed = state["ranks"][rank]
        if len(rest := self._resumed["rest"]):  # else the epoch was over
            self._batches.restore(rest.tolist())
        schedules = [one for one in self._followers if isinstance(one, ScheduleFollower)]
        for schedule, left_over in zip(schedules, state["left_over"], strict=False):
            schedule.left_over = left_over

    # What follows may be an event of a trainer as it is: what that hands over is not looked at.

    def _step_begins(self, *_: Any, **__: Any) -> None:
        """An optimizer step begins; whatever else went on is over."""
        if self._batches is not None:
            if self._resumed:  # the loader has drawn its own by now
                torch.set_rng_state(self._resumed["random"])
                if len(self._resumed["random_gpu"]) == torch.cuda.device_count():
                    torch.cuda.set_rng_state_all(self._resumed["random_gpu"])
                self._resumed = {}
            ahead = [len(batch) for batch in self._batches.handed_out][: self._parts]
            self._step_size = sum(ahead) + ahead[-1] * (self._parts - len(ahead))  # parts are alike
            for follower in self._followers:
                follower.follow(self._step_size)
        if self._tuner is not None:
            self._other_work.close()
            self._tuner.starts(self._step_size, self._parts)

    def _step_ended(self, loss: Any = None, passes: int = 0) -> None:
        """An optimizer step is done, in so many passes if it is known; waits where the budget asks for it."""
        passes = passes or self._parts
        size = self._batches.trained(passes) if self._batches is not None else self._step_size * passes // self._parts
        self._trained += size
        if self._tuner is not None:
            self._tuner.step(loss, batch_size=size)
        self._agree(size)

    def _agree(self, step_size: int = 0) -> None:
        """Take the batch size that the first process says, which all do at the same step; and whether to end."""
        if self._tuner is not None and self._batches is not None:
            self._size = max(1, self._tuner.batch_size // self._parts)
        self._is_spent = self._tuner is not None and self._tuner.is_spent
        if self._group is None:
            return
        told = torch.tensor([self._size, step_size, self._is_spent])
        try:
            torch.distributed.broadcast(told, 0, group=self._group)
        except RuntimeError as exc:
            raise StepError("Another process of this training has died.", hint="Its output says why.") from exc
        self._size, self._is_spent = int(told[0]), bool(told[2])
        if int(told[1]) != step_size:
            raise InputError(
                f"This process has made a step of {step_size} samples, and the first one of {int(told[1])}.",
                hint="Have all processes train on equally many samples, as PyTorch's DistributedSampler does.",
            )

    def _steps_left(self, limit_samples: float) -> int:
        """How many steps there are, this one included, until so many samples are trained on."""
        after = limit_samples - self._trained - self._step_size
        return 1 + max(0, math.ceil(after / (self._size * self._parts)))

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

    # The end

    def _end(self, *_: Any, error: BaseException | None = None, **__: Any) -> None:
        """Put everything back; may be called again."""
        try:
            self._end_tuner(error)
        finally:
            self._stop_following()

    @uninterrupted
    def _end_tuner(self, error: BaseException | None = None) -> None:
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            try:
                self._other_work.close()
            finally:
                tuner.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _stop_following(self) -> None:
        batches, self._batches = self._batches, None
        followers, self._followers = self._followers, []
        for follower in (*followers, *((batches,) if batches is not None else ())):
            follower.close()


def _gpus_here(group: Any, processes: int) -> str:
    """The addresses of the GPUs that the processes on this machine train on; nothing where they use none."""
    mine = ""
    if torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
        mine = f"nvml:GPU-{uuid}" if uuid else ""
    told: list[Any] = [None] * processes
    torch.distributed.all_gather_object(told, (socket.gethostname(), mine), group=group)
    return ",".join(dict.fromkeys(gpu for host, gpu in told if host == socket.gethostname() and gpu))


def _batch_size_of(loader: Any) -> int | None:
    """The batch size of a PyTorch loader; none of several loaders, or of one that makes its batches itself."""
    found = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None


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
