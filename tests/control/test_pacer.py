"""Pauses that hold a mean: against a simulated counter of joules, for steps and devices of all kinds."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from underwatt.budget import Budget
from underwatt.control.pacer import LONGEST_PAUSE_S, Pacer, can_hold
from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.errors import SensorError
from underwatt.measure.meter import Meter
from underwatt.planning.problem import can_pause
from underwatt.records import DeviceInfo, PowerSample


class Load:
    """A device that draws what it is told to; with a counter it counts joules, without its reading lags behind."""

    def __init__(self, *, counter: bool, lag_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.info = DeviceInfo("made up", "made-up load", "load", "load")
        self.drawn_w, self.energy_j = 1.0, 0.0
        self._counter, self._lag_s, self._shown_w = counter, lag_s, self.drawn_w
        self.stopped = False  # the process, so that nothing is read
        self.clock.on_move(self._live)

    def _live(self, seconds: float) -> None:
        self.energy_j += seconds * self.drawn_w
        keep = math.exp(-seconds / self._lag_s) if self._lag_s else 0.0
        self._shown_w = self.drawn_w + (self._shown_w - self.drawn_w) * keep

    def read_power(self) -> PowerSample:
        if self.stopped:
            raise SensorError("stopped")
        return PowerSample(self.clock.now_s(), self._shown_w, self.energy_j if self._counter else None)


def hold(
    load: Load, meter: Meter, pacer: Pacer, step_s: float, busy_w: float, idle_w: float, seconds: float
) -> tuple[float, list[float]]:
    """Steps with the pacer's pauses between them; mean watts, and all pauses."""
    begin_s, begin_j, pauses = load.clock.now_s(), load.energy_j, []
    while load.clock.now_s() < begin_s + seconds:
        load.drawn_w = busy_w
        load.clock.sleep(step_s)
        load.drawn_w = idle_w
        pacer.stepped(load.clock.now_s())
        while (pause_s := pacer.pause_s()) != 0:
            assert pause_s > 0
            load.clock.sleep(pause_s)
            pacer.paused(pause_s, load.clock.now_s())
            pauses.append(pause_s)
            assert load.clock.now_s() - begin_s < 10 * seconds, "it never stops pausing"
    return (load.energy_j - begin_j) / (load.clock.now_s() - begin_s), pauses


def wait(load: Load, pacer: Pacer) -> None:
    """As long as the pacer asks for."""
    while (pause_s := pacer.pause_s()) > 0:
        load.clock.sleep(pause_s)
        pacer.paused(pause_s, load.clock.now_s())


@settings(max_examples=30, deadline=None)
@given(
    busy_w=st.floats(5.0, 500.0),
    idle_share=st.floats(0.05, 0.8),
    budget_share=st.floats(0.05, 1.3),
    step_s=st.floats(0.002, 0.5),
    misjudged=st.floats(0.9, 1.1),
    knows_time=st.booleans(),
)
def test_the_mean_never_exceeds_the_budget(
    busy_w: float, idle_share: float, budget_share: float, step_s: float, misjudged: float, knows_time: bool
) -> None:
    idle_w = idle_share * busy_w
    budget_w = idle_w + budget_share * (busy_w - idle_w)
    assume(bool(can_pause(busy_w, step_s, Budget(power_w=budget_w))) and can_hold(budget_w, idle_w))
    load = Load(counter=True)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, idle_w, 0.0)
        pacer.set_budget(budget_w, idle_w)
        pacer.expect(misjudged * busy_w, step_s if knows_time else math.nan)
        hold(load, meter, pacer, step_s, busy_w, idle_w, 30.0)  # it learns
        mean_w, pauses = hold(load, meter, pacer, step_s, busy_w, idle_w, 120.0)
        counted_j = meter.energy_j
    assert all(0 < pause_s <= LONGEST_PAUSE_S for pause_s in pauses)
    assert mean_w <= budget_w * 1.01
    # Not much is left unused either, but for what one step and its pause cannot be cut into.
    assert mean_w >= min(budget_w * 0.97, busy_w * 0.999) - 2 * step_s * busy_w / 120
    assert counted_j == pytest.approx(load.energy_j, rel=0.05)


@settings(max_examples=12, deadline=None)
@given(lag_s=st.floats(0.3, 1.0), step_s=st.floats(0.02, 0.4), misjudged=st.floats(0.93, 1.07))
def test_a_sensor_that_lags_and_watts_that_are_known_badly_still_hold_the_mean(
    lag_s: float, step_s: float, misjudged: float
) -> None:
    load = Load(counter=False, lag_s=lag_s)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(7.0, 4.0)
        pacer.expect(10.0 * misjudged, step_s, 1.5)
        hold(load, meter, pacer, step_s, 10.0, 4.0, 30.0)
        mean_w, _ = hold(load, meter, pacer, step_s, 10.0, 4.0, 120.0)
    assert mean_w <= 7.0 * 1.015
    assert mean_w >= 7.0 * 0.97, "1.9% is left unused where steps are believed to draw 5% more (0.31, 0.048, 1.055)"


def made(budget_w: float, *, idle_w: float = 4.0) -> tuple[Load, Meter, Pacer]:
    load = Load(counter=True)
    meter = Meter(load)  # type: ignore[arg-type]
    pacer = Pacer(meter, idle_w, 0.0)
    pacer.set_budget(budget_w, idle_w)
    return load, meter, pacer


def test_where_the_budget_is_kept_there_is_no_pause() -> None:
    load, meter, pacer = made(10.0)
    with meter:
        assert hold(load, meter, pacer, 0.05, 9.9, 4.0, 20.0)[1] == []


def test_without_a_budget_there_is_no_pause() -> None:
    load, meter, pacer = made(math.inf)
    with meter:
        assert hold(load, meter, pacer, 0.05, 500.0, 4.0, 5.0)[1] == []
        pacer.measured(500.0, 0.05, forgive=True)
        pacer.stepped(load.clock.now_s())
        assert pacer.pause_s() == 0
        assert meter.energy_j == pytest.approx(load.energy_j, rel=0.05)


def test_what_was_drawn_less_is_no_credit() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(5.0)
        hold(load, meter, pacer, 0.1, 5.0, 4.0, 60.0)
        pacer.expect(12.0)
        mean_w, _ = hold(load, meter, pacer, 0.1, 12.0, 4.0, 2.0)
    assert mean_w <= 8.0 * 1.05


def test_a_debt_is_paid_back_and_less_of_it_where_it_is_forgiven() -> None:
    drawn_w = []
    for forgive in (False, True):
        load, meter, pacer = made(8.0)
        with meter:
            pacer.expect(12.0)
            load.drawn_w = 12.0
            load.clock.sleep(2.0)
            pacer.skip(load.clock.now_s())
            assert pacer.pause_s() == 0
            pacer.measured(12.0, 0.05, forgive=forgive)
            drawn_w.append(hold(load, meter, pacer, 0.05, 12.0, 4.0, 3.0)[0])
    assert drawn_w[0] < drawn_w[1] < 8.0


def test_what_somebody_else_drew_is_counted_and_no_pause_is_owed_for_its_time() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 10.0)
        before_j = meter.energy_j
        pacer.turn_to("writing", 4.0, load.clock.now_s())
        load.drawn_w = 6.0
        load.clock.sleep(20.0)
        pacer.stepped(load.clock.now_s())
        assert pacer.pause_s() == 0
        pacer.turn_back(load.clock.now_s())
        assert meter.energy_j - before_j == pytest.approx(120.0, rel=0.02)


def test_where_waiting_draws_as_much_as_the_budget_there_are_no_steps_until_that_changes() -> None:
    load, meter, pacer = made(4.05)
    with meter:
        assert not pacer.can_hold
        load.drawn_w = 4.0
        load.clock.sleep(0.05)
        pacer.stepped(load.clock.now_s())
        for _ in range(100):
            assert pacer.pause_s() == LONGEST_PAUSE_S
            load.clock.sleep(LONGEST_PAUSE_S)
            pacer.paused(LONGEST_PAUSE_S, load.clock.now_s())
        pacer.set_budget(8.0, 4.0)
        assert pacer.pause_s() == 0


def test_what_a_test_of_the_model_drew_is_paid_back() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 10.0)
        begin_s, begin_j = load.clock.now_s(), load.energy_j
        pacer.turn_to("test", 4.0, begin_s)
        load.drawn_w = 16.0
        load.clock.sleep(5.0)
        load.drawn_w = 4.0
        pacer.turn_back(load.clock.now_s())
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 40.0)
        mean_w = (load.energy_j - begin_j) / (load.clock.now_s() - begin_s)
    assert mean_w == pytest.approx(8.0, rel=0.01)


def test_steps_whose_time_wanders_and_whose_joules_do_not_get_a_steady_beat() -> None:
    """As where a CPU hands work to a GPU: every window of 5 s keeps the budget closely."""
    load, meter, pacer = made(8.0)
    numbers = random.Random(1)
    with meter:
        pacer.expect(12.0, 0.05)
        seen: list[tuple[float, float]] = []
        while load.clock.now_s() < 100:
            step_s = 0.05 * numbers.choice((0.7, 1.0, 1.7))
            hold(load, meter, pacer, step_s, 4.0 + 8.0 * 0.05 / step_s, 4.0, 0.03)
            seen.append((load.clock.now_s(), load.energy_j))
    at_s, energy_j = np.array([moment for moment in seen if moment[0] > 10]).T
    window_w = (np.interp(at_s + 5, at_s, energy_j) - energy_j)[at_s < 95] / 5
    assert window_w.max() <= 8.0 * 1.015
    assert window_w.mean() >= 8.0 * 0.99


def test_a_counter_of_joules_that_stops_is_not_believed() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 5.0)
        before_j, stopped_j = meter.energy_j, load.energy_j
        load.read_power = lambda: PowerSample(load.clock.now_s(), load.drawn_w, stopped_j)  # type: ignore[method-assign]
        load.drawn_w = 12.0
        load.clock.sleep(30.0)
        pacer.skip(load.clock.now_s())
    assert meter.energy_j - before_j == pytest.approx(360.0, rel=0.02)


def test_a_lower_budget_holds_at_once() -> None:
    load, meter, pacer = made(10.0)
    with meter:
        pacer.expect(12.0)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 20.0)
        pacer.set_budget(6.0, 4.0)
        mean_w, _ = hold(load, meter, pacer, 0.05, 12.0, 4.0, 3.0)
    assert mean_w <= 6.0 * 1.04


def test_a_counter_that_runs_backwards_is_not_believed() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 5.0)
        load.energy_j -= 1000.0  # the driver was loaded again
        before_j: Any = meter.energy_j
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 5.0)
    assert meter.energy_j - before_j == pytest.approx(40.0, rel=0.1)


@pytest.mark.parametrize("counter", [True, False])
@pytest.mark.parametrize("extra_w", [-1.5, 1.0, 3.0])
def test_what_draws_besides_is_found_out_and_forgotten(counter: bool, extra_w: float) -> None:
    """Another process, or watts that were measured wrong: the debt alone could not make up for it."""
    load = Load(counter=counter, lag_s=0.6)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(8.0, 4.0)
        pacer.expect(12.0)
        hold(load, meter, pacer, 0.05, 12.0 + extra_w, 4.0 + max(0.0, extra_w), 40.0)
        mean_w, _ = hold(load, meter, pacer, 0.05, 12.0 + extra_w, 4.0 + max(0.0, extra_w), 60.0)
        assert mean_w == pytest.approx(8.0, rel=0.02)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 40.0)
        mean_w, _ = hold(load, meter, pacer, 0.05, 12.0, 4.0, 60.0)
        assert 8.0 * 0.95 <= mean_w <= 8.0 * 1.01


def test_pauses_for_another_process_end_with_it() -> None:
    load = Load(counter=False, lag_s=0.6)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(8.0, 4.0)
        pacer.expect(7.8)
        assert hold(load, meter, pacer, 0.05, 7.8, 4.0, 20.0)[1] == []
        hold(load, meter, pacer, 0.05, 9.3, 5.5, 30.0)
        during_w, pauses = hold(load, meter, pacer, 0.05, 9.3, 5.5, 60.0)
        assert pauses
        assert during_w <= 8.0 * 1.02
        hold(load, meter, pacer, 0.05, 7.8, 4.0, 60.0)
        assert hold(load, meter, pacer, 0.05, 7.8, 4.0, 20.0)[1] == []


@pytest.mark.parametrize("quiet_steps", [1, 40])
def test_steps_that_were_reported_together_are_forgotten_as_soon_as_others(quiet_steps: int) -> None:
    load = Load(counter=False)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(10.0, 4.0)
        pacer.expect(9.0, 0.05)
        for _ in range(2400 // quiet_steps):
            load.drawn_w = 9.0
            load.clock.sleep(0.05 * quiet_steps)
            pacer.stepped(load.clock.now_s(), quiet_steps)
        hold(load, meter, pacer, 0.05, 14.0, 4.0, 15.0)
        assert hold(load, meter, pacer, 0.05, 14.0, 4.0, 5.0)[0] <= 10.0 * 1.04


def test_after_a_fall_the_next_step_is_paid_for_before_it_is_made() -> None:
    """Steps that came every second and a half come every seven now: a window with one of them only is above."""
    load = Load(counter=False)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 2.1, 0.0)
        pacer.set_budget(3.5, 2.1)
        pacer.expect(5.7, 0.6)
        hold(load, meter, pacer, 0.6, 5.7, 2.1, 60.0)
        pacer.set_budget(2.4, 2.1)
        load.drawn_w = 5.7
        load.clock.sleep(0.6)
        load.drawn_w = 2.1
        begin_s, begin_j = load.clock.now_s() - 0.6, load.energy_j - 0.6 * 5.7
        pacer.stepped(load.clock.now_s())
        while (pause_s := pacer.pause_s()) > 0:
            load.clock.sleep(pause_s)
            pacer.paused(pause_s, load.clock.now_s())
        waited_s, cycle_s = load.clock.now_s() - begin_s, 0.6 * (5.7 - 2.1) / (2.4 - 2.1)
        assert waited_s > 1.8 * cycle_s
        with_next_w = (load.energy_j - begin_j + 0.6 * 5.7) / (waited_s + 0.6)
        assert with_next_w <= 2.4 * 1.01
        mean_w, _ = hold(load, meter, pacer, 0.6, 5.7, 2.1, 120.0)
        assert mean_w == pytest.approx(2.4, rel=0.03)


def test_where_joules_are_counted_a_test_is_paid_for_as_it_was_drawn() -> None:
    """The first half second of a test, in which its loader begins, was paid for like work of three times the budget."""
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 20.0)
        begin_s, begin_j = load.clock.now_s(), load.energy_j
        pacer.turn_to("test", 24.0, begin_s)
        load.clock.sleep(0.5)  # waiting for its data
        for _ in range(20):
            load.drawn_w = 12.0
            load.clock.sleep(0.06)
            load.drawn_w = 4.0
            pacer.stepped(load.clock.now_s())
            while (pause_s := pacer.pause_s()) > 0:
                load.clock.sleep(pause_s)
                pacer.paused(pause_s, load.clock.now_s())
        seconds = load.clock.now_s() - begin_s
        pacer.turn_back(load.clock.now_s())
        spared_j = 8.0 * seconds - (load.energy_j - begin_j)
        assert spared_j <= 0.5 * (8.0 - 4.0) + 0.1 * 8.0  # what was waited for, and little more
        mean_w, _ = hold(load, meter, pacer, 0.05, 12.0, 4.0, 20.0)
        assert 8.0 < mean_w <= 8.0 * 1.01  # which is made up for, little by little


def test_a_stall_is_made_up_for_by_less_than_a_window_notices() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 10.0)
        load.clock.sleep(0.6)
        after = [hold(load, meter, pacer, 0.05, 12.0, 4.0, 5.0)[0] for _ in range(4)]
    assert max(after) <= 8.0 * 1.02  # a step more or less is 1% of it
    assert sum(after) / 4 >= 8.0 * 1.004


def test_what_another_process_draws_in_pauses_is_not_waited_for_long_after_it() -> None:
    load, meter, pacer = made(8.0)
    with meter:
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 10.0)
        load.drawn_w = 12.0
        load.clock.sleep(0.05)
        load.drawn_w = 9.0
        pacer.stepped(load.clock.now_s())
        for _ in range(300):
            pause_s = pacer.pause_s()
            load.clock.sleep(pause_s)
            pacer.paused(pause_s, load.clock.now_s())
        load.drawn_w = 4.0
        begin_s = load.clock.now_s()
        while (pause_s := pacer.pause_s()) > 0:
            load.clock.sleep(pause_s)
            pacer.paused(pause_s, load.clock.now_s())
    assert load.clock.now_s() - begin_s < 2.0


@pytest.mark.parametrize("counter", [True, False], ids=["joules", "watts"])
@pytest.mark.parametrize("test_s", [1.0, 3.0, 6.0, 30.0])
def test_a_test_that_is_not_told_piece_by_piece_is_paid_back_once(test_s: float, counter: bool) -> None:
    """Without a counter one of 6 s was waited for for five minutes: what it drew was taken for what pieces draw."""
    load = Load(counter=counter, lag_s=0.6)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(8.0, 4.0)
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 40.0)
        begin_s, begin_j = load.clock.now_s(), load.energy_j
        pacer.turn_to("test", 24.0, begin_s)
        load.drawn_w = 14.0
        load.clock.sleep(test_s)
        load.drawn_w = 4.0
        pacer.stepped(load.clock.now_s())
        wait(load, pacer)
        waited_s, needed_s = load.clock.now_s() - begin_s - test_s, test_s * (14.0 - 8.0) / (8.0 - 4.0)
        pacer.turn_back(load.clock.now_s())
        assert 0.9 * needed_s - 1.0 < waited_s < 1.1 * needed_s + 2.0
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 60.0)
        mean_w = (load.energy_j - begin_j) / (load.clock.now_s() - begin_s)
    assert mean_w == pytest.approx(8.0, rel=0.03)


def test_steps_after_a_test_that_nobody_waited_for_wait_for_no_more_than_it_drew() -> None:
    """As after one that failed: the first step was followed by so many of its times, whatever was due."""
    load = Load(counter=False, lag_s=0.6)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(8.0, 4.0)
        pacer.expect(12.0, 1.0)
        hold(load, meter, pacer, 1.0, 12.0, 4.0, 40.0)
        begin_s, begin_j = load.clock.now_s(), load.energy_j
        pacer.turn_to("test", 24.0, begin_s)
        load.drawn_w = 14.0
        load.clock.sleep(6.0)
        load.drawn_w = 4.0
        pacer.turn_back(load.clock.now_s())
        load.drawn_w = 12.0
        load.clock.sleep(1.0)
        load.drawn_w = 4.0
        pacer.stepped(load.clock.now_s())
        stepped_s = load.clock.now_s()
        wait(load, pacer)
        needed_s = (6.0 * (14.0 - 8.0) + 1.0 * (12.0 - 8.0)) / (8.0 - 4.0)
        assert 0.8 * needed_s < load.clock.now_s() - stepped_s < 1.2 * needed_s
        hold(load, meter, pacer, 1.0, 12.0, 4.0, 60.0)
        mean_w = (load.energy_j - begin_j) / (load.clock.now_s() - begin_s)
    assert mean_w == pytest.approx(8.0, rel=0.03)


@pytest.mark.parametrize(("what", "work_s"), [("test", 4.0), ("step", 0.05)])
def test_a_process_that_was_stopped_for_a_while_pays_nothing_back_for_it(what: str, work_s: float) -> None:
    """As by Ctrl-Z: what was read before and after was taken for all of it, so that it waited for longer than that."""
    load = Load(counter=False, lag_s=0.6)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 4.0, 0.0)
        pacer.set_budget(8.0, 4.0)
        pacer.expect(12.0, 0.05)
        hold(load, meter, pacer, 0.05, 12.0, 4.0, 40.0)
        if what == "test":
            pacer.turn_to("test", 12.0, load.clock.now_s())
        load.drawn_w = 12.0
        load.clock.sleep(work_s / 2)
        load.stopped = True
        load.clock.sleep(60.0)
        load.stopped = False
        load.clock.sleep(work_s / 2)
        load.drawn_w = 4.0
        stepped_s = load.clock.now_s()
        pacer.stepped(stepped_s)
        wait(load, pacer)
        waited_s, needed_s = load.clock.now_s() - stepped_s, work_s * (12.0 - 8.0) / (8.0 - 4.0)
        assert waited_s < needed_s + 2.0
        if what == "test":
            assert waited_s > needed_s - 1.0, "the work that was done is paid for"
            pacer.turn_back(load.clock.now_s())
        mean_w, _ = hold(load, meter, pacer, 0.05, 12.0, 4.0, 60.0)
    assert mean_w == pytest.approx(8.0, rel=0.03)


@pytest.mark.parametrize("counter", [True, False])
def test_waiting_that_was_taken_to_draw_too_much_ends_once_it_is_seen_that_it_does_not(counter: bool) -> None:
    """A run stood still for ever at 1.08 W of 1.2: without steps, nothing told that waiting draws less than that."""
    load = Load(counter=counter, lag_s=0.5)
    with Meter(load) as meter:  # type: ignore[arg-type]
        pacer = Pacer(meter, 6.95, 0.0)
        pacer.set_budget(7.0, 6.95)
        pacer.expect(10.0, 0.1)
        assert not pacer.can_hold
        mean_w, _ = hold(load, meter, pacer, 0.1, 10.0, 4.0, 60.0)
        mean_w, _ = hold(load, meter, pacer, 0.1, 10.0, 4.0, 120.0)
    assert 0.97 * 7.0 < mean_w < 1.015 * 7.0


@pytest.mark.parametrize("budget_w", [3.0, 4.0, 4.05])
def test_watts_that_are_below_waiting_or_as_much_are_no_error(budget_w: float) -> None:
    """What draws no more than waiting, as a checkpoint that is written, divided by nothing."""
    load, meter, pacer = made(budget_w)
    with meter:
        pacer.expect(10.0, 0.1)
        pacer.turn_to("moving state", 4.0, load.clock.now_s())
        load.drawn_w = 4.0
        for _ in range(3):
            load.clock.sleep(1.0)
            pacer.stepped(load.clock.now_s())
        pacer.turn_back(load.clock.now_s())
        pacer.stepped(load.clock.now_s())
        assert pacer.pause_s() > 0
