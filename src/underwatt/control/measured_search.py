"""Measure as you go on a device: the search decides what to measure, each answer is stored at once.

Interrupted and started again, it goes on with what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.measure.series import Measurer
from underwatt.planning.search import MOST, Search
from underwatt.records import lasting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.session import Session
    from underwatt.measure.measurement import MeasureOptions
    from underwatt.measure.series import MeasurementStore
    from underwatt.measure.workload import Workload
    from underwatt.planning.problem import Problem
    from underwatt.planning.search import SearchResult, Watch
    from underwatt.predict.base import Predictor
    from underwatt.records import Measurement, Profile


def measure_as_you_go(
    session: Session,
    workload: Workload,
    problem: Problem,
    store: MeasurementStore,
    *,
    references: Sequence[Profile] = (),
    options: MeasureOptions | None = None,
    most: int = MOST,
    seed: int = 0,
    predictor: Predictor | None = None,
    watch: Watch | None = None,
) -> SearchResult:
    """Measure on the device until a better setting is not to be expected; what the store holds already is used.

    ``watch`` is told of each new measurement and why it was made. Raises ``BudgetError`` where nothing fits.
    """
    profile_id = store.profile_id(session.device.info, workload.info)
    known = comparable(store.measurements(profile_id), problem)
    with Measurer(session, workload, store, profile_id, options) as measurer:
        search = Search(problem, references=references, known=known, most=most, seed=seed, predictor=predictor)
        return search.run(measurer.measure, watch)


def comparable(measurements: Sequence[Measurement], problem: Problem) -> tuple[Measurement, ...]:
    """The measurements that say something about the candidates: of the same knobs, and lasting."""
    knobs = problem.candidates.knobs
    return tuple(m for m in lasting(measurements) if tuple(m.setting.mode.knobs()) == knobs)
