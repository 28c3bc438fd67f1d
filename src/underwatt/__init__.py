"""Train as fast as a power budget allows: batch size and power mode chosen together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underwatt.adapters.lightning import LightningCallback
    from underwatt.adapters.transformers import TransformersCallback
    from underwatt.adapters.tuner import Tuner, tune
    from underwatt.api import converge, profile, read_run, report, report_figures, run
    from underwatt.api.decide import check_forecast, forecast, plan
    from underwatt.api.known import export, import_file
    from underwatt.budget import Budget, Schedule
    from underwatt.device.registry import devices, open_device
    from underwatt.device.session import Session
    from underwatt.device.session import restore_all as restore
    from underwatt.device.session import set_and_leave as set_mode
    from underwatt.errors import UnderwattError
    from underwatt.jobs.cost import count_cost
    from underwatt.jobs.job import Job
    from underwatt.jobs.runs import RunOptions, RunResult
    from underwatt.live import watch
    from underwatt.planning.choice import Plan
    from underwatt.records import Measurement, PowerMode, Profile, Setting
    from underwatt.runlog.inbox import change_budget
    from underwatt.store.store import Store

__version__: str  # written once, in pyproject.toml, and read from what pip installed

# Where a name is found when it is first used, so that `import underwatt` in a training script costs next to nothing.
# No module directly in the package may have one of these names: importing it would hide what is called so here.
_HOMES = {
    "adapters.lightning": ("LightningCallback",),
    "adapters.transformers": ("TransformersCallback",),
    "adapters.tuner": ("Tuner", "tune"),
    "api": ("converge", "profile", "read_run", "report", "report_figures", "run"),
    "api.decide": ("check_forecast", "forecast", "plan"),
    "api.known": ("export", "import_file"),
    "budget": ("Budget", "Schedule"),
    "device.registry": ("devices", "open_device"),
    "device.session": ("Session",),
    "errors": ("UnderwattError",),
    "jobs.cost": ("count_cost",),
    "jobs.job": ("Job",),
    "jobs.runs": ("RunOptions", "RunResult"),
    "live": ("watch",),
    "planning.choice": ("Plan",),
    "records": ("Measurement", "PowerMode", "Profile", "Setting"),
    "runlog.inbox": ("change_budget",),
    "store.store": ("Store",),
}
_PLACES = {name: (module, name) for module, names in _HOMES.items() for name in names} | {
    "restore": ("device.session", "restore_all"),
    "set_mode": ("device.session", "set_and_leave"),
}

__all__ = [
    "Budget",
    "Job",
    "LightningCallback",
    "Measurement",
    "Plan",
    "PowerMode",
    "Profile",
    "RunOptions",
    "RunResult",
    "Schedule",
    "Session",
    "Setting",
    "Store",
    "TransformersCallback",
    "Tuner",
    "UnderwattError",
    "__version__",
    "change_budget",
    "check_forecast",
    "converge",
    "count_cost",
    "devices",
    "export",
    "forecast",
    "import_file",
    "open_device",
    "plan",
    "profile",
    "read_run",
    "report",
    "report_figures",
    "restore",
    "run",
    "set_mode",
    "tune",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        module, attribute = _PLACES[name]
        return getattr(import_module(f"underwatt.{module}"), attribute)
    if name == "__version__":
        return import_module("importlib.metadata").version("underwatt")
    raise AttributeError(f"module 'underwatt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
