"""``underwatt.tune``: a budget for an existing PyTorch loop. Every step that is measured is a step that is trained.

with underwatt.tune(budget_w=10, batch_sizes=(8, 16, 32, 64, 128), optimizer=optimizer) as tuner:
    for batch in tuner.loader(dataset, shuffle=True):
        loss = train_step(batch)
        tuner.step()

With the last two lines in ``with tuner.training():``, a batch that does not fit into memory comes again in parts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.convergence.curve import samples_to_target
from underwatt.convergence.prior import usual_shape
from underwatt.device.registry import open_device
from underwatt.device.signals import uninterrupted
from underwatt.errors import BudgetError, InputError, OutOfMemoryError
from underwatt.events import Ended, Noted
from underwatt.jobs._torch import torch
from underwatt.jobs.data import PassBatches, fillable, open_batches
from underwatt.jobs.faults import half_updated, ran_out_of_memory, watch_updates
from underwatt.jobs.identity import loop_info
from underwatt.jobs.job import as_batch_sizes
from underwatt.jobs.rates import RateFollower, ScheduleFollower
from underwatt.jobs.runs import LOG_NAME, SoFar, taken_so_far
from underwatt.jobs.training import Completion, LatestLoss
from underwatt.runlog.inbox import Inbox, claimed_folder, register_run
from underwatt.runlog.log import RunLog
from underwatt.store.store import Saver, Store
from underwatt.studies.study import other_trainings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from underwatt.budget import Schedule
    from underwatt.control.state import ControlOptions
    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.device.base import Device
    from underwatt.events import Event, Verdict
    from underwatt.jobs.job import LrRule
    from underwatt.records import Profile, Setting, WorkloadCost

USUAL_NAME = "training"
MOST_EMPTY_PASSES = 100_000  # more epochs than a loop is given: one that makes more waits for a score that cannot come
_log = logging.getLogger("underwatt")


def tune(
    *,
    budget_w: float | str | None = None,
    budget: str | Budget | Schedule | None = None,
    batch_sizes: str | int | Sequence[int],
    optimizer: Any = None,
    scheduler: Any = None,
    lr_batch_size: int | None = None,
    lr_rule: LrRule | None = None,
    convergence: SamplesToTarget | Mapping[int, float] | None = None,
    device: str | Device = "",
    name: str = "",
    store: Path | str | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    references: Sequence[Profile] = (),
    cost: WorkloadCost | None = None,
    set_modes: bool = True,
    options: ControlOptions | None = None,
) -> Tuner:
    """A tuner for a training loop, to be used in a ``with`` statement.

    ``budget_w`` is mean watts; ``budget`` may say more: ``"10W peak"``, ``"50Wh"``, ``"08:00-18:00=15W,else=7W"``.
    ``optimizer`` has its learning rate follow the batch size, by ``lr_rule`` (linear for SGD, square root for others)
    from the rate it has now, which is taken to suit ``lr_batch_size`` (the largest batch size where it is not given).
    ``scheduler``, stepped after each step of the optimizer, then counts samples: one step for each ``lr_batch_size``.
    ``convergence`` says how many samples the target takes at each batch size; without it, batch sizes are weighed by
    what other trainings needed. With ``store`` measurements outlive the training, and are known again by the shapes of
    what the ``optimizer`` trains and by ``name``, which is needed where there is no optimizer. With ``folder`` a log is
    written there that proves the budget was kept, and ``underwatt budget`` changes it; with ``resume=True`` a run that
    is there already goes on: its time, joules and samples count. Where the budget's joules are spent, the loader
    hands out no more batches, and ``tuner.is_spent`` tells a loop to end. With ``set_modes=False``
    nothing is set on the device: batch size and pauses alone hold the budget. ``cost`` is what a step costs, for
    simulated devices only.
    """
    opened = open_device(device) if isinstance(device, str) else device
    live = LiveBudget.from_now(one_budget("A tuner", budget_w, budget), simulated=opened.info.simulated)
    if not (sizes := as_batch_sizes(batch_sizes)):
        raise InputError("No batch size is offered.", hint="Give for example batch_sizes=(8, 16, 32, 64).")
    own_size = lr_batch_size or max(sizes)
    rate = RateFollower(optimizer, own_size, lr_rule) if optimizer is not None else None
    if store is not None and not name and rate is None:
        raise InputError(
            "A store must know whose measurements it keeps, and this training has neither an optimizer nor a name.",
            hint="Give optimizer=…, or a name of your own for each model: name='resnet18 at 224 pixels'.",
        )
    workload = loop_info(name or USUAL_NAME, rate and rate.optimizer)
    goes_on = resume and folder is not None and holds_run(Path(folder))
    was = taken_so_far(Path(folder or "") / LOG_NAME) if goes_on else SoFar()
    live.resumes(was.elapsed_s)
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Store(Path(store))) if store is not None else None
        log, inbox = _open_log(stack, folder, workload.name, opened, resume=resume)
        others = other_trainings(kept, workload.id) if kept else ()
        shape = usual_shape(others) if convergence is None else None
        pilot = Pilot(
            opened,
            workload,
            sizes,
            live,
            convergence=shape or samples_to_target(convergence),
            cost=cost,
            known=kept.measurements(kept.profile_id(opened.info, workload), telling=True) if kept else (),
            references=references,
            saver=Saver(kept, opened.info, workload) if kept else None,
            log=log,
            inbox=inbox,
            listener=_tell,
            set_modes=set_modes,
            options=options,
            elapsed_s=was.elapsed_s,
        )
        pilot.continues(
            samples=was.samples, steps=was.steps, share=was.share, energy_j=was.energy_j, verdict=was.verdict
        )
        schedule = ScheduleFollower(scheduler, own_size) if scheduler is not None else None
        said = f"Batch sizes are weighed by {shape.said()}. Give convergence=… where you know better." if shape else ""
        followers = [follower for follower in (rate, schedule) if follower is not None]
        return Tuner(pilot, followers, stack.pop_all(), said if len(set(sizes)) > 1 else "")


class Tuner:
    """A training loop's side of a budget; made by ``tune``."""

    def __init__(
        self,
        pilot: Pilot,
        followers: Sequence[RateFollower | ScheduleFollower],
        stack: contextlib.ExitStack,
        said: str = "",
    ) -> None:
        self._pilot, self._followers, self._stack, self._said = pilot, followers, stack, said
        self._simulated = pilot.device.info.simulated
        self._completion = Completion(on_gpu=False if self._simulated else None)
        self._latest_loss = LatestLoss()
        self._batch_size, self._is_begun = 0, False  # of the batch handed out last, which is to be trained on
        self._handed_out: PassBatches | None = None  # what that batch is one of, until it is trained on
        self._sizes = pilot.batch_sizes  # all that may be offered
        self._process = os.getpid()
        self._is_diverged = False
        self.is_spent = False  # the budget's joules are drawn: the loader hands out no batch any more, a loop is to end
        self._empty_passes = 0

    def __enter__(self) -> Self:
        try:
            for follower in self._followers:
                self._stack.callback(follower.close)  # after the device was put back
            self._stack.enter_context(self._pilot)
            if self._said:
                self.note("info", self._said)
        except BaseException:
            self._stack.close()
            raise
        return self

    @uninterrupted
    def __exit__(self, *error: Any) -> bool | None:
        if os.getpid() != self._process:  # a forked child owns neither the device nor the log
            return None
        if self._is_diverged or self.is_spent:
            self._pilot.outcome = "diverged" if self._is_diverged else "energy spent"
        return self._stack.__exit__(*error)

    def loader(self, dataset: Any, *, shuffle: bool = False, drop_last: bool = False, **more: Any) -> TunedLoader:
        """A loader over a data set, the batch size as the budget allows at each moment: one for all epochs will do.

        ``more`` goes to PyTorch's ``DataLoader`` (``sampler``, ``generator``, ``num_workers``, ``collate_fn``, …).
        Batch sizes larger than the data set are left out.
        """
        return TunedLoader(self, dataset, shuffle=shuffle, drop_last=drop_last, **more)

    def _passed(self, batches: PassBatches, reopen: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One pass over the batches of a loader; each is to be trained on before the next one."""
        self._look_for_joules()
        if self.is_spent:
            self._count_empty_pass()
            return
        loader = reopen()
        over = object()  # None may be a batch: what a collate function makes of samples that are all spoilt
        while not self.is_spent and (batch := next(loader, over)) is not over:
            size = len(batches.handed_out[0])
            try:
                self.starts(size)
            except OutOfMemoryError:
                if size <= 1:
                    raise
                self._pilot.out_of_memory(size)
                batches.take_back()
            else:
                self._handed_out = batches
                yield batch
            if batches.taken_back:
                loader = reopen()
            elif self._handed_out is batches:
                raise InputError(
                    "A batch was handed out and tuner.step() was not called.",
                    hint="Call tuner.step() once after each batch of tuner.loader.",
                )

    def _count_empty_pass(self) -> None:
        """Epochs run out, so that what stands after them is come to; a loop without an end waits for nothing."""
        self._empty_passes += 1
        if self._empty_passes > MOST_EMPTY_PASSES:
            raise BudgetError(
                f"The joules of the budget are spent: {MOST_EMPTY_PASSES:,} passes had no batch.",
                hint="End the loop after a pass in which they went, `if tuner.is_spent: break`, or give more of them.",
            )

    def _offer(self, length: int) -> None:
        """Choose among the batch sizes that a data set can fill."""
        sizes, left_out = fillable(self._sizes, length)
        if sizes != self._pilot.batch_sizes:
            self._pilot.offer(sizes)
            if left_out:
                self.note("warning", left_out)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Use ``with tuner.training():`` around what is done with a batch of ``loader``, ``tuner.step()`` included.

        Where memory runs out in it, the block is left, and the samples of its batch are handed out again in smaller
        batches: none is lost. Gradients may be half done by then, so zero them at the beginning of the block. Raises
        ``OutOfMemoryError`` where there is no smaller batch size, and where the optimizer had begun to change the
        model, which nobody can do again.
        """
        with watch_updates() as update_begun:
            try:
                yield
            except Exception as exc:
                batches, size = self._handed_out, self._batch_size
                if batches is None or not ran_out_of_memory(exc):
                    raise
                traceback.clear_frames(exc.__traceback__)  # they hold what fills the memory
                if update_begun.is_set():
                    raise half_updated(size, "Go on from your last checkpoint, with smaller batch sizes.") from exc
                self._pilot.out_of_memory(size)
                batches.take_back()
                self._handed_out = None

    def starts(self, batch_size: int, parts: int = 1) -> None:
        """A step of this batch size begins, in so many parts whose gradients are added up.

        ``loader`` says so by itself. Raises ``OutOfMemoryError`` where a simulated device has no room for a part.
        """
        if self._simulated:
            for _ in range(parts):
                self._pilot.simulate(batch_size // parts)
        self._batch_size, self._is_begun = batch_size, True
        for follower in self._followers:
            follower.follow(batch_size)

    def step(self, loss: Any = None, *, batch_size: int | None = None) -> None:
        """A step has ended: to be called once after each batch, with its size where ``starts`` could not know it."""
        if not self._is_begun:
            raise InputError(
                "tuner.step() was called, and no step had begun since the last one.",
                hint="Call it once for each batch of tuner.loader, or tuner.starts(size) before each step of your own.",
            )
        self._is_begun = False
        if self._completion.on_gpu is not False:  # a step on the CPU asks nothing: it is to cost microseconds
            self._completion.wait(pausing=self._pilot.controller.pausing)
        if self._handed_out is not None:
            self._handed_out.handed_out.popleft()
            self._handed_out = None
        self._pilot.stepped(batch_size or self._batch_size, None if loss is None else self._latest_loss.of(loss))
        if self._pilot.losses.diverged is not self._is_diverged:
            self._is_diverged = not self._is_diverged
            if self._is_diverged:
                self.note("warning", "The loss has been no finite number for a while: the training has diverged.")
        self._look_for_joules()

    def _look_for_joules(self) -> None:
        if self._pilot.energy_left_j <= 0 and not self.is_spent:
            self.is_spent = True
            self.note("warning", "The budget's energy is spent: the loader hands out no more batches.")

    @contextlib.contextmanager
    def testing(self) -> Iterator[Callable[[int], None]]:
        """Use ``with tuner.testing() as tested:`` around a test of the model, and call ``tested(len(batch))`` in it.

        A test is paced as steps are, between its batches; without those calls what it drew is paid back after it.
        """

        def tested(samples: int) -> None:
            self._wait_for_gpu()
            piece(samples)

        with self._pilot.testing() as piece:
            yield tested
            self._wait_for_gpu()

    def _wait_for_gpu(self) -> None:
        if self._completion.on_gpu is not False:
            self._completion.wait(pausing=True)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Use ``with tuner.saving():`` around whatever is neither step nor test, such as writing a checkpoint."""
        return self._pilot.moving_state()

    def lasts(self, samples: float) -> None:
        """The training is known to end after so many samples more: a search must be worth what it gains until then."""
        ends = self._pilot.samples + samples
        self._pilot.controller.samples_left = lambda: max(0.0, ends - self._pilot.samples)

    def note(self, level: str, text: str) -> None:
        """Say something in the log: ``info`` or ``warning``."""
        self._pilot.note(level, text)

    @property
    def batch_size(self) -> int:
        """The batch size of the next batch."""
        return self._pilot.batch_size

    @property
    def setting(self) -> Setting:
        """Power mode and batch size in use."""
        return self._pilot.setting

    @property
    def state(self) -> str:
        """What the controller is doing: searching, holding, correcting or restoring."""
        return self._pilot.controller.phase.value

    @property
    def verdict(self) -> Verdict:
        """Whether the budget was held so far."""
        return self._pilot.controller.verdict

    @property
    def samples(self) -> int:
        """Samples trained on so far."""
        return self._pilot.samples

    @property
    def steps(self) -> int:
        """Steps made so far."""
        return self._pilot.steps

    @property
    def energy_j(self) -> float:
        """Joules drawn so far, as far as they were read."""
        return self._pilot.energy_j

    @property
    def elapsed_s(self) -> float:
        """Seconds of the device's time since the start."""
        return self._pilot.elapsed_s


class TunedLoader:
    """Batches of a data set for a loop under a budget; made by ``Tuner.loader``, used like a ``DataLoader``."""

    def __init__(self, tuner: Tuner, dataset: Any, *, generator: Any = None, sampler: Any = None, **more: Any) -> None:
        self.dataset, self.sampler = dataset, sampler
        self._tuner, self._generator, self._drop_last = tuner, generator, bool(more.get("drop_last"))
        self._seed: int | None = None  # of the order, once somebody names epochs
        if generator is None and sampler is None and more.get("shuffle"):
            self._generator = torch.Generator()
            self._generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        self._batches, self._reopen = open_batches(
            dataset, lambda: tuner.batch_size, generator=self._generator, sampler=sampler, **more
        )

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._order, "__len__"):
            self._tuner._offer(len(self._order))
        return self._tuner._passed(self._batches, self._reopen)

    def __len__(self) -> int:
        """How many batches a pass is at the batch size in use; it may change on the way."""
        whole, rest = divmod(len(self._order), self._tuner.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    @property
    def _order(self) -> Any:
        return self.dataset if self.sampler is None else self.sampler

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass in the order of this epoch: the same whenever that is named."""
        followers = [part for part in (self.sampler, self.dataset) if hasattr(part, "set_epoch")]
        for part in followers:
            part.set_epoch(epoch)
        if not followers and self._generator is not None:
            self._seed = self._generator.initial_seed() if self._seed is None else self._seed
            self._generator.manual_seed(self._seed + epoch)


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    path = folder / LOG_NAME
    return path.exists() and path.stat().st_size > 0


def _open_log(
    stack: contextlib.ExitStack, place: Path | str | None, name: str, device: Device, *, resume: bool
) -> tuple[RunLog, Inbox] | tuple[None, None]:
    if place is None:
        return None, None
    path = (folder := Path(place)) / LOG_NAME
    stack.enter_context(claimed_folder(folder))
    if holds_run(folder) and not resume:
        raise InputError(
            f"There is a run in {folder} already.", hint="Name another folder, or go on with it: resume=True."
        )
    log, inbox = stack.enter_context(RunLog(path)), Inbox(folder)  # what is posted from now on is heard
    if warning := stack.enter_context(register_run(folder, name, device.info.name)):
        _log.warning(warning)
    return log, inbox


def _tell(event: Event) -> None:
    """Warnings, and at the end the verdict, reach whoever trains also where there is no log, or nobody looks there."""
    if isinstance(event, Noted) and event.level == "warning":
        _log.warning(event.text)
    elif isinstance(event, Ended) and event.verdict is not None:
        if event.verdict.held is False:
            _log.warning(str(event.verdict))
        elif _log.isEnabledFor(logging.INFO):
            _log.info(str(event.verdict))
        else:  # nobody has set logging up: a training does not end without a word
            sys.stderr.write(f"{event.verdict}\n")


def one_budget(whose: str, budget_w: float | str | None, budget: str | Budget | Schedule | None) -> Budget:
    """The budget that was given in one of two ways."""
    given = [one for one in (budget_w, budget) if one is not None]
    if len(given) != 1:
        raise InputError(f"{whose} needs budget_w or budget.", hint="Such as budget_w=10, or budget='10W peak'.")
    return Budget.of(given[0])
