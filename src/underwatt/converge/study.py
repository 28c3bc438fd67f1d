"""A convergence study: runs at several batch sizes and seeds, each handed over as soon as it is made.

It can be stopped at any moment and gone on with later: what was handed over is given back as ``done``, and only the
runs that are missing are made.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.converge.pool import Failed, Finished, HerePool, Pool, ProcessPool, Scored
from underwatt.converge.runs import (
    HOPELESS_FACTOR,
    RunSpec,
    hopeless_samples,
    newest_rates,
    runs_to_make,
    time_left_s,
)
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.converge.train import Effort
    from underwatt.errors import UnderwattError
    from underwatt.records import ConvergenceRun
    from underwatt.workload.job import Job


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What to study, and with how many processes (``None``: as many as this machine has cores or GPUs for)."""

    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    effort: Effort
    workers: int | None = None
    hopeless_factor: float = HOPELESS_FACTOR

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"A study needs at least one process, not {self.workers}.")
        if not self.hopeless_factor > 1:
            raise InputError(
                f"Giving runs up at {self.hopeless_factor:g} times the best would end the best.", hint="Use 2 or more."
            )


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
    on_run: Callable[[ConvergenceRun], None] | None = None,
    on_progress: Callable[[StudyProgress], None] | None = None,
) -> StudyResult:
    """Make the runs that are not among ``done``, or were given up there before they took as many samples as now.

    ``address`` is where worker processes find the same job; ``done`` are oldest first, any learning rate.
    ``on_run`` is called in this thread for each finished run, so that it can be stored at once. A run that fails is
    reported in the result and does not stop the others. Ctrl-C ends the workers and is raised on.
    """
    done = newest_rates(done)
    enough = min(settings.effort.limit_samples, hopeless_samples(done, job.target, settings.hopeless_factor))
    specs = runs_to_make(settings.batch_sizes, settings.seeds, done, job.target, job.lr_at, may_take_samples=enough)
    keeper = _Keeper(specs, on_run, on_progress)
    if not specs:
        return keeper.result()
    pool = _pool(job, address, settings, len(specs), keeper.scored)
    try:
        keeper.workers = pool.workers
        while keeper.waiting or keeper.since:
            while keeper.waiting and len(keeper.since) < pool.workers:
                spec = keeper.waiting.popleft()
                keeper.since[spec] = time.monotonic()
                known = [*done, *keeper.runs]
                pool.start(spec, hopeless_samples(known, job.target, settings.hopeless_factor))
            event = pool.wait()
            if isinstance(event, Scored):
                keeper.scored(event)
            else:
                keeper.over(event)
    finally:
        pool.close()
    return keeper.result()


def data_note(job: Job) -> str:
    """What a user should know about the data that is studied; empty where it is proxy data, as it should be."""
    if job.synthetic:
        return "The job's data is made up: how many samples it takes to learn means nothing."
    if job.proxy_data is None:
        return "The job has no proxy data, so its own data is used."
    return ""


def default_workers(job: Job, runs: int) -> tuple[int, tuple[str, ...]]:
    """How many processes suit this machine, and a GPU for each where the job trains on one."""
    from underwatt.workload._torch import torch
    from underwatt.workload.training import device_of

    if device_of(job).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = tuple(n for n in visible.split(",") if n) or tuple(map(str, range(torch.cuda.device_count())))
        return max(1, min(runs, len(names))), names
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(runs, cores)), ()


def _pool(job: Job, address: str, settings: StudySettings, runs: int, on_scored: Callable[[Scored], None]) -> Pool:
    suited, gpus = default_workers(job, runs)
    workers = min(settings.workers or suited, runs)
    if workers == 1:
        return HerePool(job, settings.effort, on_scored)
    # More processes than GPUs share them in turn.
    return ProcessPool(address, settings.effort, workers, [gpus[i % len(gpus)] for i in range(workers)] if gpus else ())


class _Keeper:
    """The books of a study: what waits, what runs, what came out."""

    def __init__(
        self,
        specs: tuple[RunSpec, ...],
        on_run: Callable[[ConvergenceRun], None] | None,
        on_progress: Callable[[StudyProgress], None] | None,
    ) -> None:
        self.waiting = deque(specs)
        self.since: dict[RunSpec, float] = {}
        self.runs: list[ConvergenceRun] = []
        self.workers = 1
        self._total = len(specs)
        self._failures: list[tuple[RunSpec, UnderwattError]] = []
        self._took_s: list[tuple[RunSpec, float]] = []
        self._on_run = on_run
        self._on_progress = on_progress

    def scored(self, event: Scored) -> None:
        """A run under way has a new score."""
        self._report(event.spec, event.samples, event.score, "")

    def over(self, event: Finished | Failed) -> None:
        """A run came to an end; it is handed over before anything else."""
        self._took_s.append((event.spec, time.monotonic() - self.since.pop(event.spec)))
        if isinstance(event, Failed):
            self._failures.append((event.spec, event.error))
            self._report(event.spec, math.nan, math.nan, "failed")
            return
        self.runs.append(event.run)
        if self._on_run is not None:
            self._on_run(event.run)
        self._report(event.spec, event.run.samples, math.nan, event.ended)

    def _report(self, spec: RunSpec, samples: float, score: float, ended: str) -> None:
        if self._on_progress is None:
            return
        now_s = time.monotonic()
        running_s = [now_s - since_s for since_s in self.since.values()]
        left_s = time_left_s(tuple(self.waiting), running_s, self._took_s, self.workers)
        self._on_progress(
            StudyProgress(len(self._took_s), self._total, len(self.since), left_s, spec, samples, score, ended)
        )

    def result(self) -> StudyResult:
        """What came out."""
        return StudyResult(tuple(self.runs), tuple(self._failures))
