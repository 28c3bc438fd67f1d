"""The controller's state and its pure transitions, singly and in sequences that nobody thought of."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from run_world import SIZES, experienced, virtual

from underwatt.budget import Budget
from underwatt.control import state as control
from underwatt.control.headroom import READ_MARGIN, Headroom
from underwatt.control.knowledge import Knowledge
from underwatt.control.live_budget import LiveBudget
from underwatt.control.state import CALM_S, ControlOptions, ControlState, Excess, FastPath, Phase, SensorFinding
from underwatt.errors import SensorError
from underwatt.planning.problem import Problem
from underwatt.planning.search import GLIMPSE
from underwatt.predict.base import SettingArray
from underwatt.records import DeviceState, Measurement, PowerMode

OPTIONS = ControlOptions()
GONE = SensorError("The sensor is gone.", hint="Plug it in.")
ASKED = PowerMode(gpu_mhz=900.0)


def made(power_w: float = 8.0, *, can_pause: bool = True) -> tuple[ControlState, LiveBudget, Knowledge]:
    space = virtual().space
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), SIZES)
    live = LiveBudget(Budget(power_w=power_w))
    problem = Problem.of(candidates, live.budget, idle_w=2.0)
    knowledge = Knowledge(problem, [Measurement(candidates[0], step_s=0.1, power_w=5.0, peak_w=5.5)])
    room = Headroom(problem, live, knowledge, READ_MARGIN, may_pause=can_pause, budget_w=power_w)
    return ControlState(room, Phase.HOLDING, candidates[0]), live, knowledge


def test_watts_that_somebody_lowered_are_kept_for_a_while_before_settings_are_tried() -> None:
    state, _, _ = made()
    lower = control.with_budget(state, LiveBudget(Budget(power_w=6.0)), 100.0, 100.0, OPTIONS, changed=True)
    assert not control.may_search(lower, 105.9, math.inf), "pauses bring the mean of 5 s back first"
    assert control.may_search(lower, 106.1, math.inf)
    higher = control.with_budget(lower, LiveBudget(Budget(power_w=9.0)), 200.0, 200.0, OPTIONS, changed=True)
    assert control.may_search(higher, 201.1, math.inf), "more watts are used at once"
    assert not control.may_search(lower, 119.9, math.inf, is_over=True), "the mean comes back first"
    assert control.may_search(lower, 120.1, math.inf, is_over=True), "pauses do not bring it back"


# The sensor


def test_a_silent_sensor_is_news_once_and_an_error_when_it_lasts() -> None:
    state, _, _ = made()
    state, found = control.look_at_sensor(state, 5.0, 3.9, GONE, OPTIONS)
    assert found is SensorFinding.FAILED
    state, found = control.look_at_sensor(state, 15.0, 3.9, GONE, OPTIONS)
    assert found is SensorFinding.SILENT
    with pytest.raises(SensorError, match="could not be read for 10 s") as error:
        control.look_at_sensor(state, 15.1, 3.9, GONE, OPTIONS)
    assert error.value.__cause__ is GONE


def test_a_sensor_is_back_with_a_reading_after_it_was_lost() -> None:
    state, _, _ = made()
    assert control.look_at_sensor(state, 1.5, 1.0, None, OPTIONS) == (state, SensorFinding.WORKS), "never lost"
    lost, _ = control.look_at_sensor(state, 5.0, 3.0, None, OPTIONS)
    assert control.look_at_sensor(lost, 5.5, 4.9, None, OPTIONS)[1] is SensorFinding.WORKS, "that reading is older"
    back, found = control.look_at_sensor(lost, 5.5, 5.1, None, OPTIONS)
    assert found is SensorFinding.BACK
    assert back.sensor_lost_s is None
    assert control.look_at_sensor(back, 20.0, 5.1, None, OPTIONS)[1] is SensorFinding.FAILED, "news again"


# Heat


def test_a_throttled_clock_is_left_alone_for_a_while() -> None:
    state, _, _ = made()
    slow = DeviceState(running=PowerMode(gpu_mhz=600.0), throttle_reasons=("heat",))
    state = control.throttled(state, 0.0, DeviceState(running=ASKED), ASKED, OPTIONS)
    assert not state.throttle.active
    assert state.throttle.next_look_s == 1.0
    state = control.throttled(state, 1.0, slow, ASKED, OPTIONS)
    assert (state.throttle.active, state.throttle.highest_mhz) == (True, 600.0)
    assert control.throttle_ended(state, 61.0) is state
    assert not control.throttle_ended(state, 61.1).throttle.active


@pytest.mark.parametrize(("running", "asked"), [(None, ASKED), (900.0, ASKED), (600.0, PowerMode(power_limit_w=200.0))])
def test_only_a_gpu_clock_below_the_one_asked_for_is_throttling(running: float | None, asked: PowerMode) -> None:
    state, _, _ = made()
    device = DeviceState(running=PowerMode(gpu_mhz=running), throttle_reasons=("power cap",))
    assert not control.throttled(state, 0.0, device, asked, OPTIONS).throttle.active


# Watching


def test_what_is_above_the_budget_is_a_leap_only_where_no_pauses_hold_it() -> None:
    for can_pause, expected in ((True, Excess.NONE), (False, Excess.LEAP)):
        state, _, knowledge = made(4.9, can_pause=can_pause)
        assert state.setting is not None
        known = knowledge.of(state.setting)
        assert known is not None
        assert control.excess(state, known, knowledge, 5.15, 0.0, peak=False) is expected
    assert control.excess(state, known, knowledge, math.nan, 0.0, peak=False) is Excess.NONE
    assert control.excess(state, known, knowledge, math.nan, 5.0, peak=True) is Excess.PEAK


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 2))
def test_drift_is_looked_for_once_enough_was_seen_since_the_last_look(
    valid_s: float, observed_s: float, step_s: float
) -> None:
    state = replace(made()[0], valid_s=valid_s, observed_s=observed_s, usual_step_s=step_s)
    window_s = max(OPTIONS.long_s, control.LONG_STEPS * step_s)
    due_s = max(valid_s, observed_s) + window_s
    assert control.long_window_s(state, due_s - 0.01, OPTIONS) is None
    assert control.long_window_s(state, due_s + 0.01, OPTIONS) == window_s


@given(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_reading_vouches_for_a_moment_if_it_is_low_and_nobody_asks_for_anything(
    at_s: float, power_w: float, calm_w: float
) -> None:
    fast = FastPath(calm_w=calm_w)
    fast.heard(at_s, power_w, has_news=False)
    assert fast.calm_until_s == (at_s + CALM_S if power_w <= calm_w else -math.inf)
    fast.heard(at_s, power_w, has_news=True)
    assert fast.calm_until_s == -math.inf
    fast.heard(at_s, math.nan, has_news=False)
    assert fast.calm_until_s == -math.inf


# Sequences


class Transitions(RuleBasedStateMachine):
    """Any order of what can be seen: the record stays one that makes sense."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.live, self.knowledge = made()
        self.now_s, self.read_s = 0.0, 0.0

    @rule(seconds=st.floats(0.01, 20.0), reads=st.booleans())
    def time_passes(self, seconds: float, reads: bool) -> None:
        self.now_s += seconds
        if reads:
            self.read_s = self.now_s

    @rule(watts=st.floats(1.0, 20.0).map(lambda w: round(w, 2)), step_s=st.floats(0.0, 3.0))
    def somebody_asks_for_other_watts(self, watts: float, step_s: float) -> None:
        self.live.change(f"{watts:g}W")
        before = replace(self.state, usual_step_s=step_s)
        self.state = control.with_budget(before, self.live, self.now_s, self.now_s, OPTIONS, changed=True)
        assert self.state.room.budget_w == pytest.approx(watts)
        assert self.state.level_s == self.now_s
        drawn = Measurement(self.state.room.base.candidates[0], power_w=self.state.room.budget_w + 0.1)
        assert not control.keeps_measuring(before, self.state, drawn, changed=True)
        assert not control.keeps_measuring(before, self.state, None, changed=True), "not known to fit"

    @rule()
    def the_schedule_says_nothing_new(self) -> None:
        found = control.with_budget(self.state, self.live, self.now_s, self.now_s, OPTIONS, changed=False)
        assert found.room is self.state.room

    @rule()
    def the_sensor_is_looked_at(self) -> None:
        lost_s = self.state.sensor_lost_s
        try:
            self.state, found = control.look_at_sensor(self.state, self.now_s, self.read_s, None, OPTIONS)
        except SensorError:
            assert lost_s is not None
            assert self.now_s - lost_s > OPTIONS.lost_s
            self.read_s = self.now_s
            return
        assert (found is SensorFinding.FAILED) == (lost_s is None and self.state.sensor_lost_s is not None)
        assert (found is SensorFinding.BACK) == (lost_s is not None and self.state.sensor_lost_s is None)

    @rule(mhz=st.sampled_from([300.0, 600.0, 900.0]))
    def the_device_is_asked(self, mhz: float) -> None:
        self.state = control.throttle_ended(self.state, self.now_s)
        device = DeviceState(running=PowerMode(gpu_mhz=mhz), throttle_reasons=("heat",))
        self.state = control.throttled(self.state, self.now_s, device, ASKED, OPTIONS)

    @rule(phase=st.sampled_from(list(Phase)))
    def it_does_something_else(self, phase: Phase) -> None:
        self.state = replace(self.state, phase=phase)

    @rule()
    def the_device_changes(self) -> None:
        self.state = control.drifted(self.state, self.now_s)
        assert control.long_window_s(self.state, self.now_s, OPTIONS) is None
        assert not control.may_search(self.state, self.now_s, math.inf)

    @invariant()
    def a_search_needs_calm(self) -> None:
        if control.may_search(self.state, self.now_s, math.inf):
            nothing_fits = not self.state.room.fits_something()
            assert self.state.phase is Phase.HOLDING or (self.state.phase is Phase.CORRECTING and nothing_fits)
            assert self.state.sensor_lost_s is None
            assert not self.state.throttle.active
        assert not control.may_search(self.state, self.now_s, self.now_s + 1.9)

    @invariant()
    def a_throttled_clock_is_free_again_some_time(self) -> None:
        throttle = self.state.throttle
        assert not throttle.active or throttle.until_s <= self.now_s + OPTIONS.throttle_s
        assert not control.throttle_ended(self.state, throttle.until_s + 0.1).throttle.active

    @invariant()
    def nothing_lies_in_the_future(self) -> None:
        for moment_s in (self.state.level_s, self.state.observed_s, self.state.sensor_lost_s or 0.0):
            assert moment_s <= self.now_s


WAITING_W = 1.6  # of a Nano, at any clocks, and a little more


class OnABoard(RuleBasedStateMachine):
    """The whole controller on a simulated board, with whatever may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()

    @initialize(seed=st.integers(0, 99))
    def begin(self, seed: int) -> None:
        self.device = virtual("nano", seed=seed)
        self.found = dict(self.device.snapshot())
        self.live = LiveBudget(Budget(power_w=5.0))
        self.run = self.stack.enter_context(experienced(self.device, self.live))
        self.too_large, self.extra_w = math.inf, 0.0

    @rule(seconds=st.floats(0.5, 15.0))
    def train(self, seconds: float) -> None:
        self.run.train(seconds)

    @rule(watts=st.sampled_from([2.5, 3.5, 5.0, 8.0, 12.0]))
    def change_the_budget(self, watts: float) -> None:
        watts = max(watts, WAITING_W + self.extra_w)  # below that training waits until more is allowed: no step ends
        self.live.change(f"{watts:g}W")
        self.run.controller._follow_budget(self.run.elapsed_s, "changed")
        assert self.run.controller.budget_w == watts

    @rule(watts=st.sampled_from([0.0, 0.8, 1.5]), slower=st.sampled_from([1.0, 1.2]))
    def another_process_comes_or_goes(self, watts: float, slower: float) -> None:
        self.extra_w = min(watts, self.run.controller.budget_w - WAITING_W)
        self.device.board.disturb(extra_w=self.extra_w, slow_factor=slower)

    @rule(seconds=st.floats(0.1, 5.0))
    def the_model_is_tested(self, seconds: float) -> None:
        self.run.controller.other_begins("test")
        self.device.clock.sleep(seconds)
        self.run.controller.other_goes_on()
        self.run.controller.other_ends()

    @precondition(lambda self: self.too_large == math.inf)
    @rule()
    def memory_runs_out(self) -> None:
        self.too_large = max(SIZES)
        assert self.run.controller.out_of_memory(max(SIZES)).batch_size < max(SIZES)

    @invariant()
    def what_is_held_was_measured_and_fits_into_memory(self) -> None:
        controller = getattr(getattr(self, "run", None), "controller", None)
        if controller is None:
            return
        assert controller.setting.batch_size < self.too_large
        if controller.phase is not Phase.SEARCHING:
            assert controller.setting in [m.setting for m in controller.knowledge.measurements()]
            assert controller.measuring is None

    def teardown(self) -> None:
        self.stack.close()
        if hasattr(self, "device"):
            assert dict(self.device.snapshot()) == self.found


TestTransitions = Transitions.TestCase
TestTransitions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestOnABoard = OnABoard.TestCase
TestOnABoard.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)


@given(st.floats(1.0, 12.0), st.floats(1.0, 12.0), st.floats(0.3, 3.0), st.floats(0.2, 1.5))
def test_what_is_given_up_soon_is_taken_for_what_a_lagging_sensor_would_have_shown(
    from_w: float, true_w: float, since_s: float, lag_s: float
) -> None:
    read_w = true_w + (from_w - true_w) * math.exp(-(since_s - control.ROUGH_S / 2) / lag_s)
    state, _, _ = made()
    state = replace(state, changed_s=10.0, changed_from_w=from_w)
    assert state.setting is not None
    seen = Measurement(state.setting, step_s=0.1, steps=5)
    found = control.as_given_up(state, seen, 10.0 + since_s, read_w, lag_s)
    assert found.steps == GLIMPSE
    assert read_w <= found.power_w <= control.MOST_UNSEEN * read_w * (1 + 1e-9)
    if from_w < true_w < control.MOST_UNSEEN * read_w and since_s > 1.5 * control.ROUGH_S:
        assert found.power_w == pytest.approx(true_w, rel=1e-6)
