from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import planning_world as world
import pytest
from hypothesis import given, strategies as st

from underwatt.budget import Budget, parse_budget
from underwatt.errors import BudgetError, InputError
from underwatt.planning.choice import READING_STD, choose_measured, choose_setting, forecast, front, outlook_as_known
from underwatt.planning.problem import Goal, Outlook, Problem, rows_of
from underwatt.planning.search import Search
from underwatt.predict.base import SettingArray
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, PowerMode, Prediction, Setting, Status, to_json
from underwatt.rivals.compare import Table, published
from underwatt.rivals.predictors import LookupTable
from underwatt.testing.predictors import made_up_profile


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
def test_holds_exactly_the_rows_that_nothing_beats(points: list[tuple[int, int]]) -> None:
    times, powers = np.array(points, float).T
    rows = front(times, powers)
    energies = times * powers

    def beaten(a: int, b: int) -> bool:
        no_worse = times[b] <= times[a] and powers[b] <= powers[a] and energies[b] <= energies[a]
        return bool(no_worse and (times[b] < times[a] or powers[b] < powers[a]))

    best = {(times[a], powers[a]) for a in range(len(points)) if not any(beaten(a, b) for b in range(len(points)))}
    assert [(times[row], powers[row]) for row in rows] == sorted(best)
    assert all(points.index(points[row]) == row for row in rows.tolist()), "of equal ones the first"


def test_rows_without_a_time_are_left_out() -> None:
    assert front([np.inf, 2.0, np.nan], [1.0, 5.0, 0.5]).tolist() == [1]
    assert front([], []).tolist() == []


def test_a_hundred_thousand_rows_are_quick() -> None:
    rng = np.random.default_rng(0)
    times, powers = rng.lognormal(size=(2, 175_392))
    started = time.perf_counter()
    rows = front(times, powers)
    assert time.perf_counter() - started < 1.0
    assert np.all(np.diff(times[rows]) > 0)
    assert np.all(np.diff(powers[rows]) < 0)


def _flat(count: int) -> Prediction:
    return Prediction(np.zeros(count), np.full(count, 0.3), np.zeros(count), np.full(count, 0.3))


def test_only_measured_candidates_change() -> None:
    problem = world.problem(Budget(power_w=7.0))
    measured = world.truth(world.at(1000.0, 400.0, 16))
    failed = Measurement(world.at(500.0, 200.0, 8), status=Status.FAILED)
    elsewhere = world.truth(world.at(777.0, 400.0, 16))
    outlook, known = outlook_as_known(problem, _flat(len(problem)), [measured, failed, elsewhere])
    (row,) = np.flatnonzero(known)
    assert problem.candidates[int(row)] == measured.setting
    assert np.exp(outlook.log_power_w[row]) == pytest.approx(measured.power_w)
    assert np.exp(outlook.log_time_s[row] - problem.log_steps[row]) == pytest.approx(measured.step_s)
    assert outlook.step_std[row] == READING_STD
    assert np.all(outlook.log_power_w[~known] == 0)
    assert np.all(outlook.power_std[~known] == 0.3)


def test_a_recorded_interval_and_repeats_say_how_sure_it_is() -> None:
    problem = world.problem(Budget(power_w=7.0))
    one = replace(
        world.truth(world.at(1000.0, 400.0, 16)), power_w_ci95=0.196 * world.truth(world.at(1000.0, 400.0, 16)).power_w
    )
    for count in (1, 4):
        outlook, known = outlook_as_known(problem, _flat(len(problem)), [one] * count)
        assert outlook.power_std[known][0] == pytest.approx(0.1 / count**0.5)


def test_predictions_are_left_as_they_were() -> None:
    problem = world.problem(Budget(power_w=7.0))
    prediction = _flat(len(problem))
    outlook_as_known(problem, prediction, world.everything()[:5])
    assert np.all(prediction.log_power_w == 0)


def test_every_chooser_means_the_same_by_keeping_a_budget() -> None:
    settings = [Setting(PowerMode(gpu_mhz=float(mhz)), 8) for mhz in (300, 600, 900)]
    measured = [
        Measurement(setting, 1 / setting.mode.gpu_mhz, watts, power_w_ci95=0.2)  # type: ignore[operator]
        for setting, watts in zip(settings, (6.0, 9.7, 9.94), strict=True)
    ]
    problem = Problem.of(SettingArray.of(settings), parse_budget("10W"))
    logs = [np.log([getattr(m, name) for m in measured]) for name in ("step_s", "power_w")]
    guess = Prediction(logs[0], np.full(3, 0.1), logs[1], np.full(3, 0.1))
    kept = settings[1]  # 9.94 ± 0.2 W might be over, 9.7 ± 0.2 W is not
    assert choose_measured(problem, guess, measured).setting == kept
    assert choose_setting(problem, guess, measurements=measured).setting == kept
    row = published(Table.measured(problem, measured), 10.0)
    assert row is not None
    assert settings[row] == kept
    assert Search(problem).run(lambda s: measured[settings.index(s)]).best.measurement.setting == kept


def _predict(problem: Problem, std: float = 0.03) -> Prediction:
    table = world.everything()
    stds = np.full(len(problem), std)
    return Prediction(np.log([m.step_s for m in table]), stds, np.log([m.power_w for m in table]), stds)


def test_chooses_the_fastest_that_keeps_the_budget_at_the_risk() -> None:
    problem = world.problem(Budget(power_w=7.0))
    plan = choose_setting(problem, _predict(problem), risk=0.05)
    assert plan.chosen.chance_over <= 0.05
    assert plan.setting == plan.chosen.setting
    within = [m for m in world.everything() if m.power_w * math.exp(1.645 * 0.03) <= 7.0]
    samples = {size: math.exp(world.Curve().predict([size])[0][0]) for size in world.BATCH_SIZES}
    best_s = min(m.step_s / m.setting.batch_size * samples[m.setting.batch_size] for m in within)
    assert plan.chosen.time_s.expected == pytest.approx(best_s)


def test_more_risk_is_never_slower() -> None:
    problem = world.problem(Budget(power_w=7.0))
    times = [
        choose_setting(problem, _predict(problem, 0.1), risk=risk).chosen.time_s.expected for risk in (0.01, 0.1, 0.4)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_intervals_hold_the_expectation_and_widen_with_doubt() -> None:
    problem = world.problem(Budget(power_w=7.0))
    narrow, wide = (choose_setting(problem, _predict(problem, std)).chosen.power_w for std in (0.01, 0.05))
    for interval in (narrow, wide):
        assert interval.low < interval.expected < interval.high
    assert wide.high / wide.low > narrow.high / narrow.low
    unsure = world.problem(Budget(power_w=7.0), curve=world.Curve(std=0.5))
    time = choose_setting(unsure, _predict(unsure, 0.01)).chosen.time_s
    assert time.high / time.low > 4


def test_neighbours_lie_on_the_front_on_either_side() -> None:
    problem = world.problem(Budget(power_w=12.0))
    plan = choose_setting(problem, _predict(problem))
    assert plan.faster is not None
    assert plan.thriftier is not None
    assert plan.faster.time_s.expected < plan.chosen.time_s.expected
    assert plan.faster.power_w.expected > plan.chosen.power_w.expected
    assert plan.thriftier.time_s.expected > plan.chosen.time_s.expected
    assert plan.thriftier.power_w.expected < plan.chosen.power_w.expected
    assert plan.thriftier.energy_j.expected < plan.chosen.energy_j.expected
    assert plan.faster in plan.front
    assert plan.thriftier in plan.front
    times = [point.time_s.expected for point in plan.front]
    powers = [point.power_w.expected for point in plan.front]
    assert times == sorted(times)
    assert powers == sorted(powers, reverse=True)


def test_a_measured_setting_counts_as_measured() -> None:
    problem = world.problem(Budget(power_w=7.0))
    plan = choose_setting(problem, _predict(problem))
    hungry = replace(world.truth(plan.setting), power_w=7.5)
    again = choose_setting(problem, _predict(problem), measurements=[hungry])
    assert again.setting != plan.setting
    confirmed = choose_setting(problem, _predict(problem), measurements=[world.truth(plan.setting)])
    assert confirmed.setting == plan.setting
    assert confirmed.chosen.measured
    assert "measured" in confirmed.reason
    assert confirmed.chosen.power_w.high - confirmed.chosen.power_w.low < 0.2


def test_out_of_memory_batches_are_left_out() -> None:
    problem = world.problem(Budget(power_w=7.0))
    chosen = choose_setting(problem, _predict(problem)).setting.batch_size
    full = Measurement(world.at(500.0, 200.0, chosen), status=Status.OUT_OF_MEMORY)
    assert choose_setting(problem, _predict(problem), measurements=[full]).setting.batch_size < chosen
    nothing = Measurement(world.at(500.0, 200.0, 4), status=Status.OUT_OF_MEMORY)
    with pytest.raises(InputError, match="memory"):
        choose_setting(problem, _predict(problem), measurements=[nothing])


def test_the_smallest_feasible_budget_is_named_and_feasible() -> None:
    problem = world.problem(Budget(power_w=2.0))
    with pytest.raises(BudgetError) as error:
        choose_setting(problem, _predict(problem))
    named = error.value.hint.split("budget to ")[1].split(",")[0]
    raised = world.problem(parse_budget(named))
    assert choose_setting(raised, _predict(raised)).chosen.chance_over <= 0.05


@pytest.mark.parametrize("bounds", [{"deadline_s": 1.0}, {"energy_j": 1.0}])
def test_other_bounds_that_cannot_be_kept_are_named(bounds: dict[str, float]) -> None:
    problem = world.problem(Budget(power_w=7.0, **bounds))
    with pytest.raises(BudgetError, match="deadline" if "deadline_s" in bounds else "energy"):
        choose_setting(problem, _predict(problem))


def test_goals_and_bounds_trade_time_for_energy() -> None:
    free = world.problem(Budget(power_w=20.0))
    soonest = choose_setting(free, _predict(free)).chosen
    least = world.problem(Budget(deadline_s=2 * soonest.time_s.expected), goal=Goal.LEAST_ENERGY)
    thrifty = choose_setting(least, _predict(least)).chosen
    assert thrifty.energy_j.expected < soonest.energy_j.expected
    assert thrifty.time_s.expected <= 2 * soonest.time_s.expected
    tight = world.problem(Budget(energy_j=0.95 * soonest.energy_j.expected))
    assert choose_setting(tight, _predict(tight, 0.01)).chosen.energy_j.expected <= 0.95 * soonest.energy_j.expected


def test_a_plan_is_json_and_says_why() -> None:
    problem = world.problem(parse_budget("7W"))
    plan = choose_setting(problem, _predict(problem))
    assert "soonest" in plan.reason
    assert "7 W mean" in plan.reason
    plain = to_json(plan)
    assert plain["chosen"]["setting"]["batch_size"] == plan.setting.batch_size
    assert plain["goal"] == "soonest"


def test_works_on_what_the_predictor_says() -> None:
    problem = world.problem(Budget(power_w=7.0))
    measured = world.everything()[::7]
    plan = choose_setting(problem, FewShot().fit(measured).predict(problem.candidates), measurements=measured)
    assert world.truth(plan.setting).power_w <= 7.0 * 1.02


def test_nonsense_is_refused() -> None:
    problem = world.problem(Budget(power_w=7.0))
    with pytest.raises(InputError):
        choose_setting(problem, _predict(problem), risk=0.0)
    short = Prediction(*(np.zeros(3) for _ in range(4)))
    with pytest.raises(InputError):
        choose_setting(problem, short)


def test_the_plan_of_a_search_is_the_setting_it_ended_with() -> None:
    for budget in (parse_budget("7W"), parse_budget("7W peak")):
        problem = world.problem(budget)
        found = Search(problem).run(world.truth)
        plan = choose_measured(problem, _predict(problem), found.measurements)
        assert plan.setting == found.best.measurement.setting
        assert plan.chosen.measured
        assert plan.chosen.time_s.expected == pytest.approx(found.best.time_s)
        assert "measured" in plan.reason
    with pytest.raises(BudgetError):
        choose_measured(world.problem(Budget(power_w=1.0)), _predict(problem), found.measurements)


def test_a_measured_setting_exactly_at_the_budget_fits() -> None:
    measured = world.truth(world.at(1000.0, 400.0, 16))
    problem = world.problem(Budget(power_w=measured.power_w))
    assert choose_measured(problem, _predict(problem), [measured]).setting == measured.setting


def test_a_budget_that_a_measured_setting_keeps_exactly_is_kept() -> None:
    # 7.3 and the like: the log of a bound and that of a measurement may round either way.
    for power_w in (5.5, 7.3, 9.1):
        lowest = world.at(500.0, 200.0, 4)
        measured = replace(world.truth(lowest), power_w=power_w)
        everything = [replace(m, power_w=max(m.power_w, power_w)) for m in world.everything() if m.setting != lowest]
        problem = world.problem(Budget(power_w=power_w))
        plan = choose_setting(problem, _predict(problem), measurements=[measured, *everything])
        assert plan.chosen.power_w.expected == pytest.approx(power_w)
        assert plan.chosen.chance_over < 1e-6
        tight = world.problem(Budget(power_w=power_w * (1 - 1e-7)))
        with pytest.raises(BudgetError, match=r"smallest feasible power is .* W \(measured\)") as refused:
            choose_setting(tight, _predict(tight), measurements=[measured, *everything])
        assert "That is without pauses" in str(refused.value.hint)


def test_a_smallest_budget_that_nobody_measured_is_called_predicted() -> None:
    problem = world.problem(Budget(power_w=2.0))
    with pytest.raises(BudgetError, match=r"\(predicted"):
        choose_setting(problem, _predict(problem))


def test_bounds_that_only_exclude_each_other_are_an_error_and_not_a_crash() -> None:
    free = world.problem(Budget(power_w=50.0))
    fastest_s = choose_setting(free, _predict(free, 0.01)).chosen.time_s.high
    for budget in (Budget(power_w=5.0, deadline_s=fastest_s), Budget(power_w=5.0, deadline_s=fastest_s, energy_j=1.0)):
        problem = world.problem(budget)
        with pytest.raises(BudgetError):
            choose_setting(problem, _predict(problem, 0.01))


def test_half_of_the_trainings_take_longer_than_the_middle_of_the_interval() -> None:
    std = 0.6
    problem = world.problem(Budget(power_w=7.0), curve=world.Curve(std=std))
    chosen = choose_setting(problem, _predict(problem, 1e-6)).chosen
    sure = world.problem(Budget(power_w=7.0))
    median_s = {point.setting: point.time_s.expected for point in choose_setting(sure, _predict(sure, 1e-6)).front}[
        chosen.setting
    ]
    assert math.sqrt(chosen.time_s.low * chosen.time_s.high) == pytest.approx(median_s)
    assert chosen.time_s.expected == pytest.approx(median_s * math.exp(std**2 / 2)), "the mean counts unlucky trainings"
    assert math.sqrt(chosen.energy_j.low * chosen.energy_j.high) < chosen.energy_j.expected
    at_median = world.problem(Budget(deadline_s=median_s), curve=world.Curve(std=std))
    outlook = Outlook.of(at_median, _predict(at_median, 1e-6))
    row = int(rows_of(at_median.candidates, chosen.setting)[0])
    assert outlook.chance_to_fit(at_median.budget)[row] == pytest.approx(0.5, abs=1e-3)


def test_without_convergence_the_reason_speaks_of_throughput() -> None:
    problem = Problem.of(world.candidates(), Budget(power_w=7.0))
    reason = choose_setting(problem, _predict(problem)).reason
    assert "trains the most samples a second" in reason
    assert "target" not in reason


def test_measured_peaks_replace_the_usual_margin() -> None:
    problem = world.problem(parse_budget("7W peak"))
    plan = choose_setting(problem, _predict(problem, 0.001), measurements=world.everything()[:3])
    spiky = replace(world.truth(plan.setting), peak_w=9.0)
    again = choose_setting(problem, _predict(problem, 0.001), measurements=[*world.everything()[:3], spiky])
    assert again.setting != plan.setting


def test_of_repeats_the_hungriest_decides() -> None:
    problem = world.problem(Budget(power_w=7.0))
    once = world.truth(choose_setting(problem, _predict(problem)).setting)
    repeats = [once, replace(once, power_w=7.2)]
    with pytest.raises(BudgetError):
        choose_measured(problem, _predict(problem), repeats)


def test_a_plan_comes_from_measurements_and_references() -> None:
    reference = made_up_profile([world.slower(m, 2.0) for m in world.everything()])
    measured = world.everything()[::11]
    problem, prediction = forecast(world.problem(Budget(power_w=7.0)), measured, [reference])
    plan = choose_setting(problem, prediction, measurements=measured)
    assert world.truth(plan.setting).power_w <= 7.1


def test_neighbours_of_a_choice_that_others_are_predicted_to_beat_are_what_they_say() -> None:
    """A measured choice need not lie on the front: what is predicted to be faster and draw less is no neighbour."""
    measured = world.everything()[::5]
    problem = world.problem(Budget(power_w=7.0))
    for goal in Goal:
        plan = choose_measured(replace(problem, goal=goal), _predict(problem, 0.3), measured)
        chosen = plan.chosen
        if plan.faster is not None:
            assert plan.faster.time_s.expected < chosen.time_s.expected
            assert plan.faster.power_w.expected > chosen.power_w.expected
        if plan.thriftier is not None:
            assert plan.thriftier.power_w.expected < chosen.power_w.expected
            assert plan.thriftier.energy_j.expected < chosen.energy_j.expected
            assert plan.thriftier.time_s.expected > chosen.time_s.expected
        beaten = [p for p in plan.front if p.time_s.expected < chosen.time_s.expected]
        assert any(p.power_w.expected < chosen.power_w.expected for p in beaten) or goal is Goal.LEAST_ENERGY


def test_another_measurement_changes_the_plan() -> None:
    problem, measured = world.problem(Budget(power_w=7.0)), list(world.everything()[::11])
    first = choose_setting(*forecast(problem, measured), measurements=measured)
    measured.append(Measurement(first.setting, step_s=world.truth(first.setting).step_s, power_w=9.0))
    assert choose_setting(*forecast(problem, measured), measurements=measured).setting != first.setting


def test_a_predictor_that_knows_only_what_was_measured_chooses_among_that() -> None:
    everything, measured = world.problem(Budget(power_w=7.0)), world.everything()[::3]
    problem, prediction = forecast(everything, measured, predictor=LookupTable())
    assert len(problem) == len(prediction) == len(measured)
    plan = choose_setting(problem, prediction, measurements=measured)
    samples = {size: math.exp(world.Curve().predict([size])[0][0]) for size in world.BATCH_SIZES}
    fitting = [m for m in measured if everything.budget.allows(m)]
    best = min(fitting, key=lambda m: m.step_s / m.setting.batch_size * samples[m.setting.batch_size])
    assert plan.setting == best.setting
