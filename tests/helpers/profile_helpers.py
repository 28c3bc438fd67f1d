"""A job and boards for profiling tests: everything simulated, nothing slow."""

from __future__ import annotations

from underwatt.device.registry import open_device
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.records import WorkloadCost, WorkloadInfo

INFO = WorkloadInfo("small network", "0123")
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


def virtual(board: str = "nano", seed: int = 0) -> VirtualJetson:
    device = open_device(f"virtual:{board}?seed={seed}")
    assert isinstance(device, VirtualJetson)
    return device


def simulated(device: VirtualJetson, cost: WorkloadCost = COST) -> SimulatedWorkload:
    return SimulatedWorkload(INFO, cost, device)
