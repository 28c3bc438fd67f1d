"""The controller: decides after each step which setting to train with, so that the budget holds whatever happens.

It is in one of four states. *Searching*: the setting in use is being measured, by the training steps themselves.
*Holding*: it was measured and fits. *Correcting*: measured power or step time has left what was expected; a lower
setting or pauses bring it back, and the plan is made again. *Restoring*: the device is being put back.

Everything runs in the thread of the training loop, at the end of a step; only readings come from elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.errors import ApplyError, BudgetError, ModeError, NotPermittedError, SensorError
from underwatt.plan.duty import allows_pauses
from underwatt.plan.search import FIRST, Search
from underwatt.profile.measure import Measuring
from underwatt.profile.steady import Settling
from underwatt.records import Measurement, Setting, Status
from underwatt.run.knowledge import Knowledge, Surprise
from underwatt.run.options import ControlOptions, State
from underwatt.run.pacer import Pacer
from underwatt.run.trouble import SensorGuard, ThrottleGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.device.session import Session
    from underwatt.plan.problem import Problem
    from underwatt.profile.meter import Meter
    from underwatt.records import Profile
    from underwatt.run.live import LiveBudget


# A device with clocks is taken to draw at most this share of the budget in a pause: it is the lower clocks' own idling
# that counts, and what was read at the start was read at the clocks found.
IDLE_SHARE = 0.75
PAUSING_S = 2.0
MOST_BATCH_SIZES = 8
# Where only pauses hold the budget, a step that was never measured is first taken to draw so many times the budget.
CAUTION = 3.0
COUNTED_MARGIN, READ_MARGIN = 0.003, 0.01
# A setting that fits is left for a better one only where that is worth the change.
WORTH_A_CHANGE = 0.01
# Training on while another setting is measured costs about so many seconds: a few at a setting that is somewhat slower.
MEASURING_COSTS_S = 0.6
# How far to look ahead where it is not known when the training ends, and at most.
USUAL_VIEW_S, LONGEST_VIEW_S = 3600.0, 86_400.0


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
        tell: Callable[[str, dict[str, Any]], None] = lambda _kind, _fields: None,
        begun_s: float | None = None,
        can_pause: bool = True,
    ) -> None:
        self.state = State.SEARCHING
        self.energy_before_j = 0.0  # of an earlier part of the same training
        self._session, self._meter, self._live, self._tell = session, meter, live, tell
        self._options = options or ControlOptions()
        self._clock = session.device.clock
        self._now_s = self._clock.now_s
        self._begun_s = self._now_s() if begun_s is None else begun_s
        self._base = problem
        self._knowledge = Knowledge(problem, known)
        # Without knobs there are only some batch sizes: all of them are worth a look.
        first = FIRST if problem.candidates.knobs else min(len(problem), MOST_BATCH_SIZES)
        self._search = Search(problem, references=references, known=known, first=first)
        self._settling = Settling()
        self._has_knobs = bool(problem.candidates.knobs)
        self._counts_joules = session.device.read_power().energy_j is not None
        self._can_pause = can_pause and allows_pauses(live.budget)
        self._pacer = Pacer(meter, problem.idle_w or 0.0, self._now_s())
        self._measuring: Measuring | None = None
        self._search_w = math.nan
        self._searched_w: list[float] = []
        self._budget_w = math.nan
        self._throttle = ThrottleGuard(self._options.throttle_s)
        self._sensor = SensorGuard(self._options.lost_s)
        self._next_look_s = self._next_drift_s = -math.inf
        self._changed_s = self._level_s = self._now_s()
        self._steps_since_change = 0
        self._share_done = 0.0
        self._paused_s = 0.0
        self._last_pause_s = self._observed_s = -math.inf
        self.setting: Setting | None = None

    # What the training loop calls

    def begin(self) -> Setting:
        """Choose the first setting; raises ``BudgetError`` where waiting alone draws more than the budget."""
        self._follow_budget(self._elapsed_s(), "start")
        if self.setting is None:
            self._seek()
        assert self.setting is not None, "a first setting was chosen"
        return self.setting

    def after_step(self, batch_size: int) -> None:
        """A step of this batch size has ended: look, decide, and wait where the budget asks for it."""
        now_s = self._now_s()
        if self.setting is not None and batch_size == self.setting.batch_size:
            self._steps_since_change += 1
            if self._measuring is None and self.state is State.SEARCHING and self._steps_since_change == 1:
                self._measuring = self._start_measuring(now_s)
        if now_s >= self._next_look_s:
            self._look(now_s)
        if self._measuring is not None and self._has_knobs:
            self._pacer.skip(now_s)  # a pause would blur the reading
            return
        self._pacer.stepped(now_s)
        while (pause_s := self._pacer.pause_s()) > 0:
            begin_s = self._now_s()
            self._clock.sleep(pause_s)
            end_s = self._last_pause_s = self._now_s()
            self._meter.pause(begin_s, end_s)
            self._pacer.paused(end_s - begin_s, end_s)
            self._paused_s += end_s - begin_s
            if end_s >= self._next_look_s:
                self._look(end_s)

    def out_of_memory(self, batch_size: int) -> Setting:
        """A step of this batch size did not fit: go back to one that does."""
        assert self.setting is not None
        failed = Measurement(replace(self.setting, batch_size=batch_size), status=Status.OUT_OF_MEMORY)
        self._take(failed)
        self._measuring = None
        self._note("warning", f"Batch size {batch_size} does not fit into memory; it is not tried again.")
        self._settle_for_best(State.HOLDING, "the last good batch size")
        return self.setting

    def interrupted(self, begin_s: float, end_s: float) -> None:
        """Something else than training went on for a while, such as a test: it belongs to no step."""
        self._meter.absence(begin_s, end_s)
        self._pacer.absent(end_s)

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
        return self._budget_w

    @property
    def energy_j(self) -> float:
        """Drawn since the training began, as far as it was read."""
        return self.energy_before_j + self._pacer.energy_j

    @property
    def pausing(self) -> bool:
        """Whether there were pauses in the last seconds."""
        return self._now_s() - self._last_pause_s < PAUSING_S

    @property
    def pause_share(self) -> float:
        """Share of the time since the start that was spent in pauses."""
        elapsed_s = self._elapsed_s()
        return self._paused_s / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def time_left_s(self) -> float:
        """Expected from the setting in use; inf while nothing is known."""
        known = self._knowledge.of(self.setting) if self.setting else None
        if known is None:
            return math.inf
        row = int(np.argmax(self._base.candidates.batch_size == known.setting.batch_size))
        step_s = known.step_s * self._knowledge.drift.slow_factor
        return float(step_s * np.exp(self._base.log_steps[row])) * (1 - self._share_done)

    def measurements(self) -> tuple[Measurement, ...]:
        """All that is known, drift taken out."""
        return self._knowledge.measurements()

    # Looking

    def _look(self, now_s: float) -> None:
        self._next_look_s = now_s + self._options.look_s
        elapsed_s = now_s - self._begun_s
        changed = self._live.poll(elapsed_s)
        self._follow_budget(elapsed_s, "changed" if changed else "schedule")
        try:
            if self._measuring is not None:
                self._follow_measurement(now_s)
            elif self._has_knobs and self.state is not State.SEARCHING and now_s >= self._next_drift_s:
                self._next_drift_s = now_s + self._options.look_s
                self._watch(now_s)
            if self._sensor.back(self._meter.newest):
                self._note("info", "Power can be read again.")
        except SensorError as exc:
            self._sensor_lost(now_s, exc)
            return
        if self._measuring is None and self._may_search(now_s):
            self._seek()

    def _follow_budget(self, elapsed_s: float, why: str) -> None:
        """Take in the watts of the next step: it cannot be cut short when they fall."""
        ahead_s = self._options.look_s + self._step_s()
        if (watts := self._live.lowest_w(elapsed_s, elapsed_s + ahead_s)) == self._budget_w:
            return
        if math.isnan(self._budget_w):
            self._check_feasible(watts)
        fell = watts < self._budget_w
        self._budget_w = watts
        self._level_s = self._now_s()
        self._pacer.set_budget(watts * (1 - self._margin()) if self._can_pause else math.inf, self._idle_w())
        self._tell("budget", {"power_w": watts if math.isfinite(watts) else None, "why": why})
        if self.setting is None:
            return
        if self._measuring is not None and not (fell and self._is_too_much()):
            return  # what is being measured may go on
        if self._knowledge.measurements():
            self._measuring = None
            self._settle_for_best(State.HOLDING, f"{watts:g} W hold now")

    def _is_too_much(self) -> bool:
        """Whether the setting under measurement draws more than the budget, as far as it is known."""
        so_far = self._measuring.so_far if self._measuring else None
        if so_far is None:
            return True
        return so_far.power_w > self._budget_w

    def _watch(self, now_s: float) -> None:
        """Compare what is measured with what is known of the setting in use."""
        options = self._options
        known = self._knowledge.of(self.setting) if self.setting else None
        settled_s = self._changed_s + options.settle_s
        if known is None or now_s < settled_s + options.short_s:
            return
        power_w, _, paused = self._observed(now_s - options.short_s)
        if not paused and power_w > self._expected_w(known) * (1 + options.clear_excess):
            self._knowledge.observe(known.setting, power_w, math.nan, options.short_s)
            self._correct(power_w)
            return
        if now_s - options.long_s >= max(settled_s, self._observed_s):
            power_w, step_s, paused = self._observed(now_s - options.long_s)
            self._observed_s = now_s
            if math.isfinite(power_w) and not paused:
                surprise = self._knowledge.observe(known.setting, power_w, step_s, options.long_s)
                if surprise is Surprise.LEAP:
                    self._correct(power_w)
                    return
                self._settle_for_best(self.state, f"{power_w:.2f} W were measured", least_gain=WORTH_A_CHANGE)
        if self.state is State.CORRECTING and now_s - settled_s >= options.long_s:
            self.state = State.HOLDING
            self._say_setting("back within what was expected")
        self._look_for_throttling(now_s)

    def _observed(self, since_s: float) -> tuple[float, float, bool]:
        """Mean power of the steps, their mean time where there are enough of them, and whether there were pauses."""
        trace = self._meter.trace(since_s)
        if len(trace) < 3:
            return math.nan, math.nan, False
        paused_s = float(self._meter.paused_s(trace.at_s)[-1])
        seconds = float(trace.at_s[-1] - trace.at_s[0])
        power_w = (trace.energy_j - self._idle_w() * paused_s) / max(seconds - paused_s, 1e-9)
        if paused_s > 0.5 * seconds:
            power_w = math.nan  # mostly idle: says little about steps
        times = self._meter.step_times(since_s)
        return power_w, float(np.mean(times)) if len(times) >= 3 else math.nan, paused_s > 0

    def _expected_w(self, known: Measurement) -> float:
        return known.power_w + self._knowledge.drift.extra_w

    def _correct(self, power_w: float) -> None:
        """The device has changed: plan again with what is left of the budget."""
        drift = self._knowledge.drift
        self._observed_s = self._changed_s = self._now_s()  # what was seen once is not taken for another change
        what = f"{drift.extra_w:+.2f} W and {drift.slow_factor:.2f}× the time of when its settings were measured"
        self._note("info", f"The device has drifted to {what}; planning again.")
        self._level_s = self._now_s()
        state = State.CORRECTING if power_w > self._budget_w else State.HOLDING
        self._settle_for_best(state, f"{power_w:.2f} W were measured")

    def _look_for_throttling(self, now_s: float) -> None:
        if self._throttle.is_over(now_s):
            self._settle_for_best(State.HOLDING, "clocks that were throttled may be used again")
        if self.setting is not None and (why := self._throttle.look(now_s, self._session.device, self.setting.mode)):
            self._note("warning", why)
            self._settle_for_best(State.CORRECTING, f"the GPU is throttled to {self._throttle.highest_mhz:g} MHz")

    def _sensor_lost(self, now_s: float, error: SensorError) -> None:
        """Go back to a setting that was measured to fit, and give the sensor some time."""
        if self._sensor.lost(now_s, error):
            self._note("warning", f"{error} Holding the last safe setting.")
            self._measuring = None
            self._settle_for_best(State.HOLDING, "power cannot be read")

    # Searching

    def _may_search(self, now_s: float) -> bool:
        if self.state is not State.HOLDING or self._sensor.is_lost or self._throttle.active:
            return False
        stays_s = self._live.next_change_s(now_s - self._begun_s) - (now_s - self._begun_s)
        if now_s - self._level_s < 1.0 or stays_s < 2.0:
            return False
        level_w = self._left_w()
        return not any(abs(level_w / done_w - 1) <= self._options.same_level for done_w in self._searched_w)

    def _time_at_level_s(self) -> float:
        """How long watts like these are expected to hold, over all times that they come."""
        left_s = self.time_left_s
        left_s = min(left_s, LONGEST_VIEW_S) if math.isfinite(left_s) else USUAL_VIEW_S
        schedule = self._live.schedule
        if schedule is None:
            return left_s
        now_s = self._elapsed_s()
        near = self._options.same_level * self._budget_w
        pieces = schedule.pieces(now_s, now_s + left_s)
        alike_s = sum(end_s - begin_s for begin_s, end_s, power_w in pieces if abs(power_w - self._budget_w) <= near)
        return max(alike_s, 1.0)

    def _seek(self) -> None:
        """Ask the search what to measure next, and train with that; with nothing to ask, hold the best."""
        level_w = self._left_w()
        if not math.isclose(level_w, self._search_w, rel_tol=1e-3):
            least_gain = max(self._options.least_gain, MEASURING_COSTS_S / self._time_at_level_s())
            self._search = self._search.under(
                self._search_problem(), most=self._options.most_a_level, least_gain=least_gain
            )
            self._search_w = level_w
        ask = self._search.ask()
        while ask is not None and not self._knowledge.usable(ask.setting):
            self._search.tell(Measurement(ask.setting, status=Status.FAILED))
            ask = self._search.ask()
        if ask is None:
            self._searched_w.append(level_w)
            self._settle_for_best(State.HOLDING, "the best that was measured")
        elif not self._use(ask.setting, State.SEARCHING, ask.why):
            self._seek()

    def _start_measuring(self, now_s: float) -> Measuring:
        assert self.setting is not None
        return Measuring(
            self._session.device,
            self._meter,
            self.setting,
            now_s,
            self._options.measure if self._has_knobs else self._options.measure_paused,
            self._settling,
            self._idle_w(),
        )

    def _follow_measurement(self, now_s: float) -> None:
        assert self._measuring is not None
        if not (self._measuring.is_enough() or self._is_decided()):
            return
        found = self._measuring.end()
        if found is None:
            return
        self._measuring = None
        self._take(replace(found, cost_s=now_s - self._changed_s))
        self._pacer.settled(found.power_w, forgive=self._has_knobs)
        self._seek()

    def _is_decided(self) -> bool:
        """Whether the setting under measurement is out already: it draws too much, or is clearly too slow."""
        so_far = self._measuring.so_far if self._measuring else None
        if so_far is None or so_far.power_w_ci95 > self._options.rough * so_far.power_w:
            return False
        seen = self._knowledge.drift.seen_from(so_far)
        if self._has_knobs and seen.power_w - seen.power_w_ci95 > self._left_w():
            return True
        if so_far.steps < 3 or so_far.step_s_ci95 > self._options.rough * so_far.step_s:
            return False
        problem = self._problem_now()
        best = self._knowledge.best(problem)
        trial = Knowledge(problem, [seen]).best(problem)
        return bool(best and best.fits and trial and trial.time_s > self._options.hopeless * best.time_s)

    def _take(self, measurement: Measurement) -> None:
        self._tell("measured", {"measurement": measurement})
        corrected = self._knowledge.drift.seen_from(measurement)
        self._knowledge.add(corrected)
        self._search.tell(corrected)

    def _problem_now(self) -> Problem:
        """The problem with the watts that drift leaves."""
        if math.isinf(self._budget_w):
            return self._base
        watts = self._left_w()
        budget = replace(self._live.budget, power_w=watts, energy_j=None, deadline_s=None)
        return replace(self._base, budget=budget, idle_w=self._idle_w() if self._can_pause else None)

    def _search_problem(self) -> Problem:
        """What to look for: where clocks can be set, settings that fit as they are, for pauses would blur the reading.

        Pauses are then only for settings whose power is known already.
        """
        problem = self._problem_now()
        return replace(problem, idle_w=None) if self._has_knobs else problem

    # Setting

    def _settle_for_best(self, state: State, why: str, least_gain: float = 0.0) -> None:
        """Use the best measured setting; one that fits is left only for one that is better by ``least_gain``."""
        problem = self._problem_now()
        best = self._knowledge.best(problem, self._throttle.highest_mhz) or self._knowledge.best(problem)
        if best is None:
            return
        if least_gain and self.setting is not None:
            now = self._knowledge.outcome(self.setting, problem)
            if now is not None and now.fits and best.time_s > (1 - least_gain) * now.time_s:
                return
        if not self._use(best.measurement.setting, state, why):
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
                if before is None:
                    raise
                self._session.apply(before.mode)  # a write may have been half done
                return False
        now_s = self._now_s()
        self.setting, self.state = setting, state
        if setting != before or state is State.SEARCHING:
            self._changed_s = now_s
            self._steps_since_change = 0
            self._pacer.expect(self._busy_w(setting), now_s + self._options.settle_s)
        self._say_setting(why)
        return True

    def _busy_w(self, setting: Setting) -> float | None:
        """What a step is reckoned to draw; where pauses are all there is, too much rather than too little."""
        known = self._knowledge.of(setting)
        if known is not None:
            return self._expected_w(known)
        if self._has_knobs or not self._can_pause:
            return None
        highest_w = max((m.power_w for m in self._knowledge.measurements()), default=0.0)
        return max(CAUTION * self._budget_w, highest_w)

    def _say_setting(self, why: str) -> None:
        self._tell("setting", {"setting": self.setting, "state": self.state.value, "why": why})

    def _note(self, level: str, text: str) -> None:
        self._tell("note", {"level": level, "text": text})

    # Small things

    def _elapsed_s(self) -> float:
        return self._now_s() - self._begun_s

    def _step_s(self) -> float:
        known = self._knowledge.of(self.setting) if self.setting else None
        return known.step_s * self._knowledge.drift.slow_factor if known else 0.0

    def _margin(self) -> float:
        """The share of the budget that is left free: small where joules are counted, more where watts are averaged."""
        return COUNTED_MARGIN if self._counts_joules else READ_MARGIN

    def _left_w(self) -> float:
        """The watts that drift and margin leave for a setting as it was measured."""
        return self._knowledge.effective_w(self._budget_w * (1 - self._margin()))

    def _idle_w(self) -> float:
        """Power in a pause: as it was found, or less where lower clocks, which a lower budget asks for, draw less."""
        found_w = self._base.idle_w
        if found_w is None:
            return 0.0 if math.isinf(self._budget_w) else IDLE_SHARE * self._budget_w
        return min(found_w, IDLE_SHARE * self._budget_w) if self._base.candidates.knobs else found_w

    def _check_feasible(self, watts: float) -> None:
        idle_w = self._base.idle_w
        if idle_w is not None and not self._base.candidates.knobs and watts <= idle_w:
            raise BudgetError(
                f"{watts:g} W is less than the device draws while it waits ({idle_w:.2f} W).",
                hint=f"The smallest budget that can be held is above {idle_w:.2f} W.",
            )
