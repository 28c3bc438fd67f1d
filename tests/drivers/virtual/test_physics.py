from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.drivers.virtual.physics import (
    AWAKE_WITHOUT_WORK,
    BoardConstants,
    ClockedPart,
    Clocks,
    PowerConstants,
    StepConstants,
    busy_cores,
    idle_power,
    smooth_max,
    step_power,
    step_times,
)
from underwatt.records import WorkloadCost

CYCLES = st.floats(1e-3, 1e5)
STEP = st.builds(
    StepConstants,
    compute_mcycles_per_sample=CYCLES,
    launch_mcycles_per_step=CYCLES,
    load_mcycles_per_sample=CYCLES,
    memory_mcycles_per_sample=CYCLES,
    compute_mcycles_per_step=CYCLES,
    memory_mcycles_per_step=CYCLES,
    load_workers=st.floats(1, 64),
    load_core_exponent=st.floats(0.3, 3),
    exposed_memory=st.floats(0, 1),
)
MHZ = st.floats(50, 4000)
POWER = PowerConstants(
    static_w=5.0,
    gpu=ClockedPart(10.0, 1300.0, 0.5, 1.0, 0.2),
    cpu_core=ClockedPart(0.5, 2200.0, 0.5, 1.0, 0.2),
    mem=ClockedPart(6.0, 3200.0, 1.0, 1.0, 0.1),
    working_w=3.0,
)


def clocks(cores: float, cpu: float, gpu: float, mem: float) -> Clocks:
    return Clocks(*(np.asarray(float(value)) for value in (cores, cpu, gpu, mem)))


@given(STEP, st.integers(1, 12), MHZ, MHZ, MHZ, st.integers(1, 512), st.floats(1.0, 8.0))
def test_no_step_is_longer_with_more_clock_or_more_cores(
    constants: StepConstants, cores: int, cpu: float, gpu: float, mem: float, batch: int, more: float
) -> None:
    base = float(step_times(constants, clocks(cores, cpu, gpu, mem), batch).step_s)
    faster = (
        clocks(cores + 1, cpu, gpu, mem),
        clocks(cores, cpu * more, gpu, mem),
        clocks(cores, cpu, gpu * more, mem),
        clocks(cores, cpu, gpu, mem * more),
    )
    for mode in faster:
        assert float(step_times(constants, mode, batch).step_s) <= base * (1 + 1e-9)


@given(STEP, st.integers(1, 12), MHZ, MHZ, MHZ, st.integers(1, 512))
def test_nothing_is_busier_than_the_step_is_long(
    constants: StepConstants, cores: int, cpu: float, gpu: float, mem: float, batch: int
) -> None:
    mode = clocks(cores, cpu, gpu, mem)
    times = step_times(constants, mode, batch)
    for part in (times.compute_s, times.memory_s, times.launch_s, times.load_s, times.work_s):
        assert 0 <= float(part) <= float(times.step_s) * (1 + 1e-9)
    assert float(busy_cores(times, mode)) <= cores
    idle_w = float(idle_power(POWER, mode).total_w)
    assert POWER.static_w < idle_w < float(step_power(POWER, mode, times).total_w) - POWER.working_w * (1 - 1e-9)


@given(STEP, st.integers(1, 12), MHZ, MHZ, MHZ, st.integers(1, 512))
def test_cores_that_may_not_sleep_draw_more(
    constants: StepConstants, cores: int, cpu: float, gpu: float, mem: float, batch: int
) -> None:
    mode = clocks(cores, cpu, gpu, mem)
    times = step_times(constants, mode, batch)
    idle = cores - float(busy_cores(times, mode))
    for count, asleep, awake in (
        (idle, step_power(POWER, mode, times), step_power(POWER, mode, times, cpuidle=False)),
        (cores, idle_power(POWER, mode), idle_power(POWER, mode, cpuidle=False)),
    ):
        saved_w = float(POWER.cpu_core.watts_of(mode.cpu_mhz)) * count * 0.2 * (1 - AWAKE_WITHOUT_WORK)
        assert float(awake.cpu_w - asleep.cpu_w) == pytest.approx(saved_w, abs=1e-9)
        assert float(awake.total_w - asleep.total_w) == pytest.approx(saved_w, abs=1e-9)


def test_a_core_waits_for_the_gpu_as_busily_as_it_works() -> None:
    mode = clocks(8, 2000, 1000, 3000)
    waiting = step_times(StepConstants(100.0, 1.0, 1e-3, 1e-3), mode, 16)
    assert float(busy_cores(waiting, mode)) == pytest.approx(1.0, abs=0.01)
    starved = step_times(StepConstants(1.0, 1.0, 4000.0, 1e-3, load_workers=2.0), mode, 16)
    assert float(busy_cores(starved, mode)) == pytest.approx(2.0, abs=0.05)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5))
def test_smooth_max_lies_between_the_maximum_and_the_sum(values: list[float]) -> None:
    arms = [np.asarray(value) for value in values]
    smooth = float(smooth_max(4.0, *arms))
    assert max(values) * (1 - 1e-9) <= smooth <= sum(values) * (1 + 1e-9)
    assert float(smooth_max(-8.0, *arms)) <= min(values) * (1 + 1e-9)


def test_larger_batches_use_the_gpu_better_and_draw_more() -> None:
    constants = StepConstants(5.0, 50.0, 1.0, 5.0, compute_mcycles_per_step=40.0)
    mode = clocks(8, 2000, 1000, 3000)
    batches = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
    times = step_times(constants, mode, batches)
    assert np.all(np.diff(times.step_s) > 0)
    assert np.all(np.diff(times.step_s / batches) < 0)
    assert np.all(np.diff(step_power(POWER, mode, times).total_w) > 0)


def test_power_follows_voltage_squared_times_clock() -> None:
    rail = ClockedPart(10.0, 1000.0, low_v=0.5, high_v=1.0, idle_share=0.25)
    assert float(rail.watts(np.asarray(1000.0), np.asarray(1.0))) == pytest.approx(10.0)
    assert float(rail.watts(np.asarray(500.0), np.asarray(1.0))) == pytest.approx(10.0 * 0.75**2 / 2)
    assert float(rail.watts(np.asarray(1000.0), np.asarray(0.0))) == pytest.approx(2.5)


def test_counted_costs_become_cycles() -> None:
    board = BoardConstants(1000.0, 20.0, 50e3, 100.0, POWER, gpu_cycles_per_kernel=10e3, load_workers=3.0)
    cost = WorkloadCost(2e9, 40e6, 100e6, 300, 1e4, 1e6, 1e7, 1e6)
    constants = board.step_constants(cost)
    assert constants.compute_mcycles_per_sample == pytest.approx(2.0)
    assert constants.compute_mcycles_per_step == pytest.approx(3.0)
    assert constants.launch_mcycles_per_step == pytest.approx(15.0)
    assert constants.load_mcycles_per_sample == pytest.approx(1.0)
    assert constants.memory_mcycles_per_sample == pytest.approx(2.0)
    assert constants.memory_mcycles_per_step == pytest.approx(5.0)
    assert constants.load_workers == 3.0


def test_arrays_and_single_modes_agree() -> None:
    constants = StepConstants(5.0, 50.0, 30.0, 5.0)
    columns = Clocks(*(np.array(c) for c in ([2.0, 8.0], [500.0, 2000.0], [300.0, 1300.0], [665.0, 3199.0])))
    together = step_power(POWER, columns, step_times(constants, columns, 16.0)).total_w
    for at, mode in enumerate((clocks(2, 500, 300, 665), clocks(8, 2000, 1300, 3199))):
        alone = step_power(POWER, mode, step_times(constants, mode, 16.0)).total_w
        assert together[at] == pytest.approx(float(alone))
