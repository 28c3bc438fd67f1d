from __future__ import annotations

import math
import time
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import planning_world as world
import pytest
from hypothesis import given, settings, strategies as st

from underwatt.budget import Budget, parse_budget
from underwatt.errors import BudgetError, InputError
from underwatt.planning.choice import choose_setting, forecast
from underwatt.planning.problem import Goal, Outlook, Problem, project
from underwatt.planning.search import Search, expected_gain, safest_fast, shortlist
from underwatt.predict.base import SettingArray
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, PowerMode, Prediction, Setting, Status
from underwatt.rivals.compare import Table, oracle
from underwatt.testing.predictors import made_up_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.predict.base import FittedPredictor
    from underwatt.records import Profile


def _view(budget_w: float, std: float = 0.05):
    problem = world.problem(Budget(power_w=budget_w))
    stds = np.full(len(problem), std)
    table = world.everything()
    prediction = Prediction(np.log([m.step_s for m in table]), stds, np.log([m.power_w for m in table]), stds)
    return problem, Outlook.of(problem, prediction)


def test_gain_is_the_mean_of_what_readings_would_gain() -> None:
    problem, outlook = _view(1e6)
    row = 40
    best = float(outlook.log_time_s[row]) - 0.02
    readings = outlook.log_time_s[row] + 0.05 * np.random.default_rng(0).normal(size=400_000)
    drawn = np.maximum(best - readings, 0).mean()
    assert expected_gain(problem, outlook, best)[row] == pytest.approx(drawn, rel=0.02)


def test_what_cannot_fit_gains_nothing() -> None:
    problem, outlook = _view(5.0, std=0.001)
    gains = expected_gain(problem, outlook, 1e3)
    assert np.all(gains[np.exp(outlook.log_drawn_w) > 5.1] < 1e-6)
    assert gains.max() > 1


def test_never_reaching_the_target_gains_nothing() -> None:
    problem = world.problem(Budget(power_w=100.0), curve=world.Curve(hopeless=True))
    _, outlook = _view(100.0)
    stds = np.full(len(problem), 0.05)
    hopeless = Outlook.of(problem, Prediction(np.zeros(len(problem)), stds, outlook.log_power_w, stds))
    gains = expected_gain(problem, hopeless, 20.0)
    assert np.all(gains[problem.candidates.batch_size == 64] == 0)
    assert np.all(np.isfinite(gains))


def test_while_nothing_fits_it_takes_the_fastest_likely_one_or_else_the_likeliest() -> None:
    problem, outlook = _view(6.0)
    everything = np.ones(len(problem), dtype=bool)
    row = safest_fast(problem, outlook, everything)
    chance = outlook.chance_to_fit(problem.budget)
    assert chance[row] >= 0.7
    assert outlook.log_time_s[row] == outlook.log_time_s[chance >= 0.7].min()
    tight, outlook = _view(3.3)
    row = safest_fast(tight, outlook, everything)
    assert outlook.log_drawn_w[row] == outlook.log_drawn_w.min()
    impossible, outlook = _view(1e-9, std=0.001)
    assert safest_fast(impossible, outlook, everything) == int(np.argmin(outlook.log_drawn_w))


def test_shortlist_keeps_the_promising_and_the_thriftiest() -> None:
    problem, outlook = _view(6.0, std=0.02)
    rows = shortlist(problem, outlook, most=48)
    assert len(rows) <= 48
    fitting = np.flatnonzero(np.exp(outlook.log_drawn_w) <= 6.0)
    best = fitting[np.argsort(outlook.log_time_s[fitting])[:5]]
    assert set(best) <= set(rows)
    assert int(np.argmin(outlook.log_drawn_w)) in rows
    assert len(shortlist(problem, outlook, most=len(problem))) == len(problem)
    assert math.isfinite(outlook.log_time_s[rows].max())


LOWEST_W = min(m.power_w for m in world.everything())


def _best_s(problem: Problem, power_w: float) -> float:
    table = Table.measured(problem, world.everything())
    return float(table.time_s[oracle(table, power_w)])


@settings(max_examples=12, deadline=None)
@given(st.floats(LOWEST_W + 0.1, 14.0), st.integers(0, 3))
def test_finds_nearly_the_best_and_never_exceeds_the_budget(power_w: float, seed: int) -> None:
    problem = world.problem(Budget(power_w=power_w))
    found = Search(problem, seed=seed).run(world.truth)
    assert found.best.measurement.power_w <= power_w
    assert found.best.measurement in found.measurements
    assert found.best.time_s <= 1.06 * _best_s(problem, power_w)
    assert len(found.measurements) <= 20
    assert len({m.setting for m in found.measurements}) == len(found.measurements)


def test_measurements_that_are_known_cost_nothing() -> None:
    problem = world.problem(Budget(power_w=7.0))
    first = Search(problem).run(world.truth)
    calls: list[Setting] = []

    def measure(setting: Setting) -> Measurement:
        calls.append(setting)
        return world.truth(setting)

    again = Search(problem, known=first.measurements).run(measure)
    assert again.best.time_s <= first.best.time_s
    assert len(calls) < len(first.measurements)
    assert not {m.setting for m in first.measurements} & set(calls)


def test_a_reference_helps_to_start() -> None:
    problem = world.problem(Budget(power_w=7.0))
    reference = made_up_profile([world.slower(m, 2.0) for m in world.everything()])
    found = Search(problem, references=[reference]).run(world.truth)
    assert found.best.time_s <= 1.05 * _best_s(problem, 7.0)
    assert len(found.measurements) <= 14


def test_peak_watts_hold_for_the_peak() -> None:
    problem = world.problem(parse_budget("7W peak"))
    found = Search(problem).run(world.truth)
    assert found.best.measurement.peak_w <= 7.0


def test_least_energy_within_a_deadline() -> None:
    free = Search(world.problem(Budget(power_w=100.0))).run(world.truth)
    deadline_s = 2.0 * free.best.time_s
    problem = world.problem(Budget(deadline_s=deadline_s), goal=Goal.LEAST_ENERGY)
    found = Search(problem).run(world.truth)
    assert found.best.time_s <= deadline_s
    assert found.best.energy_j < free.best.energy_j


def test_soonest_within_an_energy_budget() -> None:
    free = Search(world.problem(Budget(power_w=100.0))).run(world.truth)
    problem = world.problem(Budget(energy_j=0.9 * free.best.energy_j))
    found = Search(problem).run(world.truth)
    assert found.best.energy_j <= 0.9 * free.best.energy_j
    assert found.best.time_s > free.best.time_s


def test_batches_that_run_out_of_memory_are_found_out_and_left() -> None:
    failures: list[int] = []
    measure = world.out_of_memory_from(32)

    def noted(setting: Setting) -> Measurement:
        made = measure(setting)
        if made.status is Status.OUT_OF_MEMORY:
            failures.append(setting.batch_size)
        return made

    found = Search(world.problem(Budget(power_w=8.0))).run(noted)
    assert found.best.measurement.setting.batch_size < 32
    assert len(failures) <= 2
    assert failures == sorted(failures, reverse=True)


def test_batches_that_never_reach_the_target_are_never_measured() -> None:
    problem = world.problem(Budget(power_w=8.0), curve=world.Curve(hopeless=True))
    found = Search(problem).run(world.truth)
    assert all(m.setting.batch_size < 64 for m in found.measurements)


def test_a_budget_below_the_device_names_the_smallest_power_it_measured() -> None:
    with pytest.raises(BudgetError) as error:
        Search(world.problem(Budget(power_w=0.8 * LOWEST_W))).run(world.truth)
    assert f"{LOWEST_W:.4g} W" in error.value.message
    assert "Raise" in error.value.hint


def test_a_deadline_that_cannot_be_kept_says_how_long_it_takes() -> None:
    with pytest.raises(BudgetError, match="soonest takes"):
        Search(world.problem(Budget(power_w=50.0, deadline_s=1.0))).run(world.truth)


def test_a_barely_feasible_budget_is_met() -> None:
    found = Search(world.problem(Budget(power_w=LOWEST_W * 1.0001))).run(world.truth)
    assert found.best.measurement.power_w <= LOWEST_W * 1.0001


def test_nothing_can_be_measured() -> None:
    with pytest.raises(BudgetError, match="could be measured"):
        Search(world.problem(Budget(power_w=7.0))).run(world.out_of_memory_from(1))


def test_two_candidates_are_simply_measured() -> None:
    two = SettingArray.of([world.at(500.0, 200.0, 8), world.at(2000.0, 600.0, 8)])
    found = Search(Problem.of(two, Budget(power_w=9.0))).run(world.truth)
    assert len(found.measurements) == 2
    assert found.best.measurement.setting == world.at(2000.0, 600.0, 8)
    assert found.stopped == "every setting was measured"


@pytest.mark.parametrize(("most", "said"), [(1, "1 setting was measured"), (2, "2 settings were measured")])
def test_a_search_that_may_hardly_measure_says_why_it_ended(most: int, said: str) -> None:
    assert Search(world.problem(Budget(power_w=30.0)), most=most).run(world.truth).stopped == said


def test_a_setting_that_stands_twice_among_the_candidates_is_measured_once() -> None:
    twice = world.candidates().take(np.repeat(np.arange(len(world.candidates())), 2))
    asked: list[Setting] = []

    def measure(setting: Setting) -> Measurement:
        asked.append(setting)
        return world.truth(setting)

    Search(Problem.of(twice, Budget(power_w=7.0), world.Curve()), least_gain=0.0).run(measure)
    assert len(asked) == len(set(asked))


def test_a_failed_measurement_is_not_repeated_nor_returned() -> None:
    problem = world.problem(Budget(power_w=7.0))
    best = Search(problem).run(world.truth).best.measurement.setting
    calls: list[Setting] = []

    def flaky(setting: Setting) -> Measurement:
        calls.append(setting)
        return Measurement(setting, status=Status.FAILED) if setting == best else world.truth(setting)

    found = Search(problem).run(flaky)
    assert found.best.measurement.setting != best
    assert calls.count(best) <= 1


def test_the_cap_holds_and_the_watcher_hears_everything() -> None:
    heard: list[tuple[Setting, str]] = []
    search = Search(world.problem(Budget(power_w=7.0)), most=5, least_gain=0.0)
    found = search.run(world.truth, lambda made, why: heard.append((made.setting, why)))
    assert len(found.measurements) == 5
    assert [setting for setting, _ in heard] == [m.setting for m in found.measurements]
    assert found.stopped == "5 settings were measured"
    assert heard[0][1].startswith("to learn")


def test_no_search_ends_at_its_cap_while_much_is_to_be_gained() -> None:
    problem = world.problem(Budget(power_w=7.0))
    capped = Search(problem, most=5, least_gain=0.0, much_gain=1.0)
    assert len(capped.run(world.truth).measurements) == 5
    longer = Search(problem, most=5, least_gain=0.0, much_gain=1e-12)
    assert 5 < len(longer.run(world.truth).measurements) <= 10, "but no more than twice as many"


def test_the_same_seed_measures_the_same_settings() -> None:
    problem = world.problem(Budget(power_w=7.0))
    one, two = (Search(problem, seed=3).run(world.truth) for _ in range(2))
    assert one.measurements == two.measurements


def test_a_shortlist_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = world.problem(Budget(power_w=7.0))
    monkeypatch.setattr(shortlist, "__defaults__", (64,))
    found = Search(problem).run(world.truth)
    assert found.best.time_s <= 1.06 * _best_s(problem, 7.0)


def test_known_measurements_of_other_knobs_are_refused() -> None:
    other = Measurement(Setting(world.at(500.0, 200.0, 8).mode.with_knobs(mem_mhz=1600.0), 8), step_s=1.0, power_w=5.0)
    with pytest.raises(InputError, match="other knobs"):
        Search(world.problem(Budget(power_w=7.0)), known=[other]).run(world.truth)
    with pytest.raises(InputError):
        Search(world.problem(Budget(power_w=7.0)), most=0).run(world.truth)


@pytest.mark.slow
def test_real_power_modes_are_never_over_budget(data_dir) -> None:
    from underwatt.csv_tables import read_measurements

    table = {m.setting: m for m in read_measurements(data_dir / "powertrain" / "orin_nano_train_resnet18.csv")}
    candidates = SettingArray.of(list(table))
    penalties, measured = [], []
    for power_w in (8.0, 9.5, 11.0):
        found = Search(Problem.of(candidates, Budget(power_w=power_w))).run(table.__getitem__)
        assert found.best.measurement.power_w <= power_w
        best_s = min(m.step_s for m in table.values() if m.power_w <= power_w)
        penalties.append(found.best.measurement.step_s / best_s - 1)
        measured.append(len(found.measurements))
    assert np.mean(penalties) < 0.05
    assert math.fsum(measured) / len(measured) <= 16


@pytest.mark.parametrize("known", [(), world.everything()[:40:9]])
def test_asking_and_telling_is_the_same_search(known: tuple[Measurement, ...]) -> None:
    problem = world.problem(Budget(power_w=7.0))
    whole = Search(problem, known=known, seed=2).run(world.truth)
    search = Search(problem, known=known, seed=2)
    assert search.best == (None if not known else search.best)
    told: list[Measurement] = []
    while (ask := search.ask()) is not None:
        told.append(world.truth(ask.setting))
        search.tell(told[-1])
    assert tuple(told) == whole.measurements
    assert search.result() == whole
    assert search.best == whole.best
    assert search.measurements == (*known, *told)


def test_another_budget_over_the_same_candidates_uses_all_that_is_known() -> None:
    problem = world.problem(Budget(power_w=12.0))
    search = Search(problem)
    while (ask := search.ask()) is not None:
        search.tell(world.truth(ask.setting))
    lower = search.under(world.problem(Budget(power_w=6.0)), most=10)
    asked = []
    while (ask := lower.ask()) is not None:
        asked.append(ask.setting)
        lower.tell(world.truth(ask.setting))
    assert not {m.setting for m in search.measurements} & set(asked), "measured twice"
    assert len(asked) <= 10
    assert lower.best is not None
    assert lower.best.measurement.power_w <= 6.0
    assert lower.best.time_s <= 1.06 * _best_s(world.problem(Budget(power_w=6.0)), 6.0)
    again = lower.under(problem, most=10)
    more = []
    while (ask := again.ask()) is not None:
        more.append(ask.setting)
        again.tell(world.truth(ask.setting))
    assert len(more) <= 3, "going back to a budget needs no search of its own"


def test_a_measurement_of_something_else_is_no_answer() -> None:
    search = Search(world.problem(Budget(power_w=7.0)))
    search.tell(Measurement(Setting(world.at(500.0, 200.0, 8).mode, 7), step_s=1.0, power_w=1.0))
    assert search.measurements == ()
    assert search.best is None


def test_what_ran_out_of_memory_takes_the_larger_ones_with_it() -> None:
    search, measure = Search(world.problem(Budget(power_w=12.0))), world.out_of_memory_from(16)
    too_large = math.inf
    while (ask := search.ask()) is not None:
        assert ask.setting.batch_size < too_large
        made = measure(ask.setting)
        if made.status is Status.OUT_OF_MEMORY:
            too_large = made.setting.batch_size
        search.tell(made)
    assert too_large < math.inf
    assert search.best is not None


def test_pauses_compete_with_clocks() -> None:
    """Where waiting draws little, a fast setting with pauses may be the best; the search then ends with one."""
    problem = replace(world.problem(Budget(power_w=6.5)), idle_w=0.5)
    found = Search(problem).run(world.truth)
    projections = [project(problem, row, measured) for row, measured in enumerate(world.everything())]
    best_s = min(one.time_s for one in projections if one.fits)
    assert found.best.fits
    assert found.best.time_s <= 1.06 * best_s
    assert found.best.measurement.power_w > 6.5


class Spy:
    """A predictor that has no ``prepare``, and notes about how many settings it is asked."""

    name = "spy"

    def __init__(self) -> None:
        self.references: list[Sequence[Profile]] = []
        self.asked: list[int] = []

    def fit(self, measurements: Sequence[Measurement], references: Sequence[Profile] = ()) -> FittedPredictor:
        self.references.append(references)
        self._fitted = FewShot().fit(measurements)
        return self

    def predict(self, settings: SettingArray) -> Prediction:
        self.asked.append(len(settings))
        return self._fitted.predict(settings)


def test_any_predictor_will_do_and_very_many_candidates_are_seldom_all_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortlist, "__defaults__", (60,))
    problem, spy = world.problem(Budget(power_w=7.0)), Spy()
    reference = made_up_profile(world.everything())
    known = world.everything()[::11]
    search = Search(problem, known=known, references=[reference], predictor=spy, least_gain=0.0)
    while len(search.measurements) < len(known) + 6:
        ask = search.ask()
        assert ask is not None
        search.tell(world.truth(ask.setting))
    assert spy.asked[0] == spy.asked[5] == len(problem)
    assert all(count <= 60 for count in (*spy.asked[1:5], *spy.asked[6:]))
    assert all(list(given) == [reference] for given in spy.references)
    assert search.under(problem).predictor is spy


@pytest.mark.slow
def test_a_plan_over_175392_settings_takes_seconds_and_little_memory() -> None:
    grids = np.meshgrid(
        np.arange(1, 9),
        np.linspace(115, 2265, 29),
        np.linspace(115, 1377, 14),
        np.linspace(204, 2133, 9),
        indexing="ij",
    )
    modes = np.stack([grid.ravel() for grid in grids], axis=1)
    candidates = SettingArray.product(("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz"), modes, [4, 8, 16, 32, 64, 128])
    assert len(candidates) == 29_232 * 6
    rng = np.random.default_rng(0)
    measured = [_made_up(candidates[int(row)]) for row in rng.permutation(len(candidates))[:51]]
    problem = Problem.of(candidates, Budget(power_w=20.0), world.Curve())

    def plan() -> None:
        choose_setting(*forecast(problem, measured[:50]), measurements=measured[:50])

    tracemalloc.start()
    plan()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.0e9

    # The processor's time, of all threads: the machine that runs the tests may have other things to do. Twice the aim
    # of 3 s and 0.5 s, because memory is shared with those other things.
    started = time.process_time()
    plan()
    assert time.process_time() - started < 6.0
    search = Search(problem, known=measured[:50])
    search.ask()
    search.tell(measured[50])
    started = time.process_time()
    search.ask()
    assert time.process_time() - started < 1.0


def _made_up(setting: Setting) -> Measurement:
    mode = setting.mode.knobs()
    step_s = (
        0.4 * setting.batch_size / mode["gpu_mhz"] + 20.0 / mode["cpu_mhz"] / mode["cpu_cores"] + 10 / mode["mem_mhz"]
    )
    power_w = (
        5 + 15 * (mode["gpu_mhz"] / 1377) ** 2 + mode["cpu_cores"] * mode["cpu_mhz"] / 2265 + mode["mem_mhz"] / 1000
    )
    return Measurement(Setting(PowerMode.of(mode), setting.batch_size), step_s=step_s, power_w=power_w)


def test_a_glimpse_of_a_setting_gives_way_to_a_measurement_and_never_stands_beside_one() -> None:
    search = Search(world.problem(Budget(power_w=8.0)))
    ask = search.ask()
    assert ask is not None
    measured = world.truth(ask.setting)
    glimpse = replace(measured, step_s=2 * measured.step_s, power_w=9.0, peak_w=9.0, steps=1)
    search.tell(glimpse)
    assert search.measurements == (glimpse,)
    search = search.under(world.problem(Budget(power_w=20.0)))
    assert search.measurements == (glimpse,), "it is known to the search for other watts too"
    search.tell(measured)
    assert search.measurements == (measured,)
    search.tell(glimpse)
    assert search.measurements == (measured,)
    assert search.best is not None
    assert search.best.measurement == measured
