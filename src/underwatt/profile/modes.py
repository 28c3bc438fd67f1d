"""Which power modes a profile covers when the user names them: a grid, or a file."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from underwatt.errors import InputError, ModeError
from underwatt.records import KNOBS, PowerMode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from underwatt.device.space import ModeSpace

GRID_STEPS = 12
_MAIN_KNOBS = ("gpu_mhz", "power_limit_w", "cpu_mhz")  # the first that may be set makes the grid


def grid_modes(space: ModeSpace) -> list[PowerMode]:
    """The table of the published method: every GPU clock (or power limit), all else at its highest."""
    main = next((knob for name in _MAIN_KNOBS if (knob := space.knob(name))), None)
    if main is None:
        return [space.highest]
    return [space.highest.with_knobs(**{main.name: value}) for value in thinned(main.values, GRID_STEPS)]


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of some values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def modes_from_file(path: Path, space: ModeSpace) -> list[PowerMode]:
    """Modes from a CSV file with knobs as columns; each must be allowed on the device."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = [name for name in reader.fieldnames or () if name in KNOBS]
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"The modes in {path} cannot be read ({exc}).") from exc
    if not columns or not rows:
        raise InputError(
            f"{path} names no modes.", hint=f"Give a CSV file with some of these columns: {', '.join(KNOBS)}."
        )
    modes: list[PowerMode] = []
    for line, row in rows:
        try:
            modes.append(space.check(PowerMode.of({name: float(row[name]) for name in columns if row[name]})))
        except (ValueError, TypeError, InputError, ModeError) as exc:
            raise InputError(f"{path}, line {line}: {exc}") from exc
    return modes
