"""An NVML that answers from memory, for what may not be tried on a GPU that is not ours: setting it, and its faults.

The reads are also verified against a real GPU; the record of that is in benchmarks/results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml


class FakeNvml:
    """One card; ``failing`` names calls that answer with an NVML error code."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
    NVML_ERROR_FUNCTION_NOT_FOUND = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    NVML_FI_DEV_POWER_INSTANT = pynvml.NVML_FI_DEV_POWER_INSTANT
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    nvmlClocksThrottleReasonSwPowerCap = pynvml.nvmlClocksThrottleReasonSwPowerCap  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown  # noqa: N815

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.limit_mw = 250_000
        self.limit_step_mw = 1
        self.gpu_lock: tuple[int, int] | None = None
        self.mem_lock: tuple[int, int] | None = None
        self.power_mw = 123_456
        self.energy_mj = 10_000_000
        self.throttle_bits = 0
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not (name.startswith("nvml") and callable(value)):
            return value

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise pynvml.NVMLError(self.failing[name])
            return value(*arguments)

        return call

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetUUID(self, _: str) -> bytes:
        return b"GPU-1"

    def nvmlDeviceGetName(self, _: str) -> str:
        return "Fake A40"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "999.1"

    def nvmlDeviceGetFieldValues(self, _: str, fields: list[int]) -> list[Any]:
        assert fields == [pynvml.NVML_FI_DEV_POWER_INSTANT]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.power_mw))]

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:
        return self.power_mw

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:
        self.energy_mj += 5
        return self.energy_mj

    def nvmlDeviceGetPowerManagementLimitConstraints(self, _: str) -> tuple[int, int]:
        return (100_000, 300_000)

    def nvmlDeviceGetSupportedMemoryClocks(self, _: str) -> list[int]:
        return [7251, 405]

    def nvmlDeviceGetSupportedGraphicsClocks(self, _: str, mem_mhz: int) -> list[int]:
        assert mem_mhz == 7251
        return list(range(1740, 195, -15))

    def nvmlDeviceGetClockInfo(self, _: str, kind: int) -> int:
        return 1740 if kind == self.NVML_CLOCK_SM else 7251

    def nvmlDeviceGetPowerManagementLimit(self, _: str) -> int:
        return self.limit_mw

    def nvmlDeviceGetTemperature(self, _: str, __: int) -> int:
        return 55

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: str) -> int:
        return self.throttle_bits

    def nvmlDeviceSetPowerManagementLimit(self, _: str, limit_mw: int) -> None:
        self.limit_mw = limit_mw // self.limit_step_mw * self.limit_step_mw

    def nvmlDeviceSetGpuLockedClocks(self, _: str, low_mhz: int, high_mhz: int) -> None:
        self.gpu_lock = (low_mhz, high_mhz)

    def nvmlDeviceSetMemoryLockedClocks(self, _: str, low_mhz: int, high_mhz: int) -> None:
        self.mem_lock = (low_mhz, high_mhz)

    def nvmlDeviceResetGpuLockedClocks(self, _: str) -> None:
        self.gpu_lock = None

    def nvmlDeviceResetMemoryLockedClocks(self, _: str) -> None:
        self.mem_lock = None
