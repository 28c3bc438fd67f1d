"""Tables of measured power modes, as the PowerTrain authors publish them, read into measurements."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.records import Measurement, PowerMode, Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

# The tables without a batch size column were all measured with mini-batches of 16.
DEFAULT_BATCH_SIZE = 16

_COLUMNS = ("cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "time_ms", "power_w")


def read_powertrain_table(path: Path | str, *, batch_size: int = DEFAULT_BATCH_SIZE) -> tuple[Measurement, ...]:
    """Measurements from a CSV file with the columns cores, cpu_mhz, gpu_mhz, mem_mhz, time_ms and power_w.

    A column ``batch_size`` is used where there is one, otherwise ``batch_size`` holds for every row. Raises
    ``InputError``, naming the line, for anything that is not a measured mode.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"The table {path} cannot be read ({exc}).", hint="Give the path of a CSV file.") from exc
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"The table {path} lacks the columns {', '.join(missing)}.",
            hint=f"Its first line must name {', '.join(_COLUMNS)}, and may name batch_size.",
        )
    try:
        rows = tuple(_measurement(row, f"{path}, line {reader.line_num}", batch_size) for row in reader)
    except csv.Error as exc:
        raise InputError(f"The table {path} is not CSV at line {reader.line_num} ({exc}).") from exc
    if not rows:
        raise InputError(f"The table {path} holds no measurement.", hint="Give a table with at least one row.")
    return rows


def _measurement(row: Mapping[str, str | None], where: str, batch_size: int) -> Measurement:
    def number(name: str) -> float:
        try:
            value = float(row[name] or "")
        except ValueError as exc:
            raise InputError(f"{where}: {name} is {row[name]!r}, which is no number.") from exc
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{where}: {name} is {value:g}, and must be above zero.")
        return value

    def whole(name: str) -> int:
        value = number(name)
        if value != int(value):
            raise InputError(f"{where}: {name} is {value:g}, and must be a whole number.")
        return int(value)

    mode = PowerMode(
        cpu_cores=whole("cores"), cpu_mhz=number("cpu_mhz"), gpu_mhz=number("gpu_mhz"), mem_mhz=number("mem_mhz")
    )
    size = whole("batch_size") if "batch_size" in row else batch_size
    return Measurement(Setting(mode, size), step_s=number("time_ms") / 1e3, power_w=number("power_w"))
