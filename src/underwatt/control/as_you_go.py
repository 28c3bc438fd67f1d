"""Measure as you go on a device: the search decides what to measure, each answer is stored at once.

Interrupted and started again, it goes on with what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from underwatt.measure.series import Measurer
from underwatt.planning.problem import rows_of
from underwatt.planning.search import MOST, search_setting
from underwatt.predict.base import FEWEST
from underwatt.predict.fewshot import FewShot
from underwatt.records import Prediction, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.session import Session
    from underwatt.measure.measurement import MeasureOptions
    from underwatt.measure.workload import Workload
    from underwatt.planning.problem import Problem
    from underwatt.planning.search import SearchResult, Watch
    from underwatt.records import Measurement, Profile
    from underwatt.store.store import Store


def measure_as_you_go(
    session: Session,
    workload: Workload,
    problem: Problem,
    store: Store,
    *,
    references: Sequence[Profile] = (),
    options: MeasureOptions | None = None,
    most: int = MOST,
    seed: int = 0,
    watch: Watch | None = None,
) -> SearchResult:
    """Measure on the device until a better setting is not to be expected; what the store holds already is used.

    ``watch`` is told of each new measurement and why it was made. Raises ``BudgetError`` where nothing fits.
    """
    profile_id = store.profile_id(session.device.info, workload.info)
    known = comparable(store.measurements(profile_id), problem)
    with Measurer(session, workload, store, profile_id, options) as measurer:
        return search_setting(
            problem, measurer.measure, references=references, known=known, most=most, seed=seed, watch=watch
        )


def comparable(measurements: Sequence[Measurement], problem: Problem) -> tuple[Measurement, ...]:
    """The measurements that say something about the candidates: of the same knobs, and not failed."""
    knobs = problem.candidates.knobs
    return tuple(m for m in measurements if tuple(m.setting.mode.knobs()) == knobs and m.status is not Status.FAILED)


def forecast_of(
    problem: Problem, measurements: Sequence[Measurement], references: Sequence[Profile] = ()
) -> tuple[Problem, Prediction]:
    """Predictions for all candidates; where there are too few measurements for that, only the measured candidates."""
    usable = [m for m in measurements if m.usable]
    settings = dict.fromkeys(m.setting for m in usable)
    if len(settings) >= FEWEST:
        return problem, FewShot().fit(usable, references).predict(problem.candidates)
    rows = [rows_of(problem.candidates, setting) for setting in settings]
    part = problem.take(np.sort(np.concatenate(rows)))
    unknown = np.full(len(part), np.nan)  # planning puts what was measured in its place
    return part, Prediction(unknown, unknown, unknown, unknown)
