from __future__ import annotations

import math

import numpy as np
import pytest

from underwatt.convergence.noise_scale import ABOVE, FEWEST_PAIRS, LearnedCurve, NoiseScaleMeter
from underwatt.convergence.prior import usual_shape
from underwatt.errors import InputError

DIMENSIONS = 50


def pairs(true_scale: float, batch_size: int, steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """What successive gradients with a known noise scale say: a fixed gradient, and noise that falls with the batch."""
    rng = np.random.default_rng(seed)
    gradient = rng.normal(size=DIMENSIONS)
    noise = math.sqrt(true_scale * float(gradient @ gradient) / DIMENSIONS / batch_size)
    each = gradient + noise * rng.normal(size=(steps + 1, DIMENSIONS))
    products = (each[1:] * each[:-1]).sum(1)
    squares = np.square(each).sum(1)
    variances = batch_size * ((squares[1:] + squares[:-1]) / 2 - products)
    return list(zip(products.tolist(), variances.tolist(), strict=True))


def metered(true_scale: float, batch_size: int, steps: int, seed: int = 0) -> NoiseScaleMeter:
    meter = NoiseScaleMeter()
    for pair in pairs(true_scale, batch_size, steps, seed):
        meter.add(*pair)
    return meter


@pytest.mark.parametrize(("true_scale", "batch_size"), [(20, 8), (200, 64), (200, 16), (3, 32)])
def test_a_known_noise_scale_is_found(true_scale: float, batch_size: int) -> None:
    assert metered(true_scale, batch_size, 2000).noise_scale == pytest.approx(true_scale, rel=0.35)


def test_its_uncertainty_is_about_right() -> None:
    meters = [metered(100, 32, 300, seed) for seed in range(30)]
    errors = [abs(math.log(meter.noise_scale / 100)) / meter.log_std for meter in meters]
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.9


def test_pure_noise_has_no_finite_noise_scale_or_an_unsure_one() -> None:
    rng = np.random.default_rng(0)
    meter, before = NoiseScaleMeter(), rng.normal(size=DIMENSIONS)
    for _ in range(500):
        now = rng.normal(size=DIMENSIONS)
        meter.add(float(now @ before), 8 * float((now @ now + before @ before) / 2 - now @ before))
        before = now
    assert meter.noise_scale == math.inf or meter.noise_scale > 100
    assert meter.log_std > 0.6


def test_a_young_meter_says_nothing_and_a_diverged_step_neither() -> None:
    meter = NoiseScaleMeter()
    assert math.isnan(meter.noise_scale)
    meter.add(math.nan, 1.0)
    meter.add(1.0, math.inf)
    assert meter.pairs == 0
    with pytest.raises(InputError):
        NoiseScaleMeter(decay=1.0)


def told(learned: LearnedCurve, scale: float, count: int) -> list[float]:
    """The batch size of twice the samples, each time that the curve says something new."""
    found = (learned.after(1.0, scale * (1 + 0.2 * (-1) ** at)) for at in range(count))
    return [curve.noise_samples() for curve in found if curve is not None]


def test_a_training_is_believed_more_than_others_were() -> None:
    usual = usual_shape().noise_samples()
    for scale in (8.0, 60.0, 4000.0):
        learned = LearnedCurve(usual_shape())
        assert told(learned, scale, FEWEST_PAIRS - 1) == []
        found = told(learned, scale, 50)[-1]
        assert abs(math.log(found / scale)) < abs(math.log(usual / scale))
        assert min(usual, scale) < found < 1.5 * max(usual, scale)


def test_a_noise_scale_that_grows_is_followed_and_one_that_stays_is_told_once() -> None:
    learned = LearnedCurve(usual_shape())
    assert len(told(learned, 10.0, 200)) == 1
    grown = told(learned, 160.0, 400)
    assert len(grown) > 2
    assert grown == sorted(grown)


def test_gradients_in_which_no_signal_is_seen_change_nothing() -> None:
    learned = LearnedCurve(usual_shape())
    assert all(learned.after((-1.0) ** at, 100.0) is None for at in range(FEWEST_PAIRS))
    assert all(learned.after(-1.0, 100.0) is None for _ in range(100))


def test_gradients_that_confirm_what_was_known_change_no_plan() -> None:
    usual = usual_shape().noise_samples()
    assert told(LearnedCurve(usual_shape()), usual / 2**ABOVE, 200) == []
    assert told(LearnedCurve(usual_shape()), usual / 2 ** (ABOVE + 2), 200) != []


def test_gradients_that_say_one_thing_and_then_another_are_heard_ever_less() -> None:
    """On a plateau, with hardly any signal left, a plan was made anew some ten times a minute, each time said."""
    learned, told = LearnedCurve(usual_shape()), 0
    for turn in range(200):
        for pair in pairs(300 if turn % 2 else 6000, 32, 150, seed=turn):
            told += learned.after(*pair) is not None
    assert 1 <= told <= 8
