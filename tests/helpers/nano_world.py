"""A simulated Jetson Nano, a job of known cost on it, and the settings to choose from."""

from __future__ import annotations

from profile_helpers import COST as COST, simulated, virtual

from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.predict.base import SettingArray

SIZES = (8, 32, 64, 512)  # 512 does not fit the board


def board() -> tuple[VirtualJetson, SimulatedWorkload]:
    device = virtual()
    return device, simulated(device)


def settings_of(device: VirtualJetson, sizes: tuple[int, ...] = SIZES) -> SettingArray:
    return SettingArray.product(tuple(knob.name for knob in device.space.knobs), device.space.matrix(), sizes)
