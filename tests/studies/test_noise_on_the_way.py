from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from underwatt.jobs.job import load_job
from underwatt.jobs.training import build_model
from underwatt.records import ConvergenceRun
from underwatt.studies.proxy_training import measure_noise_scale, noise_scale_on_the_way

JOB = f"{Path(__file__).parents[1] / 'helpers' / 'small_job.py'}:job"


def test_a_job_is_metered_while_it_trains() -> None:
    job = load_job(JOB)
    assert 50 < measure_noise_scale(job, 32, steps=60).pairs < 60


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
    frozen = replace(job, lr=1e-12, optimizer=torch.optim.SGD)  # which looks at all gradients alike
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
