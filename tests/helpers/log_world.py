"""How a made-up run begins."""

from __future__ import annotations

from typing import Any

from underwatt.events import Started
from underwatt.records import DeviceInfo, WorkloadInfo


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
