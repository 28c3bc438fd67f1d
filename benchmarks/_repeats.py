"""Tables as profiles, and those in which a setting stands several times as tables in which it stands once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.csv_tables import read_measurements
from underwatt.predict.base import by_setting
from underwatt.records import DeviceInfo, Profile, WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from underwatt.records import Measurement


def read_profile(path: Path) -> Profile:
    """A table as a profile that is named after its file."""
    name = path.stem
    return Profile(DeviceInfo("table", name, name, str(path)), WorkloadInfo(name, name), read_measurements(path))


def without_repeats(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """One measurement a setting, in the order of the first: usable repeats become their mean."""
    return tuple(
        same[0]
        if len(same) == 1
        else replace(
            same[0],
            step_s=sum(m.step_s for m in same) / len(same),
            power_w=sum(m.power_w for m in same) / len(same),
            peak_w=max(m.peak_w for m in same),
        )
        for same in by_setting(measurements).values()
    )
