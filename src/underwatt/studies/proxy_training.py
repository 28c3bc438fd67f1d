"""One training on proxy data until the target: how many samples did it take, and how noisy were its gradients?

Every batch size is scored after the same numbers of samples, so that none gets more chances than another to be lucky;
between two scores the crossing of the target is interpolated. A run ends as never reached, which is recorded as such:

- at its limit of samples,
- when its loss or score is no longer a number,
- when it has taken so many times the samples of the best run known that its batch size cannot be the choice.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from underwatt.convergence.noise_scale import NoiseScaleMeter
from underwatt.errors import JobError
from underwatt.jobs._torch import torch
from underwatt.jobs.data import train_and_test
from underwatt.jobs.faults import call_job
from underwatt.jobs.gradient_watch import GradientWatch
from underwatt.jobs.job import Effort
from underwatt.jobs.training import Training
from underwatt.records import ConvergenceRun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.jobs.job import Job

DEFAULT_PASSES = 30
REACHABLE = 0.9  # of what a training gains from its first score to its best: others get there too


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """A run that is over: the record, how it ended, and its scores on the way."""

    run: ConvergenceRun
    ended: str  # "reached", "limit", "diverged" or "hopeless"
    trained_samples: int
    scores: tuple[tuple[int, float], ...]


def usual_effort(job: Job, passes: float = DEFAULT_PASSES) -> Effort:
    """Scores often enough to see the target crossed, and no more than a third of the work; a limit in passes."""
    train, test = train_and_test(job, proxy=True)
    every = max(len(train) // 5, len(test), *job.batch_sizes)
    return Effort(every, max(every, math.ceil(passes * len(train))))


def train_to_target(
    job: Job,
    batch_size: int,
    seed: int,
    effort: Effort,
    *,
    hopeless_samples: float = math.inf,
    on_score: Callable[[int, float], None] = lambda _samples, _score: None,
) -> TrainingEnd:
    """Train the job on its proxy data (its data where it has none) at a batch size until its target.

    The same seed gives the same result on the same machine. ``hopeless_samples`` is where a run is given up because
    another is known to be that much better.
    """
    if effort.target is not None:
        job = replace(job, target=effort.target)
    devices = list(range(torch.cuda.device_count()))
    # Who calls this keeps their own random numbers.
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return call_job(
            batch_size,
            lambda: _train(Training(job, batch_size, proxy=True, seed=seed), seed, effort, hopeless_samples, on_score),
            of_run=f", seed {seed}",
        )


def _train(
    training: Training, seed: int, effort: Effort, hopeless_samples: float, on_score: Callable[[int, float], None]
) -> TrainingEnd:
    job, batch_size = training.job, training.batch_size
    scores: list[tuple[int, float]] = [(0, training.evaluate())]
    if job.reached(scores[0][1]):
        raise JobError(
            f"The model meets the target of {job.target:g} before it is trained ({scores[0][1]:g}).",
            hint="Choose a harder target.",
        )
    ended, samples_to_target, every = "", math.nan, effort.evaluate_every_samples
    with closing(training):
        while not ended:
            until_samples = (training.samples // every + 1) * every
            while training.samples < until_samples:
                loss = training.step()
            score = training.evaluate()
            training.scored(score)
            scores.append((training.samples, score))
            on_score(training.samples, score)
            if job.reached(score):
                ended, samples_to_target = "reached", crossing(scores[-2], scores[-1], job.target)
            elif not (math.isfinite(float(loss)) and math.isfinite(score)):
                ended = "diverged"
            elif training.samples >= effort.limit_samples:
                ended = "limit"
            elif training.samples >= hopeless_samples:
                ended = "hopeless"
    given_up = float(training.samples) if ended in ("limit", "hopeless") else math.nan
    run = ConvergenceRun(batch_size, job.target, samples_to_target, seed, job.lr_at(batch_size), given_up)
    return TrainingEnd(run, ended, training.samples, tuple(scores))


def within_reach(job: Job, end: TrainingEnd) -> tuple[float, ConvergenceRun] | None:
    """A target that trainings like this one reach, where it did not reach the job's own, and this run as one to it.

    Only the ratios between batch sizes matter, so that any target serves which all of them come to, late enough.
    """
    values = [score for _, score in end.scores if math.isfinite(score)]
    best = max(values) if job.higher_is_better else min(values)
    if best == values[0]:
        return None  # nothing was learned
    target = float(f"{values[0] + REACHABLE * (best - values[0]):.3g}")
    aimed = replace(job, target=target)
    after = next(at for at, (_, score) in enumerate(end.scores) if at and aimed.reached(score))
    samples = crossing(end.scores[after - 1], end.scores[after], target)
    return target, replace(end.run, target=target, samples=samples, given_up_samples=math.nan)


def crossing(before: tuple[int, float], after: tuple[int, float], target: float) -> float:
    """Samples at which a line between two scores crosses the target; at least one sample."""
    (samples_before, score_before), (samples_after, score_after) = before, after
    if not math.isfinite(score_before) or score_after == score_before:
        return float(samples_after)
    share = (target - score_before) / (score_after - score_before)
    return max(1.0, samples_before + min(max(share, 0.0), 1.0) * (samples_after - samples_before))


LEAST_STEPS, MOST_STEPS = 10, 1000
MOST_LOG_REACH = 3.0  # known within a factor of 20, or not at all


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """What a training said: the noise scale in samples, and bounds that hold it nine times in ten."""

    batch_size: int  # that was trained with
    samples: float
    samples_low90: float
    samples_high90: float


def noise_scale_on_the_way(job: Job, runs: Sequence[ConvergenceRun]) -> NoiseScale | None:
    """The noise scale over a training to the target, at the largest batch size whose runs got there.

    A large batch sees it best. It grows while a network learns, so a training of another length tells another one.
    ``None`` where the runs say no batch size, or the training too little.
    """
    reached = [run for run in runs if run.reached and run.target == job.target and run.batch_size > 1]
    if not reached:
        return None
    longest = max(reached, key=lambda run: (run.batch_size, run.samples))
    steps = min(max(2 * LEAST_STEPS, math.ceil(longest.samples / longest.batch_size)), MOST_STEPS)
    meter = measure_noise_scale(job, longest.batch_size, steps=steps)
    scale, reach = meter.noise_scale, 1.645 * meter.log_std
    if meter.pairs < LEAST_STEPS or not (math.isfinite(scale) and scale > 0 and reach < MOST_LOG_REACH):
        return None
    return NoiseScale(longest.batch_size, scale, scale * math.exp(-reach), scale * math.exp(reach))


def measure_noise_scale(job: Job, batch_size: int, *, steps: int = 200) -> NoiseScaleMeter:
    """Train the job on its proxy data for some steps, and meter the noise of its gradients."""
    meter = NoiseScaleMeter()
    with closing(Training(job, batch_size, proxy=True, seed=0)) as training:
        watch = GradientWatch(training, most_share=math.inf)
        for _ in range(steps):
            training.step()
            if (pair := watch.look()) is not None:
                meter.add(*pair)
    return meter
