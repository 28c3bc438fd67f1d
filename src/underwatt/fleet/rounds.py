"""Planning a round: how long it is, and each board's batch size and steps, from what the boards reported.

A board reports its *front*: how long a sample takes at some batch sizes and watts, with an upper bound. Nothing else
of a board is known here. All boards are planned at once, as arrays, so that ten thousand take no longer than a message.

Below the watts of a measured point a board pauses between steps: its rate falls in proportion to the watts above those
of waiting. That is what ``Fronts.rate_at`` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from underwatt.errors import InputError
from underwatt.planning.problem import DEFAULT_WINDOW_S, LARGEST_SWING, LEAST_BUSY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

# Samples to the target grow as 1 + b / NOISE_BATCH where nothing else is known of them; METHODS compares values.
NOISE_BATCH = 256.0
# How long boards train, as a multiple of what communication takes. Longer rounds are worth it while updates grow with
# work nearly as much as the work does; where they hardly grow, boards come to where their own data lead them. Chosen
# with the oracle of benchmarks/fleet.py, its length led so, on seeds 100 to 105 and with 1 and 10 times the work a
# step: aims of 0.5 to 0.65, and at most 10 or 20 times.
FIRST_TIMES, MOST_TIMES = 1.5, 10.0
AIM, HASTE, MOST_CHANGE = 0.55, 2.0, 1.25
# Where it is not seen how updates grow (boards that all do alike), a round is so much longer than the one before it.
UNSEEN_TIMES, UNSEEN_CHANGE = 4.0, 1.03
# While boards still search, rounds are long enough to measure some settings in each: 4 s and 5 s were slower.
SEARCH_S = 6.0
SHORTEST_S = 2.0
LEAST_STEPS = 2  # of the slowest board that counts
# Boards, and the variance of their log progress, that tell how updates grow with it; elsewhere it hardly matters.
LEAST_ROWS, LEAST_SPREAD = 3, 0.01


class FrontPoint(NamedTuple):
    """What a board can do: the seconds of a sample at a batch size and so many watts, and an upper bound of them."""

    batch_size: int
    power_w: float
    sample_s: float
    sample_s_high: float


@dataclass(frozen=True, slots=True)
class Fronts:
    """The fronts of many boards, one row a board; rows are filled up with NaN."""

    batch_size: Floats
    power_w: Floats
    sample_s: Floats
    sample_s_high: Floats
    idle_w: Floats  # one a board: what it draws while it waits

    @classmethod
    def of(cls, fronts: Sequence[Sequence[FrontPoint]], idle_w: Sequence[float]) -> Self:
        """From each board's points."""
        width = max([1, *map(len, fronts)])
        flat = np.full((len(fronts), width, 4), np.nan)
        lengths = np.fromiter(map(len, fronts), dtype=np.intp, count=len(fronts))
        values = chain.from_iterable(chain.from_iterable(fronts))
        flat[np.arange(width) < lengths[:, None]] = np.fromiter(values, dtype=float).reshape(-1, 4)
        sizes, watts, samples_s, highs_s = (np.ascontiguousarray(flat[:, :, at]) for at in range(4))
        return cls(sizes, watts, samples_s, highs_s, np.asarray(idle_w, dtype=float))

    def __len__(self) -> int:
        return len(self.idle_w)

    def goodput(self, noise_batch: float) -> Floats:
        """Samples a second of each point, less what larger batches learn less from each; by upper bounds."""
        return 1.0 / (self.sample_s_high * (1.0 + self.batch_size / noise_batch))

    def busy_share(self, limit_w: Floats) -> Floats:
        """Which share of the time each point may run where so many watts are allowed; the rest are pauses.

        As on a board, there is none where one step draws so much that pauses leave no steady mean.
        """
        limit, idle = limit_w[:, None], self.idle_w[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            share = (limit - idle) / np.maximum(self.power_w - idle, 1e-9)
            swing_s = (self.power_w / limit - 1.0) * self.batch_size * self.sample_s_high
            share = np.where((swing_s <= LARGEST_SWING * DEFAULT_WINDOW_S) & (share >= LEAST_BUSY), share, 0.0)
        return np.clip(np.where(self.power_w <= limit, 1.0, share), 0.0, 1.0)

    def rate_at(self, limit_w: Floats, noise_batch: float) -> Floats:
        """The best goodput of each board within its watts; zero where nothing is known."""
        rates = self.goodput(noise_batch) * self.busy_share(limit_w)
        return np.asarray(np.nan_to_num(rates, nan=0.0).max(axis=1))


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round: its length, and of each board the batch size (0: its own choice), steps and seconds to train for."""

    length_s: float
    batch_size: Integers
    steps: Integers  # that will be done by then, by the upper bound; 0 where nothing is known of a board
    train_s: Floats


def plan_round(
    fronts: Fronts, limit_w: Floats, overhead_s: Floats, length_s: float, noise_batch: float = NOISE_BATCH
) -> RoundPlan:
    """What each board does in a round of ``length_s``, of which ``overhead_s`` go to communication and setting up.

    A batch size is chosen by what whole steps of it bring within the round: in a short one a slow board takes smaller
    batches than in a long one.
    """
    train_s = np.maximum(length_s - overhead_s, 0.0)
    share = fronts.busy_share(limit_w)
    with np.errstate(invalid="ignore", divide="ignore"):
        step_s = fronts.batch_size * fronts.sample_s_high / share
        steps = np.floor(train_s[:, None] / step_s + 1e-9)
        # A started step is finished: half a step more or less is no reason for another batch size.
        worth = np.maximum(train_s[:, None] / step_s - 0.5, 0.0) * fronts.batch_size
        value = worth / (1.0 + fronts.batch_size / noise_batch)
    value = np.where(np.isfinite(value) & (share > 0), value, -1.0)
    best = value.argmax(axis=1)
    rows = np.arange(len(fronts))
    known = value[rows, best] > 0
    batch = np.where(known, fronts.batch_size[rows, best], 0.0)
    return RoundPlan(
        length_s,
        np.nan_to_num(batch).astype(np.int64),
        np.where(known, np.nan_to_num(steps[rows, best]), 0.0).astype(np.int64),
        train_s,
    )


def next_times(times: float, growth: float | None) -> float:
    """The multiple of communication to train for, after a round of ``times``, by how updates grow with work."""
    if growth is None:
        return max(times, min(times * UNSEEN_CHANGE, UNSEEN_TIMES))
    change = math.exp(HASTE * (growth - AIM))
    change = min(max(change, 1.0 / MOST_CHANGE), MOST_CHANGE)
    return min(max(times * change, FIRST_TIMES), MOST_TIMES)


def round_length_s(times: float, overhead_s: Floats, step_s: Floats, *, searching: bool) -> float:
    """How long a round is: ``times`` as long as communication and that itself, never too short for slow boards.

    ``overhead_s`` is what goes to communication on each board, ``step_s`` what a step takes there. While some of the
    boards still search (``searching``), the length suits that.
    """
    if not len(overhead_s):
        return SEARCH_S
    usual_s = float(np.quantile(overhead_s, 0.75))
    slowest_s = float(np.quantile(step_s[np.isfinite(step_s)], 0.9)) if np.any(np.isfinite(step_s)) else 0.0
    length_s = max(SHORTEST_S, usual_s * (1 + times), float(overhead_s.max()) + LEAST_STEPS * slowest_s)
    return max(length_s, SEARCH_S) if searching else length_s


# Updates of unequal work.


class Course:
    """How far a board's optimizer has gone: the sum of what each gradient of the round moved the weights by, per unit.

    For SGD with momentum μ and τ steps of rate η that is η(τ − μ(1−μ^τ)/(1−μ))/(1−μ), FedNova's with the rate inside,
    since it differs by board; kept step by step, so that the rate may change on the way.
    """

    def __init__(self, momentum: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False) -> None:
        if not 0.0 <= momentum < 1.0:
            raise InputError(f"Momentum must lie between 0 and 1, not {momentum:g}.", hint="Such as 0.9.")
        self._momentum, self._dampening, self._nesterov = momentum, dampening, nesterov
        self._buffer = 0.0
        self._begun = False
        self.progress = 0.0

    def step(self, lr: float) -> None:
        """One step of the optimizer at a rate."""
        if not self._momentum:
            self.progress += lr
            return
        # PyTorch's buffer is the first gradient itself, without dampening.
        fresh = 1.0 - self._dampening if self._begun else 1.0
        self._buffer = self._momentum * self._buffer + fresh
        self._begun = True
        self.progress += lr * (1.0 + self._momentum * self._buffer if self._nesterov else self._buffer)


def course_of(optimizer: object) -> Course:
    """The course of a PyTorch optimizer: SGD exactly, the Adam family by its rate; others are refused.

    Adam divides each step by the size of its gradients, so that a step moves weights by about its rate whatever they
    are: τ steps of rate η are worth τη.
    """
    name = type(optimizer).__name__
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    groups = getattr(optimizer, "param_groups", ())
    if "SGD" in kinds and groups:
        momenta = {(group["momentum"], group["dampening"], bool(group["nesterov"])) for group in groups}
        if len(momenta) == 1:
            momentum, dampening, nesterov = momenta.pop()
            return Course(momentum, dampening=dampening, nesterov=nesterov)
        raise InputError(
            "This optimizer's groups have different momenta, so their updates have no common measure.",
            hint="Give all groups the same momentum.",
        )
    if kinds & {"Adam", "AdamW", "NAdam", "RAdam", "Adamax"}:
        return Course()
    raise InputError(
        f"How far a step of {name} goes is not known, so its updates cannot be compared between boards.",
        hint="Use SGD or Adam, or say it yourself: local.step(lr=…) after each step, without optimizer=….",
    )


def growth_of(progress: Sequence[float], norms: Sequence[float]) -> float | None:
    """How updates grow with progress, as a power of it, seen from a round: 1 at first, less as boards near an optimum.

    None where too few boards tell, or all have gone equally far.

    FedNova takes it for 1. A board that did thousands of steps has come nearly as far as it can, so the first few of
    another, multiplied as if it went on like that, would throw the model far beyond.
    """
    rows = [(math.log(a), math.log(norm)) for a, norm in zip(progress, norms, strict=True) if a > 0 and norm > 0]
    if len(rows) < LEAST_ROWS:
        return None
    logs, sizes = np.array(rows).T - np.mean(rows, axis=0)[:, None]
    spread = float(logs @ logs)
    return min(max(float(logs @ sizes) / spread, 0.0), 1.0) if spread > LEAST_SPREAD * len(rows) else None


def scales(progress: Sequence[float], weights: Sequence[float], growth: float = 1.0) -> list[float]:
    """By what each board's update is multiplied, so that none counts more because it did more work.

    With progress a and updates that grow as a^growth, the update of board i becomes (mean of all a^growth) / a_i^growth
    times itself, the mean weighted by data. FedNova's is a growth of 1. A board without progress has no update.
    """
    total = math.fsum(weights)
    if total <= 0:
        raise InputError("No board has data.", hint="Report how many samples each holds.")
    reached = [a**growth if a > 0 else 0.0 for a in progress]
    mean = math.fsum(g * w for g, w in zip(reached, weights, strict=True)) / total
    return [mean / g if g > 0 else 0.0 for g in reached]
