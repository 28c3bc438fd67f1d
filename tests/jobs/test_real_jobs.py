"""Jobs as people's scripts are: a step of their own, groups, schedulers, samplers, metrics of a whole test set."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tiny_job import Listed, make
from torch import nn
from train_world import SAMPLES, blobs, log_in, same, state_in, train

from underwatt.errors import JobError
from underwatt.events import Scored
from underwatt.jobs import training as module
from underwatt.jobs.cost import count_cost
from underwatt.jobs.identity import job_info
from underwatt.jobs.job import Job
from underwatt.jobs.training import Scoring, Training


class Mixed:
    """A step in mixed precision with clipping: what people have in their scripts."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def __call__(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        *inputs, targets = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs[0]), targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def test_a_step_of_ones_own_with_mixed_precision_learns_and_is_in_checkpoints(tmp_path: Path) -> None:
    def job() -> Job:
        return blobs(target=2.0, train_step=Mixed(), limit_samples=3200)

    whole = train(tmp_path / "whole", job(), limit=0)
    assert whole.outcome == "limit"
    assert whole.best_score is not None
    assert whole.best_score > 0.8
    train(tmp_path / "parts", job(), limit=1600)
    assert train(tmp_path / "parts", job(), limit=0, resume=True).samples == 3200
    one, other = state_in(tmp_path / "whole"), state_in(tmp_path / "parts")
    assert one["train_step"]["scale"] > 1024
    for name in ("model", "optimizer", "order", "train_step"):
        assert same(one[name], other[name]), name


def test_the_cost_of_a_step_of_ones_own_is_counted_without_calling_it() -> None:
    plain, own = blobs(), blobs(train_step=lambda *_: pytest.fail("called"))
    assert count_cost(own).flops_per_sample == pytest.approx(count_cost(plain).flops_per_sample, rel=0.05)
    assert count_cost(own).bytes_per_sample == pytest.approx(count_cost(plain).bytes_per_sample, rel=0.2)
    assert job_info(plain).id != job_info(own).id


def by_depth(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    head = list(model[-1].parameters())
    rest = [weight for layer in model[:-1] for weight in layer.parameters()]
    return torch.optim.SGD([{"params": rest, "weight_decay": 0.1}, {"params": head, "lr": 10 * lr}], lr=lr)


@pytest.mark.parametrize("make_optimizer", [by_depth, functools.partial(by_depth)])
def test_an_optimizer_made_of_the_model_has_groups_that_keep_their_ratio(make_optimizer: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

    job = make(model=model, optimizer=make_optimizer, lr=0.01, lr_batch_size=32)
    assert job.lr_at(16) == pytest.approx(0.005), "SGD, so linear"
    training, rates = Training(job, 16), []
    training.optimizer.register_step_pre_hook(lambda made, *_: rates.append([g["lr"] for g in made.param_groups]))
    training.step()
    assert rates == [pytest.approx([0.005, 0.05])]
    assert [len(group["params"]) for group in training.optimizer.param_groups] == [2, 2]
    count_cost(job)


@given(st.lists(st.sampled_from([4, 8, 16, 32]), min_size=10, max_size=30))
def test_a_schedule_spans_the_same_data_at_any_batch_size(sizes: list[int]) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    training = Training(make(data=Listed(40), scheduler=scheduler, lr=0.1, lr_batch_size=16), 16)
    for size in sizes:
        training.set_batch_size(size)
        training.step()
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (training.samples // 16))


def test_a_schedule_is_resumed_between_two_of_its_steps(tmp_path: Path) -> None:
    def job() -> Job:
        def scheduler(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        return blobs(target=2.0, scheduler=scheduler, schedule_samples=192)

    whole = train(tmp_path / "whole", job(), limit=960)
    train(tmp_path / "parts", job(), limit=480)
    train(tmp_path / "parts", job(), limit=960, resume=True)
    one, other = state_in(tmp_path / "whole"), state_in(tmp_path / "parts")
    assert whole.samples == 960
    assert one["scheduler"]["last_epoch"] == 5
    assert all(same(one[name], other[name]) for name in ("model", "optimizer", "scheduler", "left_over"))


def test_a_scheduler_that_waits_for_a_plateau_hears_each_score(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1, threshold=10.0)

    train(tmp_path / "run", blobs(target=2.0, scheduler=scheduler), limit=1600)
    [group] = state_in(tmp_path / "run")["optimizer"]["param_groups"]
    assert len(log_in(tmp_path / "run").of(Scored)) == 8
    assert group["lr"] < 3e-3


def test_a_sampler_says_the_order_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    def rare(data: Any) -> Any:
        weights = [1.0 if index < 10 else 0.0 for index in range(len(data))]
        return torch.utils.data.WeightedRandomSampler(weights, 32)

    training = Training(make(data=Listed(40), test_data=Listed(5), sampler=rare), 8)
    seen = {int(number) for _ in range(12) for number in training.fetch()[0][0][:, 0].tolist()}
    assert seen == set(range(10))

    def job() -> Job:
        return blobs(target=2.0, sampler=lambda data: torch.utils.data.RandomSampler(data, num_samples=100))

    train(tmp_path / "whole", job(), limit=800)
    train(tmp_path / "parts", job(), limit=400)
    train(tmp_path / "parts", job(), limit=800, resume=True)
    one, other = state_in(tmp_path / "whole"), state_in(tmp_path / "parts")
    assert all(same(one[name], other[name]) for name in ("model", "order"))


def test_a_sampler_that_names_nothing_is_refused_and_so_is_one_already_made() -> None:
    with pytest.raises(JobError, match="names no sample"):
        Training(make(sampler=lambda _data: []), 8).step()
    with pytest.raises(JobError, match="not a function") as caught:
        make(sampler=torch.utils.data.RandomSampler(Listed(40)))
    assert "sampler=lambda data" in caught.value.hint


# Metrics.


def f1(output: torch.Tensor, targets: torch.Tensor) -> float:
    said, is_one = output.argmax(-1) == 1, targets == 1
    right = float((said & is_one).sum())
    return 2 * right / max(1.0, float(said.sum() + is_one.sum()))


def auc(output: torch.Tensor, targets: torch.Tensor) -> float:
    scores, is_one = output[:, 1] - output[:, 0], targets == 1
    above = scores[is_one].unsqueeze(1) > scores[~is_one].unsqueeze(0)
    return float(above.float().mean())


class Counted:
    """A metric as torchmetrics has them: it is told batch by batch, and asked once."""

    def reset(self) -> None:
        self.outputs, self.targets = [], []

    def update(self, output: torch.Tensor, targets: torch.Tensor) -> None:
        self.outputs.append(output)
        self.targets.append(targets)

    def compute(self) -> torch.Tensor:
        return torch.tensor(f1(torch.cat(self.outputs), torch.cat(self.targets)))


@pytest.mark.parametrize("metric", [f1, auc, Counted()])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_a_metric_is_of_the_whole_test_set_whatever_the_batches(metric: Any, batch_size: int) -> None:
    chance = torch.Generator().manual_seed(3)
    targets = (torch.rand(203, generator=chance) < 0.1).long()
    inputs = torch.randn(203, 2, generator=chance) + targets.unsqueeze(1) * torch.tensor([-0.4, 0.4])
    job = make(model=nn.Identity, data=(inputs, targets), test_data=(inputs, targets), metric=metric)
    job = Job(**{**job.__dict__, "model": nn.Linear(2, 2)})
    training = Training(job, 8)
    with torch.no_grad():
        training.model.weight.copy_(torch.eye(2))
        training.model.bias.zero_()
    whole = f1(inputs, targets) if isinstance(metric, Counted) else metric(inputs, targets)
    assert training.evaluate(batch_size=batch_size) == pytest.approx(whole, abs=1e-6)
    assert training.evaluate(batch_size=batch_size) == pytest.approx(whole, abs=1e-6), "and once more"
    if batch_size == 7:  # what it was when batches were averaged
        parts = [auc(*pair) for pair in zip(inputs.split(7), targets.split(7), strict=True)] if metric is auc else []
        means = [value for value in parts if not math.isnan(value)]
        assert not means or abs(sum(means) / len(means) - whole) > 1e-3


def test_outputs_of_many_kinds_are_joined_and_those_that_cannot_be_are_said() -> None:
    seen: list[Any] = []
    scoring = Scoring(make(metric=lambda output, targets: seen.append((output, targets)) or 0.5), 5)
    for size in (3, 2):
        boxes = [{"boxes": torch.zeros(index, 4)} for index in range(size)]
        scoring.add({"logits": torch.ones(size, 2), "boxes": boxes}, (torch.zeros(size), ["a"] * size), size)
    assert scoring.value() == 0.5
    [(output, (numbers, names))] = seen
    assert output["logits"].shape == (5, 2)
    assert [len(one["boxes"]) for one in output["boxes"]] == [0, 1, 2, 0, 1]
    assert numbers.shape == (5,)
    assert names == ["a"] * 5

    scoring = Scoring(make(metric=lambda *_: 0.5), 4)
    for length in (6, 7):
        scoring.add(torch.zeros(2, length), torch.zeros(2), 2)
    with pytest.raises(JobError, match="differ in shape") as caught:
        scoring.value()
    assert "update" in caught.value.hint


def test_outputs_that_no_memory_holds_are_refused_at_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name])
    with pytest.raises(JobError, match="whole test set"):
        Scoring(make(metric=lambda *_: 0.5), 1_000_000).add(torch.zeros(2, 10), torch.zeros(2), 2)


# When it is over.


def test_without_a_target_the_limit_of_the_job_is_its_end(tmp_path: Path) -> None:
    job = blobs(target=math.nan, limit_samples=2000)
    ended = train(tmp_path / "run", job, limit=0)
    assert (ended.outcome, ended.samples) == ("finished", 2000)
    assert log_in(tmp_path / "run").start.target is None
    assert [score.target for score in ended.scores] == [None] * len(ended.scores)
    more = train(tmp_path / "run", job, limit=2400, resume=True)
    assert (more.outcome, more.samples) == ("finished", 2400)


def test_a_plateau_ends_it_and_a_resumed_run_knows_since_when(tmp_path: Path) -> None:
    def job(patience: float) -> Job:
        flat = {"metric": lambda *_: 0.25, "patience_samples": patience}
        return blobs(target=0.9, **flat)

    assert train(tmp_path / "run", job(1600), limit=600).outcome == "limit"
    ended = train(tmp_path / "run", job(1600), limit=0, resume=True)
    assert ended.outcome == "plateau"
    assert ended.scores[0].samples == 208
    assert ended.samples == 1856, "the first test after 1808"
    assert train(tmp_path / "run", job(2000), limit=0, resume=True).samples == 2272, "and not 2000 from here"
    assert train(tmp_path / "none", blobs(target=math.nan, patience_samples=400), limit=0).outcome == "finished"


def test_what_is_lower_is_better_where_the_job_says_so(tmp_path: Path) -> None:
    values = iter([0.5, 0.4, 0.45, 0.6])
    job = blobs(target=0.1, metric=lambda *_: next(values), higher_is_better=False)
    ended = train(tmp_path / "run", job, limit=800)
    assert (ended.best_score, ended.score) == (0.4, 0.6)


@pytest.mark.parametrize("fields", [{"limit_samples": 0}, {"patience_samples": -1}, {"schedule_samples": 0}])
def test_limits_that_make_no_sense(fields: dict[str, float]) -> None:
    with pytest.raises(JobError, match="at least 1 sample"):
        make(**fields)


# The trained model.


def test_the_best_model_and_the_last_one_are_there_and_load(tmp_path: Path) -> None:
    values = iter([0.5, 0.7, 0.6])
    kept: list[Any] = []
    job = blobs(target=0.9, metric=lambda *_: next(values))
    ended = train(tmp_path / "run", job, limit=600)
    assert (ended.model, ended.last_model) == (tmp_path / "run" / "model.pt", tmp_path / "run" / "last.pt")
    assert [score.value for score in ended.scores] == [0.5, 0.7, 0.6]
    assert ended.best_score == 0.7
    for path in (ended.model, ended.last_model):
        fresh = job.model()
        fresh.load_state_dict(torch.load(path))
        kept.append({name: value.clone() for name, value in fresh.state_dict().items()})
    assert same(kept[1], dict(state_in(tmp_path / "run")["model"]))
    values = iter([0.5, 0.7])
    train(tmp_path / "short", blobs(target=0.9, metric=lambda *_: next(values)), limit=416)
    assert same(kept[0], torch.load(tmp_path / "short" / "last.pt")), "the best one is that of its moment"
    assert not same(kept[0], kept[1])


def test_a_killed_run_keeps_its_best_model_and_its_last_one(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    steps = iter(range(10_000))
    job = blobs(target=2.0, train_step=lambda *_: stop() if next(steps) == 40 else torch.zeros(()))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", job)
    assert (tmp_path / "run" / "model.pt").is_file()
    assert len(log_in(tmp_path / "run").of(Scored)) == math.floor(40 * 16 / 208)
    assert SAMPLES == 320
