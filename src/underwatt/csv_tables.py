"""Tables of measured settings as CSV: our own export, and the tables that the PowerTrain authors publish."""

from __future__ import annotations

import contextlib
import csv
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from underwatt.errors import InputError, UnderwattError
from underwatt.records import Measurement, PowerMode, Setting, columns, from_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# The tables without a batch size column were all measured with mini-batches of 16.
DEFAULT_BATCH_SIZE = 16
NATIVE_MARK = {"device_name", "step_s"}  # the columns that tell our own form

_COLUMNS = ("cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "time_ms", "power_w")
_Item = TypeVar("_Item")
Rows = list[tuple[int, dict[str, str]]]  # with the number of the line


def read_measurements(path: Path | str) -> tuple[Measurement, ...]:
    """The measurements of one workload on one device: an exported profile, or a PowerTrain table.

    The latter has the columns cores, cpu_mhz, gpu_mhz, mem_mhz, time_ms, power_w and, where it is not 16, batch_size.
    Raises ``InputError``, naming the line, for anything that is not a measured mode.
    """
    path = Path(path)
    names, rows = read_rows(path)
    parse: Callable[[dict[str, str]], Measurement] = _powertrain_measurement
    if names >= NATIVE_MARK:
        parse = cells_reader(Measurement)
        if len({(row.get("device"), row.get("workload")) for _, row in rows}) > 1:
            raise InputError(f"The table {path} holds more than one profile.", hint="Give a table of one.")
    elif missing := [name for name in _COLUMNS if name not in names]:
        raise InputError(
            f"The table {path} lacks the columns {', '.join(missing)}.",
            hint=f"Its first line must name {', '.join(_COLUMNS)}, and may name batch_size.",
        )
    found = tuple(parsed(path, rows, parse))
    if not found:
        raise InputError(f"The table {path} holds no measurement.", hint="Give a table with at least one row.")
    return found


def read_rows(path: Path) -> tuple[set[str], Rows]:
    """The columns and the rows of a CSV file, whatever they are; a spreadsheet's byte order mark is dropped."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return set(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"{path} cannot be read as CSV ({exc}).", hint="Give the path of a CSV file.") from exc


def parsed(path: Path, rows: Rows, parse: Callable[[dict[str, str]], _Item]) -> Iterator[_Item]:
    """Each row made into something; a bad one is named by its line."""
    for line, row in rows:
        try:
            yield parse(row)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, UnderwattError) as exc:
            raise InputError(
                f"{path}, line {line}: {_what_is_wrong(exc)}.", hint="Mend that line, or export the table again."
            ) from exc


def _what_is_wrong(error: Exception) -> str:
    """An error of a row in a person's words."""
    if isinstance(error, UnderwattError):
        return error.message.rstrip(".")
    if isinstance(error, KeyError):
        return f"there is no column {error.args[0]}"
    if isinstance(error, TypeError):
        return "it has fewer cells than the first line"
    return str(error)


def cells_reader(record: type[_Item]) -> Callable[[Mapping[str, str | None]], _Item]:
    """What makes records of the rows of our own export."""
    numbers = {column.name for column in columns(record) if column.kind in (int, float)}
    return lambda cells: from_row(
        record, {name: _number(text) if name in numbers else text for name, text in cells.items()}
    )


def positive(row: Mapping[str, str | None], name: str) -> float:
    """The number in a cell that must be above zero."""
    try:
        value = float(row[name] or "")
    except ValueError as exc:
        raise InputError(f"{name} is {row[name]!r:.60}, which is no number.") from exc
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value:g}, and must be above zero.")
    return value


def _number(text: str | None) -> float | str | None:
    """The number in a cell, nothing for a blank one; other text as it is, for its column to refuse."""
    if not text or text.lower() == "nan":
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _powertrain_measurement(row: Mapping[str, str | None]) -> Measurement:
    def whole(name: str) -> int:
        if (value := positive(row, name)) != int(value):
            raise InputError(f"{name} is {value:g}, and must be a whole number.")
        return int(value)

    number = partial(positive, row)
    mode = PowerMode(whole("cores"), number("cpu_mhz"), number("gpu_mhz"), number("mem_mhz"))
    size = whole("batch_size") if "batch_size" in row else DEFAULT_BATCH_SIZE
    return Measurement(Setting(mode, size), step_s=number("time_ms") / 1e3, power_w=number("power_w"))
