"""What the faults of ``faults.py`` share: a try and what came of it, boards made of files, trainings and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from run_world import Hurt, Numbers, log_of, tuned, virtual
from train_world import blobs, same, state_in, train

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import UnderwattError
from underwatt.events import Noted
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from underwatt.adapters.tuner import Tuner
    from underwatt.jobs.job import Job

LIMIT = 800  # samples of a training that is compared with one to which nothing happened: 50 steps
STEPS = LIMIT // 16
BUDGETS_W = {"nano": 4.0, "tx2-nx": 9.0, "orin-nano": 9.0}


@dataclass
class Try:
    """One time that a fault is tried: its own folder, and chance."""

    chance: Random
    folder: Path


@dataclass(frozen=True)
class Found:
    """What came of a try: was the device as before, was the user told, was anything lost; and in which words."""

    restored: bool
    said: bool
    lost: bool = False
    words: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault and how it is tried."""

    name: str
    call: Callable[[Try], Found]


@dataclass
class Faults:
    """The faults of a module, in order."""

    all: list[Fault] = field(default_factory=list)

    def __call__(self, name: str) -> Callable[[Callable[[Try], Found]], Callable[[Try], Found]]:
        """Decorates the function that tries a fault."""

        def add(call: Callable[[Try], Found]) -> Callable[[Try], Found]:
            self.all.append(Fault(name, call))
            return call

        return add


@contextlib.contextmanager
def caught(*kinds: type[BaseException]) -> Iterator[list[BaseException]]:
    """What was raised in the block; whatever is not of these kinds goes on as it is."""
    found: list[BaseException] = []
    try:
        yield found
    except kinds as exc:
        found.append(exc)


def told(errors: list[BaseException], *words: str) -> bool:
    """Whether there is one error of ours, in one line that says these words, with what to do about it."""
    if len(errors) != 1 or not isinstance(errors[0], UnderwattError):
        return False
    text = str(errors[0])
    return "\n" not in errors[0].message and bool(errors[0].hint) and all(word in text for word in words)


def words_of(errors: list[BaseException]) -> str:
    """The words of what was raised."""
    return "; ".join(f"{type(error).__name__}: {error}" for error in errors)


def notes_in(folder: Path, level: str = "warning") -> list[str]:
    """The notes of a run's log."""
    return [note.text for note in read_log(folder / "log.jsonl").of(Noted) if note.level == level]


def ended_as(folder: Path, outcome: str) -> bool:
    """Whether the log says once how the run ended, and that the device was put back."""
    end = log_of(folder).end
    return end is not None and (end.outcome, end.restored) == (outcome, True)


# Boards


def files(root: Path) -> dict[str, bytes]:
    """Every file of a board, byte for byte."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def board_of_files(at: Try) -> tuple[JetsonDevice, Path]:
    """The production driver on the files of a board that no kernel moves."""
    root = at.folder / "board"
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), root)
    return JetsonDevice(root), root


def any_mode(device: Any, chance: Random) -> Any:
    return device.space[chance.randrange(len(device.space))]


def any_board(chance: Random, **more: Any) -> tuple[Any, float]:
    """A simulated board that can be hurt, and watts that it can hold."""
    name = chance.choice(sorted(BUDGETS_W))
    return Hurt(virtual(name, chance.randrange(100)), **more), BUDGETS_W[name]


# Trainings


class Looped:
    """A loop over numbered samples; it may be ended at any moment, and what was trained is known after it."""

    def __init__(self, tuner: Tuner, samples: int = 2000) -> None:
        self.tuner, self.samples = tuner, samples
        self.parts: list[list[int]] = []  # passes, whole or not
        self.passes: list[list[int]] = []  # those that came to their end

    def train(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        """Train for simulated seconds."""
        until_s = self.tuner.elapsed_s + seconds
        while self.tuner.elapsed_s < until_s:
            self.parts.append([])
            for batch in self.tuner.loader(Numbers(self.samples), shuffle=True):
                each()
                self.tuner.step()
                self.parts[-1] += batch.tolist()
                if self.tuner.elapsed_s >= until_s:
                    return
            self.passes.append(self.parts[-1])

    def lost(self) -> bool:
        """Whether a sample was seen twice in a pass, or a pass that came to its end left some out."""
        twice = any(len(set(part)) != len(part) for part in self.parts)
        return twice or any(len(part) != self.samples for part in self.passes)


class Loop:
    """A tuned loop in ``folder / "run"``, the errors that ended it, and whether the device is as before."""

    def __init__(self, at: Try, device: Any, power_w: float, **more: Any) -> None:
        self.folder, self._device = at.folder / "run", device
        self.before = dict(device.snapshot())
        self.errors: list[BaseException] = []
        self._tuner = tuned(device, folder=self.folder, budget_w=power_w, **more)
        self.trained = Looped(self._tuner)

    def __enter__(self) -> Looped:
        self._tuner.__enter__()
        return self.trained

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            self._tuner.__exit__(kind, error, trace)
        except BaseException as exc:  # noqa: BLE001 - it is looked at afterwards
            error = exc
        if error is not None:
            self.errors.append(error)
        return True

    def found(self, *, said: bool, lost: bool = False) -> Found:
        """What came of it, at its end."""
        restored = dict(self._device.snapshot()) == self.before
        return Found(restored, said, lost or self.trained.lost(), words_of(self.errors))


_whole: dict[int, Any] = {}  # the state of a training to which nothing happened, by the number of its workers


def whole(at: Try, job: Job) -> Any:
    """The state after ``LIMIT`` samples of a job that nothing happens to."""
    if job.num_workers not in _whole:
        folder = at.folder / "whole" / "run"
        folder.parent.mkdir()
        train(folder, job, limit=LIMIT)
        _whole[job.num_workers] = state_in(folder)
    return _whole[job.num_workers]


def differs_when_resumed(at: Try, job: Job, **more: Any) -> bool:
    """Go on with the run in ``folder / "run"``; whether its model is another than where nothing had happened."""
    train(at.folder / "run", job, limit=LIMIT, resume=True, **more)
    return not same(state_in(at.folder / "run"), whole(at, job))


def endless_job(**more: Any) -> Job:
    """A job that trains until it is ended."""
    return blobs(target=1.01, **more)


# Processes


class Child:
    """A copy of this process that does something until it ends or is ended; its exit code says how."""

    def __init__(self, work: Callable[[], object]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            self._live(work, write)
        os.close(write)
        self._words = os.fdopen(read, "rb")
        self.status = 0

    @staticmethod
    def _live(work: Callable[[], object], write: int) -> None:
        code = 0
        try:
            os.dup2(write, 2)
            os.dup2(write, 1)
            # What was a file can seek, which a pipe cannot: the streams are opened anew.
            sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException as exc:  # noqa: BLE001 - its words are what is looked at
            os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
            code = 1
        finally:
            os._exit(code)

    def send(self, number: int) -> bool:
        """Send a signal; whether it is still alive."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        os.kill(self.pid, number)
        return True

    def wait(self, within_s: float = 30.0) -> tuple[int, str]:
        """How it ended (minus the number of a signal that nobody handled) and what it said; killed where it hangs."""
        until_s = time.monotonic() + within_s
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > until_s:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        with self._words as words:
            said = words.read().decode("utf-8", "replace")
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), said


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for something to happen in another process."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.002)
