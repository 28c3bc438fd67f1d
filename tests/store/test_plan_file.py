from __future__ import annotations

import copy
import json

import numpy as np
import planning_world as world
import pytest
from hypothesis import given, strategies as st

from underwatt.budget import parse_budget
from underwatt.errors import InputError
from underwatt.planning.choice import choose_setting
from underwatt.planning.problem import Goal
from underwatt.records import DeviceInfo, Prediction, WorkloadInfo
from underwatt.rivals.compare import compare
from underwatt.store.exchange import plan_of, plan_record

DEVICE = DeviceInfo("virtual", "Nano", "virtual-nano", "virtual:nano", simulated=True)
WORKLOAD = WorkloadInfo("resnet18", "abc", {"torch": "2"})


def _plan(*bounds: str, goal: Goal = Goal.SOONEST):
    problem = world.problem(parse_budget(*bounds), goal=goal)
    everything = world.everything()
    prediction = Prediction(
        np.log([m.step_s for m in everything]),
        np.full(len(everything), 0.01),
        np.log([m.power_w for m in everything]),
        np.full(len(everything), 0.01),
    )
    return choose_setting(problem, prediction, measurements=everything[::5]), compare(problem, prediction, everything)


@pytest.mark.parametrize("bounds", [("7W",), ("9W peak",), ("7W mean over 60s", "1kWh", "2h")])
def test_a_plan_comes_back_whole(bounds: tuple[str, ...]) -> None:
    plan, others = _plan(*bounds, goal=Goal.LEAST_ENERGY)
    text = json.dumps(plan_record(plan, DEVICE, WORKLOAD, others=others, per_sample=False), allow_nan=False)
    record = json.loads(text)
    assert plan_of(record) == plan
    assert record["device"]["simulated"] is True
    assert len(record["others"]) == len(others)


def _paths(value: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict):
        return [path for key, item in value.items() for path in [(*at, key), *_paths(item, (*at, key))]]
    return []


RECORD = plan_record(_plan("7W")[0], DEVICE, WORKLOAD, per_sample=True)
NEEDED = [path for path in _paths({"plan": RECORD["plan"]}) if path[-1] != "front" and "mode" not in path[:-1]]


@given(st.sampled_from(NEEDED), st.sampled_from([None, "x", [], {}]))
def test_a_damaged_plan_is_refused_or_still_a_plan(path: tuple[str, ...], junk: object) -> None:
    record = copy.deepcopy(RECORD)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    try:
        again = plan_of(record)
    except InputError:
        return
    assert again.setting.batch_size >= 1


def test_a_plan_without_its_figures_is_refused() -> None:
    record = copy.deepcopy(RECORD)
    record["plan"]["chosen"]["power_w"]["expected"] = None
    with pytest.raises(InputError, match="expected to take is missing"):
        plan_of(record)


@pytest.mark.parametrize("missing", ["chosen", "budget", "goal", "front", "reason"])
def test_what_is_missing_is_named(missing: str) -> None:
    record = copy.deepcopy(RECORD)
    del record["plan"][missing]
    with pytest.raises(InputError, match=missing):
        plan_of(record, "plan.json")
