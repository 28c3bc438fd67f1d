from __future__ import annotations

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import Budget
from underwatt.convergence.curve import samples_to_target
from underwatt.errors import InputError
from underwatt.planning.problem import Outlook, Problem
from underwatt.predict.base import SettingArray
from underwatt.records import PowerMode, Prediction, Setting
from underwatt.rivals import compare as baselines

PROBLEM = world.problem(Budget(power_w=7.0))
TABLE = baselines.Table.measured(PROBLEM, world.everything())


def _setting(row: int | None):
    assert row is not None
    return PROBLEM.candidates[row]


def test_largest_batch_takes_the_highest_gpu_clock_that_fits_with_all_else_at_its_highest() -> None:
    chosen = _setting(baselines.largest_batch(TABLE, 7.0))
    assert chosen.batch_size == 64
    assert chosen.mode.cpu_mhz == max(world.CPU_MHZ)
    assert world.truth(chosen).power_w <= 7.0
    higher = [gpu for gpu in world.GPU_MHZ if gpu > chosen.mode.gpu_mhz]
    assert higher
    assert all(world.truth(world.at(max(world.CPU_MHZ), gpu, 64)).power_w > 7.0 for gpu in higher)


def test_all_else_is_never_lowered_where_it_does_not_fit_at_its_highest() -> None:
    fits = PROBLEM.candidates.column("cpu_mhz") < 2000.0
    table = baselines.Table(TABLE.settings, TABLE.time_s, TABLE.sample_s, np.where(fits, TABLE.drawn_w, 50.0))
    assert baselines.largest_batch(table, 7.0) is None
    assert baselines.default_batch(table, 7.0) is None
    small_fits = fits | (PROBLEM.candidates.batch_size == 8)
    table = baselines.Table(TABLE.settings, TABLE.time_s, TABLE.sample_s, np.where(small_fits, TABLE.drawn_w, 50.0))
    for rule in (baselines.largest_batch, baselines.default_batch):
        chosen = _setting(rule(table, 7.0))
        assert (chosen.batch_size, chosen.mode.cpu_mhz) == (8, 2000.0)


def test_the_published_settings_are_every_clock_with_all_else_at_its_highest() -> None:
    rows = np.flatnonzero(baselines.by_clock_alone(PROBLEM.candidates))
    found = {PROBLEM.candidates[int(row)] for row in rows}
    assert found == {world.at(max(world.CPU_MHZ), gpu, b) for gpu in world.GPU_MHZ for b in world.BATCH_SIZES}
    bare = SettingArray.product((), np.empty((1, 0)), [8, 16])
    assert baselines.by_clock_alone(bare).tolist() == [True, True]


def test_largest_batch_falls_back_to_a_smaller_one_where_it_fits_at_no_clock() -> None:
    powers = np.where(PROBLEM.candidates.batch_size > 16, 50.0, TABLE.drawn_w)
    table = baselines.Table(TABLE.settings, TABLE.time_s, TABLE.sample_s, powers)
    assert _setting(baselines.largest_batch(table, 7.0)).batch_size == 16


def test_default_batch_is_the_middle_one() -> None:
    assert _setting(baselines.default_batch(TABLE, 7.0)).batch_size == 16


def test_oracle_beats_every_baseline() -> None:
    best = TABLE.time_s[baselines.oracle(TABLE, 7.0)]
    for rule in (baselines.largest_batch, baselines.default_batch, baselines.fastest_throughput):
        row = rule(TABLE, 7.0)
        assert TABLE.drawn_w[row] <= 7.0
        assert TABLE.time_s[row] >= best
    assert TABLE.time_s[baselines.largest_batch(TABLE, 7.0)] > 1.05 * best


def test_throughput_alone_chooses_a_batch_that_converges_worse() -> None:
    assert _setting(baselines.fastest_throughput(TABLE, 7.0)).batch_size == 64
    assert _setting(baselines.oracle(TABLE, 7.0)).batch_size < 64


def test_maximum_mode_ignores_the_budget() -> None:
    assert _setting(baselines.maximum_mode(TABLE)) == world.at(2000.0, 1200.0, 16)


def test_stock_modes_are_compared_by_name() -> None:
    modes = {
        "low": PowerMode(cpu_mhz=500.0, gpu_mhz=200.0),
        "middle": PowerMode(cpu_mhz=1500.0, gpu_mhz=600.0),
        "max": PowerMode(cpu_mhz=2000.0, gpu_mhz=1200.0),
        "elsewhere": PowerMode(gpu_mhz=600.0, mem_mhz=1600.0),
    }
    name, row = baselines.stock_mode(TABLE, 7.0, modes)
    assert name == "middle"
    assert _setting(row) == world.at(1500.0, 600.0, 16)
    name, row = baselines.stock_mode(TABLE, 1.0, modes)
    assert (name, _setting(row)) == ("low", world.at(500.0, 200.0, 16))  # none fits: the thriftiest
    assert baselines.stock_mode(TABLE, 7.0, {"elsewhere": modes["elsewhere"]}) is None


def test_nothing_fits_is_none() -> None:
    rules = (baselines.oracle, baselines.largest_batch, baselines.default_batch, baselines.fastest_throughput)
    assert [rule(TABLE, 1.0) for rule in rules] == [None] * 4


def test_trusting_predictions_can_break_the_budget() -> None:
    zeros = np.zeros(len(PROBLEM))
    too_low = Prediction(np.log([m.step_s for m in world.everything()]), zeros + 0.1, zeros + np.log(6.9), zeros + 0.1)
    predicted = baselines.Table.predicted(PROBLEM, Outlook.of(PROBLEM, too_low))
    row = baselines.oracle(predicted, 7.0)
    assert TABLE.drawn_w[row] > 7.0
    assert np.allclose(predicted.time_s, TABLE.time_s)
    assert np.allclose(predicted.sample_s, TABLE.sample_s)


def test_a_truth_must_cover_every_candidate() -> None:
    with pytest.raises(InputError):
        baselines.Table.measured(PROBLEM, world.everything()[1:])


def _published(budget_w: float, samples: dict[int, float]) -> Setting | None:
    problem = Problem.of(PROBLEM.candidates, Budget(power_w=budget_w), samples_to_target(samples))
    row = baselines.published(baselines.Table.measured(problem, world.everything()), budget_w)
    return None if row is None else PROBLEM.candidates[row]


SAMPLES = {4: 30_000.0, 8: 20_000.0, 16: 20_000.0, 32: 22_000.0}  # and none at 64, which never gets there


def test_the_published_method_takes_the_smallest_time_of_its_clocks_and_batch_sizes_that_fit() -> None:
    chosen = _published(7.0, SAMPLES)
    assert chosen is not None

    def time_s(setting: Setting) -> float:
        return world.truth(setting).step_s / setting.batch_size * SAMPLES[setting.batch_size]

    offered = [world.at(max(world.CPU_MHZ), gpu, b) for gpu in world.GPU_MHZ for b in SAMPLES]
    assert chosen in offered
    assert time_s(chosen) == min(time_s(one) for one in offered if world.truth(one).power_w <= 7.0)
    assert _published(7.0, {size: 10 * count for size, count in SAMPLES.items()}) == chosen
    assert _published(1.0, SAMPLES) is None
