"""Where runs are made: in this process one after the other, or in several worker processes side by side.

A worker is ``python -m underwatt.studies.workers ADDRESS``. Lines of JSON go to its standard input, one a run, and come
back where its standard output was: scores on the way, then how the run ended. What the job prints goes to standard
error. A worker lives on the pipe to its standard input: when this process ends, however it ends, the pipe closes and
the worker goes too.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from underwatt.errors import StepError, UnderwattError
from underwatt.jobs.job import Effort, Job
from underwatt.jobs.load import load_job
from underwatt.records import ConvergenceRun, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TURN_S = 0.2  # how long a wait may keep Ctrl-C from being seen


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run to make."""

    batch_size: int
    seed: int

    def __str__(self) -> str:
        return f"batch size {self.batch_size}, seed {self.seed}"


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


class InProcessPool:
    """Runs in this process, one at a time: for a single GPU, and where a process of its own is not worth its start.

    Used like ``ProcessPool``: start as many runs as there are workers, and wait for one to end.
    """

    workers = 1

    def __init__(self, job: Job, effort: Effort, on_scored: Callable[[Scored], None]) -> None:
        self._job, self._effort, self._on_scored = job, effort, on_scored
        self._next: tuple[RunSpec, float] | None = None

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Note what is to be done: it is done while waiting for it."""
        self._next = (spec, hopeless_samples)

    def wait(self) -> Finished | Failed:
        """Make the run."""
        from underwatt.studies.proxy_training import train_to_target

        assert self._next is not None, "nothing was started"
        (spec, hopeless), self._next = self._next, None
        try:
            end = train_to_target(
                self._job,
                spec.batch_size,
                spec.seed,
                self._effort,
                hopeless_samples=hopeless,
                on_score=lambda samples, score: self._on_scored(Scored(spec, samples, score)),
            )
        except UnderwattError as exc:
            return Failed(spec, exc)
        return Finished(spec, end.run, end.ended)

    def close(self) -> None:
        """Nothing goes on in the background."""


class ProcessPool:
    """Runs in worker processes that load the job by its address; each may be given a GPU of its own."""

    def __init__(
        self, address: str, effort: Effort, on_scored: Callable[[Scored], None], workers: int, gpus: Sequence[str] = ()
    ) -> None:
        self.workers = workers
        self._effort, self._on_scored = effort, on_scored
        self._events: queue.Queue[tuple[_Worker, Scored | Finished | Failed]] = queue.Queue()
        # More processes than GPUs share them in turn.
        self._all = [_Worker(address, self._events, gpus[i % len(gpus)] if gpus else None) for i in range(workers)]
        self._idle = list(self._all)

    def start(self, spec: RunSpec, hopeless_samples: float) -> None:
        """Give a run to an idle worker."""
        self._idle.pop().start(spec, self._effort, hopeless_samples)

    def wait(self) -> Finished | Failed:
        """Listen to all workers until a run ends."""
        while True:
            with contextlib.suppress(queue.Empty):
                worker, event = self._events.get(timeout=_TURN_S)
                if not isinstance(event, Scored):
                    self._idle.append(worker)
                    return event
                self._on_scored(event)

    def close(self) -> None:
        """End all workers; returns when they are gone."""
        for worker in self._all:
            worker.kill()
        self._all.clear()


class _Worker:
    """One worker process, started when first needed and again after it died."""

    def __init__(self, address: str, events: queue.Queue[Any], gpu: str | None) -> None:
        self._command = [sys.executable, "-m", __name__, address]
        # One thread a worker, also in the libraries that read this before we can say so.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if gpu is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._events = events
        self._process: subprocess.Popen[str] | None = None
        self._printed: Any = None

    def start(self, spec: RunSpec, effort: Effort, hopeless_samples: float) -> None:
        """Send a run and listen for its end in a thread."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._launch()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the listener says why
            order = {"spec": asdict(spec), "effort": asdict(effort), "hopeless_samples": hopeless_samples}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(spec, process), daemon=True).start()

    def _launch(self) -> subprocess.Popen[str]:
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
        return self._process

    def _listen(self, spec: RunSpec, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, ""):
            message = json.loads(line)
            if "score" in message:
                self._events.put((self, Scored(spec, message["samples"], message["score"])))
                continue
            if "error" in message:
                self._events.put((self, Failed(spec, StepError(message["error"], hint=message["hint"]))))
            else:
                run = from_json(ConvergenceRun, message["run"])
                self._events.put((self, Finished(spec, run, message["ended"])))
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


def work(address: str) -> int:
    """What a worker process does: make the runs it is told to, until its standard input ends."""
    from underwatt.jobs._torch import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_take_orders, args=(orders,), daemon=True).start()
    torch.set_num_threads(1)  # the study uses the cores by running side by side

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    try:
        job = load_job(address)
    except UnderwattError as exc:
        reply(error=exc.message, hint=exc.hint)
        return 1
    while True:
        order = orders.get()
        pool = InProcessPool(
            job, Effort(**order["effort"]), lambda scored: reply(samples=scored.samples, score=scored.score)
        )
        pool.start(RunSpec(**order["spec"]), order["hopeless_samples"])
        event = pool.wait()
        if isinstance(event, Failed):
            reply(error=event.error.message, hint=event.error.hint)
        else:
            reply(run=to_json(event.run), ended=event.ended)


def _take_orders(orders: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # from a thread, in the middle of a training: nothing here is worth keeping


if __name__ == "__main__":
    sys.exit(work(sys.argv[1]))
