from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from underwatt.device import journal as journal_module
from underwatt.device.journal import DeviceLock, Journal, journal_folders, pending, state_dir
from underwatt.errors import DeviceBusyError, JournalError
from underwatt.records import DeviceInfo

INFO = DeviceInfo("jetson", "Nano", "jetson-Nano 1/2", "jetson:/")
SNAPSHOT = {"a/b": "1\n", "c": ""}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.of(INFO, "session", tmp_path)


@settings(max_examples=15, deadline=None)  # each one is an fsync
@given(snapshot=st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, snapshot: dict[str, str]) -> None:
    journal = Journal.of(INFO, "session", tmp_path_factory.mktemp("journal"))
    journal.write(INFO, snapshot)
    entry = journal.read()
    assert (entry.snapshot, entry.address, entry.process) == (snapshot, "jetson:/", os.getpid())
    journal.remove()
    assert not journal.exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format": 1, "sha256": "0", "body": {}}'])
def test_a_corrupt_journal_is_an_error_and_stays(journal: Journal, damage: str) -> None:
    journal.path.write_text(damage)
    with pytest.raises(JournalError, match="damaged"):
        journal.read()
    assert journal.path.read_text() == damage


def test_one_flipped_value_is_noticed(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    journal.path.write_text(journal.path.read_text().replace('"1\\n"', '"2\\n"'))
    with pytest.raises(JournalError, match="checksum"):
        journal.read()


def test_a_truncated_journal_is_noticed_at_every_length(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    whole = journal.path.read_text()
    for length in range(0, len(whole) - 1, 7):
        journal.path.write_text(whole[:length])
        with pytest.raises(JournalError):
            journal.read()


def test_a_newer_format_is_not_guessed_at(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    outer = json.loads(journal.path.read_text())
    journal.path.write_text(json.dumps({**outer, "format": 2}))
    with pytest.raises(JournalError, match="format 2"):
        journal.read()


def test_nothing_is_changed_when_the_journal_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(JournalError, match="nothing was changed"):
        Journal.of(INFO, "session", blocked).write(INFO, SNAPSHOT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_leaves_no_half_file(journal: Journal) -> None:
    journal.path.with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(JournalError, match="No space left"):
        journal.write(INFO, SNAPSHOT)
    assert not journal.exists()


def test_the_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    first, second = DeviceLock(INFO, tmp_path), DeviceLock(INFO, tmp_path)
    first.acquire()
    with pytest.raises(DeviceBusyError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = DeviceLock(INFO, tmp_path)
    lock.acquire()
    read, write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:  # a data loader's worker that outlives its parent
        os.close(write)
        os.write(ready_write, b"1")
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.read(ready_read, 1)
    lock.release()
    other = DeviceLock(INFO, tmp_path)
    other.acquire()
    assert other._file is not None, "the child, still alive, holds nothing"
    other.release()
    for end in (write, ready_read, ready_write):
        os.close(end)
    os.waitpid(child, 0)


def test_sessions_are_finished_before_what_was_set_under_them(tmp_path: Path) -> None:
    for purpose in ("set", "session"):
        Journal.of(INFO, purpose, tmp_path).write(INFO, SNAPSHOT)
    assert [journal.path.suffixes[-2] for journal in pending([tmp_path])] == [".session", ".set"]


def test_ids_that_differ_have_files_that_differ(tmp_path: Path) -> None:
    one, other = (DeviceInfo("jetson", "x", f"a{mark}b", "jetson:/") for mark in "/_")
    assert Journal.of(one, "set", tmp_path).path != Journal.of(other, "set", tmp_path).path


def test_a_users_lock_and_roots_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UNDERWATT_STATE")
    monkeypatch.setattr(journal_module, "_SHARED_LOCKS", tmp_path)
    monkeypatch.setattr(journal_module, "_ROOTS_STATE", tmp_path / "root")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    as_root = DeviceLock(INFO)
    as_root.acquire()
    [lock] = tmp_path.glob("*.lock")
    assert lock.stat().st_mode & 0o666 == 0o666
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DeviceBusyError):
        DeviceLock(INFO).acquire()
    as_root.release()
    assert journal_folders() == (tmp_path / "home" / "underwatt", tmp_path / "root")


def test_state_folder_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path))
    assert state_dir() == tmp_path
    monkeypatch.delenv("UNDERWATT_STATE")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir() == tmp_path / "underwatt"
