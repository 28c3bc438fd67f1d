"""A board's side of a round: the user's own steps, trained under the board's budget until the round is over.

with underwatt.fleet.round(context, msg, optimizer=optimizer) as local:
    for batch in local.batches(dataset, shuffle=True):
        loss = train_step(batch)
        local.step(loss)
reply = Message(RecordDict({"arrays": arrays, "metrics": metrics, **local.records()}), reply_to=msg)

Everything that a single board has is at work inside: the search while training, pauses, the session that puts the
device back. What was learned is kept in the node's state between rounds, and in a store for other runs.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._imports import require
from underwatt.budget import Budget, Schedule
from underwatt.control.live_budget import LiveBudget, now_on_the_wall_s
from underwatt.control.pilot import Pilot
from underwatt.convergence.curve import samples_to_target
from underwatt.device.registry import open_device
from underwatt.errors import InputError
from underwatt.events import Measured
from underwatt.fleet.messages import KEY, Report, Work, front_of, profile_text, read_profile
from underwatt.fleet.rounds import NOISE_BATCH, Course, course_of
from underwatt.jobs.identity import loop_info
from underwatt.records import Profile, lasting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from underwatt.control.state import ControlOptions
    from underwatt.device.base import Device
    from underwatt.events import Event
    from underwatt.records import Measurement, WorkloadCost, WorkloadInfo

BATCH_SIZES = (8, 16, 32, 64, 128)
REMEMBERED = 0.7  # of what steps took lately, against the newest


def round(  # noqa: A001 - what users write is underwatt.fleet.round
    context: Any,
    message: Any,
    *,
    device: str | Device = "",
    budget: str | float | Budget | Schedule | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    optimizer: Any = None,
    lr_batch_size: int | None = None,
    data: int = 0,
    name: str = "",
    store: Path | str | None = None,
    share_profile: bool = True,
    cost: WorkloadCost | None = None,
    options: ControlOptions | None = None,
) -> Local:
    """One round on this board, to be used in a ``with`` statement.

    What is not given is read from the node's configuration: ``device``, ``budget`` (such as ``10W``, or a schedule) and
    ``store``, a file that keeps what was measured for other runs. ``optimizer`` has its learning rate follow the batch
    size from the rate it has, which is taken to suit ``lr_batch_size`` (the largest batch size where it is not given),
    and says how far an update went. ``data`` is how many samples the board holds, where ``local.batches`` does not see
    them. With ``share_profile=False`` the modes that were measured stay here.
    """
    given = dict(context.node_config)
    opened = device if not isinstance(device, str) else open_device(device or str(given.get("device", "")))
    own = budget if budget is not None else given.get("budget")
    if own is None:
        raise InputError(
            "This board has no budget.",
            hint="Give one to the node: --node-config 'budget=\"10W\"', or underwatt.fleet.round(…, budget='10W').",
        )
    place = store if store is not None else given.get("store")
    work = Work.read(dict(message.content[KEY])) if KEY in message.content else Work()
    return Local(
        opened,
        Budget.of(own if not isinstance(own, int) else float(own)),
        work,
        _State(context.state),
        batch_sizes=batch_sizes,
        optimizer=optimizer,
        lr_batch_size=lr_batch_size,
        data=data,
        workload=loop_info(name or "fleet", optimizer),
        store=str(place) if place else "",
        share_profile=share_profile,
        cost=cost,
        options=options,
    )


class _State:
    """What a node remembers between the rounds of a run: what waiting draws, and its measurements."""

    def __init__(self, records: Any) -> None:
        self._records = records

    @property
    def values(self) -> dict[str, Any]:
        return dict(self._records[KEY]) if KEY in self._records else {}

    def keep(self, **values: Any) -> None:
        make = type(self._records[KEY]) if KEY in self._records else require("flwr.app", extra="fleet").ConfigRecord
        self._records[KEY] = make(values)


class Local:
    """The steps of one round on one board; made by ``round``."""

    def __init__(
        self,
        device: Device,
        budget: Budget,
        work: Work,
        state: _State,
        *,
        batch_sizes: Sequence[int],
        optimizer: Any,
        lr_batch_size: int | None,
        data: int,
        workload: WorkloadInfo,
        store: str,
        share_profile: bool,
        cost: WorkloadCost | None,
        options: ControlOptions | None,
    ) -> None:
        self.device, self.work = device, work
        self._budget, self._state, self._workload = budget, state, workload
        self._sizes, self._optimizer, self._cost, self._options = tuple(batch_sizes), optimizer, cost, options
        self._lr_batch_size, self._store, self._share_profile = lr_batch_size, store, share_profile
        self._course = course_of(optimizer) if optimizer is not None else Course()
        self._data, self._clock = data, device.clock
        self._before: tuple[Measurement, ...] = ()  # measured in earlier rounds
        self._now: list[Measurement] = []  # and in this one
        self._stack = contextlib.ExitStack()
        self._begun_s = self._ended_s = self._last_s = 0.0
        self._step_s = 0.0  # what a step took lately, pauses included
        self._size, self._pilot, self._tuner = 0, _none(), _none()
        self.report: Report | None = None  # once the round is over

    def __enter__(self) -> Self:
        self._begun_s = self._clock.now_s()
        with contextlib.ExitStack() as stack:
            known, saver = self._known(stack)
            self._before = known
            held = self._state.values
            references = [read_profile(self.work.reference)] if self.work.reference and not known else []
            sizes = (self.work.batch_size,) if self.work.batch_size else self._sizes
            noise = self.work.noise_batch or NOISE_BATCH
            self._pilot = Pilot(
                self.device,
                self._workload,
                sizes,
                self._live_budget(),
                convergence=samples_to_target({size: 1e6 * (1 + size / noise) for size in self._sizes}),
                cost=self._cost,
                known=known,
                references=references,
                saver=saver,
                listener=self._hear,
                options=self._options,
                idle_w=held.get("idle-w"),
            )
            if self._optimizer is not None:
                from underwatt.adapters.tuner import Tuner
                from underwatt.jobs.rates import RateFollower

                rate = RateFollower(self._optimizer, self._lr_batch_size or max(self._sizes))
                self._tuner = stack.enter_context(Tuner(self._pilot, [rate], contextlib.ExitStack()))
            else:
                stack.enter_context(self._pilot)
            self._stack = stack.pop_all()
        self._last_s = self._clock.now_s()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        pilot = self._pilot
        steps, samples, size = pilot.steps, pilot.samples, pilot.batch_size
        trained_s = self._clock.now_s() - self._begun_s
        budget_w = pilot.controller.budget_w
        swallowed = self._stack.__exit__(*error)
        if error[0] is not None:
            return swallowed
        self._ended_s = self._clock.now_s()
        known = list({one.setting: one for one in (*self._before, *lasting(self._now))}.values())
        profile = profile_text(Profile(self.device.info, self._workload, tuple(known)))
        idle_w = pilot.idle_w or 0.0
        self._state.keep(**{"idle-w": idle_w, "profile": profile})
        verdict = pilot.controller.verdict
        front = front_of(known)
        busy_s = self._ended_s - self._begun_s
        self.report = Report(
            steps=steps,
            samples=samples,
            data=self._data,
            progress=self._course.progress,
            busy_s=busy_s,
            train_s=trained_s,
            energy_j=pilot.energy_j,
            power_w=pilot.energy_j / trained_s if trained_s > 0 else 0.0,
            budget_w=budget_w,
            over=verdict.worst_over,
            held=verdict.judgement.value,
            batch_size=size,
            searched=not self._now,
            idle_w=idle_w,
            kind=f"{self.device.info.id} {self._workload.id}",
            front_batch=tuple(point.batch_size for point in front),
            front_w=tuple(point.power_w for point in front),
            front_s=tuple(point.sample_s for point in front),
            front_s_high=tuple(point.sample_s_high for point in front),
            profile=profile if self._share_profile else "",
        )
        return swallowed

    # What the user's loop calls

    @property
    def goes_on(self) -> bool:
        """Whether there is time for another step: one that would end after the round's end is not begun."""
        if not self.work.train_s:
            return True
        return self._clock.now_s() + self._step_s <= self._begun_s + self.work.train_s

    def batches(self, dataset: Any, *, shuffle: bool = True, **more: Any) -> Iterator[Any]:
        """Batches of a data set, pass after pass until the round is over; ``more`` goes to PyTorch's ``DataLoader``.

        Where the server sets no time, one pass.
        """
        if self._tuner is None:
            raise InputError("Batches need the optimizer.", hint="Give round(…, optimizer=…), or use local.sizes().")
        self._data = self._data or len(dataset)
        while True:
            for batch in self._tuner.loader(dataset, shuffle=shuffle, **more):
                self._size = self._tuner._batch_size
                yield batch
                if not self.goes_on:
                    return
            if not self.work.train_s:
                return

    def sizes(self) -> Iterator[int]:
        """The batch size of each step until the round is over, for loops that make their own batches."""
        while True:
            self.begins(self._pilot.batch_size)
            yield self._size
            if not self.goes_on:
                return

    def begins(self, batch_size: int) -> None:
        """A step of this batch size begins; ``batches`` and ``sizes`` say so by themselves."""
        self._size = batch_size
        if self._tuner is not None:
            self._tuner.starts(batch_size)
        else:
            self._pilot.simulate(batch_size)

    def step(self, loss: Any = None, *, lr: float | None = None) -> None:
        """A step has ended. ``lr`` is its rate, where there is no optimizer that knows it."""
        if lr is None:
            lr = self._rate()
        self._course.step(lr)
        if self._tuner is not None:
            self._tuner.step(loss)
        else:
            self._pilot.stepped(self._size, loss)
        now_s = self._clock.now_s()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._step_s = took_s if not self._step_s else REMEMBERED * self._step_s + (1 - REMEMBERED) * took_s

    def records(self) -> dict[str, Any]:
        """What the reply carries for the server beside the model and its metrics."""
        if self.report is None:
            raise InputError("The round is not over.", hint="Make the reply after the with block of round().")
        return {KEY: require("flwr.app", extra="fleet").ConfigRecord(self.report.as_record())}

    # How it begins

    def _rate(self) -> float:
        """The rate of the step just made, by the batch size as the follower scales it."""
        if self._optimizer is None:
            raise InputError(
                "Nothing tells the learning rate of this step.", hint="Give round(…, optimizer=…) or step(lr=…)."
            )
        from underwatt.jobs.job import scaled_lr, usual_rule

        rates = [group["lr"] for group in self._optimizer.param_groups]
        lr = float(np.mean(rates))
        whole = self._lr_batch_size or max(self._sizes)
        return scaled_lr(lr, whole, self._size, usual_rule(self._optimizer)) if lr else 0.0

    def _known(self, stack: contextlib.ExitStack) -> tuple[tuple[Measurement, ...], Any]:
        """What earlier rounds and runs have measured, and who keeps what this one measures."""
        text = self._state.values.get("profile", "")
        known = read_profile(text).measurements if text else ()
        if not self._store:
            return known, None
        from underwatt.store.store import Saver, Store

        kept = stack.enter_context(Store(self._store))
        if not known:
            known = kept.measurements(kept.profile_id(self.device.info, self._workload), telling=True)
        return known, Saver(kept, self.device.info, self._workload)

    def _live_budget(self) -> LiveBudget:
        """The board's own budget, and no more than its lease while that lasts, then its floor."""
        simulated = self.device.info.simulated
        day_s = self._clock.now_s() if simulated else now_on_the_wall_s()
        wall = None if simulated else now_on_the_wall_s
        work = self.work
        if not work.lease_s:
            return LiveBudget(self._budget, time_of_day_s=day_s, wall_clock=wall)
        course = self._budget.course
        own = course.starting_at(day_s) if course is not None else None
        until_s = work.lease_s
        pieces = own.pieces(0.0, until_s) if own is not None else [(0.0, until_s, math.inf)]
        after_w = own.power_w(until_s) if own is not None else math.inf
        steps = [(begin_s, min(level_w, work.lease_w)) for begin_s, _, level_w in pieces]
        leased = Schedule.of([*steps, (until_s, min(after_w, work.floor_w))])
        return LiveBudget(replace(self._budget, power_w=None, schedule=leased))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Measured):
            self._now.append(event.measurement)


def _none() -> Any:
    return None
