from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from underwatt.jobs.identity import job_info, loop_info
from underwatt.jobs.job import Job

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


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss])
def test_what_a_loss_was_made_with_is_part_of_it(loss):
    def made(**options):
        return loss(**options) if isinstance(loss, type) else partial(loss, **options)

    plain, smooth, smoother = (info(loss=made(label_smoothing=value)).id for value in (0.0, 0.1, 0.2))
    assert len({plain, smooth, smoother}) == 3
    assert info(loss=made(label_smoothing=0.1)).id == smooth
    weighted = [info(loss=made(weight=torch.rand(2))).id for _ in range(2)]
    assert weighted[0] == weighted[1] != info(loss=made()).id


class Averaged(torch.optim.SGD):
    def __init__(self, parameters, lr, inner=None):
        super().__init__(parameters, lr=lr)


def test_what_an_optimizer_was_made_with_is_part_of_it_but_not_the_rate():
    assert info(optimizer=partial(torch.optim.SGD, lr=1.0)).id == info(optimizer=torch.optim.SGD).id
    assert info(optimizer=partial(torch.optim.SGD, momentum=0.9)).id != info(optimizer=torch.optim.SGD).id
    assert info(optimizer=partial(torch.optim.SGD, foreach=True)).id != info(optimizer=torch.optim.SGD).id
    inner = [info(optimizer=partial(Averaged, inner=kind)).id for kind in (torch.optim.Adam, torch.optim.SGD)]
    assert inner[0] != inner[1]


def test_the_kind_of_device_that_trains_is_part_of_it():
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    assert info(device="cpu").id != info(device="cuda").id
    assert info().id == info(device=usual).id
    assert info(device="cuda:0").id == info(device="cuda:1").id


def loop(model=None, kind=torch.optim.SGD, name="training"):
    return loop_info(name, kind((model or nn.Linear(4, 2)).parameters(), lr=0.1)).id


def test_a_loop_is_known_by_what_its_optimizer_trains():
    assert loop() == loop(nn.Linear(4, 2))
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    others = [
        loop(nn.Linear(4, 3)),
        loop(nn.Linear(2, 4)),
        loop(nn.Linear(4, 2, bias=False)),
        loop(nn.Linear(4, 2).double()),
        loop(kind=torch.optim.Adam),
        loop(name="another"),
        loop(lazy),
        loop_info("training").id,
    ]
    assert len({loop(), *others}) == 1 + len(others)
