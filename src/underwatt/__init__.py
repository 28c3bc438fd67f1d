"""Train as fast as a power budget allows: batch size and power mode chosen together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underwatt.adapters.lightning import LightningCallback as LightningCallback
    from underwatt.adapters.transformers import TransformersCallback as TransformersCallback
    from underwatt.adapters.tuner import Tuner as Tuner, tune as tune
    from underwatt.api import (
        converge as converge,
        profile as profile,
        read_run as read_run,
        report as report,
        report_figures as report_figures,
        run as run,
    )
    from underwatt.api.check import check as check
    from underwatt.api.lookup import export as export, import_file as import_file
    from underwatt.api.plan import check_forecast as check_forecast, forecast as forecast, plan as plan
    from underwatt.budget import Budget as Budget, Schedule as Schedule
    from underwatt.device.registry import devices as devices, open_device as open_device
    from underwatt.device.session import Session as Session, restore as restore, set_mode as set_mode
    from underwatt.errors import UnderwattError as UnderwattError
    from underwatt.jobs.cost import count_cost as count_cost
    from underwatt.jobs.job import Job as Job
    from underwatt.jobs.runs import RunOptions as RunOptions, RunResult as RunResult
    from underwatt.live import watch as watch
    from underwatt.planning.choice import Plan as Plan
    from underwatt.records import (
        Measurement as Measurement,
        PowerMode as PowerMode,
        Profile as Profile,
        Setting as Setting,
    )
    from underwatt.runlog.inbox import change_budget as change_budget
    from underwatt.store.store import Store as Store

__version__: str  # written once, in pyproject.toml, and read from what pip installed

# Where a name is found when it is first used, so that `import underwatt` in a training script costs next to nothing.
# No module directly in the package may have one of these names: importing it would hide what is called so here.
_HOMES = {
    "adapters.lightning": ("LightningCallback",),
    "adapters.transformers": ("TransformersCallback",),
    "adapters.tuner": ("Tuner", "tune"),
    "api": ("converge", "profile", "read_run", "report", "report_figures", "run"),
    "api.check": ("check",),
    "api.lookup": ("export", "import_file"),
    "api.plan": ("check_forecast", "forecast", "plan"),
    "budget": ("Budget", "Schedule"),
    "device.registry": ("devices", "open_device"),
    "device.session": ("Session", "restore", "set_mode"),
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
_PLACES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted((*_PLACES, "__version__"))


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"underwatt.{_PLACES[name]}"), name)
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("underwatt")
        except metadata.PackageNotFoundError:  # a checkout on the path
            return "0+unknown"
    raise AttributeError(f"module 'underwatt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
