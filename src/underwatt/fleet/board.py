"""A board's side of a round: the user's own steps, trained under the board's budget until the round is over.

app = ClientApp(mods=[underwatt.fleet.mod()])

for batch in underwatt.fleet.batches(trainloader, optimizer):
    …

or, with one's own hands:

with underwatt.fleet.round(context, msg) as local:
    for batch in local.batches(trainloader, optimizer):
        …
reply = Message(RecordDict({"arrays": arrays, "metrics": metrics, **local.records()}), reply_to=msg)

Everything that a single board has is at work inside: the search while training, pauses, the session that puts the
device back. What was learned is kept in the node's state between rounds, and in a store for other runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from underwatt._imports import require
from underwatt.budget import DAY_S, Budget, Schedule, Watts
from underwatt.control.live_budget import LiveBudget, now_on_the_wall_s
from underwatt.control.pilot import Pilot
from underwatt.control.state import ControlOptions, Phase
from underwatt.convergence.curve import samples_to_target
from underwatt.device.base import SimulatesLoad
from underwatt.device.registry import open_device
from underwatt.errors import BudgetError, InputError
from underwatt.events import Measured
from underwatt.fleet.messages import KEY, NodeState, Report, Work, front_of, of_kin, profile_text, read_profile
from underwatt.fleet.rounds import NOISE_BATCH, Course, course_of
from underwatt.jobs.data import fillable
from underwatt.jobs.identity import loop_info
from underwatt.jobs.load import RESNET18
from underwatt.measure.measurement import MeasureOptions
from underwatt.records import Profile, lasting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from typing_extensions import Self

    from underwatt.adapters.tuner import Tuner
    from underwatt.device.base import Device
    from underwatt.events import Event
    from underwatt.records import Measurement, WorkloadCost

    _Begins = TypeVar("_Begins", "Pilot", "Tuner")

_log = logging.getLogger("underwatt.fleet")
# A round is short and begins with a leap of watts: a setting is measured as well as serves to choose, not until the
# sensor shows nothing else, and for a small gain of one board among many the others' time is not worth it.
IN_ROUNDS = ControlOptions(
    measure=MeasureOptions(precision=0.03, min_steps=4, limit_s=6.0, min_readings=2), least_gain=0.02
)
REMEMBERED = 0.7  # of what steps took lately, against the newest
NO_PAUSE_S = 0.01  # what is shorter is none
LEAST_J = 1e-9  # with less there is no step, whatever it draws
ENDLESS_J = 1e18  # where nothing bounds a round's watts, and its joules are counted here


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    """How a board trains; what is not given is read from its node's configuration, where that can say it.

    ``device``, ``budget`` (such as ``10W``, or a schedule) and ``store`` (a file that keeps what was measured for
    other runs) can stand in ``--node-config``. ``lr_batch_size`` is what the optimizer's rate suits; it is the batch
    size of the user's loader otherwise. With ``share_profile=False`` the modes that were measured stay on the board.
    ``cost`` is what a step costs, for simulated boards only; without it they are charged for one of ResNet18.
    """

    device: str | Device = ""
    budget: str | float | Budget | Schedule | None = None
    store: Path | str | None = None
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    lr_batch_size: int | None = None
    name: str = "fleet"
    share_profile: bool = True
    cost: WorkloadCost | None = None
    control: ControlOptions | None = None


def round(context: Any, message: Any, **options: Any) -> Local:  # noqa: A001 - what users write is underwatt.fleet.round
    """One round on this board, to be used in a ``with`` statement; ``BoardOptions`` says what may be given."""
    return Local(context, message, BoardOptions(**options))


_under_way: ContextVar[Local] = ContextVar("underwatt_fleet_round")


def mod(**options: Any) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """For ``ClientApp(mods=[underwatt.fleet.mod()])``: its trainings and evaluations are within the board's budget.

    ``BoardOptions`` says what may be given. A training takes its batches from ``underwatt.fleet.batches``.
    """
    given = BoardOptions(**options)

    def apply(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        category = message.metadata.message_type.split(".")[0]
        if category not in ("train", "evaluate"):
            return call_next(message, context)
        with Local(context, message, given) as local:
            token = _under_way.set(local)
            try:
                if category == "evaluate":
                    with local.evaluating():
                        return call_next(message, context)
                if local.is_spent and KEY not in message.content:  # a strategy that would not know what to do with it
                    raise local.nothing_left()
                reply = None if local.is_spent else call_next(message, context)
            finally:
                _under_way.reset(token)
        if reply is None:
            app = require("flwr.app", extra="fleet")
            return app.Message(app.RecordDict(local.records()), reply_to=message)
        if not reply.has_error():
            reply.content.update(local.records())
        return reply

    return apply


def batches(loader: Any, optimizer: Any) -> Iterator[Any]:
    """Batches of the round under way, in an app that has ``mod`` among its mods: ``Local.batches``."""
    local = _under_way.get(None)
    if local is None:
        raise InputError(
            "No round of a fleet is under way.",
            hint="Give the app our mod: ClientApp(mods=[underwatt.fleet.mod()]), or use underwatt.fleet.round.",
        )
    return local.batches(loader, optimizer)


class Local:
    """The steps of one round on one board; made by ``round``."""

    def __init__(self, context: Any, message: Any, options: BoardOptions) -> None:
        node = dict(context.node_config)
        budget = options.budget if options.budget is not None else node.get("budget")
        if budget is None:
            raise InputError(
                "This board has no budget.",
                hint="Give one to the node, --node-config 'budget=\"10W\"', or to underwatt.fleet: budget='10W'.",
            )
        place = options.device or str(node.get("device", ""))
        self.device = open_device(place) if isinstance(place, str) else place
        self.work = Work.read(dict(message.content[KEY])) if KEY in message.content else Work()
        self._options, self._state, self._clock = options, NodeState(context.state), self.device.clock
        # A node that has heard of a site holds its floor without a lease, whatever a message says or leaves out.
        self._floor_w = self.work.floor_w or float(self._state.values.get("floor-w", 0.0))
        self._state.keep(**{"floor-w": self._floor_w})
        self._budget = Budget.of(float(budget) if isinstance(budget, int) else budget)
        self._store = str(options.store or node.get("store") or "")
        self._workload = loop_info(options.name)
        self._course: Course | None = None
        self._own: Schedule | None = None  # watts of the board's own, from the round's start on
        self._control = options.control or (ControlOptions() if self._budget.watts is Watts.PEAK else IN_ROUNDS)
        self._data, self._size = 0, 0
        self._before: tuple[Measurement, ...] = ()  # measured in earlier rounds
        self._borrowed: tuple[Measurement, ...] = ()  # by other boards of this kind
        self._now: list[Measurement] = []  # and in this one
        self._stack = contextlib.ExitStack()
        self._begun_s = self._last_s = 0.0
        self._step_s = 0.0  # what a step took lately, pauses included
        self._drawn_j = float(self._state.values.get("energy-j", 0.0))  # in earlier rounds and evaluations
        self._step_j, self._last_j = float(self._state.values.get("step-j", 0.0)), 0.0
        self._pilot: Pilot | None = None
        self._starved = False
        self._tuner: Tuner | None = None
        self.report: Report | None = None  # once the round is over

    def __enter__(self) -> Self:
        self._begun_s = self._clock.now_s()
        return self

    @property
    def energy_j(self) -> float:
        """Joules since the message came: as they were read, and those of waiting before the first reading."""
        if self._pilot is None:
            return float(self._state.values.get("idle-w", 0.0)) * (self._clock.now_s() - self._begun_s)
        before_s = self._clock.now_s() - self._begun_s - self._pilot.elapsed_s
        return self._pilot.meter.energy_j + (self._pilot.idle_w or 0.0) * max(before_s, 0.0)

    @property
    def is_spent(self) -> bool:
        """Whether the node's joules, over all its messages, suffice for no other step, or its deadline is over."""
        left_j = (self._budget.energy_j or math.inf) - self._drawn_j - self.energy_j
        return left_j < max(self._step_j, LEAST_J) or self._clock.now_s() >= self._deadline_s

    @property
    def _deadline_s(self) -> float:
        """It counts from the node's first round, as a schedule does."""
        if self._budget.deadline_s is None:
            return math.inf
        return float(self._state.values.get("begun-s", self._begun_s)) + self._budget.deadline_s

    def nothing_left(self) -> BudgetError:
        """Why this board does no more."""
        return BudgetError(
            f"The joules of this board's budget are spent, or its time is over: {self._budget}.",
            hint="Start its node anew with a larger budget; a FleetStrategy asks it again in its next run.",
        )

    def __exit__(self, *error: Any) -> bool | None:
        pilot, phase = self._pilot, None
        trained_s = self._clock.now_s() - self._begun_s
        if pilot is not None and error[0] is None:
            phase = pilot.controller.phase  # before the device is put back
            self._keep_unfinished(pilot)
        swallowed = self._stack.__exit__(*error)
        if pilot is not None and error[0] is None and pilot.steps:
            self._sum_up(pilot, trained_s, searched=phase is Phase.HOLDING and not self._now)
        elif error[0] is None and (self.is_spent or self._starved):
            self.report = Report.without_work(trained_s, self.energy_j, spent=self.is_spent)
        if pilot is not None:
            self._state.keep(**{"energy-j": self._drawn_j + self.energy_j, "step-j": self._step_j})
        return swallowed

    def _keep_unfinished(self, pilot: Pilot) -> None:
        """A round may end while a setting is measured: what is known of it by then counts if it is known roughly."""
        controller, control = pilot.controller, self._control
        found = controller.measuring.end() if controller.measuring is not None else None
        if found is None or not found.usable or found.steps < control.measure.min_steps:
            return
        if max(found.step_s_ci95 / found.step_s, found.power_w_ci95 / found.power_w) <= control.rough:
            self._now.append(controller.knowledge.drift.marked(found))

    def _sum_up(self, pilot: Pilot, train_s: float, *, searched: bool) -> None:
        own = {one.setting: one for one in (*self._before, *lasting(self._now))}
        known = {one.setting: one for one in self._borrowed} | own
        profile = profile_text(Profile(self.device.info, self._workload, tuple(own.values())))
        idle_w, front, verdict = pilot.idle_w or 0.0, front_of(known.values()), pilot.controller.verdict
        begun_s = self._state.values.get("begun-s", self._begun_s)
        lag = pilot.controller.judge.settling.log_prior.tolist()
        self._state.keep(**{"idle-w": idle_w, "profile": profile, "begun-s": begun_s, "lag": lag})
        self.report = Report(
            steps=pilot.steps,
            samples=pilot.samples,
            data=self._data,
            progress=self._course.progress if self._course else 0.0,
            busy_s=self._clock.now_s() - self._begun_s,
            train_s=train_s,
            energy_j=self.energy_j,
            power_w=self.energy_j / train_s if train_s > 0 else 0.0,
            budget_w=self._own.power_w(train_s) if self._own else math.inf,
            over=verdict.worst_over,
            held=verdict.judgement.value,
            batch_size=pilot.batch_size,
            searched=searched,
            spent=self.is_spent,
            idle_w=idle_w,
            kind=f"{self.device.info.id} {self._workload.id}",
            front_batch=tuple(point.batch_size for point in front),
            front_w=tuple(point.power_w for point in front),
            front_s=tuple(point.sample_s for point in front),
            front_s_high=tuple(point.sample_s_high for point in front),
            profile=profile if self._options.share_profile else "",
        )

    # What the user's loop calls

    def goes_on(self) -> bool:
        """Whether there are joules and time for another step: one that would end after the round's end is not begun.

        A first one is, however late it is: a board without any has nothing to report, and would be asked in vain again.
        One without the joules for it says so, and is asked no more.
        """
        if self.is_spent or self._starved:
            return False
        ends_s = min(self._begun_s + (self.work.train_s or math.inf), self._deadline_s)
        return not self._step_s or self._clock.now_s() + self._step_s <= ends_s

    def batches(self, loader: Any, optimizer: Any) -> Iterator[Any]:
        """Batches of what a ``DataLoader`` loads, pass after pass until the round is over.

        The batch size is the one that suits the board's watts, and the learning rate follows it from that of the
        loader's. Where the server sets no time, one pass. Asked for the next batch, the step is taken for done.
        """
        from underwatt.adapters.follow import why_fixed
        from underwatt.adapters.tuner import Tuner
        from underwatt.jobs.rates import RateFollower

        if reason := why_fixed(loader):
            raise InputError(f"The batch size of this loader cannot be changed: {reason}.", hint="Use local.sizes().")
        if not self.goes_on():
            return
        if self._tuner is None:
            self._course = course_of(optimizer)
            self._data, self._workload = len(loader.sampler), loop_info(self._options.name, optimizer)
            rate = RateFollower(optimizer, self._options.lr_batch_size or loader.batch_size)
            self._tuner = self._begun(Tuner(self._make_pilot(), [rate], contextlib.ExitStack()))
            if self._tuner is None:
                return
            rate.follow(loader.batch_size)
            # After the follower's own, so that it sees the rate that a step is made with.
            self._stack.callback(optimizer.register_step_pre_hook(self._hear_step).remove)
        tuner = self._tuner
        batches = tuner.loader(
            loader.dataset,
            sampler=loader.sampler,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
        )
        self._last_s, self._last_j = self._clock.now_s(), self.energy_j
        while True:
            for batch in batches:
                yield batch
                with self._as_leased():
                    tuner.step()
                self._stepped()
                if not self.goes_on():
                    return
            if not self.work.train_s:
                return

    def sizes(self, momentum: float = 0.0, *, data: int) -> Iterator[int]:
        """The batch size of each step until the round is over, for loops without PyTorch; ``step`` after each.

        ``momentum`` is that of the loop's own SGD, and ``data`` how many samples the board holds.
        """
        self._course, self._data = Course(momentum), data
        pilot = self._begun(self._make_pilot())
        if pilot is None:
            return
        self._last_s, self._last_j = self._clock.now_s(), self.energy_j
        while self.goes_on():
            self._size = pilot.batch_size
            pilot.simulate(self._size)
            yield self._size

    def step(self, lr: float) -> None:
        """A step of ``sizes`` has ended, made at this learning rate."""
        assert self._pilot is not None, "a step belongs to a loop over sizes"
        assert self._course is not None
        self._course.step(lr)
        with self._as_leased():
            self._pilot.stepped(self._size)
        self._stepped()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Callable[[int], None]]:
        """A test of the model, at the setting that suits training; what it draws above the budget is paid back.

        What is given may be called with the samples of each batch, and waits where the watts ask for it; else all is
        paid at the end. A test is not cut short, so one may draw more than the last joules; without any, none begins.
        """
        if self.is_spent:
            raise self.nothing_left()
        with self._make_pilot() as pilot, pilot.testing(is_last=True) as tested:

            def paced(samples: int) -> None:
                tested(samples)
                self._pay(pilot)

            yield paced

    def _pay(self, pilot: Pilot) -> None:
        """Wait for as long as the watts ask for between two batches of a test."""
        paused_s = math.inf
        while paused_s > NO_PAUSE_S:  # as a search would begin next, the controller pays little in one go
            before_s = self._clock.now_s()
            pilot.controller.other_goes_on()
            paused_s = self._clock.now_s() - before_s

    def records(self) -> dict[str, Any]:
        """What the reply carries for the server beside the model and its metrics."""
        if self.report is None:
            raise InputError(
                "There is nothing to report: no batch was asked for, or the round is not over.",
                hint="Take batches from underwatt.fleet.batches; make the reply after the with block of round().",
            )
        return {KEY: require("flwr.app", extra="fleet").ConfigRecord(self.report.as_record())}

    # How it goes on

    def _stepped(self) -> None:
        now_s = self._clock.now_s()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._step_s = took_s if not self._step_s else REMEMBERED * self._step_s + (1 - REMEMBERED) * took_s
        now_j = self.energy_j
        took_j, self._last_j = now_j - self._last_j, now_j
        self._step_j = took_j if not self._step_j else REMEMBERED * self._step_j + (1 - REMEMBERED) * took_j

    def _hear_step(self, optimizer: Any, *_: Any) -> None:
        assert self._course is not None
        self._course.step(math.fsum(group["lr"] for group in optimizer.param_groups) / len(optimizer.param_groups))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Measured):
            self._now.append(event.measurement)

    # How it begins

    def _make_pilot(self) -> Pilot:
        options = self._options
        known, saver = self._known()
        self._before, self._borrowed = known, self._borrow(known)
        sizes = options.batch_sizes
        if self._data:
            sizes, _ = fillable(sizes, self._data)
        if self.work.batch_size in sizes:
            sizes = (self.work.batch_size,)
        noise = self.work.noise_batch or NOISE_BATCH
        self._pilot = Pilot(
            self.device,
            self._workload,
            sizes,
            self._live_budget(),
            convergence=samples_to_target({size: 1e6 * (1 + size / noise) for size in options.batch_sizes}),
            cost=options.cost or (RESNET18 if isinstance(self.device, SimulatesLoad) else None),
            known=(*self._borrowed, *known),
            saver=saver,
            listener=self._hear,
            options=self._control,
            idle_w=self._state.values.get("idle-w"),
        )
        return self._pilot

    def _begun(self, begins: _Begins) -> _Begins | None:
        """What trains, begun; ``None`` where a site's lease is too little for any step."""
        with self._as_leased():
            self._stack.enter_context(begins)
            self._recall_lag()
        return None if self._starved else begins

    @contextlib.contextmanager
    def _as_leased(self) -> Iterator[None]:
        """Where a site's lease is too little for any setting, the round ends early, and with what was done."""
        try:
            yield
        except BudgetError as exc:
            if not self._floor_w:
                raise
            _log.warning("%s This round ends early.", exc.message)
            self._starved = True

    def _recall_lag(self) -> None:
        """How the sensor lags was learned in earlier rounds; else each would begin with seconds that tell of it."""
        lag = self._state.values.get("lag")
        assert self._pilot is not None
        settling = self._pilot.controller.judge.settling
        if lag is not None and len(lag) == len(settling.log_prior):
            settling.log_prior = np.array(lag)

    def _borrow(self, own: Iterable[Measurement]) -> tuple[Measurement, ...]:
        """What boards of the same kind have measured of the same network and this one has not, if the server knows any.

        They are taken for its own, but for what boards of one kind differ by; how it draws itself is soon seen.
        """
        found, known = of_kin(self.work.references, self.device.info, self._workload), {one.setting for one in own}
        return tuple(one for one in found if one.setting not in known)

    def _known(self) -> tuple[tuple[Measurement, ...], Any]:
        """What earlier rounds and runs have measured, and who keeps what this one measures."""
        text = self._state.values.get("profile", "")
        known = read_profile(text).measurements if text else ()
        if not self._store:
            return known, None
        from underwatt.store.store import Saver, Store

        kept = self._stack.enter_context(Store(self._store))
        if not known:
            known = kept.measurements(kept.profile_id(self.device.info, self._workload), telling=True)
        return known, Saver(kept, self.device.info, self._workload)

    def _live_budget(self) -> LiveBudget:
        """The watts of the board's own budget, and no more than its lease while that lasts, then its floor.

        Joules and a deadline are for all rounds and not for this one: nobody knows how many there are to be.
        """
        day_s = self._clock.now_s() if self.device.info.simulated else now_on_the_wall_s()
        course = self._budget.course
        if course is not None and course.period_s is None and len(course.levels_w) > 1:
            # Such a schedule counts from the node's first round, and each round from its own start.
            since_s = max(self._clock.now_s() - float(self._state.values.get("begun-s", self._begun_s)), 0.0)
            pieces = course.pieces(since_s, since_s + DAY_S)
            course = Schedule.of((begin_s - since_s, level_w) for begin_s, _, level_w in pieces)
        elif course is not None:
            course = course.starting_at(day_s % course.period_s if course.period_s else 0.0)
        self._own = course
        if self._floor_w:
            course = self.work.leased(course, self._clock.now_s() - self._begun_s, self._floor_w)
        if course is None:
            return LiveBudget(Budget(energy_j=ENDLESS_J))
        return LiveBudget(replace(self._budget, power_w=None, energy_j=None, deadline_s=None, schedule=course))
