from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.csv_tables import read_measurements
from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.predict.design import first_settings
from underwatt.predict.fewshot import FewShot, never_slower, width_factor
from underwatt.records import Measurement, PowerMode, Profile, Setting
from underwatt.testing.predictors import PredictorConformance, made_up_measurements, made_up_profile

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.predict.base import Predictor


class TestFewShot(PredictorConformance):
    def make(self) -> Predictor:
        return FewShot()


def _errors(seen: tuple[Measurement, ...], rows: list[int], references: list[Profile]) -> tuple[float, float]:
    fitted = FewShot().fit([seen[at] for at in rows], references)
    predicted = fitted.predict(SettingArray.of([m.setting for m in seen]))
    time_error = predicted.log_step_s - np.log([m.step_s for m in seen])
    power_error = predicted.log_power_w - np.log([m.power_w for m in seen])
    return float(np.abs(time_error).mean()), float(np.abs(power_error).mean())


def _time_weight_of_references(seen: list[Measurement], reference: Profile) -> float:
    fitted = FewShot().fit(seen, [reference])
    assert fitted.weights.sum(axis=1) == pytest.approx([1.0, 1.0])
    return sum(
        float(time)
        for expert, time in zip(fitted.experts, fitted.weights[0], strict=True)
        if expert.reference is not None
    )


TEN = [0, 3, 5, 8, 11, 12, 14, 18, 21, 23]


def test_ten_settings_predict_the_others_of_a_made_up_device() -> None:
    time_error, power_error = _errors(made_up_measurements(), TEN, [])
    assert time_error < 0.05
    assert power_error < 0.03


def test_a_reference_that_contradicts_is_ignored() -> None:
    seen = made_up_measurements()
    upside_down = [replace(m, step_s=1 / m.step_s, power_w=300 / m.power_w) for m in seen]
    reference = made_up_profile(upside_down, "upside down")
    alone, confused = _errors(seen, TEN, []), _errors(seen, TEN, [reference])
    assert confused[0] < alone[0] + 0.01
    assert confused[1] < alone[1] + 0.01
    assert _time_weight_of_references([seen[at] for at in TEN], reference) < 0.1


def test_a_reference_that_fits_is_used() -> None:
    seen = made_up_measurements(slower=3.0)
    reference = made_up_profile(made_up_measurements(), "kin")
    few = TEN[::2]
    assert _errors(seen, few, [reference])[0] < _errors(seen, few, [])[0]
    assert _time_weight_of_references([seen[at] for at in few], reference) > 0.5


def test_a_reference_with_some_of_the_knobs_is_welcome() -> None:
    seen = made_up_measurements()
    gpu_only = [
        Measurement(Setting(PowerMode(gpu_mhz=mhz), 8), step_s=4 / mhz, power_w=5 + mhz / 100)
        for mhz in (200.0, 400.0, 800.0, 1200.0)
    ]
    assert _errors(seen, TEN, [made_up_profile(gpu_only)])[0] < 0.08


def test_a_reference_without_a_shared_knob_is_refused() -> None:
    limits = [
        Measurement(Setting(PowerMode(power_limit_w=w), 8), step_s=1 / w, power_w=w) for w in (100.0, 150.0, 200.0)
    ]
    with pytest.raises(PredictError, match="nothing in common"):
        FewShot().fit(made_up_measurements(), [made_up_profile(limits, "card")])


def test_bad_readings_in_a_reference_name_the_reference() -> None:
    bad = [replace(m, power_w=-1.0) for m in made_up_measurements()]
    with pytest.raises(PredictError, match="the reference broken"):
        FewShot().fit(made_up_measurements(), [made_up_profile(bad, "broken")])


def test_a_higher_clock_is_never_slower_even_where_readings_say_so() -> None:
    rng = np.random.default_rng(1)
    noisy = [replace(m, step_s=m.step_s * np.exp(0.2 * rng.standard_normal())) for m in made_up_measurements()]
    clocks = np.array([[cpu, gpu] for cpu in np.linspace(500, 2000, 8) for gpu in np.linspace(200, 1200, 9)])
    asked = SettingArray.product(("cpu_mhz", "gpu_mhz"), clocks, [8, 16])
    times = FewShot().fit(noisy).predict(asked).log_step_s.reshape(8, 9, 2)
    assert np.diff(times, axis=0).max() < 1e-7
    assert np.diff(times, axis=1).max() < 1e-7


def test_knows_less_far_from_what_was_measured() -> None:
    seen = [m for m in made_up_measurements() if m.setting.batch_size == 8]
    near, far = (SettingArray(("cpu_mhz", "gpu_mhz"), np.array([[1000.0, 400.0]]), np.array([b])) for b in (8.0, 512.0))
    fitted = FewShot().fit(seen)
    assert fitted.predict(far).log_step_s_std[0] > 2 * fitted.predict(near).log_step_s_std[0]


def test_power_limits_and_batch_sizes() -> None:
    seen = [
        Measurement(
            Setting(PowerMode(power_limit_w=w), b), step_s=(0.02 + 0.001 * b) * (300 / w) ** 0.6, power_w=0.9 * w
        )
        for w in (100.0, 150.0, 200.0, 250.0, 300.0)
        for b in (32, 128, 512)
    ]
    time_error, power_error = _errors(tuple(seen), [0, 2, 4, 7, 9, 11, 12, 14], [])
    assert time_error < 0.1
    assert power_error < 0.1


def test_a_device_without_knobs_learns_from_batch_sizes() -> None:
    seen = [
        Measurement(Setting(PowerMode(), b), step_s=0.005 + 1e-4 * b, power_w=100 + 40 * np.log2(b))
        for b in (4, 8, 16, 32, 64, 128)
    ]
    time_error, _ = _errors(tuple(seen), [0, 2, 3, 5], [])
    assert time_error < 0.15


@pytest.mark.slow
def test_fast_enough_for_every_setting_of_a_board(data_dir: Path) -> None:
    table = read_measurements(data_dir / "powertrain" / "orin_agx_train_mobilenetv3.csv")
    values = [np.unique([m.setting.mode.knobs()[name] for m in table]) for name in table[0].setting.mode.knobs()]
    grids = [values[0], np.linspace(115.2, 2201.6, 29), values[2], values[3]]
    modes = np.stack([grid.ravel() for grid in np.meshgrid(*grids, indexing="ij")], axis=1)
    modes = np.repeat(modes, 2, axis=0)[:18096]
    asked = SettingArray.product(tuple(table[0].setting.mode.knobs()), modes, [4, 8, 16, 32, 64, 128])
    assert len(asked) == 108_576
    started = time.process_time()
    FewShot().fit(table[::87]).predict(asked)
    # Twice the two seconds of the requirement, as other work may share these cores.
    assert time.process_time() - started < 8.0


@pytest.mark.slow
def test_real_tables_within_the_stated_errors(data_dir: Path) -> None:
    target = read_measurements(data_dir / "powertrain" / "orin_agx_train_mobilenetv3.csv")
    reference = made_up_profile(read_measurements(data_dir / "powertrain" / "orin_agx_train_resnet18.csv"))
    settings = SettingArray.of([m.setting for m in target])
    chosen = first_settings(settings, 10, references=[reference], seed=0)
    fitted = FewShot().fit([target[at] for at in chosen], [reference])
    rest = np.setdiff1d(np.arange(len(target)), chosen)
    predicted = fitted.predict(settings.take(rest))
    time_error = predicted.log_step_s - np.log([target[at].step_s for at in rest])
    power_error = predicted.log_power_w - np.log([target[at].power_w for at in rest])
    assert 100 * np.abs(np.expm1(time_error)).mean() < 6.0
    assert 100 * np.abs(np.expm1(power_error)).mean() < 2.8
    assert 0.8 < np.mean(np.abs(time_error) < 1.645 * predicted.log_step_s_std) < 0.99


def test_repeats_do_not_make_it_surer_than_the_settings_allow() -> None:
    settings = [Setting(PowerMode(gpu_mhz=float(mhz), mem_mhz=1000.0), 8) for mhz in (200, 400, 600, 800)]
    once = [Measurement(s, 100 / s.mode.gpu_mhz + 0.1, 5 + s.mode.gpu_mhz / 100) for s in settings]  # type: ignore[operator]
    ask = SettingArray.of([Setting(PowerMode(gpu_mhz=500.0, mem_mhz=1000.0), 8)])
    sure = FewShot().fit(once).predict(ask).log_step_s_std
    assert FewShot().fit(once * 8).predict(ask).log_step_s_std == pytest.approx(sure)


@pytest.mark.parametrize("sizes", [(8,), (4, 8)])
def test_far_from_the_measured_batch_sizes_it_says_that_it_does_not_know(sizes: tuple[int, ...]) -> None:
    modes = [PowerMode(gpu_mhz=float(mhz), mem_mhz=1000.0) for mhz in (200, 400, 600, 800)]
    seen = [Measurement(Setting(m, b), b * 10 / m.gpu_mhz, 5 + m.gpu_mhz / 100) for m in modes for b in sizes]  # type: ignore[operator]
    found = FewShot().fit(seen).predict(SettingArray.of([Setting(modes[1], b) for b in (8, 64, 512)]))
    assert found.log_step_s_std[1] > 0.4
    assert found.log_step_s_std[2] > 0.8
    assert found.log_step_s_std[0] < found.log_step_s_std[1] < found.log_step_s_std[2]
    assert found.log_power_w_std[0] < found.log_power_w_std[1] < found.log_power_w_std[2]


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("truth", [0.6, 1.0, 1.8])
def test_many_readings_say_how_wide_intervals_must_be(truth: float) -> None:
    errors = RNG.normal(0, truth * 0.05, size=5000)
    assert width_factor(errors, np.full(5000, 0.05**2)) == pytest.approx(truth, rel=0.05)


def test_heavy_tails_are_judged_by_the_interval_and_not_by_the_outliers() -> None:
    errors = RNG.normal(size=2000)
    errors[:40] = 100.0
    assert width_factor(errors, np.ones(2000)) < 1.2


def test_few_readings_move_it_less_than_many() -> None:
    errors = np.array([0.5, -1.0, 1.5, -3.0])
    few, many = (width_factor(np.tile(errors, times), np.ones(4 * times)) for times in (1, 100))
    assert 1.0 < few < 0.8 * many


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=30))
def test_the_factor_stays_within_reason(errors: list[float]) -> None:
    assert 0.3 <= width_factor(np.array(errors), np.ones(len(errors))) <= 4.0


GRID = np.array([[f, g] for f in (500.0, 1000.0, 2000.0) for g in (200.0, 400.0, 800.0, 1200.0)])
GRID_SETTINGS = SettingArray.product(("cpu_mhz", "gpu_mhz"), GRID, [8, 32])


def _violations(log_step_s: np.ndarray, settings: SettingArray) -> int:
    rows = settings.matrix()
    count = 0
    for a, t in zip(rows, log_step_s, strict=True):
        for b, u in zip(rows, log_step_s, strict=True):
            differs = np.flatnonzero(a != b)
            if len(differs) == 1 and differs[0] < len(settings.knobs) and b[differs[0]] > a[differs[0]]:
                count += u > t + 1e-7
    return count


@given(st.lists(st.floats(-5, 5), min_size=24, max_size=24), st.integers(2, 24), st.randoms())
def test_no_single_knob_raised_makes_it_slower(values: list[float], count: int, random) -> None:
    rows = np.array(random.sample(range(24), count))
    some = SettingArray(GRID_SETTINGS.knobs, GRID_SETTINGS.values[rows], GRID_SETTINGS.batch_size[rows])
    out = never_slower(np.array(values)[rows], some)
    assert _violations(out, some) == 0


def test_times_in_order_stay_as_they_are() -> None:
    times = -np.log(GRID_SETTINGS.values).sum(axis=1) + np.log(GRID_SETTINGS.batch_size)
    np.testing.assert_allclose(never_slower(times, GRID_SETTINGS), times, atol=1e-9)


def test_a_pair_out_of_order_meets_in_the_middle() -> None:
    pair = SettingArray(("gpu_mhz",), np.array([[800.0], [400.0]]), np.array([8.0, 8.0]))
    np.testing.assert_allclose(never_slower(np.array([2.0, 1.0]), pair), [1.5, 1.5])


def test_a_knob_may_have_very_many_values() -> None:
    clocks = np.arange(1.0, 70_000.0)
    many = SettingArray(("gpu_mhz",), clocks[:, None], np.full(len(clocks), 8.0))
    times = np.where(clocks == 300.0, 5.0, -np.log(clocks))
    found = never_slower(times, many)
    assert np.all(np.diff(found) <= 1e-7)
    np.testing.assert_allclose(found[300:], times[300:], atol=1e-7)


def test_nothing_in_nothing_out() -> None:
    assert len(never_slower(np.empty(0), GRID_SETTINGS.take(slice(0, 0)))) == 0
