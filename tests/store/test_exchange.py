from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st
from test_store import DEVICE, WORKLOAD, possible

from underwatt.errors import InputError
from underwatt.records import ConvergenceRun, Measurement, PowerMode, Profile, Setting
from underwatt.store.exchange import read_file, write_convergence, write_profile

if TYPE_CHECKING:
    from pathlib import Path


@settings(deadline=None)
@given(st.lists(possible, min_size=1, max_size=5))
def test_an_exported_profile_comes_back_whole(tmp_path_factory: pytest.TempPathFactory, items: list) -> None:  # type: ignore[type-arg]
    profile = Profile(DEVICE, WORKLOAD, tuple(items))
    path = tmp_path_factory.mktemp("exchange") / "profile.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        write_profile(profile, file)
    [found] = read_file(path).profiles
    assert repr(found) == repr(profile)


def test_exported_convergence_comes_back_whole(tmp_path: Path) -> None:
    runs = (ConvergenceRun(8, 0.9, 1e4, 3, 1e-3), ConvergenceRun(64, 0.9, float("nan")))
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        write_convergence(WORKLOAD, runs, file)
    [(workload, found)] = read_file(path).convergence
    assert workload == WORKLOAD
    assert repr(found) == repr(runs)


def test_a_powertrain_table_is_one_profile(tmp_path: Path) -> None:
    path = tmp_path / "orin_resnet.csv"
    path.write_text("cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n2,268.8,1300.5,204.0,624.5,19.9\n")
    [profile] = read_file(path, device_name="my Orin").profiles
    [m] = profile.measurements
    assert (profile.device.name, profile.workload.name) == ("my Orin", "orin_resnet")
    assert (m.setting.mode, m.setting.batch_size) == (PowerMode(2, 268.8, 1300.5, 204.0), 16)
    assert (m.step_s, m.power_w) == (pytest.approx(0.6245), 19.9)


def test_zeus_power_traces_are_a_profile_for_each_workload(tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    path.write_text(
        "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"
        "cifar100,shuffle,1024,adam,100,10.0,90\n"
        "cifar100,shuffle,512,adam,150,8.0,120\n"
        "squad,bert,32,adamw,150,800.0,140\n"
    )
    first, second = read_file(path, samples_per_epoch=50_000).profiles
    assert (first.workload.name, len(first.measurements)) == ("cifar100 shuffle adam", 2)
    m = first.measurements[0]
    assert m.step_s == pytest.approx(10.0 * 1024 / 50_000)
    assert (m.power_w, m.setting.mode) == (90, PowerMode(power_limit_w=100))
    assert second.workload.id != first.workload.id


def test_zeus_train_traces_are_convergence_runs_and_blank_is_never(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(
        "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"
        "c,s,1024,adam,1e-1,1,0.5,7\nc,s,1024,adam,1e-1,1,0.9,\nc,s,512,adam,1e-1,2,0.9,nan\n"
    )
    [(workload, runs)] = read_file(path).convergence
    assert workload.name == "c s adam"
    assert [run.samples for run in runs if run.reached] == [7]
    assert [run.reached for run in runs] == [True, False, False]
    assert runs[2].seed == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no table that Underwatt knows: its columns are a, b"),
        ("", "its columns are none"),
        ("cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n2,268,1300,204,nan,19\n", "line 2"),
        ("cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n2,268,1300,204,10,-1\n", "line 2"),
        ("dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n", "no rows"),
        (
            "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\nc,s,0,a,100,1,1\n",
            "line 2.*Batch size",
        ),
        (
            "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\nc,s,8,a,100,-3,1\n",
            "line 2: time_per_epoch",
        ),
        ("dataset,power_limit,time_per_epoch\nc,100,1\n", "line 2: there is no column network"),
        (
            "dataset,network,optimizer,power_limit,time_per_epoch,batch_size\nc,s,a,100,1\n",
            "line 2: it has fewer cells",
        ),
        ("{", "cannot be read as JSON"),
        ('{"underwatt": "plan"}', "does not say for which device"),
    ],
)
def test_bad_files_are_named_with_their_line_and_a_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_file(path)
    assert caught.value.hint


@settings(deadline=None)
@given(st.text(max_size=200))
def test_arbitrary_text_is_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("exchange") / "any.csv"
    path.write_text(text, encoding="utf-8", errors="replace", newline="")
    with pytest.raises(InputError):
        read_file(path)


def test_the_real_tables_are_read(data_dir: Path) -> None:
    assert len(read_file(data_dir / "powertrain" / "orin_agx_train_resnet18.csv").profiles[0].measurements) == 4368
    power = read_file(data_dir / "zeus" / "summary_power_v100.csv").profiles
    train = read_file(data_dir / "zeus" / "summary_train.csv").convergence
    assert sum(len(profile.measurements) for profile in power) == 294
    assert sum(len(runs) for _, runs in train) == 2184
    assert {profile.workload.id for profile in power} & {workload.id for workload, _ in train}


def test_files_exported_before_runs_said_where_they_were_given_up_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "workload_name,workload_id,workload,batch_size,target,samples,seed,learning_rate\n"
        'w,i,"{""name"": ""w"", ""id"": ""i"", ""software"": {}}",8,0.9,,3,0.001\n'
    )
    [(workload, runs)] = read_file(path).convergence
    assert workload.name == "w"
    assert repr(runs) == repr((ConvergenceRun(8, 0.9, float("nan"), 3, 1e-3),))


def _exported(path: Path) -> dict[str, str]:
    """The one row of an exported profile."""
    with path.open("w", newline="", encoding="utf-8") as file:
        write_profile(Profile(DEVICE, WORKLOAD, (Measurement(Setting(PowerMode(gpu_mhz=1.0), 8), 0.1, 5.0),)), file)
    with path.open(newline="", encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    return row


def _write_row(path: Path, row: dict[str, str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("power_w", "much", r"line 2: Measurement\.power_w cannot be 'much'"),
        ("batch_size", "", r"line 2: Measurement\.batch_size cannot be None"),
        ("steps", "1.5", r"line 2: Measurement\.steps cannot be 1\.5"),
        ("status", "fine", r"line 2: Measurement\.status cannot be 'fine'"),
        ("device", "{}", "line 2: DeviceInfo has no backend"),
        ("workload", "[", "line 2"),
    ],
)
def test_a_cell_of_the_wrong_type_is_named_with_its_line(tmp_path: Path, column: str, cell: str, message: str) -> None:
    path = tmp_path / "profile.csv"
    _write_row(path, {**_exported(path), column: cell})
    with pytest.raises(InputError, match=message):
        read_file(path)


def test_a_table_that_lost_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    row = _exported(path)
    del row["power_w"]
    _write_row(path, row)
    with pytest.raises(InputError, match="line 2: Measurement has no power_w"):
        read_file(path)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "spreadsheet.csv"
    rows = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\nc,s,8,a,100,1,1\n"
    path.write_text(rows, encoding="utf-8-sig")
    [profile] = read_file(path).profiles
    assert profile.workload.name == "c s a"


@pytest.mark.parametrize(
    "text",
    [
        "dataset,network,optimizer,batch_size,learning_rate,run,target_metric,target_epoch\nc,r,s,"
        + "9" * 40
        + ",1,0,1,2\n",
        "dataset,network,optimizer,batch_size,learning_rate,run,target_metric,target_epoch\nc,r,s,64,0.1,0,0.9,-3\n",
        "dataset,network,optimizer,batch_size,learning_rate,run,target_metric,target_epoch\nc,r,s,0,0.1,0,0.9,3\n",
    ],
)
def test_what_cannot_be_is_refused_where_its_file_is_known(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"table\.csv.* cannot be"):
        read_file(path)


@pytest.mark.parametrize("value", ["-1.5", "0", "inf", ""])
def test_a_measured_setting_without_a_time_or_watts_is_refused(tmp_path: Path, value: str) -> None:
    profile = Profile(DEVICE, WORKLOAD, (Measurement(Setting(PowerMode(), 8), step_s=0.25, power_w=7.5),))
    path = tmp_path / "profile.csv"
    for old in ("0.25", "7.5"):
        with path.open("w", newline="", encoding="utf-8") as file:
            write_profile(profile, file)
        path.write_text(path.read_text(encoding="utf-8").replace(f",{old},", f",{value},"), encoding="utf-8")
        with pytest.raises(InputError, match="cannot be"):
            read_file(path)
