from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.sensors import ThermalZones
from underwatt.drivers.jetson.sysfs import Sysfs

if TYPE_CHECKING:
    from pathlib import Path

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
