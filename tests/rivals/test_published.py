from __future__ import annotations

import math

import planning_world as world
import pytest

from underwatt.budget import Budget
from underwatt.errors import BudgetError, InputError
from underwatt.records import Measurement, Status
from underwatt.rivals.choices import choose_published

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
