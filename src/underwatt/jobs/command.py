"""A training job as an external command: any framework, any Python, any language; its steps arrive as beats.

The environment variable ``UNDERWATT_BEATS`` holds the path of a named pipe. A job writes lines of text to it:

    step                      a step is complete now
    step 5120.250417          a step was complete at this time of CLOCK_MONOTONIC, in seconds
    step 5120.250417 10       ten steps were, the last of them at this time
    step - 10                 ten steps are complete now
    metric 0.913              the model scores this on held-out data
    oom                       this batch size does not fit in memory

The pipe may be opened once or for each line (``echo step > "$UNDERWATT_BEATS"``), by any number of processes. A line
that is none of these is counted and otherwise ignored. The job's end needs no line: its exit code says how it went.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING

from underwatt.errors import JobError, StepError, WorkloadError
from underwatt.jobs import command_guard
from underwatt.jobs.faults import does_not_fit, kernel_oom_kills, says_out_of_memory
from underwatt.jobs.identity import command_info
from underwatt.jobs.job import scaled_lr
from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import WorkloadInfo

BEATS_VARIABLE = "UNDERWATT_BEATS"
EMITTER_HINT = "Have it report steps: see `python -m underwatt.jobs.emitter`, or echo step > $UNDERWATT_BEATS."
KILLED = 128 + signal.SIGKILL
LINES_SHOWN = 6
LINES_JUDGED = 20  # a framework's last words; what was printed long before is not why it died
HOPELESS_LINES = 100
LONGEST_LINE = 200
MOST_STEPS = 10**9
CHUNK_BYTES, OUTPUT_KEPT_BYTES = 65536, 16384


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for a command before it counts as hung."""

    first_beat_s: float = 300.0  # imports, data and the first kernels take their time
    beat_s: float = 120.0
    grace_s: float = 5.0  # from the request to end to being killed


@dataclass(frozen=True, slots=True)
class CommandRate:
    """The learning rate that fills ``{lr}`` in a command, and the batch size it suits."""

    lr: float | None = None
    lr_batch_size: int = 128


DEFAULT_LIMITS, DEFAULT_RATE = Limits(), CommandRate()


class CommandWorkload:
    """A command with ``{batch_size}`` in it, and ``{lr}`` where it takes a learning rate; other braces stay."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        rate: CommandRate = DEFAULT_RATE,
        limits: Limits = DEFAULT_LIMITS,
        info: WorkloadInfo | None = None,
    ) -> None:
        if not any("{batch_size}" in word for word in command):
            raise JobError(
                "The command does not say where the batch size goes.",
                hint="Put {batch_size} in it, as in: -- python train.py --batch-size {batch_size} --lr {lr}",
            )
        if rate.lr is None and any("{lr}" in word for word in command):
            raise JobError(
                "The command has {lr} in it, but no learning rate was given.",
                hint="Give the learning rate and the batch size that it suits.",
            )
        self._command = tuple(command)
        self._rate, self._limits = rate, limits
        self.info = info or command_info(self._command)

    def cost(self) -> None:
        """A foreign program's cost cannot be counted."""
        return

    def arguments(self, batch_size: int) -> list[str]:
        """The command as it is run at a batch size."""
        words = [word.replace("{batch_size}", str(batch_size)) for word in self._command]
        if self._rate.lr is None:
            return words
        lr = scaled_lr(self._rate.lr, self._rate.lr_batch_size, batch_size, "sqrt")
        return [word.replace("{lr}", f"{lr:.9g}") for word in words]

    def start(self, batch_size: int) -> CommandRun:
        """Start the command at a batch size."""
        arguments = self.arguments(batch_size)
        if shutil.which(arguments[0]) is None:
            raise JobError(
                f"There is no program {arguments[0]!r} to run.", hint="Check the spelling, or give its full path."
            )
        return CommandRun(arguments, batch_size, self._limits)


class CommandRun:
    """An external command under way, with a guard process that ends it whatever happens to Underwatt."""

    def __init__(self, arguments: list[str], batch_size: int, limits: Limits) -> None:
        self._batch_size, self._limits = batch_size, limits
        self._steps = 0
        self._error: WorkloadError | None = None  # by which it was over
        self._finished = False
        self._oom_kills = kernel_oom_kills()
        self._folder = Path(tempfile.mkdtemp(prefix="underwatt-"))
        fifo = self._folder / "beats"
        os.mkfifo(fifo, 0o600)
        # Opened for both: opening does not wait for a writer, and no writer's leaving is the end.
        beats = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        lifeline_read, self._lifeline = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [*command_guard.COMMAND, str(lifeline_read), str(limits.grace_s), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline_read],
                env={**os.environ, BEATS_VARIABLE: str(fifo)},
                start_new_session=True,
            )
        finally:
            os.close(lifeline_read)
        assert self._guard.stdout is not None
        self._listener = Listener(beats, self._guard.stdout)

    @property
    def metrics(self) -> tuple[float, ...]:
        """The scores that the command has reported so far."""
        return tuple(self._listener.metrics)

    def step(self) -> Beat | None:
        """Wait for the next beat; ``None`` once the command has ended well after at least one."""
        if self._error is not None:
            raise self._error
        if self._finished:
            return None
        limit_s = self._limits.beat_s if self._steps else self._limits.first_beat_s
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                event = self._listener.events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self._error = self._hung(limit_s)
            else:
                if isinstance(event, Beat):
                    self._steps += event.steps
                    return event
                if event is Sign.EXITED:
                    self.stop()
                    self._finished = True
                    self._error = self._judge_exit(self._guard.returncode)
                elif event is Sign.OOM:
                    self._error = does_not_fit(self._batch_size)
                elif self._steps:
                    continue
                else:
                    self._error = self._no_beat()
            self.stop()
            return self.step()

    def stop(self) -> None:
        """End the command and everything it started; returns when all are gone."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=self._limits.grace_s + 5.0)
        if self._guard.returncode is None or self._guard.returncode < 0:  # stuck or killed: do its work
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        self._listener.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        # Closing the lifeline is enough: the guard does the rest.
        if getattr(self, "_lifeline", -1) >= 0:
            os.close(self._lifeline)

    def _hung(self, limit_s: float) -> WorkloadError:
        if self._steps:
            return StepError(
                f"The command reported {self._steps} steps and then none for {limit_s:g} s, so it was ended.",
                hint=f"Raise the limit if a step may take that long. {self._last_lines()}",
            )
        what = f"The command ran for {limit_s:g} s without reporting a step, so it was ended."
        return self._no_beat(what, f" {self._last_lines()}")

    def _no_beat(self, what: str = "", last_lines: str = "") -> WorkloadError:
        """The error of a command that reported no step; lines that are no beats explain it best."""
        if count := self._listener.garbage_lines:
            example = self._listener.garbage_example
            what, last_lines = (
                f"The command sent {count} lines that are not beats, such as {example!r}, and no beat.",
                "",
            )
        return StepError(what, hint=f"{EMITTER_HINT}{last_lines}")

    def _judge_exit(self, code: int) -> WorkloadError | None:
        if code == 0:
            return None if self._steps else self._no_beat("The command ended without reporting a step.")
        lines = self._listener.last_lines()
        if says_out_of_memory("\n".join(lines[-LINES_JUDGED:])) or (
            code == KILLED and kernel_oom_kills() > self._oom_kills
        ):
            return does_not_fit(self._batch_size)
        how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        if code < 0:
            how = f"lost its guard process to signal {-code}"
        last = lines[-1].strip()[:300].rstrip(".") if lines else "it printed nothing"
        return StepError(
            f"The command {how} after {self._steps} steps: {last}.", hint=self._last_lines() if len(lines) > 1 else ""
        )

    def _last_lines(self) -> str:
        lines = self._listener.last_lines()[-LINES_SHOWN:]
        return "Its last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It printed nothing."


@dataclass(frozen=True, slots=True)
class StepLine:
    """Steps are complete, at a time where the sender named one."""

    at_s: float | None = None
    steps: int = 1


class Sign(Enum):
    """What is heard of a job beside its steps and scores."""

    OOM = "the batch size does not fit in memory"
    GARBAGE = "so many lines were not of the protocol that waiting for a beat makes no sense"
    EXITED = "the job and all it started are gone"


def parse_line(raw: bytes) -> StepLine | float | Sign | None:
    """What a line says, a number being a score, or ``None`` for one that is not of this protocol."""
    try:
        match raw.decode("ascii").split():
            case ["step"]:
                return StepLine()
            case ["step", at]:
                return StepLine(_time_s(at))
            case ["step", at, count] if 1 <= int(count) <= MOST_STEPS:
                return StepLine(_time_s(at), int(count))
            case ["metric", value]:
                return _finite(value)
            case ["oom"]:
                return Sign.OOM
    except ValueError:
        pass
    return None


def _time_s(word: str) -> float | None:
    return None if word == "-" else _finite(word)


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


def split_lines(stream: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of a stream, empty ones left out, and its rest; one that never ends is cut at the longest."""
    *lines, rest = stream.split(b"\n")
    if len(rest) > LONGEST_LINE:
        lines.append(rest[:LONGEST_LINE])
        rest = b""
    return [line for line in lines if line.strip()], rest


class Listener:
    """Reads a job's beats and output in a thread of its own, so that the job never waits for Underwatt.

    It listens until the output ends, which is when the last process that could write to it is gone.
    """

    def __init__(self, beats: int, output: IO[bytes]) -> None:
        self._beats, self._rest = beats, b""
        self._last_s = time.monotonic()
        self.garbage_lines, self.garbage_example = 0, ""  # lines that are not of the protocol, and the first of them
        self.metrics: list[float] = []  # scores reported so far
        self.events: queue.SimpleQueue[Beat | Sign] = queue.SimpleQueue()
        self._output = b""
        self._give_up_s = math.inf
        self._thread = threading.Thread(target=self._listen, args=(output,), name="underwatt-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let go of the pipe, once all that was said has been heard or after a short while."""
        self._give_up_s = time.monotonic() + 0.5
        self._thread.join()

    def last_lines(self) -> list[str]:
        """The end of what the job has printed."""
        return self._output.decode("utf-8", "replace").strip().splitlines()

    def _listen(self, output: IO[bytes]) -> None:
        with selectors.DefaultSelector() as selector, output:
            selector.register(self._beats, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            over = False
            while not over:
                ready = [key.fd for key, _ in selector.select(timeout=0.2)]
                if self._beats in ready:
                    self._read_beats()
                if output.fileno() in ready:
                    chunk = os.read(output.fileno(), CHUNK_BYTES)
                    self._output = (self._output + chunk)[-OUTPUT_KEPT_BYTES:]
                    over = not chunk
                over = over or time.monotonic() > self._give_up_s
        self._read_beats()
        os.close(self._beats)
        self.events.put(Sign.EXITED)

    def _read_beats(self) -> None:
        try:
            chunk = os.read(self._beats, CHUNK_BYTES)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        unstamped, garbage_before = 0, self.garbage_lines
        lines, self._rest = split_lines(self._rest + chunk)
        for raw in lines:
            line = parse_line(raw)
            if isinstance(line, StepLine):
                if line.at_s is None:
                    unstamped += line.steps  # all of one chunk arrived at one time: one beat
                else:
                    self._beat(line.at_s, line.steps, now_s)
            elif isinstance(line, float):
                self.metrics.append(line)
            elif line is not None:
                self.events.put(line)
            else:
                self.garbage_lines += 1
                self.garbage_example = self.garbage_example or raw[:60].decode("utf-8", "replace")
        if unstamped:
            self._beat(now_s, unstamped, now_s)
        if garbage_before < HOPELESS_LINES <= self.garbage_lines:
            self.events.put(Sign.GARBAGE)

    def _beat(self, at_s: float, steps: int, now_s: float) -> None:
        # A sender's time is believed only where it can be true: not before the last beat, not in the future.
        # In a container with a clock of its own it never is, and the time of arrival is as good.
        self._last_s = at_s if self._last_s <= at_s <= now_s else now_s
        self.events.put(Beat(self._last_s, steps))
