from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from train_world import blobs, make_model

from underwatt.convergence.noise_scale import NoiseScaleMeter
from underwatt.jobs.gradient_watch import MOST_LOOKING, GradientWatch
from underwatt.jobs.training import Training


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def known(spread: float, **more: Any) -> Training:
    """A loss w·x with x around 1 in each of four dimensions: its noise scale is the square of the spread."""
    chance = torch.Generator().manual_seed(0)
    inputs = 1 + spread * torch.randn(4000, 4, generator=chance)
    job = replace(
        blobs(**more),
        data=(inputs, torch.zeros(4000)),
        model=lambda: torch.nn.Linear(4, 1, bias=False),
        forward=lambda model, batch: (model(batch[0]), batch[1]),
        loss=lambda output, _targets: output.mean(),
    )
    return Training(job, 16)


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW])
@pytest.mark.parametrize("spread", [2.0, 6.0])
def test_successive_gradients_tell_the_noise_scale(optimizer: Any, spread: float) -> None:
    training = known(spread, optimizer=optimizer, lr=1e-6)
    watch, meter = GradientWatch(training, lambda: 0.0), NoiseScaleMeter(0.999)
    for step in range(1500):
        training.set_batch_size(16 if step % 40 < 20 else 48)
        training.step()
        if (pair := watch.look()) is not None:
            meter.add(*pair)
    assert meter.pairs > 1300
    assert meter.noise_scale == pytest.approx(spread**2, rel=0.2)


def test_looking_changes_nothing_of_the_training() -> None:
    def weights(watched: bool) -> list[torch.Tensor]:
        training = Training(blobs(), 16)
        watch = GradientWatch(training, lambda: 0.0)
        for _ in range(30):
            training.step()
            if watched:
                watch.look()
        return list(training.model.parameters())

    for one, other in zip(weights(True), weights(False), strict=True):
        assert torch.equal(one, other)


def test_where_a_look_takes_long_it_is_done_seldom() -> None:
    # A step takes 10 ms and a look 4 ms, by a clock of its own.
    now, looks = 0.0, 0
    training = Training(blobs(), 16)
    real = training.model.parameters

    def parameters(*args: Any) -> Any:
        nonlocal now, looks
        now, looks = now + 0.004, looks + 1
        return real(*args)

    watch = GradientWatch(training, lambda: now)
    for _ in range(6000):
        training.step()
        training.model.parameters = parameters  # type: ignore[method-assign]
        watch.look()
        training.model.parameters = real  # type: ignore[method-assign]
        now += 0.010
    assert looks > 20
    assert looks * 0.004 < 1.5 * MOST_LOOKING * now


def test_gradients_that_cannot_be_compared_are_left_alone() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(make_model().to(torch.float64))

    def forward(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0].double()), batch[2]

    training = Training(replace(blobs(), model=model, forward=forward), 16)
    watch = GradientWatch(training, count(0.0, 1.0).__next__)
    for _ in range(10):
        training.step()
        assert watch.look() is None
    assert math.isfinite(float(training.step()))
