"""What travels is read with care: one board's nonsense is left out, and nobody else's round ends by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from underwatt.errors import InputError
from underwatt.fleet.messages import Report, profile_text, read_references
from underwatt.records import DeviceInfo, Measurement, PowerMode, Profile, Setting, WorkloadInfo

REPORT = Report(
    steps=5,
    samples=40,
    data=100,
    progress=0.5,
    busy_s=6.0,
    train_s=5.0,
    energy_j=20.0,
    power_w=4.0,
    budget_w=math.inf,
    front_batch=(8,),
    front_w=(4.0,),
    front_s=(0.01,),
    front_s_high=(0.02,),
)
PROFILE = Profile(
    DeviceInfo("virtual", "Nano", "nano", "virtual:nano", simulated=True),
    WorkloadInfo("resnet18", "resnet18"),
    (Measurement(Setting(PowerMode(), 8), step_s=0.1, power_w=4.0),),
)
UNREADABLE = ["no JSON", "[]", '{"device": 3}', "[" * 100_000, '{"measurements": [{"setting": null}]}']


@pytest.mark.parametrize("profile", UNREADABLE)
def test_an_unreadable_profile_is_left_out_of_a_report(profile: str) -> None:
    found = Report.read(replace(REPORT, profile=profile).as_record())
    assert found == REPORT
    readable = replace(REPORT, profile=profile_text(PROFILE))
    assert Report.read(readable.as_record()) == readable


def test_unreadable_references_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    assert read_references([*UNREADABLE, profile_text(PROFILE)]) == [PROFILE]
    assert len(caplog.records) == len(UNREADABLE)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"budget_w": math.nan},
        {"budget_w": 0.0},
        {"steps": -1},
        {"data": -5},
        {"front_batch": (0,)},
        {"front_w": (-1.0,)},
        {"front_s_high": (math.inf,)},
        {"train_s": math.inf},
        {"train_s": 600.0},  # in a message that took 6 s
    ],
)
def test_numbers_that_cannot_be_are_refused(nonsense: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Report.read(replace(REPORT, **nonsense).as_record())
    assert Report.read(REPORT.as_record()) == REPORT


@pytest.mark.parametrize("nonsense", [{"step_s": -1.0}, {"step_s": math.nan}, {"power_w": 0.0}])
def test_measurements_that_cannot_be_are_not_borrowed(nonsense: dict[str, float]) -> None:
    wrong = replace(PROFILE, measurements=(*PROFILE.measurements, replace(PROFILE.measurements[0], **nonsense)))
    assert read_references([profile_text(wrong)]) == [PROFILE]
