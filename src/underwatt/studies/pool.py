"""Where runs are made: in this process one after the other, or in several worker processes side by side.

A worker lives on the pipe to its standard input: when this process ends, however it ends, the pipe closes and the
worker goes too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from underwatt.errors import StepError, UnderwattError
from underwatt.records import ConvergenceRun, from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.jobs.job import Job
    from underwatt.studies.study import RunSpec
    from underwatt.studies.train import Effort

_TURN_S = 0.2  # how long a wait may keep Ctrl-C from being seen


@dataclass(frozen=True, slots=True)
class Scored:
    """A run under way was scored."""

    spec: RunSpec
    samples: int
    score: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A run is over."""

    spec: RunSpec
    run: ConvergenceRun
    ended: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A run could not be made."""

    spec: RunSpec
    error: UnderwattError


Event = Scored | Finished | Failed


class Pool(Protocol):
    """Something that makes runs: hand it as many as it has workers, and wait for what happens."""

    workers: int

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Begin a run; never more than ``workers`` at once."""
        ...

    def wait(self) -> Event:
        """What happens next."""
        ...

    def close(self) -> None:
        """End everything under way."""
        ...


class HerePool:
    """Runs in this process, one at a time: for a single GPU, and where a process of its own is not worth its start."""

    workers = 1

    def __init__(self, job: Job, effort: Effort, on_scored: Callable[[Scored], None]) -> None:
        self._job = job
        self._effort = effort
        self._on_scored = on_scored
        self._next: tuple[RunSpec, float] | None = None

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Note what is to be done: it is done while waiting for it."""
        self._next = (spec, hopeless_samples)

    def wait(self) -> Event:
        """Make the run; its scores are reported on the way."""
        from underwatt.studies.train import train_to_target

        assert self._next is not None, "nothing was started"
        (spec, hopeless), self._next = self._next, None
        try:
            outcome = train_to_target(
                self._job,
                spec.batch_size,
                spec.seed,
                self._effort,
                hopeless_samples=hopeless,
                on_score=lambda samples, score: self._on_scored(Scored(spec, samples, score)),
            )
        except UnderwattError as exc:
            return Failed(spec, exc)
        return Finished(spec, outcome.run, outcome.ended)

    def close(self) -> None:
        """Nothing goes on in the background."""


class ProcessPool:
    """Runs in worker processes that load the job by its address; each may be given a GPU of its own."""

    def __init__(self, address: str, effort: Effort, workers: int, gpus: Sequence[str] = ()) -> None:
        self.workers = workers
        self._effort = effort
        self._events: queue.Queue[tuple[_Worker, Event]] = queue.Queue()
        self._idle: list[_Worker] = []
        self._all: list[_Worker] = []
        try:
            for index in range(workers):
                self._all.append(_Worker(address, self._events, gpus[index] if gpus else None))
        except BaseException:
            self.close()
            raise
        self._idle = list(self._all)

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Give a run to an idle worker."""
        self._idle.pop().start(spec, self._effort, hopeless_samples)

    def wait(self) -> Event:
        """What happens next in any worker."""
        while True:
            with contextlib.suppress(queue.Empty):
                worker, event = self._events.get(timeout=_TURN_S)
                if not isinstance(event, Scored):
                    self._idle.append(worker)
                return event

    def close(self) -> None:
        """End all workers; returns when they are gone."""
        for worker in self._all:
            worker.kill()
        self._all.clear()


class _Worker:
    """One worker process, started when first needed and again after it died."""

    def __init__(self, address: str, events: queue.Queue[tuple[_Worker, Event]], gpu: str | None) -> None:
        self._command = [sys.executable, "-m", "underwatt.studies.worker", address]
        # One thread a worker, also in the libraries that read this before we can say so.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if gpu is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._events = events
        self._process: subprocess.Popen[str] | None = None
        self._printed: Any = None

    def start(self, spec: RunSpec, effort: Effort, hopeless_samples: float) -> None:
        """Send a run and listen for its outcome in a thread."""
        order = {
            "batch_size": spec.batch_size,
            "seed": spec.seed,
            "limit_samples": effort.limit_samples,
            "evaluate_every_samples": effort.evaluate_every_samples,
            "hopeless_samples": hopeless_samples if math.isfinite(hopeless_samples) else None,
        }
        if self._process is None or self._process.poll() is not None:
            self._launch()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the listener says why
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        threading.Thread(target=self._listen, args=(spec, self._process), daemon=True).start()

    def _launch(self) -> None:
        self.kill()
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            encoding="utf-8",
            env=self._environment,
            start_new_session=True,  # so that its own children, such as loaders of data, can be ended with it
        )

    def _listen(self, spec: RunSpec, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, ""):
            message = json.loads(line)
            if "score" in message:
                score = math.nan if message["score"] is None else message["score"]
                self._events.put((self, Scored(spec, message["samples"], score)))
                continue
            if "error" in message:
                self._events.put((self, Failed(spec, StepError(message["error"], hint=message["hint"]))))
            else:
                self._events.put((self, Finished(spec, from_json(ConvergenceRun, message["run"]), message["ended"])))
            return
        process.wait()
        self._events.put((self, Failed(spec, self._died(process.returncode))))

    def _died(self, code: int) -> StepError:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = ""
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile: the study is over
            self._printed.seek(0)
            last = (self._printed.read().strip().splitlines() or [""])[-1][:300]
        return StepError(f"The process of the run {how}.", hint=f"It last printed: {last}" if last else "")

    def kill(self) -> None:
        """End the process, if there is one, and wait for it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError, ValueError):  # what was not sent yet cannot be any more
                        pipe.close()
            self._process = None
        if self._printed is not None:
            self._printed.close()
            self._printed = None
