from __future__ import annotations

from pathlib import Path

import pytest

from underwatt.device.registry import open_device
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board import VirtualBoard
from underwatt.drivers.virtual.boards import BOARDS
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError, JobError
from underwatt.jobs.choose import CommandRate, IsolatedWorkload, choose_workload
from underwatt.jobs.command import CommandWorkload
from underwatt.jobs.simulated import SimulatedWorkload

EXAMPLE = f"{Path(__file__).resolve().parents[2] / 'examples' / 'jobs.py'}:resnet18_small"


@pytest.fixture
def board(tmp_path: Path) -> JetsonDevice:
    SysfsBoard.create(VirtualBoard(BOARDS["nano"]), tmp_path)
    return JetsonDevice(tmp_path)


def test_a_job_is_isolated_on_a_real_device_and_simulated_on_a_virtual_one(board: JetsonDevice) -> None:
    real, sizes = choose_workload([EXAMPLE], board)
    assert isinstance(real, IsolatedWorkload)
    simulated, same_sizes = choose_workload([EXAMPLE], open_device("virtual:nano"))
    assert isinstance(simulated, SimulatedWorkload)
    assert sizes == same_sizes == (4, 8, 16, 32, 64, 128)
    assert real.info == simulated.info


def test_words_after_the_dashes_are_a_command(board: JetsonDevice) -> None:
    words = ["python", "train.py", "--batch-size", "{batch_size}", "--lr", "{lr}"]
    command, sizes = choose_workload(words, board, rate=CommandRate(0.1, 64))
    assert isinstance(command, CommandWorkload)
    assert sizes == ()
    assert command.arguments(16)[-1] == "0.05"


def test_what_makes_no_sense_is_said(board: JetsonDevice) -> None:
    with pytest.raises(InputError, match="No job"):
        choose_workload([], board)
    with pytest.raises(InputError, match=r"train\.py:factory"):
        choose_workload(["train.py"], board)
    with pytest.raises(JobError, match="batch size"):
        choose_workload(["python", "train.py"], board)
    with pytest.raises(InputError, match="cannot be simulated"):
        choose_workload(["python", "train.py", "{batch_size}"], open_device("virtual:nano"))
