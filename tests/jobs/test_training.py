from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from underwatt.jobs.job import Job
from underwatt.jobs.training import EndlessBatches, Tensors, Training, endless_loader, first_batch, train_and_test


def blobs(count=200):
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 3.0]])
    return centres[classes] + 0.3 * torch.randn(count, 2, generator=generator), classes


def make(**fields):
    return Job(**{"model": lambda: nn.Linear(2, 3), "data": blobs(), "target": 0.95, "lr": 0.05, **fields})


class Listed(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([float(index), 0.0]), index % 3


@given(st.integers(1, 50), st.integers(1, 120), st.integers(0, 5))
def test_batches_are_full_and_every_pass_is_whole(length, size, seed):
    batches = iter(EndlessBatches(length, size, seed))
    drawn = [index for _ in range(4) for index in next(batches)]
    assert len(drawn) == 4 * size
    for start in range(0, len(drawn) - length + 1, length):
        assert sorted(drawn[start : start + length]) == list(range(length))


@pytest.mark.parametrize("data", [Listed(5), (torch.zeros(5, 2), torch.zeros(5)), ([[0.0]] * 5, [1] * 5)])
def test_a_batch_may_be_larger_than_the_data(data):
    job = make(data=data)
    train = train_and_test(job)[0]
    batches = endless_loader(job, train, EndlessBatches(len(train), 32, 0), pin_memory=False)
    assert len(next(batches)[0]) == 32
    assert len(first_batch(job, 7)[1]) == 7


def test_tensors_and_datasets_hand_out_the_same_batches():
    inputs, classes = blobs()
    pairs = list(zip(inputs, classes, strict=True))
    fast, slow = (endless_loader(make(data=d), d_, EndlessBatches(len(d_), 16, 3), pin_memory=False) for d, d_ in
                  (((inputs, classes), Tensors((inputs, classes))), (pairs, pairs)))  # fmt: skip
    for _ in range(3):
        for one, other in zip(next(fast), next(slow), strict=True):
            assert torch.equal(one, other)


def test_a_fifth_is_held_out_and_kept_apart():
    train, test = train_and_test(make(data=Listed(100)))
    assert len(train), len(test) == (80, 20)
    assert not {int(x[0]) for x, _ in train} & {int(x[0]) for x, _ in test}
    given_data, given_test = train_and_test(make(test_data=Listed(7)))
    assert (len(given_data), len(given_test)) == (200, 7)
    proxy, _ = train_and_test(make(proxy_data=Listed(10)), proxy=True)
    assert len(proxy) == 8
    assert len(train_and_test(make(data=Listed(1)))[1]) == 1


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


def test_another_batch_size_brings_its_learning_rate():
    training = Training(make(lr=0.1, lr_batch_size=64), 64)
    training.step()
    training.set_batch_size(16)
    training.step()
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
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


# Changing the batch size, doing a step again, and going on elsewhere


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
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(training.job.lr_at(training.batch_size))
    assert training.samples == len(training.model.shown)
    assert whole_passes(training.model.shown, 40)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_goes_on_elsewhere_bit_by_bit_as_if_nothing_had_happened(workers, tmp_path):
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
