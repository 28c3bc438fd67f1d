"""Every Jetson generation passes the suite of all devices, on plain files and on files with a kernel's manners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.testing.devices import DeviceConformance

if TYPE_CHECKING:
    from pathlib import Path


class TestPlainFiles(DeviceConformance):
    @pytest.fixture(params=trees.METERED)
    def device(self, request: pytest.FixtureRequest, tmp_path: Path) -> JetsonDevice:
        return JetsonDevice(trees.plant(tmp_path, trees.METERED[request.param]))


class TestKernelManners(DeviceConformance):
    @pytest.fixture(params=trees.METERED)
    def device(self, request: pytest.FixtureRequest, tmp_path: Path) -> JetsonDevice:
        root = trees.plant(tmp_path, trees.METERED[request.param])
        return JetsonDevice(sysfs=trees.KernelSysfs(root))
