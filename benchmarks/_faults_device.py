"""Faults of sessions on a device: signals, kills, journals, locks, refused writes. The board is made of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _faults_world import (
    Child,
    Faults,
    Found,
    Try,
    any_mode,
    board_of_files,
    caught,
    ended_as,
    files,
    told,
    wait_until,
    words_of,
)
from underwatt.adapters.tuner import tune
from underwatt.device import session as folders_module
from underwatt.device.session import Session, restore, set_mode
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import ApplyError, DeviceBusyError, DeviceError, JournalError, NoDeviceError, UnderwattError
from underwatt.helper import journal as journal_module, lock as lock_module
from underwatt.helper.journal import Journal, state_dir
from underwatt.helper.sysfs import Sysfs
from underwatt.records import PowerMode
from underwatt.runlog.inbox import running_runs

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

faults = Faults()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED = {130, *(128 + number for number in SIGNALS)}


def train_on(root: Path, folder: Path) -> None:
    """A tuned loop on a board of files, in this machine's time, until it is ended."""
    with tune(device=JetsonDevice(root), budget_w=15, batch_sizes=(8, 16), folder=folder, name="child") as tuner:
        while True:
            tuner.starts(tuner.batch_size)
            time.sleep(0.002)
            tuner.step()


def under_way(at: Try) -> tuple[Path, dict[str, bytes], Child]:
    """A training in a process of its own that has changed the board."""
    _, root = board_of_files(at)
    before = files(root)
    child = Child(lambda: train_on(root, at.folder / "run"))
    wait_until(lambda: files(root) != before)
    return root, before, child


def signalled(at: Try, numbers: list[int], gap_s: float) -> Found:
    root, before, child = under_way(at)
    time.sleep(at.chance.random() * 0.4)
    for number in numbers:
        if not child.send(number):
            break
        time.sleep(at.chance.random() * gap_s)
    code, words = child.wait()
    # Once all is back and nobody holds signals any more, a late one may end the process by itself.
    in_order = code in ENDED or (len(numbers) > 1 and -code in numbers)
    said = in_order and ended_as(at.folder / "run", "interrupted") and running_runs() == ()
    return Found(files(root) == before, said, words=f"{code} {words}")


@faults("a signal ends the process")
def one_signal(at: Try) -> Found:
    return signalled(at, [at.chance.choice(SIGNALS)], 0.0)


@faults("a second signal during the restore")
def more_signals(at: Try) -> Found:
    return signalled(at, [at.chance.choice(SIGNALS) for _ in range(at.chance.randrange(2, 6))], 0.01)


@faults("kill -9 of a session")
def killed_session(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    chance = at.chance

    def work() -> None:
        while True:
            with Session(device) as session:
                for _ in range(chance.randrange(1, 6)):
                    session.apply(any_mode(device, chance))

    child = Child(work)
    time.sleep(0.02 + chance.random() * 0.1)
    child.send(signal.SIGKILL)
    child.wait()
    left = bool(list(state_dir().glob("*.json")))
    changed = files(root) != before
    if chance.random() < 0.5:
        with Session(JetsonDevice(root)) as session:
            said, words = session.recovered, "the next session recovers"
    else:
        outcomes = restore()
        said, words = [error for _, error in outcomes] == [None], str(outcomes)
    return Found(files(root) == before, said if left else not changed, words=words)


@faults("kill -9 of a tuned loop")
def killed_loop(at: Try) -> Found:
    root, before, child = under_way(at)
    time.sleep(at.chance.random() * 0.4)
    child.send(signal.SIGKILL)
    child.wait()
    words: list[str] = []
    with caught(UnderwattError) as errors, Session(JetsonDevice(root)) as session:
        words.append("recovered" if session.recovered else "")
    return Found(files(root) == before and running_runs() == (), words == ["recovered"], words=words_of(errors))


@faults("an error in a session")
def failing_session(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    error = at.chance.choice((RuntimeError("broken"), KeyboardInterrupt(), SystemExit(3)))
    with caught(type(error)) as errors, Session(device) as session:
        for _ in range(at.chance.randrange(1, 5)):
            session.apply(any_mode(device, at.chance))
        raise error
    return Found(files(root) == before, errors == [error])


def refuse_nth_write(number: int) -> Callable[[], None]:
    """Have the kernel refuse one of the writes to come; returns what ends that."""
    write, left = Sysfs.write, number

    def refused(self: Sysfs, *given: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise ApplyError("The kernel refused the write.", hint="Look into the kernel's log.")
        return write(self, *given, **more)

    def again() -> None:
        Sysfs.write = write  # type: ignore[method-assign]

    Sysfs.write = refused  # type: ignore[method-assign]
    return again


@faults("a write refused half way through a mode")
def half_applied(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    with caught(DeviceError) as errors, Session(device) as session:
        session.apply(any_mode(device, at.chance))
        again = refuse_nth_write(at.chance.randrange(1, 4))
        try:
            while True:
                session.apply(any_mode(device, at.chance))
        finally:
            again()
    return Found(files(root) == before, told(errors), words=words_of(errors))


@faults("a restore that the device refuses")
def refused_restore(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    with caught(DeviceError) as errors, Session(device) as session:
        for _ in range(at.chance.randrange(1, 4)):
            session.apply(any_mode(device, at.chance))
        again = refuse_nth_write(at.chance.randrange(1, 3))
    again()
    outcomes = restore()
    finished = [error for _, error in outcomes] in ([None], [])
    return Found(finished and files(root) == before, told(errors, "underwatt restore"), words=words_of(errors))


@faults("a set that fails")
def failing_set(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    if at.chance.random() < 0.5:
        set_mode(device, any_mode(device, at.chance))
    kept = files(root)
    if at.chance.random() < 0.5:
        with caught(DeviceError) as errors:
            set_mode(device, PowerMode(gpu_mhz=at.chance.uniform(5000, 99_999)))
    else:
        again = refuse_nth_write(at.chance.randrange(1, 4))
        with caught(DeviceError) as errors:
            while True:
                set_mode(device, any_mode(device, at.chance))
                kept = files(root)
        again()
    unchanged = files(root) == kept
    restore()
    return Found(unchanged and files(root) == before, told(errors), words=words_of(errors))


@faults("a second training on the device")
def second_training(at: Try) -> Found:
    root, before, child = under_way(at)
    time.sleep(at.chance.random() * 0.2)
    during = files(root)
    with caught(UnderwattError) as errors:
        if at.chance.random() < 0.5:
            train_on(root, at.folder / "other")
        else:
            set_mode(JetsonDevice(root), any_mode(JetsonDevice(root), at.chance))
    alone = files(root) == during
    child.send(signal.SIGTERM)
    child.wait()
    whose = told(errors, f"process {child.pid}") and isinstance(errors[0], DeviceBusyError)
    return Found(alone and files(root) == before, whose, words=words_of(errors))


@faults("a forked child leaves the block")
def forked_child(at: Try) -> Found:
    _, root = board_of_files(at)
    before, log = files(root), at.folder / "run" / "log.jsonl"
    how = at.chance.choice(("leaves", "raises", "signal"))
    with tune(device=JetsonDevice(root), budget_w=15, batch_sizes=(8, 16), folder=log.parent, name="net") as tuner:
        for _ in range(at.chance.randrange(1, 60)):
            tuner.starts(tuner.batch_size)
            time.sleep(0.002)
            tuner.step()
        during = files(root)

        def leave() -> None:
            if how == "signal":
                time.sleep(10)
            error = ValueError("in the child") if how == "raises" else None
            tuner.__exit__(type(error) if error else None, error, None)

        child = Child(leave)
        time.sleep(at.chance.random() * 0.02)
        if how == "signal":
            time.sleep(0.05)
            child.send(signal.SIGTERM)
        child.wait()
        kept = files(root) == during and b'"kind":"end"' not in log.read_bytes().replace(b" ", b"")
        listed = len(running_runs()) == 1
    ends = log.read_bytes().replace(b" ", b"").count(b'"kind":"end"')
    return Found(kept and files(root) == before, listed and ends == 1, words=f"{how}, {ends} ends")


# Journals and locks


def damage(text: bytes, chance: Random) -> bytes:
    """A file that a disk has damaged."""
    at = chance.randrange(len(text))
    how = chance.randrange(4)
    if how == 0:
        return text[:at]
    if how == 1:
        return text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1 :]
    if how == 2:
        return text[:at] + chance.randbytes(30) + text[at + 30 :]
    return b"[" * 100_000


@faults("a damaged journal")
def damaged_journal(at: Try) -> Found:
    """Of a session that was killed before it changed anything: whatever it says is not believed."""
    device, root = board_of_files(at)
    before = files(root)
    journal = Journal.of(device.info, "session", state_dir())
    journal.write(device.info, device.snapshot())
    whole = journal.path.read_bytes()
    journal.path.write_bytes(content := damage(whole, at.chance))
    with caught(UnderwattError) as errors, Session(JetsonDevice(root)) as session:
        session.apply(any_mode(device, at.chance))
    kept = journal.exists() and journal.path.read_bytes() == content
    by_command = [error for _, error in restore()]
    said = told(errors, "--discard") and len(by_command) == 1 and "--discard" in str(by_command[0])
    harmless = not errors and by_command == []  # such as a space more or less
    restore(discard=True)
    return Found(files(root) == before, said or harmless, lost=not (kept or harmless), words=words_of(errors))


@faults("a journal that cannot be written")
def full_state_folder(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    journal = Journal.of(device.info, "session", state_dir())
    journal.path.parent.mkdir(parents=True, exist_ok=True)
    draft = journal.path.with_suffix(".tmp")
    if at.chance.random() < 0.5:
        draft.symlink_to("/dev/full")
    else:
        draft.mkdir()
    with caught(UnderwattError) as errors, Session(device) as session:
        session.apply(any_mode(device, at.chance))
    return Found(files(root) == before, told(errors, "nothing was changed"), words=words_of(errors))


@faults("a journal of a device that is gone")
def gone_device(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    journal = Journal.of(device.info, at.chance.choice(("session", "set")), state_dir())
    journal.write(device.info, device.snapshot())
    device.apply(any_mode(device, at.chance))

    def gone(_: str) -> Any:
        raise NoDeviceError("It is not here.", hint="Plug it in.")

    [(name, error)] = restore(open_address=gone)
    kept = journal.exists()
    said = error is not None and "--discard" in str(error) and device.info.name in name
    restore()
    return Found(files(root) == before, said, lost=not kept, words=f"{name}: {error}")


@faults("a lock that somebody prepared")
def prepared_lock(at: Try) -> Found:
    device, root = board_of_files(at)
    before, other = files(root), at.folder / "valuable"
    other.write_text("kept")
    path = state_dir() / f"underwatt-{journal_module.slug(device.info.id)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = at.chance.choice(("link", "dangling", "pipe", "hard link", "folder"))
    target = other if kind == "link" else at.folder / "not there"
    if kind in ("link", "dangling"):
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.link(other, path)
    with caught(UnderwattError) as errors, Session(JetsonDevice(root)) as session:
        session.apply(any_mode(device, at.chance))
    lost = other.read_text() != "kept" or (at.folder / "not there").exists()
    return Found(files(root) == before, told(errors, "UNDERWATT_STATE"), lost, f"{kind}: {words_of(errors)}")


@faults("a forged note of a session")
def forged_note(at: Try) -> Found:
    """In the folder that everybody may write to; it must hold nobody, and mislead nobody."""
    device, root = board_of_files(at)
    before, shared = files(root), at.folder / "shared"
    shared.mkdir()
    stem = f"underwatt-{journal_module.slug(device.info.id)}"
    name = shared / f"{stem}.forged.note"
    kind = at.chance.choice(("text", "dead", "link", "pipe", "noise"))
    if kind == "link":
        name.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        noise = at.chance.randbytes(50)
        name.write_bytes({"text": b"x 1 2", "dead": b"999999999 0 a", "noise": noise}[kind])
    own, os.environ["XDG_STATE_HOME"] = os.environ.pop("UNDERWATT_STATE"), str(at.folder / "home")
    places = lock_module._SHARED_NOTES, journal_module.ROOTS_STATE
    lock_module._SHARED_NOTES = shared
    journal_module.ROOTS_STATE = folders_module.ROOTS_STATE = at.folder / "root"
    try:
        with caught(UnderwattError) as errors, Session(device) as session:
            session.apply(any_mode(device, at.chance))
    finally:
        os.environ["UNDERWATT_STATE"] = own
        lock_module._SHARED_NOTES, journal_module.ROOTS_STATE = places
        folders_module.ROOTS_STATE = journal_module.ROOTS_STATE
    return Found(files(root) == before, not errors, words=f"{kind}: {words_of(errors)}")


@faults("root's journal, read by others")
def roots_journal(at: Try) -> Found:
    device, root = board_of_files(at)
    before, folder = files(root), at.folder / "root"
    journal = Journal.of(device.info, "session", folder)
    journal.write(device.info, {"a": "1"})
    for place in (at.folder, *at.folder.parents):
        with suppress(OSError):
            if place.stat().st_uid == os.geteuid() and place != Path("/"):
                place.chmod(place.stat().st_mode | 0o055)
    is_root = os.geteuid() == 0
    kind = at.chance.choice(("hidden", "unreadable", "unremovable"))
    if kind == "hidden":
        folder.chmod(0o700 if is_root else 0)
    elif kind == "unreadable":
        journal.path.chmod(0o600 if is_root else 0)
    else:
        folder.chmod(0o555)

    def look() -> None:
        if is_root:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        if kind == "unremovable":
            journal.remove()
        else:
            for _, error in restore(folder):
                if isinstance(error, JournalError):
                    raise error

    code, words = Child(look).wait()
    folder.chmod(0o755)
    said = code == 1 and words.startswith("JournalError") and "sudo underwatt restore" in words
    return Found(files(root) == before and journal.exists(), said, words=f"{kind}: {words}")


@faults("restore from the command line after kill -9")
def restored_by_command(at: Try) -> Found:
    device, root = board_of_files(at)
    before = files(root)
    Journal.of(device.info, "session", state_dir()).write(device.info, device.snapshot())
    device.apply(any_mode(device, at.chance))
    command = [sys.executable, "-m", "underwatt", "restore"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ended.returncode == 0 and device.info.name in ended.stdout
    return Found(files(root) == before, said, words=ended.stdout + ended.stderr)
