"""Faults in a job that trains under a budget, with checkpoints, on a simulated board: is its model what it would be?"""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from run_world import Hurt, virtual
from train_world import happening, same, state_in, train

from _faults_device import SIGNALS
from _faults_world import (
    LIMIT,
    STEPS,
    Child,
    Faults,
    Found,
    Try,
    board_of_files,
    caught,
    differs_when_resumed,
    ended_as,
    endless_job,
    files,
    notes_in,
    told,
    wait_until,
    whole,
    words_of,
)
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.device.session import restore
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import OutOfMemoryError, SensorError, StepError, UnderwattError
from underwatt.events import Noted, Started
from underwatt.jobs import checkpoint, training_loop
from underwatt.jobs.training import Training
from underwatt.runlog.log import read_log
from underwatt.store import schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from underwatt.jobs.job import Job

faults = Faults()
SAVE_OFTEN_S = 0.02  # between checkpoints, so that a kill falls into the writing of one now and then


class InStep:
    """Does something in the middle of a certain step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.left, self.action = step, action

    def __call__(self, _: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()


def any_step(chance: Random) -> int:
    return chance.randrange(1, STEPS)


def interrupted(at: Try, job: Job, *kinds: type[BaseException], **more: Any) -> tuple[Any, list[BaseException]]:
    """Train until something ends it; whether the board is as before, and what ended it."""
    device = Hurt(virtual("nano"))
    before = dict(device.snapshot())
    with caught(*kinds) as errors:
        train(at.folder / "run", job, limit=LIMIT, device=device, **more)
    return dict(device.snapshot()) == before, errors


@faults("a signal in a step of a job")
def signal_in_step(at: Try) -> Found:
    job, number = endless_job(), at.chance.choice(SIGNALS)
    with happening(InStep(any_step(at.chance), lambda: os.kill(os.getpid(), number))):
        restored, errors = interrupted(at, job, KeyboardInterrupt, SystemExit)
    said = len(errors) == 1 and ended_as(at.folder / "run", "interrupted")
    return Found(restored, said, differs_when_resumed(at, job), words_of(errors))


@faults("two signals in a step of a job")
def signals_in_step(at: Try) -> Found:
    job = endless_job()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), at.chance.choice(SIGNALS))

    with happening(InStep(any_step(at.chance), twice)):
        restored, errors = interrupted(at, job, KeyboardInterrupt, SystemExit)
    said = len(errors) == 1 and ended_as(at.folder / "run", "interrupted")
    return Found(restored, said, differs_when_resumed(at, job), words_of(errors))


@faults("an interrupted test of the model")
def interrupted_test(at: Try) -> Found:
    job, evaluate, left = endless_job(), Training.evaluate, at.chance.randrange(1, 4)

    def interrupting(self: Training, *how: Any) -> float:
        nonlocal left
        score, left = evaluate(self, *how), left - 1
        if left == 0:
            raise KeyboardInterrupt
        return score

    Training.evaluate = interrupting  # type: ignore[method-assign]
    try:
        restored, errors = interrupted(at, job, KeyboardInterrupt)
    finally:
        Training.evaluate = evaluate  # type: ignore[method-assign]
    said = len(errors) == 1 and ended_as(at.folder / "run", "interrupted")
    return Found(restored, said, differs_when_resumed(at, job), words_of(errors))


@faults("a step that fails")
def failing_step(at: Try) -> Found:
    job, kind = endless_job(), at.chance.choice(("shapes", "value", "lookup"))

    def fail() -> None:
        if kind == "shapes":
            torch.zeros(3, 4) @ torch.zeros(5, 6)
        if kind == "value":
            raise ValueError("a layer is missing")
        {}["missing"]

    with happening(InStep(any_step(at.chance), fail)):
        restored, errors = interrupted(at, job, StepError)
    said = len(errors) == 1 and f"{__file__}, line " in str(errors[0]) and ended_as(at.folder / "run", "failed")
    return Found(restored, said, differs_when_resumed(at, job), words_of(errors))


@faults("memory that runs out in a job")
def full_memory(at: Try) -> Found:
    full, large, trained_on = at.chance.randrange(1, 30), 0, list[int]()

    def memory(numbers: torch.Tensor) -> None:
        nonlocal large
        if len(numbers) > 8:
            large += 1
            if large > full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        trained_on.extend(numbers.tolist())

    with happening(memory):
        restored, errors = interrupted(at, endless_job(batch_sizes=(8, 32)), UnderwattError, every=10**9)
    passes = [trained_on[begin : begin + 256] for begin in range(0, len(trained_on), 256)]
    lost = any(len(set(one)) != len(one) for one in passes) or len(trained_on) < LIMIT
    said = not errors and (large <= full or any("does not fit" in text for text in notes_in(at.folder / "run")))
    return Found(restored, said, lost, words_of(errors))


class Half(torch.optim.SGD):
    """Changes a part of the model, and then there is no memory for the rest."""

    left = 0

    def step(self, closure: Any = None) -> Any:
        Half.left -= 1
        if Half.left == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


@faults("memory that runs out in a job's optimizer")
def half_changed(at: Try) -> Found:
    job = endless_job(optimizer=Half)
    Half.left = 0
    (at.folder / "plain").mkdir()
    train(at.folder / "plain" / "run", job, limit=LIMIT)
    Half.left = any_step(at.chance)
    restored, errors = interrupted(at, job, OutOfMemoryError)
    said = told(errors, "half changed", "--resume") and ended_as(at.folder / "run", "failed")
    train(at.folder / "run", job, limit=LIMIT, resume=True)
    lost = not same(state_in(at.folder / "run"), state_in(at.folder / "plain" / "run"))
    return Found(restored, said, lost, words_of(errors))


@faults("a loss that is no number, in a job")
def diverged(at: Try) -> Found:
    after, odd, seen = any_step(at.chance), at.chance.choice((math.nan, math.inf)), 0
    training_loop.CHECKPOINT_PERIOD_S = 0.0

    def poisoned(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        loss = torch.nn.functional.cross_entropy(output, targets)
        if output.device.type == "meta" or not torch.is_grad_enabled():
            return loss
        seen += 1
        return loss * odd if seen > after else loss

    device = virtual("nano")
    before = dict(device.snapshot())
    trained = train(at.folder / "run", endless_job(loss=poisoned), limit=1e6, device=device)
    state, notes = state_in(at.folder / "run"), notes_in(at.folder / "run")
    said = trained.outcome == "diverged" and any(str(at.folder / "run" / checkpoint.NAME) in text for text in notes)
    finite = all(bool(torch.isfinite(value).all()) for value in state["model"].values())
    lost = not finite or state["steps"] != after
    return Found(dict(device.snapshot()) == before, said and ended_as(at.folder / "run", "diverged"), lost, str(notes))


class Dying(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Data whose loading kills the worker that does it, once a file is there."""

    def __init__(self, parts: tuple[torch.Tensor, ...], sign: Path) -> None:
        self.parts, self.sign = parts, sign

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if self.sign.exists() and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return tuple(part[index] for part in self.parts)


@faults("a loader's worker that dies")
def dying_worker(at: Try) -> Found:
    plain, sign, after = endless_job(num_workers=1), at.folder / "die", 16 * any_step(at.chance)
    job = replace(plain, data=Dying(plain.data, sign))
    reference = whole(at, job)
    restored, errors = interrupted(
        at, job, UnderwattError, watch=lambda pilot: sign.touch() if pilot.samples >= after else None
    )
    said = not errors or (told(errors, "worker", "--resume") and ended_as(at.folder / "run", "failed"))
    sign.unlink(missing_ok=True)
    train(at.folder / "run", job, limit=LIMIT, resume=True)
    return Found(restored, said, not same(state_in(at.folder / "run"), reference), words_of(errors))


@faults("a listener that raises")
def failing_listener(at: Try) -> Found:
    job, left, folder = endless_job(), at.chance.randrange(1, 12), at.folder / "run"

    def listen(_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise ValueError("a listener's own")

    restored, errors = interrupted(at, job, ValueError, listener=listen)
    # Where it raises when it is told of the end, the log holds that end already.
    said = left > 0 or (len(errors) == 1 and (ended_as(folder, "failed") or ended_as(folder, "limit")))
    lost = differs_when_resumed(at, job) if checkpoint.exists(folder) else False
    return Found(restored, said, lost, words_of(errors))


@faults("a callback that raises")
def failing_watch(at: Try) -> Found:
    job, step = endless_job(), any_step(at.chance)
    error = at.chance.choice((ValueError("a callback's own"), KeyboardInterrupt(), SystemExit(2)))

    def watch(pilot: Any) -> None:
        if pilot.steps >= step:
            raise error

    restored, errors = interrupted(at, job, type(error), watch=watch)
    outcome = "failed" if isinstance(error, ValueError) else "interrupted"
    said = errors == [error] and ended_as(at.folder / "run", outcome)
    return Found(restored, said, differs_when_resumed(at, job), words_of(errors))


@faults("a sensor that is lost during a job")
def lost_sensor(at: Try) -> Found:
    job, step, device = endless_job(), any_step(at.chance), Hurt(virtual("nano"))
    before = dict(device.snapshot())

    def watch(pilot: Any) -> None:
        if pilot.steps >= step:
            device.silent = lambda: True

    with caught(SensorError) as errors:
        train(at.folder / "run", job, limit=1e6, every=10**9, device=device, watch=watch)
    restored = dict(device.snapshot()) == before
    said = told(errors, "could not be read") and ended_as(at.folder / "run", "failed")
    trained = state_in(at.folder / "run")["samples"]
    (at.folder / "plain").mkdir()
    train(at.folder / "plain" / "run", job, limit=trained, every=10**9)
    lost = not same(state_in(at.folder / "run"), state_in(at.folder / "plain" / "run"))
    return Found(restored, said, lost, words_of(errors))


@faults("joules that are spent")
def spent(at: Try) -> Found:
    job, joules = endless_job(), at.chance.uniform(1.0, 5.0)
    device = virtual("nano")
    before = dict(device.snapshot())
    live = LiveBudget(Budget(power_w=3.0, energy_j=joules))
    trained = train(at.folder / "run", job, limit=1e6, device=device, live=live)
    said = trained.outcome == "energy spent" and ended_as(at.folder / "run", "energy spent")
    lost = trained.energy_j > joules + 0.7 or state_in(at.folder / "run")["samples"] != trained.samples
    return Found(dict(device.snapshot()) == before, said, lost)


@faults("a store that is locked during a job")
def locked_store(at: Try) -> Found:
    schema.BUSY_TIMEOUT_S = 0.05
    other = sqlite3.connect(at.folder / "store.db", isolation_level=None)

    def lock(event: object) -> None:
        if isinstance(event, Started):
            other.execute("BEGIN EXCLUSIVE")

    job = endless_job()
    device = virtual("nano")
    before = dict(device.snapshot())
    trained = train(at.folder / "run", job, limit=8000, every=10_000, device=device, listener=lock)
    other.execute("ROLLBACK")
    other.close()
    said = trained.outcome == "limit" and any("locked" in text for text in notes_in(at.folder / "run"))
    lost = state_in(at.folder / "run")["samples"] != trained.samples
    return Found(dict(device.snapshot()) == before, said, lost, str(notes_in(at.folder / "run")))


# Kills, with the files of a board


def train_in_process(at: Try, job: Job, root: Path, *, resume: bool = False) -> Child:
    """A job in a process of its own, in this machine's time, that saves checkpoints all the time."""

    def work() -> None:
        training_loop.CHECKPOINT_PERIOD_S = SAVE_OFTEN_S
        with happening(lambda _: time.sleep(0.003)):
            train(
                at.folder / "run",
                job,
                limit=LIMIT,
                device=JetsonDevice(root),
                live=LiveBudget(Budget(power_w=12.0)),
                resume=resume,
            )

    return Child(work)


@faults("kill -9 of a job")
def killed_job(at: Try) -> Found:
    _, root = board_of_files(at)
    before, job = files(root), endless_job()
    reference = whole(at, job)
    child = train_in_process(at, job, root)
    wait_until(lambda: checkpoint.exists(at.folder / "run"))
    time.sleep(at.chance.random() * 0.4)
    child.send(signal.SIGKILL)
    child.wait()
    changed = files(root) != before
    outcomes = restore()
    restored = files(root) == before
    code, words = train_in_process(at, job, root, resume=True).wait()
    record = read_log(at.folder / "run" / "log.jsonl")
    told_so = any("Going on" in note.text for note in record.of(Noted))
    said = code == 0 and told_so and (not changed or [error for _, error in outcomes] == [None])
    lost = not same(state_in(at.folder / "run"), reference)
    return Found(restored and files(root) == before, said, lost, f"{code} {words}")


@faults("Ctrl-C for a job and its workers")
def interrupted_workers(at: Try) -> Found:
    job = endless_job(num_workers=1)
    reference = whole(at, job)

    def as_from_a_terminal() -> None:
        for child in torch.multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with happening(InStep(any_step(at.chance), as_from_a_terminal)):
        restored, errors = interrupted(at, job, KeyboardInterrupt)
    said = len(errors) == 1 and ended_as(at.folder / "run", "interrupted")
    train(at.folder / "run", job, limit=LIMIT, resume=True)
    return Found(restored, said, not same(state_in(at.folder / "run"), reference), words_of(errors))
