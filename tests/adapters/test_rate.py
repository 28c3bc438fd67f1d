from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from underwatt.adapters.tuner import RateFollower, usual_rule
from underwatt.errors import InputError

SIZES = (64, 16, 16, 32, 64, 8, 128, 64)
SCHEDULERS = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=len(SIZES) + 1, cycle_momentum=False),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
}


def make(kind: type[torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.1) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=lr)  # type: ignore[call-arg]


def step(optimizer: torch.optim.Optimizer) -> float:
    """One step of a gradient of one; how far the parameter went."""
    [parameter] = optimizer.param_groups[0]["params"]
    before = parameter.item()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return before - parameter.item()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sees_its_own_rates_wherever_it_is_called(name: str) -> None:
    plain, followed = make(), make()
    alone, beside = SCHEDULERS[name](plain), SCHEDULERS[name](followed)
    follower = RateFollower(followed, 64)
    for size in SIZES:
        own = plain.param_groups[0]["lr"]
        step(plain)
        follower.follow(size)
        assert step(followed) == pytest.approx(own * size / 64, rel=1e-4)
        if alone is not None and beside is not None:
            alone.step()
            beside.step()
        assert followed.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
    follower.close()
    assert step(followed) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-4)


def test_groups_keep_their_proportions() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    follower = RateFollower(optimizer, 64)
    follower.follow(16)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(1)
    optimizer.step()
    assert [-group["params"][0].item() for group in optimizer.param_groups] == pytest.approx([0.025, 0.0025])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_a_step_that_raises_leaves_the_rate_as_it_was() -> None:
    optimizer = make()
    follower = RateFollower(optimizer, 64)
    follower.follow(32)

    def broken() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError):
        optimizer.step(broken)
    assert step(optimizer) == pytest.approx(0.05)
    with pytest.raises(RuntimeError):
        optimizer.step(broken)
    follower.close()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_usual_rule_suits_the_optimizer() -> None:
    assert usual_rule(make()) == "linear"
    assert usual_rule(make(torch.optim.AdamW)) == "sqrt"
    optimizer = make()
    follower = RateFollower(optimizer, 64, "sqrt")
    follower.follow(16)
    assert step(optimizer) == pytest.approx(0.05)
    follower.follow(64)
    assert step(optimizer) == pytest.approx(0.1)


def test_a_wrapped_optimizer_is_unwrapped_and_anything_else_is_refused() -> None:
    optimizer = make()
    RateFollower(SimpleNamespace(optimizer=optimizer), 64).follow(32)
    assert step(optimizer) == pytest.approx(0.05)
    with pytest.raises(InputError, match="no PyTorch optimizer"):
        RateFollower(SimpleNamespace(param_groups=[]), 64)


def test_a_checkpoint_holds_the_own_rate() -> None:
    optimizer = make()
    RateFollower(optimizer, 64).follow(8)
    step(optimizer)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_a_rate_of_zero_stays_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    follower = RateFollower(optimizer, 32)
    follower.follow(8)
    weight.grad = torch.ones(2)
    optimizer.step()  # a warm-up that begins at zero must not end the training
    assert torch.equal(weight.detach(), torch.ones(2))
    follower.close()
