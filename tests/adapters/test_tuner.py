"""The in-loop form on virtual boards: what it promises when all goes well."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from real_time import RealTime
from run_world import NET, SIZES, Hurt, Numbers, found_mode, log_of, train, tuned, virtual
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from underwatt.adapters.tuner import Tuner
from underwatt.control.state import ControlOptions
from underwatt.errors import BudgetError, InputError
from underwatt.events import Measured, Noted, Progressed
from underwatt.jobs.job import usual_rule
from underwatt.jobs.rates import RateFollower
from underwatt.runlog.inbox import running_runs
from underwatt.store.store import Store


class Stream(torch.utils.data.IterableDataset[int]):
    """Numbers that come one by one; each worker process reads its share."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(self.count) if worker is None else range(worker.id, self.count, worker.num_workers))


def test_every_sample_of_a_pass_is_trained_once_while_settings_change(tmp_path: Path) -> None:
    device = virtual()
    before = found_mode(device)
    with tuned(device, folder=tmp_path, budget_w=8.0) as tuner:
        seen, sizes = [], set()
        for batch in tuner.loader(Numbers(4001), shuffle=True):
            sizes.add(len(batch))
            seen += batch.tolist()
            tuner.step(loss=torch.tensor(0.5))
        assert tuner.samples == 4001
        assert found_mode(device) != before
    assert sorted(seen) == list(range(4001))
    assert len(sizes) > 2, "the batch size never changed: nothing was tried"
    assert found_mode(device) == before
    log = log_of(tmp_path)
    assert log.end.outcome == "finished"
    assert log.end.restored
    assert (log.end.samples, log.end.steps) == (4001, len(device.board._phases) and log.end.steps)
    assert log.of(Progressed)[-1].loss == 0.5
    assert log.start.batch_sizes == SIZES
    assert log.energy_j() == pytest.approx(log.end.energy_j, rel=0.02)


def test_worker_processes_prepare_batches_and_none_is_lost() -> None:
    with tuned(virtual(), budget_w=8.0) as tuner:
        seen: list[int] = []
        for batch in tuner.loader(Numbers(700), shuffle=True, num_workers=1):
            seen += batch.tolist()
            tuner.step()
    assert sorted(seen) == list(range(700))


def test_a_batch_that_is_nothing_does_not_end_the_pass() -> None:
    def collate(samples: list[int]) -> torch.Tensor | None:
        return None if 0 in samples else torch.tensor(samples)

    with tuned(virtual(), batch_sizes=(16,)) as tuner:
        batches = []
        for batch in tuner.loader(Numbers(64), collate_fn=collate):
            batches.append(batch)
            tuner.step()
    assert [batch is None for batch in batches] == [True, False, False, False]


def test_the_last_batch_may_be_dropped() -> None:
    with tuned(virtual(), batch_sizes=(64,)) as tuner:
        sizes = []
        for batch in tuner.loader(Numbers(150), drop_last=True):
            sizes.append(len(batch))
            tuner.step()
    assert sizes == [64, 64]


def passes(tuner: Tuner, loader: Any, count: int) -> list[list[int]]:
    """So many passes over one loader; the numbers of each."""
    seen: list[list[int]] = []
    for _ in range(count):
        seen.append([])
        for batch in loader:
            seen[-1] += batch.tolist()
            tuner.step()
    return seen


def test_one_loader_serves_all_epochs() -> None:
    with tuned(virtual(), budget_w=8.0) as tuner:
        loader = tuner.loader(Numbers(1001), shuffle=True)
        first, second, third = passes(tuner, loader, 3)
        assert sorted(first) == sorted(second) == sorted(third) == list(range(1001))
        assert first != second != third
        assert tuner.samples == 3003
        assert len(loader) == math.ceil(1001 / tuner.batch_size)
        assert len(tuner.loader(Numbers(1001), drop_last=True)) == 1001 // tuner.batch_size


def test_a_sampler_and_a_generator_of_the_users_say_the_order() -> None:
    with tuned(virtual(), batch_sizes=(8,)) as tuner:
        chosen = torch.utils.data.WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], 100)
        loader = tuner.loader(Numbers(4), sampler=chosen)
        assert len(loader) == 13
        [seen] = passes(tuner, loader, 1)
        assert set(seen) == {1, 3}
        assert len(seen) == 100
        plain = torch.utils.data.DataLoader(Numbers(50), 8, shuffle=True, generator=torch.Generator().manual_seed(5))
        ours = tuner.loader(Numbers(50), shuffle=True, generator=torch.Generator().manual_seed(5))
        assert passes(tuner, ours, 2) == [[int(x) for batch in plain for x in batch] for _ in range(2)]


def test_an_epoch_that_is_named_has_its_own_order() -> None:
    with tuned(virtual(), batch_sizes=(8,)) as tuner:
        loader = tuner.loader(Numbers(200), shuffle=True)
        orders = []
        for epoch in (0, 1, 0, 1):
            loader.set_epoch(epoch)
            orders += passes(tuner, loader, 1)
        assert orders[0] == orders[2] != orders[1] == orders[3]
        shared = torch.utils.data.DistributedSampler(Numbers(200), 2, 0)
        loader = tuner.loader(Numbers(200), sampler=shared)
        loader.set_epoch(3)
        assert shared.epoch == 3
        assert passes(tuner, loader, 1) == [list(shared)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_is_put_into_batches(workers: int) -> None:
    with tuned(virtual(), budget_w=8.0) as tuner:
        loader = tuner.loader(Stream(1500), num_workers=workers)
        for seen in passes(tuner, loader, 2):
            assert sorted(seen) == list(range(1500))
        with pytest.raises(TypeError):
            len(loader)
        [seen] = passes(tuner, tuner.loader(Stream(150), drop_last=True), 1)
        assert len(seen) > 80


def test_a_step_that_is_reported_twice_is_said() -> None:
    with tuned(virtual()) as tuner:
        for _ in tuner.loader(Numbers(300)):
            tuner.step()
            with pytest.raises(InputError, match="no step had begun"):
                tuner.step()
            break
        assert tuner.steps == 1


def test_a_step_that_was_not_reported_is_said() -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError, match=r"tuner\.step"):
        for _ in tuner.loader(Numbers(300)):
            pass


def test_leaving_a_pass_early_is_no_mistake() -> None:
    with tuned(virtual()) as tuner:
        for _ in range(3):
            for _batch in tuner.loader(Numbers(300)):
                tuner.step()
                break
        assert tuner.samples > 0


@pytest.mark.parametrize(
    ("dataset", "more"),
    [(iter([1, 2]), {}), (Numbers(5), {"batch_size": 4}), (Stream(9), {"shuffle": True})],
)
def test_a_loader_that_cannot_be_made_says_why(dataset: Any, more: dict[str, Any]) -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError):
        next(iter(tuner.loader(dataset, **more)))


@pytest.mark.parametrize("budget", [{}, {"budget_w": 9.0, "budget": "9W"}, {"budget": "9 cats"}])
def test_a_tuner_without_one_budget_says_so(budget: dict[str, Any]) -> None:
    from underwatt.adapters.tuner import tune

    with pytest.raises(InputError):
        tune(device=virtual(), cost=NET, batch_sizes=SIZES, **budget)


def test_a_simulated_device_asks_for_the_cost() -> None:
    with pytest.raises(InputError, match="simulated"), tuned(virtual(), cost=None):  # type: ignore[arg-type]
        pass


def test_testing_belongs_to_no_step(tmp_path: Path) -> None:
    device = virtual()
    with tuned(device, folder=tmp_path) as tuner:
        train(tuner, 40)
        step_s = device.board.true_step_s(NET, tuner.setting.mode, tuner.batch_size)
        for _ in range(5):
            train(tuner, 4)
            with tuner.testing():
                device.clock.sleep(5.0)
    for event in log_of(tmp_path).of(Progressed)[-20:]:
        assert math.isnan(event.step_s) or event.step_s < 1.5 * step_s


def test_a_scheduler_within_the_step_goes_its_own_way() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.64)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with tuned(virtual(), optimizer=optimizer) as tuner:
        for count, _ in enumerate(tuner.loader(Numbers(400)), start=1):
            optimizer.step()
            scheduler.step()
            tuner.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.64 / (1 + count))


def test_the_learning_rate_follows_and_comes_back() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.64)
    with tuned(virtual(), optimizer=optimizer) as tuner:
        for batch in tuner.loader(Numbers(1500)):
            before = parameter.item()
            parameter.grad = torch.ones(1)
            optimizer.step()
            assert before - parameter.item() == pytest.approx(0.01 * len(batch), rel=1e-3)
            tuner.step()
            assert optimizer.param_groups[0]["lr"] == 0.64
    parameter.grad = torch.ones(1)
    before = parameter.item()
    optimizer.step()
    assert before - parameter.item() == pytest.approx(0.64, rel=1e-3)


def test_what_was_measured_is_known_the_next_time(tmp_path: Path) -> None:
    for count in range(2):
        with tuned(
            virtual(),
            folder=tmp_path / str(count),
            store=tmp_path / "store.db",
            optimizer=torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1),
            options=ControlOptions(most_a_level=6),
        ) as tuner:
            train(tuner, 30)
    first, second = (
        [event.measurement.setting for event in log_of(tmp_path / str(count)).of(Measured)] for count in range(2)
    )
    assert len(first) >= 5
    assert len(second) <= len(first)
    assert not set(first) & set(second), "what is known was measured again"
    with Store(tmp_path / "store.db", create=False) as store:
        assert store.summaries()[0].measured == len(first) + len(second)


def test_another_model_does_not_inherit_the_figures_of_the_first(tmp_path: Path) -> None:
    for width in (2, 3):
        optimizer = torch.optim.SGD(torch.nn.Linear(4, width).parameters(), lr=0.1)
        with tuned(virtual(), folder=tmp_path / str(width), store=tmp_path / "store.db", optimizer=optimizer) as tuner:
            assert not tuner._pilot.controller.knowledge.measurements(), "nothing of this model was ever measured"
            train(tuner, 20)
    with Store(tmp_path / "store.db", create=False) as store:
        assert len(store.summaries()) == 2


def test_a_store_asks_for_a_name_where_there_is_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither an optimizer nor a name") as caught:
        tuned(virtual(), store=tmp_path / "store.db")
    assert "name=" in str(caught.value.hint)
    assert not (tmp_path / "store.db").exists()


def test_stored_measurements_of_other_knobs_are_left_aside(tmp_path: Path) -> None:
    """A store filled by a user who may set clocks is of little use to one who may not, and no reason to fail."""
    with tuned(virtual(), store=tmp_path / "store.db", name="numbers") as tuner:
        train(tuner, 20)
    with tuned(Hurt(virtual(), knobs=False), store=tmp_path / "store.db", name="numbers") as tuner:
        train(tuner, 5)
        assert tuner.samples > 0


def test_a_run_is_listed_while_it_lasts(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path):
        assert [run.folder for run in running_runs()] == [str(tmp_path)]
    assert running_runs() == ()


STEP_SIZES = (64, 16, 16, 32, 64, 8, 128, 64)
SCHEDULERS = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=len(STEP_SIZES) + 1, cycle_momentum=False),
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
    for size in STEP_SIZES:
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
    assert usual_rule(make(type("Mine", (torch.optim.SGD,), {}))) == "linear"
    assert usual_rule(make(torch.optim.ASGD)) == "linear"
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


def test_only_the_thread_that_trains_touches_the_loss(tmp_path: Path) -> None:
    """The thread that reads power tells of progress; a tensor of a GPU would have it wait there."""
    asked: list[threading.Thread] = []

    class Loss:
        def detach(self) -> Loss:
            asked.append(threading.current_thread())
            return self

        def __float__(self) -> float:
            asked.append(threading.current_thread())
            return 0.125

    with tuned(RealTime(), folder=tmp_path, batch_sizes=(8,)) as tuner:
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            tuner.starts(8)
            tuner.step(Loss())
    assert set(asked) == {threading.current_thread()}
    assert log_of(tmp_path).of(Progressed)[-1].loss == 0.125


def test_a_loss_whose_value_takes_long_leaves_no_gap_in_the_readings(tmp_path: Path) -> None:
    class Slow:
        def __float__(self) -> float:
            time.sleep(1.2)
            return 0.125

    with tuned(RealTime(), folder=tmp_path, batch_sizes=(8,)) as tuner:
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            tuner.starts(8)
            tuner.step(Slow())
    assert float(np.diff(log_of(tmp_path).power.at_s).max()) < 0.6


def test_a_run_in_a_folder_goes_on_where_it_is_asked_to(tmp_path: Path) -> None:
    with tuned(virtual("nano"), folder=tmp_path, resume=True) as first:  # nothing to go on with yet
        train(first, 4.0)
    with pytest.raises(InputError, match="There is a run") as caught:
        tuned(virtual("nano"), folder=tmp_path)
    assert "resume=True" in caught.value.hint
    with tuned(virtual("nano"), folder=tmp_path, resume=True) as second:
        assert (second.samples, second.steps) == (first.samples, first.steps)
        train(second, 4.0)
    log = log_of(tmp_path)
    assert second.elapsed_s > 8.0
    assert log.end.samples == second.samples > first.samples
    assert log.end.energy_j > 1.5 * first.energy_j
    times = [event.at_s for event in log.events]
    assert times == sorted(times)


@pytest.mark.parametrize("given", [8, "8", (8,), "8,8"])
def test_a_single_batch_size_and_watts_as_text_are_understood(given: Any) -> None:
    with tuned(virtual("nano"), batch_sizes=given, budget_w="9W") as tuner:
        assert tuner.batch_size == 8


@pytest.mark.parametrize("given", [0, "eight", (), (8, 2.5)])
def test_batch_sizes_that_are_none_are_refused_kindly(given: Any) -> None:
    with pytest.raises(InputError, match=r"[Bb]atch size") as caught:
        tuned(virtual("nano"), batch_sizes=given)
    assert "8, 16" in caught.value.hint or "8,16" in caught.value.hint


def test_where_the_joules_are_spent_no_more_batches_come(tmp_path: Path) -> None:
    device = virtual()
    with tuned(device, folder=tmp_path, budget="9W, 400J", set_modes=False) as tuner:
        while not tuner.is_spent:
            for batch in tuner.loader(Numbers(500)):
                last = len(batch)
                tuner.step()
        step_j = 15.0 * device.board.true_step_s(NET, tuner.setting.mode, last)
        assert 400 <= tuner.energy_j < 400 + step_j
    log = log_of(tmp_path)
    assert log.end.outcome == "energy spent"
    assert sum("energy is spent" in note.text for note in log.of(Noted)) == 1


def epochs_without_joules(folder: Path, most: int) -> list[int]:
    """How many batches each of so many passes had."""
    passes: list[int] = []
    with tuned(virtual(), folder=folder, budget="9W, 100J") as tuner:
        loader = tuner.loader(Numbers(100))
        for _ in range(most):
            passes.append(0)
            for _ in loader:
                passes[-1] += 1
                tuner.step()
    return passes


def test_epochs_run_out_in_good_order_once_the_joules_are_spent(tmp_path: Path) -> None:
    """What stands after the loop, such as saving the model, is come to."""
    passes = epochs_without_joules(tmp_path, 2000)
    assert passes[0] > 0
    assert len(passes) == 2000
    assert passes[-1] == 0
    assert log_of(tmp_path).end.outcome == "energy spent"


def test_a_loop_to_a_target_does_not_go_on_for_ever_without_batches(tmp_path: Path) -> None:
    """It went on with passes of no batch at all, as fast as it could."""
    with pytest.raises(BudgetError, match="joules") as caught:
        epochs_without_joules(tmp_path, 10**9)
    assert "is_spent" in caught.value.hint
    end = log_of(tmp_path).end
    assert (end.outcome, end.restored, end.error) == ("energy spent", True, None)


def test_joules_that_a_test_has_spent_leave_no_other_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    own = torch.utils.data.DataLoader.__iter__
    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", lambda self: opened.append(self) or own(self))
    with tuned(virtual(), folder=tmp_path, budget="9W, 400J", set_modes=False) as tuner:
        loader = tuner.loader(Numbers(8))
        for _ in loader:
            tuner.step()
        with tuner.testing() as tested:
            while tuner.energy_j < 400:
                tested(64)
        before = len(opened)
        assert list(loader) == []
        assert tuner.is_spent
        assert len(opened) == before, "workers are started for nothing"


def test_a_loop_that_goes_on_without_joules_still_keeps_its_watts(tmp_path: Path) -> None:
    """It was paced no longer, and drew twice its watts."""
    with tuned(virtual(), folder=tmp_path, budget="7W, 60J", set_modes=False) as tuner:
        while tuner.elapsed_s < 120:
            tuner.starts(tuner.batch_size)
            tuner.step()
        assert tuner.is_spent
        assert tuner.energy_j / tuner.elapsed_s < 7.1
        assert tuner.verdict.held
