"""Faults of the helper and of those whose knobs it sets: kills of either, or of both, and leases that run out.

A few of each kind, on the files of a board; ``benchmarks/helper.py`` has the hundreds, through a mount.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from helper_world import Helper, serving

from _faults_world import Child, Faults, Found, Try, any_mode, board_of_files, caught, files, told, wait_until, words_of
from underwatt.adapters.tuner import tune
from underwatt.device.session import Session
from underwatt.drivers.helper import HelperDevice
from underwatt.errors import DeviceBusyError, UnderwattError
from underwatt.events import Noted
from underwatt.helper.errors import LeaseError
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from pathlib import Path

faults = Faults()
LOST = "put everything back"  # what a run notes whose helper has started again
PUT_BACK = "what a killed process had set was put back"
WITHIN_S = 1.0  # in which all is to be back after the end of whoever held the board


class Served:
    """A board of files, its helper, and what it looked like before."""

    def __init__(self, at: Try) -> None:
        self.device, self.root = board_of_files(at)
        self.before = files(self.root)
        self.helper_of = serving(at.folder / "helper", self.root)
        self.address: str = ""

    def __enter__(self) -> Served:
        self.helper: Helper = self.helper_of.__enter__()
        self.address = str(self.helper.socket)
        return self

    def __exit__(self, *how: Any) -> None:
        self.helper_of.__exit__(*how)

    def is_back(self, within_s: float = WITHIN_S) -> bool:
        """Whether all is as before, at the latest after so long."""
        with suppress(TimeoutError):
            wait_until(lambda: files(self.root) == self.before and not self.helper.journals, within_s)
        return files(self.root) == self.before and not self.helper.journals

    def says(self, text: str) -> bool:
        """Whether the helper's log says so, at the latest a moment later."""
        with suppress(TimeoutError):
            wait_until(lambda: text in self.helper.said(), WITHIN_S)
        return text in self.helper.said()

    def changed(self) -> bool:
        """Whether somebody has set something."""
        return files(self.root) != self.before


def setting_on(at: Try, address: str) -> Child:
    """A process that sets the board through its helper again and again."""

    def work() -> None:
        device = HelperDevice(address)
        with Session(device) as session:
            while True:
                session.apply(any_mode(device, at.chance))

    return Child(work)


@faults("kill -9 of a session that a helper serves")
def killed_client(at: Try) -> Found:
    with Served(at) as served:
        child = setting_on(at, served.address)
        wait_until(served.changed)
        time.sleep(at.chance.random() * 0.3)
        child.send(signal.SIGKILL)
        child.wait()
        back = served.is_back()
        return Found(back, served.says(": the board is as it was found"), words=served.helper.said())


@faults("kill -9 of the helper")
def killed_helper(at: Try) -> Found:
    with Served(at) as served:
        device = HelperDevice(served.address)
        with caught(UnderwattError) as errors, Session(device) as session:
            for _ in range(at.chance.randrange(1, 5)):
                session.apply(any_mode(device, at.chance))
            served.helper.stop(signal.SIGKILL)
            served.helper.start()
            back = served.is_back()
            if at.chance.random() < 0.5:  # the session goes on, which is said
                session.apply(any_mode(device, at.chance))
                back = back and any(LOST in text for text in device.foreign_changes())
        said = not errors and served.says(PUT_BACK)
        return Found(back and served.is_back(), said, words=words_of(errors) + served.helper.said())


@faults("kill -9 of the helper and of its client")
def killed_both(at: Try) -> Found:
    with Served(at) as served:
        child = setting_on(at, served.address)
        wait_until(served.changed)
        time.sleep(at.chance.random() * 0.3)
        for kill in at.chance.sample([lambda: served.helper.stop(signal.SIGKILL), child_killer(child)], 2):
            kill()
        left = bool(served.helper.journals)
        served.helper.start()
        back = served.is_back()
        said = not left or served.says(PUT_BACK)
        return Found(back, said, words=served.helper.said())


def child_killer(child: Child) -> Any:
    def kill() -> None:
        child.send(signal.SIGKILL)
        child.wait()

    return kill


@faults("a client that stands still")
def frozen_client(at: Try) -> Found:
    """Its lease runs out; what it asks for then is refused, and its hold is over."""
    with Served(at) as served:
        device = HelperDevice(served.address)
        link = device._board.link
        lease = link.ask("hold", lease_s=1.0)["lease"]
        link.ask("apply", lease=lease, mode=dict(any_mode(device, at.chance).knobs()))
        changed = served.changed()
        time.sleep(1.0 + at.chance.random() * 0.2)
        back = served.is_back()
        with caught(UnderwattError) as errors:
            link.ask("apply", lease=lease, mode=dict(any_mode(device, at.chance).knobs()))
        device.close()
        refused = len(errors) == 1 and isinstance(errors[0], LeaseError)
        said = refused and served.says("gave no sign of life")
        return Found(back and served.is_back(), said, lost=not changed, words=words_of(errors) + served.helper.said())


@faults("a second session at a helper")
def second_client(at: Try) -> Found:
    with Served(at) as served:
        child = setting_on(at, served.address)
        wait_until(served.changed)
        with caught(UnderwattError) as errors, Session(HelperDevice(served.address)) as session:
            session.apply(any_mode(HelperDevice(served.address), at.chance))
        child.send(signal.SIGTERM)
        child.wait()
        said = told(errors, f"process {child.pid}") and isinstance(errors[0], DeviceBusyError)
        return Found(served.is_back(), said, words=words_of(errors))


@faults("a helper that is killed under a tuned loop")
def helper_lost_in_loop(at: Try) -> Found:
    folder = at.folder / "run"
    with Served(at) as served:
        with caught(UnderwattError) as errors:
            train_over(served, folder, at.chance.randrange(20, 200))
        notes = read_notes(folder)
        return Found(served.is_back(), not errors and LOST in notes, words=words_of(errors) + notes)


def train_over(served: Served, folder: Path, at_step: int) -> None:
    """A tuned loop whose helper is killed and started again at some step; it goes on until that was noticed."""
    device = HelperDevice(served.address)
    [sensor] = served.root.glob("sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon*/curr1_input")
    text, ends_s, step = sensor.read_text(), time.monotonic() + 20.0, 0
    try:
        with tune(device=device, budget_w=15, batch_sizes=(8, 16), folder=folder, name="numbers") as tuner:
            while time.monotonic() < ends_s and not (step > at_step and LOST in read_notes(folder)):
                tuner.starts(tuner.batch_size)
                time.sleep(0.002)
                tuner.step()
                step += 1
                sensor.write_text(f"{int(text) + step % 50}\n")  # one that always reads the same would be called stuck
                if step == at_step:
                    served.helper.stop(signal.SIGKILL)
                    served.helper.start()
    finally:
        sensor.write_text(text)


def read_notes(folder: Path) -> str:
    """All notes of a run that is under way."""
    return "\n".join(note.text for note in read_log(folder / "log.jsonl").of(Noted))
