"""Logs of made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from underwatt.events import BudgetChanged, SettingChanged, Started
from underwatt.records import DeviceInfo, PowerMode, Setting, WorkloadInfo
from underwatt.runlog.log import RunLog, read_log
from underwatt.runlog.run_record import RunRecord


def started(**changed: Any) -> Started:
    """A run of digits on a virtual Nano, with other fields where these matter."""
    told: dict[str, Any] = {
        "at_s": 0.0,
        "started_at": "2026-07-01T12:00:00+02:00",
        "job": "digits",
        "device": DeviceInfo("virtual", "Jetson Nano (virtual)", "nano", "virtual:nano", simulated=True),
        "workload": WorkloadInfo("digits", "abc"),
        "budget": "10 W mean",
        "batch_sizes": (8, 16, 32),
        "simulated": True,
        "version": "0.1.0",
    }
    return Started(**told | changed)


def recorded(
    path: Path,
    watts: list[float],
    *,
    budgets: tuple[tuple[float, float | None], ...] = ((0.0, 10.0),),
    **marks: list[float],
) -> RunRecord:
    """A log with ten readings a second from 0.1 s on; ``settings`` are the times at which the setting changed."""
    with RunLog(path) as log:
        log.write(started())
        for at_s, budget_w in budgets:
            log.write(BudgetChanged(at_s=at_s, power_w=budget_w, why="changed"))
        for number, at_s in enumerate(marks.get("settings", [])):
            log.write(SettingChanged(at_s=at_s, setting=Setting(PowerMode(), number + 1), state="holding", why=""))
        for number, power_w in enumerate(watts, 1):
            log.power(number / 10, power_w)
    return read_log(path)
