"""Train as fast as a power budget allows: batch size and power mode chosen together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underwatt.adapters.lightning import BudgetCallback as LightningCallback
    from underwatt.adapters.transformers import BudgetCallback as TransformersCallback
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

# Resolved when first used, so that `import underwatt` in a training script costs next to nothing. No module directly in
# the package may have one of these names: importing it would hide what is called so here.
_HOMES = {
    "Budget": "budget:Budget",
    "Job": "jobs.job:Job",
    "LightningCallback": "adapters.lightning:BudgetCallback",
    "Measurement": "records:Measurement",
    "Plan": "planning.choice:Plan",
    "PowerMode": "records:PowerMode",
    "Profile": "records:Profile",
    "RunOptions": "jobs.runs:RunOptions",
    "RunResult": "jobs.runs:RunResult",
    "Schedule": "budget:Schedule",
    "Session": "device.session:Session",
    "Setting": "records:Setting",
    "Store": "store.store:Store",
    "TransformersCallback": "adapters.transformers:BudgetCallback",
    "Tuner": "adapters.tuner:Tuner",
    "UnderwattError": "errors:UnderwattError",
    "change_budget": "runlog.inbox:change_budget",
    "check_forecast": "api.decide:check_forecast",
    "converge": "api:converge",
    "count_cost": "jobs.cost:count_cost",
    "devices": "device.registry:devices",
    "export": "api.known:export",
    "forecast": "api.decide:forecast",
    "import_file": "api.known:import_file",
    "open_device": "device.registry:open_device",
    "plan": "api.decide:plan",
    "profile": "api:profile",
    "read_run": "api:read_run",
    "report": "api:report",
    "report_figures": "api:report_figures",
    "restore": "device.session:restore_all",
    "run": "api:run",
    "set_mode": "device.session:set_and_leave",
    "tune": "adapters.tuner:tune",
    "watch": "live:watch",
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
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(import_module(f"underwatt.{module}"), attribute)
    if name == "__version__":
        return import_module("importlib.metadata").version("underwatt")
    raise AttributeError(f"module 'underwatt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
