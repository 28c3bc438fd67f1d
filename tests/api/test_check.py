from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import underwatt
from underwatt.api.check import CheckProgress
from underwatt.api.lookup import spread_settings
from underwatt.device.base import permitted_space
from underwatt.device.session import Session
from underwatt.drivers.check import Level, read_check
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.device import VirtualJetson, open_virtual
from underwatt.errors import ApplyError, DeviceBusyError, SensorError
from underwatt.jobs.load import LOAD_BATCH_SIZES
from underwatt.records import PowerMode, PowerSample, Profile
from underwatt.store.store import Store

BUDGETS = ("6W", "7W", "8W", "9W", "10W")


def choices(store: Path) -> list[str]:
    """What is chosen under each budget, or why nothing is."""
    found = []
    for budget in BUDGETS:
        try:
            found.append(str(underwatt.plan(budget, store=store).chosen.setting))
        except underwatt.UnderwattError as exc:
            found.append(type(exc).__name__)
    return found


def test_without_set_nothing_is_changed_and_the_sensor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: VirtualJetson, mode: PowerMode) -> None:
        raise AssertionError(f"{mode} was set")

    monkeypatch.setattr(VirtualJetson, "apply", refuse)
    found = underwatt.check("virtual:nano")
    spec = BOARDS["nano"].sensor
    assert found.sensor.lag_s == pytest.approx(spec.lag_s, rel=0.3)
    assert found.sensor.period_s == pytest.approx(spec.window_s, rel=0.3)
    assert found.load_w > found.idle_w > 0
    assert list(found.rails_w) == [rail.name for rail in BOARDS["nano"].rails]
    assert found.rails_w["POM_5V_IN"] == pytest.approx(found.idle_w, rel=0.1)
    assert not found.trials
    assert not found.measurements
    assert found.verdict.level is Level.READY
    assert "underwatt check --set" in found.verdict.text


@pytest.mark.parametrize("board", ["nano", "orin-agx"])
def test_with_set_each_knob_is_moved_to_both_ends_and_put_back(board: str) -> None:
    device = open_virtual(board)
    before = device.board.mode
    found = underwatt.check(device, set_knobs=True)
    assert device.board.mode == before
    assert [trial.knob for trial in found.trials] == [knob.name for knob in device.space.knobs]
    for trial, knob in zip(found.trials, device.space.knobs, strict=True):
        assert trial.put_back
        assert [move.asked for move in trial.moves] == [knob.values[0], knob.values[-1]]
        assert [move.ran for move in trial.moves] == [knob.values[0], knob.values[-1]]
        low, high = trial.moves
        assert 0 < low.power_w <= 1.02 * high.power_w
    assert len([m for m in found.measurements if m.usable]) == 12
    assert found.verdict.level is Level.READY
    assert "12 settings measured" in found.verdict.text


def test_its_file_as_a_device_gives_the_same_plan(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    device = open_virtual("orin-nano")
    found = underwatt.check(device, set_knobs=True, output=file)
    with Store(tmp_path / "board.db") as store:
        store.take_in([Profile(device.info, found.load, found.measurements)], [])
    underwatt.import_file(file, store=tmp_path / "file.db")
    there, here = choices(tmp_path / "board.db"), choices(tmp_path / "file.db")
    assert there == here
    assert len(set(here)) > 2


def test_a_profile_of_its_file_asks_for_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    found = underwatt.check("virtual:nano", set_knobs=True, output=file)
    device = underwatt.open_device(f"check:{file}")
    wanted = spread_settings(permitted_space(device), LOAD_BATCH_SIZES, 12)
    assert set(wanted) == {m.setting for m in found.measurements}
    assert read_check(file)[0] == found


def test_what_happens_is_told_before_it_takes_long() -> None:
    events: list[object] = []
    underwatt.check("virtual:nano", set_knobs=True, listener=events.append)
    told = [event for event in events if isinstance(event, CheckProgress)]
    assert [event.done for event in told] == sorted(event.done for event in told)
    assert {event.what.split()[0] for event in told} == {"reading", "looking", "watching", "moving", "measuring"}
    assert told[-1].done == told[-1].total - 1  # the load itself was the first of the last
    assert math.isfinite(told[-1].left_s)


class Silent(VirtualJetson):
    def read_power(self) -> PowerSample:
        raise SensorError("No power sensor found on this board.", hint="Mount /sys.")


def test_a_board_whose_power_cannot_be_read_is_not_usable() -> None:
    found = underwatt.check(Silent(open_virtual("nano").board), set_knobs=True)
    assert found.verdict.level is Level.UNUSABLE
    assert "No power sensor found" in found.verdict.text
    assert not found.trials
    json.loads(found.to_text())


class Stubborn(VirtualJetson):
    """Takes a clock and cannot be brought back."""

    def restore(self, snapshot: object) -> None:
        raise ApplyError("The file is read-only now.")


def test_what_cannot_be_put_back_is_the_verdict_and_the_file_is_still_made() -> None:
    found = underwatt.check(Stubborn(open_virtual("nano").board), set_knobs=True)
    assert found.verdict.level is Level.UNUSABLE
    assert "could not be put back" in found.verdict.text
    assert any("underwatt restore" in remedy for remedy in found.verdict.remedies)


class Deaf(VirtualJetson):
    """Takes a GPU clock, says so, and runs at another."""

    def apply(self, mode: PowerMode) -> None:
        super().apply(mode.with_knobs(gpu_mhz=921.6) if mode.gpu_mhz else mode)


def test_a_clock_that_does_not_run_as_asked_is_named() -> None:
    found = underwatt.check(Deaf(open_virtual("nano").board), set_knobs=True)
    assert found.verdict.level is Level.LIMITED
    assert "gpu_mhz was set to 76.8 and ran at 921.6" in found.verdict.text


class Narrow(VirtualJetson):
    def run_step(self, cost: object, batch_size: int) -> None:
        super().run_step(replace(cost, activation_bytes_per_sample=2e8 if batch_size > 8 else 1), batch_size)  # type: ignore[type-var]


def test_a_load_that_does_not_fit_is_a_finding() -> None:
    found = underwatt.check(Narrow(open_virtual("nano").board), set_knobs=True)
    assert found.verdict.level is Level.LIMITED
    assert "batch size 32 needs" in found.verdict.text


def test_a_device_that_another_session_holds_is_left_alone() -> None:
    device = open_virtual("nano")
    with Session(device), pytest.raises(DeviceBusyError):
        underwatt.check(device, set_knobs=True)
