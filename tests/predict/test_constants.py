from __future__ import annotations

import numpy as np

from underwatt.predict.base import SettingArray
from underwatt.predict.roofline import NO_LIMIT, Belief, Centre, Levels, evaluate, fit_constants

MODES = np.array([[c, f, g] for c in (2.0, 4.0, 8.0) for f in (500.0, 1000.0, 2000.0) for g in (200.0, 600.0, 1200.0)])
SETTINGS = SettingArray.product(("cpu_cores", "cpu_mhz", "gpu_mhz"), MODES, [8, 32])


def test_centre_is_the_highest_clocks_and_the_middle_batch() -> None:
    centre = Centre.of(SETTINGS)
    x = centre.inputs(SETTINGS)
    assert x.cpu.max() == x.gpu.max() == 0.0
    assert np.isclose(x.batch.min(), -x.batch.max())
    assert np.all(x.mem == 0.0)
    assert np.all(x.log_limit_w == NO_LIMIT)
    assert np.isclose(x.cores[SETTINGS.values[:, 0] == 4.0], 0.0).all()


def test_constants_of_a_made_up_device_are_found_again() -> None:
    levels = Levels(-1.0, 2.5)
    belief = Belief.general(levels)
    truth = np.random.default_rng(3).multivariate_normal(belief.mean, belief.cov / 4)
    x = Centre.of(SETTINGS).inputs(SETTINGS)
    time, power = evaluate(truth, x)
    fitted = evaluate(fit_constants(x, time.value, power.value, belief), x)
    assert np.abs(fitted[0].value - time.value).max() < 0.02
    assert np.abs(fitted[1].value - power.value).max() < 0.02


def test_one_wild_reading_does_not_bend_the_fit() -> None:
    belief = Belief.general(Levels(-1.0, 2.5))
    x = Centre.of(SETTINGS).inputs(SETTINGS)
    time, power = evaluate(belief.mean, x)
    wild = time.value.copy()
    wild[5] += 1.0
    fitted = evaluate(fit_constants(x, wild, power.value, belief), x)
    assert np.median(np.abs(fitted[0].value - time.value)) < 0.01


def test_a_belief_near_another_workload_moves_with_the_level() -> None:
    general = Belief.general(Levels(0.0, 0.0))
    near = Belief.near(general.mean, Levels(0.0, 0.0), Levels(2.0, 1.0), closeness=0.5)
    shift = near.mean - general.mean
    assert set(np.round(shift, 9)) == {0.0, 1.0, 2.0}
    assert np.all(np.diag(near.cov) <= np.diag(general.cov))
