from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given, strategies as st

from underwatt.errors import DeviceBusyError, InputError, UnderwattError
from underwatt.records import (
    KNOBS,
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    Status,
    WorkloadCost,
    WorkloadInfo,
    columns,
    from_json,
    from_row,
    to_json,
    to_row,
)

knob_values = st.dictionaries(st.sampled_from(KNOBS), st.integers(1, 3000).map(float))


@given(knob_values)
def test_mode_from_knobs_and_back(values: dict[str, float]) -> None:
    mode = PowerMode.of(values)
    assert mode.knobs() == values
    assert list(mode.knobs()) == [name for name in KNOBS if name in values]


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_nonsense_values_are_refused(value: float) -> None:
    with pytest.raises(InputError, match="gpu_mhz"):
        PowerMode(gpu_mhz=value)


def test_unknown_knob_is_named() -> None:
    with pytest.raises(InputError, match="fan"):
        PowerMode.of({"fan": 3})


def test_batch_size_zero_is_refused() -> None:
    with pytest.raises(InputError, match="Batch size"):
        Setting(PowerMode(), 0)


def test_people_read_modes() -> None:
    assert str(Setting(PowerMode(cpu_cores=4, gpu_mhz=921.6), 32)) == "batch 32, 4 cores, GPU 921.6 MHz"
    assert str(PowerMode()) == "as it is"


def test_json_has_no_nan_and_knows_enums() -> None:
    record = to_json(Measurement(Setting(PowerMode(gpu_mhz=1.0), 2), status=Status.OUT_OF_MEMORY))
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["status"] == "out_of_memory"
    assert json.loads(text)["step_s"] is None


def test_only_measured_ones_are_usable() -> None:
    setting = Setting(PowerMode(), 1)
    assert Measurement(setting, step_s=1.0, power_w=1.0).usable
    assert Measurement(setting, status=Status.THROTTLED).usable
    assert not Measurement(setting, status=Status.FAILED).usable


def test_memory_grows_with_batch_size() -> None:
    cost = WorkloadCost(1, 1, 1, 1, 1, 1, state_bytes=100, activation_bytes_per_sample=10)
    assert cost.memory_bytes(3) == 130


def test_errors_keep_their_hint_across_processes() -> None:
    error = pickle.loads(pickle.dumps(DeviceBusyError("It is taken.", hint="Wait.")))
    assert isinstance(error, UnderwattError)
    assert (error.message, error.hint, str(error)) == ("It is taken.", "Wait.", "It is taken. Wait.")


SETTING = Setting(PowerMode(cpu_cores=4, gpu_mhz=921.6), 8)
MEASUREMENT = Measurement(SETTING, step_s=0.5, power_w=7.0, steps=3, status=Status.THROTTLED, note="warm")
RUN = ConvergenceRun(8, 0.9, given_up_samples=900.0, samples=math.nan)


@pytest.mark.parametrize("record", [MEASUREMENT, RUN, DeviceInfo("b", "n", "i", "a", software={"driver": "1"})])
def test_records_come_back_from_json(record: object) -> None:
    text = json.dumps(to_json(record), allow_nan=False)
    assert repr(from_json(type(record), json.loads(text))) == repr(record)


@pytest.mark.parametrize("record", [MEASUREMENT, RUN])
def test_records_come_back_from_rows_beside_other_columns(record: object) -> None:
    row = to_row(record)
    assert list(row) == [column.name for column in columns(type(record))]
    assert repr(from_row(type(record), {"id": 7, **row, "measured_at": "today"})) == repr(record)
    as_fractions = {name: float(value) if type(value) is int else value for name, value in row.items()}
    assert repr(from_row(type(record), as_fractions)) == repr(record)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("step_s",), "0.5", r"Measurement\.step_s cannot be '0\.5'"),
        (("step_s",), True, "step_s cannot be True"),
        (("step_s",), 10**400, "step_s cannot be 1000"),
        (("steps",), None, "steps cannot be None"),
        (("steps",), 2.5, "steps cannot be 2.5"),
        (("steps",), 2**63, "steps cannot be 9223372036854775808"),
        (("status",), "fine", "status cannot be 'fine'"),
        (("status",), [], r"status cannot be \[\]"),
        (("note",), 3, "note cannot be 3"),
        (("setting",), None, "setting cannot be None"),
        (("setting", "batch_size"), "8", r"Measurement\.setting\.batch_size cannot be '8'"),
        (("setting", "batch_size"), 0, "Batch size must be at least 1"),
        (("setting", "mode"), [], r"setting\.mode cannot be \[\]"),
        (("setting", "mode", "gpu_mhz"), "fast", "mode.gpu_mhz cannot be 'fast'"),
        (("setting", "mode", "gpu_mhz"), -1, "gpu_mhz must be a positive number"),
        (("setting", "mode", "fan"), 1, "no knob fan"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(where: tuple[str, ...], value: object, says: str) -> None:
    plain = to_json(MEASUREMENT)
    inner = plain
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    with pytest.raises(InputError, match=says):
        from_json(Measurement, plain)


@pytest.mark.parametrize(
    ("record", "needed"),
    [(MEASUREMENT, {"setting", "step_s", "power_w", "status"}), (RUN, {"batch_size", "target", "samples"})],
)
def test_only_what_files_always_held_must_be_there(record: object, needed: set[str]) -> None:
    plain = to_json(record)
    for name in plain:
        rest = {other: value for other, value in plain.items() if other != name}
        if name in needed:
            with pytest.raises(InputError, match=f"has no {name}"):
                from_json(type(record), rest)
        else:
            from_json(type(record), rest)


def test_what_a_newer_version_added_is_left_out() -> None:
    assert from_json(WorkloadInfo, {"name": "n", "id": "i", "colour": "blue"}) == WorkloadInfo("n", "i")


def test_the_place_in_a_list_and_the_key_of_a_mapping_are_named() -> None:
    plain = to_json(Profile(DeviceInfo("b", "n", "i", "a"), WorkloadInfo("n", "i"), (MEASUREMENT, MEASUREMENT)))
    plain["measurements"][1]["power_w"] = "much"
    with pytest.raises(InputError, match=r"Profile\.measurements\[1\]\.power_w cannot be 'much'"):
        from_json(Profile, plain)
    plain["device"]["software"] = {"driver": 1}
    with pytest.raises(InputError, match=r"Profile\.device\.software\.driver cannot be 1"):
        from_json(Profile, plain)


def test_a_run_needs_a_target() -> None:
    with pytest.raises(InputError, match="target of a convergence run"):
        from_json(ConvergenceRun, {**to_json(RUN), "target": None})
