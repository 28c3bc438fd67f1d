from __future__ import annotations

import math

import pytest

from underwatt.errors import InputError
from underwatt.records import ConvergenceRun
from underwatt.studies.study import (
    RunSpec,
    hopeless_samples,
    newest_rates,
    runs_to_make,
    spread_batch_sizes,
    time_left_s,
)

SIZES = (4, 8, 16, 32, 64, 128)


def lr_at(size: int) -> float:
    return 1e-3 * math.sqrt(size)


@pytest.mark.parametrize(
    ("points", "chosen"), [(1, (32,)), (2, (4, 128)), (3, (4, 16, 128)), (4, (4, 16, 32, 128)), (9, SIZES)]
)
def test_chosen_batch_sizes_are_spread_with_both_ends(points: int, chosen: tuple[int, ...]) -> None:
    assert spread_batch_sizes(SIZES, points) == chosen


def test_no_batch_size_is_refused() -> None:
    with pytest.raises(InputError):
        spread_batch_sizes(SIZES, 0)
    with pytest.raises(InputError):
        runs_to_make((), (0,), (), 0.9, lr_at)


def test_all_batch_sizes_of_one_seed_come_before_the_next_from_the_middle_out() -> None:
    specs = runs_to_make((4, 16, 64), (0, 1), (), 0.9, lr_at)
    assert specs == tuple(RunSpec(size, seed) for seed in (0, 1) for size in (16, 4, 64))


def test_made_runs_are_skipped_only_where_they_are_the_same_run() -> None:
    done = [
        ConvergenceRun(4, 0.9, 100.0, 0, lr_at(4)),
        ConvergenceRun(16, 0.8, 100.0, 0, lr_at(16)),  # another target
        ConvergenceRun(64, 0.9, 100.0, 0, 0.5),  # another learning rate
        ConvergenceRun(128, 0.9, math.nan, 0, lr_at(128)),
    ]
    left = {spec.batch_size for spec in runs_to_make((4, 16, 64, 128), (0,), done, 0.9, lr_at)}
    assert left == {16, 64}


def test_a_run_that_was_given_up_is_made_again_only_where_it_may_take_more_samples() -> None:
    done = [
        ConvergenceRun(4, 0.9, math.nan, 0, lr_at(4), given_up_samples=1000.0),
        ConvergenceRun(16, 0.9, math.nan, 0, lr_at(16)),  # diverged: more samples do not help
        ConvergenceRun(64, 0.9, 500.0, 0, lr_at(64)),
    ]

    def made_again(may_take_samples: float) -> list[int]:
        specs = runs_to_make((4, 16, 64), (0,), done, 0.9, lr_at, may_take_samples=may_take_samples)
        return [spec.batch_size for spec in specs]

    assert made_again(1000.0) == []
    assert made_again(2000.0) == [4]
    done.append(ConvergenceRun(4, 0.9, 1700.0, 0, lr_at(4)))
    assert made_again(2000.0) == []


def test_of_a_run_made_twice_the_newer_counts() -> None:
    given_up = ConvergenceRun(8, 0.9, math.nan, 0, 1e-3, given_up_samples=900.0)
    other_rate = ConvergenceRun(8, 0.9, 4000.0, 0, 2e-3)
    again = ConvergenceRun(8, 0.9, 3000.0, 0, 1e-3)
    assert newest_rates([given_up, again]) == (again,)
    assert newest_rates([again, given_up]) == (given_up,)
    assert newest_rates([given_up, other_rate, again]) == (again,)


def test_a_run_is_hopeless_at_a_multiple_of_the_best_of_the_same_target() -> None:
    runs = [ConvergenceRun(8, 0.9, 500.0), ConvergenceRun(16, 0.9, math.nan), ConvergenceRun(8, 0.5, 10.0)]
    assert hopeless_samples(runs, 0.9, 4.0) == 2000.0
    assert hopeless_samples(runs, 0.99, 4.0) == math.inf


def test_time_left_knows_that_small_batches_take_longer() -> None:
    waiting = [RunSpec(4, 1), RunSpec(64, 1)]
    took = [(RunSpec(4, 0), 90.0), (RunSpec(64, 0), 10.0)]
    assert time_left_s(waiting, [], [], 1) is None
    assert time_left_s(waiting, [], took, 1) == 100.0
    assert time_left_s(waiting, [20.0], took, 2) == (100.0 + 30.0) / 2


def test_runs_at_an_older_learning_rate_are_left_out() -> None:
    old = ConvergenceRun(8, 0.9, 5000, 0, 1e-3)
    kept = (
        ConvergenceRun(16, 0.9, 4000, 0, 1e-3),
        ConvergenceRun(8, 0.5, 900, 0, 1e-3),
        ConvergenceRun(8, 0.9, 3000, 0, 2e-3),
        ConvergenceRun(8, 0.9, 3100, 1, 2e-3),
    )
    assert newest_rates([old, *kept]) == kept


def test_runs_whose_rate_nobody_recorded_belong_together() -> None:
    runs = [ConvergenceRun(8, 0.9, 5000, seed) for seed in range(3)]
    assert all(math.isnan(run.learning_rate) for run in runs)
    assert len(newest_rates(runs)) == 3
    assert newest_rates([]) == ()
