"""In which order to measure: as few starts, mode changes and hot boards as possible. Pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from underwatt.records import Measurement, PowerMode, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def ordered_settings(modes: Iterable[PowerMode], batch_sizes: Iterable[int]) -> list[Setting]:
    """Every mode at every batch size, in the order to measure them."""
    sizes = list(batch_sizes)
    return in_order(Setting(mode, size) for mode in modes for size in sizes)


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """Batch sizes ascending, so that running out of memory is met once and the job is started once for each; within
    one, modes from gentle to hot, so that each starts on a board that is no hotter than it will be anyway.
    """
    return sorted(dict.fromkeys(settings), key=lambda setting: (setting.batch_size, _heat(setting.mode)))


def _heat(mode: PowerMode) -> tuple[float, tuple[float, ...]]:
    values = tuple(mode.knobs().values())
    return math.prod(values), values


def to_measure(settings: Sequence[Setting], done: Iterable[Measurement]) -> list[Setting]:
    """What is left: not what was measured, and not what is known to run out of memory."""
    done = list(done)
    settled = {m.setting for m in done if m.status is not Status.FAILED}
    too_large = smallest_too_large(done)
    return [s for s in settings if s not in settled and s.batch_size < too_large]


def smallest_too_large(done: Iterable[Measurement]) -> float:
    """The smallest batch size that ran out of memory; infinite where none did. Memory does not depend on clocks."""
    return min((m.setting.batch_size for m in done if m.status is Status.OUT_OF_MEMORY), default=math.inf)
