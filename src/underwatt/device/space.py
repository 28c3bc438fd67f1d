"""The space of power modes a device allows, as a product of knobs that is never written out."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.errors import InputError, ModeError
from underwatt.records import KNOBS, PowerMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

# Sysfs keeps Hz or kHz, tables keep decimals: two clocks closer than this are the same clock.
SAME_VALUE_TOLERANCE = 0.06


@dataclass(frozen=True, slots=True)
class Knob:
    """The values one knob may take, ascending; a continuous knob takes anything from the first to the last."""

    name: str
    values: tuple[float, ...]
    continuous: bool = False

    def __post_init__(self) -> None:
        if self.name not in KNOBS:
            raise InputError(f"There is no knob {self.name!r}; the knobs are {', '.join(KNOBS)}.")
        if not self.values or list(self.values) != sorted(set(self.values)):
            raise InputError(f"The values of {self.name} must be ascending and at least one: {self.values}.")

    def nearest(self, value: float) -> float:
        """The allowed value closest to ``value``."""
        if self.continuous:
            return min(max(value, self.values[0]), self.values[-1])
        at = bisect_left(self.values, value)
        return min(self.values[max(0, at - 1) : at + 1], key=lambda allowed: abs(allowed - value))

    def exact(self, value: float) -> float:
        """The table's spelling of ``value``; raises ``ModeError``, naming the nearest, where it is not allowed."""
        nearest = self.nearest(value)
        if math.isfinite(value) and abs(nearest - value) <= SAME_VALUE_TOLERANCE:
            return nearest
        raise ModeError(
            f"{self.name} = {value:g} is not allowed on this device; the nearest is {nearest:g}.",
            hint=f"Allowed: {_short(self)}.",
        )


def _short(knob: Knob) -> str:
    said = [f"{value:g}" for value in knob.values]
    if knob.continuous:
        return f"{said[0]} to {said[-1]}"
    if len(said) <= 8:
        return ", ".join(said)
    return f"{', '.join(said[:3])} … {', '.join(said[-2:])} ({len(said)} values)"


class ModeSpace:
    """All combinations of some knobs, in a fixed order: a sequence that holds only its knobs.

    A recorded table may hold only some of the combinations; ``of_modes`` then keeps that list.
    """

    def __init__(self, knobs: tuple[Knob, ...] | list[Knob], listed: tuple[PowerMode, ...] | None = None) -> None:
        by_name = {knob.name: knob for knob in knobs}
        if len(by_name) != len(knobs):
            raise InputError("A knob stands twice in one space.")
        self.knobs: tuple[Knob, ...] = tuple(by_name[name] for name in KNOBS if name in by_name)
        self._listed = listed

    @classmethod
    def of_modes(cls, modes: Iterable[PowerMode]) -> ModeSpace:
        """The space of exactly these modes, which must all have the same knobs."""
        unique = sorted(set(modes), key=lambda mode: tuple(mode.knobs().values()))
        names = {tuple(mode.knobs()) for mode in unique}
        if len(names) != 1:
            hint = "Give each row a value in the same columns of knobs."
            raise InputError("The modes of a table must be at least one, and all have the same knobs.", hint=hint)
        columns = zip(*(mode.knobs().values() for mode in unique), strict=True)
        knobs = [Knob(name, tuple(sorted(set(column)))) for name, column in zip(*names, columns, strict=False)]
        whole = cls(knobs)
        return whole if len(whole) == len(unique) else cls(knobs, tuple(unique))

    @classmethod
    def of_values(cls, values: Mapping[str, Iterable[float]]) -> ModeSpace:
        """All combinations of some values of some knobs."""
        return cls([Knob(name, tuple(sorted(set(steps)))) for name, steps in values.items()])

    def only(self, names: Iterable[str]) -> ModeSpace:
        """The space of some of the knobs, the others left alone."""
        wanted = set(names)
        if self._listed is not None:
            return ModeSpace.of_modes(
                PowerMode.of({name: value for name, value in mode.knobs().items() if name in wanted})
                for mode in self._listed
            )
        return ModeSpace([knob for knob in self.knobs if knob.name in wanted])

    def knob(self, name: str) -> Knob | None:
        """The knob of that name, or ``None`` where the device has none."""
        return next((knob for knob in self.knobs if knob.name == name), None)

    def __len__(self) -> int:
        if self._listed is not None:
            return len(self._listed)
        return math.prod(len(knob.values) for knob in self.knobs)

    def __iter__(self) -> Iterator[PowerMode]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> PowerMode:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        if self._listed is not None:
            return self._listed[index]
        values: dict[str, float] = {}
        for knob in reversed(self.knobs):
            index, at = divmod(index, len(knob.values))
            values[knob.name] = knob.values[at]
        return PowerMode.of(values)

    def __contains__(self, mode: object) -> bool:
        if not isinstance(mode, PowerMode):
            return False
        try:
            self.check(mode)
        except ModeError:
            return False
        return True

    def check(self, mode: PowerMode) -> PowerMode:
        """``mode`` in the table's spelling; raises ``ModeError`` for a knob or value the device does not have."""
        exact: dict[str, float] = {}
        for name, value in mode.knobs().items():
            knob = self.knob(name)
            if knob is None:
                here = ", ".join(k.name for k in self.knobs) or "none"
                raise ModeError(f"This device has no knob {name}.", hint=f"Its knobs: {here}.")
            exact[name] = knob.exact(value)
        checked = PowerMode.of(exact)
        if self._listed is not None and len(exact) == len(self.knobs) and checked not in self._listed:
            nearest = min(self._listed, key=lambda listed: _distance(listed, checked))
            raise ModeError(f"The table does not hold the mode {checked}; the nearest it holds is {nearest}.")
        return checked

    @property
    def highest(self) -> PowerMode:
        """Every knob at its largest value (of a list: its last mode)."""
        return self[-1]

    @property
    def lowest(self) -> PowerMode:
        """Every knob at its smallest value (of a list: its first mode)."""
        return self[0]

    def matrix(self) -> NDArray[np.float64]:
        """One row a mode, one column a knob, in the order of iteration: 29,232 modes in about a millisecond."""
        import numpy as np

        if self._listed is not None:
            return np.array([list(mode.knobs().values()) for mode in self._listed], float)
        grids = np.meshgrid(*(np.asarray(knob.values, float) for knob in self.knobs), indexing="ij")
        return np.stack([grid.ravel() for grid in grids], axis=1) if grids else np.empty((1, 0))


def _distance(one: PowerMode, other: PowerMode) -> float:
    pairs = zip(one.knobs().values(), other.knobs().values(), strict=True)
    return sum(abs(math.log(a / b)) for a, b in pairs)
