"""Profiling: many settings, one after the other, each on disk as soon as it is measured.

Stopping at any moment loses at most the setting under way; starting again goes on with what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from underwatt.errors import OutOfMemoryError, StepError, WorkloadError
from underwatt.profile.measure import measure
from underwatt.profile.order import smallest_too_large, to_measure
from underwatt.profile.steady import Settling
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from underwatt.device.session import Session
    from underwatt.profile.measure import MeasureOptions
    from underwatt.profile.store import Store
    from underwatt.workload.base import StepRun, Workload

    Watcher: TypeAlias = Callable[[Measurement, int, int], None]  # the newest answer, how many there are, of how many

TRIES = 2  # a job that ends or fails by itself is started once more for the same setting
GUESS_S = 8.0  # for one setting, before any was measured


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
    store: Store,
    *,
    options: MeasureOptions | None = None,
    watch: Watcher | None = None,
) -> ProfileOutcome:
    """Measure every setting that the store does not hold yet, in the order given."""
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


class Measurer:
    """Measures settings of a job one after the other, whatever their order; each is on disk when it is known."""

    def __init__(
        self,
        session: Session,
        workload: Workload,
        store: Store,
        profile_id: int,
        options: MeasureOptions | None = None,
    ) -> None:
        self._session = session
        self._runs = _Runs(workload)
        self._store = store
        self._profile_id = profile_id
        self._options = options
        self._settling = Settling()

    def measure(self, setting: Setting) -> Measurement:
        """One setting; running out of memory and failing are answers too."""
        found = self._measure_with_retry(setting)
        self._store.add(self._profile_id, [found])
        return found

    def _measure_with_retry(self, setting: Setting) -> Measurement:
        for _ in range(TRIES):
            try:
                run = self._runs.at(setting.batch_size)
            except OutOfMemoryError as exc:
                return Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
            except StepError as exc:
                return Measurement(setting, status=Status.FAILED, note=str(exc))
            found = measure(self._session, run, setting, self._options, self._settling)
            if found.usable:
                return found
            self._runs.end()  # whatever went wrong, the next setting gets a fresh start
            if found.status is Status.OUT_OF_MEMORY:
                return found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._runs.end()
        except WorkloadError:
            if kind is None:
                raise


class _Runs:
    """The job, started once for each batch size and kept running while modes change."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._run: StepRun | None = None
        self._batch_size = 0

    def at(self, batch_size: int) -> StepRun:
        if self._run is None or self._batch_size != batch_size:
            self.end()
            self._run = self._workload.start(batch_size)
            self._batch_size = batch_size
        return self._run

    def end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop()
