"""Trainings whose numbers run over: they end, they say so, and the last good checkpoint stays."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from run_world import Numbers, log_of, notes, tuned, virtual
from train_world import blobs, happening, log_in, state_in, train

from underwatt.events import Progressed
from underwatt.jobs import checkpoint, training_loop
from underwatt.reports.gather_run import happened


def weights_are_finite(folder: Path) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state_in(folder)["model"].values())


class Poison:
    """A loss that is as the job says, until so many steps are trained, and then no finite number."""

    def __init__(self, after: int, *, value: float = math.nan, steps: float = math.inf, reaches_weights: bool = True):
        self.after, self.value, self.steps, self.reaches_weights = after, value, steps, reaches_weights
        self.seen = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(output, targets)
        if output.device.type == "meta" or not torch.is_grad_enabled():
            return loss
        self.seen += 1
        if not self.after < self.seen <= self.after + self.steps:
            return loss
        return loss * self.value if self.reaches_weights else loss + (torch.tensor(self.value) - 0.0).detach()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("every", [200, 10**9])
def test_a_diverged_training_ends_and_its_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, every: int
) -> None:
    monkeypatch.setattr(training_loop, "CHECKPOINT_PERIOD_S", 0.0)  # one with every step
    job = blobs(target=1.01, loss=Poison(60, value=value))
    trained = train(tmp_path / "run", job, limit=1e7, every=every)
    assert trained.outcome == "diverged"
    assert trained.samples < 1e6
    assert weights_are_finite(tmp_path / "run")
    assert state_in(tmp_path / "run")["steps"] == 60
    log = log_in(tmp_path / "run")
    assert log.end is not None
    assert (log.end.outcome, log.end.restored) == ("diverged", True)
    [said] = [text for text in notes(tmp_path / "run") if "diverged" in text]
    assert f"of {16 * 60:,} samples" in said
    assert str(tmp_path / "run" / checkpoint.NAME) in said
    assert "diverged" in happened(log)


def test_a_model_that_diverged_at_the_very_end_is_not_called_trained(tmp_path: Path) -> None:
    trained = train(tmp_path / "run", blobs(target=1.01, loss=Poison(9)), limit=160, every=10**9)
    assert trained.outcome == "diverged"
    assert weights_are_finite(tmp_path / "run")


def test_an_odd_loss_now_and_then_ends_nothing(tmp_path: Path) -> None:
    """As where mixed precision skips a step: the weights are untouched by it."""
    loss = Poison(20, steps=1, reaches_weights=False)
    assert train(tmp_path / "run", blobs(loss=loss)).outcome == "reached"


def test_a_loss_that_stays_odd_ends_it_though_the_weights_are_finite(tmp_path: Path) -> None:
    job = blobs(target=1.01, loss=Poison(60, reaches_weights=False))
    assert train(tmp_path / "run", job, limit=1e6, every=10**9).outcome == "diverged"
    assert state_in(tmp_path / "run")["samples"] < 16 * 61


def test_an_odd_loss_just_before_the_target_costs_no_checkpoint(tmp_path: Path) -> None:
    job = blobs(target=0.0, loss=Poison(190, reaches_weights=False))  # of 250 steps, in too short a time to be sure
    trained = train(tmp_path / "run", job, every=4000)
    assert trained.outcome == "reached"
    assert not math.isfinite(log_in(tmp_path / "run").of(Progressed)[-1].loss or math.nan), "it was looked at"
    assert state_in(tmp_path / "run")["samples"] == trained.samples


def test_an_interrupted_diverged_training_keeps_the_good_checkpoint(tmp_path: Path) -> None:
    steps = []

    def interrupt(_: torch.Tensor) -> None:
        steps.append(1)
        if len(steps) == 14:
            raise KeyboardInterrupt

    with happening(interrupt), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", blobs(target=1.01, loss=Poison(10)), every=10**9)
    assert weights_are_finite(tmp_path / "run")


def test_a_loop_of_ones_own_is_warned_once_and_its_log_says_so(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        for _ in range(3):
            for _batch in tuner.loader(Numbers(4000)):
                tuner.step(loss=torch.tensor(math.nan))
    assert log_of(tmp_path).end.outcome == "diverged"
    assert sum("diverged" in text for text in notes(tmp_path)) == 1


def test_a_loop_that_recovers_is_not_called_diverged(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        for loss in (math.nan, 0.5):
            for _batch in tuner.loader(Numbers(4000)):
                tuner.step(loss=loss)
    assert log_of(tmp_path).end.outcome == "finished"
