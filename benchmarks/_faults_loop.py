"""Faults around a loop that is tuned, on simulated boards: sensors, clocks, budgets, memory, disks, messages."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from real_time import RealTime
from run_world import HUGE, Numbers, tuned, virtual
from train_world import blobs, train

from _faults_world import Faults, Found, Loop, Try, any_board, caught, ended_as, notes_in, told, words_of
from underwatt.control.state import ControlOptions
from underwatt.errors import ApplyError, BudgetError, UnderwattError
from underwatt.events import BudgetChanged, Measured, SettingChanged
from underwatt.runlog.inbox import INBOX_NAME, post_budget
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from random import Random

faults = Faults()
WITHIN_S = 40.0  # simulated, in which the fault happens
SEARCHES = ControlOptions()


def log_in(loop: Loop) -> Any:
    return read_log(loop.folder / "log.jsonl")


def some_s(chance: Random, most_s: float = WITHIN_S) -> float:
    return chance.uniform(0.1, most_s)


class Heard(logging.Handler):
    """What Underwatt says to whoever trains."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("underwatt").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("underwatt").removeHandler(self)


# Sensors


@faults("a sensor that is stuck")
def stuck_sensor(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    read, loop = device.read_power, Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        newest_w = device.read_power().power_w
        stuck_w = at.chance.choice((at.chance.uniform(0.5, 12.0), newest_w, 999.0, 0.0))
        device.read_power = lambda: replace(read(), power_w=stuck_w)
        looped.train(2 * WITHIN_S)
    what = "which cannot be" if stuck_w == 0.0 else "whatever it does"
    return loop.found(said=told(loop.errors, what) and ended_as(loop.folder, "failed"))


@faults("a sensor that is lost for good")
def lost_sensor(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        device.silent = lambda: True
        looped.train(WITHIN_S)
    return loop.found(said=told(loop.errors, "could not be read") and ended_as(loop.folder, "failed"))


@faults("a sensor that is lost for a while")
def absent_sensor(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        lost_s, away_s = device.clock.now_s(), at.chance.uniform(3.0, 8.0)
        device.silent = lambda: device.clock.now_s() - lost_s < away_s
        looped.train(WITHIN_S)
    said = any("safe setting" in text for text in notes_in(loop.folder)) and ended_as(loop.folder, "finished")
    return loop.found(said=said and "Power can be read again." in notes_in(loop.folder, "info"))


@faults("readings that are missing")
def missing_readings(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    share, chance = at.chance.uniform(0.01, 0.2), at.chance
    loop, readings = Loop(at, device, power_w), 0

    def count(_: object) -> None:
        nonlocal readings
        readings += 1

    with loop as looped:
        looped.train(some_s(chance))
        looped.tuner._pilot.meter.listen(count)
        before, begun_j = log_count(looped), device.board.energy_j - looped.tuner.energy_j
        device.silent = lambda: chance.random() < share
        looped.train(WITHIN_S)
    # A reading alone is bridged without a word; the log counts those that there were, and its joules are the true ones.
    log = log_in(loop)
    said = log.tally.readings - before <= readings and ended_as(loop.folder, "finished")
    off = abs(log.energy_j() / (device.board.energy_j - begun_j) - 1)
    return replace(loop.found(said=said, lost=off > 0.03), words=f"joules off by {off:.1%}")


def log_count(looped: Any) -> int:
    """Readings so far."""
    return len(looped.tuner._pilot.meter._samples)


@faults("a reading that is no number")
def odd_readings(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    read, loop, chance = device.read_power, Loop(at, device, power_w), at.chance
    odd_w = chance.choice((math.nan, math.inf, -1.0, -math.inf, 1e12))

    def odd() -> Any:
        sample = read()
        return replace(sample, power_w=odd_w) if chance.random() < 0.05 else sample

    with loop as looped:
        looped.train(some_s(chance))
        device.read_power = odd
        looped.train(WITHIN_S)
    record = log_in(loop)
    believed = [watts for watts in record.power.power_w if not 0 < watts < 1e6]
    said = told(loop.errors) or (not loop.errors and not (believed and odd_w < 1e6))
    return loop.found(said=said)


@faults("a sensor that hangs")
def hanging_sensor(at: Try) -> Found:
    device = RealTime()
    loop = Loop(at, device, 9.0, batch_sizes=(8, 16))
    begun_s = ended_s = time.monotonic()
    with loop as looped:
        looped.train(at.chance.uniform(0.05, 0.8))
        device.hang = threading.Event()
        time.sleep(at.chance.uniform(0.15, 0.4))
        begun_s = time.monotonic()
    ended_s = time.monotonic()
    assert device.hang is not None
    device.hang.set()
    said = any("hangs" in text for text in notes_in(loop.folder)) and ended_as(loop.folder, "finished")
    return loop.found(said=said, lost=ended_s - begun_s > 5.0)


@faults("a device that answers nothing any more")
def silent_device(at: Try) -> Found:
    device = RealTime()
    loop = Loop(at, device, 9.0, batch_sizes=(8, 16), options=ControlOptions(lost_s=0.5))
    with loop as looped:
        looped.train(at.chance.uniform(0.05, 0.8))
        device.hang = threading.Event()
        looped.train(20.0)
    assert device.hang is not None
    device.hang.set()
    return loop.found(said=told(loop.errors) and ended_as(loop.folder, "failed"))


# Clocks and budgets


@faults("clocks that are refused")
def refused_clocks(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    salt, share = at.chance.random(), at.chance.uniform(0.1, 0.6)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance, 10.0))
        device.refuses = lambda mode: hash((salt, mode)) % 1000 < 1000 * share
        device.applied.clear()
        looped.train(WITHIN_S)
    refused = [mode for mode in device.applied if device.refuses(mode)]
    if loop.errors:  # also what it fell back to was refused, as the device says
        return loop.found(said=isinstance(loop.errors[0], ApplyError) and ended_as(loop.folder, "failed"))
    said = not refused or any("cannot be set" in text for text in notes_in(loop.folder))
    return loop.found(said=said and ended_as(loop.folder, "finished"))


@faults("all clocks are refused")
def no_clocks(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        device.refuses = lambda _: True
        device.board.disturb(extra_w=3.0)  # so that another mode is asked for
        looped.train(2 * WITHIN_S)
    device.board.disturb(extra_w=0.0)
    refused = [error for error in loop.errors if isinstance(error, ApplyError)]
    said = bool(refused) or any("cannot be set" in text for text in notes_in(loop.folder))
    return loop.found(said=said)


@faults("a budget that cannot be held")
def impossible_budget(at: Try) -> Found:
    device, _ = any_board(at.chance, knobs=at.chance.random() < 0.5)
    before = dict(device.snapshot())
    with caught(BudgetError) as errors, tuned(device, folder=at.folder / "run", budget_w=at.chance.uniform(0.05, 0.6)):
        pass
    log = at.folder / "run" / "log.jsonl"
    said = told(errors, " W") and (not log.stat().st_size or ended_as(at.folder / "run", "failed"))
    return Found(dict(device.snapshot()) == before, said, words=words_of(errors))


@faults("a posted budget that cannot be held")
def impossible_post(at: Try) -> Found:
    device, power_w = any_board(at.chance, knobs=at.chance.random() < 0.7)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        post_budget(loop.folder, f"{at.chance.uniform(0.1, 0.6):.2f}W", "command")
        # It waits for watts that hold, for as long as nobody gives it these.
        more_s = device.clock.now_s() + WITHIN_S
        read = device.read_power

        def read_and_post() -> Any:
            if device.clock.now_s() > more_s:
                device.read_power = read
                post_budget(loop.folder, f"{power_w}W", "command")
            return read()

        device.read_power = read_and_post
        looped.train(2 * WITHIN_S)
    end = log_in(loop).end
    verdict = end and end.verdict
    unheld = verdict is not None and verdict.held is False
    said = told(loop.errors, " W") or (unheld and any(" W" in text for text in notes_in(loop.folder)))
    return loop.found(said=said)


@faults("another program that draws watts")
def disturbed(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        device.board.disturb(extra_w=at.chance.uniform(0.8, 2.0))
        begun_s, begun_j = device.clock.now_s(), device.board.energy_j
        looped.train(WITHIN_S)
        drawn_w = (device.board.energy_j - begun_j) / (device.clock.now_s() - begun_s)
        device.board.disturb(extra_w=0.0)
    log = log_in(loop)
    noticed = any("drifted" in text for text in notes_in(loop.folder, "info"))
    corrected = any(change.state == "correcting" for change in log.of(SettingChanged))
    unheld = log.end is not None and log.end.verdict is not None and log.end.verdict.held is False
    said = noticed or corrected or unheld or drawn_w <= 1.02 * power_w  # held all the same: there is nothing to say
    found = loop.found(said=said and ended_as(loop.folder, "finished"), lost=drawn_w > 1.05 * power_w)
    return replace(found, words=f"{drawn_w:.2f} W of {power_w:g} W")


# Memory


@faults("a batch that does not fit a simulated board")
def large_batch(at: Try) -> Found:
    device = virtual("nano", at.chance.randrange(100))
    cost = replace(HUGE, activation_bytes_per_sample=at.chance.uniform(60e6, 180e6))
    loop = Loop(at, device, 6.0, cost=cost, options=SEARCHES)
    with loop as looped:
        looped.train(WITHIN_S)
    tried = [m for event in log_in(loop).of(Measured) if (m := event.measurement).status.value == "out_of_memory"]
    said = not tried or any("does not fit" in text for text in notes_in(loop.folder))
    return loop.found(said=said and not loop.errors)


@faults("memory that runs out in a loop")
def full_memory(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    limit, after = at.chance.choice((8, 16, 32)), at.chance.randrange(1, 60)
    loop, steps = Loop(at, device, power_w, options=SEARCHES), 0
    seen: list[int] = []
    with loop as looped:
        for batch in looped.tuner.loader(Numbers(3001), shuffle=True):
            with looped.tuner.training():
                steps += 1
                if steps > after and len(batch) > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                seen += batch.tolist()
                looped.tuner.step()
    failed = any(m.measurement.status.value == "out_of_memory" for m in log_in(loop).of(Measured))
    said = not loop.errors and (not failed or any("does not fit" in text for text in notes_in(loop.folder)))
    return loop.found(said=said, lost=sorted(seen) != list(range(3001)))


@faults("memory that runs out in the optimizer")
def half_changed(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    left = [at.chance.randrange(1, 100)]

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().step(closure)

    optimizer = Half([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    loop = Loop(at, device, power_w)
    with loop as looped:
        while True:
            for _ in looped.tuner.loader(Numbers(3000)):
                with looped.tuner.training():
                    optimizer.step()
                    looped.tuner.step()
    return loop.found(said=told(loop.errors, "half changed", "checkpoint") and ended_as(loop.folder, "failed"))


# The loop itself


@faults("an error in a loop")
def failing_loop(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    error = at.chance.choice((RuntimeError("the job is broken"), KeyboardInterrupt(), SystemExit(3)))
    loop = Loop(at, device, power_w, options=SEARCHES)
    with loop as looped:
        looped.train(some_s(at.chance))
        raise error
    outcome = "failed" if isinstance(error, RuntimeError) else "interrupted"
    end = log_in(loop).end
    said = loop.errors == [error] and ended_as(loop.folder, outcome)
    return loop.found(said=said and (outcome == "interrupted" or end.error == "the job is broken"))


@faults("an optimizer that breaks")
def broken_optimizer(at: Try) -> Found:
    """Its learning rates cannot be put back any more, which must not stand before the device."""
    device, power_w = any_board(at.chance)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    loop = Loop(at, device, power_w, optimizer=optimizer)
    with loop as looped:
        looped.train(some_s(at.chance), each=optimizer.step)
        optimizer.param_groups = None  # type: ignore[assignment]
    return loop.found(said=bool(loop.errors) and ended_as(loop.folder, "finished"))


@faults("a loss that is no number, in a loop")
def diverged_loop(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop, odd = Loop(at, device, power_w), at.chance.choice((math.nan, math.inf, -math.inf))
    with loop as looped:
        looped.train(some_s(at.chance))
        for _ in range(3):
            for _batch in looped.tuner.loader(Numbers(2000)):
                looped.tuner.step(loss=torch.tensor(odd) if at.chance.random() < 0.5 else odd)
    said = any("diverged" in text for text in notes_in(loop.folder)) and ended_as(loop.folder, "diverged")
    return loop.found(said=said)


@faults("a second run in the folder")
def second_run(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop, errors = Loop(at, device, power_w), []
    with loop as looped:
        looped.train(some_s(at.chance))
        with caught(UnderwattError) as errors:
            if at.chance.random() < 0.5:
                tuned(virtual(), folder=loop.folder)
            else:
                train(loop.folder, blobs(target=1.01), limit=160, resume=at.chance.random() < 0.5)
        looped.train(5.0)
    text = (loop.folder / "log.jsonl").read_bytes().replace(b" ", b"")
    once = text.count(b'"kind":"start"') == text.count(b'"kind":"end"') == 1
    found = loop.found(said=told(errors, "under way", str(os.getpid())), lost=not once or bool(loop.errors))
    return replace(found, words=words_of(errors))


# Disks and messages


@faults("a full disk under the log")
def full_log(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    (at.folder / "run").mkdir()
    (at.folder / "run" / "log.jsonl").symlink_to("/dev/full")
    loop = Loop(at, device, power_w)
    with Heard() as heard, loop as looped:
        looped.train(some_s(at.chance))
    return loop.found(said=sum("cannot be written" in text for text in heard) == 1 and not loop.errors)


@faults("a disk that is full for a while")
def full_for_a_while(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop, write, readings = Loop(at, device, power_w), os.write, 0
    room = [at.chance.randrange(5000)]

    def nearly_full(file: int, text: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        part = bytes(text)[: room[0]]
        room[0] -= len(part)
        return write(file, part)

    def count(_: object) -> None:
        nonlocal readings
        readings += 1

    with loop as looped:
        looped.tuner._pilot.meter.listen(count)
        begun = len(looped.tuner._pilot.meter._samples)
        looped.train(some_s(at.chance))
        os.write = nearly_full
        looped.train(some_s(at.chance))
        os.write = write
        looped.train(5.0)
    said = any("No space left" in text for text in notes_in(loop.folder))
    kept = log_in(loop).tally.readings
    return loop.found(said=said or room[0] > 0, lost=kept < readings + begun - 1)


@faults("a folder that is removed")
def removed_folder(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w)
    with loop as looped:
        looped.train(some_s(at.chance))
        shutil.rmtree(loop.folder)
        looped.train(some_s(at.chance))
    return loop.found(said=ended_as(loop.folder, "finished") and not loop.errors)


@faults("a budget file that makes no sense")
def odd_budget_file(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop, kind = Loop(at, device, power_w), at.chance.choice(("brackets", "endless", "pipe", "noise", "words", "long"))
    path = loop.folder / INBOX_NAME
    with loop as looped:
        looped.train(some_s(at.chance))
        if kind == "endless":
            path.symlink_to(at.chance.choice(("/dev/zero", "/dev/urandom")))
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(
                {
                    "brackets": b"[" * 100_000,
                    "noise": at.chance.randbytes(200),
                    "words": b'{"id": 1, "budget": "a lot", "from": "x"}',
                    "long": b'{"id": 1, "budget": "' + b"9" * 3_000_000 + b'"}',
                }[kind]
            )
        looped.train(some_s(at.chance))
        path.unlink(missing_ok=True)
        post_budget(loop.folder, f"{power_w + 1}W", "command")
        looped.train(5.0)
    followed = [event.power_w for event in log_in(loop).of(BudgetChanged)] == [power_w, power_w + 1]
    found = loop.found(said=bool(notes_in(loop.folder)) and not loop.errors, lost=not followed)
    return replace(found, words=f"{kind}: {notes_in(loop.folder)}")


@faults("a loader that is left half way")
def forgotten_step(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    loop = Loop(at, device, power_w)
    with loop as looped:
        looped.train(some_s(at.chance))
        for _ in looped.tuner.loader(Numbers(300)):
            pass
    return loop.found(said=told(loop.errors, "was not called") and ended_as(loop.folder, "failed"))
