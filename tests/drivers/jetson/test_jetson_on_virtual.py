"""The production driver, end to end on virtual boards that present themselves as directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from underwatt.device.base import HasStockModes
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.records import WorkloadCost
from underwatt.testing.devices import DeviceConformance

if TYPE_CHECKING:
    from pathlib import Path

MODES = [(name, stock) for name, spec in BOARDS.items() for stock in spec.stock_modes]


def boot(name: str, root: Path, stock_mode: str | None = None) -> tuple[JetsonDevice, SysfsBoard]:
    board = VirtualBoard(BOARDS[name])
    tree = SysfsBoard.create(board, root, stock_mode=stock_mode)
    board.clock.sleep(1.0)
    return JetsonDevice(root, clock=board.clock), tree


class TestVirtualTree(DeviceConformance):
    @pytest.fixture(params=BOARDS)
    def device(self, request: pytest.FixtureRequest, tmp_path: Path) -> JetsonDevice:
        return boot(request.param, tmp_path)[0]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_driver_and_the_board_mean_the_same(tmp_path: Path, name: str, mode: str) -> None:
    device, tree = boot(name, tmp_path, mode)
    assert device.space.highest == BOARDS[name].stock_mode(mode)
    found = dict(device.snapshot())
    for asked in (device.space.lowest, device.space[len(device.space) // 2], device.space.highest):
        device.apply(asked)
        after = dict(device.snapshot())
        device.clock.sleep(1.0)
        assert dict(device.snapshot()) == after, "the board rounded what the driver wrote"
        assert tree.board.mode == asked
        assert device.read_state().running.knobs() == pytest.approx(asked.knobs())
        rails_w = device.read_state().rails_w
        assert 0 < device.read_power().power_w <= sum(rails_w.values()) * 1.0001
    device.restore(found)
    assert dict(device.snapshot()) == found
    device.clock.sleep(1.0)
    assert dict(device.snapshot()) == found


@pytest.mark.parametrize("name", BOARDS)
def test_the_driver_knows_the_whole_table_of_the_board(tmp_path: Path, name: str) -> None:
    spec = BOARDS[name]
    most, mode = max(spec.stock_modes.items(), key=lambda stock: sum(stock[1].knobs().values()))
    device, _ = boot(name, tmp_path, most)
    knobs = {knob.name: knob.values for knob in device.space.knobs}
    assert knobs["mem_mhz"] == tuple(mhz for mhz in spec.mem_mhz if mhz <= (mode.mem_mhz or 0))
    assert knobs["gpu_mhz"] == pytest.approx([mhz for mhz in spec.gpu_mhz if mhz <= (mode.gpu_mhz or 0)])


@pytest.mark.parametrize("name", BOARDS)
def test_files_move_under_load_and_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    device, tree = boot(name, tmp_path)
    found = device.snapshot()
    set_by_us = [path for path in found if path != "nvpmodel"]
    before = {path: (tmp_path / path).read_bytes() for path in set_by_us}
    cost = WorkloadCost(1e9, 1e7, 1e8, 200.0, 1e5, 1e7, 2e8, 1e6)
    device.apply(device.space.highest)
    idle_w = device.read_power().power_w
    while device.clock.now_s() < 5.0:
        tree.run_step(cost, 16)
    assert device.read_power().power_w > idle_w * 1.1
    device.restore(found)
    assert {path: (tmp_path / path).read_bytes() for path in set_by_us} == before


@pytest.mark.parametrize("name", BOARDS)
def test_the_driver_reads_the_vendors_modes_as_the_board_means_them(tmp_path: Path, name: str) -> None:
    device, tree = boot(name, tmp_path)
    expected = VirtualJetson(tree.board).stock_modes()
    assert device.stock_modes() == expected
    assert isinstance(device, HasStockModes)
