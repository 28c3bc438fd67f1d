"""Which runs a study makes, in which order, and when one is given up: decisions only, nothing is trained here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from underwatt.records import ConvergenceRun

DEFAULT_POINTS = 4
DEFAULT_SEEDS = 3
# Generous, because a large batch may be the choice although it needs many times the samples: on a large GPU a step
# takes hardly longer at 30 times the batch size. On a small board a fraction of this would do.
HOPELESS_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run to make."""

    batch_size: int
    seed: int

    def __str__(self) -> str:
        return f"batch size {self.batch_size}, seed {self.seed}"


def spread_batch_sizes(batch_sizes: Sequence[int], points: int = DEFAULT_POINTS) -> tuple[int, ...]:
    """Some of the batch sizes, evenly spread with both ends: the curve tells the others."""
    sizes = sorted(set(batch_sizes))
    if points < 1 or not sizes:
        raise InputError(f"{points} of {len(sizes)} batch sizes cannot be chosen.", hint="Choose at least one.")
    if points >= len(sizes):
        return tuple(sizes)
    if points == 1:
        return (sizes[len(sizes) // 2],)
    return tuple(sizes[round(i * (len(sizes) - 1) / (points - 1))] for i in range(points))


def runs_to_make(
    batch_sizes: Iterable[int],
    seeds: Iterable[int],
    done: Iterable[ConvergenceRun],
    target: float,
    lr_at: Callable[[int], float],
    *,
    may_take_samples: float = math.inf,
) -> tuple[RunSpec, ...]:
    """The runs not made yet: one seed after the other, each from the middle batch size outwards.

    The middle is where the fewest samples are needed: with it known first, hopeless runs at the ends are short. A run
    counts as made if batch size, seed, target and learning rate are the same, unless it was given up before it took
    ``may_take_samples``, which runs may take now.
    """
    made = {
        (run.batch_size, run.seed)
        for run in done
        if run.target == target
        and not run.given_up_samples < may_take_samples
        and math.isclose(run.learning_rate, lr_at(run.batch_size), rel_tol=1e-6)
    }
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise InputError(f"Batch sizes must be at least 1, not {sizes}.")
    middle = (len(sizes) - 1) / 2
    order = sorted(range(len(sizes)), key=lambda index: (abs(index - middle), index))
    wanted = [RunSpec(sizes[index], seed) for seed in sorted(set(seeds)) for index in order]
    return tuple(spec for spec in wanted if (spec.batch_size, spec.seed) not in made)


def hopeless_samples(runs: Iterable[ConvergenceRun], target: float, factor: float = HOPELESS_FACTOR) -> float:
    """Where a run is given up: a multiple of the best known; without end while none is known."""
    best = min((run.samples for run in runs if run.target == target and run.reached), default=math.inf)
    return factor * best


def time_left_s(
    waiting: Sequence[RunSpec], running_s: Sequence[float], took_s: Sequence[tuple[RunSpec, float]], workers: int
) -> float | None:
    """Seconds until all runs are done, from how long those at the same batch size took; ``None`` before any is."""
    if not took_s:
        return None
    overall = sum(seconds for _, seconds in took_s) / len(took_s)

    def usual(spec: RunSpec) -> float:
        same = [seconds for other, seconds in took_s if other.batch_size == spec.batch_size]
        return sum(same) / len(same) if same else overall

    still = sum(max(0.0, overall - seconds) for seconds in running_s)
    return (sum(usual(spec) for spec in waiting) + still) / max(1, workers)


def newest_rates(runs: Iterable[ConvergenceRun]) -> tuple[ConvergenceRun, ...]:
    """The runs at each batch size that share the learning rate of the newest one there; ``runs`` are oldest first.

    A job whose learning rate was changed keeps its older runs in the store; they say nothing about it now. Nor does a
    run that was given up and then made again with more samples.
    """
    listed = _last_makings(runs)
    newest = {(run.batch_size, run.target): run.learning_rate for run in listed}

    def same(one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))

    return tuple(run for run in listed if same(run.learning_rate, newest[run.batch_size, run.target]))


def _last_makings(runs: Iterable[ConvergenceRun]) -> list[ConvergenceRun]:
    """Each run as it was last made; those whose rate nobody recorded, such as imported ones, are never the same."""
    last: dict[tuple[float, ...], ConvergenceRun] = {}
    for at, run in enumerate(runs):
        known = not math.isnan(run.learning_rate)
        key = (run.batch_size, run.seed, run.target, run.learning_rate) if known else (at,)
        last.pop(key, None)  # so that it stands where the newest stands
        last[key] = run
    return list(last.values())
