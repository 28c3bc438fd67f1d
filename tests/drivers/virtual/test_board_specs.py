from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from virtual_costs import IMAGENET, SMALL

from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.physics import Clocks, step_power, step_times
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.drivers.virtual.board_specs import BoardSpec

EVERY_BOARD = pytest.mark.parametrize("spec", BOARDS.values(), ids=lambda spec: spec.name)
MODES = {"nano": 5_040, "tx2-nx": 6_552, "xavier-agx": 29_232, "orin-nano": 1_800, "orin-agx": 18_096}
# What the modules' data sheets promise, with room for a carrier board and for what presets are known to exceed.
TRAINING_W = {"nano": (4, 11), "tx2-nx": (6, 16), "xavier-agx": (15, 42), "orin-nano": (10, 26), "orin-agx": (25, 65)}


@EVERY_BOARD
def test_knobs_and_stock_modes(spec: BoardSpec) -> None:
    assert len(spec.space) == MODES[spec.name]
    assert spec.default_mode in spec.stock_modes
    assert all(mode in spec.space for mode in spec.stock_modes.values())
    with pytest.raises(InputError, match="no stock mode 'TURBO'"):
        spec.stock_mode("TURBO")


@EVERY_BOARD
def test_rails_of_the_total_add_up_to_all_power(spec: BoardSpec) -> None:
    for part in ("static", "gpu", "cpu", "mem"):
        assert sum(getattr(rail, part) for rail in spec.rails if rail.in_total) == pytest.approx(1.0)
    assert len({(rail.chip, rail.channel) for rail in spec.rails if rail.channel in range(3)}) == len(spec.rails)
    assert sorted(core for cluster in spec.sysfs.clusters for core in cluster) == list(range(spec.cpu_cores))


@EVERY_BOARD
def test_power_is_plausible(spec: BoardSpec) -> None:
    board = VirtualBoard(spec)
    low, high = TRAINING_W[spec.name]
    for cost in (SMALL, IMAGENET):
        assert low < board.true_power_w(cost, board.space.highest, 32) < high
        assert board.true_power_w(cost, board.space.lowest, 32) < 0.7 * board.true_power_w(
            cost, board.space.highest, 32
        )


def test_bigger_boards_are_faster() -> None:
    order = ("nano", "tx2-nx", "xavier-agx", "orin-agx")
    boards = [VirtualBoard(BOARDS[name]) for name in order]
    times = [board.true_step_s(SMALL, board.space.highest, 32) for board in boards]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("name", "table"), [("orin-agx", "orin_agx_train_resnet18"), ("orin-nano", "orin_nano_train_resnet18")]
)
def test_orins_resemble_their_measured_tables(data_dir: Path, name: str, table: str) -> None:
    """Counted costs, not fitted ones: a virtual board must be near the real one without being told its times."""
    data = np.genfromtxt(data_dir / "powertrain" / f"{table}.csv", delimiter=",", names=True)
    clocks = Clocks(data["cores"], data["cpu_mhz"], data["gpu_mhz"], data["mem_mhz"])
    physics = BOARDS[name].physics
    times = step_times(physics.step_constants(IMAGENET), clocks, 16.0)
    watts = step_power(physics.power, clocks, times).total_w
    assert np.median(np.abs(np.log(times.step_s / (data["time_ms"] / 1e3)))) < 0.2
    assert np.median(np.abs(np.log(watts / data["power_w"]))) < 0.1
