"""Settings put into force: the device is set, the pacer told what to expect, and everybody told why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.budget import Watts
from underwatt.control.headroom import COUNTED_MARGIN, READ_MARGIN, Headroom
from underwatt.control.judge import LiveJudge
from underwatt.control.knowledge import Knowledge, mean_reading_w, seen_idle_w
from underwatt.control.pacer import LONGEST_PAUSE_S, Pacer
from underwatt.control.state import (
    ControlOptions,
    ControlState,
    FastPath,
    Phase,
    SensorFinding,
    is_back,
    is_clearly_over,
    look_at_sensor,
    throttle_ended,
    throttled,
)
from underwatt.control.steering import Steering
from underwatt.errors import DeviceError, ModeError
from underwatt.events import Noted, SettingChanged
from underwatt.records import DeviceState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.control.live_budget import LiveBudget
    from underwatt.convergence.prior import RelativeCurve
    from underwatt.device.session import Session
    from underwatt.events import Event, Verdict
    from underwatt.measure.measurement import Measuring
    from underwatt.measure.meter import Meter
    from underwatt.planning.problem import Problem
    from underwatt.records import Measurement, Profile, Setting

PAUSING_S = 2.0
READ_BEFORE_S = 0.5  # a change of setting, that tells from where readings move
MOST_REFUSED = 5  # modes that the device refuses before any was taken
# A known setting is tried so soon where only waiting at an unknown one held the budget, each time so much later, and as
# soon as at first again once that was so long ago. Not tuned: each try may be above the budget for some seconds.
TRY_S, TRY_RARER, FORGOTTEN_S = 20.0, 4.0, 300.0
# Where only pauses hold the budget, a step that was never measured is first taken to draw so many times the budget.
CAUTION = 3.0
TEST = "test"  # of all that is no step, this alone is taken to draw what steps do, before it was seen


class Actuator:
    """Puts settings into force and says so, and knows what is in force; the controller decides which."""

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
        judge: LiveJudge | None = None,
    ) -> None:
        self.fast_path = FastPath()
        self.energy_before_j = 0.0  # of an earlier part of the same training
        self._session, self._meter, self._live, self._tell, self._waiting = session, meter, live, tell, waiting
        self._options = options or ControlOptions()
        self._clock = session.device.clock
        self._now_s = self._clock.now_s
        self.sleep = self._clock.sleep  # how pauses are waited for: a command waits in a process of its own
        now_s = self._begun_here_s = self._now_s()
        self._begun_s = now_s if begun_s is None else begun_s
        self._most_j = math.inf if live.budget.energy_j is None else live.budget.energy_j
        self.knowledge = Knowledge(problem, known)
        margin = COUNTED_MARGIN if meter.counts_joules else READ_MARGIN
        room = Headroom(problem, live, self.knowledge, margin, may_pause=can_pause)
        self.state = ControlState(room, changed_s=now_s, level_s=now_s)
        self._steering = Steering(self._note, references)
        self._pacer = Pacer(meter, problem.idle_w or 0.0, now_s)
        self.judge = judge or LiveJudge(meter, self._begun_s)
        self._settling = self.judge.settling
        self._share_done = 0.0
        self.samples_left: Callable[[], float] = lambda: math.inf  # to the end, where that is known
        self._paused_s = 0.0
        self.measuring: Measuring | None = None  # which something other than steps would blur

    # What others may ask

    @property
    def setting(self) -> Setting | None:
        """Power mode and batch size in use."""
        return self.state.setting

    @property
    def phase(self) -> Phase:
        """Searching, holding, correcting or restoring."""
        return self.state.phase

    @property
    def verdict(self) -> Verdict:
        """Whether the budget was held so far."""
        return self.judge.verdict

    @property
    def budget_w(self) -> float:
        """The watts in force."""
        return self.state.room.budget_w

    @property
    def energy_j(self) -> float:
        """Drawn since the training began, as far as it was read."""
        return self.energy_before_j + self._meter.energy_j

    @property
    def pausing(self) -> bool:
        """Whether there were pauses in the last seconds, or before the last step where that takes as long."""
        return self._now_s() - self.state.last_pause_s < PAUSING_S + 2 * self.state.usual_step_s

    @property
    def pause_share(self) -> float:
        """Share of the time since the start that was spent in pauses."""
        return self._paused_s / max(self._elapsed_s(), 1e-9)

    @property
    def time_left_s(self) -> float:
        """Expected from the setting in use, to the target or the training's end; inf while nothing is known."""
        room, left = self.state.room, self.samples_left()
        to_end_s = left * room.sample_s(self.setting) if math.isfinite(left) else math.inf
        return min(room.expected_s(self.setting) * (1 - self._share_done), to_end_s)

    def progressed(self, share: float) -> None:
        """So much of the way to the target is done."""
        self._share_done = min(max(share, 0.0), 1.0)

    def restoring(self) -> None:
        """The run is over: nothing is decided any more, and what was read is judged."""
        self.state = replace(self.state, phase=Phase.RESTORING)
        self.measuring = None
        self.judge.end()

    def goes_on(self, energy_j: float, before: Actuator | None) -> None:
        """A part of the training is over, in which so much was drawn; ``before`` led it in this process."""
        self.energy_before_j = energy_j
        if before is not None:
            self.samples_left, self._paused_s = before.samples_left, before._paused_s

    def weigh(self, shape: RelativeCurve) -> None:
        """Batch sizes compare otherwise than was known: settings are searched for anew when there is time to."""
        self.state = replace(self.state, room=replace(self.state.room, base=self.state.room.base.weighed(shape)))

    # Setting

    def _use_best(self, phase: Phase, why: str, least_gain: float = 0.0) -> None:
        """Use the best measured setting; one that fits is left only for one that is better by ``least_gain``."""
        while (chosen := self._best(least_gain)) is not None and not self._use(chosen, phase, why):
            least_gain = 0.0

    def _best(self, least_gain: float) -> Setting | None:
        left = self._elapsed_s(), self.energy_j, 1 - self._share_done
        room, ahead = self._steering.course(self.state.room, *left)
        self.state = replace(self.state, room=room)
        problem, highest_mhz = room.problem(), self.state.throttle.highest_mhz
        best = self.knowledge.best(problem, highest_mhz) or self.knowledge.best(problem)
        if best is None:
            return None
        if least_gain and self.setting is not None and ahead in (None, self.setting):
            now = self.knowledge.outcome(self.setting, problem)
            if now is not None and now.fits and best.score(problem.goal) > (1 - least_gain) * now.score(problem.goal):
                return None
        return ahead if ahead is not None and best.fits else best.measurement.setting

    def _use(self, setting: Setting, phase: Phase, why: str) -> bool:
        """Train with a setting from the next step on; whether the device took it."""
        before = self.state
        if setting == before.setting and phase is before.phase:
            return True
        if not self._apply(setting):
            return False
        self.fast_path.until_s = -math.inf
        self.state = replace(before, setting=setting, phase=phase)
        if setting != before.setting or phase is Phase.SEARCHING:
            self._expect(setting, self._now_s())
        else:
            self.state = replace(self.state, usual_step_s=self.knowledge.step_s(setting))
        self._say_setting(why)
        return True

    def _apply(self, setting: Setting) -> bool:
        before = self.setting
        if before is not None and setting.mode == before.mode:
            return True
        try:
            self._session.apply(setting.mode)
            self._meter.changed(setting.mode)
            self._pacer.forget_others()
        except (DeviceError, ModeError) as exc:
            self._note("warning", f"{setting.mode} cannot be set: {exc}")
            self.knowledge.refuse(setting.mode)
            self.state = replace(self.state, refused=self.state.refused + 1)
            if before is None and self.state.refused >= MOST_REFUSED:
                raise
            if before is not None:
                self._session.apply(before.mode)  # a write may have been half done
            return False
        return True

    def _wait_at_lowest(self, power_w: float) -> None:
        """Waiting alone draws so much, which is more than is allowed: say so, and wait where it draws least."""
        text = f"Waiting alone draws {power_w:.2f} W: {self.budget_w:g} W cannot be held, and training waits."
        if (lowest := self.state.room.lowest()) != self.setting or not self.verdict.why:
            self._note("warning", text)
            self.judge.because(text)
            self._use(lowest, Phase.CORRECTING, "waiting draws least there")

    def _wait_for_watts(self, least_w: float, follow: Callable[[float], object]) -> bool:
        """Before the first step: wait while no more is allowed than what waiting draws; whether it was."""
        if self.budget_w > least_w:
            return False
        self._wait_at_lowest(min(least_w, self.state.room.base.idle_w or least_w))
        while self.budget_w <= least_w and self.energy_j < self._most_j:
            begin_s = self._now_s()
            self.sleep(LONGEST_PAUSE_S)
            now_s = self._now_s()
            self._meter.pause(begin_s, now_s)
            self._paused_s += now_s - begin_s
            follow(now_s)
            self._hear_verdict(now_s)
            self._waiting()
        self._pacer.skip(self._now_s())
        return True

    def _expect(self, setting: Setting, now_s: float) -> None:
        """What the next steps are reckoned to draw and take, and from when on readings tell of them."""
        usual_s, expected_w, newest = self.knowledge.step_s(setting), self._busy_w(setting), self._meter.newest
        valid_s, blind_until_s = now_s + self._options.lag_s, -math.inf
        if self.knowledge.of(setting) is not None and expected_w is not None and newest is not None:
            valid_s = blind_until_s = now_s + self._settling.seconds(newest.power_w - expected_w, expected_w)
        readings = self._meter.readings_after(now_s - READ_BEFORE_S)
        read_w = sum(r.power_w for r in readings) / len(readings) if readings else 0.0
        self.state = replace(self.state, changed_s=now_s, changed_from_w=read_w, usual_step_s=usual_s, valid_s=valid_s)
        self._set_pace()
        self._pacer.expect(expected_w, usual_s or math.nan, blind_until_s)

    def _try_known(self, now_s: float) -> None:
        """Pauses hold at a setting that was never measured: use one that was, again and again but ever more rarely.

        What made pauses draw too much at all of them may be gone, and only a known setting can tell.
        """
        state, best = self.state, self.knowledge.best(self.state.room.problem())
        if self.phase is not Phase.HOLDING or best is None or now_s < state.tried_s + state.try_after_s:
            return
        if now_s < state.changed_s + self._options.long_s:
            return
        is_new = now_s > state.tried_s + 2 * state.try_after_s + FORGOTTEN_S
        self.state = replace(state, tried_s=now_s, try_after_s=TRY_S if is_new else TRY_RARER * state.try_after_s)
        self._use(best.measurement.setting, Phase.HOLDING, "to see whether pauses hold the budget there again")

    def _expect_measured(self, found: Measurement, now_s: float) -> None:
        """What steps draw is known from now on; pauses become shorter, which a sensor that lags shows later."""
        blurred = self.state.room.pauses_blur
        blind_until_s = -math.inf if blurred else now_s + self._settling.seconds(self.budget_w, found.power_w)
        busy_w = found.power_w + self._doubt_w(found)
        self._pacer.measured(busy_w, found.step_s, forgive=blurred, blind_until_s=blind_until_s)

    def _learn_idle(self, known: Measurement, since_s: float) -> None:
        """See what pauses draw at the setting in use, where there were enough of them."""
        before_w, busy_w = self.state.room.idle_at(self.setting), self.knowledge.expected_w(known)
        seen_w = seen_idle_w(self._meter, since_s, busy_w)
        if seen_w is None:
            return
        self.knowledge.saw_idle(known.setting, seen_w)
        if abs(self.state.room.idle_at(self.setting) - before_w) > self._options.idle_news * before_w:
            self._set_pace()

    def _look_for_throttling(self, now_s: float) -> None:
        before, self.state = self.state, throttle_ended(self.state, now_s)
        if self.state is not before:
            self._use_best(Phase.HOLDING, "clocks that were throttled may be used again")
        if self.setting is None or now_s < self.state.throttle.next_look_s:
            return
        was_active = self.state.throttle.active
        # Where it does not say whether it slows itself down, lost watts are noticed elsewhere.
        device = self._meter.states.ask() or DeviceState(self.setting.mode)
        self.state = throttled(self.state, now_s, device, self.setting.mode, self._options)
        if self.state.throttle.active and not was_active:
            self._note("warning", f"The device slows itself down ({', '.join(device.throttle_reasons)}).")
            self._use_best(Phase.CORRECTING, f"the GPU is throttled to {self.state.throttle.highest_mhz:g} MHz")

    def _busy_w(self, setting: Setting) -> float | None:
        """What a step is reckoned to draw; where pauses are all there is, too much rather than too little."""
        known, room = self.knowledge.of(setting), self.state.room
        if known is not None:
            return self.knowledge.expected_w(known) + self._doubt_w(known)
        if room.pauses_blur or not room.can_pause:
            return None
        highest_w = max((m.power_w for m in self.knowledge.measurements()), default=0.0)
        return max(CAUTION * self.budget_w, highest_w)

    def _doubt_w(self, known: Measurement) -> float:
        """What steps may draw beyond what was measured between pauses: a pacer without a counter learns it too late."""
        is_sure = self.state.room.pauses_blur or self._meter.counts_joules or math.isinf(known.power_w_ci95)
        return 0.0 if is_sure else known.power_w_ci95

    def _unseen_peak_w(self, since_s: float, now_s: float) -> float:
        """The highest reading since a moment that was not looked at yet: a step may take longer than any window."""
        since_s = max(since_s, self.state.peaks_seen_s)
        self.state = replace(self.state, peaks_seen_s=now_s)
        return self._meter.highest_after(since_s)

    def _over_while_measured_w(self, now_s: float) -> float:
        """The watts of a setting under measurement that is clearly above the budget; 0 where it is not."""
        since_s = max(now_s - self._options.short_s, self.state.changed_s, self.state.other_s)
        mean_w, peak = mean_reading_w(self._meter, since_s), self._live.budget.watts is Watts.PEAK
        if math.isnan(mean_w):
            return 0.0
        lag_s = self._options.lag_s
        settled_s = self.state.changed_s + (lag_s if now_s >= self.state.changed_s + lag_s else 0.0)
        peak_w = self._unseen_peak_w(settled_s, now_s) if peak else 0.0
        is_over = is_clearly_over(self.state, now_s, mean_w, peak_w, self._options, peak=peak)
        return mean_w if is_over else 0.0

    def _sensor_works(self, now_s: float) -> bool:
        """Whether there are readings; without, a setting that was measured to fit is held for a while."""
        newest = self._meter.newest
        read_s = self._begun_here_s if newest is None else newest.at_s
        self.state, found = look_at_sensor(self.state, now_s, read_s, self._meter.failure, self._options)
        if found is SensorFinding.BACK:
            self._note("info", "Power can be read again.")
            self.measuring = None  # anew with the next step
        elif found is SensorFinding.FAILED:
            why = self._meter.failure or f"Power was last read {now_s - read_s:.1f} s ago."
            self._note("warning", f"{why} Holding the last safe setting.")
            self.measuring = None
            self._use_best(Phase.HOLDING, "power cannot be read")
        return found in (SensorFinding.WORKS, SensorFinding.BACK)

    def _may_measure(self, setting: Setting, batch_size: int) -> bool:
        """Whether a step of a batch size tells of a setting to be measured, and what waiting draws there was seen."""
        waits_first = self.state.room.waits_first and self.knowledge.waits_w(setting.mode) is None
        return self.phase is Phase.SEARCHING and batch_size == setting.batch_size and not waits_first

    def _other_w(self, what: str) -> float:
        """What is no step is reckoned to draw so much, before it was seen; too much rather than too little."""
        room = self.state.room
        idle_w = room.idle_at(self.setting)
        if what != TEST or self.setting is None or math.isinf(room.held_w):
            return idle_w
        known_w = self._busy_w(self.setting) or idle_w
        return known_w if room.has_knobs else max(CAUTION * self.budget_w, known_w)

    def _set_pace(self) -> None:
        self._pacer.set_budget(self.state.room.held_w, self.state.room.idle_at(self.setting))

    def _say_setting(self, why: str) -> None:
        assert self.setting is not None
        self._tell(SettingChanged(setting=self.setting, state=self.phase.value, why=why))

    def _note(self, level: str, text: str) -> None:
        self._tell(Noted(level=level, text=text))

    def _elapsed_s(self) -> float:
        return self._now_s() - self._begun_s

    def _hear_verdict(self, now_s: float) -> None:
        """Say at once when the budget is not held, and when it is again; *holding* means that it is."""
        self.judge.catch_up()
        if news := self.judge.news(self.budget_w):
            self._note(*news)
        if self.judge.is_over and self.phase is Phase.HOLDING:
            self.state = replace(self.state, phase=Phase.CORRECTING)
            self._say_setting("above the budget")
        elif is_back(self.state, now_s, self.judge.over, self._options) and self._pacer.can_hold:
            self.state = replace(self.state, phase=Phase.HOLDING)
            self._say_setting("within the budget again")
