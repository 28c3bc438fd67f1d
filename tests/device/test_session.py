from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from killable import Killable

from underwatt.device import session as session_module
from underwatt.device.registry import open_device
from underwatt.device.session import Session, restore, set_mode
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import ApplyError, DeviceBusyError, DeviceError, JournalError, ModeError, UnderwattError
from underwatt.helper import journal as journal_module
from underwatt.helper.journal import Journal, state_dir
from underwatt.helper.lock import FileLock
from underwatt.helper.sysfs import Sysfs
from underwatt.records import PowerMode

CHILD = Path(__file__).parents[1] / "helpers" / "session_child.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    return tmp_path / "board"


@pytest.fixture
def device(root: Path) -> JetsonDevice:
    return JetsonDevice(root)


def files(root: Path) -> dict[str, bytes]:
    """Every file of a board, byte for byte."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def journals() -> list[str]:
    return [path.name for path in state_dir().glob("*.json")]


def test_everything_is_back_after_a_session(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    with Session(device) as session:
        session.apply(device.space.lowest)
        assert files(root) != before
        assert len(journals()) == 1
    assert files(root) == before
    assert journals() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_everything_is_back_after_an_exception(device: JetsonDevice, root: Path, error: type[BaseException]) -> None:
    before = files(root)
    with pytest.raises(error), Session(device) as session:  # noqa: PT012
        session.apply(device.space.lowest)
        raise error
    assert files(root) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_everything_is_back_after_a_signal(device: JetsonDevice, root: Path, number: signal.Signals) -> None:
    before = files(root)
    with pytest.raises((SystemExit, KeyboardInterrupt)), Session(device) as session:  # noqa: PT012
        session.apply(device.space.lowest)
        os.kill(os.getpid(), number)
        time.sleep(1)
        pytest.fail("the signal was lost")
    assert files(root) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_waits_until_the_device_is_in_one_piece(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    seen: list[dict[str, bytes]] = []
    apply = device.apply

    def apply_with_signal(mode: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        apply(mode)  # type: ignore[arg-type]
        seen.append(files(root))

    device.apply = apply_with_signal  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), Session(device) as session:
        session.apply(device.space.lowest)
    assert len(seen) == 1
    assert seen[0] != before
    assert files(root) == before


def test_a_session_that_sets_nothing_writes_nothing(device: JetsonDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sysfs, "write", lambda *_: pytest.fail("it wrote"))
    with Session(device):
        device.read_power()
        assert journals() == []


def test_signals_are_as_before_also_where_a_keeper_does_not_let_go(device: JetsonDevice) -> None:
    def let_go() -> None:
        raise DeviceError("The helper does not answer.")

    device.hold, device.let_go = lambda: False, let_go  # type: ignore[attr-defined]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(DeviceError, match="does not answer"), Session(device):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_session_works_outside_the_main_thread(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    done: list[bool] = []

    def work() -> None:
        with Session(device) as session:
            session.apply(device.space.lowest)
            done.append(files(root) != before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
    assert files(root) == before


def test_the_second_session_is_told_who_has_the_device(device: JetsonDevice, root: Path) -> None:
    with Session(device), pytest.raises(DeviceBusyError, match=f"process {os.getpid()}"), Session(JetsonDevice(root)):
        pass


def test_a_forked_child_restores_nothing(device: JetsonDevice, root: Path) -> None:
    with Session(device) as session:
        session.apply(device.space.lowest)
        during = files(root)
        child = os.fork()
        if child == 0:
            session.restore()
            os._exit(0)
        os.waitpid(child, 0)
        assert files(root) == during


def test_what_cannot_be_put_back_stays_in_the_journal(
    device: JetsonDevice, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(root)

    def refuse(_: object) -> None:
        raise ApplyError("The bus is gone.")

    with pytest.raises(ApplyError, match="underwatt restore"), Session(device) as session:  # noqa: PT012
        session.apply(device.space.lowest)
        monkeypatch.setattr(device, "restore", refuse)
    assert len(journals()) == 1
    assert [error for _, error in restore()] == [None]
    assert files(root) == before


def test_the_next_session_finishes_what_a_killed_one_left(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    Journal.of(device.info, "session", state_dir()).write(device.info, device.snapshot())
    device.apply(device.space.highest)  # and then it was killed
    assert files(root) != before
    with Session(JetsonDevice(root)) as session:
        assert session.recovered
        assert files(root) == before
    assert journals() == []


def test_a_corrupt_journal_stops_the_session_and_stays(device: JetsonDevice) -> None:
    journal = Journal.of(device.info, "session", state_dir())
    journal.path.parent.mkdir(parents=True, exist_ok=True)
    journal.path.write_text("garbage")
    with pytest.raises(JournalError, match="damaged"), Session(device):
        pass
    assert journal.path.read_text() == "garbage"
    [(_, error)] = restore()
    assert isinstance(error, JournalError)
    assert [error for _, error in restore(discard=True)] == [None]
    assert not journal.exists()
    with Session(device):
        pass


def test_set_outlives_sessions_and_restore_brings_the_first_state_back(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    set_mode(device, device.space.lowest)
    once = files(root)
    with Session(device) as session:
        session.apply(device.space.highest)
    assert files(root) == once
    set_mode(device, device.space[3])
    assert [error for _, error in restore()] == [None]
    assert files(root) == before
    assert restore() == []


def test_set_after_a_killed_session_keeps_the_state_before_it(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    Journal.of(device.info, "session", state_dir()).write(device.info, device.snapshot())
    device.apply(device.space.highest)  # what a killed session had set
    set_mode(device, device.space.lowest)
    restore()
    assert files(root) == before


def test_a_set_that_fails_leaves_no_trace(device: JetsonDevice, root: Path) -> None:
    before = files(root)
    with pytest.raises(ModeError):
        set_mode(device, PowerMode(gpu_mhz=99_999))
    assert journals() == []
    set_mode(device, device.space.lowest)
    kept = files(root)
    with pytest.raises(ModeError):
        set_mode(device, PowerMode(gpu_mhz=99_999))
    assert files(root) == kept
    restore()
    assert files(root) == before


def test_a_journal_that_cannot_be_finished_can_be_given_up(device: JetsonDevice, root: Path) -> None:
    journal = Journal.of(device.info, "session", state_dir())
    journal.write(device.info, {"sys/class/devfreq/gone/max_freq": "1\n"})
    with pytest.raises(ApplyError, match="--discard"), Session(device):
        pass
    [(_, error)] = restore()
    assert "--discard" in str(error)
    [(name, error)] = restore(discard=True)
    assert error is None
    assert "given up" in name
    with Session(device):
        pass


def test_a_device_in_use_is_not_given_up(device: JetsonDevice, root: Path) -> None:
    with Session(device) as session:
        session.apply(device.space.lowest)
        [(_, error)] = restore(discard=True)
        assert isinstance(error, DeviceBusyError)
        assert len(journals()) == 1


def test_a_journal_of_a_device_that_is_gone_is_an_error_and_stays(device: JetsonDevice) -> None:
    Journal.of(device.info, "session", state_dir()).write(device.info, {})

    def gone(_: str) -> JetsonDevice:
        raise UnderwattError("It is gone.")

    [(name, error)] = restore(open_address=gone)
    assert device.info.name in name
    assert "It is gone." in str(error)
    assert len(journals()) == 1


def test_in_process_devices_need_no_journal() -> None:
    virtual = open_device("virtual:nano")
    found = dict(virtual.snapshot())
    with Session(virtual) as session, Session(open_device("virtual:nano")):
        session.apply(virtual.space.lowest)
        assert not state_dir().exists()
    assert dict(virtual.snapshot()) == found


@pytest.mark.slow
def test_kill_9_at_50_random_moments_always_restores(root: Path) -> None:
    before = files(root)
    chance = random.Random(0)
    restored = changed = 0
    with Killable(CHILD) as sessions:
        for seed in range(50):
            process = sessions.start(f"{seed} {root}")
            time.sleep(chance.random() * 0.15)
            assert sessions.kill(process) == -signal.SIGKILL
            changed += files(root) != before
            if seed % 10 == 0:
                subprocess.run([sys.executable, "-m", "underwatt", "restore"], check=True, capture_output=True)
            else:
                restore()
            restored += files(root) == before
    assert restored == 50
    assert changed >= 10, "the kills came too late to prove anything"


def test_a_device_in_this_process_has_one_session_at_a_time() -> None:
    virtual = open_device("virtual:nano")
    with Session(virtual):
        with pytest.raises(DeviceBusyError, match="another session of this process"), Session(virtual):
            pass
        with pytest.raises(DeviceBusyError), Session(virtual):
            pass
    with Session(virtual):
        pass


def test_restore_names_a_folder_that_cannot_be_looked_into(
    device: JetsonDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    iterdir, hidden = Path.iterdir, tmp_path / "root"

    def refuse(folder: Path) -> object:
        if folder == hidden:
            raise PermissionError(13, "Permission denied")
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(session_module, "journal_folders", lambda: (state_dir(), hidden))
    Journal.of(device.info, "session", state_dir()).write(device.info, {})
    (name, error), (finished, no_error) = restore()
    assert name == str(hidden)
    assert isinstance(error, JournalError)
    assert "sudo underwatt restore" in str(error)
    assert device.info.name in finished
    assert no_error is None


def test_a_lock_that_is_taken_again_and_again_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is registered for forks stays as long as the process: of a service, for months."""
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: registered.append(calls))
    lock = FileLock()
    for _ in range(3):
        assert lock.take(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
        lock.release()
    assert len(registered) == 1


def test_what_was_found_before_a_reboot_is_not_put_back(device: JetsonDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reboot brings the board's own values, and perhaps another nvpmodel mode, which would refuse every session."""
    now = dict(device.snapshot())
    found = {**now, "nvpmodel": "9"}

    def leave(address: str, *purposes: str) -> None:
        with monkeypatch.context() as before:
            before.setattr(journal_module, "boot_id", lambda: "another start")
            for purpose in purposes:
                Journal.of(device.info, purpose, state_dir()).write(replace(device.info, address=address), found)

    leave("jetson:/", "session", "set")
    assert [error for _, error in restore(open_address=lambda _: device)] == [None, None]
    leave("jetson:/", "session")
    with Session(device) as session:
        assert session.recovered
    assert dict(device.snapshot()) == now
    leave(device.info.address, "session")  # a folder is as it was left
    with pytest.raises(ApplyError, match="nvpmodel mode was 9"), Session(device):
        pass
