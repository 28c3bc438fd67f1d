"""A convergence study: runs at several batch sizes and seeds, each handed over as soon as it is made.

It can be stopped at any moment and gone on with later: what was handed over is given back as ``done``, and only the
runs that are missing are made.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from underwatt.convergence.curve import fit_convergence
from underwatt.errors import InputError
from underwatt.studies.workers import InProcessPool, ProcessPool, RunEnded, RunScored, RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from underwatt.convergence.prior import Evidence
    from underwatt.errors import UnderwattError
    from underwatt.jobs.job import Effort, Job
    from underwatt.records import ConvergenceRun
    from underwatt.store.store import Store

DEFAULT_POINTS = 4
MOST_OTHERS = 10  # workloads of a store, to learn from how another one may learn
# Generous, because a large batch may be the choice although it needs many times the samples: on a large GPU a step
# takes hardly longer at 30 times the batch size. On a small board a fraction of this would do.
HOPELESS_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What to study, and with how many processes (``None``: as many as this machine has cores or GPUs for)."""

    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    effort: Effort
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"A study needs at least one process, not {self.workers}.")


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Where a study stands; ``last`` is a run that was just scored or finished."""

    made: int
    total: int
    running: int
    left_s: float | None
    last: RunSpec | None = None
    samples: float = math.nan
    score: float = math.nan
    ended: str = ""  # empty while the run goes on


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a study made, and what it could not make."""

    runs: tuple[ConvergenceRun, ...]
    failures: tuple[tuple[RunSpec, UnderwattError], ...]


def study(
    job: Job,
    address: str,
    settings: StudySettings,
    *,
    done: Sequence[ConvergenceRun] = (),
    on_run: Callable[[ConvergenceRun], None] = lambda _run: None,
    on_progress: Callable[[StudyProgress], None] = lambda _progress: None,
) -> StudyResult:
    """Make the runs that are not among ``done``, or were given up there before they took as many samples as now.

    ``address`` is where worker processes find the same job; ``done`` are oldest first, any learning rate.
    ``on_run`` is called in this thread for each finished run, so that it can be stored at once. A run that fails is
    reported in the result and does not stop the others. Ctrl-C ends the workers and is raised on.
    """
    done = newest_rates(done)
    enough = min(settings.effort.limit_samples, hopeless_samples(done, job.target))
    specs = runs_to_make(settings.batch_sizes, settings.seeds, done, job.target, job.lr_at, may_take_samples=enough)
    suited, gpus = default_workers(job, len(specs))
    workers = min(settings.workers or suited, len(specs))
    progress = _Progress(deque(specs), workers, on_run, on_progress)
    pool: InProcessPool | ProcessPool
    if workers == 1:
        pool = InProcessPool(lambda: job, settings.effort, progress.scored)
    else:
        pool = ProcessPool(address, settings.effort, progress.scored, workers, gpus)
    with closing(pool):
        while progress.waiting or progress.running_since_s:
            while progress.waiting and len(progress.running_since_s) < workers:
                pool.start(progress.next(), hopeless_samples([*done, *progress.runs], job.target))
            progress.ended(pool.wait())
    return StudyResult(tuple(progress.runs), tuple(progress.failures))


def default_workers(job: Job, runs: int) -> tuple[int, tuple[str, ...]]:
    """How many processes suit this machine, and a GPU for each where the job trains on one."""
    from underwatt.jobs._torch import torch
    from underwatt.jobs.training import device_of

    if device_of(job).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = tuple(n for n in visible.split(",") if n) or tuple(map(str, range(torch.cuda.device_count())))
        return max(1, min(runs, len(names))), names
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(runs, cores)), ()


@dataclass
class _Progress:
    """What waits, what runs, what came out; and what a caller is told of it."""

    waiting: deque[RunSpec]
    workers: int
    on_run: Callable[[ConvergenceRun], None]
    on_progress: Callable[[StudyProgress], None]
    running_since_s: dict[RunSpec, float] = field(default_factory=dict)
    took_s: list[tuple[RunSpec, float]] = field(default_factory=list)
    runs: list[ConvergenceRun] = field(default_factory=list)
    failures: list[tuple[RunSpec, UnderwattError]] = field(default_factory=list)

    def next(self) -> RunSpec:
        """The run that begins now."""
        spec = self.waiting.popleft()
        self.running_since_s[spec] = time.monotonic()
        return spec

    def scored(self, event: RunScored) -> None:
        """A run under way has a new score."""
        self._report(event.spec, event.samples, event.score, "")

    def ended(self, event: RunEnded) -> None:
        """A run came to an end; it is handed over before anything else."""
        self.took_s.append((event.spec, time.monotonic() - self.running_since_s.pop(event.spec)))
        if event.error is not None:
            self.failures.append((event.spec, event.error))
        if event.run is not None:
            self.runs.append(event.run)
            self.on_run(event.run)
        self._report(event.spec, event.run.samples if event.run else math.nan, math.nan, event.how)

    def _report(self, spec: RunSpec, samples: float, score: float, ended: str) -> None:
        now_s = time.monotonic()
        running_s = [now_s - since_s for since_s in self.running_since_s.values()]
        left_s = time_left_s(self.waiting, running_s, self.took_s, self.workers)
        made, running = len(self.took_s), len(running_s)
        total = made + running + len(self.waiting)
        self.on_progress(StudyProgress(made, total, running, left_s, spec, samples, score, ended))


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


def hopeless_samples(runs: Iterable[ConvergenceRun], target: float) -> float:
    """Where a run is given up: a multiple of the best known; without end while none is known."""
    reached = [run.samples for run in runs if run.target == target and run.reached]
    return HOPELESS_FACTOR * min(reached, default=math.inf)


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
    last: dict[tuple[float, ...], ConvergenceRun] = {}  # each run as it was last made
    for at, run in enumerate(runs):
        # Runs whose rate nobody recorded, such as imported ones, are never the same.
        key = (at,) if math.isnan(run.learning_rate) else (run.batch_size, run.seed, run.target, run.learning_rate)
        last.pop(key, None)  # so that it stands where the newest stands
        last[key] = run
    newest = {(run.batch_size, run.target): run.learning_rate for run in last.values()}

    def same(one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))

    return tuple(run for run in last.values() if same(run.learning_rate, newest[run.batch_size, run.target]))


def stored_runs(store: Store, workload_id: str) -> tuple[ConvergenceRun, ...]:
    """A workload's convergence runs that still count."""
    return newest_rates(next((runs for _, runs in store.convergence(workload_id)), ()))


def other_trainings(store: Store, workload_id: str) -> list[Evidence]:
    """What the convergence runs of other workloads say of this one; of very many, the newest."""
    names = [workload.id for workload, _ in store.convergence_counts() if workload.id != workload_id]
    found = []
    for name in names[-MOST_OTHERS:]:
        runs = stored_runs(store, name)
        aim = runs[-1].target if runs else None
        if any(run.reached and run.target == aim for run in runs):
            found.append(fit_convergence(runs, aim).evidence(name))
    return found


def data_note(job: Job) -> str:
    """What a user should know about the data that is studied; empty where it is proxy data, as it should be."""
    if job.synthetic:
        return "The job's data is made up: how many samples it takes to learn means nothing."
    if job.proxy_data is None:
        return "The job has no proxy data, so its own data is used."
    return ""
