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
    total = len(left)
    settling = Settling()
    measured: list[Measurement] = []
    with _Runs(workload) as runs:
        for setting in left:
            if setting.batch_size >= smallest_too_large(measured):
                continue
            found = _measure_with_retry(session, runs, setting, options, settling)
            store.add(profile_id, [found])
            measured.append(found)
            if watch:
                watch(found, len(measured), total)
    tried = {m.setting for m in (*known, *measured)}
    limit = smallest_too_large([*known, *measured])
    return ProfileOutcome(
        measured=tuple(measured),
        failed=tuple(m for m in measured if m.status is Status.FAILED),
        too_large=tuple(s for s in settings if s.batch_size >= limit and s not in tried),
    )


def _measure_with_retry(
    session: Session, runs: _Runs, setting: Setting, options: MeasureOptions | None, settling: Settling
) -> Measurement:
    for _ in range(TRIES):
        try:
            run = runs.at(setting.batch_size)
        except OutOfMemoryError as exc:
            return Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
        except StepError as exc:
            return Measurement(setting, status=Status.FAILED, note=str(exc))
        found = measure(session, run, setting, options, settling)
        if found.usable:
            return found
        runs.end()  # whatever went wrong, the next setting gets a fresh start
        if found.status is Status.OUT_OF_MEMORY:
            return found
    return found


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

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        except WorkloadError:
            if _[0] is None:
                raise
