"""Numbers as a person says them."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.events import BudgetChanged
    from underwatt.planning.choice import Interval
    from underwatt.records import DeviceInfo, PowerMode

SHORTEST_S = 5.0  # of a run whose watts mean something: sensors follow within about 2 s
KNOB_NAMES = {
    "cpu_cores": "CPU cores",
    "cpu_mhz": "CPU clock (MHz)",
    "gpu_mhz": "GPU clock (MHz)",
    "mem_mhz": "memory clock (MHz)",
    "power_limit_w": "power limit (W)",
}


def set_command(device: DeviceInfo, mode: PowerMode) -> str:
    """The command that sets a mode by hand; none for a device that lives and dies with one process."""
    if device.in_process or not mode.knobs():
        return ""
    knobs = [part for name, value in mode.knobs().items() for part in (f"--{name.replace('_', '-')}", f"{value:g}")]
    return shlex.join(["underwatt", "set", "--device", device.address, *knobs])


def figures(value: float, digits: int = 3) -> str:
    """A number with so many significant figures, never in scientific notation where it can be helped."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    value = float(f"{value:.{digits}g}") if abs(value) < 10**digits else value  # 9.998 is 10.0, not 10.00
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"


def duration(seconds: float, digits: int = 3) -> str:
    """Milliseconds up to days, with so many significant figures."""
    if not math.isfinite(seconds):
        return "never"
    if seconds < 1:
        return f"{figures(1e3 * seconds, digits)} ms" if seconds else "0 s"
    for unit_s, name, most in ((1, "s", 99.5), (60, "min", 99.5), (3600, "h", 72)):
        if seconds < most * unit_s:
            return f"{figures(seconds / unit_s, digits)} {name}"
    return f"{figures(seconds / 86400, digits)} days"


def watts(power_w: float) -> str:
    """Watts with three figures."""
    return f"{figures(power_w)} W"


def bound(power_w: float) -> str:
    """Watts of a budget, as they were given."""
    return f"{power_w:g} W"


def allowed(step: BudgetChanged) -> str:
    """What a step of the budget allows: 3 W peak, 3 W mean over 60 s."""
    if step.power_w is None or math.isinf(step.power_w):
        return "no bound on watts"
    window = f" over {step.window_s:g} s" if step.window_s else ""
    return f"{bound(step.power_w)} {step.watts}{window}"


def mean_power(energy_j: float, time_s: float) -> str:
    """Mean watts of a whole run; says so where it was too short for its sensor."""
    lag = "" if time_s >= SHORTEST_S else " (too short for watts and joules: the sensor lags)"
    return f"{watts(energy_j / max(time_s, 1e-9))} on average{lag}"


def energy(energy_j: float) -> str:
    """Joules where they are few, else watt-hours."""
    unit_j, name = energy_unit(energy_j)
    return f"{figures(energy_j / unit_j)} {name}"


def span(interval: Interval, say: Callable[[float], str]) -> str:
    """The bounds of an interval in the words of ``say``."""
    return f"{say(interval.low)} to {say(interval.high)}"


def counted(count: int, what: str) -> str:
    """So many of something: one reading, 2 readings."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def listed(items: Sequence[str]) -> str:
    """Items as a sentence names them: a, b and c."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.0f}%"


def times(ratio: float) -> str:
    """How many times as long."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds in the unit in which an axis up to ``longest_s`` reads well, and its name."""
    for least, unit_s, name in ((3, 86400.0, "days"), (2, 3600.0, "h"), (2, 60.0, "min"), (1, 1.0, "s")):
        if longest_s >= least * unit_s:
            return unit_s, name
    return 1e-3, "ms"


def energy_unit(largest_j: float) -> tuple[float, str]:
    """Joules in the unit in which an axis up to ``largest_j`` reads well, and its name."""
    for least_j, unit_j, name in ((3.6e6, 3.6e6, "kWh"), (360, 3600.0, "Wh"), (1, 1.0, "J")):
        if largest_j >= least_j:
            return unit_j, name
    return 1e-3, "mJ"
