from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from train_world import blobs

import underwatt
from underwatt.device.registry import open_device
from underwatt.drivers.check import CheckedDevice, read_check, report_of
from underwatt.errors import InputError, UnderwattError
from underwatt.jobs.load import RESNET18
from underwatt.store.store import Store
from underwatt.testing.devices import DeviceConformance

WHOLE = underwatt.check("virtual:nano", set_knobs=True)
RECORD: dict[str, Any] = json.loads(WHOLE.to_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    WHOLE.save(tmp_path / "check.json")
    return tmp_path / "check.json"


class TestCheckedConformance(DeviceConformance):
    @pytest.fixture
    def device(self, file: Path) -> CheckedDevice:
        return open_device(f"check:{file}")  # type: ignore[return-value]


def test_knobs_and_rights_are_those_of_the_board(file: Path) -> None:
    device, board = open_device(f"check:{file}"), open_device("virtual:nano")
    assert device.capabilities() == board.capabilities()
    assert [(k.name, k.values) for k in device.space.knobs] == [(k.name, k.values) for k in board.space.knobs]
    assert device.info.name == "Virtual Jetson Nano 4 GB (simulated) (from a check)"
    assert device.read_power().power_w == WHOLE.idle_w


def test_measured_settings_answer_and_others_say_so(file: Path) -> None:
    device = open_device(f"check:{file}")
    assert isinstance(device, CheckedDevice)
    measured = WHOLE.measurements[0]
    device.apply(measured.setting.mode)
    begin_s = device.clock.now_s()
    device.run_step(RESNET18, measured.setting.batch_size)
    assert device.clock.now_s() - begin_s == pytest.approx(measured.step_s)
    assert device.read_power().power_w == measured.power_w
    with pytest.raises(InputError, match="no other job") as told:
        device.run_step(RESNET18, 7)
    assert f"underwatt store import {file}" in told.value.hint


def test_a_job_of_ones_own_is_refused_once_and_leaves_nothing_in_the_store(file: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        with pytest.raises(InputError, match="no other job"):
            underwatt.profile(blobs(), device=f"check:{file}", store=store)
        assert store.measurements(1) == ()


def test_a_check_without_set_can_be_looked_at_and_not_run(tmp_path: Path) -> None:
    underwatt.check("virtual:nano", output=tmp_path / "look.json")
    device = open_device(f"check:{tmp_path / 'look.json'}")
    assert device.space.knobs
    with pytest.raises(InputError, match="No setting"):
        device.run_step(RESNET18, 16)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no measured setting") as told:
        underwatt.import_file(tmp_path / "look.json", store=tmp_path / "store.db")
    assert "--set" in told.value.hint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged"),
        (b"\xff\xfe{}", "damaged"),
        (b"[1, 2]", "not the file of a check"),
        (b'{"underwatt": "plan"}', "not the file of a check"),
        (b'{"underwatt": "check", "format": 99}', "format 99"),
        (b'{"underwatt": "check", "format": 1}', "has no name"),
        (b"[" * 100_000, "damaged"),
        (b'{"underwatt": "check", "format": 1, "idle_w": NaN}', "NaN is no number"),
        (b" " * (4 << 20) + b"{}", "larger than any check"),
    ],
)
def test_what_is_no_check_is_an_error_with_a_remedy(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=says) as told:
        read_check(tmp_path / "file")
    assert told.value.hint


@pytest.mark.parametrize("where", ["", "no-such-file", "."])
def test_no_file_is_an_error_with_a_remedy(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as told:
        open_device(f"check:{where}")
    assert told.value.hint


def changed(**values: Any) -> dict[str, Any]:
    return {**RECORD, **values}


@pytest.mark.parametrize(
    "record",
    [
        changed(idle_w=-1),
        changed(knobs=[{**RECORD["knobs"][0], "values": [2, 1]}, *RECORD["knobs"][1:]]),
        changed(knobs=[{**RECORD["knobs"][0], "values": [1.5, 2.5]}, *RECORD["knobs"][1:]]),
        changed(knobs=[{**RECORD["knobs"][1], "values": [-5.0]}]),
        changed(knobs=[]),  # and yet there are measurements
        changed(measurements=[{**RECORD["measurements"][0], "power_w": None}]),
        changed(measurements=[{**RECORD["measurements"][0], "step_s": 0}]),
        changed(verdict={"level": "splendid", "text": ""}),
        changed(files={"sys/x": 1}),
    ],
)
def test_what_cannot_be_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="damaged check") as told:
        report_of(record, "This file")
    assert told.value.hint


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def outcome(read: Callable[[], Any]) -> tuple[Any, InputError]:
    """What was read, and the error where nothing was."""
    try:
        return read(), InputError("none")
    except InputError as exc:
        return None, exc


PLACES = [place for place in places(RECORD) if place]


@settings(max_examples=300)
@given(st.sampled_from(PLACES), VALUES, st.booleans())
def test_any_value_anywhere_gives_a_device_or_an_error_with_a_remedy(
    place: tuple[Any, ...], value: Any, gone: bool
) -> None:
    record = copy.deepcopy(RECORD)
    holder: Any = record
    for key in place[:-1]:
        holder = holder[key]
    if gone:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    report, error = outcome(lambda: report_of(json.loads(json.dumps(record)), "This file"))
    if report is None:
        assert error.hint
        return
    device = CheckedDevice(report, open_device("virtual:nano").info)
    with suppress(UnderwattError):
        device.capabilities(), device.stock_modes(), device.read_state()
        device.apply(device.space.highest)
        device.read_power()
        device.run_step(RESNET18, 16)


@settings(max_examples=100)
@given(st.integers(0, 5000), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_give_a_report_or_an_error_with_a_remedy(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes
) -> None:
    content = WHOLE.to_text().encode()
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    for damaged in (content[:at], content[:at] + junk + content[at + len(junk) :]):
        path.write_bytes(damaged)
        found, error = outcome(lambda: read_check(path))
        assert found or error.hint
