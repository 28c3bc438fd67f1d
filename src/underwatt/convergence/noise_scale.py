"""What a training's own gradients say of its batch sizes while it goes on: the noise scale, and the curve that follows.

The gradients of two batches share their signal and not their noise (McCandlish et al. 2018, appendix A.1). At the noise
scale, a number of samples, both are alike in a batch's gradient: about there a target takes twice the samples. It grows
while a network learns, so that the best batch size is a path and not a point.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from underwatt.errors import InputError

if TYPE_CHECKING:
    from underwatt.convergence.prior import RelativeCurve

DECAY = 0.98  # of a pair of gradients to the next one
# In powers of two: how far the batch size of twice the samples lies above the noise scale as it is measured, and how
# surely; and how far it must have moved to be weighed again, and for a person to hear of it. A compromise between few
# trials on the jobs of benchmarks/cold.py: one of three gained clearly, the others within the scatter of seeds.
ABOVE, SPREAD = 0.5, 0.7
NEWS, SAID_AGAIN = 0.6, 2.0
SURELY = 2.0  # ... and so many times its own deviation, or chance would tell something new all the time
TURNED = 1.5  # so much further with each time that it turns back, from the third on: what comes and goes is chance
FEWEST_PAIRS = 12
ONE_STD = (0.16, 0.5, 0.84)  # quantiles: the middle, and a standard deviation to either side
MOST_LOG_STD = 1.5  # within a factor of 4.5 or so; before that, nothing is said


class NoiseScaleMeter:
    """The gradient noise scale, from signal and noise as they are seen pair by pair.

    Single pairs are far too noisy to divide: both are averaged first, older ones counting less.
    """

    def __init__(self, decay: float = DECAY) -> None:
        if not 0 < decay < 1:
            raise InputError(f"A decay of {decay!r} makes no sense.", hint="Use a value between 0 and 1, such as 0.98.")
        self._signal, self._noise = _Average(decay), _Average(decay)
        self.pairs = 0

    def add(self, signal: float, noise: float) -> None:
        """Count a pair: the squared true gradient, and the variance of one sample's, by any measure of them both."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return  # a diverged step says nothing about noise
        self._signal.add(signal)
        self._noise.add(noise)
        self.pairs += 1

    @property
    def noise_scale(self) -> float:
        """Samples in a batch at which noise and signal are alike; inf where no signal can be seen, NaN at first."""
        if not self.pairs:
            return math.nan
        if self._signal.mean <= 0:
            return math.inf
        return max(0.0, self._noise.mean) / self._signal.mean

    @property
    def log_std(self) -> float:
        """How unsure the log of the noise scale is, from how much single pairs differ."""
        if self.pairs < 2 or self._signal.mean <= 0 or self._noise.mean <= 0:
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
        share = self._weight_squares / self._weight**2  # one over the number of pairs that count
        return math.sqrt(variance * share / max(1 - share, 1e-9))


class LearnedCurve:
    """How batch sizes compare by what was known before, and by the gradients of this training as they come.

    What it says is new where it moves what both together let expect: gradients that only confirm what was known before,
    or differ from one look to the next by chance, change no plan.
    """

    def __init__(self, before: RelativeCurve) -> None:
        self._before, self._meter = before, NoiseScaleMeter()
        low, self._usual, high = (math.log2(before.noise_samples(quantile)) for quantile in ONE_STD)
        self._usual_variance = ((high - low) / 2) ** 2
        self._told, self._turns, self._was_up, self._said = self._usual, 0, True, math.inf

    def is_far(self) -> bool:
        """Whether it lies so far from where it was when this was asked last that a person should hear of it."""
        is_far = abs(self._told - self._said) > SAID_AGAIN
        self._said = self._told if is_far else self._said
        return is_far

    def after(self, signal: float, noise: float) -> RelativeCurve | None:
        """The curve after one more pair of gradients; ``None`` where it says nothing new.

        Each is made from what was known before and from the noise scale of now: it grows, and older ones are over.
        """
        meter = self._meter
        meter.add(signal, noise)
        if meter.pairs < FEWEST_PAIRS or not (0 < meter.noise_scale < math.inf and meter.log_std < MOST_LOG_STD):
            return None
        level, doubt = math.log2(meter.noise_scale) + ABOVE, meter.log_std / math.log(2)
        spread = math.hypot(SPREAD, doubt)
        weight = self._usual_variance / (self._usual_variance + spread**2)
        middle = self._usual + weight * (level - self._usual)  # about: a whole curve for every pair would take long
        is_up = middle > self._told
        turns = self._turns + (is_up != self._was_up)
        if abs(middle - self._told) < max(NEWS * TURNED ** max(0, turns - 2), SURELY * weight * doubt):
            return None
        self._told, self._turns, self._was_up = middle, turns, is_up
        return self._before.given(2.0**level, spread, f"{self._before.source} and this one's gradients")
