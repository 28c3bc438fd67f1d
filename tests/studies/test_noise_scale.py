from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from underwatt.errors import InputError, PredictError
from underwatt.jobs.job_address import load_job
from underwatt.jobs.training import build_model
from underwatt.records import ConvergenceRun
from underwatt.studies.proxy_training import NoiseScaleMeter, measure_noise_scale, noise_scale_on_the_way

JOB = f"{Path(__file__).parents[1] / 'helpers' / 'small_job.py'}:job"


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
    assert meter.noise_scale == math.inf or meter.noise_scale > 100
    assert meter.log_std > 0.9


def test_a_young_meter_says_nothing() -> None:
    meter = NoiseScaleMeter()
    assert math.isnan(meter.noise_scale)
    meter.add([math.nan, 1.0], 1.0, 4)
    assert meter.steps == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError):
        NoiseScaleMeter(decay=1.0)
    with pytest.raises(InputError):
        NoiseScaleMeter().add([1.0], 1.0, 8)


def test_a_job_is_metered_while_it_trains() -> None:
    job = load_job(JOB)
    assert measure_noise_scale(job, 32, steps=60).steps == 60
    with pytest.raises(PredictError):
        measure_noise_scale(job, 1)


def test_the_noise_scale_of_a_training_is_like_that_of_its_gradients_one_sample_at_a_time() -> None:
    # The truth, by its definition: the spread of single gradients against their mean, before anything is learned.
    job = load_job(JOB)
    torch.manual_seed(0)
    model = build_model(job, 0)
    inputs, classes = job.proxy_data
    gradients = []
    for at in range(len(classes)):
        loss = torch.nn.functional.cross_entropy(model(inputs[at : at + 1]), classes[at : at + 1])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    each = torch.stack(gradients)
    true_scale = float(each.var(0).sum() / each.mean(0).square().sum())
    frozen = replace(job, lr=1e-12)
    assert measure_noise_scale(frozen, 64, steps=300).noise_scale == pytest.approx(true_scale, rel=0.4)


def test_it_is_taken_over_a_training_to_the_target_at_the_largest_batch_that_got_there() -> None:
    job = load_job(JOB)
    runs = [
        ConvergenceRun(4, 0.9, 300.0),
        ConvergenceRun(16, 0.9, 320.0),
        ConvergenceRun(64, 0.9, math.nan),
        ConvergenceRun(64, 0.5, 100.0),
    ]
    found = noise_scale_on_the_way(job, runs)
    assert found is not None
    assert found.batch_size == 16
    assert found.samples_low90 < found.samples < found.samples_high90
    assert noise_scale_on_the_way(job, runs[2:]) is None
    assert noise_scale_on_the_way(job, [ConvergenceRun(1, 0.9, 300.0)]) is None
