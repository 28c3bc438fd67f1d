"""A training job as an external command: any framework, any Python, any language; its steps arrive as beats.

The environment variable ``UNDERWATT_BEATS`` holds the path of a named pipe. A job writes lines of text to it:

    step                      a step is complete now
    step 5120.250417          a step was complete at this time of CLOCK_MONOTONIC, in seconds
    step 5120.250417 10       ten steps were, the last of them at this time
    step - 10 32              ten steps are complete now, each of 32 samples
    ask                       what next? the answer is one line, ``32 0.250 0.000``, in the pipe ``UNDERWATT_ANSWERS``:
                              the batch size from now on, 0 to end; the seconds to wait now, and where there are any to
                              ask again after them; the seconds for which nobody needs to ask
    metric 0.913              the model scores this on held-out data
    loss 2.31                 the loss of the last step
    oom 64                    this batch size, or the one that was told last, does not fit in memory
    saved 51200               a checkpoint was written after so many samples; a resumed run is told so
    away, back                what goes on is no step, such as a test; there are steps again

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
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from underwatt.errors import JobError, StepError, WorkloadError
from underwatt.jobs import command_guard
from underwatt.jobs.faults import does_not_fit, kernel_oom_kills, says_out_of_memory
from underwatt.jobs.identity import command_info
from underwatt.jobs.job import scaled_lr
from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.records import WorkloadInfo

BEATS_VARIABLE, ANSWERS_VARIABLE = "UNDERWATT_BEATS", "UNDERWATT_ANSWERS"
EMITTER_HINT = "Have it report steps: see `python -m underwatt.jobs.emitter`, or echo step > $UNDERWATT_BEATS."
PLACE_HINT = "Put {batch_size} in it, as in: -- python train.py --batch-size {batch_size} --lr {lr}"
KILLED = 128 + signal.SIGKILL
LINES_SHOWN = 6
LINES_JUDGED = 20  # a framework's last words; what was printed long before is not why it died
HOPELESS_LINES = 100
LONGEST_LINE = 200
MOST = 10**15  # steps, samples
MOST_HEARD = 10_000  # what a job says is read no faster than it is listened to; so many scores are kept
ALIVE = ("away", "back", "saved", "oom")  # what a training says of itself that goes on
CHUNK_BYTES, OUTPUT_KEPT_BYTES = 65536, 16384


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for a command before it counts as hung."""

    first_beat_s: float = 300.0  # imports, data and the first kernels take their time
    beat_s: float = 120.0
    grace_s: float = 5.0  # from the request to end to being killed
    away_s: float = 3600.0  # a test of the model on a small board, say


@dataclass(frozen=True, slots=True)
class CommandRate:
    """The learning rate that fills ``{lr}`` in a command, and the batch size it suits."""

    lr: float | None = None
    lr_batch_size: int = 128


DEFAULT_LIMITS, DEFAULT_RATE = Limits(), CommandRate()


class CommandWorkload:
    """A command with ``{batch_size}`` in it, or one that asks, and ``{lr}`` for a learning rate; other braces stay."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        rate: CommandRate = DEFAULT_RATE,
        limits: Limits = DEFAULT_LIMITS,
        info: WorkloadInfo | None = None,
    ) -> None:
        if rate.lr is None and any("{lr}" in word for word in command):
            raise JobError(
                "The command has {lr} in it, but no learning rate was given.",
                hint="Give the learning rate and the batch size that it suits.",
            )
        self._command = tuple(command)
        self._must_ask = not any("{batch_size}" in word for word in command)
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

    def start(self, batch_size: int, **told: str) -> CommandRun:
        """Start the command at a batch size, with more variables in its environment."""
        arguments = self.arguments(batch_size)
        if shutil.which(arguments[0]) is None:
            raise JobError(
                f"There is no program {arguments[0]!r} to run.", hint="Check the spelling, or give its full path."
            )
        return CommandRun(arguments, batch_size, self._limits, told, must_ask=self._must_ask)


class CommandRun:
    """An external command under way, with a guard process that ends it whatever happens to Underwatt."""

    def __init__(
        self, arguments: list[str], batch_size: int, limits: Limits, told: Mapping[str, str], *, must_ask: bool
    ) -> None:
        self.batch_size = batch_size  # as it was started with, or told last
        self.is_away = False  # while something goes on that is no step
        self._limits, self._must_ask = limits, must_ask
        self._steps, self._alive_s = 0, time.monotonic()
        self._error: WorkloadError | None = None  # by which it was over
        self._finished = False
        self._oom_kills = kernel_oom_kills()
        self._folder = Path(tempfile.mkdtemp(prefix="underwatt-"))
        # Opened for both: opening does not wait for the other side, and nobody's leaving is the end.
        beats, self._answers = (_open_pipe(self._folder / name) for name in ("beats", "answers"))
        told = {**told, BEATS_VARIABLE: str(self._folder / "beats"), ANSWERS_VARIABLE: str(self._folder / "answers")}
        lifeline_read, self._lifeline = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [*command_guard.COMMAND, str(lifeline_read), str(limits.grace_s), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline_read],
                env={**os.environ, **told},
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
        """Wait for the next beat; ``None`` once the command has ended well. One that asks is told to go on as it is."""
        while True:
            said = self.hear()
            if isinstance(said, Beat):
                return said
            if said is Sign.EXITED:
                return None
            if said is Sign.ASK:
                self.answer(self.batch_size)
            elif isinstance(said, Said) and said.word == "oom":
                self._fail(does_not_fit(self.batch_size))

    def hear(self, until_s: float = math.inf) -> Beat | Said | Sign | None:
        """Wait for what the command says next: ``EXITED`` once it has ended well; ``None`` where that takes longer.

        Raises where it failed, hangs, or says nothing that makes sense.
        """
        if self._error is not None:
            raise self._error
        if self._finished:
            return Sign.EXITED
        limits = self._limits
        limit_s = limits.away_s if self.is_away else limits.beat_s if self._steps else limits.first_beat_s
        try:
            event = self._listener.events.get(
                timeout=max(0.0, min(self._alive_s + limit_s, until_s) - time.monotonic())
            )
        except queue.Empty:
            event = None
        if isinstance(event, Beat) or event is Sign.ASK or (isinstance(event, Said) and event.word in ALIVE):
            self._alive_s = time.monotonic()
        elif not isinstance(event, Sign) and time.monotonic() >= self._alive_s + limit_s:
            self._fail(self._hung(limit_s))
        if isinstance(event, Beat):
            self._steps += event.steps
        if (error := self._judge(event)) is not None:
            self._fail(error)
        return self.hear(until_s) if event is Sign.GARBAGE else event

    def _judge(self, event: Beat | Said | Sign | None) -> WorkloadError | None:
        """What is wrong with a command that says this."""
        if event is Sign.ASK:
            self._must_ask = False
        elif isinstance(event, Beat) and self._must_ask:
            return JobError("The command neither asks for a batch size nor has a place for it.", hint=PLACE_HINT)
        elif event is Sign.EXITED:
            self.stop()
            self._finished = True
            return self._judge_exit(self._guard.returncode)
        elif event is Sign.GARBAGE and not self._steps:
            return self._no_beat()
        return None

    def answer(self, batch_size: int, wait_s: float = 0.0, calm_s: float = 0.0) -> None:
        """Tell a command that has asked what to do."""
        self.batch_size = batch_size or self.batch_size
        with contextlib.suppress(OSError):  # the pipe is full: it reads none of its answers
            os.write(self._answers, b"%d %.6f %.3f\n" % (batch_size, wait_s, calm_s))

    def _fail(self, error: WorkloadError) -> NoReturn:
        self._error = error
        self.stop()
        raise error

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
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        # Closing the lifeline is enough: the guard does the rest.
        for end in (getattr(self, "_lifeline", -1), getattr(self, "_answers", -1)):
            if end >= 0:
                os.close(end)

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
            return does_not_fit(self.batch_size)
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


def _open_pipe(path: Path) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class StepLine:
    """Steps are complete, at a time and of a batch size where the sender named them."""

    at_s: float | None = None
    steps: int = 1
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A line that is neither about steps nor a question."""

    word: str  # "metric", "loss", "oom", "saved", "away" or "back"
    value: float | None = None


class Sign(Enum):
    """What is heard of a job beside its steps and what it says of them."""

    ASK = "what next?"
    GARBAGE = "so many lines were not of the protocol that waiting for a beat makes no sense"
    EXITED = "the job and all it started are gone"


def parse_line(raw: bytes) -> StepLine | Said | Sign | None:
    """What a line says, or ``None`` for one that is not of this protocol."""
    try:
        match raw.decode("ascii").split():
            case ["step"]:
                return StepLine()
            case ["step", at, *counts] if len(counts) <= 2:
                numbers = [_count(word) for word in counts]
                return StepLine(_time_s(at), *numbers)
            case ["ask"]:
                return Sign.ASK
            case ["metric" | "loss" as word, value]:
                return Said(word, float(value) if word == "loss" else _finite(value))
            case ["oom" | "saved" as word, count]:
                return Said(word, _count(count, least=int(word == "oom")))
            case ["oom" | "saved" | "away" | "back" as word]:
                return Said(word)
    except ValueError:
        pass
    return None


def _count(word: str, least: int = 1) -> int:
    if not least <= (value := int(word)) <= MOST:
        raise ValueError(word)
    return value


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
        self.metrics: deque[float] = deque(maxlen=MOST_HEARD)  # scores reported so far
        self.events: queue.SimpleQueue[Beat | Said | Sign] = queue.SimpleQueue()
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
                if self._beats in ready and self.events.qsize() < MOST_HEARD:
                    self._read_beats()
                elif self._beats in ready:
                    time.sleep(0.01)
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
            if isinstance(line, StepLine) and line.at_s is None and line.batch_size is None:
                unstamped += line.steps  # all of one chunk arrived at one time: one beat
                continue
            if unstamped and line is not None:
                self._beat(now_s, unstamped, now_s)
                unstamped = 0
            if isinstance(line, StepLine):
                self._beat(now_s if line.at_s is None else line.at_s, line.steps, now_s, line.batch_size)
            elif line is not None:
                if isinstance(line, Said) and line.word == "metric" and line.value is not None:
                    self.metrics.append(line.value)
                self.events.put(line)
            else:
                self.garbage_lines += 1
                self.garbage_example = self.garbage_example or raw[:60].decode("utf-8", "replace")
        if unstamped:
            self._beat(now_s, unstamped, now_s)
        if garbage_before < HOPELESS_LINES <= self.garbage_lines:
            self.events.put(Sign.GARBAGE)

    def _beat(self, at_s: float, steps: int, now_s: float, batch_size: int | None = None) -> None:
        # A sender's time is believed only where it can be true: not before the last beat, not in the future.
        # In a container with a clock of its own it never is, and the time of arrival is as good.
        self._last_s = at_s if self._last_s <= at_s <= now_s else now_s
        self.events.put(Beat(self._last_s, steps, batch_size))
