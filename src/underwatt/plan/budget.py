"""What may be spent: watts, and where asked for joules and time; read from text such as ``10W``, ``50Wh`` or ``2h``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from underwatt.errors import InputError

if TYPE_CHECKING:
    from underwatt.records import Measurement

_POWER = {"mW": 1e-3, "W": 1.0, "kW": 1e3}
_ENERGY = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}
_TIME = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BOUNDS = {
    unit: (name, factor)
    for name, factors in (("power_w", _POWER), ("energy_j", _ENERGY), ("deadline_s", _TIME))
    for unit, factor in factors.items()
}
_SPELLED = {"watt": "W", "watts": "W"}
# Case matters only where milli and mega would be mixed up: 10w is 10 W, but 10mj is nothing.
_ANY_CASE = {unit.lower(): bound for unit, bound in _BOUNDS.items() if unit not in ("mW", "MJ")}
_UNITS = f"{', '.join(_POWER)} for power, {', '.join(_ENERGY)} for energy, {', '.join(_TIME)} for a deadline"
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
_QUANTITY = re.compile(rf"{_NUMBER.pattern}\s*([a-zµ]+)", re.IGNORECASE)
_MEANING = re.compile(r"(peak|mean)(?:\s+over\s+(.+))?", re.IGNORECASE)


class Watts(str, Enum):
    """What the watts of a budget bound: every reading, or the mean over a window."""

    PEAK = "peak"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that a setting must keep; ``None`` is no bound, and there is at least one.

    ``window_s`` says over how long watts are averaged; without it, over the whole training.
    """

    power_w: float | None = None
    watts: Watts = Watts.MEAN
    window_s: float | None = None
    energy_j: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        bounds = {"power": self.power_w, "energy": self.energy_j, "deadline": self.deadline_s}
        if all(value is None for value in bounds.values()):
            raise InputError("A budget must bound power, energy or time.", hint="Give one, such as 10W.")
        for name, value in {**bounds, "window": self.window_s}.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"The {name} of a budget must be a positive number, not {value:g}.")
        if self.window_s is not None and (self.power_w is None or self.watts is Watts.PEAK):
            raise InputError("Only mean watts have a window.", hint="Write for instance 10W mean over 60s.")

    def drawn_w(self, measurement: Measurement) -> float:
        """The watts of a measurement that this budget bounds: the upper end of their 95% interval, where one is known.

        Everything that asks whether a measured setting keeps a budget asks this, so that all give one answer.
        """
        drawn = measurement.peak_w if self.watts is Watts.PEAK else measurement.power_w
        if measurement.usable and not math.isfinite(drawn):
            raise InputError(
                f"The {self.watts.value} power of {measurement.setting} was not recorded.",
                hint="Measure it again, or give the budget as mean watts.",
            )
        return drawn + (measurement.power_w_ci95 if math.isfinite(measurement.power_w_ci95) else 0.0)

    def allows(self, measurement: Measurement) -> bool:
        """Whether the measured watts keep the budget; energy and deadline depend on the samples to the target."""
        return measurement.usable and (self.power_w is None or self.drawn_w(measurement) <= self.power_w)

    def __str__(self) -> str:
        parts = []
        if self.power_w is not None:
            window = "" if self.window_s is None else f" over {self.window_s:g} s"
            parts.append(f"{self.power_w:g} W {self.watts.value}{window}")
        if self.energy_j is not None:
            parts.append(_said(self.energy_j, ("J", "Wh", "kWh"), _ENERGY))
        if self.deadline_s is not None:
            parts.append(_said(self.deadline_s, ("s", "min", "h"), _TIME))
        return ", ".join(parts)


def _said(value: float, units: tuple[str, ...], factors: dict[str, float]) -> str:
    """A value in the largest of the units in which it is at least 1."""
    fitting = [unit for unit in units if value >= factors[unit] * (1 - 1e-9)]
    unit = fitting[-1] if fitting else units[0]
    return f"{value / factors[unit]:.4g} {unit}"


def parse_budget(*texts: str) -> Budget:
    """A budget from one text for each bound; its unit says which: ``10W``, ``50Wh`` or ``2h``.

    Watts may be followed by what they bound: ``10W peak``, ``10W mean`` (the default) or ``10W mean over 60s``.
    """
    found: dict[str, float] = {}
    meaning, window_s = Watts.MEAN, None
    for text in texts:
        name, value, rest = parse_quantity(text)
        if name in found:
            raise InputError(f"The budget bounds {_SAID[name]} twice, the second time with {text!r}.")
        found[name] = value
        if rest and name == "power_w":
            meaning, window_s = _meaning(rest, text)
        elif rest:
            raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint="Only watts are peak or mean.")
    if not found:
        raise InputError("The budget is empty.", hint=f"Give a number with a unit: {_UNITS}.")
    return Budget(watts=meaning, window_s=window_s, **found)


_SAID = {"power_w": "power", "energy_j": "energy", "deadline_s": "time"}


def parse_quantity(text: str) -> tuple[str, float, str]:
    """Which bound a text gives, its value, and what follows: ``10W peak`` is ``("power_w", 10.0, "peak")``."""
    match = _QUANTITY.match(text.strip())
    if match is None and _NUMBER.fullmatch(text.strip()):
        raise InputError(
            f"{text!r} is no budget: it has no unit.", hint=f"Did you mean {text.strip()}W? Units: {_UNITS}."
        )
    if match is None:
        raise InputError(f"{text!r} is no budget.", hint=f"Give a number with a unit: {_UNITS}.")
    number, unit = float(match[1]), _SPELLED.get(match[2].lower(), match[2])
    bound = _BOUNDS.get(unit) or _ANY_CASE.get(unit.lower())
    if bound is None:
        raise InputError(f"The unit {unit!r} in the budget {text!r} is unknown.", hint=f"Use {_UNITS}.")
    name, factor = bound
    value = number * factor
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"A budget must be above zero and finite, and {text!r} is not.")
    return name, value, text.strip()[match.end() :].strip()


def _meaning(rest: str, text: str) -> tuple[Watts, float | None]:
    match = _MEANING.fullmatch(rest)
    if match is None:
        raise InputError(
            f"{rest!r} in the budget {text!r} makes no sense.", hint="Watts are peak, mean, or mean over 60s."
        )
    meaning = Watts(match[1].lower())
    if match[2] is None:
        return meaning, None
    name, window_s, more = parse_quantity(match[2])
    if name != "deadline_s" or more or meaning is Watts.PEAK:
        raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint="Write for instance mean over 60s.")
    return meaning, window_s
