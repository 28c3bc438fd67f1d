"""Predictions for a problem's candidates that keep up with measurements, even where there are very many candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.plan.acquire import shortlist
from underwatt.plan.problem import Outlook
from underwatt.predict import FewShot

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from underwatt.plan.problem import Problem
    from underwatt.records import Measurement, Prediction, Profile


class Forecast:
    """Understands the references once, and remembers which candidates have a prospect."""

    def __init__(self, problem: Problem, references: Sequence[Profile] = (), seed: int = 0) -> None:
        self._problem = problem
        self._prepared = FewShot(seed=seed).prepare(problem.candidates, references)
        self._shortlist: NDArray[np.intp] | None = None

    def on(self, problem: Problem) -> Forecast:
        """The same candidates under another budget: what was understood of the references is kept."""
        other = object.__new__(Forecast)
        other._problem, other._prepared, other._shortlist = problem, self._prepared, None
        return other

    def of_all(self, measurements: Sequence[Measurement]) -> Prediction:
        """Predictions for every candidate."""
        return self._look(measurements)[1]

    def of_promising(self, measurements: Sequence[Measurement]) -> tuple[NDArray[np.intp], Prediction]:
        """The candidates that had a prospect when all were last looked at, and predictions for them."""
        if self._shortlist is None:
            rows, prediction = self._look(measurements)
            return rows, _take(prediction, rows)
        rows = self._shortlist
        return rows, self._prepared.fit(measurements).predict(self._problem.candidates.take(rows))

    def _look(self, measurements: Sequence[Measurement]) -> tuple[NDArray[np.intp], Prediction]:
        prediction = self._prepared.fit(measurements).predict(self._problem.candidates)
        self._shortlist = shortlist(self._problem, Outlook.of(self._problem, prediction, measurements))
        return self._shortlist, prediction

    def forget(self) -> None:
        """Look at all candidates the next time."""
        self._shortlist = None


def _take(prediction: Prediction, rows: NDArray[np.intp]) -> Prediction:
    return type(prediction)(*(getattr(prediction, name)[rows] for name in prediction.__dataclass_fields__))
