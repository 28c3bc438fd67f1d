"""A training job as an external command: any framework, any Python, any language; its steps arrive as beats."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.errors import JobError, StepError, WorkloadError
from underwatt.workload import guard
from underwatt.workload.identity import command_info
from underwatt.workload.listener import Exited, Garbage, Listener
from underwatt.workload.lr import LrRule, scaled_lr
from underwatt.workload.oom import does_not_fit, kernel_oom_kills, says_out_of_memory
from underwatt.workload.protocol import BEATS_VARIABLE, OomLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import WorkloadInfo
    from underwatt.workload.base import Beat

EMITTER_HINT = "Have it report steps: see `python -m underwatt.workload.emitter`, or echo step > $UNDERWATT_BEATS."
KILLED = 128 + signal.SIGKILL
LINES_SHOWN = 6
LINES_JUDGED = 20  # a framework's last words; what was printed long before is not why it died


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait for a command before it counts as hung."""

    first_beat_s: float = 300.0  # imports, data and the first kernels take their time
    beat_s: float = 120.0
    grace_s: float = 5.0  # from the request to end to being killed


DEFAULT_LIMITS = Limits()


class CommandWorkload:
    """A command with ``{batch_size}`` in it, and ``{lr}`` where it takes a learning rate; other braces stay."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        lr: float | None = None,
        lr_batch_size: int = 128,
        lr_rule: LrRule = "sqrt",
        limits: Limits = DEFAULT_LIMITS,
        info: WorkloadInfo | None = None,
    ) -> None:
        if not any("{batch_size}" in word for word in command):
            raise JobError(
                "The command does not say where the batch size goes.",
                hint="Put {batch_size} in it, as in: -- python train.py --batch-size {batch_size} --lr {lr}",
            )
        if lr is None and any("{lr}" in word for word in command):
            raise JobError(
                "The command has {lr} in it, but no learning rate was given.",
                hint="Give the learning rate and the batch size that it suits.",
            )
        self._command = tuple(command)
        self._lr = lr
        self._lr_batch_size = lr_batch_size
        self._lr_rule = lr_rule
        self._limits = limits
        self.info = info or command_info(self._command)

    def cost(self) -> None:
        """A foreign program's cost cannot be counted."""
        return

    def arguments(self, batch_size: int) -> list[str]:
        """The command as it is run at a batch size."""
        words = [word.replace("{batch_size}", str(batch_size)) for word in self._command]
        if self._lr is None:
            return words
        lr = scaled_lr(self._lr, self._lr_batch_size, batch_size, self._lr_rule)
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
        self._batch_size = batch_size
        self._limits = limits
        self._steps = 0
        self._garbage = Garbage()
        self._over: WorkloadError | None = None
        self._finished = False
        self._oom_kills = kernel_oom_kills()
        self._folder = Path(tempfile.mkdtemp(prefix="underwatt-"))
        fifo = self._folder / "beats"
        os.mkfifo(fifo, 0o600)
        lifeline_read, self._lifeline = os.pipe()
        try:
            self._listener = Listener(fifo)
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(lifeline_read), str(limits.grace_s), *arguments],
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
        self._listener.start(self._guard.stdout)

    @property
    def metrics(self) -> tuple[float, ...]:
        """The scores that the command has reported so far."""
        return self._listener.metrics

    def step(self) -> Beat | None:
        """Wait for the next beat; ``None`` once the command has ended well after at least one."""
        if self._over is not None:
            raise self._over
        if self._finished:
            return None
        limit_s = self._limits.beat_s if self._steps else self._limits.first_beat_s
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                event = self._listener.events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise self._ended_by(self._hung(limit_s)) from None
            if isinstance(event, Garbage):
                self._garbage = event
                if not self._steps and event.hopeless:
                    raise self._ended_by(self._talks_garbage())
            elif isinstance(event, OomLine):
                raise self._ended_by(does_not_fit(self._batch_size))
            elif isinstance(event, Exited):
                self.stop()
                self._finished = True
                self._over = self._judge_exit(self._guard.returncode)
                return self.step()
            else:
                self._steps += event.steps
                return event

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

    def _ended_by(self, error: WorkloadError) -> WorkloadError:
        self._over = error
        self.stop()
        return error

    def _hung(self, limit_s: float) -> WorkloadError:
        if self._steps:
            return StepError(
                f"The command reported {self._steps} steps and then none for {limit_s:g} s, so it was ended.",
                hint=f"Raise the limit if a step may take that long. {self._last_lines()}",
            )
        if self._garbage.lines:
            return self._talks_garbage()
        return StepError(
            f"The command ran for {limit_s:g} s without reporting a step, so it was ended.",
            hint=f"{EMITTER_HINT} {self._last_lines()}",
        )

    def _talks_garbage(self) -> WorkloadError:
        return StepError(
            f"The command sent {self._garbage.lines} lines that are not beats, such as {self._garbage.example!r}, "
            "and no beat.",
            hint=EMITTER_HINT,
        )

    def _judge_exit(self, code: int) -> WorkloadError | None:
        output = self._listener.output_tail
        if code == 0:
            if self._steps:
                return None
            if self._garbage.lines:
                return self._talks_garbage()
            return StepError("The command ended without reporting a step.", hint=EMITTER_HINT)
        lines = output.strip().splitlines()
        if says_out_of_memory("\n".join(lines[-LINES_JUDGED:])) or (
            code == KILLED and kernel_oom_kills() > self._oom_kills
        ):
            return does_not_fit(self._batch_size)
        how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        if code < 0:
            how = f"lost its guard process to signal {-code}"
        last = lines[-1:] or ["it printed nothing"]
        return StepError(
            f"The command {how} after {self._steps} steps: {last[0].strip()[:300].rstrip('.')}.",
            hint=self._last_lines() if len(lines) > 1 else "",
        )

    def _last_lines(self) -> str:
        lines = self._listener.output_tail.strip().splitlines()[-LINES_SHOWN:]
        return "Its last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It printed nothing."
