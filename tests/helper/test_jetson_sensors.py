from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import NotPermittedError, SensorError
from underwatt.helper.board_facts import detect_board
from underwatt.helper.sensors import PowerMonitor, ThermalZones, find_rails
from underwatt.helper.sysfs import Sysfs

if TYPE_CHECKING:
    from pathlib import Path

VDD_IN = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"


def monitor(root: Path) -> PowerMonitor:
    sysfs = Sysfs(root)
    return PowerMonitor(sysfs, detect_board(sysfs))


@pytest.mark.parametrize("name", trees.METERED)
def test_the_total_is_right_for_each_board(tmp_path: Path, name: str) -> None:
    tree = trees.METERED[name]
    assert monitor(trees.plant(tmp_path, tree)).total_w() == pytest.approx(tree.total_w)


@pytest.mark.parametrize("name", trees.METERED)
def test_rails_leave_out_what_is_not_connected(tmp_path: Path, name: str) -> None:
    tree = trees.METERED[name]
    rails_w = monitor(trees.plant(tmp_path, tree)).rails_w()
    expected = {rail: mv * ma / 1e6 for sensor in tree.sensors for rail, mv, ma in sensor.rails if rail != "NC"}
    assert rails_w == pytest.approx(expected)


def test_agx_orin_does_not_count_the_fourth_rail_twice(tmp_path: Path) -> None:
    measured = monitor(trees.plant(tmp_path, trees.ORIN_AGX_JP6))
    assert "VDDQ_VDD2_1V8AO" in measured.rails_w()
    assert "VDDQ_VDD2_1V8AO" not in {rail.name for rail in measured.total_rails()}


def test_the_2gb_nano_says_that_it_has_no_sensor(tmp_path: Path) -> None:
    with pytest.raises(SensorError, match="2GB has no power sensor"):
        monitor(trees.plant(tmp_path, trees.NANO_2GB)).total_w()


def test_a_missing_sensor_is_an_error(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / "sys/bus/i2c")
    with pytest.raises(SensorError, match="No power sensor found"):
        monitor(tmp_path).total_w()


def test_a_part_of_the_rails_is_not_the_total(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.XAVIER_AGX)
    shutil.rmtree(tmp_path / "sys/bus/i2c/drivers/ina3221/1-0041")
    with pytest.raises(SensorError, match=r"report CPU, GPU, SOC, but not GPU \+ CPU"):
        monitor(tmp_path).total_w()


def test_an_unknown_board_is_read_where_its_rails_are_known(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.XAVIER_AGX)
    trees.put(tmp_path, "proc/device-tree/model", "Carrier of someone\0")
    trees.put(tmp_path, "proc/device-tree/compatible", "someone,board\0")
    assert monitor(tmp_path).total_w() == pytest.approx(6.0)
    trees.put(tmp_path, "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_label", "ODD")
    with pytest.raises(SensorError, match="any known total"):
        monitor(tmp_path).total_w()


@pytest.mark.parametrize("text", ["", "\n", "nan\n", "-1100\n", "N/A\n", "99999999999\n", "\0\0\0"])
def test_garbage_is_an_error_and_never_zero_watts(tmp_path: Path, text: str) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    device = JetsonDevice(tmp_path)
    assert device.read_power().power_w == pytest.approx(5.5)
    (tmp_path / VDD_IN / "curr1_input").write_text(text)
    with pytest.raises(SensorError):
        device.read_power()
    assert "VDD_IN" not in device.read_state().rails_w
    (tmp_path / VDD_IN / "curr1_input").write_text("1200\n")
    assert device.read_power().power_w == pytest.approx(6.0)


def test_two_negatives_make_no_positive(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    trees.put(tmp_path, f"{VDD_IN}/curr1_input", -1000)
    trees.put(tmp_path, f"{VDD_IN}/in1_input", -5000)
    with pytest.raises(SensorError, match="reads -5000"):
        monitor(tmp_path).total_w()


def test_zero_watts_of_a_running_board_is_an_error(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.NANO)
    trees.put(tmp_path, "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input", 0)
    with pytest.raises(SensorError, match="zero watts"):
        monitor(tmp_path).total_w()


def test_a_sensor_that_vanishes_is_an_error_and_is_found_again_under_another_number(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    device = JetsonDevice(tmp_path)
    device.read_power()
    (tmp_path / VDD_IN).rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(SensorError):
            device.read_power()
    assert device.read_state().rails_w == {}
    (tmp_path / "away").rename((tmp_path / VDD_IN).with_name("hwmon8"))
    assert device.read_power().power_w == pytest.approx(5.5)


def test_a_forbidden_sensor_says_so(tmp_path: Path) -> None:
    class Forbidden(Sysfs):
        def _pull(self, path: str) -> bytes:
            if path.endswith("curr1_input"):
                raise PermissionError(13, "no")
            return super()._pull(path)

    device = JetsonDevice(sysfs=Forbidden(trees.plant(tmp_path, trees.ORIN_NANO)))
    with pytest.raises(NotPermittedError, match="curr1_input"):
        device.read_power()
    power = next(item for item in device.capabilities() if item.name == "power")
    assert not power.usable
    assert "sudo" in power.remedy


def test_a_rail_without_a_readable_name_is_no_rail(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    (tmp_path / VDD_IN / "in3_label").write_text("")
    assert [rail.name for rail in find_rails(Sysfs(tmp_path))] == ["VDD_IN", "VDD_CPU_GPU_CV"]


def test_reading_power_is_cheap(tmp_path: Path) -> None:
    device = JetsonDevice(trees.plant(tmp_path, trees.XAVIER_AGX))
    device.read_power()
    best_s = min(_timed_s(device) for _ in range(200))
    assert best_s < 500e-6  # twelve files; a tenth of a percent of a 100 ms period is the point


def _timed_s(device: JetsonDevice) -> float:
    start_s = time.perf_counter()
    device.read_power()
    return time.perf_counter() - start_s


def test_an_idle_rail_a_step_below_zero_is_no_fault(tmp_path: Path) -> None:
    measured = monitor(trees.plant(tmp_path, trees.XAVIER_AGX))
    before_w = measured.total_w()
    currents = sorted(tmp_path.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/curr2_input"))
    currents[0].write_text("-8\n")
    assert 0 < measured.total_w() < before_w


def test_a_rail_without_voltage_is_missing_not_zero(tmp_path: Path) -> None:
    measured = monitor(trees.plant(tmp_path, trees.ORIN_AGX_JP6))
    assert measured.total_w() > 0
    voltage = min(tmp_path.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in1_input"))
    voltage.write_text("0\n")
    with pytest.raises(SensorError, match="0 mV"):
        measured.total_w()


ZONE = "sys/class/thermal/thermal_zone"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return trees.plant(tmp_path, trees.ORIN_NANO)


def test_temperatures_without_the_constant_zone(root: Path) -> None:
    assert ThermalZones(Sysfs(root)).temperatures_c() == {"CPU": 41.5, "gpu": 39.0}


@pytest.mark.parametrize("text", ["-256000", "999000", "", "garbage"])
def test_a_zone_that_is_powered_down_is_left_out(root: Path, text: str) -> None:
    trees.put(root, f"{ZONE}1/temp", text)
    assert ThermalZones(Sysfs(root)).temperatures_c() == {"CPU": 41.5}


def test_a_fan_at_work_is_no_throttling_but_a_cooling_clock_is(root: Path) -> None:
    thermal = ThermalZones(Sysfs(root))
    assert thermal.throttle_reasons() == ()
    trees.put(root, "sys/class/thermal/cooling_device1/cur_state", 2)
    assert thermal.throttle_reasons() == ("thermal: cpu-throttle-alert at 2",)
    trees.put(root, "sys/class/thermal/cooling_device1/cur_state", "odd")
    assert thermal.throttle_reasons() == ()


def test_over_current_events_count_from_the_last_look(root: Path) -> None:
    counter = "sys/class/hwmon/hwmon9/oc1_event_cnt"
    thermal = ThermalZones(Sysfs(root))
    assert thermal.throttle_reasons() == ()
    trees.put(root, counter, 9)
    assert thermal.throttle_reasons() == ("over-current: OC1 (2 events)",)
    assert thermal.throttle_reasons() == ()
    trees.put(root, counter, "?")
    assert thermal.throttle_reasons() == ()


class Hand:
    """A clock that is moved by hand."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def test_small_over_current_events_count_by_how_often_they_come(root: Path) -> None:
    counter = "sys/class/hwmon/hwmon9/oc3_event_cnt"
    trees.put(root, counter, 27_390)
    clock: Any = Hand()
    thermal = ThermalZones(Sysfs(root), clock.now_s)
    assert thermal.throttle_reasons() == ()
    count = 27_390
    for _ in range(40):  # as on a board that is well under load: 7.6 a second
        clock.at_s += 0.25
        count += 2
        trees.put(root, counter, count)
        assert thermal.throttle_reasons() == ()
    clock.at_s += 10.0
    trees.put(root, counter, count + 500)
    assert thermal.throttle_reasons() == ("over-current: OC3 (500 events)",)
    assert thermal.throttle_reasons() == ()


def test_rail_names_that_only_root_reads_come_from_the_device_tree(tmp_path: Path) -> None:
    class Sealed(Sysfs):
        def _pull(self, path: str) -> bytes:
            if "/rail_name_" in path:
                raise PermissionError(13, "no")
            return super()._pull(path)

    root = trees.plant(tmp_path, trees.NANO)
    sysfs = Sealed(root)
    with pytest.raises(SensorError, match=r"Only root may read which rail is which.*sudo"):
        PowerMonitor(sysfs, detect_board(sysfs)).total_w()
    for channel, (name, _, _) in enumerate(trees.NANO.sensors[0].rails):
        of_node = "sys/bus/i2c/drivers/ina3221x/6-0040/of_node"
        trees.put(root, f"{of_node}/channel@{channel}/ti,rail-name", f"{name}\0")
    assert PowerMonitor(sysfs, detect_board(sysfs)).total_w() == pytest.approx(3.5)


def test_a_sensor_that_is_busy_for_a_moment_is_asked_again(root: Path) -> None:
    class Busy(Sysfs):
        refusals = 2

        def _pull(self, path: str) -> bytes:
            if path.endswith("_input") and self.refusals:
                self.refusals -= 1
                raise BlockingIOError(11, "busy")
            return super()._pull(path)

    sysfs = Busy(root)
    assert PowerMonitor(sysfs, detect_board(sysfs)).total_w() > 0
