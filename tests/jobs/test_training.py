from __future__ import annotations

import math
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from tiny_job import Listed, make
from torch import nn

from underwatt.errors import InputError
from underwatt.jobs import training
from underwatt.jobs.training import Completion, LatestLoss, Training


def test_training_learns_and_scores():
    training = Training(make(), 16)
    before = training.evaluate()
    for _ in range(100):
        training.step()
    assert before < 0.9
    assert training.evaluate() > 0.95
    assert (training.steps, training.samples) == (100, 1600)


def test_the_same_seed_gives_the_same_training():
    def weights(seed):
        training = Training(make(), 16, seed=seed)
        for _ in range(5):
            training.step()
        return training.model.weight.detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_module_is_copied_so_that_runs_do_not_touch_each_other():
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    Training(make(model=model), 8).step()
    assert torch.equal(model.weight, before)


def rates_used(training):
    """The learning rates of each step's groups, as the optimizer sees them within it."""
    seen = []
    training.optimizer.register_step_pre_hook(
        lambda made, *_: seen.append([group["lr"] for group in made.param_groups])
    )
    return seen


def test_another_batch_size_brings_its_learning_rate():
    training = Training(make(lr=0.1, lr_batch_size=64), 64)
    rates = rates_used(training)
    training.step()
    training.set_batch_size(16)
    training.step()
    assert rates == [[pytest.approx(0.1)], [pytest.approx(0.05)]]
    assert training.optimizer.param_groups[0]["lr"] == 0.1  # outside a step, the job's own
    assert training.samples == 80


def test_a_job_with_its_own_forward_loss_metric_and_collate():
    job = make(
        data=Listed(50),
        model=nn.Linear(2, 1),
        forward=lambda model, batch: (model(batch["x"]).squeeze(1), batch["y"]),
        collate=lambda samples: {
            "x": torch.stack([x for x, _ in samples]) / 50,
            "y": torch.tensor([float(y) for _, y in samples]),
        },
        loss=nn.MSELoss(),
        metric=lambda output, targets: (output - targets).abs().mean(),
        higher_is_better=False,
    )
    training = Training(job, 8)
    assert training.step().ndim == 0
    assert training.evaluate() > 0


def test_worker_processes_load_the_data():
    training = Training(make(data=Listed(40), num_workers=1), 8)
    training.step()
    assert (training.steps, training.samples) == (1, 8)
    training.close()


def test_sequences_use_the_same_defaults():
    tokens = torch.randint(5, (40, 7))
    training = Training(make(model=lambda: nn.Embedding(5, 5), data=(tokens, tokens), lr=0.5), 8)
    for _ in range(60):
        training.step()
    assert training.evaluate() > 0.9


class Seen(nn.Module):
    """A model that notes the samples it was shown."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.shown = []

    def forward(self, inputs):
        if self.training:
            self.shown += inputs[:, 0].long().tolist()
        return self.layer(inputs / 100)


def whole_passes(shown, length):
    """Whether samples come in whole shuffled passes, none skipped and none repeated."""
    return all(
        len(set(shown[begin : begin + length])) == min(length, len(shown) - begin)
        for begin in range(0, len(shown), length)
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_another_batch_size_within_a_pass_skips_and_repeats_nothing(workers):
    training = Training(make(data=Listed(50), test_data=Listed(5), model=Seen, num_workers=workers), 8)
    for size in (8, 3, 20, 1, 33, 8, 50, 2, 64):
        training.set_batch_size(size)
        training.step()
        training.step()
    training.close()
    assert len(training.model.shown) == training.samples
    assert whole_passes(training.model.shown, 50)


def test_a_step_that_is_done_again_loses_nothing():
    class Tight(Seen):
        def forward(self, inputs):
            if self.training and len(inputs) > 16:
                raise torch.cuda.OutOfMemoryError("no room")
            return super().forward(inputs)

    training = Training(make(data=Listed(40), test_data=Listed(5), model=Tight), 8)
    rates = rates_used(training)
    for size in (8, 32, 8, 64, 16, 33):
        training.set_batch_size(size)
        steps = training.steps
        try:
            training.step()
        except torch.cuda.OutOfMemoryError:
            assert training.steps == steps
            training.redo(16)
            training.step()
        assert training.steps == steps + 1
        assert rates[-1] == [pytest.approx(training.job.lr_at(training.batch_size))]
    assert training.samples == len(training.model.shown)
    assert whole_passes(training.model.shown, 40)


def test_a_batch_in_parts_learns_as_a_whole_one_does():
    def trained(divided):
        training = Training(make(data=Listed(50), test_data=Listed(5), model=Seen), 20)
        if divided:
            assert training.divide(20) == 10
            assert training.divide() == 5
            assert training.next_parts == [5, 5, 5, 5]
        losses = []
        for size in (20, 20, 13, 4):
            training.set_batch_size(size)
            losses.append(training.step().item())
        training.close()
        assert whole_passes(training.model.shown, 50)
        return losses, training

    whole, one = trained(False)
    parts, other = trained(True)
    assert parts == pytest.approx(whole, rel=1e-4)
    assert one.samples == other.samples
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_single_sample_cannot_be_divided_nor_a_job_that_wants_whole_batches():
    assert Training(make(), 1).divide() == 0
    assert Training(make(accumulate=False), 64).divide() == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restored_training_goes_on_bit_by_bit_as_if_nothing_had_happened(workers, tmp_path):
    def model():
        return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def some(training, count):
        losses = []
        for number in range(count):
            # What workers have prepared keeps its size, so that only without them a change comes at the same step.
            training.set_batch_size(8 if number % 3 or workers else 24)
            losses.append(training.step().item())
        return losses

    job = make(data=Listed(60), model=model, num_workers=workers, optimizer=torch.optim.AdamW)
    through = Training(job, 8, seed=3)
    some(through, 7)
    torch.save(through.state(), tmp_path / "state.pt")
    expected = some(through, 9)
    other = Training(job, 16, seed=4)
    some(other, 2)
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (other.steps, other.batch_size) == (7, 8 if workers else 24)
    assert some(other, 9) == expected
    assert (other.steps, other.samples) == (through.steps, through.samples)
    for one, two in zip(through.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    through.close()
    other.close()


@pytest.mark.parametrize("changed", [{"lr": 0.5}, {"lr_batch_size": 4}, {"lr_rule": "none"}])
def test_another_learning_rate_than_that_of_a_checkpoint_is_refused_by_name(changed):
    kept = Training(make(lr=0.25), 8)
    with pytest.raises(InputError, match=r"The learning rate was 0\.25 at batch size 128 before, and the job has"):
        Training(make(**{"lr": 0.25, **changed}), 8).restore(kept.state())
    Training(make(lr=0.25), 16).restore(kept.state())


class Events:
    """Stands in for PyTorch on a GPU: notes which event was recorded and which was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.count = 0

    def torch(self, *, available: bool = True, initialized: bool = True) -> SimpleNamespace:
        def event(*, blocking: bool) -> SimpleNamespace:
            assert blocking, "waiting must not take a CPU core"
            self.count += 1
            name = str(self.count)
            return SimpleNamespace(
                record=lambda: self.log.append(f"record {name}"), synchronize=lambda: self.log.append(f"wait {name}")
            )

        cuda = SimpleNamespace(is_available=lambda: available, is_initialized=lambda: initialized, Event=event)
        return SimpleNamespace(cuda=cuda)


def test_steps_that_follow_each_other_are_waited_for_one_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(training, "torch", events.torch())
    completion = Completion()
    for pausing in (False, False, False, True, True, False, False):
        completion.wait(pausing=pausing)
    waited = [text for text in events.log if text.startswith("wait")]
    assert waited == ["wait 1", "wait 1", "wait 2", "wait 4", "wait 5", "wait 6", "wait 6"]


@pytest.mark.parametrize(("available", "initialized"), [(False, False), (True, False)])
def test_without_a_gpu_in_use_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool
) -> None:
    events = Events()
    monkeypatch.setattr(training, "torch", events.torch(available=available, initialized=initialized))
    completion = Completion()
    completion.wait(pausing=True)
    assert events.log == []


def test_on_a_simulated_device_pytorchs_gpu_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(training, "torch", events.torch())
    Completion(on_gpu=False).wait(pausing=True)
    assert events.log == []


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (None, None),
        (0.5, 0.5),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (torch.tensor([1.0, 2.0]), None),
        ("much", None),
        (torch.tensor(math.inf), math.inf),
    ],
)
def test_a_loss_is_a_number_where_it_is_one(loss, number):
    latest = LatestLoss()
    assert latest.of(loss) == number
    assert latest.value == number


def test_a_loss_on_a_gpu_is_read_when_it_has_come_and_never_waited_for(monkeypatch):
    """The order of things, without a GPU; ``test_training_cuda.py`` has one."""
    done = []

    class Event:
        def record(self, stream):
            pass

        def query(self):
            return bool(done)

    class Loss:
        is_cuda, device = True, "cuda:0"

        def __init__(self, value):
            self.value = value

        def numel(self):
            return 1

        def detach(self):
            return self

        def reshape(self, _shape):
            return torch.tensor(self.value)

        def __float__(self):
            raise AssertionError("this waits for all that is queued")

    monkeypatch.setattr(training.torch.cuda, "Event", Event)
    monkeypatch.setattr(training.torch.cuda, "current_stream", lambda _device: None)
    empty = torch.empty
    monkeypatch.setattr(training.torch, "empty", lambda shape, pin_memory: empty(shape))
    monkeypatch.setattr(training, "LOSS_PERIOD_S", 0.0)
    latest = LatestLoss()
    assert latest.of(Loss(0.5)) is None
    assert latest.of(Loss(0.25)) is None, "still on its way"
    done.append(True)
    assert latest.of(Loss(0.125)) == 0.5
    assert latest.of(Loss(1.0)) == 0.125


def test_groups_of_parameters_keep_their_own_rates_through_changes_of_batch_size():
    def grouped(parameters, lr):
        first, second = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": lr / 10}], lr=lr)

    training = Training(make(data=Listed(40), test_data=Listed(5), optimizer=grouped, lr=0.8, lr_batch_size=8), 8)
    rates = rates_used(training)
    for size in (8, 4, 16, 5, 8):
        training.set_batch_size(size)
        training.step()
        assert rates[-1] == [pytest.approx(0.1 * size), pytest.approx(0.01 * size)]
    assert rates[-1][0] == 0.8, "exactly"


def test_closing_ends_the_loaders_workers_also_while_somebody_keeps_its_error():
    class Fails(Listed):
        def __getitem__(self, index):
            raise ValueError("planted")

    others = set(multiprocessing.active_children())
    training = Training(make(data=Fails(40), test_data=Listed(5), num_workers=1), 8)
    with pytest.raises(ValueError, match="planted") as caught:
        training.step()
    workers = set(multiprocessing.active_children()) - others
    assert workers
    training.close()
    assert not workers & set(multiprocessing.active_children())
    assert caught.value is not None
