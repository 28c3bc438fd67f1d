"""Reading the field's tables of measured power modes.

Columns: ``cores, cpu_mhz, gpu_mhz, mem_mhz, [batch_size,] time_ms, power_w``.
"""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.records import Measurement, PowerMode, Setting

if TYPE_CHECKING:
    from pathlib import Path

TABLE_BATCH_SIZE = 16  # PowerTrain's tables were measured at this mini-batch
_COLUMNS = ("cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "time_ms", "power_w")


def read_powertrain_table(path: Path, batch_size: int = TABLE_BATCH_SIZE) -> tuple[Measurement, ...]:
    """The rows of a table as measurements; ``batch_size`` is for tables without that column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path} has no column {', '.join(missing)}.", hint=f"It needs {', '.join(_COLUMNS)}.")
            rows = tuple(_measurement(path, reader.line_num, row, batch_size) for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"The table {path} cannot be read ({exc}).") from exc
    if not rows:
        raise InputError(f"The table {path} has no rows.")
    return rows


def _measurement(path: Path, line: int, row: dict[str, str], batch_size: int) -> Measurement:
    try:
        time_ms, power_w = float(row["time_ms"]), float(row["power_w"])
        if not (math.isfinite(time_ms) and time_ms > 0 and math.isfinite(power_w) and power_w > 0):
            raise ValueError("time_ms and power_w must be positive numbers")
        mode = PowerMode(int(row["cores"]), float(row["cpu_mhz"]), float(row["gpu_mhz"]), float(row["mem_mhz"]))
        setting = Setting(mode, int(row.get("batch_size") or batch_size))
    except (ValueError, TypeError, InputError) as exc:
        raise InputError(f"{path}, line {line}: {exc}") from exc
    return Measurement(setting, step_s=time_ms / 1000, power_w=power_w)
