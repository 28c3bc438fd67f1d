from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from underwatt.converge.curve import fit_convergence
from underwatt.converge.noise_scale import NoiseScaleMeter, measure_noise_scale, noise_scale_prior
from underwatt.errors import InputError, PredictError
from underwatt.records import ConvergenceRun
from underwatt.workload.load import load_job


def metered(true_scale: float, *, part_samples: int, parts: int, steps: int, seed: int = 0) -> NoiseScaleMeter:
    """Gradients made up with a known noise scale: a fixed gradient, and noise that falls with the batch size."""
    rng = np.random.default_rng(seed)
    dimensions = 50
    gradient = rng.normal(size=dimensions)
    noise = math.sqrt(true_scale * float(gradient @ gradient) / dimensions)  # of one sample, in each dimension
    meter = NoiseScaleMeter()
    for _ in range(steps):
        each = gradient + noise / math.sqrt(part_samples) * rng.normal(size=(parts, dimensions))
        meter.add([float(g @ g) for g in each], float(np.square(each.mean(0)).sum()), part_samples)
    return meter


@pytest.mark.parametrize(("true_scale", "part_samples", "parts"), [(20, 8, 2), (200, 64, 2), (200, 16, 4), (3, 32, 2)])
def test_a_known_noise_scale_is_found(true_scale: float, part_samples: int, parts: int) -> None:
    meter = metered(true_scale, part_samples=part_samples, parts=parts, steps=2000)
    assert meter.noise_scale == pytest.approx(true_scale, rel=0.3)


def test_its_uncertainty_is_about_right() -> None:
    meters = [metered(100, part_samples=32, parts=2, steps=300, seed=seed) for seed in range(30)]
    errors = [abs(math.log(meter.noise_scale / 100)) / meter.log_std for meter in meters]
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.7


def test_gradients_of_parts_make_the_gradient_of_the_batch_and_a_known_noise_scale() -> None:
    # Loss w·x with x ~ N(1, 2²) in each of 4 dimensions: the gradient is mean(x), its noise scale 4·4/4 = 4.
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4))
    unused = torch.nn.Parameter(torch.zeros(2))
    meter = NoiseScaleMeter(decay=0.998)
    for _ in range(1500):
        parts = 1 + 2 * torch.randn(2, 16, 4)
        meter.backward([weight, unused], [(part @ weight).mean() for part in parts], 16)
    assert weight.grad is not None
    assert torch.allclose(weight.grad, parts.mean((0, 1)), atol=1e-6)
    assert unused.grad is None
    assert meter.noise_scale == pytest.approx(4.0, rel=0.15)


def test_pure_noise_has_no_finite_noise_scale_or_an_unsure_one() -> None:
    rng = np.random.default_rng(0)
    meter = NoiseScaleMeter()
    for _ in range(500):
        each = rng.normal(size=(2, 50))
        meter.add([float(g @ g) for g in each], float(np.square(each.mean(0)).sum()), 8)
    prior = noise_scale_prior(meter)
    assert meter.noise_scale == math.inf or meter.noise_scale > 100
    assert prior is None or prior.log_std > 0.9


def test_a_young_meter_says_nothing() -> None:
    meter = NoiseScaleMeter()
    assert math.isnan(meter.noise_scale)
    assert noise_scale_prior(meter) is None
    meter.add([math.nan, 1.0], 1.0, 4)
    assert meter.steps == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError):
        NoiseScaleMeter(decay=1.0)
    with pytest.raises(InputError):
        NoiseScaleMeter().add([1.0], 1.0, 8)


def test_a_job_is_metered_while_it_trains_and_the_curve_takes_it() -> None:
    job = load_job(f"{Path(__file__).parent / 'small_job.py'}:job")
    meter = measure_noise_scale(job, 32, steps=60)
    assert meter.steps == 60
    prior = noise_scale_prior(meter)
    assert prior is not None
    curve = fit_convergence([ConvergenceRun(16, 0.9, 500.0)], noise_scale=prior)
    assert curve.batch_noise == pytest.approx(meter.noise_scale, rel=1.5)
    with pytest.raises(PredictError):
        measure_noise_scale(job, 1)
