"""The controller: decides after each step which setting to train with, so that the budget holds whatever happens.

What it is doing is one record, and what follows from what it sees is decided by pure functions (both in ``state.py``);
here the device is set, read and waited for. Everything runs in the thread of the training loop, at the end of a step;
only readings come from elsewhere.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from underwatt.budget import Watts
from underwatt.control import state as control
from underwatt.control.actuator import Actuator
from underwatt.control.knowledge import mean_reading_w, seen_steps
from underwatt.control.level_search import LevelSearch
from underwatt.control.pacer import LONGEST_PAUSE_S
from underwatt.control.state import Excess, Phase
from underwatt.errors import OutOfMemoryError, SensorError
from underwatt.events import BudgetChanged, Measured
from underwatt.measure.measurement import Measuring
from underwatt.measure.steady import jump
from underwatt.planning.search import GLIMPSE
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.control.headroom import Headroom
    from underwatt.control.live_budget import LiveBudget
    from underwatt.device.session import Session
    from underwatt.measure.meter import Meter
    from underwatt.planning.problem import Problem
    from underwatt.planning.search import Ask
    from underwatt.records import Profile

WORTH_A_CHANGE = 0.01  # a setting that fits is left for a better one only where that is worth the change
SEEN_S, READ_FROM_S, PAUSE_S = 0.4, 2.0, 0.1  # waiting is read for so long, from then on at the soonest, in such pieces
MOST_REFUSED, MOST_IN_VAIN = 8, 2  # modes in a row that the device refused; checks of it that showed no change


class Controller(Actuator):
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
        **more: Any,
    ) -> None:
        super().__init__(session, meter, problem, live, known=known, references=references, **more)
        self._search = LevelSearch(self.state.room, self._options, known, references)
        self._doubted: Measurement | None = None  # until a known setting was measured again
        self._may_refuse, self._in_vain = True, 0  # a budget that nothing keeps, at the start only; checks in vain
        self._stepped_s = self._now_s()
        self._other_from_s: float | None = None  # since when something goes on that is no step

    # What the training loop calls

    def begin(self, least_w: float = 0.0) -> Setting:
        """Choose the first setting, once more than ``least_w`` is allowed; ``BudgetError`` where that is never so."""
        self._follow_budget(self._elapsed_s(), "start")
        if self._wait_for_watts(least_w, self._follow) or self.setting is None:
            self._stepped_s = self._now_s()
            self._seek()
            if self.setting is None and self.knowledge.usable(lowest := self.state.room.lowest()):
                self._use(lowest, Phase.SEARCHING, "to see whether the lowest setting fits")
        if self.setting is None:
            raise OutOfMemoryError(
                "Every offered batch size ran out of memory when it was measured before.",
                hint="Offer smaller batch sizes, or measure anew with another store.",
            )
        self._begin_paused()
        return self.setting

    def after_step(self, batch_size: int) -> None:
        """A step of this batch size has ended: look, decide, and wait where the budget asks for it."""
        now_s, setting, fast, budget_w = self._now_s(), self.setting, self.fast_path, self.budget_w
        assert setting is not None, "a training begins with one"
        steps, fast.steps, fast.until_s = fast.steps + 1, 0, -math.inf
        self.judge.stepped(self._stepped_s, max(self._stepped_s, self.state.last_pause_s), now_s, steps)
        self._stepped_s = now_s
        if self.measuring is None and self._may_measure(setting, batch_size):
            self.measuring = self._start_measuring(now_s)
        if now_s >= self.state.next_look_s:
            self._look(now_s)
        while self.state.room.may_pause and self._meter.wants_a_pause():
            self.measuring, self.state = None, replace(self.state, next_look_s=math.inf)  # nothing else may move them
            self._pause(LONGEST_PAUSE_S)
            self.state = replace(self.state, next_look_s=self._now_s())
            self._meter.check_sensor(after_step=False)  # where they do not move either, the run is over
        if self.measuring is not None and self.state.room.pauses_blur:
            self._pacer.skip(now_s)  # a pause would blur the reading
            return
        if steps > 1 and self.budget_w != budget_w:
            self._pacer.skip(now_s)  # the steps of the fast path kept the budget that was in force
            return
        self._pacer.stepped(now_s, steps * batch_size / setting.batch_size)
        if self._pacer.at_ease and self.phase is not Phase.SEARCHING and self.setting is setting:
            fast.batch_size, fast.calm_w = setting.batch_size, self.budget_w * (1 + self._options.calm_above)
            fast.until_s = control.fast_until_s(self.state, self._live.budget, self._begun_s, now_s, self._options)
            return
        self._keep_pace()
        self._begin_paused()

    def _keep_pace(self) -> None:
        """Wait for as long as the pacer asks for; a wait in which the last joules go ends, so that the training can.

        With none left, what can be paid for is; a wait that pays for nothing would only draw more.
        """
        were_left = self.energy_j < self._most_j
        while (pause_s := self._pacer.pause_s()) > 0:
            if self.energy_j >= self._most_j and (were_left or not self._pacer.helps):
                return
            self._pause(pause_s)
            if self.phase is Phase.SEARCHING and self.state.room.pauses_blur:
                return  # a setting is to be measured, which a pause would blur

    def _pause(self, seconds: float) -> None:
        begin_s = self._now_s()
        self.sleep(seconds)
        end_s = self._now_s()
        self.state = replace(self.state, last_pause_s=end_s)
        if self._other_from_s is None:
            self._meter.pause(begin_s, end_s)
        self._pacer.paused(end_s - begin_s, end_s)
        self._paused_s += end_s - begin_s
        if end_s >= self.state.next_look_s:
            self._look(end_s)
        self._waiting()

    def out_of_memory(self, batch_size: int) -> Setting:
        """A step of this batch size did not fit: go back to one that does."""
        assert self.setting is not None
        self._take(Measurement(replace(self.setting, batch_size=batch_size), status=Status.OUT_OF_MEMORY))
        self.measuring = None
        self._note("warning", f"Batch size {batch_size} does not fit into memory; it is not tried again.")
        if self.knowledge.measurements():
            self._use_best(Phase.HOLDING, "the last good batch size")
        else:
            self._seek()
        return self.setting

    def other_begins(self, what: str) -> None:
        """Something that is no step begins, such as a test; ``other_goes_on`` after each piece, then ``other_ends``."""
        now_s, fast = self._now_s(), self.fast_path
        if fast.steps:
            self._pacer.stepped(now_s, fast.steps)
        fast.steps, fast.until_s = 0, -math.inf
        self._other_from_s = now_s
        self._pacer.turn_to(what, self._other_w(what), now_s)

    def other_goes_on(self) -> None:
        """A piece of it is done: look, and wait where the budget asks for it, as after a step."""
        self._other_stepped()
        self._keep_pace()

    def pay_off(self) -> None:
        """It is done, and no step comes after it: wait until all that was drawn is read, and paid for where it can."""
        self._other_stepped()
        while (pause_s := self._pacer.unsettled_s(self._now_s())) > 0:
            self._pause(pause_s)

    def _other_stepped(self) -> None:
        now_s = self._now_s()
        if now_s >= self.state.next_look_s:
            self._look(now_s)
        self._pacer.stepped(now_s)

    def other_ends(self) -> None:
        """There are steps again; its time, pauses included, and its watts belong to none of them."""
        begin_s, end_s, self._other_from_s = self._other_from_s, self._now_s(), None
        self._pacer.turn_back(end_s)
        if begin_s is not None and end_s > begin_s:  # where only steps were recorded, nothing else takes time
            self._meter.absence(begin_s, end_s)
            self._stepped_s += end_s - begin_s
            self.state = replace(self.state, last_pause_s=end_s, other_s=end_s)

    # Looking

    def _look(self, now_s: float) -> None:
        self.state = replace(self.state, next_look_s=now_s + self._options.look_s)
        if not self._follow(now_s):
            return
        self._meter.check_sensor()
        self._hear_verdict(now_s)
        is_stepping = self._other_from_s is None  # else readings tell nothing of steps
        try:
            if is_stepping and self.measuring is not None:
                self._follow_measurement(now_s)
            elif is_stepping and control.is_watch_due(self.state, now_s):
                self.state = replace(self.state, next_watch_s=now_s + self._options.short_s)
                self._watch(now_s)
        except SensorError:  # a reading failed on the way, and others came after it: measure anew
            self.measuring = None
            return
        if self._pacer.short_s > self._options.short_of_s:
            self._cannot_hold(now_s)
        elif self.measuring is None and is_stepping and now_s >= self.state.next_search_s:
            self.state = replace(self.state, next_search_s=now_s + self._options.short_s)
            level_ends_s = self._begun_s + self._live.next_change_s(now_s - self._begun_s)
            may_search = control.may_search(self.state, now_s, level_ends_s, is_over=self.judge.is_over)
            if may_search and not self._search.is_done(self.state.room):
                self._seek()

    def _cannot_hold(self, now_s: float) -> None:
        """Pauses at this setting draw more than the budget: find one where they do not, or wait at the lowest."""
        power_w = mean_reading_w(self._meter, now_s - self._options.short_s)
        if math.isnan(power_w):
            return  # nothing was read lately
        if self.setting is not None and self.knowledge.of(self.setting) is not None:
            self.knowledge.saw_idle(self.setting, power_w)
        self._set_pace()
        if (room := self.state.room).fits_something() or not self._search.is_done(room):
            self._use_best(Phase.CORRECTING, f"pauses drew {power_w:.2f} W")
            return
        self._wait_at_lowest(power_w)

    def _follow(self, now_s: float) -> bool:
        """Follow the budget to a moment; whether there are readings."""
        elapsed_s = now_s - self._begun_s
        self._follow_budget(elapsed_s, "changed" if self._live.poll(elapsed_s) else "schedule")
        return self._sensor_works(now_s)

    def _follow_budget(self, elapsed_s: float, why: str) -> None:
        before, changed = self.state, why == "changed"
        self.state = control.with_budget(before, self._live, elapsed_s, self._now_s(), self._options, changed=changed)
        room, watts = self.state.room, self.budget_w
        if room is before.room:
            return
        is_first = math.isnan(before.room.budget_w)
        self._may_refuse = self._may_refuse and is_first and watts >= self._live.most_w(elapsed_s)
        if is_first:
            room.check(self._live.most_w(elapsed_s))
        elif not room.can_wait(watts):
            self._note("warning", f"Waiting alone draws more than {watts:g} W: training waits until more is allowed.")
        self._set_pace()
        self.judge.budget(self._now_s(), self._live.budget, watts)
        meant, bound_w = self._live.budget, watts if math.isfinite(watts) else None
        self._tell(BudgetChanged(power_w=bound_w, watts=meant.watts.value, window_s=meant.window_s, why=why))
        if self.setting is None:
            return
        if self.measuring is not None and control.keeps_measuring(
            before, self.state, self.measuring.so_far, changed=changed
        ):
            return
        if self.knowledge.measurements():
            self.measuring = None
            if not room.can_pause and not room.fits_something():
                self._seek()  # nothing that is known will do, not even for a moment
            else:
                self._use_best(Phase.HOLDING, f"the budget is {watts:g} W now")

    def _watch(self, now_s: float) -> None:
        """Compare what is measured with what is known of the setting in use."""
        known = self.knowledge.of(self.setting) if self.setting else None
        if now_s < self.state.valid_s + self._options.short_s:
            return
        if known is None:
            self._try_known(now_s)
        elif not self._is_exceeded(known, now_s) and not self._has_drifted(known, now_s):
            self._look_for_throttling(now_s)

    def _is_exceeded(self, known: Measurement, now_s: float) -> bool:
        """Whether the last moment's readings are above what is allowed or expected; corrected where they are."""
        short_s, peak = self._options.short_s, self._live.budget.watts is Watts.PEAK
        since_s = now_s - short_s
        peak_w = self._unseen_peak_w(self.state.valid_s, now_s) if peak else 0.0
        power_w = math.nan if self.state.last_pause_s >= since_s else mean_reading_w(self._meter, since_s)
        found = control.excess(self.state, known, self.knowledge, power_w, peak_w, peak=peak)
        if found is Excess.PEAK:
            self.knowledge.saw_peak(known.setting, peak_w)
            self._use_best(Phase.CORRECTING, f"{peak_w:.2f} W were read")
        elif found is Excess.LEAP:
            self.knowledge.observe(known.setting, power_w, math.nan, short_s)
            self._correct(power_w)
        return found is not Excess.NONE

    def _has_drifted(self, known: Measurement, now_s: float) -> bool:
        """Take in what steps drew and took lately; whether the device has changed, which is corrected then."""
        long_s = control.long_window_s(self.state, now_s, self._options)
        if long_s is None:
            return False
        self.state = replace(self.state, observed_s=now_s)
        self._learn_idle(known, max(self.state.valid_s, now_s - max(long_s, self._options.idle_view_s)))
        seen = seen_steps(self._meter, now_s - long_s, self.state.room.idle_at(self.setting))
        if math.isfinite(seen.step_s):
            self.state = replace(self.state, step_time_from_s=-math.inf)
        if self.knowledge.was_disturbed(known.setting, seen.power_w, seen.step_s):
            peak_w = seen.power_w + known.peak_w - known.power_w
            self._start_over([replace(known, power_w=seen.power_w, step_s=seen.step_s, peak_w=peak_w)])
            return True
        if self.knowledge.observe(known.setting, seen.power_w, seen.step_s, long_s, seen.blur_w, seen.busy_share):
            self._correct(seen.power_w)
            return True
        if math.isfinite(seen.power_w):
            self._use_best(self.phase, f"{seen.power_w:.2f} W were measured", least_gain=WORTH_A_CHANGE)
        return False

    def _correct(self, power_w: float) -> None:
        """The device has changed: plan again with what is left of the budget."""
        drift, now_s = self.knowledge.drift, self._now_s()
        # The readings that told of it are in part from before: what it is now shows a whole window later.
        self.state = replace(control.drifted(self.state, now_s), step_time_from_s=now_s + 2 * self._options.long_s)
        what = f"{drift.extra_w:+.2f} W and {drift.slow_factor:.2f}× the time of when its settings were measured"
        self._note("info", f"The device has drifted to {what}; planning again.")
        self._set_pace()
        if self.setting is not None:
            self._pacer.expect(self._busy_w(self.setting), self.state.usual_step_s or math.nan)
        phase = Phase.CORRECTING if power_w > self.budget_w else Phase.HOLDING
        self._use_best(phase, f"{power_w:.2f} W were measured" if math.isfinite(power_w) else "steps take another time")

    # Measuring and searching

    def _start_measuring(self, now_s: float) -> Measuring:
        assert self.setting is not None
        room, options = self.state.room, self._options
        precision = options.measure if room.pauses_blur else options.measure_paused
        idle_w = room.idle_at(self.setting)
        return Measuring(self._session.device, self._meter, self.setting, now_s, precision, self._settling, idle_w)

    def _follow_measurement(self, now_s: float) -> None:
        assert self.measuring is not None
        room = self.state.room
        if room.pauses_blur and self._has_leapt(now_s):
            return
        is_enough = (
            self.measuring.is_enough()
            or room.is_ruled_out(self.measuring.so_far, self._options)
            or control.outlived(self.state, now_s, self._options)
        )
        over_w = 0.0 if is_enough or not room.pauses_blur else self._over_while_measured_w(now_s)
        if not is_enough and not over_w:
            return
        is_doubtful = room.may_pause and self._meter.stands_still(self.measuring.begun_s)  # a pause will tell
        if (found := None if is_doubtful else self.measuring.end()) is None and not over_w:
            return
        setting, self.measuring = self.measuring.setting, None
        if over_w and (found is None or found.power_w_ci95 > 2 * self._options.rough * found.power_w):
            if self._is_rough_worth_a_check(found or Measurement(setting, now_s - self.state.changed_s), now_s, over_w):
                return
        elif found is not None:
            found = replace(found, power_w=max(found.power_w, over_w), cost_s=now_s - self.state.changed_s)
            self._expect_measured(found, now_s)
            if self._is_to_be_checked(found):
                return
        if over_w and self.knowledge.measurements():
            if self._search.tried_in_vain(room, now_s - self._begun_s):
                self._check_found()
            # Back to what is known: if that draws more too, it is the device that has changed, and not the setting.
            self._use_best(Phase.CORRECTING, f"{over_w:.2f} W were read while a setting was measured")
        else:
            self._seek()

    def _is_to_be_checked(self, found: Measurement) -> bool:
        """Take in a measurement; one that surprises waits until a known setting was measured again.

        If that draws other watts than before too, the device has changed: another process came or went.
        """
        doubted, self._doubted = self._doubted, None
        if doubted is not None and found.usable and self.knowledge.of(found.setting) is not None:
            if self.knowledge.was_disturbed(found.setting, found.power_w, found.step_s):
                self._start_over([found, doubted])
                self._tell(Measured(measurement=found))
                self._tell(Measured(measurement=doubted))
            else:
                self._in_vain += 1
                self.knowledge.observe(found.setting, found.power_w, found.step_s, found.window_s)
                self._tell(Measured(measurement=self.knowledge.drift.marked(found)))
                self._take(doubted)
            return False
        room = self.state.room
        best = self.knowledge.best(replace(room.problem(), idle_w=None))  # as nothing pauses while it is checked
        may_check = found.usable and room.pauses_blur and self._in_vain < MOST_IN_VAIN
        if best and best.fits and may_check and self._search.is_surprised_by(self.knowledge.drift.seen_from(found)):
            self._doubted = found
            if self._use(best.measurement.setting, Phase.SEARCHING, "to see whether the device has changed"):
                return True
            self._doubted = None
        self._take(found)
        return False

    def _is_rough_worth_a_check(self, found: Measurement, now_s: float, over_w: float) -> bool:
        """Take in what was given up after a moment: only the search hears of it, and no drift follows from it.

        But where a known setting is given up while it is checked, it is the device that has changed.
        """
        self._doubted = None
        read_w = mean_reading_w(self._meter, max(now_s - control.ROUGH_S, self.state.changed_s))
        read_w = over_w if math.isnan(read_w) else read_w  # the newest reading may be older than that
        found = control.as_given_up(self.state, found, now_s, read_w, self._settling.typical_s)
        self._pacer.measured(found.power_w, found.step_s, forgive=True)
        if self.knowledge.of(found.setting) is None:
            return self._is_to_be_checked(found)
        self.knowledge.observe(found.setting, found.power_w, math.nan, self._options.short_s)
        self._correct(found.power_w)
        return True

    def _has_leapt(self, now_s: float) -> bool:
        """Whether another process came or went while a setting was measured: then it is measured anew."""
        assert self.measuring is not None
        since_s = max(self.measuring.begun_s, self.state.changed_s + self._options.lag_s)
        trace = self._meter.trace(since_s)
        found = jump(trace.at_s, trace.power_w) if self.state.last_pause_s < self.state.changed_s else None
        if found is None:
            return False
        leap_w, drift = found[1] - found[0], self.knowledge.drift
        if leap_w < 0 and drift.extra_w < -leap_w / 2:
            self._start_over([])
        else:
            self.knowledge.drift = replace(drift, extra_w=drift.extra_w + leap_w)
            self._note("info", f"The device draws {leap_w:+.2f} W while nothing was changed; planning again.")
        self.state = control.drifted(replace(self.state, changed_s=now_s), now_s)
        self.measuring = self._start_measuring(now_s)
        self._set_pace()
        return True

    def _start_over(self, seen: list[Measurement]) -> None:
        """Another process drew power while settings were measured, and does no more: measure them anew."""
        self._note("info", "Other processes drew power while settings were measured; they are measured anew.")
        self._doubted = None
        self.knowledge.start_over(seen)
        self._search.start_over(self.state.room, seen)
        self.state = control.drifted(self.state, self._now_s())
        self._set_pace()

    def _take(self, measurement: Measurement) -> None:
        corrected = self.knowledge.drift.seen_from(measurement)
        if measurement.steps != GLIMPSE or not self.knowledge.measurements():
            self._tell(Measured(measurement=self.knowledge.drift.marked(measurement)))
            self.knowledge.add(corrected)
        self._search.tell(corrected)

    def _seek(self) -> None:
        """Ask the search what to measure next, and train with that; with nothing to ask, hold the best."""
        room = self._steering.foresee(self.state.room, self._elapsed_s(), self.energy_j, 1 - self._share_done)
        self.state = replace(self.state, room=room)
        most = MOST_REFUSED if self.knowledge.measurements() else len(room.base)
        asks = (self._ask(room) for _ in range(most))
        if any(self._use(ask.setting, Phase.SEARCHING, ask.why) for ask in itertools.takewhile(bool, asks) if ask):
            return
        if not self.knowledge.measurements():  # by what is known of other batch sizes, nothing fits
            return
        self._check_found()
        self._search.ends(self.state.room)
        self._may_refuse, self._in_vain = False, 0
        self._use_best(Phase.HOLDING, "the best that was measured")
        if self.setting is not None and (plan := self.state.room.planned(self.setting)):
            self._tell(plan)

    def _ask(self, room: Headroom) -> Ask | None:
        ask = self._search.ask(room, self._elapsed_s(), self.time_left_s)
        self.state = replace(self.state, room=replace(room, measures_paused=self._search.is_paused))
        return ask

    def _begin_paused(self) -> None:
        """Before a setting is measured with its pauses: see what waiting draws at its clocks, then reckon with both."""
        while (setting := self.setting) and self.phase is Phase.SEARCHING and self.state.room.waits_first:
            if self.measuring or not (self.knowledge.waits_w(setting.mode) or self._sees_waiting(setting)):
                return
            if not self._search.is_out(self.state.room, setting):
                if self.knowledge.of(setting) is None:
                    self._pacer.expect(self._search.reckoned_w(self.state.room, setting) or self._busy_w(setting))
                return
            self._seek()

    def _sees_waiting(self, setting: Setting) -> bool:
        """Wait until the sensor shows what waiting draws, or that it is too much; whether nothing came between."""
        idle_w, begin_s, newest = self.state.room.idle_w, self._now_s(), self._meter.newest
        until_s = begin_s + self._settling.seconds(newest.power_w - idle_w if newest else idle_w, idle_w) + SEEN_S
        while self.setting == setting and (now_s := self._now_s()) < until_s and self.energy_j < self._most_j:
            if now_s > begin_s + READ_FROM_S and mean_reading_w(self._meter, now_s - SEEN_S) > self.budget_w:
                break
            self._pause(PAUSE_S)
        waits_w = mean_reading_w(self._meter, self._now_s() - SEEN_S)
        if self.setting != setting or self.phase is not Phase.SEARCHING or math.isnan(waits_w):
            return False
        self.knowledge.saw_waiting(setting.mode, waits_w)
        self._set_pace()
        return True

    def _check_found(self) -> None:
        """A search that found nothing which fits ends a run that begins with it; later, there is nothing to end."""
        room = self.state.room
        if (error := room.why_nothing_fits(self._live.budget)) is None or not room.can_wait(self.budget_w):
            return
        if room.can_pause and not room.has_knobs:
            self._note("warning", "One step draws much of what 5 s allow: the mean swings. Offer smaller batch sizes.")
        elif self._may_refuse:
            raise error
        else:
            self._note("warning", error.message)
