"""Which candidate to measure next: where the expected gain within the budget is largest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from underwatt.plan.problem import normal_cdf

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.plan.problem import Outlook, Problem

    Floats = NDArray[np.float64]

# While nothing measured fits, a candidate this likely to fit is good enough to be judged by its speed.
LIKELY = 0.7
# A candidate with less chance to fit than this is given up.
HOPELESS = 0.01
# A candidate so many standard deviations behind gains nothing.
FURTHEST = 30.0
# So many candidates are enough to think about; the others have no prospect for a while.
SHORTLIST = 4096


def expected_gain(problem: Problem, outlook: Outlook, best_log_score: float, caution: float = 1.0) -> Floats:
    """By how much (in log units) measuring each candidate is expected to improve on the best one that fits.

    Constrained expected improvement: what is gained if it reads better than the best, times its chance to fit. A
    ``caution`` above 1 shuns candidates that may not fit, for searches during which the budget must hold.
    """
    score, std = outlook.log_score(problem.goal)
    lead = np.maximum((best_log_score - score) / std, -FURTHEST)  # a target that is never reached is infinitely far
    gain = std * (lead * normal_cdf(lead) + np.exp(-0.5 * lead**2) / math.sqrt(2 * math.pi))
    return np.asarray(np.maximum(gain, 0.0) * outlook.chance_to_fit(problem.budget) ** caution)


def safest_fast(problem: Problem, outlook: Outlook, open_rows: NDArray[np.bool_], caution: float = 1.0) -> int:
    """While nothing measured fits: the best candidate that is likely to fit, or else the likeliest one."""
    chance = np.where(open_rows, outlook.chance_to_fit(problem.budget), -1.0)
    score, _ = outlook.log_score(problem.goal)
    likely = chance >= LIKELY ** (1 / caution)
    if np.any(likely):
        return int(np.argmin(np.where(likely, score, np.inf)))
    if chance.max() > 0:
        return int(np.argmax(chance))
    return int(np.argmin(np.where(open_rows, outlook.log_drawn_w, np.inf)))


def shortlist(problem: Problem, outlook: Outlook, most: int = SHORTLIST) -> NDArray[np.intp]:
    """Rows that one or two more measurements could make the choice, and those of the lowest power, ascending."""
    if len(problem) <= most:
        return np.arange(len(problem))
    score, std = outlook.log_score(problem.goal)
    chance = outlook.chance_to_fit(problem.budget)
    # Optimistic about both: a candidate stays while it may be fast and may fit.
    promise = np.where(chance > HOPELESS, score - std - np.log(np.maximum(chance, HOPELESS)) * 0.1, np.inf)
    thrifty = np.argpartition(outlook.log_drawn_w, most // 16)[: most // 16]
    fast = np.argpartition(promise, most - len(thrifty))[: most - len(thrifty)]
    return np.union1d(thrifty, fast)
