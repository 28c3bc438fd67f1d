from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st
from test_store import DEVICE, WORKLOAD, possible

from underwatt.errors import InputError
from underwatt.records import ConvergenceRun, Measurement, PowerMode, Profile, Setting, to_json
from underwatt.store.exchange import read_file, write_profile_with_convergence

if TYPE_CHECKING:
    from pathlib import Path

RUNS = (ConvergenceRun(8, 0.9, 1e4, 3, 1e-3), ConvergenceRun(64, 0.9, float("nan")))
PLAN = {"underwatt": "plan", "device": to_json(DEVICE), "workload": to_json(WORKLOAD), "plan": {"any": "thing"}}


@settings(deadline=None)
@given(st.lists(possible, max_size=5))
def test_a_profile_with_its_convergence_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, items: list[Measurement]
) -> None:
    profile = Profile(DEVICE, WORKLOAD, tuple(items))
    path = tmp_path_factory.mktemp("exchange") / "both.json"
    with path.open("w", encoding="utf-8") as file:
        write_profile_with_convergence(profile, RUNS, file)
    found = read_file(path)
    assert repr(found.profiles) == repr([profile])
    assert repr(found.convergence) == repr([(WORKLOAD, RUNS)])
    assert found.plans == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_plan_is_taken_as_it_is(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN), encoding=encoding)
    assert read_file(path).plans == [PLAN]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"underwatt": "plan"}', "for which device"),
        (json.dumps({**PLAN, "device": {"name": "only"}}), "for which device"),
        (json.dumps({**PLAN, "underwatt": "recipe"}), "no profile, no plan and no check"),
        ('{"a": 1}', "no profile, no plan and no check"),
        ("{", "cannot be read as JSON"),
        ('{"a": ' + "[" * 20_000, "cannot be read as JSON"),
        (json.dumps({**PLAN, "underwatt": "profile"}), "damaged profile"),
        (json.dumps({**PLAN, "underwatt": "profile", "measurements": [1], "convergence": []}), "damaged profile"),
    ],
)
def test_other_json_is_an_input_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_file(path)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("measurements", "power_w", "much", r"damaged profile \(Profile\.measurements\[0\]\.power_w cannot be 'much'"),
        ("measurements", "steps", "3", r"steps cannot be '3'"),
        ("measurements", "setting", None, r"setting cannot be None"),
        ("convergence", "target", "0.9", r"damaged profile \(convergence\[0\]\.target cannot be '0\.9'"),
        ("convergence", "batch_size", 1.5, r"batch_size cannot be 1\.5"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, part: str, field: str, value: object, message: str) -> None:
    path = tmp_path / "both.json"
    profile = Profile(DEVICE, WORKLOAD, (Measurement(Setting(PowerMode(gpu_mhz=1.0), 8), 0.1, 5.0),))
    with path.open("w", encoding="utf-8") as file:
        write_profile_with_convergence(profile, RUNS, file)
    record = json.loads(path.read_text())
    record[part][0][field] = value
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        read_file(path)


@settings(deadline=None)
@given(st.text(max_size=100))
def test_arbitrary_text_in_braces_is_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("exchange") / "any.json"
    path.write_text("{" + text, encoding="utf-8", errors="replace", newline="")
    with pytest.raises(InputError):
        read_file(path)
