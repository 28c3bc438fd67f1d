"""Where runs are made: in this process one after the other, or in several worker processes side by side.

A worker is a Python process that does ``work``. Runs to make are pickled into its standard input, and events come back
where its standard output was: scores on the way, then how the run ended. What the job prints goes to standard error. A
worker lives on the pipe to its standard input: when this process ends, however it ends, the pipe closes and the worker
goes too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from underwatt.errors import StepError, UnderwattError
from underwatt.jobs.job_address import load_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.jobs.job import Effort, Job
    from underwatt.records import ConvergenceRun

_TURN_S = 0.2  # how long a wait may keep Ctrl-C from being seen


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
