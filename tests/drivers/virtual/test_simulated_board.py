from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given, strategies as st
from virtual_costs import IMAGENET, SMALL, STARVED

from underwatt.drivers.virtual.board_specs import BOARDS, SensorRail, SensorSpec
from underwatt.drivers.virtual.simulated_board import AveragingSensor, VirtualBoard, VirtualClock
from underwatt.errors import InputError, ModeError, OutOfMemoryError
from underwatt.records import PowerMode, WorkloadCost

EVERY_BOARD = pytest.mark.parametrize("name", list(BOARDS))


def make(name: str = "nano", seed: int = 0) -> VirtualBoard:
    return VirtualBoard(BOARDS[name], seed=seed)


def train(board: VirtualBoard, seconds: float, cost: WorkloadCost = SMALL, batch: int = 16) -> int:
    steps, end_s = 0, board.clock.now_s() + seconds
    while board.clock.now_s() < end_s:
        board.run_step(cost, batch)
        steps += 1
    return steps


def total_w(board: VirtualBoard) -> float:
    watts = board.sensor.watts()
    return sum(watts[rail.name] for rail in board.spec.rails if rail.in_total)


@EVERY_BOARD
def test_a_step_takes_its_true_time_on_average(name: str) -> None:
    board = make(name)
    start_s = board.clock.now_s()
    for _ in range(400):
        board.run_step(SMALL, 8)
    mean_s = (board.clock.now_s() - start_s) / 400
    assert mean_s == pytest.approx(board.true_step_s(SMALL, board.mode, 8), rel=0.003)


@EVERY_BOARD
@pytest.mark.parametrize("cost", [SMALL, STARVED], ids=["compute", "loading"])
def test_the_sensor_conserves_energy(name: str, cost: WorkloadCost) -> None:
    board = make(name)
    train(board, 1200, cost)  # warm
    readings: list[float] = []
    start_s, start_j = board.clock.now_s(), board.energy_j
    timer = board.clock.every(0.1, lambda: readings.append(total_w(board)))
    train(board, 120, cost)
    timer.cancel()
    truly_w = (board.energy_j - start_j) / (board.clock.now_s() - start_s)
    assert sum(readings) / len(readings) == pytest.approx(truly_w, rel=0.01)
    expected_w = board.true_power_w(cost, board.mode, 16, temperature_c=board.temperature_c)
    assert truly_w == pytest.approx(expected_w, rel=0.01)


def test_waiting_for_data_shows_as_valleys_in_power() -> None:
    board = make("orin-agx")
    board.set_mode(PowerMode(cpu_cores=2))
    watts: list[float] = []
    timer = board.clock.every(0.005, lambda: watts.append(board.power_w))
    train(board, 10, STARVED)
    timer.cancel()
    assert max(watts) > 1.3 * min(watts)


@EVERY_BOARD
def test_idle_draws_less_than_training(name: str) -> None:
    board = make(name)
    idle_w = board.power_w
    train(board, 60)
    assert total_w(board) > 1.1 * idle_w
    board.clock.sleep(5)
    assert total_w(board) < 1.1 * idle_w


def test_heat_throttles_the_gpu_and_cold_sets_it_free() -> None:
    board = make()
    board.set_mode(board.space.highest)
    train(board, 900)
    assert not board.throttled
    board.disturb(ambient_c=75.0)
    train(board, 1800)
    assert board.throttled
    slowed_mhz = board.running.gpu_mhz
    assert slowed_mhz is not None
    assert slowed_mhz < 921.6
    assert board.mode.gpu_mhz == 921.6
    assert board.temperature_c < board.spec.thermal.throttle_c + 3
    slow_s = train_step_s(board)
    assert slow_s > 1.02 * board.true_step_s(SMALL, board.mode, 16)
    board.disturb()
    board.clock.sleep(1800)
    assert not board.throttled
    assert train_step_s(board) == pytest.approx(board.true_step_s(SMALL, board.mode, 16), rel=0.02)


def train_step_s(board: VirtualBoard) -> float:
    start_s = board.clock.now_s()
    for _ in range(20):
        board.run_step(SMALL, 16)
    return (board.clock.now_s() - start_s) / 20


def test_temperature_settles_where_resistance_says() -> None:
    board = make()
    train(board, 3000)
    mean_w = board.true_power_w(SMALL, board.mode, 16, temperature_c=board.temperature_c)
    assert board.temperature_c == pytest.approx(25 + 4.5 * mean_w, abs=1.0)


def test_memory_runs_out_at_a_batch_size() -> None:
    board = make()
    board.run_step(IMAGENET, 64)
    before_s = board.clock.now_s()
    with pytest.raises(OutOfMemoryError, match="batch size 128 needs") as caught:
        board.run_step(IMAGENET, 128)
    assert caught.value.hint
    assert board.clock.now_s() == before_s
    make("orin-agx").run_step(IMAGENET, 128)
    with pytest.raises(InputError):
        board.run_step(SMALL, 0)


def test_same_seed_same_life_other_seed_another() -> None:
    def life(seed: int) -> list[float]:
        board = make(seed=seed)
        seen: list[float] = []
        board.clock.every(0.1, lambda: seen.append(total_w(board)))
        train(board, 20)
        return [*seen, board.clock.now_s(), board.energy_j]

    assert life(3) == life(3)
    assert life(3) != life(4)


def test_reading_the_sensor_more_often_changes_no_step() -> None:
    one, other = make(), make()
    other.clock.every(0.03, lambda: None)
    train(one, 10)
    train(other, 10)
    assert one.clock.now_s() == pytest.approx(other.clock.now_s())


def test_disturbance_slows_and_draws() -> None:
    board = make()
    train(board, 300)
    calm_s, calm_j = train_step_s(board), board.energy_j
    board.disturb(extra_w=2.0, slow_factor=1.5)
    start_s, start_j = board.clock.now_s(), board.energy_j
    assert train_step_s(board) == pytest.approx(1.5 * calm_s, rel=0.02)
    disturbed_w = (board.energy_j - start_j) / (board.clock.now_s() - start_s)
    board.disturb()
    assert train_step_s(board) == pytest.approx(calm_s, rel=0.02)
    assert disturbed_w == pytest.approx(calm_j / start_s + 2.0, rel=0.1)
    with pytest.raises(InputError):
        board.disturb(slow_factor=0.5)


def test_modes_move_time_and_power_the_right_way() -> None:
    board = make("orin-agx")
    low, high = board.space.lowest, board.space.highest
    assert board.true_step_s(SMALL, low, 16) > 5 * board.true_step_s(SMALL, high, 16)
    assert board.true_power_w(SMALL, low, 16) < 0.5 * board.true_power_w(SMALL, high, 16)
    hot_w = board.true_power_w(SMALL, high, 16, temperature_c=85)
    assert 1.0 < hot_w / board.true_power_w(SMALL, high, 16) < 1.1
    with pytest.raises(ModeError, match="nearest"):
        board.set_mode(PowerMode(gpu_mhz=5000))


def test_a_simulated_hour_takes_seconds() -> None:
    board = make("orin-agx")
    board.set_mode(board.space.highest)
    readings: list[float] = []
    board.clock.every(0.1, lambda: readings.append(total_w(board)))
    start_s = time.process_time()
    steps = train(board, 3600, batch=64)
    assert steps > 30_000
    assert len(readings) >= 36_000
    assert time.process_time() - start_s < 20


def test_a_simulated_day_of_rest_takes_no_time() -> None:
    board = make()
    start_s = time.process_time()
    board.clock.sleep(86_400)
    assert time.process_time() - start_s < 0.5
    assert total_w(board) == pytest.approx(board.power_w, rel=0.1)


RAIL = SensorRail("1-0040", 0, "IN", 1, 1, 1, 1, in_total=True, volts=5.0)
EXACT = SensorSpec(window_s=0.1, lag_s=0.6, step_ma=1e-3, noise=0.0)


class Quiet(Random):
    """No noise."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return mu


def sensor(spec: SensorSpec = EXACT, watts: float = 2.0, random: Random | None = None) -> AveragingSensor:
    return AveragingSensor(spec, (RAIL,), random or Quiet(), (watts,))


def test_follows_a_change_within_two_seconds_but_not_at_once() -> None:
    meter = sensor()
    meter.live(0.05, (10.0,))
    assert meter.watts()["IN"] == pytest.approx(2.0, abs=0.01)
    meter.live(0.45, (10.0,))
    assert 4.0 < meter.watts()["IN"] < 8.0
    meter.live(2.0, (10.0,))
    assert meter.watts()["IN"] == pytest.approx(10.0, rel=0.03)


@given(st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=20))
def test_any_cutting_of_time_reads_the_same(cuts: list[float]) -> None:
    whole, cut = sensor(), sensor()
    for seconds in cuts:
        cut.live(seconds, (8.0,))
    whole.live(sum(cuts), (8.0,))
    # Rounding may put a window's end on either side of a cut: one window's worth of difference at most.
    assert cut.watts()["IN"] == pytest.approx(whole.watts()["IN"], abs=6.0 * (0.1 / 0.6) + 0.02)
    whole.live(20, (8.0,))
    cut.live(20, (8.0,))
    assert cut.watts()["IN"] == pytest.approx(whole.watts()["IN"], abs=1e-3)


def test_reads_whole_steps_of_current() -> None:
    meter = sensor(SensorSpec(0.1, 0.6, step_ma=8.0, noise=0.01), random=Random(1))
    readings = set()
    for _ in range(200):
        meter.live(0.1, (7.3,))
        mv, ma = meter.readings()["IN"]
        assert mv == 5000
        assert ma % 8 == 0
        readings.add(ma)
    assert len(readings) > 3


def test_a_load_that_switches_faster_than_the_window_reads_as_its_mean() -> None:
    meter = sensor()
    for _ in range(2000):
        meter.live(0.004, (12.0,))
        meter.live(0.006, (2.0,))
    assert meter.watts()["IN"] == pytest.approx(6.0, rel=0.02)


def test_never_reads_below_zero() -> None:
    meter = sensor(SensorSpec(0.1, 0.6, step_ma=20.0, noise=0.01), watts=0.001, random=Random(3))
    for _ in range(500):
        meter.live(0.1, (0.001,))
        assert meter.watts()["IN"] >= 0


@given(st.lists(st.floats(0, 3), max_size=20), st.floats(0.05, 1))
def test_virtual_timers_fire_at_their_exact_times(steps: list[float], period_s: float) -> None:
    clock = VirtualClock()
    seen: list[float] = []
    moved: list[float] = []
    clock.on_move(moved.append)
    clock.every(period_s, lambda: seen.append(clock.now_s()))
    for step in steps:
        clock.advance(step)
    assert abs(sum(moved) - sum(steps)) < 1e-9
    assert abs(clock.now_s() - sum(steps)) < 1e-9
    assert all(abs(at - n * period_s) < 1e-6 for n, at in enumerate(seen))
    if steps:
        assert abs(len(seen) - (sum(steps) / period_s + 1)) <= 1 + 1e-6


def test_a_cancelled_virtual_timer_is_silent_even_when_it_cancels_itself() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def once() -> None:
        seen.append(clock.now_s())
        timer.cancel()

    timer = clock.every(1.0, once)
    clock.advance(10)
    timer.cancel()
    assert seen == [0.0]
    assert clock.now_s() == 10


def test_time_never_goes_back() -> None:
    clock = VirtualClock(5.0)
    clock.sleep(-3)
    assert clock.now_s() == 5.0
