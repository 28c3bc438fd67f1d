from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from underwatt.errors import JobError
from underwatt.jobs.job import Job, scaled_lr

DATA = (torch.zeros(10, 4), torch.zeros(10, dtype=torch.long))


def make(**fields):
    return Job(**{"model": nn.Linear(4, 2), "data": DATA, "target": 0.9, **fields})


def test_only_model_data_and_target_are_needed():
    job = make()
    assert isinstance(job.make_optimizer(job.model, 0.1), torch.optim.AdamW)
    assert job.batch_sizes == (4, 8, 16, 32, 64, 128)


def test_batch_sizes_are_put_in_order():
    assert make(batch_sizes=[64, 8, 8]).batch_sizes == (8, 64)
    assert make(batch_sizes=8).batch_sizes == (8,)


@pytest.mark.parametrize("sizes", [[0], [-4, 8], [], [8.0], [True]])
def test_batch_sizes_that_make_no_sense(sizes):
    with pytest.raises(JobError, match="at least 1"):
        make(batch_sizes=sizes)


def test_a_target_is_needed():
    with pytest.raises(JobError, match="no target") as caught:
        Job(nn.Linear(4, 2), DATA)
    assert "target=0.9" in caught.value.hint


@pytest.mark.parametrize("name", ["data", "proxy_data", "test_data", "proxy_test_data"])
def test_empty_data_is_named(name):
    with pytest.raises(JobError, match=f"{name} is empty"):
        make(**{name: (torch.zeros(0, 4), torch.zeros(0))})
    with pytest.raises(JobError, match=f"{name} is empty"):
        make(**{name: []})


def test_data_without_a_length_or_of_unlike_lengths():
    with pytest.raises(JobError, match="no length"):
        make(data=iter([1, 2]))
    with pytest.raises(JobError, match="no length"):
        make(data=None)
    with pytest.raises(JobError, match=r"differ in length: \[3, 10\]"):
        make(data=(torch.zeros(10, 4), torch.zeros(3)))


@pytest.mark.parametrize("fields", [{"lr": 0.0}, {"lr": float("nan")}, {"lr_batch_size": 0}])
def test_learning_rates_that_make_no_sense(fields):
    with pytest.raises(JobError, match="makes no sense"):
        make(**fields)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (None, 0.05),
        (torch.optim.Adam, 0.05),
        (torch.optim.SGD, 0.025),
        (functools.partial(torch.optim.SGD, momentum=0.9), 0.025),
        (lambda parameters, lr: torch.optim.SGD(parameters, lr=lr), 0.025),
    ],
)
def test_the_usual_rule_follows_the_optimizer(optimizer, rate):
    assert make(lr=0.1, lr_batch_size=128, optimizer=optimizer).lr_at(32) == pytest.approx(rate)


def test_a_rule_of_ones_own_wins():
    assert make(lr=0.1, lr_rule="none", optimizer=torch.optim.SGD).lr_at(1) == 0.1


def test_reached_knows_the_direction():
    assert make().reached(0.9)
    assert not make().reached(0.89)
    assert make(higher_is_better=False).reached(0.5)


def test_jobs_load_without_torch():
    code = (
        "import sys; import underwatt.measure.workload, underwatt.jobs.workloads; "
        "assert not {'torch', 'numpy', 'scipy', 'sklearn'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_hint_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from underwatt.errors import MissingExtraError\n"
        "try: import underwatt.jobs.training\n"
        "except MissingExtraError as exc: assert 'underwatt[torch]' in exc.hint\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_rules():
    assert scaled_lr(5e-4, 128, 32, "sqrt") == pytest.approx(2.5e-4)
    assert scaled_lr(0.1, 256, 64, "linear") == pytest.approx(0.025)
    assert scaled_lr(0.1, 256, 64, "none") == 0.1
    assert scaled_lr(0.1, 256, 64, lambda lr, base, size: lr * base / size) == pytest.approx(0.4)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["sqrt", "linear", "none"]))
def test_the_base_batch_size_keeps_its_rate_and_there_and_back_is_the_same(base, size, rule):
    assert scaled_lr(0.01, base, base, rule) == pytest.approx(0.01)
    assert scaled_lr(scaled_lr(0.01, base, size, rule), size, base, rule) == pytest.approx(0.01)


def test_nonsense_is_refused():
    with pytest.raises(JobError, match="no learning-rate rule 'cube'"):
        scaled_lr(0.1, 1, 1, "cube")
    with pytest.raises(JobError, match="comes out as 0"):
        scaled_lr(0.1, 1, 1, lambda *_: 0.0)


def test_an_accuracy_in_percent_is_refused() -> None:
    with pytest.raises(JobError, match="1 at most"):
        make(target=90)
    assert make(target=90, metric=lambda *_: 91.0).target == 90
