from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from underwatt.errors import JobError, MissingExtraError
from underwatt.jobs.command import CommandRate, CommandWorkload, Limits
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job, load_job
from underwatt.jobs.training import Training
from underwatt.jobs.workloads import TorchWorkload

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "examples" / "jobs.py"
DATA = Path(os.environ.get("UNDERWATT_DATA") or ROOT.parent / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no data folder: set UNDERWATT_DATA")

SMALL = ["resnet18_small", "mobilenetv2_small", "efficientvit_small", "char_transformer_small", "digits_small"]


def job(name: str):
    return load_job(f"{JOBS}:{name}")


@pytest.mark.parametrize(
    ("name", "parameters", "gflops"),
    [
        # Published for 32×32 and ten classes: 11.17 M, 0.56 G multiplications; 2.2 M, 0.09 G.
        ("resnet18", 11.17e6, 3 * 2 * 0.556),
        ("mobilenetv2", 2.24e6, 3 * 2 * 0.088),
    ],
)
def test_the_large_networks_are_the_published_size(name, parameters, gflops):
    made = job(name)
    cost = count_cost(made)
    assert cost.parameters == pytest.approx(parameters, rel=0.01)
    assert cost.flops_per_sample == pytest.approx(gflops * 1e9, rel=0.03)
    assert made.lr_at(128) == pytest.approx(5e-4)
    assert made.lr_at(32) == pytest.approx(2.5e-4)
    assert TorchWorkload(made).info.name == f"{name} (synthetic data)"


def test_attention_of_the_vision_transformer_is_linear_in_positions():
    layers = job("efficientvit_small").model().modules()
    attention = next(layer for layer in layers if type(layer).__name__ == "LinearAttention")
    channels = attention.qkv.in_channels

    def flops(size):
        model = nn.Sequential(attention, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        data = (torch.zeros(4, channels, size, size), torch.zeros(4, dtype=torch.long))
        return count_cost(Job(model, data, target=0.5)).flops_per_sample

    assert flops(16) == pytest.approx(4 * flops(8), rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_the_small_jobs_train_here(name):
    made = job(name)
    run = TorchWorkload(made).start(8)
    for _ in range(2):
        run.step()
    assert made.batch_sizes[0] >= 0
    assert torch.isfinite(run.training.step())
    run.stop()
    assert made.synthetic == (name in SMALL[:3])


def test_digits_reach_their_target_in_seconds():
    training = Training(job("digits_small"), 32)
    while training.steps < 1500 and not training.job.reached(training.evaluate()):
        for _ in range(50):
            training.step()
    assert training.evaluate() >= 0.97


@pytest.mark.slow
def test_the_small_transformer_reaches_its_target():
    training = Training(job("char_transformer_small"), 32)
    while training.steps < 600 and not training.job.reached(training.evaluate()):
        for _ in range(50):
            training.step()
    assert training.evaluate() >= 0.7


def test_the_transformer_sees_only_the_past():
    model = job("char_transformer_small").model().eval()
    text = torch.randint(90, (1, 64))
    changed = text.clone()
    changed[0, 40:] = 3
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.allclose(before[0, :40], after[0, :40], atol=1e-5)
    assert not torch.allclose(before[0, 40:], after[0, 40:], atol=1e-3)


def test_without_data_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv("UNDERWATT_DATA", raising=False)
    for name in ("char_transformer", "resnet18_cifar10"):
        with pytest.raises(JobError) as caught:
            job(name)
        assert "UNDERWATT_DATA" in caught.value.hint


@needs_data
def test_the_transformer_on_real_text(monkeypatch):
    monkeypatch.setenv("UNDERWATT_DATA", str(DATA))
    made = job("char_transformer")
    assert made.lr_at(128) == pytest.approx(1e-3)
    assert len(made.data) > 10_000
    assert made.proxy_data is not made.data
    assert count_cost(made).parameters == pytest.approx(4.77e6, rel=0.01)


@needs_data
def test_real_images_come_scaled(monkeypatch):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    monkeypatch.setenv("UNDERWATT_DATA", str(DATA))
    made = job("resnet18_cifar10")
    images, classes = made.data
    assert images.shape[1:] == (3, 32, 32)
    assert abs(float(images.mean())) < 0.05
    assert set(classes.tolist()) == set(range(10))
    assert not made.synthetic


@needs_data
def test_without_pillow_the_hint_names_it(monkeypatch):
    monkeypatch.setenv("UNDERWATT_DATA", str(DATA))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError) as caught:
        job("resnet18_cifar10")
    assert "pip install pillow" in caught.value.hint


def test_a_script_becomes_a_job_in_under_twenty_lines():
    """The training script of examples/train_plain.py as a job, imports and all."""
    lines = [line for line in (ROOT / "examples" / "plain_job.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 20
    training = Training(load_job(f"{ROOT}/examples/plain_job.py:job"), 32)
    training.step()
    assert count_cost(training.job).parameters == 64 * 64 + 64 + 64 * 10 + 10


def test_the_plain_script_beats_from_outside():
    command = [
        sys.executable,
        str(ROOT / "examples" / "train_plain.py"),
        "--batch-size",
        "{batch_size}",
        "--lr",
        "{lr}",
    ]
    run = CommandWorkload(command, rate=CommandRate(5e-3, 32), limits=Limits(120.0, 60.0, 1.0)).start(64)
    beats = [run.step() for _ in range(30)]
    run.stop()
    assert beats[-1].at_s > beats[0].at_s
