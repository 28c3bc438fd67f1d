from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from underwatt.device.registry import open_device
from underwatt.drivers.replay import ReplayDevice
from underwatt.errors import InputError, ModeError, OutOfMemoryError, SensorError, StepError
from underwatt.records import DeviceInfo, Measurement, PowerMode, Profile, Setting, Status, WorkloadCost, WorkloadInfo
from underwatt.store.exchange import write_profile
from underwatt.testing.devices import DeviceConformance

if TYPE_CHECKING:
    from pathlib import Path

ANY_COST = WorkloadCost(1, 1, 1, 1, 1, 1, 1, 1)
TABLE = "cores,cpu_mhz,gpu_mhz,mem_mhz,batch_size,time_ms,power_w\n" + "".join(
    f"{cores},{100 * cores},{gpu},1000,{batch},{batch * 1000 / gpu},{gpu / 100 + cores}\n"
    for cores in (2, 4)
    for gpu in (300, 600)
    for batch in (4, 8)
)


@pytest.fixture
def device(tmp_path: Path) -> ReplayDevice:
    (tmp_path / "table.csv").write_text(TABLE)
    found = open_device(f"replay:{tmp_path / 'table.csv'}")
    assert isinstance(found, ReplayDevice)
    return found


class TestReplayConformance(DeviceConformance):
    @pytest.fixture
    def device(self, tmp_path: Path) -> ReplayDevice:
        (tmp_path / "table.csv").write_text(TABLE)
        return open_device(f"replay:{tmp_path / 'table.csv'}")  # type: ignore[return-value]


def test_it_answers_what_was_measured(device: ReplayDevice) -> None:
    assert device.batch_sizes == (4, 8)
    device.apply(PowerMode(cpu_cores=4, cpu_mhz=400, gpu_mhz=600, mem_mhz=1000))
    device.run_step(ANY_COST, 8)
    assert device.clock.now_s() == pytest.approx(8 / 600)
    assert device.read_power().power_w == 10
    assert device.info.simulated


def test_a_mode_that_was_not_measured_is_refused(device: ReplayDevice) -> None:
    with pytest.raises(ModeError, match="does not hold the mode"):
        device.apply(PowerMode(cpu_cores=4, cpu_mhz=200, gpu_mhz=600, mem_mhz=1000))
    with pytest.raises(StepError, match="does not hold batch 5"):
        device.run_step(ANY_COST, 5)


@pytest.mark.parametrize(
    "table",
    [
        [Measurement(Setting(PowerMode(gpu_mhz=1), 1), status=Status.OUT_OF_MEMORY)],
        [Measurement(Setting(PowerMode(gpu_mhz=1), 1), 0.1, 5.0), Measurement(Setting(PowerMode(), 1), 0.1, 5.0)],
    ],
)
def test_a_table_of_no_use_is_refused_with_a_remedy(table: list[Measurement]) -> None:
    with pytest.raises(InputError) as caught:
        ReplayDevice(table, name="table", address="replay:table")
    assert caught.value.hint


def test_out_of_memory_is_replayed() -> None:
    mode = PowerMode(gpu_mhz=1)
    table = [Measurement(Setting(mode, 1), 0.1, 5.0), Measurement(Setting(mode, 2), status=Status.OUT_OF_MEMORY)]
    device = ReplayDevice(table, name="table", address="replay:table")
    with pytest.raises(OutOfMemoryError):
        device.run_step(ANY_COST, 2)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(InputError, match="no usable"):
        ReplayDevice([], name="table", address="replay:table")
    with pytest.raises(InputError, match="needs a table"):
        open_device("replay")


def test_a_profile_that_was_exported_is_a_device(tmp_path: Path) -> None:
    fast, slow = PowerMode(cpu_cores=4, gpu_mhz=600.0), PowerMode(cpu_cores=2, gpu_mhz=300.0)
    measured = (
        Measurement(Setting(slow, 8), 0.25, 4.0),
        Measurement(Setting(fast, 8), 0.125, 9.0),
        Measurement(Setting(fast, 16), status=Status.FAILED, note="it, too,\nfell over"),
    )
    path = tmp_path / "profile.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        write_profile(Profile(DeviceInfo("nvml", "Board", "b", "nvml:b"), WorkloadInfo("job", "j"), measured), file)
    device = open_device(f"replay:{path}")
    assert isinstance(device, ReplayDevice)
    assert list(device.space) == [slow, fast]
    device.apply(fast)
    device.run_step(ANY_COST, 8)
    assert (device.clock.now_s(), device.read_power().power_w) == (0.125, 9.0)
    with pytest.raises(StepError, match="fell over"):
        device.run_step(ANY_COST, 16)
    with pytest.raises(SensorError):  # never NaN watts
        device.read_power()


def test_a_failed_repeat_does_not_hide_what_was_measured() -> None:
    setting = Setting(PowerMode(gpu_mhz=1), 1)
    table = [Measurement(setting, 0.1, 5.0), Measurement(setting, 0.2, 6.0), Measurement(setting, status=Status.FAILED)]
    device = ReplayDevice(table, name="table", address="replay:table")
    assert device.read_power().power_w == 6.0
