"""Settings as columns: a hundred thousand of them are arrays here, not objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError
from underwatt.records import KNOBS, PowerMode, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SettingArray:
    """Many settings: one row a setting, one column a knob in the order of ``knobs``, batch sizes beside them."""

    knobs: tuple[str, ...]
    values: NDArray[np.float64]
    batch_size: NDArray[np.float64]

    def __post_init__(self) -> None:
        if list(self.knobs) != [name for name in KNOBS if name in self.knobs]:
            raise InputError(
                f"Knobs {self.knobs} are unknown, twice there, or out of order.",
                hint=f"Name some of {', '.join(KNOBS)}, in this order.",
            )
        if self.values.shape != (len(self.batch_size), len(self.knobs)):
            raise InputError(
                f"{len(self.batch_size)} settings of {len(self.knobs)} knobs cannot be a {self.values.shape} array.",
                hint="Give one row a setting and one column a knob.",
            )
        if not (_positive(self.values) and _positive(self.batch_size)):
            raise InputError("Every knob and batch size of a setting must be a positive number.")

    @classmethod
    def of(cls, settings: Sequence[Setting]) -> SettingArray:
        """Columns from records; all of them must set the same knobs."""
        knobs = tuple(settings[0].mode.knobs()) if settings else ()
        odd = next((setting for setting in settings if tuple(setting.mode.knobs()) != knobs), None)
        if odd is not None:
            raise InputError(
                f"These settings do not set the same knobs: {settings[0]}; {odd}.",
                hint="Keep settings that leave a knob alone apart from settings that set it.",
            )
        rows = [list(setting.mode.knobs().values()) for setting in settings]
        values = np.array(rows, dtype=float).reshape(len(settings), len(knobs))
        return cls(knobs, values, np.array([setting.batch_size for setting in settings], dtype=float))

    @classmethod
    def product(cls, knobs: tuple[str, ...], modes: NDArray[np.float64], batch_sizes: ArrayLike) -> SettingArray:
        """Every mode (one row each, as ``ModeSpace.matrix`` gives them) at every batch size."""
        sizes = np.asarray(batch_sizes, dtype=float).ravel()
        values = np.repeat(np.asarray(modes, dtype=float), len(sizes), axis=0)
        return cls(knobs, values, np.tile(sizes, len(modes)))

    def __len__(self) -> int:
        return len(self.batch_size)

    def __getitem__(self, index: int) -> Setting:
        mode = dict(zip(self.knobs, self.values[index].tolist(), strict=True))
        cores = mode.pop("cpu_cores", None)
        return Setting(PowerMode(cpu_cores=None if cores is None else int(cores), **mode), int(self.batch_size[index]))

    def take(self, rows: NDArray[np.intp] | slice) -> SettingArray:
        """Some of the settings."""
        return SettingArray(self.knobs, self.values[rows], self.batch_size[rows])

    def column(self, name: str) -> NDArray[np.float64] | None:
        """The values of one knob, or ``None`` where these settings have no such knob."""
        return self.values[:, self.knobs.index(name)] if name in self.knobs else None

    def matrix(self) -> NDArray[np.float64]:
        """Knobs and, last, the batch size."""
        return np.column_stack([self.values, self.batch_size])


def _positive(values: NDArray[np.float64]) -> bool:
    return bool(np.all(np.isfinite(values) & (values > 0)))
