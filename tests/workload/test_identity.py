from __future__ import annotations

import pytest
import torch
from torch import nn

from underwatt.workload.identity import job_info
from underwatt.workload.job import Job

DATA = (torch.randn(64, 4), torch.randint(2, (64,)))


def info(model=None, **fields):
    fields = {"data": DATA, "target": 0.9, **fields}
    return job_info(Job(model or nn.Linear(4, 2), **fields))


def test_is_the_same_for_what_does_not_change_a_step():
    same = info()
    assert same.id == info(lambda: nn.Linear(4, 2)).id
    assert same.id == info(lr=0.1, target=0.5, batch_sizes=(8,), seed=3).id
    assert same.id == info(data=(torch.zeros(9, 4), torch.zeros(9, dtype=torch.long))).id


@pytest.mark.parametrize(
    "fields",
    [
        {"model": nn.Linear(4, 3)},
        {"model": nn.Sequential(nn.Linear(4, 2), nn.ReLU())},
        {"data": (torch.zeros(9, 4, dtype=torch.float64), DATA[1][:9])},
        {"optimizer": torch.optim.SGD},
        {"loss": nn.functional.nll_loss},
        {"num_workers": 2},
    ],
)
def test_differs_for_what_does(fields):
    assert info(**fields).id != info().id


def test_the_same_layers_wired_differently_differ():
    class Plain(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    assert info(Plain(4, 2)).id != info(Doubled(4, 2)).id


def test_synthetic_data_is_said_in_the_name():
    assert info(name="net", synthetic=True).name == "net (synthetic data)"
    assert info(name="net").name == "net"
    assert info().software["torch"] == torch.__version__
