from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from profile_helpers import COST, simulated, virtual

from underwatt.device.session import Session
from underwatt.errors import InputError, MeasureError, OutOfMemoryError, SensorError, StepError
from underwatt.measure.measurement import MeasureOptions, Measuring, measure
from underwatt.measure.meter import Meter
from underwatt.measure.steady import Settling
from underwatt.measure.workload import Beat
from underwatt.records import DeviceState, PowerMode, Setting, Status


class ScriptedRun:
    """A job on a virtual board that does what a test wants at a certain step."""

    def __init__(self, device: Any, at: int, what: Any) -> None:
        self._device, self._at, self._what = device, at, what
        self.steps = 0

    def step(self) -> Beat | None:
        self.steps += 1
        if self.steps >= self._at:
            if isinstance(self._what, Exception):
                raise self._what
            return None
        self._device.run_step(COST, 8)
        return Beat(self._device.clock.now_s())

    def stop(self) -> None:
        """Nothing to stop."""


def test_a_measurement_is_true_and_says_how_sure_it_is() -> None:
    device = virtual("orin-agx")
    setting = Setting(device.space.highest, 16)
    with Session(device) as session:
        found = measure(session, simulated(device).start(16), setting)
    truth_s = device.board.true_step_s(COST, setting.mode, 16)
    assert found.status is Status.OK
    assert found.step_s == pytest.approx(truth_s, rel=0.02)
    assert found.step_s_ci95 <= 0.01 * found.step_s
    assert found.power_w_ci95 <= 0.01 * found.power_w
    assert found.peak_w >= found.power_w * 0.98
    assert found.energy_j == pytest.approx(found.power_w * found.window_s, rel=0.05)
    assert found.cost_s >= found.window_s
    assert found.samples >= 6


def test_a_tighter_precision_takes_longer() -> None:
    costs = []
    for precision in (0.03, 0.003):
        device = virtual("nano")
        with Session(device) as session:
            run = simulated(device).start(8)
            found = measure(session, run, Setting(device.space.highest, 8), MeasureOptions(precision=precision))
        costs.append(found.cost_s)
        assert found.power_w_ci95 <= precision * found.power_w
    assert costs[1] > 2 * costs[0]


def test_where_the_interval_alone_is_to_say_nothing_waits_for_the_sensor_to_settle() -> None:
    found = {}
    for readings in (2, 6):
        device = virtual("nano")
        options = MeasureOptions(precision=0.03, min_readings=readings)
        with Session(device) as session:
            run = simulated(device).start(8)
            found[readings] = measure(session, run, Setting(device.space.highest, 8), options)
    assert found[2].cost_s < 0.8 * found[6].cost_s
    assert found[2].power_w == pytest.approx(found[6].power_w, rel=0.04)


def test_the_limit_ends_it_and_the_interval_says_so() -> None:
    device = virtual("nano")
    options = MeasureOptions(precision=1e-5, limit_s=3.0)
    with Session(device) as session:
        found = measure(session, simulated(device).start(8), Setting(device.space.highest, 8), options)
    assert 3.0 <= found.cost_s < 6.0
    assert found.power_w_ci95 > 1e-5 * found.power_w
    assert found.status is Status.OK


def test_very_slow_steps_are_still_measured_past_the_limit() -> None:
    device = virtual("nano")
    slow = replace(COST, flops_per_sample=1e13)
    with Session(device) as session:
        run = simulated(device, slow).start(1)
        found = measure(session, run, Setting(device.space.highest, 1), MeasureOptions(limit_s=1.0))
    assert found.step_s > 5
    assert found.step_s == pytest.approx(device.board.true_step_s(slow, device.space.highest, 1), rel=0.05)


def test_throttling_is_said() -> None:
    device = virtual("nano")
    device.board.disturb(ambient_c=95)
    device.clock.sleep(1200)
    with Session(device) as session:
        found = measure(session, simulated(device).start(8), Setting(device.space.highest, 8))
    assert found.status is Status.THROTTLED
    assert "slowed down" in found.note


@pytest.mark.parametrize("at", [1, 4])
def test_out_of_memory_is_an_answer(at: int) -> None:
    device = virtual()
    run = ScriptedRun(device, at, OutOfMemoryError("It does not fit."))
    with Session(device) as session:
        found = measure(session, run, Setting(device.space.highest, 8))
    assert (found.status, found.note) == (Status.OUT_OF_MEMORY, "It does not fit.")
    assert math.isnan(found.step_s)


def test_a_failing_job_is_an_answer() -> None:
    device = virtual()
    with Session(device) as session:
        found = measure(session, ScriptedRun(device, 3, StepError("It died.")), Setting(device.space.highest, 8))
    assert (found.status, found.note) == (Status.FAILED, "It died.")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_job_that_ends_too_soon_is_said_to(at: int) -> None:
    device = virtual()
    with Session(device) as session:
        found = measure(session, ScriptedRun(device, at, None), Setting(device.space.highest, 8))
    assert found.status is Status.FAILED
    assert "ended before" in found.note


def test_a_job_that_ends_after_enough_steps_gives_what_is_known() -> None:
    device = virtual()
    with Session(device) as session:
        run = ScriptedRun(device, 20, None)
        found = measure(session, run, Setting(device.space.highest, 8), MeasureOptions(precision=1e-6))
    assert found.status is Status.OK
    assert found.steps >= 5


def test_a_sensor_that_vanishes_is_an_error_not_a_measurement() -> None:
    device = virtual()
    read = device.read_power
    readings = iter(range(5))

    def failing() -> Any:
        if next(readings, None) is None:
            raise SensorError("The sensor is gone.")
        return read()

    device.read_power = failing  # type: ignore[method-assign]
    with pytest.raises(SensorError, match="gone"), Session(device) as session:
        measure(session, simulated(device).start(8), Setting(device.space.highest, 8))


@pytest.mark.parametrize("options", [{"precision": 0}, {"precision": 1}, {"limit_s": 0}])
def test_nonsense_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        MeasureOptions(**options)  # type: ignore[arg-type]


def test_beats_of_several_steps_count_each_step() -> None:
    device = virtual()

    class Uneven(ScriptedRun):
        def step(self) -> Beat | None:
            self.steps += 1
            count = 9 if self.steps % 2 else 1
            device.clock.sleep(0.009 if count == 9 else 0.011)
            return Beat(device.clock.now_s(), count)

    with Session(device) as session:
        found = measure(session, Uneven(device, 0, None), Setting(device.space.highest, 8))
    assert found.step_s == pytest.approx(0.002, rel=0.05)


def test_a_stall_that_comes_again_is_no_warm_up() -> None:
    device = virtual()

    class Stalling(ScriptedRun):
        def step(self) -> Beat | None:
            self.steps += 1
            device.clock.sleep(0.1 if self.steps % 10 == 9 else 0.01)
            return Beat(device.clock.now_s())

    with Session(device) as session:
        found = measure(session, Stalling(device, 0, None), Setting(device.space.highest, 8))
    assert found.step_s == pytest.approx(0.019, rel=0.1)


# Steps with pauses between them, measured while somebody else runs them


def follow(device: Any, pause: Callable[[int], float], *, idle_w: float | None, seconds: float = 20.0) -> Measuring:
    setting = Setting(PowerMode(), 8)
    with Meter(device) as meter:
        device.run_step(COST, 8)
        meter.beat()
        options = MeasureOptions(limit_s=seconds)
        measuring = Measuring(device, meter, setting, device.clock.now_s(), options, Settling(), idle_w)
        count = 0
        while not measuring.is_enough():
            device.run_step(COST, 8)
            meter.beat()
            count += 1
            begin_s = device.clock.now_s()
            device.clock.sleep(pause(count))
            meter.pause(begin_s, device.clock.now_s())
        known = measuring.end()
        assert known is not None
        assert measuring.so_far is not None
    return measuring


@pytest.mark.parametrize("board", ["nano", "tx2-nx", "orin-nano"])
@pytest.mark.parametrize("pause_s", [0.02, 0.2])
def test_pauses_are_no_part_of_a_step_and_idling_no_part_of_its_power(board: str, pause_s: float) -> None:
    device = virtual(board)
    idle_w = device.board.power_w
    found = follow(device, lambda count: pause_s * (0.5 + count % 2), idle_w=idle_w).so_far
    assert found is not None
    mode = device.board.mode
    assert found.step_s == pytest.approx(device.board.true_step_s(COST, mode, 8), rel=0.03)
    truth_w = device.board.true_power_w(COST, mode, 8, temperature_c=device.board.temperature_c)
    assert found.power_w == pytest.approx(truth_w, abs=max(found.power_w_ci95, 0.05 * truth_w))


def test_a_measurement_without_pauses_is_the_same_however_it_is_driven() -> None:
    one, two = virtual("nano"), virtual("nano")
    with Session(one) as session:
        made = measure(session, simulated(one).start(8), Setting(one.board.mode, 8))
    found = follow(two, lambda _: 0.0, idle_w=None, seconds=60.0).so_far
    assert found is not None
    assert found.power_w == pytest.approx(made.power_w, rel=0.02)
    assert found.step_s == pytest.approx(made.step_s, rel=0.02)


def test_pauses_without_idle_power_cannot_be_measured() -> None:
    with pytest.raises(MeasureError, match="idle power"):
        follow(virtual(), lambda _: 0.1, idle_w=None)


def test_nothing_is_known_at_first() -> None:
    device = virtual()
    with Meter(device) as meter:
        measuring = Measuring(
            device, meter, Setting(PowerMode(), 8), device.clock.now_s(), MeasureOptions(), Settling()
        )
        assert measuring.so_far is None
        assert not measuring.is_enough()
        assert measuring.end() is None


def test_steps_that_tests_leave_no_time_to_settle_are_measured_with_them() -> None:
    """An epoch of a third of a second, a test, and again: the measurement never ended, nor did the search."""
    device = virtual("nano")
    setting = Setting(device.space.highest, 8)
    clock = device.clock
    with Session(device) as session, Meter(device) as meter:
        session.apply(setting.mode)
        device.run_step(COST, 8)
        meter.beat()
        measuring = Measuring(device, meter, setting, clock.now_s(), MeasureOptions(precision=0.03), Settling())
        begun_s = clock.now_s()
        while not measuring.is_enough():
            assert clock.now_s() < begun_s + 12.0
            for _ in range(max(1, round(0.3 / device.board.true_step_s(COST, setting.mode, 8)))):
                device.run_step(COST, 8)
                meter.beat()
            test_begun_s = clock.now_s()
            while clock.now_s() < test_begun_s + 0.2:
                device.run_step(COST.of_test(), 8)
            meter.absence(test_begun_s, clock.now_s())
        found = measuring.end()
    assert found is not None
    assert found.step_s == pytest.approx(device.board.true_step_s(COST, setting.mode, 8), rel=0.05)
    assert found.power_w == pytest.approx(device.board.true_power_w(COST, setting.mode, 8), rel=0.15)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_state_that_hangs_is_asked_for_once_and_its_wait_is_no_part_of_a_step(answers: int) -> None:
    """It was asked for again and again, and the wait was taken for the time of a step."""
    device, asked = virtual("orin-agx"), []
    read = device.read_state

    def hangs() -> DeviceState:
        asked.append(device.clock.now_s())
        if len(asked) <= answers:
            return read()
        device.clock.advance(3.0)
        raise SensorError("It does not answer.")

    device.read_state = hangs  # type: ignore[method-assign]
    setting = Setting(device.space.highest, 16)
    with Session(device) as session:
        found = measure(session, simulated(device).start(16), setting, MeasureOptions(precision=0.003))
    assert len(asked) == answers + 1
    assert found.status is Status.OK
    truth_s = device.board.true_step_s(COST, setting.mode, 16)
    assert found.step_s == pytest.approx(truth_s, rel=0.01)
    assert found.window_s < 20
