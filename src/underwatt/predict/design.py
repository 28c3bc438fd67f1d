"""Which settings to measure first: the ones that tell most about all others.

Before anything is measured, the physics and what is believed of its constants already say how settings hang
together. Settings are chosen one after the other, each the one that is expected to shrink the uncertainty of all
candidates most, per unit of the time that measuring it takes. No measured value of a candidate is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.expert import TYPICAL, ReferenceModel, features, kernel
from underwatt.predict.roofline import NAMES, Belief, Centre, evaluate, level_shift
from underwatt.records import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.predict.base import SettingArray
    from underwatt.predict.roofline import Inputs
    from underwatt.records import Measurement, Profile

# Settings are compared within a random pool of this size: enough to stand for the whole space, and fast.
POOL = 400
# Chosen with benchmarks/predict.py. A reference guides so many of the first settings.
GUIDED = 10
# How much a slow setting is shunned: 0 not at all, 1 in proportion to its step time. Slow settings tell a lot.
THRIFT = 0.1


def fits_memory(candidates: SettingArray, measurements: Sequence[Measurement]) -> NDArray[np.bool_]:
    """Which candidates are not known to run out of memory: those of smaller batches than any that did."""
    sizes = [m.setting.batch_size for m in measurements if m.status is Status.OUT_OF_MEMORY]
    return np.asarray(candidates.batch_size < min(sizes, default=np.inf))


def first_settings(
    candidates: SettingArray, count: int, *, references: Sequence[Profile] = (), seed: int = 0
) -> NDArray[np.intp]:
    """Rows of ``candidates`` to measure first, the most telling one in front.

    The first reference, where there is one, says which part of the device usually sets the pace, and guides the first
    ten; the others are chosen as if it might be wrong.
    """
    if not 1 <= count <= len(candidates):
        raise PredictError(
            f"{count} settings to measure were asked for, and {len(candidates)} can be measured.",
            hint="Ask for fewer settings, or offer smaller batch sizes or more power modes.",
        )
    centre, level = Centre.of(candidates), level_shift(0.0, 0.0)
    rng = np.random.default_rng(seed)
    beliefs = [(Belief.general(level), count)]
    if references:
        model = ReferenceModel.fit(references[0], centre, candidates.knobs, seed)
        beliefs.insert(0, (Belief.near(model.constants, level, closeness=1.0), min(count, GUIDED)))
    chosen = np.empty(0, dtype=np.intp)
    for belief, until in beliefs:
        wanted = until - len(chosen)
        if wanted:
            rest = np.setdiff1d(np.arange(len(candidates)), chosen)
            pool = rest[rng.permutation(len(rest))[: max(POOL, wanted)]]
            x = centre.inputs(candidates.take(np.concatenate([chosen, pool])))
            chosen = np.concatenate([chosen, pool[_most_telling(x, len(chosen), wanted, belief)]])
    return chosen


def _most_telling(x: Inputs, known: int, count: int, belief: Belief) -> list[int]:
    """Which of the settings that follow the first ``known`` ones, which will be measured anyway, tell most."""
    points = features(x)
    quantities = evaluate(belief.mean, x)
    cost = np.exp(THRIFT * (quantities[0].value - quantities[0].value.min()))
    uncertain = []
    for dual, spread in zip(quantities, TYPICAL, strict=True):
        slopes = dual.jacobian(NAMES, len(x))
        prior = slopes @ belief.cov @ slopes.T + spread.amplitude**2 * kernel(points, points, spread.stretch)
        uncertain.append((prior, spread))

    def measure(at: int) -> None:
        for now, spread in uncertain:
            shared = now[:, at].copy()
            now -= np.outer(shared, shared) / (shared[at] + spread.noise**2)

    chosen = list(range(known))
    for at in chosen:
        measure(at)
    while len(chosen) < known + count:
        gain = np.zeros(len(x))
        for now, spread in uncertain:
            gain += (now**2).sum(axis=0) / (np.diag(now) + spread.noise**2) / spread.amplitude**2
        gain /= cost
        gain[chosen] = -1.0
        chosen.append(int(np.argmax(gain)))
        measure(chosen[-1])
    return [at - known for at in chosen[known:]]
