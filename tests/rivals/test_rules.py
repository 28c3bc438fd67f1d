from __future__ import annotations

import math

import numpy as np
import planning_world as world
import pytest

from underwatt.budget import Budget
from underwatt.errors import BudgetError, InputError
from underwatt.planning.problem import Outlook
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Prediction, Status
from underwatt.rivals import compare as baselines
from underwatt.rivals.compare import choose_published

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


SAMPLES = {4: 30_000.0, 8: 20_000.0, 16: 20_000.0, 32: 22_000.0, 64: math.nan}


def test_it_is_the_smallest_time_per_sample_times_samples_that_fits() -> None:
    table, budget = world.everything(), Budget(power_w=7.0)
    chosen = choose_published(table, SAMPLES, budget)
    assert chosen.power_w <= 7.0

    def time(m: Measurement) -> float:
        return m.step_s / m.setting.batch_size * SAMPLES[m.setting.batch_size]

    assert all(time(chosen) <= time(m) for m in table if m.power_w <= 7.0 and m.setting.batch_size in (4, 8, 16, 32))
    assert chosen.setting.batch_size != 64


def test_only_ratios_of_samples_matter() -> None:
    table, budget = world.everything(), Budget(power_w=7.0)
    tenfold = {size: 10 * samples for size, samples in SAMPLES.items()}
    assert choose_published(table, SAMPLES, budget) == choose_published(table, tenfold, budget)


def test_a_budget_nothing_keeps_names_the_smallest_that_is_kept() -> None:
    smallest_w = min(m.power_w for m in world.everything() if m.setting.batch_size != 64)
    with pytest.raises(BudgetError) as error:
        choose_published(world.everything(), SAMPLES, Budget(power_w=1.0))
    assert f"{smallest_w:.4g} W" in str(error.value)


def test_nothing_known_is_an_error() -> None:
    failed = Measurement(world.at(500.0, 200.0, 8), status=Status.OUT_OF_MEMORY)
    for table in ((), (failed,), world.everything()):
        with pytest.raises(InputError):
            choose_published(table, {} if len(table) > 1 else SAMPLES, Budget(power_w=7.0))
