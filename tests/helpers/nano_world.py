"""A simulated Jetson Nano, a job of known cost on it, and the settings to choose from."""

from __future__ import annotations

from underwatt.device.registry import open_device
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.predict.base import SettingArray
from underwatt.records import WorkloadCost, WorkloadInfo

COST = WorkloadCost(
    flops_per_sample=5e8,
    bytes_per_sample=1e7,
    bytes_per_step=1e8,
    kernels_per_step=300,
    load_bytes_per_sample=1e4,
    parameters=1e7,
    state_bytes=1.6e8,
    activation_bytes_per_sample=2e7,
)
SIZES = (8, 32, 64, 512)  # 512 does not fit the board


def board() -> tuple[VirtualJetson, SimulatedWorkload]:
    device = open_device("virtual:nano")
    assert isinstance(device, VirtualJetson)
    return device, SimulatedWorkload(WorkloadInfo("small", "small"), COST, device)


def settings_of(device: VirtualJetson, sizes: tuple[int, ...] = SIZES) -> SettingArray:
    return SettingArray.product(tuple(knob.name for knob in device.space.knobs), device.space.matrix(), sizes)
