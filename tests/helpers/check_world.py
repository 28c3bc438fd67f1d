"""Checks that take seconds instead of a minute, and boards that show the load of one."""

from __future__ import annotations

import pytest
from kernel_mount import Mount

import underwatt.api.check as module
from underwatt.measure.measurement import MeasureOptions

LOAD = "load_script.py"  # as it stands in the command line of the load's process


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a shorter time at everything."""
    for name, value in (("LOAD_S", 1.2), ("FALL_S", 1.0), ("HOLD_S", 0.4), ("LATEST_S", 0.3), ("SETTINGS", 4)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "OPTIONS", MeasureOptions(precision=0.2, limit_s=0.8))


def in_use(mount: Mount) -> Mount:
    """A board whose GPU was used once, and which draws more while the load of a check runs."""
    mount.tell("use_gpu")
    mount.tell("loader", LOAD)
    return mount
