"""The controller on virtual boards when things break: sensors, clocks, memory; and that the board is put back."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from real_time import RealTime
from run_world import (
    NET,
    QUICK,
    Hurt,
    Run,
    experienced,
    running,
    settle,
    virtual,
    watts,
)

from underwatt.budget import parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.state import ControlOptions, Phase
from underwatt.errors import DeviceBusyError, NoDeviceError, SensorError
from underwatt.records import DeviceState, Status

SETTLED_S = 40.0


def test_a_sensor_lost_during_the_first_measurement_is_waited_for() -> None:
    device = Hurt(virtual())
    with running(device, watts(9.0)) as run:
        run.train(0.7)
        lost_s = run.elapsed_s
        device.silent = lambda: run.elapsed_s - lost_s < 3.0
        run.train(60)
        assert run.holds()


def test_a_sensor_lost_for_good_during_the_first_measurement_ends_the_run() -> None:
    device = Hurt(virtual())
    with running(device, watts(9.0)) as run:
        run.train(0.7)
        device.silent = lambda: True
        with pytest.raises(SensorError, match="could not be read for"):
            run.train(30)


def test_a_sensor_that_hangs_while_a_test_goes_on_ends_the_run() -> None:
    """What was not read makes no debt: whoever watches the sensor must see to it."""
    device = Hurt(virtual())
    with experienced(device, watts(9.0)) as run:
        settle(run)
        device.silent = lambda: True
        run.controller.other_begins("test")
        begin_s = run.elapsed_s
        with pytest.raises(SensorError, match="could not be read for"):  # noqa: PT012
            while run.elapsed_s < begin_s + 60:
                device.clock.sleep(0.1)
                run.controller.other_goes_on()
        assert run.elapsed_s < begin_s + 15


def test_a_sensor_that_is_back_in_time_is_no_lost_sensor() -> None:
    device = Hurt(virtual())
    with experienced(device, watts(9.0)) as run:
        settle(run)
        lost_s = run.elapsed_s
        device.silent = lambda: run.elapsed_s - lost_s < 8.0
        run.train(30)
        assert run.notes("info")[-1] == "Power can be read again."


def test_a_reading_that_fails_now_and_then_is_no_lost_sensor() -> None:
    device = Hurt(virtual())
    with experienced(device, watts(9.0)) as run:
        settle(run)
        begun_s = run.elapsed_s
        device.silent = lambda: (run.elapsed_s - begun_s) % 3.0 < 0.11
        run.train(40)
        assert len(run.notes("warning")) <= 20


def test_a_reading_that_fails_each_second_does_not_stall_the_search() -> None:
    device = Hurt(virtual())
    device.silent = lambda: 0.35 <= device.clock.now_s() % 1.0 < 0.45
    with running(device, watts(9.0), options=QUICK) as run:
        run.train(SETTLED_S, until=run.holds)
        assert run.holds()


def test_a_refused_mode_during_a_correction_falls_back() -> None:
    device = Hurt(virtual())
    with experienced(device, watts(12.0)) as run:
        settle(run)
        held = run.controller.setting
        assert held is not None
        refused: list[Any] = []

        def refuses(mode: Any) -> bool:
            if mode != held.mode and len(refused) < 2:
                refused.append(mode)
            return mode in refused

        device.refuses = refuses
        device.applied.clear()
        device.board.disturb(extra_w=2.0)
        run.train(40)
        mean_w, _ = run.train(30)
    assert mean_w <= 12.0 * 1.01
    assert run.controller.setting is not None
    assert run.controller.setting.mode not in refused
    assert all(device.applied.count(mode) == 1 for mode in refused if mode != held.mode)


def test_out_of_memory_goes_back_to_the_last_good_batch_size() -> None:
    with experienced(virtual(), watts(9.0)) as run:
        settle(run)
        setting = run.controller.setting
        assert setting is not None
        after = run.controller.out_of_memory(setting.batch_size)
        assert after.batch_size < setting.batch_size
        assert any(m.setting == after for m in run.controller.knowledge.measurements())
        before = len(run.said("setting"))
        run.train(40)
        assert all(event.setting.batch_size < setting.batch_size for event in run.said("setting")[before:])


def test_a_first_batch_that_does_not_fit_is_left_for_a_smaller_one() -> None:
    with running(virtual(), watts(9.0)) as run:
        first = run.controller.setting
        assert first is not None
        run.controller.state = replace(
            run.controller.state, setting=replace(first, batch_size=32)
        )  # as if the search had begun with it
        assert run.controller.out_of_memory(32).batch_size < 32
        run.train(20)
        assert all(event.setting.batch_size < 32 for event in run.said("setting"))


def test_what_is_no_training_does_not_spoil_a_measurement() -> None:
    """A test of the model draws other watts than a pause: they must not be taken for those of the steps."""
    device = virtual()
    with running(device, watts(9.0)) as run:
        for _ in range(12):
            run.train(1.8)
            run.controller.other_begins("test")
            until_s = device.clock.now_s() + 3.0
            while device.clock.now_s() < until_s:
                device.run_step(replace(NET, flops_per_sample=4e9), 64)
                run.controller.other_goes_on()
            run.controller.other_ends()
        for event in run.said("measured"):
            found = event.measurement
            truth_w = device.board.true_power_w(NET, found.setting.mode, found.setting.batch_size)
            assert found.power_w == pytest.approx(truth_w, rel=0.12)


def test_the_board_is_put_back_whatever_the_controller_did() -> None:
    device = virtual()
    before = dict(device.snapshot())
    with running(device, watts(9.0)) as run:
        run.train(20)
        assert dict(device.snapshot()) != before
    assert dict(device.snapshot()) == before


def test_measurements_are_told_with_what_they_cost() -> None:
    with running(virtual(), watts(9.0)) as run:
        run.train(30)
        found = [event.measurement for event in run.said("measured")]
        assert found
        for measurement in found:
            assert measurement.status is Status.OK
            assert 0 < measurement.cost_s < 15
            assert math.isfinite(measurement.power_w)


def test_time_left_shrinks_with_progress() -> None:
    with experienced(virtual(), watts(9.0)) as run:
        assert run.controller.time_left_s == math.inf
        settle(run)
        whole_s = run.controller.time_left_s
        run.controller.progressed(0.5)
        assert run.controller.time_left_s == pytest.approx(whole_s / 2)


def test_energy_is_counted_as_it_is_drawn() -> None:
    device = virtual()
    with running(device, watts(9.0)) as run:
        begin_j = device.board.energy_j
        run.train(60)
        assert run.controller.energy_j == pytest.approx(device.board.energy_j - begin_j, rel=0.02)


def test_a_device_is_controlled_by_one_session_at_a_time() -> None:
    """The controller needs nothing but the session, the meter, the problem and the budget."""
    device = virtual()
    with running(device, watts(9.0), options=ControlOptions(look_s=0.5)) as run:
        run.train(10)
        assert run.controller.energy_j > 0
        with pytest.raises(DeviceBusyError), running(device, watts(9.0)):
            pass


def test_what_is_measured_beside_another_process_is_used_now_and_marked_for_later() -> None:
    device = virtual("nano")
    with running(device, watts(4.5)) as run:
        run.train(9)
        before = len(run.said("measured"))
        assert before
        device.board.disturb(extra_w=1.5)
        run.train(60)
        found = [event.measurement for event in run.said("measured")[before:]]
        assert found, "the search went on"
        assert {m.status for m in found} == {Status.DISTURBED}
        for m in found:
            known = run.controller.knowledge.of(m.setting)
            truth_w = device.board.true_power_w(NET, m.setting.mode, m.setting.batch_size)
            assert known is not None
            assert known.power_w == pytest.approx(truth_w, rel=0.2), "as the setting is by itself"
            assert m.power_w > truth_w + 1.0


def test_a_process_that_comes_while_a_known_setting_is_checked_is_the_devices() -> None:
    """The check was given up and begun anew for as long as the process lasted: a minute at 12% above the budget."""
    device = virtual("nano")
    with experienced(device, watts(5.0)) as run:
        settle(run)
        setting, controller = run.controller.setting, run.controller
        assert setting is not None
        controller._search.is_surprised_by = lambda measurement: True
        device.board.disturb(extra_w=1.5)
        device.clock.advance(1.0)
        assert controller._use(setting, Phase.SEARCHING, "to see whether the device has changed")
        run.train(8.0)
        mean_w, _ = run.train(30.0)
        assert any("has drifted" in note for note in run.notes("info"))
        assert mean_w <= 5.0 * 1.01


def test_a_search_goes_on_while_much_is_to_be_gained() -> None:
    """After twelve measurements, most of them steps towards a setting that surely fits, it ended at 73% of the best."""
    with running(virtual("orin-nano"), LiveBudget(parse_budget("10.5W peak"))) as run:
        run.train(SETTLED_S + 20)
        assert run.controller.phase is Phase.HOLDING
        assert "expected to gain" in run.controller._search._search._stopped


class Late(Hurt):
    """A board whose sensor gives a value every 0.3 s and tells it late, as several GPUs read in turn do."""

    def read_power(self) -> Any:
        sample = super().read_power()
        at_s = math.floor((sample.at_s - 0.16) / 0.3) * 0.3
        if self.last is None or at_s > self.last.at_s:
            self.last = replace(sample, at_s=at_s)
        return self.last

    last: Any = None


@pytest.mark.parametrize("power_w", [5.0, 7.0])
def test_readings_that_come_late_and_seldom_end_no_run(power_w: float) -> None:
    """The newest reading was older than the moment for which a setting that drew too much was looked at."""
    device = Late(virtual())
    with running(device, watts(power_w)) as run:
        run.train(60)
        assert run.train(60)[0] <= power_w * 1.02


def test_a_counting_sensor_that_is_silent_for_some_long_steps_ends_no_run() -> None:
    device = Hurt(virtual(), counter=True)
    with running(device, LiveBudget(parse_budget("9W mean over 1s"))) as run:
        run.train(30)
        lost_s = run.elapsed_s
        device.silent = lambda: run.elapsed_s - lost_s < 3.0
        run.train(30)


def test_a_state_that_cannot_be_read_for_a_moment_ends_no_run() -> None:
    device = Hurt(virtual())
    read, asked = device.read_state, []

    def sometimes() -> Any:
        asked.append(device.clock.now_s())
        if len(asked) % 3 == 1:
            raise NoDeviceError("The helper does not answer.") if len(asked) % 2 else SensorError("Not now.")
        return read()

    device.read_state = sometimes  # type: ignore[method-assign]
    with running(device, watts(9.0)) as run:
        run.train(60)
        assert run.holds()
    assert len(asked) > 6


def test_a_run_leaves_the_lowest_clocks_when_what_made_it_wait_is_gone() -> None:
    """Nothing was known of that setting, so that nobody saw that the device was as before again."""
    device = virtual("nano")
    with running(device, watts(4.5)) as run:
        run.train(120)
        _, before = run.train(20)
        begun_s = run.elapsed_s
        device.clock.every(0.5, lambda: device.board.disturb(extra_w=4.0 * (0 < run.elapsed_s - begun_s < 15)))
        run.train(40)
        assert any("training waits" in text for text in run.notes("warning"))
        mean_w, after = run.train(30)
    assert after > 0.9 * before
    assert mean_w <= 4.5 * 1.01


class StateHangs(RealTime):
    """Power reads, and what the device is doing does not: a file, or a helper that has no time."""

    hangs = False

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.wakes = threading.Event()

    def read_state(self) -> DeviceState:
        self.asked += 1
        if self.hangs:
            self.wakes.wait(30)
        return super().read_state()


def _steps(run: Run, seconds: float) -> int:
    """How many steps are trained in so many seconds."""
    until_s, steps = run.elapsed_s + seconds, 0
    while run.elapsed_s < until_s:
        run.step()
        steps += 1
    return steps


@pytest.mark.parametrize("settled_s", [0.0, 6.0])
def test_a_state_that_hangs_slows_no_training(monkeypatch: pytest.MonkeyPatch, settled_s: float) -> None:
    """Each look waited for it again, as the next one was due before the wait had ended."""
    monkeypatch.setattr("underwatt.measure.meter.STATE_S", 0.5)
    device = StateHangs()
    with running(device, watts(9.0), options=ControlOptions(most_a_level=2)) as run:
        _steps(run, settled_s)
        device.hangs, device.asked = True, 0
        steps = _steps(run, 6.0)
        device.wakes.set()
    assert 1 <= device.asked <= 2
    assert steps > 200
