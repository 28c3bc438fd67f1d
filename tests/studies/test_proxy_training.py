from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from underwatt.errors import InputError, JobError, OutOfMemoryError, StepError
from underwatt.jobs.job import Effort, Job, load_job
from underwatt.studies.proxy_training import crossing, train_to_target, usual_effort

ADDRESS = f"{Path(__file__).parents[1] / 'helpers' / 'small_job.py'}:job"
EFFORT = Effort(limit_samples=20_000, evaluate_every_samples=64)


@pytest.fixture
def job() -> Job:
    return load_job(ADDRESS)


def test_a_run_reaches_the_target_and_says_after_how_many_samples(job: Job) -> None:
    outcome = train_to_target(job, 16, 0, EFFORT)
    assert outcome.ended == "reached"
    assert outcome.scores[-1][1] >= job.target > outcome.scores[-2][1]
    assert outcome.scores[-2][0] < outcome.run.samples <= outcome.scores[-1][0] == outcome.trained_samples
    assert (outcome.run.batch_size, outcome.run.seed, outcome.run.target) == (16, 0, 0.9)
    assert outcome.run.learning_rate == pytest.approx(4e-2 * math.sqrt(16 / 64))


def test_it_trains_on_proxy_data_and_scores_on_held_out_proxy_data(job: Job) -> None:
    # With labels of noise in the data proper, only training on the proxy can reach the target.
    noise = (job.data[0], torch.randint(3, (100,)))
    assert train_to_target(replace(job, data=noise), 16, 0, EFFORT).ended == "reached"
    mixed = (job.proxy_test_data[0], torch.randint(3, (300,)))
    assert train_to_target(replace(job, proxy_test_data=mixed), 16, 0, Effort(100, 1000)).ended == "limit"


def test_a_seed_gives_the_same_run_again_and_another_seed_another(job: Job) -> None:
    torch.manual_seed(5)
    one, again, other = (train_to_target(job, 4, seed, EFFORT) for seed in (0, 0, 1))
    assert one == again
    assert one.scores != other.scores
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    train_to_target(job, 64, 0, Effort(64, 64))
    assert torch.rand(1) == first, "the caller's random numbers were touched"


def test_all_batch_sizes_are_scored_after_the_same_numbers_of_samples(job: Job) -> None:
    never = replace(job, target=2.0)
    scored = {tuple(s for s, _ in train_to_target(never, size, 0, Effort(128, 512)).scores) for size in (4, 16, 64)}
    assert scored == {(0, 128, 256, 384, 512)}


def test_a_batch_larger_than_the_distance_between_scores_is_scored_each_step(job: Job) -> None:
    outcome = train_to_target(replace(job, target=2.0), 100, 0, Effort(64, 300))
    assert [samples for samples, _ in outcome.scores] == [0, 100, 200, 300]


def test_a_limit_ends_a_run_as_never_reached(job: Job) -> None:
    outcome = train_to_target(replace(job, target=2.0), 16, 0, Effort(64, 256))
    assert outcome.ended == "limit"
    assert math.isnan(outcome.run.samples)
    assert not outcome.run.reached


def test_a_hopeless_run_is_given_up(job: Job) -> None:
    outcome = train_to_target(replace(job, target=2.0), 16, 0, EFFORT, hopeless_samples=300)
    assert (outcome.ended, outcome.trained_samples) == ("hopeless", 320)
    assert not outcome.run.reached


def test_a_diverged_run_is_given_up_at_the_next_score(job: Job) -> None:
    bad = replace(job, loss=lambda output, targets: output.sum() * math.nan)
    outcome = train_to_target(bad, 16, 0, EFFORT)
    assert (outcome.ended, outcome.trained_samples) == ("diverged", 64)


def test_a_metric_where_lower_is_better(job: Job) -> None:
    def wrong(output: torch.Tensor, targets: torch.Tensor) -> float:
        return float((output.argmax(-1) != targets).float().mean())

    outcome = train_to_target(replace(job, metric=wrong, higher_is_better=False, target=0.1), 16, 0, EFFORT)
    assert outcome.ended == "reached"
    assert outcome.run.samples == pytest.approx(train_to_target(job, 16, 0, EFFORT).run.samples)


def test_a_target_that_is_met_untrained_is_an_error(job: Job) -> None:
    with pytest.raises(JobError, match="before it is trained"):
        train_to_target(replace(job, target=0.01), 16, 0, EFFORT)


def test_faults_of_the_job_are_named_with_their_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FAIL_AT", "16")
    with pytest.raises(StepError, match="batch size 16, seed 3: RuntimeError: planted"):
        train_to_target(job, 16, 3, EFFORT)


def test_out_of_memory_is_told_from_other_faults(job: Job) -> None:
    def full(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError, match="Batch size 16"):
        train_to_target(replace(job, loss=full), 16, 0, EFFORT)


def test_the_usual_effort_scores_no_more_than_it_trains(job: Job) -> None:
    effort = usual_effort(job, passes=10)
    assert effort == Effort(limit_samples=6000, evaluate_every_samples=300)
    with pytest.raises(InputError):
        Effort(10, 0)


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(-10, 10), st.floats(-10, 10), st.floats(0, 1))
def test_a_crossing_lies_between_its_scores(before: int, more: int, low: float, high: float, share: float) -> None:
    target = low + share * (high - low)
    found = crossing((before, low), (before + more, high), target)
    assert max(1.0, before) - 1e-6 <= found <= max(1.0, before + more) + 1e-6


def test_a_crossing_is_interpolated() -> None:
    assert crossing((100, 0.5), (200, 0.9), 0.8) == pytest.approx(175)
    assert crossing((100, math.nan), (200, 0.9), 0.8) == 200
