"""The pilot: everything between a training loop and a device, for whoever owns the loop.

A loop asks for the batch size, trains a step, and reports it. The pilot holds the device's session, the meter, the
controller and the log; when it is left, by whatever way, the device is put back.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from underwatt import __version__
from underwatt.control.actuator import TEST
from underwatt.control.controller import Controller
from underwatt.control.divergence import Losses
from underwatt.control.headroom import lowest_idle_w
from underwatt.control.judge import LiveJudge
from underwatt.control.measured_search import comparable
from underwatt.control.publisher import LATE_S, PERIOD_S, Publisher
from underwatt.control.state import FastPath
from underwatt.convergence.noise_scale import LearnedCurve
from underwatt.convergence.prior import RelativeCurve
from underwatt.device.base import HasRecordedPower, SimulatesLoad, permitted_space
from underwatt.device.session import Session
from underwatt.device.signals import interruptible, uninterrupted
from underwatt.errors import BudgetError, InputError, OutOfMemoryError, SensorError
from underwatt.events import Ended, Measured, Noted, Progressed, Resumed, Scored, Started
from underwatt.measure.meter import Meter, measure_idle
from underwatt.planning.problem import Problem
from underwatt.predict.base import SettingArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from underwatt.control.live_budget import BudgetSource, LiveBudget
    from underwatt.control.publisher import EventLog, Keeper
    from underwatt.control.state import ControlOptions
    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.device.base import Device
    from underwatt.events import Event, Verdict
    from underwatt.records import Measurement, PowerSample, Profile, Setting, WorkloadCost, WorkloadInfo


class Pilot:
    """Use as ``with Pilot(…) as pilot:``; then ``pilot.batch_size``, a step, ``pilot.stepped(batch_size)``."""

    def __init__(
        self,
        device: Device,
        workload: WorkloadInfo,
        batch_sizes: Sequence[int],
        live: LiveBudget,
        *,
        convergence: SamplesToTarget | None = None,
        cost: WorkloadCost | None = None,
        known: Sequence[Measurement] = (),
        references: Sequence[Profile] = (),
        saver: Keeper | None = None,
        log: EventLog | None = None,
        inbox: BudgetSource | None = None,
        options: ControlOptions | None = None,
        listener: Callable[[Event], None] | None = None,
        can_pause: bool = True,
        set_modes: bool = True,
        elapsed_s: float = 0.0,
        idle_w: float | None = None,
    ) -> None:
        if isinstance(device, SimulatesLoad) and cost is None:
            raise InputError(
                f"{device.info.name} is simulated, so it must be told what a step costs.",
                hint="Give cost=underwatt.count_cost(job), or name a real device.",
            )
        self.device, self.workload = device, workload
        self._steps, self._samples, self._heard_steps, self._share = 0, 0, 0, 0.0
        self.target: float | None = None
        self.score: float | None = None  # of the last test
        self._live, self._convergence, self._cost, self._known = live, convergence, cost, tuple(known)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))  # those on offer
        self._references, self._options = references, options
        self._learned = LearnedCurve(convergence) if isinstance(convergence, RelativeCurve) else None
        self._elapsed_s, self._energy_j, self._idle_w = elapsed_s, 0.0, idle_w  # as it was measured before
        self._session, self._process = Session(device), os.getpid()
        self.meter, self._fast = Meter(device), FastPath()  # the first: power readings, and beats of the steps
        self._now_s, self._keep_beat = device.clock.now_s, self.meter.keep_beat
        self._controller: Controller | None = None
        self._stack = contextlib.ExitStack()
        self._share_of_sample: dict[int, float] = {}
        self._begun_s, self._is_elsewhere = 0.0, False
        self.outcome = "finished"  # how the training ends, for the log
        self._loss: float | None = None
        self.losses = Losses()  # as they were looked at
        self._verdict: Verdict | None = None  # of an earlier part of the same training
        self.can_pause, self._set_modes = can_pause, set_modes  # the first of a command that asks once it has asked
        self._publisher = Publisher(log, saver, listener, inbox, self.meter.states)
        if inbox is not None:
            live.inbox = inbox

    def __enter__(self) -> Self:
        failure: BaseException | None = None
        try:
            with contextlib.ExitStack() as stack:
                try:
                    self._begin(stack)
                except BaseException as exc:
                    failure = exc
                    raise
                self._stack = stack.pop_all()
        except BaseException as exc:
            if self._controller is not None:
                self._say_end(exc is failure, failure or exc)  # putting back raises an error of its own
            raise
        return self

    def _begin(self, stack: contextlib.ExitStack) -> None:
        sampling = stack.enter_context(contextlib.ExitStack())  # ends last: a sensor that hangs holds up no restoring
        self._session = stack.enter_context(self._session)
        if self._idle_w is None:  # also where no mean watts are bounded yet: somebody may ask for some later
            self._idle_w = measure_idle(self.device)
        is_low = self.can_pause and self._live.power_w(self._elapsed_s) < self._idle_w
        least_w = lowest_idle_w(self._session, self._set_modes, self._live, self._elapsed_s) if is_low else 0.0
        self._begun_s = self.device.clock.now_s() - self._elapsed_s
        self.meter.listen(lambda read: self._fast.heard(read.at_s, read.power_w, self._live.has_news()))
        if self._publisher.log is not None:
            self.meter.listen(self._log_reading)
        sampling.enter_context(self.meter)
        self._controller = self._make_controller()
        self._say_start()
        if self._session.recovered:
            self.note("info", "A killed session had left the device changed; put back.")
        self._controller.begin(least_w)

    def _make_controller(self) -> Controller:
        space = permitted_space(self.device) if self._set_modes else self.device.space.only(())
        candidates = SettingArray.product(tuple(k.name for k in space.knobs), space.matrix(), self.batch_sizes)
        problem = Problem.of(candidates, self._live.budget, self._convergence, idle_w=self._idle_w)
        self._share_of_sample = _shares(self._convergence, self.batch_sizes)
        before = self._controller
        controller = Controller(
            self._session,
            self.meter,
            problem,
            self._live,
            known=comparable(self._known, problem),
            references=self._references,
            options=self._options,
            tell=self._tell,
            begun_s=self._begun_s,
            can_pause=self.can_pause,
            waiting=self._say_progress_if_late,
            judge=before.judge if before else LiveJudge(self.meter, self._begun_s, self._verdict, self._elapsed_s),
        )
        controller.goes_on(self._energy_j, before)
        self._fast = controller.fast_path
        return controller

    @uninterrupted
    def __exit__(self, *error: Any) -> None:
        if os.getpid() != self._process:  # a forked child owns neither the device nor the log
            return
        restored, failure = False, error[1]
        try:
            # Nothing may stand between an end and the restore: what fails on the way there fails inside the stack.
            self._stack.callback(self.controller.restoring)
            self._stack.__exit__(*error)
            restored = True
        except BaseException as exc:
            failure = failure or exc
            raise
        finally:
            self._say_end(restored, failure)

    @property
    def controller(self) -> Controller:
        """What decides."""
        if self._controller is None:
            raise InputError("The tuner is not under way.", hint="Use it in a with statement.")
        return self._controller

    @property
    def setting(self) -> Setting:
        """What to train with from the next step on."""
        setting = self.controller.setting
        assert setting is not None
        return setting

    @property
    def idle_w(self) -> float | None:
        """What waiting draws; ``None`` where that is not known."""
        return self._idle_w

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return self._steps + self._fast.steps

    @property
    def samples(self) -> int:
        """Samples trained on so far."""
        return self._samples + self._fast.steps * self._fast.batch_size

    @property
    def share(self) -> float:
        """Of the way to the target, as far as convergence tells."""
        fast = self._fast
        return self._share + fast.steps * fast.batch_size * self._share_of_sample.get(fast.batch_size, 0.0)

    @property
    def batch_size(self) -> int:
        """The batch size of the next batch."""
        return self.setting.batch_size

    @property
    def elapsed_s(self) -> float:
        """Seconds of the device's time since the training began."""
        return self.device.clock.now_s() - self._begun_s

    @property
    def energy_j(self) -> float:
        """Joules since the training began, as far as they were read."""
        return self.controller.energy_j

    @property
    def power_w(self) -> float:
        """Mean power over the last second; NaN where it cannot be read."""
        try:
            watts = self.meter.trace(self._now_s() - PERIOD_S).mean_watts()[1]
        except SensorError:
            return math.nan
        return float(watts.mean()) if len(watts) else math.nan

    @property
    def time_left_s(self) -> float:
        """Expected time to the target; inf where nothing is known of it."""
        return self.controller.time_left_s

    def continues(
        self, *, samples: int, steps: int, share: float, energy_j: float, verdict: Verdict | None = None
    ) -> None:
        """This is a part of a training that began earlier."""
        self._samples, self._steps, self._share, self._energy_j = samples, steps, share, energy_j
        self._verdict = verdict

    def offer(self, batch_sizes: Sequence[int]) -> None:
        """Choose among these batch sizes from the next step on; what was measured and drawn so far stays counted."""
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self._count(0, 0)
        self._controller = self._make_controller()
        self._controller.progressed(self.share)
        self._controller.begin()

    @property
    def learns(self) -> bool:
        """Whether it is of use to know how noisy gradients are: how batch sizes compare was not measured before."""
        return self._learned is not None and len(self.batch_sizes) > 1

    def saw_gradients(self, signal: float, noise: float) -> None:
        """Two gradients were compared: the squared true one, and the variance of one sample's."""
        if self._learned is not None and (curve := self._learned.after(signal, noise)) is not None:
            self.controller.weigh(curve)
            self._convergence = curve
            if self._learned.is_far():
                self.note("info", f"Batch sizes are weighed by {curve.said()}.")

    def begins_anew(self, samples: int = 0, steps: int = 0, share: float = 0.0) -> None:
        """What was trained so far does not count, but for this."""
        self._fast.steps, self._steps, self._samples, self._share = 0, steps, samples, share

    def simulate(self, batch_size: int) -> None:
        """Let a step pass on a simulated device, before it is trained; it may run out of memory as a real one."""
        if self._cost is not None and isinstance(self.device, SimulatesLoad):
            self.device.run_step(self._cost, batch_size)

    def _simulate_other(self, samples: int) -> None:
        """Let a test of so many samples pass on a simulated device, or where there are none, a checkpoint's writing."""
        device, is_recorded = self.device, isinstance(self.device, HasRecordedPower)  # of which only steps were
        if self._cost is not None and isinstance(device, SimulatesLoad) and not is_recorded:
            device.run_step(self._cost.of_test() if samples else self._cost.of_transfer(), samples or 1)

    def stepped(self, batch_size: int, loss: float | None = None) -> None:
        """A step of this batch size has ended; waits where the budget asks for it.

        ``loss`` is the newest that is known. It is a number, because the thread that reads power tells of it, and a
        tensor would have that thread wait for a GPU.
        """
        fast, now_s = self._fast, self._now_s()
        self._keep_beat(now_s)
        self._loss = loss
        if now_s < fast.until_s and now_s < fast.calm_until_s and batch_size == fast.batch_size:
            fast.steps += 1
            return
        self._count(batch_size, 1)
        self.look(batch_size)

    def heard(self, batch_size: int, steps: int, at_s: float, loss: float | None = None) -> None:
        """So many steps had ended at a moment, as somebody else says; ``look`` when they can be waited for."""
        self.meter.beat_at(at_s, steps)
        self._count(batch_size, steps)
        self._loss, self._heard_steps = loss, self._heard_steps + steps

    def _count(self, batch_size: int, steps: int) -> None:
        """Count steps, and those of the fast path before them."""
        for size, count in ((self._fast.batch_size, self._fast.steps), (batch_size, steps)):
            self._steps += count
            self._samples += count * size
            self._share += count * size * self._share_of_sample.get(size, 0.0)

    def look(self, batch_size: int) -> None:
        """Decide, and wait where the budget asks for it, after steps, the last of them of this batch size."""
        if self._heard_steps:
            self._fast.steps, self._heard_steps = self._heard_steps - 1, 0
        controller = self.controller
        controller.progressed(self._share)  # in which the steps of the fast path have just been counted
        controller.after_step(batch_size)
        self._publisher.look_at(self.device, self._now_s())
        self._say_progress_if_late()

    def out_of_memory(self, batch_size: int) -> int:
        """A step of this batch size did not fit; the one to go on with. Raises where there is no smaller one."""
        smaller = self.controller.out_of_memory(batch_size).batch_size
        if smaller >= batch_size:
            raise OutOfMemoryError(
                f"A step at batch size {batch_size} does not fit into the memory of {self.device.info.name}.",
                hint="Offer smaller batch sizes.",
            )
        return smaller

    @property
    def is_measuring(self) -> bool:
        """Whether steps are being measured, which something else would blur."""
        return self.controller.measuring is not None

    @contextlib.contextmanager
    def testing(self, *, is_last: bool = False) -> Iterator[Callable[[int], None]]:
        """The model is tested: that belongs to no step, and is paced as steps are.

        What is given is to be called with the number of samples of each batch that was tested, and waits where the
        budget asks for it. Where nobody does, what it drew is paid back after it; all of it there if it ``is_last``.
        """

        def tested(samples: int) -> None:
            self._simulate_other(samples)
            self.controller.other_goes_on()

        with self.elsewhere(TEST, is_last=is_last):
            yield tested

    @contextlib.contextmanager
    def moving_state(self) -> Iterator[None]:
        """The training's state is written to a disk, or has been read from there."""
        with self.elsewhere("moving state"):
            self._simulate_other(0)
            yield

    @contextlib.contextmanager
    def elsewhere(self, what: str, *, is_last: bool = False) -> Iterator[None]:
        """Something goes on that is no step; what it draws beyond the budget is paid back before the next one."""
        if self._is_elsewhere:  # what is saved within a test is a part of it
            yield
            return
        self._count(0, 0)
        controller, self._is_elsewhere = self.controller, True
        controller.other_begins(what)
        try:
            yield
            (controller.pay_off if is_last else controller.other_goes_on)()
        finally:  # after an error without waiting
            self._is_elsewhere = False
            controller.other_ends()

    def scored(self, value: float, target: float | None, took_s: float | None = None) -> None:
        """The model was tested, which took so long, pauses included."""
        self.score = value
        self._tell(Scored(samples=self.samples, value=value, target=target, took_s=took_s))

    @property
    def energy_left_j(self) -> float:
        """What is left of the budget's joules; inf where they are not bounded."""
        limit_j = self._live.budget.energy_j
        return math.inf if limit_j is None else limit_j - self.energy_j

    def note(self, level: str, text: str) -> None:
        """Say something in the log: ``info`` or ``warning``."""
        self._tell(Noted(level=level, text=text))

    # Telling

    def _log_reading(self, sample: PowerSample) -> None:
        assert self._publisher.log is not None
        power_w = sample.power_w if self._live.bounds_peaks else sample.mean_w
        self._publisher.log.power(sample.at_s - self._begun_s, power_w)
        controller = self._controller
        if controller is not None and controller.setting is not None and self._publisher.is_progress_due(sample.at_s):
            with self._publisher.outlived():
                self._say_progress()

    def _tell(self, event: Event) -> None:
        self._publisher.tell(replace(event, at_s=self.elapsed_s))
        if isinstance(event, Measured):
            self._known += (event.measurement,)

    def _say_news(self) -> None:
        for note in self._publisher.news():
            self._tell(note)

    def _say_start(self) -> None:
        started_at = datetime.now().astimezone().isoformat(timespec="milliseconds")
        if self._elapsed_s:
            self._tell(Resumed(started_at=started_at, pid=os.getpid(), budget=str(self._live)))
            return
        self._tell(
            Started(
                started_at=started_at,
                job=self.workload.name,
                device=self.device.info,
                workload=self.workload,
                budget=str(self._live),
                batch_sizes=self.batch_sizes,
                target=self.target,
                simulated=self.device.info.simulated,
                idle_w=self._idle_w,
                pid=os.getpid(),
                version=__version__,
            )
        )

    def _say_progress_if_late(self) -> None:
        self._publisher.raise_failure()
        if self._publisher.is_progress_due(self._now_s(), LATE_S):
            self._say_progress()

    def _say_progress(self) -> None:
        now_s, controller, log = self._now_s(), self.controller, self._publisher.log
        self._publisher.progress_told(now_s)
        self._say_news()
        self.losses = self.losses.after(self._loss, self.steps)
        if log is None:
            return
        times = self.meter.step_times(now_s - PERIOD_S)
        left_s = self.time_left_s
        self._tell(
            Progressed(
                steps=self.steps,
                samples=self.samples,
                batch_size=self.batch_size,
                state=controller.phase.value,
                loss=self._loss,
                step_s=float(times.mean()) if len(times) else math.nan,
                power_w=self.power_w,
                budget_w=controller.budget_w,
                energy_j=controller.energy_j,
                time_left_s=left_s if math.isfinite(left_s) else None,
                gap_share=controller.pause_share,
                share=self.share if self._share_of_sample else None,
                **self._publisher.seen,
                verdict=controller.verdict,
            )
        )
        log.flush()

    @interruptible
    def _say_end(self, restored: bool, failure: BaseException | None) -> None:
        outcome = self.outcome
        if failure is not None and not (outcome == "energy spent" and isinstance(failure, BudgetError)):
            outcome = "interrupted" if isinstance(failure, (KeyboardInterrupt, SystemExit)) else "failed"
        error = str(failure) if failure is not None and outcome == "failed" else None
        if self.meter.hangs:
            self.note("warning", "A power reading hangs and was left behind; what was drawn at the end is not known.")
        try:
            if (note := self._publisher.close()) is not None:
                self._tell(note)
        finally:
            self._say_news()
            self._tell(
                Ended(
                    outcome=outcome,
                    restored=restored,
                    energy_j=self.energy_j,
                    samples=self.samples,
                    steps=self.steps,
                    score=self.score,
                    error=error,
                    verdict=self.controller.verdict,
                )
            )
            if self._publisher.log is not None:
                self._publisher.log.flush()
                self._say_news()


def _shares(convergence: SamplesToTarget | None, sizes: Sequence[int]) -> dict[int, float]:
    """How much of the way to the target one sample is, by batch size."""
    if convergence is None or isinstance(convergence, RelativeCurve):
        return {}
    return {size: math.exp(-float(log)) for size, log in zip(sizes, convergence.predict(list(sizes))[0], strict=True)}
