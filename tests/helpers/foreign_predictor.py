"""A predictor of somebody else's, in a package of its own that is found by its entry point as an installed one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NAME = "nearest"
CODE = """
import numpy as np
from underwatt.predict.base import check_same_knobs, observe
from underwatt.records import Prediction


class Nearest:
    name = "nearest"

    def fit(self, measurements, references=()):
        return Fitted(observe(measurements))


class Fitted:
    def __init__(self, seen):
        self.seen = seen

    def predict(self, settings):
        check_same_knobs(settings, self.seen.settings.knobs)
        here, there = np.log(self.seen.settings.matrix()), np.log(settings.matrix())
        nearest = ((there[:, None] - here[None]) ** 2).sum(axis=2).argmin(axis=1)
        unsure = np.full(len(settings), 0.1)
        return Prediction(self.seen.log_step_s[nearest], unsure, self.seen.log_power_w[nearest], unsure)


def broken():
    raise RuntimeError("no licence")
"""
ENTRY_POINTS = f"[underwatt.predictors]\n{NAME} = foreign_nearest:Nearest\nbroken = foreign_nearest:broken\n"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip does it: a module, and its metadata beside it, on the path."""
    metadata = folder / "foreign_nearest-1.0.dist-info"
    metadata.mkdir()
    (folder / "foreign_nearest.py").write_text(CODE, encoding="utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-nearest\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
