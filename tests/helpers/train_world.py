"""A small job that learns at once, and whole runs of it on a virtual board, for tests of training under a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from run_world import virtual

from underwatt import Job
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.jobs import checkpoint
from underwatt.jobs.runs import Run, RunOptions, RunResult, run_job
from underwatt.runlog.log import read_log
from underwatt.runlog.run_record import RunRecord
from underwatt.store.store import Store

SAMPLES = 320  # of which a fifth is held out
happens: list[Callable[[torch.Tensor], None]] = []  # called with the numbers of the samples, in each training step


def forward(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    inputs, numbers, targets = batch
    if model.training and numbers.device.type != "meta":
        for call in happens:
            call(numbers)
    return model(inputs), targets


def make_model() -> torch.nn.Module:
    # Dropout draws random numbers: a training that goes on must draw the same ones.
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
    )


def blobs(**more: Any) -> Job:
    chance = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (SAMPLES,), generator=chance)
    inputs = torch.randn(SAMPLES, 8, generator=chance) + 2 * torch.nn.functional.one_hot(targets, 8)
    given = {"target": 0.85, "batch_sizes": (16,), "lr": 3e-3, "name": "blobs", **more}
    return Job(make_model, (inputs, torch.arange(SAMPLES), targets), forward=forward, **given)


@contextlib.contextmanager
def happening(call: Callable[[torch.Tensor], None]) -> Iterator[None]:
    happens.append(call)
    try:
        yield
    finally:
        happens.remove(call)


def train(
    folder: Path,
    job: Job,
    *,
    limit: float = 10_000,
    every: int = 200,
    resume: bool = False,
    device: Any = None,
    live: LiveBudget | None = None,
    set_modes: bool = True,
    **more: Any,
) -> RunResult:
    with Store(folder.parent / "store.db") as store:
        run = Run(
            RunOptions(evaluate_every=every, limit_samples=limit, resume=resume, set_modes=set_modes),
            device or virtual("nano"),
            live or LiveBudget(Budget(power_w=3.0)),
            folder,
            store,
            job.batch_sizes,
            **more,
        )
        return run_job(run, job)


def state_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / checkpoint.NAME, weights_only=True)["training"]
    return found


def log_in(folder: Path) -> RunRecord:
    return read_log(folder / "log.jsonl")


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
