from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from underwatt.csv_tables import read_measurements
from underwatt.errors import InputError
from underwatt.records import PowerMode, Setting, Status

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n"


def _write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_reads_rows_in_seconds_and_watts(tmp_path: Path) -> None:
    (row,) = read_measurements(_write(tmp_path, HEADER + "4,422.4,114.75,665.6,96.5,11.7\n"))
    assert row.setting == Setting(PowerMode(cpu_cores=4, cpu_mhz=422.4, gpu_mhz=114.75, mem_mhz=665.6), 16)
    assert row.step_s == pytest.approx(0.0965)
    assert row.power_w == 11.7


def test_batch_size_from_the_column_or_16(tmp_path: Path) -> None:
    path = _write(tmp_path, HEADER + "4,422.4,114.75,665.6,96.5,11.7\n")
    assert read_measurements(path)[0].setting.batch_size == 16
    path = _write(tmp_path, "batch_size," + HEADER + "64,4,422.4,114.75,665.6,96.5,11.7\n")
    assert read_measurements(path)[0].setting.batch_size == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cores,cpu_mhz\n1,2\n", "lacks the columns gpu_mhz"),
        ("", "lacks the columns"),
        (HEADER, "no measurement"),
        (HEADER + "4,422.4,114.75,665.6,nan,11.7\n", "line 2: time_ms"),
        (HEADER + "4,422.4,114.75,665.6,10,11.7\n4,422.4,114.75,665.6,10,-1\n", "line 3: power_w"),
        (HEADER + "4.5,422.4,114.75,665.6,10,11.7\n", "whole number"),
        (HEADER + "4,fast,114.75,665.6,10,11.7\n", "'fast'"),
        (HEADER + "4,422.4\n", "no number"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_measurements(_write(tmp_path, text))
    assert says in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_measurements(tmp_path / "absent.csv")


@given(st.binary(max_size=300))
def test_any_bytes_are_measurements_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "t.csv"
    path.write_bytes(HEADER.encode() + raw)
    try:
        rows = read_measurements(path)
    except InputError:
        return
    assert all(row.step_s > 0 and row.power_w > 0 for row in rows)


def test_reads_the_real_tables(data_dir: Path) -> None:
    rows = read_measurements(data_dir / "powertrain" / "orin_agx_train_resnet18.csv")
    assert len(rows) == 4368
    assert len({row.setting for row in rows}) == 4368


NATIVE = (
    "device_name,device,workload,cpu_cores,cpu_mhz,gpu_mhz,mem_mhz,power_limit_w,batch_size,step_s,power_w,peak_w,"
    "energy_j,window_s,cost_s,step_s_ci95,power_w_ci95,steps,samples,missed_samples,status,note\n"
)
NATIVE_ROW = "Nano,{},{},4,,600.0,,,8,0.5,7.5,,,,,,,10,20,0,ok,\n"


def test_the_form_is_told_by_the_columns(tmp_path: Path) -> None:
    (native,) = read_measurements(_write(tmp_path, NATIVE + NATIVE_ROW))
    assert native.setting == Setting(PowerMode(cpu_cores=4, gpu_mhz=600.0), 8)
    assert (native.step_s, native.power_w, native.steps, native.status) == (0.5, 7.5, 10, Status.OK)
    (published,) = read_measurements(_write(tmp_path, HEADER + "4,422.4,114.75,665.6,96.5,11.7\n"))
    assert published.setting.batch_size == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "lacks the columns"),
        (NATIVE, "no measurement"),
        (NATIVE + NATIVE_ROW.replace("0.5", "slow"), "line 2.*slow"),
        (NATIVE + NATIVE_ROW.replace(",ok,", ",fine,"), "line 2.*fine"),
        (NATIVE + NATIVE_ROW + NATIVE_ROW.replace("{}", "[]", 1), "more than one profile"),
    ],
)
def test_a_bad_table_of_either_form_is_an_input_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_measurements(_write(tmp_path, text))
