"""A convergence study: runs at several batch sizes and seeds, each handed over as soon as it is made.

It can be stopped at any moment and gone on with later: what was handed over is given back as ``done``, and only the
runs that are missing are made.

They are made in this process one after the other, or in several worker processes side by side. A worker is a Python
process that does ``work``. Runs to make are pickled into its standard input, and events come back where its standard
output was: scores on the way, then how the run ended. What the job prints goes to standard error. A worker lives on the
pipe to its standard input: when this process ends, however it ends, the pipe closes and the worker goes too.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from underwatt.convergence.curve import fit_convergence
from underwatt.errors import InputError, StepError, UnderwattError
from underwatt.jobs.job import load_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from underwatt.convergence.prior import Evidence
    from underwatt.jobs.job import Effort, Job
    from underwatt.records import ConvergenceRun
    from underwatt.store.store import Store

DEFAULT_POINTS = 4
MOST_OTHERS = 10  # workloads of a store, to learn from how another one may learn
# Generous, because a large batch may be the choice although it needs many times the samples: on a large GPU a step
# takes hardly longer at 30 times the batch size. On a small board a fraction of this would do.
HOPELESS_FACTOR = 10.0
_TURN_S = 0.2  # how long a wait may keep Ctrl-C from being seen


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
class RunSpec:
    """A run to make."""

    batch_size: int
    seed: int

    def __str__(self) -> str:
        return f"batch size {self.batch_size}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class RunScored:
    """A run under way was scored."""

    spec: RunSpec
    samples: int
    score: float


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run is over, or could not be made."""

    spec: RunSpec
    how: str  # "failed", or as in ``TrainingEnd``
    run: ConvergenceRun | None = None
    error: UnderwattError | None = None


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
    done, effort = newest_rates(done), settings.effort
    target = job.target if effort.target is None else effort.target
    enough = min(effort.limit_samples, hopeless_samples(done, target))
    specs = runs_to_make(settings.batch_sizes, settings.seeds, done, target, job.lr_at, may_take_samples=enough)
    suited, gpus = default_workers(job, len(specs))
    workers = min(settings.workers or suited, len(specs))
    progress = _Progress(deque(specs), workers, on_run, on_progress)
    pool: InProcessPool | ProcessPool
    if workers == 1:
        pool = InProcessPool(lambda: job, effort, progress.scored)
    else:
        pool = ProcessPool(address, effort, progress.scored, workers, gpus)
    with contextlib.closing(pool):
        while progress.waiting or progress.running_since_s:
            while progress.waiting and len(progress.running_since_s) < workers:
                pool.start(progress.next(), hopeless_samples([*done, *progress.runs], target))
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


# Where runs are made.


class InProcessPool:
    """Runs in this process, one at a time: for a single GPU, and where a process of its own is not worth its start.

    Used like ``ProcessPool``: start as many runs as there are workers, and wait for one to end.
    """

    def __init__(self, job: Callable[[], Job], effort: Effort, on_scored: Callable[[RunScored], None]) -> None:
        self._job, self._effort, self._on_scored = job, effort, on_scored
        self._next: tuple[RunSpec, float] | None = None

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Note what is to be done: it is done while waiting for it."""
        self._next = (spec, hopeless_samples)

    def wait(self) -> RunEnded:
        """Make the run."""
        from underwatt.studies.proxy_training import train_to_target

        assert self._next is not None, "nothing was started"
        (spec, hopeless), self._next = self._next, None
        try:
            end = train_to_target(
                self._job(),
                spec.batch_size,
                spec.seed,
                self._effort,
                hopeless_samples=hopeless,
                on_score=lambda samples, score: self._on_scored(RunScored(spec, samples, score)),
            )
        except UnderwattError as exc:
            return RunEnded(spec, "failed", error=exc)
        return RunEnded(spec, end.ended, end.run)

    def close(self) -> None:
        """Nothing goes on in the background."""


class ProcessPool:
    """Runs in worker processes that load the job by its address; each may be given a GPU of its own."""

    def __init__(
        self,
        address: str,
        effort: Effort,
        on_scored: Callable[[RunScored], None],
        workers: int,
        gpus: Sequence[str] = (),
    ) -> None:
        self._effort, self._on_scored = effort, on_scored
        self._events: queue.Queue[tuple[_Worker, RunScored | RunEnded]] = queue.Queue()
        # More processes than GPUs share them in turn.
        self._all = [_Worker(address, self._events, gpus[i % len(gpus)] if gpus else None) for i in range(workers)]
        self._idle = list(self._all)

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Give a run to an idle worker."""
        self._idle.pop().start(spec, self._effort, hopeless_samples)

    def wait(self) -> RunEnded:
        """Listen to all workers until a run ends."""
        while True:
            with contextlib.suppress(queue.Empty):
                worker, event = self._events.get(timeout=_TURN_S)
                if not isinstance(event, RunScored):
                    self._idle.append(worker)
                    return event
                self._on_scored(event)

    def close(self) -> None:
        """End all workers; returns when they are gone."""
        for worker in self._all:
            worker.kill()


class _Worker:
    """One worker process, started when first needed and again after it died."""

    def __init__(self, address: str, events: queue.Queue[Any], gpu: str | None) -> None:
        self._command = [sys.executable, "-c", f"from {__name__} import work; work()", address]
        # One thread a worker, also in the libraries that read this before we can say so.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if gpu is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._events = events
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: Any = None

    def start(self, spec: RunSpec, effort: Effort, hopeless_samples: float) -> None:
        """Send a run and listen for its end in a thread."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._launch()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the listener says why
            pickle.dump((spec, effort, hopeless_samples), process.stdin)
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(spec, process), daemon=True).start()

    def _launch(self) -> subprocess.Popen[bytes]:
        self.kill()
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=self._environment,
            start_new_session=True,  # so that its own children, such as loaders of data, can be ended with it
        )
        return self._process

    def _listen(self, spec: RunSpec, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            while isinstance(event := pickle.load(process.stdout), RunScored):  # noqa: S301 - from a process of ours
                self._events.put((self, event))
        except (EOFError, pickle.UnpicklingError):  # it died, maybe in the middle of an event
            event = RunEnded(spec, "failed", error=self._died(process.wait()))
        except Exception as exc:  # noqa: BLE001 - a job's own error may be one that cannot be read here
            event = RunEnded(spec, "failed", error=StepError(f"The run failed, and its error cannot be read: {exc}"))
        self._events.put((self, event))

    def _died(self, code: int) -> StepError:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = ""
        with contextlib.suppress(ValueError, OSError, AttributeError):  # closed meanwhile: the study is over
            self._printed.seek(0)
            last = (self._printed.read().strip().splitlines() or [""])[-1][:300]
        return StepError(f"The process of the run {how}.", hint=f"It last printed: {last}" if last else "")

    def kill(self) -> None:
        """End the process, if there is one, and wait for it."""
        if self._process is not None:
            # It may be gone already, and what was not sent yet cannot be any more.
            with contextlib.suppress(OSError, ValueError), self._process:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None
        if self._printed is not None:
            self._printed.close()
            self._printed = None


def work() -> None:
    """What a worker process does: make the runs it is told to, until its standard input ends."""
    from underwatt.jobs._torch import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # Orders come by a file of their own: a loader's worker closes standard input when it is forked, and would wait for
    # ever for the thread that holds it, which is not in that process.
    orders_file = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    orders: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_take_orders, args=(orders_file, orders), daemon=True).start()
    torch.set_num_threads(1)  # the study uses the cores by running side by side
    job = cache(lambda: load_job(sys.argv[1]))
    while True:
        spec, effort, hopeless_samples = orders.get()
        pool = InProcessPool(job, effort, lambda scored: pickle.dump(scored, replies))
        pool.start(spec, hopeless_samples)
        pickle.dump(pool.wait(), replies)


def _take_orders(orders_file: BinaryIO, orders: queue.Queue[Any]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            orders.put(pickle.load(orders_file))  # noqa: S301 - from the process that started this one
    os._exit(0)  # from a thread, in the middle of a training: nothing here is worth keeping
