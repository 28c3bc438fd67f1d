"""A higher clock is never slower: predicted times put in order along each knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.settings import SettingArray

# Larger than any difference of log times, so that runs of one knob do not mix when scanned together.
_APART = 100.0
_MOST_PASSES = 10


def never_slower(log_step_s: NDArray[np.float64], settings: SettingArray) -> NDArray[np.float64]:
    """The nearest times that do not rise where one knob is raised and the rest stays.

    Midway between the two extreme corrections (lower every later time, raise every earlier one), so that it favours
    neither. Holds among the settings asked about together.
    """
    runs = _runs(settings)
    return np.asarray((_scan(log_step_s, runs, lower=True) + _scan(log_step_s, runs, lower=False)) / 2)


def _runs(settings: SettingArray) -> list[tuple[NDArray[np.intp], NDArray[np.float64]]]:
    """For each knob: the rows sorted so that settings equal in all else lie together, ascending; and their run."""
    codes = []
    for column in settings.matrix().T:
        values, code = np.unique(column, return_inverse=True)
        codes.append((code.ravel().astype(np.int64), len(values)))
    runs: list[tuple[NDArray[np.intp], NDArray[np.float64]]] = []
    for at in range(len(settings.knobs)):
        code, count = codes[at]
        if count == 1:
            continue
        rest = np.zeros(len(settings), dtype=np.int64)
        for other, (other_code, other_count) in enumerate(codes):
            if other != at:
                # Renumbered after each column, so that the product of the counts cannot overflow.
                rest = rest * other_count + other_code
                if rest.max(initial=0) > 2**40:
                    rest = np.unique(rest, return_inverse=True)[1].ravel().astype(np.int64)
        order = np.argsort(rest * count + code, kind="stable")
        _, run = np.unique(rest[order], return_inverse=True)
        runs.append((order, _APART * run.ravel().astype(np.float64)))
    return runs


def _scan(
    log_step_s: NDArray[np.float64], runs: list[tuple[NDArray[np.intp], NDArray[np.float64]]], *, lower: bool
) -> NDArray[np.float64]:
    out: NDArray[np.float64] = np.array(log_step_s)
    for _ in range(_MOST_PASSES):
        before = out.copy()
        for order, run in runs:
            ordered = out[order]
            if lower:
                out[order] = np.minimum.accumulate(ordered - run) + run
            else:
                out[order] = np.maximum.accumulate((ordered - run)[::-1])[::-1] + run
        if np.allclose(out, before, rtol=0, atol=1e-9):
            break
    return out
