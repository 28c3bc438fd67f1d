"""A job that learns in a moment: three clouds of points; how it misbehaves is said by environment variables."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from underwatt.jobs.job import Job

SIZES = (4, 16, 64)


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    return centres[classes] + torch.randn(count, 2, generator=generator), classes


class Net(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == int(os.environ.get("TEST_FAIL_AT", "-1")) and self.training:
            raise RuntimeError("planted")
        if len(inputs) == int(os.environ.get("TEST_DIE_AT", "-1")) and self.training:
            print("last words", flush=True)
            os._exit(7)
        return super().forward(inputs)


def job(**changes: object) -> Job:
    print("a job may print")
    settings: dict[str, object] = {
        "target": 0.9,
        "proxy_data": points(600, 1),
        "proxy_test_data": points(300, 2),
        "lr": 4e-2,
        "lr_batch_size": 64,
        "batch_sizes": SIZES,
        "device": "cpu",
    }
    model = lambda: Net(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))  # noqa: E731
    return Job(model, points(100, 0), **{**settings, **changes})  # type: ignore[arg-type]


class PlainSgd:
    """Steps down the gradient. PyTorch's own optimizers import its compiler first, which takes a process a second."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.defaults, self.state = {"lr": lr}, dict[nn.Parameter, object]()
        self._before, self._after = (OrderedDict[int, Callable[..., None]]() for _ in range(2))

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        handle = RemovableHandle(self._before)
        self._before[handle.id] = hook
        return handle

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    def zero_grad(self, set_to_none: bool) -> None:
        assert set_to_none
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for hook in self._before.values():
            hook(self, (), {})
        for weight in self.param_groups[0]["params"]:
            weight -= self.param_groups[0]["lr"] * weight.grad
        for hook in self._after.values():
            hook(self, (), {})


def light_job(**changes: object) -> Job:
    """For worker processes: they start in half the time."""
    return job(optimizer=PlainSgd, **changes)


def slow_job() -> Job:
    return light_job(target=2.0)  # no accuracy is: it trains until ended


def loading_job() -> Job:
    return light_job(num_workers=1, target=0.5)
