from __future__ import annotations

import math
import random
import time
from itertools import islice

import pytest
import torch
from hypothesis import given, strategies as st
from tiny_job import Listed, make, points

from underwatt.errors import InputError
from underwatt.jobs.data import (
    EndlessBatches,
    PassBatches,
    Tensors,
    first_batch,
    open_batches,
    open_loader,
    step_parts,
    train_and_test,
)


@given(st.integers(0, 300), st.integers(0, 10_000), st.integers(1, 4))
def test_every_sample_comes_once_however_the_size_changes_and_batches_are_taken_back(
    length: int, seed: int, parts: int
) -> None:
    chance = random.Random(seed)
    batches = PassBatches(range(length), lambda: chance.randint(1, 40), parts=parts)
    trained: list[int] = []
    stream = iter(batches)
    while (batch := next(stream, None)) is not None:
        if chance.random() < 0.3:  # worker processes prepare batches ahead
            ahead = list(islice(stream, chance.randint(0, 3)))
            assert list(batches.handed_out) == [batch, *ahead]
        if chance.random() < 0.3:
            batches.take_back()
            stream = iter(batches)
            continue
        while batches.handed_out:
            trained += batches.handed_out.popleft()
        if chance.random() < 0.2:  # a training that was killed goes on in another process
            rest = batches.state()
            batches = PassBatches(range(length), lambda: chance.randint(1, 40), parts=parts)
            batches.restore(rest)
            stream = iter(batches)
    assert trained == list(range(length))
    assert [index for batch in batches for index in batch] == list(range(length)), "the next pass is a whole one"


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 8))
def test_a_step_in_parts_is_even_and_leaves_no_part_over(left: int, size: int, parts: int) -> None:
    while left >= parts:
        sizes = step_parts(left, size, parts)
        assert len(sizes) == parts
        assert max(sizes) <= max(size, 2)
        assert max(sizes) - min(sizes) <= 1
        left -= sum(sizes)
        assert left == 0 or left >= parts


@given(st.integers(1, 60), st.integers(0, 10_000))
def test_endless_batches_skip_and_repeat_nothing(length: int, seed: int) -> None:
    chance = random.Random(seed)
    batches = EndlessBatches(length, 4, seed)
    trained: list[int] = []
    stream = iter(batches)
    for _ in range(60):
        batches.batch_size, batches.most_at_once = chance.randint(1, 2 * length), chance.choice([math.inf, 1, 7])
        parts = batches.next_parts()
        batch = [index for part in parts for index in next(stream)]
        assert batches.steps[0] == parts
        assert max(parts) <= batches.most_at_once
        assert max(parts) - min(parts) <= 1
        assert len(batch) == batches.batch_size
        if chance.random() < 0.3:
            batches.take_back()
            stream = iter(batches)
            continue
        if chance.random() < 0.2:
            other = EndlessBatches(length, 1, seed + 1)
            batches.trained()
            other.restore(batches.state())
            batches, stream = other, iter(other)
        else:
            batches.trained()
        trained += batch
    for begin in range(0, len(trained) - length + 1, length):
        assert sorted(trained[begin : begin + length]) == list(range(length))


@given(st.integers(1, 50), st.integers(1, 60))
def test_a_last_batch_that_is_not_full_may_be_dropped(length: int, size: int) -> None:
    batches = list(PassBatches(range(length), lambda: size, drop_last=True))
    assert [len(batch) for batch in batches] == [size] * (length // size)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: EndlessBatches(n, 32, 0),
        lambda n: PassBatches(torch.randperm(n).tolist(), lambda: 32),
    ],
)
def test_a_batch_costs_no_more_in_a_large_data_set(make) -> None:
    costs = []
    for length in (2_000, 400_000):
        stream = iter(make(length))
        next(stream)
        rounds = []
        for _ in range(5):
            begun_s = time.perf_counter()
            for _ in range(10):
                next(stream)
            rounds.append(time.perf_counter() - begun_s)
        costs.append(min(rounds))
    assert costs[1] < 20 * costs[0] + 1e-4


def test_what_the_tuner_chooses_is_not_for_the_user_to_choose() -> None:
    for name in ("batch_size", "batch_sampler"):
        with pytest.raises(InputError, match=name):
            open_batches([1, 2], lambda: 1, **{name: 1})
    with pytest.raises(InputError, match="no length"):
        open_batches(iter([1]), lambda: 1)
    with pytest.raises(InputError, match="says another"):
        open_batches([1, 2], lambda: 1, shuffle=True, sampler=[1, 0])


def test_a_pass_can_be_opened_again_for_what_is_left() -> None:
    batches, reopen = open_batches(list(range(10)), lambda: 3)
    loader = reopen()
    assert next(loader).tolist() == [0, 1, 2]
    batches.handed_out.popleft()
    assert next(loader).tolist() == [3, 4, 5]
    batches.take_back()
    assert [batch.tolist() for batch in reopen()] == [[3, 4, 5], [6, 7, 8], [9]]


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
    batches = open_loader(job, train, batch_sampler=EndlessBatches(len(train), 32, 0))
    assert len(next(batches)[0]) == 32
    assert len(first_batch(job, 7)[1]) == 7


def test_tensors_and_datasets_hand_out_the_same_batches():
    inputs, classes = points()
    pairs = list(zip(inputs, classes, strict=True))
    fast, slow = (open_loader(make(data=d), d_, batch_sampler=EndlessBatches(len(d_), 16, 3)) for d, d_ in
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
