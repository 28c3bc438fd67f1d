"""The load that a device is checked under: simulated on simulated devices, else a small training in a process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from underwatt.device.base import SimulatesLoad
from underwatt.jobs.command import CommandWorkload, Limits
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.records import WorkloadCost, WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.device.base import Device
    from underwatt.measure.workload import Workload

# ResNet18 at 32×32 with AdamW, as `underwatt.jobs.cost` counts it.
RESNET18 = WorkloadCost(
    flops_per_sample=3.329e9,
    bytes_per_sample=4.30e7,
    bytes_per_step=1.073e9,
    kernels_per_step=177,
    load_bytes_per_sample=1.23e4,
    parameters=1.1174e7,
    state_bytes=1.788e8,
    activation_bytes_per_sample=4.70e6,
)
LOAD_BATCH_SIZES = (8, 32)
SCRIPT = Path(__file__).with_name("load_script.py")
PROBE_S = 60.0  # a Nano takes a quarter of that to import PyTorch
FIRST_STEP_S = 120.0


class Load(NamedTuple):
    """What to run, and whether it will use the GPU."""

    workload: Workload
    on_gpu: bool


def load_for(device: Device) -> Load:
    """The load that suits a device; looks for a Python on this machine whose PyTorch can use a GPU."""
    if isinstance(device, SimulatesLoad):
        info = WorkloadInfo("ResNet-18 at 32×32 (simulated)", "load-resnet18")
        return Load(SimulatedWorkload(info, RESNET18, device), on_gpu=True)
    gpu = [device.info.address.removeprefix("nvml:")] if device.info.backend == "nvml" else []
    python = next((found for found in _pythons() if _sees_gpu(found, gpu)), "")
    where = "gpu" if python else "cpu"
    info = WorkloadInfo(f"matrix products on the {where.upper()}", f"load-products-{where}")
    command = [python or sys.executable, str(SCRIPT), "{batch_size}", *(gpu if python else [])]
    limits = Limits(first_beat_s=FIRST_STEP_S, beat_s=FIRST_STEP_S)
    return Load(CommandWorkload(command, limits=limits, info=info), on_gpu=bool(python))


def _pythons() -> Iterator[str]:
    """This Python, and those of the system: NVIDIA builds PyTorch for the Python that its own image brings."""
    found = map(shutil.which, (sys.executable, "/usr/bin/python3", "python3"))
    yield from dict.fromkeys(python for python in found if python)


def _sees_gpu(python: str, gpu: list[str]) -> bool:
    try:
        asked = subprocess.run(
            [python, str(SCRIPT), "--probe", *gpu], capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
