"""The controller: decides after each step which setting to train with, so that the budget holds whatever happens.

It is in one of four states. *Searching*: the setting in use is being measured, by the training steps themselves.
*Holding*: it was measured and fits. *Correcting*: measured power or step time has left what was expected; a lower
setting or pauses bring it back, and the plan is made again. *Restoring*: the device is being put back.

Everything runs in the thread of the training loop, at the end of a step; only readings come from elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.budget import Watts
from underwatt.control.faults import Sensor, SensorGuard, ThrottleGuard
from underwatt.control.headroom import Room
from underwatt.control.knowledge import LEAP, Knowledge, Surprise, mean_reading_w, seen_steps
from underwatt.control.options import ControlOptions, Quiet, State
from underwatt.control.outcome import expected_s, is_decided, no_size_left, plan_of, why_nothing_fits
from underwatt.control.pacer import Pacer
from underwatt.control.seeker import Seeker
from underwatt.errors import ApplyError, ModeError, NotPermittedError, SensorError
from underwatt.events import BudgetChanged, Measured, Noted, SettingChanged
from underwatt.measure.measurement import Measuring
from underwatt.measure.steady import Settling
from underwatt.planning.problem import DEFAULT_WINDOW_S
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.control.live import LiveBudget
    from underwatt.device.session import Session
    from underwatt.events import Event
    from underwatt.measure.meter import Meter
    from underwatt.planning.problem import Problem
    from underwatt.records import Profile


PAUSING_S = 2.0
LONG_STEPS = 5.0  # a drift of their time is seen in so many steps
MOST_REFUSED = 5  # modes that the device refuses before any was taken
# Where only pauses hold the budget, a step that was never measured is first taken to draw so many times the budget.
CAUTION = 3.0
# A setting that fits is left for a better one only where that is worth the change.
WORTH_A_CHANGE = 0.01


class Controller:
    """Holds a live budget by choosing settings and pauses; ``after_step`` is all that a training loop calls."""

    def __init__(
        self,
        session: Session,
        meter: Meter,
        problem: Problem,
        live: LiveBudget,
        *,
        known: Sequence[Measurement] = (),
        references: Sequence[Profile] = (),
        options: ControlOptions | None = None,
        tell: Callable[[Event], None] = lambda _event: None,
        begun_s: float | None = None,
        can_pause: bool = True,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = State.SEARCHING
        self.quiet = Quiet()
        self.energy_before_j = 0.0  # of an earlier part of the same training
        self._session, self._meter, self._live, self._tell, self._waiting = session, meter, live, tell, waiting
        self._options = options or ControlOptions()
        self._clock = session.device.clock
        self._now_s = self._clock.now_s
        self._begun_s = self._now_s() if begun_s is None else begun_s
        self._base = problem
        self._most_j = math.inf if live.budget.energy_j is None else live.budget.energy_j
        self._knowledge = Knowledge(problem, known)
        self._settling = Settling()
        counts_joules = session.device.read_power().energy_j is not None
        self._room = Room(problem, live, self._knowledge, counts_joules=counts_joules, can_pause=can_pause)
        self._seeker = Seeker(problem, self._room, self._knowledge, self._options, known=known, references=references)
        self._pacer = Pacer(meter, problem.idle_w or 0.0, self._now_s())
        self._measuring: Measuring | None = None
        self._throttle = ThrottleGuard(self._options.throttle_s)
        self._sensor = SensorGuard(self._options.silent_s, self._options.lost_s)
        self._next_look_s = self._next_drift_s = self._next_search_s = self._same_until_s = -math.inf
        self._usual_s = 0.0  # what a step takes at the setting in use
        self._changed_s = self._level_s = self._begun_here_s = self._now_s()
        self._refused = 0
        self._share_done = 0.0
        self._paused_s = 0.0
        self._time_unknown_until_s = -math.inf  # after a leap of power steps are timed anew before a search goes on
        self._last_pause_s = self._observed_s = self._settled_s = -math.inf
        self.setting: Setting | None = None

    # What the training loop calls

    def begin(self) -> Setting:
        """Choose the first setting; raises ``BudgetError`` where waiting alone draws more than the budget."""
        self._follow_budget(self._elapsed_s(), "start")
        if self.setting is None:
            self._seek()
        if self.setting is None:
            raise no_size_left()
        return self.setting

    def after_step(self, batch_size: int) -> None:
        """A step of this batch size has ended: look, decide, and wait where the budget asks for it."""
        now_s, setting, quiet = self._now_s(), self.setting, self.quiet
        assert setting is not None, "a training begins with one"
        steps, quiet.steps, quiet.until_s = quiet.steps + 1, 0, -math.inf
        if self._measuring is None and self.state is State.SEARCHING and batch_size == setting.batch_size:
            self._measuring = self._start_measuring(now_s)
        budget_w = self._room.budget_w
        if now_s >= self._next_look_s:
            self._look(now_s)
        if self._measuring is not None and self._room.has_knobs:
            self._pacer.skip(now_s)  # a pause would blur the reading
            return
        if steps > 1 and self._room.budget_w != budget_w:
            self._pacer.skip(now_s)  # the quiet steps kept the budget that was in force
            return
        self._pacer.stepped(now_s, steps * batch_size / setting.batch_size)
        if self._pacer.at_ease and self.state is not State.SEARCHING and self.setting is setting:
            self._be_quiet(now_s, setting.batch_size)
            return
        while (pause_s := self._pacer.pause_s()) > 0 and self.energy_j < self._most_j:
            begin_s = self._now_s()
            self._clock.sleep(pause_s)
            end_s = self._last_pause_s = self._now_s()
            self._meter.pause(begin_s, end_s)
            self._pacer.paused(end_s - begin_s, end_s)
            self._paused_s += end_s - begin_s
            if end_s >= self._next_look_s:
                self._look(end_s)
            self._waiting()

    def _be_quiet(self, now_s: float, batch_size: int) -> None:
        """Nothing is to be done for a while, if readings are calm."""
        options, budget = self._options, self._live.budget
        changes_s = self._begun_s + self._same_until_s - options.look_s - self._usual_s
        self.quiet.batch_size, self.quiet.calm_w = batch_size, self._room.budget_w * (1 + options.calm_above)
        # Single readings, and means over a moment, do not wait.
        is_long = budget.watts is Watts.MEAN and (budget.window_s or DEFAULT_WINDOW_S) >= DEFAULT_WINDOW_S
        self.quiet.until_s = min(now_s + options.calm_look_s, changes_s) if is_long else self._next_look_s

    def out_of_memory(self, batch_size: int) -> Setting:
        """A step of this batch size did not fit: go back to one that does."""
        assert self.setting is not None
        failed = Measurement(replace(self.setting, batch_size=batch_size), status=Status.OUT_OF_MEMORY)
        self._take(failed)
        self._measuring = None
        self._note("warning", f"Batch size {batch_size} does not fit into memory; it is not tried again.")
        if self._knowledge.measurements():
            self._settle_for_best(State.HOLDING, "the last good batch size")
        else:
            self._seek()
        return self.setting

    def interrupted(self, begin_s: float, end_s: float) -> None:
        """Something else than training went on for a while, such as a test: it belongs to no step."""
        self._meter.absence(begin_s, end_s)
        self._pacer.absent(begin_s, end_s)
        self._last_pause_s = end_s

    def progressed(self, share: float) -> None:
        """So much of the way to the target is done."""
        self._share_done = min(max(share, 0.0), 1.0)

    def restoring(self) -> None:
        """The run is over: nothing is decided any more."""
        self.state = State.RESTORING
        self._measuring = None

    # What others may ask

    @property
    def budget_w(self) -> float:
        """The watts in force."""
        return self._room.budget_w

    @property
    def energy_j(self) -> float:
        """Drawn since the training began, as far as it was read."""
        return self.energy_before_j + self._meter.energy_j

    @property
    def pausing(self) -> bool:
        """Whether there were pauses in the last seconds."""
        return self._now_s() - self._last_pause_s < PAUSING_S

    @property
    def pause_share(self) -> float:
        """Share of the time since the start that was spent in pauses."""
        return self._paused_s / max(self._elapsed_s(), 1e-9)

    @property
    def time_left_s(self) -> float:
        """Expected from the setting in use; inf while nothing is known."""
        return expected_s(self._base, self._knowledge, self.setting) * (1 - self._share_done)

    def measurements(self) -> tuple[Measurement, ...]:
        """All that is known, drift taken out."""
        return self._knowledge.measurements()

    # Looking

    def _look(self, now_s: float) -> None:
        self._next_look_s = now_s + self._options.look_s
        elapsed_s = now_s - self._begun_s
        changed = self._live.poll(elapsed_s)
        self._follow_budget(elapsed_s, "changed" if changed else "schedule")
        if not self._sensor_works(now_s):
            return
        try:
            if self._measuring is not None:
                self._follow_measurement(now_s)
            elif self._room.watches and self.state is not State.SEARCHING and now_s >= self._next_drift_s:
                self._next_drift_s = now_s + self._options.short_s
                self._watch(now_s)
        except SensorError:  # a reading failed on the way, and others came after it
            self._measure_anew()
            return
        if self._pacer.short_s > self._options.short_of_s:
            self._cannot_hold(now_s)
        elif self._measuring is None and now_s >= self._next_search_s:
            self._next_search_s = now_s + self._options.short_s
            if self._may_search(now_s):
                self._seek()

    def _cannot_hold(self, now_s: float) -> None:
        """Pauses draw more than the budget: wait, at the setting that draws least, until more is allowed."""
        power_w = mean_reading_w(self._meter, now_s - self._options.short_s)
        is_news, self._room.floor_w = self._pacer.can_hold, power_w
        self._pacer.set_budget(self._room.held_w, self._room.idle_w)
        if is_news and not self._pacer.can_hold:
            text = f"Waiting alone draws {power_w:.2f} W: {self._room.budget_w:g} W cannot be held, and training waits."
            self._note("warning", text)
        self._settle_for_best(State.CORRECTING, f"pauses drew {power_w:.2f} W")

    def _follow_budget(self, elapsed_s: float, why: str) -> None:
        """Take in the watts of the next step: it cannot be cut short when they fall."""
        ahead_s = elapsed_s + self._options.look_s + self._usual_s
        if ahead_s < self._same_until_s and why == "schedule":
            return
        self._same_until_s = self._live.next_change_s(elapsed_s)
        watts = self._live.lowest_w(elapsed_s, ahead_s)
        if watts == self._room.budget_w and why != "changed":
            return
        if math.isnan(self._room.budget_w):
            self._room.check(watts)
        elif not self._room.can_wait(watts):
            self._note("warning", f"Waiting alone draws more than {watts:g} W: training waits until more is allowed.")
        fell = watts < self._room.budget_w or why == "changed"
        self._room.budget_w = watts
        self._level_s = self._now_s()
        self._pacer.set_budget(self._room.held_w, self._room.idle_w)
        meant = self._live.budget
        bound_w = watts if math.isfinite(watts) else None
        self._tell(BudgetChanged(power_w=bound_w, watts=meant.watts.value, window_s=meant.window_s, why=why))
        if self.setting is None:
            return
        if self._measuring is not None and not (fell and self._is_too_much()):
            return  # what is being measured may go on
        if self._knowledge.measurements():
            self._measuring = None
            self._settle_for_best(State.HOLDING, f"the budget is {watts:g} W now")

    def _is_too_much(self) -> bool:
        """Whether the setting under measurement draws more than the budget, as far as it is known."""
        so_far = self._measuring.so_far if self._measuring else None
        return so_far is None or so_far.power_w > self._room.budget_w

    def _watch(self, now_s: float) -> None:
        """Compare what is measured with what is known of the setting in use."""
        options = self._options
        known = self._knowledge.of(self.setting) if self.setting else None
        settled_s = self._settled_s
        if known is None or now_s < settled_s + options.short_s:
            return
        since_s = now_s - options.short_s
        if self._live.budget.watts is Watts.PEAK and self._is_peak_exceeded(known.setting, since_s):
            return
        power_w = math.nan if self._last_pause_s >= since_s else mean_reading_w(self._meter, since_s)
        clearly_w = math.inf if self._room.can_pause else self._room.budget_w * (1 + LEAP)  # pauses hold it meanwhile
        if power_w > self._knowledge.expected_w(known) and (
            power_w > clearly_w or self._knowledge.is_leap(known.setting, power_w)
        ):
            self._knowledge.observe(known.setting, power_w, math.nan, options.short_s)
            self._time_unknown_until_s = now_s + 2 * options.long_s
            self._correct(power_w)
            return
        long_s = max(options.long_s, LONG_STEPS * self._usual_s)
        if now_s - long_s >= max(settled_s, self._observed_s):
            self._observed_s = now_s
            seen = seen_steps(self._meter, now_s - long_s, self._room.idle_w)
            power_w = seen.power_w
            if math.isfinite(seen.step_s):
                self._time_unknown_until_s = -math.inf
            if self._knowledge.observe(known.setting, power_w, seen.step_s, long_s, seen.blur_w) is Surprise.LEAP:
                self._correct(power_w)
                return
            if math.isfinite(power_w):
                self._settle_for_best(self.state, f"{power_w:.2f} W were measured", least_gain=WORTH_A_CHANGE)
        if self.state is State.CORRECTING and now_s - settled_s >= options.long_s:
            self.state = State.HOLDING
            self._say_setting("back within what was expected")
        self._look_for_throttling(now_s)

    def _is_peak_exceeded(self, setting: Setting, since_s: float) -> bool:
        """Whether one reading was above peak watts: what the setting draws at most is more than was measured."""
        peak_w = max((reading.power_w for reading in self._meter.readings_after(since_s)), default=0.0)
        if peak_w <= self._room.budget_w:
            return False
        self._knowledge.saw_peak(setting, peak_w)
        self._settle_for_best(State.CORRECTING, f"{peak_w:.2f} W were read")
        return True

    def _correct(self, power_w: float) -> None:
        """The device has changed: plan again with what is left of the budget."""
        drift = self._knowledge.drift
        self._observed_s = self._settled_s = self._now_s()  # what was seen once is not taken for another change
        what = f"{drift.extra_w:+.2f} W and {drift.slow_factor:.2f}× the time of when its settings were measured"
        self._note("info", f"The device has drifted to {what}; planning again.")
        self._level_s = self._now_s()
        self._pacer.set_budget(self._room.held_w, self._room.idle_w)
        if self.setting is not None:
            self._pacer.expect(self._busy_w(self.setting), self._usual_s or math.nan)
        state = State.CORRECTING if power_w > self._room.budget_w else State.HOLDING
        why = f"{power_w:.2f} W were measured" if math.isfinite(power_w) else "steps take another time"
        self._settle_for_best(state, why)

    def _look_for_throttling(self, now_s: float) -> None:
        if self._throttle.is_over(now_s):
            self._settle_for_best(State.HOLDING, "clocks that were throttled may be used again")
        if self.setting is not None and (why := self._throttle.look(now_s, self._session.device, self.setting.mode)):
            self._note("warning", why)
            self._settle_for_best(State.CORRECTING, f"the GPU is throttled to {self._throttle.highest_mhz:g} MHz")

    def _sensor_works(self, now_s: float) -> bool:
        """Whether there are readings; without, a setting that was measured to fit is held for a while."""
        found = self._sensor.look(now_s, self._meter, self._begun_here_s)
        if found is Sensor.BACK:
            self._note("info", "Power can be read again.")
            self._measure_anew()
        elif found is Sensor.FAILED:
            self._note("warning", f"{self._sensor.error} Holding the last safe setting.")
            self._measuring = None
            self._settle_for_best(State.HOLDING, "power cannot be read")
        return found in (Sensor.WORKS, Sensor.BACK)

    def _measure_anew(self) -> None:
        """Start the measurement under way again with the next step."""
        if self.state is State.SEARCHING:
            self._measuring = None

    # Searching

    def _may_search(self, now_s: float) -> bool:
        if self.state is not State.HOLDING or self._sensor.is_lost or self._throttle.active:
            return False
        if now_s < self._time_unknown_until_s:
            return False
        stays_s = self._live.next_change_s(now_s - self._begun_s) - (now_s - self._begun_s)
        if now_s - self._level_s < 1.0 or stays_s < 2.0:
            return False
        return not self._seeker.is_done

    def _seek(self) -> None:
        """Ask the search what to measure next, and train with that; with nothing to ask, hold the best."""
        ask = self._seeker.ask(self._elapsed_s(), self.time_left_s)
        if ask is None:
            self._check_found()
            self._seeker.ends()
            self._settle_for_best(State.HOLDING, "the best that was measured")
            if self.setting is not None and (plan := plan_of(self._room, self._knowledge, self.setting)):
                self._tell(plan)
        elif not self._use(ask.setting, State.SEARCHING, ask.why):
            self._seek()

    def _check_found(self) -> None:
        """A search that found nothing which fits ends a run that begins with it; later, there is nothing to end."""
        error = why_nothing_fits(self._room, self._knowledge, self._live.budget)
        if error is None:
            return
        if self._room.can_pause and not self._room.has_knobs:
            self._note("warning", "One step draws much of what 5 s allow: the mean swings. Offer smaller batch sizes.")
        elif self._seeker.has_ended_once:
            self._note("warning", error.message)
        else:
            raise error

    def _start_measuring(self, now_s: float) -> Measuring:
        assert self.setting is not None
        return Measuring(
            self._session.device,
            self._meter,
            self.setting,
            now_s,
            self._options.measure if self._room.has_knobs else self._options.measure_paused,
            self._settling,
            self._room.idle_w,
        )

    def _follow_measurement(self, now_s: float) -> None:
        assert self._measuring is not None
        enough = self._measuring.is_enough()
        if not (enough or is_decided(self._measuring.so_far, self._room, self._knowledge, self._options)):
            return
        found = self._measuring.end()
        if found is None:
            return
        self._measuring = None
        self._take(replace(found, cost_s=now_s - self._changed_s))
        self._pacer.settled(found.power_w, found.step_s, forgive=self._room.has_knobs)
        self._seek()

    def _take(self, measurement: Measurement) -> None:
        self._tell(Measured(measurement=measurement))
        corrected = self._knowledge.drift.seen_from(measurement)
        self._knowledge.add(corrected)
        self._seeker.tell(corrected)

    # Setting

    def _settle_for_best(self, state: State, why: str, least_gain: float = 0.0) -> None:
        """Use the best measured setting; one that fits is left only for one that is better by ``least_gain``."""
        problem = self._room.problem()
        best = self._knowledge.best(problem, self._throttle.highest_mhz) or self._knowledge.best(problem)
        if best is None:
            return
        if least_gain and self.setting is not None:
            now = self._knowledge.outcome(self.setting, problem)
            if now is not None and now.fits and best.time_s > (1 - least_gain) * now.time_s:
                return
        chosen = best.measurement.setting
        if best.fits and (thrifty := self._room.within_energy(self._elapsed_s(), self.energy_j, 1 - self._share_done)):
            chosen = thrifty
        if not self._use(chosen, state, why):
            self._settle_for_best(state, why)

    def _use(self, setting: Setting, state: State, why: str) -> bool:
        """Train with a setting from the next step on; whether the device took it."""
        if setting == self.setting and state is self.state:
            return True
        before = self.setting
        if before is None or setting.mode != before.mode:
            try:
                self._session.apply(setting.mode)
            except (ApplyError, ModeError, NotPermittedError) as exc:
                self._note("warning", f"{setting.mode} cannot be set: {exc}")
                self._knowledge.refuse(setting.mode)
                self._refused += 1
                if before is None and self._refused >= MOST_REFUSED:
                    raise
                if before is not None:
                    self._session.apply(before.mode)  # a write may have been half done
                return False
        now_s = self._now_s()
        self.setting, self.state, self.quiet.until_s = setting, state, -math.inf
        if setting != before or state is State.SEARCHING:
            self._changed_s = now_s
            self._usual_s, expected_w = self._knowledge.step_s(setting), self._busy_w(setting)
            newest = self._meter.newest
            self._settled_s, blind_until_s = now_s + self._options.settle_s, -math.inf
            if self._knowledge.of(setting) is not None and expected_w is not None and newest is not None:
                settles_s = self._settling.seconds(newest.power_w - expected_w, expected_w)
                self._settled_s = blind_until_s = now_s + settles_s
            self._pacer.expect(expected_w, self._usual_s or math.nan, blind_until_s)
        self._say_setting(why)
        return True

    def _busy_w(self, setting: Setting) -> float | None:
        """What a step is reckoned to draw; where pauses are all there is, too much rather than too little."""
        known = self._knowledge.of(setting)
        if known is not None:
            return self._knowledge.expected_w(known)
        if self._room.has_knobs or not self._room.can_pause:
            return None
        highest_w = max((m.power_w for m in self._knowledge.measurements()), default=0.0)
        return max(CAUTION * self._room.budget_w, highest_w)

    def _say_setting(self, why: str) -> None:
        assert self.setting is not None
        self._tell(SettingChanged(setting=self.setting, state=self.state.value, why=why))

    def _note(self, level: str, text: str) -> None:
        self._tell(Noted(level=level, text=text))

    # Small things

    def _elapsed_s(self) -> float:
        return self._now_s() - self._begun_s
