"""Which settings to measure: first the ones that tell most about all others, then the next most telling.

Before anything is measured, the physics and what is believed of its constants already say how settings hang
together. Settings are chosen one after the other, each the one that is expected to shrink the uncertainty of all
candidates most, per unit of the time that measuring it takes. No measured value of a candidate is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.base import SettingArray
from underwatt.predict.expert import ReferenceModel
from underwatt.predict.gp import TYPICAL_POWER, TYPICAL_TIME, features, kernel
from underwatt.predict.roofline import NAMES, Belief, Centre, Levels, evaluate
from underwatt.records import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.predict.fewshot import FittedFewShot
    from underwatt.records import Measurement, Profile

# Settings are compared within a random pool of this size: enough to stand for the whole space, and fast.
POOL = 400
# A reference guides so many of the first settings.
GUIDED = 10
# How much a slow setting is shunned: 0 not at all, 1 in proportion to its step time. Slow settings tell a lot.
THRIFT = 0.1


def fits_memory(candidates: SettingArray, measurements: Sequence[Measurement]) -> NDArray[np.bool_]:
    """Which candidates are not known to run out of memory: those of smaller batches than any that did."""
    sizes = [m.setting.batch_size for m in measurements if m.status is Status.OUT_OF_MEMORY]
    return np.asarray(candidates.batch_size < min(sizes, default=np.inf))


def first_settings(
    candidates: SettingArray,
    count: int,
    *,
    references: Sequence[Profile] = (),
    measurements: Sequence[Measurement] = (),
    seed: int = 0,
) -> NDArray[np.intp]:
    """Rows of ``candidates`` to measure first, the most telling one in front.

    ``measurements`` only say what runs out of memory. The first reference, where there is one, says which part of
    the device usually sets the pace, and guides the first ten; the others are chosen as if it might be wrong.
    """
    allowed = _allowed(candidates, fits_memory(candidates, measurements), count)
    centre = Centre.of(candidates)
    level = Levels(0.0, 0.0)
    rng = np.random.default_rng(seed)
    guided = np.empty(0, dtype=np.intp)
    if references:
        model = ReferenceModel.fit(references[0], centre, candidates.knobs, seed)
        near = Belief.near(model.theta, model.levels, level, closeness=1.0)
        guided = _choose(
            candidates, allowed, min(count, GUIDED), centre, near.mean, near.cov, candidates.take(guided), rng
        )
        if len(guided) == count:
            return guided
    general = Belief.general(level)
    rest = np.setdiff1d(allowed, guided)
    known = candidates.take(guided)
    others = _choose(candidates, rest, count - len(guided), centre, general.mean, general.cov, known, rng)
    return np.concatenate([guided, others])


def next_settings(
    candidates: SettingArray,
    count: int,
    *,
    measurements: Sequence[Measurement],
    fitted: FittedFewShot,
    seed: int = 0,
) -> NDArray[np.intp]:
    """Rows of ``candidates`` to measure next, given what was measured and the predictor fitted on it."""
    measured = SettingArray.of([m.setting for m in measurements if m.usable])
    fresh = fits_memory(candidates, measurements) & ~_among(candidates, measured)
    allowed = _allowed(candidates, fresh, count)
    expert = fitted.experts[int(np.argmax(fitted.weights.sum(axis=0)))]
    rng = np.random.default_rng(seed)
    return _choose(candidates, allowed, count, fitted.centre, expert.theta, expert.belief.cov, measured, rng)


def _allowed(candidates: SettingArray, mask: NDArray[np.bool_], count: int) -> NDArray[np.intp]:
    rows = np.flatnonzero(mask)
    if count < 1 or len(rows) < count:
        raise PredictError(
            f"{count} settings to measure were asked for, and {len(rows)} of {len(candidates)} can be measured.",
            hint="Ask for fewer settings, or offer smaller batch sizes or more power modes.",
        )
    return rows


def _among(candidates: SettingArray, measured: SettingArray) -> NDArray[np.bool_]:
    known = {tuple(row) for row in measured.matrix().tolist()}
    return np.array([tuple(row) in known for row in candidates.matrix().tolist()], dtype=bool)


def _choose(
    candidates: SettingArray,
    allowed: NDArray[np.intp],
    count: int,
    centre: Centre,
    theta: NDArray[np.float64],
    cov: NDArray[np.float64],
    measured: SettingArray,
    rng: np.random.Generator,
) -> NDArray[np.intp]:
    rows = allowed[rng.permutation(len(allowed))[: max(POOL, count)]]
    pool = candidates.take(rows)
    known = len(measured)
    pool = SettingArray(
        pool.knobs,
        np.concatenate([measured.values, pool.values]),
        np.concatenate([measured.batch_size, pool.batch_size]),
    )
    x = centre.inputs(pool)
    points = features(x)
    quantities = evaluate(theta, x)
    cost = np.exp(THRIFT * (quantities[0].value - quantities[0].value.min()))
    uncertain = []
    for dual, spread in zip(quantities, (TYPICAL_TIME, TYPICAL_POWER), strict=True):
        slopes = dual.jacobian(NAMES, len(x))
        prior = slopes @ cov @ slopes.T + spread.amplitude**2 * kernel(points, points, spread.stretch)
        uncertain.append((prior, spread))

    def measure(at: int) -> None:
        for where, (now, spread) in enumerate(uncertain):
            shared = now[:, at].copy()
            uncertain[where] = (now - np.outer(shared, shared) / (shared[at] + spread.noise**2), spread)

    for at in range(known):
        measure(at)
    chosen: list[int] = []
    for _ in range(count):
        gain = np.zeros(len(x))
        for now, spread in uncertain:
            gain += (now**2).sum(axis=0) / (np.diag(now) + spread.noise**2) / spread.amplitude**2
        gain /= cost
        gain[:known] = -1.0
        gain[[known + at for at in chosen]] = -1.0
        best = int(np.argmax(gain))
        measure(best)
        chosen.append(best - known)
    return np.asarray(rows[chosen])
