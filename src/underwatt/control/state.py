"""What the controller is doing, as one frozen record, and how it changes: pure functions of what was seen.

Nothing here reads, sets or waits. ``controller.py`` asks these functions what follows from what it sees, and does it.
Moments (``*_s``) are those of the device's clock; ``same_until_s`` alone counts from the start of the training, as
schedules do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from underwatt.budget import Watts
from underwatt.control.headroom import PEAK_ALARM
from underwatt.control.judge import TOLERANCE
from underwatt.control.knowledge import LEAP
from underwatt.errors import SensorError
from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.steady import UNJUDGED_AFTER_CHANGE_S
from underwatt.planning.problem import DEFAULT_WINDOW_S
from underwatt.planning.search import GLIMPSE

if TYPE_CHECKING:
    from underwatt.budget import Budget
    from underwatt.control.headroom import Headroom
    from underwatt.control.knowledge import Knowledge
    from underwatt.control.live_budget import LiveBudget
    from underwatt.records import DeviceState, Measurement, PowerMode, Setting

LONG_STEPS = 5.0  # a drift of their time is seen in so many steps
CALM_S = 0.35  # a reading says so much about the time after it; without another one, somebody looks
DEVICE_STATE_PERIOD_S = 1.0  # how often the device is asked whether it slows itself down
# A budget that is new, or about to change, is not searched for.
LEAST_SINCE_S, LEAST_AHEAD_S = 1.0, 2.0
# A setting that is given up soon: how well its power is known, over how long it is read, and how much more it may be.
ROUGH, ROUGH_S, MOST_UNSEEN = 0.05, 0.3, 1.5
REPAID_S, LONGEST_REPAID_S = 6.0, 20.0  # after a fall, pauses first bring the mean of 5 s back within the budget


class Phase(str, Enum):
    """What the controller is doing.

    *Searching*: the setting in use is being measured, by the training steps themselves. *Holding*: it was measured and
    fits. *Correcting*: measured power or step time has left what was expected; a lower setting or pauses bring it back,
    and the plan is made again. *Restoring*: the device is being put back.
    """

    SEARCHING = "searching"
    HOLDING = "holding"
    CORRECTING = "correcting"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """When the controller looks, and what it takes seriously; chosen with ``benchmarks/hold.py``."""

    look_s: float = 0.2
    calm_look_s: float = 2.0  # where readings and budget are calm meanwhile
    calm_above: float = 0.03  # of mean watts: readings are noisy
    measure: MeasureOptions = field(default_factory=lambda: MeasureOptions(precision=0.015, min_steps=4, limit_s=12.0))
    # Pauses blur a reading, and a few batch sizes are soon compared.
    measure_paused: MeasureOptions = field(
        default_factory=lambda: MeasureOptions(precision=0.03, min_steps=4, limit_s=6.0)
    )
    lag_s: float = UNJUDGED_AFTER_CHANGE_S  # where it is not known what a setting draws
    short_s: float = 0.5  # a clear excess is seen in this time
    long_s: float = 4.0  # a drift in this
    same_level: float = 0.03  # budgets this close to each other need no search of their own
    most_a_level: int = 12  # measurements for one level of the budget
    least_gain: float = 0.005
    outlived_s: float = 2.0  # so long a measurement goes on after the watts have risen
    hopeless: float = 1.3  # so many times slower than the best: measured no further
    rough: float = 0.05  # half width of the intervals that suffices to rule a setting out
    clearly_over: float = 0.05  # a setting under measurement that is above the budget by this share is given up
    idle_news: float = 0.05  # what pauses draw is told to the pacer where it has changed by this share
    idle_view_s: float = 15.0  # pauses may be far apart where a step takes long
    short_of_s: float = 4.0  # pauses that draw more than the budget for so long do not help
    silent_s: float = 1.0  # without a reading for so long, the sensor counts as lost
    lost_s: float = 10.0  # a sensor may be silent for so long
    throttle_s: float = 60.0  # how long clocks above a throttled one are not used


@dataclass(frozen=True, slots=True)
class Throttle:
    """Clocks above the one that heat allows are of no use for a while."""

    highest_mhz: float = math.inf
    until_s: float = -math.inf
    next_look_s: float = -math.inf

    @property
    def active(self) -> bool:
        """Whether some clocks are not to be used."""
        return self.highest_mhz < math.inf


@dataclass(frozen=True, slots=True)
class ControlState:
    """What decides what happens next, but for what was learned (``Knowledge``) and for the pauses (``Pacer``)."""

    room: Headroom
    phase: Phase = Phase.SEARCHING
    setting: Setting | None = None
    usual_step_s: float = 0.0  # what a step takes at the setting in use; 0 where that is not known
    # Since when
    changed_s: float = -math.inf  # this setting is in use, or is being measured
    level_s: float = -math.inf  # these watts hold, or the device is as it is
    fell_s: float = -math.inf  # somebody asked for less
    changed_from_w: float = 0.0  # what was read then
    valid_s: float = -math.inf  # readings tell of the setting in use
    observed_s: float = -math.inf  # the setting in use was last compared with what is known of it
    last_pause_s: float = -math.inf
    other_s: float = -math.inf  # there are steps again, after something else
    peaks_seen_s: float = -math.inf  # readings from after this were not compared with peak watts yet
    tried_s: float = -math.inf  # a known setting was tried last, where waiting at an unknown one held the budget
    # Not before
    next_look_s: float = -math.inf
    next_watch_s: float = -math.inf
    next_search_s: float = -math.inf
    step_time_from_s: float = -math.inf  # after a leap of power steps are timed anew before a search goes on
    same_until_s: float = -math.inf  # by the schedule, no other watts hold
    try_after_s: float = 0.0  # and not before so much later is another one tried
    # Faults
    sensor_lost_s: float | None = None  # since when power cannot be read
    throttle: Throttle = Throttle()
    refused: int = 0  # modes that the device did not take


@dataclass(slots=True)
class FastPath:
    """Until when steps need no look, because nothing is measured and nothing paused: then a step costs next to nothing.

    Whoever reports steps looks here first, and only counts those of this batch size. It takes two: the controller,
    which says until when and up to which watts (``until_s``, ``calm_w``), and the thread that reads power, which sees
    with each reading that nothing has happened (``calm_until_s``). Neither writes what is the other's.
    """

    until_s: float = -math.inf
    calm_w: float = -math.inf
    calm_until_s: float = -math.inf
    batch_size: int = 0
    steps: int = 0

    def heard(self, at_s: float, power_w: float, has_news: bool) -> None:
        """Power was read; ``has_news`` where somebody has asked for another budget."""
        self.calm_until_s = at_s + CALM_S if power_w <= self.calm_w and not has_news else -math.inf


def fast_until_s(state: ControlState, budget: Budget, begun_s: float, now_s: float, options: ControlOptions) -> float:
    """Until when steps may take the fast path, if readings are calm; single readings and short means do not wait."""
    is_long = budget.watts is Watts.MEAN and (budget.window_s or DEFAULT_WINDOW_S) >= DEFAULT_WINDOW_S
    changes_s = begun_s + state.same_until_s - options.look_s - state.usual_step_s
    return min(now_s + options.calm_look_s, changes_s) if is_long else state.next_look_s


# The budget


def with_budget(
    state: ControlState, live: LiveBudget, elapsed_s: float, now_s: float, options: ControlOptions, *, changed: bool
) -> ControlState:
    """The state under the watts of the next step, which cannot be cut short; ``changed`` where somebody asked."""
    state = replace(state, same_until_s=live.next_change_s(elapsed_s))  # anew: somebody may have set the clock
    budget_w = live.lowest_w(elapsed_s, elapsed_s + options.look_s + state.usual_step_s)
    if budget_w == state.room.budget_w and not changed:
        return state
    fell_s = now_s if changed and budget_w < state.room.budget_w else state.fell_s
    return replace(state, room=replace(state.room, budget_w=budget_w), level_s=now_s, fell_s=fell_s)


def keeps_measuring(before: ControlState, after: ControlState, so_far: Measurement | None, *, changed: bool) -> bool:
    """Whether a measurement under way goes on under other watts: they did not fall, or it is known to keep them."""
    fell = after.room.budget_w < before.room.budget_w or changed
    return not fell or (so_far is not None and so_far.power_w <= after.room.budget_w)


def outlived(state: ControlState, now_s: float, options: ControlOptions) -> bool:
    """Whether a measurement began under other watts, and has gone on for long enough since they changed."""
    return state.changed_s < state.level_s <= now_s - options.outlived_s


# The sensor


class SensorFinding(Enum):
    """What a look at the readings finds: that they come, come again, have just stopped, or still do not come."""

    WORKS = "works"
    BACK = "back"
    FAILED = "failed"
    SILENT = "silent"


def look_at_sensor(
    state: ControlState, now_s: float, read_s: float, failure: SensorError | None, options: ControlOptions
) -> tuple[ControlState, SensorFinding]:
    """Whether there are readings, the newest of them from ``read_s``; raises where there were none for too long."""
    lost_s, error = state.sensor_lost_s, failure or SensorError(f"Power was last read {now_s - read_s:.1f} s ago.")
    if now_s - read_s <= options.silent_s:
        if lost_s is not None and read_s > lost_s:
            return replace(state, sensor_lost_s=None), SensorFinding.BACK
        return state, SensorFinding.WORKS
    if lost_s is None:
        return replace(state, sensor_lost_s=now_s), SensorFinding.FAILED
    if now_s - lost_s > options.lost_s:
        raise SensorError(
            f"Power could not be read for {options.lost_s:g} s, so the budget cannot be kept: {error.message}",
            hint="Mend the sensor, then go on where the training stopped.",
        ) from error
    return state, SensorFinding.SILENT


# Heat


def throttle_ended(state: ControlState, now_s: float) -> ControlState:
    """All clocks may be used again once the while is over."""
    if not state.throttle.active or now_s <= state.throttle.until_s:
        return state
    return replace(state, throttle=replace(state.throttle, highest_mhz=math.inf))


def throttled(
    state: ControlState, now_s: float, device: DeviceState, asked: PowerMode, options: ControlOptions
) -> ControlState:
    """After the device was asked what it is doing: whether it slows itself down, and to which clock."""
    throttle = replace(state.throttle, next_look_s=now_s + DEVICE_STATE_PERIOD_S)
    running_mhz = device.running.gpu_mhz
    slowed = device.throttle_reasons and not throttle.active and asked.gpu_mhz and running_mhz
    if slowed and running_mhz is not None and asked.gpu_mhz is not None and running_mhz < asked.gpu_mhz:
        throttle = replace(throttle, highest_mhz=running_mhz, until_s=now_s + options.throttle_s)
    return replace(state, throttle=throttle)


# Watching the setting in use


class Excess(Enum):
    """What the last readings say of the setting in use: nothing new, a reading above peak watts, or a leap."""

    NONE = "none"
    PEAK = "peak"
    LEAP = "leap"


def is_watch_due(state: ControlState, now_s: float) -> bool:
    """Whether to compare watts with what is expected of a setting; pauses alone follow the watts anyway."""
    watches = state.room.has_knobs or not state.room.can_pause
    return watches and state.phase is not Phase.SEARCHING and now_s >= state.next_watch_s


def excess(
    state: ControlState, known: Measurement, knowledge: Knowledge, power_w: float, peak_w: float, *, peak: bool
) -> Excess:
    """Compare the mean and the highest of the last readings with what is known of the setting in use.

    ``power_w`` is NaN where pauses blur it. Where pauses hold the budget, a small excess is theirs to correct.
    """
    room = state.room
    if peak and peak_w > room.budget_w * (1 - PEAK_ALARM):
        return Excess.PEAK
    clearly_w = math.inf if room.can_pause else room.budget_w * (1 + LEAP)
    is_more = power_w > knowledge.expected_w(known)
    return (
        Excess.LEAP if is_more and (power_w > clearly_w or knowledge.is_leap(known.setting, power_w)) else Excess.NONE
    )


def long_window_s(state: ControlState, now_s: float, options: ControlOptions) -> float | None:
    """How far to look back for drift; ``None`` while too little was seen since the last look, or since a change."""
    long_s = max(options.long_s, LONG_STEPS * state.usual_step_s)
    return long_s if now_s - long_s >= max(state.valid_s, state.observed_s) else None


def is_back(state: ControlState, now_s: float, over: float, options: ControlOptions) -> bool:
    """Whether a correction has held for long enough; ``over`` is how far the last window lies above the budget."""
    return state.phase is Phase.CORRECTING and now_s - state.valid_s >= options.long_s and over <= TOLERANCE


def is_clearly_over(
    state: ControlState, now_s: float, power_w: float, peak_w: float, options: ControlOptions, *, peak: bool
) -> bool:
    """Whether a setting under measurement is to be given up, by the mean and the highest of the last readings.

    Soon after a change readings may still show what was before: then only what rises above that counts.
    """
    bound_w = state.room.budget_w * (1.0 if peak else 1 + options.clearly_over)
    if now_s < state.changed_s + options.lag_s:
        bound_w = max(bound_w, state.changed_from_w * (1 + options.clearly_over))
    return (peak_w if peak else power_w) > bound_w


def as_given_up(state: ControlState, found: Measurement, now_s: float, read_w: float, lag_s: float) -> Measurement:
    """What was measured for a moment only, with what a sensor that lags so long had not shown of its watts yet."""
    since_s = now_s - state.changed_s
    shown = -math.expm1(-max(since_s - ROUGH_S / 2, ROUGH_S) / lag_s)
    settled_w = state.changed_from_w + (read_w - state.changed_from_w) / shown
    power_w = max(read_w, min(settled_w, MOST_UNSEEN * read_w))
    seen = replace(found, power_w=power_w, peak_w=power_w, power_w_ci95=ROUGH * power_w / shown, cost_s=since_s)
    return replace(seen, step_s_ci95=found.step_s, steps=GLIMPSE)


def drifted(state: ControlState, now_s: float) -> ControlState:
    """The device has changed: what was seen once is not taken for another change, and another search may pay."""
    return replace(state, observed_s=now_s, valid_s=now_s, level_s=now_s)


# Searching


def may_search(state: ControlState, now_s: float, level_ends_s: float, *, is_over: bool = False) -> bool:
    """Whether a search may begin: all is well, the watts stay, and are held, or cannot be by what is known.

    ``is_over`` where the last window is above the budget: pauses bring that back first.
    """
    if state.sensor_lost_s is not None or state.throttle.active:
        return False
    if state.phase is not Phase.HOLDING and not (state.phase is Phase.CORRECTING and not state.room.fits_something()):
        return False
    waits_s = LONGEST_REPAID_S if is_over else REPAID_S
    if now_s < state.step_time_from_s or (state.room.can_pause and now_s - state.fell_s < waits_s):
        return False
    return now_s - state.level_s >= LEAST_SINCE_S and level_ends_s - now_s >= LEAST_AHEAD_S
