"""Train as fast as a power budget allows: batch size and power mode chosen together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underwatt.adapters.tuner import tune
    from underwatt.device.registry import open_device
    from underwatt.device.session import Session
    from underwatt.errors import UnderwattError
    from underwatt.jobs.cost import count_cost
    from underwatt.jobs.job import Job
    from underwatt.records import Measurement, PowerMode, Profile, Setting

__version__: str  # written once, in pyproject.toml, and read from what pip installed

# Resolved when first used, so that `import underwatt` in a training script costs next to nothing.
_HOMES = {
    "Job": "underwatt.jobs.job",
    "Measurement": "underwatt.records",
    "PowerMode": "underwatt.records",
    "Profile": "underwatt.records",
    "Session": "underwatt.device.session",
    "Setting": "underwatt.records",
    "UnderwattError": "underwatt.errors",
    "count_cost": "underwatt.jobs.cost",
    "open_device": "underwatt.device.registry",
    "tune": "underwatt.adapters.tuner",
}

__all__ = [
    "Job",
    "Measurement",
    "PowerMode",
    "Profile",
    "Session",
    "Setting",
    "UnderwattError",
    "__version__",
    "count_cost",
    "open_device",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("underwatt")
    raise AttributeError(f"module 'underwatt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
