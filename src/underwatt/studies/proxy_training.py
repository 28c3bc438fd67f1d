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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError, JobError, PredictError
from underwatt.jobs._torch import torch
from underwatt.jobs.data import train_and_test
from underwatt.jobs.faults import call_job
from underwatt.jobs.job import Effort
from underwatt.jobs.training import Training, forward, loss_of
from underwatt.records import ConvergenceRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from underwatt.jobs.job import Job

DEFAULT_PASSES = 30


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


def crossing(before: tuple[int, float], after: tuple[int, float], target: float) -> float:
    """Samples at which a line between two scores crosses the target; at least one sample."""
    (samples_before, score_before), (samples_after, score_after) = before, after
    if not math.isfinite(score_before) or score_after == score_before:
        return float(samples_after)
    share = (target - score_before) / (score_after - score_before)
    return max(1.0, samples_before + min(max(share, 0.0), 1.0) * (samples_after - samples_before))


LEAST_STEPS, MOST_STEPS = 10, 1000
MOST_LOG_REACH = 3.0  # known within a factor of 20, or not at all


class NoiseScaleMeter:
    """The gradient noise scale, measured during normal training: a second opinion on the curve's B_noise.

    It is shown beside the curve and does not shape it: how it relates to samples depends on the optimizer and the stage
    of training, and tried as a prior it made curves worse more often than better.

    Gradients of two batch sizes tell how much of a gradient is noise (McCandlish et al. 2018, appendix A.1). One device
    gives one gradient a step, so a batch is cut into parts: each part's gradient is one of the small batch, their mean
    is that of the large one, and is what the optimizer would have used anyway. Training goes on as before, except that
    layers that mix samples (batch norm) see the parts. Single steps are far too noisy to divide: the squared true
    gradient and the noise around it are averaged first, older steps counting less.
    """

    def __init__(self, decay: float = 0.98) -> None:
        if not 0 < decay < 1:
            raise InputError(f"A decay of {decay!r} makes no sense.", hint="Use a value between 0 and 1, such as 0.98.")
        self._signal, self._noise = _Average(decay), _Average(decay)
        self.steps = 0

    def add(self, part_squares: Sequence[float], mean_square: float, part_samples: int) -> None:
        """Count one step: squared norms of each part's gradient and of their mean, and the samples in a part."""
        parts = len(part_squares)
        if parts < 2 or part_samples < 1:
            raise InputError("The noise scale needs at least two parts of a batch, each of at least one sample.")
        small, large = part_samples, part_samples * parts
        small_square = sum(part_squares) / parts
        if not (math.isfinite(small_square) and math.isfinite(mean_square)):
            return  # a diverged step says nothing about noise
        self._signal.add((large * mean_square - small * small_square) / (large - small))
        self._noise.add((small_square - mean_square) / (1 / small - 1 / large))
        self.steps += 1

    def backward(self, parameters: Iterable[Any], losses: Sequence[Any], part_samples: int) -> None:
        """In place of ``loss.backward()``: the mean losses of equal parts of a batch; leaves the mean gradient."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        by_loss = [torch.autograd.grad(loss, wanted, allow_unused=True) for loss in losses]
        for parameter, *gradients in zip(wanted, *by_loss, strict=True):
            used = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(used) / len(losses) if used else None
        mean_square = _square(parameter.grad for parameter in wanted)
        self.add([float(_square(gradients)) for gradients in by_loss], float(mean_square), part_samples)

    @property
    def noise_scale(self) -> float:
        """Samples in a batch at which noise and signal are alike; inf where no signal can be seen, NaN at first."""
        if not self.steps:
            return math.nan
        if self._signal.mean <= 0:
            return math.inf
        return max(0.0, self._noise.mean) / self._signal.mean

    @property
    def log_std(self) -> float:
        """How unsure the log of the noise scale is, from how much single steps differ."""
        if self.steps < 2 or self._signal.mean <= 0 or self._noise.mean <= 0:
            return math.inf
        return math.hypot(self._signal.mean_std / self._signal.mean, self._noise.mean_std / self._noise.mean)


class _Average:
    """An exponential average without the pull of its start, and how sure it is."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = self._weight_squares = self._sum = self._sum_squares = 0.0

    def add(self, value: float) -> None:
        keep = self._decay
        self._weight = keep * self._weight + (1 - keep)
        self._weight_squares = keep**2 * self._weight_squares + (1 - keep) ** 2
        self._sum = keep * self._sum + (1 - keep) * value
        self._sum_squares = keep * self._sum_squares + (1 - keep) * value**2

    @property
    def mean(self) -> float:
        return self._sum / self._weight if self._weight else math.nan

    @property
    def mean_std(self) -> float:
        variance = max(0.0, self._sum_squares / self._weight - self.mean**2)
        share = self._weight_squares / self._weight**2  # one over the number of steps that count
        return math.sqrt(variance * share / max(1 - share, 1e-9))


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
    steps = min(max(LEAST_STEPS, math.ceil(longest.samples / longest.batch_size)), MOST_STEPS)
    meter = measure_noise_scale(job, longest.batch_size, steps=steps)
    scale, reach = meter.noise_scale, 1.645 * meter.log_std
    if meter.steps < LEAST_STEPS or not (math.isfinite(scale) and scale > 0 and reach < MOST_LOG_REACH):
        return None
    return NoiseScale(longest.batch_size, scale, scale * math.exp(-reach), scale * math.exp(reach))


def measure_noise_scale(job: Job, batch_size: int, *, steps: int = 200) -> NoiseScaleMeter:
    """Train the job on its proxy data for some steps, each on two halves of a batch, and meter the noise."""
    if batch_size < 2:
        raise PredictError("The noise scale needs a batch of at least two samples.", hint="Use a larger batch size.")
    half = batch_size // 2
    training = Training(job, half, proxy=True, seed=0)
    training.rates.follow(2 * half)
    model = training.model.train()
    meter = NoiseScaleMeter()
    for _ in range(steps):
        halves = [training.fetch()[0] for _ in range(2)]
        meter.backward(model.parameters(), [loss_of(job, *forward(job, model, part)) for part in halves], half)
        training.optimizer.step()
    training.close()
    return meter


def _square(gradients: Iterable[Any]) -> Any:
    """The squared norm of a gradient; stays on the device."""
    return sum(gradient.detach().square().sum() for gradient in gradients if gradient is not None)
