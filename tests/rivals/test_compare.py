from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import planning_world as world
import pytest
from nano_world import COST, board, settings_of

from underwatt.budget import Budget, Watts
from underwatt.device.registry import open_device
from underwatt.errors import InputError
from underwatt.planning.choice import choose_setting
from underwatt.planning.problem import Goal
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Prediction, Setting, Status, to_json
from underwatt.rivals.compare import (
    LARGEST,
    MIDDLE,
    PUBLISHED,
    Alternative,
    Truth,
    as_alternative,
    cannot_keep,
    compare,
    joined,
    truth_of,
)

if TYPE_CHECKING:
    from pathlib import Path


BUDGET = Budget(power_w=7.0)
EVERYTHING = world.everything()
STEP_S = np.array([m.step_s for m in EVERYTHING])
POWER_W = np.array([m.power_w for m in EVERYTHING])
TRUTH = Truth("simulated truth", STEP_S, POWER_W)


def predicted(*, slower: float = 1.0, std: float = 0.01) -> Prediction:
    spread = np.full(len(STEP_S), std)
    return Prediction(np.log(slower * STEP_S), spread, np.log(POWER_W), spread)


def by_name(found: tuple[Alternative, ...]) -> dict[str, Alternative]:
    return {item.name: item for item in found}


def test_every_rule_is_there_and_judged_by_one_outlook() -> None:
    stock = {"5W": PowerMode(cpu_mhz=500.0, gpu_mhz=400.0), "MAXN": PowerMode(cpu_mhz=2000.0, gpu_mhz=1200.0)}
    problem = world.problem(BUDGET)
    found = by_name(compare(problem, predicted(), EVERYTHING[::7], stock_modes=stock, truth=TRUTH))
    assert list(found) == [
        "largest batch that fits, highest clock",
        "middle batch or less, highest clock",
        "vendor's 5W",
        "maximum mode",
        "most samples/s",
        PUBLISHED,
        "oracle (simulated truth)",
    ]
    for item in found.values():
        true = world.truth(item.setting)
        steps = math.exp(world.Curve().predict([item.setting.batch_size])[0][0]) / item.setting.batch_size
        assert item.time_s == pytest.approx(true.step_s * steps)
        assert item.power_w == pytest.approx(true.power_w)
        assert item.energy_j == pytest.approx(item.time_s * item.power_w)
        assert (item.fits == "over") == (true.power_w > 7.0)
    assert found["maximum mode"].fits == "over"
    assert found["oracle (simulated truth)"].known == "truth"
    json.dumps(to_json(tuple(found.values())), allow_nan=False)


def test_what_was_measured_counts_as_measured() -> None:
    problem = world.problem(BUDGET)
    measured = (world.slower(world.truth(world.at(2000.0, 1200.0, 16)), 3.0),)
    found = by_name(compare(problem, predicted(), measured))
    item = found["maximum mode"]
    assert item.known == "measured"
    assert item.time_s == pytest.approx(3 * compare(problem, predicted(), ())[2].time_s)
    assert found["largest batch that fits, highest clock"].known == "predicted"


def test_a_measured_interval_decides_whether_it_fits() -> None:
    problem = world.problem(BUDGET)
    chosen = by_name(compare(problem, predicted(std=1e-3), ()))["middle batch or less, highest clock"]
    measured = replace(world.truth(chosen.setting), power_w_ci95=7.01 - chosen.power_w)
    again = by_name(compare(problem, predicted(std=1e-3), [measured]))["middle batch or less, highest clock"]
    assert again.setting != chosen.setting


def test_unsure_predictions_are_risky() -> None:
    [item] = [
        found for found in compare(world.problem(BUDGET), predicted(std=0.5), ()) if found.name == "most samples/s"
    ]
    assert item.fits == "risky"


def test_batches_that_do_not_fit_memory_are_left_out() -> None:
    problem = world.problem(BUDGET)
    too_large = Measurement(world.at(500.0, 200.0, 32), status=Status.OUT_OF_MEMORY)
    found = by_name(compare(problem, predicted(), [*EVERYTHING[::7], too_large], truth=TRUTH))
    assert found["largest batch that fits, highest clock"].setting.batch_size == 16
    assert all(item.setting.batch_size < 32 for item in found.values())


def test_a_batch_that_never_gets_there_is_shown_as_never() -> None:
    problem = world.problem(BUDGET, curve=world.Curve(hopeless=True))
    found = by_name(compare(problem, predicted(), EVERYTHING, truth=TRUTH))
    for name in ("largest batch that fits, highest clock", "most samples/s"):
        assert found[name].setting.batch_size == 64
        assert found[name].time_s == math.inf
    assert found[PUBLISHED].setting.batch_size < 64
    assert found["oracle (simulated truth)"].setting.batch_size < 64
    assert to_json(found["most samples/s"])["time_s"] is None


def test_the_published_method_sets_clock_and_batch_alone() -> None:
    problem = world.problem(BUDGET)
    for measured in ((), EVERYTHING[::9], EVERYTHING):  # of whatever else was measured it knows nothing
        found = by_name(compare(problem, predicted(), measured))[PUBLISHED]
        assert found.setting.mode.cpu_mhz == max(world.CPU_MHZ)
        offered = [(m, at) for at, m in enumerate(EVERYTHING) if m.setting.mode.cpu_mhz == max(world.CPU_MHZ)]
        times = {m.setting: m.step_s * math.exp(problem.log_steps[at]) for m, at in offered if m.power_w <= 7.0}
        assert found.time_s == pytest.approx(min(times.values()))


def test_powertrain_is_taken_at_its_word_and_judged_by_ours() -> None:
    problem = world.problem(BUDGET)
    optimist = replace(predicted(), log_power_w=np.log(0.5 * POWER_W))
    found = by_name(compare(problem, predicted(), (), powertrain=optimist))["PowerTrain's choice"]
    assert world.truth(found.setting).power_w > 7.0
    assert found.fits == "over"
    assert found.power_w == pytest.approx(world.truth(found.setting).power_w)


def test_the_oracle_is_the_best_by_the_truth_and_changes_nothing_else() -> None:
    problem = world.problem(BUDGET)
    off = predicted(slower=2.0)
    with_truth = compare(problem, off, (), truth=TRUTH)
    assert with_truth[:-1] == compare(problem, off, ())
    allowed = [m for m in EVERYTHING if m.power_w <= 7.0]
    samples = {b: float(np.exp(world.Curve().predict([b])[0][0])) for b in world.BATCH_SIZES}
    best = min(allowed, key=lambda m: m.step_s / m.setting.batch_size * samples[m.setting.batch_size])
    assert with_truth[-1].setting == best.setting


def test_the_oracle_keeps_every_bound_and_the_goal() -> None:
    def oracle(goal: Goal, **bounds: float) -> Alternative:
        return compare(world.problem(Budget(**bounds), goal=goal), predicted(), (), truth=TRUTH)[-1]

    soonest = oracle(Goal.SOONEST, power_w=20.0)
    thriftiest = oracle(Goal.LEAST_ENERGY, power_w=20.0)
    assert thriftiest.energy_j < soonest.energy_j
    deadline_s = (soonest.time_s * thriftiest.time_s) ** 0.5
    between = oracle(Goal.LEAST_ENERGY, power_w=20.0, deadline_s=deadline_s)
    assert between.time_s <= deadline_s < thriftiest.time_s
    assert thriftiest.energy_j < between.energy_j
    impossible = world.problem(Budget(power_w=7.0, energy_j=1.0))
    assert "oracle (simulated truth)" not in by_name(compare(impossible, predicted(), (), truth=TRUTH))


def test_there_is_no_oracle_for_peaks_nor_where_nothing_is_known() -> None:
    peak = world.problem(Budget(power_w=9.0, watts=Watts.PEAK))
    assert not any(item.known == "truth" for item in compare(peak, predicted(), EVERYTHING[::7], truth=TRUTH))
    unknown = Truth("recorded table", np.full(len(STEP_S), np.nan), np.full(len(STEP_S), np.nan))
    found = compare(world.problem(BUDGET), predicted(), (), truth=unknown)
    assert not any(item.known == "truth" for item in found)
    with pytest.raises(InputError):
        compare(world.problem(BUDGET), predicted(), (), truth=Truth("short", STEP_S[1:], POWER_W[1:]))


def test_rules_do_not_pause_and_the_oracle_may() -> None:
    problem = replace(world.problem(BUDGET), idle_w=2.0)
    found = by_name(compare(problem, predicted(), (), truth=TRUTH))
    assert found["maximum mode"].fits == "over"
    assert found["oracle (simulated truth)"].time_s <= compare(world.problem(BUDGET), predicted(), (), truth=TRUTH)[
        -1
    ].time_s * (1 + 1e-9)


def test_neighbours_take_the_same_form() -> None:
    plan = choose_setting(world.problem(BUDGET), predicted())
    assert plan.faster is not None
    item = as_alternative("faster neighbour", plan.faster, BUDGET)
    assert item.fits in ("risky", "over")
    assert item.known == "predicted"
    assert as_alternative("choice", plan.chosen, BUDGET).fits == "yes"


def test_a_baseline_that_cannot_keep_the_budget_is_said_and_not_a_row() -> None:
    assert cannot_keep(compare(world.problem(BUDGET), predicted(), ())) == ""
    highest = [m.power_w for m in EVERYTHING if m.setting.mode.cpu_mhz == max(world.CPU_MHZ)]
    tight = world.problem(Budget(power_w=min(highest) - 0.01))
    found = compare(tight, predicted(), ())
    assert "most samples/s" in by_name(found)
    for rule in (LARGEST, MIDDLE, PUBLISHED):
        assert rule not in by_name(found)
        assert rule in cannot_keep(found)


def test_rules_that_choose_the_same_are_one_row_but_the_truth_stays_apart() -> None:
    first = compare(world.problem(BUDGET), predicted(), ())[0]
    again, true = replace(first, name="again"), replace(first, name="oracle", known="truth")
    other = replace(first, name="other", setting=world.at(500.0, 200.0, 8))
    assert [item.name for item in joined([first, other, again, true])] == [f"{LARGEST}; again", "other", "oracle"]


def test_a_measured_mean_below_the_budget_is_not_over_only_because_its_interval_ends_above() -> None:
    truth = world.truth(world.at(2000.0, 1200.0, 16))
    measured = replace(truth, power_w=6.94, power_w_ci95=0.1)
    problem = world.problem(BUDGET)
    assert by_name(compare(problem, predicted(), [measured]))["maximum mode"].fits == "risky"
    surely = replace(measured, power_w=7.06)
    assert by_name(compare(problem, predicted(), [surely]))["maximum mode"].fits == "over"
    [seen] = [e for e in choose_setting(problem, predicted(), measurements=[measured]).front if e.measured]
    assert seen.chance_over > 0.99
    assert as_alternative("neighbour", seen, BUDGET).fits == "risky"
    assert as_alternative("neighbour", seen, Budget(power_w=7.0, energy_j=1.0)).fits == "over"
    peak = Budget(power_w=7.0, watts=Watts.PEAK)
    assert as_alternative("neighbour", seen, peak).fits == "over"


def test_the_truth_of_a_virtual_board_is_its_own() -> None:
    device, _ = board()
    candidates = settings_of(device)
    truth = truth_of(device, candidates, COST)
    assert truth is not None
    assert truth.name == "simulated truth"
    for row in np.random.default_rng(0).choice(len(candidates), 30, replace=False):
        setting = candidates[int(row)]
        if setting.batch_size == 512:
            assert np.isnan(truth.step_s[row])
            continue
        assert truth.step_s[row] == pytest.approx(device.board.true_step_s(COST, setting.mode, setting.batch_size))
        assert truth.power_w[row] == pytest.approx(device.board.true_power_w(COST, setting.mode, setting.batch_size))


def test_knobs_that_are_left_alone_stay_as_they_are() -> None:
    device, _ = board()
    setting = Setting(PowerMode(gpu_mhz=921.6), 8)
    truth = truth_of(device, SettingArray.of([setting]), COST)
    assert truth is not None
    assert truth.step_s[0] == pytest.approx(device.board.true_step_s(COST, setting.mode, 8))


def test_a_replayed_table_knows_what_it_holds(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n2,500,900,2000,100,5\n4,500,900,2000,80,6\n")
    modes = [PowerMode(cores, 500.0, 900.0, 2000.0) for cores in (2, 3, 4)]
    candidates = SettingArray.of([Setting(mode, 16) for mode in modes])
    truth = truth_of(open_device(f"replay:{table}"), candidates, None)
    assert truth is not None
    assert truth.name == "recorded table"
    assert truth.step_s.tolist() == pytest.approx([0.1, np.nan, 0.08], nan_ok=True)
    assert truth.power_w.tolist() == pytest.approx([5, np.nan, 6], nan_ok=True)


def test_nobody_knows_the_truth_otherwise() -> None:
    device, _ = board()
    candidates = settings_of(device, (8,))
    assert truth_of(None, candidates, COST) is None
    assert truth_of(device, candidates, None) is None
