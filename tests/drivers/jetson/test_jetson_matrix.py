"""Each cell of the matrix in docs/jetson.md: what is read and set on a board with a release, and who may."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_matrix import CELLS, Cell
from kernel_boards import Boards, as_nobody
from kernel_mount import Mount, why_not

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.records import PowerMode

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
DOCS = Path(__file__).parents[3] / "docs" / "jetson.md"
NAMES = {
    "nano": "Nano",
    "tx2": "TX2",
    "tx2-nx": "TX2 NX",
    "xavier-nx": "Xavier NX",
    "agx-xavier": "AGX Xavier",
    "orin-nano": "Orin Nano",
    "orin-nano-super": "Orin Nano Super",
    "orin-nx": "Orin NX",
    "agx-orin": "AGX Orin",
    "thor": "AGX Thor",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Boards]:
    with Boards() as boards:
        yield boards


def largest(device: JetsonDevice) -> PowerMode:
    """All that the board can do: its largest stock mode."""
    return max(device.stock_modes().values(), key=lambda mode: math.prod(mode.knobs().values()), default=PowerMode())


def row(cell: Cell, mount: Mount) -> str:
    """A line of the table in the docs, from what the driver finds: power as a user without rights sees it."""
    power = as_nobody(lambda: next(c for c in JetsonDevice(mount.root).capabilities() if c.name == "power"))
    asleep = JetsonDevice(mount.root)
    gpu_first = cell.board != "thor" and asleep.space.knob("gpu_mhz") is None
    mount.tell("use_gpu")
    device = JetsonDevice(mount.root)
    mode = largest(device)
    known = (
        f"{mode.cpu_cores} cores, CPU to {mode.cpu_mhz:g}, GPU to {mode.gpu_mhz:g}{' once used' if gpu_first else ''}"
        if mode.cpu_cores
        else "–"
    )
    memory = f", memory to {mode.mem_mhz:g}" if mode.mem_mhz else ""
    rails = power.detail.removeprefix("total of ")
    return f"| {NAMES[cell.board]} | {cell.release} | `{rails}` | {known}{memory} |"


@pytest.mark.parametrize("key", CELLS, ids=lambda key: "-".join(key))
def test_the_docs_say_what_the_driver_finds(pool: Boards, key: tuple[str, str]) -> None:
    cell = CELLS[key]
    assert row(cell, pool.board(*key, awake=False)) in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", CELLS, ids=lambda key: "-".join(key))
def test_power_responds_to_what_is_set_and_all_comes_back(pool: Boards, key: tuple[str, str]) -> None:
    mount = pool.board(*key)
    device = JetsonDevice(mount.root)
    if not device.space.knobs:
        assert device.read_power().power_w > 0
        return
    found, snapshot = mount.settled(), device.snapshot()
    powers_w = []
    for mode in (device.space.lowest, device.space.highest):
        device.apply(mode)
        assert device.read_state().running.cpu_cores == mode.cpu_cores
        powers_w.append(device.read_power().power_w)
    assert powers_w[0] < powers_w[1]
    device.restore(snapshot)
    assert mount.settled(0.0) == found
