"""Profiling: many settings, one after the other, each kept as soon as it is measured.

Which modes to measure, in which order, and the measuring itself. Stopping at any moment loses at most the setting under
way; starting again goes on with what is left.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from underwatt.csv_tables import parsed, read_rows
from underwatt.errors import InputError, OutOfMemoryError, StepError, WorkloadError
from underwatt.measure.measurement import measure
from underwatt.measure.meter import Meter, StateReader
from underwatt.measure.steady import Settling
from underwatt.measure.stuck import StuckWatch
from underwatt.records import KNOBS, Measurement, PowerMode, Setting, Status, lasting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from underwatt.device.session import Session
    from underwatt.device.space import ModeSpace
    from underwatt.measure.measurement import MeasureOptions
    from underwatt.measure.workload import StepRun, Workload
    from underwatt.records import DeviceInfo, WorkloadInfo

_log = logging.getLogger("underwatt")
GRID_STEPS = 12
MAIN_KNOBS = ("gpu_mhz", "power_limit_w", "cpu_mhz")  # the first that may be set makes the grid
TRIES = 2  # a job that ends or fails by itself is started once more for the same setting
PAUSE_S = 0.25
GUESS_S = 8.0  # for one setting, before any was measured


class MeasurementStore(Protocol):
    """Where measurements are kept: what was added is on disk."""

    def profile_id(self, device: DeviceInfo, workload: WorkloadInfo) -> int:
        """The number of the profile of a workload on a device."""

    def measurements(self, profile_id: int) -> tuple[Measurement, ...]:
        """What is known of it."""

    def add(self, profile_id: int, measurements: Sequence[Measurement]) -> None:
        """Keep some more."""


def grid_modes(space: ModeSpace) -> list[PowerMode]:
    """The table of the published method: every GPU clock (of power limits, some), all else at its highest."""
    main = next((knob for name in MAIN_KNOBS if (knob := space.knob(name))), None)
    if main is None:
        return [space.highest]
    values = thinned(main.values, GRID_STEPS) if main.continuous else main.values
    return [space.highest.with_knobs(**{main.name: value}) for value in values]


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of some values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def modes_from_file(path: Path, space: ModeSpace) -> list[PowerMode]:
    """Modes from a CSV file with knobs as columns; each must be allowed on the device."""
    columns, rows = read_rows(path)
    if not columns & set(KNOBS) or not rows:
        raise InputError(
            f"{path} names no modes.", hint=f"Give a CSV file with some of these columns: {', '.join(KNOBS)}."
        )

    def allowed(row: Mapping[str, str]) -> PowerMode:
        return space.check(PowerMode.of({name: float(row[name]) for name in KNOBS if row.get(name)}))

    return list(parsed(path, rows, allowed))


def ordered_settings(modes: Iterable[PowerMode], batch_sizes: Sequence[int]) -> list[Setting]:
    """Every mode at every batch size, in the order to measure them."""
    return in_order(Setting(mode, size) for mode in modes for size in batch_sizes)


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """Batch sizes ascending, so that running out of memory is met once and the job is started once for each; within
    one, modes from gentle to hot, so that each starts on a board that is no hotter than it will be anyway.
    """

    def heat(setting: Setting) -> tuple[float, ...]:
        values = setting.mode.knobs().values()
        return setting.batch_size, math.prod(values), *values

    return sorted(dict.fromkeys(settings), key=heat)


def to_measure(settings: Sequence[Setting], done: Sequence[Measurement]) -> list[Setting]:
    """What is left: not what was measured, and not what is known to run out of memory."""
    answered = {m.setting for m in lasting(done)}
    too_large = smallest_too_large(done)
    return [s for s in settings if s not in answered and s.batch_size < too_large]


def smallest_too_large(done: Iterable[Measurement]) -> float:
    """The smallest batch size that ran out of memory; infinite where none did. Memory does not depend on clocks."""
    return min((m.setting.batch_size for m in done if m.status is Status.OUT_OF_MEMORY), default=math.inf)


@dataclass(frozen=True, slots=True)
class ProfileOutcome:
    """What profiling did: new measurements, those that failed, and settings that were too large to be tried."""

    measured: tuple[Measurement, ...]
    failed: tuple[Measurement, ...]
    too_large: tuple[Setting, ...]


def expected_s(count: int, known: Sequence[Measurement]) -> float:
    """How long so many settings will take, from what earlier ones took."""
    costs = [m.cost_s for m in known if m.usable and m.cost_s > 0]
    return count * (sum(costs) / len(costs) if costs else GUESS_S)


def run_profile(
    session: Session,
    workload: Workload,
    settings: Sequence[Setting],
    store: MeasurementStore,
    *,
    options: MeasureOptions | None = None,
    watch: Callable[[Measurement, int, int], None] | None = None,
) -> ProfileOutcome:
    """Measure every setting that the store does not hold yet, in the order given.

    ``watch`` is told the newest answer, how many there are, and of how many.
    """
    profile_id = store.profile_id(session.device.info, workload.info)
    known = list(store.measurements(profile_id))
    left = to_measure(settings, known)
    measured: list[Measurement] = []
    with Measurer(session, workload, store, profile_id, options) as measurer:
        for setting in left:
            if setting.batch_size >= smallest_too_large(measured):
                continue
            measured.append(measurer.measure(setting))
            if watch:
                watch(measured[-1], len(measured), len(left))
    tried = {m.setting for m in (*known, *measured)}
    limit = smallest_too_large([*known, *measured])
    return ProfileOutcome(
        measured=tuple(measured),
        failed=tuple(m for m in measured if m.status is Status.FAILED),
        too_large=tuple(s for s in settings if s.batch_size >= limit and s not in tried),
    )


@dataclass(eq=False)
class Measurer:
    """Measures settings of a job one after the other, whatever their order; each is on disk when it is known.

    The job is started once for each batch size and kept running while modes change.
    """

    session: Session
    workload: Workload
    store: MeasurementStore
    profile_id: int
    options: MeasureOptions | None = None

    def __post_init__(self) -> None:
        self._settling, self._watch, self._states = Settling(), StuckWatch(), StateReader(self.session.device)
        self._run: StepRun | None = None
        self._batch_size = 0

    def measure(self, setting: Setting) -> Measurement:
        """One setting; running out of memory and failing are answers too."""
        found = self._measure_with_retry(setting)
        self._try_sensor()
        if news := self._states.take_news():
            _log.warning(news[1])
        self.store.add(self.profile_id, [found])
        return found

    def _measure_with_retry(self, setting: Setting) -> Measurement:
        for _ in range(TRIES):
            try:
                run = self._run_at(setting.batch_size)
            except OutOfMemoryError as exc:
                return Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
            except StepError as exc:
                return Measurement(setting, status=Status.FAILED, note=str(exc))
            found = measure(self.session, run, setting, self.options, self._settling, self._watch, self._states)
            if found.usable:
                return found
            self._end_run()  # whatever went wrong, the next setting gets a fresh start
            if found.status is Status.OUT_OF_MEMORY:
                return found
        return found

    def _try_sensor(self) -> None:
        """Where readings have stood still for long: end the job for a moment, which every sensor sees that works."""
        if not self._watch.wants_a_pause():
            return
        self._end_run()
        clock = self.session.device.clock
        with Meter(self.session.device, watch=self._watch) as meter:
            while meter.wants_a_pause():
                begin_s = clock.now_s()
                clock.sleep(PAUSE_S)
                meter.pause(begin_s, clock.now_s())
                meter.check_sensor()

    def _run_at(self, batch_size: int) -> StepRun:
        if self._run is None or self._batch_size != batch_size:
            self._end_run()
            self._run = self.workload.start(batch_size)
            self._batch_size = batch_size
        return self._run

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._end_run()
        except WorkloadError:
            if kind is None:
                raise
