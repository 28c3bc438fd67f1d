from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from underwatt.errors import JobError, StepError
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job


def job(model, inputs, classes=10, **fields):
    return Job(model, (inputs, torch.zeros(len(inputs), dtype=torch.long)), target=0.9, **fields)


def linear(**fields):
    return job(nn.Linear(64, 10, bias=False), torch.zeros(8, 64), **fields)


def test_a_linear_layer_by_hand():
    cost = count_cost(linear())
    # Forward and the weight gradient; the input needs none.
    assert cost.flops_per_sample == 2 * (2 * 64 * 10)
    assert cost.parameters == 640
    assert cost.load_bytes_per_sample == 64 * 4 + 8
    # Each sample at least brings its input twice and its output out and back.
    assert cost.bytes_per_sample > 2 * 64 * 4 + 2 * 10 * 4
    # The saved input, the scores' log-softmax and the label.
    assert cost.activation_bytes_per_sample == 64 * 4 + 10 * 4 + 8


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (torch.optim.AdamW, 4),
        (torch.optim.Adam, 4),
        (torch.optim.SGD, 2),
        (lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), 3),
        (torch.optim.Adagrad, 3),
    ],
)
def test_state_is_weights_gradients_and_what_the_optimizer_keeps(optimizer, copies):
    assert count_cost(linear(optimizer=optimizer)).state_bytes == pytest.approx(copies * 640 * 4, abs=8)


def test_adam_moves_more_than_sgd_at_each_step_whatever_the_batch():
    adam, sgd = count_cost(linear()), count_cost(linear(optimizer=torch.optim.SGD))
    assert adam.bytes_per_step > sgd.bytes_per_step
    assert adam.bytes_per_sample == sgd.bytes_per_sample
    assert adam.kernels_per_step > sgd.kernels_per_step


@pytest.mark.parametrize("groups", [1, 32])
def test_convolutions_cost_forward_three_times_also_in_groups(groups):
    # A first layer in front, so that the one in question has an input gradient too.
    first, second = nn.Conv2d(3, 32, 1, bias=False), nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False)
    model = nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    cost = count_cost(job(model, torch.zeros(4, 3, 16, 16)))
    forward = 2 * 16 * 16
    assert cost.flops_per_sample == forward * (2 * 3 * 32 + 3 * 32 * 32 * 9 // groups)


def test_transposed_convolutions():
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    cost = count_cost(job(model, torch.zeros(4, 4, 8, 8)))
    assert cost.flops_per_sample == 2 * (2 * 8 * 8 * 4 * 8 * 2 * 2)


def test_views_are_free_and_inplace_saves_activations():
    plain = count_cost(job(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)), torch.zeros(8, 64)))
    viewed = count_cost(
        job(
            nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (8, 8)), nn.Flatten(), nn.Linear(64, 10)),
            torch.zeros(8, 64),
        )
    )
    assert viewed.bytes_per_sample == plain.bytes_per_sample
    assert viewed.kernels_per_step == plain.kernels_per_step
    assert viewed.activation_bytes_per_sample == plain.activation_bytes_per_sample


def test_activations_match_what_autograd_really_holds():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    counted = count_cost(job(model, torch.zeros(8, 256))).activation_bytes_per_sample
    # By hand: the input, the ReLU's output (also the next layer's input), the tanh's output, log-softmax, label.
    assert counted == 256 * 4 + 512 * 4 + 512 * 4 + 10 * 4 + 8


def test_a_deeper_network_launches_more():
    def layers(count):
        return count_cost(job(nn.Sequential(*(nn.Linear(10, 10) for _ in range(count))), torch.zeros(4, 10)))

    assert layers(10).kernels_per_step > layers(5).kernels_per_step


def test_counting_does_not_train_or_use_memory():
    model = nn.Linear(64, 10)
    before = model.weight.detach().clone()
    count_cost(job(model, torch.zeros(8, 64)))
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    started_s = time.monotonic()
    wide = count_cost(job(lambda: nn.Linear(64, 10, device="meta"), torch.zeros(8, 64)))
    assert wide.parameters == 650
    assert time.monotonic() - started_s < 2


def test_what_reads_values_is_refused_with_a_hint():
    class Reads(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * inputs.sum().item()

    with pytest.raises(JobError, match="cost of this job cannot be counted") as caught:
        count_cost(job(Reads(64, 10), torch.zeros(8, 64)))
    assert ".item()" in caught.value.hint


def test_a_plain_shape_error_is_the_jobs_own_and_shows_its_line():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, inputs):
            return self.layer(inputs[:, :60])  # too few

    with pytest.raises(StepError, match="shapes cannot be multiplied") as caught:
        count_cost(job(Wrong(), torch.zeros(8, 64)))
    assert "too few" in caught.value.message
    assert Path(__file__).name in caught.value.message
